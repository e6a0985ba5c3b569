"""Who owns temporary directories: a process that lives. What a killed one left is removed by the next that makes one.

A process holds a lock on a file ``arenarl-TOKEN.lock`` in the temporary folder while it has directories, whose names begin
with ``arenarl-TOKEN-``. The system drops the lock at the end of the process, however it ends; so a lock that can be
taken is that of a dead one.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import stat
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

_log = logging.getLogger(__name__)
_lock = threading.Lock()
_current: Claim | None = None


@dataclass
class Claim:
    """This process's claim on the directories with its token; get it from `claim`, and `release` it once for each."""

    file: Path
    descriptor: int
    process: int
    users: int = 0

    def make_directory(self) -> Path:
        """A new directory that only its owner may enter, resolved."""
        return Path(tempfile.mkdtemp(prefix=f"{self.file.stem}-", dir=self.file.parent)).resolve()

    def release(self) -> None:
        """The claim ends with its last user. In a forked copy nothing happens: it is the parent's."""
        global _current
        with _lock:
            self.users -= 1
            if self.users > 0 or self.process != os.getpid():
                return
            if _current is self:
                _current = None
            self.file.unlink(missing_ok=True)
            os.close(self.descriptor)


def claim() -> Claim:
    """The claim of this process, with one more user; before its first, the directories of dead processes are removed."""
    global _current
    with _lock:
        if _current is None or _current.process != os.getpid():
            folder = Path(tempfile.gettempdir())
            _remove_those_of_the_dead(folder)
            _current = _new(folder)
        _current.users += 1
        return _current


def _new(folder: Path) -> Claim:
    file = folder / f"arenarl-{secrets.token_hex(8)}.lock"
    early = file.with_suffix(".new")  # under its name only when it is locked
    descriptor = os.open(early, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    early.rename(file)
    return Claim(file, descriptor, os.getpid())


def _remove_those_of_the_dead(folder: Path) -> None:
    for file in folder.glob("arenarl-*.lock"):
        if not re.fullmatch(r"arenarl-[0-9a-f]{16}\.lock", file.name):
            continue
        try:
            descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # another user's, or gone meanwhile
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for left in folder.glob(f"{file.stem}-*"):
                clear_tree(left)
                left.rmdir()
            file.unlink(missing_ok=True)
        except BlockingIOError:  # it lives
            continue
        except OSError as error:
            _log.warning("what a dead process has left in %s cannot be removed: %s", folder, error)
        finally:
            os.close(descriptor)


def clear_tree(top: Path, keep: Path | None = None) -> None:
    """Remove everything in a directory but ``keep``; links are removed, not followed, and read-only folders opened.

    Raises:
        OSError: if something cannot be removed.
    """
    pending, folders = [str(top)], []
    while pending:
        folder = pending.pop()
        try:
            os.chmod(folder, stat.S_IRWXU)
            entries = list(os.scandir(folder))
        except FileNotFoundError:
            continue
        folders.append(folder)
        for entry in entries:
            if keep is not None and entry.path == str(keep):
                continue
            if entry.is_dir(follow_symlinks=False):
                pending.append(entry.path)
            else:
                Path(entry.path).unlink(missing_ok=True)
    for folder in reversed(folders[1:]):
        try:
            os.rmdir(folder)
        except FileNotFoundError:
            continue


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
