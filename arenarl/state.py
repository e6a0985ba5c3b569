"""What an episode left behind on disk: files, sqlite rows, git history. Verifiers read it before the slot is reset."""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from arenarl.errors import BrokenFile, EnvError

_GIT_SECONDS = 30.0
_MAX_BYTES = 16 << 20
# Of sqlite's primary result codes, those that tell of the content. Without a code it is text that is not UTF-8.
_BROKEN = (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_MISMATCH)


@dataclass(frozen=True)
class EpisodeState:
    """A read-only view of an episode's working directory. Paths are relative to it; links that lead out are refused.

    Attributes:
        root: the real directory; None for an environment without one, where every reader raises.
        outward: gives a text as the model knows it: with "/workspace" for the real directory's name.
    """

    root: Path | None = None
    outward: Callable[[str], str] = str

    def paths(self) -> list[str]:
        """Every file below the root, sorted, with "/" between parts; ``.git`` folders and links are left out."""
        root, found = self._directory(), []
        for folder, folders, files in os.walk(root):
            folders[:] = [name for name in folders if name != ".git"]
            inside = [Path(folder, name) for name in files]
            found += [path.relative_to(root).as_posix() for path in inside if not path.is_symlink()]
        return sorted(found)

    def read(self, path: str) -> str | None:
        """Text of a file, undecodable bytes as U+FFFD, at most 16 MiB of it; None if there is no such file."""
        file = self._inside(path)
        if file is None:
            return None
        with file.open("rb") as stream:
            return self.outward(stream.read(_MAX_BYTES).decode("utf-8", "replace"))

    def exists(self, path: str) -> bool:
        """Whether anything is at a path: a file, a folder, or a link, wherever it leads."""
        return os.path.lexists(self._directory() / path)

    def rows(self, path: str, query: str, parameters: Sequence[object] = ()) -> list[tuple[object, ...]] | None:
        """Rows of a query on a sqlite file, opened read-only; None if there is no such file.

        Raises:
            BrokenFile: if the file is no sound database, or the query does not fit what is in it.
            EnvError: if it cannot be read for another reason, such as a lock.
        """
        file = self._inside(path)
        if file is None:
            return None
        try:
            connection = sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True)
            try:
                rows = connection.execute(query, tuple(parameters)).fetchall()
            finally:
                connection.close()
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", None)
            kind = BrokenFile if code is None or code & 0xFF in _BROKEN else EnvError
            raise kind(f"sqlite file {path!r} cannot be read with {query!r}: {error}") from error
        return [tuple(self.outward(cell) if isinstance(cell, str) else cell for cell in row) for row in rows]

    def git(self, *arguments: str, at: str = ".") -> str | None:
        """Output of ``git ARGUMENTS`` on the repository in a folder; None if there is none, or git refuses.

        The repository is the agent's work, and its configuration could name programs to run. So git sees its objects,
        references, index and files, under a configuration of our own.

        Raises:
            EnvError: if git cannot be run or does not end.
        """
        root = self._directory().resolve()
        folder = (root / at).resolve()
        source = folder / ".git"
        if not folder.is_relative_to(root) or source.is_symlink() or not source.is_dir():
            return None
        with tempfile.TemporaryDirectory(prefix="arenarl-git-") as clean:
            _copy_git(source, Path(clean))
            environment = {
                "PATH": os.environ.get("PATH", ""), "HOME": clean, "LC_ALL": "C", "GIT_CONFIG_NOSYSTEM": "1",
                "GIT_DIR": clean, "GIT_WORK_TREE": str(folder), "GIT_OBJECT_DIRECTORY": str(source / "objects"),
            }  # fmt: skip
            try:
                done = subprocess.run(
                    ["git", "--no-pager", *arguments], cwd=folder, env=environment, stdin=subprocess.DEVNULL,
                    capture_output=True, timeout=_GIT_SECONDS,
                )  # fmt: skip
            except (OSError, subprocess.TimeoutExpired) as error:
                raise EnvError(f"git {' '.join(arguments)} could not be run: {error}") from error
        return self.outward(done.stdout.decode("utf-8", "replace")) if done.returncode == 0 else None

    def _directory(self) -> Path:
        if self.root is None:
            raise EnvError("this environment has no working directory; name ${WORKDIR} in a server's args, env or cwd")
        return self.root

    def _inside(self, path: str) -> Path | None:
        """The regular file behind a relative path; None if it is missing or a link leads out of the root."""
        root = self._directory().resolve()
        try:
            file = (root / path).resolve(strict=True)
            is_file = stat.S_ISREG(file.stat().st_mode)
        except (OSError, ValueError):
            return None
        return file if is_file and file.is_relative_to(root) else None


def _copy_git(source: Path, target: Path) -> None:
    """The parts of a git folder that say what is where, and none that says what to run."""
    (target / "config").write_text("[core]\n\trepositoryformatversion = 0\n\tbare = false\n")
    (target / "refs").mkdir()
    for name in ("HEAD", "index", "packed-refs", "refs", "logs"):
        part = source / name
        if part.is_symlink():
            continue
        if part.is_dir():
            shutil.copytree(part, target / name, symlinks=True, dirs_exist_ok=True)
        elif part.is_file():
            shutil.copyfile(part, target / name)
