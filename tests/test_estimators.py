"""From games to scores: golden numbers by hand, and what holds for any games."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arenarl.estimators import (
    ESTIMATORS,
    bradley_terry,
    bradley_terry_posterior,
    by_depth,
    margin_ls,
    ranks,
    to_anchor,
    win_share,
)
from arenarl.types import Abstention, Game, Verdict

nan = math.nan


def once(i: int, j: int, m: float) -> Game:
    return Game(i=i, j=j, round=0, result=Verdict(score_a=m, score_b=0.0))


def twice(i: int, j: int, first: float, second: float) -> Game:
    """A pair asked in both orders: i's margin in the first and in the second."""
    halves = (Verdict(score_a=first, score_b=0.0), Verdict(score_a=0.0, score_b=second))
    return Game(i=i, j=j, round=0, result=Verdict(score_a=first + second, score_b=0.0), halves=halves)


def games(*results: tuple[int, int, float]) -> list[Game]:
    return [once(*result) for result in results]


def approx(values, **options):
    return pytest.approx(values, nan_ok=True, **options)


# ---- margins of games


def test_a_margin_is_the_difference_and_float_noise_is_a_tie():
    assert once(0, 1, 2.5).margin == 2.5
    assert Game(i=0, j=1, round=0, result=Verdict(score_a=0.1 + 0.2, score_b=0.3)).margin == 0.0
    assert Game(i=0, j=1, round=0, result=Abstention(reason="down")).margin is None


# ---- the paper's rankings


def test_win_share_counts_a_tie_as_half_and_breaks_equal_shares_by_the_opponents():
    # shares: 0 has 1/2, 1 has 1/2, 2 has 1, 3 has 0; 0 lost to the winner, 1 beat the last.
    scores, _ = win_share(4, games((2, 0, 1), (0, 1, 0), (0, 3, 0), (2, 1, 1), (1, 3, 1)))
    assert scores == approx([1 / 3, 1 / 2, 1, 1 / 4], abs=1e-4)
    swiss, _ = win_share(4, games((0, 1, 1), (2, 3, 1), (0, 2, 1), (1, 3, 0)))
    assert ranks(swiss).tolist() == [0, 2, 1, 3]  # 1 and 3 share 1/4, but 1 lost to the winner


def test_the_error_of_a_win_share_is_that_of_a_proportion_seen_with_a_uniform_prior():
    _, stderr = win_share(4, games((0, 1, 1), (0, 2, 1), (1, 2, 0)))
    # Beta(3, 1), Beta(1.5, 2.5) twice: variance a b / ((a + b)^2 (a + b + 1))
    assert stderr.tolist() == approx([math.sqrt(3 / 80), math.sqrt(3.75 / 80), math.sqrt(3.75 / 80), nan])


def test_to_anchor_is_the_difference_to_player_zero():
    assert to_anchor(3, games((1, 2, 9), (1, 0, 2), (0, 2, 3))).scores.tolist() == [0, 2, -3]
    scores, stderr = to_anchor(4, games((0, 1, 3), (0, 2, -1)))
    assert scores.tolist() == approx([0, -3, 1, nan])
    assert stderr.tolist() == approx([0, nan, nan, nan])
    assert to_anchor(2, []).scores.tolist() == approx([nan, nan])


def test_the_two_answers_to_a_pair_tell_the_error_of_the_difference_to_the_anchor():
    scores, stderr = to_anchor(3, [twice(0, 1, 2, 1), twice(2, 0, 3, -2)])
    assert scores.tolist() == [0, -3, 1]
    # the answers differ by 1 and 5, a standard deviation of sqrt(8): a liking for side a would have moved both alike
    assert stderr.tolist() == approx([0, math.sqrt(8), math.sqrt(8)])


def test_depth_is_the_level_and_within_a_level_the_mean_margin():
    scores, stderr = by_depth([2, 1, 0, 0])(4, games((0, 1, 4), (2, 3, 1), (0, 2, 2)))
    assert scores.tolist() == [2 + 3 / 16, 1 - 4 / 16, -0.5 / 16, -1 / 16]
    assert np.isnan(stderr).all()
    assert by_depth([1, 0, 0])(3, games((0, 1, 4))).scores.tolist() == approx([1.25, -0.25, nan])


# ---- least squares on margins


def test_margins_on_a_path_by_hand():
    scores, stderr = margin_ls(3, games((0, 1, 2), (1, 2, 1)))
    assert scores.tolist() == approx([5 / 3, -1 / 3, -4 / 3])
    assert np.isnan(stderr).all()  # no game to spare, so noise cannot be told


