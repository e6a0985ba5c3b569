"""Tasks that carry their own rubric: where they come from, who checks them, and that good work is worth full marks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from arenarl.async_env import AsyncToolEnv
from arenarl.envs.rubric_tasks import RubricTasks
from arenarl.envs.shared import call
from arenarl.envs.travel import KINDS, TravelTasks, parse_table
from arenarl.envs.travel_rubrics import label_of
from arenarl.envs.travel_server import TravelTools
from arenarl.errors import ConfigError
from arenarl.rubric import ChecklistItem
from arenarl.task_pool import PoolTask, TaskPool
from arenarl.taskset import load_taskset
from arenarl.types import Task, ToolCall, ToolEvent, ToolResult, Trajectory
from tests.playing import play
from tests.processes import descendants

TOOLS = TravelTools()
EMBEDDED = RubricTasks(heldout="embedded")
SILENT = Trajectory(messages=(), events=(), answer=None)
RECORD = {"query": "A cafe in Wuxi?", "metadata": {"rubrics": ["The cafe is Lotus.", "It is nice there."]}}


class CountingGrader:
    """Says yes to the first item and cannot tell the others."""

    def __init__(self, greeting: str = "") -> None:
        self.said = [greeting]

    async def grade(self, items: Sequence[ChecklistItem], trajectory: Trajectory, task: Task) -> list[bool | None]:
        self.said.append(f"graded {len(items)} of {task.task_id}")
        return [True, *[None] * (len(items) - 1)]

    def begin_step(self, version: int) -> None:
        self.said.append(f"step {version}")

    async def aclose(self) -> None:
        self.said.append("closed")


class NoGrader:
    pass


class BareBase:
    """A base with what a task set must have, and nothing more."""

    name, system_prompt, max_turns = "bare", "Be brief.", 3

    def servers(self) -> tuple[()]:
        return ()

    def tasks(self, split: str, count: int, seed: int) -> list[Task]:
        return []

    def checklist(self, task: Task) -> Any:
        raise AssertionError("not asked for tasks with rubrics")


class RichBase(BareBase):
    """A base with all that a task set may have."""

    def setup(self, task: Task, workdir: Path) -> None:
        (workdir / "name.txt").write_text(task.task_id)

    def check_tools(self, tools: Any) -> None:
        raise ConfigError(f"{sorted(tools)} do not fit")

    def quality(self, task: Task, trajectory: Trajectory) -> float:
        return 0.25


def named(cls: type) -> str:
    return f"{cls.__module__}:{cls.__name__}"


def file(folder: Path, *records: Mapping[str, Any], name: str = "tasks.jsonl") -> Path:
    (folder / name).write_text("\n".join(map(json.dumps, records)))
    return folder / name


def line(label: str, rows: list[dict[str, str]], query: str) -> tuple[str, int]:
    """(line of the answer, price) of the row that a query wishes for."""
    if "best rated" in query:
        row = max(rows, key=lambda row: int(row["rating"]))
    else:
        column = "minutes" if "fastest" in query else "usd"
        row = min(rows, key=lambda row: int(row.get(column, 0)))
    unit = "usd" if "usd" in row else "celsius"
    return f"{label}: {next(iter(row.values()))} {row[unit]} {unit}", int(row.get("usd", 0))


def needed(task: Task) -> list[tuple[str, dict[str, str]]]:
    """The calls of a good episode: those expected, and one about the event of the city of "Plan 2 days in Oslo"."""
    calls = [(tool["name"], tool["arguments"]) for tool in task.data["expected_tools"]]
    if task.kind == "multi_day":
        calls.append(("web_search", {"query": f"what is on in {task.prompt.split()[4]} this week"}))
    return calls


def perfect(task: Task) -> list[str]:
    """The assistant messages that do all that a travel task expects: each expected call, then the answer."""
    calls, answer, prices = [], [], {}
    for tool, arguments in needed(task):
        calls.append(call(tool, **arguments))
        label = label_of(tool, arguments)
        said, prices[label] = line(label, parse_table(getattr(TOOLS, tool)(**arguments)), task.prompt)
        answer.append(said)
    if task.kind == "compare":
        answer.append(f"take: {min(prices, key=lambda label: prices[label])}")
    return [*calls, "\n".join(answer)]


def as_trajectory(task: Task, answer: str) -> Trajectory:
    events = []
    for n, (tool, arguments) in enumerate(needed(task)):
        result = ToolResult(kind="ok", text=getattr(TOOLS, tool)(**arguments), tool=tool)
        events.append(ToolEvent(call=ToolCall(id=f"c{n}", name=tool, arguments=arguments), result=result, turn=n))
    return Trajectory(messages=(), events=tuple(events), answer=answer)


async def failed(task: Task, trajectory: Trajectory) -> list[str]:
    """Names of the items that are not met."""
    results = await EMBEDDED.checklist(task).run(trajectory)
    return [name for name, met in results.items() if met is not True]


# --- the embedded set --------------------------------------------------------------------------------------------


async def test_good_work_meets_every_item_of_every_embedded_task():
    tasks = EMBEDDED.tasks("heldout", 120, seed=0)
    assert len({task.task_id for task in tasks}) == 120
    for task in tasks:
        assert (task.prompt, await failed(task, as_trajectory(task, perfect(task)[-1]))) == (task.prompt, [])


async def test_silence_meets_no_item_of_any_embedded_task():
    for task in EMBEDDED.tasks("heldout", 120, seed=0):
        checklist = EMBEDDED.checklist(task)
        assert await failed(task, SILENT) == list(checklist.items)
        assert checklist.score(await checklist.run(SILENT)) == 0.0


async def test_one_fault_loses_the_items_it_is_about():
    (task,) = (task for task in EMBEDDED.tasks("heldout", 120, seed=0) if task.task_id == "ecr-compare-01")
    flight, train, _ = perfect(task)[-1].split("\n")
    assert (flight, train) == ("flight: QR22 25 usd", "train: T54 52 usd")
    assert await failed(task, as_trajectory(task, f"{flight}\n{train}\ntake: train")) == ["r5"]
    assert await failed(task, as_trajectory(task, f"flight: QR22 24 usd\n{train}\ntake: flight")) == ["r1", "r2"]
    halved = as_trajectory(task, f"{flight}\n{train}\ntake: flight")
    halved = Trajectory(messages=(), events=halved.events[:1], answer=halved.answer)
    assert await failed(task, halved) == ["r3", "r4", "tool2:search_train_tickets"]


async def test_an_episode_over_the_real_server_earns_full_marks():
    env = AsyncToolEnv(EMBEDDED, split="heldout")
    tasks = EMBEDDED.tasks("heldout", 120, seed=0)
    try:
        for task in (next(task for task in tasks if task.kind == kind) for kind in KINDS):
            assert (task.prompt, await play(env, task, perfect(task))) == (task.prompt, 1.0)
            assert await play(env, task, ["I do not know."]) == 0.0
    finally:
        await env.aclose()
    assert not descendants()


def test_the_embedded_set_belongs_to_one_world():
    for base, config in (("arenarl.envs.travel:TravelTasks", {"seed": 1}), (named(BareBase), {})):
        with pytest.raises(ConfigError, match=r"embedded.* is about the travel world of seed 0"):
            RubricTasks(base, config, heldout="embedded")


# --- where tasks come from ---------------------------------------------------------------------------------------


def test_without_files_it_is_the_base():
    tasks, base = RubricTasks(), TravelTasks()
    assert (tasks.system_prompt, tasks.max_turns, tasks.servers()) == (base.system_prompt, 8, base.servers())
    assert tasks.name == "travel_rubrics"
    for split in ("train", "heldout"):
        (task,) = tasks.tasks(split, 1, seed=3)
        assert [task] == base.tasks(split, 1, seed=3)
        assert list(tasks.checklist(task).items) == list(base.checklist(task).items)
        assert tasks.quality(task, SILENT) == base.quality(task, SILENT) == 0.0
    with pytest.raises(ConfigError, match="split 'test' is unknown"):
        tasks.tasks("test", 1, seed=0)


def test_a_file_serves_its_split_and_the_base_the_other(tmp_path: Path):
    records = [RECORD | {"id": f"t{n}", "query": f"A cafe in Wuxi, {n}?"} for n in range(9)]
    tasks = RubricTasks(train=file(tmp_path, *records))
    drawn = [task.task_id for task in tasks.tasks("train", 4, seed=1)]
    assert len(set(drawn)) == 4 and set(drawn) < {record["id"] for record in records}
    assert drawn == [task.task_id for task in tasks.tasks("train", 4, seed=1)]
    assert drawn != [task.task_id for task in tasks.tasks("train", 4, seed=2)]
    assert len(tasks.tasks("train", 99, seed=1)) == 9
    assert tasks.tasks("heldout", 2, seed=1) == TravelTasks().tasks("heldout", 2, seed=1)


async def test_a_pool_of_generated_tasks_is_read(tmp_path: Path):
    data = {"rubrics": [{"text": "The cafe is Lotus.", "evidence": {"observation": 1, "quote": "Lotus 12"}}]}
    task = Task(task_id="g1", kind="search", prompt="A cafe in Wuxi?", data=data)
    TaskPool([PoolTask(task=task, seed_id="s", episode_id="e")]).save(tmp_path / "pool.parquet")
    tasks = RubricTasks(train=tmp_path / "pool.parquet")
    assert tasks.tasks("train", 5, seed=0) == [task]
    assert await tasks.checklist(task).run(SILENT) == {"r1": False}
    assert tasks.quality(task, SILENT) is None
    TaskPool().save(tmp_path / "empty.parquet")
    with pytest.raises(ConfigError, match=r"empty\.parquet' holds no task"):
        RubricTasks(heldout=tmp_path / "empty.parquet")


def test_a_malformed_task_of_a_pool_is_refused_at_once(tmp_path: Path):
    task = Task(task_id="g1", kind="search", prompt="A cafe?", data={"rubrics": [{"text": "Nice.", "weight": 0}]})
    TaskPool([PoolTask(task=task, seed_id="s", episode_id="e")]).save(tmp_path / "pool.parquet")
    with pytest.raises(ConfigError, match="rubrics of task 'g1', r1, has weight=0"):
        RubricTasks(train=tmp_path / "pool.parquet")


@pytest.mark.parametrize("data", [{}, {"rubrics": [], "expected_tools": []}])
def test_a_task_of_a_pool_that_nothing_checks_is_refused_at_once(tmp_path: Path, data: dict[str, Any]):
    task = Task(task_id="g1", kind="search", prompt="A cafe?", data=data)
    TaskPool([PoolTask(task=task, seed_id="s", episode_id="e")]).save(tmp_path / "pool.parquet")
    with pytest.raises(
        ConfigError, match=r"'g1' of '.*pool\.parquet' has neither rubrics nor expected_tools.*take it out"
    ):
        RubricTasks(train=tmp_path / "pool.parquet")


def test_a_request_cannot_be_in_both_splits(tmp_path: Path):
    train, heldout = file(tmp_path, RECORD, name="a.jsonl"), file(tmp_path, RECORD | {"id": "h"}, name="b.jsonl")
    with pytest.raises(ConfigError, match="held-out task 'h' asks the same as training task 'research-"):
        RubricTasks(train=train, heldout=heldout)


# --- who checks them ---------------------------------------------------------------------------------------------


async def test_one_grader_serves_all_checklists(tmp_path: Path):
    path = file(tmp_path, RECORD | {"id": "a"}, RECORD | {"id": "b", "query": "B?"})
    tasks = RubricTasks(train=path, grader=named(CountingGrader), grader_config={"greeting": "hello"})
    for task in sorted(tasks.tasks("train", 2, seed=0), key=lambda task: task.task_id):
        checklist = tasks.checklist(task)
        results = await checklist.run(SILENT)
        assert (results, checklist.score(results)) == ({"r1": True, "r2": None}, 1.0)
    tasks.begin_step(7)
    await tasks.aclose()
    assert isinstance(tasks.grader, CountingGrader)
    assert tasks.grader.said == ["hello", "graded 2 of a", "graded 2 of b", "step 7", "closed"]


async def test_a_grader_without_budget_or_connections_needs_no_methods():
    tasks = RubricTasks()
    tasks.begin_step(1)
    await tasks.aclose()
    assert not hasattr(tasks.grader, "begin_step")


async def test_steps_and_the_end_reach_the_base_too(tmp_path: Path):
    inner = {"train": str(file(tmp_path, RECORD)), "grader": named(CountingGrader)}
    tasks = RubricTasks("arenarl.envs.rubric_tasks:RubricTasks", inner)
    tasks.begin_step(3)
    await tasks.aclose()
    (task,) = tasks.tasks("train", 9, seed=0)
    grader = RubricTasks.checklist(tasks._base, task).grader
    assert isinstance(grader, CountingGrader) and grader.said == ["", "step 3", "closed"]


def test_what_a_base_may_have_is_passed_on(tmp_path: Path):
    task = Task(task_id="g1", kind="k", prompt="p", data={"rubrics": [{"text": "x"}]})
    bare, rich = (RubricTasks(named(base)) for base in (BareBase, RichBase))
    assert [name for name in ("setup", "check_tools", "quality") if hasattr(bare, name)] == []
    rich.setup(task, tmp_path)
    assert (tmp_path / "name.txt").read_text() == "g1"
    with pytest.raises(ConfigError, match="do not fit"):
        rich.check_tools({("a", "b")})
    assert (rich.quality(task, SILENT), rich.quality(Task(task_id="b", kind="k", prompt="p"), SILENT)) == (None, 0.25)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"base": "arenarl.envs.travel:NoTasks"}, "'arenarl.envs.travel:NoTasks' cannot be built"),
        ({"grader": named(NoGrader)}, "has no method grade"),
        ({"grader_config": {"strict": True}}, "grader 'arenarl.envs.travel_rubrics:TravelGrader' cannot be built"),
        ({"train": "no-such-file.jsonl"}, "'no-such-file.jsonl' cannot be read"),
        ({"train": "no-such-file.parquet"}, "'no-such-file.parquet' cannot be read"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], says: str):
    with pytest.raises(ConfigError, match=says):
        load_taskset("arenarl.envs.rubric_tasks:RubricTasks", settings)


def test_it_is_registered_with_gymnasium():
    assert gymnasium.spec("arenarl/Rubric-v0").kwargs["taskset"] == "arenarl.envs.rubric_tasks:RubricTasks"
