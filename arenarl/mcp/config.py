"""What a tool server is: `ServerSpec`, and the ``mcpServers`` JSON that other clients use too."""

from __future__ import annotations

import difflib
import importlib
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from arenarl.errors import ConfigError

Transport = Literal["stdio", "inproc"]
Scope = Literal["episode", "shared"]

_PLACEHOLDER = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(:-([^}]*))?\}")


@dataclass(frozen=True, kw_only=True)
class ServerSpec:
    """One tool server: how to start it, how long to wait for it, and who shares it. Picklable; ``repr`` hides secrets.

    Attributes:
        name: used in tool names when two servers have a tool of one name, and in messages.
        transport: "stdio" starts ``command``; "inproc" calls ``factory``.
        env: added to HOME, LOGNAME, PATH, SHELL, TERM and USER, which are all that a server inherits.
        factory: returns an `mcp.server.MCPServer` (or low-level ``Server``); a callable or "module:function".
        scope: "episode" starts a server for every episode; "shared" keeps one for all episodes of a hub, which is
            right only if no episode can see what another did.
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
    cwd: str | None = None
    factory: Callable[[], Any] | str | None = None
    scope: Scope = "episode"
    start_timeout: float = 60.0
    call_timeout: float = 30.0
    close_grace: float = 0.5
    max_message_bytes: int = 8 << 20

    def __post_init__(self) -> None:
        if isinstance(self.args, str):
            raise self._bad("args", self.args, "give a list of strings")
        object.__setattr__(self, "args", tuple(self.args))
        object.__setattr__(self, "env", dict(self.env))
        if not isinstance(self.name, str) or not self.name.strip():
            raise self._bad("name", self.name, "give the server a name")
        for key, allowed in (("transport", get_args(Transport)), ("scope", get_args(Scope))):
            if getattr(self, key) not in allowed:
                raise self._bad(key, getattr(self, key), f"use one of {', '.join(allowed)}")
        self._check_target()
        for key in ("start_timeout", "call_timeout", "close_grace", "max_message_bytes"):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise self._bad(key, value, "give a positive number")

    def _check_target(self) -> None:
        if self.transport == "inproc":
            if self.factory is None:
                raise self._bad("factory", None, 'an inproc server needs a callable or "module:function"')
            if self.command is not None or self.args or self.env or self.cwd is not None:
                raise self._bad("command", self.command, "an inproc server takes no command, args, env or cwd")
            if isinstance(self.factory, str) and not re.fullmatch(r"[\w.]+:[\w.]+", self.factory):
                raise self._bad("factory", self.factory, 'write it as "module:function"')
            return
        if self.factory is not None:
            raise self._bad("factory", self.factory, 'set transport="inproc" to use a factory')
        if not isinstance(self.command, str) or not self.command.strip():
            raise self._bad("command", self.command, "a stdio server needs the program to run")
        texts = [("command", self.command), ("cwd", self.cwd or "")]
        texts += [("args", value) for value in self.args]
        texts += [(f"env[{key!r}]", value) for key, value in self.env.items()]
        for key, value in texts:
            if not isinstance(value, str) or "\0" in value:
                raise self._bad(key, "***" if key.startswith("env") else value, "give a string without NUL")

    def _bad(self, key: str, value: object, remedy: str) -> ConfigError:
        return ConfigError(f"server {self.name!r}: {key}={value!r} is refused; {remedy}")

    def __hash__(self) -> int:
        return hash((self.name, self.transport, self.command, self.args))

    def __repr__(self) -> str:
        shown = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        shown["env"] = dict.fromkeys(self.env, "***")
        return f"ServerSpec({', '.join(f'{key}={value!r}' for key, value in shown.items())})"

    def make_server(self) -> Any:
        """Call the factory.

        Raises:
            ConfigError: if "module:function" does not lead to a callable.
        """
        if not isinstance(self.factory, str):
            assert self.factory is not None
            return self.factory()
        module, _, path = self.factory.partition(":")
        try:
            target: Any = importlib.import_module(module)
            for part in path.split("."):
                target = getattr(target, part)
        except (ImportError, AttributeError) as error:
            raise self._bad("factory", self.factory, f"it cannot be imported: {error}") from error
        return target()


_JSON_KEYS = tuple(f.name for f in fields(ServerSpec) if f.name not in ("name", "transport", "factory"))


def load_mcp_config(source: str | Path | Mapping[str, Any]) -> list[ServerSpec]:
    """Read ``{"mcpServers": {NAME: {"command": ..., "args": [...], "env": {...}, "cwd": ...}}}``.

    ``scope``, the timeouts and ``max_message_bytes`` of `ServerSpec` may stand beside ``command``. In command, args, env
    and cwd, ``${VAR}`` is the environment variable and ``${VAR:-text}`` has a default for an unset or empty one.

    Args:
        source: a path to a JSON file, or the parsed data.

    Raises:
        ConfigError: for a file that cannot be read, an unknown key, an unset variable, or a value that is refused.
    """
    data = source if isinstance(source, Mapping) else _read(Path(source))
    _known(data, ("mcpServers",), "the MCP configuration")
    servers = data.get("mcpServers")
    if not isinstance(servers, Mapping) or not servers:
        raise ConfigError('the MCP configuration names no server; write {"mcpServers": {"name": {"command": "..."}}}')
    return [_server(name, entry) for name, entry in servers.items()]


def _read(path: Path) -> Mapping[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"MCP configuration {str(path)!r} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"MCP configuration {str(path)!r} is not JSON: {error}") from error
    if not isinstance(data, Mapping):
        raise ConfigError(f"MCP configuration {str(path)!r} must be a JSON object, got {type(data).__name__}")
    return data


def _server(name: str, entry: Any) -> ServerSpec:
    if not isinstance(entry, Mapping):
        raise ConfigError(f'server {name!r} must be an object with "command", got {entry!r}')
    if "url" in entry or entry.get("type", "stdio") != "stdio":
        raise ConfigError(f"server {name!r} is not a stdio server; give a command instead of a url")
    _known(entry, (*_JSON_KEYS, "type"), f"server {name!r}")
    values = {key: value for key, value in entry.items() if key != "type"}
    for key in ("command", "cwd", "args", "env"):
        if key in values:
            values[key] = _expand(values[key], name, key)
    if not isinstance(values.get("args", []), list) or not isinstance(values.get("env", {}), Mapping):
        raise ConfigError(f"server {name!r}: args must be a list of strings and env an object of strings")
    return ServerSpec(name=name, **values)


def _known(data: Mapping[str, Any], allowed: tuple[str, ...], where: str) -> None:
    for key in data:
        if key not in allowed:
            near = difflib.get_close_matches(key, allowed, 1, 0.5)
            remedy = f"did you mean {near[0]!r}?" if near else f"known keys are {', '.join(allowed)}"
            raise ConfigError(f"{where} has the unknown key {key!r}; {remedy}")


def _expand(value: Any, server: str, key: str) -> Any:
    if isinstance(value, list):
        return [_expand(item, server, f"{key}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        return {name: _expand(item, server, f"{key}[{name!r}]") for name, item in value.items()}
    if not isinstance(value, str):
        return value

    def substitute(match: re.Match[str]) -> str:
        found, default = os.environ.get(match[1]), match[3]
        if default is not None:
            return found or default
        if found is None:
            raise ConfigError(
                f"server {server!r}: {key} needs the environment variable {match[1]}; set it or write ${{{match[1]}:-default}}"
            )
        return found

    leftover = _PLACEHOLDER.sub("", value)
    if "${" in leftover:
        raise ConfigError(f"server {server!r}: {key} has a placeholder that is not ${{VAR}} or ${{VAR:-default}}")
    return _PLACEHOLDER.sub(substitute, value)
