"""Runs one server so that the server, and everything it starts, dies with the process that asked for it.

A script of its own (``python -I -S supervise.py CONTROL_FD PARENT_PID GRACE COMMAND ...``) that imports a few modules of
the standard library, so it starts in about 20 ms. It adopts every orphan below it (child subreaper), so a daemonised
grandchild is still a child to kill. It ends the whole family when the server exits, when the control socket closes,
when its parent is gone, or on SIGTERM: SIGTERM to all, ``GRACE`` seconds, SIGKILL until no child is left.

On the control socket it writes ``spawn MESSAGE`` if the command would not run, and at the end ``exit CODE``.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_STOP = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_KILL_SECONDS = 10.0


class Supervisor:
    def __init__(self, control: int, parent: int, grace: float) -> None:
        self.control, self.parent, self.grace = control, parent, grace
        self.server = 0
        self.code: int | None = None
        os.set_inheritable(control, False)
        self.wake, wake_end = os.pipe()
        os.set_blocking(self.wake, False)
        os.set_blocking(wake_end, False)
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
        # SIGUSR1 comes when the thread that started us ends, which need not be the end of its process.
        for number in (signal.SIGCHLD, signal.SIGUSR1, *_STOP):
            signal.signal(number, lambda *_: None)
        self.prctl = ctypes.CDLL(None).prctl
        self.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1, 0, 0, 0)

    def run(self, command: list[str]) -> int:
        self.spawn(command)
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):  # the pipes belong to the server: its end must be their end
            os.dup2(null, fd)
        while self.reap() and self.code is None and not self.told_to_stop():
            pass
        self.end_family()
        code = self.code if self.code is not None else -signal.SIGKILL
        self.say(f"exit {code}")
        return 0

    def spawn(self, command: list[str]) -> None:
        me = os.getpid()
        self.server = os.fork()
        if self.server:
            return
        try:
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and exec would inherit that
                signal.signal(number, signal.SIG_DFL)
            self.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() == me:
                os.execvp(command[0], command)
        except (OSError, ValueError) as error:
            self.say(f"spawn {error}")
        finally:
            os._exit(127)

    def told_to_stop(self) -> bool:
        """Sleep until something happens; True if it is a reason to end."""
        if os.getppid() != self.parent:
            return True
        ready, signals = self.sleep(None)
        return self.control in ready or not _STOP.isdisjoint(signals) or os.getppid() != self.parent

    def sleep(self, seconds: float | None) -> tuple[set[int], bytes]:
        poll = select.poll()
        poll.register(self.wake, select.POLLIN)
        if seconds is None:
            poll.register(self.control, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(None if seconds is None else seconds * 1000)}
        return ready, os.read(self.wake, 512) if self.wake in ready else b""

    def reap(self) -> bool:
        """Collect the dead; False when no child is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self.server:
                self.code = os.waitstatus_to_exitcode(status)

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
        me = os.getpid()
        with open(f"/proc/self/task/{me}/children") as file:
            targets = [int(pid) for pid in file.read().split()]
        if self.code is None:
            targets.append(-self.server)  # its process group
        for pid in targets:  # a child that is not reaped yet keeps its pid, so this hits the right process
            try:  # noqa: SIM105  (contextlib would cost 3 ms of every start)
                os.kill(pid, number)
            except OSError:
                pass

    def say(self, text: str) -> None:
        try:  # noqa: SIM105
            os.write(self.control, text.encode("utf-8", "replace") + b"\n")
        except OSError:
            pass


if __name__ == "__main__":
    sys.exit(Supervisor(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])).run(sys.argv[4:]))
