"""The engine against the Hugging Face model with the same weights, before, across and after weight updates."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, PreTrainedModel

from arenarl.engine import EngineConfig, VLLMEngine, check_request
from arenarl.errors import DeadlineExceeded, EngineUnavailable, InvalidRequest, WeightUpdateFailed
from arenarl.types import Completion, SamplingParams
from arenarl.vllm_thread import TurnLock
from tests.processes import descendants, freeze

BOUND = 1e-4  # float32 log-probs of two implementations


def prompt(length: int, start: int = 1) -> list[int]:
    return [1 + (start * 37 + i * i) % 511 for i in range(length)]


def shifted(model: PreTrainedModel, seed: int) -> dict[str, torch.Tensor]:
    """Other weights of the same shapes, far from the first; as a learner sends them, without the tied head."""
    torch.manual_seed(seed)
    return {n: p.detach() + 0.1 * torch.randn_like(p) for n, p in model.named_parameters()}


def with_weights(model: PreTrainedModel, weights: dict[str, torch.Tensor]) -> PreTrainedModel:
    other = type(model)(model.config).eval()
    other.load_state_dict(weights, strict=False)
    return other


def hf_logprobs(model: PreTrainedModel, ids: Sequence[int], done: Completion, temperature: float = 1.0) -> np.ndarray:
    with torch.no_grad():
        logits = model(torch.tensor([[*ids, *done.token_ids]])).logits[0, len(ids) - 1 : -1] / temperature
    return logits.log_softmax(-1)[range(len(done.token_ids)), list(done.token_ids)].numpy()


def gap(model: PreTrainedModel, ids: Sequence[int], done: Completion, temperature: float = 1.0) -> float:
    return float(np.abs(hf_logprobs(model, ids, done, temperature) - done.logprobs).max())


async def push(engine: VLLMEngine, weights: dict[str, torch.Tensor]) -> int:
    """Load weights under the next version, healing the engine if it is poisoned."""
    version = engine.version + 1
    await engine.update_weights(weights, version, timeout_s=30)
    return version


async def sample(engine: VLLMEngine, ids: list[int], sampling: SamplingParams, name: str = "one") -> Completion:
    return await engine.generate(ids, sampling, request_id=name, deadline_s=60)


async def started(engine: VLLMEngine, ids: list[int], count: int = 1, max_tokens: int = 1900) -> list[asyncio.Task]:
    """Requests of which some tokens are sampled already: one that came after them has ended."""
    long = [SamplingParams(max_tokens=max_tokens, seed=i) for i in range(count)]
    tasks = [asyncio.create_task(sample(engine, ids, params, f"long-{i}")) for i, params in enumerate(long)]
    await asyncio.sleep(0)  # let them submit first
    await sample(engine, ids, SamplingParams(max_tokens=12, temperature=0.0), "after")
    return tasks


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(tiny_model_dir).eval()


@pytest.mark.parametrize("temperature", [1.0, 0.8])
async def test_logprobs_match_before_and_after_an_update(engine, model, temperature):
    sampling = SamplingParams(max_tokens=50, temperature=temperature)
    weights = shifted(model, seed=1)
    await push(engine, dict(model.named_parameters()))
    old = await sample(engine, prompt(40), sampling)
    assert gap(model, prompt(40), old, temperature) < BOUND

    version = await push(engine, weights)
    new = await sample(engine, prompt(40), sampling)
    assert set(new.versions) == {version}
    assert gap(with_weights(model, weights), prompt(40), new, temperature) < BOUND
    assert gap(model, prompt(40), new, temperature) > 0.1


async def test_greedy_takes_the_likeliest_token_and_reports_temperature_one(engine, model):
    await push(engine, dict(model.named_parameters()))
    done = await sample(engine, prompt(20), SamplingParams(max_tokens=20, temperature=0.0))
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt(20), *done.token_ids]])).logits[0, 19:-1]
    assert tuple(logits.argmax(-1).tolist()) == done.token_ids
    assert gap(model, prompt(20), done) < BOUND


async def test_an_update_splits_sequences_exactly(engine, model):
    weights = shifted(model, seed=2)
    old = await push(engine, dict(model.named_parameters()))
    tasks = await started(engine, prompt(70), count=16, max_tokens=150)
    new = await push(engine, weights)
    runs = [done for done in await asyncio.gather(*tasks) if len(set(done.versions)) == 2]
    assert len(runs) >= 8
    by_version = {old: model, new: with_weights(model, weights)}
    for done in runs:
        assert list(done.versions) == sorted(done.versions) and set(done.versions) == {old, new}
        for version, judge in by_version.items():
            of_version = np.array(done.versions) == version
            error = np.abs(hf_logprobs(judge, prompt(70), done) - done.logprobs)
            assert error[of_version].max() < BOUND < 0.1 < error[~of_version].max()


async def test_an_episode_finds_what_was_computed_again_for_it_in_the_cache(engine, model):
    await push(engine, dict(model.named_parameters()))
    (task,) = await started(engine, prompt(70), max_tokens=150)
    await push(engine, shifted(model, seed=3))
    turn = await task
    ids = [*prompt(70), *turn.token_ids, 5, 6, 7]
    assert (await sample(engine, ids, SamplingParams(max_tokens=1))).num_cached_tokens >= 64


async def test_the_cache_of_old_weights_is_never_read(engine, model):
    weights = shifted(model, seed=4)
    await push(engine, dict(model.named_parameters()))
    await sample(engine, prompt(100), SamplingParams(max_tokens=1))
    again = await sample(engine, prompt(100), SamplingParams(max_tokens=20))
    assert again.num_cached_tokens == 96  # three blocks of 32
    await push(engine, weights)
    fresh = await sample(engine, prompt(100), SamplingParams(max_tokens=20))
    assert fresh.num_cached_tokens == 0
    assert gap(with_weights(model, weights), prompt(100), fresh) < BOUND


@pytest.mark.parametrize("spoil", ["shape", "missing", "unknown"])
async def test_a_failed_update_poisons_until_a_good_one(engine, model, spoil):
    good = shifted(model, seed=5)
    bad = dict(good)
    (waiting,) = await started(engine, prompt(30), max_tokens=250)
    if spoil == "shape":
        bad["model.norm.weight"] = torch.ones(63)
    elif spoil == "missing":
        del bad["model.norm.weight"]
    else:
        bad["module.model.norm.weight"] = bad.pop("model.norm.weight")
    with pytest.raises(WeightUpdateFailed, match=r"shared: update to version \d+"):
        await push(engine, bad)
    with pytest.raises(EngineUnavailable, match="did not finish"):
        await sample(engine, prompt(30), SamplingParams(max_tokens=5))
    with pytest.raises(EngineUnavailable, match="did not finish"):
        await engine.weight_version()

    version = await push(engine, good)
    assert gap(with_weights(model, good), prompt(30), await sample(engine, prompt(30), SamplingParams())) < BOUND
    assert version in (await waiting).versions


async def test_versions_only_rise_and_a_refusal_does_no_harm(engine, model):
    version = await push(engine, dict(model.named_parameters()))
    with pytest.raises(WeightUpdateFailed, match=f"to version {version} refused: version {version} is loaded"):
        await engine.update_weights({}, version, timeout_s=30)
    with pytest.raises(WeightUpdateFailed, match=r"shared: .* unfinished after 0\.0 s"):
        await engine.update_weights(dict(model.named_parameters()), version + 1, timeout_s=0.0)
    assert await engine.weight_version() == version


async def test_tensors_that_share_memory_are_accepted(engine, model):
    weights = dict(model.state_dict())
    assert weights["lm_head.weight"].data_ptr() == weights["model.embed_tokens.weight"].data_ptr()
    await push(engine, weights)
    assert gap(model, prompt(9), await sample(engine, prompt(9), SamplingParams(max_tokens=9))) < BOUND


@pytest.mark.parametrize("bad", [3.0, True, -1, 512, None, np.int64(3), "3"])
async def test_bad_ids_are_refused_and_the_engine_still_answers(engine, bad):
    with pytest.raises(InvalidRequest, match="prompt id at position 1"):
        await sample(engine, [4, bad], SamplingParams(max_tokens=2))
    with pytest.raises(InvalidRequest, match="stop token id at position 0"):
        await sample(engine, [4], SamplingParams(max_tokens=2, stop_token_ids=(bad,)))
    assert len((await sample(engine, [4, 3], SamplingParams(max_tokens=2, temperature=0.0))).token_ids) == 2


@given(length=st.integers(0, 40), max_tokens=st.integers(1, 50))
def test_max_tokens_is_cut_to_the_room_that_is_left(length, max_tokens):
    ids, sampling = [1] * length, SamplingParams(max_tokens=max_tokens)
    if 1 <= length < 32:
        assert check_request(ids, sampling, vocab_size=4, max_model_len=32) == min(max_tokens, 32 - length)
    else:
        with pytest.raises(InvalidRequest, match="empty" if length == 0 else "no room in the context of 32"):
            check_request(ids, sampling, vocab_size=4, max_model_len=32)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": 0.001},
        {"temperature": float("nan")},
        {"temperature": True},
        {"max_tokens": 0},
        {"max_tokens": 2.0},
        {"seed": -1},
        {"seed": 2**63},
        {"seed": 1.0},
    ],
)
def test_bad_sampling_is_refused_by_name(wrong):
    with pytest.raises(InvalidRequest, match=next(iter(wrong))):
        check_request([1], replace(SamplingParams(), **wrong), vocab_size=4, max_model_len=32)


async def test_the_context_bounds_a_completion(engine):
    full = await sample(engine, prompt(2040), SamplingParams(max_tokens=50, temperature=0.0))
    assert len(full.token_ids) == 8 and full.finish_reason == "length"
    with pytest.raises(InvalidRequest, match="context"):
        await sample(engine, prompt(2048), SamplingParams(max_tokens=50))


async def test_the_stop_token_is_the_last_token(engine):
    stop = tuple(range(256, 512))
    done = await sample(engine, prompt(10), SamplingParams(max_tokens=500, seed=1, stop_token_ids=stop))
    assert done.finish_reason == "stop" and done.token_ids[-1] in stop
    assert not set(done.token_ids[:-1]) & set(stop)
    assert len(done.logprobs) == len(done.versions) == len(done.token_ids)


async def test_many_requests_at_once(engine, model):
    await push(engine, dict(model.named_parameters()))
    asked = [prompt(5 + i % 30, start=i) for i in range(64)]
    sampling = SamplingParams(max_tokens=60)
    done = await asyncio.gather(*(sample(engine, ids, sampling, f"many-{i}") for i, ids in enumerate(asked)))
    assert {d.versions for d in done} == {(engine.version,) * 60}
    assert max(gap(model, ids, d) for ids, d in zip(asked, done, strict=True)) < BOUND


async def test_more_seeded_prompt_tokens_than_a_step_takes(engine, model):
    await push(engine, dict(model.named_parameters()))
    asked = [
        prompt(1900 + i, start=i) for i in range(5)
    ]  # vLLM 0.32 on CPU dies of a seeded prompt that it cuts in two
    params = [SamplingParams(max_tokens=5, seed=i) for i in range(5)]
    runs = (sample(engine, ids, p, f"big-{p.seed}") for ids, p in zip(asked, params, strict=True))
    done = await asyncio.gather(*runs)
    assert max(gap(model, ids, d) for ids, d in zip(asked, done, strict=True)) < BOUND


async def test_one_seed_gives_one_completion(engine):
    seeded = SamplingParams(max_tokens=30, seed=7)
    alone = await sample(engine, prompt(12), seeded)
    crowd = [sample(engine, prompt(12, start=i), SamplingParams(max_tokens=30), f"crowd-{i}") for i in range(8)]
    together, *_ = await asyncio.gather(sample(engine, prompt(12), seeded), *crowd)
    other = await sample(engine, prompt(12), replace(seeded, seed=8))
    assert together.token_ids == alone.token_ids != other.token_ids


async def test_a_deadline_ends_the_request_in_the_engine_too(engine):
    with pytest.raises(DeadlineExceeded, match=r"shared: request late unfinished after 0\.1 s"):
        await engine.generate(prompt(5), SamplingParams(max_tokens=1900), request_id="late", deadline_s=0.1)
    assert engine.num_unfinished() == 0


async def test_cancelling_ends_the_request_in_the_engine_too(engine):
    (task,) = await started(engine, prompt(5))
    assert engine.num_unfinished() == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.num_unfinished() == 0


def test_a_turn_is_taken_by_one_at_a_time_and_given_back_after_an_error():
    lock, inside, most = TurnLock(), [], []

    def work():
        for _ in range(200):
            with lock:
                inside.append(1)
                os.sched_yield()
                most.append(len(inside))
                inside.pop()

    with pytest.raises(KeyError), lock:
        raise KeyError("work")
    threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert most == [1] * 800


def test_turns_go_by_arrival_so_nobody_can_keep_the_others_out():
    lock, order = TurnLock(), []

    def visit(name):
        with lock:
            order.append(name)

    visitors = [threading.Thread(target=visit, args=(n,), daemon=True) for n in range(5)]
    with lock:
        for n, visitor in enumerate(visitors):
            visitor.start()
            while len(lock._waiting) == n:
                os.sched_yield()
    visit("again")  # at once, as a core does that has more work
    assert order == [0, 1, 2, 3, 4, "again"]


async def test_two_engines_of_one_process_work_at_once_and_one_outlives_the_other(engine, model, tiny_model_dir):
    config = EngineConfig(model=str(tiny_model_dir), core="thread", max_model_len=256, kv_cache_bytes=8 << 20)
    second = VLLMEngine(config, engine_id="second")
    await push(engine, dict(model.named_parameters()))
    asked = [prompt(5 + i, start=i) for i in range(32)]

    def load(on: VLLMEngine) -> list:
        return [sample(on, ids, SamplingParams(max_tokens=100, seed=i), f"both-{i}") for i, ids in enumerate(asked)]

    early = [asyncio.create_task(one) for one in load(engine)]  # while the second one starts
    try:
        await second.start()
        done = await asyncio.gather(*early, *load(second))
        late = await started(engine, prompt(9), max_tokens=1500)
    finally:
        await second.shutdown()
    assert [len(d.token_ids) for d in done] == [100] * 64
    assert max(gap(model, ids, d) for ids, d in zip(asked * 2, done, strict=True)) < BOUND
    assert gap(model, prompt(9), await late[0]) < BOUND and len(late[0].result().token_ids) == 1500


async def test_abort_returns_what_there_is(engine):
    (task,) = await started(engine, prompt(5))
    with pytest.raises(InvalidRequest, match="'long-0' is in flight"):
        await sample(engine, prompt(5), SamplingParams(), "long-0")
    await engine.abort(["long-0", "nobody"])
    done = await task
    assert done.finish_reason == "abort" and 0 < len(done.token_ids) < 1900
    assert len(done.logprobs) == len(done.versions) == len(done.token_ids)


async def test_an_untied_model_ends_at_its_end_of_sequence_follows_updates_and_leaves_nothing(model, tmp_path):
    ends = list(range(32))
    config = type(model.config)(**model.config.to_dict() | {"tie_word_embeddings": False, "eos_token_id": ends})
    untied = type(model)(config).eval()
    untied.save_pretrained(tmp_path / "model")
    (tmp_path / "weights").mkdir()
    engine = VLLMEngine(
        EngineConfig(
            model=str(tmp_path / "model"),
            core="thread",
            max_model_len=64,
            kv_cache_bytes=3 * 32 * 512,  # two blocks for 64 tokens and vLLM's own, of 32 tokens, 512 bytes each
            weights_dir=str(tmp_path / "weights"),
        ),
        engine_id="untied",
    )
    await engine.start()
    sampling = SamplingParams(max_tokens=24, temperature=0.8)
    for weights in (dict(untied.named_parameters()), shifted(untied, seed=6), shifted(untied, seed=7)):
        await push(engine, weights)
        done = await asyncio.gather(*(sample(engine, prompt(40), replace(sampling, seed=i), f"{i}") for i in range(16)))
        judge = with_weights(untied, weights)
        assert max(gap(judge, prompt(40), d, 0.8) for d in done) < BOUND
        assert all((d.finish_reason == "stop") == (d.token_ids[-1] in ends) for d in done)
        assert not any(set(d.token_ids[:-1]) & set(ends) for d in done)
        assert "stop" in {d.finish_reason for d in done}
    assert len(list((tmp_path / "weights").rglob("*.safetensors"))) == 2

    running = asyncio.create_task(sample(engine, prompt(10), SamplingParams(max_tokens=50, seed=1)))
    await asyncio.sleep(0)
    await engine.shutdown()
    await engine.shutdown()
    assert (await running).finish_reason == "abort"
    assert not list((tmp_path / "weights").iterdir())
    with pytest.raises(EngineUnavailable, match="untied is not started"):
        await sample(engine, prompt(40), sampling)


async def test_a_start_that_fails_says_so_and_leaves_no_engine(tiny_model_dir, tmp_path):
    shutil.copytree(tiny_model_dir, tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"nothing")
    engine = VLLMEngine(EngineConfig(model=str(tmp_path / "broken"), core="thread"), engine_id="stillborn")
    with pytest.raises(EngineUnavailable, match="stillborn did not start"):
        await engine.start()
    with pytest.raises(EngineUnavailable, match="stillborn is not started"):
        await engine.weight_version()


async def test_a_stuck_then_killed_core_is_reported_and_leaves_no_process(tiny_model_dir, model):
    before = set(descendants())
    config = EngineConfig(model=str(tiny_model_dir), max_model_len=512, kv_cache_bytes=8 << 20)
    engine = VLLMEngine(config, engine_id="doomed")
    await engine.start()
    (core,) = set(descendants()) - before
    assert gap(model, prompt(30), await sample(engine, prompt(30), SamplingParams(max_tokens=20))) < BOUND
    version = await push(engine, shifted(model, seed=8))
    assert await engine.weight_version() == version

    freeze(core.pid)
    with pytest.raises(EngineUnavailable, match=r"doomed did not tell its version within 0\.2 s"):
        await engine.weight_version(timeout_s=0.2)
    with pytest.raises(WeightUpdateFailed, match=r"doomed: update to version 2 unfinished after 0\.2 s"):
        await engine.update_weights(dict(model.named_parameters()), 2, timeout_s=0.2)
    os.kill(core.pid, signal.SIGCONT)
    await push(engine, dict(model.named_parameters()))
    (task,) = await started(engine, prompt(30), max_tokens=450)
    core.kill()
    with pytest.raises(EngineUnavailable, match="doomed"):
        await asyncio.wait_for(task, timeout=20)
    with pytest.raises(EngineUnavailable, match="doomed"):
        await sample(engine, prompt(30), SamplingParams())
    await engine.shutdown()
    assert set(descendants()) == before


def test_a_core_ends_and_cleans_up_when_its_parent_is_killed(tmp_path):
    (tmp_path / "weights").mkdir()
    (tmp_path / "parent.py").write_text(
        "import multiprocessing, os, sys, threading\n"
        "from arenarl.vllm_thread import end_with_parent, leftovers\n"
        "def core(folder):\n"
        "    leftovers.add(folder)\n"
        "    end_with_parent()\n"
        "    print(os.getpid(), flush=True)\n"
        "    threading.Event().wait()\n"
        "if __name__ == '__main__':\n"
        "    child = multiprocessing.get_context('spawn').Process(target=core, args=sys.argv[1:], name='EngineCore')\n"
        "    child.start(), child.join()\n"
    )
    command = [sys.executable, str(tmp_path / "parent.py"), str(tmp_path / "weights")]
    root = str(Path(__file__).parents[1])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": root}) as parent:
        core = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    assert not psutil.wait_procs([core], timeout=20)[1]
    assert not (tmp_path / "weights").exists()
