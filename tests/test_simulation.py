"""Simulated judges: what they get right, what they get wrong, and that they repeat themselves."""

import asyncio
import math
import pickle

import numpy as np
import pytest

from arenarl.errors import ConfigError
from arenarl.simulation import SimulatedJudge, pointwise_mark, simulated_compare, uniforms
from arenarl.taskset import load_object
from arenarl.types import Abstention, Episode, Outcome, Task, Trajectory, Verdict

TASK = Task(task_id="t", kind="k", prompt="p")


def episode(name: str, score: float | None) -> Episode:
    return Episode(
        episode_id=name,
        task=TASK,
        member=0,
        greedy=False,
        segments=(),
        trajectory=Trajectory(messages=(), events=(), answer=""),
        outcome=Outcome.ABSTAINED if score is None else Outcome.SCORED,
        score=score,
    )


async def margins(compare, pairs) -> np.ndarray:
    verdicts = [await compare(i, j) for i, j in pairs]
    return np.array([v.score_a - v.score_b for v in verdicts])


@pytest.mark.parametrize(
    ("kind", "theta", "accuracy"),
    [  # research figures for normal qualities: 0.716 0.833 0.909 0.822 0.784 0.782 0.669, each within 0.004
        ("margin", 0.7, 0.717), ("margin", 1.5, 0.833), ("margin", 3.0, 0.909),
        ("coarse", 1.5, 0.820), ("lapse", 1.5, 0.786), ("binary", 1.5, 0.780), ("binary", 0.7, 0.667),
    ],
)  # fmt: skip
async def test_accuracy_of_a_comparison_in_both_orders(kind, theta, accuracy):
    pairs = 16_000
    qualities = np.random.default_rng(0).normal(size=2 * pairs)
    compare = simulated_compare(qualities, kind=kind, theta=theta)
    forth = await margins(compare, [(k, k + pairs) for k in range(pairs)])
    back = await margins(compare, [(k + pairs, k) for k in range(pairs)])
    right = np.sign(np.round(forth - back, 6)) * np.sign(qualities[:pairs] - qualities[pairs:])
    assert np.mean((right + 1) / 2) == pytest.approx(accuracy, abs=0.009)  # three standard errors


@pytest.mark.parametrize("kind", ["margin", "binary"])
async def test_equal_attempts_show_the_liking_for_the_first_side(kind):
    found = await margins(simulated_compare([0.0, 0.0], kind=kind), [(0, 1)] * 8000)
    first = np.mean((np.sign(np.round(found, 6)) + 1) / 2)
    assert first == pytest.approx(1 / (1 + math.exp(-0.5)), abs=0.017)


async def test_one_order_prefers_the_first_side_by_bias_over_theta():
    found = await margins(simulated_compare([1.0, 0.0], theta=2.0, bias=1.0), [(0, 1)] * 8000)
    assert found.mean() == pytest.approx(1.0 + 1.0 / 2.0, abs=0.035)
    assert found.std() == pytest.approx(math.pi / math.sqrt(3) / 2.0, rel=0.05)  # logistic noise


@pytest.mark.parametrize(
    ("kind", "marks"),
    [
        ("margin", [(7.5, 8.7), (5.2, 6.3), (8.6, 8.0)]),
        ("coarse", [(7.0, 9.0), (5.0, 6.0), (9.0, 8.0)]),
        ("lapse", [(7.5, 8.7), (5.2, 6.3), (8.6, 8.0)]),
        ("binary", [(0.0, 1.0), (0.0, 1.0), (1.0, 0.0)]),
    ],
)
async def test_answers_depend_on_seed_order_and_repeat_only(kind, marks):
    compare = simulated_compare([0.0, 1.0], kind=kind, seed=7)
    assert await compare(1, 0) == Verdict(score_a=marks[2][0], score_b=marks[2][1], judge="simulated", calls=1)
    assert [(v.score_a, v.score_b) for v in [await compare(0, 1), await compare(0, 1)]] == marks[:2]


def test_the_same_names_give_the_same_numbers_everywhere():
    assert uniforms(0, "a", "b") == (0.6885875861794958, 0.6483670683276089, 0.9223521683619776, 0.7597780673274158)
    assert uniforms(1, "a", "b") != uniforms(0, "a", "b") != uniforms(0, "b", "a")


async def test_the_level_of_the_marks_wanders_and_says_nothing():
    compare = simulated_compare([0.0, 0.0])
    levels = [(v.score_a + v.score_b) / 2 for v in [await compare(0, 1) for _ in range(4000)]]
    assert (np.mean(levels), np.std(levels)) == pytest.approx((7.0, 1.0), abs=0.05)


