"""Pure maths of the objectives and the group baselines: no state, no configuration, no masks.

Token functions take 1-D tensors [T] that the caller has already selected. Selecting instead of multiplying by a
mask keeps an infinite log-prob of a context token out of the sum (0 * inf is nan). Group functions take one reward
for each member [G]; None is a member without a reward and comes back as None.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from arenarl.errors import ConfigError
from arenarl.types import FLOAT_NOISE

if TYPE_CHECKING:
    from torch import Tensor


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
