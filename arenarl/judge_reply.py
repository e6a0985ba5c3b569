"""What a model judge wrote, as marks, or the reason why it is none. A reply that has to be guessed at is no reply.

    truncated       the server stopped it at its length      too_long        longer than any verdict
    no_json         it does not begin with a JSON object     bad_json        the object is broken
    two_objects     more than one object                     extra_text      text after the object
    nan             NaN or Infinity                          duplicate_key   a key that is given twice
    missing         a mark is not there                      not_a_number    "8", true, null, a list
    out_of_range    a mark below 0 or above 10

A thought before the object and one code fence round it are allowed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from arenarl.judge_prompt import SIDES
from arenarl.judge_rubrics import SCALE, Rubric
from arenarl.types import Abstention, Mark, Verdict

MAX_CHARS = 200_000
_THINK_END, _FENCE = "</think>", "```"


class _Refused(Exception):
    """The reply is no verdict. Its text is the reason of the abstention."""


def read_verdict(text: str, finish_reason: str, rubric: Rubric) -> Verdict | Abstention:
    """The verdict that a reply for a pair holds, scores being the rubric's weighted sums. Never raises."""
    try:
        a, b = _read(text, finish_reason, rubric, SIDES)
    except _Refused as reason:
        return Abstention(reason=str(reason), raw=text[:MAX_CHARS])
    dimensions = {name: (a[name], b[name]) for name in rubric.dimensions}
    return Verdict(score_a=rubric.score(a), score_b=rubric.score(b), dimensions=dimensions, raw=text)


def read_mark(text: str, finish_reason: str, rubric: Rubric) -> Mark | Abstention:
    """The mark that a reply for one attempt holds. Never raises."""
    try:
        (marks,) = _read(text, finish_reason, rubric, SIDES[:1])
    except _Refused as reason:
        return Abstention(reason=str(reason), raw=text[:MAX_CHARS])
    return Mark(score=rubric.score(marks))


def _read(text: str, finish_reason: str, rubric: Rubric, sides: Sequence[str]) -> list[dict[str, float]]:
    """Marks of each side by "part/dimension"."""
    if finish_reason == "length":
        raise _Refused(f"truncated: the reply was cut after {len(text)} characters")
    if len(text) > MAX_CHARS:
        raise _Refused(f"too_long: {len(text)} characters")
    reply, keys = _the_object(text), [name.split("/") for name in rubric.dimensions]
    return [{f"{part}/{name}": _mark(reply, part, "marks", side, name) for part, name in keys} for side in sides]


def _the_object(text: str) -> object:
    """The one JSON object of a reply, strictly."""
    text = _said(text)
    if not text.startswith("{"):
        raise _Refused(f"no_json: the reply begins with {text[:40]!r}")
    decoder = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)
    try:
        value, end = decoder.raw_decode(text)
    except RecursionError:
        raise _Refused("bad_json: it is nested too deeply") from None
    except ValueError as error:
        raise _Refused(f"bad_json: {str(error)[:200]}") from None
    if rest := text[end:].strip():
        raise _Refused(f"two_objects: {rest[:40]!r}" if "{" in rest else f"extra_text: {rest[:40]!r}")
    return value


def _said(text: str) -> str:
    """The reply without a thought before it and a fence round it. The chat template may have opened the thought."""
    text = text.strip()
    if not text.startswith(("{", _FENCE)):
        end = text.find(_THINK_END)
        text = text[end + len(_THINK_END) :].strip() if end >= 0 else text
    if text.startswith(_FENCE) and text.endswith(_FENCE) and len(text) > 2 * len(_FENCE):
        text = text[len(_FENCE) : -len(_FENCE)].lstrip()
        text = text[4:] if text[:4].lower() == "json" else text
    return text.strip()


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise _Refused(f"duplicate_key: {key[:40]!r}")
        found[key] = value
    return found


def _no_constant(name: str) -> float:
    raise _Refused(f"nan: {name} is no mark")


def _mark(reply: object, *path: str) -> float:
    value, where = reply, "/".join(path)
    for key in path:
        if not isinstance(value, dict) or key not in value:
            raise _Refused(f"missing: {where}")
        value = value[key]
    if isinstance(value, bool) or not isinstance(value, int | float):
        shown = repr(value[:40]) if isinstance(value, str) else f"a {type(value).__name__}"
        raise _Refused(f"not_a_number: {where} is {shown}")
    if not 0 <= value <= SCALE:
        raise _Refused(f"out_of_range: {where} is {str(value)[:40]}")
    return float(value)
