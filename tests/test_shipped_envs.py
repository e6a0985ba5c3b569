"""Every environment of the folder that has an oracle: the oracle scores 1, doing nothing scores 0, and splits are apart."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from arenarl.async_env import AsyncToolEnv
from arenarl.errors import ConfigError
from arenarl.taskset import load_object
from tests.playing import play
from tests.processes import descendants

ENVS = Path(__file__).resolve().parent.parent / "envs"
NAMES = [
    f"arenarl.envs.{file.stem}:{name}"
    for file in sorted(ENVS.glob("*.py"))
    for name in re.findall(r"^class (\w+Tasks)\b", file.read_text(), re.MULTILINE)
    if "def oracle(" in file.read_text()
]


def test_environments_are_found():
    assert {name.partition(":")[2] for name in NAMES} >= {"FilesystemTasks", "MemoryTasks", "SqliteTasks", "GitTasks"}


@pytest.fixture(params=NAMES)
def taskset(request: pytest.FixtureRequest) -> Any:
    return load_object(request.param, "environment")


@pytest.mark.parametrize("split", ["train", "heldout"])
async def test_the_oracle_scores_one_and_doing_nothing_zero(taskset: Any, split: str):
    env = AsyncToolEnv(taskset, split=split)
    try:
        for n, task in enumerate(taskset.tasks(split, 21, seed=7)):
            assert (task.prompt, await play(env, task, taskset.oracle(task))) == (task.prompt, 1.0)
            assert [event.result.text for event in env.trajectory().events if not event.result.ok] == []
            assert (task.prompt, await play(env, task, [("done", "")[n % 2]])) == (task.prompt, 0.0)
    finally:
        await env.aclose()
    assert not descendants()


def test_there_are_two_hundred_tasks_in_each_split_of_several_kinds_and_axes(taskset: Any):
    drawn = {split: taskset.tasks(split, 200, seed=3) for split in ("train", "heldout")}
    for tasks in drawn.values():
        assert len({task.task_id for task in tasks}) == len({str(task.data) for task in tasks}) == 200
        kinds = Counter(task.kind for task in tasks)
        assert len(kinds) >= 5 and max(kinds.values()) - min(kinds.values()) <= 1
        axes = [task.data["difficulty"] for task in tasks]
        assert len(axes[0]) == 3
        assert all({axis[name] for axis in axes} == {1, 2, 3} for name in axes[0])
    assert taskset.tasks("train", 5, seed=3) == taskset.tasks("train", 5, seed=3) != taskset.tasks("train", 5, seed=4)
    assert type(taskset)(seed=1).tasks("train", 5, seed=3) != taskset.tasks("train", 5, seed=3)
    assert not {task.prompt for task in drawn["train"]} & {task.prompt for task in drawn["heldout"]}


def test_an_unknown_split_is_refused(taskset: Any):
    with pytest.raises(ConfigError, match="'test' is unknown"):
        taskset.tasks("test", 1, seed=0)
