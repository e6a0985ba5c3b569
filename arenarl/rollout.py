"""Episodes in flight: one thread, one asyncio loop, one engine, many environments.

`RolloutLoop` plays the groups it is given and never blocks its caller:

    submit(jobs)   caller's thread -> the loop. Bounded by the caller, who admits groups by staleness.
    episodes       wait for the engine, then for their tools; nothing waits for a sibling.
    groups         scored as soon as their last episode ends, so judges overlap with generation.
    drain(wait)    the loop -> caller's thread. Raises what killed the loop, so a death is seen at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from typing import Any, TypeVar

from arenarl.arena import together
from arenarl.chat import ChatRenderer
from arenarl.engine import Engine
from arenarl.errors import ArenaError, DeadlineExceeded, EngineUnavailable
from arenarl.mcp.hub import ServerHub
from arenarl.player import EpisodePlayer, Job, RolloutLimits
from arenarl.taskset import TaskSet, draw_tasks, servers_of, setup_of
from arenarl.types import Episode, EpisodeGroup

CLOSE_TIMEOUT_S = 10.0

_DESCRIPTORS = 1 << 16

T = TypeVar("T")
ScoreGroup = Callable[[EpisodeGroup], Awaitable[EpisodeGroup]]


def _allow_descriptors() -> None:
    """Use the descriptors that the system would give: an episode takes four for each tool server."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class RolloutLoop:
    """See the module docstring. Plain class: usable without Ray, from any thread.

    Args:
        engine: not yet started; the loop starts it and shuts it down.
        score_group: gives a finished group its rewards and advantages.
        on_close: runs on the loop at its end, for ten seconds at most: what ``score_group`` holds is taken down.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: ChatRenderer,
        taskset: TaskSet,
        score_group: ScoreGroup,
        limits: RolloutLimits,
        on_close: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.engine, self.renderer, self.taskset, self.limits = engine, renderer, taskset, limits
        self._score_group, self._on_close = score_group, on_close
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)
        self._ready: Future[None] = Future()
        self._finished: list[EpisodeGroup] = []
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._stop = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    # -- the caller's side ------------------------------------------------------------------------------------------

    def start(self, timeout_s: float = 600.0) -> None:
        """Start engine and servers.

        Raises:
            ArenaError: whatever kept them from starting.
        """
        self._thread.start()
        self._ready.result(timeout_s)

    def submit(self, jobs: Sequence[Job]) -> None:
        """Begin to play groups for training; they come back from `drain`."""
        self._check_alive()
        for job in jobs:
            self._loop.call_soon_threadsafe(self._spawn, job)

    def drain(self, wait_s: float) -> list[EpisodeGroup]:
        """Groups that have finished since the last call; waits up to ``wait_s`` for the first.

        Raises:
            ArenaError: the loop has died, with its cause.
        """
        with self._changed:
            if not self._finished and self._error is None:
                self._changed.wait(wait_s)
            done, self._finished = self._finished, []
        if not done:
            self._check_alive()
        return done

    def run(self, jobs: Sequence[Job], timeout_s: float, *, score: ScoreGroup | None = None) -> list[EpisodeGroup]:
        """Play groups apart from training, in order; scored by their checklists alone, or also by ``score``.

        The first to fail ends the others.
        """

        async def play(job: Job) -> EpisodeGroup:
            group = await self.play_group(job)
            return await score(group) if score else group

        return self.call(together(map(play, jobs)), timeout_s)

    def call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run a coroutine on the loop and wait for it.

        Raises:
            DeadlineExceeded: it took longer.
        """
        try:
            self._check_alive()
        except BaseException:
            coroutine.close()
            raise
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout_s)
        except FutureTimeout:
            future.cancel()
            raise DeadlineExceeded(
                f"the rollout loop of {self.engine.engine_id} did not answer within {timeout_s:g} s"
            ) from None

    def close(self, timeout_s: float = 20.0) -> None:
        """Stop episodes, servers and engine. May be called twice."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # a start that failed closes the loop by itself
                self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(timeout_s)

    def _check_alive(self) -> None:
        if self._error is not None:
            raise EngineUnavailable(f"the rollout loop of {self.engine.engine_id} died: {self._error}") from self._error
        if not self._thread.is_alive():
            raise EngineUnavailable(f"the rollout loop of {self.engine.engine_id} is not running")

    # -- the loop's side --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._main())
        except BaseException as error:
            self._fail(error)
        finally:
            self._loop.close()

    async def _main(self) -> None:
        _allow_descriptors()
        self._hub = ServerHub()
        warming = asyncio.create_task(self._prewarm())  # while the engine starts, which takes longer
        try:
            await self.engine.start()
            self._player = EpisodePlayer(self.engine, self.renderer, self.taskset, self._hub, self.limits)
            self._slots = asyncio.Semaphore(self.limits.max_episodes)
            self._ready.set_result(None)
            await self._stop.wait()
        finally:
            for task in (warming, *self._tasks):
                task.cancel()
            await asyncio.gather(warming, *self._tasks, return_exceptions=True)
            try:
                await self._hub.aclose()
                await self.engine.shutdown()
            finally:  # last, as it is not ours and may hang
                if self._on_close:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._on_close(), CLOSE_TIMEOUT_S)

    async def _prewarm(self) -> None:
        """Start pooled servers ahead; what goes wrong here goes wrong again in an episode, which reports it."""
        with contextlib.suppress(ArenaError):
            task = draw_tasks(self.taskset, "train", 1, 0)[0]
            fill = setup_of(self.taskset, task)
            await self._hub.prewarm(servers_of(self.taskset), self.limits.prewarm, fill=fill)

    def _spawn(self, job: Job) -> None:
        task = self._loop.create_task(self._play_and_score(job), name=job.group_id)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._fail(task.exception())
            self._stop.set()

    def _fail(self, error: BaseException | None) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
        if not self._ready.done():
            self._ready.set_exception(
                error if isinstance(error, ArenaError) else EngineUnavailable(f"{type(error).__name__}: {error}")
            )

    async def _play_and_score(self, job: Job) -> None:
        started = time.monotonic()
        group = await self._score_group(await self.play_group(job))
        with self._changed:
            self._finished.append(replace(group, seconds=time.monotonic() - started))
            self._changed.notify_all()

    async def play_group(self, job: Job) -> EpisodeGroup:
        """Play one group, unscored. On the loop: scorers that need more attempts call it."""
        attempts = await together(self._play_one(job, member) for member in range(job.group_size))
        return EpisodeGroup(group_id=job.group_id, task=job.task, episodes=tuple(attempts), version=job.version)

    async def _play_one(self, job: Job, member: int) -> Episode:
        async with self._slots:
            return await self._player.play(job, member)
