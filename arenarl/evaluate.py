"""What an evaluation reports, with its uncertainty: win rate, share, mean, agreement of judges, pass@k and pass^k.

Pure functions of numbers. A missing value (None or nan) is counted and left out, never replaced.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from arenarl.errors import ConfigError
from arenarl.types import FLOAT_NOISE

Z_95 = 1.959963984540054
"""The two-sided 95 % point of the standard normal distribution."""

FEWEST = 6
"""Values below which no bootstrap reaches 95 %: all n of them lie on one side of the median with probability 2^(1 - n)."""


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
class Share:
    """``met`` of ``total``; ``low`` and ``high`` are the Wilson 95 % interval of ``rate``. All three nan of nothing."""

    met: float
    total: int
    rate: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean with its 95 % interval, in the unit of the data.

    Attributes:
        count: values in the mean.
        missing: values left out because they are missing.
    """

    mean: float
    low: float
    high: float
    count: int
    missing: int


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How often two judges decided the same tasks alike: won, tied or lost.

    Attributes:
        share: tasks decided alike, of those that both judged.
        kappa: Cohen's kappa, which is 0 for judges that agree as often as chance would have it; nan if chance alone
            would have them agree always.
    """

    share: Share
    kappa: float


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


def share(met: float, total: int, independent: int | None = None) -> Share:
    """``met`` of ``total`` with the Wilson interval of ``independent`` trials (default: all of them).

    Several attempts at a task are not independent. With the number of tasks the interval holds whatever they have in
    common, and is too wide if that is nothing.
    """
    trials = total if independent is None else min(total, independent)
    rate, low, high = _wilson(met / total * trials, trials) if total else (math.nan,) * 3
    return Share(met=met, total=total, rate=rate, low=low, high=high)


def mean_win_rate(judges: Sequence[WinRate]) -> Estimate:
    """Mean of the win rates that several judges give the same tasks.

    The interval is Wilson's for as many tasks as the judge with the fewest decided. It gains nothing from more judges,
    as they look at the same attempts.

    Returns:
        ``count`` is that number of tasks; ``missing`` counts judges that decided none, which are left out.
    """
    known = [j for j in judges if j.wins + j.losses]
    tasks = min((j.wins + j.losses for j in known), default=0)
    mean = sum(j.rate for j in known) / len(known) if known else math.nan
    _, low, high = _wilson(mean * tasks, tasks)
    return Estimate(mean=mean, low=low, high=high, count=tasks, missing=len(judges) - len(known))


def agreement(first: Sequence[float | None], second: Sequence[float | None]) -> Agreement:
    """Agreement of two judges from their margins for the same tasks; tasks that one of them left open are left out.

    Source of kappa: Cohen 1960.

    Raises:
        ConfigError: the two have different lengths.
    """
    _check_lengths(first, second)
    both = np.array([_floats(first), _floats(second)])
    a, b = np.sign(np.where(np.abs(both) <= FLOAT_NOISE, 0.0, both))[:, ~np.isnan(both).any(axis=0)]
    n = len(a)
    alike = share(int((a == b).sum()), n)
    chance = sum(float((a == sign).mean() * (b == sign).mean()) for sign in (-1, 0, 1)) if n else math.nan
    return Agreement(share=alike, kappa=(alike.rate - chance) / (1 - chance) if n and chance < 1 else math.nan)


def _wilson(successes: float, trials: int) -> tuple[float, float, float]:
    if trials == 0:
        return math.nan, math.nan, math.nan
    rate, z2 = successes / trials, Z_95**2
    centre = (rate + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z_95 * math.sqrt(max(0.0, rate * (1 - rate)) / trials + z2 / (4 * trials**2)) / (1 + z2 / trials)
    return rate, max(0.0, min(rate, centre - half)), min(1.0, max(rate, centre + half))


def bootstrap_mean(
    values: Sequence[float | None], *, shares: bool = False, samples: int = 10_000, seed: int = 0
) -> Estimate:
    """Mean over tasks with the expanded percentile bootstrap over tasks; the same seed repeats the interval.

    The plain percentile interval is about sqrt((n - 1) / n) z / t too narrow: at 10 tasks it holds in 90 % of cases.

    Args:
        values: one for each task (average repeated attempts at a task first).
        shares: all values are in [0, 1]. Where a bootstrap knows nothing, the interval is then Wilson's, which is wide enough
            for whatever the next tasks bring.

    Returns:
        A bootstrap knows nothing of fewer than `FEWEST` known values, or of equal ones: interval nan, without ``shares``. The
        mean of none is nan.

    Source: Hesterberg 2015, What Teachers Should Know about the Bootstrap (expanded percentile interval).
    """
    from scipy.special import stdtrit  # the quantile of Student's t

    numbers = _floats(values)
    known = numbers[~np.isnan(numbers)]
    n, low, high = len(known), math.nan, math.nan
    if n >= FEWEST and np.ptp(known) > FLOAT_NOISE:
        draws = np.random.default_rng(seed).integers(n, size=(samples, n))
        tail = NormalDist().cdf(math.sqrt(n / (n - 1)) * float(stdtrit(n - 1, 0.025)))
        low, high = np.quantile(known[draws].mean(axis=1), [tail, 1 - tail]).tolist()
    elif shares and n:
        _, low, high = _wilson(float(known.sum()), n)
    return Estimate(mean=float(known.mean()) if n else math.nan, low=low, high=high, count=n, missing=len(numbers) - n)


def bootstrap_mean_difference(
    after: Sequence[float | None], before: Sequence[float | None], *, samples: int = 10_000, seed: int = 0
) -> Estimate:
    """`bootstrap_mean` of after - before, for each task; tasks that miss one of the two are missing.

    Raises:
        ConfigError: the two have different lengths.
    """
    _check_lengths(after, before)
    return bootstrap_mean((_floats(after) - _floats(before)).tolist(), samples=samples, seed=seed)


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
        raise ConfigError(f"c={c} successes in n={n} attempts: c is 0..n, so count them again")


def _check_lengths(first: Sequence[float | None], second: Sequence[float | None]) -> None:
    if len(first) != len(second):
        raise ConfigError(
            f"{len(first)} values against {len(second)}: give one of each for every task, None if missing"
        )


def _floats(values: Sequence[float | None]) -> NDArray[np.float64]:
    return np.array([math.nan if v is None else v for v in values], dtype=np.float64)
