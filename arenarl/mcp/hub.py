"""The one place that hands out sessions on an event loop, and that takes every server down at the end."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from arenarl.errors import EnvError, McpServerError
from arenarl.mcp.config import ServerSpec
from arenarl.mcp.session import McpSession

_MAX_FAILURES = 3


@dataclass
class _Shared:
    """The one session of a shared server, the start in flight, and the starts or lives in a row that came to nothing."""

    session: McpSession | None = None
    starting: asyncio.Task[McpSession] | None = None
    failures: int = 0
    last_error: BaseException | None = None


class ServerHub:
    """Leases sessions. A server of scope "episode" is started for each lease; a "shared" one serves all leases.

    A shared server that died, or hangs, is replaced at the next lease: once for all who wait, and no more after three
    starts or lives in a row without a single answer.

    Args:
        spawn_width: servers that may be starting at once; the number of usable CPUs if None.
    """

    def __init__(self, spawn_width: int | None = None) -> None:
        self._width = asyncio.Semaphore(spawn_width or len(os.sched_getaffinity(0)))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sessions: set[McpSession] = set()
        self._leases: Counter[McpSession] = Counter()
        self._shared: dict[ServerSpec, _Shared] = {}
        self._tasks: set[asyncio.Task[None] | asyncio.Task[McpSession]] = set()
        self._closed = False

    @asynccontextmanager
    async def lease(self, spec: ServerSpec) -> AsyncIterator[McpSession]:
        """A started session for the length of the block. Raises what `acquire` raises."""
        session = await self.acquire(spec)
        try:
            yield session
        finally:
            self.release(session)

    async def acquire(self, spec: ServerSpec) -> McpSession:
        """A started session; give it back with `release`.

        Raises:
            McpServerError: if the server does not start, or a shared one has failed too often, or the hub is closed.
            EnvError: if the hub was used on another event loop before.
        """
        self._check_usable()
        session = await (self._start(spec) if spec.scope == "episode" else self._share(spec))
        self._leases[session] += 1
        return session

    def release(self, session: McpSession) -> None:
        """Give a session back, at once; if nobody else may use it, it is closed in the background."""
        if session not in self._leases:  # the hub was closed in between
            return
        self._leases[session] -= 1
        entry = self._shared.get(session.spec)
        if self._leases[session] <= 0 and (entry is None or entry.session is not session):
            self._retire(session)

    async def aclose(self) -> None:
        """Close every session and wait for it; no process and no task is left. May be called twice."""
        self._closed = True
        while self._sessions or self._tasks:
            for session in list(self._sessions):
                self._retire(session)
            await asyncio.wait(set(self._tasks))

    def _check_usable(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop not in (None, loop):
            raise EnvError("a ServerHub belongs to the event loop that used it first; make one hub per loop")
        self._loop = loop
        if self._closed:
            raise McpServerError("the server hub is closed; make a new one")

    async def _start(self, spec: ServerSpec) -> McpSession:
        session = McpSession(spec)
        self._sessions.add(session)
        try:
            async with self._width:
                self._check_usable()
                return await session.start()
        except BaseException:
            self._retire(session)
            raise

    async def _share(self, spec: ServerSpec) -> McpSession:
        entry = self._shared.setdefault(spec, _Shared())
        if entry.session is not None and (entry.session.dead or entry.session.suspect):
            old, entry.session = entry.session, None
            entry.failures = 0 if old.answered else entry.failures + 1
            entry.last_error = old.dead
            if self._leases[old] <= 0:
                self._retire(old)
        if entry.session is not None:
            return entry.session
        if entry.starting is None:
            if entry.failures >= _MAX_FAILURES:
                raise McpServerError(
                    f"MCP server {spec.name!r} failed {entry.failures} times in a row and is not started again; "
                    f"the last time: {entry.last_error or 'it did not answer'}"
                )
            entry.starting = asyncio.create_task(self._start_shared(spec, entry))
            self._keep(entry.starting)
        return await asyncio.shield(entry.starting)  # one waiter's cancellation is not the others'

    async def _start_shared(self, spec: ServerSpec, entry: _Shared) -> McpSession:
        try:
            entry.session = await self._start(spec)
            return entry.session
        except McpServerError as error:
            entry.failures, entry.last_error = entry.failures + 1, error
            raise
        finally:
            entry.starting = None

    def _retire(self, session: McpSession) -> None:
        if session in self._sessions:
            self._sessions.discard(session)
            self._leases.pop(session, None)
            self._keep(asyncio.create_task(session.close()))

    def _keep(self, task: asyncio.Task[None] | asyncio.Task[McpSession]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._drop)

    def _drop(self, task: asyncio.Task[None] | asyncio.Task[McpSession]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen: whoever waited has it
