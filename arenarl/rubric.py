"""Typed checklists: named items, each of which says how far it is met, or that it cannot tell."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from arenarl.errors import EnvError, boundary
from arenarl.state import EpisodeState
from arenarl.types import Task, Trajectory

Check = Callable[[Trajectory], bool | None]
RewardFunction = Callable[[Trajectory, EpisodeState], Awaitable[float | None]]
Scope = Literal["turn", "trajectory", "answer"]


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
        weight: relative weight; negative for a fault whose presence costs.
        gate: if it is not met, the score of the whole is 0.
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
        _check_weight(self.name, self.weight)

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
        _check_weight(self.name, self.weight)

    async def evaluate(self, trajectory: Trajectory, state: EpisodeState) -> float | None:
        value = await self.function(trajectory, state)
        if value is not None and not 0 <= value <= 1:
            raise EnvError(f"reward {self.name!r} gave {value!r}; it must be in [0, 1], or None to abstain")
        return value


def _check_weight(name: str, weight: float) -> None:
    if not weight > 0:
        raise ValueError(f"weight of checklist item {name!r} must be positive, got {weight}")


class Checklist:
    """A list of items with unique names."""

    def __init__(self, items: Sequence[ChecklistItem | Reward]) -> None:
        self.items = {item.name: item for item in items}
        if len(self.items) != len(items):
            raise ValueError(f"checklist items must have unique names, got {[i.name for i in items]}")

    async def run(self, trajectory: Trajectory, state: EpisodeState | None = None) -> dict[str, float | None]:
        """How far each item is met: in [0, 1] (True and False for a `ChecklistItem`), None where it cannot tell.

        Raises:
            EnvError: if an item raises; a broken checklist is an environment fault, not a score.
        """
        results: dict[str, float | None] = {}
        for name, item in self.items.items():
            with boundary(EnvError, f"checklist item {name!r}"):
                results[name] = await item.evaluate(trajectory, state or EpisodeState())
        return results

    def score(self, results: Mapping[str, float | None]) -> float | None:
        """Weighted mean of the items that were decided, in [0, 1]; None if no item could be decided."""
        decided = [(self.items[name].weight, met) for name, met in results.items() if met is not None]
        total = sum(weight for weight, _ in decided)
        return sum(weight * met for weight, met in decided) / total if total else None
