"""The study of tournaments: its measures, its pairing, and what it finds."""

import io
import json
import math

import numpy as np
import pytest
from rich.console import Console

from arenarl.arena import run_tournament
from arenarl.errors import ConfigError
from arenarl.simulation import simulated_compare
from arenarl.study import (
    DEFAULT,
    POINTWISE,
    REFERENCE,
    Method,
    Setting,
    calibrate,
    correlation,
    group_seed,
    kendall_tau_b,
    methods,
    simulate,
    study,
)
from arenarl.study_page import page, spread_out
from arenarl.types import Abstention, Verdict

NAN = math.nan


def console() -> Console:
    return Console(file=io.StringIO(), width=60)


@pytest.mark.parametrize(
    ("x", "y", "tau"),
    [
        ([1, 2, 3], [4, 5, 6], 1.0), ([3, 2, 1], [4, 5, 6], -1.0), ([1, 1, 1], [1, 2, 3], 0.0),
        ([1, 1, 2], [1, 2, 3], 2 / math.sqrt(2 * 3)),  # one tie in x: 2 of 3 pairs, all concordant
        ([1, NAN, 2], [1, 2, 3], 1 / math.sqrt(1 * 3)), ([NAN, NAN], [1, 2], 0.0),
    ],
)  # fmt: skip
def test_kendall_tau_b(x, y, tau):
    assert kendall_tau_b(np.array(x, dtype=float), np.array(y, dtype=float)) == pytest.approx(tau)


def test_correlation_of_what_does_not_vary_is_zero():
    assert correlation(np.array([1.0, 2.0, 3.0]), np.array([2.0, 4.0, 6.0])) == pytest.approx(1.0)
    assert correlation(np.ones(3), np.arange(3.0)) == 0.0


async def test_estimators_that_share_games_find_what_the_tournament_itself_does():
    asked = methods(["single_elimination", "info_gain"])
    rows = await study(asked, [Setting(players=8, missing=0.2)], groups=2, seed=5)
    for row in rows:
        outage = 1 - math.sqrt(0.8) if row.method.orders == 2 else 0.2
        found = []
        for group in range(2):
            qualities, own = np.random.default_rng([5, group]).normal(size=8), group_seed(5, group)
            result = await run_tournament(
                row.method.topology, 8, simulated_compare(qualities, seed=own, outage=outage),
                estimator=row.method.estimator, orders=row.method.orders, seed=own,
            )  # fmt: skip
            found.append(np.corrcoef(np.nan_to_num(result.advantages), qualities)[0, 1])
        assert row.advantage.value == pytest.approx(np.mean(found)), row.method


async def test_prices_are_those_of_the_topologies():
    rows = await study([*methods(estimators=["paper"]), *POINTWISE], [Setting(players=8)], groups=2)
    assert {row.method.topology: (row.calls, row.waits) for row in rows if row.method not in POINTWISE} == {
        "anchor": (14, 1), "round_robin": (56, 1), "swiss": (24, 3), "double_elimination": (28, 6),
        "single_elimination": (28, 4), "even_graph": (28, 1), "info_gain": (28, 1),
    }  # fmt: skip
    assert [row.calls for row in rows if row.method in POINTWISE] == [8, 32, 8, 32]


async def test_a_method_does_the_same_whoever_else_is_asked():
    alone = await study([DEFAULT], [Setting()], groups=3, seed=2)
    among = await study([*methods(), *POINTWISE], [Setting()], groups=3, seed=2)
    assert alone == [row for row in among if row.method == DEFAULT]
    assert alone != await study([DEFAULT], [Setting()], groups=3, seed=3)


async def test_a_perfect_judge_is_believed():
    (row,) = await study([Method("round_robin", "paper", 2)], [Setting(players=6, kind="binary", theta=1e6)], groups=3)
    assert (row.tau.value, row.top1.value) == (pytest.approx(1.0), 1.0)


@pytest.mark.parametrize("method", [DEFAULT, REFERENCE])
async def test_missing_is_a_share_of_games_in_one_order_and_in_both(method):
    (row,) = await study([method], [Setting(missing=0.3)], groups=20)
    assert row.missing == pytest.approx(0.3, abs=0.05)  # 600 games and more


async def test_without_any_games_nothing_is_known():
    (row,) = await study([DEFAULT], [Setting(players=4, missing=1.0)], groups=2)
    assert (row.tau.value, row.advantage.value, row.top1.value) == (0.0, 0.0, 0.25)


async def test_the_default_beats_the_papers_bracket_at_its_price():
    rows = await study([DEFAULT, Method("single_elimination", "margin_ls", 2), REFERENCE], [Setting()], groups=60)
    default, same_games, reference = rows
    assert default.calls == reference.calls and default.waits == 1
    assert default.gain.value > 5 * default.gain.stderr > 0
    assert default.gain.value > same_games.gain.value > 3 * same_games.gain.stderr
    assert default.gain.value == pytest.approx(default.advantage.value - reference.advantage.value)
    assert (reference.gain.value, reference.gain.stderr) == (0.0, 0.0)


async def test_marks_on_a_fine_scale_beat_rounded_ones_and_four_beat_one():
    x1, x4, x1_fine, x4_fine = [row.advantage.value for row in await study(POINTWISE, [Setting()], groups=60)]
    assert x1 < x1_fine < x4_fine
    assert x1 < x4 < x4_fine
    assert x4_fine == pytest.approx(0.906, abs=0.02)  # sqrt(.0005 / (.0005 + .0004 / 4)) in a large group is .913


