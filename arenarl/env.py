"""Multi-turn tool use as a Gymnasium environment, on top of the asyncio core of `arenarl.async_env`."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

import gymnasium

from arenarl.async_env import AsyncToolEnv
from arenarl.errors import EnvError
from arenarl.taskset import TaskSet, load_taskset
from arenarl.types import Message

ADAPTER_MARGIN = 60.0

T = TypeVar("T")


class UnicodeText(gymnasium.Space[str]):
    """Any text of at most ``max_length`` characters. (Gymnasium's ``Text`` has a closed alphabet, checked letter by letter.)"""

    def __init__(self, max_length: int = 1 << 22, seed: int | None = None) -> None:
        self.max_length = max_length
        super().__init__(seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def sample(self, mask: None = None, probability: None = None) -> str:
        """A short printable text."""
        length = int(self.np_random.integers(1, min(self.max_length, 32) + 1))
        return "".join(map(chr, self.np_random.integers(32, 127, length)))

    def contains(self, x: object) -> bool:
        return isinstance(x, str) and len(x) <= self.max_length

    def to_jsonable(self, sample_n: Sequence[str]) -> list[str]:
        return list(sample_n)

    def from_jsonable(self, sample_n: list[str]) -> list[str]:
        return list(sample_n)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UnicodeText) and other.max_length == self.max_length

    def __hash__(self) -> int:
        return hash(self.max_length)

    def __repr__(self) -> str:
        return f"UnicodeText({self.max_length})"


class ToolGymEnv(gymnasium.Env[str, str]):
    """`AsyncToolEnv` for code that is not asynchronous. Observation: the text of the new messages; action: a text.

    ``info["messages"]`` has the new messages, ``info["tools"]`` (at reset) the tool schemas. All environments of a
    process share one thread with an event loop. After a fork, the child's copy starts afresh and leaves the parent's
    servers alone.

    Args:
        taskset: a task set, or "module:Class" of one.
        env_config: keyword arguments of that class.
        kwargs: those of `AsyncToolEnv`.

    Raises:
        EnvError: from any method, if called on that thread itself, where it would wait for itself for ever.
    """

    metadata = {"render_modes": []}  # noqa: RUF012

    def __init__(self, taskset: TaskSet | str, env_config: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._taskset, self._kwargs = as_taskset(taskset, env_config), kwargs
        self._inherited: list[AsyncToolEnv] = []
        self.observation_space = UnicodeText()
        self.action_space = UnicodeText()
        self.core = AsyncToolEnv(self._taskset, **kwargs)
        self._pid = os.getpid()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        core = self._own_core()
        messages, info = on_loop(core.reset(seed=seed, options=options), reset_limit(core))
        return as_text(messages), {**info, "messages": messages}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        core = self._own_core()
        result = on_loop(core.step(action), step_limit(core))
        info = {**result.info, "messages": result.messages}
        return as_text(result.messages), result.reward, result.terminated, result.truncated, info

    def close(self) -> None:
        on_loop(self._own_core().aclose(), ADAPTER_MARGIN)

    def _own_core(self) -> AsyncToolEnv:
        if self._pid != os.getpid():
            self._inherited.append(self.core)  # never collected: its handles are the parent's
            self.core, self._pid = AsyncToolEnv(self._taskset, **self._kwargs), os.getpid()
        return self.core


def as_taskset(taskset: TaskSet | str, env_config: Mapping[str, Any] | None = None) -> TaskSet:
    """A task set, built if it is given as "module:Class". Raises ConfigError if that cannot be done."""
    return load_taskset(taskset, env_config) if isinstance(taskset, str) else taskset


def as_text(messages: Sequence[Message]) -> str:
    """The text of new messages, as an observation."""
    return "\n\n".join(message["content"] for message in messages)


def reset_limit(core: AsyncToolEnv) -> float:
    """Seconds after which a reset has certainly gone wrong."""
    return sum(spec.start_timeout for spec in core.taskset.servers()) + ADAPTER_MARGIN


def step_limit(core: AsyncToolEnv) -> float:
    """Seconds after which a step has certainly gone wrong."""
    return core.episode_timeout + core.verdict_timeout + ADAPTER_MARGIN


_loops: dict[int, tuple[asyncio.AbstractEventLoop, threading.Thread]] = {}
_loops_lock = threading.Lock()


def on_loop(work: Coroutine[Any, Any, T], seconds: float) -> T:
    """Run a coroutine on this process's environment thread and wait for it, at most so long."""
    with _loops_lock:
        if os.getpid() not in _loops:  # keyed by process: a thread does not survive a fork
            loop = asyncio.new_event_loop()
            thread = threading.Thread(target=loop.run_forever, name="arenarl-env", daemon=True)
            thread.start()
            _loops[os.getpid()] = loop, thread
        loop, thread = _loops[os.getpid()]
    if threading.current_thread() is thread:
        work.close()
        raise EnvError("an environment was used on its own event loop's thread; use AsyncToolEnv there")
    future = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        return future.result(seconds)
    except FutureTimeout as error:
        raise EnvError(f"the environment did not answer within {seconds:g} s") from error
    finally:
        future.cancel()
