"""What an evaluation reports, with its uncertainty: win rate, mean difference, pass@k and pass^k.

Pure functions of numbers. A missing value (None or nan) is counted and left out, never replaced.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from arenarl.errors import ConfigError
from arenarl.functional import FLOAT_NOISE

Z_95 = 1.959963984540054
"""The two-sided 95 % point of the standard normal distribution."""


@dataclass(frozen=True, kw_only=True)
class WinRate:
    """Games of one side against the other.

    Attributes:
        rate: wins / (wins + losses); ties are left out, as in ArenaRL's evaluation. nan if no game was decided.
        low, high: Wilson 95 % interval of ``rate``; nan if no game was decided.
        missing: games without a verdict.
    """

    wins: int
    losses: int
    ties: int
    missing: int
    rate: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class MeanDifference:
    """Mean of paired differences with its 95 % interval, in the unit of the data.

    Attributes:
        pairs: pairs with both values.
        missing: pairs left out because a value is missing.
    """

    mean: float
    low: float
    high: float
    pairs: int
    missing: int


def win_rate(margins: Sequence[float | None]) -> WinRate:
    """Win rate over decided games from margins (ours minus theirs); None or nan is a game without a verdict.

    The interval takes games as independent: give one game a task, or the mean margin of the games of a task.
    Source of the interval: Wilson 1927; it keeps its level for few games and for rates near 0 and 1.
    """
    values = _floats(margins)
    known = values[~np.isnan(values)]
    wins, losses = int((known > FLOAT_NOISE).sum()), int((known < -FLOAT_NOISE).sum())
    rate, low, high = _wilson(wins, wins + losses)
    return WinRate(
        wins=wins,
        losses=losses,
        ties=len(known) - wins - losses,
        missing=len(values) - len(known),
        rate=rate,
        low=low,
        high=high,
    )


def _wilson(successes: int, trials: int) -> tuple[float, float, float]:
    if trials == 0:
        return math.nan, math.nan, math.nan
    rate, z2 = successes / trials, Z_95**2
    centre = (rate + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z_95 * math.sqrt(rate * (1 - rate) / trials + z2 / (4 * trials**2)) / (1 + z2 / trials)
    return rate, max(0.0, min(rate, centre - half)), min(1.0, max(rate, centre + half))


def bootstrap_mean_difference(
    after: Sequence[float | None], before: Sequence[float | None], *, samples: int = 10_000, seed: int = 0
) -> MeanDifference:
    """Mean of after - before over tasks, with the percentile bootstrap over tasks; the same seed repeats the interval.

    Args:
        after, before: one value for each task, in the same order (average repeated attempts at a task first).

    Returns:
        Interval nan with fewer than 2 complete pairs, mean nan with none.

    Raises:
        ConfigError: the two have different lengths.

    Source: Efron and Tibshirani 1993, section 13.3.
    """
    if len(after) != len(before):
        raise ConfigError(
            f"{len(after)} values against {len(before)}: give one of each for every task, None if missing"
        )
    differences = _floats(after) - _floats(before)
    known = differences[~np.isnan(differences)]
    low = high = math.nan
    if len(known) >= 2:
        draws = np.random.default_rng(seed).integers(len(known), size=(samples, len(known)))
        low, high = np.quantile(known[draws].mean(axis=1), [0.025, 0.975]).tolist()
    return MeanDifference(
        mean=float(known.mean()) if len(known) else math.nan,
        low=low,
        high=high,
        pairs=len(known),
        missing=len(differences) - len(known),
    )


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that at least one of k attempts at a task succeeds, unbiased from c successes in n attempts.

    1 - C(n - c, k) / C(n, k). Source: Chen et al. 2021 (Codex), eq. 1.

    Raises:
        ConfigError: k is not in 1..n, or c not in 0..n.
    """
    _check_counts(n, c, k)
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def pass_hat_k(n: int, c: int, k: int) -> float:
    """Chance that all of k attempts at a task succeed (pass^k), unbiased from c successes in n attempts.

    C(c, k) / C(n, k). Source: Yao et al. 2024 (tau-bench), section on pass^k.

    Raises:
        ConfigError: k is not in 1..n, or c not in 0..n.
    """
    _check_counts(n, c, k)
    return math.comb(c, k) / math.comb(n, k)


def _check_counts(n: int, c: int, k: int) -> None:
    if not 1 <= k <= n:
        raise ConfigError(f"k={k} of n={n} attempts: k is 1..n, so ask for a smaller k or make more attempts")
    if not 0 <= c <= n:
        raise ConfigError(f"c={c} successes in n={n} attempts: c is 0..n")


def _floats(values: Sequence[float | None]) -> NDArray[np.float64]:
    return np.array([math.nan if v is None else v for v in values], dtype=np.float64)
