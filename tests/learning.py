"""A tiny model, and batches for a learner of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from arenarl.batching import Batch, Stream, pack, policy_gradient_stream
from arenarl.learner import AccelerateLearner, LearnerSpec
from arenarl.types import Episode, EpisodeGroup, Outcome, Segment, Task, Trajectory

GRADIENT = {"lr": 1e6, "adam_eps": 1e6, "grad_clip": 1e9}
"""With these options one optimizer step moves each weight by minus its gradient, so that weights show gradients:
Adam's first step is lr * g / (|g| + eps), which is g for lr = eps = 10^6."""

TASK = Task(task_id="t", kind="k", prompt="p")


def tiny_model(folder: Path, *, vocab_size: int = 512) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=vocab_size, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=256, initializer_range=0.1, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def built(model_dir: Path, **options: Any) -> AccelerateLearner:
    learner = AccelerateLearner(LearnerSpec(model=str(model_dir), **{"lr": 1e-2, **options}))
    learner.build()
    return learner


def ids(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(1, 512, n).tolist()


def episode(tokens: Sequence[int], logprobs: Sequence[float], *, version: int = 0) -> Episode:
    """The last len(logprobs) tokens are sampled."""
    context = len(tokens) - len(logprobs)
    return Episode(
        episode_id="e",
        task=TASK,
        member=0,
        greedy=False,
        segments=(
            Segment(
                token_ids=tuple(tokens),
                mask=(False,) * context + (True,) * len(logprobs),
                logprobs=(0.0,) * context + tuple(logprobs),
                versions=(-1,) * context + (version,) * len(logprobs),
            ),
        ),
        trajectory=Trajectory(messages=(), events=(), answer=None),
        outcome=Outcome.SCORED,
    )


def packed(
    episodes: Sequence[Episode],
    advantages: Sequence[float],
    *,
    lambdas: Sequence[float] = (),
    memory: Sequence[int] = (),
    splice: int = 0,
    **options: int | bool,
) -> Batch:
    """One group; with ``lambdas``, one for each episode, it is also distilled."""
    group = EpisodeGroup(
        group_id="g", task=TASK, episodes=tuple(episodes), version=0, advantages=tuple(advantages), rewards=()
    )
    streams = [policy_gradient_stream(group)]
    if lambdas:
        weights = tuple(
            tuple(np.full(len(s.token_ids), lam, dtype=np.float32) for s in e.segments)
            for e, lam in zip(episodes, lambdas, strict=True)
        )
        streams.append(Stream(name="distillation", weights=weights, memory_ids=tuple(memory), splice=splice))
    return pack([group], [streams], **{"tokens_per_microbatch": 64, **options})


def on_policy(learner: AccelerateLearner, sizes: Sequence[int], shift: float = 0.0) -> list[Episode]:
    """Episodes of five context tokens and so many sampled ones, with the learner's log-probs plus ``shift``."""
    episodes = []
    for seed, n in enumerate(sizes):
        tokens = ids(5 + n, seed)
        episodes.append(episode(tokens, [x + shift for x in learner.logprobs(tokens, start=5)]))
    return episodes


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)
