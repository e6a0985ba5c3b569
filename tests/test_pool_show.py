"""`arenarl pool show`: the list of a pool, one task with what it rests on, and what is refused."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from test_drawing import HOSTILE
from test_task_pool import entry, saved

from arenarl.errors import ConfigError
from arenarl.pool_show import show
from arenarl.task_pool import PoolTask
from arenarl.types import Task

TABLE = "name usd rating\nLotus 12 7\nBlue 30 9"


def shown(path: Path, *, encoding: str = "utf-8", width: int = 100, colour: bool = False, **options: object) -> str:
    raw = io.BytesIO()
    console = Console(
        file=io.TextIOWrapper(raw, encoding=encoding, write_through=True), width=width, force_terminal=colour,
        color_system="standard" if colour else None,
    )  # fmt: skip
    assert show(path, console, **options) == 0
    return "\n".join(line.rstrip() for line in raw.getvalue().decode(encoding).splitlines())


def test_a_list_has_a_line_a_task(tmp_path: Path):
    path = saved(
        tmp_path, entry("search-1", "Find the cheapest cafe in Hanoi.", successes=3, runs=8, cycle=2), entry("search-2")
    )
    assert shown(path) == (
        "id        kind    query                             items     passed  cycle\n"
        "search-1  search  Find the cheapest cafe in Hanoi.      3   38% of 8      2\n"
        "search-2  search  Find search-2.                        3  not tried      0\n"
        "2 tasks, 1 of them tried by a solver"
    )


def test_a_limit_says_what_it_leaves_out(tmp_path: Path):
    path = saved(tmp_path, *[entry(f"task-{n:02}") for n in range(25)])
    assert "task-19" in shown(path) and "task-20" not in shown(path)
    assert shown(path, limit=3).endswith("25 tasks, 0 of them tried by a solver, 22 more than shown")
    assert "more than shown" not in shown(path, limit=25)


def test_a_long_request_is_cut_in_the_list_and_whole_alone(tmp_path: Path):
    path = saved(tmp_path, entry("a", "word " * 100 + "end."))
    assert "..." in shown(path) and "end." not in shown(path)
    assert "end." in shown(path, task="a")


def test_an_empty_pool_is_shown(tmp_path: Path):
    assert shown(saved(tmp_path)).endswith("0 tasks, 0 of them tried by a solver")
    with pytest.raises(ConfigError, match="the pool has no task 'a'; it is empty"):
        shown(saved(tmp_path), task="a")


def test_a_task_is_shown_with_what_each_assertion_rests_on(tmp_path: Path):
    one = entry(
        "search-1", "Find the cheapest cafe in Hanoi.", observations=("unseen", TABLE), successes=3, runs=8, cycle=1,
        generator_version=4, created="2026-01-02T03:04:05+00:00",
    )  # fmt: skip
    data = dict(one.task.data)
    data["rubrics"] = [
        {"text": "The cafe is Lotus.", "evidence": {"observation": 2, "quote": "Lotus 12 7"}},
        *data["rubrics"][1:],
        {"text": "It is open.", "evidence": {"observation": 3, "quote": "open"}},
    ]
    path = saved(tmp_path, replace(one, task=replace(one.task, data=data)))
    assert shown(path, task="search") == (
        "search-1  search\n"
        "Find the cheapest cafe in Hanoi.\n"
        "passed 38% of 8, cycle 1\n"
        "asked by seed-1, written in episode ep-1 by weights 4, 2026-01-02T03:04:05+00:00\n"
        "\nrubric\n"
        "  r1  The cafe is Lotus.\n"
        "      observation 2: Lotus 12 7\n"
        "  r2  It was looked up.  trajectory, weight 2, gate\n"
        "      rests on nothing\n"
        "  r3  It is open.\n"
        "      observation 3 was not kept\n"
        "\nexpected tools\n"
        "  poi_search(city='Hanoi', category='cafe')\n"
        "\nobservation 2\n"
        "  name usd rating\n"
        "  Lotus 12 7\n"
        "  Blue 30 9"
    )


def test_the_quote_is_marked_in_the_result_and_a_long_result_is_cut(tmp_path: Path):
    path = saved(tmp_path, entry("a", observations=(TABLE + "\nmore" * 20,)))
    output = shown(path, task="a", colour=True)
    assert "\x1b[32mLotus 12 7\x1b[0m" in output.split("observation 1")[-1]
    assert output.count("more") == 10 and "... 11 more lines" in output


def test_a_result_of_one_long_line_is_cut_too(tmp_path: Path):
    output = shown(saved(tmp_path, entry("a", observations=("Lotus 12 7 " + "x" * 100_000,))), task="a")
    assert output.count("x") < 4100 and "... 96011 more characters" in output


def test_a_task_without_tools_or_data_is_shown(tmp_path: Path):
    bare = PoolTask(task=Task(task_id="a", kind="k", prompt="Q"), seed_id="s", episode_id="e")
    output = shown(saved(tmp_path, bare), task="a")
    assert "by weights 0\n\nrubric\n\nexpected tools\n  none" in output


def hostile() -> PoolTask:
    task = Task(
        task_id="[bold]" + HOSTILE, kind=HOSTILE, prompt="[red]é\n" + HOSTILE,
        data={
            "rubrics": [{"text": "[/] " + HOSTILE, "evidence": {"observation": 1, "quote": "\x1b[2J[red] é"}}],
            "expected_tools": [{"name": "[link=x]" + HOSTILE, "arguments": {HOSTILE: HOSTILE}}],
        },
    )  # fmt: skip
    return PoolTask(
        task=task,
        seed_id=HOSTILE,
        episode_id=HOSTILE,
        created=HOSTILE,
        observations=("[blink]\x1b[2J[red] é" + HOSTILE,),
    )


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_no_text_moves_the_cursor_or_is_read_as_markup(tmp_path: Path, encoding: str):
    path = saved(tmp_path, hostile())
    for options in ({}, {"task": "[bold]"}):
        output = shown(path, encoding=encoding, width=200, **options)
        assert {c for c in output if not c.isprintable()} <= {"\n"}
        assert "[bold]<script>alert(1)</script>" in output and "[red]" in output
    assert "[/] <script>" in output and "[link=x]<script>" in output and "[blink]" in output


@pytest.mark.parametrize("width", [20, 40, 79])
def test_a_narrow_terminal_loses_no_request(tmp_path: Path, width: int):
    path = saved(tmp_path, entry("a-rather-long-id/of-an-episode-0", "Find the cheapest cafe in Hanoi."))
    assert max(map(len, shown(path, width=width).splitlines()[:-1])) <= width
    assert "Hanoi." in shown(path, width=width, task="a")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"task": "search-9"}, r"the pool has no task 'search-9'; did you mean 'search-1\d?'"),
        ({"task": ""}, "the pool has no task ''; known are search-1, search-12, other"),
        ({"task": "se"}, "2 tasks begin with 'se', such as 'search-1' and 'search-12'; give more of it"),
        ({"limit": 0}, "limit=0 shows nothing; give 1 or more"),
    ],
)
def test_what_cannot_be_shown_is_refused(tmp_path: Path, options: dict[str, object], reason: str):
    path = saved(tmp_path, *map(entry, ("search-1", "search-12", "other")))
    with pytest.raises(ConfigError, match=reason):
        shown(path, **options)
    assert "search-1  search" in shown(path, task="search-1")


def test_a_pool_of_malformed_data_or_no_file_is_refused(tmp_path: Path):
    one = entry("a")
    path = saved(tmp_path, replace(one, task=replace(one.task, data={"rubrics": [{"text": 3}]})))
    for options in ({}, {"task": "a"}):
        with pytest.raises(ConfigError, match="rubrics of task 'a', r1"):
            shown(path, **options)
    with pytest.raises(ConfigError, match="cannot be read"):
        shown(tmp_path / "none")
