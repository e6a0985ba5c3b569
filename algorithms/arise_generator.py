"""ARISE Generator: attempts explore an environment and write tasks, paid by how much a solver can learn from them.

ARISE-RL, arXiv 2609.01058, the Generator. For each attempt that wrote a task:

    R_tool = 1 if a tool was observed, each item quotes an observation, each expected tool was really called
    R_fmt  = 1 if the task can be read
    c      = runs of the solver, of K, that meet all of it: r >= gamma
    R_diff = 2 max(0, 1 - |c - K/2| / (K/2))
    R_G    = R_tool R_fmt (1 + R_diff)

Departures: failed calls are no observations, near duplicates earn nothing, a task that the solver could not be asked about has no
reward instead of the lowest one, and the difficulty may be the expectation under a Beta posterior that also counts earlier runs of tasks
of the same signature.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import ray

from arenarl.algorithm import AgentAlgorithm, Scores, Services
from arenarl.algorithms.arise_solver import check_bonus, episode_reward
from arenarl.arena import together
from arenarl.config import AgentConfig
from arenarl.errors import ConfigError
from arenarl.functional import difficulty_posterior, difficulty_reward, generator_reward, group_advantages
from arenarl.generated import Refused, draft_task, read_draft, ungrounded
from arenarl.novelty import Novelty, signature
from arenarl.player import derive_seed
from arenarl.rllib_compat import num_remote_runners
from arenarl.scoring import Executor
from arenarl.task_pool import PoolTask
from arenarl.taskset import load_object
from arenarl.types import Episode, EpisodeGroup, Generated

if TYPE_CHECKING:
    from torch import Tensor

DIFFICULTIES = ("count", "posterior", "none")


class ARISEGenerator(AgentAlgorithm):
    """Trains a policy to write tasks that its solver meets about half of the time."""

    @staticmethod
    async def score_group(group: EpisodeGroup, config: ARISEGeneratorConfig, services: Services) -> Scores:
        seen = services.kept.get("novelty", Novelty(config.duplicate_similarity)).copy()
        written = [examine(e, config, services, seen) for e in group.episodes]
        services.kept["novelty"] = seen
        solved = await together(solve(g, config, services) for g in written)
        rewards = [reward_of(g, config, services) for g in solved]
        remember(solved, services)
        return Scores(rewards=tuple(rewards), advantages=tuple(group_advantages(rewards)), generated=tuple(solved))

    def follow(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Give the executors the weights of a solver in training.

        Raises:
            ConfigError: there is none whose weights can be set.
        """
        payload = ray.put(weights) if num_remote_runners(self) else weights
        self._call("set_solver_weights", payload, version, self.config.push_timeout_s)

    def write_tasks(self, count: int, *, cycle: int, seed: int) -> list[PoolTask]:
        """One attempt at each of ``count`` seeds with the current weights: the valid tasks, with what the solver made of them.

        Each worker leaves near duplicates out, of tasks of the same call: those of training went into no pool.
        """
        seeds = self.taskset.tasks("train", count, seed=seed)
        created = datetime.now(UTC).isoformat(timespec="seconds")
        groups = self._play(seeds, f"pool-{cycle}-{seed}", seed, scored=True)
        return [
            PoolTask(
                task=g.task, seed_id=group.task.task_id, episode_id=episode.episode_id,
                observations=tuple(event.result.text for event in episode.trajectory.events),
                generator_version=self.learner_group.version, cycle=cycle, successes=g.successes, runs=g.runs, created=created,
            )
            for group in groups
            for episode, g in zip(group.episodes, group.generated, strict=True)
            if g.task and not g.refusal
        ]  # fmt: skip


def examine(episode: Episode, config: ARISEGeneratorConfig, services: Services, seen: Novelty) -> Generated:
    """The task that an attempt wrote, or why it is none. A task that passes is among the ``seen`` ones from then on."""
    if not episode.rankable:
        return Generated(outage=f"episode: {episode.detail}")
    draft = read_draft(episode.trajectory.answer)
    if isinstance(draft, Refused):
        return Generated(refusal=str(draft))
    task = draft_task(draft, seed=episode.task, task_id=f"{episode.task.task_id}/{episode.episode_id}")
    if config.grounding and (refused := ungrounded(draft, episode.trajectory.events)):
        return Generated(task=task, refusal=str(refused))
    refuse = getattr(services.taskset, "refuse", None)
    if refuse and (reason := refuse(task, episode.task)):
        return Generated(task=task, refusal=f"unfit: {reason}")
    if seen.is_duplicate(task.prompt):
        return Generated(task=task, refusal=f"duplicate: of {seen.nearest(task.prompt)}")
    seen.add(task.prompt)
    return Generated(task=task)


