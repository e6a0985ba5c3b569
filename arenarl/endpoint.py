"""Chat endpoints for judges: messages in; a reply out, or the reason why there is none. Nothing that a server does raises.

An endpoint may be built in one thread, or pickled, and used from an event loop elsewhere: it opens nothing before its first
call. One loop at a time uses it, and another may follow when that one has ended.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import ipaddress
import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args
from urllib.parse import urlsplit

from arenarl.endpoint_budget import Budget, Usage, check_positive
from arenarl.endpoint_calls import Calls, Outage, Reply
from arenarl.endpoint_wire import (
    Failure,
    backoff,
    failed,
    guess_tokens,
    is_about_format,
    read_completion,
    response_format,
)
from arenarl.errors import ConfigError, near_name
from arenarl.jsonl import clean_json
from arenarl.reply_cache import request_key

if TYPE_CHECKING:
    from openai import AsyncOpenAI

Structured = Literal["auto", "json_schema", "json_object", "none"]
FALLBACK = ("json_schema", "json_object", "none")  # what "auto" tries, in this order
DEFAULT_KEY = "OPENAI_API_KEY"


class Endpoint(Protocol):
    """A chat model that judges ask. `name` is what their verdicts are signed with."""

    name: str

    async def complete(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        schema: Mapping[str, Any] | None = None,
        max_tokens: int,
        temperature: float = 0.0,
        seed: int | None = None,
    ) -> Reply | Outage:
        """One reply to a conversation. With a cache the same arguments get the same reply: vary the seed for another one.

        Args:
            messages: with "role" and "content".
            schema: JSON schema that the text should satisfy. Not every server can promise it: check the text.
            max_tokens: longest reply.
        """
        ...

    def begin_step(self, version: int) -> None:
        """The budget is full again, if the version is a new one."""
        ...

    async def aclose(self) -> None: ...


class OpenAIEndpoint:
    """A model behind an OpenAI-compatible chat API.

    429, 408, 5xx, broken connections and requests that take too long are repeated, with waits that double and with the
    server's Retry-After. A wait that would end behind the deadline is not begun. Other errors are not repeated.

    Args:
        base_url: up to the version, e.g. "http://localhost:8000/v1".
        model: name that the server knows.
        api_key_env: environment variable with the key, read where the endpoint is used. Servers of one's own need none.
        max_concurrency: requests in flight at most.
        request_timeout_s: for one request.
        deadline_s: for one call of `complete`: its wait for a slot, all requests and the waits between them.
        max_attempts: requests that one call sends at most, not counting those that only find out what a server supports.
        structured: how a schema is asked for. "auto" begins with "json_schema" and remembers what the server refuses.
        tokens_per_step, cost_per_step, price_in, price_out: see `arenarl.endpoint_budget.Budget`; they hold for this one
            object, so in training for one environment runner.
        cache: file of replies, kept over runs; ":memory:" for this process alone; None for no cache.
        extra_body: further members of the request. They win over ours, and None takes a member out: for models that want
            it so, ``{"max_tokens": None, "max_completion_tokens": 2000, "temperature": None}``. A server that takes no
            ``seed`` wants ``{"seed": None}``.

    Raises:
        ConfigError: the URL is none, the key is missing, or a value is out of range.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key_env: str = DEFAULT_KEY,
        max_concurrency: int = 16,
        request_timeout_s: float = 60.0,
        deadline_s: float = 180.0,
        max_attempts: int = 6,
        structured: Structured = "auto",
        tokens_per_step: int | None = None,
        cost_per_step: float | None = None,
        price_in: float = 0.0,
        price_out: float = 0.0,
        cache: str | None = None,
        extra_body: Mapping[str, Any] | None = None,
    ) -> None:
        check_key(api_key_env, check_url(base_url))
        check_positive(request_timeout_s=request_timeout_s)
        check_positive(int, max_attempts=max_attempts)
        check_extra(extra_body)
        if not isinstance(model, str) or not model:
            raise ConfigError(f"model={model!r} must be the name of a model that {base_url} serves")
        if structured not in get_args(Structured):
            raise ConfigError(f"structured={structured!r} must be one of {', '.join(get_args(Structured))}")
        self.name = model
        self._base_url, self._key_env = base_url, api_key_env
        self._timeout_s, self._max_attempts = request_timeout_s, max_attempts
        self._extra = dict(extra_body or {})
        self._structured = structured
        self._format = FALLBACK.index("json_schema" if structured == "auto" else structured)
        budget = Budget(tokens_per_step, cost_per_step, price_in, price_out)
        self._calls = Calls(max_concurrency=max_concurrency, deadline_s=deadline_s, budget=budget, cache=cache)
        self._client: tuple[asyncio.AbstractEventLoop, AsyncOpenAI] | None = None

    async def complete(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        schema: Mapping[str, Any] | None = None,
        max_tokens: int,
        temperature: float = 0.0,
        seed: int | None = None,
    ) -> Reply | Outage:
        sent = clean_json(messages)
        body = {
            "model": self.name,
            "messages": sent,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
        }
        body |= self._extra
        # with the seed that was asked for, also where the server does not see it: replies must stay independent
        key = request_key(url=self._base_url, structured=self._structured, schema=schema, body=body, seed=seed)
        limits = [body.get(name) for name in ("max_tokens", "max_completion_tokens")]
        longest = max((limit for limit in limits if type(limit) is int), default=max_tokens)
        most = Usage(prompt_tokens=guess_tokens(sent), completion_tokens=longest)
        return await self._calls.run(key, most, lambda used, deadline: self._send(body, schema, used, deadline))

    def begin_step(self, version: int) -> None:
        self._calls.budget.begin_step(version)

    async def aclose(self) -> None:
        client, self._client = self._client, None
        self._calls.close()
        if client is not None and client[0] is asyncio.get_running_loop():
            await client[1].close()

    async def _send(
        self, body: dict[str, Any], schema: Mapping[str, Any] | None, used: Usage, deadline: float
    ) -> Reply | Outage:
        loop, failures = asyncio.get_running_loop(), 0
        client = await self._connect(loop)
        while True:
            answer = await self._ask(client, body, schema, used)
            if isinstance(answer, Reply):
                return answer
            if isinstance(answer, Outage):
                return Outage(kind=answer.kind, detail=self._without_key(answer.detail))
            failures += 1
            wait = max(answer.wait_s, backoff(failures))
            if failures == self._max_attempts or loop.time() + wait >= deadline:
                detail = self._without_key(answer.detail)
                return Outage(kind=answer.kind, detail=f"{detail} (request {used.calls}, the last)")
            await asyncio.sleep(wait)

    async def _ask(
        self, client: AsyncOpenAI, body: dict[str, Any], schema: Mapping[str, Any] | None, used: Usage
    ) -> Reply | Outage | Failure:
        """One request; up to three while it is not known how the server takes a schema."""
        for asked in range(self._format, len(FALLBACK)):
            answer, about_format = await self._request(client, body | response_format(FALLBACK[asked], schema), used)
            if not (about_format and schema is not None and self._structured == "auto"):
                break
        if isinstance(answer, Reply):  # the first that was taken: an error may speak of formats for another reason
            self._format = max(self._format, asked)  # others may have found out at the same time
        return answer

    async def _request(
        self, client: AsyncOpenAI, fields: dict[str, Any], used: Usage
    ) -> tuple[Reply | Outage | Failure, bool]:
        """What one request came to, and whether the server refused the form in which the schema was asked for."""
        from openai import APIConnectionError, APIStatusError, APITimeoutError

        messages = fields["messages"]
        sent = {k: v for k, v in fields.items() if v is not None and k not in ("model", "messages")}
        used.calls += 1
        try:
            async with asyncio.timeout(self._timeout_s):  # the client's own is for each read
                response = await client.chat.completions.with_raw_response.create(
                    model=self.name, messages=messages, extra_body=sent
                )
        except asyncio.CancelledError:
            used.lost += 1
            raise
        except (TimeoutError, APITimeoutError):
            used.lost += 1
            return Failure("timeout", f"no answer within request_timeout_s={self._timeout_s}"), False
        except APIStatusError as error:
            status, said = error.response.status_code, error.response.text
            wait = error.response.headers.get("retry-after")
            return failed(status, wait, self._without_key(said)), is_about_format(status, said)
        except APIConnectionError as error:
            return Failure("unavailable", f"{self._base_url}: {error.__cause__!r}"), False
        except Exception as error:  # an answer that the client cannot take
            return Outage(kind="protocol", detail=f"{self._base_url}: {error!r}"), False
        return read_completion(response.http_response.content, messages, used), False

    async def _connect(self, loop: asyncio.AbstractEventLoop) -> AsyncOpenAI:
        if self._client is None or self._client[0] is not loop:
            await asyncio.to_thread(importlib.import_module, "openai")  # takes a second when it is the first
        from openai import AsyncOpenAI

        if self._client is None or self._client[0] is not loop:  # another call may have been quicker
            key = read_key(self._key_env) or "EMPTY"
            client = AsyncOpenAI(base_url=self._base_url, api_key=key, max_retries=0, timeout=self._timeout_s)
            self._client = (loop, client)
        return self._client[1]

    def _without_key(self, text: str) -> str:
        key = read_key(self._key_env)
        return text.replace(key, "***") if key else text


