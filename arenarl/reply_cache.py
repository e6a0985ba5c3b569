"""Replies by the content of their request, in one SQLite file that several processes may share."""

from __future__ import annotations

import hashlib
import json
import logging
import sqlite3
from pathlib import Path
from typing import Any

from arenarl.errors import ConfigError

log = logging.getLogger(__name__)

BUSY_S = 2.0  # a write takes under a millisecond: who waits longer waits for a process that hangs
TABLE = "CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, text TEXT NOT NULL)"


def request_key(**request: Any) -> str:
    """SHA-256 of a request as JSON. The order of keys counts, since a model fills a schema in its order."""
    return hashlib.sha256(json.dumps(request).encode()).hexdigest()


class ReplyCache:
    """Opens its file at first use. A file that cannot be used switches the cache off with one warning; it ends no run.

    Args:
        path: of the file, or ":memory:" for a cache that ends with the process.

    Raises:
        ConfigError: the path is a folder, or its folder does not exist.
    """

    def __init__(self, path: str) -> None:
        if path != ":memory:" and (Path(path).is_dir() or not Path(path).parent.is_dir()):
            raise ConfigError(
                f"cache={path!r} must name a file in a folder that exists, or be ':memory:', or None for no cache"
            )
        self.path = path
        self._broken = False
        self._file: sqlite3.Connection | None = None

    def get(self, key: str) -> str | None:
        """The text that was put under the key, or None."""
        rows = self._run("SELECT text FROM replies WHERE key = ?", key)
        return rows[0][0] if rows else None

    def put(self, key: str, text: str) -> None:
        self._run("INSERT OR REPLACE INTO replies VALUES (?, ?)", key, text)

    def close(self) -> None:
        """The next use opens the file again."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def _run(self, statement: str, *values: str) -> list[Any]:
        if self._broken:
            return []
        try:
            if self._file is None:
                self._file = self._open()
            return self._file.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            log.warning("cache %s is off: %s: %s", self.path, type(error).__name__, error)
            self._broken = True
            self.close()
            return []

    def _open(self) -> sqlite3.Connection:
        # each statement is a transaction of its own; the endpoint may move to another thread, but is used by one at a time
        file = sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            file.execute("PRAGMA journal_mode = WAL")
            file.execute("PRAGMA synchronous = NORMAL")
            file.execute(TABLE)
        except BaseException:
            file.close()
            raise
        return file
