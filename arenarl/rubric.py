"""Typed checklists: named items, each of which says how far it is met, or that it cannot tell."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, get_args

from arenarl.errors import ConfigError, EnvError, boundary
from arenarl.expected_tools import DEFAULT_TOLERANCE, ExpectedTool, Tolerance, ToolMatch, match_tools, tools_from_data
from arenarl.state import EpisodeState
from arenarl.types import Task, Trajectory

Check = Callable[[Trajectory], bool | None]
RewardFunction = Callable[[Trajectory, EpisodeState], Awaitable[float | None]]
Scope = Literal["turn", "trajectory", "answer"]
MAX_WEIGHT = 1e6  # so that no sum of them overflows


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What supports an assertion: the number of a tool result in the episode that wrote it (1 is the first), and a quote from it."""

    observation: int
    quote: str = ""


@dataclass(frozen=True, kw_only=True)
class ChecklistItem:
    """One assertion that can be checked alone.

    Attributes:
        name: short and stable; the key in metrics and records.
        check: returns True (met), False (not met) or None (cannot tell: the item then carries no weight). None: the
            checklist's grader reads ``text``.
        text: the assertion in words; needed if there is no ``check``.
        scope: what it is about: each assistant turn, the whole path (tool use, grounding), or the final answer.
        weight: relative weight, not 0 and at most a million in size; negative for a fault whose presence costs (ResearchRubrics).
        gate: if it is not met, the score of the whole is 0. Its weight is positive.
        evidence: the observation that supports it, if it was written from one.
    """

    name: str
    check: Check | None = None
    text: str = ""
    scope: Scope = "trajectory"
    weight: float = 1.0
    gate: bool = False
    evidence: Evidence | None = None

    def __post_init__(self) -> None:
        _check_weight(self.name, self.weight, above=0 if self.gate else -math.inf)
        if self.check is None and not self.text.strip():
            raise ValueError(f"checklist item {self.name!r} has neither a check nor a text that a grader could read")

    @property
    def judged(self) -> bool:
        """Whether a grader reads it."""
        return self.check is None

    async def evaluate(self, trajectory: Trajectory, state: EpisodeState) -> bool | None:
        assert self.check is not None
        return self.check(trajectory)


class Grader(Protocol):
    """Says which assertions a trajectory meets: a model, or code that reads a small language.

    It may also have ``begin_step(version)`` and ``async aclose()``, as a judge has.
    """

    async def grade(self, items: Sequence[ChecklistItem], trajectory: Trajectory, task: Task) -> Sequence[bool | None]:
        """One entry for each item; None where it cannot tell, or where an outage kept it from looking. Never raises for an outage."""
        ...


@dataclass(frozen=True, kw_only=True)
class Reward:
    """A named reward function that may also look at what the episode left behind.

    Attributes:
        name: short and stable; the key in metrics and records.
        function: asynchronous, returns a value in [0, 1], or None to abstain: it then carries no weight.
        weight: relative weight, positive.
    """

    name: str
    function: RewardFunction
    weight: float = 1.0

    def __post_init__(self) -> None:
        _check_weight(self.name, self.weight, above=0)

    async def evaluate(self, trajectory: Trajectory, state: EpisodeState) -> float | None:
        value = await self.function(trajectory, state)
        if value is not None and not 0 <= value <= 1:
            raise EnvError(f"reward {self.name!r} gave {value!r}; it must be in [0, 1], or None to abstain")
        return value


def _check_weight(name: str, weight: float, *, above: float) -> None:
    if not (weight > above and 0 < abs(weight) <= MAX_WEIGHT):
        wanted = "positive" if above == 0 else "a number other than 0"
        raise ValueError(
            f"weight of checklist item {name!r} must be {wanted}, got {weight}; at most {MAX_WEIGHT:g} in size"
        )


