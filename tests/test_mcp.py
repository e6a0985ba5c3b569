"""Sessions against a server that misbehaves on purpose; schemas, names, configuration."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arenarl.errors import ConfigError, EnvError, McpServerError
from arenarl.mcp import McpSession, ServerHub, ServerSpec, ToolSet, ToolSpec, load_mcp_config
from arenarl.mcp.schema import argument_problem, clean_text, normalise_schema, result_text, truncate_text
from arenarl.mcp.wire import Inbox, LineSplitter
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

FAULTS = [  # tool, kind, text, kind of the call after it
    ("exit", "server_dead", "Error: the tool server has stopped.", "server_dead"),
    ("exit_after", "ok", "last words", "server_dead"),
    ("close_stdout", "server_dead", "Error: the tool server has stopped.", "server_dead"),
    ("bad_json", "protocol", "Error: the tool server sent an answer that cannot be read.", "ok"),
    ("nested", "ok", json.dumps({"deep": json.loads("[" * 100 + "]" * 100)}, separators=(",", ":")), "ok"),
    ("deep", "protocol", "Error: the tool server sent an answer that cannot be read.", "ok"),
    ("huge", "too_large", "Error: the answer is too large to be delivered.", "ok"),
    ("log_lines", "ok", "after the noise", "ok"),
    ("not_utf8", "ok", "caf\ufffd", "ok"),
    ("surrogate", "ok", "cut \ufffd here", "ok"),
    ("big", "ok", "x" * 5_000_000, "ok"),
    ("unknown_content", "ok", '{"type":"hologram","depth":3}\n[image , 0.0 kB]\nnull\n5', "ok"),
    ("image", "ok", "[image image/png, 3.0 kB]", "ok"),
    ("no_content", "ok", "", "ok"),
    ("null_result", "ok", "", "ok"),
    ("bare_string", "ok", "just text", "ok"),
    ("structured_only", "ok", '{"y":1}', "ok"),
    ("structured_list", "ok", "[1, 2]", "ok"),
    ("nan", "ok", '{"price":null}', "ok"),
    ("string_id", "ok", "same", "ok"),
    ("twice", "ok", "first", "ok"),
    ("stderr", "ok", "written", "ok"),
    ("ask_client", "ok", "asked", "ok"),
    ("error_result", "tool_error", "Error: no such city", "ok"),
    ("rpc_error", "tool_error", "Error: internal", "ok"),
    ("reserved_error", "tool_error", "Error: busy", "ok"),
    ("string_error", "tool_error", "Error: plain", "ok"),
    ("bad_args", "invalid_args", "Error: text is missing", "ok"),
]


@pytest.mark.parametrize(("tool", "kind", "text", "after"), FAULTS, ids=[f[0] for f in FAULTS])
async def test_fault_becomes_a_result(tool: str, kind: str, text: str, after: str):
    async with running(server()) as session:
        result = await session.call(tool, {})
        assert (result.kind, result.text, result.server, result.tool) == (kind, text, "faulty", tool)
        second = await session.call("echo", {"text": "again"})
        assert second.kind == after
        assert after != "ok" or second.text == "again"
    assert not descendants()


async def test_hang_ends_at_its_deadline_and_makes_the_session_suspect():
    async with running(server(call_timeout=0.3)) as session:
        assert (await session.call("hang", {})).kind == "timeout"
        assert not session.suspect and session.dead is None
        assert (await session.call("echo", {}, timeout=0.1)).kind == "timeout"
        assert session.suspect
    assert not descendants()


async def test_answer_without_a_newline_times_out():
    async with running(server(call_timeout=0.3)) as session:
        assert (await session.call("no_newline", {})).kind == "timeout"


async def test_arguments_that_utf8_cannot_carry_are_mended():
    async with running(server()) as session:
        result = await session.call("echo_all", {"text": "a\ud800", "\udfff": [1, {"é": "\ud801"}]})
    assert json.loads(result.text) == {"text": "a\ufffd", "\ufffd": [1, {"é": "\ufffd"}]}


async def test_odd_tools_are_repaired_or_left_out_and_the_listing_is_paged():
    async with running(server()) as session:
        tools = {tool.name: tool for tool in await session.list_tools()}
    assert len(tools) == 36  # 33 well-formed over four pages, 3 of the 6 odd ones
    assert tools["no_schema"].parameters == {"type": "object"}
    assert tools["no_type"].parameters == {"type": "object", "properties": {"a": True, "b": {}}}
    assert tools["null_words"].description == ""
    assert "not_an_object" not in tools


async def test_death_is_explained_with_exit_code_and_last_words():
    async with running(server()) as session:
        await session.call("exit", {})
    assert isinstance(session.dead, McpServerError)
    assert "exited with code 7" in str(session.dead) and "out of luck" in str(session.dead)
    assert session.stderr_tail == "out of luck\n"


async def test_calls_in_flight_at_the_death_all_end():
    async with running(server()) as session:
        calls = [asyncio.create_task(session.call(tool, {})) for tool in ("exit", "echo", "count")]
        assert {result.kind for result in await asyncio.gather(*calls)} == {"server_dead"}


# --- start and end -----------------------------------------------------------------------------------------------

STARTS = [
    (server("--start", "exit"), "exited with code 1; last words on stderr: missing API key"),
    (server("--start", "exit_stdout"), "exited with code 2; last words on stdout: usage: faulty DIR"),
    (server("--start", "slow", start_timeout=0.5, close_grace=0.1), "did not start within 0.5 s (start_timeout)"),
    (server(command="no-such-program-here"), "cannot run its command ([Errno 2] No such file or directory)"),
    (server(command=str(SERVERS)), "cannot run its command ([Errno 13] Permission denied)"),
    (server(cwd=str(SERVERS / "missing")), "No such file or directory"),
]


@pytest.mark.parametrize(
    ("spec", "reason"), STARTS, ids=["exits", "exits_on_stdout", "slow", "no_command", "folder", "no_cwd"]
)
async def test_failed_start_is_one_error_in_one_line(spec: ServerSpec, reason: str):
    session = McpSession(spec)
    with pytest.raises(McpServerError) as caught:
        await session.start()
    assert str(caught.value).startswith("MCP server 'faulty' (") and "\n" not in str(caught.value)
    assert reason in str(caught.value)
    assert (await session.call("echo", {})).kind == "server_dead"
    assert not descendants()


async def test_banner_before_the_handshake_is_skipped():
    async with running(server("--start", "banner")) as session:
        assert (await session.call("echo", {"text": "hello"})).text == "hello"


@pytest.mark.parametrize("fault", ["ignore_eof", "ignore_all", "family"])
async def test_close_leaves_no_process_whatever_the_server_ignores(fault: str):
    session = await McpSession(server("--start", fault, close_grace=0.2)).start()
    family = descendants()
    assert len(family) == {"ignore_eof": 2, "ignore_all": 2, "family": 4}[fault]
    await session.close()
    await session.close()
    assert not [process for process in family if process.is_running()]


async def test_session_lives_and_ends_in_any_task_and_leaks_nothing():
    rng, complaints = random.Random(0), []
    loop = asyncio.get_running_loop()
    before = asyncio.all_tasks()
    loop.set_exception_handler(lambda _, context: complaints.append(context))

    async def torment() -> None:
        session = McpSession(server(call_timeout=rng.random() * 0.2, close_grace=0.1))

        async def use() -> None:
            await session.start()
            while True:
                await session.call(rng.choice(["echo", "hang", "exit", "close_stdout"]), {})

        user = asyncio.create_task(use())
        await asyncio.wait({user}, timeout=rng.random() * rng.choice([0.2, 2]))
        user.cancel()
        closers = [asyncio.create_task(session.close()) for _ in range(3)]
        await asyncio.sleep(0)
        closers[0].cancel()
        await asyncio.wait({user, *closers})
        assert user.cancelled() and closers[0].cancelled() and closers[1].exception() is None

    for _ in range(4):
        await asyncio.gather(*(torment() for _ in range(6)))
    loop.set_exception_handler(None)
    assert complaints == []
    assert not descendants()
    assert asyncio.all_tasks() == before


def test_loop_that_ends_with_sessions_open_leaves_no_process():
    async def forget() -> list[psutil.Process]:
        for _ in range(2):
            await McpSession(server("--start", "family")).start()
        return descendants()

    family = asyncio.run(forget())
    assert len(family) == 8
    assert not psutil.wait_procs(family, timeout=20)[1]


@pytest.mark.parametrize("how", ["", "fork"])
def test_no_descendant_survives_a_killed_parent(how: str):
    command = [sys.executable, str(SERVERS / "parent.py"), how]
    environment = os.environ | {"PYTHONPATH": str(SERVERS.parent.parent)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        told = json.loads(parent.stdout.readline())
        family = [psutil.Process(pid) for pid in told["family"]]
        parent.send_signal(signal.SIGKILL)
    try:
        assert len(family) == 10  # twice supervisor, shell, server, grandchild, daemon
        assert not psutil.wait_procs(family, timeout=20)[1]
    finally:
        if told["copy"]:
            os.kill(told["copy"], signal.SIGKILL)


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


async def test_inproc_factory_that_fails_is_named():
    with pytest.raises(ConfigError, match=r"factory='json:nothing'.*cannot be imported"):
        await McpSession(ServerSpec(name="x", transport="inproc", factory="json:nothing")).start()
    with pytest.raises(McpServerError, match=r"MCP server 'x' \('math:factorial'\) failed: TypeError"):
        await McpSession(ServerSpec(name="x", transport="inproc", factory="math:factorial")).start()


# --- hub ---------------------------------------------------------------------------------------------------------


async def test_concurrent_episodes_do_not_see_each_other():
    hub = ServerHub()

    async def episode(calls: int) -> list[str]:
        async with hub.lease(server()) as session:
            return [(await session.call("count", {})).text for _ in range(calls)]

    lengths = [1 + n % 5 for n in range(32)]
    assert await asyncio.gather(*map(episode, lengths)) == [[str(k + 1) for k in range(n)] for n in lengths]
    await hub.aclose()
    assert not descendants()


async def test_shared_server_is_one_and_is_restarted_once_for_all_who_wait(tmp_path: Path):
    log = tmp_path / "log"
    spec, hub = server(scope="shared", env={"FAULTY_LOG": str(log)}), ServerHub()

    async def once(tool: str) -> str:
        async with hub.lease(spec) as session:
            return (await session.call(tool, {})).text

    assert sorted(await asyncio.gather(*(once("count") for _ in range(8)))) == [str(n + 1) for n in range(8)]
    assert await once("exit") == "Error: the tool server has stopped."
    assert sorted(await asyncio.gather(*(once("count") for _ in range(4)))) == ["1", "2", "3", "4"]
    await hub.aclose()
    assert log.read_text().split() == ["start", *["count"] * 8, "exit", "start", *["count"] * 4]  # no call twice
    assert not descendants()


async def test_shared_server_that_never_starts_is_given_up(tmp_path: Path):
    log = tmp_path / "log"
    spec, hub = server("--start", "exit", scope="shared", env={"FAULTY_LOG": str(log)}), ServerHub()
    for _ in range(3):
        with pytest.raises(McpServerError, match="missing API key"):
            await hub.acquire(spec)
    with pytest.raises(McpServerError, match=r"failed 3 times in a row and is not started again.*missing API key"):
        await hub.acquire(spec)
    await hub.aclose()
    assert log.read_text().split() == ["start"] * 3


async def test_hanging_shared_server_is_replaced_for_the_next_lease():
    spec, hub = server(scope="shared", call_timeout=0.3, close_grace=0.1), ServerHub()
    async with hub.lease(spec) as old:
        for _ in range(2):
            assert (await old.call("hang", {})).kind == "timeout"
        async with hub.lease(spec) as new:
            assert new is not old
            assert (await new.call("count", {})).text == "1"
    await hub.aclose()
    assert not descendants()


async def test_aclose_ends_starts_in_flight_and_refuses_new_ones():
    before, hub = asyncio.all_tasks(), ServerHub(spawn_width=1)
    waiting = [asyncio.create_task(hub.acquire(server("--start", "slow", close_grace=0.1))) for _ in range(3)]
    await asyncio.wait(waiting, timeout=0.2)  # the first is starting, the others wait for it
    assert descendants()
    await hub.aclose()
    await hub.aclose()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(result) for result in results] == [McpServerError] * 3
    with pytest.raises(McpServerError, match="closed"):
        await hub.acquire(server())
    assert not descendants() and asyncio.all_tasks() == before


async def test_cancelled_waiter_does_not_stop_a_shared_start_for_the_others():
    spec, hub = server(scope="shared"), ServerHub()
    first, second = (asyncio.create_task(hub.acquire(spec)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert (await (await second).call("count", {})).text == "1"
    assert first.cancelled()
    await hub.aclose()
    assert not descendants()


def test_hub_belongs_to_one_loop():
    hub = ServerHub()

    async def use() -> None:
        async with hub.lease(ServerSpec(name="c", transport="inproc", factory=make_counter)):
            pass

    asyncio.run(use())
    with pytest.raises(EnvError, match="one hub per loop"):
        asyncio.run(use())


# --- wire --------------------------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=40)), st.integers(1, 9))
def test_lines_do_not_depend_on_the_chunks(pieces: list[bytes], size: int):
    data = b"\n".join([*pieces, b""])
    splitter = LineSplitter(10_000)
    lines = [line for i in range(0, len(data), size) for line, _ in splitter.feed(data[i : i + size])]
    assert lines == data.split(b"\n")[:-1]


def test_long_line_keeps_its_ends_and_its_size_only():
    splitter = LineSplitter(20_000)
    chunks = [b"start" + b"a" * 9_995, *[b"b" * 10_000] * 50, b"end\nnext\n"]
    lines = [pair for chunk in chunks for pair in splitter.feed(chunk)]
    assert lines[0][1] == 510_003 and lines[1] == (b"next", 4)
    assert lines[0][0].startswith(b"start") and lines[0][0].endswith(b"end") and len(lines[0][0]) == 8192


def test_broken_answer_fails_the_call_it_names():
    inbox = Inbox(100)
    for key in (1, 2, 3):
        inbox.sent({"id": key, "method": "tools/call"})
    answers = list(inbox.feed(b'{"jsonrpc": "2.0", "id": 2, oops\n{"id": 3, "result": "' + b"x" * 200 + b'"}\n'))
    assert [(a["id"], a["error"]["code"]) for a in answers] == [(2, -32012), (3, -32013)]
    assert [a["id"] for a in inbox.feed(b'{"oops\n')] == [1]  # the only one that waits
    assert list(inbox.feed(b'{"oops\n')) == []
    assert list(inbox.log)[-1] == '{"oops'


def test_cancelled_call_waits_no_more():
    inbox = Inbox(100)
    inbox.sent({"id": 1, "method": "tools/call"})
    inbox.sent({"method": "notifications/cancelled", "params": {"requestId": 1}})
    assert list(inbox.feed(b'{"jsonrpc": "2.0", "id": 1, "result": {}}\n')) == []


# --- schemas -----------------------------------------------------------------------------------------------------

SCHEMAS = [  # given, normalised
    ({}, {"type": "object", "properties": {}}),
    ({"properties": None, "required": "x", "title": "T", "$schema": "s"}, {"type": "object", "properties": {}}),
    (
        {"properties": {"title": {"type": "string", "title": "Title"}, "n": True}, "required": ["title", "gone"]},
        {"type": "object", "properties": {"title": {"type": "string"}, "n": {}}, "required": ["title"]},
    ),
    (
        {"properties": {"n": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None, "description": None}}},
        {"type": "object", "properties": {"n": {"default": None, "nullable": True, "type": "integer"}}},
    ),
    (
        {"properties": {"n": {"type": ["string", "null"]}, "m": {"type": ["string", "integer"]}, "c": {"const": 5}}},
        {
            "type": "object",
            "properties": {
                "n": {"type": "string", "nullable": True},
                "m": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
                "c": {"enum": [5], "type": "integer"},
            },
        },
    ),
    (
        {"properties": {"p": {"$ref": "#/$defs/P", "description": "d"}}, "$defs": {"P": {"properties": {"x": {"type": "number"}}}}},
        {
            "type": "object",
            "properties": {"p": {"properties": {"x": {"type": "number"}}, "description": "d", "type": "object"}},
        },
    ),
    (
        {"properties": {"a": {"allOf": [{"$ref": "#/$defs/a~1b"}]}, "w": {"$ref": "http://x/y"}}, "$defs": {"a/b": {"enum": ["u", None]}}},
        {"type": "object", "properties": {"a": {"enum": ["u"], "nullable": True, "type": "string"}, "w": {}}},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "expected"), SCHEMAS)
def test_schema_golden(schema: dict[str, Any], expected: dict[str, Any]):
    assert normalise_schema(schema) == expected


def test_recursive_schema_ends():
    tree = {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}}
    result = normalise_schema({"$ref": "#/$defs/tree", "$defs": {"tree": tree}})
    assert result["properties"]["kids"]["items"] == {"type": "object", "description": "nested further in the same way"}
    bomb = {f"d{n}": {"properties": {k: {"$ref": f"#/$defs/d{n + 1}"} for k in "abcdefgh"}} for n in range(12)}
    assert len(json.dumps(normalise_schema({"$ref": "#/$defs/d0", "$defs": bomb}))) < 1_000_000


SIMPLE = st.sampled_from(["string", "integer", "number", "boolean", "null", "array", "object"])
NODES = st.recursive(
    st.one_of(
        st.booleans(),
        st.fixed_dictionaries(
            {}, optional={"type": st.one_of(SIMPLE, st.lists(SIMPLE, max_size=3)), "title": st.just("t")}
        ),
        st.fixed_dictionaries({"$ref": st.sampled_from(["#", "#/$defs/a", "#/$defs/b", "#/nowhere", "x.json"])}),
        st.fixed_dictionaries({"const": st.one_of(st.none(), st.integers(), st.text(max_size=2))}),
        st.fixed_dictionaries({"enum": st.lists(st.one_of(st.none(), st.text(max_size=2)), max_size=3)}),
    ),
    lambda node: st.fixed_dictionaries(
        {},
        optional={
            "anyOf": st.lists(node, max_size=3),
            "oneOf": st.lists(node, max_size=2),
            "allOf": st.lists(node, max_size=2),
            "items": st.one_of(node, st.lists(node, max_size=2)),
            "properties": st.dictionaries(st.sampled_from("xyz"), node, max_size=3),
            "additionalProperties": node,
            "required": st.lists(st.sampled_from("xyzw"), max_size=3),
            "description": st.one_of(st.none(), st.just("words")),
            "not": node,
        },
    ),
    max_leaves=6,
)
ROOTS = st.builds(
    lambda root, a, b: {**(root if isinstance(root, dict) else {}), "$defs": {"a": a, "b": b}}, NODES, NODES, NODES
)


def keys_of(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value).union(*map(keys_of, value.values()))
    return set().union(*map(keys_of, value)) if isinstance(value, list) else set()


@settings(deadline=None, max_examples=60)
@given(ROOTS)
def test_normalised_schema_is_plain_and_stable(schema: dict[str, Any]):
    result = normalise_schema(schema)
    assert result["type"] == "object" and isinstance(result["properties"], dict)
    assert not keys_of(result) & {"$ref", "$defs", "const", "title"}
    assert normalise_schema(result) == result


PARAMETERS = st.sampled_from(
    [
        {"type": "integer"},
        {"type": ["string", "null"]},
        {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        {"const": "fixed"},
        {"enum": ["a", "b", None]},
        {"$ref": "#/$defs/kind"},
        {"allOf": [{"$ref": "#/$defs/kind"}]},
    ]
)
VALUES = {"integer": 3, "string": "s", "boolean": True}


@settings(deadline=None, max_examples=40)
@given(st.dictionaries(st.sampled_from("pqrs"), PARAMETERS), st.lists(st.sampled_from("pqrst")))
def test_what_fits_the_normalised_schema_fits_the_original(properties: dict[str, Any], required: list[str]):
    known = sorted(set(required) & set(properties))
    schema = {"type": "object", "properties": properties, "required": known, "$defs": {"kind": {"enum": ["k"]}}}
    shown = normalise_schema(schema)
    arguments = {name: p["enum"][0] if "enum" in p else VALUES[p["type"]] for name, p in shown["properties"].items()}
    assert argument_problem(json.dumps(schema), arguments) is None


ARGUMENTS = [
    ({"city": "Oslo", "days": 2}, None),
    ({"days": 2}, "missing required argument: city"),
    ({}, "missing required arguments: city, days"),
    ({"city": 5, "days": 2}, "5 is not of type 'string' (at city)"),
    ({"city": "Oslo", "days": 0}, "0 is less than the minimum of 1 (at days)"),
    ({"city": "Oslo", "days": 2, "x": 1}, "Additional properties are not allowed ('x' was unexpected)"),
    ({"city": "Oslo", "days": float("nan")}, "the arguments hold a value that JSON cannot carry"),
]


@pytest.mark.parametrize(("arguments", "problem"), ARGUMENTS)
def test_argument_problem_is_one_readable_line(arguments: dict[str, Any], problem: str | None):
    fields = {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}}
    schema = {"type": "object", "properties": fields, "required": ["city", "days"], "additionalProperties": False}
    found = argument_problem(json.dumps(schema), arguments)
    assert found == problem or (problem is not None and found is not None and found.startswith(problem))


@pytest.mark.parametrize(
    "schema", [{"type": "nonsense"}, {"$ref": "http://x/y"}, {"properties": {"a": {"pattern": "\\p{L}("}}}]
)
def test_broken_schema_accepts_everything(schema: dict[str, Any]):
    assert argument_problem(json.dumps(schema), {"a": "b"}) is None


def tool(server_name: str, name: str) -> ToolSpec:
    return ToolSpec(name=name, description="", parameters={"type": "object"}, server=server_name)


def test_names_are_bare_if_unique_and_lead_back():
    tools = ToolSet([tool("web", "search"), tool("files", "search"), tool("web", "get.page"), tool("web", "x" * 70)])
    assert tools.names[:3] == ["web__search", "files__search", "get_page"]
    assert len(tools.names[3]) == 64 and tools.names[3].startswith("x" * 55 + "_")
    assert tools.resolve("files__search") == tool("files", "search")
    assert tools.name_of("web", "get.page") == "get_page" and tools.resolve("search") is None
    assert tools.near("serch")[0] in ("web__search", "files__search")


@given(
    st.lists(st.tuples(st.sampled_from(["a", "b b"]), st.text("ab._/é", max_size=4)), unique=True, max_size=8),
    st.randoms(),
)
def test_names_are_unique_valid_and_independent_of_order(pairs: list[tuple[str, str]], rng: random.Random):
    tools = ToolSet([tool(*pair) for pair in pairs])
    shuffled = rng.sample(pairs, len(pairs))
    other = ToolSet([tool(*pair) for pair in shuffled])
    assert len(set(tools.names)) == len(pairs)
    assert all(name and len(name) <= 64 and set(name) <= set("ab_") | set("0123456789cdef-") for name in tools.names)
    assert {pair: other.name_of(*pair) for pair in pairs} == {pair: tools.name_of(*pair) for pair in pairs}


def test_result_text_prefers_text_and_marks_the_rest():
    text, image = (
        {"type": "text", "text": "a\0\x1b[31mb\ud800"},
        {"type": "audio", "data": "AAAA", "mimeType": "audio/wav"},
    )
    assert result_text([text, image], {"k": 1}) == "ab\ufffd\n[audio audio/wav, 0.0 kB]"
    assert result_text([image], {"k": "é"}) == '[audio audio/wav, 0.0 kB]\n{"k":"é"}'
    link = {"type": "resource_link", "name": "n", "uri": "file:///x", "mimeType": None}
    assert (
        result_text([link, {"type": "resource", "resource": {"uri": "u", "text": "inside"}}])
        == "[resource n file:///x]\ninside"
    )


def test_truncation_keeps_both_ends():
    assert truncate_text("short", 5) == ("short", False)
    assert truncate_text("a" * 80 + "b" * 20, 20) == ("a" * 14 + "\n[... 80 characters omitted ...]\n" + "b" * 6, True)
    lines = "".join(f"line {n}\n" for n in range(100))
    cut, was_cut = truncate_text(lines, 100)
    assert was_cut and cut.startswith("line 0\nline 1\n") and cut.endswith("\nline 98\nline 99\n")


@given(st.text(st.characters(), max_size=50))
def test_clean_text_can_be_encoded_and_is_stable(text: str):
    cleaned = clean_text(text)
    assert "\0" not in cleaned
    assert cleaned.encode().decode() == cleaned
    assert clean_text(cleaned) == cleaned or "\x1b" in text


# --- configuration -----------------------------------------------------------------------------------------------


def test_config_file_is_read_and_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ARENARL_TEST_TOKEN", "secret")
    path = tmp_path / "mcp.json"
    entry = {
        "command": "prog",
        "args": ["--at", "${ARENARL_UNSET:-here}"],
        "env": {"T": "${ARENARL_TEST_TOKEN}"},
        "call_timeout": 5,
    }
    path.write_text(
        json.dumps({"mcpServers": {"one": entry, "two": {"type": "stdio", "command": "p", "scope": "shared"}}})
    )
    one, two = load_mcp_config(path)
    assert one == ServerSpec(name="one", command="prog", args=("--at", "here"), env={"T": "secret"}, call_timeout=5)
    assert (two.scope, two.call_timeout) == ("shared", 30.0)
    assert "secret" not in repr(one) and "***" in repr(one)
    assert pickle.loads(pickle.dumps(one)) == one and hash(one) == hash(pickle.loads(pickle.dumps(one)))


BAD_CONFIGS = [
    ({"mcpservers": {}}, "unknown key 'mcpservers'; did you mean 'mcpServers'"),
    ({"mcpServers": {}}, "names no server"),
    ({"mcpServers": {"s": {"command": "c", "arg": []}}}, "server 's' has the unknown key 'arg'; did you mean 'args'"),
    ({"mcpServers": {"s": {"url": "http://x"}}}, "server 's' is not a stdio server"),
    ({"mcpServers": {"s": {"args": []}}}, "server 's': command=None is refused"),
    ({"mcpServers": {"s": {"command": "c", "args": "--flag"}}}, "args must be a list"),
    ({"mcpServers": {"s": {"command": "c", "args": [5]}}}, "args=5 is refused"),
    ({"mcpServers": {"s": {"command": "c", "env": {"K": "${ARENARL_UNSET}"}}}}, r"env\['K'\] needs the environment variable ARENARL_UNSET"),
    ({"mcpServers": {"s": {"command": "c", "args": ["${input:x}"]}}}, r"args\[0\] has a placeholder"),
    ({"mcpServers": {"s": {"command": "c", "scope": "pool"}}}, "scope='pool' is refused; use one of episode, shared"),
    ({"mcpServers": {"s": {"command": "c", "call_timeout": 0}}}, "call_timeout=0 is refused"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "message"), BAD_CONFIGS)
def test_bad_config_is_refused_by_name(data: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        load_mcp_config(data)


BAD_SPECS = [
    ({}, "needs the program to run"),
    ({"command": "c", "factory": print}, 'set transport="inproc"'),
    ({"transport": "inproc"}, "needs a callable"),
    ({"transport": "inproc", "factory": "no_colon"}, "module:function"),
    ({"transport": "inproc", "factory": print, "command": "c"}, "takes no command"),
    ({"transport": "http", "command": "c"}, "use one of stdio, inproc"),
    ({"command": "c", "env": {"K": "a\0b"}}, r"env\['K'\]='\*\*\*'"),
]


@pytest.mark.parametrize(("values", "message"), BAD_SPECS)
def test_bad_spec_is_refused(values: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        ServerSpec(name="s", **values)


def test_missing_config_file_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"nothing\.json' cannot be read: No such file"):
        load_mcp_config(tmp_path / "nothing.json")
