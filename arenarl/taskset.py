"""What makes an environment of the generic one: tasks, tool servers, a starting state, and a verdict."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from arenarl.errors import ConfigError
from arenarl.mcp.config import ServerSpec
from arenarl.rubric import Checklist
from arenarl.types import Task


class TaskSet(Protocol):
    """Tasks, tools, and how an episode is judged.

    A task set may also have these methods:

    - ``setup(task, workdir)`` writes the task's files into the episode's empty working directory before it begins.
    - ``oracle(task)`` gives the assistant messages of a perfect episode, calls in the Hermes form, the answer last.
    - ``quality(task, trajectory)`` gives evaluations a judge of their own, in [0, 1].
    """

    name: str
    system_prompt: str
    max_turns: int

    def servers(self) -> Sequence[ServerSpec]:
        """The tool servers of an episode."""
        ...

    def tasks(self, split: str, count: int, seed: int) -> list[Task]:
        """``count`` tasks of "train" or "heldout"; the same for the same arguments."""
        ...

    def checklist(self, task: Task) -> Checklist:
        """What a good episode of this task does."""
        ...


def setup_of(taskset: TaskSet, task: Task) -> Callable[[Path], None] | None:
    """The function that writes the starting state of a task, if its task set has one."""
    setup = getattr(taskset, "setup", None)
    return None if setup is None else lambda workdir: setup(task, workdir)


def load_object(path: str, what: str, /, **kwargs: Any) -> Any:
    """Import "module:Name" and call it.

    Raises:
        ConfigError: naming the path and what went wrong.
    """
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)(**kwargs)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{what} {path!r} cannot be built: {error}; give 'module:Name'") from error
