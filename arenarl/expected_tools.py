"""Tool calls that a task expects, and which calls of an attempt fulfil them, one to one.

One call fulfils one expectation at most (in ARISE's released code one call can fulfil several), a call that failed fulfils
none, and what is left over is counted.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from arenarl.errors import ConfigError
from arenarl.types import ToolCall, ToolEvent

_DEPTH = 20  # levels of arguments within arguments that are compared
_COORDINATE = frozenset({"lat", "latitude", "lon", "lng", "longitude"})
_PAIR = frozenset({"location", "coordinates", "coordinate", "center", "point", "origin", "destination"})
_CITIES = frozenset({"origin", "destination", "from", "to", "from_city", "to_city"})
_NUMBER = re.compile(r"\s*([+-]?\d{1,15}(?:\.\d{0,20})?)\s*", re.ASCII)
_PAIR_CHARS = 120  # bounded: what a policy writes must not be able to make reading it slow
_TWO = re.compile(rf"\s*[(\[]?{_NUMBER.pattern}[,，]{_NUMBER.pattern}[)\]]?\s*", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class ExpectedTool:
    """A call that an attempt should make: ``name`` of the tool, and the ``arguments`` that matter. Plain JSON."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How far a call may be from what was expected (ARISE-RL, arXiv 2609.01058, released code).

    Attributes:
        degrees: largest difference of two coordinates; 0.1 is about 11 km.
        tickets: tools of which only the two cities count: their names among the arguments are origin and destination, from
            and to, from_city and to_city.
    """

    degrees: float = 0.1
    tickets: tuple[str, ...] = ("search_flights", "search_train_tickets")

    def __post_init__(self) -> None:
        if not 0 <= self.degrees <= 180:
            raise ConfigError(f"degrees={self.degrees} is no distance of coordinates; give one from 0 to 180")


DEFAULT_TOLERANCE = Tolerance()


@dataclass(frozen=True, kw_only=True)
class ToolMatch:
    """Which calls fulfil which expectations.

    Attributes:
        matched: for each expected tool the index of the event that fulfils it, no index twice; None if there is none.
        superfluous: successful calls that fulfil nothing.
    """

    matched: tuple[int | None, ...]
    superfluous: int


def matches(expected: ExpectedTool, call: ToolCall, tolerance: Tolerance = DEFAULT_TOLERANCE) -> bool:
    """Whether a call is the expected one.

    Each expected argument must be given: equal as text without regard to letter case and white space, as a number however it is
    written, or as coordinates within the tolerance. Further arguments of the call narrow it, and do not matter.
    """
    return _text(expected.name) == _text(call.name) and _asks(expected, call.arguments, tolerance)


def match_tools(
    expected: Sequence[ExpectedTool], events: Sequence[ToolEvent], tolerance: Tolerance = DEFAULT_TOLERANCE
) -> ToolMatch:
    """As many expectations as possible, each with a successful call of its own: a maximum bipartite matching.

    Among the largest it is one whose calls are the earliest. A tool goes by the name that the model used, and by its own.
    """
    from scipy.optimize import linear_sum_assignment

    done = [index for index, event in enumerate(events) if event.result.ok]
    matched: list[int | None] = [None] * len(expected)
    # A match is worth 1, less its place in the row: all the losses together stay below 1, so no match is given up for them.
    loss = 1 / (len(done) * (len(done) + 1)) if done else 0.0
    worth = [
        [(1 - place * loss) * _fulfils(tool, events[index], tolerance) for place, index in enumerate(done)]
        for tool in expected
    ]
    if done and expected:
        for row, place in zip(*linear_sum_assignment(worth, maximize=True), strict=True):
            if worth[row][place]:
                matched[row] = done[place]
    return ToolMatch(matched=tuple(matched), superfluous=len(done) - sum(index is not None for index in matched))


def tools_from_data(data: Mapping[str, Any], *, task_id: str = "") -> list[ExpectedTool]:
    """The expected tools of ``Task.data``, where they are ``[{"name": "poi_search", "arguments": {"city": "Hanoi"}}]``.

    Raises:
        ConfigError: naming the task, the entry and the remedy.
    """
    entries = data.get("expected_tools", [])
    where = f"expected_tools of task {task_id!r}" if task_id else "expected_tools"
    if not isinstance(entries, list | tuple):
        raise ConfigError(
            f'{where} is a {type(entries).__name__}; give a list of {{"name": ..., "arguments": {{...}}}}'
        )
    return [_tool(entry, f"{where}, entry {number}") for number, entry in enumerate(entries, start=1)]


def tool_to_data(tool: ExpectedTool) -> dict[str, Any]:
    """The entry of ``Task.data`` that `tools_from_data` reads."""
    return {"name": tool.name, "arguments": dict(tool.arguments)}


def _fulfils(expected: ExpectedTool, event: ToolEvent, tolerance: Tolerance) -> bool:
    names = {_text(event.call.name), _text(event.result.tool or event.call.name)}
    return _text(expected.name) in names and _asks(expected, event.call.arguments, tolerance)


def _asks(expected: ExpectedTool, given: Mapping[str, Any], tolerance: Tolerance) -> bool:
    """Whether the arguments are those that matter; of a ticket only the cities do."""
    wanted = expected.arguments
    if expected.name in tolerance.tickets:
        wanted = {key: value for key, value in wanted.items() if key in _CITIES} or wanted
    return _covers(wanted, given, tolerance, _DEPTH)


def _tool(entry: object, where: str) -> ExpectedTool:
    if not isinstance(entry, Mapping) or not set(entry) <= {"name", "arguments"}:
        raise ConfigError(f'{where}, is {str(entry)[:80]!r}; give an object with "name" and "arguments"')
    name, arguments = entry.get("name"), entry.get("arguments", {})
    if not isinstance(name, str) or not name.strip():
        raise ConfigError(f"{where}, has name={name!r}; give the name of a tool")
    if not isinstance(arguments, Mapping):
        raise ConfigError(f"{where}, has arguments={str(arguments)[:80]!r}; give an object")
    return ExpectedTool(name=name.strip(), arguments=dict(arguments))


# --- values ----------------------------------------------------------------------------------------------------------


def _covers(wanted: Mapping[str, Any], given: Mapping[str, Any], tolerance: Tolerance, depth: int) -> bool:
    return all(_same(str(key).lower(), value, given.get(key), tolerance, depth - 1) for key, value in wanted.items())


def _same(key: str, wanted: object, given: object, tolerance: Tolerance, depth: int) -> bool:
    """Whether two values of an argument say the same. None is the same as no value."""
    if depth < 0:
        return False
    places = _places(key, wanted), _places(key, given)
    if places[0] and places[1]:
        return all(_near(a, b, tolerance.degrees) for a, b in zip(*places, strict=True))
    if isinstance(wanted, Mapping) and isinstance(given, Mapping):
        return _covers(wanted, given, tolerance, depth)
    if isinstance(wanted, list | tuple) and isinstance(given, list | tuple):
        pairs = zip(wanted, given, strict=False)
        return len(wanted) == len(given) and all(_same("", a, b, tolerance, depth - 1) for a, b in pairs)
    if isinstance(wanted, str) and isinstance(given, str):
        return _text(wanted) == _text(given)
    if isinstance(wanted, bool | None) or isinstance(given, bool | None):
        return wanted is given
    a, b = _number(wanted), _number(given)
    return a is not None and a == b


def _places(key: str, value: object) -> tuple[float, ...]:
    """Coordinates in degrees: one for a key such as "lat", two for one such as "location"; empty if the value is none."""
    found: list[float | None] = []
    key = key.rpartition("_")[2]  # "from_lat" is a latitude
    if key in _COORDINATE:
        found = [_number(value)]
    elif key in _PAIR and isinstance(value, str) and len(value) <= _PAIR_CHARS:
        found = [_number(part) for two in [_TWO.fullmatch(value)] if two for part in two.groups()]
    elif key in _PAIR and isinstance(value, list | tuple) and len(value) == 2:
        found = [_number(part) for part in value]
    numbers = tuple(number for number in found if number is not None and abs(number) <= 180)
    return numbers if len(numbers) == len(found) else ()


def _near(a: float, b: float, degrees: float) -> bool:
    """Whether two coordinates differ by no more than this, also across the date line."""
    apart = abs(a - b)
    apart = min(apart, 360 - apart)
    return apart <= degrees or math.isclose(apart, degrees, abs_tol=1e-9)


def _number(value: object) -> float | None:
    if isinstance(value, str):
        written = _NUMBER.fullmatch(value)
        return float(written[1]) if written else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if -math.inf < value < math.inf else None  # an integer may be larger than any float


def _text(value: str) -> str:
    return "".join(unicodedata.normalize("NFKC", value).casefold().split())
