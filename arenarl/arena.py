"""A tournament is a plan plus an estimator.

A plan (topology) is a generator: it yields a round of pairs, is sent the games of that round, and yields the next. It
may look only at (n, rng) and at the games, so a tournament is repeatable from (topology, n, seed) and a repeatable
judge, and relabelling the players relabels the result. The games of a round run at the same time; a round waits for
its slowest game, and each game has a deadline.

The rules that hold for every plan:
    * A tie is a result. An abstention is no game: it gives points to nobody and is not in any fit.
    * A bye is no game either. Where a bracket game is tied or abstained somebody must go on: the better seed does,
      with no credit, and a seed is information (anchor margins) or, failing that, the seeded shuffle. Never the index.
    * No information is nan, from the score to the advantage; total ties give advantages of exactly 0.

Source of the five named after the paper: ArenaRL (arXiv 2601.06487), section on topologies.
"""

from __future__ import annotations

import asyncio
import difflib
import math
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Generator, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from arenarl.errors import ConfigError, JudgeError, boundary
from arenarl.estimators import ESTIMATORS, Estimator, margin, ranks
from arenarl.functional import group_advantages, rank_rewards
from arenarl.types import Abstention, Game, Verdict

Pair = tuple[int, int]
Rounds = Generator[list[Pair], list[Game], None]
Bracket = Generator[list[Pair], list[Game], Sequence[float]]
Plan = Rounds | Bracket
Topology = Callable[[int, np.random.Generator], Plan]
Compare = Callable[[int, int], Awaitable[Verdict | Abstention]]
T = TypeVar("T")
Slot = int | None  # a place in a bracket; None is a bye


@dataclass(frozen=True, eq=False)
class Tournament:
    """What was played and what it is worth.

    Attributes:
        games: in the order of the plan, abstained ones included.
        scores: [n] the estimator's, higher is better.
        ranks: [n] 0 is best; ties share the mean of their places.
        rewards: [n] 1 - rank / (N - 1) over the N players with a rank, or the score, as the estimator says.
        advantages: [n] group-normalised rewards.
        rounds: number of waits one after another.
        abstentions: number of games without a verdict.

    In all four arrays nan means no information: no game of that player was decided.
    """

    games: tuple[Game, ...]
    scores: NDArray[np.float64]
    ranks: NDArray[np.float64]
    rewards: NDArray[np.float64]
    advantages: NDArray[np.float64]
    topology: str
    estimator: str
    seed: int
    rounds: int
    abstentions: int


async def run_tournament(
    topology: str | Topology,
    n: int,
    compare: Compare,
    *,
    estimator: str | Estimator | None = None,
    seed: int = 0,
    max_concurrency: int | None = None,
    game_timeout: float = 600.0,
) -> Tournament:
    """Play a tournament between players 0..n-1 and estimate what each is worth.

    Args:
        topology: a name in ``TOPOLOGIES`` or a plan of your own.
        compare: judges i (side a) against j (side b). An outage is an ``Abstention``, as is a TimeoutError.
        estimator: a name in ``ESTIMATORS`` or one of your own; None takes the plan's own, "margins" for your plan.
        max_concurrency: games in flight, None for a whole round at once.
        game_timeout: seconds that one game may take before it counts as abstained.

    Raises:
        ConfigError: n < 2, unknown names, an estimator that the plan cannot feed, or a plan that pairs nonsense.
        JudgeError: ``compare`` raised, or returned something that is no verdict; the message names the game. An
            ``ArenaError`` of another kind passes unchanged.
    """
    if n < 2:
        raise ConfigError(f"group_size={n} leaves a tournament nobody to compare: set group_size to 2 or more")
    if max_concurrency is not None and max_concurrency < 1:
        raise ConfigError(f"max_concurrency={max_concurrency} would never start a game: set 1 or more, or None")
    name, plan_of, fit = resolve(topology, estimator)
    plan = plan_of(n, np.random.default_rng(seed))
    free = asyncio.Semaphore(max_concurrency or sys.maxsize)
    games: list[Game] = []
    rounds = 0
    try:
        pairs = next(plan)
        while True:
            _check_pairs(name, n, pairs)
            played = await _play_round(pairs, rounds, compare, free, game_timeout)
            games += played
            rounds += 1
            pairs = plan.send(played)
    except StopIteration as end:
        levels = end.value
    decided = [game for game in games if game.margin is not None]
    scores = fit.fit(n, decided, levels)
    places = ranks(scores)
    rewards = _rewards(fit, scores, places)
    return Tournament(
        games=tuple(games),
        scores=scores,
        ranks=places,
        rewards=rewards,
        advantages=_advantages(rewards),
        topology=name,
        estimator=fit.name,
        seed=seed,
        rounds=rounds,
        abstentions=len(games) - len(decided),
    )


