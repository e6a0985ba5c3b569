"""A tournament is a plan plus an estimator.

The plan (`arenarl.topologies`) says who meets whom, round by round; the games of a round run at the same time, a round
waits for its slowest game, and each question to the judge has a deadline. The estimator (`arenarl.estimators`) turns all
decided games into scores with standard errors. Scores become rewards, by rank or as they are, and rewards advantages.

A tie is a result; an abstention is no game. No information is nan, from the score to the advantage of a player without a
decided game. Total ties give advantages of exactly 0, and so does a total outage.
"""

from __future__ import annotations

import asyncio
import difflib
import math
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from arenarl.errors import ConfigError, JudgeError, boundary
from arenarl.estimators import ESTIMATORS, Estimator, Fit, Rewards, ranks, win_share
from arenarl.functional import group_advantages, rank_rewards
from arenarl.topologies import PAPER_TOPOLOGIES, TOPOLOGIES, Pair, Plan, Topology
from arenarl.types import Abstention, Game, Mark, Verdict

Answer = Verdict | Abstention
Compare = Callable[[int, int], Awaitable[Answer]]
Array = NDArray[np.float64]
T = TypeVar("T")
A = TypeVar("A", Verdict, Mark)
ANSWER_TIMEOUT_S = 600.0


@dataclass(frozen=True, eq=False)
class TournamentResult:
    """What was played and what it is worth.

    Attributes:
        games: in the order of the plan, abstained ones included.
        scores: [n] the estimator's, higher is better.
        stderr: [n] standard errors of the scores, in the same unit; nan also where the estimator has none.
        ranks: [n] 0 is best; ties share the mean of their places.
        rewards: [n] 1 - rank / (N - 1) over the N players with a rank, or the score.
        advantages: [n] rewards less their mean, divided by their standard deviation if asked for.
        orders: how often each pair was asked: 1, or 2 for both orders.
        rounds: number of waits one after another.
        abstentions: number of games without a verdict.

    In the arrays nan means no information: no game of that player was decided. Where no game was, all advantages are 0.
    """

    games: tuple[Game, ...]
    scores: NDArray[np.float64]
    stderr: NDArray[np.float64]
    ranks: NDArray[np.float64]
    rewards: NDArray[np.float64]
    advantages: NDArray[np.float64]
    topology: str
    estimator: str
    orders: int
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
    orders: int | None = None,
    rewards: Rewards | None = None,
    standardise: bool = True,
    max_concurrency: int | None = None,
    game_timeout: float = ANSWER_TIMEOUT_S,
) -> TournamentResult:
    """Play a tournament between players 0..n-1 and estimate what each is worth.

    Args:
        topology: a name in ``TOPOLOGIES`` or a plan of your own.
        compare: judges i (side a) against j (side b). An outage is an ``Abstention``, as is a TimeoutError.
        estimator: a name in ``ESTIMATORS`` or one of your own; None takes "paper" for the paper's topologies and
            "margin_ls" for the others.
        orders: 2 asks each pair in both orders and adds the scores, so that a judge's liking for a side cancels:
            (s_i, s_j) = J(i, j) + J(j, i) (ArenaRL, arXiv 2601.06487, arena judge). 1 asks once. None takes 2 for the
            paper's topologies and 1 for the others.
        rewards: "rank" or "score"; None takes "rank" for "paper", "score" for estimators whose distances have a meaning.
        standardise: divide advantages by the group's standard deviation. False keeps the unit of the rewards, so that with
            shrunk scores a group of equals weighs little.
        max_concurrency: questions to the judge in flight, None for a whole round at once.
        game_timeout: seconds that one question may take before it counts as abstained.

    Raises:
        ConfigError: n < 2, an unknown name or option, or a plan that pairs nonsense.
        JudgeError: ``compare`` raised, or returned something that is no verdict; the message names the game. An
            ``ArenaError`` of another kind passes unchanged.
    """
    if n < 2:
        raise ConfigError(f"group_size={n} leaves a tournament nobody to compare: set group_size to 2 or more")
    if max_concurrency is not None and max_concurrency < 1:
        raise ConfigError(f"max_concurrency={max_concurrency} would never start a game: set 1 or more, or None")
    if rewards not in ("rank", "score", None):
        raise ConfigError(f"rewards={rewards!r} is unknown: take 'rank', 'score', or None for the estimator's own")
    name, topology, estimator, orders = resolve(topology, estimator, orders)
    plan = topology(n, np.random.default_rng(seed), orders)
    games, rounds, own = await _play_out(plan, name, n, orders, _questions(compare, max_concurrency, game_timeout))
    decided = [game for game in games if game.margin is not None]
    scores, stderr = (estimator.fit or own)(n, decided)
    places, worth, advantages = rate(scores, rewards or estimator.rewards, standardise)
    return TournamentResult(
        games=tuple(games), scores=scores, stderr=stderr, ranks=places, rewards=worth, advantages=advantages, topology=name,
        estimator=estimator.name, orders=orders, seed=seed, rounds=rounds, abstentions=len(games) - len(decided),
    )  # fmt: skip


async def _play_out(plan: Plan, name: str, n: int, orders: int, ask: Compare) -> tuple[list[Game], int, Fit]:
    """All games of a plan, its number of rounds, and its own ranking."""
    games: list[Game] = []
    rounds = 0
    try:
        pairs = next(plan)
        while True:
            _check_pairs(name, n, pairs)
            played = await together(_play(i, j, rounds, orders, ask) for i, j in pairs)
            games += played
            rounds += 1
            pairs = plan.send(played)
    except StopIteration as end:
        return games, rounds, end.value or win_share


