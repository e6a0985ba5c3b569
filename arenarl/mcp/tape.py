"""Tool results on file: recorded once from real servers, replayed without any, for tests that give the same each time."""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, get_args

from arenarl.errors import ConfigError, EnvError
from arenarl.jsonl import dumps, read_jsonl
from arenarl.mcp.cache import canonical
from arenarl.mcp.config import ServerSpec
from arenarl.mcp.schema import ToolSpec
from arenarl.types import ToolResult

TapeMode = Literal["record", "replay"]
_PATH = re.compile(r"(?:/[^/\s:=,]+)+/(?=[^/\s:=,])")


class Tape:
    """A file of JSON lines: ``{"servers", "tools"}`` for a list of servers, ``{"call", ..., "result"}`` for each call.

    A call is found by its servers, the starting state's name, the digest of all calls before it that may have written,
    the tool, the arguments, and how often that very call was made since. So a tape holds on another machine and for any
    order of episodes. What was recorded first stays: to record something anew, remove the file. Arguments and results
    are written as they are; values of environment variables and headers never.

    Args:
        mode: "record" adds to the file after each call; "replay" only reads it.

    Raises:
        ConfigError: for another mode, a tape to replay that does not exist, a file that is no tape, or one that cannot be
            read or written.
    """

    def __init__(self, path: str | Path, mode: TapeMode = "replay") -> None:
        if mode not in get_args(TapeMode):
            raise ConfigError(f"tape mode={mode!r} is refused; use 'record' or 'replay'")
        self.path, self.mode = Path(path), mode
        self._listings: dict[str, tuple[ToolSpec, ...]] = {}
        self._calls: dict[str, dict[str, Any]] = {}
        if mode == "replay" and not os.path.exists(self.path):
            name = str(self.path)
            raise ConfigError(f"there is no tape {name!r}; make one with mode 'record', or with `arenarl env record`")
        with self._usable():
            if mode == "record":
                open(self.path, "ab").close()  # a path that is wrong is so before the first episode
            self._load()

    def reel(self, specs: Sequence[ServerSpec], key: str, seed: int) -> Reel:
        """The place of a new workspace on the tape."""
        return Reel(self, specs, key, seed)

    def _load(self) -> None:
        try:
            for record in read_jsonl(self.path):
                if "tools" in record:
                    self._listings.setdefault(record["servers"], tuple(ToolSpec(**tool) for tool in record["tools"]))
                else:
                    self._calls.setdefault(record["call"], record)
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{str(self.path)!r} is not a tape: {error}; remove it and record anew") from error
        if self.mode == "record":
            data = self.path.read_bytes()
            if not data.endswith(b"\n"):  # torn by a kill
                self.path.write_bytes(data[: data.rfind(b"\n") + 1])

    def _append(self, record: Mapping[str, Any]) -> None:
        with self._usable(), open(self.path, "ab") as file:
            file.write(dumps(record).encode("utf-8", "backslashreplace") + b"\n")

    @contextmanager
    def _usable(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            problem = f"there is no folder {str(self.path.parent)!r}; make it"
            raise ConfigError(f"tape {str(self.path)!r} cannot be used: {problem}") from error
        except OSError as error:
            problem = f"{(error.strerror or str(error)).lower()}; give the path of a file"
            raise ConfigError(f"tape {str(self.path)!r} cannot be used: {problem}") from error


class Reel:
    """One workspace's way along a `Tape`.

    Attributes:
        replays: whether results come from the tape.
    """

    def __init__(self, tape: Tape, specs: Sequence[ServerSpec], key: str, seed: int) -> None:
        self.replays = tape.mode == "replay"
        self._tape = tape
        self._servers = _digest([_portable(spec) for spec in specs])
        seeded = any("SEED" in spec.variables for spec in specs)
        self._history = _digest([self._servers, key, seed if seeded else None])
        self._made: Counter[str] = Counter()

    def listing(self) -> list[ToolSpec]:
        """The recorded tools.

        Raises:
            EnvError: if these servers are not on the tape.
        """
        found = self._tape._listings.get(self._servers)
        if found is None:
            raise EnvError(f"tape {str(self._tape.path)!r} does not know this list of servers; record it again")
        return list(found)

    def record_listing(self, tools: Sequence[ToolSpec]) -> None:
        if self._servers not in self._tape._listings:
            self._tape._listings[self._servers] = tuple(tools)
            self._tape._append({"servers": self._servers, "tools": [asdict(tool) for tool in tools]})

    def advance(self, server: str, tool: str, arguments: Mapping[str, Any], *, reads: bool) -> str:
        """The key of the next call, which changes the state unless it ``reads`` only."""
        call = _digest([self._history, server, tool, arguments])
        self._made[call] += 1
        if not reads:
            self._history = call
        return _digest([call, self._made[call]])

    def play(self, mark: str, server: str, tool: str) -> tuple[ToolResult, bool]:
        """(result, whether the server's state was lost).

        Raises:
            EnvError: if this call is not on the tape.
        """
        record = self._tape._calls.get(mark)
        if record is None:
            raise EnvError(
                f"tape {str(self._tape.path)!r} has no answer of {tool!r} of server {server!r} here (key {mark[:16]}): "
                "the calls differ from those that were recorded"
            )
        return ToolResult(server=server, tool=tool, **record["result"]), record["lost"]

    def record(self, mark: str, arguments: Mapping[str, Any], result: ToolResult, *, lost: bool) -> None:
        if mark in self._tape._calls:
            return
        kept = {key: getattr(result, key) for key in ("kind", "text", "structured", "cached")}
        call = {"call": mark, "server": result.server, "tool": result.tool, "arguments": arguments}
        self._tape._calls[mark] = call | {"result": kept, "lost": lost}
        self._tape._append(self._tape._calls[mark])


def _digest(value: Any) -> str:
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def _portable(spec: ServerSpec) -> list[Any]:
    """What a server is, whatever machine it runs on: folders of paths, values of variables and addresses left out."""
    factory = spec.factory if isinstance(spec.factory, str) else getattr(spec.factory, "__qualname__", None)
    texts = [_PATH.sub("", text) for text in (spec.command or "", *spec.args)]
    offered = [sorted(spec.allow) if spec.allow is not None else None, sorted(spec.deny)]
    return [spec.name, spec.transport, texts, spec.url, factory, sorted(spec.env), sorted(spec.headers), offered]
