"""The typed side of a connection: the SDK's client, which protocol generation the server speaks, and servers in process."""

from __future__ import annotations

import logging
from contextlib import AbstractAsyncContextManager
from typing import Any

from mcp import ClientSession, MCPError
from mcp.client._memory import InMemoryTransport
from mcp.client._transport import TransportStreams
from mcp.types import METHOD_NOT_FOUND, CallToolResult, DiscoverResult, PaginatedRequestParams, ServerCapabilities
from mcp_types.version import LATEST_MODERN_VERSION

from arenarl.mcp.config import ServerSpec
from arenarl.mcp.schema import ToolSpec
from arenarl.mcp.wire import CONNECTION_CLOSED, TOO_LARGE, UNREADABLE

_MAX_PAGES = 100
# What each server was found to speak, by the fingerprint of its spec; asked once per process.
_known: dict[str, str] = {}


class LenientSession(ClientSession):
    """The SDK's client, which throws a result away if the server breaks its own output schema; this one keeps it."""

    async def validate_tool_result(self, name: str, result: CallToolResult) -> None:
        pass


async def shake_hands(client: ClientSession, spec: ServerSpec) -> str:
    """Agree on a protocol and return "legacy" or "2026-07-28", see `ServerSpec.era`.

    "auto" tries the handshake first: most servers know it, over HTTP only it gives a session that state can be kept for,
    and one that ignores methods it does not know would let the other question wait for 10 s.

    Raises:
        MCPError: if the server refuses, or is gone.
        RuntimeError: if it speaks no version in common.
    """
    era = spec.era if spec.era != "auto" else _known.get(spec.fingerprint, "auto")
    if era == LATEST_MODERN_VERSION:
        client.adopt(_discovery(LATEST_MODERN_VERSION))
    else:
        try:
            await client.initialize()
            era = "legacy"
        except MCPError as refusal:
            if era == "legacy" or refusal.code in (CONNECTION_CLOSED, UNREADABLE, TOO_LARGE):
                raise
            try:
                found = await client.send_discover(LATEST_MODERN_VERSION)
            except MCPError:
                raise refusal from None
            client.adopt(DiscoverResult.model_validate(found))
            era = LATEST_MODERN_VERSION
    _known[spec.fingerprint] = era
    return era


async def list_tools(client: ClientSession, server: str) -> dict[str, ToolSpec]:
    """All tools by name, over all pages. Of two with one name the first counts.

    Raises:
        MCPError: if the server does not answer. One that knows no tools at all has none.
    """
    found: dict[str, ToolSpec] = {}
    cursor, seen = None, set()
    for _ in range(_MAX_PAGES):
        try:
            page = await client.list_tools(params=PaginatedRequestParams(cursor=cursor))
        except MCPError as error:
            if error.code == METHOD_NOT_FOUND:
                break
            raise
        for tool in page.tools:
            hints = tool.annotations
            found.setdefault(tool.name, ToolSpec(
                name=tool.name, description=tool.description or "", parameters=tool.input_schema, server=server,
                read_only=bool(hints and hints.read_only_hint), idempotent=bool(hints and hints.idempotent_hint),
            ))  # fmt: skip
        cursor = page.next_cursor
        if cursor is None or cursor in seen:
            break
        seen.add(cursor)
    return found


def _discovery(version: str) -> DiscoverResult:
    return DiscoverResult(
        supported_versions=[version], capabilities=ServerCapabilities(), result_type="complete", ttl_ms=0,
        cache_scope="private",
    )  # fmt: skip


def in_process(spec: ServerSpec) -> AbstractAsyncContextManager[TransportStreams]:
    """The server that the spec's factory makes, as a transport.

    `MCPServer` sets up the root logger of the process, which is for the program to do: that is undone here.

    Raises:
        ConfigError: if the factory cannot be found.
    """
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        server: Any = spec.make_server()
    finally:
        for handler in set(root.handlers) - set(handlers):
            root.removeHandler(handler)
        root.setLevel(level)
    return InMemoryTransport(server)
