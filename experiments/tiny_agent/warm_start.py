"""Warm-start the tiny agent for both roles of ARISE: solve travel tasks, and write them.

    python experiments/tiny_agent/warm_start.py --init experiments/tiny_agent/model --out experiments/tiny_agent/arise

One torch thread. Goes on from the tiny travel agent: the free places of its vocabulary are filled with the pieces that
the new text needs most, then it is trained on demonstrations of both roles, a third of them with a note of advice.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from demonstrations import drill, words
from generator_demonstrations import Demonstration, generator_demonstrations, row_drill, solver_demonstrations
from pretrain import Document, encode_conversation, encode_drill, tool_schemas, train
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

from arenarl.chat import ChatRenderer
from arenarl.envs.travel import TravelTasks
from arenarl.envs.travel_world import PLACE_NAMES

HELD = 64


def extend_tokenizer(folder: Path, out: Path, texts: Sequence[str], size: int) -> dict[int, list[int]]:
    """Copy a tokenizer to ``out`` and fill its vocabulary up to ``size`` with the pieces that save most tokens.

    Returns:
        For each new token the ids that it was before, whose embeddings it starts from.
    """
    old = AutoTokenizer.from_pretrained(folder)
    core = old.backend_tokenizer
    pieces = Counter(piece for text in texts for piece, _ in core.pre_tokenizer.pre_tokenize_str(text))
    known = old.get_vocab()
    spelled = {piece: [token.id for token in core.model.tokenize(piece)] for piece in pieces if piece not in known}
    ranked = sorted(spelled, key=lambda piece: (-pieces[piece] * (len(spelled[piece]) - 1), piece))
    chosen = [piece for piece in ranked if "<" not in piece][: size - len(known)]
    out.mkdir(parents=True, exist_ok=True)
    old.save_pretrained(out)
    if chosen:
        state = json.loads((out / "tokenizer.json").read_text())
        vocabulary = state["model"]["vocab"]
        # marks that were added later get a place in the model too, so that the ids have no gap
        vocabulary.update({added["content"]: added["id"] for added in state["added_tokens"]})
        vocabulary.update({piece: len(known) + n for n, piece in enumerate(chosen)})
        (out / "tokenizer.json").write_text(json.dumps(state, ensure_ascii=False))
    return {len(known) + n: spelled[piece] for n, piece in enumerate(chosen)}


def encode_demonstration(renderer: ChatRenderer, tools: list[dict], demonstration: Demonstration) -> Document:
    """Ids and loss mask, with the note where the rollouts put it: as ids of its own behind the content of a message."""
    messages, memory = demonstration
    ids, mask = encode_conversation(renderer, tools, messages)
    if memory is None:
        return ids, mask
    at = renderer.splice_point(messages[:2], tools, memory.place)
    note = renderer.encode_foreign(memory.text)
    return ids[:at] + note + ids[at:], mask[:at] + [False] * len(note) + mask[at:]


def all_demonstrations(count: int, seed: int, written_share: float) -> list[Demonstration]:
    """``count`` conversations in cities of both splits, ``written_share`` of them of the writer."""
    splits = ("train", "heldout")
    writers = round(count * written_share)
    return generator_demonstrations(writers, seed, splits) + solver_demonstrations(count - writers, seed, splits)


@torch.no_grad()
def grow(model: Qwen3ForCausalLM, tokens: dict[int, list[int]]) -> None:
    """Start each new token at the mean embedding of the tokens that it replaces."""
    embedding = model.model.embed_tokens.weight
    for token, before in tokens.items():
        embedding[token] = embedding[before].mean(0)


def corpus(demonstrations: Sequence[Demonstration]) -> list[str]:
    return [m["content"] for messages, _ in demonstrations for m in messages] + [
        memory.text for _, memory in demonstrations if memory
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--init", type=Path, required=True, help="folder of the agent to go on from")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=6000, help="tokens per step")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--demonstrations", type=int, default=8000)
    parser.add_argument("--written-share", type=float, default=0.5, help="share of demonstrations that write a task")
    parser.add_argument("--drill-share", type=float, default=0.08, help="share of steps on copy drills")
    parser.add_argument("--seed", type=int, default=3)
    args = parser.parse_args()
    args.drill_steps = 0
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    played = all_demonstrations(args.demonstrations, args.seed, args.written_share)
    model = Qwen3ForCausalLM.from_pretrained(args.init, dtype=torch.float32)
    rng.shuffle(played)
    grow(model, extend_tokenizer(args.init, args.out, corpus(played[:2000]), model.config.vocab_size))
    tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(args.out)
    renderer, tools = ChatRenderer(tokenizer), tool_schemas()
    demos = [encode_demonstration(renderer, tools, demonstration) for demonstration in played]
    held = all_demonstrations(HELD, args.seed + 1000, args.written_share)
    held_documents = [encode_demonstration(renderer, tools, demonstration) for demonstration in held]
    names = words(list(TravelTasks().world.cities))
    texts = [row_drill(rng, PLACE_NAMES) if n % 2 else drill(rng, names, 0.5) for n in range(12_000)]
    drills = [encode_drill(tokenizer, *text) for text in texts]
    lengths = sorted(len(ids) for ids, _ in demos)
    print(f"vocabulary {len(tokenizer)}, tokens an episode: median {lengths[len(lengths) // 2]}, most {lengths[-1]}")
    train(model, demos, drills, held_documents, args)
    model.to(torch.bfloat16).save_pretrained(args.out)
    shutil.rmtree(args.out / "checkpoint", ignore_errors=True)


if __name__ == "__main__":
    main()
