"""ArenaRL: attempts meet in a tournament, and the ranking is the reward. arXiv 2601.06487v2, sections 1.2 and 1.3.

    for each task: G attempts, the first decoded greedily if the anchor is asked for
    games    = the topology's pairs, each judged                       J(x, i, j)
    rank     = the estimator's order over the games                    Rank_i in {0 .. G-1}
    r_i      = 1 - Rank_i / (G - 1)
    A_i      = (r_i - mean r) / (sd r + eps)

Departures: the default plan is an even comparison graph (2 G games in one round, where seeded elimination takes 2 G - 2 in
1 + log2 G) with a least-squares estimator, whose scores are the rewards as they are: in simulation it orders better
(`benchmarks/topologies.py`), and equal attempts stay equal. The topologies of the paper come with the paper's ranks. Ties share
their rank; an outage removes a game; the greedy member is ranked but not trained on, since the policy that is trained did not
sample it.
"""

from __future__ import annotations

from arenarl.algorithm import AgentAlgorithm, Scores
from arenarl.arena import resolve, run_tournament
from arenarl.config import AgentConfig
from arenarl.errors import ConfigError
from arenarl.judge import Judge
from arenarl.rollout import derive_seed
from arenarl.types import Abstention, EpisodeGroup, Game, Verdict


class ArenaRL(AgentAlgorithm):
    """Trains on each attempt's rank in a tournament of its group."""

    @staticmethod
    async def score_group(group: EpisodeGroup, config: ArenaRLConfig, judge: Judge) -> Scores:
        players = [episode for episode in group.episodes if episode.rankable]
        if len(players) < 2:
            nothing = (None,) * len(group.episodes)
            return Scores(rewards=nothing, advantages=nothing)

        async def compare(i: int, j: int) -> Verdict | Abstention:
            return await judge.compare(players[i], players[j], group.task)

        tournament = await run_tournament(
            config.topology,
            len(players),
            compare,
            estimator=config.estimator,
            seed=derive_seed(config.seed, group.group_id),
        )
        members = [player.member for player in players]
        return Scores(
            rewards=_by_member(members, tournament.rewards.tolist(), len(group.episodes)),
            advantages=_by_member(members, tournament.advantages.tolist(), len(group.episodes)),
            games=tuple(
                Game(i=members[g.i], j=members[g.j], round=g.round, result=g.result, seconds=g.seconds)
                for g in tournament.games
            ),
        )


def _by_member(members: list[int], values: list[float], size: int) -> tuple[float | None, ...]:
    """Values of the players as values of the members; nan (no decided game) and absence are both missing."""
    known = {member: value for member, value in zip(members, values, strict=True) if value == value}
    return tuple(known.get(member) for member in range(size))


class ArenaRLConfig(AgentConfig):
    """Configuration of `ArenaRL`.

    Fields of its own, set by ``arena()``: ``topology`` (a name in `arenarl.arena.TOPOLOGIES`), ``estimator`` (a name in
    `arenarl.estimators`, None for the topology's own), ``greedy_anchor`` (decode member 0 at temperature 0).
    """

    SECTIONS = {**AgentConfig.SECTIONS, "arena": ("topology", "estimator", "greedy_anchor")}  # noqa: RUF012

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class=algo_class or ArenaRL)
        self.topology = "even_graph"
        self.estimator: str | None = None
        self.greedy_anchor = False

    def arena(self, **settings: object) -> ArenaRLConfig:
        """Set the tournament: ``topology``, ``estimator``, ``greedy_anchor``."""
        return self._section("arena", settings)

    def validate(self) -> None:
        super().validate()
        resolve(self.topology, self.estimator)
        if self.group_size < 2:
            raise ConfigError(
                f"group_size={self.group_size} leaves a tournament nobody to compare: set group_size to 2 or more"
            )
        if self.topology == "anchor" and not self.greedy_anchor:
            raise ConfigError("topology='anchor' compares all members with a greedy one: set greedy_anchor=True")


ArenaRL.config_class = ArenaRLConfig
