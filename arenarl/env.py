"""Multi-turn tool use as a Gymnasium environment, on top of the asyncio core of `arenarl.async_env`."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

import gymnasium

from arenarl.async_env import MAX_CALLS_PER_TURN, AsyncToolEnv, StepResult, TaskSet
from arenarl.errors import EnvError
from arenarl.types import Message

__all__ = ["MAX_CALLS_PER_TURN", "AsyncToolEnv", "StepResult", "TaskSet", "ToolGymEnv", "UnicodeText"]

_ADAPTER_MARGIN = 60.0

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

    ``info["messages"]`` has the new messages, ``info["tools"]`` (at reset) the tool schemas. Arguments are those of
    `AsyncToolEnv`. All environments of a process share one thread with an event loop. After a fork, the child's copy
    starts afresh and leaves the parent's servers alone.

    Raises:
        EnvError: from any method, if called on that thread itself, where it would wait for itself for ever.
    """

    metadata = {"render_modes": []}  # noqa: RUF012

    def __init__(self, taskset: TaskSet, **kwargs: Any) -> None:
        self._arguments = (taskset, kwargs)
        self._inherited: list[AsyncToolEnv] = []
        self.observation_space = UnicodeText()
        self.action_space = UnicodeText()
        self.core = AsyncToolEnv(taskset, **kwargs)
        self._pid = os.getpid()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        core = self._own_core()
        limit = sum(spec.start_timeout for spec in core.taskset.servers())
        messages, info = _on_loop(core.reset(seed=seed, options=options), limit + _ADAPTER_MARGIN)
        return _text(messages), {**info, "messages": messages}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        core = self._own_core()
        result = _on_loop(core.step(action), core.episode_timeout + _ADAPTER_MARGIN)
        info = {**result.info, "messages": result.messages}
        return _text(result.messages), result.reward, result.terminated, result.truncated, info

    def close(self) -> None:
        _on_loop(self._own_core().aclose(), _ADAPTER_MARGIN)

    def _own_core(self) -> AsyncToolEnv:
        if self._pid != os.getpid():
            self._inherited.append(self.core)  # never collected: its handles are the parent's
            taskset, kwargs = self._arguments
            self.core, self._pid = AsyncToolEnv(taskset, **kwargs), os.getpid()
        return self.core


def _text(messages: Sequence[Message]) -> str:
    return "\n\n".join(message["content"] for message in messages)


_loops: dict[int, tuple[asyncio.AbstractEventLoop, threading.Thread]] = {}
_loops_lock = threading.Lock()


def _on_loop(work: Coroutine[Any, Any, T], seconds: float) -> T:
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
        raise EnvError("a ToolGymEnv was used on its own event loop's thread; use AsyncToolEnv there")
    future = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        return future.result(seconds)
    except FutureTimeout as error:
        raise EnvError(f"the environment did not answer within {seconds:g} s") from error
    finally:
        future.cancel()
