"""Public MCP servers that are known to work: pinned, each in an environment of its own, with a script that proves it.

The packages are installed by `arenarl.mcp.install`; nothing here touches the network.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from arenarl.errors import ConfigError, near_name
from arenarl.mcp.config import ServerSpec
from arenarl.mcp.profiles import PROFILES, Profile

STAMP = ".ready"  # holds the digest of what was installed

Sdk = Literal["python-1", "python-2", "fastmcp", "typescript"]


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a tool and what its result must hold.

    Texts of ``arguments`` and ``expect`` may hold ``{root}``, the episode's directory, ``{marker}``, a word of the
    caller's choice, and ``{page}``, a URL below which every path P answers "the word P", but ``none`` is not found.
    """

    tool: str
    arguments: Mapping[str, Any]
    expect: str = ""

    def filled(self, **values: str) -> Call:
        """The call with ``{root}``, ``{marker}`` and ``{page}`` replaced."""

        def fill(value: Any) -> Any:
            if isinstance(value, str):
                for key, text in values.items():
                    value = value.replace(f"{{{key}}}", text)
            elif isinstance(value, Mapping):
                return {fill(key): fill(item) for key, item in value.items()}
            elif isinstance(value, list):
                return [fill(item) for item in value]
            return value

        return Call(tool=self.tool, arguments=fill(self.arguments), expect=fill(self.expect))


@dataclass(frozen=True, kw_only=True)
class PublicServer:
    """A server of the catalogue.

    Attributes:
        package, version: what the registry calls it.
        command: name of its program; ``args`` as in `ServerSpec`; ``env`` is added to its profile's.
        sdk: what it was written with.
        good: a call that works in an empty (or filled) directory. ``bad`` is one that the server must refuse.
        write, read: calls that leave a marker and that show it; None for a server without state.
        fill: makes the starting state in an empty directory, if the server cannot start without one.
        probe_args: further arguments for ``good``, ``bad``, ``write`` and ``read`` to work.
    """

    name: str
    kind: Literal["npm", "pypi"]
    package: str
    version: str
    command: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    sdk: Sdk
    good: Call
    bad: Call
    write: Call | None = None
    read: Call | None = None
    fill: Callable[[Path], None] | None = None
    probe_args: tuple[str, ...] = ()

    @property
    def pin(self) -> str:
        """The package at its exact version, as its package manager writes it."""
        return f"{self.package}{'@' if self.kind == 'npm' else '=='}{self.version}"

    @property
    def lock(self) -> Path:
        """Exact versions of the package and of everything below it, as pip's resolver or npm found them once.

        Without hosts, so that they come from whatever registry the user has set up; npm checks their digests too.
        """
        suffix = ".json" if self.kind == "npm" else ".txt"
        return Path(__file__).parent / "locks" / f"{self.name}{suffix}"

    @property
    def digest(self) -> str:
        """Changes with anything that is installed."""
        return hashlib.sha256(self.pin.encode() + self.lock.read_bytes()).hexdigest()

    def package_json(self) -> str:
        """The npm project that the lock belongs to."""
        return json.dumps({"private": True, "dependencies": {self.package: self.version}})

    def program(self, folder: Path) -> Path:
        """Where the server's program is, below the folder of all servers."""
        return folder / self.name / ("node_modules/.bin" if self.kind == "npm" else "bin") / self.command

    def is_installed(self, folder: Path) -> bool:
        """Whether the folder of all servers has this one, complete and of this version."""
        try:
            return (folder / self.name / STAMP).read_text() == self.digest and self.program(folder).exists()
        except OSError:
            return False


def root() -> Path:
    """The folder of all servers: ``ARENARL_SERVERS``, or ``.servers`` of this checkout, or one in the user's cache."""
    if chosen := os.environ.get("ARENARL_SERVERS"):
        return Path(chosen).expanduser().resolve()
    checkout = Path(__file__).resolve().parents[2] / ".servers"
    return checkout if checkout.is_dir() else Path.home() / ".cache" / "arenarl" / "servers"


def entry(name: str) -> PublicServer:
    """The server of that name.

    Raises:
        ConfigError: for an unknown name, with the nearest.
    """
    if name not in CATALOGUE:
        raise ConfigError(f"the catalogue has no server {name!r}; {near_name(name, CATALOGUE)}")
    return CATALOGUE[name]


def is_installed(name: str) -> bool:
    """Whether `find` would give the server. Raises the ConfigError of `entry`."""
    return entry(name).is_installed(root())


