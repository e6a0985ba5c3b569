"""Golden numbers by hand for what an evaluation reports."""

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arenarl.errors import ConfigError
from arenarl.evaluate import bootstrap_mean_difference, pass_at_k, pass_hat_k, win_rate


def test_win_rate_is_over_decided_games():
    result = win_rate([0.2, 0.1, -0.3, 0.0, None, math.nan, 1e-12])
    assert (result.wins, result.losses, result.ties, result.missing) == (2, 1, 2, 2)
    assert result.rate == pytest.approx(2 / 3)


def test_wilson_interval_of_seven_in_ten():
    # z = 1.96: centre (0.7 + 0.19207) / 1.38415, half width 1.96 sqrt(0.021 + 0.0096037) / 1.38415
    result = win_rate([1.0] * 7 + [-1.0] * 3)
    assert (result.low, result.high) == (pytest.approx(0.39678, abs=1e-4), pytest.approx(0.89221, abs=1e-4))


def test_wilson_interval_of_a_clean_sweep_ends_at_one():
    result = win_rate([1.0] * 10)
    assert result.rate == result.high == 1.0
    assert result.low == pytest.approx(10 / (10 + 1.96**2), abs=1e-4)


@pytest.mark.parametrize("margins", [[], [0.0, 0.0], [None]])
def test_no_decided_game_is_no_rate(margins):
    result = win_rate(margins)
    assert all(map(math.isnan, (result.rate, result.low, result.high)))


@given(st.lists(st.none() | st.sampled_from([-1.0, 0.0, 1.0]), max_size=40))
def test_win_rate_of_the_other_side_is_the_mirror_image(margins):
    ours, theirs = win_rate(margins), win_rate([None if m is None else -m for m in margins])
    assert (ours.wins, ours.losses, ours.ties, ours.missing) == (
        theirs.losses,
        theirs.wins,
        theirs.ties,
        theirs.missing,
    )
    assert ours.wins + ours.losses + ours.ties + ours.missing == len(margins)
    if ours.wins + ours.losses:
        assert [ours.low, ours.rate, ours.high] == pytest.approx([1 - theirs.high, 1 - theirs.rate, 1 - theirs.low])
        assert 0 <= ours.low <= ours.rate <= ours.high <= 1


def test_mean_difference_pairs_tasks_and_counts_gaps():
    result = bootstrap_mean_difference([0.5, 0.75, None, 1.0], [0.25, 0.5, 0.9, math.nan])
    assert (result.mean, result.low, result.high) == (0.25, 0.25, 0.25)
    assert (result.pairs, result.missing) == (2, 2)


def test_bootstrap_interval_agrees_with_the_normal_one_and_repeats():
    rng = np.random.default_rng(0)
    before = rng.normal(size=400)
    after = before + rng.normal(0.1, 0.5, size=400)
    result = bootstrap_mean_difference(after.tolist(), before.tolist(), seed=3)
    mean, se = float(np.mean(after - before)), float(np.std(after - before) / 20)
    assert [result.low, result.mean, result.high] == pytest.approx(
        [mean - 1.96 * se, mean, mean + 1.96 * se], abs=0.004
    )
    assert result == bootstrap_mean_difference(after.tolist(), before.tolist(), seed=3)
    assert result != bootstrap_mean_difference(after.tolist(), before.tolist(), seed=4)


def test_too_few_pairs_have_no_interval_and_unequal_lengths_are_refused():
    one, none = bootstrap_mean_difference([1.0], [0.5]), bootstrap_mean_difference([], [])
    assert one.mean == 0.5 and math.isnan(one.low) and math.isnan(one.high)
    assert math.isnan(none.mean)
    with pytest.raises(ConfigError, match="2 values against 1"):
        bootstrap_mean_difference([1.0, 2.0], [1.0])


def test_pass_at_k_and_pass_hat_k_of_two_in_five():
    assert pass_at_k(5, 2, 2) == pytest.approx(1 - 3 / 10)
    assert pass_hat_k(5, 2, 2) == pytest.approx(1 / 10)


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_pass_estimators_are_the_mean_over_all_choices_of_k(successes, data):
    n, k = len(successes), data.draw(st.integers(1, len(successes)))
    chosen = list(combinations(successes, k))
    assert pass_at_k(n, sum(successes), k) == pytest.approx(sum(map(any, chosen)) / len(chosen))
    assert pass_hat_k(n, sum(successes), k) == pytest.approx(sum(map(all, chosen)) / len(chosen))


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 2), (4, -1, 2)])
def test_impossible_counts_are_refused(n, c, k):
    for estimator in (pass_at_k, pass_hat_k):
        with pytest.raises(ConfigError, match=f"n={n}"):
            estimator(n, c, k)
