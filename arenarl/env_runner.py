"""`AgentEnvRunner`: the synchronous face of a `RolloutLoop` that RLlib knows how to place, restart and stop.

No method is a coroutine: one ``async def`` would make the Ray actor an asyncio actor, and ``apply`` would block its loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import ray
from ray.rllib.core import COMPONENT_RL_MODULE, DEFAULT_MODULE_ID
from ray.rllib.env import INPUT_ENV_SPACES
from ray.rllib.env.env_runner import EnvRunner
from ray.rllib.utils.checkpoints import Checkpointable
from ray.rllib.utils.metrics import WEIGHTS_SEQ_NO

from arenarl.chat import ChatRenderer
from arenarl.engine import VLLMEngine
from arenarl.env import UnicodeText
from arenarl.errors import ConfigError
from arenarl.player import Job, RolloutLimits
from arenarl.rollout import RolloutLoop, ScoreGroup
from arenarl.scoring import ExtraStream, Services
from arenarl.types import Completion, Episode, EpisodeGroup, SamplingParams

CANARY_TOKENS = 16


class AgentEnvRunner(EnvRunner, Checkpointable):
    """One worker: an engine, its environments, and the judges of its groups.

    Args:
        config: an `arenarl.config.AgentConfig`.

    Raises:
        ArenaError: the engine or a tool server does not start.
    """

    def __init__(self, *, config: Any, **kwargs: Any) -> None:
        super().__init__(config=config, **kwargs)
        self.version = 0
        self.taskset = self.config.build_taskset()
        limits = RolloutLimits(
            max_turns=self.config.max_turns, generate_timeout_s=self.config.generate_timeout_s,
            episode_timeout_s=self.config.episode_timeout_s, max_episodes=self.config.max_episodes, max_result_tokens=self.config.max_result_tokens,
            prewarm=min(self.config.max_episodes, self.config.episodes_in_flight // max(1, self.config.num_env_runners)),
        )  # fmt: skip
        engine = VLLMEngine(self.config.engine_config(), engine_id=f"engine-{self.worker_index or 0}")
        renderer = load_renderer(self.config.model_path)
        self.services = Services(
            judge=self.config.build_judge(), play=lambda job: self.loop.play_group(job), taskset=self.taskset, renderer=renderer,
            executor=self.config.build_executor(),
        )  # fmt: skip
        self.helpers = (self.services.judge, self.services.executor, self.taskset, *self.config.extra_streams)
        self.loop = RolloutLoop(
            engine, renderer, self.taskset, scorer(self.config, self.services, terms=self.config.extra_streams), limits,
            on_close=self._close_helpers,
        )  # fmt: skip
        self.loop.start()

    # -- training ---------------------------------------------------------------------------------------------------

    def submit(self, jobs: Sequence[Job]) -> None:
        """Begin to play groups; returns at once."""
        self.loop.submit(jobs)

    def drain(self, wait_s: float) -> list[EpisodeGroup]:
        """Finished groups, scored; waits up to ``wait_s`` for the first."""
        return self.loop.drain(wait_s)

    def set_weights(self, weights: Any, version: int, timeout_s: float) -> float:
        """Load weights into the engine while its requests are in flight; seconds it took.

        Args:
            weights: tensors by Hugging Face name, or a Ray reference to them.
        """
        if isinstance(weights, ray.ObjectRef):
            weights = ray.get(weights)
        seconds = self.loop.call(self.loop.engine.update_weights(weights, version, timeout_s=timeout_s), timeout_s + 10)
        self.version = version
        for helper in self.helpers:
            if begin_step := getattr(helper, "begin_step", None):
                begin_step(version)
        return seconds

    def set_solver_weights(self, weights: Any, version: int, timeout_s: float) -> None:
        """Load weights into the executor's policy; see `set_weights`.

        Raises:
            ConfigError: there is no executor, or its policy is not ours to change.
        """
        load = getattr(self.services.executor, "set_weights", None)
        if load is None:
            raise ConfigError(
                "this worker has no executor whose weights can follow: use arenarl.executor:RunnerExecutor"
            )
        load(ray.get(weights) if isinstance(weights, ray.ObjectRef) else weights, version, timeout_s)

    def canary(self, prompt_ids: Sequence[int], temperature: float, seed: int, timeout_s: float) -> Completion:
        """A few tokens sampled after a prompt, so that the learner can check whose weights sampled them."""
        sampling = SamplingParams(temperature=temperature, max_tokens=CANARY_TOKENS, seed=seed)
        request = self.loop.engine.generate(
            prompt_ids, sampling, request_id=f"canary/{self.version}", deadline_s=timeout_s
        )
        return self.loop.call(request, timeout_s + 10)

    # -- evaluation -------------------------------------------------------------------------------------------------

    def play(self, jobs: Sequence[Job], timeout_s: float, scored: bool = False) -> list[EpisodeGroup]:
        """Play groups apart from training and wait for them.

        Args:
            scored: give them the rewards that training would. Nothing that an algorithm keeps from group to group goes in or comes
                out, and no further term of the loss is served: nobody trains on them.
        """
        apart = replace(self.services, kept={})
        return self.loop.run(jobs, timeout_s, score=scorer(self.config, apart, terms=()) if scored else None)

    # -- what RLlib asks for ----------------------------------------------------------------------------------------

    def sample(self, *, num_episodes: int | None = None, **_: Any) -> list[Episode]:
        """Fresh episodes of training tasks, one attempt each."""
        count = num_episodes or self.config.group_size
        tasks = self.taskset.tasks("train", count, seed=self.version)
        sampling = self.config.sampling_params()
        jobs = [
            Job(group_id=f"sample-{self.version}-{n}", task=t, group_size=1, sampling=sampling)
            for n, t in enumerate(tasks)
        ]
        return [e for group in self.loop.run(jobs, self.config.stall_timeout_s) for e in group.episodes]

    def assert_healthy(self) -> None:
        self.loop.call(self.loop.engine.weight_version(), 15.0)

    def get_spaces(self) -> dict[str, Any]:
        spaces = (UnicodeText(), UnicodeText())
        return {INPUT_ENV_SPACES: spaces, DEFAULT_MODULE_ID: spaces}

    def get_metrics(self) -> dict[str, Any]:
        return self.metrics.reduce()

    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {WEIGHTS_SEQ_NO: self.version}

    def set_state(self, state: dict[str, Any]) -> None:
        """Take weights that RLlib sends; versions differ rather than rise after a restore, hence ``!=``."""
        version = state.get(WEIGHTS_SEQ_NO, 0)
        if COMPONENT_RL_MODULE in state and version != self.version:
            self.set_weights(state[COMPONENT_RL_MODULE], version, self.config.push_timeout_s)

    def get_ctor_args_and_kwargs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (), {"config": self.config}

    def stop(self) -> None:
        self.loop.close()

    async def _close_helpers(self) -> None:
        closing = [close() for helper in self.helpers if (close := getattr(helper, "aclose", None))]
        for error in await asyncio.gather(*closing, return_exceptions=True):
            if isinstance(error, Exception):
                raise error


def scorer(config: Any, services: Services, *, terms: Sequence[ExtraStream]) -> ScoreGroup:
    """The algorithm's ``score_group`` and what ``terms`` of the loss add, as a function from a bare group to a scored one."""

    async def score(group: EpisodeGroup) -> EpisodeGroup:
        before = dict(services.kept)  # what rehearsals of this group may know, and change for themselves
        scores = await config.algo_class.score_group(group, config, services)
        group = replace(group, **{field.name: getattr(scores, field.name) for field in fields(scores)})
        for term in terms:
            group = await term.extend(group, config, replace(services, kept=dict(before)))
        return group

    return score


def load_renderer(model_path: str) -> ChatRenderer:
    """The renderer for the tokenizer of a model folder."""
    from transformers import AutoTokenizer

    return ChatRenderer(AutoTokenizer.from_pretrained(model_path))
