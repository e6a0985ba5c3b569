"""The only file that touches what RLlib does not promise to keep, each use with its reason.

Tried with Ray 2.60. `tests/` has a test for every name here, so that a new Ray fails with a clear message.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.core import COMPONENT_LEARNER, COMPONENT_RL_MODULE
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.core.rl_module.rl_module import RLModule, RLModuleSpec
from ray.rllib.utils.metrics import WEIGHTS_SEQ_NO
from ray.tune.result import TRIAL_INFO

from arenarl.errors import ArenaError, EngineUnavailable

__all__ = [
    "COMPONENT_LEARNER", "COMPONENT_RL_MODULE", "WEIGHTS_SEQ_NO", "UnbuiltLearner", "call_runners", "is_config_key",
    "num_remote_runners", "unbuilt_module_spec",
]  # fmt: skip

T = TypeVar("T")

# Every algorithm is told at every start that it uses the new API stack.
logging.getLogger("ray.rllib.algorithms.algorithm_config").setLevel(logging.ERROR)


class _UnbuiltModule(RLModule):
    """Names a module class for RLlib's specs. The language model lives in the engine and in the learner group."""

    framework = "torch"

    def _never(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError("arenarl builds no RLModule: the engine samples and the learner group trains")

    setup = _forward = _forward_inference = _forward_exploration = _forward_train = _never
    get_state = set_state = get_ctor_args_and_kwargs = _never


def unbuilt_module_spec() -> RLModuleSpec:
    """For ``AlgorithmConfig.get_default_rl_module_spec``: ``Algorithm.setup`` insists on a spec and never builds it."""
    return RLModuleSpec(module_class=_UnbuiltModule)


class UnbuiltLearner(TorchLearner):
    """For ``AlgorithmConfig.get_default_learner_class``, which must name a class; ``build_learner_group`` ignores it."""

    def compute_loss_for_module(self, **kwargs: Any) -> NoReturn:
        raise NotImplementedError("arenarl trains in AccelerateLearnerGroup")


def is_config_key(config: AlgorithmConfig, name: str) -> bool:
    """Whether ``update_from_dict`` would set an existing field; RLlib translates a few old names and a Tune marker."""
    return (
        name in vars(config)
        or name == TRIAL_INFO
        or config._translate_special_keys(name, warn_deprecated=False) in vars(config)
    )


def num_remote_runners(algorithm: Algorithm) -> int:
    return algorithm.env_runner_group.num_remote_env_runners()


def call_runners(
    algorithm: Algorithm, call: Callable[[Any], T] | Sequence[Callable[[Any], T]], timeout_s: float
) -> list[T]:
    """Call every env runner (or the local one if there are no others) and wait for all.

    Args:
        call: one function for all, or one for each in the order of the runners.

    Raises:
        EngineUnavailable: a runner is gone or did not answer in time. Errors of the call itself pass unchanged.
    """
    group = algorithm.env_runner_group
    if not group.num_remote_env_runners():
        return [(call if callable(call) else call[0])(group.local_env_runner)]
    manager = group._worker_manager
    ids = manager.actor_ids()
    results = manager.foreach_actor(
        call if callable(call) else list(call), kwargs=None if callable(call) else [{} for _ in ids], remote_actor_ids=ids,
        timeout_seconds=timeout_s, healthy_only=False,
    )  # fmt: skip
    answers = {result.actor_id: result for result in results}
    for actor in ids:
        if actor not in answers:
            raise EngineUnavailable(f"env runner {actor} gave no answer within {timeout_s:g} s")
        if not answers[actor].ok:
            error = answers[actor].get()
            cause = getattr(error, "cause", None)
            raise cause if isinstance(cause, ArenaError) else EngineUnavailable(f"env runner {actor} failed: {error}")
    return [answers[actor].get() for actor in ids]
