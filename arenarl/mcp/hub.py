"""The one place that hands out servers on an event loop, and that takes every server down at the end."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary

from arenarl.errors import EnvError, McpServerError
from arenarl.mcp.cache import ResultCache
from arenarl.mcp.config import ServerSpec
from arenarl.mcp.nursery import Nursery, hold
from arenarl.mcp.pool import Fill, Slot, Workspace, check_names, lasting, needs_directory, place
from arenarl.mcp.session import McpSession
from arenarl.mcp.spawn import SpawnGate
from arenarl.mcp.tape import Tape
from arenarl.mcp.workdir import WorkDirectory

_MAX_FAILURES = 3
_FILL_SECONDS = 120.0
_IDLE_SECONDS = 60.0  # after which a pooled server must show that it still answers

_log = logging.getLogger(__name__)


@dataclass
class _Shared:
    """The one session of a shared server, the start in flight, and the starts or lives in a row that came to nothing."""

    session: McpSession | None = None
    starting: asyncio.Task[McpSession] | None = None
    failures: int = 0
    last_error: BaseException | None = None


_PoolKey = tuple[tuple[ServerSpec, ...], bool]


class ServerHub:
    """Hands out workspaces: the servers and the directory of one episode.

    A server of scope "episode" is started for each workspace. One of scope "pool" goes on to the next workspace of the
    same specs, with its directory, after a reset; it does not if it died, timed out, lists other tools, or is worn out.
    A "shared" one serves all: if it died, or hangs, it is replaced at the next lease: once for all who wait, and no more
    after three starts or lives in a row without a single answer.

    Args:
        spawn_width: servers that may be computing their start at once; the number of usable CPUs if None.
        tape: records every result, or replays them without any server.
    """

    def __init__(self, spawn_width: int | None = None, *, tape: Tape | None = None) -> None:
        self._gate = SpawnGate(spawn_width or len(os.sched_getaffinity(0)))
        self._nursery: Nursery | None = None
        self._tape = tape
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sessions: set[McpSession] = set()
        self._leases: Counter[McpSession] = Counter()
        self._shared: dict[ServerSpec, _Shared] = {}
        self._caches: WeakKeyDictionary[McpSession, ResultCache] = WeakKeyDictionary()
        self._slots: set[Slot] = set()
        self._idle: dict[_PoolKey, list[asyncio.Task[Slot | None]]] = {}  # ready, or soon
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    # --- workspaces ----------------------------------------------------------------------------------------------

    async def open(
        self, specs: Sequence[ServerSpec], *, fill: Fill | None = None, seed: int = 0, episode: str = "", key: str = ""
    ) -> Workspace:
        """Start, or take from the pool, the servers of an episode; give them back with `put`.

        There is a directory if a server names ``${WORKDIR}`` or is reset by "files", or if ``fill`` is given. A stdio
        server that names it and has no ``cwd`` starts in it, so that relative paths lead there.

        Args:
            fill: writes the task's files into the empty directory, in a thread: before the servers start, or into the
                directory of pooled ones that run already. So that the first episode of these sees what later ones will,
                it is called a second time, in a directory that is empty again, after their start.
            seed, episode: for the variables ``${SEED}`` and ``${EPISODE}``; a unique text if ``episode`` is empty.
            key: names the starting state, on a tape.

        Raises:
            McpServerError: if a server does not start; nothing of the workspace is left.
            EnvError: if ``fill`` fails, or the tape to replay does not know the servers.
            ConfigError: if two servers have one name, one with reset="files" is not in the directory, or ``reset_tool``
                or ``cache_tools`` name a tool that the server does not have.
        """
        self._check_usable()
        placed = place(specs)
        reel = self._tape.reel(placed, key, seed) if self._tape else None
        if reel is not None and reel.replays:
            workspace = Workspace(self, placed, None, reel)
            workspace.offer(reel.listing())
            return workspace
        pool = (placed, needs_directory(placed, fill))
        slot = await self._idle_slot(pool)
        if slot is None:
            slot = await self._build(pool, fill) if lasting(placed) else self._new_slot(*pool)
        workspace = Workspace(self, placed, slot, reel)
        try:
            if fill is not None:
                if await self._end_passing(slot):  # they start in the filled directory
                    await slot.wipe()
                await slot.fill(fill, _FILL_SECONDS)
            variables = {"SEED": str(seed), "EPISODE": episode or uuid4().hex}
            await self._start_servers(slot, (s for s in placed if s.scope != "shared"), variables)
            await workspace.connect()
            self._check_usable()
        except BaseException:
            workspace.release()
            self._discard(slot)
            raise
        return workspace

    def put(self, workspace: Workspace) -> None:
        """Give a workspace back, at once: it is cleaned, or taken down, in the background. May be called twice."""
        if workspace.closed:
            return
        reusable = workspace.in_flight == 0
        workspace.release()
        slot = workspace.slot
        if slot is None or slot not in self._slots:  # a replayed one; the hub was closed in between
            return
        slot.uses += 1
        if reusable and slot.clean():
            self._later((slot.specs, slot.directory is not None), self._reset(slot))
        else:
            self._discard(slot)

    async def prewarm(self, specs: Sequence[ServerSpec], count: int, *, fill: Fill | None = None) -> None:
        """Have ``count`` more workspaces' pooled servers running, and the shared servers of ``specs``.

        Those with reset="respawn" start only when the files are there: ahead of time if there are none.

        Args:
            fill: writes what the servers need at their start; it is gone again when they are handed out.

        Raises:
            McpServerError: if a server does not start; those that did are kept.
            EnvError: if ``fill`` fails.
        """
        self._check_usable()
        placed = place(specs)
        if self._tape is not None and self._tape.mode == "replay":
            return
        for spec in placed:
            if spec.scope == "shared":
                self.release(await self.acquire(spec))
        if not any(spec.scope == "pool" for spec in placed):
            return
        key = (placed, needs_directory(placed, fill))
        ahead = [self._later(key, self._build(key, fill)) for _ in range(count)]
        for outcome in await asyncio.gather(*ahead, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    # --- sessions ------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def lease(self, spec: ServerSpec) -> AsyncIterator[McpSession]:
        """A started session for the length of the block. Raises what `acquire` raises."""
        session = await self.acquire(spec)
        try:
            yield session
        finally:
            self.release(session)

    async def acquire(self, spec: ServerSpec, variables: Mapping[str, str] | None = None) -> McpSession:
        """A started session; give it back with `release`. ``variables`` are the episode's, for texts like ``${WORKDIR}``.

        Raises:
            McpServerError: if the server does not start, or a shared one has failed too often, or the hub is closed.
            EnvError: if the hub was used on another event loop before.
        """
        self._check_usable()
        session = await (self._start(spec, variables) if spec.scope != "shared" else self._share(spec))
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
        """End every session, remove every directory, and wait for it; nothing is left running. May be called twice."""
        self._closed = True
        while self._sessions or self._slots or self._tasks:
            for session in list(self._sessions):
                self._retire(session)
            for slot in list(self._slots):
                self._discard(slot)
            await asyncio.wait(set(self._tasks))
        self._idle.clear()
        nursery, self._nursery = self._nursery, None
        if nursery is not None:
            await nursery.release()

    def cache_of(self, session: McpSession) -> ResultCache:
        """Results of a shared server, for all workspaces; they end with its session."""
        return self._caches.setdefault(session, ResultCache())

    def _check_usable(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop not in (None, loop):
            raise EnvError("a ServerHub belongs to the event loop that used it first; make one hub per loop")
        self._loop = loop
        if self._closed:
            raise McpServerError("the server hub is closed; make a new one")

    async def _start(self, spec: ServerSpec, variables: Mapping[str, str] | None = None) -> McpSession:
        return await self._begin(McpSession(spec, variables))

    async def _begin(self, session: McpSession) -> McpSession:
        self._sessions.add(session)
        try:
            if session.spec.transport != "stdio":
                await session.start()
            else:
                async with self._gate.place(lambda: session.pid):
                    self._check_usable()
                    self._nursery = self._nursery or hold()  # one for all servers of this hub, however they come and go
                    await session.start()
            check_names(session.spec, await session.list_tools())
            return session
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

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._drop)

    def _drop(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen: whoever waited has it

    # --- slots ---------------------------------------------------------------------------------------------------

    def _new_slot(self, placed: tuple[ServerSpec, ...], with_directory: bool) -> Slot:
        slot = Slot(placed, WorkDirectory() if with_directory else None)
        self._slots.add(slot)
        return slot

    def _later(self, key: _PoolKey, coming: Coroutine[Any, Any, Slot | None]) -> asyncio.Task[Slot | None]:
        """Have a slot handed out as soon as it is there."""
        task = asyncio.create_task(coming)
        self._keep(task)
        self._idle.setdefault(key, []).append(task)
        return task

    async def _idle_slot(self, key: _PoolKey) -> Slot | None:
        """A pooled slot that is ready, else the one that will be soonest, if it turns out well."""
        ahead = self._idle.get(key, [])
        while ahead:
            task = next((task for task in ahead if task.done()), ahead[0])
            ahead.remove(task)
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError:
                ahead.insert(0, task)
                raise
            slot = None if task.cancelled() or task.exception() else task.result()
            if slot is not None and slot in self._slots and await self._fit(slot):
                return slot
        return None

    async def _fit(self, slot: Slot) -> bool:
        """Whether a slot can be handed out after its rest; it is discarded if not."""
        try:
            rested = asyncio.get_running_loop().time() - slot.idle_since > _IDLE_SECONDS
            if slot.clean() and not (rested and await slot.lists_others()):
                return True
        except BaseException:
            self._discard(slot)
            raise
        self._discard(slot)
        return False

    async def _start_servers(self, slot: Slot, specs: Iterable[ServerSpec], variables: Mapping[str, str]) -> None:
        """Start those that do not run yet, at the same time; the first failure ends the others' start."""
        where = {"WORKDIR": str(slot.directory.path)} if slot.directory else {}
        missing = [spec for spec in specs if spec.name not in slot.sessions]
        for spec in missing:
            slot.sessions[spec.name] = McpSession(spec, {**where, **variables})
        try:
            async with asyncio.TaskGroup() as group:
                for spec in missing:
                    group.create_task(self._begin(slot.sessions[spec.name]))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        slot.listings |= {s.name: slot.sessions[s.name].listing_hash for s in missing if s.scope == "pool"}

    async def _build(self, key: _PoolKey, fill: Fill | None) -> Slot:
        """A new slot whose pooled servers run, as they will after every later reset."""
        slot = self._new_slot(*key)
        try:
            if fill is not None:
                await slot.fill(fill, _FILL_SECONDS)
            await self._start_servers(slot, slot.staying() if slot.filled else slot.pooled(), {})
            if fill is not None or lasting(slot.specs):
                await slot.wipe()
        except BaseException:
            self._discard(slot)
            raise
        slot.idle_since = asyncio.get_running_loop().time()
        return slot

    async def _reset(self, slot: Slot) -> Slot | None:
        """Make a slot clean for the next episode; None, and the slot is discarded, if that cannot be done."""
        try:
            await self._end_passing(slot)
            if any(session.list_changed for session in slot.sessions.values()) and await slot.lists_others():
                raise McpServerError("a server lists other tools than at its start")
            await slot.wipe()
            if not slot.filled:  # else those that are missing start in the next episode's files
                await self._start_servers(slot, slot.pooled(), {})
            slot.idle_since = asyncio.get_running_loop().time()
            return slot
        except Exception as error:  # boundary: whatever it is, the slot is of no more use
            if slot in self._slots:  # else it was taken down meanwhile
                _log.warning("a pooled workspace of %s is discarded: %s", ", ".join(s.name for s in slot.specs), error)
            self._discard(slot)
            return None
        except BaseException:
            self._discard(slot)
            raise

    async def _end_passing(self, slot: Slot) -> bool:
        """End the servers that do not go on from one episode to the next; False if there are none."""
        staying = {spec.name for spec in slot.staying()}
        ended = [slot.sessions.pop(name) for name in list(slot.sessions) if name not in staying]
        for session in ended:
            self._retire(session)
        await asyncio.gather(*(session.close() for session in ended))
        return bool(ended)

    def _discard(self, slot: Slot) -> None:
        if slot in self._slots:
            self._slots.discard(slot)
            for session in slot.sessions.values():
                self._retire(session)
            self._keep(asyncio.create_task(self._take_down(slot)))

    async def _take_down(self, slot: Slot) -> None:
        await asyncio.gather(*(session.close() for session in slot.sessions.values()))
        if slot.filling is not None:
            await asyncio.wait({slot.filling}, timeout=_FILL_SECONDS)
        if slot.directory is not None:
            await asyncio.to_thread(slot.directory.remove)
