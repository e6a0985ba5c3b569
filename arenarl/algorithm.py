"""`AgentAlgorithm`: the training loop that reads like the paper, on RLlib's `Algorithm`.

An algorithm overrides at most three things:

    tasks()        which tasks to play next                                   (driver)
    score_group()  a group's rewards and advantages, async, overlaps rollouts  (where the rollouts run)
    streams()      per-token weights of the loss                              (driver)
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Literal

import ray
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.utils.metrics import ENV_RUNNER_RESULTS, EVALUATION_RESULTS
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

from arenarl.batching import Batch, Stream, pack, policy_gradient_stream
from arenarl.comparison import compare_attempts, evaluation_judge
from arenarl.config import AgentConfig
from arenarl.env_runner import AgentEnvRunner, load_renderer
from arenarl.errors import CanaryError, ConfigError, EngineUnavailable
from arenarl.metrics import StepClock, episode_metrics, group_metrics, learner_metrics, stream_metrics
from arenarl.player import Job, derive_seed
from arenarl.preflight import preflight, training_tasks
from arenarl.rllib_compat import call_runners, num_remote_runners
from arenarl.scoring import Scores, Services
from arenarl.tracking import MLflowTracker, RunFolder, metric_family
from arenarl.types import Episode, EpisodeGroup, Task

POLL_S = 0.25


class Interrupted(Exception):
    """The user asked to stop; the last finished step stands."""


class AgentAlgorithm(Algorithm):
    """Base of all algorithms here; also a Tune trainable."""

    config: AgentConfig
    config_class: ClassVar[type[AgentConfig]] = AgentConfig
    rewards_compare: ClassVar[bool] = True
    """Whether rewards of two groups of attempts at one task are on one scale; ranks are not."""

    @classmethod
    def get_default_config(cls) -> AgentConfig:
        return cls.config_class(algo_class=cls)

    # -- what an algorithm is -----------------------------------------------------------------------------------------

    def tasks(self) -> Iterator[Task]:
        """Training tasks for ever: the task set's, reshuffled each pass.

        Raises:
            ConfigError: the task set has none.
        """
        yield from shuffled(training_tasks(self.config, self.taskset), self.config.seed)

    @staticmethod
    async def score_group(group: EpisodeGroup, config: AgentConfig, services: Services) -> Scores:
        """Rewards and advantages of a finished group. Runs in the worker, many groups at once."""
        raise NotImplementedError

    def streams(self, group: EpisodeGroup) -> list[Stream]:
        """Per-token weights of a group, one stream a term of the loss: by default each episode's advantage on each token that it
        sampled, and what ``extra_streams`` adds.
        """
        extra = [term.stream(group, self.learner_steps) for term in self.config.extra_streams]
        return [policy_gradient_stream(group), *(stream for stream in extra if stream is not None)]

    # -- the step -----------------------------------------------------------------------------------------------------

    def training_step(self) -> None:
        """Collect scored groups, weigh their tokens, update the learners, push the weights."""
        clock = StepClock()
        with clock("collect"):
            groups = self._collect()
        streams = [self.streams(group) for group in groups]
        with clock("learn"):
            batch = self._pack(groups, streams)
            learned = self.learner_group.update(batch)
        with clock("push"):
            pushed = self._push()
        self._record(
            groups,
            group_metrics(groups)
            | (stream_metrics(streams) if self.config.extra_streams else {})
            | learner_metrics(learned, batch.stats)
            | pushed
            | clock.metrics(groups),
        )

    def _collect(self) -> list[EpisodeGroup]:
        """The next ``groups_per_step`` groups, in the order of their admission, once all of them have finished.

        At step k at most (k + 1 + max_staleness) * groups_per_step groups have ever been started, and they are trained
        on in that order, so none is more than ``max_staleness`` versions old. A running episode is never thrown away
        for its age, which would favour short ones.

        Raises:
            EngineUnavailable: a worker died, or no group finished for ``stall_timeout_s``.
            Interrupted: the user asked to stop.
        """
        wanted, patience = self.config.groups_per_step, self.config.stall_timeout_s
        self._admit((self.learner_steps + 1 + self.config.max_staleness) * wanted - self._started)
        due = [group_id(self._taken + n) for n in range(wanted)]
        progress = time.monotonic()
        while not all(name in self._finished for name in due):
            if self.should_stop():
                raise Interrupted
            fresh = {g.group_id: g for groups in self._call("drain", POLL_S) for g in groups}
            self._finished |= fresh
            progress = time.monotonic() if fresh else progress
            if time.monotonic() - progress > patience:
                running = self._started - self._taken - len(self._finished)
                raise EngineUnavailable(
                    f"no group finished within stall_timeout_s={patience:g} s; {running} are in flight"
                )
        self._taken += wanted
        return [self._finished.pop(name) for name in due]

    def _admit(self, count: int) -> None:
        """Start ``count`` groups, dealt out to the workers in turn."""
        runners = max(1, num_remote_runners(self))
        hands: list[list[Job]] = [[] for _ in range(runners)]
        for _ in range(max(0, count)):
            hands[self._started % runners].append(self._job(next(self._tasks), self._started))
            self._started += 1
        if count > 0:
            call_runners(self, [lambda r, hand=hand: r.submit(hand) for hand in hands], self.config.push_timeout_s)

    def _job(self, task: Task, number: int) -> Job:
        return Job(
            group_id=group_id(number), task=task, group_size=self.config.group_size, sampling=self.config.sampling_params(),
            seed=derive_seed(self.config.seed, number), greedy_first=self.config.greedy_first,
            version=self.learner_group.version,
        )  # fmt: skip

    def _pack(self, groups: Sequence[EpisodeGroup], streams: Sequence[Sequence[Stream]]) -> Batch:
        return pack(
            groups, streams, tokens_per_microbatch=self.config.tokens_per_microbatch,
            num_shards=max(1, self.config.num_learners), keep_zero_weights=self.config.kl_coeff > 0,
        )  # fmt: skip

    def _push(self) -> dict[str, float]:
        """Give every engine the learner's weights, then prove it: a canary's log-probs must agree.

        Raises:
            CanaryError: engine and learner differ by more than ``canary_tolerance``.
        """
        version, timeout = self.learner_group.version, self.config.push_timeout_s
        if version == self._pushed:
            return {}
        weights = self.learner_group.weights()
        payload = ray.put(weights) if num_remote_runners(self) else weights
        self._call("set_weights", payload, version, timeout)
        self._pushed = version
        samples = self._call("canary", self._canary_prompt, self.config.temperature, version, timeout)
        worst = 0.0
        for number, sample in enumerate(samples):
            ids = [*self._canary_prompt, *sample.token_ids]
            ours = self.learner_group.logprobs(ids, len(self._canary_prompt))
            gap = max(abs(a - b) for a, b in zip(ours, sample.logprobs, strict=True))
            if not gap <= self.config.canary_tolerance or set(sample.versions) != {version}:
                raise CanaryError(
                    f"engine {number} after the push of version {version}: log-probs differ by {gap:.2e} (allowed "
                    f"{self.config.canary_tolerance:g}), token versions {sorted(set(sample.versions))}"
                )
            worst = max(worst, gap)
        return {"policy/canary_gap": worst}

    def _call(self, method: str, *args: Any) -> list[Any]:
        """Call a method on every worker and wait; results in the order of the workers."""
        timeout = self.config.push_timeout_s + 30
        return call_runners(self, lambda r: getattr(r, method)(*args), timeout)

    def train_on(self, tasks: Sequence[Task]) -> None:
        """Admit these tasks from now on, reshuffled each pass; groups in flight are finished as they are."""
        if not tasks:
            raise ConfigError("train_on() got no task: give at least one")
        self._tasks = shuffled(tasks, derive_seed(self.config.seed, self._started))

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def play(self, tasks: Sequence[Task], *, name: str, seed: int = 0) -> list[Episode]:
        """One attempt at each task with the current weights, apart from training; in the order of the tasks."""
        return [group.episodes[0] for group in self._play(tasks, name, seed, scored=False)]

    def _play(self, tasks: Sequence[Task], name: str, seed: int, *, scored: bool) -> list[EpisodeGroup]:
        """Groups of one, apart from training; in the order of the tasks."""
        runners, timeout = max(1, num_remote_runners(self)), self.config.stall_timeout_s
        sampling = self.config.sampling_params()
        jobs = [
            Job(group_id=f"{name}-{n:04d}", task=t, group_size=1, sampling=sampling, seed=derive_seed(seed, n))
            for n, t in enumerate(tasks)
        ]
        hands = [jobs[k::runners] for k in range(runners)]
        played = call_runners(
            self, [lambda r, hand=hand: r.play(hand, timeout, scored) for hand in hands], timeout + 30
        )
        by_id = {group.group_id: group for groups in played for group in groups}
        return [by_id[job.group_id] for job in jobs]

    def evaluate_heldout(self) -> tuple[dict[str, Any], int, int]:
        """RLlib's evaluation: ``evaluation_duration`` held-out tasks, one attempt each.

        If ``reference`` holds another policy's attempts at them, also the win rate over it.
        """
        tasks = self.taskset.tasks("heldout", self.config.evaluation_duration, seed=0)
        episodes = self.play(tasks, name=f"heldout-{self.learner_steps}", seed=1)
        results = episode_metrics(episodes)
        if self.reference:
            judge, _ = evaluation_judge(self.taskset, self.config)
            results["reward/win_rate"] = compare_attempts(judge, self.reference, episodes)["win_rate"]
        self.last_evaluation = {
            name if name == "reward/win_rate" else name.replace("/", "/heldout_"): value
            for name, value in results.items()
        }
        if self.run_folder and self.tracker:
            self.run_folder.append_metrics(self.learner_steps, self.last_evaluation)
            self.tracker.log_metrics(self.learner_steps, self.last_evaluation)
        leaf = MetricsLogger(root=False)
        for name, value in results.items():
            leaf.log_value(tuple(name.split("/")), value, window=1)
        self.metrics.aggregate([leaf.reduce()], key=(EVALUATION_RESULTS, ENV_RUNNER_RESULTS))
        steps = sum(e.env_steps() for e in episodes)
        return results, steps, steps

    # -- life ---------------------------------------------------------------------------------------------------------

    def setup(self, config: AgentConfig) -> None:
        """Check everything that can be checked without an engine, then build workers and learners.

        Raises:
            ArenaError: naming what is wrong and the remedy.
        """
        self.should_stop: Callable[[], bool] = lambda: False
        self.config, self.taskset = config, config.build_taskset()
        self._tasks = self.tasks()
        self.listing = preflight(config, self.taskset)
        first = training_tasks(config, self.taskset)[0]
        prompt = [{"role": "system", "content": self.taskset.system_prompt}, {"role": "user", "content": first.prompt}]
        self._canary_prompt = load_renderer(config.model_path).prompt(prompt, self.listing.schemas)
        self._finished: dict[str, EpisodeGroup] = {}
        self._started = self._taken = self.learner_steps = self._pushed = 0
        self.last_metrics: dict[str, float] = {}
        self.last_evaluation: dict[str, float] = {}
        self.reference: Sequence[Episode] = ()
        self.run_folder = RunFolder(config.run_dir) if config.run_dir else None
        self.tracker: MLflowTracker | None = None
        self.run_status: Literal["FINISHED", "FAILED", "KILLED"] = "FINISHED"
        super().setup(config)
        if self.run_folder:
            self.run_folder.write_config(config.public_fields())
            self.tracker = MLflowTracker(
                root=self.run_folder.path.parent, experiment=config.experiment_name, run_name=self.run_folder.path.name,
                params=config.public_fields(), tags={"algorithm": type(self).__name__}, tracking_uri=config.tracking_uri,
            )  # fmt: skip

    def _record(self, groups: Sequence[EpisodeGroup], metrics: dict[str, float]) -> None:
        """Write the step down: JSON lines first, then MLflow and RLlib's own result."""
        self.learner_steps += 1
        self.last_metrics = metrics
        for name, value in metrics.items():
            metric_family(name)
            self.metrics.log_value(tuple(name.split("/")), value, window=1)
        if self.run_folder and self.tracker:
            for group in groups:
                self.run_folder.append_group(group, step=self.learner_steps)
            self.run_folder.append_metrics(self.learner_steps, metrics)
            self.tracker.log_metrics(self.learner_steps, metrics)
            self.tracker.log_tournaments(groups, step=self.learner_steps)
            for group in groups[: self.config.traces_per_step]:
                self.tracker.log_episode_trace(
                    group.episodes[-1],
                    group,
                    reward=group.rewards[-1],
                    advantage=group.advantages[-1],
                    step=self.learner_steps,
                )

    def save_pretrained(self, path: str) -> None:
        """Export the policy as a Hugging Face folder."""
        self.learner_group.save_pretrained(path)

    def cleanup(self) -> None:
        """Stop workers, learners and tracking side by side, so that the slowest alone sets the time."""
        closing = (
            threading.Thread(target=self.tracker.close, kwargs={"status": self.run_status}) if self.tracker else None
        )
        if closing:
            closing.start()
        try:
            super().cleanup()
        finally:
            if closing:
                closing.join()

    @classmethod
    def _should_create_evaluation_env_runners(cls, eval_config: Any) -> bool:
        return False  # evaluation runs on the training engines: another one would cost its weights again


def group_id(number: int) -> str:
    return f"g{number:06d}"


def shuffled(tasks: Sequence[Task], seed: int | None) -> Iterator[Task]:
    """The tasks for ever, in a new order each pass."""
    rng = random.Random(seed)
    while True:
        yield from rng.sample(tasks, len(tasks))


__all__ = ["AgentAlgorithm", "AgentEnvRunner", "Interrupted", "Scores", "Services"]
