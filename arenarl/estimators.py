"""Estimators: how the games of a tournament become one score for each player.

An estimator sees only games that a judge decided; a tie is a result, an abstention is no game. It knows nothing of the
plan that paired the players, except that a bracket hands over the level that each player reached.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from arenarl.errors import ConfigError
from arenarl.functional import FLOAT_NOISE
from arenarl.types import Game, Verdict

Scores = NDArray[np.float64]
Fit = Callable[[int, Sequence[Game], Sequence[float] | None], Scores]


@dataclass(frozen=True)
class Estimator:
    """A named fit.

    Attributes:
        name: what the record calls it.
        fit: ``(n, games, levels)`` to scores [n]; higher is better, equal is a tie, nan is a player without a decided
            game. ``games`` are decided ones; ``levels`` [n] is what the plan returned, None for plans without rounds
            to survive.
        ranked: True if only the order of the scores has a meaning: the reward is then the paper's 1 - rank / (N - 1).
            False if the distances do too: the reward is then the score.
    """

    name: str
    fit: Fit
    ranked: bool = True


def margin(game: Game) -> float | None:
    """Score of i minus score of j, exactly 0.0 if they differ by float noise only; None if the judge abstained."""
    if not isinstance(game.result, Verdict):
        return None
    a, b = game.result.score_a, game.result.score_b
    return 0.0 if math.isclose(a, b, rel_tol=FLOAT_NOISE) else a - b


def wins(n: int, games: Sequence[Game], levels: Sequence[float] | None = None) -> Scores:
    """Share of games won, a tie being half a win; equal shares are ordered by Buchholz, worth at most 1e-4.

    Buchholz is the mean share of the opponents met. A mean, where chess takes a sum, so that a bye or an abstention is
    no loss of points. In a complete round robin it orders nobody.

    Source: ArenaRL (arXiv 2601.06487), round robin and Swiss.
    """
    design, observed = _linear(n, games)
    seats = np.abs(design)
    count = seats.sum(axis=0)
    share = _divide((count + np.sign(observed) @ design) / 2, count)
    played = seats.T @ seats - np.diag(count)
    return share + 1e-4 * _divide(played @ np.nan_to_num(share), count)


def anchor(n: int, games: Sequence[Game], levels: Sequence[float] | None = None) -> Scores:
    """Own score minus player 0's, over the games against player 0 only; player 0 itself stands at 0.

    The paper ranks own scores taken in separate calls and gives the anchor its mean. The difference lets the judge's
    level in each call cancel. Source: ArenaRL (arXiv 2601.06487), anchor-based ranking.
    """
    scores = _mean_margin(n, [game for game in games if 0 in (game.i, game.j)])
    return np.where(np.isnan(scores) | (np.arange(n) > 0), scores, 0.0)


def depth(n: int, games: Sequence[Game], levels: Sequence[float] | None = None) -> Scores:
    """Level reached in the bracket; within a level, mean margin over all games, worth at most a quarter of a level.

    Source: ArenaRL (arXiv 2601.06487), single and double elimination.

    Raises:
        ConfigError: the plan returned no levels.
    """
    if levels is None:
        raise ConfigError("estimator 'depth' needs a plan that returns levels: take an elimination, or 'margins'")
    _, observed = _linear(n, games)
    largest = np.abs(observed).max(initial=0.0) or 1.0
    return np.asarray(levels, dtype=np.float64) + _mean_margin(n, games) / (4 * largest)


def margins(n: int, games: Sequence[Game], levels: Sequence[float] | None = None, *, one_order: bool = False) -> Scores:
    """Least squares on score differences over the comparison graph, shrunk by the noise it finds; mean 0.

    Minimises sum (x_i - x_j - margin)^2 + ridge sum x^2, in the judge's unit. The ridge stands for the ratio of noise to
    quality variance and is the one under which the games are most probable: 0 if they fit together (a perfect judge
    gets a perfect order), more as they contradict each other, so that a player with few games keeps near the mean.

    Args:
        one_order: fit a constant liking of the judge for side a as one more unknown, if the games can tell it from the
            players (in a star round the anchor they cannot). For judges that see each pair once.

    Sources: Jiang et al. 2011 (HodgeRank) for the fit; MacKay 1992 (the evidence) for the ridge.
    """
    design, observed = _linear(n, games)
    played = design.any(axis=0)
    if one_order and games:
        centred = design - design.mean(axis=0)
        if np.linalg.matrix_rank(centred) == np.linalg.matrix_rank(design):
            design, observed = centred, observed - observed.mean()
    u, s, vt = np.linalg.svd(design, full_matrices=False)
    fitted = s > FLOAT_NOISE
    u, s, vt = u[:, fitted], s[fitted], vt[fitted]
    along = observed @ u
    along[np.abs(along) <= FLOAT_NOISE * np.linalg.norm(observed)] = 0.0
    ridge = _most_probable_ridge(s**2, along**2, float(observed @ observed), len(games))
    return np.where(played, (s * along / (s**2 + ridge)) @ vt, np.nan)


def _most_probable_ridge(eigenvalues: Scores, explained: Scores, total: float, games: int) -> float:
    """Noise variance over quality variance at the maximum of the marginal likelihood of the margins.

    In the eigenbasis of the graph the margins have variance (eigenvalue + ridge) q^2, and ridge q^2 in the ``spare``
    dimensions that no quality explains; q^2 is at its own maximum. Without a spare dimension noise cannot be told.
    """
    spare = games - len(eigenvalues)
    if not spare or not total:
        return 0.0
    ridges = np.concatenate([[1e-12], np.geomspace(0.01, 10, 13)])
    variances = eigenvalues[:, None] + ridges
    scaled = (explained[:, None] / variances).sum(axis=0) + max(total - explained.sum(), 0.0) / ridges
    log_det = np.log(variances).sum(axis=0) + spare * np.log(ridges)
    return float(ridges[np.argmin(log_det + games * np.log(scaled))])


def bradley_terry(n: int, games: Sequence[Game], levels: Sequence[float] | None = None) -> Scores:
    """Most probable log-strengths given who won, under a normal prior of sd 1.5; a tie is half a win each. Mean 0.

    Each step minimises a quadratic that bounds the objective from above, so it converges from anywhere.
    Sources: Bradley and Terry 1952; Bohning and Lindsay 1988 for the bound.
    """
    design, observed = _linear(n, games)
    outcome = (np.sign(observed) + 1) / 2
    precision = 1.5**-2
    step = np.linalg.inv(design.T @ design / 4 + precision * np.eye(n))
    x = np.zeros(n)
    for _ in range(1000):
        surprise = outcome - 1 / (1 + np.exp(-(design @ x)))
        move = step @ (surprise @ design - precision * x)
        x += move
        if np.abs(move).max() < 1e-12:
            break
    return np.where(design.any(axis=0), x, np.nan)


ESTIMATORS: dict[str, Estimator] = {
    "wins": Estimator("wins", wins),
    "anchor": Estimator("anchor", anchor),
    "depth": Estimator("depth", depth),
    "margins": Estimator("margins", margins, ranked=False),
    "margins_one_order": Estimator("margins_one_order", partial(margins, one_order=True), ranked=False),
    "bradley_terry": Estimator("bradley_terry", bradley_terry, ranked=False),
}


def ranks(scores: Scores) -> Scores:
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


def _linear(n: int, games: Sequence[Game]) -> tuple[Scores, Scores]:
    """Design [games, n], +1 for the player on side a and -1 for the one on side b, and margins [games]."""
    design = np.zeros((len(games), n))
    for row, game in zip(design, games, strict=True):
        row[game.i], row[game.j] = 1, -1
    return design, np.array([margin(game) for game in games], dtype=np.float64)


def _mean_margin(n: int, games: Sequence[Game]) -> Scores:
    design, observed = _linear(n, games)
    return _divide(observed @ design, np.abs(design).sum(axis=0))


def _divide(total: Scores, count: Scores) -> Scores:
    return np.divide(total, count, out=np.full(len(total), np.nan), where=count > 0)
