"""A Hugging Face causal language model as the learner needs it: load, score chosen tokens, export."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from arenarl.errors import ConfigError, boundary

COMPANIONS = (
    "tokenizer*", "chat_template*", "*.jinja", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "*.model", "generation_config.json",
)  # fmt: skip
"""Files beside the weights that an exported model needs and that training does not change."""

HEAD_TOLERANCE = 1e-3
"""Largest log-prob difference between ``TokenScorer`` and the model's own logits that ``build`` accepts."""


class Scored(NamedTuple):
    """Chosen tokens: log-probs [N], entropies [N] in nats and without gradient, and the log-distributions [N, V]."""

    logprobs: Tensor
    entropies: Tensor
    distributions: Tensor


class TokenScorer(nn.Module):
    """Log-probs of chosen tokens from the hidden states before them; logits of other positions are never computed."""

    def __init__(self, lm: nn.Module, temperature: float) -> None:
        super().__init__()
        self.lm = lm
        self.temperature = temperature

    def forward(self, token_ids: Tensor, rows: Tensor, columns: Tensor) -> Scored:
        """Score the tokens at (rows [N], columns [N]) of token_ids [B, T], each column >= 1."""
        hidden = self.lm.get_decoder()(input_ids=token_ids[:, :-1], use_cache=False).last_hidden_state
        logits = self.lm.get_output_embeddings()(hidden[rows, columns - 1]).float() / self.temperature
        distributions = torch.log_softmax(logits, dim=-1)
        with torch.no_grad():
            entropies = torch.special.entr(distributions.exp()).sum(-1)
        logprobs = distributions.gather(1, token_ids[rows, columns, None]).squeeze(1)
        return Scored(logprobs, entropies, distributions)


def load_causal_lm(model: str) -> nn.Module:
    """The causal language model of a folder, in float32, in evaluation mode."""
    from transformers import AutoModelForCausalLM

    if not (Path(model) / "config.json").is_file():
        raise ConfigError(f"model={model!r}: no config.json there; give a Hugging Face model folder")
    with boundary(ConfigError, f"model={model!r} does not load as a causal language model"):
        lm, info = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True, output_loading_info=True
        )
    if info["missing_keys"]:
        raise ConfigError(f"model={model!r} lacks weights: {sorted(info['missing_keys'])[:3]}")
    return lm.eval()


@torch.no_grad()
def check_head(scorer: TokenScorer, model: str) -> None:
    """Refuse models that scale or cap their logits after the output layer, by comparing with their own logits."""
    ids = torch.tensor([[0, 1, 2]])
    ours = scorer(ids, torch.tensor([0, 0]), torch.tensor([1, 2])).logprobs
    logits = scorer.lm(input_ids=ids).logits[0, :-1] / scorer.temperature
    theirs = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None]).squeeze(1)
    if (ours - theirs).abs().max() > HEAD_TOLERANCE:
        raise ConfigError(f"model={model!r} transforms its logits after the output layer, which is not supported")


def stored_names(lm: nn.Module) -> tuple[str, ...]:
    """State-dict names, each storage once: the name of a tied weight is that of its first owner."""
    owners = {name for name, _ in (*lm.named_parameters(), *lm.named_buffers())}
    return tuple(name for name in lm.state_dict() if name in owners)


def copy_companions(source: Path, target: Path) -> None:
    """Copy the tokenizer, template and generation files of one model folder into another."""
    for pattern in COMPANIONS:
        for path in source.glob(pattern):
            copy_to = shutil.copytree if path.is_dir() else shutil.copy2
            copy_to(path, target / path.name)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A new folder beside ``path`` that takes its place when the block ends well and is removed when it does not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    fresh, previous = scratch / "new", scratch / "old"
    try:
        fresh.mkdir()
        yield fresh
        if path.exists():
            path.rename(previous)
        fresh.rename(path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
