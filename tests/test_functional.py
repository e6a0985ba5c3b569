"""Golden numbers by hand for the pure maths."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arenarl.errors import ConfigError
from arenarl.functional import (
    clipped_surrogate,
    difficulty_posterior,
    difficulty_reward,
    generator_reward,
    group_advantages,
    kl_k1,
    kl_k2,
    kl_k3,
    leave_one_out,
    rank_rewards,
    reverse_kl_full,
    reverse_kl_sampled,
    reverse_kl_topk,
    reward_gap,
    sed_coefficient,
    sed_gate,
    solver_reward,
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


LOGITS = st.lists(st.floats(-4, 4), min_size=5, max_size=5).map(lambda x: torch.tensor(x, dtype=torch.float64))


def test_reverse_divergence_by_hand():
    student, teacher = log(0.5, 0.25, 0.25), log(0.25, 0.25, 0.5)
    # 1/2 log 2 + 0 - 1/4 log 2
    assert reverse_kl_full(student, teacher).item() == pytest.approx(math.log(2) / 4)
    assert reverse_kl_full(student + 3, teacher - 5).item() == pytest.approx(math.log(2) / 4)
    # the first token, and the other two as one: 1/2 log 2 + 1/2 log(1/2 / 3/4)
    assert reverse_kl_topk(student, teacher, 1).item() == pytest.approx(math.log(2) / 2 + math.log(2 / 3) / 2)


@given(LOGITS, LOGITS)
def test_lumping_tokens_together_never_adds_divergence(student, teacher):
    values = [reverse_kl_topk(student, teacher, k).item() for k in range(1, 6)]
    full = reverse_kl_full(student, teacher).item()
    assert values[3] == pytest.approx(full, abs=1e-9) and values[4] == pytest.approx(full, abs=1e-9)
    assert all(-1e-9 <= a <= b + 1e-9 for a, b in pairwise(values))


@given(LOGITS, LOGITS, st.sampled_from([1, 2, 5]))
def test_a_divergence_from_itself_is_exactly_zero(student, other, k):
    both = torch.stack([student, other])
    assert reverse_kl_full(both, both.clone()).tolist() == [0.0, 0.0]
    assert reverse_kl_topk(both, both.clone(), k).tolist() == [0.0, 0.0]


def test_the_sampled_divergence_is_capped_above_only_and_averages_to_the_full_one():
    student, teacher = log(0.5, 0.25, 0.25), log(0.25, 0.25, 0.5)
    sampled = reverse_kl_sampled(student, teacher)
    assert sampled.tolist() == pytest.approx([math.log(2), 0.0, -math.log(2)])
    assert (student.exp() * sampled).sum().item() == pytest.approx(reverse_kl_full(student, teacher).item())
    assert reverse_kl_sampled(log(1, 1e-9), log(1e-9, 1)).tolist() == pytest.approx([10.0, 9 * math.log(0.1)])


def test_solver_reward_by_hand():
    assert solver_reward(3, 4) == pytest.approx(0.6)
    assert solver_reward(4, 4) == 1.0
    assert solver_reward(0, 4) == 0.0
    assert solver_reward(3, 4, bonus=0.5) == pytest.approx(0.375)
    assert solver_reward(0.1 + 0.2, 0.3) == pytest.approx(1.0)  # weights that add up to all, but for float noise
    assert solver_reward(0, 0) is None


def test_any_threshold_above_the_partial_rewards_asks_for_all_items():
    """papers.md 2.1: the largest partial reward for 12 rubrics is 0.733; in general it stays below 0.8."""
    assert solver_reward(11, 12) == pytest.approx(0.7333, abs=1e-4)
    rewards = [(met == total, solver_reward(met, total)) for total in range(1, 200) for met in range(total + 1)]
    assert all((reward >= gamma) == full for gamma in (0.801, 0.9, 1.0) for full, reward in rewards)


@pytest.mark.parametrize(("met", "total"), [(5, 4), (-1, 4)])
def test_more_than_all_or_less_than_nothing_is_refused(met, total):
    with pytest.raises(ValueError, match=f"met={met} of total=4"):
        solver_reward(met, total)
    with pytest.raises(ValueError, match=f"successes={met} of runs=4"):
        difficulty_reward(met, total)
    with pytest.raises(ValueError, match=f"successes={met} of runs=4"):
        difficulty_posterior(met, total)


def test_difficulty_rewards_of_eight_and_of_odd_runs():
    assert [difficulty_reward(c, 8) for c in range(9)] == [0.0, 0.5, 1.0, 1.5, 2.0, 1.5, 1.0, 0.5, 0.0]
    assert difficulty_reward(1, 3) == pytest.approx(4 / 3)
    assert difficulty_reward(0, 0) is None


def test_the_noise_of_the_difficulty_reward_is_that_of_the_paper_notes():
    """papers.md 2.1, exactly, over the binomial distribution of eight runs."""

    def moments(p: float) -> tuple[float, float]:
        chance = [math.comb(8, c) * p**c * (1 - p) ** (8 - c) for c in range(9)]
        reward = [difficulty_reward(c, 8) for c in range(9)]
        mean = sum(w * r for w, r in zip(chance, reward, strict=True))
        return mean, math.sqrt(sum(w * (r - mean) ** 2 for w, r in zip(chance, reward, strict=True)))

    assert moments(0.5) == pytest.approx((1.45, 0.45), abs=0.006)
    assert [moments(p)[0] for p in (0.02, 0.1, 0.2, 0.3)] == pytest.approx([0.08, 0.40, 0.79, 1.13], abs=0.006)


def test_posterior_difficulty_by_hand():
    """Four of eight: 4 E[min(p, 1 - p)] under Beta(5, 5) is 4 P(Bin(10, 1/2) >= 6) = 4 * 386 / 1024."""
    assert difficulty_posterior(4, 8) == pytest.approx(4 * 386 / 1024, abs=1e-6)
    assert difficulty_posterior(0, 0) == pytest.approx(1.0, abs=1e-6)  # 4 * 1/4
    assert difficulty_posterior(0, 0, prior=(0.5, 0.5)) == pytest.approx(2 - 4 / math.pi, abs=1e-6)
    assert difficulty_posterior(1, 0 + 1) == pytest.approx(1.0, abs=1e-6)  # density 2p: 8 (1/24 + 1/12)
    with pytest.raises(ValueError, match="pseudo-counts must be at least 1/2"):
        difficulty_posterior(0, 0, prior=(0.1, 1.0))


@given(st.integers(0, 400), st.integers(0, 400))
def test_posterior_difficulty_is_symmetric_and_nears_the_raw_one_with_many_runs(successes, failures):
    value = difficulty_posterior(successes, successes + failures)
    assert value == pytest.approx(difficulty_posterior(failures, successes + failures))
    runs = 1000 * (successes + failures)
    if runs:
        assert difficulty_posterior(1000 * successes, runs) == pytest.approx(
            difficulty_reward(1000 * successes, runs), abs=0.06
        )
    assert 0 < value < 2


def test_generator_reward_by_hand():
    assert generator_reward(True, True, 2.0) == 3.0
    assert generator_reward(True, True, 0.0) == 1.0
    assert generator_reward(True, True, None) is None
    assert [generator_reward(tool, fmt, None) for tool, fmt in ((False, True), (True, False))] == [0.0, 0.0]
    assert generator_reward(False, True, 2.0) == 0.0


def test_reward_gap_by_hand():
    # variances 1/50 and 2/25 over two each: sqrt(0.01 + 0.04)
    assert reward_gap([0.1, None, 0.3], [0.5, 0.9]) == pytest.approx((0.5, math.sqrt(0.05)))
    assert reward_gap([0.1, 0.3], [0.5, None]) == (pytest.approx(0.3), None)
    assert reward_gap([None], [0.5, 0.7]) == (None, None)
    assert reward_gap([0.25] * 8, [0.75] * 8) == (0.5, 0.0)
    with pytest.raises(ValueError, match="finite"):
        reward_gap([math.nan], [1.0])


def test_gates_by_hand():
    assert [sed_gate(d, kind="threshold") for d in (0.04, 0.05, 0.06)] == [0.0, 0.0, 1.0]
    assert sed_gate(0.05, kind="sigmoid") == 0.5
    assert sed_gate(0.0625, kind="sigmoid") == pytest.approx(1 / (1 + math.exp(-1)))
    assert sed_gate(0.0625, kind="sigmoid", temperature=0.025) == pytest.approx(1 / (1 + math.exp(-0.5)))
    assert sed_gate(0.25, stderr=0.1, c=2.0) == 0.5  # tau + 2 * 0.1
    assert sed_gate(0.25, stderr=0.1, c=1.875) == pytest.approx(1 / (1 + math.exp(-1)))
    assert sed_gate(-50.0, kind="sigmoid") == 0.0 and sed_gate(50.0, stderr=0.1) == 1.0
    with pytest.raises(ValueError, match="kind='soft'"):
        sed_gate(0.1, kind="soft")


def test_a_gap_that_was_not_measured_keeps_the_gate_shut():
    assert [sed_gate(None, kind=kind) for kind in ("threshold", "sigmoid", "stderr")] == [0.0, 0.0, 0.0]
    assert sed_gate(1.0, stderr=None) == 0.0


def test_false_alarms_of_the_gates_with_a_memory_that_does_nothing():
    """Eight against eight, 4,000 groups: papers.md 2.3 for the threshold; at most 10 % open by the standard error."""
    rng = np.random.default_rng(0)
    for sd, expected in ((0.1, 0.16), (0.2, 0.31), (0.3, 0.37), (1.0, None)):
        opened, weight = {"threshold": 0.0, "sigmoid": 0.0, "stderr": 0.0}, 0.0
        for plain, conditioned in rng.normal(0.5, sd, (4000, 2, 8)).tolist():
            delta, stderr = reward_gap(plain, conditioned)
            for kind in opened:
                opened[kind] += (sed_gate(delta, stderr=stderr, kind=kind) >= 0.5) / 4000
            weight += sed_gate(delta, stderr=stderr) / 4000
        assert opened["sigmoid"] == opened["threshold"]  # half-way is at tau: it only smears
        assert expected is None or opened["threshold"] == pytest.approx(expected, abs=0.02)
        assert opened["stderr"] <= 0.10 and weight <= 0.10  # nor do gates that open a little add up to more


def test_a_note_that_helps_much_opens_the_gate_by_the_standard_error():
    delta, stderr = reward_gap([0.2, 0.3, 0.4] * 3, [0.6, 0.7, 0.8] * 3)
    assert sed_gate(delta, stderr=stderr) > 0.99
    assert sed_gate(-delta, stderr=stderr) < 0.01


def test_coefficient_warms_up_and_decays_to_its_floor():
    # w(10) = 1/2; d(60) = 0.55
    assert sed_coefficient(0) == 0.0
    assert sed_coefficient(10) == pytest.approx(0.5 * 0.5 * (0.1 + 0.9 * (1 + math.cos(math.pi / 12)) / 2))
    assert sed_coefficient(60) == pytest.approx(0.5 * 0.55)
    assert [sed_coefficient(step) for step in (120, 500)] == pytest.approx([0.05, 0.05])
    assert sed_coefficient(0, coefficient=2.0, warmup=0, floor=0.5) == 2.0
    assert sed_coefficient(0, warmup=0, decay=0) == pytest.approx(0.05)
