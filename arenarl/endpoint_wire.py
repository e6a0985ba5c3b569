"""The OpenAI chat protocol, as far as a judge needs it: bytes and status codes to values, without any input or output."""

from __future__ import annotations

import email.utils
import json
import math
import random
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from arenarl.endpoint_budget import Usage
from arenarl.endpoint_calls import Outage, OutageKind, Reply
from arenarl.jsonl import clean_json

FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 30.0
CHARACTERS_PER_TOKEN = 4  # a guess for ASCII text that has no count; of other scripts a character may be a token
MOST_TOKENS = 2**40  # a count above is none
SHOWN_CHARACTERS = 500  # of what a server says in an error
_ABOUT_FORMAT = re.compile("response_format|json.?schema|json.?object|structured|guided|grammar", re.IGNORECASE)


@dataclass(frozen=True)
class Failure:
    """A request that may be sent again, after `wait_s` at the earliest."""

    kind: OutageKind
    detail: str
    wait_s: float = 0.0


def response_format(kind: str, schema: Mapping[str, Any] | None) -> dict[str, Any]:
    """The member of the request that asks for text of a schema, as the server takes it."""
    if schema is None or kind == "none":
        return {}
    if kind == "json_object":
        return {"response_format": {"type": "json_object"}}
    asked = {"name": "reply", "strict": True, "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": asked}}


def is_about_format(status: int, said: str) -> bool:
    """Whether an error says that the server does not take the schema as it was asked for."""
    return status in (400, 422) and _ABOUT_FORMAT.search(said) is not None


def failed(status: int, retry_after: str | None, said: str) -> Outage | Failure:
    """What an error status means: whether to ask again, and when."""
    detail = f"HTTP {status}: {said[:SHOWN_CHARACTERS]}"
    if status == 429 and "insufficient_quota" not in said:  # which no wait brings back
        return Failure("rate_limited", detail, seconds_until(retry_after))
    if status == 408 or status >= 500:
        return Failure("unavailable", detail, seconds_until(retry_after))
    return Outage(kind="refused", detail=detail)


def seconds_until(retry_after: str | None) -> float:
    """Seconds from now that a Retry-After header asks for, given as a number or as a date; 0 if it says neither."""
    try:
        seconds = float(retry_after or 0)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(retry_after or "").timestamp() - time.time()
        except (ValueError, OverflowError):
            return 0.0
    return 0.0 if math.isnan(seconds) else max(seconds, 0.0)


def backoff(failures: int) -> float:
    """Seconds to wait after so many failures: doubled each time, up to a half less by chance, so that many do not return at once."""
    return min(FIRST_WAIT_S * 2.0 ** min(failures - 1, 30), LONGEST_WAIT_S) * random.uniform(0.5, 1.0)


def guess_tokens(messages: Sequence[Mapping[str, str]]) -> int:
    return 1 + sum(guess_text(m["content"]) for m in messages)


def guess_text(text: str) -> int:
    plain = len(text.encode("ascii", "ignore"))
    return plain // CHARACTERS_PER_TOKEN + len(text) - plain


def read_completion(body: bytes, messages: Sequence[Mapping[str, str]], used: Usage) -> Reply | Outage | Failure:
    """The reply in the body of a chat completion. What it took is booked into ``used``, guessed where the server does not say."""
    seen = body[:SHOWN_CHARACTERS].decode(errors="replace")
    try:
        data = json.loads(body)
        choice, usage = data["choices"][0], data.get("usage") or {}
        message, finish = choice["message"], choice.get("finish_reason")
        text, refusal = message.get("content"), message.get("refusal")
        prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        return Outage(kind="protocol", detail=f"no chat completion ({type(error).__name__}: {error}): {seen}")
    text = "" if text is None and finish == "length" else text  # all was spent on thinking
    written = guess_text(text) if isinstance(text, str) else 0
    used.prompt_tokens += counted(prompt, guess_tokens(messages))
    used.completion_tokens += counted(completion, written)
    if refusal or finish == "content_filter":
        why = refusal[:SHOWN_CHARACTERS] if isinstance(refusal, str) else seen
        return Outage(kind="refused", detail=f"the model refused: {why}")
    if finish in ("abort", "error"):  # vLLM when it goes down; routers, when what is behind them does
        return Failure("unavailable", f"the server ended the request with {finish!r}")
    if not isinstance(text, str):
        return Outage(kind="protocol", detail=f"the content is no text: {seen}")
    return Reply(text=clean_json(text), finish_reason="length" if finish == "length" else "stop")


def counted(value: object, guess: int) -> int:
    return value if type(value) is int and 0 <= value <= MOST_TOKENS else guess
