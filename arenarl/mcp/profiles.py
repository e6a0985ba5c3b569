"""How known public servers are shared and made clean: what `x-env.profile` stands for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from arenarl.errors import ConfigError, near_name
from arenarl.mcp.config import Reset, Scope


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Defaults of a known server; what a configuration says itself wins. Fields as in `ServerSpec`."""

    scope: Scope = "episode"
    reset: Reset = "respawn"
    env: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    cwd: str | None = None
    cache_tools: tuple[str, ...] = ()


def _on_disk(
    *, env: Mapping[str, str] = MappingProxyType({}), cwd: str | None = None, cache_tools: tuple[str, ...] = ()
) -> Profile:
    """Of a server whose process keeps nothing that its files do not."""
    return Profile(scope="pool", reset="files", env=env, cwd=cwd, cache_tools=cache_tools)


_STATELESS = Profile(scope="shared", reset="none")

# Equal work must give equal hashes, whoever does it and whenever.
_GIT_ENV = MappingProxyType({
    "GIT_AUTHOR_NAME": "Agent", "GIT_AUTHOR_EMAIL": "agent@example.com", "GIT_AUTHOR_DATE": "2026-01-01T00:00:00 +0000",
    "GIT_COMMITTER_NAME": "Agent", "GIT_COMMITTER_EMAIL": "agent@example.com", "GIT_COMMITTER_DATE": "2026-01-01T00:00:00 +0000",
    "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_TERMINAL_PROMPT": "0",
})  # fmt: skip

PROFILES: Mapping[str, Profile] = MappingProxyType({
    "filesystem": _on_disk(
        cache_tools=(
            "read_file", "read_text_file", "read_media_file", "read_multiple_files", "list_directory",
            "list_directory_with_sizes", "directory_tree", "search_files", "get_file_info", "list_allowed_directories",
        ),
    ),
    "memory": _on_disk(
        env=MappingProxyType({"MEMORY_FILE_PATH": "${WORKDIR}/memory.jsonl"}),
        cache_tools=("read_graph", "search_nodes", "open_nodes"),
    ),
    "sqlite": _on_disk(cache_tools=("read_query", "list_tables", "describe_table")),
    "git": _on_disk(
        env=_GIT_ENV,
        cache_tools=(
            "git_status", "git_diff_unstaged", "git_diff_staged", "git_diff", "git_log", "git_show", "git_branch",
        ),
    ),
    "excel": _on_disk(),
    "text-editor": _on_disk(cache_tools=("get_text_file_contents",)),
    "shell": _on_disk(
        env=MappingProxyType({"ALLOW_COMMANDS": "cat,cp,cut,echo,grep,head,ls,mkdir,mv,pwd,rm,sort,tail,touch,uniq,wc"}),
        cwd="${WORKDIR}",
    ),
    "duckdb": Profile(),  # it may hold its database open, or in memory
    "time": _STATELESS,
    "calculator": replace(_STATELESS, cache_tools=("calculate",)),
    "fetch": _STATELESS,
    "pandoc": _STATELESS,
    "everything": Profile(),
    "playwright": Profile(),
})  # fmt: skip


def find_profile(name: str) -> Profile:
    """The profile of that name.

    Raises:
        ConfigError: if there is none, with the nearest name.
    """
    if isinstance(name, str) and name in PROFILES:
        return PROFILES[name]
    raise ConfigError(f"profile {name!r} is unknown; {near_name(name, PROFILES)}")
