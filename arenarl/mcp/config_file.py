"""The JSON in which desktop clients name their MCP servers, as a list of `ServerSpec`.

Claude, Cursor and others write ``mcpServers``, VS Code writes ``servers``; both may have comments. What only we need
stands per server in a block that the clients ignore::

    {"mcpServers": {"notes": {
        "command": "mcp-server-memory", "env": {"TOKEN": "${TOKEN}"},
        "x-env": {"profile": "memory", "deny": ["delete_entities"], "limits": {"call_timeout": 10}}}}}
"""

from __future__ import annotations

import difflib
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from arenarl.errors import ConfigError, near_name
from arenarl.mcp.config import ServerSpec, Transport
from arenarl.mcp.profiles import find_profile

_log = logging.getLogger(__name__)

_EXAMPLE = '{"mcpServers": {"NAME": {"command": "PROGRAM", "args": ["${WORKDIR}"]}}}'
_TOP_KEYS = ("mcpServers", "servers")
_SYNONYMS = {"envFile": "env_file", "serverUrl": "url", "httpUrl": "url"}
_CLIENT_KEYS = ("command", "args", "env", "cwd", "url", "headers", *_SYNONYMS, "type", "transport", "disabled", "x-env")
_SPEC_KEYS = ("command", "args", "env", "env_file", "cwd", "url", "headers")
_OWN_KEYS = ("scope", "reset", "reset_tool", "allow", "deny", "cache_tools", "trust_annotations", "era")
_BLOCK_KEYS = (*_OWN_KEYS, "profile", "venv", "limits")
_LIMITS = ("start_timeout", "call_timeout", "close_grace", "max_message_bytes", "max_calls", "max_uses")
_TRANSPORTS: dict[str, Transport] = {
    "stdio": "stdio", "http": "http", "streamable-http": "http", "streamableHttp": "http", "sse": "sse"
}  # fmt: skip
_CLIENT_FOLDERS = (".vscode", ".cursor")
_OPTIONS_WITH_VALUE = ("--python", "-p", "--with", "--registry", "--index", "--index-url", "--cache-dir", "--directory")


def load_mcp_config(source: str | Path | Mapping[str, Any]) -> list[ServerSpec]:
    """Read the servers of a client's configuration, in the order of the file.

    A relative ``cwd`` or ``envFile`` is relative to the project: the folder of the file, or the one above if that is
    ``.vscode`` or ``.cursor``; the current directory if ``source`` is a mapping. A server of a file that has no ``cwd``
    starts there, as in the clients, unless it works in the episode's directory. ``${workspaceFolder}`` is the project and
    ``${userHome}`` the home directory. For other variables see `ServerSpec`. Keys of other clients that mean nothing here
    are named in one warning of the log.

    Args:
        source: a path to a JSON file, or the parsed data.

    Raises:
        ConfigError: for a file that cannot be read, an unknown key in ``x-env``, an unset variable, or a refused value.
    """
    if isinstance(source, Mapping):
        data, folder, default_cwd = source, Path.cwd(), None
    else:
        path = Path(source)
        data, folder = _read(path), path.resolve().parent
        folder = folder.parent if folder.name in _CLIENT_FOLDERS else folder
        default_cwd = str(folder)
    foreign = [key for key in data if key not in _TOP_KEYS]
    entries: dict[str, Any] = {}
    for key in _TOP_KEYS:
        block = data.get(key)
        if block is not None and not isinstance(block, Mapping):
            raise ConfigError(f"{key!r} of the MCP configuration must be an object; write {_EXAMPLE}")
        for name, entry in (block or {}).items():
            if name in entries:
                raise ConfigError(f"server {name!r} is named in 'mcpServers' and in 'servers'; keep one")
            entries[name] = entry
    if not entries:
        near = "".join(f"; {key!r} is not read" for key in foreign)
        raise ConfigError(f"the MCP configuration names no server{near}; write {_EXAMPLE}")
    if foreign:
        _log.warning("keys of the MCP configuration that mean nothing here are ignored: %s", ", ".join(foreign))
    specs = [_server(name, entry, folder, default_cwd) for name, entry in entries.items() if _enabled(name, entry)]
    if not specs:
        raise ConfigError('every server of the MCP configuration is "disabled": true; enable one')
    return specs


# --- the file ----------------------------------------------------------------------------------------------------

_STRING = r'"(?:[^"\\\n]|\\.)*"'
_COMMENT = re.compile(rf"{_STRING}|(?P<gone>//[^\n]*|/\*.*?\*/)", re.DOTALL)
_TRAILING_COMMA = re.compile(rf"{_STRING}|[\[{{,]\s*,|(?P<gone>,)(?=\s*[\]}}])")


def plain_json(text: str) -> str:
    """JSON with ``//`` and ``/* */`` comments and trailing commas as plain JSON, each character in its place.

    What is taken out becomes blanks, so that lines and columns in messages stay right. Strings are never touched.
    """

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\r\n]", " ", match[0]) if match["gone"] else match[0]

    return _TRAILING_COMMA.sub(blank, _COMMENT.sub(blank, text))