class Checklist:
    """A list of items with unique names.

    Args:
        grader: reads the items that have no code of their own.
        task: what was to be done; the grader is told.

    Raises:
        ValueError: two items share a name, or there is an item to be judged and nobody to do it.
    """

    def __init__(
        self, items: Sequence[ChecklistItem | Reward], *, grader: Grader | None = None, task: Task | None = None
    ) -> None:
        self.items = {item.name: item for item in items}
        if len(self.items) != len(items):
            raise ValueError(f"checklist items must have unique names, got {[i.name for i in items]}")
        self.grader, self.task = grader, task
        self._judged = [item for item in items if isinstance(item, ChecklistItem) and item.judged]
        if self._judged and (grader is None or task is None):
            missing = "grader" if grader is None else "task"
            raise ValueError(f"checklist item {self._judged[0].name!r} is judged by its text: give a {missing}")

    async def run(self, trajectory: Trajectory, state: EpisodeState | None = None) -> dict[str, float | None]:
        """How far each item is met: in [0, 1] (True and False for a `ChecklistItem`), None where it cannot tell.

        Code items first, one after the other; then the grader is called once, with all the others.

        Raises:
            EnvError: if an item or the grader raises; a broken checklist is an environment fault, not a score.
        """
        results: dict[str, float | None] = dict.fromkeys(self.items)
        for name, item in self.items.items():
            if isinstance(item, Reward) or not item.judged:
                with boundary(EnvError, f"checklist item {name!r}"):
                    results[name] = await item.evaluate(trajectory, state or EpisodeState())
        if self._judged:
            results |= await self._grade(trajectory)
        return results

    async def _grade(self, trajectory: Trajectory) -> dict[str, bool | None]:
        assert self.grader is not None and self.task is not None
        with boundary(EnvError, f"grader of task {self.task.task_id!r}"):
            met = await self.grader.grade(self._judged, trajectory, self.task)
        if len(met) != (count := len(self._judged)):
            raise EnvError(f"grader of task {self.task.task_id!r} gave {len(met)} results for {count} items")
        return {item.name: one for item, one in zip(self._judged, met, strict=True)}

    def score(self, results: Mapping[str, float | None]) -> float | None:
        """sum w z / sum of the positive w, over the items that were decided, clipped at [0, 1] (ResearchRubrics).

        A gate that is not met makes it 0. Undecided items, gates among them, carry no weight. None if no item that could
        earn something was decided, and if no judged one was where there are such: the calls alone do not speak for an
        answer that nobody could read.
        """
        decided = [(self.items[name], met) for name, met in results.items() if met is not None]
        if any(isinstance(item, ChecklistItem) and item.gate and not met for item, met in decided):
            return 0.0
        if self._judged and all(results.get(item.name) is None for item in self._judged):
            return None
        total = sum(item.weight for item, _ in decided if item.weight > 0)
        return min(1.0, max(0.0, sum(item.weight * met for item, met in decided) / total)) if total else None


# --- items as data -----------------------------------------------------------------------------------------------------


def items_from_data(
    data: Mapping[str, Any], *, task_id: str = "", tolerance: Tolerance = DEFAULT_TOLERANCE
) -> list[ChecklistItem]:
    """The items of ``Task.data``: its rubrics, to be judged, named r1, r2 ..., then those of `tool_items`.

    ``data["rubrics"]`` is a list of objects with "text" and, if they differ from these, "scope" ("answer"), "weight" (1), "gate"
    (false) and "evidence" ({"observation": 1, "quote": "..."}); ``data["expected_tools"]`` is what `tools_from_data` reads.

    Raises:
        ConfigError: naming the task, the rubric, the key and the remedy.
    """
    rubrics = data.get("rubrics", [])
    where = f"rubrics of task {task_id!r}" if task_id else "rubrics"
    if not isinstance(rubrics, list | tuple):
        raise ConfigError(f'{where} is a {type(rubrics).__name__}; give a list of {{"text": ...}}')
    items = [_item(f"r{number}", entry, f"{where}, r{number}") for number, entry in enumerate(rubrics, start=1)]
    return items + tool_items(tools_from_data(data, task_id=task_id), tolerance=tolerance)


