"""One MCP session: one task owns the client for its whole life, anyone may call, nothing hangs and nothing leaks."""

from __future__ import annotations

import asyncio
import logging
import shlex
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from arenarl.errors import ArenaError, McpServerError
from arenarl.mcp.config import ServerSpec
from arenarl.mcp.schema import ToolSpec, clean_json, clean_text, json_problem, result_text
from arenarl.mcp.wire import TOO_LARGE, UNREADABLE
from arenarl.types import ToolResult, ToolResultKind

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult

    from arenarl.mcp.transport import StdioTransport

_log = logging.getLogger(__name__)
_TEARDOWN_SECONDS = 15.0  # above all waits of the transport's own ending
_MAX_PAGES = 100
_SUSPECT_TIMEOUTS = 2

_CONNECTION_CLOSED, _METHOD_NOT_FOUND, _INVALID_PARAMS = -32000, -32601, -32602  # the SDK's, JSON-RPC's
_OURS: dict[int, ToolResultKind] = {_CONNECTION_CLOSED: "server_dead", TOO_LARGE: "too_large", UNREADABLE: "protocol"}
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

    Attributes:
        dead: why the session ended by itself; None while it lives and after an orderly `close`.
        answered: calls that the server has answered.
    """

    def __init__(self, spec: ServerSpec) -> None:
        self.spec = spec
        self.dead: BaseException | None = None
        self.answered = 0
        self._timeouts = 0
        self._client: Client | None = None
        self._transport: StdioTransport | None = None
        self._tools: tuple[ToolSpec, ...] = ()
        self._owner: asyncio.Task[None] | None = None
        self._calls: set[asyncio.Task[Any]] = set()
        self._settled = asyncio.Event()  # started, or never will be
        self._end = asyncio.Event()
        self._closing = False

    @property
    def stderr_tail(self) -> str:
        """The last 8 kB that the server wrote to stderr; empty for one in process."""
        return self._transport.stderr_tail if self._transport else ""

    @property
    def suspect(self) -> bool:
        """Whether the server seems to hang: its last calls all ran into their deadline."""
        return self._timeouts >= _SUSPECT_TIMEOUTS

    async def start(self) -> Self:
        """Start the server, shake hands and list its tools. Returns the session.

        Raises:
            McpServerError: names the server, its command, exit code and last words; nothing is left running.
            ConfigError: if the factory of an in-process server cannot be found.
        """
        if self._owner is not None or self._closing:
            raise McpServerError(f"{self._who()} was started or closed before; make a new session")
        self._owner = asyncio.create_task(self._own(), name=f"mcp-session-{self.spec.name}")
        self._owner.add_done_callback(lambda _: self._settled.set())
        try:
            await self._settled.wait()
        except asyncio.CancelledError:
            self._owner.cancel()
            raise
        if self._client is None:
            await self.close()
            raise self.dead or McpServerError(f"{self._who()} was closed while it started")
        return self

    async def list_tools(self) -> list[ToolSpec]:
        """The server's tools as it listed them at the start; a later change of the listing does not show."""
        return list(self._tools)

    async def call(
        self,
        tool: str,
        arguments: Mapping[str, Any],
        *,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> ToolResult:
        """Call a tool once; never again, for the first call may have written.

        Never raises for what the tool or the server does: the result's ``kind`` says it.

        Args:
            tool: the server's own name of the tool.
            timeout: seconds; the spec's ``call_timeout`` if None.
        """
        began = time.monotonic()
        limit = self.spec.call_timeout if timeout is None else timeout
        kind, text, structured = await self._call(tool, arguments, limit)
        self._timeouts = self._timeouts + 1 if kind == "timeout" else 0
        took = time.monotonic() - began
        return ToolResult(kind=kind, text=text, server=self.spec.name, tool=tool, structured=structured, seconds=took)

    async def _call(self, tool: str, arguments: Mapping[str, Any], limit: float) -> tuple[ToolResultKind, str, Any]:
        if self._client is None or self._owner is None or self.dead is not None:
            await asyncio.sleep(0)  # a caller that loops stays cancellable
            return "server_dead", _TEXT["server_dead"], None
        if (problem := json_problem(arguments)) is not None:
            return "invalid_args", f"Error: {problem}.", None
        request = asyncio.create_task(self._client.session.call_tool(tool, clean_json(arguments)))
        self._calls.add(request)
        request.add_done_callback(self._forget)
        try:
            await asyncio.wait({request, self._owner}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not request.done():
                request.cancel()  # the SDK then tells the server that nobody waits any more
        if not request.done():
            kind: ToolResultKind = "server_dead" if self._owner.done() else "timeout"
            return kind, _TEXT[kind], None
        if request.cancelled():
            return "server_dead", _TEXT["server_dead"], None
        if (error := request.exception()) is not None:
            return self._failure(tool, error)
        try:
            return self._success(request.result())
        except RecursionError as too_deep:
            return self._failure(tool, too_deep)

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
        if not self._settled.is_set():
            self._owner.cancel()
        limit = 2 * self.spec.close_grace + _TEARDOWN_SECONDS
        _, running = await asyncio.wait({self._owner}, timeout=limit)
        if running:
            self._owner.cancel()
            await asyncio.wait({self._owner}, timeout=_TEARDOWN_SECONDS)
        if self._calls:
            for request in self._calls:
                request.cancel()
            await asyncio.wait(self._calls, timeout=_TEARDOWN_SECONDS)

    async def _own(self) -> None:
        """Enter, hold and leave the client: the only task that touches it."""
        try:
            target = self._make_client()  # before the timer: the first import of the SDK may take long
            # One timer for both ends. An anyio scope would have to be left before the client's, so it cannot be one.
            async with asyncio.timeout(self.spec.start_timeout) as deadline, target as client:
                self._tools = await self._list(client)
                deadline.reschedule(None)
                self._client = client
                self._settled.set()
                try:
                    await self._end.wait()
                finally:
                    self._client = None
                    deadline.reschedule(asyncio.get_running_loop().time() + _TEARDOWN_SECONDS)
        except asyncio.CancelledError:
            self.dead = self.dead or McpServerError(f"{self._who()}: its session was cancelled")
            raise
        except BaseException as error:
            self.dead = self._explain(error)
        else:
            if self.dead is not None:
                self.dead = self._explain(None)

    def _make_client(self) -> Client:
        from mcp import Client

        if self.spec.transport == "inproc":
            return Client(self.spec.make_server(), mode="legacy", cache=None)
        from arenarl.mcp.transport import StdioTransport

        self._transport = StdioTransport(self.spec, on_end=self._lost)
        return Client(self._transport, mode="legacy", cache=None)

    def _lost(self) -> None:
        """The server closed its side. Callers learn it now, the exit code when the owner has reaped it."""
        self.dead = self.dead or McpServerError(f"{self._who()} closed the connection")
        self._end.set()

    async def _list(self, client: Client) -> tuple[ToolSpec, ...]:
        from mcp import MCPError

        found: dict[str, ToolSpec] = {}
        cursor, seen = None, set()
        for _ in range(_MAX_PAGES):
            try:
                page = await client.list_tools(cursor=cursor)
            except MCPError as error:
                if error.code == _METHOD_NOT_FOUND:  # a server without tools
                    break
                raise
            for tool in page.tools:
                words, schema = tool.description or "", tool.input_schema
                spec = ToolSpec(name=tool.name, description=words, parameters=schema, server=self.spec.name)
                found.setdefault(tool.name, spec)
            cursor = page.next_cursor
            if cursor is None or cursor in seen:
                break
            seen.add(cursor)
        return tuple(found.values())

    def _who(self) -> str:
        return f"MCP server {self.spec.name!r}"

    def _explain(self, error: BaseException | None) -> BaseException:
        """One exception in one line: who, what happened, and the server's last words."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, ArenaError):
            return error
        transport, spec = self._transport, self.spec
        command = shlex.join([spec.command, *spec.args])[:200] if spec.command else repr(spec.factory)
        if transport is not None and transport.spawn_error:
            what = f"cannot run its command ({transport.spawn_error}); check command, PATH and cwd"
        elif transport is not None and transport.ended and transport.exit_code is not None:
            code = transport.exit_code
            what = f"exited with code {code}" if code >= 0 else f"was killed by signal {-code}"
        elif isinstance(error, TimeoutError):
            limit = f"start within {spec.start_timeout:g} s (start_timeout)"
            what = f"did not {'end in time' if self._settled.is_set() else limit}"
        else:
            what = f"failed: {type(error).__name__}: {error}" if error else "closed the connection"
        stream, lines = "stderr", self.stderr_tail.splitlines()
        if transport is not None and not lines:
            stream, lines = "stdout", transport.stdout_log
        words = [line.strip() for line in lines if line.strip()][-5:]
        said = f"; last words on {stream}: {' | '.join(words)[-800:]}" if words else ""
        return McpServerError(f"{self._who()} ({command}) {what}{said}")
