"""Judges compare two attempts at one task. A judge that cannot decide abstains; it never makes a score up."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Protocol

import numpy as np

from arenarl.errors import ConfigError
from arenarl.types import Abstention, Episode, Mark, Task, Verdict


class Judge(Protocol):
    """Anything that compares two episodes, called once for each game and from many games at once.

    A judge may have more; who uses one asks for the method and does without it where it is missing:

        async mark(a, task, repeat=0) -> Mark | Abstention    one attempt alone, for pointwise algorithms; `repeat` numbers
                                                              independent marks of the same attempt
        begin_step(version)                                   the next training step begins: budgets are full again. Each
                                                              environment runner has a judge, and so a budget, of its own
        async aclose()                                        connections and engines down; called once, from the loop of `compare`
    """

    async def compare(self, a: Episode, b: Episode, task: Task) -> Verdict | Abstention:
        """Marks for a and b on one scale, higher is better, or the reason why there are none.

        An outage is an ``Abstention``. The judge owns its deadline and its retries.
        """
        ...


class RubricJudge:
    """Compares checklist scores: the margin of a game is the difference of ``Episode.score``.

    Args:
        noise: standard deviation of normal noise on a margin and on a mark, in units of the score; makes a programmatic checklist
            as unreliable as a model would be. It depends only on (seed, the two episode ids, their order), so a run
            repeats itself however its games are scheduled, and the two orders of a pair are two independent calls.
    """

    def __init__(self, noise: float = 0.0, seed: int = 0) -> None:
        if not 0.0 <= noise < math.inf:
            raise ConfigError(f"noise={noise} is no standard deviation: set 0 or more")
        self.noise = noise
        self.seed = seed

    async def compare(self, a: Episode, b: Episode, task: Task) -> Verdict | Abstention:
        return _verdict(a, b, a.score, b.score, self.noise * _normal(self.seed, a.episode_id, b.episode_id))

    async def mark(self, a: Episode, task: Task, repeat: int = 0) -> Mark | Abstention:
        return _mark(a, a.score, self.noise * _normal(self.seed, a.episode_id, f"mark {repeat}"))


class OracleJudge:
    """Compares any hidden quality of an episode; for tests, and for evaluation by what training did not see.

    Args:
        quality: higher is better; None where it is not known, which makes the judge abstain.
    """

    def __init__(self, quality: Callable[[Episode], float | None]) -> None:
        self.quality = quality

    async def compare(self, a: Episode, b: Episode, task: Task) -> Verdict | Abstention:
        return _verdict(a, b, self.quality(a), self.quality(b))

    async def mark(self, a: Episode, task: Task, repeat: int = 0) -> Mark | Abstention:
        return _mark(a, self.quality(a))


def _verdict(
    a: Episode, b: Episode, score_a: float | None, score_b: float | None, noise: float = 0.0
) -> Verdict | Abstention:
    missing = [e.episode_id for e, score in ((a, score_a), (b, score_b)) if score is None]
    if score_a is None or score_b is None:
        return Abstention(reason=f"no_score: {' and '.join(missing)}")
    return Verdict(score_a=score_a + noise / 2, score_b=score_b - noise / 2)


def _mark(a: Episode, score: float | None, noise: float = 0.0) -> Mark | Abstention:
    return Abstention(reason=f"no_score: {a.episode_id}") if score is None else Mark(score=score + noise)


def _normal(seed: int, *names: str) -> float:
    """One standard normal number that depends on nothing but the arguments, in this process or any other."""
    digest = hashlib.sha256("\0".join((str(seed), *names)).encode()).digest()
    return float(np.random.default_rng(int.from_bytes(digest)).standard_normal())
