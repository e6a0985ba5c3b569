"""Whatever a model says, there is an observation, or an end with a reason; never an exception."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from arenarl.async_env import AsyncToolEnv
from arenarl.mcp import ServerHub, ServerSpec
from arenarl.rubric import Checklist, ChecklistItem
from arenarl.tool_calls import PARSERS
from arenarl.types import Outcome, Task


class Tools:
    def echo(self, text: str) -> str:
        """Say it again."""
        return text

    def add(self, a: int, b: int = 1) -> int:
        """Add up."""
        return a + b


class Fuzzed:
    name, system_prompt, max_turns = "fuzzed", "Say anything.", 3

    def servers(self) -> tuple[ServerSpec, ...]:
        return (ServerSpec(name="tools", transport="inproc", factory=Tools, scope="shared"),)

    def tasks(self, split: str, count: int, seed: int) -> list[Task]:
        return [Task(task_id=f"{split}-{seed}", kind="any", prompt="Go.")] * count

    def checklist(self, task: Task) -> Checklist:
        return Checklist([ChecklistItem(name="answered", check=lambda trajectory: trajectory.answer is not None)])


VALID = (
    '<tool_call>\n{"name": "echo", "arguments": {"text": "hi"}}\n</tool_call>',
    '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    "<think>I call it.</think>",
    "The answer is 3.",
)
TAGS = st.sampled_from(
    ("<tool_call>", "</tool_call>", "<think>", "</think>", "<function=echo>", "</function>", "<parameter=text>", "</parameter>",
     "<|im_end|>", "\ud800", "\0", "{", "}", '"', "\\", "[" * 50)
)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
CALLS = st.builds(
    lambda name, arguments: f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>",
    st.sampled_from(("echo", "add", "ekko", "", "tools__echo")) | JSON,
    st.fixed_dictionaries({}, optional={"text": JSON, "a": JSON, "b": JSON}) | JSON,
)


@st.composite
def mutated(draw: st.DrawFn) -> str:
    """A valid message with a piece cut out, doubled or replaced."""
    text = draw(st.sampled_from(VALID)) + draw(st.sampled_from(VALID))
    start = draw(st.integers(0, len(text)))
    end = draw(st.integers(start, len(text)))
    return text[:start] + draw(TAGS | st.just(text[start:end] * 2) | st.text(max_size=4)) + text[end:]


REPLIES = mutated() | CALLS | st.lists(TAGS | CALLS | st.text(max_size=5), max_size=6).map("".join) | st.text()


@pytest.fixture(scope="module")
def loop() -> Iterator[tuple[asyncio.Runner, ServerHub]]:
    with asyncio.Runner() as runner:
        hub = ServerHub()
        yield runner, hub
        runner.run(hub.aclose())


@pytest.mark.parametrize("parser", sorted(PARSERS))
def test_any_reply_is_answered_or_ends_the_episode_with_a_reason(loop: tuple[asyncio.Runner, ServerHub], parser: str):
    runner, hub = loop
    env = AsyncToolEnv(Fuzzed(), hub=hub, parser=PARSERS[parser])

    async def play(replies: list[str]) -> None:
        await env.reset(seed=1)
        for reply in replies:
            result = await env.step(reply)
            for message in result.messages:
                message["content"].encode("utf-8")
            if result.terminated or result.truncated:
                assert env.outcome in (Outcome.SCORED, Outcome.TRUNCATED), (env.outcome, env.detail, env.error)
                return
            assert len(result.messages) == len(result.info["results"]) > 0

    @settings(max_examples=1000, suppress_health_check=list(HealthCheck))
    @given(st.lists(REPLIES, min_size=1, max_size=3))
    def fuzz(replies: list[str]) -> None:
        runner.run(play(replies))

    fuzz()