def _read(path: Path) -> Mapping[str, Any]:
    try:
        data = json.loads(plain_json(path.read_text(encoding="utf-8-sig")), object_pairs_hook=_object)
    except OSError as error:
        raise ConfigError(f"MCP configuration {str(path)!r} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # the decoder's own message would be chained with the whole text
        raise ConfigError(f"MCP configuration {str(path)!r} is not JSON: {error}") from None
    if not isinstance(data, Mapping):
        raise ConfigError(f"MCP configuration {str(path)!r} must be a JSON object; write {_EXAMPLE}")
    return data


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} stands twice in an object")
    return found


# --- one server --------------------------------------------------------------------------------------------------


def _enabled(name: str, entry: Any) -> bool:
    if not isinstance(entry, Mapping):
        raise ConfigError(f'server {name!r} must be an object with "command" or "url", not {type(entry).__name__}')
    disabled = entry.get("disabled", False)
    if not isinstance(disabled, bool):
        raise ConfigError(f"server {name!r}: disabled must be true or false")
    if disabled:
        _log.info("MCP server %r is disabled in its configuration and left out", name)
    return not disabled


def _server(name: str, entry: Mapping[str, Any], folder: Path, default_cwd: str | None) -> ServerSpec:
    entry = {key: value for key, value in entry.items() if value is not None}
    block = entry.get("x-env", {})
    _check_keys(name, entry, block)
    entry = {_SYNONYMS.get(key, key): value for key, value in entry.items() if key in _CLIENT_KEYS}
    values = {key: entry[key] for key in _SPEC_KEYS if key in entry}
    values["transport"] = _transport(name, entry)
    values |= {key: block[key] for key in _OWN_KEYS if key in block} | dict(block.get("limits", {}))
    values = {key: _resolved(value, f"server {name!r}: {key}", folder) for key, value in values.items()}
    if "profile" in block:
        _apply_profile(name, block["profile"], values)
    if values["transport"] == "stdio":
        _place(values, folder)
        _warn_unpinned(name, values)
        if "venv" not in block:
            _warn_of_our_own_environment(name, values.get("command"))
    if "venv" in block:
        _enter_venv(name, values, _resolved(block["venv"], f"server {name!r}: x-env.venv", folder), folder)
    spec = ServerSpec(name=name, **values)
    in_episode = spec.reset == "files" or "WORKDIR" in spec.variables
    if spec.transport == "stdio" and spec.cwd is None and not in_episode:
        spec = replace(spec, cwd=default_cwd)
    spec.check_variables()
    return spec


def _warn_of_our_own_environment(name: str, command: Any) -> None:
    """A server whose packages are the trainer's breaks with them, or breaks them."""
    found = shutil.which(command) if isinstance(command, str) else None
    if found is not None and sys.prefix != sys.base_prefix and Path(found).is_relative_to(sys.prefix):
        _log.warning("MCP server %r runs in the trainer's own environment; give it another one with x-env.venv", name)


def _check_keys(name: str, entry: Mapping[str, Any], block: Any) -> None:
    if not isinstance(block, Mapping) or not isinstance(block.get("limits", {}), Mapping):
        raise ConfigError(f"server {name!r}: x-env and x-env.limits must be objects, such as {{'scope': 'pool'}}")
    for where, keys, known in (("x-env", block, _BLOCK_KEYS), ("x-env.limits", block.get("limits", {}), _LIMITS)):
        for key in keys:
            if key not in known:
                other = "x-env.limits" if key in _LIMITS else "x-env" if key in _BLOCK_KEYS else None
                remedy = f"it belongs in {other}" if other else near_name(key, known)
                raise ConfigError(f"server {name!r}: {where} has the unknown key {key!r}; {remedy}")
    foreign = [key for key in entry if key not in _CLIENT_KEYS]
    for key in foreign:
        if key in (*_BLOCK_KEYS, *_LIMITS):
            where = "x-env.limits" if key in _LIMITS else "x-env"
            raise ConfigError(f"server {name!r}: {key!r} stands beside the command; it belongs in {where}")
    if foreign:
        near = {key: difflib.get_close_matches(key, _CLIENT_KEYS, 1, 0.8) for key in foreign}
        words = [f"{key} (did you mean {near[key][0]}?)" if near[key] else key for key in foreign]
        limits = "; limits go in x-env.limits, in seconds" if "timeout" in foreign else ""
        _log.warning("MCP server %r: keys that mean nothing here are ignored: %s%s", name, ", ".join(words), limits)


