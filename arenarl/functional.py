"""Pure maths of the objectives, the group baselines and the rewards: no state, no configuration, no masks.

Token functions take 1-D tensors [T] that the caller has already selected. Selecting instead of multiplying by a
mask keeps an infinite log-prob of a context token out of the sum (0 * inf is nan). Group functions take one reward
for each member [G]; None is a member without a reward and comes back as None.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from arenarl.errors import ConfigError
from arenarl.types import FLOAT_NOISE

if TYPE_CHECKING:
    from torch import Tensor

QUADRATURE_POINTS = 4096
"""Of an integral over a pass rate: errors stay below 1e-6."""


def clipped_surrogate(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of the clipped policy ratio, -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), per token.

    Sources: Schulman et al. 2017 (PPO), eq. 7; Yu et al. 2025 (DAPO), section 3.1, for the two separate ranges.

    Args:
        logprobs: [T] log-probs under the weights being trained; the gradient flows through these only.
        behavior_logprobs: [T] log-probs that the ratio is taken against: the engine's own, or, in the decoupled
            form (see ``truncated_importance_weight``), those recomputed under the proximal weights.
        advantages: [T] advantage of the episode that each token belongs to.

    Returns:
        loss [T], to be minimised, and detached statistics, each [T] so that the caller's weights apply to them too:
        ``ratio`` is rho; ``clipped`` is 1.0 where the clip is active and the token has no gradient, else 0.0.
    """
    ratio = (logprobs - behavior_logprobs).exp()
    free = ratio * advantages
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    stats = {"ratio": ratio.detach(), "clipped": (bounded < free).to(ratio.dtype)}
    return -free.minimum(bounded), stats


def truncated_importance_weight(logprobs_old: Tensor, behavior_logprobs: Tensor, *, cap: float = 2.0) -> Tensor:
    """Weight min(pi_old / pi_behavior, cap) that corrects the decoupled loss for the engine's own distribution.

    In the decoupled form the surrogate's ratio is taken against ``logprobs_old``, recomputed by the learner at the
    start of the step, and its loss is multiplied by this weight. It equals 1 where the learner's recomputation
    equals the engine's record: same weights (lag 0) and same arithmetic. Where the surrogate's ratio is already
    against the engine's log-probs the correction is inside the ratio, and this weight must not be used on top.

    Sources: Ionides 2008 (truncated importance sampling); Hilton et al. 2022 (decoupled objective).

    Args:
        logprobs_old: [T] under the proximal weights.
        behavior_logprobs: [T] as the engine reported them.

    Returns:
        [T] in (0, cap], without gradient.
    """
    return (logprobs_old - behavior_logprobs).detach().exp().clamp(max=cap)


def kl_k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """KL(pi || ref) from tokens sampled from pi, as log pi - log ref: unbiased, can be negative, high variance.

    Source: Schulman 2020, "Approximating KL divergence", for k1, k2 and k3. Shapes: [T] and [T] to [T].
    """
    return logprobs - ref_logprobs


def kl_k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """KL(pi || ref) as (log pi - log ref)^2 / 2: biased, never negative, with an unbiased gradient. [T] to [T]."""
    return (logprobs - ref_logprobs).square() / 2


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """KL(pi || ref) as r - 1 - log r with r = ref / pi: unbiased, never negative, low variance. [T] to [T]."""
    log_ratio = ref_logprobs - logprobs
    return log_ratio.exp() - 1 - log_ratio


