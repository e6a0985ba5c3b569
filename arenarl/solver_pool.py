"""Runners of an executor: each in a place that starts it when it is needed, keeps it on its weights, and replaces it when it died.

Starts and ends take seconds and have threads of their own; nothing here blocks an event loop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from arenarl.errors import ArenaError, EngineUnavailable
from arenarl.player import Job, RolloutLimits
from arenarl.types import Episode, EpisodeGroup

if TYPE_CHECKING:
    from arenarl.config import AgentConfig

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 5.0
MAX_FAILURES = 3
_CONTROL = {"control": 4}  # threads of an actor that no episode can take

log = logging.getLogger(__name__)
T = TypeVar("T")


class Runner(Protocol):
    """An engine with its environments. Built running; building, `set_weights` and `close` block."""

    async def play(self, job: Job, timeout_s: float) -> Episode:
        """The episode of a group of one.

        Raises:
            EngineUnavailable: the runner died, or was closed meanwhile.
        """
        ...

    def set_weights(self, weights: Any, version: int, timeout_s: float) -> None: ...

    def begin_step(self, version: int) -> None: ...

    def close(self) -> None: ...


class Place:
    """One runner after the other. Any thread may call it."""

    def __init__(self, build: Callable[[], Runner]) -> None:
        self._build = build
        self._lock = threading.Lock()  # for the fields below, never held for long
        self._starting: Future[Runner] | None = None
        self._runner: Runner | None = None
        self._weights: tuple[Any, int, float] | None = None
        self._ending: list[Future[None]] = []
        self._failures, self._why = 0, ""
        self._closed = False

    @property
    def running(self) -> bool:
        return self._runner is not None

    async def runner(self) -> Runner:
        """The runner, started if there is none. Leaving the wait does not stop the start.

        Raises:
            ArenaError: what kept it from starting.
            EngineUnavailable: the place is closed, or three starts or lives in a row came to nothing.
        """
        with self._lock:
            if self._closed:
                raise EngineUnavailable("the executor is closed")
            if self._failures >= MAX_FAILURES:
                raise EngineUnavailable(f"down until the next step after {MAX_FAILURES} failures in a row: {self._why}")
            self._starting = self._starting or _in_thread(self._start)
            starting = self._starting
        return await until(starting)

    def proven(self) -> None:
        """It brought an episode back."""
        self._failures = 0

    def lose(self, runner: Runner, error: Exception) -> None:
        """Put away a runner that died; the next call of `runner` starts another."""
        with self._lock:
            if self._runner is runner:
                self._runner = self._starting = None
                self._fail(error)
                self._ending = [*(e for e in self._ending if not e.done()), _in_thread(runner.close)]

    def set_weights(self, weights: Any, version: int, timeout_s: float) -> None:
        """Load weights, now or when it starts. A runner that does not take them is put away."""
        with self._lock:
            self._weights, self._failures = (weights, version, timeout_s), 0
            runner = self._runner
        if runner is not None:
            try:
                runner.set_weights(weights, version, timeout_s)
            except Exception as error:  # boundary: whatever it is, this runner has the wrong weights
                self.lose(runner, error)

    def begin_step(self, version: int) -> None:
        self._failures = 0
        if (runner := self._runner) is not None:
            runner.begin_step(version)

    async def aclose(self) -> None:
        """End what runs, and what is starting as soon as it has started; if this is cancelled, that happens all the same."""
        with self._lock:
            self._closed = True
            runner, starting, self._runner = self._runner, self._starting, None
            if runner is not None:
                self._ending.append(_in_thread(runner.close))
        for future in (*self._ending, *([starting] if starting else [])):
            with contextlib.suppress(Exception):
                await until(future)

    def _start(self) -> Runner:
        runner, loaded = None, None
        try:
            for ending in tuple(
                self._ending
            ):  # its memory is needed, and vLLM's core in a thread shares state with the next
                ending.exception()
            runner = self._build()
            while not self._admit(runner, loaded):
                loaded = self._weights
                assert loaded is not None
                runner.set_weights(*loaded)
            return runner
        except BaseException as error:
            if runner is not None:
                runner.close()
            with self._lock:
                self._starting = None
                self._fail(error)
            raise

    def _admit(self, runner: Runner, loaded: tuple[Any, int, float] | None) -> bool:
        """Let a runner in that has the latest weights."""
        with self._lock:
            if self._closed:
                raise EngineUnavailable("the executor was closed while the engine started")
            if self._weights is loaded:
                self._runner = runner
            return self._weights is loaded

    def _fail(self, error: BaseException) -> None:
        self._failures, self._why = self._failures + 1, str(error) or type(error).__name__
        if not self._closed:
            log.warning("a solver's engine failed (%d in a row): %s", self._failures, self._why)


async def until(future: Future[T]) -> T:
    """The result of a thread's work. Neither leaving the wait nor the end of the event loop touches the work."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def wake(_: Future[T]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(done.set)

    future.add_done_callback(wake)
    await done.wait()
    return future.result()


def _in_thread(work: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="solver", daemon=True).start()
    return future


# --- in this process -----------------------------------------------------------------------------------------------


