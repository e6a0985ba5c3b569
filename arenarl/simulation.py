"""Judges whose faults are known: models of a language model that compares, or marks, attempts of hidden quality.

Every answer is a pure function of a seed and of who was asked about, so a study repeats itself however its games are
scheduled, and different tournaments over one group meet the same judge: their difference is not luck.

The models assume noise that is independent from call to call, one constant liking for the first side, and transitive
taste. A persistent bias (length, style) averages out in no tournament and is in none of these models.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from arenarl.errors import ConfigError
from arenarl.types import Abstention, Episode, Mark, Task, Verdict

if TYPE_CHECKING:
    from arenarl.arena import Compare

Uniforms = tuple[float, float, float, float]  # independent, in (0, 1)
Model = Callable[
    [float, float, float, Uniforms], tuple[float, float]
]  # (difference, theta, bias, uniforms) to two marks

LAPSE = 0.1
"""Share of calls in which the judge of kind "lapse" does not look."""

_normal = NormalDist().inv_cdf


def margin(difference: float, theta: float, bias: float, u: Uniforms) -> tuple[float, float]:
    """Marks to 0.1 that stand s apart around a level, with s = difference + (bias + logistic noise) / theta.

    P(s > 0) = sigmoid(theta difference + bias). The level is normal(7, 1) and new in every call, so only the difference of
    two marks means anything.
    """
    return _marks(difference, theta, bias, u, digits=1)


def coarse(difference: float, theta: float, bias: float, u: Uniforms) -> tuple[float, float]:
    """As ``margin``, with marks in whole points: close calls are often ties."""
    return _marks(difference, theta, bias, u, digits=0)


def lapse(difference: float, theta: float, bias: float, u: Uniforms) -> tuple[float, float]:
    """As ``margin``, but with probability ``LAPSE`` both marks are uniform on 0 to 10, whatever there was to see."""
    if u[2] < LAPSE:
        return round(10 * u[0], 1), round(10 * u[1], 1)
    return _marks(difference, theta, bias, u, digits=1)


def binary(difference: float, theta: float, bias: float, u: Uniforms) -> tuple[float, float]:
    """1 for the winner and 0 for the loser, with P(first wins) = sigmoid(theta difference + bias); never a tie."""
    return (1.0, 0.0) if _seen(difference, theta, bias, u) > 0 else (0.0, 1.0)


KINDS: dict[str, Model] = {"margin": margin, "coarse": coarse, "lapse": lapse, "binary": binary}


def simulated_compare(
    qualities: Sequence[float] | NDArray[np.float64],
    *,
    kind: str = "margin",
    theta: float = 1.5,
    bias: float = 0.5,
    seed: int = 0,
    outage: float = 0.0,
) -> Compare:
    """A judge of players with known qualities. Asked the same thing again, it draws its noise anew.

    Args:
        qualities: [n] hidden; differences of about 1 are usual, as among standard normal ones.
        kind: a name in ``KINDS``.
        theta: sharpness. At 1.5 a random pair of normal qualities, asked in both orders, is told right in 83 %.
        bias: liking for the first side, in log-odds.
        outage: share of calls that come back as an ``Abstention``.

    Raises:
        ConfigError: an unknown kind, or a number out of its range.
    """
    check_model(kind, theta, outage)
    hidden = [float(q) for q in qualities]
    asked: Counter[tuple[int, int]] = Counter()

    async def compare(i: int, j: int) -> Verdict | Abstention:
        asked[i, j] += 1
        u = uniforms(seed, str(i), str(j), str(asked[i, j]))
        return _answer(kind, hidden[i] - hidden[j], theta, bias, outage, u)

    return compare


def pointwise_mark(
    quality: float, u: Uniforms, *, centre: float = 0.7, spread: float = 0.03, noise: float = 0.02, fine: bool = False
) -> float:
    """Mark of one attempt alone, compressed as ArenaRL's figure has it: centre + sqrt(spread^2 - noise^2) quality + noise.

    Args:
        quality: in standard deviations of the group.
        spread: standard deviation of the marks of a group, noise included.
        noise: standard deviation of marks given to one attempt again and again.
        fine: no rounding; otherwise to one decimal.

    Source: ArenaRL (arXiv 2601.06487), figure of pointwise scores: spread 0.03, noise 0.02, shown to one decimal.
    """
    mark = centre + math.sqrt(spread**2 - noise**2) * quality + noise * _normal(u[0])
    return mark if fine else round(mark, 1)


class SimulatedJudge:
    """Judges episodes by their checklist score as a fallible model would: quality = score / sd.

    Named in a configuration as ``"arenarl.simulation:SimulatedJudge"`` with its arguments in ``judge_config``. An answer
    depends on (seed, episode ids, their order) and, for marks, on ``repeat``: asked the same again it says the same, as a
    model at temperature 0 does.

    Args:
        kind, theta, bias, outage: of comparisons, as in ``simulated_compare``; ``outage`` holds for marks too.
        sd: difference of two scores that counts as a quality of 1: the usual spread of scores within a group.
        fine: marks without rounding. They are 0.7 at a score of one half, and compressed as ``pointwise_mark`` says.
        latency_s: seconds that every answer takes.

    Raises:
        ConfigError: an unknown kind, or a number out of its range.
    """

    def __init__(
        self,
        kind: str = "margin",
        theta: float = 1.5,
        sd: float = 0.2,
        bias: float = 0.5,
        seed: int = 0,
        fine: bool = False,
        outage: float = 0.0,
        latency_s: float = 0.0,
    ) -> None:
        check_model(kind, theta, outage)
        if not 0 < sd < math.inf:
            raise ConfigError(f"sd={sd} is no spread of scores: set a positive number, such as 0.2")
        if not 0 <= latency_s < math.inf:
            raise ConfigError(f"latency_s={latency_s} is no time: set 0 or more seconds")
        self.kind, self.theta, self.sd, self.bias = kind, theta, sd, bias
        self.seed, self.fine, self.outage, self.latency_s = seed, fine, outage, latency_s

    async def compare(self, a: Episode, b: Episode, task: Task) -> Verdict | Abstention:
        await asyncio.sleep(self.latency_s)
        if a.score is None or b.score is None:
            missing = [e.episode_id for e in (a, b) if e.score is None]
            return Abstention(reason=f"no_score: {' and '.join(missing)}", judge="simulated")
        u = uniforms(self.seed, a.episode_id, b.episode_id)
        return _answer(self.kind, (a.score - b.score) / self.sd, self.theta, self.bias, self.outage, u)

    async def mark(self, a: Episode, task: Task, repeat: int = 0) -> Mark | Abstention:
        await asyncio.sleep(self.latency_s)
        if a.score is None:
            return Abstention(reason=f"no_score: {a.episode_id}", judge="simulated")
        u = uniforms(self.seed, a.episode_id, f"mark {repeat}")
        if u[3] < self.outage:
            return _down()
        return Mark(score=pointwise_mark((a.score - 0.5) / self.sd, u, fine=self.fine), judge="simulated", calls=1)


def uniforms(seed: int, *names: str) -> Uniforms:
    """Four independent numbers in (0, 1) that depend on nothing but the arguments, in this process or any other."""
    digest = hashlib.sha256("\0".join((str(seed), *names)).encode()).digest()
    a, b, c, d = ((int.from_bytes(digest[k : k + 8]) >> 12) + 0.5 for k in (0, 8, 16, 24))
    return a / 2**52, b / 2**52, c / 2**52, d / 2**52


def check_model(kind: str, theta: float, outage: float) -> None:
    """Raises ConfigError for what no judge can be made of."""
    if kind not in KINDS:
        raise ConfigError(f"unknown kind of judge {kind!r}: take one of {', '.join(KINDS)}")
    if not 0 < theta < math.inf:
        raise ConfigError(f"theta={theta} is no sharpness: set a positive number; 0.7 is dull, 1.5 usual, 3 sharp")
    if not 0 <= outage <= 1:
        raise ConfigError(f"outage={outage} is no share: set a number from 0 to 1")


def _answer(
    kind: str, difference: float, theta: float, bias: float, outage: float, u: Uniforms
) -> Verdict | Abstention:
    if u[3] < outage:
        return _down()
    a, b = KINDS[kind](difference, theta, bias, u)
    return Verdict(score_a=a, score_b=b, judge="simulated", calls=1)


def _down() -> Abstention:
    return Abstention(reason="unavailable: simulated outage", judge="simulated", calls=1)


def _seen(difference: float, theta: float, bias: float, u: Uniforms) -> float:
    return difference + (bias + math.log(u[0] / (1 - u[0]))) / theta


def _marks(difference: float, theta: float, bias: float, u: Uniforms, digits: int) -> tuple[float, float]:
    seen, level = _seen(difference, theta, bias, u), 7 + _normal(u[1])
    return round(level + seen / 2, digits), round(level - seen / 2, digits)
