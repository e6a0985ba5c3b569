"""Topologies: who meets whom.

A plan is a generator: it yields a round of pairs, is sent the games of that round, and yields the next. It may look only
at (n, rng, orders) and at the games, so a tournament is repeatable from (topology, n, seed) and a repeatable judge. At
its end it returns the ranking that goes with it (the estimator ``paper``), or None for the share of games won.

The rules that hold for every plan:
    * A bye is no game, and neither is an abstention. Where a bracket game is tied or abstained somebody must go on: the
      better seed does, with no credit, and a seed is information (anchor margins) or, failing that, the seeded shuffle.
      Never the index.
    * With one order the sides are shared out evenly, so that a judge's liking for a side favours nobody: a player that was
      on side a less often takes it. Only the anchor keeps side a, where the liking shifts all others alike.

Source of the five named in `PAPER_TOPOLOGIES`: ArenaRL (arXiv 2601.06487), section on topologies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from arenarl.estimators import Fit, bradley_terry_posterior, by_depth, to_anchor, win_share
from arenarl.types import Game

Pair = tuple[int, int]
Plan = Generator[list[Pair], list[Game], Fit | None]
Topology = Callable[[int, np.random.Generator, int], Plan]
Slot = int | None  # a place in a bracket; None is a bye
WAITS = 4
"""Rounds of `info_gain`: more would be better informed, and longer."""


def anchor(n: int, rng: np.random.Generator, orders: int) -> Plan:
    """Player 0, the greedy attempt, meets everybody else: n - 1 games in one round."""
    yield [(0, k) for k in range(1, n)]
    return to_anchor


def round_robin(n: int, rng: np.random.Generator, orders: int) -> Plan:
    """Everybody meets everybody: n (n - 1) / 2 games in one round.

    The sides alternate with the distance of the two, so that everybody is on each side equally often (for n even, but
    for one game).
    """
    yield [(i, j) if (j - i) % 2 else (j, i) for i, j in combinations(range(n), 2)]
    return win_share


def swiss(n: int, rng: np.random.Generator, orders: int) -> Plan:
    """ceil(log2 n) rounds in which players of like standing meet, nobody twice.

    Standing is wins minus losses, so that a tie, a bye and an abstained game all leave it alone; equal standings are in
    the order of a seeded shuffle. With n odd the bye is one more player at the bottom, whom nobody meets twice either.
    """
    bye = [n] if n % 2 else []
    standing, lead = np.zeros(n), np.zeros(n)
    met: set[frozenset[int]] = set()
    shuffle = rng.permutation(n).tolist()
    for _ in range(math.ceil(math.log2(n))):
        pairs = _pair_neighbours(sorted(shuffle, key=lambda k: -standing[k]) + bye, met)
        met |= {frozenset(pair) for pair in pairs}
        for game in (yield _take_sides([pair for pair in pairs if n not in pair], lead, rng)):
            result = np.sign(game.margin or 0.0)
            standing[game.i] += result
            standing[game.j] -= result
    return win_share


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


def single_elimination(n: int, rng: np.random.Generator, orders: int) -> Plan:
    """Anchor games seed a knock-out: 2n - 2 games in 1 + ceil(log2 n) rounds. Ranked by the level that each reached.

    Seeds follow the margin to player 0, who stands at 0; a player whose seeding game is missing gets the median, and
    equal margins are in the order of a seeded shuffle. With n below a power of two the best seeds have the byes.
    """
    seeding = yield [(0, k) for k in range(1, n)]
    standing = {0: 0.0} | {game.j: -m for game in seeding if (m := game.margin) is not None}
    middle = float(np.median(list(standing.values())))
    bracket = _Bracket(sorted(rng.permutation(n).tolist(), key=lambda k: -standing.get(k, middle)), rng)
    slots, prize = bracket.slots(), 1
    while len(slots) > 1:
        slots, _ = yield from bracket.knock_out(slots, [prize] * (len(slots) // 2))
        prize += 1
    return by_depth(bracket.levels.tolist())


def double_elimination(n: int, rng: np.random.Generator, orders: int) -> Plan:
    """Two defeats put a player out: 2n - 2 games, random start, one final. Ranked by the level that each reached.

    A level is the round of the lower bracket in which the next defeat, or two, would end. The upper bracket's round k
    runs beside the lower bracket's round 2k - 2; its losers enter the lower bracket's round 2k - 1, in reverse order to
    put rematches off.
    """
    bracket = _Bracket(rng.permutation(n).tolist(), rng)
    slots = bracket.slots()
    upper, lower = yield from bracket.knock_out(slots, [1] * (len(slots) // 2))
    k = 1
    while len(upper) > 1:
        half = len(upper) // 2
        won, lost = yield from bracket.knock_out(upper + lower, [2 * k + 1] * half + [2 * k - 1] * half)
        upper, dropped, lower = won[:half], lost[:half], won[half:]
        meetings = [slot for pair in zip(lower, reversed(dropped), strict=True) for slot in pair]
        lower, _ = yield from bracket.knock_out(meetings, [2 * k] * half)
        k += 1
    yield from bracket.knock_out(upper + lower, [2 * k])
    return by_depth(bracket.levels.tolist())


@dataclass
class _Bracket:
    """Players in the order of their seeds, and the levels [n] that they have reached."""

    seeds: list[int]
    rng: np.random.Generator

    def __post_init__(self) -> None:
        self.levels = np.zeros(len(self.seeds))
        self.lead = np.zeros(len(self.seeds))

    def slots(self) -> list[Slot]:
        """Places of a knock-out in which the best seeds meet last (1-8, 4-5, 2-7, 3-6), byes where there is no such seed."""
        order = [0]
        while len(order) < len(self.seeds):
            order = [place for k in order for place in (k, 2 * len(order) - 1 - k)]
        return [self.seeds[k] if k < len(self.seeds) else None for k in order]

    def knock_out(
        self, slots: Sequence[Slot], prizes: Sequence[int]
    ) -> Generator[list[Pair], list[Game], tuple[list[Slot], list[Slot]]]:
        """Play neighbouring slots off; returns winners and losers, slot by slot. A win in match m lifts to ``prizes[m]``.

        Only a game that was won lifts anybody: a bye, a tie and an abstention move a player on at the level it has.
        """
        matches = list(zip(slots[::2], slots[1::2], strict=True))
        pairs = [(a, b) for a, b in matches if a is not None and b is not None]
        games = iter((yield _take_sides(pairs, self.lead, self.rng)) if pairs else [])
        winners: list[Slot] = []
        losers: list[Slot] = []
        for (a, b), prize in zip(matches, prizes, strict=True):
            if a is None or b is None:
                winners.append(b if a is None else a)
                losers.append(None)
                continue
            game = next(games)
            result = game.margin
            better_seed = self.seeds.index(game.i) < self.seeds.index(game.j)
            winner, loser = (game.i, game.j) if (result > 0 if result else better_seed) else (game.j, game.i)
            if result:
                self.levels[winner] = max(self.levels[winner], prize)
            winners.append(winner)
            losers.append(loser)
        return winners, losers


def even_graph(n: int, rng: np.random.Generator, orders: int) -> Plan:
    """A random graph in one round in which everybody plays as often as everybody else, or one game less.

    It has the price of an elimination: 2n - 2 games in both orders, 4n - 4 (or all pairs, if fewer) in one. The graph is
    a choice of rounds from a schedule in which everybody meets everybody (the circle method), that connects the players;
    they are seated in it at random.
    """
    ring = n - 1 + n % 2  # an odd number of rounds, n // 2 games each
    games = _price(n, orders)
    rounds = rng.permutation(ring)
    while math.gcd(ring, *(rounds[: games // (n // 2)] - rounds[0]).tolist()) > 1:  # else it falls apart
        rounds = rng.permutation(ring)
    schedule = [pair for r in rounds.tolist() for pair in _circle(n, ring, r)]
    player = rng.permutation(n).tolist()
    yield [(player[i], player[j]) for i, j in _share_sides(n, schedule[:games])]
    return win_share


def _price(n: int, orders: int) -> int:
    """Games that the calls of an elimination in both orders pay for, 4n - 4 in all."""
    return min((4 * n - 4) // orders, n * (n - 1) // 2)


def _circle(n: int, ring: int, r: int) -> list[Pair]:
    """Round r of the circle method: seats of the ring whose sum is 2r meet. Seat r meets the last player, or has a bye."""
    pairs = [((r + d) % ring, (r - d) % ring) for d in range(1, ring // 2 + 1)]
    return pairs if n % 2 else [(r, n - 1), *pairs]


def _share_sides(n: int, pairs: Sequence[Pair]) -> list[Pair]:
    """Turn pairs, all different, so that each player is on both sides equally often, but for one game if it plays an odd
    number: walk closed trails through them (Euler), each game with the one that is left on side a."""
    links: list[set[int]] = [set() for _ in range(n + 1)]
    for i, j in pairs:
        links[i].add(j)
        links[j].add(i)
    for k in [k for k in range(n) if len(links[k]) % 2]:  # the place n makes all numbers even
        links[k].add(n)
        links[n].add(k)
    trails = []
    for here in range(n + 1):
        while links[here]:
            there = min(links[here])
            links[here].remove(there)
            links[there].remove(here)
            trails.append((here, there))
            here = there
    return [pair for pair in trails if n not in pair]


def info_gain(n: int, rng: np.random.Generator, orders: int) -> Plan:
    """As many games as `even_graph`, in four rounds, each of the pairs that are expected to tell most; no pair twice.

    A pair tells p (1 - p) Var(x_i - x_j) under the Bradley-Terry posterior of the games so far, where p is the probability
    that i wins. Pairs are taken one after another, each as if those before it in the round had been played, which spreads
    a round over the players. The order of equal ones is a seeded shuffle. If all pairs are paid for there is one round.
    """
    player = rng.permutation(n).tolist()
    seat = {k: place for place, k in enumerate(player)}
    i, j = np.triu_indices(n, 1)
    open_pairs, games_left, lead = np.ones(len(i), dtype=bool), _price(n, orders), np.zeros(n)
    decided: list[Game] = []  # by seat, so that nothing depends on a player's index
    for wait in range(WAITS if games_left < len(i) else 1, 0, -1):
        strengths, covariance = bradley_terry_posterior(n, decided)
        win = 1 / (1 + np.exp(strengths[j] - strengths[i]))
        pairs = []
        for _ in range(math.ceil(games_left / wait)):
            spread = covariance[i, i] + covariance[j, j] - 2 * covariance[i, j]
            best = int(np.argmax(np.where(open_pairs, win * (1 - win) * spread, -1.0)))
            open_pairs[best] = False
            a, b, told = i[best], j[best], win[best] * (1 - win[best])
            column = covariance[a] - covariance[b]
            covariance = covariance - np.outer(column, column) * told / (1 + told * spread[best])
            pairs.append((player[a], player[b]))
        games_left -= len(pairs)
        games = yield _take_sides(pairs, lead, rng)
        decided += [replace(g, i=seat[g.i], j=seat[g.j]) for g in games if g.margin is not None]
    return win_share


def _take_sides(pairs: Sequence[Pair], lead: NDArray[np.float64], rng: np.random.Generator) -> list[Pair]:
    """Put the one of each pair on side a that has been there less often, a coin if neither; ``lead`` [n] keeps count."""
    seated = []
    for i, j in pairs:
        if lead[i] > lead[j] or (lead[i] == lead[j] and rng.random() < 0.5):
            i, j = j, i
        lead[i] += 1
        lead[j] -= 1
        seated.append((i, j))
    return seated


PAPER_TOPOLOGIES: dict[str, Topology] = {
    "anchor": anchor,
    "round_robin": round_robin,
    "swiss": swiss,
    "double_elimination": double_elimination,
    "single_elimination": single_elimination,
}
"""Played as in the paper unless told otherwise: both orders, and the ranking that goes with each."""

TOPOLOGIES: dict[str, Topology] = PAPER_TOPOLOGIES | {"even_graph": even_graph, "info_gain": info_gain}
"""All of them. The two that are not the paper's are meant for one order and margins."""
