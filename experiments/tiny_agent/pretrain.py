"""Make the tiny travel agent: tokenizer, demonstrations, supervised training, model card.

    python experiments/tiny_agent/pretrain.py --out experiments/tiny_agent/model

One torch thread. The model is a Qwen3 of about one million parameters. Its tokenizer gives a word the same token (or the
same with a space) wherever it stands, and its weights start with heads that look back, so that names can be copied.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from demonstrations import TOOLS, demonstrations, drill, words
from jinja2 import Template
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from arenarl.chat import ChatRenderer
from arenarl.envs.travel import TravelTasks
from arenarl.envs.travel_server import TravelTools
from arenarl.types import Message

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CALL_MARKS = ("<tool_call>", "</tool_call>")
SPACE = "Ġ"  # how byte-level tokenizers write a space
SPLIT = r" ?[\p{L}_]+| ?\p{N}{1,2}|[^\p{L}\p{N}_]+(?= [\p{L}\p{N}_])|[^\p{L}\p{N}_]+"
CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- if loop.first and tools %}
{{- '\\nTools: ' }}
{%- for tool in tools %}
{{- tool.function.name + '(' + (tool.function.parameters.properties.keys() | join(', ')) + ')' }}
{{- '\\n' if loop.last else '; ' }}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
Document = tuple[list[int], list[bool]]


def tool_schemas() -> list[dict]:
    """The tools as the template sees them; only names and argument names matter to it."""
    parameters = {name: inspect.signature(getattr(TravelTools, name)).parameters for name in TOOLS}
    return [
        {
            "type": "function",
            "function": {"name": n, "parameters": {"properties": {a: {} for a in args if a != "self"}}},
        }
        for n, args in parameters.items()
    ]


def make_tokenizer(texts: list[str], names: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE in which every common word, number and run of punctuation is one token, with and without a space before it."""
    splitter = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [splitter, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=list(SPECIAL),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    core.train_from_iterator(texts, trainer)
    state = json.loads(core.to_str())
    parts = [part for text in texts for part in re.split("|".join(map(re.escape, (*SPECIAL, *CALL_MARKS))), text)]
    counts = Counter(piece for part in parts for piece, _ in core.pre_tokenizer.pre_tokenize_str(part))
    whole = [piece for piece, count in counts.items() if count >= 20]
    whole += [prefix + word for word in [*names, *map(str, range(100))] for prefix in ("", SPACE)]
    vocabulary = state["model"]["vocab"]
    for piece in dict.fromkeys(whole):
        vocabulary.setdefault(piece, len(vocabulary))
    merges = [tuple(merge) for merge in state["model"]["merges"]]
    core.model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=SPECIAL[0], eos_token=SPECIAL[2], model_max_length=1024,
        additional_special_tokens=[SPECIAL[1]],
    )  # fmt: skip
    tokenizer.add_tokens(list(CALL_MARKS))
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@torch.no_grad()
def prepare_to_copy(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Start from weights that can look back: without this, copying a name out of a table takes many thousands of steps.

    A word with a space before it starts as the word plus one common vector. One head of layer 0 attends to the token
    before and writes part of it beside the current one; two heads of layer 1 attend to where the current token stood
    before (its trace beside the token that followed) and copy that. Everything is trained from there.
    """
    embedding, width = model.model.embed_tokens.weight, model.config.head_dim
    vocabulary, space = tokenizer.get_vocab(), torch.randn(embedding.shape[1]) * 0.01
    for piece, place in vocabulary.items():
        if piece.startswith(SPACE) and piece[1:] in vocabulary:
            embedding[place] = embedding[vocabulary[piece[1:]]] + space
    embedding[:, -1] = 0.06  # a constant that a head without content can hold on to
    for (
        layer
    ) in model.model.layers:  # each layer starts by adding nothing, so what the three heads write is not drowned
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    rates = [model.config.rope_parameters["rope_theta"] ** (-2 * i / width) for i in range(width // 2)]
    previous, match = model.model.layers[0].self_attn, model.model.layers[1].self_attn
    half, eye = width // 2, torch.eye(width)
    for weight in (previous.q_proj.weight, previous.k_proj.weight, previous.v_proj.weight):
        weight[:width] *= 0.05
    for i in (
        0,
        1,
    ):  # the fastest rotations tell neighbours apart: a query turned back by one step fits the token before
        previous.q_proj.weight[i, -1], previous.q_proj.weight[i + half, -1] = math.cos(rates[i]), -math.sin(rates[i])
        previous.k_proj.weight[i, -1] = 1.0
        for norm in (previous.q_norm.weight, previous.k_norm.weight):
            norm[[i, i + half]] = 2.5
    previous.v_proj.weight[:width, :width] += eye
    previous.o_proj.weight[width : 2 * width, :width] += 0.06 * eye
    slow = [i for i in range(half) if rates[i] < 0.006]  # rotations that leave the match alone over hundreds of tokens
    dims = slow + [i + half for i in slow]
    for norm in (match.q_norm.weight, match.k_norm.weight):
        norm[dims] = 2.0
    for query, key, first in ((0, 0, 2 * width), (2, 1, 3 * width)):
        rows, keys = slice(query * width, (query + 1) * width), slice(key * width, (key + 1) * width)
        for weight, part in ((match.q_proj.weight, rows), (match.k_proj.weight, keys), (match.v_proj.weight, keys)):
            weight[part] *= 0.05
        for n, d in enumerate(dims):
            match.q_proj.weight[query * width + d, n] = 1.0
            match.k_proj.weight[key * width + d, width + n] = 1.0
        match.v_proj.weight[keys, first : first + width] += eye
        match.o_proj.weight[first : first + width - 1, query * width : (query + 1) * width - 1] += 0.1 * torch.eye(
            width - 1
        )


def new_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 64) * 64, hidden_size=128, intermediate_size=384, num_hidden_layers=5,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    prepare_to_copy(model, tokenizer)
    return model


def encode_conversation(renderer: ChatRenderer, tools: list[dict], messages: list[Message]) -> Document:
    """Ids and loss mask, built by the very renderer that the rollouts use, so training text is rollout text."""
    first = next(i for i, m in enumerate(messages) if m["role"] == "assistant")
    ids = renderer.prompt(messages[:first], tools)
    mask = [False] * len(ids)
    at = first
    while at < len(messages):
        said = [
            *renderer.tokenizer.encode(messages[at]["content"], add_special_tokens=False),
            renderer.tokenizer.eos_token_id,
        ]
        ids, mask = ids + said, mask + [True] * len(said)
        end = next((i for i in range(at + 1, len(messages)) if messages[i]["role"] == "assistant"), None)
        if end is None:
            break
        glue = renderer.glue(messages[: at + 1], messages[at + 1 : end], tools)
        assert glue is not None, "the template of the tiny agent never rewrites history"
        ids, mask, at = ids + glue, mask + [False] * len(glue), end
    return ids, mask


def encode_drill(tokenizer: PreTrainedTokenizerFast, context: str, continuation: str) -> Document:
    head, tail = (tokenizer.encode(text, add_special_tokens=False) for text in (context, continuation))
    return [*head, *tail, tokenizer.eos_token_id], [False] * len(head) + [True] * (len(tail) + 1)


def batch_loss(model: Qwen3ForCausalLM, documents: list[Document]) -> torch.Tensor:
    """Mean cross entropy over the masked tokens; only their positions reach the output layer."""
    width = max(len(ids) for ids, _ in documents)
    tokens = torch.zeros(len(documents), width, dtype=torch.long)
    mask = torch.zeros(len(documents), width, dtype=torch.bool)
    for row, (ids, learn) in enumerate(documents):
        tokens[row, : len(ids)], mask[row, : len(ids)] = torch.tensor(ids), torch.tensor(learn)
    hidden = model.model(tokens).last_hidden_state[:, :-1]  # right padding: causal attention never sees it
    chosen = mask[:, 1:]
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[chosen]), tokens[:, 1:][chosen])


def batches(documents: list[Document], tokens_per_batch: int, rng: random.Random) -> Iterator[list[Document]]:
    """Endless batches of similar length, reshuffled each pass."""
    while True:
        by_length = sorted(documents, key=lambda d: len(d[0]) + rng.random())
        packs: list[list[Document]] = [[]]
        for document in by_length:
            if len(document[0]) * (len(packs[-1]) + 1) > tokens_per_batch and packs[-1]:
                packs.append([])
            packs[-1].append(document)
        rng.shuffle(packs)
        yield from packs


def optimizers(model: Qwen3ForCausalLM, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the hidden matrices, AdamW for the tied embedding and the norms."""
    hidden = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    rest = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    return [
        torch.optim.Muon(hidden, lr=lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def train(
    model: Qwen3ForCausalLM,
    demos: list[Document],
    drills: list[Document],
    held: list[Document],
    args: argparse.Namespace,
) -> None:
    rng = random.Random(args.seed)
    demo_batches, drill_batches = batches(demos, args.tokens, rng), batches(drills, args.tokens // 2, rng)
    optims = optimizers(model, args.lr)
    started = time.monotonic()
    for step in range(args.steps):
        scale = min(1.0, (step + 1) / 50) * max(0.02, 1 - step / args.steps)
        for optim in optims:
            for group in optim.param_groups:
                group["lr"] = args.lr * scale
        # copying is learned from dense repetition first; then drills fade to a small share
        on_drill = rng.random() < (0.8 if step < args.drill_steps else args.drill_share)
        loss = batch_loss(model, next(drill_batches if on_drill else demo_batches))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optim in optims:
            optim.step()
            optim.zero_grad(set_to_none=True)
        if step % 50 == 0 or step == args.steps - 1:
            with torch.no_grad():
                fresh = sum(float(batch_loss(model, held[i : i + 16])) for i in range(0, 64, 16)) / 4
                copy = float(batch_loss(model, drills[:64]))
            print(
                f"step {step} held-out demonstrations {fresh:.3f} drills {copy:.3f} {time.monotonic() - started:.0f} s",
                flush=True,
            )
        if step and step % 500 == 0:
            model.save_pretrained(args.out / "checkpoint")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1800)
    parser.add_argument("--drill-steps", type=int, default=150)
    parser.add_argument("--drill-share", type=float, default=0.15, help="share of drills after the first steps")
    parser.add_argument("--tokens", type=int, default=6000, help="tokens per step")
    parser.add_argument("--lr", type=float, default=7e-3)
    parser.add_argument("--demonstrations", type=int, default=10000)
    parser.add_argument("--all-cities", action="store_true", help="demonstrate in the cities of both splits")
    parser.add_argument("--quotes", type=float, default=0.0, help="share of drills that put words into JSON")
    parser.add_argument("--init", type=Path, help="go on from this folder, tokenizer included")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    splits = ("train", "heldout") if args.all_cities else ("train",)
    conversations = demonstrations(args.demonstrations, args.seed, splits)
    names = words(list(TravelTasks().world.cities))
    texts = [m["content"] for c in conversations[:2000] for m in c]
    texts += 20 * [Template(CHAT_TEMPLATE).render(messages=conversations[0], tools=tool_schemas())]
    tokenizer = AutoTokenizer.from_pretrained(args.init) if args.init else make_tokenizer(texts, names)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(args.out)
    renderer, tools = ChatRenderer(tokenizer), tool_schemas()
    demos = [encode_conversation(renderer, tools, c) for c in conversations]
    drills = [encode_drill(tokenizer, *drill(rng, names, args.quotes)) for _ in range(30_000)]
    held = [encode_conversation(renderer, tools, c) for c in demonstrations(64, seed=args.seed + 1000)]
    model = Qwen3ForCausalLM.from_pretrained(args.init, dtype=torch.float32) if args.init else new_model(tokenizer)
    mean = sum(len(ids) for ids, _ in demos) / len(demos)
    print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, vocabulary {len(tokenizer)}, {mean:.0f} tokens an episode",
        flush=True,
    )
    train(model, demos, drills, held, args)
    model.to(torch.bfloat16).save_pretrained(args.out)


if __name__ == "__main__":
    main()
