"""A plain Python class as a tool server."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from arenarl.errors import ConfigError
from arenarl.mcp import McpSession, ServerSpec
from arenarl.types import ToolResult


class Till:
    """Counts money."""

    def __init__(self) -> None:
        self.total = 0

    def add(self, cents: int, times: int = 1) -> int:
        """Put coins in."""
        self.total += cents * times
        return self.total

    async def take(self, cents: int) -> str:
        """Take coins out."""
        if cents > self.total:
            raise ValueError(f"only {self.total} cents are left")
        self.total -= cents
        return f"{self.total} left"

    @staticmethod
    def currency() -> str:
        return "usd"

    def _audit(self) -> None:
        raise AssertionError("no tool")


class Silent:
    value = 5


async def play(factory: Any, *calls: tuple[str, dict[str, Any]]) -> tuple[dict[str, Any], list[ToolResult]]:
    session = await McpSession(ServerSpec(name="till", transport="inproc", factory=factory)).start()
    try:
        tools = {tool.name: tool for tool in await session.list_tools()}
        return tools, [await session.call(name, arguments) for name, arguments in calls]
    finally:
        await session.close()


async def test_public_methods_are_tools():
    tools, results = await play(Till, ("add", {"cents": 5, "times": 3}), ("take", {"cents": 4}), ("currency", {}))
    assert sorted(tools) == ["add", "currency", "take"]
    assert tools["add"].description == "Put coins in."
    assert tools["add"].parameters["required"] == ["cents"]
    assert tools["add"].parameters["properties"]["times"]["default"] == 1
    assert [(result.kind, result.text) for result in results] == [("ok", "15"), ("ok", "11 left"), ("ok", "usd")]


async def test_what_a_method_raises_is_shown_to_the_model():
    _, (refused, wrong) = await play("tests.test_mcp_local:Till", ("take", {"cents": 4}), ("add", {"cents": "many"}))
    assert refused.kind == "tool_error" and refused.text.endswith("ValueError: only 0 cents are left")
    assert not wrong.ok and "cents" in wrong.text


async def test_every_session_has_an_object_of_its_own():
    first, second = await asyncio.gather(*(play(Till, ("add", {"cents": n})) for n in (1, 2)))
    assert (first[1][0].text, second[1][0].text) == ("1", "2")


class Stuck:
    go_on = threading.Event()
    entered = threading.Semaphore(0)

    def hang(self) -> str:
        Stuck.entered.release()
        Stuck.go_on.wait()
        return "late"

    def quick(self) -> str:
        return "quick"


async def test_methods_that_hang_keep_nobody_else_waiting():
    sessions = [McpSession(ServerSpec(name="s", transport="inproc", factory=Stuck, max_calls=4)) for _ in range(46)]
    await asyncio.gather(*(session.start() for session in sessions))
    try:
        hanging = [asyncio.create_task(session.call("hang", {}, timeout=20.0)) for session in sessions[:45]]
        entered = [asyncio.to_thread(Stuck.entered.acquire, timeout=20) for _ in hanging]
        assert all(await asyncio.gather(*entered))  # more at once than the SDK has threads for all servers together
        assert (await sessions[45].call("quick", {}, timeout=20.0)).text == "quick"
        assert (await sessions[0].call("quick", {}, timeout=20.0)).text == "quick"
        late = await sessions[1].call("hang", {}, timeout=0.05)
        assert late.kind == "timeout"
        assert (await sessions[1].call("quick", {}, timeout=20.0)).text == "quick"
        await sessions[1].close()  # it does not wait for the thread
        assert not Stuck.go_on.is_set()
        Stuck.go_on.set()
        kinds = [result.kind for result in await asyncio.gather(*hanging)]
        assert kinds == ["ok", "server_dead", *["ok"] * 43]
    finally:
        Stuck.go_on.set()
        await asyncio.gather(*(session.close() for session in sessions))


async def test_an_object_without_tools_is_refused():
    with pytest.raises(ConfigError, match="Silent has no public method"):
        await play(Silent)
