"""The store of generated tasks: what it takes, how it counts, and that a file is whole or none."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from arenarl.errors import ConfigError
from arenarl.novelty import Novelty
from arenarl.task_pool import PoolTask, TaskPool
from arenarl.types import Task

DATA = {
    "rubrics": [
        {"text": "The cafe is Lotus.", "evidence": {"observation": 1, "quote": "Lotus 12 7"}},
        {"text": "It was looked up.", "scope": "trajectory", "weight": 2.0, "gate": True},
    ],
    "expected_tools": [{"name": "poi_search", "arguments": {"city": "Hanoi", "category": "cafe"}}],
}


def entry(task_id: str, prompt: str = "", **fields: Any) -> PoolTask:
    task = Task(task_id=task_id, kind="search", prompt=prompt or f"Find {task_id}.", seed=5, data=DATA)
    return PoolTask(task=task, seed_id="seed-1", episode_id="ep-1", **fields)


def ids(pool: TaskPool) -> list[str]:
    return [entry.task.task_id for entry in pool]


def test_a_pool_keeps_order_and_finds_by_id():
    pool = TaskPool([entry("b"), entry("a")])
    assert (len(pool), ids(pool), "a" in pool, "c" in pool) == (2, ["b", "a"], True, False)
    assert pool["a"] == entry("a")


def test_an_id_twice_is_refused():
    with pytest.raises(ConfigError, match="task 'a' is in the pool twice"):
        TaskPool([entry("a"), entry("a")])


def test_duplicates_are_dropped_and_counted():
    pool, novelty = TaskPool([entry("a", "Find a cafe.")]), Novelty()
    found = [
        entry("b", "find a CAFE"),
        entry("c", "Find a museum."),
        entry("d", "Find a museum"),
        entry("a", "Go home."),
    ]
    assert pool.add(found, novelty) == (1, 3)
    assert ids(pool) == ["a", "c"]
    assert novelty.is_duplicate("Find a cafe.") and novelty.is_duplicate("Find a museum.")
    assert not novelty.is_duplicate("Go home.")


def test_what_the_caller_has_seen_elsewhere_is_a_duplicate_too():
    pool, novelty = TaskPool(), Novelty()
    novelty.add("Find a cafe.")
    assert pool.add([entry("a", "Find a cafe."), entry("b", "Find a park.")], novelty) == (1, 1)
    assert ids(pool) == ["b"]


def test_runs_add_up_from_unknown():
    pool = TaskPool([entry("a"), entry("b", successes=3, runs=8), entry("c", runs=3)])
    assert [e.pass_rate for e in pool] == [None, 3 / 8, None]
    for task_id in "abc":
        pool.record(task_id, 1, 4)
    assert [(e.successes, e.runs, e.pass_rate) for e in pool] == [(1, 4, 0.25), (4, 12, 1 / 3), (1, 4, 0.25)]
    pool.record("a", 0, 0)
    assert (pool["a"].successes, pool["a"].runs) == (1, 4)


def test_runs_of_no_task_or_of_no_sense_are_refused():
    pool = TaskPool([entry("a")])
    with pytest.raises(ConfigError, match="task 'x' is not in the pool"):
        pool.record("x", 1, 2)
    for successes, runs in ((3, 2), (-1, 2)):
        with pytest.raises(ValueError, match=f"cannot have {successes} successes in {runs} runs"):
            pool.record("a", successes, runs)
    with pytest.raises(ValueError, match="has 3 successes in 2 runs"):
        entry("a", successes=3, runs=2)
    with pytest.raises(ValueError, match="has None successes in -1 runs"):
        entry("a", runs=-1)


def test_the_posterior_mean_of_a_pass_rate():
    assert entry("a").posterior() == entry("a", runs=6).posterior() == 0.5
    assert entry("a", successes=0, runs=8).posterior() == 0.1  # (1 + 0) / (2 + 8)
    assert entry("a", successes=3, runs=8).posterior((2.0, 4.0)) == 5 / 14


def test_a_band_takes_tasks_by_their_posterior_and_keeps_the_unknown_apart():
    runs = {"none": (0, 8), "few": (1, 8), "half": (4, 8), "all": (8, 8)}  # posterior .1, .2, .5, .9
    pool = TaskPool([entry(name, successes=s, runs=n) for name, (s, n) in runs.items()] + [entry("new")])
    assert ids(pool.band(0.2, 0.8)) == ["few", "half"]
    assert ids(pool.band(0.1, 0.5)) == ["none", "few", "half"]
    assert ids(pool.band(0.2, 0.8, unknown=True)) == ["few", "half", "new"]
    assert ids(pool.band(0.9, 0.9, unknown=True)) == ["all", "new"]
    assert ids(pool.band(0.2, 0.8, prior=(10.0, 10.0))) == ["none", "few", "half", "all"]
    assert len(pool) == 5


@pytest.mark.parametrize(("low", "high"), [(0.6, 0.4), (-0.1, 0.5), (0.5, 1.1), (float("nan"), 0.5)])
def test_a_band_that_is_none_is_refused(low: float, high: float):
    with pytest.raises(ConfigError, match="is none; give 0 <= low <= high <= 1"):
        TaskPool().band(low, high)
    with pytest.raises(ConfigError, match="is no Beta distribution"):
        TaskPool().band(0.2, 0.8, prior=(0.0, 1.0))


# --- files -------------------------------------------------------------------------------------------------------


def saved(folder: Path, *entries: PoolTask) -> Path:
    path = folder / "pool.parquet"
    TaskPool(entries).save(path)
    return path


words = st.text(max_size=12)
entries = st.builds(
    PoolTask, task=st.builds(
        Task, task_id=words, kind=words, prompt=words, seed=st.integers(0, 2**63 - 1),
        data=st.dictionaries(words, st.none() | st.floats(allow_nan=False, allow_infinity=False) | st.lists(words), max_size=2),
    ),
    seed_id=words, episode_id=words, observations=st.lists(words, max_size=3).map(tuple), generator_version=st.integers(-1, 9),
    cycle=st.integers(0, 9), successes=st.none() | st.integers(0, 8), runs=st.integers(8, 16), created=words,
)  # fmt: skip


@settings(max_examples=40)
@given(pool=st.lists(entries, max_size=3, unique_by=lambda e: e.task.task_id))
def test_a_pool_comes_back_from_its_file(tmp_path_factory: pytest.TempPathFactory, pool: list[PoolTask]):
    path = saved(tmp_path_factory.mktemp("pool"), *pool)
    assert list(TaskPool.load(path)) == pool
    assert [file.name for file in path.parent.iterdir()] == ["pool.parquet"]


def test_half_characters_are_replaced(tmp_path: Path):
    odd = replace(entry("a", "Caf\udce9"), observations=("\ud800",))
    odd = replace(odd, task=replace(odd.task, data={"rubrics": [{"text": "\ud800"}]}))
    (back,) = TaskPool.load(saved(tmp_path, odd))
    assert (back.task.prompt, back.observations) == ("Caf\ufffd", ("\ufffd",))
    assert back.task.data == {"rubrics": [{"text": "\ufffd"}]}


def test_a_folder_whose_name_looks_like_a_partition_adds_no_column(tmp_path: Path):
    (folder := tmp_path / "cycle=9").mkdir()
    assert TaskPool.load(saved(folder, entry("a", cycle=2)))["a"].cycle == 2


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path: Path):
    path = saved(tmp_path, entry("a"))
    (blocked := tmp_path / "folder").mkdir()
    for place in (tmp_path / "nowhere" / "pool.parquet", blocked):
        with pytest.raises(ConfigError, match=r"cannot be written: .*; name another file"):
            TaskPool([entry("b")]).save(place)
    with pytest.raises(OverflowError):
        TaskPool([replace(entry("b"), cycle=2**80)]).save(path)
    assert ids(TaskPool.load(path)) == ["a"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["folder", "pool.parquet"]


def test_a_file_that_is_no_pool_is_refused(tmp_path: Path):
    (text := tmp_path / "a.txt").write_text("no Parquet")
    (tmp_path / "empty").touch()
    parquet.write_table(pyarrow.table({"prompt": ["a"]}), foreign := tmp_path / "foreign.parquet")
    for path, reason in {
        tmp_path / "none.parquet": "cannot be read: .*No such file.*; give a file of TaskPool.save",
        tmp_path: "cannot be read: .*directory",
        text: "is no sound pool .*magic bytes",
        tmp_path / "empty": "is no sound pool .*0 bytes",
        foreign: "is Parquet, but no pool of tasks",
    }.items():
        with pytest.raises(ConfigError, match=reason):
            TaskPool.load(path)


def rewritten(path: Path, change: Any) -> Path:
    """The file after a change of its table, with the metadata that it had."""
    table = parquet.read_table(path)
    changed = change(table)
    parquet.write_table(changed.replace_schema_metadata(changed.schema.metadata or table.schema.metadata), path)
    return path


def with_column(name: str, value: Any) -> Any:
    def change(table: pyarrow.Table) -> pyarrow.Table:
        at = table.schema.get_field_index(name)
        return table.set_column(at, table.schema.field(name), pyarrow.array([value] * len(table)))

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda t: t.replace_schema_metadata({"arenarl.task_pool": "2"}),
            "has version '2', and this arenarl reads 1; update",
        ),
        (lambda t: t.drop_columns(["runs"]), "has not the columns of a pool"),
        (lambda t: t.append_column("more", pyarrow.array(["x"] * len(t))), "has not the columns of a pool"),
        (with_column("data", "{"), "is no sound pool .Expecting"),
        (with_column("data", "[" * 20_000), "is no sound pool .maximum recursion"),
        (with_column("data", "[]"), "is no sound pool .the data of task 'a' is no object"),
        (with_column("successes", 9), "is no sound pool .task 'a' has 9 successes in 8 runs"),
        (with_column("task_id", "a"), "task 'a' is in the pool twice"),
    ],
)
def test_a_newer_or_an_altered_pool_is_refused(tmp_path: Path, change: Any, reason: str):
    path = saved(tmp_path, entry("a", successes=1, runs=8), entry("b", runs=8))
    with pytest.raises(ConfigError, match=reason):
        TaskPool.load(rewritten(path, change))


@pytest.mark.parametrize("part", range(8))
def test_a_damaged_file_is_refused_and_never_half_read(tmp_path: Path, part: int):
    path = saved(tmp_path, *[entry(f"task-{n}", successes=n, runs=20) for n in range(20)])
    whole, content = list(TaskPool.load(path)), path.read_bytes()
    for at in range(part, len(content), 8 * 29):
        path.write_bytes(content[:at])
        with pytest.raises(ConfigError, match=r"give a file of TaskPool\.save"):
            TaskPool.load(path)
        path.write_bytes(content[:at] + bytes([content[at] ^ 0x55]) + content[at + 1 :])
        with contextlib.suppress(ConfigError):  # of a byte that means something
            assert list(TaskPool.load(path)) == whole
