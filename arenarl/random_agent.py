"""Agents without a model: one that calls tools at random, and one that says what a task set's oracle says."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import string
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

from arenarl.async_env import AsyncToolEnv
from arenarl.errors import ConfigError, EnvError
from arenarl.mcp import ServerHub
from arenarl.mcp.paths import VIRTUAL_ROOT
from arenarl.mcp.tape import Tape
from arenarl.taskset import TaskSet, draw_tasks
from arenarl.types import Task, Trajectory

EPISODE_LIMIT_S = 120.0
_PATH_WORDS = ("path", "file", "dir", "folder", "source", "destination")


def first_task(taskset: TaskSet, split: str = "train", seed: int = 0) -> Task:
    """The task that a seed picks. Raises ConfigError if the split has none."""
    return draw_tasks(taskset, split, 1, seed)[0]


def random_action(tools: Sequence[dict[str, Any]], rng: random.Random) -> str:
    """What a random agent says: mostly a call with random arguments, now and then junk or an answer."""
    if not tools or rng.random() < 0.2:
        return rng.choice(("I do not know.", "<tool_call>{broken", "<tool_call>[]</tool_call>"))
    name, arguments = random_call(tools, rng)
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def random_call(
    tools: Sequence[dict[str, Any]], rng: random.Random, optional: float = 0.75
) -> tuple[str, dict[str, Any]]:
    """(a tool's name, arguments as its schema asks for, each optional one with the probability ``optional``)."""
    function = rng.choice(tools)["function"]
    return function["name"], _random_object(function["parameters"], rng, optional)


def _random_object(schema: Mapping[str, Any], rng: random.Random, optional: float) -> dict[str, Any]:
    required, known = schema.get("required", []), schema.get("properties", {})
    chosen = [name for name in known if name in required or rng.random() < optional]
    return {name: _random_value(name, known[name], rng, optional) for name in chosen}


def _random_value(name: str, schema: Mapping[str, Any], rng: random.Random, optional: float) -> Any:
    """A value of the schema's type; a text that seems to be a path leads into the working directory, or is relative."""
    if options := schema.get("enum"):
        return rng.choice(options)
    text = "".join(rng.choices(string.ascii_lowercase, k=6))
    match schema.get("type", "string"):
        case "integer":
            return rng.randint(0, 9)
        case "number":
            return rng.random()
        case "boolean":
            return rng.random() < 0.5
        case "array":
            items = schema.get("items", {})
            kinds = items if isinstance(items, list) else [items] * rng.randint(1, 2)
            return [_random_value(name, kind, rng, optional) for kind in kinds]
        case "object":
            return _random_object(schema, rng, optional)
    if any(word in name.lower() for word in _PATH_WORDS):
        return rng.choice((VIRTUAL_ROOT, f"{VIRTUAL_ROOT}/{text[0]}.txt", f"{VIRTUAL_ROOT}/{text}.txt", f"{text}.txt"))
    return text


async def play_random(
    taskset: TaskSet, split: str, seed: int, hub: ServerHub | None = None
) -> tuple[Trajectory, AsyncToolEnv]:
    """One episode of the random agent, within `EPISODE_LIMIT_S`."""
    rng = random.Random(seed)
    return await _play(taskset, split, seed, hub, lambda env: random_action(env.tools, rng))


async def play_oracle(
    taskset: TaskSet, split: str, seed: int, hub: ServerHub | None = None
) -> tuple[Trajectory, AsyncToolEnv]:
    """One episode as the task set's own oracle plays it, within `EPISODE_LIMIT_S`.

    Raises:
        ConfigError: if the task set has no oracle.
    """
    oracle = getattr(taskset, "oracle", None)
    if oracle is None:
        raise ConfigError(f"task set {taskset.name!r} has no oracle; use --agent random")
    left: Iterator[str] = iter(())

    def say(env: AsyncToolEnv) -> str:
        nonlocal left
        if env.trajectory().num_turns == 0:
            left = iter(oracle(env.task))
        return next(left, "")

    return await _play(taskset, split, seed, hub, say)


async def _play(
    taskset: TaskSet, split: str, seed: int, hub: ServerHub | None, say: Callable[[AsyncToolEnv], str]
) -> tuple[Trajectory, AsyncToolEnv]:
    env = AsyncToolEnv(taskset, split=split, hub=hub)
    try:
        async with asyncio.timeout(EPISODE_LIMIT_S):
            await env.reset(seed=seed)
            while env.outcome is None:
                await env.step(say(env))
        return env.trajectory(), env
    except TimeoutError:
        raise EnvError(f"the episode of seed {seed} did not end in {EPISODE_LIMIT_S:g} s") from None
    finally:
        await env.aclose()


@contextlib.asynccontextmanager
async def hub_of(replay: str | None = None, record: str | None = None) -> AsyncIterator[ServerHub]:
    """A hub for the length of the block, on a tape if one is named; nothing is left of it."""
    path = replay or record
    hub = ServerHub(tape=Tape(path, mode="replay" if replay else "record") if path else None)
    try:
        yield hub
    finally:
        await hub.aclose()
