"""A git repository as plain data: what is committed, what is changed, and the names that git gives to it all."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arenarl.errors import EnvError

_EPOCH = 1_750_000_000  # commits of the start are an hour apart, all older than those of the agent
_ENV = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "HOME": "/nonexistent", "LC_ALL": "C"}

Files = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Repository:
    """A starting state, as plain data.

    Attributes:
        commits: {"branch", "parent" (position, or None), "message", "author", "files" (those it changes)}, in order.
        tags: name to position of a commit.
        changed: files that differ from main's tip in the working directory; ``staged``, those of them in the index.
    """

    commits: list[dict[str, Any]] = field(default_factory=list)
    tags: dict[str, int] = field(default_factory=dict)
    changed: Files = field(default_factory=dict)
    staged: list[str] = field(default_factory=list)

    def tips(self) -> dict[str, int]:
        """Branch to position of its last commit."""
        return {commit["branch"]: n for n, commit in enumerate(self.commits)}

    def tree(self, at: int | None) -> Files:
        """All files as of a commit."""
        if at is None:
            return {}
        commit = self.commits[at]
        return self.tree(commit["parent"]) | commit["files"]

    def hashes(self) -> list[str]:
        """Names that git gives the commits."""
        found: list[str] = []
        for n, commit in enumerate(self.commits):
            parent = "" if commit["parent"] is None else f"parent {found[commit['parent']]}\n"
            tree = b"".join(
                f"100644 {path}\0".encode() + bytes.fromhex(blob(text)) for path, text in sorted(self.tree(n).items())
            )
            text = f"tree {_hash('tree', tree)}\n{parent}author {_who(commit, n)}\ncommitter {_who(commit, n)}\n\n"
            found.append(_hash("commit", f"{text}{commit['message']}\n".encode()))
        return found

    def write(self, folder: Path) -> None:
        """Make the repository in an empty folder: four processes, about 20 ms.

        Raises:
            EnvError: if git cannot do it.
        """
        _git(folder, "init", "--quiet", "--template=", "--initial-branch=main")
        _git(folder, "-c", "fastimport.unpackLimit=1", "fast-import", "--quiet", given=_stream(self))
        _git(folder, "reset", "--quiet", "--hard")
        for path, text in self.changed.items():
            (folder / path).write_text(text)
        if self.staged:
            _git(folder, "add", "--", *self.staged)


def blob(text: str) -> str:
    """The name that git gives a file's content."""
    return _hash("blob", text.encode())


def _hash(kind: str, body: bytes) -> str:
    return hashlib.sha1(f"{kind} {len(body)}\0".encode() + body).hexdigest()


def _who(commit: Mapping[str, Any], n: int) -> str:
    return f"{commit['author']} <{commit['author'].lower()}@example.com> {_EPOCH + 3600 * n} +0000"


def _stream(repository: Repository) -> bytes:
    """The repository in the language of ``git fast-import``."""
    lines: list[str] = []
    for n, commit in enumerate(repository.commits):
        who, message = _who(commit, n), commit["message"] + "\n"
        lines += [f"commit refs/heads/{commit['branch']}", f"mark :{n + 1}", f"author {who}", f"committer {who}"]
        lines += [f"data {len(message)}\n{message}"]
        lines += [f"from :{commit['parent'] + 1}"] if commit["parent"] is not None else []
        lines += [f"M 100644 inline {path}\ndata {len(text)}\n{text}" for path, text in commit["files"].items()]
    lines += [f"reset refs/tags/{name}\nfrom :{at + 1}\n" for name, at in repository.tags.items()]
    return ("\n".join(lines) + "\n").encode()


def _git(folder: Path, *arguments: str, given: bytes = b"") -> None:
    environment = {"PATH": os.environ.get("PATH", ""), **_ENV}
    try:
        subprocess.run(
            ["git", "-C", str(folder), *arguments],
            env=environment,
            input=given,
            capture_output=True,
            check=True,
            timeout=60,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise EnvError(f"git {arguments[0]} could not set up the repository of a task: {error}") from error
