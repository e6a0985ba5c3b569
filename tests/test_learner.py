"""The learner on a real tiny model: the loss worked by hand, invariances, resume and export; Ray in the last tests only."""

import math
import os
import select
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ray.rllib.core.learner.learner_group import LearnerGroup

from arenarl.errors import ConfigError, LearnerError
from arenarl.learner import AccelerateLearner, LearnerSpec
from arenarl.learner_group import AccelerateLearnerGroup
from arenarl.rllib_compat import UnbuiltLearner, unbuilt_module_spec
from tests.learning import GRADIENT, built, distance, episode, ids, on_policy, packed, tiny_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_model(tmp_path_factory.mktemp("learner") / "model")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@pytest.fixture(scope="module")
def build(model_dir: Path) -> Callable[..., AccelerateLearner]:
    return partial(built, model_dir)


def test_golden_loss(build: Callable[..., AccelerateLearner]) -> None:
    """Engine log-probs lower by log 1.5 and log 4 give weights 1.5 and, capped, 2.

    1/2 * (1.5 * -1) + 1/2 * (1/2 * (1 * 2 + 2 * 2)) = 0.75
    """
    learner = build()
    one, two = ids(6), ids(7, 1)
    logprob = learner.logprobs(one, start=5)[0]
    first, second = learner.logprobs(two, start=5)
    episodes = [episode(one, [logprob - math.log(1.5)]), episode(two, [first, second - math.log(4)])]
    metrics = learner.update(packed(episodes, [1.0, -2.0]).shards[0], 0)
    assert metrics["loss"] == pytest.approx(0.75, abs=1e-5)
    assert metrics["importance_weight"] == pytest.approx((1.5 + 1 + 2) / 3, abs=1e-5)
    assert metrics["ratio_max"] == pytest.approx(4.0, abs=1e-4)
    assert metrics["kl_behavior"] == pytest.approx(
        (1 / 1.5 - 1 + math.log(1.5) + 1 / 4 - 1 + math.log(4)) / 3, abs=1e-5
    )


def test_gradient_is_that_of_the_weighted_log_likelihood(
    build: Callable[..., AccelerateLearner], model_dir: Path
) -> None:
    """Against Hugging Face's own full logits and autograd, at temperature 0.7."""
    from transformers import AutoModelForCausalLM

    learner = build(temperature=0.7, **GRADIENT)
    before = learner.weights()
    tokens = ids(9)
    learner.update(packed([episode(tokens, learner.logprobs(tokens, start=5))], [3.0]).shards[0], 0)
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    logprobs = (model(torch.tensor([tokens])).logits[0] / 0.7).log_softmax(-1)
    (-3.0 * logprobs[range(4, 8), tokens[5:]].mean()).backward()
    after = {name: before[name] - p.grad for name, p in model.named_parameters()}
    assert distance(learner.weights(), after) < 1e-4


def test_own_log_probs_and_zero_rate_give_ratio_one_and_change_nothing(build: Callable[..., AccelerateLearner]) -> None:
    learner = build(lr=0.0, temperature=0.7)
    before = learner.weights()
    metrics = learner.update(packed(on_policy(learner, [4, 9]), [1.0, -1.0]).shards[0], 2)
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["abs_log_ratio_max"] < 1e-5
    assert (metrics["lag_mean"], metrics["lag_max"], metrics["tokens"]) == (2.0, 2.0, 13.0)
    assert distance(learner.weights(), before) == 0.0


def test_log_probs_read_at_another_temperature_show(build: Callable[..., AccelerateLearner]) -> None:
    cold, warm = build(temperature=0.7, lr=0.0), build(temperature=1.0, lr=0.0)
    assert warm.update(packed(on_policy(cold, [20]), [1.0]).shards[0], 0)["abs_log_ratio_mean"] > 0.1


def test_entropy_of_the_sampled_distribution(build: Callable[..., AccelerateLearner]) -> None:
    learner = build(lr=0.0)
    tokens = ids(6)
    metrics = learner.update(packed([episode(tokens, learner.logprobs(tokens, start=5))], [1.0]).shards[0], 0)
    logprobs = np.array([learner.logprobs([*tokens[:5], v], start=5)[0] for v in range(512)])
    assert metrics["entropy"] == pytest.approx(-(np.exp(logprobs) * logprobs).sum(), abs=1e-3)


def test_infinite_values_at_context_tokens_leave_the_gradient_finite(build: Callable[..., AccelerateLearner]) -> None:
    learner = build()
    [mb] = packed(on_policy(learner, [4]), [1.0]).shards[0]
    poisoned = replace(mb, **{f: np.where(mb.mask, getattr(mb, f), -np.inf) for f in ("behavior_logprobs", "weights")})
    assert math.isfinite(learner.update([poisoned], 0)["grad_norm"])
    assert all(w.isfinite().all() for w in learner.weights().values())


