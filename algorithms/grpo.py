"""GRPO: the pointwise baseline. Group Relative Policy Optimization, DeepSeekMath, arXiv 2402.03300, section 4.1.

    for each task: G attempts, each with a score of its own
    A_i = (r_i - mean r) / sd r

Departures: the decoupled objective of `arenarl.learner` (asymmetric clip, truncated importance weights), no KL term by default, loss averaged
per episode and then over episodes.
"""

from __future__ import annotations

from arenarl.algorithm import AgentAlgorithm, Scores
from arenarl.config import AgentConfig
from arenarl.functional import group_advantages
from arenarl.judge import Judge
from arenarl.types import EpisodeGroup


class GRPO(AgentAlgorithm):
    """Trains on each attempt's checklist score, standardised within its group."""

    @staticmethod
    async def score_group(group: EpisodeGroup, config: AgentConfig, judge: Judge) -> Scores:
        rewards = [episode.score if episode.rankable else None for episode in group.episodes]
        return Scores(rewards=tuple(rewards), advantages=tuple(group_advantages(rewards)))


class GRPOConfig(AgentConfig):
    """Configuration of `GRPO`; it has no field of its own."""

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class=algo_class or GRPO)


GRPO.config_class = GRPOConfig
