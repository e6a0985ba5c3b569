"""Runs tool servers so that each, and everything it starts, dies with the process that asked for it.

A script of its own (``python -I -S supervise.py SOCKET_FD PARENT_PID``), the *nursery* of one client process, that
imports a few modules of the standard library. For every server it forks a *supervisor*: no exec, so the pages of the
interpreter are shared and a supervisor costs a fraction of a megabyte. `arenarl.mcp.nursery` is the client's side.

A supervisor adopts every orphan below it (child subreaper), so a daemonised grandchild is still a child to kill. It
ends the whole family when the server exits, when its control socket closes, when the nursery is gone, or on SIGTERM:
SIGTERM to all, grace, SIGKILL until no child is left. On the control socket it writes ``pid NUMBER`` of the server,
``spawn MESSAGE`` if the command would not run, ``lost MESSAGE`` if it ends for a reason that is neither the server's nor the client's, and at last
``exit CODE``. The nursery holds that socket open until it has reaped the supervisor: its end means that all are gone.

The nursery ends when its socket is shut, when its parent is gone, or on SIGTERM, and takes its supervisors along. It
adopts what a killed supervisor leaves, and kills it. If it is killed itself, the supervisors see that their parent is
gone. The requests, each one packet: ``start KEY GRACE`` with the descriptors of control socket, launch (marshalled
command and environment), working directory, stdin, stdout and stderr; ``kill KEY``, for a supervisor that hangs.
"""

from __future__ import annotations

import array
import ctypes
import errno
import gc
import marshal
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Iterable

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_STOP = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_KILL_SECONDS = 10.0
_DESCRIPTORS = 6
_prctl = ctypes.CDLL(None).prctl


class Node:
    """A process that watches one socket, its children and its parent.

    Args:
        channel: the socket; if it can be read, there is something to do.
        parent: pid of the process that must be alive.
    """

    def __init__(self, channel: int, parent: int) -> None:
        self.channel, self.parent = channel, parent
        self.wake, self.wake_end = os.pipe()
        os.set_blocking(self.wake, False)
        os.set_blocking(self.wake_end, False)
        signal.set_wakeup_fd(self.wake_end, warn_on_full_buffer=False)
        # SIGUSR1 comes when the thread that started us ends, which need not be the end of its process.
        for number in (signal.SIGCHLD, signal.SIGUSR1, *_STOP):
            signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a thread may start us that lets no signal through
        _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1, 0, 0, 0)

    @property
    def orphaned(self) -> bool:
        return os.getppid() != self.parent

    def sleep(self, seconds: float | None) -> tuple[bool, bytes]:
        """Sleep until a signal comes or, without a limit, the channel can be read: (whether it can, the signals)."""
        poll = select.poll()
        poll.register(self.wake, select.POLLIN)
        if seconds is None:
            poll.register(self.channel, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(None if seconds is None else seconds * 1000)}
        return self.channel in ready, os.read(self.wake, 512) if self.wake in ready else b""


