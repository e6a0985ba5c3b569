"""`AgentConfig`: RLlib's `AlgorithmConfig` with the fields of language-model agents, flat, typed and validated.

Sections follow RLlib: ``training`` and ``env_runners`` take RLlib's own fields and ours; ``agent``, ``tracking`` are new.
A key that does not exist, or that has no effect under the other options, is refused with the nearest name.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from arenarl.errors import ConfigError, boundary
from arenarl.judge import Judge
from arenarl.rllib_compat import UnbuiltLearner, is_config_key, unbuilt_module_spec
from arenarl.taskset import TaskSet, load_object, load_taskset, taskset_path
from arenarl.types import SamplingParams
from arenarl.vllm_settings import EngineConfig

if TYPE_CHECKING:
    from arenarl.learner import LearnerSpec
    from arenarl.learner_group import AccelerateLearnerGroup
    from arenarl.scoring import Executor, ExtraStream


class AgentConfig(AlgorithmConfig):
    """Configuration of an `arenarl.algorithm.AgentAlgorithm`.

        config = (
            ArenaRLConfig()
            .environment("arenarl.envs.travel:TravelTasks")
            .agent(model_path="path/to/model", max_tokens=64)
            .training(lr=3e-4, group_size=8, groups_per_step=8)
            .env_runners(num_env_runners=1)
        )

    The environment is a task set, "module:Class", built with ``env_config``; or a Gymnasium id whose class names one.
    """

    #: what each section may set, beside RLlib's own fields
    SECTIONS: Mapping[str, tuple[str, ...]] = {
        "agent": (
            "model_path", "max_model_len", "max_num_seqs", "kv_cache_bytes", "engine_core", "gpu_memory_utilization",
            "temperature", "max_tokens", "max_turns", "max_result_tokens", "max_tools_tokens", "generate_timeout_s",
            "episode_timeout_s",
        ),
        "training": (
            "group_size", "groups_per_step", "max_staleness", "num_steps", "warmup_steps", "weight_decay", "clip_param",
            "clip_param_high", "tis_cap", "kl_coeff", "tokens_per_microbatch", "dtype", "num_train_tasks", "extra_streams",
            "distill_form", "distill_top_k",
        ),
        "env_runners": ("max_episodes", "stall_timeout_s", "push_timeout_s", "canary_tolerance"),
        "judging": ("judge", "judge_config"),
        "tracking": ("run_dir", "tracking_uri", "experiment_name", "traces_per_step"),
    }  # fmt: skip

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class=algo_class)
        # the policy and its engine
        self.model_path = ""
        self.max_model_len = 1024
        self.max_num_seqs = 64
        self.kv_cache_bytes = 128 << 20
        self.engine_core = "process"
        self.gpu_memory_utilization = 0.9
        self.temperature = 1.0
        self.max_tokens = 256
        self.max_turns: int | None = None
        self.max_result_tokens = 2048  # a longer tool result is cut in the middle
        self.max_tools_tokens = 4096  # a longer listing is refused, unless allow-lists say that it is meant
        self.generate_timeout_s, self.episode_timeout_s = 300.0, 600.0
        # the step
        self.lr = 1e-6
        self.grad_clip, self.num_epochs = 1.0, 1
        self.group_size = 8
        self.groups_per_step = 8
        self.max_staleness = 1
        self.num_steps = 100
        self.warmup_steps = 5
        self.weight_decay = 0.0
        self.clip_param = 0.2  # the clip acts from the second epoch on a batch; staleness is met by tis_cap
        self.clip_param_high = 0.28
        self.tis_cap = 2.0
        self.kl_coeff = 0.0
        self.tokens_per_microbatch = 2048
        self.dtype = "float32"
        self.num_train_tasks = 1000
        self.extra_streams: Sequence[ExtraStream] = ()  # further terms of the loss, such as algorithms/rg_sed.py's
        self.distill_form, self.distill_top_k = "full", 64
        # the workers
        self.max_episodes = 256
        self.stall_timeout_s = 600.0
        self.push_timeout_s = 120.0
        self.canary_tolerance = 1e-4
        # who judges
        self.judge = "arenarl.judge:RubricJudge"
        self.judge_config: dict[str, Any] = {}
        # where it is written down
        self.run_dir: str | None = None
        self.tracking_uri: str | None = None
        self.experiment_name = "arenarl"
        self.traces_per_step = 1
        # RLlib's own fields, set as this design needs them
        self.seed = 0
        self.num_env_runners = 0
        self.num_learners = 0
        self.evaluation_duration = 64
        self.custom_evaluation_function = _evaluate_heldout
        self.restart_failed_env_runners = False
        self.delay_between_env_runner_restarts_s = 0.1
        self.log_level = "ERROR"
        self.enable_rl_module_and_learner = True
        self.enable_env_runner_and_connector_v2 = True
        from arenarl.env_runner import AgentEnvRunner  # its base class needs AlgorithmConfig: a cycle at the top

        self.env_runner_cls = AgentEnvRunner

    # -- sections ---------------------------------------------------------------------------------------------------

    def agent(self, **settings: Any) -> AgentConfig:
        """Set the policy: ``model_path``, context, sampling, engine."""
        return self._section("agent", settings)

    def training(self, **settings: Any) -> AgentConfig:
        """Set the step: RLlib's training fields and ours (``group_size``, ``groups_per_step``, ``max_staleness`` ...)."""
        return self._section("training", settings, AlgorithmConfig.training)

    def env_runners(self, **settings: Any) -> AgentConfig:
        """Set the workers: RLlib's fields and ours (``max_episodes``, ``stall_timeout_s`` ...)."""
        return self._section("env_runners", settings, AlgorithmConfig.env_runners)

    def judging(self, **settings: Any) -> AgentConfig:
        """Set who compares attempts: ``judge`` ("module:Class") and its arguments ``judge_config``."""
        return self._section("judging", settings)

    def tracking(self, **settings: Any) -> AgentConfig:
        """Set where the run is written down: ``run_dir``, ``tracking_uri`` (MLflow), ``traces_per_step``."""
        return self._section("tracking", settings)

    def _section(self, section: str, settings: dict[str, Any], inherited: Any = None) -> AgentConfig:
        ours = {name: settings[name] for name in settings if name in self.SECTIONS[section]}
        theirs = {name: value for name, value in settings.items() if name not in ours}
        known = [*self.SECTIONS[section], *(inspect.signature(inherited).parameters if inherited else ())]
        for name in theirs:
            if name not in known:
                raise ConfigError(unknown_key(name, known, f"{type(self).__name__}.{section}()"))
        for name, value in ours.items():
            setattr(self, name, value)
        if theirs:
            inherited(self, **theirs)
        return self

    def update_from_dict(self, config_dict: Mapping[str, Any]) -> AgentConfig:
        """Set fields by name, as Ray Tune and the command line do.

        Raises:
            ConfigError: for a name that is no field, with the nearest one.
        """
        for name in config_dict:
            if not is_config_key(self, name):
                raise ConfigError(
                    unknown_key(name, [k for k in vars(self) if not k.startswith("_")], type(self).__name__)
                )
        return super().update_from_dict(dict(config_dict))

    # -- checks -----------------------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Check every value of ours, cheaply and before anything starts.

        Raises:
            ConfigError: naming the value and the remedy.
        """
        self.create_local_env_runner = self.num_env_runners == 0
        with boundary(ConfigError, "RLlib refuses the configuration"):
            super().validate()
        if not self.env:
            raise ConfigError("no environment is set; give environment('module:TaskSetClass')")
        if not self.model_path:
            raise ConfigError("no model_path is set; give agent(model_path='folder of a Hugging Face model')")
        positive = (
            "group_size", "groups_per_step", "num_steps", "max_tokens", "tokens_per_microbatch", "num_train_tasks", "max_episodes",
            "temperature", "max_result_tokens", "max_tools_tokens", "lr", "stall_timeout_s", "push_timeout_s", "canary_tolerance", "generate_timeout_s", "episode_timeout_s",
        )  # fmt: skip
        for name in positive:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ConfigError(f"{name}={value!r} must be a positive number")
        if not isinstance(self.max_staleness, int) or self.max_staleness < 0:
            raise ConfigError(
                f"max_staleness={self.max_staleness!r} must be 0 (synchronous) or a positive number of versions"
            )
        self._check_streams()
        self.engine_config()
        self.learner_spec()

    def _check_streams(self) -> None:
        terms, needed = self.extra_streams, ("check", "extend", "stream", "aclose")
        if not isinstance(terms, Sequence) or not all(hasattr(term, name) for term in terms for name in needed):
            raise ConfigError(
                f"extra_streams={terms!r} must be a list of terms of the loss, such as [arenarl.algorithms.rg_sed.RGSED(...)]"
            )
        if len(terms) > 1:
            raise ConfigError(
                f"extra_streams has {len(terms)} terms, and a group has one distillation at most: give one of them"
            )

    # -- what the parts are built from --------------------------------------------------------------------------------

    def build_taskset(self) -> TaskSet:
        """The task set that ``env`` names.

        Raises:
            ConfigError: if it cannot be imported or built.
        """
        return load_taskset(taskset_path(self.env), self.env_config)

    def build_judge(self) -> Judge:
        """The judge of attempts. Raises ConfigError if it cannot be imported or built, or cannot do what is asked of it."""
        judge = load_object(self.judge, "judge", **self.judge_config)
        self.check_judge(judge)
        return judge

    def build_executor(self) -> Executor | None:
        """For algorithms that let a solver try tasks: what does it. Raises ConfigError if it cannot be built."""
        return None

    def check_judge(self, judge: Judge) -> None:
        """For algorithms that need more of a judge than ``compare``. Raises ConfigError if it does not have that."""

    @property
    def greedy_first(self) -> bool:
        """Whether member 0 of each group is decoded at temperature 0."""
        return False

    @property
    def episodes_in_flight(self) -> int:
        """How many episodes of training are played at once at most, over all workers."""
        return self.group_size * self.groups_per_step * (1 + self.max_staleness)

    def engine_config(self) -> EngineConfig:
        return EngineConfig(
            model=self.model_path, max_model_len=self.max_model_len, max_num_seqs=self.max_num_seqs,
            kv_cache_bytes=self.kv_cache_bytes, gpu_memory_utilization=self.gpu_memory_utilization, core=self.engine_core,
            dtype="auto" if self.dtype == "float32" else self.dtype, seed=self.seed or 0,
        )  # fmt: skip

    def learner_spec(self) -> LearnerSpec:
        from arenarl.learner import LearnerSpec

        return LearnerSpec(
            model=self.model_path, lr=self.lr, weight_decay=self.weight_decay, grad_clip=self.grad_clip or 1e9,
            warmup_steps=self.warmup_steps, temperature=self.temperature, clip_param=self.clip_param,
            clip_param_high=self.clip_param_high, tis_cap=self.tis_cap, kl_coeff=self.kl_coeff, num_epochs=self.num_epochs,
            dtype=self.dtype, seed=self.seed or 0, distill_form=self.distill_form, distill_top_k=self.distill_top_k,
        )  # fmt: skip

    def sampling_params(self) -> SamplingParams:
        return SamplingParams(temperature=self.temperature, max_tokens=self.max_tokens)

    def public_fields(self) -> dict[str, Any]:
        """The fields that a reader of a run wants to see: ours, and those of RLlib that have an effect here."""
        ours = [name for names in self.SECTIONS.values() for name in names]
        theirs = [
            "env", "env_config", "seed", "lr", "grad_clip", "num_epochs", "num_env_runners", "num_learners",
            "num_cpus_per_env_runner", "num_gpus_per_env_runner", "num_cpus_per_learner", "num_gpus_per_learner",
            "evaluation_interval", "evaluation_duration",
        ]  # fmt: skip
        return {
            "algorithm": getattr(self.algo_class, "__name__", ""),
            **{n: getattr(self, n) for n in (*theirs, *ours)},
            "extra_streams": [_shown(term) for term in self.extra_streams],
        }

    # -- RLlib's extension points -------------------------------------------------------------------------------------

    def build_learner_group(self, **_: Any) -> AccelerateLearnerGroup:
        from arenarl.learner_group import AccelerateLearnerGroup

        return AccelerateLearnerGroup(
            self.learner_spec(), num_learners=self.num_learners, num_cpus_per_learner=self.num_cpus_per_learner,
            num_gpus_per_learner=self.num_gpus_per_learner,
            bundle_offset=1 + self.num_env_runners + self.evaluation_num_env_runners,
        )  # fmt: skip

    def get_default_learner_class(self) -> type:
        return UnbuiltLearner

    def get_default_rl_module_spec(self) -> RLModuleSpec:
        return unbuilt_module_spec()


def _evaluate_heldout(algorithm: Any, _: Any) -> tuple[dict[str, Any], int, int]:
    return algorithm.evaluate_heldout()


def _shown(term: ExtraStream) -> dict[str, Any]:
    """The kind of a term of the loss, and its settings if it is a dataclass."""
    settings = fields(term) if is_dataclass(term) else ()
    return {"term": type(term).__name__, **{f.name: getattr(term, f.name) for f in settings if f.init}}


def unknown_key(name: str, known: list[str], where: str) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"{where} has no field {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")
