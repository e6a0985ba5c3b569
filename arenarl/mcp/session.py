"""One MCP session: one task owns the client for its whole life, anyone may call, nothing hangs and nothing leaks."""

from __future__ import annotations

import asyncio
import difflib
import hashlib
import json
import logging
import time
from collections.abc import Coroutine, Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Self

from arenarl.errors import ConfigError, McpServerError
from arenarl.jsonl import clean_json
from arenarl.mcp.config import ServerSpec
from arenarl.mcp.explain import explain, secrets_of
from arenarl.mcp.results import clean_text, result_text
from arenarl.mcp.schema import ToolSpec, json_problem
from arenarl.mcp.wire import CONNECTION_CLOSED, REFUSED, TOO_LARGE, UNREADABLE
from arenarl.types import ToolResult, ToolResultKind

if TYPE_CHECKING:
    from mcp import ClientSession
    from mcp.client._transport import Transport
    from mcp.types import CallToolResult, ServerNotification

    from arenarl.mcp.remote import RemoteTransport
    from arenarl.mcp.transport import StdioTransport

_log = logging.getLogger(__name__)
_TEARDOWN_SECONDS = 15.0  # above all waits of the transport's own ending
_SLACK_SECONDS = 5.0
_SUSPECT_TIMEOUTS = 2

_METHOD_NOT_FOUND, _INVALID_PARAMS = -32601, -32602  # JSON-RPC's
_OURS: dict[int, ToolResultKind] = {
    CONNECTION_CLOSED: "server_dead", TOO_LARGE: "too_large", UNREADABLE: "protocol", REFUSED: "protocol"
}  # fmt: skip
_THEIRS: dict[int, ToolResultKind] = {_INVALID_PARAMS: "invalid_args", _METHOD_NOT_FOUND: "unknown_tool"}
_TEXT: dict[ToolResultKind, str] = {
    "timeout": "Error: the tool did not answer in time.",
    "server_dead": "Error: the tool server has stopped.",
    "protocol": "Error: the tool server sent an answer that cannot be read.",
    "too_large": "Error: the answer is too large to be delivered.",
}