def find(name: str, **changes: Any) -> ServerSpec:
    """The spec of an installed server, with scope and reset that suit where its state lives.

    Args:
        changes: fields of `ServerSpec` that are to be different.

    Raises:
        ConfigError: for an unknown name, a server that is not installed, or a value that is refused.
    """
    server, folder = entry(name), root()
    if not server.is_installed(folder):
        raise ConfigError(f"server {name!r} is not installed; run `arenarl env install {name}`")
    profile = PROFILES.get(name, Profile())
    values: dict[str, Any] = {
        "command": str(server.program(folder)), "args": server.args, "env": {**profile.env, **server.env},
        "cwd": profile.cwd, "scope": profile.scope, "cache_tools": profile.cache_tools,
    }  # fmt: skip
    if "scope" not in changes:  # the reset of another scope follows from it
        values["reset"] = profile.reset
    return ServerSpec(name=name, **(values | changes))


def _repository(folder: Path) -> None:
    """A git repository with one commit."""
    author = ("-c", "user.name=Author", "-c", "user.email=author@example.com")
    first = ("commit", "--quiet", "--allow-empty", "--message", "first")
    for step in (("init", "--quiet", "--initial-branch", "main"), (*author, *first)):
        subprocess.run(["git", "-C", str(folder), *step], check=True, stdin=subprocess.DEVNULL, timeout=60)


def _thought(**more: Any) -> dict[str, Any]:
    return {"thought": "{marker}", "thoughtNumber": 1, "totalThoughts": 2, "nextThoughtNeeded": True, **more}


def _new_file(name: str) -> dict[str, Any]:
    patch = {"line_start": 1, "contents": "{marker}\n", "range_hash": ""}
    return {"files": [{"path": f"{{root}}/{name}", "file_hash": "", "patches": [patch]}]}


