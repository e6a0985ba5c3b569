"""Tasks that carry their own rubric, over the tool servers of another environment: generated pools, ECR-Bench files.

## Description
The servers, the system prompt and the limit of turns are those of the base environment. The tasks of a split come from
a file: JSON Lines or a JSON list in the format of ECR-Bench (`arenarl.ecr`), or a pool of generated tasks in Parquet
(`arenarl.task_pool`). ``heldout="embedded"`` is a set of 120 travel tasks in that format, 24 of each kind, about cities
that no training task names. A split without a file has the base's tasks.

## Actions
The text of an assistant message: Hermes-style tool calls, or the final answer (any text without a call).

## Observations
The new chat messages: system and user at reset, tool results after each step.

## Rewards
0 until the end, then the weighted share of the task's rubrics and expected tool calls that are met, in [0, 1]. A grader
reads the rubrics; the tool calls are matched by code, one to one. A task of the base is scored by the base.

## Starting state
A task of the split, picked by the seed, and what the base sets up for it.

## Episode end
As in the base: terminated by an answer, truncated after ``max_turns`` assistant turns.

## Arguments
``base``, ``base_config``: the environment whose servers are used. ``train``, ``heldout``: files, or None. ``grader``,
``grader_config``: who reads the rubrics.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from arenarl.ecr import load_ecr
from arenarl.envs.travel import TravelTasks
from arenarl.errors import ConfigError
from arenarl.mcp.config import ServerSpec
from arenarl.rubric import Checklist, Grader, items_from_data
from arenarl.taskset import load_object, load_taskset
from arenarl.types import Task, Trajectory

EMBEDDED = Path(__file__).parent / "data" / "ecr_travel.jsonl"


class RubricTasks:
    """A task set whose tasks say themselves how they are checked. See the module docstring.

    Args:
        train, heldout: a ``.parquet`` pool, any other file in ECR format, or None for the base's tasks. ``heldout`` may
            be "embedded".
        grader: "module:Class" of a `Grader`. One object serves all checklists; `begin_step` and `aclose` are passed on to it,
            and to the base.

    Raises:
        ConfigError: for a file or a task that is refused, a request that is in both files, or a base or grader that is
            none.
    """

    setup: Callable[[Task, Path], None]  # these three only if the base has them
    check_tools: Callable[[Collection[tuple[str, str]]], None]
    quality: Callable[[Task, Trajectory], float | None]

    def __init__(
        self, base: str = "arenarl.envs.travel:TravelTasks", base_config: Mapping[str, Any] | None = None, *,
        train: str | Path | None = None, heldout: str | Path | None = None,
        grader: str = "arenarl.envs.travel_rubrics:TravelGrader", grader_config: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self._base = load_taskset(base, base_config)
        self.name = f"{self._base.name}_rubrics"
        self.system_prompt, self.max_turns = self._base.system_prompt, self._base.max_turns
        self.grader: Grader = load_object(grader, "grader", **(grader_config or {}))
        if not hasattr(self.grader, "grade"):
            raise ConfigError(f"grader {grader!r} has no method grade(items, trajectory, task); name a class that has")
        files = {"train": train, "heldout": self._embedded() if heldout == "embedded" else heldout}
        self._tasks = {split: self._read(Path(file)) for split, file in files.items() if file is not None}
        self._check_apart()
        for name in ("setup", "check_tools"):
            if hasattr(self._base, name):
                setattr(self, name, getattr(self._base, name))
        if hasattr(self._base, "quality"):
            self.quality = self._base_quality

    def servers(self) -> Sequence[ServerSpec]:
        return self._base.servers()

    def tasks(self, split: str, count: int, seed: int) -> list[Task]:
        """``count`` distinct tasks of the split's file, or all there are, in an order that the seed decides.

        Without a file they are the base's.

        Raises:
            ConfigError: for an unknown split.
        """
        if split not in self._tasks:
            return self._base.tasks(split, count, seed)
        found = self._tasks[split]
        return random.Random(f"tasks/{split}/{seed}").sample(found, min(count, len(found)))

    def checklist(self, task: Task) -> Checklist:
        """The rubrics and expected tools of the task; the base's checklist for a task that has neither.

        Raises:
            ConfigError: naming the task and what in its data is refused.
        """
        if not _has_rubric(task):
            return self._base.checklist(task)
        return Checklist(items_from_data(task.data, task_id=task.task_id), grader=self.grader, task=task)

    def begin_step(self, version: int) -> None:
        """The budgets of the grader and of the base are full again."""
        for part in (self.grader, self._base):
            if begin_step := getattr(part, "begin_step", None):
                begin_step(version)

    async def aclose(self) -> None:
        """Close what the grader and the base hold."""
        for part in (self.grader, self._base):
            if aclose := getattr(part, "aclose", None):
                await aclose()

    def _base_quality(self, task: Task, trajectory: Trajectory) -> float | None:
        """The base's verdict for evaluations, on tasks of the base; what it would be for others is not known."""
        return None if _has_rubric(task) else self._base.quality(task, trajectory)  # type: ignore[attr-defined]

    def _embedded(self) -> Path:
        if not isinstance(self._base, TravelTasks) or self._base.seed != 0:
            raise ConfigError('heldout="embedded" is about the travel world of seed 0; give a file for another base')
        return EMBEDDED

    def _read(self, path: Path) -> list[Task]:
        if path.suffix == ".parquet":
            from arenarl.task_pool import TaskPool

            tasks = [entry.task for entry in TaskPool.load(path)]
            if not tasks:
                raise ConfigError(f"the pool '{path}' holds no task; fill it, or give another file")
        else:
            tasks = load_ecr(path)
        for task in tasks:  # what is malformed is refused here, not in the middle of a run
            if not (_has_rubric(task) and self.checklist(task).items):
                raise ConfigError(
                    f"task {task.task_id!r} of '{path}' has neither rubrics nor expected_tools, so nothing could be checked; "
                    "take it out"
                )
        return tasks

    def _check_apart(self) -> None:
        train, heldout = ({task.prompt: task for task in self._tasks.get(split, [])} for split in ("train", "heldout"))
        for prompt in heldout.keys() & train.keys():
            raise ConfigError(
                f"held-out task {heldout[prompt].task_id!r} asks the same as training task {train[prompt].task_id!r}; "
                "take it out of one of the files"
            )


def _has_rubric(task: Task) -> bool:
    """Whether a task's data says how it is checked."""
    return "rubrics" in task.data or "expected_tools" in task.data
