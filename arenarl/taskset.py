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
        """``count`` tasks of "train" or "heldout", fewer if there are no more; the same for the same arguments."""
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


def taskset_path(env: str) -> str:
    """ "module:Class" of the task set behind an environment name; a Gymnasium id is looked up in its registry."""
    if not isinstance(env, str):
        raise ConfigError(f"environment {env!r} must be a string: 'module:TaskSetClass' or a Gymnasium id")
    if "/" not in env or ":" in env:
        return env
    import gymnasium

    try:
        return str(gymnasium.spec(env).kwargs["taskset"])
    except (gymnasium.error.Error, KeyError) as error:
        raise ConfigError(f"environment {env!r} names no task set: {error}; give 'module:TaskSetClass'") from None