@pytest.mark.parametrize("field", ["behavior_logprobs", "weights"])
def test_nan_at_a_trained_token_stops_the_step(build: Callable[..., AccelerateLearner], field: str) -> None:
    learner = build()
    before = learner.weights()
    batch = packed(on_policy(learner, [4]), [1.0])
    bad = replace(batch.shards[0][0], **{field: np.full_like(batch.shards[0][0].weights, np.nan)})
    with pytest.raises(LearnerError, match=r"step 0 \(weight version 7\): the loss is nan"):
        learner.update([bad], 7)
    assert distance(learner.weights(), before) == 0.0
    assert learner.update(batch.shards[0], 7)["grad_norm"] > 0  # the poisoned gradient is gone


def test_nothing_to_train_on_changes_nothing(build: Callable[..., AccelerateLearner]) -> None:
    """After one real step, so that Adam's momentum would move the weights."""
    learner = build(warmup_steps=10)
    batch = packed(on_policy(learner, [4]), [1.0])
    learner.update(batch.shards[0], 0)
    before = learner.get_state()
    empty = packed(on_policy(learner, [4]), [1.0], num_shards=2).shards[1]
    assert learner.update([], 1)["noop"] == learner.update(empty, 1)["noop"] == 1.0
    after = learner.get_state()
    assert distance(after["weights"], before["weights"]) == 0.0
    assert (after["steps"], after["noops"]) == (1, 2)
    assert all(
        torch.equal(a["exp_avg"], before["optimizer"]["state"][i]["exp_avg"])
        for i, a in after["optimizer"]["state"].items()
    )


@settings(max_examples=6, suppress_health_check=list(HealthCheck))
@given(budget=st.integers(1, 120))
def test_gradient_does_not_depend_on_the_cut(build: Callable[..., AccelerateLearner], budget: int) -> None:
    whole, cut = build(**GRADIENT), build(**GRADIENT)
    episodes, advantages = on_policy(whole, [3, 17, 8, 1, 30], shift=-0.1), [1.0, -2.0, 0.5, 3.0, -1.0]
    whole.update(packed(episodes, advantages, tokens_per_microbatch=1000).shards[0], 0)
    cut.update(packed(episodes, advantages, tokens_per_microbatch=budget).shards[0], 0)
    assert distance(whole.weights(), cut.weights()) < 1e-5


