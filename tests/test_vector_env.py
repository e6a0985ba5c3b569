"""Many environments as one: side by side on one loop, each ended and reset on its own."""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from arenarl.env import ToolGymEnv
from arenarl.errors import ConfigError, EnvError
from arenarl.mcp import ServerSpec
from arenarl.mcp.catalogue import find
from arenarl.rubric import Checklist, ChecklistItem
from arenarl.types import Task
from arenarl.vector_env import ToolVectorEnv
from tests.processes import descendants


class Counter:
    """A tool whose calls end together: it waits until as many are in it as `parties` says."""

    parties: asyncio.Barrier | None = None

    def __init__(self) -> None:
        self.count = 0

    async def next(self) -> int:
        """Count one on."""
        if Counter.parties is not None:
            await Counter.parties.wait()
        self.count += 1
        return self.count


class Counting:
    name, system_prompt, max_turns = "counting", "You count.", 2

    def servers(self) -> tuple[ServerSpec, ...]:
        return (ServerSpec(name="counter", transport="inproc", factory=Counter, call_timeout=20.0),)

    def tasks(self, split: str, count: int, seed: int) -> list[Task]:
        return [Task(task_id=f"{split}-{seed}", kind="count", prompt=f"Count to {seed}.")] * count

    def checklist(self, task: Task) -> Checklist:
        met = {"yes": True, "no": False}
        return Checklist([ChecklistItem(name="said", check=lambda trajectory: met.get(str(trajectory.answer)))])


NEXT = '<tool_call>{"name": "next", "arguments": {}}</tool_call>'


@pytest.fixture
def env() -> Iterator[ToolVectorEnv]:
    env = ToolVectorEnv(3, Counting())
    yield env
    env.close()
    env.close()
    assert not descendants()


def test_environments_have_seeds_states_and_ends_of_their_own(env: ToolVectorEnv):
    observations, infos = env.reset(seed=5)
    assert observations == tuple(f"You count.\n\nCount to {n}." for n in (5, 6, 7))
    assert list(infos["task_id"]) == ["train-5", "train-6", "train-7"] and all(infos["_task_id"])
    assert env.observation_space.contains(observations)
    observations, rewards, terminated, truncated, _ = env.step([NEXT, "yes", NEXT])
    assert observations == ("1", "", "1") and rewards.tolist() == [0.0, 1.0, 0.0]
    assert terminated.tolist() == [False, True, False] and not truncated.any()
    observations, _, terminated, truncated, infos = env.step([NEXT, None, "what?"])
    assert observations == ("2", "", "")
    assert (terminated.tolist(), truncated.tolist()) == ([False, False, True], [True, False, False])
    assert list(infos["outcome"]) == ["truncated", None, "abstained"] and infos["_outcome"].tolist() == [
        True,
        False,
        True,
    ]
    assert infos["checklist"][2] == {"said": None} and infos["score"][2] is None


def test_only_the_masked_are_reset(env: ToolVectorEnv):
    env.reset(seed=1)
    env.step([NEXT, "yes", NEXT])
    with pytest.raises(EnvError, match=r"environments \[1\] have ended"):
        env.step([NEXT, NEXT, NEXT])
    observations, infos = env.reset(seed=8, options={"reset_mask": np.array([False, True, False])})
    assert observations[1] == "You count.\n\nCount to 9." and infos["_task_id"].tolist() == [False, True, False]
    assert env.step([NEXT, NEXT, NEXT])[0] == ("2", "1", "2")


def test_steps_of_all_environments_overlap(env: ToolVectorEnv):
    env.reset(seed=1)
    Counter.parties = asyncio.Barrier(3)
    try:
        assert env.step([NEXT] * 3)[0] == ("1", "1", "1")
    finally:
        Counter.parties = None


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (lambda env: env.reset(seed=[1, 2]), "2 entries for 3"),
        (lambda env: env.reset(options={"reset_mask": np.array([1, 0, 1])}), "bool array"),
        (lambda env: env.reset(options={"rest_mask": 1}), "'rest_mask' is unknown"),
        (lambda env: env.step(["yes"]), "1 actions for 3"),
        (lambda env: ToolVectorEnv(0, Counting()), "num_envs=0"),
        (lambda env: ToolVectorEnv(2, Counting(), split="test"), "split='test'"),
        (lambda env: ToolVectorEnv(2, "arenarl.envs.travel:NoSuchTasks"), "NoSuchTasks"),
    ],
)
def test_bad_input_is_named(env: ToolVectorEnv, work: Any, words: str):
    with pytest.raises(ConfigError, match=words):
        work(env)


def test_gymnasium_makes_one_and_many():
    many = gymnasium.make_vec("arenarl/Travel-v0", num_envs=4)
    try:
        observations, infos = many.reset(seed=3)
        assert len(observations) == len(set(observations)) == 4 and len(infos["tools"][0]) == 7
        one = gymnasium.make("arenarl/Travel-v0")
        assert one.reset(seed=4)[0] == observations[1]
        one.close()
    finally:
        many.close()
    assert not descendants()


SHIPPED = sorted(name for name in gymnasium.registry if name.startswith("arenarl/") and name != "arenarl/Mcp-v0")


@pytest.mark.parametrize("shipped", SHIPPED)
def test_check_env_has_no_complaint_about_a_shipped_environment(shipped: str):
    check(shipped)


def test_check_env_has_no_complaint_about_a_foreign_server(tmp_path: Path):
    server = find("sequential-thinking")
    entry = {"command": server.command, "args": list(server.args)}
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": {"thinking": entry}}))
    check("arenarl/Mcp-v0", env_config={"config": str(tmp_path / "mcp.json")})


def check(name: str, **arguments: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = gymnasium.make(name, **arguments)
        assert isinstance(env.unwrapped, ToolGymEnv)
        check_env(env.unwrapped)
        env.close()
    assert not descendants()
