"""Bytes of a server to messages, and any answer at all to a result."""

from __future__ import annotations

import asyncio
import copy
import json
import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from arenarl.mcp import McpSession
from arenarl.mcp.wire import EventSplitter, Inbox, LineSplitter
from arenarl.types import ToolResult
from tests.processes import descendants
from tests.test_mcp import server


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


@given(st.integers(1, 9))
def test_events_do_not_depend_on_the_chunks(size: int):
    data = b": ping\r\n\r\nid: 1\nevent: message\ndata: {\ndata:}\n\ndata:\n\nevent: end\r\ndata: caf\xe9\r\n\r\nretry: 5\n\ndata: cut"
    splitter = EventSplitter(100)
    events = [event for i in range(0, len(data), size) for event in splitter.feed(data[i : i + size])]
    assert [event[:2] for event in events] == [("message", b"{\n}"), ("message", b""), ("end", b"caf\xe9")]


def test_event_over_the_limit_is_measured_and_not_kept():
    splitter = EventSplitter(1000)
    (event, data, size), after = splitter.feed(
        b"data: " + b"x" * 900 + b"\n" + b"data: yyyyyyyyy\n" * 50 + b"\ndata: next\n\n"
    )
    assert (event, len(data), size > 1000) == ("message", 990, True)
    assert after[:2] == ("message", b"next")


def test_empty_data_lines_count():
    splitter = EventSplitter(1000)
    for name in (b"data:\n", b"data\n"):
        ((_, data, size),) = splitter.feed(name * 3000 + b"\n")
        assert (len(data), size) == (1000, 2999)


@pytest.mark.parametrize(
    ("line", "failed"),
    [
        ('{"jsonrpc": "2.0", "id": 7, "result": {"rows": ["id": 9}', [7]),
        ('{"id": "9", "jsonrpc": "2.0", "result": {oops}}', [9]),
        ('{"result": {"rows": [{"id": 7, "name": oops}]}, "jsonrpc": "2.0", "id": 9}\r', [9]),
        ('{"jsonrpc": "2.0", "result": {"rows": [{"id": 7, oops}]}}', []),
        ('{"id": 7, "level": "info", oops}', []),
        ('{"jsonrpc": "2.0", "id": 7, "method": "ping", oops}', []),
    ],
)
@pytest.mark.parametrize("size", [0, 20_000])
def test_broken_answer_fails_no_call_that_it_only_mentions(line: str, failed: list[int], size: int):
    inbox = Inbox(9_000)
    for key in (7, 9):
        inbox.sent({"id": key, "method": "tools/call"})
    text = line.replace("oops", "oops" + "x" * size).encode() + b"\n"
    assert [answer["id"] for answer in inbox.feed(text)] == failed


def test_late_answer_that_is_too_large_fails_nobody_else():
    inbox = Inbox(100)
    inbox.sent({"id": 2, "method": "tools/call"})
    assert list(inbox.feed(b'{"jsonrpc": "2.0", "id": 1, "result": "' + b"x" * 200 + b'"}\n')) == []
    assert [answer["id"] for answer in inbox.feed(b"x" * 200 + b"\n")] == [2]


def test_change_of_the_listing_is_passed_on_once_until_it_is_asked_for():
    inbox, change = Inbox(1000), b'{"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}\n'
    assert len(list(inbox.feed(change * 3))) == 1 and list(inbox.feed(change)) == []
    inbox.sent({"id": 1, "method": "tools/list"})
    assert len(list(inbox.feed(change * 3))) == 1


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


# --- any answer at all -------------------------------------------------------------------------------------------

ANSWERS: list[Any] = [
    {"content": [{"type": "text", "text": "hello"}], "isError": False},
    {"content": [{"type": "image", "data": "AAAA", "mimeType": "image/png"}, {"type": "text", "text": "é"}]},
    {"content": [{"type": "resource", "resource": {"uri": "a://b", "text": "t", "mimeType": "text/plain"}}]},
    {"content": [{"type": "resource_link", "uri": "a://b", "name": "n"}], "structuredContent": {"x": [1, {"y": 2.5}]}},
]
REPLIES = [{"jsonrpc": "2.0", "id": "%ID%", "result": answer} for answer in ANSWERS] + [
    {"jsonrpc": "2.0", "id": "%ID%", "error": {"code": -32602, "message": "no", "data": [1]}}
]
ODD: list[Any] = [
    None, True, -1, 2**70, 10**30, 1e308, math.nan, -math.inf, "", "\ud800", "\0", "x" * 5000, "%ID%", [], {}, [[]], {"": None},
    "text", "image", "resource", "input_required", [None, 1, "a", {"type": "text"}], {"type": "text", "text": 5},
    {"type": "audio", "data": "", "mimeType": "a/b"}, {"type": "resource", "resource": []}, {"code": "x"}, {"resultType": 1},
    {"method": "ping", "id": 1}, {"structuredContent": math.inf}, {"a": {"b": {"c": [{"d": "\udfff"}]}}},
]  # fmt: skip
BYTES = [
    b"",
    b"1e999",
    b"NaN",
    b"\n",
    b'"%ID%"',
    b"\xff",
    b"\xc3",
    b"\\ud83d",
    b"\\u0000",
    b"{",
    b"]",
    b'"',
    b",",
    b"9" * 5000,
]


def places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything inside a JSON value."""
    items = (
        list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    )
    return [(value, key) for key, _ in items] + [place for _, item in items for place in places(item)]


@st.composite
def wire_replies(draw: st.DrawFn) -> bytes:
    """A valid reply with up to three parts replaced, taken out or added, and then perhaps with bytes cut or put in."""
    reply = {"reply": copy.deepcopy(draw(st.sampled_from(REPLIES)))}
    for _ in range(draw(st.integers(0, 3))):
        container, key = draw(st.sampled_from(places(reply)))
        if draw(st.booleans()):
            container[key] = copy.deepcopy(draw(st.sampled_from(ODD)))
        elif isinstance(container, dict) and container is not reply:
            del container[key]
    line = json.dumps(reply["reply"], ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        start = draw(st.integers(0, len(line)))
        line = line[:start] + draw(st.sampled_from(BYTES)) + line[start + draw(st.integers(0, 20)) :]
    return line


def test_any_reply_becomes_a_result():
    kinds = Counter[str]()
    with asyncio.Runner() as runner:
        session = runner.run(McpSession(server(max_message_bytes=4000)).start())

        @settings(max_examples=2000, database=None, phases=[Phase.generate, Phase.shrink])
        @given(wire_replies())
        def answer(reply: bytes) -> None:
            result = runner.run(session.call("raw", {"hex": reply.hex()}))
            assert isinstance(result, ToolResult)
            result.text.encode()
            json.dumps(result.structured, allow_nan=False).encode()
            kinds[result.kind] += 1

        try:
            answer()
            assert runner.run(session.call("echo", {"text": "alive"})).text == "alive"
        finally:
            runner.run(session.close())
    assert set(kinds) == {"ok", "tool_error", "invalid_args", "protocol", "too_large"}
    assert not descendants()
