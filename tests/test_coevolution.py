"""Co-evolution: its tables on made-up runs, and one real cycle of everything: engines, executor, coach, learner, pool."""

import json
import math
import subprocess
import sys
from pathlib import Path

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
    sweep.report(tmp_path, arise.ARMS, arise.tables, arise.plot, arise.PLOT)
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


def command(*words: str) -> str:
    """Run a command to its end in a session of its own; its output. No process of it is left."""
    process = subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    output, _ = process.communicate(timeout=500)
    assert process.returncode == 0, output
    return output


@pytest.mark.timeout(600)
def test_a_cycle_trains_both_and_leaves_a_pool(tmp_path):
    small = ("--cycles", "1", "--generator-steps", "2", "--solver-steps", "2", "--workers", "1")
    output = command("experiments/arise.py", "--out", str(tmp_path), "--arms", "full", "--seeds", "0", *small)
    assert "| `full` | 1 |" in output and (tmp_path / arise.PLOT).exists()
    start, end = sweep.load(tmp_path)[0]["curve"]
    assert (start["step"], end["step"]) == (0, 1) and 0 < start["checklist"] < 1 and 0 < end["checklist"] < 1
    assert len(end["generator"]) == len(end["solver"]) == 2
    assert all(0 < step["task/valid_share"] <= 1 and 0 <= step["task/pass_rate"] <= 1 for step in end["generator"])
    assert any("lesson/gap_mean" in step for step in end["generator"])  # a coach spoke, and its notes were measured
    pool = TaskPool.load(tmp_path / arise.POOLS / "full-0.parquet")
    assert 0 < len(pool) <= 48 and all(entry.runs == 8 and entry.cycle == 1 for entry in pool)
    for entry in pool:  # each item names an observation of the episode that wrote it, and quotes it
        for item in entry.task.data["rubrics"]:
            seen = entry.observations[item["evidence"]["observation"] - 1]
            assert " ".join(item["evidence"]["quote"].lower().split()) in " ".join(seen.lower().split())
    assert "search" in command("-m", "arenarl.cli", "pool", "show", str(tmp_path / arise.POOLS / "full-0.parquet"))


DOWN = """
from arenarl.algorithms.{module} import {name}
from arenarl.algorithms.rg_sed import RGSED

AWAY = {{"base_url": "http://127.0.0.1:9/v1", "model": "none", "max_attempts": 1}}

def config():
    coach = RGSED(coach="arenarl.coach:LLMCoach", coach_config=AWAY, memory_rollouts=2)
    return (
        {name}()
        .environment("{env}", env_config={env_config})
        .agent(model_path="{model}", temperature={temperature}, max_model_len=1024, max_num_seqs=32, max_tokens={tokens}, engine_core="thread")
        {generator}
        .training(group_size=4, groups_per_step=1, max_staleness=0, num_steps=2, extra_streams=[coach])
        .env_runners(num_env_runners=0)
        .evaluation(evaluation_duration=2)
    )
"""
EXECUTOR = """.generator(solver_runs=2, executor="arenarl.executor:EndpointExecutor",
                   executor_config={{"env": "arenarl.envs.rubric_tasks:RubricTasks", **AWAY}})"""


def run_down(folder: Path, **about: object) -> list[dict]:
    """The metrics of a run of two steps in which every endpoint is at a port where nobody listens."""
    (folder / "down.py").write_text(DOWN.format(**{"generator": "", "env_config": {}, "temperature": 1.0, **about}))
    command("-m", "arenarl.cli", "train", str(folder / "down.py"), "--run-dir", str(folder / "run"))
    steps = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [step for step in steps if "group/flat_share" in step]


def run_generator_down(folder: Path, **about: object) -> list[dict]:
    return run_down(
        folder, module="arise_generator", name="ARISEGeneratorConfig", generator=EXECUTOR.format(),
        env="arenarl.envs.travel_generator:TravelGenerator", **about,
    )  # fmt: skip


@pytest.mark.timeout(300)
def test_a_generator_goes_on_without_executor_and_coach(tmp_path):
    steps = run_generator_down(tmp_path, model="experiments/tiny_agent/arise", tokens=420, temperature=0.7)
    assert len(steps) == 2 and sum(step["task/valid_share"] for step in steps) > 0  # there were tasks to try
    assert all("task/pass_rate" not in step for step in steps)  # nothing was solved, and nothing made up
    assert sum(step["task/outage_share"] for step in steps) > 0
    assert all(step["lesson/outage_share"] == 1.0 for step in steps if "lesson/outage_share" in step)


@pytest.mark.timeout(300)
def test_a_generator_that_writes_junk_alone_is_counted_and_moves_nothing(tmp_path):
    steps = run_generator_down(tmp_path, model="experiments/tiny_agent/model", tokens=40)
    assert [(step["task/valid_share"], step["group/flat_share"], step["policy/noop"]) for step in steps] == [
        (0, 1, 1)
    ] * 2
    refused = [sum(v for k, v in step.items() if k.startswith("task/refused_")) for step in steps]
    assert refused == pytest.approx([1.0, 1.0])


@pytest.mark.timeout(300)
def test_a_solver_without_its_grader_has_no_reward(tmp_path):
    away = {"base_url": "http://127.0.0.1:9/v1", "model": "none", "max_attempts": 1}
    rubric = [{"query": "Find a cafe in Oslo.", "metadata": {"rubrics": ["The answer names one cafe."]}}]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(record) + "\n" for record in rubric))
    steps = run_down(
        tmp_path, module="arise_solver", name="ARISESolverConfig", env="arenarl.envs.rubric_tasks:RubricTasks",
        model="experiments/tiny_agent/model", tokens=64,
        env_config={"train": str(tmp_path / "tasks.jsonl"), "grader": "arenarl.grader:LLMGrader", "grader_config": away},
    )  # fmt: skip
    assert all("reward/score_mean" not in step and step["group/incomplete_share"] == 1.0 for step in steps)
    assert [step["policy/noop"] for step in steps] == [1.0, 1.0]
    assert all(step["reward/undecided_share"] > 0 for step in steps)
