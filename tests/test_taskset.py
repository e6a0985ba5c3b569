"""What a task set of the user's may get wrong, and that each is named."""

from __future__ import annotations

from typing import Any

import pytest

from arenarl.errors import ConfigError, EnvError
from arenarl.mcp import ServerSpec, ToolSet, ToolSpec
from arenarl.taskset import check_tools, draw_tasks, load_taskset, servers_of
from arenarl.types import Task


class Empty:
    name, system_prompt, max_turns = "empty", "", 1

    def __init__(self, found: Any = ()) -> None:
        self.found = found

    def servers(self) -> Any:
        return self.found

    def tasks(self, split: str, count: int, seed: int) -> list[Task]:
        return list(self.found) if count else [][0]

    def checklist(self, task: Task) -> Any: ...


class Half:
    name = "half"


def test_a_class_that_is_no_task_set_is_named_with_what_it_lacks():
    with pytest.raises(
        ConfigError, match=r"'tests.test_taskset:Half' is no task set: it has no system_prompt, max_turns"
    ):
        load_taskset("tests.test_taskset:Half")
    with pytest.raises(ConfigError, match="env_config=3 must be a mapping"):
        load_taskset("tests.test_taskset:Empty", 3)  # type: ignore[arg-type]
    assert load_taskset("tests.test_taskset:Empty", {"found": (5,)}).found == (5,)  # type: ignore[attr-defined]


@pytest.mark.parametrize("found", [None, [5], "text"])
def test_servers_that_are_none_are_refused(found: Any):
    with pytest.raises(ConfigError, match=r"servers\(\) of task set 'empty' gave"):
        servers_of(Empty(found))
    spec = ServerSpec(name="a", command="a")
    assert servers_of(Empty([spec])) == (spec,)


def test_no_task_and_broken_code_are_told_apart():
    with pytest.raises(ConfigError, match="'empty' has no task in its 'train' split"):
        draw_tasks(Empty(), "train", 1, 0)
    with pytest.raises(EnvError, match=r"tasks\('train', 0, 5\) of task set 'empty': IndexError"):
        draw_tasks(Empty(), "train", 0, 5)


def test_a_task_set_may_refuse_tools_by_their_canonical_names():
    class Checking(Empty):
        def check_tools(self, tools: Any) -> None:
            self.seen = tools

    taskset = Checking()
    check_tools(taskset, ToolSet([ToolSpec(name="t", description="", parameters={}, server=s) for s in "ab"]))
    assert taskset.seen == {("a", "t"), ("b", "t")}
    check_tools(Empty(), ToolSet([]))