def resolve(topology: str | Topology, estimator: str | Estimator | None = None) -> tuple[str, Topology, Estimator]:
    """Name, plan and estimator that ``run_tournament`` would use; lets a configuration be checked before a game is paid.

    Raises:
        ConfigError: an unknown name (with the nearest one), or an estimator that the topology has not the games for.
    """
    own = DEFAULT_ESTIMATOR.get(topology, "margins") if isinstance(topology, str) else "margins"
    if isinstance(estimator, Estimator):
        fit = estimator
    else:
        fit = ESTIMATORS[_known("estimator", estimator or own, ESTIMATORS)]
    if not isinstance(topology, str):
        return getattr(topology, "__name__", type(topology).__name__), topology, fit
    plan = TOPOLOGIES[_known("topology", topology, TOPOLOGIES)]
    fed_by = FED_BY.get(fit.name, TOPOLOGIES)
    if topology not in fed_by:
        raise ConfigError(
            f"estimator {fit.name!r} cannot be had from topology {topology!r}: take {own!r} or 'margins', "
            f"or one of the topologies {', '.join(fed_by)}"
        )
    return topology, plan, fit


def both_orders(compare: Compare) -> Compare:
    """Ask each pair twice with the sides exchanged and add the scores, so that a judge's liking for a side cancels.

    (s_i, s_j) = J(i, j) + J(j, i). Abstains if either half does. Source: ArenaRL (arXiv 2601.06487), arena judge.
    """

    async def compare_twice(i: int, j: int) -> Verdict | Abstention:
        first, second = await _together([compare(i, j), compare(j, i)])
        if isinstance(first, Abstention):
            return first
        if isinstance(second, Abstention):
            return second
        return Verdict(score_a=first.score_a + second.score_b, score_b=first.score_b + second.score_a)

    return compare_twice


def round_robin(n: int, rng: np.random.Generator) -> Rounds:
    """Everybody meets everybody: n (n - 1) / 2 games in one round.

    The sides alternate with the distance of the two, so that everybody is on each side equally often (for n even, but
    for one game).
    """
    yield [(i, j) if (j - i) % 2 else (j, i) for i, j in combinations(range(n), 2)]


def anchor(n: int, rng: np.random.Generator) -> Rounds:
    """Player 0, the greedy attempt, meets everybody else: n - 1 games in one round."""
    yield [(0, k) for k in range(1, n)]


def swiss(n: int, rng: np.random.Generator) -> Rounds:
    """ceil(log2 n) rounds in which players of like standing meet, nobody twice.

    Standing is wins minus losses, so that a tie, a bye and an abstained game all leave it alone; equal standings are in
    the order of a seeded shuffle. With n odd the bye is one more player at the bottom, whom nobody meets twice either.
    """
    bye = [n] if n % 2 else []
    standing = np.zeros(n)
    met: set[frozenset[int]] = set()
    shuffle = rng.permutation(n).tolist()
    for _ in range(math.ceil(math.log2(n))):
        pairs = _pair_neighbours(sorted(shuffle, key=lambda k: -standing[k]) + bye, met)
        met |= {frozenset(pair) for pair in pairs}
        for game in (yield [pair for pair in pairs if n not in pair]):
            result = np.sign(margin(game) or 0.0)
            standing[game.i] += result
            standing[game.j] -= result