def test_margins_of_games_that_contradict_each_other_are_shrunk():
    # the mean is 1/3; one spread of 6 and a ridge of 100, the largest that is tried, leave 6/106 of it
    scores, stderr = margin_ls(2, [twice(0, 1, 1, 0), twice(0, 1, -1, 0), twice(0, 1, 1, 0)])
    assert scores.tolist() == approx([1 / 106, -1 / 106])
    # 1/3 of the sum of squares is explained, 8/3 is left: the most probable noise, then its posterior share
    noise = 100 * (1 / 3 / 106 + 8 / 3 / 100) / 3
    assert stderr.tolist() == approx([math.sqrt(noise / 106 / 2)] * 2)
    assert margin_ls(3, games((0, 1, 1), (1, 2, 1), (2, 0, 1))).scores.tolist() == [0, 0, 0]


def test_margins_keep_components_apart_and_each_at_the_mean():
    scores, stderr = margin_ls(5, games((0, 1, 2), (2, 3, 4)))
    assert scores.tolist() == approx([1, -1, 2, -2, nan])
    assert math.isnan(stderr[4])


def test_games_that_fit_together_have_no_error():
    q = [3.0, 1.0, 0.5, -4.5]
    scores, stderr = margin_ls(4, games(*((i, j, q[i] - q[j]) for i in range(4) for j in range(i))))
    assert scores.tolist() == approx(q)
    assert stderr.tolist() == [0.0] * 4


def test_a_liking_for_the_first_side_is_taken_out_of_pairs_that_were_asked_once():
    biased = games((0, 1, 2 + 10), (1, 2, 1 + 10), (2, 0, -3 + 10))
    assert margin_ls(3, biased).scores.tolist() == approx([5 / 3, -1 / 3, -4 / 3])
    asked_twice = [twice(0, 1, 2, 10), twice(1, 2, 1, 10), twice(2, 0, -3, 10)]
    assert margin_ls(3, asked_twice).scores[0] == approx(
        0.0, abs=0.5
    )  # 12, 11 and 7 round a circle contradict each other


def test_a_liking_for_the_first_side_that_could_be_a_strong_player_is_left_alone():
    star = games((0, 1, 2), (0, 2, 3))
    assert margin_ls(3, star).scores.tolist() == approx([5 / 3, -1 / 3, -4 / 3])


@pytest.mark.parametrize("liking", [0.3, 1e-3, 1e6])
def test_a_judge_that_only_likes_a_side_gives_exactly_nothing(liking):
    unbalanced = games((0, 1, liking), (0, 2, liking), (1, 2, liking), (3, 0, liking), (3, 1, liking), (2, 3, liking))
    scores, stderr = margin_ls(4, unbalanced)
    assert scores.tolist() == stderr.tolist() == [0.0] * 4


# ---- Bradley-Terry


def test_bradley_terry_of_one_game_solves_its_equation():
    (x, y), stderr = bradley_terry(2, games((0, 1, 0.01)))
    assert y == -x
    win = 1 / (1 + math.exp(-2 * x))
    assert 1 - win == approx(x / 1.5**2)  # derivative of log-likelihood and prior
    assert x == approx(0.5565, abs=1e-3)
    # along (1, -1) / sqrt 2 the curvature is 2 p (1 - p) + 1.5^-2, and each player has half the variance
    assert stderr.tolist() == approx([math.sqrt(0.5 / (2 * win * (1 - win) + 1.5**-2))] * 2)


def test_bradley_terry_takes_wins_for_less_where_the_side_explains_them():
    # side a wins always, and player 0 is always there
    results = [(0, 1), (0, 2), (0, 3), (1, 2), (2, 3), (3, 1)]
    by_strength = bradley_terry(4, [twice(i, j, 1, 1) for i, j in results]).scores
    by_side = bradley_terry(4, [once(i, j, 1) for i, j in results]).scores
    assert by_strength[0] > 1
    assert 0.2 < by_side[0] < by_strength[0] / 2
    assert by_side[1:].tolist() == approx([by_side[1]] * 3)


@pytest.mark.parametrize("k", [1, 4])
def test_more_games_make_bradley_terry_surer(k):
    _, stderr = bradley_terry(3, games((0, 1, 0), (1, 2, 0), (2, 0, 0)) * k)
    # a triangle of even games: curvature 3 k / 4 across the players, each of whom is 1/3 of the mean
    assert stderr.tolist() == approx([math.sqrt(2 / 3 / (0.75 * k + 1.5**-2))] * 3)


def test_without_games_the_posterior_is_the_prior():
    mode, covariance = bradley_terry_posterior(3, [])
    assert mode.tolist() == [0, 0, 0]
    assert covariance == approx(2.25 * np.eye(3))


