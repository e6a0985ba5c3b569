"""What a scorer may use where the rollouts run, and what it gives back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from arenarl.batching import Stream
from arenarl.chat import ChatRenderer
from arenarl.judge import Judge
from arenarl.player import Job
from arenarl.taskset import TaskSet
from arenarl.types import Abstention, Episode, EpisodeGroup, Game, Generated, Mark, Message, Standings, Task


@dataclass(frozen=True, kw_only=True)
class Attempts:
    """What an executor brought back: finished attempts at a task, fewer than asked for if something failed.

    Attributes:
        episodes: the attempts, each with its outcome; those that the infrastructure failed are among them.
        outage: why there are none, or not all ("budget", "timeout", "unavailable", a colon, details); empty if all came back.
    """

    episodes: tuple[Episode, ...] = ()
    outage: str = ""


class Executor(Protocol):
    """A solver that tries tasks on behalf of a generator. Nothing that happens to it raises; it owns its deadlines and its budget.

    Many tasks are attempted at once. It opens nothing before its first call. `set_weights` is only there if its policy can follow.
    """

    async def attempt(self, task: Task, runs: int, *, seed: int) -> Attempts:
        """``runs`` independent attempts at a task."""
        ...

    def begin_step(self, version: int) -> None:
        """The budget is full again, if the version is a new one."""
        ...

    async def aclose(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Services:
    """The help that a scorer has in its worker.

    Attributes:
        judge: of attempts.
        play: plays one more group, apart from training and unscored.
        taskset, renderer: of the attempts being scored.
        executor: tries tasks; None if the configuration names none.
        kept: what an algorithm keeps in this worker from group to group, by a name of its own.
    """

    judge: Judge
    play: Callable[[Job], Awaitable[EpisodeGroup]]
    taskset: TaskSet
    renderer: ChatRenderer
    executor: Executor | None = None
    kept: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What a scorer makes of a group; None is a missing value, and an episode without an advantage is not trained on."""

    rewards: tuple[float | None, ...]
    advantages: tuple[float | None, ...]
    games: tuple[Game, ...] = ()
    standings: Standings | None = None
    marks: tuple[tuple[Mark | Abstention, ...], ...] = ()
    generated: tuple[Generated, ...] = ()


class ExtraStream(Protocol):
    """A further term of the loss that any algorithm can add: ``training(extra_streams=[...])``."""

    def check(self, renderer: ChatRenderer, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> None:
        """Before anything starts, with the prompt of a training task. Raises ConfigError for what cannot work."""
        ...

    async def extend(self, group: EpisodeGroup, config: Any, services: Services) -> EpisodeGroup:
        """In the worker, after `score_group`: what the term needs beside the group's own attempts. Never raises for an outage."""
        ...

    def stream(self, group: EpisodeGroup, step: int) -> Stream | None:
        """In the driver: per-token weights of the term at a learner step, or None if this group has none."""
        ...

    async def aclose(self) -> None:
        """In the worker, at its end."""
        ...
