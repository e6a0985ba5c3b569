"""Every public server of the catalogue, as a training run uses it: real packages, real processes, eight episodes at once."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from arenarl.mcp import McpSession, ServerHub, ServerSpec
from arenarl.mcp.catalogue import CATALOGUE, Call, PublicServer, find, is_installed, root
from arenarl.mcp.config import Era, Transport
from arenarl.mcp.paths import VIRTUAL_ROOT
from arenarl.mcp.pool import Workspace
from arenarl.mcp.schema import ToolSet, ToolSpec
from arenarl.types import ToolResult
from tests.processes import descendants

MARKERS = [f"marker_{n}" for n in range(8)]
REFUSALS = ("tool_error", "invalid_args", "unknown_tool")
SDKS = {"python-1", "python-2", "fastmcp", "typescript"}


class Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        word = self.path.strip("/")
        self.send_response(404 if word == "none" else 200)
        self.send_header("Content-Type", "text/plain")
        self.end_headers()
        self.wfile.write(f"the word {word}".encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def page() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def installed(name: str) -> ServerSpec:
    if not is_installed(name):
        pytest.fail(f"server {name} is not installed in {root()}: run `make servers`")
    spec = find(name, call_timeout=60.0, cache_tools=())  # each call is to reach the server
    return replace(spec, args=(*spec.args, *CATALOGUE[name].probe_args))


def listing(tools: Sequence[ToolSpec]) -> list[dict]:
    """What the model would read of the tools, checked for the normal form."""
    assert all(tool.name for tool in tools)
    schemas = ToolSet(tools).schemas
    assert schemas and all(s["function"]["parameters"]["type"] == "object" for s in schemas)
    assert all("$ref" not in str(s) and "properties" in s["function"]["parameters"] for s in schemas)
    return schemas


async def alone(server: PublicServer, spec: ServerSpec, page: str, folder: Path) -> list[dict]:
    """One session, of the newest protocol that the server knows: a good call, bad ones that it must survive. Its listing."""
    era: Era = "2026-07-28" if "\nmcp==2." in server.lock.read_text() else "legacy"
    if server.fill is not None:
        server.fill(folder)
    session = await McpSession(replace(spec, era=era), {"WORKDIR": str(folder)}).start()
    try:
        assert session.era == era
        good, bad = (c.filled(root=str(folder), marker="marker", page=page) for c in (server.good, server.bad))
        first = await session.call(good.tool, good.arguments)
        assert first.kind == "ok" and good.expect in first.text, first
        refused = await session.call(bad.tool, bad.arguments)
        assert refused.kind in REFUSALS and bad.expect in refused.text, refused
        nothing = await session.call("no_such_tool", {})
        assert nothing.kind in REFUSALS or nothing.text.startswith("Error"), nothing
        again = await session.call(good.tool, good.arguments)
        assert again.kind in ("ok", "tool_error") and session.dead is None, again  # some refuse to do it twice
        return listing(await session.list_tools())
    finally:
        await session.close()


async def open_many(hub: ServerHub, server: PublicServer, spec: ServerSpec, count: int) -> list[Workspace]:
    """Workspaces that are opened at once."""
    return list(await asyncio.gather(*(hub.open([spec], fill=server.fill) for _ in range(count))))


async def check_isolation(server: PublicServer, spaces: Sequence[Workspace], page: str) -> None:
    """Each episode leaves its own marker, if it can, and then sees it and nobody else's."""
    if server.write is not None:
        assert [result.kind for result in await in_all(spaces, server.write, page)] == ["ok"] * len(spaces)
    look = server.read or server.good
    seen = await in_all(spaces, look, page)
    assert all(shows(result, marker, look) for result, marker in zip(seen, MARKERS, strict=False)), seen


async def in_all(spaces: Sequence[Workspace], call: Call, page: str) -> list[ToolResult]:
    """The call in all workspaces at once, each with its own marker."""
    filled = [call.filled(root=VIRTUAL_ROOT, marker=marker, page=page) for marker in MARKERS[: len(spaces)]]
    name = spaces[0].tools[0].server
    return await asyncio.gather(
        *(space.call(name, c.tool, c.arguments, timeout=120.0) for space, c in zip(spaces, filled, strict=True))
    )


def shows(result: ToolResult, marker: str, call: Call) -> bool:
    """Whether a result has its own marker and nobody else's."""
    others = [other for other in MARKERS if other != marker and other in result.text]
    return result.kind == "ok" and call.filled(root=VIRTUAL_ROOT, marker=marker).expect in result.text and not others


@pytest.mark.parametrize("name", CATALOGUE)
async def test_a_public_server_conforms(name: str, page: str, tmp_path: Path):
    server, spec = CATALOGUE[name], installed(name)
    hub = ServerHub()
    try:
        async with asyncio.TaskGroup() as group:
            first = group.create_task(alone(server, spec, page, tmp_path))
            opening = group.create_task(open_many(hub, server, spec, len(MARKERS)))
        tools, spaces = first.result(), opening.result()
        assert all(listing(space.tools) == tools for space in spaces)
        await check_isolation(server, spaces, page)
        homes = {space.root for space in spaces}
        for space in spaces:
            hub.put(space)
        pooled = spec.scope == "pool"
        spaces = await open_many(hub, server, spec, len(MARKERS) if pooled else 1)
        assert not pooled or {space.root for space in spaces} == homes  # the same slots, so the same processes
        if server.read is not None:
            old = await in_all(spaces, server.read, page)
            assert not any(marker in result.text for result in old for marker in MARKERS), old
        await check_isolation(server, spaces[::-1], page)
    finally:
        await hub.aclose()
    assert not descendants()


def test_the_public_servers_are_of_every_generation():
    assert {CATALOGUE[name].sdk for name in CATALOGUE if is_installed(name)} == SDKS


@asynccontextmanager
async def everything(mode: str) -> AsyncIterator[int]:
    """The everything-server as somebody else's process, listening on the port that is yielded."""
    installed("everything")
    program = CATALOGUE["everything"].program(root())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        program, mode, env={"PATH": os.environ["PATH"], "PORT": str(port)}, stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    said = b""
    try:
        async with asyncio.timeout(60):
            while f"port {port}".encode() not in said:
                line = await process.stderr.readline()
                assert line, f"the server has ended: {said.decode()}"
                said += line
        rest = asyncio.create_task(process.stderr.read())  # a full pipe would stop the server
        yield port
        assert process.returncode is None
        process.kill()
        await rest
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.parametrize(("transport", "mode", "path"), [("http", "streamableHttp", "mcp"), ("sse", "sse", "sse")])
async def test_a_public_server_behind_a_url(transport: Transport, mode: str, path: str, page: str):
    server, hub = CATALOGUE["everything"], ServerHub()
    async with everything(mode) as port:
        spec = ServerSpec(name="everything", transport=transport, url=f"http://127.0.0.1:{port}/{path}")
        try:
            spaces = await open_many(hub, server, spec, len(MARKERS))
            assert all(listing(space.tools) == listing(spaces[0].tools) for space in spaces)
            assert "get-sum" in {tool.name for tool in spaces[0].tools}
            await check_isolation(server, spaces, page)
            refused = await in_all(spaces, server.bad, page)
            assert all(result.kind in REFUSALS for result in refused)
            await check_isolation(server, spaces, page)
        finally:
            await hub.aclose()
    assert not descendants()