def test_the_printed_table(tmp_path):
    shown, out = console(), tmp_path / "rows.json"
    rows = simulate(
        shown, topologies=["even_graph", "anchor"], estimators=["margin_ls"], players=[4], groups=3, seed=1, out=out
    )
    assert [line.rstrip() for line in shown.file.getvalue().splitlines() if line.strip()] == TABLE
    assert [line["advantage"]["value"] for line in json.loads(out.read_text())] == [r.advantage.value for r in rows]


TABLE = [
    "4 players, margin judge, theta 1.5",
    "| topology   | estimator | orders | calls | comparisons | waits | missing |            tau |     advantage |          top1 |           gain |",
    "|------------|-----------|--------|-------|-------------|-------|---------|----------------|---------------|---------------|----------------|",
    "| even_graph | margin_ls |      1 |     6 |           3 |     1 |    0.00 |  0.667 ± 0.192 | 0.845 ± 0.098 | 1.000 ± 0.000 | -0.070 ± 0.091 |",
    "| anchor     | margin_ls |      2 |     6 |           3 |     1 |    0.00 |  0.889 ± 0.111 | 0.986 ± 0.007 | 1.000 ± 0.000 | +0.071 ± 0.027 |",
    "| pointwise  | x1        |        |     4 |           2 |     1 |    0.00 | -0.079 ± 0.079 | 0.067 ± 0.067 | 0.167 ± 0.083 | -0.848 ± 0.086 |",
    "| pointwise  | x4        |        |    16 |           8 |     1 |    0.00 |  0.297 ± 0.212 | 0.402 ± 0.256 | 0.194 ± 0.100 | -0.513 ± 0.235 |",
    "| pointwise  | x1 fine   |        |     4 |           2 |     1 |    0.00 |  0.222 ± 0.294 | 0.442 ± 0.338 | 0.333 ± 0.333 | -0.474 ± 0.325 |",
    "| pointwise  | x4 fine   |        |    16 |           8 |     1 |    0.00 |  0.333 ± 0.333 | 0.578 ± 0.400 | 0.333 ± 0.333 | -0.337 ± 0.392 |",
    "3 groups, seed 1; gain is over single_elimination paper both",
    "orders, paired",
]


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"groups": 1}, "groups=1.*2 or more"), ({"players": [8, 1]}, "players=1.*2 or more"),
        ({"missing": 1.0}, "missing=1.0.*0 to below 1"), ({"missing": -0.1}, "missing=-0.1"),
        ({"kinds": ["rude"]}, "'rude'.*margin, coarse, lapse, binary"), ({"thetas": [0.0]}, "theta=0.0.*positive"),
        ({"topologies": ["swis"]}, "'swis'.*'swiss'"), ({"estimators": ["margins"]}, "'margins'.*'margin_ls'"),
        ({"orders": 3}, "orders=3"), ({"out": "no/such/folder.json"}, "no/such.*first"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_before_a_game(setting, said):
    with pytest.raises(ConfigError, match=said):
        simulate(console(), **setting)


async def test_calibration_of_a_judge_who_only_likes_the_first_side():
    async def compare(i: int, j: int) -> Verdict:
        return Verdict(score_a=1.0, score_b=0.0)

    found = await calibrate(compare, [(0, 1), (2, 3)])
    assert (found.first, found.flips, found.repeats, found.margins, found.wins) == (1.0, 1.0, 1.0, 0.0, 0.0)


async def test_calibration_tells_ties_and_abstentions_from_wins():
    async def compare(i: int, j: int) -> Verdict | Abstention:
        if {i, j} == {0, 1}:
            return Abstention(reason="down")
        return Verdict(score_a=float(i == 4), score_b=float(j == 4))

    found = await calibrate(compare, [(0, 1), (2, 3), (4, 5), (6, 7)])
    assert (found.abstained, found.ties, found.first, found.flips) == (0.25, pytest.approx(2 / 3), 1.0, 0.0)


async def test_calibration_shows_whether_margins_mean_anything():
    pairs = [(k, k + 1500) for k in range(1500)]
    qualities = np.random.default_rng(0).normal(size=3000)
    margin = await calibrate(simulated_compare(qualities, kind="margin"), pairs)
    binary = await calibrate(simulated_compare(qualities, kind="binary"), pairs)
    assert margin.margins == pytest.approx(2 / (2 + math.pi**2 / 3 / 1.5**2), abs=0.04)  # variances: qualities, noise
    assert margin.wins < margin.margins - 0.1
    assert binary.wins == pytest.approx(binary.margins)
    assert margin.repeats > 1 - margin.flips > 0.6  # the liking for a side repeats itself, and turns with the order


async def test_calibration_needs_pairs():
    with pytest.raises(ConfigError, match="pairs="):
        await calibrate(simulated_compare([0.0]), [])


def test_the_page_can_be_made_again(tmp_path):
    shown = console()
    page(tmp_path, shown, players=(16,), judges=[("margin", 1.5), ("binary", 0.7)], groups=2, pairs=20)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "arena-cost.svg", "arena-judges.svg", "arena-missing.svg",
    ]  # fmt: skip
    assert all(1000 < path.stat().st_size < 60_000 for path in tmp_path.iterdir())
    assert shown.file.getvalue().count("| even_graph") > 10


def test_labels_that_would_overlap_make_room_for_each_other():
    assert spread_out([0.0, 5.0], 1.0) == [0.0, 5.0]
    assert spread_out([1.0, 1.0, 1.5, 9.0], 2.0) == pytest.approx([-5 / 6, 7 / 6, 19 / 6, 9.0])
    assert spread_out([3.0, 2.9, 0.5], 1.0) == pytest.approx([3.45, 2.45, 0.5])
