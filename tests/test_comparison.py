"""Games between two sides: golden numbers by hand, and that nothing depends on which side is called ours."""

import asyncio
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arenarl import comparison
from arenarl.cli import load_config
from arenarl.comparison import (
    Attempts,
    close_judges,
    compare_attempts,
    evaluation_judge,
    evaluation_judges,
    load_judge,
    pair_up,
    play_games,
    rule,
    valid,
)
from arenarl.envs.travel import TravelTasks
from arenarl.errors import ConfigError, JudgeError
from arenarl.judge import OracleJudge, RubricJudge
from arenarl.types import Abstention, Episode, Outcome, Task, Trajectory, Verdict


def attempt(answer: str | None, *, name: str = "e", outcome: Outcome = Outcome.SCORED, score: float | None = 0.5):
    trajectory = Trajectory(messages=(), events=(), answer=answer)
    return Episode(
        episode_id=name, task=Task(task_id="t", kind="k", prompt="p"), member=0, greedy=False, segments=(),
        trajectory=trajectory, outcome=outcome, score=None if outcome is Outcome.FAILED else score,
    )  # fmt: skip


LOST, CUT, SILENT = attempt(None, outcome=Outcome.FAILED), attempt("9 9", outcome=Outcome.TRUNCATED), attempt(None)


class Reader:
    """Reads its marks from the answers, "breadth depth"; likes side a by ``bias``; abstains at "?"."""

    def __init__(self, bias: float = 0.0) -> None:
        self.bias, self.seen, self.closed = bias, 0, 0

    async def compare(self, a: Episode, b: Episode, task: Task) -> Verdict | Abstention:
        self.seen += 1
        if "?" in (a.trajectory.answer or "") + (b.trajectory.answer or ""):
            return Abstention(reason="no_json: prose only", calls=1, prompt_tokens=10, seconds=0.5)
        x, y = ([float(n) for n in (e.trajectory.answer or "").split()] for e in (a, b))
        dimensions = {"path/breadth": (x[0], y[0]), "path/depth": (x[1] + self.bias, y[1])}
        return Verdict(score_a=sum(x) + self.bias, score_b=sum(y), dimensions=dimensions, calls=1, prompt_tokens=10)

    async def aclose(self) -> None:
        self.closed += 1


def judged(judge: Reader, ours: Attempts, theirs: Attempts) -> comparison.Ruling:
    pairs = pair_up(ours, theirs)
    (answers,) = play_games([judge], [p for p in pairs if p.walkover is None])
    return rule("reader", "", pairs, answers, len(ours))


def counts(rate) -> tuple[int, int, int, int]:
    return rate.wins, rate.losses, rate.ties, rate.missing


def test_both_orders_are_asked_and_a_liking_for_a_side_cancels():
    judge = Reader(bias=7.0)
    result = judged(judge, [[attempt("5 4")]], [[attempt("5 2")]])
    assert result.valid_margins == (4.0,)
    assert (judge.seen, judge.closed) == (2, 1)
    assert (result.games, result.calls, result.prompt_tokens) == (1, 2, 20)


OURS = [[attempt("8 1")], [attempt("3 0")], [CUT], [attempt("1 1")], [attempt("2 3")], [LOST], [SILENT], [attempt("?")]]
THEIRS = [
    [attempt("6 2")],
    [attempt("5 0")],
    [attempt("1 0")],
    [SILENT],
    [attempt("3 2")],
    [SILENT],
    [CUT],
    [attempt("1 1")],
]


def test_win_rates_over_valid_pairs_and_over_all_queries():
    result = judged(Reader(), OURS, THEIRS)
    # tasks 0 won, 1 lost, 4 tied, 7 abstained; 2 and 3 are walkovers; in 6 nobody is valid; 5 was lost by the infrastructure
    assert result.valid_margins == (2.0, -4.0, None, None, 0.0, None, None, None)
    assert counts(result.valid_pairs) == (1, 1, 1, 1)
    assert result.all_margins == (2.0, -4.0, -4.0, 4.0, 0.0, None, 0.0, None)
    assert counts(result.all_queries) == (2, 2, 2, 2)
    assert result.abstentions == {"no_json": 1}


