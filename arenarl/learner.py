"""The learner: a Hugging Face causal language model, AdamW and one loss. It knows no algorithm by name.

The loss is the decoupled clipped objective (Hilton et al., "Batch size-invariance for policy optimization", arXiv
2110.00641; used by AReaL, arXiv 2505.24298). For a trained token with advantage A::

    w * -min(rho A, clip(rho, 1 - clip_param, 1 + clip_param_high) A)      w = min(pi_old / pi_engine, tis_cap)
                                                                         rho = pi / pi_old

``pi_old`` are the weights at the start of the step. They are the weights of the first epoch's forward pass, so they
cost no pass of their own. Hence, with one epoch, rho is 1, the clip is idle and the gradient is ``w A grad log pi``:
the truncated importance-weighted policy gradient, and the plain one if the engine holds the same weights. The clip
bounds how far later epochs move, and w corrects for lag and for the engine's arithmetic, each exactly once.

A distilled token adds ``lambda KL(pi || teacher)``, as in RG-SED (ARISE, arXiv 2609.01058) and OPCD (arXiv 2602.12275).
The teacher is pi itself, of the same moment and temperature and without a gradient, with a memory in its context.
"""

from __future__ import annotations

import copy
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import Tensor, nn

from arenarl.batching import MicroBatch
from arenarl.causal_lm import (
    Scored,
    TokenScorer,
    check_head,
    copy_companions,
    load_causal_lm,
    stored_names,
    whole_folder,
)
from arenarl.errors import ConfigError, LearnerError, boundary
from arenarl.functional import (
    clipped_surrogate,
    kl_k3,
    reverse_kl_full,
    reverse_kl_sampled,
    reverse_kl_topk,
    truncated_importance_weight,
)
from arenarl.learner_meter import Meter
from arenarl.learner_tokens import Teacher, Tokens


@dataclass(frozen=True, kw_only=True)
class LearnerSpec:
    """Everything a learner is built from.

    Attributes:
        model: Hugging Face folder of the starting weights; also the frozen reference if ``kl_coeff`` > 0.
        grad_clip: bound on the global norm of the gradient.
        warmup_steps: optimizer steps of linear warm-up; the rate is constant after.
        temperature: log-probs are those of softmax(logits / temperature), the distribution the engine samples.
        clip_param, clip_param_high: the ratio's range is [1 - clip_param, 1 + clip_param_high]; idle with one epoch.
        tis_cap: upper bound of the importance weight.
        kl_coeff: factor of the k3 estimate of KL(policy || starting weights), per token.
        distill_form: KL of a distillation: over the whole vocabulary ("full"), over the student's ``distill_top_k``
            likeliest tokens and the rest as one ("top_k"), or estimated from the sampled token alone ("sampled").
        num_epochs: passes over a batch, each one optimizer step.
        dtype: of the arithmetic; weights and optimizer state are float32 in either case.
        num_threads: torch threads of a learner process on CPU.
    """

    model: str
    lr: float = 1e-6
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    adam_eps: float = 1e-8
    grad_clip: float = 1.0
    warmup_steps: int = 0
    temperature: float = 1.0
    clip_param: float = 0.2
    clip_param_high: float = 0.28
    tis_cap: float = 2.0
    kl_coeff: float = 0.0
    distill_form: Literal["full", "top_k", "sampled"] = "full"
    distill_top_k: int = 64
    num_epochs: int = 1
    dtype: Literal["float32", "bfloat16"] = "float32"
    num_threads: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("temperature", "grad_clip", "tis_cap", "adam_eps", "distill_top_k", "num_epochs", "num_threads"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be above 0")
        for name in ("lr", "weight_decay", "warmup_steps", "clip_param", "clip_param_high", "kl_coeff"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name}={getattr(self, name)!r}: must not be negative")
        if self.dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"dtype={self.dtype!r}: must be 'float32' or 'bfloat16'")
        if self.distill_form not in ("full", "top_k", "sampled"):
            raise ConfigError(f"distill_form={self.distill_form!r}: must be 'full', 'top_k' or 'sampled'")


