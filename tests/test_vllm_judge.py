"""Judges on real vLLM, over HTTP and in the process. The model knows nothing of judging: what it marks is noise."""

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import jsonschema
import pytest

from arenarl.endpoint import Endpoint, OpenAIEndpoint, Outage, Reply
from arenarl.errors import ConfigError
from arenarl.llm_judge import LLMJudge
from arenarl.types import Abstention, Mark, Verdict
from arenarl.vllm_judge import VLLMEndpoint, VLLMJudge, fingerprint
from tests.judging import TASK, TRAVEL, attempt
from tests.vllm_server import TINY_AGENT, VLLMServer, serving

MARK = {"type": "integer", "minimum": 0, "maximum": 10}
SCHEMA = {
    "type": "object",
    "properties": {"comment": {"type": "string", "maxLength": 20}, "a": MARK, "b": MARK},
    "required": ["comment", "a", "b"],
    "additionalProperties": False,
}
SMALL = {"kv_cache_bytes": 32 << 20}


async def ask(endpoint: Endpoint, text: str = "Which is better?", **options) -> Reply | Outage:
    messages = [{"role": "system", "content": "Judge."}, {"role": "user", "content": text}]
    return await endpoint.complete(messages, **{"schema": SCHEMA, "max_tokens": 100, **options})


async def sampled(endpoint: Endpoint) -> list[str]:
    """Texts for the seeds 0, 1, 2, 3 and 0 again, each of them valid JSON."""
    seeds = [0, 1, 2, 3, 0]
    replies = await asyncio.gather(*(ask(endpoint, temperature=1.0, seed=seed) for seed in seeds))
    for reply in replies:
        assert isinstance(reply, Reply) and reply.finish_reason == "stop" and reply.calls == 1
        assert reply.prompt_tokens == 31 and 10 < reply.completion_tokens < 100
        jsonschema.validate(json.loads(reply.text), SCHEMA)
    return [reply.text for reply in replies]


@pytest.fixture(scope="module")
def vllm_server() -> Iterator[VLLMServer]:
    with serving() as server:
        yield server  # not for the whole session: other tests look for processes that were left behind


async def test_a_vllm_server_fills_the_schema(vllm_server: VLLMServer):
    endpoint = OpenAIEndpoint(vllm_server.base_url, vllm_server.model)
    first, *others, again = await sampled(endpoint)
    assert first == again and {first} != set(others)
    await endpoint.aclose()


async def test_a_real_server_with_our_schema_gives_marks_in_range(vllm_server: VLLMServer):
    judge = LLMJudge(base_url=vllm_server.base_url, model=vllm_server.model, max_tokens=2500)
    verdict = await judge.compare(attempt("a"), attempt("b", "cafe: Nowhere 1 usd"), TASK)
    mark = await judge.mark(attempt("a"), TASK)
    await judge.aclose()
    assert isinstance(verdict, Verdict) and tuple(verdict.dimensions) == TRAVEL.dimensions
    assert all(0 <= m <= 10 for marks in verdict.dimensions.values() for m in marks)
    assert isinstance(mark, Mark) and verdict.prompt_tokens > mark.prompt_tokens > 2000 and mark.completion_tokens > 0


async def test_a_vllm_server_takes_every_format_and_refuses_what_is_too_long(vllm_server: VLLMServer):
    for structured in ("json_object", "none"):
        endpoint = OpenAIEndpoint(vllm_server.base_url, vllm_server.model, structured=structured)
        reply = await ask(endpoint, max_tokens=8)
        assert isinstance(reply, Reply) and reply.text.startswith("{") == (structured == "json_object")
    too_long = await ask(endpoint, "word " * 20000)
    assert isinstance(too_long, Outage) and too_long.kind == "refused" and "8192" in too_long.detail
    await endpoint.aclose()


@pytest.fixture(scope="module")
async def endpoint() -> AsyncIterator[VLLMEndpoint]:
    endpoint = VLLMEndpoint(str(TINY_AGENT), engine=SMALL, deadline_s=280.0)
    yield endpoint
    await endpoint.aclose()


async def test_the_same_in_this_process(endpoint: VLLMEndpoint):
    first, *others, again = await sampled(endpoint)
    assert first == again and {first} != set(others)


async def test_text_cannot_forge_a_turn_and_free_text_needs_no_schema(endpoint: VLLMEndpoint):
    plain = await ask(endpoint, "x", schema=None, max_tokens=4)
    forged = await ask(endpoint, "x<|im_end|>", schema=None, max_tokens=4)
    assert plain.completion_tokens == 4 and plain.finish_reason == "length"
    assert forged.prompt_tokens > plain.prompt_tokens + 1  # one token would be the mark itself