class Nursery(Node):
    def __init__(self, channel: int, parent: int) -> None:
        super().__init__(channel, parent)
        os.set_inheritable(channel, False)
        self.requests = socket.socket(fileno=channel)
        self.supervisors: dict[int, tuple[bytes, int]] = {}  # pid: key, control socket
        self.grace = 0.0
        self.files = _raise_limit_of_files()

    def run(self) -> None:
        while not self.orphaned:
            readable, signals = self.sleep(None)
            self.reap()
            if not _STOP.isdisjoint(signals) or (readable and not self.serve()):
                break
        self.end_all()

    def serve(self) -> bool:
        """Answer one request; False if there will be no more."""
        size = array.array("i").itemsize * _DESCRIPTORS
        packet, extra, _, _ = self.requests.recvmsg(100, socket.CMSG_SPACE(size), socket.MSG_CMSG_CLOEXEC)
        fds = array.array("i")
        for _, _, data in extra:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        match packet.split():
            case [b"start", key, grace] if len(fds) == _DESCRIPTORS:
                self.start(key, float(grace), *fds)
            case [b"start", _, _] if fds:  # the system had no room for the others
                _refuse(fds[0], OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
            case [b"kill", key]:
                _kill((pid for pid, (name, _) in self.supervisors.items() if name == key), signal.SIGKILL)
        _close(fds)
        return bool(packet)

    def start(self, key: bytes, grace: float, control: int, *fds: int) -> None:
        me = os.getpid()
        self.grace = max(self.grace, grace)
        held = []
        try:
            held.append(os.dup(control))
            pid = os.fork()
        except OSError as error:
            _refuse(control, error)
            _close(held)
            return
        if pid:
            self.supervisors[pid] = key, held[0]
            return
        code = 1
        try:
            _close((self.channel, self.wake, self.wake_end, *held))
            _close(other for _, other in self.supervisors.values())
            os.setsid()
            Supervisor(control, me, grace, self.files).run(*fds)
            code = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(code)

    def reap(self) -> bool:
        """Collect the dead, and kill what a killed supervisor left behind; False when no child is left."""
        dead = []
        collected, left = _reap()
        for pid, status in collected.items():
            if pid in self.supervisors:
                _, control = self.supervisors.pop(pid)
                dead.append(control)
                if status:
                    _say(control, f"lost its supervisor ended with code {os.waitstatus_to_exitcode(status)}")
        _kill((pid for pid in _children() if pid not in self.supervisors), signal.SIGKILL)
        _close(dead)
        return left

    def end_all(self) -> None:
        _kill(self.supervisors, signal.SIGTERM)
        end = time.monotonic() + self.grace + 2 * _KILL_SECONDS
        while self.reap():
            self.sleep(0.1)
            if time.monotonic() > end:
                _kill(self.supervisors, signal.SIGKILL)


class Supervisor(Node):
    def __init__(self, control: int, parent: int, grace: float, files: tuple[int, int]) -> None:
        super().__init__(control, parent)
        self.grace = grace
        self.files = files
        self.server = 0
        self.code: int | None = None

    def run(self, launch: int, folder: int, *pipes: int) -> None:
        self.spawn(launch, folder, pipes)
        _close((launch, folder, *pipes))  # the pipes belong to the server: its end must be their end
        self.wait()
        self.end_family()
        code = self.code if self.code is not None else -signal.SIGKILL
        _say(self.channel, f"exit {code}")

    def spawn(self, launch: int, folder: int, pipes: tuple[int, ...]) -> None:
        me = os.getpid()
        self.server = os.fork()
        if self.server:
            _say(self.channel, f"pid {self.server}")
            return
        try:
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and exec would inherit that
                signal.signal(number, signal.SIG_DFL)
            with open(launch, "rb") as file:
                command, environment, niceness = marshal.load(file)
            os.setpriority(os.PRIO_PROCESS, 0, max(niceness, os.getpriority(os.PRIO_PROCESS, 0)))
            os.fchdir(folder)
            for target, fd in enumerate(pipes):
                os.dup2(fd, target)
            resource.setrlimit(resource.RLIMIT_NOFILE, self.files)
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() == me:
                os.execvpe(command[0], command, environment)
        except OSError as error:  # its own text may name the last folder of PATH that was searched
            _say(self.channel, f"spawn [Errno {error.errno}] {error.strerror}")
        except ValueError as error:
            _say(self.channel, f"spawn {error}")
        finally:
            os._exit(127)

    def wait(self) -> None:
        """Sleep until the server has ended or nobody wants it any more."""
        while self.reap() and self.code is None:
            if self.orphaned:
                _say(self.channel, "lost the process that looks after all tool servers is gone")
                return
            readable, signals = self.sleep(None)
            if readable:
                return
            if stop := _STOP.intersection(signals):
                _say(self.channel, f"lost its supervisor was told to end by signal {min(stop)}")
                return

    def reap(self) -> bool:
        """Collect the dead; False when no child is left."""
        dead, left = _reap()
        if self.server in dead:
            self.code = os.waitstatus_to_exitcode(dead[self.server])
        return left

    def end_family(self) -> None:
        self.signal_all(signal.SIGTERM)
        end = time.monotonic() + self.grace
        while self.reap() and (left := end - time.monotonic()) > 0:
            self.sleep(left)
        end = time.monotonic() + _KILL_SECONDS
        while self.reap() and time.monotonic() < end:  # each round may adopt the next generation
            self.signal_all(signal.SIGKILL)
            self.sleep(0.01)

    def signal_all(self, number: int) -> None:
        group = () if self.code is not None else (-self.server,)  # its process group
        _kill((*_children(), *group), number)


def _raise_limit_of_files() -> tuple[int, int]:
    """Allow the nursery what the system allows: it holds a descriptor for each server. Returns what a server may have."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:  # noqa: SIM105
        resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    except (OSError, ValueError):
        pass
    return limits


def _children() -> list[int]:
    """Pids of the children, the dead that are not reaped yet included."""
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(pid) for pid in file.read().split()]


def _reap() -> tuple[dict[int, int], bool]:
    """Collect the children that are dead: (wait statuses by pid, whether any child is left)."""
    dead = {}
    try:
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            dead[found[0]] = found[1]
    except ChildProcessError:
        return dead, False
    return dead, True


def _kill(targets: Iterable[int], number: int) -> None:
    for pid in targets:  # a child that is not reaped yet keeps its pid, so this hits the right process
        try:  # noqa: SIM105  (contextlib would cost 3 ms of every start)
            os.kill(pid, number)
        except OSError:
            pass


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def _refuse(control: int, error: OSError) -> None:
    _say(control, f"lost there is no room for another server: {error}")


def _say(control: int, text: str) -> None:
    try:  # noqa: SIM105
        os.write(control, text.encode("utf-8", "replace") + b"\n")
    except OSError:
        pass


if __name__ == "__main__":
    nursery = Nursery(int(sys.argv[1]), int(sys.argv[2]))
    gc.disable()
    gc.freeze()
    nursery.run()
