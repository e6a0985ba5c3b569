"""Servers behind a URL, and every transport and protocol generation against a server of SDK 2."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from arenarl.errors import McpServerError
from arenarl.mcp import McpSession, ServerSpec
from tests.processes import freeze
from tests.test_mcp import DIRTY, running

SERVERS = Path(__file__).parent / "servers"
SDK2 = str(SERVERS / "sdk2.py")
FAULTY = ("-I", "-S", str(SERVERS / "faulty_http.py"))
SECRET = "hunter2"


@contextlib.contextmanager
def serve(*command: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server script that runs, and the port at which it listens."""
    with subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


@pytest.fixture(scope="module")
def sdk2() -> Iterator[int]:
    with serve(SDK2, "http") as (_, port):
        yield port


@pytest.fixture(scope="module")
def faulty() -> Iterator[int]:
    with serve(*FAULTY) as (_, port):
        yield port


def remote(port: int, path: str = "/mcp", **changes: Any) -> ServerSpec:
    values = {"name": "far", "transport": "http", "url": f"http://127.0.0.1:{port}{path}", "call_timeout": 20.0}
    return ServerSpec(**(values | changes))


# --- every transport, both generations ---------------------------------------------------------------------------


def spec_of(transport: str, port: int, era: Any) -> ServerSpec:
    if transport in ("http", "sse"):
        return remote(port, "/mcp" if transport == "http" else "/sse", transport=transport, era=era)
    if transport == "stdio":
        return ServerSpec(name="far", command=sys.executable, args=(SDK2, "stdio"), era=era)
    return ServerSpec(name="far", transport="inproc", factory="tests.servers.sdk2:make", era=era)


@pytest.mark.parametrize("era", ["auto", "2026-07-28"])
@pytest.mark.parametrize("transport", ["stdio", "http", "sse", "inproc"])
async def test_every_transport_and_era_behaves_alike(sdk2: int, transport: str, era: str):
    async with running(spec_of(transport, sdk2, era)) as session:
        assert session.era == ("legacy" if era == "auto" else era)
        tools = {tool.name: tool for tool in await session.list_tools()}
        assert {"echo", "count", "header", "fail", "ask", "grow"} <= set(tools)
        assert (tools["echo"].read_only, tools["count"].read_only, tools["count"].idempotent) == (True, False, True)
        good = await session.call("echo", {"text": "caf\ud800é"})
        assert (good.kind, good.text, good.structured) == ("ok", "caf\ufffdé", {"result": "caf\ufffdé"})
        failed = await session.call("fail", {})
        assert (failed.kind, failed.text) == ("tool_error", "Error executing tool fail: no such city")
        assert (await session.call("ask", {})).text.startswith("refused: ")
        assert (await session.call("nothing", {})).text == "Error: Unknown tool: nothing"
        calls = [session.call("echo", {"text": str(n)}) for n in range(20)]
        assert [result.text for result in await asyncio.gather(*calls)] == [str(n) for n in range(20)]
        before = session.listing_hash
        assert (await session.call("grow", {})).text == "grown"
        await session.relist()
        assert session.listing_hash != before and not session.dirty
    assert session.dead is None


async def test_listing_hash_does_not_depend_on_the_transport():
    hashes = set()
    for transport, era in (("stdio", "legacy"), ("inproc", "legacy"), ("inproc", "2026-07-28")):
        async with running(spec_of(transport, 0, era)) as session:
            hashes.add(session.listing_hash)
    assert len(hashes) == 1


async def test_sessions_over_http_have_states_and_headers_of_their_own(sdk2: int):
    headers = {"X-Episode": "${EPISODE}"}
    sessions = [await McpSession(remote(sdk2, headers=headers), {"EPISODE": str(n)}).start() for n in range(8)]
    try:
        for n, session in enumerate(sessions):
            assert [(await session.call("count", {})).text for _ in range(n + 1)] == [str(k + 1) for k in range(n + 1)]
        told = [await session.call("header", {"name": "x-episode"}) for session in sessions]
        assert [result.text for result in told] == list("01234567")
    finally:
        await asyncio.gather(*(session.close() for session in sessions))


@pytest.mark.parametrize("transport", ["http", "sse"])
async def test_change_of_the_listing_is_heard(sdk2: int, transport: str):
    async with running(spec_of(transport, sdk2, "legacy")) as session:
        before = {tool.name for tool in await session.list_tools()}
        await session.call("grow", {})
        async with asyncio.timeout(10):
            while not session.list_changed:
                await session.call("echo", {"text": ""})
        assert {tool.name for tool in await session.list_tools()} == before  # until it is asked for
        assert {tool.name for tool in await session.relist()} > before and not session.list_changed


# --- faults ------------------------------------------------------------------------------------------------------

