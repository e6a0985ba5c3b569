"""Learner processes as RLlib sees them: one in this process, or N Ray actors that Accelerate joins into one group.

RLlib's own ``LearnerGroup`` starts its actors without the variables that Accelerate reads, so that each would train
alone, and asks one rank for state, which hangs once parameters are sharded. This subclass has its own bring-up and
sends every operation to every rank.
"""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import torch
from pyarrow.fs import FileSystem
from ray.rllib.core.learner.learner_group import LearnerGroup
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch import Tensor

from arenarl.batching import Batch
from arenarl.errors import ArenaError, ConfigError, LearnerError, boundary
from arenarl.learner import AccelerateLearner, LearnerRank, LearnerSpec
from arenarl.rllib_compat import COMPONENT_LEARNER, COMPONENT_RL_MODULE, WEIGHTS_SEQ_NO

if TYPE_CHECKING:
    from ray.actor import ActorHandle

STATE_FILE = "learner.pt"


class AccelerateLearnerGroup(LearnerGroup):
    """The learners of one algorithm, and the owner of the weight version, which only rises.

    Each operation goes to all ranks under one lock. The first error, a death or an overdue answer ends the group: all
    ranks are killed, since the survivors sit in a collective, and ``LearnerError`` names the rank and the operation.

    Args:
        num_learners: 0 trains in this process; otherwise so many Ray actors, also if it is 1.
        num_gpus_per_learner: 0 or 1 (a rank has one device).
        bundle_offset: bundle of rank 0 in the current placement group, if there is one: behind the main process and
            the env runners. None lets Ray place the learners.
        timeout_s: bound on each operation of a remote group, its start included.

    Raises:
        ConfigError: the cluster cannot hold the learners, or the model does not load.
        LearnerError: a rank failed to start.
    """

    def __init__(
        self,
        spec: LearnerSpec,
        *,
        num_learners: int = 0,
        num_cpus_per_learner: float = 1,
        num_gpus_per_learner: float = 0,
        bundle_offset: int | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self.spec = spec
        self.version = 0
        self._num_learners = num_learners
        self._arguments = {
            "num_learners": num_learners,
            "num_cpus_per_learner": num_cpus_per_learner,
            "num_gpus_per_learner": num_gpus_per_learner,
            "bundle_offset": bundle_offset,
            "timeout_s": timeout_s,
        }
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._learner: AccelerateLearner | None = None
        self._workers: list[ActorHandle] = []
        if not num_learners:
            self._learner = AccelerateLearner(spec)
            self._learner.build()
            return
        resources = {"CPU": num_cpus_per_learner, "GPU": num_gpus_per_learner}
        self._workers = _start_ranks(spec, num_learners, resources, bundle_offset, timeout_s)
        rendezvous = self._each_rank("listen", [()])[0]
        self._each_rank("build", [rendezvous] * num_learners)

    @property
    def is_remote(self) -> bool:
        return self._num_learners > 0

    def __len__(self) -> int:
        return self._num_learners

    def update(self, batch: Batch) -> dict[str, float]:
        """One learner step; the version rises unless the batch had nothing to train on.

        Args:
            batch: packed with ``num_shards = max(1, num_learners)``.

        Returns:
            The metrics of ``AccelerateLearner.update``, and ``version``, that of the weights after the step.
        """
        if len(batch.shards) != max(1, len(self)):
            raise ConfigError(f"a batch of {len(batch.shards)} shards for {max(1, len(self))} learners: pack it anew")
        metrics = self._call("update", per_rank=[(shard, self.version) for shard in batch.shards])
        if not metrics["noop"]:
            self.version += 1
        return metrics | {"version": float(self.version)}

    def weights(self) -> dict[str, Tensor]:
        """The current weights, as ``AccelerateLearner.weights`` gives them."""
        return self._call("weights")

    def logprobs(self, token_ids: Sequence[int], start: int) -> list[float]:
        """The learner's log-probs of token_ids[start:], to compare with an engine's."""
        return self._call("logprobs", token_ids, start)

    def save_pretrained(self, path: str | Path) -> None:
        """Export a Hugging Face folder. It is written where rank 0 runs: name a shared folder if that is elsewhere."""
        self._call("save_pretrained", str(path))

    def get_state(
        self,
        components: str | Collection[str] | None = None,
        *,
        not_components: str | Collection[str] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The weights and their version if ``components`` asks for the learner's module, else a small dict.

        Checkpoints call this without components before ``save_to_path``, which must not move the model twice.
        """
        wanted = [components] if isinstance(components, str) else components or ()
        if not any(name.split("/")[0] == COMPONENT_LEARNER for name in wanted):
            return {"num_learners": len(self), "version": self.version}
        return {COMPONENT_LEARNER: {COMPONENT_RL_MODULE: self.weights(), WEIGHTS_SEQ_NO: self.version}}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Load weights, if the state has any, under a new version."""
        weights = state.get(COMPONENT_LEARNER, {}).get(COMPONENT_RL_MODULE)
        if weights is not None:
            self._call("set_weights", weights)
            self.version += 1

    def save_to_path(
        self,
        path: str | Path | None = None,
        *,
        state: Mapping[str, Any] | None = None,
        filesystem: FileSystem | None = None,
        use_msgpack: bool = False,
    ) -> str:
        """Write the full state (weights, optimizer, counters, version) to ``path``/learner.pt, whole or not at all.

        The state travels to this process first: the folder of a Tune trial is local to the trial. ``state`` and
        ``use_msgpack`` belong to RLlib's signature and change nothing.
        """
        if path is None:
            raise ConfigError("save_to_path of the learner group needs a path")
        if filesystem is None:
            filesystem, path = FileSystem.from_uri(str(path))
        content = {"version": self.version, "learner": self._call("get_state")}
        filesystem.create_dir(str(path), recursive=True)
        target = f"{path}/{STATE_FILE}"
        with boundary(LearnerError, f"saving the learner to {path}"):
            with filesystem.open_output_stream(f"{target}.part") as file:
                torch.save(content, file)
            filesystem.move(f"{target}.part", target)
        return str(path)

    def restore_from_path(
        self, path: str | Path, *, component: str | None = None, filesystem: FileSystem | None = None, **kwargs: Any
    ) -> None:
        """Load what ``save_to_path`` wrote, into any number of learners.

        The version becomes the saved one if that is a rise, else it rises by one, so that every engine takes the
        weights and no version ever stands for two sets of them.

        Raises:
            ConfigError: no state there, or ``component`` asks for a part of it.
        """
        if component is not None:
            raise ConfigError(f"component={component!r}: the learner group restores as a whole")
        if filesystem is None:
            filesystem, path = FileSystem.from_uri(str(path))
        with (
            boundary(ConfigError, f"no learner state in {path}"),
            filesystem.open_input_file(f"{path}/{STATE_FILE}") as f,
        ):
            content = torch.load(io.BytesIO(f.read()), weights_only=True)
        self._call("set_state", content["learner"])
        self.version = max(content["version"], self.version + 1)

    def get_ctor_args_and_kwargs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (self.spec,), self._arguments

    def get_checkpointable_components(self) -> list[tuple[str, Any]]:
        return []

    def processes(self) -> list[tuple[str, int]]:
        """(node address, process id) of each remote rank."""
        return self._each_rank("process", [()] * len(self)) if self.is_remote else []

    def shutdown(self) -> None:
        """Kill the remote ranks. May be called again."""
        workers, self._workers, self._learner = self._workers, [], None
        for worker in workers:
            ray.kill(worker, no_restart=True)

    def __del__(self) -> None:
        """Nothing: Ray ends an actor whose last handle is gone, and at interpreter exit it is too late for calls."""

    def _call(self, method: str, *shared: Any, per_rank: Sequence[tuple[Any, ...]] = ()) -> Any:
        """Run a learner's method on every rank, with the same or with each one's own arguments; rank 0's result."""
        if self.is_remote:
            refs = tuple(map(ray.put, shared))
            return self._each_rank("call", [(method, *refs, *own) for own in per_rank or [()] * len(self)])[0]
        if self._learner is None:
            raise LearnerError(f"learner {method}: the learner group is shut down")
        with self._lock, boundary(LearnerError, f"learner {method}"):
            return getattr(self._learner, method)(*shared, *(per_rank[0] if per_rank else ()))

    def _each_rank(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call an actor method on ranks 0, 1, ... with one tuple of arguments each; whoever fails first ends it all."""
        with self._lock:
            what = f"learner {arguments[0][0] if method == 'call' else method}"
            if not self._workers:
                raise LearnerError(f"{what}: the learner group is shut down")
            calls = zip(self._workers, arguments, strict=False)
            rank_of = {getattr(worker, method).remote(*args): rank for rank, (worker, args) in enumerate(calls)}
            results, pending, deadline = {}, list(rank_of), time.monotonic() + self._timeout_s
            while pending:
                ready, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
                if not ready:
                    self.shutdown()
                    late = sorted(rank_of[ref] for ref in pending)
                    raise LearnerError(f"{what}: ranks {late} gave no answer within {self._timeout_s:g} s")
                rank = rank_of[ready[0]]
                try:
                    results[rank] = ray.get(ready[0])
                except Exception as error:
                    self.shutdown()
                    raise _attribute(error, f"{what}: rank {rank} failed") from error
            return [results[rank] for rank in sorted(results)]


def _attribute(error: Exception, what: str) -> ArenaError:
    """The error of a rank as one of ours, without Ray's wrapping and its traceback text."""
    cause = getattr(error, "cause", None) or error
    if isinstance(cause, ArenaError):
        return type(cause)(f"{what}: {cause}")
    return LearnerError(f"{what}: {type(cause).__name__}: {str(cause).splitlines()[0] if str(cause) else ''}")


def _start_ranks(
    spec: LearnerSpec, num_learners: int, resources: Mapping[str, float], bundle_offset: int | None, timeout_s: float
) -> list[ActorHandle]:
    if not ray.is_initialized():
        raise ConfigError(f"num_learners={num_learners} needs Ray: call ray.init() first, or take num_learners=0")
    if resources["GPU"] > 1:
        raise ConfigError(f"num_gpus_per_learner={resources['GPU']}: a learner has one device; raise num_learners")
    group = ray.util.get_current_placement_group() if bundle_offset is not None else None
    _check_supply(num_learners, resources, group, bundle_offset or 0)
    env = {"OMP_NUM_THREADS": str(spec.num_threads), "OMP_WAIT_POLICY": "PASSIVE"}
    if not resources["GPU"]:
        env["CUDA_VISIBLE_DEVICES"] = ""
    workers = []
    for rank in range(num_learners):
        strategy: Any = "DEFAULT"
        if group is not None:
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle_offset + rank)
        actor = ray.remote(LearnerRank).options(
            num_cpus=resources["CPU"],
            num_gpus=resources["GPU"],
            max_restarts=0,
            runtime_env={"env_vars": env},
            scheduling_strategy=strategy,
        )
        workers.append(actor.remote(spec, rank, num_learners, timeout_s))
    return workers


def _check_supply(
    num_learners: int, resources: Mapping[str, float], group: PlacementGroup | None, bundle_offset: int
) -> None:
    """Refuse what Ray would wait for without end."""
    if group is not None:
        if bundle_offset + num_learners > group.bundle_count:
            raise ConfigError(
                f"num_learners={num_learners} from bundle {bundle_offset} on: the placement group has only "
                f"{group.bundle_count} bundles"
            )
        return
    supply = ray.cluster_resources()
    for name, each in resources.items():
        if num_learners * each > supply.get(name, 0.0):
            raise ConfigError(
                f"{num_learners} learners want {num_learners * each:g} {name}, the cluster has {supply.get(name, 0.0):g}: "
                f"lower num_learners or num_{name.lower()}s_per_learner"
            )
