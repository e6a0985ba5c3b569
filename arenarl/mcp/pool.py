"""What one episode has for itself: a directory and the servers in it. Pooled servers go on to the next with both."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arenarl.errors import ArenaError, ConfigError, EnvError, near_name
from arenarl.jsonl import clean_json
from arenarl.mcp.cache import ResultCache, result_key
from arenarl.mcp.config import ServerSpec
from arenarl.mcp.paths import PathMap
from arenarl.mcp.profiles import PROFILES
from arenarl.mcp.schema import ToolSpec, json_problem
from arenarl.mcp.session import McpSession
from arenarl.mcp.tape import Reel
from arenarl.mcp.workdir import WorkDirectory
from arenarl.state import EpisodeState
from arenarl.types import INFRASTRUCTURE_KINDS, ToolResult, ToolResultKind

if TYPE_CHECKING:
    from arenarl.mcp.hub import ServerHub

_TEXT: dict[ToolResultKind, str] = {
    "timeout": "Error: the tool did not answer in time.",
    "server_dead": "Error: the tool server has stopped.",
    "protocol": "Error: the tool server sent an answer that cannot be read.",
}

Fill = Callable[[Path], None]


def place(specs: Iterable[ServerSpec]) -> tuple[ServerSpec, ...]:
    """The specs as they start in a workspace: in its directory, if they name it and no other ``cwd``.

    Raises:
        ConfigError: if two have one name, or one with reset="files" is not in the directory.
    """
    placed: dict[str, ServerSpec] = {}
    for spec in specs:
        if spec.name in placed:
            raise ConfigError(f"two servers of one workspace are called {spec.name!r}; rename one")
        local = spec.transport == "stdio" and spec.cwd is None
        lives_here = "WORKDIR" in spec.variables
        if spec.scope == "pool":
            if spec.reset == "files" and not (lives_here or local):
                raise ConfigError(f"server {spec.name!r}: reset='files' is for a server that names ${{WORKDIR}}")
            lives_here = lives_here or spec.reset == "files"
        placed[spec.name] = replace(spec, cwd="${WORKDIR}") if local and lives_here else spec
    return tuple(placed.values())


def lasting(specs: Iterable[ServerSpec]) -> bool:
    """Whether there are pooled servers, and all of them go on running from one episode to the next."""
    resets = [spec.reset for spec in specs if spec.scope == "pool"]
    return bool(resets) and "respawn" not in resets


def needs_directory(specs: Iterable[ServerSpec], fill: Fill | None) -> bool:
    """Whether a workspace of placed specs has a directory."""
    return fill is not None or any("WORKDIR" in spec.variables for spec in specs)


def check_names(spec: ServerSpec, listed: Iterable[ToolSpec]) -> None:
    """Refuse names of tools that the server does not have.

    A profile is made for all versions of its server, so its names need not all be there; and with ``allow`` it is not
    known what else the server has.

    Raises:
        ConfigError: names the nearest tool.
    """
    has = {tool.name for tool in listed} | set(spec.deny)
    profiled = {name for profile in PROFILES.values() for name in profile.cache_tools}
    resets = () if spec.reset_tool is None else (spec.reset_tool,)
    for key, names in (("reset_tool", resets), ("cache_tools", (n for n in spec.cache_tools if n not in profiled))):
        for name in names:
            if name not in has and spec.allow is None:
                known = near_name(name, sorted(has))
                raise ConfigError(f"server {spec.name!r}: {key} names {name!r}, which is none of its tools; {known}")


@dataclass(eq=False)
class Slot:
    """The part of a workspace that may outlive it.

    Attributes:
        sessions: of all servers but the shared ones, as far as they run.
        listings: digest of what each pooled server listed at its start.
        filling: the thread that writes the task's files.
        filled: whether one ever did.
        uses: episodes that have ended.
        idle_since: in the loop's time.
    """

    specs: tuple[ServerSpec, ...]
    directory: WorkDirectory | None
    sessions: dict[str, McpSession] = field(default_factory=dict)
    listings: dict[str, str] = field(default_factory=dict)
    filling: asyncio.Task[None] | None = None
    filled: bool = False
    uses: int = 0
    idle_since: float = 0.0

    def pooled(self) -> list[ServerSpec]:
        return [spec for spec in self.specs if spec.scope == "pool"]

    def staying(self) -> list[ServerSpec]:
        """Servers that go on running from one episode to the next."""
        return [spec for spec in self.pooled() if spec.reset != "respawn"]

    def clean(self) -> bool:
        """Whether no pooled server is in doubt or worn out. One reset by "respawn" need not run."""
        sessions = [self.sessions.get(spec.name) for spec in self.pooled()]
        worn_out = any(self.uses >= spec.max_uses for spec in self.staying())
        return bool(sessions) and not worn_out and not any(session and session.dirty for session in sessions)

    async def lists_others(self) -> bool:
        """Whether a server that stays lists other tools than at its start, or none in time."""
        for spec in self.staying():
            session = self.sessions[spec.name]
            try:
                await session.relist()
            except ArenaError:
                return True
            if session.listing_hash != self.listings[spec.name]:
                return True
        return False

    async def wipe(self) -> None:
        """Empty the directory, then call the tools that reset what is not on disk.

        The directory stays as it is if all servers in it are reset by a tool, which knows their files.

        Raises:
            EnvError: if either fails.
        """
        by_files = any("WORKDIR" in spec.variables and spec.reset != "tool" for spec in self.specs)
        if self.directory is not None and (self.filled or by_files):
            await asyncio.to_thread(self.directory.empty)
        for spec in self.staying():
            if spec.reset_tool is not None:
                result = await self.sessions[spec.name].call(spec.reset_tool, {})
                if not result.ok:
                    raise EnvError(f"{spec.reset_tool!r} of server {spec.name!r} has not reset it: {result.text}")

    async def fill(self, fill: Fill, limit: float) -> None:
        """Let a thread write the task's files. The thread outlives a cancelled or hasty caller as `filling`.

        Raises:
            EnvError: if that fails, or takes longer than ``limit`` seconds.
        """
        assert self.directory is not None
        self.filled = True
        self.filling = asyncio.create_task(asyncio.to_thread(fill, self.directory.path))
        await asyncio.wait({self.filling}, timeout=limit)
        if not self.filling.done():
            raise EnvError(f"the task's files are not written after {limit:g} s")
        try:
            self.filling.result()
        except ArenaError:
            raise
        except Exception as error:  # boundary: a task set's own code
            words = str(error).replace(f"{self.directory.path}/", "")
            raise EnvError(f"the task's files cannot be written: {type(error).__name__}: {words}") from error


class Workspace:
    """Servers, tools and directory of one episode; from `ServerHub.open` until `ServerHub.put`.

    Attributes:
        root: the real directory; None without one, and on a replayed tape.
        tools: of all servers, in the order of the specs.
        error: why the server of the last failed call died, if an exception tells it.
        in_flight: calls that are not answered yet.
        closed: whether it was given back; every further call answers "server_dead".
    """

    def __init__(self, hub: ServerHub, specs: Sequence[ServerSpec], slot: Slot | None, reel: Reel | None) -> None:
        directory = slot.directory if slot else None
        self.root: Path | None = directory.path if directory else None
        self.tools: list[ToolSpec] = []
        self.error: BaseException | None = None
        self.in_flight = 0
        self.closed = False
        self.slot = slot
        self._hub = hub
        self._specs = {spec.name: spec for spec in specs}
        self._shared: dict[str, McpSession] = {}
        self._leasing = asyncio.Lock()
        self._paths = PathMap(self.root) if self.root else None
        self._cache = ResultCache()
        self._reads: set[tuple[str, str]] = set()
        self._reel = reel
        self._lost: set[str] = set()  # as the tape says

    async def connect(self) -> None:
        """Lease the shared servers, and read what all have listed."""
        for spec in self._specs.values():
            if spec.scope == "shared":
                self._shared[spec.name] = await self._hub.acquire(spec)
        tools: list[ToolSpec] = []
        for spec in self._specs.values():
            session = self._session(spec)
            assert session is not None
            tools += [tool for tool in await session.list_tools() if tool.name != spec.reset_tool]
        self.offer(tools)
        if self._reel is not None:
            self._reel.record_listing(self.tools)

    def offer(self, tools: Sequence[ToolSpec]) -> None:
        """Set the tools; the real directory does not show in their words."""
        out = self._paths.outward if self._paths else lambda value: value
        self.tools = [replace(t, description=out(t.description), parameters=out(t.parameters)) for t in tools]
        for tool in self.tools:
            spec = self._specs[tool.server]
            if tool.name in spec.cache_tools or (spec.trust_annotations and tool.read_only):
                self._reads.add((tool.server, tool.name))

    async def call(
        self,
        server: str,
        tool: str,
        arguments: Mapping[str, Any],
        *,
        timeout: float,  # noqa: ASYNC109
    ) -> ToolResult:
        """Call a tool once; a call that may have written is never repeated.

        Never raises for what the tool or the server does: the result's ``kind`` says it.

        Args:
            server, tool: the canonical names.
            arguments: paths below ``/workspace`` are those of the directory.
            timeout: seconds for everything: waiting in line, a lease, the answer. The spec's ``call_timeout`` if shorter.

        Raises:
            EnvError: if there is no such server, or a replayed tape does not hold the call.
        """
        deadline = asyncio.get_running_loop().time() + timeout
        if (spec := self._specs.get(server)) is None:
            raise EnvError(f"no server of this workspace is called {server!r}")
        if self.closed:
            return _failure("server_dead", spec, tool)
        if (problem := json_problem(arguments)) is not None:
            return ToolResult(kind="invalid_args", text=f"Error: {problem}.", server=server, tool=tool)
        arguments, reads = clean_json(arguments), (server, tool) in self._reads
        mark = self._reel.advance(server, tool, arguments, reads=reads) if self._reel else ""
        if self._reel is not None and self._reel.replays:
            await asyncio.sleep(0)
            result, lost = self._reel.play(mark, server, tool)
            self._lost |= {server} if lost else set()
            return result
        self.in_flight += 1
        try:
            result = await self._mapped(spec, tool, arguments, reads, deadline)
        finally:
            self.in_flight -= 1
        if self._reel is not None:
            self._reel.record(mark, arguments, result, lost=self.lost(server))
        return result

    def lost(self, server: str) -> bool:
        """Whether the state of a server is gone, dead and not shared: the episode cannot go on."""
        if self.slot is None:
            return server in self._lost
        session = self.slot.sessions.get(server)
        return self._specs[server].scope != "shared" and (self.closed or session is None or session.dead is not None)

    def state(self) -> EpisodeState:
        """A view of the directory for a verdict; before `release`, for the next episode empties it."""
        return EpisodeState(self.root, self._paths.outward) if self._paths else EpisodeState()

    def release(self) -> None:
        """Give back what is shared, and refuse further calls."""
        self.closed = True
        while self._shared:
            self._hub.release(self._shared.popitem()[1])

    async def _mapped(
        self, spec: ServerSpec, tool: str, arguments: Mapping[str, Any], reads: bool, deadline: float
    ) -> ToolResult:
        inside = self._paths.inward(arguments) if self._paths else arguments
        try:
            result = await self._cached(spec, tool, inside, reads, deadline)
            if self._paths is None:
                return result
            text, structured = self._paths.outward(result.text), self._paths.outward(result.structured)
            return replace(result, text=text, structured=structured)
        except RecursionError:  # nested too deep
            return _failure("protocol", spec, tool)

    async def _cached(
        self, spec: ServerSpec, tool: str, arguments: Mapping[str, Any], reads: bool, deadline: float
    ) -> ToolResult:
        session = await self._find(spec, tool, deadline)
        if isinstance(session, ToolResult):
            return session
        shared = self._hub.cache_of(session) if spec.scope == "shared" else None
        if reads:
            key = result_key(spec.name, spec.fingerprint, tool, arguments)
            send = lambda: self._send(session, tool, arguments, deadline)  # noqa: E731
            return await (shared or self._cache).read(key, send, deadline)
        caches = [self._cache, shared] if shared else [self._cache]
        for cache in caches:
            cache.begin_write()
        certain = False
        try:
            result = await self._send(session, tool, arguments, deadline)
            certain = result.kind not in INFRASTRUCTURE_KINDS
            return result
        finally:
            for cache in caches:
                cache.end_write(certain=certain)

    async def _find(self, spec: ServerSpec, tool: str, deadline: float) -> McpSession | ToolResult:
        """The session to call, or why there is none."""
        try:
            async with asyncio.timeout_at(deadline):
                session = await self._session_to_call(spec)
        except TimeoutError:
            return _failure("timeout", spec, tool)
        except ArenaError as error:
            self.error = error
            return _failure("server_dead", spec, tool)
        return session or _failure("server_dead", spec, tool)

    async def _send(self, session: McpSession, tool: str, arguments: Mapping[str, Any], deadline: float) -> ToolResult:
        left = min(session.spec.call_timeout, deadline - asyncio.get_running_loop().time())
        if left <= 0:
            return _failure("timeout", session.spec, tool)
        result = await session.call(tool, arguments, timeout=left)
        if result.kind in INFRASTRUCTURE_KINDS:
            self.error = session.dead
        return result

    def _session(self, spec: ServerSpec) -> McpSession | None:
        sessions = self._shared if spec.scope == "shared" else self.slot.sessions if self.slot else {}
        return sessions.get(spec.name)

    async def _session_to_call(self, spec: ServerSpec) -> McpSession | None:
        """The session; a shared one that died since is leased again, once for all calls that wait."""
        session = self._session(spec)
        if spec.scope != "shared" or (session is not None and session.dead is None):
            return session
        async with self._leasing:
            session = self._session(spec)
            if session is not None and session.dead is not None:
                self._hub.release(self._shared.pop(spec.name))
                session = None
            if session is None:
                session = await self._hub.acquire(spec)
                if self.closed:
                    self._hub.release(session)
                    return None
                self._shared[spec.name] = session
        return session


def _failure(kind: ToolResultKind, spec: ServerSpec, tool: str) -> ToolResult:
    return ToolResult(kind=kind, text=_TEXT[kind], server=spec.name, tool=tool)