def test_rate_warms_up_linearly_and_the_norm_is_clipped(build: Callable[..., AccelerateLearner]) -> None:
    learner = build(lr=1.0, adam_eps=1e9, warmup_steps=4, grad_clip=1e-3)
    batch = packed(on_policy(learner, [4]), [1.0]).shards[0]
    assert [learner.update(batch, 0)["lr"] for _ in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert learner.update(batch, 0)["grad_norm"] > 1e-3  # as it was before clipping


def test_the_clip_acts_from_the_second_epoch_on(build: Callable[..., AccelerateLearner]) -> None:
    """A step raises the log-probs of good tokens and lowers those of bad ones beyond a range of 0.0001."""
    for advantage, side in ((1.0, "clip_high"), (-1.0, "clip_low")):
        learner = build(num_epochs=2, clip_param=1e-4, clip_param_high=1e-4)
        metrics = learner.update(packed(on_policy(learner, [1]), [advantage]).shards[0], 0)
        assert (metrics["clip_low"], metrics["clip_high"]) == ((0.0, 0.5) if side == "clip_high" else (0.5, 0.0))
        assert learner.steps == 2
    once = build(num_epochs=1, clip_param=1e-4, clip_param_high=1e-4)
    assert once.update(packed(on_policy(once, [1], shift=-0.3), [1.0]).shards[0], 0)["clip_high"] == 0.0


def test_kl_pulls_back_to_the_starting_weights(build: Callable[..., AccelerateLearner]) -> None:
    learner, start = build(kl_coeff=1.0, lr=2e-3), build()
    episodes = on_policy(start, [10, 10])
    away = learner.update(packed(episodes, [5.0, 5.0]).shards[0], 0)
    assert away["kl_loss"] == pytest.approx(0.0, abs=1e-9)
    gaps = []
    for _ in range(8):
        metrics = learner.update(packed(episodes, [0.0, 0.0], keep_zero_weights=True).shards[0], 0)
        gaps.append(metrics["abs_log_ratio_mean"])
    assert gaps[-1] < 0.5 * gaps[0]


def test_training_makes_good_tokens_likelier(build: Callable[..., AccelerateLearner]) -> None:
    learner = build(lr=1e-3)
    good, bad = on_policy(learner, [6, 6])
    for version in range(5):
        learner.update(packed([good, bad], [1.0, -1.0]).shards[0], version)
    after_good, after_bad = on_policy(learner, [6, 6])
    assert sum(after_good.segments[0].logprobs) > sum(good.segments[0].logprobs) + 1
    assert sum(after_bad.segments[0].logprobs) < sum(bad.segments[0].logprobs) - 1


def test_resumed_steps_equal_the_uninterrupted_ones_bit_for_bit(
    build: Callable[..., AccelerateLearner], tmp_path: Path
) -> None:
    straight = build(warmup_steps=5, kl_coeff=0.1)
    batches = [packed(on_policy(straight, [n, 2 * n]), [1.0, -1.0]).shards[0] for n in (3, 5, 7, 9)]
    for version, batch in enumerate(batches[:2]):
        straight.update(batch, version)
    torch.save(straight.get_state(), tmp_path / "state.pt")
    resumed = build(warmup_steps=5, kl_coeff=0.1)
    resumed.set_state(torch.load(tmp_path / "state.pt", weights_only=True))
    for version, batch in enumerate(batches[2:], 2):
        a, b = straight.update(batch, version), resumed.update(batch, version)
        assert {**a, "seconds": 0} == {**b, "seconds": 0}
    assert distance(straight.weights(), resumed.weights()) == 0.0


def test_a_state_is_a_copy_and_of_one_model_only(build: Callable[..., AccelerateLearner]) -> None:
    learner = build()
    batch = packed(on_policy(learner, [4]), [1.0]).shards[0]
    learner.update(batch, 0)
    state = learner.get_state()
    kept = {name: w.clone() for name, w in state["weights"].items()}
    moment = state["optimizer"]["state"][0]["exp_avg"].clone()
    for _ in range(2):  # a state taken from the learner, then one given to it
        learner.update(batch, 1)
        assert distance(state["weights"], kept) == 0.0
        assert torch.equal(state["optimizer"]["state"][0]["exp_avg"], moment)
        learner.set_state(state)
    with pytest.raises(LearnerError, match="other"):
        learner.set_weights({**kept, "other": torch.zeros(1)})


def test_export_reloads_as_the_same_model(
    build: Callable[..., AccelerateLearner], model_dir: Path, tmp_path: Path
) -> None:
    learner = build()
    learner.update(packed(on_policy(learner, [4]), [1.0]).shards[0], 0)
    target = tmp_path / "runs" / "model"
    target.mkdir(parents=True)
    (target / "stale.txt").write_text("of an earlier export")
    learner.save_pretrained(target)
    again = AccelerateLearner(replace(learner.spec, model=str(target)))
    again.build()
    assert distance(again.weights(), learner.weights()) == 0.0
    assert (target / "chat_template.jinja").read_text() == "{{ messages }}"
    assert (target / "tokenizer.json").exists()
    assert not (target / "stale.txt").exists()
    assert [p.name for p in target.parent.iterdir()] == ["model"]


def test_tied_output_layer_is_not_repeated(build: Callable[..., AccelerateLearner]) -> None:
    names = build().weights().keys()
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def test_bad_models_and_values_are_refused(tmp_path: Path, model_dir: Path) -> None:
    from transformers import GraniteConfig, GraniteForCausalLM

    with pytest.raises(ConfigError, match=r"no config\.json"):
        AccelerateLearner(LearnerSpec(model=str(tmp_path))).build()
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    GraniteForCausalLM(GraniteConfig(**sizes, num_key_value_heads=1, logits_scaling=8.0)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="transforms its logits"):
        AccelerateLearner(LearnerSpec(model=str(tmp_path))).build()
    with pytest.raises(ConfigError, match=r"temperature=0\.0: must be above 0"):
        LearnerSpec(model=str(model_dir), temperature=0.0)


def test_version_rises_with_each_step_and_past_each_restore(model_dir: Path, tmp_path: Path) -> None:
    spec = LearnerSpec(model=str(model_dir), lr=1e-2)
    group = AccelerateLearnerGroup(spec)
    batch = packed([episode(ids(8), [-5.0] * 3)], [1.0])
    assert [group.update(batch)["version"], group.update(packed([], []))["version"]] == [1.0, 1.0]
    group.save_to_path(tmp_path / "a")
    saved = group.weights()
    assert [group.update(batch)["version"] for _ in range(3)] == [2.0, 3.0, 4.0]
    group.restore_from_path(tmp_path / "a")
    assert group.version == 5
    fresh = AccelerateLearnerGroup(spec)
    fresh.restore_from_path(tmp_path / "a")
    assert fresh.version == 1
    assert distance(fresh.weights(), saved) == distance(group.weights(), saved) == 0.0


def test_the_group_speaks_rllib(model_dir: Path) -> None:
    group = AccelerateLearnerGroup(LearnerSpec(model=str(model_dir)))
    assert (group.is_local, len(group)) == (True, 0)
    assert group.get_state() == {"num_learners": 0, "version": 0}
    state = group.get_state(components=["learner/rl_module"], inference_only=True)["learner"]
    assert state["weights_seq_no"] == 0
    assert distance(state["rl_module"], group.get_weights()) == 0.0
    group.set_weights({name: torch.zeros_like(w) for name, w in group.get_weights().items()})
    assert group.version == 1
    assert all(not w.any() for w in group.weights().values())
    group.shutdown()
    with pytest.raises(LearnerError, match="shut down"):
        group.weights()


def test_rllib_takes_the_stand_ins_and_never_builds_them() -> None:
    import gymnasium as gym
    from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

    class Config(AlgorithmConfig):
        get_default_learner_class = staticmethod(lambda: UnbuiltLearner)
        get_default_rl_module_spec = staticmethod(unbuilt_module_spec)

    text = gym.spaces.Text(8)
    spec = Config().get_multi_rl_module_spec(spaces={"default_policy": (text, text)})
    assert spec.rl_module_specs["default_policy"].module_class.framework == "torch"
    assert Config().learner_class is UnbuiltLearner
    assert issubclass(AccelerateLearnerGroup, LearnerGroup)
    with pytest.raises(NotImplementedError, match="builds no RLModule"):
        spec.build()


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    import ray

    os.environ["RAY_AUTH_MODE"] = "disabled"
    ray.init(address="local", include_dashboard=False, num_cpus=2, log_to_driver=False)
    yield
    ray.shutdown()


def test_two_ranks_equal_one_process_until_one_dies(cluster: None, model_dir: Path, tmp_path: Path) -> None:
    """One test, since a group takes seconds to start: same step, same checkpoint, and no process left after a death."""
    spec = LearnerSpec(model=str(model_dir), lr=1e-2, adam_eps=1e-3)
    alone, pair = AccelerateLearnerGroup(spec), AccelerateLearnerGroup(spec, num_learners=2)
    tokens = [ids(5) + ids(n, n) for n in (25, 4, 7)]
    episodes = [episode(t, [x - 0.1 for x in alone.logprobs(t, start=5)]) for t in tokens]
    for lambdas in ((), (0.0, 2.0, 0.0)):  # of a distillation, which one of the ranks alone has to do
        options = {"tokens_per_microbatch": 16, "lambdas": lambdas, "memory": (7, 8), "splice": 3}
        one = alone.update(packed(episodes, [1.0, -2.0, 0.5], **options))
        two = pair.update(packed(episodes, [1.0, -2.0, 0.5], num_shards=2, **options))
        assert one.get("distilled_tokens") == (4.0 if lambdas else None)
        assert {k: v for k, v in two.items() if k != "seconds"} == pytest.approx(
            {k: v for k, v in one.items() if k != "seconds"}, abs=1e-4
        )
    assert distance(pair.weights(), alone.weights()) < 1e-5
    assert pair.update(packed([], [], num_shards=2))["noop"] == 1.0
    pair.save_to_path(tmp_path / "a")
    fresh = AccelerateLearnerGroup(spec)
    fresh.restore_from_path(tmp_path / "a")
    assert distance(fresh.weights(), pair.weights()) == 0.0
    pids = [pid for _, pid in pair.processes()]
    os.kill(pids[1], 9)
    with pytest.raises(LearnerError, match=r"learner \w+: rank \d failed"):
        pair.weights()
    with pytest.raises(LearnerError, match="shut down"):
        pair.update(packed([], [], num_shards=2))
    assert all(exits(pid) for pid in pids)


def test_more_learners_than_the_cluster_holds_are_refused_at_once(cluster: None, model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="8 learners want 8 CPU, the cluster has 2"):
        AccelerateLearnerGroup(LearnerSpec(model=str(model_dir)), num_learners=8)


def exits(pid: int) -> bool:
    """Wait up to 20 s for the end of a process that is not our child."""
    try:
        return bool(select.select([os.pidfd_open(pid)], [], [], 20)[0])
    except ProcessLookupError:
        return True