def reverse_kl_full(student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """KL(student || teacher) of two distributions over the vocabulary, in nats: [..., V] and [..., V] to [...].

    The gradient flows through both; a teacher that stands still is passed without one. Logits need no normalisation.

    Sources: ARISE (arXiv 2609.01058), RG-SED; OPCD (arXiv 2602.12275), for the direction of the divergence.
    """
    student, teacher = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
    return (student.exp() * (student - teacher)).sum(-1)


def reverse_kl_topk(student_logits: Tensor, teacher_logits: Tensor, k: int) -> Tensor:
    """The same over k + 1 outcomes: the student's k likeliest tokens, and one bucket for all others.

    Never above `reverse_kl_full`, since lumping outcomes together loses information, and equal to it if k >= V - 1.

    Source: OPCD (arXiv 2602.12275), for the likeliest tokens; the bucket makes both sides distributions again.
    """
    likeliest = student_logits.topk(min(k, student_logits.shape[-1] - 1), dim=-1).indices

    def lumped(logits: Tensor) -> tuple[Tensor, Tensor]:
        logits = logits.log_softmax(-1)
        return logits.gather(-1, likeliest), logits.scatter(-1, likeliest, -math.inf).logsumexp(-1)

    (student, student_rest), (teacher, teacher_rest) = lumped(student_logits), lumped(teacher_logits)
    named = (student.exp() * (student - teacher)).sum(-1)
    return named + student_rest.exp() * (student_rest - teacher_rest)


def reverse_kl_sampled(logp_student: Tensor, logp_teacher: Tensor, *, cap: float = 10.0) -> Tensor:
    """KL(student || teacher) from the student's own tokens, as min(log pi_s - log pi_t, cap): [T] and [T] to [T].

    Used as the cost of having sampled the token, without a gradient of its own: the mean of cost * grad log pi_s over
    the student's tokens is the gradient of `reverse_kl_full`, apart from the cap.

    Source: the code of ARISE (arXiv 2609.01058), which caps from above only, at 10.
    """
    return kl_k1(logp_student, logp_teacher).clamp(max=cap)


def rank_rewards(ranks: ArrayLike, n: int) -> NDArray[np.float64]:
    """Rank to reward: r = 1 - rank / (n - 1), so the best of n has 1 and the last has 0.

    Source: ArenaRL (arXiv 2601.06487), rank to advantage.

    Args:
        ranks: 0 is best; tied players share the mean of their places; nan (no rank) stays nan.
        n: number of ranked players.

    Raises:
        ConfigError: n < 2, since one player has no rank.
    """
    if n < 2:
        raise ConfigError(f"cannot turn ranks of n={n} players into rewards: give at least 2")
    return 1.0 - np.asarray(ranks, dtype=np.float64) / (n - 1)


def group_advantages(rewards: Sequence[float | None], *, eps: float = 1e-6) -> list[float | None]:
    """Group-normalised advantage (r - mean) / (sd + eps), with the population sd over the members with a reward.

    Rewards that differ by float noise only, and a reward without a second one to compare with, carry no signal:
    the advantage is then exactly 0.0, never noise divided by noise.

    Sources: Shao et al. 2024 (GRPO), section 4.1.2; ArenaRL (arXiv 2601.06487), rank to advantage.

    Raises:
        ValueError: a reward is nan or infinite (a missing one is None).
    """
    known = _known(rewards)
    if _no_signal(known):
        return [None if r is None else 0.0 for r in rewards]
    mean = math.fsum(known) / len(known)
    sd = math.sqrt(math.fsum((r - mean) ** 2 for r in known) / len(known))
    return [None if r is None else (r - mean) / (sd + eps) for r in rewards]


def leave_one_out(rewards: Sequence[float | None]) -> list[float | None]:
    """Advantage against the mean reward of the other members, r - mean of the others; same rules as above.

    Source: Ahmadian et al. 2024 (RLOO).

    Raises:
        ValueError: a reward is nan or infinite (a missing one is None).
    """
    known = _known(rewards)
    if _no_signal(known):
        return [None if r is None else 0.0 for r in rewards]
    total, others = math.fsum(known), len(known) - 1
    return [None if r is None else r - (total - r) / others for r in rewards]


def _known(rewards: Sequence[float | None]) -> list[float]:
    known = [float(r) for r in rewards if r is not None]
    if not all(map(math.isfinite, known)):
        raise ValueError(f"rewards must be finite, or None where missing, got {list(rewards)}")
    return known


def _no_signal(known: list[float]) -> bool:
    return len(known) < 2 or max(known) - min(known) <= FLOAT_NOISE * max(map(abs, known))


def solver_reward(met: float, total: float, *, bonus: float = 0.2) -> float | None:
    """Reward of an attempt: r = (1 - bonus) s + bonus [s = 1] with s = met / total; None if nothing was decided.

    Source: ARISE (arXiv 2609.01058), Solver. Because of the bonus no partial success comes near 1: with 12 items the
    largest is 0.733, so that every threshold in (1 - bonus, 1] asks for all of them.

    Args:
        met, total: items that are met and items that were decided, counted or weighted; total 0 means none.
        bonus: share of the reward that is kept for meeting all, in [0, 1].

    Raises:
        ValueError: ``met`` is not in [0, total].
    """
    if not 0 <= met <= total * (1 + FLOAT_NOISE):
        raise ValueError(f"met={met} of total={total} items: must be in [0, total]")
    if not total:
        return None
    share = min(1.0, met / total)
    return (1 - bonus) * share + bonus * (share >= 1 - FLOAT_NOISE)


def difficulty_reward(successes: int, runs: int) -> float | None:
    """R_diff = 2 max(0, 1 - |c - K/2| / (K/2)) of a task that c of K solver runs met: 2 at one half, 0 at none or all.

    Source: ARISE (arXiv 2609.01058), Generator. None without a run. One draw of K = 8 is noisy: at a pass rate of 1/2
    it is 1.45 on average, with a standard deviation of 0.45.

    Raises:
        ValueError: ``successes`` is not in [0, runs].
    """
    _check_runs(successes, runs)
    return 2 * max(0.0, 1 - abs(successes - runs / 2) / (runs / 2)) if runs else None


def difficulty_posterior(successes: int, runs: int, *, prior: tuple[float, float] = (1.0, 1.0)) -> float:
    """Expectation of the same triangle, E[2 max(0, 1 - |p - 1/2| / (1/2))] = 4 E[min(p, 1 - p)], over the pass rate p.

    The belief about p is Beta(prior[0] + successes, prior[1] + runs - successes), so that all runs that a task ever had
    add up. An expectation and not the triangle at the mean of p: a task that nobody has tried has the mean 1/2, but its
    difficulty is not known to be right, and under the uniform prior it is worth 1, not 2.

    Args:
        prior: pseudo-counts of successes and failures, at least 1/2 each (1/2, 1/2 is Jeffreys' prior).

    Raises:
        ValueError: ``successes`` is not in [0, runs], or a pseudo-count is below 1/2.
    """
    _check_runs(successes, runs)
    if min(prior) < 0.5:
        raise ValueError(f"prior={prior}: pseudo-counts must be at least 1/2")
    # With p = sin(angle)^2 the density is sin^(2a - 1) cos^(2b - 1), bounded for these priors: the midpoint rule will do.
    angle = (np.arange(QUADRATURE_POINTS) + 0.5) * (math.pi / 2 / QUADRATURE_POINTS)
    sine, cosine = np.sin(angle), np.cos(angle)
    log_density = (2 * (prior[0] + successes) - 1) * np.log(sine) + (2 * (prior[1] + runs - successes) - 1) * np.log(
        cosine
    )
    density = np.exp(log_density - log_density.max())
    return float(4 * (density * np.minimum(sine**2, cosine**2)).sum() / density.sum())


def generator_reward(tool: bool, fmt: bool, difficulty: float | None) -> float | None:
    """R_G = R_tool R_fmt (1 + R_diff), in [0, 3]. Source: ARISE (arXiv 2609.01058), Generator.

    Args:
        tool: the task rests on real observations.
        fmt: what was written is a task.
        difficulty: R_diff, or None if the solver runs are missing: then a valid task has no reward, and an invalid one
            earns 0.0 all the same.
    """
    if not (tool and fmt):
        return 0.0
    return None if difficulty is None else 1 + difficulty


def reward_gap(plain: Sequence[float | None], conditioned: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Mean reward of the conditioned attempts minus that of the plain ones, and its standard error after Welch.

    Source: ARISE (arXiv 2609.01058), RG-SED, for the gap. None is a missing reward and left out. The gap is None if
    either side has no reward; the standard error, sqrt(s_p^2 / n_p + s_c^2 / n_c), if either has fewer than two.

    Raises:
        ValueError: a reward is nan or infinite.
    """
    sides = [_known(plain), _known(conditioned)]
    if not all(sides):
        return None, None
    means = [math.fsum(side) / len(side) for side in sides]
    gap = means[1] - means[0]
    if min(map(len, sides)) < 2:
        return gap, None
    squares = (
        math.fsum((r - mean) ** 2 for r in side) / (len(side) - 1) / len(side)
        for side, mean in zip(sides, means, strict=True)
    )
    return gap, math.sqrt(math.fsum(squares))


def sed_gate(
    delta: float | None,
    *,
    tau: float = 0.05,
    temperature: float = 0.0125,
    stderr: float | None = None,
    c: float = 1.35,
    kind: Literal["threshold", "sigmoid", "stderr"] = "stderr",
) -> float:
    """How far a group is distilled, in [0, 1], by the gain ``delta`` that the note brought. A gap not measured: 0.

    * ``threshold``: [delta > tau], the text of ARISE (arXiv 2609.01058), RG-SED.
    * ``sigmoid``: sigmoid((delta - tau) / temperature), its appendix and code.
    * ``stderr``: sigmoid((delta - tau - c * stderr) / temperature), ours: the gap must exceed tau by c standard errors.
      0 without a standard error.

    The first two take noise for gain: with a note that does nothing, 8 against 8 attempts, and rewards of standard
    deviation 0.1, 0.2 and 0.3 they open in 16, 31 and 37 % of the groups. ``c`` = 1.35 is the 90 % point of Student's
    t with 14 degrees of freedom, so that the third opens in at most 10 %, however noisy the rewards. Dividing by the
    standard error instead would not help: the sigmoid gets flatter, but still opens half-way at tau.
    """
    if delta is None:
        return 0.0
    if kind == "threshold":
        return float(delta > tau)
    if kind == "sigmoid":
        return _sigmoid((delta - tau) / temperature)
    if kind == "stderr":
        return 0.0 if stderr is None else _sigmoid((delta - tau - c * stderr) / temperature)
    raise ValueError(f"kind={kind!r}: must be 'threshold', 'sigmoid' or 'stderr'")


def sed_coefficient(
    step: int, *, coefficient: float = 0.5, warmup: int = 20, decay: int = 120, floor: float = 0.1
) -> float:
    """lambda_0 w(t) d(t) at learner step t, counted from 0: what a fully open gate multiplies.

    w rises from 0 to 1 along a half cosine over ``warmup`` steps; d falls from 1 to ``floor`` along one over ``decay``
    steps; both start at step 0, and a length of 0 means at once. Source: ARISE (arXiv 2609.01058), RG-SED.
    """

    def fall(length: int) -> float:
        return (1 + math.cos(math.pi * min(1.0, step / length))) / 2 if length else 0.0

    return coefficient * (1 - fall(warmup)) * (floor + (1 - floor) * fall(decay))


def _sigmoid(x: float) -> float:
    return (1 + math.tanh(x / 2)) / 2


def _check_runs(successes: int, runs: int) -> None:
    if not 0 <= successes <= runs:
        raise ValueError(f"successes={successes} of runs={runs}: must be in [0, runs]")
