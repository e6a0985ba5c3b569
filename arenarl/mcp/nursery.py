"""The client's side of `arenarl.mcp.supervise`: one nursery per process, for all its threads and event loops.

It starts with the first server and ends with the last one: when `Server.close` or `Nursery.release` of the last user
returns, no process is left. Whoever starts many servers one after another holds it in between (`hold`).
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import marshal
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

_SCRIPT = Path(__file__).with_name("supervise.py")
_TICK = 0.002
_END_SECONDS = 15.0
_FULL = (errno.EAGAIN, errno.ETOOMANYREFS, errno.ENOBUFS)  # of a socket whose reader has much to do

_lock = threading.Lock()
_current: Nursery | None = None
_keys = itertools.count(1)


class Nursery:
    """The process below which the servers run; get it from `hold`."""

    def __init__(self) -> None:
        self.users = 0
        self.broken = False
        self._owner = os.getpid()
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._requests.setblocking(False)
        with theirs:  # after a failure the collector closes the other end
            number = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_SCRIPT), str(number), str(self._owner)],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, cwd="/", pass_fds=(number,), start_new_session=True,
            )  # fmt: skip

    @property
    def alive(self) -> bool:
        return not self.broken and self._process.poll() is None

    async def release(self) -> None:
        """Give it back. After the last user it ends, and this waits until it has."""
        global _current
        if os.getpid() != self._owner:  # a fork's copy
            return
        with _lock:
            self.users -= 1
            if self.users > 0:
                return
            if _current is self:
                _current = None
            self.drop()
        for _ in range(2):
            for _ in range(int(_END_SECONDS / _TICK)):
                if self._process.poll() is not None:
                    return
                await asyncio.sleep(_TICK)
            self._process.kill()

    def drop(self) -> None:
        """Close our end of the socket. In a forked copy that is all; in the process that made it, it is told to end."""
        with suppress(OSError):
            if os.getpid() == self._owner:
                self._requests.shutdown(socket.SHUT_RDWR)
        self._requests.close()

    async def send(self, words: str, fds: Sequence[int] = ()) -> None:
        """Send a request as soon as there is room. Raises ConnectionError if the nursery is gone."""
        while True:
            try:
                socket.send_fds(self._requests, [words.encode()], list(fds))
                return
            except OSError as error:
                if error.errno not in _FULL:
                    self.broken = True
                    raise
            await asyncio.sleep(_TICK)


@dataclass
class Server:
    """A started server. The pipes do not block; reading ``control`` to its end means that no process of it is left."""

    key: int
    nursery: Nursery
    stdin: FileIO
    stdout: FileIO
    stderr: FileIO
    control: socket.socket

    @property
    def pid(self) -> int | None:
        """Of the server, once it was told. Read before `control` is read."""
        try:
            words = self.control.recv(64, socket.MSG_PEEK | socket.MSG_DONTWAIT).partition(b"\n")[0].split()
        except OSError:
            return None
        return int(words[1]) if words[:1] == [b"pid"] else None

    async def kill(self) -> None:
        """Kill its supervisor, for one that does not end; the family dies with it."""
        with suppress(OSError):
            await self.nursery.send(f"kill {self.key}")

    async def close(self) -> None:
        """Give every handle back, at once; shutting the socket tells the supervisor, whatever else went wrong."""
        with suppress(OSError):
            self.control.shutdown(socket.SHUT_RDWR)
        for handle in (self.control, self.stdin, self.stdout, self.stderr):
            handle.close()
        await self.nursery.release()


def hold() -> Nursery:
    """The nursery of this process, started if need be, and alive until `Nursery.release`.

    Raises:
        OSError: if no process can be made.
    """
    global _current
    with _lock:
        if _current is None or not _current.alive:
            _current = Nursery()
        _current.users += 1
        return _current


async def start_server(command: Sequence[str], env: Mapping[str, str], cwd: str | None, grace: float) -> Server:
    """Have a server started: its whole environment is ``env``, and ``grace`` seconds lie between SIGTERM and SIGKILL.

    Raises:
        OSError: if ``cwd`` is missing, or no process or pipe can be made. A command that would not run is reported on
            the control socket instead.
    """
    for last in (False, False, True):
        nursery = hold()
        try:
            with ExitStack() as ours, ExitStack() as theirs:
                server, descriptors = _handles(nursery, ours, theirs, command, env, cwd)
                await nursery.send(f"start {server.key} {grace}", descriptors)
                ours.pop_all()
                return server
        except BaseException as error:
            await nursery.release()
            if isinstance(error, OSError) and error.errno == errno.EMFILE:
                what = "too many open files: a server takes 4 of them; raise the limit (ulimit -n)"
                raise OSError(errno.EMFILE, what) from error
            if last or not isinstance(error, ConnectionError):  # else the nursery was killed: try with the next
                raise
    raise AssertionError


def _handles(
    nursery: Nursery,
    ours: ExitStack,
    theirs: ExitStack,
    command: Sequence[str],
    env: Mapping[str, str],
    cwd: str | None,
) -> tuple[Server, tuple[int, ...]]:
    """Our ends, and the descriptors of the supervisor in the order of its request; the stacks close them."""
    control, control_end = socket.socketpair()
    ours.enter_context(control).setblocking(False)
    theirs.enter_context(control_end)
    launch = theirs.enter_context(FileIO(os.memfd_create("launch"), "w"))
    launch.write(marshal.dumps((list(command), dict(env), os.getpriority(os.PRIO_PROCESS, 0))))
    os.lseek(launch.fileno(), 0, os.SEEK_SET)
    folder = os.open(cwd or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    theirs.callback(os.close, folder)
    pipes, ends = [], []
    for mode in ("w", "r", "r"):
        read, write = os.pipe()
        here, there = (read, write) if mode == "r" else (write, read)
        pipes.append(ours.enter_context(FileIO(here, mode)))
        theirs.callback(os.close, there)
        os.set_blocking(here, False)
        ends.append(there)
    server = Server(next(_keys), nursery, pipes[0], pipes[1], pipes[2], control)
    return server, (control_end.fileno(), launch.fileno(), folder, *ends)


def _after_fork() -> None:
    global _lock, _current
    _lock = threading.Lock()
    if _current is not None:
        _current.drop()
    _current = None


os.register_at_fork(after_in_child=_after_fork)