STARTS = [
    ("/status/401?key=hunter2", "answered 401 Unauthorized; check its headers"),
    ("/status/400", "answered 400 Bad Request; check its url and its era"),
    ("/status/404", "answered 404 Not Found; check its url"),
    ("/status/500", "answered 500 Internal Server Error"),
    ("/html", "answered 200 OK with text/html instead of JSON; check its url"),
    ("/nothing", "answered 200 OK with nothing instead of JSON; check its url"),
    ("/loop", "redirects without end; check its url"),
    ("/elsewhere", "answered 307 Temporary Redirect"),
]


@pytest.mark.parametrize(("path", "reason"), STARTS, ids=[path for path, _ in STARTS])
async def test_failed_start_names_url_and_remedy_in_one_line(faulty: int, path: str, reason: str):
    with pytest.raises(McpServerError) as caught:
        await McpSession(remote(faulty, path)).start()
    assert str(caught.value) == f"MCP server 'far' (http://127.0.0.1:{faulty}{path.partition('?')[0]}) {reason}"


SSE_STARTS = [
    (
        "/mcp",
        "answered 405 Method Not Allowed with application/json instead of a stream; check its url and its transport",
    ),
    ("/away", "cannot be reached: its url is not valid; write http://host/path"),
    ("/short", "closed the connection"),
]


@pytest.mark.parametrize(("path", "reason"), SSE_STARTS, ids=[path for path, _ in SSE_STARTS])
async def test_failed_start_of_the_older_transport(faulty: int, path: str, reason: str):
    with pytest.raises(McpServerError) as caught:
        await McpSession(remote(faulty, path, transport="sse", start_timeout=10.0)).start()
    assert str(caught.value) == f"MCP server 'far' (http://127.0.0.1:{faulty}{path}) {reason}"


UNREACHABLE = [
    (
        "http://127.0.0.1:9/mcp",
        "",
        "cannot be reached (All connection attempts failed); check its url and that it runs",
    ),
    ("far/away", "", "cannot be reached: its url is not valid; write http://host/path"),
    ("http://127.0.0.1:PORT/mcp", "\n", "cannot be asked: its url or headers hold characters that HTTP does not allow"),
    ("http://127.0.0.1:PORT/mcp", "€", "cannot be asked: its url or headers hold characters that HTTP does not allow"),
]


@pytest.mark.parametrize("transport", ["http", "sse"])
@pytest.mark.parametrize(("url", "end", "reason"), UNREACHABLE, ids=["refused", "no_url", "newline", "euro"])
async def test_server_that_cannot_be_asked(faulty: int, transport: Any, url: str, end: str, reason: str):
    spec = remote(0, url=url.replace("PORT", str(faulty)), transport=transport, headers={"X": SECRET + end})
    with pytest.raises(McpServerError) as caught:
        await McpSession(spec).start()
    assert str(caught.value).endswith(f") {reason}") and SECRET not in str(caught.value)


STOPPED, UNREADABLE = (
    "Error: the tool server has stopped.",
    "Error: the tool server sent an answer that cannot be read.",
)
FAULTS: list[tuple[str, dict[str, Any], str, str, str]] = [  # tool, arguments, kind, text, kind of the call after it
    ("not_utf8", {}, "ok", "caf\ufffd", "ok"),
    ("surrogate", {}, "ok", "cut \ufffd here", "ok"),
    ("nan", {}, "ok", '{"price":null}', "ok"),
    ("mismatch", {}, "ok", "kept", "ok"),
    ("hologram", {}, "ok", '{"type":"hologram"}', "ok"),
    ("other_id", {}, "ok", "good", "ok"),
    ("huge", {}, "too_large", "Error: the answer is too large to be delivered.", "ok"),
    ("bad_json", {}, "protocol", UNREADABLE, "ok"),
    ("html", {}, "protocol", UNREADABLE, "ok"),
    ("accepted", {}, "protocol", UNREADABLE, "ok"),
    ("status", {"code": 500}, "protocol", UNREADABLE, "ok"),
    ("status", {"code": 401}, "protocol", UNREADABLE, "ok"),
    ("status", {"code": 404}, "server_dead", STOPPED, "server_dead"),
    ("error_in_400", {}, "invalid_args", "Error: text is missing", "ok"),
    ("cut", {}, "server_dead", STOPPED, "server_dead"),
    ("hang", {}, "timeout", "Error: the tool did not answer in time.", "ok"),
    ("events", {}, "ok", "good", "ok"),
    ("events_surrogate", {}, "ok", "cut \ufffd here", "ok"),
    ("events_huge", {}, "too_large", "Error: the answer is too large to be delivered.", "ok"),
    ("events_bad_json", {}, "protocol", UNREADABLE, "ok"),
    ("events_unclosed", {}, "ok", "good", "ok"),
    ("events_end", {}, "protocol", UNREADABLE, "ok"),
]