class McpSession:
    """A connection to one server. Use it on one event loop: `start`, then `call` from any task, then `close`.

    anyio's cancel scopes must be left in the task that entered them, so the SDK's client is entered, held and left by a
    task of its own (field reports: python-sdk 79, 577). Calls run in tasks of their own, and callers wait for those.
    The client declares no capabilities, and what a server asks of it (sampling, roots) is answered with an error.

    Attributes:
        dead: why the session ended by itself; None while it lives and after an orderly `close`.
        answered: calls that the server has answered.
        era: the protocol generation that was agreed on, "legacy" or "2026-07-28"; "" before the start.
        listing_hash: hex digest of all tools as the server listed them, in any order; "" before the start.
        list_changed: the server has announced another listing since it was last asked for (2026-07-28 servers do not).
    """

    def __init__(self, spec: ServerSpec, variables: Mapping[str, str] | None = None) -> None:
        self.spec = spec
        self.variables = dict(variables or {})
        self.dead: BaseException | None = None
        self.answered = 0
        self.era = ""
        self.listing_hash = ""
        self.list_changed = False
        self._timeouts = 0
        self._abandoned = False
        self._secrets: tuple[str, ...] = ()
        self._client: ClientSession | None = None
        self._transport: StdioTransport | None = None
        self._remote: RemoteTransport | None = None
        self._tools: tuple[ToolSpec, ...] = ()
        self._owner: asyncio.Task[None] | None = None
        self._calls: set[asyncio.Task[Any]] = set()
        self._slots = asyncio.Semaphore(spec.max_calls or 1)
        self._settled = asyncio.Event()  # started, or never will be
        self._end = asyncio.Event()
        self._closing = False
        self._deadline: asyncio.Timeout | None = None
        self._leaving = False

    @property
    def stderr_tail(self) -> str:
        """The last 8 kB that the server wrote to stderr; empty for one that is no process of ours."""
        return self._transport.stderr_tail if self._transport else ""

    @property
    def pid(self) -> int | None:
        """Of the server, if it is a process of ours."""
        return self._transport.pid if self._transport else None

    @property
    def suspect(self) -> bool:
        """Whether the server seems to hang: of its last calls none was answered, and some had all of ``call_timeout``."""
        return self._timeouts >= _SUSPECT_TIMEOUTS

    @property
    def dirty(self) -> bool:
        """Whether the server may still work on a call that was given up or had no readable answer, or is dead: never hand it on."""
        return self._abandoned or self.dead is not None

    async def start(self) -> Self:
        """Start the server, shake hands and list its tools. Returns the session.

        Raises:
            McpServerError: names the server, its command or url, exit code and last words; nothing is left running.
            ConfigError: for a factory that cannot be found, a variable without value, or a name in ``allow`` or ``deny``
                that no tool has.
        """
        if self._owner is not None or self._closing:
            raise McpServerError(f"{self._who()} was started or closed before; make a new session")
        self._owner = asyncio.create_task(self._own(), name=f"mcp-session-{self.spec.name}")
        self._owner.add_done_callback(lambda _: self._settled.set())
        try:
            await self._settled.wait()
        except asyncio.CancelledError:
            self._give_up_start()
            raise
        if self._client is None:
            await self.close()
            raise self.dead or McpServerError(f"{self._who()} was closed while it started")
        return self

    async def list_tools(self) -> list[ToolSpec]:
        """The tools on offer, after ``allow`` and ``deny``, as listed at the start or by the last `relist`."""
        return list(self._tools)

    async def relist(self) -> list[ToolSpec]:
        """Ask for the listing anew, within ``call_timeout``, and keep it from now on. Returns the tools on offer.

        Raises:
            McpServerError: if the server is gone or does not answer.
            ConfigError: as `start` does.
        """
        if self._client is None or self.dead is not None:
            raise McpServerError(f"{self._who()} has stopped: {self.dead or 'the session is not open'}")
        request = await self._perform(self._list(self._client), self.spec.call_timeout)
        if not request.done() or request.cancelled():
            raise McpServerError(f"{self._who()} did not list its tools within {self.spec.call_timeout:g} s")
        if (error := request.exception()) is not None:
            raise self._explain(error)
        return list(self._tools)

    async def call(
        self,
        tool: str,
        arguments: Mapping[str, Any],
        *,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> ToolResult:
        """Call a tool once; never again, for the first call may have written.

        Never raises for what the tool or the server does: the result's ``kind`` says it. Of more than ``max_calls`` calls
        at once the last wait for the first, in order.

        Args:
            tool: the server's own name of the tool.
            timeout: seconds, the waiting included; the spec's ``call_timeout`` if None.
        """
        began = time.monotonic()
        limit = self.spec.call_timeout if timeout is None else timeout
        kind, text, structured = await self._call(tool, arguments, limit)
        if kind != "timeout":
            self._timeouts = 0
        if kind in ("protocol", "too_large"):  # what looked like an answer may have been none
            self._abandoned = True
        took = time.monotonic() - began
        return ToolResult(kind=kind, text=text, server=self.spec.name, tool=tool, structured=structured, seconds=took)

    async def _call(self, tool: str, arguments: Mapping[str, Any], limit: float) -> tuple[ToolResultKind, str, Any]:
        if (problem := json_problem(arguments)) is not None:
            return "invalid_args", f"Error: {problem}.", None
        if self._slots.locked():
            began = time.monotonic()
            try:
                async with asyncio.timeout(limit):
                    await self._slots.acquire()
            except TimeoutError:
                return "timeout", _TEXT["timeout"], None
            limit -= time.monotonic() - began
        else:
            await self._slots.acquire()
        try:
            if self._client is None or self._owner is None or self.dead is not None:
                await asyncio.sleep(0)  # a caller that loops stays cancellable
                return "server_dead", _TEXT["server_dead"], None
            request = await self._perform(self._client.call_tool(tool, clean_json(arguments)), limit)
        finally:
            self._slots.release()
        if not request.done():
            kind: ToolResultKind = "server_dead" if self._owner.done() else "timeout"
            # A server is not to be blamed for a short limit, nor for time spent in the line.
            self._timeouts += kind == "timeout" and limit >= self.spec.call_timeout
            return kind, _TEXT[kind], None
        if request.cancelled():
            return "server_dead", _TEXT["server_dead"], None
        if (error := request.exception()) is not None:
            return self._failure(tool, error)
        try:
            return self._success(request.result())
        except (RecursionError, ValueError) as odd:
            return self._failure(tool, odd)

    async def _perform(self, work: Coroutine[Any, Any, Any], limit: float) -> asyncio.Task[Any]:
        """Do the work in a task of its own, and wait at most so long. A task that is returned undone has been given up."""
        assert self._owner is not None
        request = asyncio.create_task(work)
        self._calls.add(request)
        request.add_done_callback(self._forget)
        try:
            await asyncio.wait({request, self._owner}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not request.done():
                self._abandoned = True
                request.cancel()  # the SDK then tells the server that nobody waits any more
        return request

    def _success(self, result: CallToolResult) -> tuple[ToolResultKind, str, Any]:
        self.answered += 1
        blocks = [block.model_dump(mode="json", by_alias=True) for block in result.content]
        text, structured = result_text(blocks, result.structured_content), result.structured_content
        if result.is_error:
            return "tool_error", text if text.startswith("Error") else f"Error: {text}", structured
        return "ok", text, structured

    def _failure(self, tool: str, error: BaseException) -> tuple[ToolResultKind, str, Any]:
        from mcp import MCPError

        if not isinstance(error, MCPError):
            _log.warning("%s: answer of %r cannot be read: %s", self._who(), tool, error)
            return "protocol", _TEXT["protocol"], None
        if (kind := _OURS.get(error.code)) is not None:
            if kind == "protocol":
                _log.warning("%s: call of %r: %s", self._who(), tool, error.message)
            return kind, _TEXT[kind], None
        self.answered += 1
        return _THEIRS.get(error.code, "tool_error"), clean_text(f"Error: {error.message}"), None

    def _forget(self, request: asyncio.Task[Any]) -> None:
        self._calls.discard(request)
        if not request.cancelled():
            request.exception()  # seen, even if its caller has gone

    async def close(self) -> None:
        """End the session and the server. Bounded, idempotent, from any task; a cancelled close goes on by itself."""
        self._closing = True
        self._end.set()
        if self._owner is None:
            return
        self._give_up_start()
        _, running = await asyncio.wait({self._owner}, timeout=self._ending_seconds + _SLACK_SECONDS)
        if running:
            self._owner.cancel()
            await asyncio.wait({self._owner}, timeout=_TEARDOWN_SECONDS)
        if self._calls:
            for request in self._calls:
                request.cancel()
            await asyncio.wait(self._calls, timeout=_TEARDOWN_SECONDS)

    @property
    def _ending_seconds(self) -> float:
        return 2 * self.spec.close_grace + _TEARDOWN_SECONDS

    def _give_up_start(self) -> None:
        """Cancel a start that is under way. Only once: the next cancellation would break into the ending of the process."""
        if self._owner is None or self._settled.is_set() or self._owner.done():
            return
        if not self._leaving and not self._owner.cancelling():  # the latter: the start's own timer has gone off
            self._owner.cancel()
            self._leave()

    def _leave(self) -> None:
        """From now on the owner has the time of an ending, however little was left of its start."""
        self._leaving = True
        if self._deadline is not None and not self._deadline.expired():
            self._deadline.reschedule(asyncio.get_running_loop().time() + self._ending_seconds)

    async def _own(self) -> None:
        """Enter, hold and leave the client: the only task that touches it."""
        try:
            from arenarl.mcp.handshake import LenientSession, shake_hands

            target = self._make_target()  # before the timer: the first import of the SDK may take long
            # One timer for both ends. An anyio scope would have to be left before the client's, so it cannot be one.
            async with (
                asyncio.timeout(self.spec.start_timeout) as self._deadline,
                target as (read, write),
                LenientSession(read, write, message_handler=self._told) as client,
            ):
                try:
                    self.era = await shake_hands(client, self.spec)
                    await self._list(client)
                    self._deadline.reschedule(None)
                    self._client = client
                    self._settled.set()
                    await self._end.wait()
                finally:
                    self._client = None
                    self._leave()
        except asyncio.CancelledError:
            self.dead = self.dead or McpServerError(f"{self._who()}: its session was cancelled")
            raise
        except BaseException as error:
            self.dead = self._explain(error)
        else:
            if self.dead is not None:
                self.dead = self._explain(None)

    def _make_target(self) -> Transport:
        if self.spec.transport == "inproc":
            from arenarl.mcp.handshake import in_process

            return in_process(self.spec)
        launch = self.spec.launch(self.variables)
        self._secrets = secrets_of(self.spec, launch, self.variables)
        if self.spec.transport == "stdio":
            from arenarl.mcp.transport import StdioTransport

            self._transport = StdioTransport(self.spec, launch, on_end=self._lost)
            return self._transport
        from arenarl.mcp.remote import RemoteTransport

        self._remote = RemoteTransport(self.spec, launch, on_end=self._lost)
        return self._remote

    def _lost(self) -> None:
        """The server closed its side. Callers learn it now, the exit code when the owner has reaped it."""
        self.dead = self.dead or McpServerError(f"{self._who()} closed the connection")
        self._end.set()

    async def _told(self, message: ServerNotification | Exception) -> None:
        """What the server says without being asked."""
        if getattr(message, "method", None) == "notifications/tools/list_changed":
            self.list_changed = True
            if self._client is not None:
                _note_change(self._who())

    async def _list(self, client: ClientSession) -> None:
        from arenarl.mcp.handshake import list_tools

        self.list_changed = False  # what is announced from here on may not be in the answer
        found = await list_tools(client, self.spec.name)
        self.listing_hash = _digest(found.values())
        self._tools = self._offered(found)

    def _offered(self, found: Mapping[str, ToolSpec]) -> tuple[ToolSpec, ...]:
        spec = self.spec
        for key, names in (("allow", spec.allow or ()), ("deny", spec.deny)):
            for name in names:
                if name not in found:
                    near = difflib.get_close_matches(name, found, 3, 0.5) or sorted(found)[:10]
                    has = f"did you mean {', '.join(near)}?" if near else "it has no tools"
                    raise ConfigError(f"server {spec.name!r}: {key} names {name!r}, which is none of its tools; {has}")
        allowed = set(found if spec.allow is None else spec.allow) - set(spec.deny)
        return tuple(tool for name, tool in found.items() if name in allowed)

    def _who(self) -> str:
        return f"MCP server {self.spec.name!r}"

    def _explain(self, error: BaseException | None) -> BaseException:
        return explain(
            self.spec, error, started=self._settled.is_set(), secrets=self._secrets, transport=self._transport,
            remote=self._remote,
        )  # fmt: skip


def _digest(tools: Iterable[ToolSpec]) -> str:
    fields = ("name", "description", "parameters", "read_only", "idempotent")
    listed = sorted(json.dumps({key: getattr(tool, key) for key in fields}, sort_keys=True) for tool in tools)
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()


@lru_cache(maxsize=256)  # once per process, not once per episode
def _note_change(who: str) -> None:
    _log.warning("%s announced another list of tools; its sessions keep the one they started with", who)
