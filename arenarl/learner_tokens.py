"""A micro-batch on the learner's device: its trained tokens, and the distilled ones among them as their teacher sees them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arenarl.batching import MicroBatch


@dataclass(frozen=True)
class Tokens:
    """The trained tokens of a micro-batch: token_ids [B, T], everything else [N]. ``teacher`` is None without one."""

    token_ids: Tensor
    rows: Tensor
    columns: Tensor
    behavior: Tensor
    advantages: Tensor
    loss_weight: Tensor
    versions: Tensor
    teacher: Teacher | None = None

    @classmethod
    def select(cls, batch: MicroBatch, device: torch.device) -> Tokens:
        rows, columns = batch.mask.nonzero()
        chosen = (batch.behavior_logprobs, batch.weights, batch.loss_weight, batch.versions)
        arrays = (batch.token_ids, rows, columns, *(array[rows, columns] for array in chosen))
        teacher = Teacher.select(batch, rows, columns, device) if len(batch.teacher_ids) else None
        return cls(*_to(device, *arrays), teacher)


@dataclass(frozen=True)
class Teacher:
    """The distilled ones of the N trained tokens, as the teacher sees them: token_ids [B', T'], everything else [M].

    ``chosen`` are their indices among the N, ``weight`` is lambda times the loss weight.
    """

    token_ids: Tensor
    rows: Tensor
    columns: Tensor
    chosen: Tensor
    weight: Tensor

    @classmethod
    def select(
        cls, batch: MicroBatch, rows: NDArray[np.int64], columns: NDArray[np.int64], device: torch.device
    ) -> Self:
        weight = batch.distill_weight[rows, columns]
        chosen = weight.nonzero()[0]
        lines = np.searchsorted(batch.teacher_rows, rows[chosen])  # teacher_rows ascend
        teacher_columns = columns[chosen] + batch.teacher_shift[lines]
        return cls(*_to(device, batch.teacher_ids, lines, teacher_columns, chosen, weight[chosen]))


def _to(device: torch.device, *arrays: NDArray[Any]) -> list[Tensor]:
    return [torch.from_numpy(array).to(device) for array in arrays]