async def test_a_lapse_is_a_tenth_of_the_calls_and_ignores_quality():
    sharp = simulated_compare([9.0, 0.0], kind="lapse", theta=50.0)
    wrong = np.mean(await margins(sharp, [(0, 1)] * 8000) < 0)
    assert wrong == pytest.approx(0.05, abs=0.008)


async def test_outages_have_their_share_and_leave_the_other_answers_alone():
    pairs = [(i, j) for i in range(60) for j in range(60) if i != j]
    down, up = simulated_compare(np.zeros(60), outage=0.3), simulated_compare(np.zeros(60))
    found = [(await down(i, j), await up(i, j)) for i, j in pairs]
    assert np.mean([isinstance(a, Abstention) for a, _ in found]) == pytest.approx(0.3, abs=0.025)
    assert all(a == b for a, b in found if isinstance(a, Verdict))
    assert {a.kind for a, _ in found if isinstance(a, Abstention)} == {"unavailable"}


async def test_episodes_are_compared_by_score_in_units_of_sd():
    a, b = episode("a", 0.9), episode("b", 0.5)
    judge = SimulatedJudge(theta=1e6, sd=0.2)
    verdict = await judge.compare(a, b, TASK)
    assert verdict.score_a - verdict.score_b == pytest.approx(2.0, abs=0.11)
    assert verdict == await pickle.loads(pickle.dumps(judge)).compare(a, b, TASK)
    assert verdict != await SimulatedJudge(theta=1e6, sd=0.2, seed=1).compare(a, b, TASK)


async def test_the_two_orders_of_a_pair_are_two_calls():
    judge = SimulatedJudge(theta=0.5)
    there, back = [await judge.compare(episode(x, 0.5), episode(y, 0.5), TASK) for x, y in ("ab", "ba")]
    assert (there.score_a, there.score_b) != (back.score_b, back.score_a)


async def test_marks_are_compressed_and_rounded_and_differ_by_repeat():
    episodes = [episode(f"e{k}", 0.5 + 0.2 * q) for k, q in enumerate(np.random.default_rng(0).normal(size=2000))]
    rounded = [(await SimulatedJudge().mark(e, TASK)).score for e in episodes]
    assert set(rounded) <= {0.6, 0.7, 0.8}
    fine = np.array([[(await SimulatedJudge(fine=True).mark(e, TASK, r)).score for r in (0, 1)] for e in episodes])
    assert fine[:, 0].mean() == pytest.approx(0.7, abs=0.002)
    assert fine[:, 0].std() == pytest.approx(0.03, rel=0.05)
    assert (fine[:, 0] - fine[:, 1]).std() == pytest.approx(0.02 * math.sqrt(2), rel=0.05)


def test_a_mark_by_hand():
    middle = (0.5, 0.5, 0.5, 0.5)  # no noise
    assert pointwise_mark(2.0, middle, fine=True) == pytest.approx(0.7 + 2 * math.sqrt(0.0005))
    assert pointwise_mark(2.0, middle) == 0.7
    assert pointwise_mark(2.0, middle, centre=0.72) == 0.8


async def test_without_a_score_there_is_no_verdict_and_no_mark():
    judge, known, unknown = SimulatedJudge(), episode("a", 0.5), episode("b", None)
    assert (await judge.compare(known, unknown, TASK)).reason == "no_score: b"
    assert (await judge.compare(unknown, unknown, TASK)).reason == "no_score: b and b"
    assert (await judge.mark(unknown, TASK)).reason == "no_score: b"


async def test_total_outage_takes_comparisons_and_marks():
    judge = SimulatedJudge(outage=1.0)
    found = [await judge.compare(episode("a", 1.0), episode("b", 0.0), TASK), await judge.mark(episode("a", 1.0), TASK)]
    assert [x.kind for x in found] == ["unavailable", "unavailable"]


def test_a_configuration_can_name_the_judge():
    judge = load_object("arenarl.simulation:SimulatedJudge", "judge", kind="binary", theta=0.7, latency_s=0.3)
    assert (judge.kind, judge.theta, judge.latency_s) == ("binary", 0.7, 0.3)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"kind": "sharp"}, "'sharp'.*margin, coarse, lapse, binary"), ({"theta": 0.0}, "theta=0.0.*positive"),
        ({"theta": math.nan}, "theta=nan"), ({"outage": 1.5}, "outage=1.5.*0 to 1"), ({"sd": 0.0}, "sd=0.0.*positive"),
        ({"latency_s": -1.0}, "latency_s=-1.0.*0 or more"),
    ],
)  # fmt: skip
def test_impossible_judges_are_refused(setting, said):
    with pytest.raises(ConfigError, match=said):
        SimulatedJudge(**setting)


async def test_an_answer_takes_its_latency():
    judge = SimulatedJudge(latency_s=3600.0)
    for answer in (judge.compare(episode("a", 1.0), episode("b", 0.0), TASK), judge.mark(episode("a", 1.0), TASK)):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await answer