class AccelerateLearner:
    """One learner process: the whole learner if alone, else one rank of the process group that Accelerate finds.

    With several ranks every method is collective: all ranks call it, in the same order.
    Dropout is off, since a log-prob must be that of the policy which the engine runs.
    """

    def __init__(self, spec: LearnerSpec) -> None:
        self.spec = spec
        self.steps = 0
        self.noops = 0

    def build(self) -> None:
        """Load the model and make the optimizer.

        Raises:
            ConfigError: the folder is not a causal language model, lacks weights, or transforms its logits after the
                output layer, which ``TokenScorer`` would miss.
        """
        spec = self.spec
        on_cpu = not torch.cuda.is_available()
        if on_cpu:
            torch.set_num_threads(spec.num_threads)
        torch.manual_seed(spec.seed)
        self._accelerator = Accelerator(cpu=on_cpu, mixed_precision="bf16" if spec.dtype == "bfloat16" else "no")
        scorer = TokenScorer(load_causal_lm(spec.model), spec.temperature)
        check_head(scorer, spec.model)
        self._names = stored_names(scorer.lm)
        self._reference = None
        if spec.kl_coeff:
            self._reference = copy.deepcopy(scorer).requires_grad_(False).to(self._accelerator.device)
        optimizer = torch.optim.AdamW(
            scorer.parameters(), lr=spec.lr, betas=spec.betas, eps=spec.adam_eps, weight_decay=spec.weight_decay
        )
        self._scorer, self._optimizer = self._accelerator.prepare(scorer, optimizer)

    @property
    def rank(self) -> int:
        return self._accelerator.process_index

    @property
    def world_size(self) -> int:
        return self._accelerator.num_processes

    @property
    def _lm(self) -> nn.Module:
        return self._accelerator.unwrap_model(self._scorer).lm

    def update(self, micro_batches: Sequence[MicroBatch], version: int) -> dict[str, float]:
        """One optimizer step for each epoch, on this rank's shard of the batch.

        A batch without a trained token on any rank changes nothing: weights, optimizer state and schedule stay, and
        ``noops`` rises.

        Args:
            version: weight version being trained, for the lag of the tokens.

        Returns:
            Metrics over all ranks and epochs, means per trained token unless named otherwise: ``loss``,
            ``policy_loss``, ``kl_loss``, ``distill_loss`` (with their weights, summed); ``kl_behavior`` (k3 estimate of
            KL(policy || engine)), ``entropy``, ``ratio_mean`` and ``ratio_max`` (policy / engine),
            ``abs_log_ratio_mean`` and ``abs_log_ratio_max`` (before the first step), ``importance_weight``,
            ``clip_low``, ``clip_high`` (share of tokens that the clip silenced), ``grad_norm`` (before clipping),
            ``lr``, ``tokens`` (trained, one epoch), ``lag_mean``, ``lag_max`` (in versions), ``seconds``, ``noop``.
            With a distillation also ``distilled_tokens`` and ``distill_kl``, KL(student || teacher) for each of them.

        Raises:
            LearnerError: the loss or the gradient is not finite. The weights are those before the epoch.
        """
        started = time.perf_counter()
        selected = [Tokens.select(batch, self._accelerator.device) for batch in micro_batches]
        tokens = self._total(torch.tensor([sum(len(s.rows) for s in selected)], dtype=torch.float64)).item()
        if not tokens:
            self.noops += 1
            return {"noop": 1.0, "tokens": 0.0, "seconds": time.perf_counter() - started}
        old: list[Tensor] = []
        epochs = [self._epoch(selected, old, version) for _ in range(self.spec.num_epochs)]
        metrics = {name: sum(epoch[name] for epoch in epochs) / len(epochs) for name in epochs[0]}
        metrics |= {name: max(epoch[name] for epoch in epochs) for name in ("ratio_max", "lag_max")}
        metrics |= {name: epochs[0][name] for name in ("abs_log_ratio_mean", "abs_log_ratio_max")}
        return metrics | {"noop": 0.0, "tokens": tokens, "seconds": time.perf_counter() - started}

    def _epoch(self, selected: Sequence[Tokens], old: list[Tensor], version: int) -> dict[str, float]:
        """One pass and one optimizer step. The first epoch fills ``old`` with its log-probs, one tensor a micro-batch."""
        rate = self.spec.lr * min(1.0, (self.steps + 1) / max(1, self.spec.warmup_steps))
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        first_epoch = not old
        meter = Meter()
        for index, batch in enumerate(selected):
            last = index == len(selected) - 1
            with nullcontext() if last else self._accelerator.no_sync(self._scorer):
                logprobs = self._pass(batch, None if first_epoch else old[index], meter, version)
            if first_epoch:
                old.append(logprobs)
        norm = float(self._accelerator.clip_grad_norm_(self._scorer.parameters(), self.spec.grad_clip))
        metrics = meter.compute(self._total, self._largest)
        for name, value in (("loss", metrics["loss"]), ("gradient norm", norm)):
            if not math.isfinite(value):
                self._optimizer.zero_grad()
                raise LearnerError(f"step {self.steps} (weight version {version}): the {name} is {value}")
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.steps += 1
        return metrics | {"grad_norm": norm, "lr": rate}

    def _pass(self, batch: Tokens, old: Tensor | None, meter: Meter, version: int) -> Tensor:
        """Forward and backward of a micro-batch; its log-probs [N], which are also ``old`` in the first epoch."""
        scored = self._scorer(batch.token_ids, batch.rows, batch.columns)
        logprobs = scored.logprobs.detach()
        loss = self._loss(batch, scored, logprobs if old is None else old, meter)
        # Data-parallel ranks average their gradients; loss_weight divides by the whole step, so they must add.
        self._accelerator.backward(loss * self.world_size)
        meter.observe(logprobs, scored.entropies, batch.behavior, version - batch.versions)
        return logprobs

    def _loss(self, batch: Tokens, scored: Scored, old: Tensor, meter: Meter) -> Tensor:
        """This micro-batch's part of the loss of the step, by the formula at the head of the file."""
        spec = self.spec
        surrogate, stats = clipped_surrogate(
            scored.logprobs, old, batch.advantages, clip_low=spec.clip_param, clip_high=spec.clip_param_high
        )
        weight = truncated_importance_weight(old, batch.behavior, cap=spec.tis_cap)
        loss = policy_loss = (batch.loss_weight * weight * surrogate).sum()
        kl_loss = distill_loss = distill_kl = distilled = torch.zeros_like(policy_loss)
        if self._reference is not None:
            with torch.no_grad(), self._accelerator.autocast():
                reference = self._reference(batch.token_ids, batch.rows, batch.columns).logprobs
            kl_loss = spec.kl_coeff * (batch.loss_weight * kl_k3(scored.logprobs, reference)).sum()
            loss = loss + kl_loss
        if batch.teacher is not None:
            cost, divergence = self._distillation(batch.teacher, scored, weight * (scored.logprobs - old).exp())
            distill_loss = (batch.teacher.weight * cost).sum()
            loss, distill_kl = loss + distill_loss, divergence.sum()
            distilled = torch.full_like(distilled, len(divergence))
        meter.add(
            loss=loss,
            policy_loss=policy_loss,
            kl_loss=kl_loss,
            distill_loss=distill_loss,
            distill_kl=distill_kl,
            distilled_tokens=distilled,
            importance_weight=weight.sum(),
            clip_low=stats["clipped"][batch.advantages < 0].sum(),
            clip_high=stats["clipped"][batch.advantages > 0].sum(),
        )
        return loss

    def _distillation(self, teacher: Teacher, scored: Scored, ratio: Tensor) -> tuple[Tensor, Tensor]:
        """Cost and KL(student || teacher) of each distilled token, both [M]. ``ratio`` [N] is w pi / pi_old.

        The sampled form is a score-function estimate: its cost is the estimated KL, without gradient, times the ratio.
        """
        with torch.no_grad(), self._accelerator.autocast():
            # Not through the data-parallel wrapper: ranks take different numbers of teacher passes.
            target = self._accelerator.unwrap_model(self._scorer)(teacher.token_ids, teacher.rows, teacher.columns)
        if self.spec.distill_form == "sampled":
            divergence = reverse_kl_sampled(scored.logprobs[teacher.chosen].detach(), target.logprobs)
            return ratio[teacher.chosen] * divergence, divergence
        student = scored.distributions[teacher.chosen]
        if self.spec.distill_form == "top_k":
            divergence = reverse_kl_topk(student, target.distributions, self.spec.distill_top_k)
        else:
            divergence = reverse_kl_full(student, target.distributions)
        return divergence, divergence

    def _total(self, values: Tensor) -> Tensor:
        return self._accelerator.reduce(values.to(self._accelerator.device), reduction="sum")

    def _largest(self, values: Tensor) -> Tensor:
        return self._accelerator.gather(values.to(self._accelerator.device)[None]).amax(0)

    def weights(self) -> dict[str, Tensor]:
        """Detached CPU copies by Hugging Face name. An output layer tied to the embedding is not repeated."""
        state = self._accelerator.get_state_dict(self._scorer)
        return {name: state[f"lm.{name}"].detach().to("cpu", copy=True) for name in self._names}

    def set_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Load what ``weights`` gave.

        Raises:
            LearnerError: a name is missing or unknown.
        """
        if set(weights) != set(self._names):
            odd = sorted(set(weights) ^ set(self._names))
            raise LearnerError(f"weights do not fit the model {self.spec.model}: {odd[:3]}")
        self._lm.load_state_dict(dict(weights), strict=False)

    @torch.no_grad()
    def logprobs(self, token_ids: Sequence[int], start: int) -> list[float]:
        """Log-probs of token_ids[start:] given what is before each, at the learner's temperature. ``start`` >= 1."""
        if not 1 <= start < len(token_ids):
            raise ConfigError(f"start={start}: must be in [1, {len(token_ids) - 1}] for {len(token_ids)} tokens")
        ids = torch.tensor([list(token_ids)], device=self._accelerator.device)
        columns = torch.arange(start, len(token_ids), device=ids.device)
        return self._scorer(ids, torch.zeros_like(columns), columns).logprobs.tolist()

    def save_pretrained(self, path: str | Path) -> None:
        """Write a complete Hugging Face folder: weights, config, and the source folder's tokenizer, template and
        generation files. The folder appears whole or not at all; one that was there is replaced. Rank 0 writes."""
        state = self.weights()
        if self.rank:
            return
        with boundary(LearnerError, f"saving the model to {path}"), whole_folder(Path(path)) as folder:
            self._lm.save_pretrained(folder, state_dict=state)
            copy_companions(Path(self.spec.model), folder)

    def get_state(self) -> dict[str, Any]:
        """Everything the next step depends on, as CPU copies: weights, optimizer, step and no-op count, generator."""
        return {
            "weights": self.weights(),
            "optimizer": copy.deepcopy(send_to_device(self._optimizer.state_dict(), "cpu")),
            "steps": self.steps,
            "noops": self.noops,
            "rng": torch.get_rng_state(),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Load what ``get_state`` gave: the steps after it are those of the run that was saved, bit for bit.

        Raises:
            LearnerError: the state belongs to another model.
        """
        self.set_weights(state["weights"])
        self._optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        self.steps, self.noops = state["steps"], state["noops"]
        torch.set_rng_state(state["rng"])


class LearnerRank:
    """One rank of a process group of learners; a Ray actor when it runs. Kept apart from RLlib, whose import takes seconds."""

    def __init__(self, spec: LearnerSpec, rank: int, world_size: int, timeout_s: float) -> None:
        self._learner = AccelerateLearner(spec)
        self._rank = rank
        self._world_size = world_size
        self._timeout = timedelta(seconds=timeout_s)
        self._store: torch.distributed.TCPStore | None = None

    def listen(self) -> tuple[str, int]:
        """Rank 0: open the rendezvous on a port that the system chooses, and keep it."""
        host, _ = self.process()
        self._store = torch.distributed.TCPStore(
            host, 0, self._world_size, is_master=True, timeout=self._timeout, wait_for_workers=False
        )
        return host, self._store.port

    def build(self, host: str, port: int) -> None:
        """Join the process group at host:port and build the learner.

        Raises:
            LearnerError: Accelerate does not see the whole group, so that the rank would train alone.
        """
        # Accelerate takes its rank from torchrun's variables; a rank sees one device, hence LOCAL_RANK 0.
        values = {"RANK": self._rank, "WORLD_SIZE": self._world_size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        os.environ.update({name: str(value) for name, value in values.items()})
        os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port))
        store = self._store or torch.distributed.TCPStore(
            host, port, self._world_size, is_master=False, timeout=self._timeout
        )
        torch.distributed.init_process_group(
            "nccl" if torch.cuda.is_available() else "gloo",
            store=store,
            rank=self._rank,
            world_size=self._world_size,
            timeout=self._timeout,
        )
        self._learner.build()
        if (self._learner.rank, self._learner.world_size) != (self._rank, self._world_size):
            raise LearnerError(f"Accelerate sees {self._learner.world_size} processes instead of {self._world_size}")

    def call(self, method: str, *args: Any) -> Any:
        """Every rank takes part in every operation; rank 0 alone sends the result."""
        result = getattr(self._learner, method)(*args)
        return result if self._rank == 0 else None

    def process(self) -> tuple[str, int]:
        """Node address and process id."""
        import ray

        return ray.util.get_node_ip_address(), os.getpid()
