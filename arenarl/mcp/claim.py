"""Who owns temporary directories: a process that lives. What a killed one left is removed by the next that makes one.

A process holds a lock on a file ``arenarl-TOKEN.lock`` in the temporary folder while it has directories, whose names begin
with ``arenarl-TOKEN-``. The system drops the lock at the end of the process, however it ends; so a lock that can be
taken is that of a dead one.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
            folder = Path(tempfile.gettempdir()).resolve()
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
            if os.fstat(descriptor).st_uid != os.geteuid():
                continue
            for left in folder.glob(f"{file.stem}-*"):
                found = left.lstat()
                if stat.S_ISLNK(found.st_mode):
                    left.unlink()
                elif stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
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

    Not even a link that is put in the place of a folder meanwhile is followed.

    Args:
        top: resolved.

    Raises:
        OSError: if something cannot be removed.
    """
    pending, folders = [str(top)], []
    while pending:
        folder = pending.pop()
        try:
            with _opened(folder) as descriptor, os.scandir(descriptor) as entries:
                folders.append(folder)
                for entry in entries:
                    path = os.path.join(folder, entry.name)
                    if keep is not None and path == str(keep):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(path)
                    else:
                        _remove(os.unlink, path, descriptor)
        except FileNotFoundError:
            continue
    for folder in reversed(folders[1:]):
        try:
            with _opened(os.path.dirname(folder)) as descriptor:
                _remove(os.rmdir, folder, descriptor)
        except FileNotFoundError:
            continue


@contextmanager
def _opened(folder: str) -> Iterator[int]:
    """A descriptor of a directory, readable and writable from now on, that no link has led to."""
    place = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        link = f"/proc/self/fd/{place}"
        if os.readlink(link) != folder:
            raise NotADirectoryError(errno.ENOTDIR, "moved away, or a link has led there", folder)
        os.chmod(link, stat.S_IRWXU)
        descriptor = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=place)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
    finally:
        os.close(place)


def _remove(how: Callable[..., None], path: str, folder: int) -> None:
    try:
        how(os.path.basename(path), dir_fd=folder)
    except FileNotFoundError:
        return
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error  # its own names no folder


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