def resolve(
    topology: str | Topology, estimator: str | Estimator | None = None, orders: int | None = None
) -> tuple[str, Topology, Estimator, int]:
    """Name, plan, estimator and orders that ``run_tournament`` would use; checks a configuration before a game is paid.

    Raises:
        ConfigError: an unknown name, with the nearest one, or orders other than 1, 2 and None.
    """
    if isinstance(topology, str):
        name, plan = topology, TOPOLOGIES[_known("topology", topology, TOPOLOGIES)]
    else:
        name, plan = getattr(topology, "__name__", type(topology).__name__), topology
    of_the_paper = isinstance(topology, str) and topology in PAPER_TOPOLOGIES
    own_estimator, own_orders = ("paper", 2) if of_the_paper else ("margin_ls", 1)
    if not isinstance(estimator, Estimator):
        estimator = ESTIMATORS[_known("estimator", estimator or own_estimator, ESTIMATORS)]
    if orders not in (1, 2, None):
        raise ConfigError(
            f"orders={orders!r} is unknown: ask each pair in 1 order or in 2, None for the topology's own"
        )
    return name, plan, estimator, orders or own_orders


def _questions(compare: Compare, max_concurrency: int | None, limit: float) -> Compare:
    """``compare`` with a deadline, a bound on what is in flight, and a check of what comes back."""
    free = asyncio.Semaphore(max_concurrency or sys.maxsize)

    async def ask(i: int, j: int) -> Answer:
        async with free:
            return await answer_of(lambda: compare(i, j), Verdict, f"comparing {i} with {j}", limit)

    return ask


async def answer_of(
    question: Callable[[], Awaitable[A | Abstention]], kind: type[A], what: str, limit: float = ANSWER_TIMEOUT_S
) -> A | Abstention:
    """What a judge says to one question; an abstention if it takes longer than ``limit`` seconds.

    Raises:
        JudgeError: it raised, or its answer is neither of the kind asked for, with finite scores, nor an abstention.
    """
    with boundary(JudgeError, what):
        try:
            async with asyncio.timeout(limit):
                answer = await question()
        except TimeoutError as error:
            return Abstention(reason=f"timeout: {str(error) or f'no verdict after {limit:g} s'}")
        if not isinstance(answer, kind | Abstention):
            raise JudgeError(f"{what}: got {answer!r}, which is neither a {kind.__name__} nor an Abstention")
        scores = [value for name, value in vars(answer).items() if name.startswith("score")]
        if not all(map(math.isfinite, scores)):
            raise JudgeError(f"{what}: {answer} is not finite; an outage is an Abstention")
        return answer


async def _play(i: int, j: int, number: int, orders: int, ask: Compare) -> Game:
    start = time.perf_counter()
    halves: tuple[Answer, ...] = ()
    if orders == 1:
        result = await ask(i, j)
    else:
        first, second = halves = tuple(await together([ask(i, j), ask(j, i)]))
        result = _sum(first, second)
    return Game(i=i, j=j, round=number, result=result, halves=halves, seconds=time.perf_counter() - start)


def _sum(first: Answer, second: Answer) -> Answer:
    """The answers to a pair in both orders as one, in the order of the first; an abstention if either is one."""
    summed: Answer
    if isinstance(first, Abstention):
        summed = first
    elif isinstance(second, Abstention):
        summed = second
    else:
        summed = Verdict(
            score_a=first.score_a + second.score_b,
            score_b=first.score_b + second.score_a,
            dimensions={
                name: (a + second.dimensions[name][1], b + second.dimensions[name][0])
                for name, (a, b) in first.dimensions.items()
                if name in second.dimensions
            },
            judge=first.judge,
        )
    return replace(
        summed,
        raw="",  # each half keeps its own
        calls=first.calls + second.calls,
        prompt_tokens=first.prompt_tokens + second.prompt_tokens,
        completion_tokens=first.completion_tokens + second.completion_tokens,
        seconds=max(first.seconds, second.seconds),
    )


async def together(awaitables: Iterable[Awaitable[T]]) -> list[T]:
    """Results of all at once, in order. The first failure cancels the rest and is raised as it is."""

    async def one(awaitable: Awaitable[T]) -> T:
        return await awaitable

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(awaitable)) for awaitable in awaitables]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


def rate(scores: Array, rewards: Rewards, standardise: bool) -> tuple[Array, Array, Array]:
    """Ranks, rewards and advantages [n] of scores [n], as in `TournamentResult`; nan is a player without information.

    Source of 1 - rank / (N - 1) and of the advantage: ArenaRL (arXiv 2601.06487), rank to advantage.
    """
    places = ranks(scores)
    known = int(np.isfinite(places).sum())
    worth = rank_rewards(places, max(known, 2)) if rewards == "rank" else scores
    return places, worth, _advantages(worth, standardise)


def _advantages(rewards: Array, standardise: bool) -> Array:
    known = np.isfinite(rewards)
    if not known.any():
        return np.zeros(len(rewards))
    advantages = np.array(group_advantages([None if math.isnan(r) else r for r in rewards.tolist()]), dtype=np.float64)
    if standardise or not advantages[known].any():
        return advantages
    return rewards - rewards[known].mean()


def _check_pairs(name: str, n: int, pairs: Sequence[Pair]) -> None:
    for i, j in pairs:
        if i == j or not (0 <= i < n and 0 <= j < n):
            raise ConfigError(f"topology {name!r} paired {i} with {j}: pairs are two different players in 0..{n - 1}")


def _known(what: str, name: str, table: Collection[str]) -> str:
    if name in table:
        return name
    near = difflib.get_close_matches(name, table, n=1, cutoff=0.0)
    raise ConfigError(f"unknown {what} {name!r}: did you mean {near[0]!r}? Known: {', '.join(table)}")
