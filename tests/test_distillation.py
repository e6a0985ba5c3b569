"""Distillation in the learner, on a real tiny model: gradients against autograd by hand, and where nothing may change."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from arenarl.errors import ConfigError
from arenarl.learner import AccelerateLearner, LearnerSpec
from arenarl.types import Episode
from tests.learning import GRADIENT, built, distance, episode, ids, packed, tiny_model

VOCAB = 61
MEMORY, SPLICE = (50, 51, 52), 3


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("distillation") / "model", vocab_size=VOCAB)


@pytest.fixture(scope="module")
def build(model_dir: Path) -> partial[AccelerateLearner]:
    return partial(built, model_dir)


def attempt(learner: AccelerateLearner, sampled: int, seed: int = 0, shift: float = 0.0) -> Episode:
    """A prompt of five tokens that all attempts share, and so many sampled ones."""
    tokens = [x % VOCAB for x in (*ids(5), *ids(sampled, seed + 1))]
    return episode(tokens, [x + shift for x in learner.logprobs(tokens, start=5)])


def spliced(tokens: tuple[int, ...]) -> list[int]:
    return [*tokens[:SPLICE], *MEMORY, *tokens[SPLICE:]]


def log_distributions(model: nn.Module, tokens: list[int], sampled: int) -> Tensor:
    """Of the last ``sampled`` tokens, from Hugging Face's own logits, at temperature 0.7: [sampled, V]."""
    return (model(torch.tensor([tokens])).logits[0, -sampled - 1 : -1] / 0.7).log_softmax(-1)


def test_gradient_of_the_full_form_is_that_of_the_divergence(
    build: partial[AccelerateLearner], model_dir: Path
) -> None:
    """lambda / (2 episodes * 4 tokens) * sum of KL, against Hugging Face's logits and autograd."""
    from transformers import AutoModelForCausalLM

    learner = build(temperature=0.7, **GRADIENT)
    before = learner.weights()
    episodes = [attempt(learner, 4), attempt(learner, 2, seed=9)]
    batch = packed(episodes, [0.0, 0.0], lambdas=[3.0, 0.0], memory=MEMORY, splice=SPLICE)
    metrics = learner.update(batch.shards[0], 0)
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    tokens = episodes[0].segments[0].token_ids
    student, teacher = (log_distributions(model, ids, 4) for ids in (list(tokens), spliced(tokens)))
    kl = (student.exp() * (student - teacher.detach())).sum(-1)
    (3.0 / (2 * 4) * kl.sum()).backward()
    assert distance(learner.weights(), {name: before[name] - p.grad for name, p in model.named_parameters()}) < 1e-5
    assert distance(learner.weights(), before) > 1e-2
    assert metrics["distill_kl"] == pytest.approx(kl.mean().item(), abs=1e-5)
    assert metrics["loss"] == pytest.approx(metrics["distill_loss"]) == pytest.approx(1.5 * kl.mean().item(), abs=1e-5)
    assert (metrics["policy_loss"], metrics["distilled_tokens"], metrics["tokens"]) == (0.0, 4.0, 4.0)


def test_the_sampled_form_averages_to_the_gradient_of_the_full_one(build: partial[AccelerateLearner]) -> None:
    """Every token of the vocabulary in turn after one prompt, each with its probability as weight."""
    full, sampled = build(**GRADIENT), build(distill_form="sampled", **GRADIENT)
    prompt = [x % VOCAB for x in ids(5)]
    everyone = [episode([*prompt, v], full.logprobs([*prompt, v], start=5)) for v in range(VOCAB)]
    probabilities = [float(np.exp(e.segments[0].logprobs[-1])) for e in everyone]
    one = packed(everyone[:1], [0.0], lambdas=[1.0], memory=MEMORY, splice=SPLICE)
    every = packed(
        everyone, [0.0] * VOCAB, lambdas=[VOCAB * p for p in probabilities], memory=MEMORY, splice=SPLICE,
        tokens_per_microbatch=10_000,
    )  # fmt: skip
    exact, estimate = full.update(one.shards[0], 0), sampled.update(every.shards[0], 0)
    assert distance(full.weights(), sampled.weights()) < 1e-5
    assert distance(full.weights(), build().weights()) > 1e-3
    assert estimate["distill_loss"] == pytest.approx(exact["distill_kl"], abs=1e-5)


def test_the_sampled_form_weighs_by_the_importance_of_the_token(build: partial[AccelerateLearner]) -> None:
    """Engine log-probs lower by log 1.5 and log 4: importance 1.5 and, capped, 2."""
    costs = []
    for shift in (0.0, -np.log(1.5), -np.log(4.0)):
        learner = build(distill_form="sampled", lr=0.0)
        batch = packed([attempt(learner, 1, shift=shift)], [0.0], lambdas=[1.0], memory=MEMORY, splice=SPLICE)
        costs.append(learner.update(batch.shards[0], 0)["distill_loss"])
    assert costs[0] != 0.0
    assert [cost / costs[0] for cost in costs] == pytest.approx([1.0, 1.5, 2.0], rel=1e-4)


