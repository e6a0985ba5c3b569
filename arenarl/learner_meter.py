"""Sums and maxima over the tokens of one epoch, for the metrics of a learner step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from arenarl.functional import kl_k3

LOSSES = ("loss", "policy_loss", "kl_loss", "distill_loss")
"""Weighted sums, reported as they are; every other sum is reported as a mean per token."""


class Meter:
    """What the micro-batches of one epoch add up to."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor | float] = {}
        self._largest: dict[str, float] = {"ratio_max": 0.0, "abs_log_ratio_max": 0.0, "lag_max": 0.0}

    def add(self, **sums: Tensor) -> None:
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + value.detach().double()

    def observe(self, logprobs: Tensor, entropies: Tensor, behavior: Tensor, lag: Tensor) -> None:
        """Trained tokens, all [N]: log-probs here and in the engine, entropies, and age in weight versions."""
        log_ratio = logprobs - behavior
        per_token = {"ratio": log_ratio.exp(), "abs_log_ratio": log_ratio.abs(), "lag": lag.float()}
        self.add(
            kl_behavior=kl_k3(logprobs, behavior).sum(),
            entropy=entropies.sum(),
            tokens=torch.tensor(float(len(logprobs)), device=logprobs.device),
            **{f"{name}_mean": value.sum() for name, value in per_token.items()},
        )
        if len(logprobs):
            for name, value in per_token.items():
                self._largest[f"{name}_max"] = max(self._largest[f"{name}_max"], float(value.max()))

    def compute(self, total: Callable[[Tensor], Tensor], largest: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Combine the ranks: ``total`` adds a vector over them, ``largest`` takes its maximum.

        ``distill_kl`` is a mean per distilled token; without one, nothing is said of the distillation.
        """
        sums = dict(zip(self._sums, total(torch.stack(list(self._sums.values()))).tolist(), strict=True))
        tokens, distilled = sums.pop("tokens"), sums.pop("distilled_tokens")
        distillation = {"distill_loss": sums.pop("distill_loss"), "distill_kl": sums.pop("distill_kl")}
        metrics = {name: value if name in LOSSES else value / tokens for name, value in sums.items()}
        if distilled:
            distillation["distill_kl"] /= distilled
            metrics |= distillation | {"distilled_tokens": distilled}
        maxima = largest(torch.tensor(list(self._largest.values()))).tolist()
        return metrics | dict(zip(self._largest, maxima, strict=True))
