"""What makes an environment of the generic one: tasks, tool servers, a starting state, and a verdict."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from arenarl.errors import ConfigError, EnvError, boundary
from arenarl.mcp.config import ServerSpec
from arenarl.mcp.schema import ToolSet
from arenarl.rubric import Checklist
from arenarl.types import Task

_REQUIRED = ("name", "system_prompt", "max_turns", "servers", "tasks", "checklist")


class TaskSet(Protocol):
    """Tasks, tools, and how an episode is judged.

    A task set may also have these methods:

    - ``setup(task, workdir)`` writes the task's files into the episode's empty working directory before it begins.
    - ``oracle(task)`` gives the assistant messages of a perfect episode, calls in the Hermes form, the answer last.
    - ``quality(task, trajectory)`` gives evaluations a judge of their own, in [0, 1].
    - ``check_tools(tools)`` raises ConfigError if a task needs a tool that is not among these (server, tool) pairs.
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


def load_taskset(path: str, config: Mapping[str, Any] | None = None) -> TaskSet:
    """Build the task set "module:Class" with the keyword arguments ``config``.

    Raises:
        ConfigError: naming the path and what went wrong, or what the class lacks.
    """
    if config is not None and not isinstance(config, Mapping):
        raise ConfigError(f"env_config={config!r} must be a mapping of the task set's arguments")
    taskset = load_object(path, "environment", **(config or {}))
    missing = [name for name in _REQUIRED if not hasattr(taskset, name)]
    if missing:
        raise ConfigError(
            f"environment {path!r} is no task set: it has no {', '.join(missing)}; see arenarl.taskset.TaskSet"
        )
    return taskset


def draw_tasks(taskset: TaskSet, split: str, count: int, seed: int) -> list[Task]:
    """At most ``count`` tasks of a split, at least one.

    Raises:
        ConfigError: if the split has none.
        EnvError: if the task set's own code fails.
    """
    with boundary(EnvError, f"tasks({split!r}, {count}, {seed}) of task set {taskset.name!r}"):
        tasks = list(taskset.tasks(split, count, seed))
    if not tasks:
        raise ConfigError(
            f"task set {taskset.name!r} has no task in its {split!r} split; its tasks({split!r}, ...) must give at least one"
        )
    return tasks


def servers_of(taskset: TaskSet) -> tuple[ServerSpec, ...]:
    """The servers of a task set.

    Raises:
        ConfigError: if it gives anything else.
        EnvError: if its own code fails.
    """
    with boundary(EnvError, f"servers() of task set {taskset.name!r}"):
        found = taskset.servers()
    if not isinstance(found, Sequence) or not all(isinstance(spec, ServerSpec) for spec in found):
        raise ConfigError(f"servers() of task set {taskset.name!r} gave {found!r}; it must give a list of ServerSpec")
    return tuple(found)


def check_tools(taskset: TaskSet, tools: ToolSet) -> None:
    """Let a task set that can refuse tools that do not fit its tasks. Raises ConfigError."""
    if check := getattr(taskset, "check_tools", None):
        check({(spec.server, spec.name) for name in tools.names if (spec := tools.resolve(name))})


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
