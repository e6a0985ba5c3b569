"""The experiment on the paper's claim: its arithmetic on made-up runs, and that each arm pays the judge what it says."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from arenarl import sweep
from arenarl.cli import load_experiment
from arenarl.errors import ConfigError
from arenarl.jsonl import dumps
from arenarl.types import Episode, EpisodeGroup, Outcome, Task, Trajectory
from tests.judging import judged_by

collapse = load_experiment("experiments/collapse.py")
SETTINGS = collapse.settings_of(16)


def run(arm: str, seed: int, *scores: float, rate: float = 0.5, faults: int = 0) -> dict:
    """A finished run with a checklist score every 8 steps."""
    curve = [
        {
            "step": 8 * n,
            "win_rate": rate if n else None,
            "wins": 3,
            "losses": 2,
            "ties": 0,
            "checklist": score,
            "faults": faults,
        }
        for n, score in enumerate(scores)
    ]
    rest = {"seconds": 60.0, "cpu_seconds": 50.0, "signal": 0.5, "flat_share": 0.25}
    return {"arm": arm, "seed": seed, "settings": SETTINGS, "curve": curve, **rest}


def failed(arm: str, seed: int) -> dict:
    return {"arm": arm, "seed": seed, "settings": SETTINGS, "error": "EngineUnavailable: gone"}


RUNS = [
    run("pointwise", 0, 0.5, 0.55, 0.60),
    run("pointwise", 1, 0.5, 0.55, 0.62),
    run("pointwise", 2, 0.5, 0.55, 0.64),
    run("even_graph", 0, 0.5, 0.60, 0.70, rate=0.6),
    run("even_graph", 1, 0.5, 0.62, 0.71, rate=0.7),
    run("even_graph", 3, 0.5, 0.64, 0.99, rate=0.8),
    failed("anchor", 0),
]


def write(folder: Path, runs: list[dict]) -> None:
    (folder / sweep.RECORDS).write_text("".join(dumps(r) + "\n" for r in runs))


def test_the_interval_is_student_t_over_seeds():
    # mean 2, sd 1, 3 values: t(0.975, 2) = 4.302653, half width 4.302653 / sqrt(3) = 2.484138
    assert sweep.interval([1.0, 2.0, 3.0]) == pytest.approx((2.0, -0.484138, 4.484138), abs=1e-6)
    mean, low, high = sweep.interval([0.7])
    assert mean == 0.7 and math.isnan(low) and math.isnan(high)
    assert all(map(math.isnan, sweep.interval([])))


def test_differences_are_paired_by_seed():
    # seeds 0 and 1 are common: 0.10 and 0.09; t(0.975, 1) = 12.706205, sd 0.00707107, half width 0.0635310
    mean, low, high = sweep.paired(RUNS, "even_graph", "pointwise", "checklist")
    assert (mean, low, high) == pytest.approx((0.095, 0.095 - 0.063531, 0.095 + 0.063531), abs=1e-6)
    assert math.isnan(sweep.paired(RUNS, "even_graph", "anchor", "checklist")[0])


def test_a_last_value_that_is_missing_is_nan_and_left_out_of_means():
    runs = [{"arm": "a", "seed": seed, "curve": [{"step": 0, "x": value}]} for seed, value in enumerate((0.5, None))]
    last = sweep.final(runs, "a", "x")
    assert last[0] == 0.5 and math.isnan(last[1])
    mean, low, _ = sweep.paired([*runs, *({**run, "arm": "b"} for run in runs)], "a", "b", "x")
    assert mean == 0.0 and math.isnan(low)  # one seed is known on both sides


def test_curves_have_a_row_for_each_finished_seed():
    steps, values = sweep.curves(RUNS, "even_graph", "win_rate")
    assert steps == [0, 8, 16]
    assert values[:, 1:].tolist() == [[0.6, 0.6], [0.7, 0.7], [0.8, 0.8]] and all(map(math.isnan, values[:, 0]))
    assert sweep.curves(RUNS, "anchor", "checklist") == ([], pytest.approx(0))


def test_a_resumed_folder_plays_what_is_missing_or_failed(tmp_path):
    write(tmp_path, RUNS)
    todo = sweep.missing(
        sweep.load(tmp_path, collapse.ARMS), ["pointwise", "anchor", "even_graph"], [0, 1, 2], SETTINGS
    )
    assert todo == [("anchor", 0), ("anchor", 1), ("anchor", 2), ("even_graph", 2)]


def test_a_second_try_replaces_a_failure(tmp_path):
    write(tmp_path, [*RUNS, run("anchor", 0, 0.5, 0.6, 0.7)])
    runs = sweep.load(tmp_path, collapse.ARMS)
    assert len(runs) == 7 and [r["arm"] for r in runs if "error" in r] == []
    assert [r["arm"] for r in runs] == ["pointwise"] * 3 + ["anchor"] + ["even_graph"] * 3


def test_runs_of_other_settings_are_not_mixed():
    with pytest.raises(ConfigError, match="name another folder"):
        sweep.missing(RUNS, ["pointwise"], [0], collapse.settings_of(17))


def test_the_tables_say_what_each_arm_cost_and_reached():
    text = collapse.tables(RUNS)
    assert "| `pointwise` | 8 | 3 | 0.500 (0.500 to 0.500) | 0.620 (0.570 to 0.670) | 0.50 | 25% |" in text
    assert "| `even_graph` | 28 | 3 | 0.700 (0.452 to 0.948) | 0.800 (0.391 to 1.209) | 0.50 | 25% |" in text
    assert "| `even_graph` | +0.095 (+0.031 to +0.159) |" in text
    assert "- anchor, seed 0: failed: EngineUnavailable: gone" in text
    assert "`anchor` |" not in text


def test_a_run_whose_tools_failed_is_named():
    assert "failed" not in collapse.tables(RUNS[:-1])
    text = collapse.tables([*RUNS[:-1], run("oracle", 0, 0.5, 0.6, faults=7)])
    assert "- oracle, seed 0: checklist 0.500 -> 0.600" in text and "14 tool calls of the evaluations failed" in text


def test_report_draws_the_arms_that_were_played(tmp_path, capsys):
    write(tmp_path, RUNS)
    sweep.report(tmp_path, collapse.ARMS, collapse.tables, collapse.plot, collapse.PLOT)
    drawing = (tmp_path / collapse.PLOT).read_text()
    assert drawing.startswith("<?xml") and "even_graph (28 calls)" in drawing and "anchor (" not in drawing
    assert collapse.tables(sweep.load(tmp_path, collapse.ARMS)) in capsys.readouterr().out
    sweep.report(tmp_path, collapse.ARMS, collapse.tables, collapse.plot, collapse.PLOT)
    assert (tmp_path / collapse.PLOT).read_text() == drawing


def test_a_folder_without_a_finished_run_says_so(tmp_path, capsys):
    write(tmp_path, [failed("anchor", 0)])
    sweep.report(tmp_path, collapse.ARMS, collapse.tables, collapse.plot, collapse.PLOT)
    assert "holds no finished run\nanchor, seed 0: failed" in capsys.readouterr().out
    assert not (tmp_path / collapse.PLOT).exists()


class Counting:
    """Passes on to a judge and counts its calls."""

    def __init__(self, judge: object) -> None:
        self.judge, self.calls = judge, 0

    async def compare(self, *args: object) -> object:
        self.calls += 1
        return await self.judge.compare(*args)

    async def mark(self, *args: object) -> object:
        self.calls += 1
        return await self.judge.mark(*args)


def group(answer: str | None = "a") -> EpisodeGroup:
    """Eight attempts from worst to best; the best may have no answer."""
    task = Task(task_id="t", kind="k", prompt="p")
    episodes = [
        Episode(
            episode_id=f"g/{n}", task=task, member=n, greedy=False, segments=(), score=n / 8, outcome=Outcome.SCORED,
            trajectory=Trajectory(messages=(), events=(), answer=answer if n == 7 else "a"),
        )
        for n in range(8)
    ]  # fmt: skip
    return EpisodeGroup(group_id="g", task=task, episodes=tuple(episodes), version=0)


def test_the_truth_told_is_a_correlation_over_the_trained_members():
    # scores 0, 1/8 ... 7/8; advantages 1 for the better half: r = 4 / sqrt(21) = 0.872872
    halves = (-1.0,) * 4 + (1.0,) * 4
    assert collapse.truth_told(replace(group(), advantages=halves)) == pytest.approx(0.872872, abs=1e-6)
    assert collapse.truth_told(replace(group(), advantages=(0.0,) * 8)) == 0.0
    only = replace(group(), advantages=(None,) * 6 + (1.0, -1.0))
    assert collapse.truth_told(only) == pytest.approx(-1.0)


def test_neither_the_greedy_member_nor_a_group_of_equals_tells_anything():
    eight = group()
    greedy = tuple(replace(e, greedy=e.member == 0) for e in eight.episodes)
    told = (9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)  # wrong about the greedy member alone
    assert collapse.truth_told(replace(eight, episodes=greedy, advantages=told)) == pytest.approx(1.0)
    equal = tuple(replace(e, score=0.5) for e in eight.episodes)
    assert math.isnan(collapse.truth_told(replace(eight, episodes=equal, advantages=told)))


def test_a_watched_algorithm_notes_each_group_and_weighs_it_as_before():
    told: list[float] = []
    algorithm = collapse.config("even_graph").algo_class
    watched = collapse.watched(algorithm, told)
    scored = replace(group(), advantages=tuple(float(n) for n in range(8)))
    plain, seen = object.__new__(algorithm), object.__new__(watched)
    plain.config = seen.config = collapse.config("even_graph")
    assert told == [] and seen.streams(scored) == plain.streams(scored)
    assert told == pytest.approx([1.0])


@pytest.mark.parametrize("arm", collapse.ARMS)
async def test_an_arm_pays_for_a_group_what_it_says(arm):
    config = collapse.config(arm, seed=3)
    config.validate()
    judge = Counting(config.build_judge())
    scores = await config.algo_class.score_group(group(), config, judged_by(judge))
    assert judge.calls == collapse.ARMS[arm].calls
    assert len(scores.advantages) == 8 and None not in scores.advantages


@pytest.mark.parametrize("arm", ["anchor", "single_elimination", "round_robin", "even_graph"])
async def test_no_arm_is_told_for_free_who_gave_no_answer(arm):
    config = collapse.config(arm)
    judge = Counting(config.build_judge())
    scores = await config.algo_class.score_group(group(answer=None), config, judged_by(judge))
    assert judge.calls == collapse.ARMS[arm].calls and scores.rewards[7] > 0.5


def test_arms_differ_in_nothing_but_their_use_of_the_judge():
    def common(arm: str) -> dict:
        fields = collapse.config(arm, seed=2).public_fields()
        return {k: v for k, v in fields.items() if k not in own}

    own = {"algorithm", "marks", *collapse.ArenaRLConfig.SECTIONS["arena"]}
    assert all(common(arm) == common("pointwise") for arm in collapse.ARMS)
    assert common("pointwise")["judge_config"]["seed"] == 2


def test_an_unknown_arm_is_refused():
    with pytest.raises(ConfigError, match="unknown arm 'bracket'; known: pointwise"):
        collapse.config("bracket")
