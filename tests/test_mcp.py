"""Sessions against a server that misbehaves on purpose; their start and their end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from arenarl.errors import ConfigError, McpServerError
from arenarl.mcp import McpSession, ServerSpec
from arenarl.mcp.nursery import hold
from tests.processes import descendants

SERVERS = Path(__file__).parent / "servers"
FAULTY = str(SERVERS / "faulty.py")


def server(*args: str, **changes: Any) -> ServerSpec:
    values = {"name": "faulty", "command": sys.executable, "args": ("-I", "-S", FAULTY, *args), "call_timeout": 20.0}
    return ServerSpec(**(values | changes))


@contextlib.asynccontextmanager
async def running(spec: ServerSpec):
    session = await McpSession(spec).start()
    try:
        yield session
    finally:
        await session.close()


# --- faults (research: mcp.md, section 5) ------------------------------------------------------------------------

STOPPED, UNREADABLE = (
    "Error: the tool server has stopped.",
    "Error: the tool server sent an answer that cannot be read.",
)
DIRTY = {"timeout", "protocol", "too_large", "server_dead"}
TOO_LARGE, TIMEOUT = "Error: the answer is too large to be delivered.", "Error: the tool did not answer in time."


@dataclass(frozen=True)
class Fault:
    """A server started with ``--start start``, its tool ``name`` called ``calls`` times: the last result, and what echo gives
    after it. A start that fails has kind "start_failed" and a reason that holds ``text``."""

    name: str
    kind: str
    text: str
    after: str = "ok"
    start: str = ""
    calls: int = 1
    limit: float = 20.0


FAULTS = [
    # it ends
    Fault("exit", "server_dead", STOPPED, "server_dead"),  # after a partial line
    Fault("exit_after", "ok", "last words", "server_dead"),
    Fault("mortal", "ok", "3", "server_dead", calls=3),
    Fault("close_stdout", "server_dead", STOPPED, "server_dead"),
    # it is silent
    Fault("hang", "timeout", TIMEOUT, "timeout", limit=0.3),
    Fault("no_newline", "timeout", TIMEOUT, "protocol", limit=0.3),  # the next answer comes on the same line
    # what it writes is no JSON, or too much
    Fault("bad_json", "protocol", UNREADABLE),
    Fault("deep", "protocol", UNREADABLE),
    Fault("nested", "ok", json.dumps({"deep": json.loads("[" * 100 + "]" * 100)}, separators=(",", ":"))),
    Fault("not_utf8", "ok", "caf\ufffd"),
    Fault("surrogate", "ok", "cut \ufffd here"),
    Fault("nan", "ok", '{"price":null}'),
    Fault("infinity", "ok", '{"n":[null,null,1000.0]}'),
    Fault("big", "ok", "x" * 5_000_000),
    Fault("huge", "too_large", TOO_LARGE),
    Fault("vast", "too_large", TOO_LARGE),
    # other things beside the answer
    Fault("log_lines", "ok", "after the noise"),
    Fault("blank_lines", "ok", "after blanks"),
    Fault("stderr", "ok", "written"),
    Fault("progress", "ok", "done"),
    Fault("logs", "ok", "logged"),
    Fault("grow", "ok", "grown"),
    Fault("echo_request", "ok", "echoed"),
    Fault("ask_client", "ok", "asked"),
    Fault("ask_sampling", "ok", "Sampling not supported"),
    Fault("input_required", "tool_error", "Error: the tool wants to ask the user, and there is no user who could answer"),
    # answers that the protocol does not allow
    Fault("string_id", "ok", "same"),
    Fault("twice", "ok", "first"),
    Fault("unknown_content", "ok", '{"type":"hologram","depth":3}\n[image , 0.0 kB]\nnull\n5'),
    Fault("no_content", "ok", ""),
    Fault("null_result", "ok", ""),
    Fault("bare_string", "ok", "just text"),
    Fault("structured_mismatch", "ok", "kept"),
    Fault("structured_list", "ok", "[1, 2]"),
    Fault("reserved_error", "tool_error", "Error: busy"),
    Fault("string_error", "tool_error", "Error: plain"),
    # answers that it does allow
    Fault("image", "ok", "[image image/png, 3.0 kB]"),
    Fault("structured_only", "ok", '{"y":1}'),
    Fault("error_result", "tool_error", "Error: no such city"),
    Fault("rpc_error", "tool_error", "Error: internal"),
    Fault("bad_args", "invalid_args", "Error: text is missing"),
    Fault("no_such_tool", "invalid_args", "Error: Unknown tool: no_such_tool"),
    # its start
    Fault("error_result", "tool_error", "Error: no such city", start="late"),
    Fault("image", "ok", "[image image/png, 3.0 kB]", start="banner"),
    Fault("image", "ok", "[image image/png, 3.0 kB]", start="log_first"),
    Fault("image", "ok", "[image image/png, 3.0 kB]", start="modern"),
    Fault("", "start_failed", "exited with code 1; last words on stderr: missing API key", "server_dead", start="exit"),
    Fault("", "start_failed", "exited with code 2; last words on stdout: usage: faulty DIR", "server_dead", start="exit_stdout"),
    Fault("", "start_failed", "exited with code 0", "server_dead", start="mute"),
    Fault("", "start_failed", "failed: RuntimeError: Unsupported protocol version from the server: 1999-01-01", "server_dead", start="old"),
    Fault("", "start_failed", "did not start within 0.5 s (start_timeout)", "server_dead", start="slow", limit=0.5),
]  # fmt: skip


async def suffer(fault: Fault) -> tuple[str, str, str]:
    """(kind, text, kind of the call after it)."""
    start = ("--start", fault.start) if fault.start else ()
    limit = 9.0 if fault.kind != "start_failed" else fault.limit  # a stall of the SDK's 10 s is a failure
    session = McpSession(server(*start, start_timeout=limit, close_grace=0.2))
    try:
        try:
            await session.start()
            results = [await session.call(fault.name, {}, timeout=fault.limit) for _ in range(fault.calls)]
            kind, text = results[-1].kind, results[-1].text
            assert (results[-1].server, results[-1].tool) == ("faulty", fault.name)
        except McpServerError as error:
            assert str(error).startswith("MCP server 'faulty' (") and "\n" not in str(error)
            kind, text = "start_failed", fault.text if fault.text in str(error) else str(error)
        last = await session.call("echo", {"text": "again"}, timeout=fault.limit)
        assert last.kind != "ok" or last.text == "again"
        assert session.dirty == (not {kind, last.kind}.isdisjoint(DIRTY))
        return kind, text, last.kind
    finally:
        await session.close()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.start}-{fault.name}".strip("-"))
async def test_fault_ends_as_its_row_says_and_no_neighbour_notices(fault: Fault):
    async with running(server()) as neighbour:
        assert (await neighbour.call("echo", {"text": "before"})).text == "before"
        suffering = asyncio.create_task(suffer(fault))
        while not suffering.done():
            assert (await neighbour.call("echo", {"text": "during"})).text == "during"
            await asyncio.wait({suffering}, timeout=0.02)
        assert await suffering == (fault.kind, fault.text, fault.after)
        assert (await neighbour.call("echo", {"text": "after"})).text == "after"
    assert not descendants()


async def test_two_timeouts_in_a_row_make_the_session_suspect():
    async with running(server(call_timeout=0.3)) as session:
        assert (await session.call("hang", {})).kind == "timeout"
        assert not session.suspect and session.dead is None
        assert (await session.call("echo", {})).kind == "timeout"
        assert session.suspect and session.dirty


async def test_timeouts_of_a_short_limit_or_in_the_line_are_not_the_servers():
    async with running(server(call_timeout=0.3)) as session:
        assert [(await session.call("hang", {}, timeout=0.1)).kind for _ in range(3)] == ["timeout"] * 3
        assert not session.suspect
    async with running(server(call_timeout=0.3, max_calls=1)) as session:
        hanging = asyncio.create_task(session.call("hang", {}, timeout=20.0))
        await asyncio.sleep(0)
        assert [(await session.call("echo", {})).kind for _ in range(3)] == ["timeout"] * 3
        assert not session.suspect and not session.dirty
        hanging.cancel()


# --- one session -------------------------------------------------------------------------------------------------


async def test_arguments_that_utf8_cannot_carry_are_mended():
    async with running(server()) as session:
        result = await session.call("echo_all", {"text": "a\ud800", "\udfff": [1, {"é": "\ud801"}]})
    assert json.loads(result.text) == {"text": "a\ufffd", "\ufffd": [1, {"é": "\ufffd"}]}


async def test_odd_tools_are_repaired_or_left_out_and_the_listing_is_paged():
    async with running(server()) as session:
        tools = {tool.name: tool for tool in await session.list_tools()}
    assert len(tools) == 50  # 47 well-formed over six pages, 3 of the 6 odd ones
    assert tools["no_schema"].parameters == {"type": "object"}
    assert tools["no_type"].parameters == {"type": "object", "properties": {"a": True, "b": {}}}
    assert tools["null_words"].description == ""
    assert "not_an_object" not in tools
    assert [(tools[name].read_only, tools[name].idempotent) for name in ("echo", "hang")] == [
        (True, True),
        (False, False),
    ]


async def test_allow_and_deny_choose_the_tools_on_offer():
    async with running(server(allow=("echo", "hang"), deny=("hang",))) as session, running(server()) as whole:
        assert [tool.name for tool in await session.list_tools()] == ["echo"]
        assert session.listing_hash == whole.listing_hash


@pytest.mark.parametrize("key", ["allow", "deny"])
async def test_a_name_that_no_tool_has_is_refused_with_the_nearest(key: str):
    with pytest.raises(
        ConfigError, match=f"server 'faulty': {key} names 'eco', which is none of its tools; did you mean echo"
    ):
        await McpSession(server(**{key: ("echo", "eco")})).start()
    assert not descendants()


async def test_listing_is_frozen_until_it_is_asked_for_again():
    async with running(server()) as session:
        before, listed = session.listing_hash, await session.list_tools()
        assert not session.list_changed
        await session.call("grow", {})
        await session.call("echo", {})
        assert session.list_changed and await session.list_tools() == listed and session.listing_hash == before
        assert {tool.name for tool in await session.relist()} - {tool.name for tool in listed} == {"grown"}
        assert not session.list_changed and session.listing_hash != before and len(before) == 64
    with pytest.raises(McpServerError, match="has stopped"):
        await session.relist()


async def test_relist_of_a_server_that_hangs_ends():
    async with running(server(call_timeout=0.2)) as session:
        await session.call("hang", {})
        with pytest.raises(McpServerError, match=r"did not list its tools within 0.2 s"):
            await session.relist()


async def test_session_is_dirty_once_nobody_waits_for_a_call():
    async with running(server()) as session:
        await session.call("error_result", {})
        assert not session.dirty
        call = asyncio.create_task(session.call("hang", {}))
        await asyncio.sleep(0.01)
        call.cancel()
        await asyncio.wait({call})
        assert session.dirty and session.dead is None


async def test_calls_beyond_the_cap_wait_in_order_and_within_their_time():
    from mcp.server import MCPServer

    app, entered, gate = MCPServer("gate"), list[int](), asyncio.Event()

    @app.tool()
    async def enter(n: int) -> None:
        entered.append(n)
        await gate.wait()

    async with running(ServerSpec(name="gate", transport="inproc", factory=lambda: app, max_calls=2)) as session:
        calls = [asyncio.create_task(session.call("enter", {"n": n})) for n in range(5)]
        await asyncio.sleep(0)
        late = await session.call("enter", {"n": 9}, timeout=0.1)
        assert (late.kind, entered, session.dirty) == ("timeout", [0, 1], False)
        gate.set()
        assert [result.kind for result in await asyncio.gather(*calls)] == ["ok"] * 5
        assert entered == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("start", "era", "found", "methods"),
    [
        ((), "auto", "legacy", ["initialize", "notifications/initialized", "tools/list"]),
        (("--start", "modern"), "auto", "2026-07-28", ["initialize", "server/discover", "tools/list"]),
        (("--start", "modern"), "2026-07-28", "2026-07-28", ["tools/list"]),
    ],
)
async def test_era_is_found_once_and_then_kept(
    tmp_path: Path, start: tuple[str, ...], era: Any, found: str, methods: list[str]
):
    log = tmp_path / "methods"
    spec = server(*start, era=era, env={"FAULTY_METHODS": str(log)})
    async with running(spec) as session:
        assert session.era == found
    assert list(dict.fromkeys(log.read_text().split())) == methods
    log.write_text("")
    async with running(spec) as session:
        assert (session.era, (await session.call("echo", {"text": "hi"})).text) == (found, "hi")
    assert log.read_text().split()[0] == ("tools/list" if found == "2026-07-28" else "initialize")


async def test_pinned_legacy_does_not_try_the_other_era():
    with pytest.raises(McpServerError, match="Method not found"):
        await McpSession(server("--start", "modern", era="legacy")).start()


async def test_death_is_explained_with_exit_code_and_last_words():
    async with running(server()) as session:
        await session.call("exit", {})
    assert isinstance(session.dead, McpServerError)
    assert "exited with code 7" in str(session.dead) and "out of luck" in str(session.dead)
    assert session.stderr_tail == "out of luck\n"


async def test_calls_in_flight_at_the_death_all_end():
    async with running(server(max_calls=3)) as session:
        calls = [asyncio.create_task(session.call(tool, {})) for tool in ("exit", "echo", "count")]
        assert {result.kind for result in await asyncio.gather(*calls)} == {"server_dead"}


# --- start and end -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("early", [True, False])
async def test_start_that_is_given_up_more_than_once_ends_its_process(early: bool):
    """By the caller and by ``close``, and by the timer: before both, or while the process is being ended."""
    nursery, pid = hold(), None  # alive afterwards, as with other servers around
    session = McpSession(server("--start", "stubborn", start_timeout=0.6, close_grace=0.5))
    starting = asyncio.create_task(session.start())
    while pid is None or not (early or session._deadline.expired()):
        pid = pid or session.pid
        await asyncio.sleep(0.01)
    starting.cancel()
    await asyncio.wait({starting})
    await session.close()
    assert starting.cancelled() and not psutil.pid_exists(pid)
    await nursery.release()
    assert not descendants()


async def test_an_ending_has_time_for_both_graces():
    session = await McpSession(server(close_grace=100.0)).start()
    before = asyncio.get_running_loop().time()
    await session.close()
    assert session._deadline.when() > before + 200


async def test_flood_of_requests_from_a_server_that_does_not_read_is_not_queued():
    async with running(server()) as session:
        assert (await session.call("flood", {})).text == "flooded"
        assert 0 < int((await session.call("replies", {})).text) < 5000  # of 20000; a pipe holds about 1700
        await session.relist()


# --- in process --------------------------------------------------------------------------------------------------


def make_counter() -> Any:
    from mcp.server import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError

    app, seen = MCPServer("counter"), []

    @app.tool()
    def count(step: int = 1) -> int:
        """Count calls."""
        if step == 0:
            raise ToolError("step must not be 0")
        seen.append(step)
        return sum(seen)

    return app


async def test_inproc_server_behaves_like_a_process():
    spec = ServerSpec(name="here", transport="inproc", factory=make_counter)
    async with running(spec) as one, running(spec) as two:
        assert [tool.name for tool in await one.list_tools()] == ["count"]
        assert [(await one.call("count", {"step": n})).text for n in (1, 2)] == ["1", "3"]
        assert (await two.call("count", {})).text == "1"
        error = await one.call("count", {"step": 0})
        assert (error.kind, error.text.endswith("step must not be 0")) == ("tool_error", True)
    assert (await one.call("count", {})).kind == "server_dead"


async def test_inproc_server_leaves_the_root_logger_alone():
    root = logging.getLogger()
    kept, level, root.handlers = root.handlers, root.level, []  # basicConfig adds only to a root without handlers
    try:
        async with running(ServerSpec(name="here", transport="inproc", factory=make_counter)):
            assert (root.handlers, root.level) == ([], level)
    finally:
        root.handlers = kept


async def test_inproc_factory_that_fails_is_named():
    with pytest.raises(ConfigError, match=r"factory='json:nothing'.*cannot be imported"):
        await McpSession(ServerSpec(name="x", transport="inproc", factory="json:nothing")).start()
    with pytest.raises(McpServerError, match=r"MCP server 'x' \('math:factorial'\) failed: TypeError"):
        await McpSession(ServerSpec(name="x", transport="inproc", factory="math:factorial")).start()
