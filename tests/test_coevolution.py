"""Co-evolution: its tables on made-up runs, and one real cycle of everything: engines, executor, coach, learner, pool."""

import math

import pytest

from arenarl import sweep
from arenarl.cli import load_experiment
from arenarl.jsonl import dumps
from arenarl.task_pool import TaskPool

arise = load_experiment("experiments/arise.py")


def run(arm: str, seed: int, *scores: float) -> dict:
    """A finished run whose held-out checklist has these scores, one a cycle."""
    pool = dict.fromkeys(arise.POOL_COLUMNS, 0.5)
    curve = [
        {"step": n, **dict.fromkeys(arise.SOLVER_COLUMNS, score), **(pool if n else {})}
        for n, score in enumerate(scores)
    ]
    for point in curve[1:]:
        point["generator"] = [{"task/valid_share": 0.6, "task/distance_from_half": 0.3}, {"task/valid_share": 0.7}]
    return {"arm": arm, "seed": seed, "settings": {}, "curve": curve}


RUNS = [
    run("full", 0, 0.5, 0.6, 0.70), run("full", 1, 0.5, 0.6, 0.74), run("fixed_pool", 0, 0.5, 0.6, 0.60),
    run("fixed_pool", 1, 0.5, 0.6, 0.62), {"arm": "no_gate", "seed": 0, "settings": {}, "error": "EngineUnavailable: gone"},
]  # fmt: skip


def test_the_tables_give_each_arm_its_difference_to_the_fixed_pool():
    text = arise.tables(RUNS)
    # differences .10 and .12: mean .11, sd .0141421, t(0.975, 1) = 12.7062, half width .1270620
    assert "| minus `fixed_pool` |" in text and "| `full` | +0.110 (-0.017 to +0.237) |" in text
    assert "| at the start | | 0.500 (0.500 to 0.500) |" in text and "| `full` | 2 | 0.720 (0.466 to 0.974) |" in text
    assert "- no_gate, seed 0: EngineUnavailable: gone" in text and "`no_gate` |" not in text


def test_the_generators_curve_runs_through_all_cycles():
    steps, values = arise.generator_curve(RUNS, "full", "task/distance_from_half")
    assert steps == [1, 2, 3, 4] and values[0, [0, 2]].tolist() == [0.3, 0.3] and math.isnan(values[0, 1])


def test_the_report_draws_what_was_played(tmp_path, capsys):
    (tmp_path / sweep.RECORDS).write_text("".join(dumps(r) + "\n" for r in RUNS))
    arise.report(tmp_path)
    drawing = (tmp_path / arise.PLOT).read_text()
    assert drawing.startswith("<?xml") and "fixed_pool" in drawing and "no_gate" not in drawing
    assert arise.tables(sweep.load(tmp_path, arise.ARMS)) in capsys.readouterr().out


def test_each_arm_takes_one_part_away():
    full = arise.config("full")
    assert full.extra_streams[0].gate == "stderr" and full.grounding and full.difficulty == "count"
    assert arise.config("no_rg_sed").extra_streams == [] and arise.config("no_gate").extra_streams[0].gate == "open"
    assert not arise.config("no_grounding").grounding and arise.config("no_difficulty").difficulty == "none"
    assert (
        arise.solver_config("no_rg_sed").extra_streams == []
        and arise.solver_config("full").extra_streams[0].place == "system"
    )


@pytest.mark.timeout(600)
def test_a_cycle_trains_both_and_leaves_a_pool(tmp_path):
    pool, scale = TaskPool(), arise.Scale(cycles=1, generator_steps=2, solver_steps=2, seeds=15)
    start, end = arise.coevolve("full", seed=0, scale=scale, pool=pool)
    assert (start["step"], end["step"]) == (0, 1) and 0 < start["checklist"] < 1 and 0 < end["checklist"] < 1
    assert len(end["generator"]) == len(end["solver"]) == 2
    step = end["generator"][1]
    assert 0 < step["task/valid_share"] <= 1 and 0 <= step["task/pass_rate"] <= 1
    assert "lesson/gap_mean" in step  # the coach spoke, and what its notes are worth was measured
    assert 0 < len(pool) <= 15 and all(entry.runs == 8 for entry in pool)
    pool.save(tmp_path / "pool.parquet")
    kept = TaskPool.load(tmp_path / "pool.parquet")
    assert [entry.task for entry in kept] == [entry.task for entry in pool]
    for entry in kept:  # each item names an observation of the episode that wrote it, and quotes it
        for item in entry.task.data["rubrics"]:
            seen = entry.observations[item["evidence"]["observation"] - 1]
            assert " ".join(item["evidence"]["quote"].lower().split()) in " ".join(seen.lower().split())
