"""What a tool server is: `ServerSpec`. The JSON that other clients use too is read by `arenarl.mcp.config_file`."""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from arenarl.errors import ConfigError

Transport = Literal["stdio", "http", "sse", "inproc"]
Scope = Literal["episode", "pool", "shared"]
Reset = Literal["respawn", "files", "tool", "none"]
Era = Literal["auto", "legacy", "2026-07-28"]

# Variables that an episode sets; every other name is an environment variable.
EPISODE_VARIABLES = ("WORKDIR", "SEED", "EPISODE")
_PLACEHOLDER = re.compile(r"\$\{(?:env:)?([A-Za-z_][A-Za-z0-9_]*)(?::-((?:(?!\$\{)[^}])*))?\}")
_DEFAULT_RESET: dict[str, Reset] = {"episode": "respawn", "pool": "files", "shared": "none"}
_LISTS, _MAPPINGS = ("args", "allow", "deny", "cache_tools"), ("env", "headers")
_COUNTS, _SECONDS = ("max_calls", "max_uses", "max_message_bytes"), ("start_timeout", "call_timeout", "close_grace")
_RESETS: dict[str, tuple[str, ...]] = {
    "episode": ("respawn",), "pool": ("files", "tool", "respawn"), "shared": ("none",)
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ServerSpec:
    """One tool server: how to reach it, who shares it, how it is made clean again, and how long to wait for it.

    Texts may hold ``${VAR}``, ``${env:VAR}`` and ``${VAR:-default}``; they are filled in when the server starts
    (`launch`), so that a spec, its ``repr``, its pickle and its `fingerprint` never hold a secret that came from the
    environment. ``${WORKDIR}``, ``${SEED}`` and ``${EPISODE}`` are the episode's.

    Attributes:
        name: used in tool names when two servers have a tool of one name, and in messages.
        transport: "stdio" starts ``command``; "http" (streamable) and "sse" connect to ``url``; "inproc" calls ``factory``.
        env: added to HOME, LOGNAME, PATH, SHELL, TERM and USER, which are all that a server inherits.
        env_file: path of a file with KEY=VALUE lines, read at each start; ``env`` wins over it.
        factory: a callable or "module:function" that returns an MCP server, or any object: its public methods become tools.
        era: MCP protocol generation: "legacy" begins with a handshake, "2026-07-28" does not; "auto" finds out once.
        scope: "episode" gives every episode a server of its own; "pool" hands a running server on after a reset;
            "shared" keeps one for all episodes of a process, which is right only if no episode can see what another did.
        reset: how a pooled server is made clean: "files" empties and refills its working directory, "tool" calls
            ``reset_tool``, "respawn" starts it anew. Follows from the scope if None.
        allow: names of the only tools that are offered; all if None. ``deny`` takes tools away.
        cache_tools: tools whose result may be reused within an episode until something is written (across episodes if
            "shared"). ``trust_annotations`` adds the tools that their server calls read-only.
        max_calls: calls in flight at once; None means 1, or 16 for a shared server.
        max_uses: episodes after which a pooled server is replaced.
        start_timeout: seconds until the server must have answered the handshake and listed its tools.
        call_timeout: seconds until a call must have been answered.
        close_grace: seconds between end of input and SIGTERM, and again until SIGKILL.
        max_message_bytes: a longer answer becomes an error.

    Raises:
        ConfigError: if a value cannot work.
    """

    name: str
    transport: Transport = "stdio"
    command: str | None = None
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    env_file: str | None = None
    cwd: str | None = None
    url: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    factory: Callable[[], Any] | str | None = None
    era: Era = "auto"
    scope: Scope = "episode"
    reset: Reset | None = None
    reset_tool: str | None = None
    allow: tuple[str, ...] | None = None
    deny: tuple[str, ...] = ()
    cache_tools: tuple[str, ...] = ()
    trust_annotations: bool = False
    max_calls: int | None = None
    max_uses: int = 64
    start_timeout: float = 60.0
    call_timeout: float = 30.0
    close_grace: float = 0.5
    max_message_bytes: int = 8 << 20

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise self._bad("name", self.name, "give the server a name")
        for key in _LISTS:
            value = getattr(self, key)
            if value is not None:
                if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
                    raise self._bad(key, value, "give a list of strings")
                object.__setattr__(self, key, tuple(value))
        for key in _MAPPINGS:
            value = getattr(self, key)
            if not isinstance(value, Mapping) or not all(
                isinstance(n, str) and re.fullmatch(r"[^=\0]+", n) for n in value
            ):
                raise self._bad(key, "***", "give an object whose keys are names")
            object.__setattr__(self, key, dict(value))
        for key, allowed in (("transport", get_args(Transport)), ("scope", get_args(Scope)), ("era", get_args(Era))):
            if getattr(self, key) not in allowed:
                raise self._bad(key, getattr(self, key), f"use one of {', '.join(allowed)}")
        if not isinstance(self.trust_annotations, bool):
            raise self._bad("trust_annotations", self.trust_annotations, "use true or false")
        if self.max_calls is None:
            object.__setattr__(self, "max_calls", 16 if self.scope == "shared" else 1)
        for key in (*_COUNTS, *_SECONDS):
            value, kind = getattr(self, key), int if key in _COUNTS else int | float
            if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value < math.inf:
                what = "a positive whole number" if key in _COUNTS else "a positive number of seconds"
                raise self._bad(key, value, f"give {what}")
        self._check_target()
        self._check_reset()

    def _check_target(self) -> None:
        keys = ("command", "args", "env", "env_file", "cwd", "url", "headers", "factory")
        given = {key for key in keys if getattr(self, key)}
        wanted, allowed = {
            "stdio": ("command", {"command", "args", "env", "env_file", "cwd"}),
            "http": ("url", {"url", "headers"}),
            "sse": ("url", {"url", "headers"}),
            "inproc": ("factory", {"factory"}),
        }[self.transport]
        if not given <= allowed:
            raise self._bad("transport", self.transport, f"it takes no {', '.join(sorted(given - allowed))}")
        if wanted not in given or (wanted != "factory" and not isinstance(getattr(self, wanted), str)):
            raise self._bad(wanted, getattr(self, wanted), f"transport {self.transport!r} needs a {wanted}")
        if isinstance(self.factory, str) and not re.fullmatch(r"[\w.]+:[\w.]+", self.factory):
            raise self._bad("factory", self.factory, 'write it as "module:function"')
        for key, value in self._texts():
            if not isinstance(value, str) or "\0" in value:
                shown = "***" if key.startswith((*_MAPPINGS, "url")) else value
                raise self._bad(key, shown, "give a string without NUL")
            if "${" in _PLACEHOLDER.sub("", value):
                what = "has a placeholder that is not ${VAR}, ${env:VAR} or ${VAR:-default}"
                raise ConfigError(f"server {self.name!r}: {key} {what}")

    def _check_reset(self) -> None:
        if self.reset is None:
            object.__setattr__(self, "reset", _DEFAULT_RESET[self.scope])
        if self.reset not in _RESETS[self.scope]:
            raise self._bad("reset", self.reset, f"scope {self.scope!r} can have {', '.join(_RESETS[self.scope])}")
        if (self.reset == "tool") != (self.reset_tool is not None):
            raise self._bad("reset_tool", self.reset_tool, "reset='tool' needs a reset_tool, and nothing else does")
        if self.transport in ("http", "sse") and self.reset == "files":
            raise self._bad(
                "reset", self.reset, f"transport {self.transport!r} has no files here; use 'tool' or 'respawn'"
            )
        outlived = {"shared": EPISODE_VARIABLES, "pool": ("SEED", "EPISODE")}
        for name in sorted(self.variables.intersection(outlived.get(self.scope, ()))):
            raise self._bad("scope", self.scope, f"such a server outlives the episode and cannot have its ${{{name}}}")

    def _texts(self) -> Iterator[tuple[str, str]]:
        """Every text that may hold a variable, with the name that messages give it."""
        for key in ("command", "env_file", "cwd", "url"):
            if getattr(self, key) is not None:
                yield key, getattr(self, key)
        yield from ((f"args[{n}]", value) for n, value in enumerate(self.args))
        for key in _MAPPINGS:
            yield from ((f"{key}[{name!r}]", value) for name, value in getattr(self, key).items())

    def _bad(self, key: str, value: object, remedy: str) -> ConfigError:
        return ConfigError(f"server {self.name!r}: {key}={value!r} is refused; {remedy}")

    def __hash__(self) -> int:
        return hash((self.name, self.transport, self.command, self.args, self.url))

    def __repr__(self) -> str:
        shown = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        shown |= {key: dict.fromkeys(getattr(self, key), "***") for key in _MAPPINGS}
        if isinstance(self.url, str):
            shown["url"] = re.sub(r"\?[^#]*", "?***", re.sub(r"//[^/@?#]*@", "//***@", self.url))
        return f"ServerSpec({', '.join(f'{key}={value!r}' for key, value in shown.items() if value != {})})"

    @property
    def variables(self) -> frozenset[str]:
        """Names of all variables that the texts mention."""
        return frozenset(match[1] for _, text in self._texts() for match in _PLACEHOLDER.finditer(text))

    @property
    def fingerprint(self) -> str:
        """A digest of everything that decides what the server answers; variables by name, not by value."""
        made_by = getattr(self.factory, "__qualname__", None)  # repr of a function has an address, other in each run
        made_by = f"{self.factory.__module__}:{made_by}" if made_by else repr(self.factory)
        parts = [self.transport, *(f"{key}={value}" for key, value in self._texts()), made_by, self.era]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def launch(self, variables: Mapping[str, str] | None = None) -> Launch:
        """The texts with their variables filled in: from ``variables`` first, then from the environment.

        Raises:
            ConfigError: for a variable without value and default, naming server, field and variable; for an ``env_file``
                that cannot be read.
        """
        environment = {name: value for name, value in os.environ.items() if name not in EPISODE_VARIABLES}
        values = {**environment, **(variables or {})}
        texts = {key: self._filled(key, text, values) for key, text in self._texts()}
        return Launch(
            command=texts.get("command"), cwd=texts.get("cwd"), url=texts.get("url"),
            args=tuple(texts[f"args[{n}]"] for n in range(len(self.args))),
            env=self._env_of_file(texts.get("env_file")) | {name: texts[f"env[{name!r}]"] for name in self.env},
            headers={name: texts[f"headers[{name!r}]"] for name in self.headers},
        )  # fmt: skip

    def check_variables(self) -> None:
        """Raise the ConfigError of `launch` now, for every variable that is not the episode's."""
        self.launch(dict.fromkeys(EPISODE_VARIABLES, ""))

    def _filled(self, key: str, text: str, values: Mapping[str, str]) -> str:
        def substitute(match: re.Match[str]) -> str:
            found, default = values.get(match[1]), match[2]
            if default is not None:
                return found or default
            if found is None:
                what = "the episode's" if match[1] in EPISODE_VARIABLES else "the environment variable"
                remedy = "" if match[1] in EPISODE_VARIABLES else f"; set it or write ${{{match[1]}:-default}}"
                raise ConfigError(f"server {self.name!r}: {key} needs {what} {match[1]}{remedy}")
            return found

        return _PLACEHOLDER.sub(substitute, text)

    def _env_of_file(self, path: str | None) -> dict[str, str]:
        """KEY=VALUE lines; empty lines, comments, ``export`` and a pair of quotes around the value are allowed."""
        values: dict[str, str] = {}
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines() if path else []
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise ConfigError(f"server {self.name!r}: env_file {path!r} cannot be read: {why}") from None
        for number, line in enumerate(map(str.strip, lines), 1):
            if line and not line.startswith("#"):
                name, equals, value = line.removeprefix("export ").partition("=")
                name, value = name.strip(), value.strip()
                if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.]*", name) or "\0" in value:
                    raise ConfigError(f"server {self.name!r}: env_file {path!r}, line {number} is not KEY=VALUE")
                quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
                values[name] = value[1:-1] if quoted else value
        return values

    def make_server(self) -> Any:
        """Call the factory. What it returns is an MCP server, or becomes one (`arenarl.mcp.local.as_server`).

        Raises:
            ConfigError: if "module:function" does not lead to a callable, or the object has nothing to offer.
        """
        from arenarl.mcp.local import as_server

        if not isinstance(self.factory, str):
            assert self.factory is not None
            return as_server(self.factory())
        module, _, path = self.factory.partition(":")
        try:
            target: Any = importlib.import_module(module)
            for part in path.split("."):
                target = getattr(target, part)
        except (ImportError, AttributeError) as error:
            raise self._bad("factory", self.factory, f"it cannot be imported: {error}") from error
        return as_server(target())


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A spec's texts for one start, secrets included: never keep, print or pickle it."""

    command: str | None = field(repr=False)
    args: tuple[str, ...] = field(repr=False)
    env: Mapping[str, str] = field(repr=False)
    cwd: str | None = field(repr=False)
    url: str | None = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)