def test_each_dimension_has_a_win_rate_of_its_own():
    result = judged(Reader(bias=5.0), OURS, THEIRS)
    assert list(result.dimensions) == ["path/breadth", "path/depth"]
    assert counts(result.dimensions["path/breadth"]) == (1, 2, 0, 1)
    assert counts(result.dimensions["path/depth"]) == (1, 1, 1, 1)


def test_a_model_that_fails_often_is_not_flattered_over_all_queries():
    ours = [[attempt("9 9")]] + [[CUT]] * 9
    result = judged(Reader(), ours, [[attempt("1 1")]] * 10)
    assert (result.valid_pairs.rate, result.all_queries.rate) == (1.0, 0.1)


def test_the_attempts_of_a_task_are_one_decision_by_their_mean_margin():
    ours = [[attempt("4 4"), attempt("1 1"), LOST], [attempt("9 9"), CUT]]
    theirs = [[attempt("3 3")], [attempt("8 8"), attempt("5 5")]]
    result = judged(Reader(), ours, theirs)
    assert result.valid_margins == ((4 - 8) / 2, 4.0)
    assert result.all_margins == (-2.0, (4 - 8) / 2)
    assert counts(result.valid_pairs) == (1, 1, 0, 0) and counts(result.all_queries) == (0, 2, 0, 0)


def test_without_a_verdict_a_walkover_still_counts():
    result = judged(Reader(), [[CUT], [attempt("1 1")]], [[attempt("1 1")], [attempt("1 1")]])
    assert result.all_margins == (-1.0, 0.0)


@pytest.mark.parametrize(
    ("episode", "is_valid"),
    [
        (attempt("ok"), True),
        (attempt("ok", outcome=Outcome.ABSTAINED, score=None), True),
        (attempt("ok", outcome=Outcome.TRUNCATED), False),
        (attempt("ok", outcome=Outcome.FAILED), False),
        (attempt(" \n"), False),
        (attempt(None), False),
    ],
)
def test_a_valid_attempt_ended_by_itself_with_an_answer(episode, is_valid):
    assert valid(episode) is is_valid


SIDES = st.lists(
    st.lists(st.sampled_from([attempt("1 2"), attempt("3 1"), attempt("2 2"), attempt("?"), CUT, SILENT, LOST]), max_size=3),
    min_size=4, max_size=4,
)  # fmt: skip


@settings(max_examples=50)
@given(SIDES, SIDES, st.sampled_from([0.0, 3.0]))
def test_the_other_side_has_the_mirror_image(ours, theirs, bias):
    one, other = judged(Reader(bias), ours, theirs), judged(Reader(bias), theirs, ours)
    assert one.all_margins == tuple(None if m is None else -m for m in other.all_margins)
    for a, b in ((one.valid_pairs, other.valid_pairs), (one.all_queries, other.all_queries)):
        assert counts(a) == (b.losses, b.wins, b.ties, b.missing)
    assert sum(counts(one.all_queries)) == 4
    assert one.abstentions == other.abstentions


class Faulty:
    def __init__(self, answer: object, on_close: BaseException | None = None) -> None:
        self.answer, self.on_close, self.closed = answer, on_close, 0

    async def compare(self, a: Episode, b: Episode, task: Task) -> object:
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer

    async def aclose(self) -> None:
        self.closed += 1
        if self.on_close:
            raise self.on_close


@pytest.mark.parametrize("answer", [ValueError("boom"), 0.5, Verdict(score_a=math.nan, score_b=0.0)])
def test_what_is_no_verdict_stops_the_evaluation_and_every_judge_is_closed(answer):
    judges = [Reader(), Faulty(answer)]
    with pytest.raises(JudgeError, match=r"^o against t: comparing"):
        play_games(judges, pair_up([[attempt("1 1", name="o")]], [[attempt("1 1", name="t")]]))
    assert (judges[0].closed, judges[1].closed) == (1, 1)


@pytest.mark.parametrize(("error", "reason"), [("server is slow", "server is slow"), ("", "no verdict after 600 s")])
def test_a_judge_that_times_out_abstains(error, reason):
    slow = Faulty(TimeoutError(error) if error else TimeoutError())
    (answers,) = play_games([slow], pair_up([[attempt("1")]], [[attempt("2")]]))
    assert [a.reason for a in answers] == [f"timeout: {reason}"]


