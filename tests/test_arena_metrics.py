"""Golden numbers for the diagnostics of a step's tournaments, worked by hand."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arenarl.arena_metrics import arena_metrics, order_bias, reliability
from arenarl.tracking import metric_family
from arenarl.types import Abstention, Episode, EpisodeGroup, Game, Mark, Outcome, Standings, Task, Trajectory, Verdict

TASK = Task(task_id="t", kind="k", prompt="p")
NOTHING = Trajectory(messages=(), events=(), answer="x")
LOST = Abstention(reason="timeout: 60 s")


def episode(member: int) -> Episode:
    return Episode(
        episode_id=f"e{member}", task=TASK, member=member, greedy=False, segments=(), trajectory=NOTHING, outcome=Outcome.SCORED
    )  # fmt: skip


def group(*games: Game, size: int = 3, **fields: object) -> EpisodeGroup:
    return EpisodeGroup(
        group_id="g", task=TASK, episodes=tuple(map(episode, range(size))), version=0, games=games, **fields
    )


def game(i: int, j: int, *answers: tuple[float, float] | Abstention, round: int = 0, seconds: float = 1.0) -> Game:
    """One answer, or two: the second with j on side a, as it was given."""
    given = tuple(a if isinstance(a, Abstention) else Verdict(score_a=a[0], score_b=a[1]) for a in answers)
    if len(given) == 1:
        return Game(i=i, j=j, round=round, result=given[0], seconds=seconds)
    lost = next((a for a in given if isinstance(a, Abstention)), None)
    result = lost or Verdict(score_a=given[0].score_a + given[1].score_b, score_b=given[0].score_b + given[1].score_a)
    return Game(i=i, j=j, round=round, result=result, halves=given, seconds=seconds)


def table(scores: tuple, stderr: tuple, *, estimator: str = "margin_ls", gated: tuple = ()) -> Standings:
    return Standings(
        topology="t", estimator=estimator, orders=1, seed=0, scores=scores, stderr=stderr, ranks=scores, gated=gated
    )


def of(metrics: dict[str, float], prefix: str) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.startswith(prefix)}


def test_abstentions_are_a_share_and_counted_by_kind():
    found = arena_metrics(
        [group(game(0, 1, (7, 5)), game(1, 2, LOST), game(0, 2, Abstention(reason="no score for e0")))]
    )
    assert of(found, "group/abstained") == {
        "group/abstained_game_share": pytest.approx(2 / 3),
        "group/abstained/timeout": 1.0,
        "group/abstained/other": 1.0,
    }


def test_each_half_that_abstains_is_counted_and_the_game_once():
    found = arena_metrics([group(game(0, 1, LOST, LOST), game(0, 2, (7, 5), (5, 7)))])
    assert found["group/abstained_game_share"] == 0.5
    assert found["group/abstained/timeout"] == 2.0


def test_kinds_are_few():
    kinds = [Abstention(reason=f"kind_{k}") for k in range(12) for _ in range(13 - k)]
    counts = of(arena_metrics([group(*(game(0, 1, kind) for kind in kinds))]), "group/abstained/")
    assert len(counts) == 9
    assert counts["group/abstained/kind_0"] == 13.0
    assert counts["group/abstained/other"] == 5.0 + 4.0 + 3.0 + 2.0


def test_a_tie_is_equal_marks_up_to_float_noise_among_decided_games():
    found = arena_metrics(
        [group(game(0, 1, (5, 5)), game(0, 2, (0.1 + 0.2, 0.3)), game(1, 2, (6, 5)), game(1, 2, LOST))]
    )
    assert found["group/tied_game_share"] == pytest.approx(2 / 3)


def test_order_bias_of_both_orders_is_the_mean_margin_over_the_rms():
    found = arena_metrics([group(game(0, 1, (7, 5), (6, 6)))])  # side a leads by 2 and by 0: 1 / sqrt(2)
    assert found["group/order_bias"] == pytest.approx(1 / math.sqrt(2))


def test_a_strong_player_on_side_a_is_no_bias():
    assert order_bias([group(game(0, 1, (9, 3), (3, 9)))]) == pytest.approx(0.0)
    assert order_bias([group(game(0, 1, (9, 3)), game(0, 2, (9, 4)))]) is None  # a star in one order cannot tell


def test_order_bias_of_one_order_is_what_goes_round_a_circle():
    circle = group(game(0, 1, (8, 5)), game(1, 2, (6, 5)), game(2, 0, (7, 5)))  # 3 + 1 + 2 = 3 times the bias
    assert order_bias([circle]) == pytest.approx(2 / math.sqrt(14 / 3))
    assert order_bias([circle, group(game(0, 1, (9, 3)))]) == pytest.approx(2 / math.sqrt(14 / 3))


def test_order_bias_needs_a_margin():
    assert order_bias([group(game(0, 1, (5, 5), (5, 5)))]) is None
    assert "group/order_bias" not in arena_metrics([group(game(0, 1, LOST))])


def test_a_flip_is_two_winners_for_two_orders():
    games = [
        game(0, 1, (7, 5), (7, 5)),
        game(0, 1, (7, 5), (5, 7)),
        game(0, 1, (7, 5), (6, 6)),
        game(0, 1, (7, 5), LOST),
    ]
    assert arena_metrics([group(*games)])["group/order_flip_share"] == 0.5
    assert "group/order_flip_share" not in arena_metrics([group(game(0, 1, (7, 5)))])


def test_repeated_games_agree_or_not():
    games = [game(0, 1, (7, 5)), game(1, 0, (5, 6)), game(0, 1, (3, 4)), game(0, 1, (5, 5)), game(0, 2, (1, 2))]
    assert arena_metrics([group(*games)])["group/repeat_agreement"] == pytest.approx(1 / 3)  # 0, 0, 1 won
    apart = [group(game(0, 1, (7, 5))), group(game(0, 1, (5, 7)))]  # other groups are other pairs
    assert "group/repeat_agreement" not in arena_metrics(apart)


def test_spread_against_error():
    found = arena_metrics([group(standings=table((1.0, -1.0, None), (0.5, 0.5, None)))])
    assert of(found, "group/score") == pytest.approx(
        {"group/score_spread": 1.0, "group/score_stderr": 0.5, "group/score_reliability": 0.8}
    )
    paper = arena_metrics([group(standings=table((1.0, -1.0, None), (0.5, 0.5, None), estimator="paper"))])
    assert paper["group/score_reliability"] == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("scores", "stderr", "shrunk", "expected"),
    [
        ((1.0, -1.0), (0.0, 0.0), True, 1.0),
        ((1.0, -1.0), (2.0, 2.0), False, 0.0),
        ((1.0, -1.0), (2.0, 2.0), True, 0.2),
        ((3.0, 3.0), (0.5, 0.5), True, 0.0),
        ((3.0, 3.0), (0.0, 0.0), False, None),
    ],
)
def test_reliability(scores: tuple, stderr: tuple, shrunk: bool, expected: float | None):
    assert reliability(scores, stderr, shrunk=shrunk) == (None if expected is None else pytest.approx(expected))


def test_no_spread_without_standard_errors():
    assert of(arena_metrics([group(standings=table((1.0, -1.0, 0.0), (None, 0.5, None)))]), "group/score") == {}


def test_gated_members_by_reason():
    one = group(standings=table((None,) * 3, (None,) * 3, gated=("", "truncated", "no_answer")))
    two = group(standings=table((None,) * 3, (None,) * 3, gated=("", "", "truncated")))
    assert of(arena_metrics([one, two]), "group/gated") == {
        "group/gated_share": 0.5,
        "group/gated/truncated": 2.0,
        "group/gated/no_answer": 1.0,
    }


def test_costs_and_times():
    paid = Verdict(score_a=1, score_b=0, calls=2, prompt_tokens=100, completion_tokens=10)
    bad = Abstention(reason="no_json", calls=1, prompt_tokens=60, completion_tokens=5)
    games = [
        Game(i=0, j=1, round=k, result=r, seconds=s) for k, r, s in ((0, paid, 1.0), (1, bad, 2.0), (2, paid, 3.0))
    ]
    marked = group(marks=((Mark(score=7.0, calls=1, prompt_tokens=50, completion_tokens=2), LOST),))
    found = arena_metrics([group(*games), marked])
    assert of(found, "cost/") == {
        "cost/judge_games": 3.0,
        "cost/judge_calls": 6.0,
        "cost/judge_prompt_tokens": 310.0,
        "cost/judge_completion_tokens": 27.0,
        "cost/judge_calls_per_group": 5.0,
        "cost/judge_tokens_per_group": 285.0,
    }
    assert of(found, "time/") == pytest.approx({"time/judge_game_mean": 2.0, "time/judge_game_p95": 2.9})
    assert found["group/games"] == found["group/rounds"] == 3.0
    assert found["group/abstained/timeout"] == 1.0


def test_nothing_is_reported_of_nothing():
    sums = ("games", "calls", "prompt_tokens", "completion_tokens")
    assert arena_metrics([]) == arena_metrics([group()]) == {f"cost/judge_{name}": 0.0 for name in sums}


MARK = st.integers(0, 3).map(float)
ANSWER = st.one_of(
    st.builds(Verdict, score_a=MARK, score_b=MARK),
    st.builds(Abstention, reason=st.sampled_from(["timeout: 1", "", "a b"])),
)
SIDES = st.permutations(range(4)).map(lambda order: tuple(order[:2]))


@st.composite
def any_game(draw: st.DrawFn) -> Game:
    (i, j), answers = draw(SIDES), tuple(draw(st.lists(ANSWER, min_size=1, max_size=2)))
    return Game(i=i, j=j, round=draw(st.integers(0, 3)), result=answers[0], halves=answers if len(answers) == 2 else ())


@settings(max_examples=60)
@given(st.lists(st.lists(any_game(), max_size=8), max_size=3))
def test_any_games_give_finite_numbers_of_known_families(groups: list[list[Game]]):
    found = arena_metrics([group(*games, size=4) for games in groups])
    assert all(math.isfinite(value) and metric_family(name) for name, value in found.items())
    assert all(0.0 <= value <= 1.0 for name, value in found.items() if name.endswith(("_share", "_agreement")))


@settings(max_examples=60)
@given(st.lists(any_game(), min_size=1, max_size=8), st.permutations(range(4)))
def test_names_of_the_members_do_not_matter(games: list[Game], name: list[int]):
    renamed = [Game(i=name[g.i], j=name[g.j], round=g.round, result=g.result, halves=g.halves) for g in games]
    assert arena_metrics([group(*renamed, size=4)]) == pytest.approx(arena_metrics([group(*games, size=4)]))
