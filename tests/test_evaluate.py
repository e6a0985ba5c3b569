"""Golden numbers by hand for what an evaluation reports."""

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arenarl.errors import ConfigError
from arenarl.evaluate import (
    agreement,
    bootstrap_mean,
    bootstrap_mean_difference,
    mean_win_rate,
    pass_at_k,
    pass_hat_k,
    share,
    win_rate,
)


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
    assert result.mean == 0.25 and math.isnan(result.low) and math.isnan(result.high)
    assert (result.count, result.missing) == (2, 2)


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


def test_a_share_has_the_interval_of_its_independent_trials():
    assert (share(7, 10).low, share(7, 10).high) == (pytest.approx(0.39678, abs=1e-4), pytest.approx(0.89221, abs=1e-4))
    attempts = share(14, 20, independent=10)
    assert (attempts.rate, attempts.met, attempts.total) == (0.7, 14, 20)
    assert (attempts.low, attempts.high) == pytest.approx((share(7, 10).low, share(7, 10).high))
    assert math.isnan(share(0, 0).rate) and math.isnan(share(0, 0, independent=0).high)


def test_the_interval_of_few_values_is_as_wide_as_students():
    values = np.linspace(0, 1, 12)
    half = 2.201 * float(np.std(values, ddof=1)) / math.sqrt(12)  # t of 11 degrees of freedom
    for shares in (True, False):
        result = bootstrap_mean(values.tolist(), shares=shares)
        assert [result.low, result.high] == pytest.approx([0.5 - half, 0.5 + half], abs=0.01)


def test_where_a_bootstrap_knows_nothing_shares_have_wilsons_interval_and_others_none():
    certain = bootstrap_mean([1.0] * 10, shares=True)
    assert (certain.mean, certain.high) == (1.0, 1.0)
    assert certain.low == pytest.approx(10 / (10 + 1.96**2), abs=1e-4)
    few, wilson = bootstrap_mean([0.4, 0.6, None, 0.5, 0.5, 0.5], shares=True), share(2.5, 5)
    assert (few.low, few.high) == pytest.approx((wilson.low, wilson.high))
    for values in ([1.0] * 10, [0.4, 0.6, None, 0.5, 0.5, 0.5]):
        assert math.isnan(bootstrap_mean(values).low) and math.isnan(bootstrap_mean(values).high)


def test_the_mean_of_two_judges_has_the_interval_of_the_one_that_decided_less():
    eight, six = win_rate([1.0] * 8 + [-1.0] * 2), win_rate([1.0] * 6 + [-1.0] * 10)
    mean = mean_win_rate([eight, six, win_rate([0.0, None])])
    assert mean.mean == pytest.approx((0.8 + 0.375) / 2)
    assert (mean.count, mean.missing) == (10, 1)
    wilson = share(5.875, 10)
    assert (mean.low, mean.high) == pytest.approx((wilson.low, wilson.high))
    assert math.isnan(mean_win_rate([win_rate([])]).mean) and math.isnan(mean_win_rate([]).low)


def test_kappa_by_hand():
    # both judged 6 tasks: alike in 4; first judge 3 won 2 tied 1 lost, second 3 won 1 tied 2 lost
    first = [2.0, 1.0, 0.1, 0.0, 1e-12, -1.0, 1.0, None]
    second = [9.0, 1.0, -2.0, 0.0, 3.0, -0.5, math.nan, 1.0]
    result = agreement(first, second)
    assert (result.share.met, result.share.total) == (4, 6)
    chance = (3 * 3 + 2 * 1 + 1 * 2) / 36
    assert result.kappa == pytest.approx((4 / 6 - chance) / (1 - chance))


def test_kappa_needs_tasks_and_judges_that_could_differ():
    assert math.isnan(agreement([1.0, 2.0], [1.0, 3.0]).kappa) and agreement([1.0], [2.0]).share.rate == 1.0
    assert math.isnan(agreement([None], [1.0]).share.rate) and math.isnan(agreement([], []).kappa)
    with pytest.raises(ConfigError, match="1 values against 2"):
        agreement([1.0], [1.0, 2.0])


MARGINS = st.lists(st.tuples(*[st.none() | st.sampled_from([-1.0, 0.0, 0.5])] * 2), max_size=30)


@given(MARGINS)
def test_agreement_is_symmetric_and_blind_to_who_is_called_ours(pairs):
    a, b = [p[0] for p in pairs], [p[1] for p in pairs]
    mirrored = agreement([None if x is None else -x for x in b], [None if x is None else -x for x in a])
    assert mirrored.share == agreement(a, b).share
    assert mirrored.kappa == pytest.approx(agreement(a, b).kappa, nan_ok=True)
    if {-1.0, 0.5} <= {x for x, y in pairs if y is not None}:
        assert agreement([x for x, y in pairs if y is not None], [x for x, y in pairs if y is not None]).kappa == 1.0


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
