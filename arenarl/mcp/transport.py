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
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TypeAlias

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage
from mcp.types import jsonrpc_message_adapter

from arenarl.mcp.config import ServerSpec
from arenarl.mcp.wire import Inbox

_log = logging.getLogger(__name__)
_SUPERVISOR = Path(__file__).with_name("supervise.py")
_CHUNK = 1 << 16
_STDERR_BYTES = 8192
_KILL_SECONDS = 5.0

Streams: TypeAlias = tuple[
    MemoryObjectReceiveStream[SessionMessage | Exception], MemoryObjectSendStream[SessionMessage]
]


class StdioTransport(AbstractAsyncContextManager[Streams]):
    """Starts the server on entry and ends it on exit; pass it to `mcp.Client`. Enter and leave in one task, once.

    Attributes:
        ended: the server closed its side, by exit or otherwise, before we did.
        exit_code: of the server, negative for a signal; known after exit.
        spawn_error: why the command would not run; known after exit.

    Raises:
        OSError: on entry, if no process can be made or ``cwd`` is missing.
    """

    def __init__(self, spec: ServerSpec, on_end: Callable[[], None] = lambda: None) -> None:
        self.spec = spec
        self.ended = False
        self.exit_code: int | None = None
        self.spawn_error: str | None = None
        self._on_end = on_end
        self._inbox = Inbox(spec.max_message_bytes)
        self._stderr = b""
        self._stopping = False
        self._context = self._run()

    async def __aenter__(self) -> Streams:
        return await self._context.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._context.__aexit__(kind, error, trace)

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
        process, control = self._spawn()
        # No await between the process and the block that ends it: a cancellation cannot fall into the gap.
        to_client, read = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        write, to_server = anyio.create_memory_object_stream[SessionMessage](math.inf)
        writing, stderr_done = anyio.CancelScope(), anyio.Event()
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._write_stdin, process, to_server, writing)
                tasks.start_soon(self._read_stdout, process, to_client)
                tasks.start_soon(self._read_stderr, process, stderr_done)
                try:
                    yield read, write
                finally:
                    self._stopping = True
                    read.close()
                    writing.cancel()
                    with anyio.CancelScope(shield=True):
                        await self._stop(process, control)
                        with anyio.move_on_after(0.5):
                            await stderr_done.wait()
                    tasks.cancel_scope.cancel()
        finally:
            for stream in (to_client, read, write, to_server):
                stream.close()
            _release(process, control)

    def _spawn(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        spec, (ours, theirs) = self.spec, socket.socketpair()
        assert spec.command is not None
        number = theirs.fileno()
        watch = [sys.executable, "-I", "-S", str(_SUPERVISOR), str(number), str(os.getpid()), str(spec.close_grace)]
        try:
            process = subprocess.Popen(
                [*watch, spec.command, *spec.args],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
                env={**get_default_environment(), **spec.env}, cwd=spec.cwd, pass_fds=(number,), start_new_session=True,
            )  # fmt: skip
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        for pipe in (process.stdin, process.stdout, process.stderr):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
        ours.setblocking(False)
        return process, ours

    async def _read_stdout(
        self, process: subprocess.Popen[bytes], to_client: MemoryObjectSendStream[SessionMessage | Exception]
    ) -> None:
        assert process.stdout is not None
        try:
            async for chunk in _chunks(process.stdout.fileno()):
                for data in self._inbox.feed(chunk):
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

    async def _read_stderr(self, process: subprocess.Popen[bytes], done: anyio.Event) -> None:
        assert process.stderr is not None
        try:
            async for chunk in _chunks(process.stderr.fileno()):
                self._stderr = (self._stderr + chunk)[-_STDERR_BYTES:]
        finally:
            done.set()

    async def _write_stdin(
        self,
        process: subprocess.Popen[bytes],
        to_server: MemoryObjectReceiveStream[SessionMessage],
        scope: anyio.CancelScope,
    ) -> None:
        """Send messages until the scope is cancelled, then close the server's stdin."""
        assert process.stdin is not None
        try:
            with scope:
                async for item in to_server:
                    data = item.message.model_dump(by_alias=True, exclude_unset=True)
                    self._inbox.sent(data)
                    line = json.dumps(data, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
                    await _write_all(process.stdin.fileno(), line)
        except OSError:  # it closed its stdin; nothing more can be asked of it
            self._end()
        finally:
            to_server.close()
            process.stdin.close()

    def _end(self) -> None:
        if not self._stopping:
            self.ended = True
            self._on_end()

    async def _stop(self, process: subprocess.Popen[bytes], control: socket.socket) -> None:
        """End of input, grace, SIGTERM to all, grace, SIGKILL to all; the supervisor does the last two."""
        grace = self.spec.close_grace
        if await self._gone(process, control, grace):
            return
        with suppress(OSError):
            control.shutdown(socket.SHUT_WR)
        if not await self._gone(process, control, grace + _KILL_SECONDS):
            _log.error("server %s (pid %d): its supervisor does not end and is killed", self.spec.name, process.pid)
            process.kill()
            await self._gone(process, control, _KILL_SECONDS)

    async def _gone(self, process: subprocess.Popen[bytes], control: socket.socket, seconds: float) -> bool:
        """Wait for the supervisor's last words and its end, at most so long."""
        with anyio.move_on_after(seconds):
            async for chunk in _chunks(control.fileno()):
                for word, _, rest in (line.partition(" ") for line in chunk.decode("utf-8", "replace").splitlines()):
                    if word == "exit":
                        self.exit_code = int(rest)
                    elif word == "spawn":
                        self.spawn_error = rest
            while process.poll() is None:  # noqa: ASYNC110  (its socket is closed: it is about to end)
                await anyio.sleep(0.002)
        return process.returncode is not None


def _release(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    """Give back every handle without waiting. Shutting the socket tells the supervisor, whatever else went wrong."""
    with suppress(OSError):
        control.shutdown(socket.SHUT_RDWR)
    control.close()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
    process.poll()


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