def build_local(config: AgentConfig) -> Runner:
    return _LocalRunner(config)


class _LocalRunner:
    """A rollout loop: a thread with an engine."""

    def __init__(self, config: AgentConfig) -> None:
        from arenarl.engine import VLLMEngine
        from arenarl.env_runner import load_renderer
        from arenarl.rollout import RolloutLoop

        self._taskset = config.build_taskset()
        limits = RolloutLimits(
            max_turns=config.max_turns, max_result_tokens=config.max_result_tokens, max_episodes=config.max_episodes,
            generate_timeout_s=config.generate_timeout_s, episode_timeout_s=config.episode_timeout_s,
        )  # fmt: skip
        self._loop = RolloutLoop(
            VLLMEngine(config.engine_config(), engine_id="solver"), load_renderer(config.model_path), self._taskset, _unscored,
            limits, on_close=getattr(self._taskset, "aclose", None),
        )  # fmt: skip
        self._plays: set[Future[EpisodeGroup]] = set()
        try:
            self._loop.start(START_TIMEOUT_S)
            self._home = self._loop.call(_running_loop(), STOP_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    async def play(self, job: Job, timeout_s: float) -> Episode:
        playing = self._loop.play_group(job)
        try:
            future = asyncio.run_coroutine_threadsafe(playing, self._home)
        except RuntimeError as error:
            playing.close()
            raise EngineUnavailable(f"the solver's loop has ended: {error}") from None
        self._plays.add(future)
        try:
            group = await until(future)
        except concurrent.futures.CancelledError:
            raise EngineUnavailable("the solver was closed during the episode") from None
        except asyncio.CancelledError:
            future.cancel()
            raise
        finally:
            self._plays.discard(future)
        return group.episodes[0]

    def set_weights(self, weights: Any, version: int, timeout_s: float) -> None:
        self._loop.call(self._loop.engine.update_weights(weights, version, timeout_s=timeout_s), timeout_s + 10)

    def begin_step(self, version: int) -> None:
        if begin_step := getattr(self._taskset, "begin_step", None):
            begin_step(version)

    def close(self) -> None:
        for future in tuple(self._plays):
            future.cancel()
        with contextlib.suppress(RuntimeError):  # a loop that failed to start ends by itself, now
            self._loop.close()


async def _unscored(group: EpisodeGroup) -> EpisodeGroup:
    return group


async def _running_loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


# --- on Ray --------------------------------------------------------------------------------------------------------


def build_remote(config: AgentConfig) -> Runner:
    return _RemoteRunner(config)


class _RemoteRunner:
    """An `arenarl.env_runner.AgentEnvRunner` in an actor, outside the placement group of whoever starts it."""

    def __init__(self, config: AgentConfig) -> None:
        import ray

        from arenarl.env_runner import AgentEnvRunner

        actor = ray.remote(concurrency_groups=_CONTROL)(AgentEnvRunner)
        self._actor = actor.options(
            num_cpus=config.num_cpus_per_env_runner, num_gpus=config.num_gpus_per_env_runner, max_restarts=0,
            max_concurrency=config.max_episodes, scheduling_strategy="DEFAULT",
        ).remote(config=config)  # fmt: skip
        try:
            self._control("assert_healthy", START_TIMEOUT_S)
        except BaseException:
            ray.kill(self._actor)
            raise

    async def play(self, job: Job, timeout_s: float) -> Episode:
        try:
            groups: Sequence[EpisodeGroup] = await until(self._actor.play.remote([job], timeout_s).future())
        except Exception as error:
            raise _attribute(error) from None
        return groups[0].episodes[0]

    def set_weights(self, weights: Any, version: int, timeout_s: float) -> None:
        self._control("set_weights", timeout_s + 20, weights, version, timeout_s)

    def begin_step(self, version: int) -> None:
        self._actor.apply.options(concurrency_group="control").remote(_begin_step, version)

    def close(self) -> None:
        import ray

        try:
            self._control("stop", STOP_TIMEOUT_S)
        except ArenaError as error:
            log.debug("a solver's actor did not stop by itself: %s", error)
        finally:
            ray.kill(self._actor)

    def _control(self, method: str, timeout_s: float, *args: Any) -> None:
        import ray

        try:
            ray.get(getattr(self._actor, method).options(concurrency_group="control").remote(*args), timeout=timeout_s)
        except Exception as error:
            raise _attribute(error) from None


def _begin_step(runner: Any, version: int) -> None:
    if begin_step := getattr(runner.taskset, "begin_step", None):
        begin_step(version)


def _attribute(error: Exception) -> ArenaError:
    """What an actor's call came to as one of our errors, without Ray's wrapping and traceback text."""
    from ray.exceptions import GetTimeoutError, RayActorError

    cause = getattr(error, "cause", None) or error
    if isinstance(cause, ArenaError):
        return cause
    said = (str(cause).strip().splitlines() or [""])[-1]
    if isinstance(cause, RayActorError | GetTimeoutError):
        return EngineUnavailable(f"the solver's actor: {type(cause).__name__}: {said}")
    return ArenaError(f"the solver's actor: {type(cause).__name__}: {said}")