# At its start fastmcp asks the network for news about itself, and waits.
_FASTMCP_ENV = {"FASTMCP_CHECK_FOR_UPDATES": "off", "FASTMCP_SHOW_SERVER_BANNER": "false"}
_NODE = "@modelcontextprotocol/server-"
_SERVERS = (
    PublicServer(
        name="filesystem", kind="npm", package=f"{_NODE}filesystem", version="2026.8.31", sdk="typescript",
        command="mcp-server-filesystem", args=("${WORKDIR}",),
        good=Call(tool="list_allowed_directories", arguments={}, expect="{root}"),
        bad=Call(tool="read_text_file", arguments={"path": "{root}/none.txt"}, expect="no such file"),
        write=Call(tool="write_file", arguments={"path": "{root}/a.txt", "content": "{marker}"}),
        read=Call(tool="read_text_file", arguments={"path": "{root}/a.txt"}, expect="{marker}"),
    ),
    PublicServer(
        name="memory", kind="npm", package=f"{_NODE}memory", version="2026.8.31", sdk="typescript",
        command="mcp-server-memory",
        good=Call(tool="read_graph", arguments={}, expect="entities"),
        bad=Call(tool="create_entities", arguments={"entities": "none"}, expect="expected array"),
        write=Call(tool="create_entities", arguments={
            "entities": [{"name": "{marker}", "entityType": "note", "observations": []}]}),
        read=Call(tool="read_graph", arguments={}, expect="{marker}"),
    ),
    PublicServer(
        name="everything", kind="npm", package=f"{_NODE}everything", version="2026.8.31", sdk="typescript",
        command="mcp-server-everything", args=("stdio",),
        good=Call(tool="echo", arguments={"message": "{marker}"}, expect="{marker}"),
        bad=Call(tool="get-sum", arguments={"a": "one", "b": 2}),
    ),
    PublicServer(
        name="sequential-thinking", kind="npm", package=f"{_NODE}sequential-thinking", version="2026.8.31",
        sdk="typescript", command="mcp-server-sequential-thinking",
        good=Call(tool="sequentialthinking", arguments=_thought(), expect="thoughtHistoryLength"),
        bad=Call(tool="sequentialthinking", arguments={"thought": 1}),
        write=Call(tool="sequentialthinking", arguments=_thought(branchFromThought=1, branchId="{marker}")),
        read=Call(tool="sequentialthinking", arguments=_thought(), expect="{marker}"),
    ),
    PublicServer(
        name="git", kind="pypi", package="mcp-server-git", version="2026.10.19", sdk="python-2",
        command="mcp-server-git", args=("--repository", "${WORKDIR}"), fill=_repository,
        good=Call(tool="git_status", arguments={"repo_path": "{root}"}, expect="On branch main"),
        bad=Call(tool="git_checkout", arguments={"repo_path": "{root}", "branch_name": "none"}, expect="none"),
        write=Call(tool="git_create_branch", arguments={"repo_path": "{root}", "branch_name": "{marker}"}),
        read=Call(tool="git_branch", arguments={"repo_path": "{root}", "branch_type": "local"}, expect="{marker}"),
    ),
    PublicServer(
        name="time", kind="pypi", package="mcp-server-time", version="2026.10.19", sdk="python-2",
        command="mcp-server-time", args=("--local-timezone", "UTC"),
        good=Call(tool="convert_time", arguments={
            "source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Kolkata"}, expect="17:30"),
        bad=Call(tool="get_current_time", arguments={"timezone": "Nowhere/None"}),
    ),
    PublicServer(
        name="fetch", kind="pypi", package="mcp-server-fetch", version="2026.10.24", sdk="python-2",
        command="mcp-server-fetch", probe_args=("--allow-private-ips", "--ignore-robots-txt"),
        good=Call(tool="fetch", arguments={"url": "{page}/{marker}"}, expect="the word {marker}"),
        bad=Call(tool="fetch", arguments={"url": "{page}/none"}),
    ),
    PublicServer(
        name="sqlite", kind="pypi", package="mcp-server-sqlite", version="2025.4.25", sdk="python-1",
        command="mcp-server-sqlite", args=("--db-path", "${WORKDIR}/data.sqlite"),
        good=Call(tool="read_query", arguments={"query": "SELECT 6 * 7 AS answer"}, expect="42"),
        bad=Call(tool="read_query", arguments={"text": "SELECT 1"}),
        write=Call(tool="create_table", arguments={"query": "CREATE TABLE {marker} (id INTEGER)"}),
        read=Call(tool="list_tables", arguments={}, expect="{marker}"),
    ),
    PublicServer(
        name="calculator", kind="pypi", package="mcp-server-calculator", version="0.2.1", sdk="python-1",
        command="mcp-server-calculator",
        good=Call(tool="calculate", arguments={"expression": "6 * 7"}, expect="42"),
        bad=Call(tool="calculate", arguments={"expression": "6 *"}),
    ),
    PublicServer(
        name="text-editor", kind="pypi", package="mcp-text-editor", version="1.0.2", sdk="python-1",
        command="mcp-text-editor",
        good=Call(tool="edit_text_file_contents", arguments=_new_file("good.txt"), expect="ok"),
        bad=Call(tool="get_text_file_contents", arguments={"files": 1}),
        write=Call(tool="edit_text_file_contents", arguments=_new_file("a.txt")),
        read=Call(tool="get_text_file_contents", arguments={
            "files": [{"file_path": "{root}/a.txt", "ranges": [{"start": 1}]}]}, expect="{marker}"),
    ),
    PublicServer(
        name="shell", kind="pypi", package="mcp-shell-server", version="1.1.14", sdk="python-1",
        command="mcp-shell-server", env={"PYTHONHASHSEED": "0"},  # it prints a set of commands in a tool's description
        good=Call(tool="shell_execute", arguments={"command": ["echo", "42"], "directory": "{root}"}, expect="42"),
        bad=Call(tool="shell_execute", arguments={"command": ["reboot"], "directory": "{root}"}),
        write=Call(tool="shell_execute", arguments={"command": ["touch", "{marker}"], "directory": "{root}"}),
        read=Call(tool="shell_execute", arguments={"command": ["ls"], "directory": "{root}"}, expect="{marker}"),
    ),
    PublicServer(
        name="mathematics", kind="pypi", package="mcp-mathematics", version="2.3.1", sdk="fastmcp",
        command="mcp-mathematics", env=_FASTMCP_ENV,
        good=Call(tool="calculate_expression", arguments={"expr": "6 * 7"}, expect="42"),
        bad=Call(tool="calculate_expression", arguments={}),
        write=Call(tool="create_session", arguments={"session_id": "one", "variables": {"{marker}": 1}}),
        read=Call(tool="list_session_variables", arguments={"session_id": "one"}, expect="{marker}"),
    ),
    PublicServer(
        name="excel", kind="pypi", package="excel-mcp-server", version="2.2.2", sdk="python-2",
        command="excel-mcp-server", args=("stdio",),
        good=Call(tool="create_workbook", arguments={"path": "{root}/good.xlsx"}, expect="good.xlsx"),
        bad=Call(tool="describe_workbook", arguments={"path": "{root}/none.xlsx"}),
        write=Call(tool="create_workbook", arguments={"path": "{root}/a.xlsx", "sheets": ["{marker}"]}),
        read=Call(tool="describe_workbook", arguments={"path": "{root}/a.xlsx"}, expect="{marker}"),
    ),
    PublicServer(
        name="duckdb", kind="pypi", package="mcp-server-motherduck", version="1.1.0", sdk="fastmcp",
        command="mcp-server-motherduck", args=("--db-path", "${WORKDIR}/data.duckdb", "--read-write"),
        env=_FASTMCP_ENV,
        good=Call(tool="execute_query", arguments={"sql": "SELECT 6 * 7 AS answer"}, expect="42"),
        bad=Call(tool="execute_query", arguments={"sql": "SELECT * FROM none"}),
        write=Call(tool="execute_query", arguments={"sql": "CREATE TABLE {marker} (id INTEGER)"}),
        read=Call(tool="list_tables", arguments={}, expect="{marker}"),
    ),
)  # fmt: skip
CATALOGUE: Mapping[str, PublicServer] = {server.name: server for server in _SERVERS}