@pytest.mark.parametrize(
    ("tool", "arguments", "kind", "text", "after"), FAULTS, ids=[f"{f[0]}{f[1].get('code', '')}" for f in FAULTS]
)
async def test_fault_becomes_a_result(
    faulty: int, tool: str, arguments: dict[str, Any], kind: str, text: str, after: str
):
    spec = remote(faulty, max_message_bytes=1_000_000)
    async with running(spec) as session, running(spec) as neighbour:
        result = await session.call(tool, arguments, timeout=0.3 if tool == "hang" else 20.0)
        assert (result.kind, result.text) == (kind, text)
        assert (await session.call("echo", {"text": "again"})).kind == after
        assert session.dirty == (kind in DIRTY)
        assert (await neighbour.call("echo", {"text": "hello"})).text == "hello"


async def test_odd_tools_are_repaired_or_left_out(faulty: int):
    async with running(remote(faulty)) as session:
        tools = await session.list_tools()
    assert [(tool.name, tool.parameters, tool.read_only) for tool in tools] == [
        ("echo", {"type": "object"}, True),
        ("no_type", {"type": "object"}, False),
    ]


async def test_forgotten_session_is_dead_and_says_why(faulty: int):
    async with running(remote(faulty)) as session:
        assert (await session.call("forget", {})).kind == "ok"
        assert (await session.call("echo", {})).kind == "server_dead"
    assert str(session.dead).endswith("/mcp) has forgotten the session (404)")


async def test_server_that_dies_in_a_call_is_dead_and_says_why():
    with serve(*FAULTY) as (_, port):
        async with running(remote(port)) as session, running(remote(port)) as other:
            assert (await session.call("die", {})).kind == "server_dead"
            assert (await other.call("echo", {})).kind == "server_dead"
        for lost in (session, other):
            assert str(lost.dead).startswith(f"MCP server 'far' (http://127.0.0.1:{port}/mcp) ")
        assert str(session.dead).endswith("broke the connection (RemoteProtocolError)")


async def test_frozen_server_cannot_hold_a_session():
    with serve(*FAULTY) as (process, port):
        session = await McpSession(remote(port)).start()
        freeze(process.pid)
        assert (await session.call("echo", {}, timeout=0.2)).kind == "timeout"
        async with asyncio.timeout(10):
            await session.close()
        assert session.dirty


async def test_server_that_hangs_at_the_start_is_given_up():
    listener = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    async with listener:
        port = listener.sockets[0].getsockname()[1]
        with pytest.raises(McpServerError, match=r"did not start within 0.3 s \(start_timeout\)"):
            await McpSession(remote(port, start_timeout=0.3)).start()


async def test_modern_server_is_found_by_its_refusal_and_redirects_on_one_host_are_followed(faulty: int):
    async with running(remote(faulty, "/modern")) as modern, running(remote(faulty, "/moved")) as moved:
        assert (modern.era, moved.era) == ("2026-07-28", "legacy")
        assert [(await session.call("echo", {"text": "hi"})).text for session in (modern, moved)] == ["hi", "hi"]


async def test_session_is_ended_at_the_server(faulty: int):
    async with running(remote(faulty)) as session:
        name = (await session.call("header", {"name": "mcp-session-id"})).text
    async with running(remote(faulty)) as session:
        assert name in (await session.call("deleted", {})).text.split()


async def test_nothing_secret_is_logged(faulty: int, sdk2: int, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    for port in (faulty, sdk2):
        spec = remote(port, f"/mcp?key={SECRET}", headers={"Authorization": f"Bearer {SECRET}"})
        async with running(spec) as session:
            assert (await session.call("header", {"name": "authorization"})).text == f"Bearer {SECRET}"
            await session.call("status", {"code": 500})
    assert "HTTP Request: POST" in caplog.text
    assert SECRET not in caplog.text


async def test_of_a_url_only_the_host_is_logged(
    faulty: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FAR_KEY", SECRET)
    caplog.set_level(logging.INFO)
    with pytest.raises(McpServerError) as caught:
        await McpSession(remote(faulty, "/moved/${FAR_KEY}/mcp")).start()
    assert f"HTTP Request: POST http://127.0.0.1:{faulty}/***" in caplog.text
    assert SECRET not in caplog.text and SECRET not in str(caught.value)


async def test_flood_of_requests_is_answered_only_as_far_as_the_answers_are_taken(faulty: int):
    async with running(remote(faulty)) as session:
        assert (await session.call("flood", {})).text == "good"
        assert 0 < int((await session.call("replies", {})).text) < 100  # of 300


async def test_no_task_is_left(sdk2: int):
    before = asyncio.all_tasks()
    spec = remote(sdk2, max_calls=4)
    for _ in range(2):
        sessions = await asyncio.gather(*(McpSession(spec).start() for _ in range(16)))
        calls = [asyncio.create_task(session.call("echo", {"text": "x"})) for session in sessions for _ in range(4)]
        await asyncio.sleep(0.01)
        for call in calls[::3]:
            call.cancel()
        await asyncio.gather(*(session.close() for session in sessions))
        await asyncio.wait(calls)
    assert asyncio.all_tasks() == before
