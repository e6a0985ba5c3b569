"""A lenient stdio transport for the MCP SDK: one server process, its pipes, and an end that always comes.

The SDK's own transport dies on one byte that is not UTF-8, hangs on a lone surrogate, is quadratic on long lines and
leaves grandchildren behind. This one reads with `arenarl.mcp.wire` and runs the server under `arenarl.mcp.supervise`.
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from types import TracebackType
from typing import TypeAlias

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage
from mcp.types import jsonrpc_message_adapter

from arenarl.errors import McpServerError
from arenarl.mcp.config import Launch, ServerSpec
from arenarl.mcp.nursery import Server, start_server
from arenarl.mcp.wire import Inbox, is_demand

_log = logging.getLogger(__name__)
_CHUNK = 1 << 16
_STDERR_BYTES = 8192
_KILL_SECONDS = 5.0
MAX_REPLIES = 64  # that wait to be read by the server; what it asks beyond them is not answered

Streams: TypeAlias = tuple[
    MemoryObjectReceiveStream[SessionMessage | Exception], MemoryObjectSendStream[SessionMessage]
]


class OneLifeTransport(AbstractAsyncContextManager[Streams]):
    """A transport whose whole life is one generator: what is before its yield is the entry, what is after it the exit."""

    def __init__(self, life: AbstractAsyncContextManager[Streams]) -> None:
        self._life = life

    async def __aenter__(self) -> Streams:
        return await self._life.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._life.__aexit__(kind, error, trace)


class StdioTransport(OneLifeTransport):
    """Starts the server on entry and ends it on exit; pass it to `mcp.Client`. Enter and leave in one task, once.

    Attributes:
        ended: the server closed its side, by exit or otherwise, before we did.
        exit_code: of the server, negative for a signal; known after exit.
        spawn_error: why the command would not run; known after exit.

    Raises:
        OSError: on entry, if no process can be made or ``cwd`` is missing.
        McpServerError: on exit, if the server ended because the process above it was killed.
    """

    def __init__(self, spec: ServerSpec, launch: Launch, on_end: Callable[[], None] = lambda: None) -> None:
        self.spec = spec
        self._launch = launch
        self.ended = False
        self.exit_code: int | None = None
        self.spawn_error: str | None = None
        self._on_end = on_end
        self._inbox = Inbox(spec.max_message_bytes)
        self._stderr = b""
        self._lost: str | None = None
        self._stopping = False
        self._server: Server | None = None
        super().__init__(self._run())

    @property
    def pid(self) -> int | None:
        """Of the server's process, while it starts and runs."""
        return self._server.pid if self._server and not self._stopping else None

    @property
    def stderr_tail(self) -> str:
        """The last 8 kB of the server's stderr."""
        return self._stderr.decode("utf-8", "replace")

    @property
    def stdout_log(self) -> list[str]:
        """The last lines on stdout that were no messages."""
        return list(self._inbox.log)

    @asynccontextmanager
    async def _run(self) -> AsyncIterator[Streams]:
        launch = self._launch
        assert launch.command is not None
        environment = {**get_default_environment(), **launch.env}
        server = await start_server([launch.command, *launch.args], environment, launch.cwd, self.spec.close_grace)
        self._server = server
        # No await between the process and the block that ends it: a cancellation cannot fall into the gap.
        to_client, read = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        write, to_server = anyio.create_memory_object_stream[SessionMessage](math.inf)
        writing, stderr_done = anyio.CancelScope(), anyio.Event()
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._write_stdin, server, to_server, writing)
                tasks.start_soon(self._read_stdout, server, to_client, to_server)
                tasks.start_soon(self._read_stderr, server, stderr_done)
                try:
                    yield read, write
                finally:
                    self._stopping = True
                    read.close()
                    writing.cancel()
                    with anyio.CancelScope(shield=True):
                        await self._stop(server)
                        with anyio.move_on_after(0.5):
                            await stderr_done.wait()
                    tasks.cancel_scope.cancel()
        finally:
            for stream in (to_client, read, write, to_server):
                stream.close()
            with anyio.CancelScope(shield=True):
                await server.close()
            if self.ended and self._lost:
                raise McpServerError(f"MCP server {self.spec.name!r} was ended: {self._lost}")

    async def _read_stdout(
        self,
        server: Server,
        to_client: MemoryObjectSendStream[SessionMessage | Exception],
        to_server: MemoryObjectReceiveStream[SessionMessage],
    ) -> None:
        try:
            async for chunk in _chunks(server.stdout.fileno()):
                for data in self._inbox.feed(chunk):
                    if is_demand(data) and to_server.statistics().current_buffer_used >= MAX_REPLIES:
                        continue
                    try:
                        message = SessionMessage(jsonrpc_message_adapter.validate_python(data, by_name=False))
                    except ValueError:
                        _log.debug("server %s: not a JSON-RPC message: %.200s", self.spec.name, data)
                        continue
                    # Without a client we go on reading: a server that cannot write cannot end.
                    with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
                        await to_client.send(message)
        finally:
            to_client.close()
            self._end()

    async def _read_stderr(self, server: Server, done: anyio.Event) -> None:
        try:
            async for chunk in _chunks(server.stderr.fileno()):
                self._stderr = (self._stderr + chunk)[-_STDERR_BYTES:]
        finally:
            done.set()

    async def _write_stdin(
        self,
        server: Server,
        to_server: MemoryObjectReceiveStream[SessionMessage],
        scope: anyio.CancelScope,
    ) -> None:
        """Send messages until the client closes its stream or the scope is cancelled, then close the server's stdin."""
        try:
            with scope:
                async for item in to_server:
                    data = item.message.model_dump(by_alias=True, exclude_unset=True)
                    self._inbox.sent(data)
                    line = json.dumps(data, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
                    await _write_all(server.stdin.fileno(), line)
        except OSError:  # it closed its stdin; nothing more can be asked of it
            self._end()
        finally:
            self._stopping = True  # without input a server ends, and that is no fault of its own
            to_server.close()
            server.stdin.close()

    def _end(self) -> None:
        if not self._stopping:
            self.ended = True
            self._on_end()

    async def _stop(self, server: Server) -> None:
        """End of input, grace, SIGTERM to all, grace, SIGKILL to all; the supervisor does the last two."""
        grace = self.spec.close_grace
        if await self._gone(server, grace):
            return
        with suppress(OSError):
            server.control.shutdown(socket.SHUT_WR)
        if not await self._gone(server, grace + _KILL_SECONDS):
            _log.error("server %s: its supervisor does not end and is killed", self.spec.name)
            with anyio.move_on_after(_KILL_SECONDS):
                await server.kill()
            await self._gone(server, _KILL_SECONDS)

    async def _gone(self, server: Server, seconds: float) -> bool:
        """Wait at most so long for the supervisor's last words and its end. False if time ran out."""
        with anyio.move_on_after(seconds) as limit:
            async for chunk in _chunks(server.control.fileno()):
                for word, _, rest in (line.partition(" ") for line in chunk.decode("utf-8", "replace").splitlines()):
                    if word == "exit":
                        self.exit_code = int(rest)
                    elif word == "spawn":
                        self.spawn_error = rest
                    elif word == "lost":
                        self._lost = self._lost or rest
            if self.exit_code is None and self._lost is None:
                self._lost = "its supervisor could not start or was killed"
        return not limit.cancelled_caught


async def _chunks(fd: int) -> AsyncIterator[bytes]:
    while True:
        await anyio.wait_readable(fd)
        try:
            chunk = os.read(fd, _CHUNK)
        except BlockingIOError:
            continue
        except OSError:  # reset by a peer that died
            return
        if not chunk:
            return
        yield chunk


async def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            await anyio.wait_writable(fd)