async def solve(written: Generated, config: ARISEGeneratorConfig, services: Services) -> Generated:
    """Count the solver runs that meet all of a task. With fewer than half of the runs the difficulty is missing."""
    if written.task is None or written.refusal or written.outage or services.executor is None:
        return written
    attempts = await services.executor.attempt(
        written.task, config.solver_runs, seed=derive_seed(config.seed, written.task.task_id)
    )
    rewards = [episode_reward(e, bonus=config.bonus) for e in attempts.episodes]
    known = [reward for reward in rewards if reward is not None]
    if 2 * len(known) < config.solver_runs:
        return replace(written, runs=len(known), outage=attempts.outage or "solver: too few runs ended with a verdict")
    return replace(written, runs=len(known), successes=sum(reward >= config.gamma for reward in known))


def reward_of(written: Generated, config: ARISEGeneratorConfig, services: Services) -> float | None:
    """R_G; None where the attempt or the difficulty is missing."""
    if written.refusal:
        return generator_reward(False, False, None)
    if written.task is None:
        return None
    if config.difficulty == "none":
        return generator_reward(True, True, 0.0)
    if written.successes is None:
        return None
    if config.difficulty == "count":
        difficulty = difficulty_reward(written.successes, written.runs)
    else:
        successes, runs = services.kept.get("solved", {}).get(signature(written.task), (0, 0))
        share = min(1.0, config.solver_runs / max(1, runs))  # earlier runs of such tasks count as K at most
        prior = (1.0 + share * successes, 1.0 + share * (runs - successes))
        difficulty = difficulty_posterior(written.successes, written.runs, prior=prior)
    return generator_reward(True, True, difficulty)


def remember(written: Sequence[Generated], services: Services) -> None:
    """Add up the runs of tasks of one signature, for the posterior."""
    solved = dict(services.kept.get("solved", {}))
    for g in written:
        if g.task and g.successes is not None:
            successes, runs = solved.get(signature(g.task), (0, 0))
            solved[signature(g.task)] = (successes + g.successes, runs + g.runs)
    services.kept["solved"] = solved


class ARISEGeneratorConfig(AgentConfig):
    """Configuration of `ARISEGenerator`. Its environment is one that asks for tasks, such as
    "arenarl.envs.generator_tasks:GeneratorTasks".

    Fields of its own, set by ``generator()``:
        executor, executor_config: "module:Class" of what runs the solver, and its arguments; see `arenarl.executor`. Without one,
            ``difficulty`` is "none".
        solver_runs: K, runs of the solver at each valid task.
        gamma: reward from which a run counts as a success. With the bonus of 0.2, all of (0.8, 1] means: everything met.
        bonus: of the solver's reward, as the solver is trained with.
        difficulty: "count" (the paper's R_diff), "posterior" (its expectation under a Beta posterior), or "none": R_diff = 0, and
            the solver runs, if there is an executor, are only written down.
        grounding: whether R_tool is asked for.
        duplicate_similarity: from which similarity to an earlier task of its worker's training a task earns nothing.
    """

    SECTIONS = {  # noqa: RUF012
        **AgentConfig.SECTIONS,
        "generator": (
            "executor", "executor_config", "solver_runs", "gamma", "bonus", "difficulty", "grounding", "duplicate_similarity",
        ),
    }  # fmt: skip

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class=algo_class or ARISEGenerator)
        self.temperature = 0.8
        self.max_turns = 7  # 6 rounds of tools and the task
        self.executor = ""
        self.executor_config: dict[str, object] = {}
        self.solver_runs = 8
        self.gamma = 0.9
        self.bonus = 0.2
        self.difficulty = "count"
        self.grounding = True
        self.duplicate_similarity = 0.8

    def generator(self, **settings: object) -> ARISEGeneratorConfig:
        """Set how tasks are tried and paid: ``executor``, ``executor_config``, ``solver_runs``, ``gamma``, ``difficulty`` ..."""
        return self._section("generator", settings)

    def validate(self) -> None:
        super().validate()
        if self.difficulty not in DIFFICULTIES:
            raise ConfigError(f"difficulty={self.difficulty!r} is unknown: take one of {', '.join(DIFFICULTIES)}")
        if type(self.solver_runs) is not int or self.solver_runs < 1:
            raise ConfigError(f"solver_runs={self.solver_runs!r} must be a whole number of runs, at least 1")
        for name in ("gamma", "duplicate_similarity"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and 0 < value <= 1):
                raise ConfigError(f"{name}={value!r} must be above 0 and at most 1")
        check_bonus(self.bonus)

    def build_executor(self) -> Executor | None:
        """None if there is none and difficulty is not paid for. Raises ConfigError if it is missing or cannot be built."""
        if not self.executor and self.difficulty == "none":
            return None
        if not self.executor:
            raise ConfigError(
                "no executor is set, and tasks are paid by how a solver does: give generator(executor="
                "'arenarl.executor:RunnerExecutor', executor_config={...})"
            )
        if not isinstance(self.executor_config, Mapping):
            raise ConfigError(f"executor_config={self.executor_config!r} must be a mapping of the executor's arguments")
        executor = load_object(self.executor, "executor", **self.executor_config)
        if not callable(getattr(executor, "attempt", None)):
            raise ConfigError(
                f"executor {self.executor!r} has no method attempt(task, runs, seed); name a class that has"
            )
        return executor


ARISEGenerator.config_class = ARISEGeneratorConfig