# ---- any games


results = st.tuples(st.integers(0, 7), st.integers(0, 7), st.integers(-3, 3), st.integers(-3, 3), st.booleans())
FITS = {
    "win_share": win_share,
    "to_anchor": to_anchor,
    "margin_ls": margin_ls,
    "bradley_terry": bradley_terry,
}


def some_games(drawn) -> list[Game]:
    return [twice(i, j, float(a), float(b)) if both else once(i, j, float(a)) for i, j, a, b, both in drawn if i != j]


@pytest.mark.parametrize("fit", FITS)
@given(drawn=st.lists(results, max_size=20), data=st.data())
@settings(max_examples=30)
def test_relabelling_the_players_relabels_scores_and_errors(fit, drawn, data):
    played = some_games(drawn)
    to = [0, *data.draw(st.permutations(range(1, 8)))] if fit == "to_anchor" else data.draw(st.permutations(range(8)))
    renamed = [Game(i=to[g.i], j=to[g.j], round=0, result=g.result, halves=g.halves) for g in played]
    first, second = FITS[fit](8, played), FITS[fit](8, renamed)
    assert second.scores[to].tolist() == approx(first.scores.tolist(), abs=1e-6)
    assert second.stderr[to].tolist() == approx(first.stderr.tolist(), abs=1e-6)


@pytest.mark.parametrize("fit", FITS)
@given(drawn=st.lists(results, max_size=20))
@settings(max_examples=30)
def test_it_does_not_matter_which_player_of_a_pair_asked_twice_is_named_first(fit, drawn):
    played = some_games([(i, j, a, b, True) for i, j, a, b, _ in drawn])
    turned = [twice(g.j, g.i, -margin_of(g.halves[1], True), -margin_of(g.halves[0])) for g in played]
    first, second = FITS[fit](8, played), FITS[fit](8, turned)
    assert second.scores.tolist() == approx(first.scores.tolist(), abs=1e-6)
    assert second.stderr.tolist() == approx(first.stderr.tolist(), abs=1e-6)


def margin_of(half, other_side: bool = False) -> float:
    return (half.score_b - half.score_a) if other_side else (half.score_a - half.score_b)


@pytest.mark.parametrize("fit", FITS)
@given(drawn=st.lists(results, max_size=20))
@settings(max_examples=30)
def test_a_score_is_missing_exactly_for_players_without_a_game(fit, drawn):
    played = some_games(drawn)
    if fit == "to_anchor":
        played = [g for g in played if 0 in (g.i, g.j)]
    known = {k for g in played for k in (g.i, g.j)}
    scores, stderr = FITS[fit](8, played)
    assert {k for k in range(8) if not math.isnan(scores[k])} == known
    assert all(math.isnan(stderr[k]) or stderr[k] >= 0 for k in range(8))
    assert np.isnan(stderr[[k for k in range(8) if k not in known]]).all()


@pytest.mark.parametrize("fit", ["margin_ls", "bradley_terry"])
@given(drawn=st.lists(results, min_size=1, max_size=20))
@settings(max_examples=30)
def test_scores_have_mean_zero(fit, drawn):
    scores, _ = FITS[fit](8, some_games(drawn))
    assert np.nansum(scores) == approx(0.0, abs=1e-6)


@pytest.mark.parametrize(("fit", "theta"), [("margin_ls", 1.0), ("bradley_terry", 1.5)])
def test_standard_errors_are_the_size_of_the_errors(fit, theta):
    errors = []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        q = rng.normal(size=12)
        pairs = [(i, (i + d) % 12) for d in (1, 2, 4, 5) for i in range(12)]
        played = [once(i, j, q[i] - q[j] + (0.5 + rng.logistic()) / 1.5) for i, j in pairs]
        scores, stderr = FITS[fit](12, played)
        errors += ((scores - theta * (q - q.mean())) / stderr).tolist()
    assert 0.85 < math.sqrt(np.mean(np.square(errors))) < 1.25


# ---- names and places


def test_estimators_say_what_their_scores_are_good_for():
    assert {name: e.rewards for name, e in ESTIMATORS.items()} == {
        "paper": "rank",
        "margin_ls": "score",
        "bradley_terry": "score",
    }
    assert ESTIMATORS["paper"].fit is None  # the plan brings it


def test_ranks_share_places_within_float_noise():
    assert ranks(np.array([0.3, 1.0, 0.1 + 0.2, nan, 0.0])).tolist() == approx([1.5, 0, 1.5, nan, 3])
    assert ranks(np.array([1e9 + 1e-3, 1e9])).tolist() == [0.5, 0.5]
