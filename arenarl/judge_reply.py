"""What a model judge wrote, as marks, or the reason why it is none. A reply that has to be guessed at is no reply.

truncated       the server stopped it at its length      too_long        longer than any verdict
missing         a mark is not there                      not_a_number    "8", true, null, a list
out_of_range    a mark below 0 or above 10               and the kinds of `arenarl.strict_json`
"""

from __future__ import annotations

from collections.abc import Sequence

from arenarl.judge_prompt import SIDES
from arenarl.judge_rubrics import SCALE, Rubric
from arenarl.strict_json import Unreadable, read_object
from arenarl.types import Abstention, Mark, Verdict

MAX_CHARS = 200_000


def read_verdict(text: str, finish_reason: str, rubric: Rubric) -> Verdict | Abstention:
    """The verdict that a reply for a pair holds, scores being the rubric's weighted sums. Never raises."""
    try:
        a, b = _read(text, finish_reason, rubric, SIDES)
    except Unreadable as reason:
        return Abstention(reason=str(reason), raw=text[:MAX_CHARS])
    dimensions = {name: (a[name], b[name]) for name in rubric.dimensions}
    return Verdict(score_a=rubric.score(a), score_b=rubric.score(b), dimensions=dimensions, raw=text)


def read_mark(text: str, finish_reason: str, rubric: Rubric) -> Mark | Abstention:
    """The mark that a reply for one attempt holds. Never raises."""
    try:
        (marks,) = _read(text, finish_reason, rubric, SIDES[:1])
    except Unreadable as reason:
        return Abstention(reason=str(reason), raw=text[:MAX_CHARS])
    return Mark(score=rubric.score(marks))


def _read(text: str, finish_reason: str, rubric: Rubric, sides: Sequence[str]) -> list[dict[str, float]]:
    """Marks of each side by "part/dimension"."""
    if finish_reason == "length":
        raise Unreadable("truncated", f"the reply was cut after {len(text)} characters")
    if len(text) > MAX_CHARS:
        raise Unreadable("too_long", f"{len(text)} characters")
    reply, keys = read_object(text), [name.split("/") for name in rubric.dimensions]
    return [{f"{part}/{name}": _mark(reply, part, "marks", side, name) for part, name in keys} for side in sides]


def _mark(reply: object, *path: str) -> float:
    value, where = reply, "/".join(path)
    for key in path:
        if not isinstance(value, dict) or key not in value:
            raise Unreadable("missing", f"{where}")
        value = value[key]
    if isinstance(value, bool) or not isinstance(value, int | float):
        shown = repr(value[:40]) if isinstance(value, str) else f"a {type(value).__name__}"
        raise Unreadable("not_a_number", f"{where} is {shown}")
    if not 0 <= value <= SCALE:
        raise Unreadable("out_of_range", f"{where} is {str(value)[:40]}")
    return float(value)
