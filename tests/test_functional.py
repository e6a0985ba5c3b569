"""Golden numbers by hand for the pure maths."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arenarl.errors import ConfigError
from arenarl.functional import (
    clipped_surrogate,
    group_advantages,
    kl_k1,
    kl_k2,
    kl_k3,
    leave_one_out,
    rank_rewards,
    truncated_importance_weight,
)

REWARDS = st.lists(st.none() | st.floats(-10, 10).map(lambda r: round(r, 3)), min_size=1, max_size=12)


def log(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).log()


def test_surrogate_clips_low_and_high_at_their_own_bounds():
    ratios = (1.5, 1.5, 0.5, 0.5, 1.1)
    loss, stats = clipped_surrogate(
        log(*ratios), log(1, 1, 1, 1, 1), torch.tensor([1.0, -1.0, 1.0, -1.0, 2.0]).double()
    )
    # min(rho A, clip(rho, 0.8, 1.28) A), sign turned
    assert loss.tolist() == pytest.approx([-1.28, 1.5, -0.5, 0.8, -2.2])
    assert stats["ratio"].tolist() == pytest.approx(ratios)
    assert stats["clipped"].tolist() == [1, 0, 0, 1, 0]


def test_surrogate_gradient_is_advantage_at_ratio_one_and_zero_where_clipped():
    logprobs = log(0.5, 0.9).requires_grad_()
    loss, _ = clipped_surrogate(logprobs, log(0.5, 0.5), torch.tensor([3.0, 3.0]).double())
    loss.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([-3.0, 0.0])


def test_surrogate_of_no_tokens_is_empty_and_its_statistics_carry_no_gradient():
    empty = torch.zeros(0, requires_grad=True)
    loss, stats = clipped_surrogate(empty, torch.zeros(0), torch.zeros(0))
    assert loss.shape == (0,) and loss.sum().item() == 0.0
    assert not any(value.requires_grad for value in stats.values())


def test_importance_weight_is_one_on_policy_and_capped_above():
    old, behavior = log(0.2, 0.6, 0.9).requires_grad_(), log(0.2, 0.5, 0.1)
    weight = truncated_importance_weight(old, behavior, cap=2.0)
    assert weight.tolist() == pytest.approx([1.0, 1.2, 2.0])
    assert not weight.requires_grad


def test_kl_estimators_of_one_token():
    pi, ref = log(0.5), log(0.25)
    assert kl_k1(pi, ref).item() == pytest.approx(math.log(2))
    assert kl_k2(pi, ref).item() == pytest.approx(math.log(2) ** 2 / 2)
    assert kl_k3(pi, ref).item() == pytest.approx(0.5 - 1 + math.log(2))


def test_k1_and_k3_average_to_the_exact_divergence():
    pi, ref = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.4, 0.4, 0.2])
    exact = (pi * (pi / ref).log()).sum().item()
    for estimator in (kl_k1, kl_k3):
        assert (pi * estimator(pi.log(), ref.log())).sum().item() == pytest.approx(exact, abs=1e-6)


def test_rank_rewards_of_four():
    assert rank_rewards([0, 1, 2, 3], 4).tolist() == pytest.approx([1, 2 / 3, 1 / 3, 0])
    assert rank_rewards([1.5] * 4, 4).tolist() == [0.5] * 4
    assert math.isnan(rank_rewards([0, math.nan, 1], 2)[1])


def test_rank_rewards_of_one_player_are_refused():
    with pytest.raises(ConfigError, match="n=1"):
        rank_rewards([0], 1)


def test_group_advantages_of_four_ranks():
    # mean 1/2, population variance (1/4 + 1/36 + 1/36 + 1/4) / 4 = 5/36
    sd = math.sqrt(5 / 36)
    expected = [0.5 / sd, (1 / 6) / sd, (-1 / 6) / sd, -0.5 / sd]
    assert group_advantages([1, 2 / 3, 1 / 3, 0]) == pytest.approx(expected, rel=1e-5)
    assert expected[0] == pytest.approx(1.341641)


def test_group_advantages_leave_missing_members_out_of_the_statistics():
    assert group_advantages([2.0, None, 4.0]) == [pytest.approx(-1, rel=1e-5), None, pytest.approx(1, rel=1e-5)]


def test_equal_rewards_up_to_float_noise_give_exact_zeros():
    noisy = [0.1 + 0.2, 0.3, 0.15 + 0.15, 0.1 * 3, 0.3, 0.1 + 0.2, 0.6 / 2, 0.9 / 3]
    assert len(set(noisy)) > 1
    assert group_advantages(noisy) == [0.0] * 8
    assert leave_one_out(noisy) == [0.0] * 8


def test_fewer_than_two_rewards_give_zero_and_keep_the_gaps():
    assert group_advantages([None, 7.0, None]) == [None, 0.0, None]
    assert group_advantages([None, None]) == [None, None]
    assert leave_one_out([5.0]) == [0.0]


def test_leave_one_out_by_hand():
    assert leave_one_out([1.0, None, 2.0, 6.0]) == [pytest.approx(-3), None, pytest.approx(-1.5), pytest.approx(4.5)]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_refused(bad):
    with pytest.raises(ValueError, match="finite"):
        group_advantages([1.0, bad])


@given(REWARDS, st.floats(-100, 100), st.floats(0.5, 50))
def test_group_advantages_have_mean_zero_and_ignore_shift_and_scale(rewards, shift, scale):
    advantages = group_advantages(rewards)
    known = [a for a in advantages if a is not None]
    assert sum(known) == pytest.approx(0, abs=1e-9)
    assert [a is None for a in advantages] == [r is None for r in rewards]
    moved = group_advantages([None if r is None else shift + scale * r for r in rewards])
    assert [a for a in moved if a is not None] == pytest.approx(known, abs=0.02)


@given(REWARDS)
def test_leave_one_out_is_the_group_deviation_scaled(rewards):
    known = [r for r in rewards if r is not None]
    n = len(known)
    expected = [(r - sum(known) / n) * n / (n - 1) if n > 1 else 0.0 for r in known]
    assert [a for a in leave_one_out(rewards) if a is not None] == pytest.approx(expected, abs=1e-9)