def item_to_data(item: ChecklistItem) -> dict[str, Any]:
    """The object of ``data["rubrics"]`` that `items_from_data` reads, without what is as it would be anyway.

    Raises:
        ValueError: if the item is checked by code, which no data can hold.
    """
    if not item.judged:
        raise ValueError(f"checklist item {item.name!r} is checked by code; only judged items can be written as data")
    data: dict[str, Any] = {"text": item.text, "scope": item.scope, "weight": item.weight, "gate": item.gate}
    data = {key: value for key, value in data.items() if key == "text" or value != _DEFAULTS[key]}
    if item.evidence is not None:
        data["evidence"] = {"observation": item.evidence.observation, "quote": item.evidence.quote}
    return data


def tool_items(expected: Sequence[ExpectedTool], *, tolerance: Tolerance = DEFAULT_TOLERANCE) -> list[ChecklistItem]:
    """An item for each expected call, named "tool1:poi_search" ...: whether the attempt has a call of its own for it."""
    matching = _Matching(tuple(expected), tolerance)
    return [
        ChecklistItem(
            name=f"tool{number}:{tool.name}", text=f"{tool.name} was called with {_shown(tool)}.",
            check=partial(matching.has, number - 1),
        )
        for number, tool in enumerate(expected, start=1)
    ]  # fmt: skip


_DEFAULTS: dict[str, Any] = {"scope": "answer", "weight": 1.0, "gate": False}


def _item(name: str, entry: object, where: str) -> ChecklistItem:
    keys = ("text", *_DEFAULTS, "evidence")
    if not isinstance(entry, Mapping):
        raise ConfigError(f'{where}, is {str(entry)[:80]!r}; give an object with "text"')
    if unknown := [key for key in entry if key not in keys]:
        raise ConfigError(f"{where}, has the key {unknown[0]!r}, which no rubric has; its keys are {', '.join(keys)}")
    value = _DEFAULTS | dict(entry)
    text, scope, weight, gate = value.get("text"), value["scope"], value["weight"], value["gate"]
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"{where}, has text={text!r}; give an assertion in words")
    if scope not in get_args(Scope):
        raise ConfigError(f"{where}, has scope={scope!r}; give one of {', '.join(get_args(Scope))}")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < abs(weight) <= MAX_WEIGHT:
        raise ConfigError(
            f"{where}, has weight={repr(weight)[:80]}; give a number other than 0, at most {MAX_WEIGHT:g} in size"
        )
    if not isinstance(gate, bool) or (gate and weight < 0):
        raise ConfigError(f"{where}, has gate={gate!r}; give true or false, and true only with a positive weight")
    evidence = _evidence(value.get("evidence"), where)
    return ChecklistItem(name=name, text=text, scope=scope, weight=weight, gate=gate, evidence=evidence)


def _evidence(value: object, where: str) -> Evidence | None:
    if value is None:
        return None
    if isinstance(value, Mapping) and set(value) <= {"observation", "quote"}:
        observation, quote = value.get("observation"), value.get("quote", "")
        if type(observation) is int and observation >= 1 and isinstance(quote, str):
            return Evidence(observation=observation, quote=quote)
    raise ConfigError(
        f'{where}, has evidence={str(value)[:80]!r}; give {{"observation": number from 1, "quote": text}}, or leave it out'
    )


class _Matching:
    """The calls of an attempt matched to the expected ones: once for all the items that ask, not once for each."""

    def __init__(self, tools: tuple[ExpectedTool, ...], tolerance: Tolerance) -> None:
        self._tools, self._tolerance = tools, tolerance
        self._latest: tuple[Trajectory, ToolMatch] | None = None

    def has(self, index: int, trajectory: Trajectory) -> bool:
        latest = self._latest
        if latest is None or latest[0] is not trajectory:
            self._latest = latest = trajectory, match_tools(self._tools, trajectory.events, self._tolerance)
        return latest[1].matched[index] is not None


def _shown(tool: ExpectedTool) -> str:
    return ", ".join(f"{key} {value}" for key, value in tool.arguments.items()) or "any arguments"
