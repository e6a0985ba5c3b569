"""Estimators: how the games of a tournament become a score for each player, with a standard error.

A fit sees only games that a judge decided; a tie is a result, an abstention is no game. Three estimators are named:
``paper``, the ranking that goes with the topology and that the plan itself returns (`win_share`, `to_anchor`,
`by_depth`); ``margin_ls``, least squares on score margins; ``bradley_terry``, on who won. The last two serve any games,
and where pairs were asked in one order they fit the judge's liking for side a as one more unknown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from arenarl.types import FLOAT_NOISE, Game, Verdict

Array = NDArray[np.float64]
Rewards = Literal["rank", "score"]

PRIOR_SD = 1.5
"""Prior standard deviation of a log-strength: in seven of ten pairs of players the odds are then within 10 : 1."""


class Estimate(NamedTuple):
    """Scores [n], higher is better, and their standard errors [n] in the same unit.

    A score is nan for a player without a decided game; a standard error also where the games do not tell it.
    """

    scores: Array
    stderr: Array


Fit = Callable[[int, Sequence[Game]], Estimate]


@dataclass(frozen=True)
class Estimator:
    """A named fit.

    Attributes:
        name: what the record calls it.
        fit: ``(n, decided games)`` to an `Estimate`; equal scores are a tie. None for the ranking that the plan returns.
        rewards: "rank" if only the order of the scores has a meaning: the reward is then the paper's 1 - rank / (N - 1).
            "score" if the distances do too: the reward is then the score.
    """

    name: str
    fit: Fit | None
    rewards: Rewards = "rank"


def win_share(n: int, games: Sequence[Game]) -> Estimate:
    """Share of games won, a tie being half a win; equal shares are ordered by Buchholz, worth at most 1e-4.

    Buchholz is the mean share of the opponents met. A mean, where chess takes a sum, so that a bye or an abstention is
    no loss of points. In a complete round robin it orders nobody. The standard error is the posterior standard deviation
    of the share under a uniform prior, which is above 0 for a player that won all its games too.

    Source: ArenaRL (arXiv 2601.06487), round robin and Swiss.
    """
    design, observed = _linear(n, games)
    seats = np.abs(design)
    count = seats.sum(axis=0)
    won = (count + np.sign(observed) @ design) / 2
    share = _divide(won, count)
    played = seats.T @ seats - np.diag(count)
    buchholz = _divide(played @ np.nan_to_num(share), count)
    variance = (won + 1) * (count - won + 1) / ((count + 2) ** 2 * (count + 3))
    return Estimate(share + 1e-4 * buchholz, np.where(count > 0, np.sqrt(variance), np.nan))


def to_anchor(n: int, games: Sequence[Game]) -> Estimate:
    """Own score minus player 0's, over the games against player 0 only; player 0 itself stands at 0, without error.

    The paper ranks own scores taken in separate calls and gives the anchor its mean. The difference lets the judge's
    level in each call cancel. Of games that were asked in both orders the two answers tell the error: their difference
    is free of quality and has the noise of their sum, so its spread over the games is the error of one game. With one
    order there is none to be had. Source: ArenaRL (arXiv 2601.06487), anchor-based ranking.
    """
    met = [game for game in games if 0 in (game.i, game.j)]
    design, observed = _linear(n, met)
    count = np.abs(design).sum(axis=0)
    gaps = [_gap(game) for game in met if game.halves]
    noise = float(np.std(gaps, ddof=1)) if len(gaps) > 1 else math.nan
    scores, stderr = _divide(observed @ design, count), _divide(np.full(n, noise), np.sqrt(count))
    if met:
        scores[0] = stderr[0] = 0.0
    return Estimate(scores, stderr)


def by_depth(levels: Sequence[float]) -> Fit:
    """Ranking by the level [n] reached in a bracket; within a level, mean margin over all games, worth at most a quarter.

    A bracket's depth has no standard error: all nan. Source: ArenaRL (arXiv 2601.06487), single and double elimination.
    """

    def fit(n: int, games: Sequence[Game]) -> Estimate:
        design, observed = _linear(n, games)
        mean = _divide(observed @ design, np.abs(design).sum(axis=0))
        largest = np.abs(observed).max(initial=0.0) or 1.0
        return Estimate(np.asarray(levels, dtype=np.float64) + mean / (4 * largest), np.full(n, np.nan))

    return fit


def margin_ls(n: int, games: Sequence[Game]) -> Estimate:
    """Least squares on score differences over the comparison graph, shrunk by the noise it finds; mean 0.

    Minimises sum (x_i - x_j + bias - margin)^2 + ridge sum x^2, in the unit of a margin. The ridge stands for the ratio
    of noise to quality variance and is the one under which the games are most probable: 0 if they fit together (a
    perfect judge gets a perfect order), more as they contradict each other, so that a player with few games keeps near
    the mean. The bias is absent where games cannot tell it from the players (in a star round the anchor they cannot).

    The standard error is the posterior standard deviation with the noise found: 0 for games that fit together, nan where
    there are no more games than unknowns, which leaves nothing to tell noise by. Players whom no chain of games connects
    cannot be compared; each connected set has mean 0.

    Sources: Jiang et al. 2011 (HodgeRank) for the fit; MacKay 1992 (the evidence) for the ridge.
    """
    design, observed = _linear(n, games)
    played, floor = design.any(axis=0), FLOAT_NOISE * np.linalg.norm(observed)
    unknowns = 0
    if (side := _side_column(games, design)) is not None:
        design = design - np.outer(side, side @ design) / (side @ side)
        observed = observed - side * (side @ observed) / (side @ side)
        unknowns = 1
    u, s, vt = np.linalg.svd(design, full_matrices=False)
    fitted = s > FLOAT_NOISE
    u, s, vt = u[:, fitted], s[fitted], vt[fitted]
    along, rest = observed @ u, observed - u @ (observed @ u)
    along[np.abs(along) <= floor] = 0.0
    rest[np.abs(rest) <= floor] = 0.0
    spare = len(games) - unknowns - len(s)
    ridge, noise = _most_probable_noise(s**2, along**2, float(rest @ rest), spare)
    variance = (noise / (s**2 + ridge)) @ vt**2
    return Estimate(
        np.where(played, (s * along / (s**2 + ridge)) @ vt, np.nan), np.where(played, np.sqrt(variance), np.nan)
    )


def _most_probable_noise(eigenvalues: Array, explained: Array, residual: float, spare: int) -> tuple[float, float]:
    """(noise variance over quality variance, noise variance) at the maximum of the marginal likelihood of the margins.

    In the eigenbasis of the graph the margins have variance (eigenvalue + ridge) q^2, and ridge q^2 in the ``spare``
    dimensions that no quality explains; q^2 is at its own maximum. Without a spare dimension noise cannot be told.
    """
    if not spare:
        return 0.0, math.nan
    if not residual and not explained.any():
        return 0.0, 0.0
    ridges = np.concatenate([[1e-12], np.geomspace(0.01, 100, 17)])
    variances = eigenvalues[:, None] + ridges
    scaled = (explained[:, None] / variances).sum(axis=0) + residual / ridges
    games = len(eigenvalues) + spare
    log_det = np.log(variances).sum(axis=0) + spare * np.log(ridges)
    best = int(np.argmin(log_det + games * np.log(scaled)))
    return float(ridges[best]), float(ridges[best] * scaled[best] / games) if residual else 0.0


def bradley_terry(n: int, games: Sequence[Game]) -> Estimate:
    """Most probable log-strengths given who won, under a normal prior of sd 1.5; a tie is half a win each. Mean 0.

    The judge's liking for side a is one more unknown under the same prior, where the games can tell it. Standard errors
    are those of the normal approximation at the mode (Laplace), against the mean of the players that games connect.

    Source: Bradley and Terry 1952.
    """
    strengths, covariance = bradley_terry_posterior(n, games)
    design, _ = _linear(n, games)
    compared = np.linalg.pinv(design) @ design if games else np.zeros((n, n))
    stderr = np.sqrt(np.diag(compared @ covariance @ compared))
    played = design.any(axis=0)
    return Estimate(np.where(played, strengths, np.nan), np.where(played, stderr, np.nan))


def bradley_terry_posterior(n: int, games: Sequence[Game]) -> tuple[Array, Array]:
    """Mode [n] and covariance [n, n] of the log-strengths; without games, those of the prior.

    Each step minimises a quadratic that bounds the objective from above, so it converges from anywhere.
    Source: Bohning and Lindsay 1988.
    """
    design, observed = _linear(n, games)
    if (side := _side_column(games, design)) is not None:
        design = np.column_stack([design, side])
    outcome = (np.sign(observed) + 1) / 2
    prior = PRIOR_SD**-2 * np.eye(design.shape[1])
    step = np.linalg.inv(design.T @ design / 4 + prior)
    x = np.zeros(design.shape[1])
    for _ in range(1000):
        win = 1 / (1 + np.exp(-(design @ x)))
        move = step @ ((outcome - win) @ design - prior @ x)
        x += move
        if np.abs(move).max() < 1e-11:
            break
    x[np.abs(x) < FLOAT_NOISE] = 0.0
    precision = (design.T * (win * (1 - win))) @ design + prior
    return x[:n], np.asarray(np.linalg.inv(precision)[:n, :n], dtype=np.float64)


ESTIMATORS: dict[str, Estimator] = {
    "paper": Estimator("paper", None),
    "margin_ls": Estimator("margin_ls", margin_ls, "score"),
    "bradley_terry": Estimator("bradley_terry", bradley_terry, "score"),
}


def ranks(scores: Array) -> Array:
    """Places [n] from scores [n]: 0 is the best, ties share the mean of their places, nan stays nan.

    Scores within float noise of the best of their tie are equal.
    """
    places = np.full(len(scores), np.nan)
    order = [k for k in np.argsort(-scores, kind="stable") if not math.isnan(scores[k])]
    noise = FLOAT_NOISE * np.nanmax(np.abs(scores), initial=0.0)
    start = 0
    for end in range(1, len(order) + 1):
        if end == len(order) or scores[order[start]] - scores[order[end]] > noise:
            places[order[start:end]] = (start + end - 1) / 2
            start = end
    return places


def _linear(n: int, games: Sequence[Game]) -> tuple[Array, Array]:
    """Design [games, n], +1 for the player on side a and -1 for the one on side b, and margins [games]."""
    design = np.zeros((len(games), n))
    for row, game in zip(design, games, strict=True):
        row[game.i], row[game.j] = 1, -1
    return design, np.array([game.margin for game in games], dtype=np.float64)


def _side_column(games: Sequence[Game], design: Array) -> Array | None:
    """Column [games] of the judge's liking for side a: 1 where a pair was asked in one order, 0 where in both.

    None if there is none, or if the players can take its place, so that the games do not tell one from the other.
    """
    side = np.array([not game.halves for game in games], dtype=np.float64)
    if not side.any():
        return None
    alone = side - design @ np.linalg.lstsq(design, side)[0]
    return side if np.linalg.norm(alone) > FLOAT_NOISE * np.linalg.norm(side) else None


def _gap(game: Game) -> float:
    """Difference of the margins of i over j in the two orders."""
    first, second = game.halves
    assert isinstance(first, Verdict) and isinstance(second, Verdict)  # a game with an abstained half is not decided
    return (first.score_a - first.score_b) - (second.score_b - second.score_a)


def _divide(total: Array, count: Array) -> Array:
    return np.divide(total, count, out=np.full(len(total), np.nan), where=count > 0)