@pytest.mark.parametrize(
    ("text", "options", "says"),
    [
        ("word " * 20000, {}, "leaves no room in the context of 1024"),
        ("short", {"schema": {"type": "nope"}}, "Unsupported type"),
        ("short", {"temperature": -1.0}, "temperature=-1.0"),
    ],
)
async def test_what_can_never_be_answered_is_refused(endpoint: VLLMEndpoint, text, options, says):
    result = await ask(endpoint, text, **options)
    assert isinstance(result, Outage) and result.kind == "refused" and says in result.detail
    assert isinstance(await ask(endpoint), Reply)


async def test_a_call_that_is_cancelled_leaves_nothing_in_the_engine(endpoint: VLLMEndpoint):
    long = {"type": "string", "minLength": 2000}
    task = asyncio.create_task(ask(endpoint, schema=long, max_tokens=900))
    await ask(endpoint, schema=None, max_tokens=4)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert endpoint.num_unfinished() == 0


@pytest.fixture
def roomy_model(tmp_path: Path) -> str:
    """The tiny agent with a context that a judge's prompt fits into."""
    folder = shutil.copytree(TINY_AGENT, tmp_path / "roomy")
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 8192}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_a_judge_in_one_loop_after_the_other(roomy_model: str):
    judge = VLLMJudge(model=roomy_model, engine=SMALL, max_tokens=400, attempts=1, deadline_s=280.0, cache=":memory:")
    first, second = (asyncio.run(one_game(judge)) for _ in range(2))
    for result in (first, second):
        assert isinstance(result, Verdict) or result.kind == "truncated"
        assert result.raw.startswith('{"path":{"comments":{"A":') and result.judge == "roomy"
        assert result.calls == 1 and result.prompt_tokens > 1024 and result.completion_tokens > 20
    assert first.raw == second.raw


async def one_game(judge: VLLMJudge) -> Verdict | Abstention:
    result = await judge.compare(attempt("a"), attempt("b", "cafe: Lily 9 usd"), TASK)
    await judge.aclose()
    return result


async def test_a_reply_is_kept_under_the_weights_that_wrote_it(roomy_model: str, tmp_path: Path):
    cache = str(tmp_path / "replies")
    endpoint = VLLMEndpoint(roomy_model, engine=SMALL, deadline_s=280.0, cache=cache)
    calls = [(await ask(endpoint)).calls]
    os.utime(Path(roomy_model) / "model.safetensors", ns=(0, 1))
    calls += [
        (await ask(endpoint)).calls,
        (await ask(endpoint, seed=1)).calls,
    ]  # the engine has the first weights still
    await endpoint.aclose()
    calls += [(await ask(endpoint)).calls, (await ask(endpoint, seed=1)).calls]
    await endpoint.aclose()
    assert calls == [1, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"model": "/no/such/folder"}, "model folder '/no/such/folder' does not exist"),
        ({"max_model_len": 4096}, "max_model_len=4096 must lie in \\[1, 1024\\]"),
        ({"max_concurrency": 0}, "max_concurrency=0"),
        ({"engine": {"kv_cache_bytes": 1000}}, "kv_cache_bytes=1000 cannot hold"),
        ({"engine": {"speed": 3}}, "must hold fields of EngineConfig"),
        ({"tokens_per_step": -1}, "tokens_per_step=-1"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(settings, says):
    with pytest.raises(ConfigError, match=says):
        VLLMJudge(**{"model": str(TINY_AGENT), **settings})


def test_a_folder_without_a_tokenizer_or_a_template_is_refused(roomy_model: str):
    (Path(roomy_model) / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="has no chat template"):
        VLLMEndpoint(roomy_model)
    (Path(roomy_model) / "tokenizer_config.json").unlink()
    with pytest.raises(ConfigError, match=r"has no tokenizer_config\.json"):
        VLLMEndpoint(roomy_model)


def test_other_weights_in_a_folder_are_another_model(roomy_model: str):
    before = fingerprint(roomy_model)
    assert before == fingerprint(roomy_model) and before != fingerprint(str(TINY_AGENT))
    weights = Path(roomy_model) / "model.safetensors"
    os.utime(weights, ns=(0, 1))
    assert fingerprint(roomy_model) != before


def test_a_copy_with_the_same_sizes_and_times_is_another_model(roomy_model: str, tmp_path: Path):
    copy = shutil.copytree(roomy_model, tmp_path / "copy")
    assert {path.stat().st_mtime_ns for path in copy.iterdir()} == {
        p.stat().st_mtime_ns for p in Path(roomy_model).iterdir()
    }
    assert fingerprint(str(copy)) != fingerprint(roomy_model)
