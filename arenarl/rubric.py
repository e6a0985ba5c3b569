"""Typed checklists: each item is a code predicate over a trajectory that says met, not met, or cannot tell."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from arenarl.errors import EnvError, boundary
from arenarl.types import Trajectory

Check = Callable[[Trajectory], bool | None]


@dataclass(frozen=True, kw_only=True)
class ChecklistItem:
    """One assertion that can be checked alone.

    Attributes:
        name: short and stable; the key in metrics and records.
        check: returns True (met), False (not met) or None (cannot tell: the item then carries no weight).
        weight: relative weight, positive.
        about: whether it judges the path (tool use, grounding) or the final answer.
    """

    name: str
    check: Check
    weight: float = 1.0
    about: Literal["trajectory", "answer"] = "trajectory"

    def __post_init__(self) -> None:
        if not self.weight > 0:
            raise ValueError(f"weight of checklist item {self.name!r} must be positive, got {self.weight}")


class Checklist:
    """A list of items with unique names."""

    def __init__(self, items: list[ChecklistItem]) -> None:
        self.items = {item.name: item for item in items}
        if len(self.items) != len(items):
            raise ValueError(f"checklist items must have unique names, got {[i.name for i in items]}")

    def run(self, trajectory: Trajectory) -> dict[str, bool | None]:
        """Check every item.

        Raises:
            EnvError: if a predicate raises; a broken checklist is an environment fault, not a score.
        """
        results: dict[str, bool | None] = {}
        for name, item in self.items.items():
            with boundary(EnvError, f"checklist item {name!r}"):
                results[name] = item.check(trajectory)
        return results

    def score(self, results: Mapping[str, bool | None]) -> float | None:
        """Weighted share of the decided items that are met, in [0, 1]; None if no item could be decided."""
        decided = [(self.items[name].weight, met) for name, met in results.items() if met is not None]
        total = sum(weight for weight, _ in decided)
        return sum(weight for weight, met in decided if met) / total if total else None
