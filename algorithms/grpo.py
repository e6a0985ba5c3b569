"""GRPO: the pointwise baseline. Group Relative Policy Optimization, DeepSeekMath, arXiv 2402.03300, section 4.1.

    for each task: G attempts, each with a score of its own: its checklist's, or the mean of K marks that a judge gives it
    A_i = (r_i - mean r) / sd r

Departures: the decoupled objective of `arenarl.learner` (asymmetric clip, truncated importance weights), no KL term by default, loss averaged
per episode and then over episodes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from arenarl.algorithm import AgentAlgorithm, Scores, Services
from arenarl.arena import answer_of, together
from arenarl.config import AgentConfig
from arenarl.errors import ConfigError
from arenarl.functional import group_advantages
from arenarl.judge import Judge
from arenarl.types import Abstention, Episode, EpisodeGroup, Mark


class GRPO(AgentAlgorithm):
    """Trains on each attempt's own score, standardised within its group."""

    @staticmethod
    async def score_group(group: EpisodeGroup, config: GRPOConfig, services: Services) -> Scores:
        judge: Any = services.judge

        async def marks_of(episode: Episode) -> tuple[Mark | Abstention, ...]:
            questions = [
                partial(judge.mark, episode, group.task, k) for k in range(config.marks if episode.rankable else 0)
            ]
            return tuple(await together(answer_of(q, Mark, f"marking {episode.episode_id}") for q in questions))

        marks = tuple(await together(map(marks_of, group.episodes))) if config.marks else ()
        rewards = [mean_mark(given) for given in marks] or [e.score if e.rankable else None for e in group.episodes]
        return Scores(rewards=tuple(rewards), advantages=tuple(group_advantages(rewards)), marks=marks)


def mean_mark(given: tuple[Mark | Abstention, ...]) -> float | None:
    """Mean of the marks that were given; None if all were abstentions."""
    scores = [mark.score for mark in given if isinstance(mark, Mark)]
    return sum(scores) / len(scores) if scores else None


class GRPOConfig(AgentConfig):
    """Configuration of `GRPO`.

    A field of its own, set by ``training()``: ``marks``, how often the judge marks each attempt alone; the reward is their mean. 0:
    no judge is asked, the reward is the checklist score.
    """

    SECTIONS = {**AgentConfig.SECTIONS, "training": (*AgentConfig.SECTIONS["training"], "marks")}  # noqa: RUF012

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class=algo_class or GRPO)
        self.marks = 0

    def validate(self) -> None:
        super().validate()
        if not isinstance(self.marks, int) or self.marks < 0:
            raise ConfigError(f"marks={self.marks!r} must be 0 (the checklist score) or a number of marks an attempt")

    def check_judge(self, judge: Judge) -> None:
        if self.marks and not hasattr(judge, "mark"):
            raise ConfigError(
                f"marks={self.marks} asks for a judge of single attempts, and {self.judge} has no method mark(); take another or marks=0"
            )


GRPO.config_class = GRPOConfig