def test_a_judge_that_does_not_close_is_logged_and_the_others_are_closed(caplog):
    judges = [Faulty(None, on_close=OSError("stuck")), Reader()]
    asyncio.run(close_judges([*judges, RubricJudge()]))
    assert (judges[0].closed, judges[1].closed) == (1, 1)
    assert "judge Faulty did not close: OSError: stuck" in caplog.text


class Crowded(Reader):
    """Counts how many wait for it at once."""

    inside, most = 0, 0

    async def compare(self, a: Episode, b: Episode, task: Task) -> Verdict | Abstention:
        self.inside += 1
        self.most = max(self.most, self.inside)
        for _ in range(20):
            await asyncio.sleep(0)
        self.inside -= 1
        return await super().compare(a, b, task)


def test_no_more_games_than_a_judge_can_answer_within_its_deadline_are_in_flight():
    judge = Crowded()
    played = judged(judge, [[attempt("2 2")]] * 100, [[attempt("1 1")]] * 100)
    assert (judge.most, judge.seen, played.valid_pairs.wins) == (2 * comparison.AT_ONCE, 200, 100)


def test_before_and_after_leave_out_what_the_infrastructure_lost_and_judge_the_rest():
    judge = OracleJudge(lambda e: float(len(e.trajectory.answer or "")))
    before = [attempt("aa", score=0.25), attempt("aa", score=0.5), attempt("a"), LOST]
    after = [attempt("aaa", score=0.75), attempt("a", score=0.5), LOST, attempt("a")]
    result = compare_attempts(judge, before, after)
    assert [result[k] for k in ("wins", "losses", "ties", "missing", "win_rate")] == [1, 1, 0, 2, 0.5]
    assert (result["checklist_gain"], result["held_out_tasks"]) == (0.25, 4)


# -- judges ---------------------------------------------------------------------------------------------------------------


def test_a_judge_is_named_with_its_arguments():
    assert load_judge('arenarl.judge:RubricJudge{"noise": 0.25}').noise == 0.25
    assert load_judge(' arenarl.judge:RubricJudge {"seed": 3} ').seed == 3
    assert isinstance(load_judge("arenarl.judge:RubricJudge"), RubricJudge)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nowhere:Judge", "'nowhere:Judge'.*give 'module:Name'"),
        ("arenarl.judge:RubricJudge{noise: 1}", "no JSON object"),
        ('arenarl.judge:RubricJudge{"nose": 1}', "nose"),
        ('arenarl.judge:RubricJudge{"noise": -1}', "noise=-1"),
        ("os:getcwd", "'os:getcwd' has no method compare.*'module:Class'"),
        ("asyncio:get_running_loop", "'asyncio:get_running_loop' cannot be built.*RuntimeError"),
    ],
)
def test_a_judge_that_cannot_be_built_is_refused(text, says):
    with pytest.raises(ConfigError, match=says):
        load_judge(text)


def test_the_verifier_of_a_task_set_judges_evaluations():
    taskset = TravelTasks()
    (task,) = taskset.tasks("heldout", 1, 0)
    judge, name = evaluation_judge(taskset, config=None)
    silent = Episode(
        episode_id="e", task=task, member=0, greedy=False, segments=(), outcome=Outcome.SCORED,
        trajectory=Trajectory(messages=(), events=(), answer="I do not know."),
    )  # fmt: skip
    assert "not used in training" in name
    assert asyncio.run(judge.compare(silent, silent, task)) == Verdict(score_a=0.0, score_b=0.0)


def test_judges_of_one_name_are_told_apart_and_arguments_that_are_no_json_are_shown():
    config = load_config("experiments/quickstart.py", [])
    config.judging(judge_config={"seed": frozenset({1})})
    found = evaluation_judges(
        TravelTasks(), config, ["arenarl.judge:RubricJudge", 'arenarl.judge:RubricJudge{"seed": 1}']
    )
    assert [j.name for j in found] == ["RubricJudge", "travel verifier", "RubricJudge 2", "RubricJudge 3"]
    assert found[0].about == 'arenarl.judge:RubricJudge{"seed": [1]}, the training judge'
    assert [j.judge.seed for j in found[2:]] == [0, 1]
