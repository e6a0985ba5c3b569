"""The private directory of a workspace: made, emptied under a running server, and taken away whatever was done to it."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import stat
from pathlib import Path

from arenarl.errors import EnvError
from arenarl.mcp.claim import claim, clear_tree
from arenarl.mcp.paths import VIRTUAL_ROOT

_ATTEMPTS = 3
_log = logging.getLogger(__name__)
_live: dict[WorkDirectory, int] = {}  # with the process that made it: a fork must not take it away


class WorkDirectory:
    """A new empty directory, alone in a folder that only its owner may enter.

    Links are removed, never followed. The methods block: call them in a thread.

    Attributes:
        path: resolved; it stays the same directory (inode) for life, as running servers hold on to it.
    """

    def __init__(self) -> None:
        self._claim = claim()
        self._holder = self._claim.make_directory()
        self.path = self._holder / VIRTUAL_ROOT.strip("/")
        _live[self] = os.getpid()
        self.path.mkdir(mode=0o700)
        self._identity = [_identity(folder) for folder in (self._holder, self.path)]

    def empty(self) -> None:
        """Remove everything in the directory, and whatever a server has put beside it.

        Raises:
            EnvError: if something stays or comes back, with its path relative to the directory, or if the directory is
                no longer the one that was made.
        """
        if [_identity(folder) for folder in (self._holder, self.path)] != self._identity:
            raise EnvError("a server has removed or replaced its working directory")
        try:
            for _ in range(_ATTEMPTS):  # a server may be writing still
                clear_tree(self._holder, keep=self.path)
                clear_tree(self.path)
                if not (left := os.listdir(self.path)):
                    return
        except OSError as error:
            where = os.path.relpath(error.filename or self.path, self.path)
            raise EnvError(f"the working directory cannot be emptied: {where}: {error.strerror}") from error
        raise EnvError(f"the working directory cannot be emptied: {left[0]} comes back")

    def remove(self) -> None:
        """Remove the directory. What withstands is tried again when the interpreter ends, and named in the log."""
        for attempt in range(_ATTEMPTS):
            try:
                if _identity(self._holder) == self._identity[0]:
                    if attempt:
                        shutil.rmtree(self._holder)  # gets to paths that are too long for `clear_tree`, but not so deep
                    else:
                        clear_tree(self._holder)
                        self._holder.rmdir()
                if _live.pop(self, None) is not None:
                    self._claim.release()
                return
            except OSError as error:
                problem = error
        _log.warning("%s cannot be removed: %s", self._holder, problem)


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and inode of a directory; None if there is none, or a link in its place."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return (found.st_dev, found.st_ino) if stat.S_ISDIR(found.st_mode) else None


@atexit.register
def _sweep() -> None:
    for directory, process in list(_live.items()):
        if process == os.getpid():
            directory.remove()