def _transport(name: str, entry: Mapping[str, Any]) -> Transport:
    """As it is named, else by what there is to reach; a URL that ends in ``/sse`` is of the older kind."""
    named = {key: entry[key] for key in ("type", "transport") if key in entry}
    for key, value in named.items():
        if not isinstance(value, str) or value not in _TRANSPORTS:
            raise ConfigError(f"server {name!r}: {key}={value!r} is unknown; use one of {', '.join(_TRANSPORTS)}")
    kinds = {_TRANSPORTS[value] for value in named.values()}
    if len(kinds) > 1:
        raise ConfigError(f"server {name!r}: type and transport differ; keep one")
    if kinds:
        return kinds.pop()
    if "command" in entry or "url" not in entry:
        return "stdio"
    return "sse" if re.search(r"/sse/?(\?|$)", str(entry["url"])) else "http"


def _resolved(value: Any, where: str, folder: Path) -> Any:
    """The value with the variables that are places on this machine filled in, at any depth."""
    if isinstance(value, Mapping):
        return {key: _resolved(item, f"{where}[{key!r}]", folder) for key, item in value.items()}
    if isinstance(value, list):
        return [_resolved(item, f"{where}[{n}]", folder) for n, item in enumerate(value)]
    if not isinstance(value, str):
        return value
    if asked := re.search(r"\$\{input:([^}]*)\}", value):
        raise ConfigError(
            f"{where} asks a person for ${{input:{asked[1]}}}; write ${{VAR}} and set it in the environment"
        )
    return value.replace("${workspaceFolder}", str(folder)).replace("${userHome}", str(Path.home()))


def _apply_profile(name: str, profile_name: str, values: dict[str, Any]) -> None:
    """Fill in what the entry does not say. The reset belongs to the scope: another scope, another reset."""
    try:
        profile = find_profile(profile_name)
    except ConfigError as error:
        raise ConfigError(f"server {name!r}: x-env.{error}") from None
    if values.setdefault("scope", profile.scope) == profile.scope and "reset_tool" not in values:
        values.setdefault("reset", profile.reset)
    values.setdefault("cache_tools", profile.cache_tools)
    if values["transport"] == "stdio":
        if isinstance(values.setdefault("env", {}), Mapping):
            values["env"] = {**profile.env, **values["env"]}
        if profile.cwd is not None:
            values.setdefault("cwd", profile.cwd)


def _place(values: dict[str, Any], folder: Path) -> None:
    """Make relative paths absolute; the command's only if the entry leaves the place where it starts to us."""
    for key in ("cwd", "env_file"):
        if isinstance(values.get(key), str) and not values[key].startswith("${"):
            values[key] = os.path.normpath(folder / values[key])
    command = values.get("command")
    if isinstance(command, str) and "/" in command and "cwd" not in values and not command.startswith(("/", "${")):
        values["command"] = os.path.normpath(folder / command)


def _enter_venv(name: str, values: dict[str, Any], venv: Any, folder: Path) -> None:
    """Start the command from a virtual environment, as its ``activate`` would.

    Raises:
        ConfigError: if there is no such environment, or no such command in it.
    """
    if values["transport"] != "stdio":
        raise ConfigError(f"server {name!r}: x-env.venv is for a server with a command, not for one with a url")
    programs = folder / Path(str(venv)).expanduser() / "bin"
    if not isinstance(venv, str) or not programs.is_dir():
        raise ConfigError(
            f"server {name!r}: x-env.venv={venv!r} is no virtual environment; {str(programs)!r} does not exist"
        )
    command = values.get("command")
    if isinstance(command, str) and "/" not in command:
        if not os.access(programs / command, os.X_OK):
            raise ConfigError(
                f"server {name!r}: there is no command {command!r} in {str(programs)!r}; install it there"
            )
        values["command"] = str(programs / command)
    env = values.get("env", {})
    if isinstance(env, Mapping):
        path = env.get("PATH", "${PATH:-/usr/bin:/bin}")
        values["env"] = {**env, "VIRTUAL_ENV": str(programs.parent), "PATH": f"{programs}{os.pathsep}{path}"}


def _warn_unpinned(name: str, values: Mapping[str, Any]) -> None:
    """Say so if a package runner would fetch whatever version is newest when the server starts."""
    runner, args = Path(str(values.get("command"))).name, values.get("args")
    if runner not in ("npx", "bunx", "uvx") or not isinstance(args, list):
        return
    words = iter(str(arg) for arg in args)
    package = None
    for word in words:
        option, equals, value = word.partition("=")
        if option in ("--package", "--from") or (option == "-p" and runner != "uvx"):
            package = value if equals else next(words, "")
            break
        if word in _OPTIONS_WITH_VALUE:
            next(words, "")
        elif not word.startswith("-"):
            package = word
            break
    pinned = r"[./$~].*|.+==.+|.+@(?!latest$).+" if runner == "uvx" else r"[./$~].*|.+@(?!latest$).+"
    if package and not re.fullmatch(pinned, package):
        sign = "==" if runner == "uvx" else "@"
        _log.warning(
            "MCP server %r: %s fetches the newest %r at each start, so the tools may change between runs; "
            "write %s%sVERSION, or install it and start its own command",
            name, runner, package, package.removesuffix("@latest"), sign,
        )  # fmt: skip
