"""Judges that need no model."""

import statistics

import pytest

from arenarl.errors import ConfigError
from arenarl.judge import OracleJudge, RubricJudge
from arenarl.types import Abstention, Episode, Mark, Outcome, Task, Trajectory, Verdict

TASK = Task(task_id="t", kind="k", prompt="p")


def episode(name: str, score: float | None, answer: str = "") -> Episode:
    return Episode(
        episode_id=name,
        task=TASK,
        member=0,
        greedy=False,
        segments=(),
        trajectory=Trajectory(messages=(), events=(), answer=answer),
        outcome=Outcome.ABSTAINED if score is None else Outcome.SCORED,
        score=score,
    )


async def margin(judge, a: Episode, b: Episode) -> float:
    verdict = await judge.compare(a, b, TASK)
    return verdict.score_a - verdict.score_b


async def test_rubric_judge_takes_the_difference_of_checklist_scores():
    assert await RubricJudge().compare(episode("a", 0.75), episode("b", 0.5), TASK) == Verdict(
        score_a=0.75, score_b=0.5
    )


@pytest.mark.parametrize("scores", [(None, 0.5), (0.5, None), (None, None)])
async def test_rubric_judge_abstains_without_a_score_and_says_whose(scores):
    names = [name for name, score in zip("ab", scores, strict=True) if score is None]
    verdict = await RubricJudge(noise=1.0).compare(episode("a", scores[0]), episode("b", scores[1]), TASK)
    assert verdict == Abstention(reason=f"no_score: {' and '.join(names)}")


async def test_noise_depends_only_on_seed_and_episode_ids():
    a, b, c = episode("a", 0.4), episode("b", 0.4), episode("c", 0.4)
    judge = RubricJudge(noise=0.2, seed=1)
    first = await margin(judge, a, b)
    await margin(judge, b, c)
    assert await margin(judge, a, b) == first == await margin(RubricJudge(noise=0.2, seed=1), a, b)
    others = [await margin(judge, b, a), await margin(judge, a, c), await margin(RubricJudge(0.2, seed=2), a, b)]
    assert len({first, *others, *(-m for m in others)}) == 7


async def test_noise_on_the_margin_has_the_stated_spread_and_no_liking_for_a_side():
    judge = RubricJudge(noise=0.2)
    noise = [await margin(judge, episode(f"a{k}", 0.5), episode(f"b{k}", 0.4)) - 0.1 for k in range(2000)]
    assert statistics.mean(noise) == pytest.approx(0, abs=0.015)
    assert statistics.stdev(noise) == pytest.approx(0.2, abs=0.01)


async def test_names_cannot_run_into_each_other():
    judge = RubricJudge(noise=1.0)
    assert await margin(judge, episode("ab", 0.0), episode("c", 0.0)) != await margin(
        judge, episode("a", 0.0), episode("bc", 0.0)
    )


@pytest.mark.parametrize("noise", [-0.1, float("nan"), float("inf")])
def test_a_negative_spread_is_refused(noise):
    with pytest.raises(ConfigError, match="noise="):
        RubricJudge(noise=noise)


async def test_oracle_compares_a_hidden_quality_and_abstains_where_it_is_unknown():
    oracle = OracleJudge(lambda e: len(e.trajectory.answer) if e.trajectory.answer else None)
    long, short, none = episode("a", 0.0, "long"), episode("b", 1.0, "no"), episode("c", 1.0)
    assert await margin(oracle, long, short) == 2
    assert await oracle.compare(none, long, TASK) == Abstention(reason="no_score: c")


async def test_marks_of_one_attempt_are_its_score_and_repeats_are_independent():
    a, unscored = episode("a", 0.4), episode("b", None)
    assert await RubricJudge().mark(a, TASK) == Mark(score=0.4)
    assert await RubricJudge().mark(unscored, TASK) == Abstention(reason="no_score: b")
    noisy = RubricJudge(noise=0.2)
    assert (await noisy.mark(a, TASK, repeat=0)).score != (await noisy.mark(a, TASK, repeat=1)).score
    assert await noisy.mark(a, TASK, repeat=1) == await RubricJudge(noise=0.2).mark(a, TASK, repeat=1)
    assert await OracleJudge(lambda e: 7.0).mark(a, TASK) == Mark(score=7.0)