def open_endpoint(settings: Mapping[str, Any], whose: str) -> OpenAIEndpoint:
    """An endpoint from the settings of a judge, grader, coach or executor.

    Raises:
        ConfigError: naming the setting that is missing, or that neither ``whose`` nor an endpoint has.
    """
    for name, example in (("base_url", "'http://localhost:8000/v1'"), ("model", "a name that the server knows")):
        if name not in settings:
            raise ConfigError(f"{name} is missing: give {name}, such as {example}, to {whose}")
    known = list(inspect.signature(OpenAIEndpoint).parameters)
    for name in settings:
        if name not in known:
            raise ConfigError(f"{name!r} is no setting of {whose} or its endpoint; {near_name(name, known)}")
    return OpenAIEndpoint(**settings)


def check_url(base_url: str) -> bool:
    """Whether a server at the URL asks for a key as a rule: it does unless it is one's own.

    Raises:
        ConfigError: it is no URL of a server, or it has a place for secrets, which are not shown then.
    """
    if isinstance(base_url, str) and set("@?#") & set(base_url):
        raise ConfigError(
            "base_url must not hold a user, a query or a fragment; put the key into the variable that api_key_env names"
        )
    try:
        parts = urlsplit(base_url)
        host, port = parts.hostname, parts.port
    except (ValueError, AttributeError, TypeError):
        host = port = None
    if not host or parts.scheme not in ("http", "https") or port == 0:
        raise ConfigError(
            f"base_url={base_url!r} is no address of a server; give one such as 'http://localhost:8000/v1'"
        )
    try:
        own = not ipaddress.ip_address(host).is_global
    except ValueError:
        own = "." not in host or host.endswith((".local", ".internal"))
    return parts.scheme == "https" and not own


def read_key(variable: str) -> str:
    """The key, without the line end that a file or a shell may have left behind it; empty if there is none."""
    return os.environ.get(variable, "").strip()


def check_key(variable: str, needed: bool) -> None:
    """Refuse an endpoint without its key. Naming a variable says that there is one.

    Raises:
        ConfigError: naming the variable, never the key.
    """
    key = read_key(variable)
    if not key and (needed or variable != DEFAULT_KEY):
        raise ConfigError(f"the environment variable {variable} is not set; put the key of the endpoint there")
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f"the environment variable {variable} holds characters that no key has; copy the key again")


def check_extra(extra_body: Mapping[str, Any] | None) -> None:
    """Refuse members of a request that are no JSON, and those that are not for the user to change.

    Raises:
        ConfigError: with what is wrong.
    """
    try:
        json.dumps(dict(extra_body or {}), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"extra_body={extra_body!r} is no JSON object: {error}") from error
    if taken := {"model", "messages", "stream"} & set(extra_body or ()):
        raise ConfigError(f"extra_body must not hold {min(taken)!r}; that is the endpoint's to set")
