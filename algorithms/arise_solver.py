"""ARISE Solver: each attempt is paid by the share of its rubric that it meets. ARISE-RL, arXiv 2609.01058, the Solver.

    s_i = share of the rubric items and expected tools that attempt i meets
    r_i = 0.8 s_i + 0.2 [s_i = 1]
    A_i = (r_i - mean r) / sd r

Departures: weights and gates of items count, what nobody could judge carries no weight, expected tools are matched one to one, and
superfluous calls may have a price. The baseline is the group's own, which the released code lacks.
"""

from __future__ import annotations

from arenarl.algorithm import AgentAlgorithm, Scores, Services
from arenarl.config import AgentConfig
from arenarl.errors import ConfigError
from arenarl.expected_tools import match_tools, tools_from_data
from arenarl.functional import group_advantages, solver_reward
from arenarl.types import Episode, EpisodeGroup


class ARISESolver(AgentAlgorithm):
    """Trains on the share of the rubric that each attempt meets, with a bonus for all of it."""

    @staticmethod
    async def score_group(group: EpisodeGroup, config: ARISESolverConfig, services: Services) -> Scores:
        rewards = [episode_reward(e, bonus=config.bonus, price=config.superfluous_price) for e in group.episodes]
        return Scores(rewards=tuple(rewards), advantages=tuple(group_advantages(rewards)))


def episode_reward(episode: Episode, *, bonus: float, price: float = 0.0) -> float | None:
    """`solver_reward` of the checklist score, less ``price`` for each superfluous call, not below 0; None without a score.

    Of a task that expects no tools nobody can say which calls are superfluous: they are free.
    """
    if not episode.rankable or episode.score is None:
        return None
    reward = solver_reward(episode.score, 1.0, bonus=bonus)
    expected = tools_from_data(episode.task.data, task_id=episode.task.task_id) if price else ()
    if reward is None or not expected:
        return reward
    return max(0.0, reward - price * match_tools(expected, episode.trajectory.events).superfluous)


def check_bonus(bonus: float) -> None:
    """Raises ConfigError."""
    if not 0 <= bonus < 1:
        raise ConfigError(f"bonus={bonus!r} must be a share of the reward, from 0 to below 1")


class ARISESolverConfig(AgentConfig):
    """Configuration of `ARISESolver`; group size, temperature and turns are the paper's.

    Fields of its own, set by ``training()``:
        bonus: share of the reward that only a full score earns, in [0, 1).
        superfluous_price: what each successful call costs that none of the task's expected tools asks for.
    """

    SECTIONS = {  # noqa: RUF012
        **AgentConfig.SECTIONS,
        "training": (*AgentConfig.SECTIONS["training"], "bonus", "superfluous_price"),
    }

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class=algo_class or ARISESolver)
        self.group_size = 16
        self.temperature = 0.8
        self.max_turns = 41  # 40 rounds of tools and the answer
        self.bonus = 0.2
        self.superfluous_price = 0.0

    def validate(self) -> None:
        super().validate()
        check_bonus(self.bonus)
        if not self.superfluous_price >= 0:
            raise ConfigError(f"superfluous_price={self.superfluous_price!r} must be 0 (free) or more")


ARISESolver.config_class = ARISESolverConfig
