"""ArenaRL: attempts meet in a tournament, and the ranking is the reward. arXiv 2601.06487v2, sections 1.2 and 1.3.

    for each task: G attempts, the first decoded greedily if the anchor is asked for
    games    = the topology's pairs, each judged                       J(x, i, j), in one order or both
    rank     = the estimator's order over the games                    Rank_i in {0 .. G-1}
    r_i      = 1 - Rank_i / (G - 1)
    A_i      = (r_i - mean r) / (sd r + eps)

The paper's setting is one word, ``arena(topology="single_elimination")``: its greedy anchor, both orders and ranks come with it.

Departures: the default plan is an even comparison graph, each pair asked once and all at the same time, with a least-squares estimator
whose scores are the rewards as they are: at equal cost it orders better than every plan of the paper (`docs/arena.md`), and equal
attempts stay equal. Ties share their rank; an outage removes a game; attempts without an answer are last without a game
(`arenarl.gates`); the greedy member is ranked but not trained on, since the policy that is trained did not sample it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from arenarl.algorithm import AgentAlgorithm, Scores, Services
from arenarl.arena import rate, resolve, run_tournament
from arenarl.config import AgentConfig
from arenarl.errors import ConfigError
from arenarl.gates import DEFAULT_GATES, below, check_gates, sort_out
from arenarl.player import derive_seed
from arenarl.topologies import Topology
from arenarl.types import Abstention, EpisodeGroup, Standings, Verdict

GREEDY = ("anchor", "single_elimination")
"""Topologies in which everybody meets member 0, which the paper decodes greedily."""


class ArenaRL(AgentAlgorithm):
    """Trains on each attempt's rank in a tournament of its group."""

    rewards_compare = False

    @staticmethod
    async def score_group(group: EpisodeGroup, config: ArenaRLConfig, services: Services) -> Scores:
        topology, _, estimator, orders = resolve(config.topology, config.estimator, config.orders)
        seed, field = derive_seed(config.seed, group.group_id), sort_out(group.episodes, config.gates)
        players = field.players

        async def compare(i: int, j: int) -> Verdict | Abstention:
            return await services.judge.compare(group.episodes[players[i]], group.episodes[players[j]], group.task)

        if len(players) > 1:
            played = await run_tournament(
                config.topology, len(players), compare, estimator=estimator, seed=seed, orders=orders
            )
            scores, stderr, games = played.scores, played.stderr, played.games
        else:  # nobody to meet, but above those placed last
            scores, stderr, games = np.zeros(len(players)), np.full(len(players), np.nan), ()
        scores = np.append(scores, [below(scores)] * len(field.last))
        stderr = np.append(stderr, [math.nan] * len(field.last))
        ranks, rewards, advantages = rate(scores, config.rewards or estimator.rewards, config.standardise)

        def by_member(values: NDArray[np.float64]) -> tuple[float | None, ...]:
            """None: not ranked, no information, or nobody to compare with."""
            ranked = zip(players + field.last, values.tolist(), strict=True)
            known = {member: value for member, value in ranked if len(values) > 1 and not math.isnan(value)}
            return tuple(known.get(member) for member in range(len(group.episodes)))

        return Scores(
            rewards=by_member(rewards),
            advantages=by_member(advantages),
            games=tuple(replace(game, i=players[game.i], j=players[game.j]) for game in games),
            standings=Standings(
                topology=topology, estimator=estimator.name, orders=orders, seed=seed, scores=by_member(scores),
                stderr=by_member(stderr), ranks=by_member(ranks), gated=field.gated,
            ),
        )  # fmt: skip


class ArenaRLConfig(AgentConfig):
    """Configuration of `ArenaRL`.

    Fields of its own, set by ``arena()``:
        topology: a name in `arenarl.topologies.TOPOLOGIES`, or a plan of your own.
        estimator: a name in `arenarl.estimators.ESTIMATORS`, None for the topology's own.
        orders: 1 or 2, how often each pair is asked; None for the topology's own.
        rewards: "rank" (1 - rank / (N - 1)) or "score" (the estimator's), None for the estimator's own.
        standardise: divide advantages by the group's standard deviation. With False and scores, a group of near equals weighs little.
        gates: treatment of attempts by what is wrong with them, ``{"no_answer": "last" | "out" | "play"}``; see `arenarl.gates`.
        greedy_anchor: decode member 0 at temperature 0; None for the topologies in which everybody meets it.
    """

    SECTIONS = {  # noqa: RUF012
        **AgentConfig.SECTIONS,
        "arena": ("topology", "estimator", "orders", "rewards", "standardise", "gates", "greedy_anchor"),
    }

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class=algo_class or ArenaRL)
        self.topology: str | Topology = "even_graph"
        self.estimator: str | None = None
        self.orders: int | None = None
        self.rewards: str | None = None
        self.standardise = True
        self.gates: Mapping[str, str] = dict(DEFAULT_GATES)
        self.greedy_anchor: bool | None = None

    def arena(self, **settings: object) -> ArenaRLConfig:
        """Set the tournament: ``topology``, ``estimator``, ``orders``, ``rewards``, ``standardise``, ``gates``, ``greedy_anchor``."""
        return self._section("arena", settings)

    def validate(self) -> None:
        super().validate()
        resolve(self.topology, self.estimator, self.orders)
        self.gates = check_gates(self.gates)
        if self.rewards not in ("rank", "score", None):
            raise ConfigError(
                f"rewards={self.rewards!r} is unknown: take 'rank', 'score', or None for the estimator's own"
            )
        if self.group_size < 2:
            raise ConfigError(
                f"group_size={self.group_size} leaves a tournament nobody to compare: set group_size to 2 or more"
            )
        if self.topology == "anchor" and self.greedy_first is False:
            raise ConfigError("topology='anchor' compares all members with a greedy one: leave greedy_anchor=None")

    @property
    def greedy_first(self) -> bool:
        return self.topology in GREEDY if self.greedy_anchor is None else self.greedy_anchor


ArenaRL.config_class = ArenaRLConfig