def _pair_neighbours(order: list[int], met: Collection[frozenset[int]]) -> list[Pair]:
    """Pair the first with the nearest player that it has not met, and so on, going back where that leaves nobody.

    There is a pairing while everybody has at least half of the field left to meet (Dirac), as in all rounds of Swiss.
    """
    if not order:
        return []
    first, rest = order[0], order[1:]
    for other in rest:
        if frozenset((first, other)) in met:
            continue
        pairs = _pair_neighbours([k for k in rest if k != other], met)
        if pairs or len(rest) == 1:
            return [(first, other), *pairs]
    return []


def seeded_elimination(n: int, rng: np.random.Generator) -> Bracket:
    """Anchor games seed a knock-out: 2n - 2 games in 1 + ceil(log2 n) rounds. Returns the level that each reached.

    Seeds follow the margin to player 0, who stands at 0; a player whose seeding game is missing gets the median, and
    equal margins are in the order of a seeded shuffle. With n below a power of two the best seeds have the byes.
    """
    seeding = yield [(0, k) for k in range(1, n)]
    standing = {0: 0.0} | {game.j: -m for game in seeding if (m := margin(game)) is not None}
    middle = float(np.median(list(standing.values())))
    seeds = sorted(rng.permutation(n).tolist(), key=lambda k: -standing.get(k, middle))
    levels = np.zeros(n)
    slots, prize = _bracket(seeds), 1
    while len(slots) > 1:
        slots, _ = yield from _knock_out(slots, seeds, levels, [prize] * (len(slots) // 2))
        prize += 1
    return levels.tolist()


def double_elimination(n: int, rng: np.random.Generator) -> Bracket:
    """Two defeats put a player out: 2n - 2 games, random start, one final. Returns the level that each reached.

    A level is the round of the lower bracket in which the next defeat, or two, would end. The upper bracket's round k
    runs beside the lower bracket's round 2k - 2; its losers enter the lower bracket's round 2k - 1, in reverse order to
    put rematches off.
    """
    seeds = rng.permutation(n).tolist()
    levels = np.zeros(n)
    slots = _bracket(seeds)
    upper, lower = yield from _knock_out(slots, seeds, levels, [1] * (len(slots) // 2))
    k = 1
    while len(upper) > 1:
        half = len(upper) // 2
        won, lost = yield from _knock_out(upper + lower, seeds, levels, [2 * k + 1] * half + [2 * k - 1] * half)
        upper, dropped, lower = won[:half], lost[:half], won[half:]
        meetings = [slot for pair in zip(lower, reversed(dropped), strict=True) for slot in pair]
        lower, _ = yield from _knock_out(meetings, seeds, levels, [2 * k] * half)
        k += 1
    yield from _knock_out(upper + lower, seeds, levels, [2 * k])
    return levels.tolist()


def _bracket(seeds: Sequence[int]) -> list[Slot]:
    """Slots of a knock-out in which the best seeds meet last (1-8, 4-5, 2-7, 3-6), byes where there is no such seed."""
    order = [0]
    while len(order) < len(seeds):
        order = [place for k in order for place in (k, 2 * len(order) - 1 - k)]
    return [seeds[k] if k < len(seeds) else None for k in order]


def _knock_out(
    slots: Sequence[Slot], seeds: Sequence[int], levels: NDArray[np.float64], prizes: Sequence[int]
) -> Generator[list[Pair], list[Game], tuple[list[Slot], list[Slot]]]:
    """Play neighbouring slots off; returns winners and losers, slot by slot. A win in match m lifts to ``prizes[m]``.

    Only a game that was won lifts anybody: a bye, a tie and an abstention move a player on at the level it has.
    """
    matches = list(zip(slots[::2], slots[1::2], strict=True))
    pairs = [(a, b) for a, b in matches if a is not None and b is not None]
    games = iter((yield pairs) if pairs else [])
    winners: list[Slot] = []
    losers: list[Slot] = []
    for (a, b), prize in zip(matches, prizes, strict=True):
        if a is None or b is None:
            winners.append(b if a is None else a)
            losers.append(None)
            continue
        result = margin(next(games))
        better_seed = seeds.index(a) < seeds.index(b)
        winner, loser = (a, b) if (result > 0 if result else better_seed) else (b, a)
        if result:
            levels[winner] = max(levels[winner], prize)
        winners.append(winner)
        losers.append(loser)
    return winners, losers


def even_graph(n: int, rng: np.random.Generator) -> Rounds:
    """A random circulant graph of 2n games in one round: each player is twice on side a and twice on side b.

    Players are shuffled round a ring; each is side a against those d and e places on, for two random distances that
    connect the ring. (n = 2 and 3 have room for one distance only.) Since everybody is as often on one side as on the
    other, a constant liking of the judge for a side drops out of "margins" by itself: nothing has to be fitted, and
    one call for each pair is enough. Lost games upset the balance: against a strong liking "margins_one_order" helps.
    """
    ring = rng.permutation(n)
    furthest = n // 2 if n < 5 else (n - 1) // 2
    choices = [c for c in combinations(range(1, furthest + 1), min(2, furthest)) if math.gcd(n, *c) == 1]
    steps = choices[rng.integers(len(choices))]
    yield [(int(ring[k]), int(ring[(k + step) % n])) for step in steps for k in range(n)]


TOPOLOGIES: dict[str, Topology] = {
    "round_robin": round_robin,
    "anchor": anchor,
    "swiss": swiss,
    "double_elimination": double_elimination,
    "seeded_elimination": seeded_elimination,
    "even_graph": even_graph,
}

DEFAULT_ESTIMATOR: dict[str, str] = {
    "round_robin": "wins",
    "anchor": "anchor",
    "swiss": "wins",
    "double_elimination": "depth",
    "seeded_elimination": "depth",
    "even_graph": "margins",
}

FED_BY: dict[str, tuple[str, ...]] = {
    "depth": ("double_elimination", "seeded_elimination"),
    "anchor": ("anchor", "seeded_elimination", "round_robin"),
}
"""Topologies for the estimators that do not suit them all: a bracket, or a game of everybody against player 0."""


async def _play_round(
    pairs: Sequence[Pair], number: int, compare: Compare, free: asyncio.Semaphore, limit: float
) -> list[Game]:
    return await _together(_play(i, j, number, compare, free, limit) for i, j in pairs)


async def _together(awaitables: Iterable[Awaitable[T]]) -> list[T]:
    """Results of all at once, in order. The first failure cancels the rest and is raised as it is."""

    async def one(awaitable: Awaitable[T]) -> T:
        return await awaitable

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(awaitable)) for awaitable in awaitables]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


async def _play(i: int, j: int, number: int, compare: Compare, free: asyncio.Semaphore, limit: float) -> Game:
    async with free:
        start = time.perf_counter()
        result: Verdict | Abstention
        with boundary(JudgeError, f"comparing {i} with {j}"):
            try:
                async with asyncio.timeout(limit):
                    result = await compare(i, j)
            except TimeoutError as error:
                result = Abstention(reason=f"timeout: {error}" if str(error) else f"timeout after {limit:g} s")
        seconds = time.perf_counter() - start
    if isinstance(result, Verdict) and not (math.isfinite(result.score_a) and math.isfinite(result.score_b)):
        raise JudgeError(f"comparing {i} with {j}: {result} is not finite; an outage is an Abstention")
    if not isinstance(result, Verdict | Abstention):
        raise JudgeError(f"comparing {i} with {j}: got {result!r}, which is neither a Verdict nor an Abstention")
    return Game(i=i, j=j, round=number, result=result, seconds=seconds)


def _rewards(fit: Estimator, scores: NDArray[np.float64], places: NDArray[np.float64]) -> NDArray[np.float64]:
    known = int(np.isfinite(places).sum())
    return rank_rewards(places, known) if fit.ranked and known else scores


def _advantages(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.array(group_advantages([None if math.isnan(r) else r for r in rewards.tolist()]), dtype=np.float64)


def _check_pairs(name: str, n: int, pairs: Sequence[Pair]) -> None:
    for i, j in pairs:
        if i == j or not (0 <= i < n and 0 <= j < n):
            raise ConfigError(f"topology {name!r} paired {i} with {j}: pairs are two different players in 0..{n - 1}")


def _known(what: str, name: str, table: Collection[str]) -> str:
    if name in table:
        return name
    near = difflib.get_close_matches(name, table, n=1, cutoff=0.0)
    raise ConfigError(f"unknown {what} {name!r}: did you mean {near[0]!r}? Known: {', '.join(table)}")