def test_top_k_of_all_but_one_is_the_full_form_and_fewer_see_less(build: partial[AccelerateLearner]) -> None:
    learners = {k: build(distill_form="top_k", distill_top_k=k, **GRADIENT) for k in (2, VOCAB - 1, VOCAB)}
    full = build(**GRADIENT)
    batch = packed([attempt(full, 6)], [1.0], lambdas=[0.5], memory=MEMORY, splice=SPLICE).shards[0]
    exact, seen = full.update(batch, 0), {k: learner.update(batch, 0) for k, learner in learners.items()}
    for k in (VOCAB - 1, VOCAB):
        assert distance(learners[k].weights(), full.weights()) < 1e-5
    assert 0 < seen[2]["distill_kl"] < exact["distill_kl"]


@pytest.mark.parametrize("form", ["full", "top_k", "sampled"])
def test_a_teacher_without_a_memory_agrees_exactly(build: partial[AccelerateLearner], form: str) -> None:
    """A batch made by hand, since packing leaves an empty memory out."""
    learner = build(distill_form=form, lr=0.0)
    [mb] = packed([attempt(learner, n, seed=n) for n in (4, 9)], [0.0, 0.0], keep_zero_weights=True).shards[0]
    teacher = {"teacher_ids": mb.token_ids, "teacher_rows": np.arange(2), "teacher_shift": np.zeros(2, np.int64)}
    metrics = learner.update([replace(mb, distill_weight=mb.loss_weight, **teacher)], 0)
    assert metrics["distilled_tokens"] == 13.0
    assert metrics["distill_kl"] == metrics["distill_loss"] == 0.0


@pytest.mark.parametrize(("lambdas", "memory"), [((0.0, 0.0), MEMORY), ((1.0, 1.0), ())])
def test_no_weight_or_no_memory_is_the_step_without_a_distillation(
    build: partial[AccelerateLearner], lambdas: tuple[float, ...], memory: tuple[int, ...]
) -> None:
    plain, idle = build(), build()
    episodes = [attempt(plain, n, seed=n, shift=-0.1) for n in (4, 9)]
    without = plain.update(packed(episodes, [1.0, -2.0]).shards[0], 0)
    batch = packed(episodes, [1.0, -2.0], lambdas=lambdas, memory=memory, splice=SPLICE).shards[0]
    assert {**idle.update(batch, 0), "seconds": 0} == {**without, "seconds": 0}
    assert distance(plain.weights(), idle.weights()) == 0.0


def test_the_policy_gradient_is_the_same_beside_a_distillation(build: partial[AccelerateLearner]) -> None:
    plain, both = build(lr=0.0), build(lr=0.0)
    episodes = [attempt(plain, n, seed=n, shift=-0.1) for n in (4, 9)]
    options = {"lambdas": [1.0, 0.5], "memory": MEMORY, "splice": SPLICE}
    without = plain.update(packed(episodes, [1.0, -2.0]).shards[0], 0)
    beside = both.update(packed(episodes, [1.0, -2.0], **options).shards[0], 0)
    assert beside["policy_loss"] == without["policy_loss"]
    assert beside["loss"] == pytest.approx(beside["policy_loss"] + beside["distill_loss"])
    assert beside["distill_loss"] > 0


@pytest.mark.parametrize("budget", [1, 40])
def test_gradient_does_not_depend_on_the_cut(build: partial[AccelerateLearner], budget: int) -> None:
    whole, cut = build(**GRADIENT), build(**GRADIENT)
    episodes = [attempt(whole, n, seed=n) for n in (3, 17, 8, 1)]
    options = {"lambdas": [1.0, 0.0, 0.5, 2.0], "memory": MEMORY, "splice": SPLICE}
    for learner, tokens in ((whole, 1000), (cut, budget)):
        batch = packed(episodes, [1.0, -1.0, 0.0, 0.5], tokens_per_microbatch=tokens, **options)
        learner.update(batch.shards[0], 0)
    assert distance(whole.weights(), cut.weights()) < 1e-5


def test_the_student_comes_to_do_without_the_memory_what_the_teacher_does_with_it(
    build: partial[AccelerateLearner],
) -> None:
    """The second epoch of a step meets a teacher that has moved along, so the gap is measured anew each time."""
    learner = build(lr=1e-3, num_epochs=2)
    episodes = [attempt(learner, 8)]
    batch = packed(episodes, [0.0], lambdas=[1.0], memory=MEMORY, splice=SPLICE).shards[0]
    gaps = [learner.update(batch, version)["distill_kl"] for version in range(6)]
    assert gaps[-1] < 0.5 * gaps[0]


def test_unknown_forms_are_refused() -> None:
    with pytest.raises(ConfigError, match="distill_form='half': must be 'full', 'top_k' or 'sampled'"):
        LearnerSpec(model="m", distill_form="half")
    with pytest.raises(ConfigError, match="distill_top_k=0: must be above 0"):
        LearnerSpec(model="m", distill_top_k=0)
