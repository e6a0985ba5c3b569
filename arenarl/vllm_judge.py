"""A local model as judge, on a vLLM engine of its own, with JSON that a grammar enforces."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arenarl.endpoint_budget import Budget, Usage
from arenarl.endpoint_calls import Calls, Outage, Reply
from arenarl.endpoint_wire import guess_tokens
from arenarl.engine import START_TIMEOUT_S, check_request
from arenarl.errors import ConfigError, InvalidRequest
from arenarl.jsonl import clean_json
from arenarl.llm_judge import LLMJudge
from arenarl.reply_cache import request_key
from arenarl.types import SamplingParams
from arenarl.vllm_settings import EngineConfig, engine_args, installed_device, prepare_vllm, read_model
from arenarl.vllm_thread import build_llm

if TYPE_CHECKING:
    from vllm import RequestOutput
    from vllm import SamplingParams as VLLMSamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    from arenarl.chat import ChatRenderer

LONGEST_CONTEXT = 16_384  # tokens, unless the user wants more: two long attempts and a reply


Fingerprint = list[tuple[str, int, int]]


@dataclass(frozen=True)
class _Engine:
    llm: AsyncLLM
    renderer: ChatRenderer


class VLLMEndpoint:
    """A model folder as an `arenarl.endpoint.Endpoint`, on an engine of its own that starts with the first call.

    A call that starts the engine, or finds it starting, waits no longer than its deadline; the start goes on. An engine that did
    not start, or died, stays down until `aclose`: its calls are outages.

    Args:
        model: folder of a Hugging Face model with a tokenizer and a chat template.
        max_model_len: longest prompt plus reply, in tokens; None: the model's context, 16,384 at most.
        max_concurrency: requests in the engine at once.
        deadline_s: for one call of `complete`, its waits included.
        tokens_per_step: see `arenarl.endpoint_budget.Budget`.
        cache: as of `arenarl.endpoint.OpenAIEndpoint`. Other folders, and other weights in the same folder, have other entries;
            a running engine has those of the files that it loaded.
        engine: further fields of `arenarl.vllm_settings.EngineConfig`, e.g. `kv_cache_bytes` or `gpu_memory_utilization`.
            The core is in a thread on CPU and in a process on GPU.

    Raises:
        ConfigError: the folder cannot serve as a chat model, or a value is out of range.
    """

    def __init__(
        self,
        model: str,
        *,
        max_model_len: int | None = None,
        max_concurrency: int = 16,
        deadline_s: float = 180.0,
        tokens_per_step: int | None = None,
        cache: str | None = None,
        engine: Mapping[str, Any] | None = None,
    ) -> None:
        facts, device = read_model(model), installed_device()
        check_chat_template(model)
        settings = {
            "max_model_len": min(facts.context, LONGEST_CONTEXT) if max_model_len is None else max_model_len,
            "max_num_seqs": max_concurrency,
            "core": "thread" if device == "cpu" else "process",
        }
        self._calls = Calls(
            max_concurrency=max_concurrency, deadline_s=deadline_s, budget=Budget(tokens_per_step), cache=cache
        )
        try:
            self._config = EngineConfig(model=model, **settings | dict(engine or {}))
        except TypeError as error:
            raise ConfigError(f"engine={engine!r} must hold fields of EngineConfig: {error}") from error
        engine_args(self._config, device)
        self.name = Path(model).resolve().name
        self._vocab_size = facts.vocab_size
        self._starting: asyncio.Task[_Engine] | None = None
        self._llm: AsyncLLM | None = None
        self._loaded: Fingerprint | None = None  # what the engine read; the folder may have changed since

    async def complete(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        schema: Mapping[str, Any] | None = None,
        max_tokens: int,
        temperature: float = 0.0,
        seed: int | None = None,
    ) -> Reply | Outage:
        sent = clean_json(messages)
        sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
        asked = {"messages": sent, "schema": schema, "max_tokens": max_tokens, "temperature": temperature, "seed": seed}
        key = request_key(model=self._weights(), context=self._config.max_model_len, **asked)
        most = Usage(prompt_tokens=guess_tokens(sent), completion_tokens=max_tokens)
        return await self._calls.run(key, most, lambda used, _: self._send(sent, schema, sampling, used))

    def begin_step(self, version: int) -> None:
        self._calls.budget.begin_step(version)

    def num_unfinished(self) -> int:
        """Requests that wait or run in the engine."""
        return 0 if self._llm is None else self._llm.get_num_unfinished_requests()

    async def aclose(self) -> None:
        """Stop the engine, after its start if it is starting."""
        if self._starting is not None and self._starting.get_loop() is asyncio.get_running_loop():
            await asyncio.wait({self._starting})
        self._starting = None
        self._calls.close()
        await self._stop()

    async def _send(
        self,
        messages: Sequence[Mapping[str, str]],
        schema: Mapping[str, Any] | None,
        sampling: SamplingParams,
        used: Usage,
    ) -> Reply | Outage:
        try:
            engine = await self._running()
        except ConfigError:
            raise
        except Exception as error:
            return Outage(kind="unavailable", detail=f"{self.name} did not start: {type(error).__name__}: {error}")
        from vllm.exceptions import VLLMClientError

        try:
            ids = engine.renderer.prompt(messages, [])
            params = self._params(ids, sampling, schema)
            used.calls += 1
            output = await _generate(engine.llm, ids, params)
        except asyncio.CancelledError:
            used.lost = used.calls
            raise
        except (InvalidRequest, VLLMClientError) as error:
            return Outage(kind="refused", detail=f"{self.name}: {error}")
        except Exception as error:
            return Outage(kind="unavailable", detail=f"{self.name}: {type(error).__name__}: {error}")
        sample = output.outputs[0]
        used.prompt_tokens += len(ids)
        used.completion_tokens += len(sample.token_ids)
        if sample.finish_reason not in ("stop", "length"):
            return Outage(kind="unavailable", detail=f"{self.name} ended the request: {sample.finish_reason}")
        return Reply(text=engine.renderer.decode(sample.token_ids), finish_reason=sample.finish_reason)

    def _params(
        self, ids: Sequence[int], sampling: SamplingParams, schema: Mapping[str, Any] | None
    ) -> VLLMSamplingParams:
        from vllm import SamplingParams as VLLMSamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        max_tokens = check_request(ids, sampling, vocab_size=self._vocab_size, max_model_len=self._config.max_model_len)
        return VLLMSamplingParams(
            temperature=sampling.temperature,
            max_tokens=max_tokens,
            seed=sampling.seed,
            detokenize=False,
            structured_outputs=None if schema is None else StructuredOutputsParams(json=dict(schema)),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _weights(self) -> Fingerprint:
        """What the engine of this loop has read; before it starts, what lies in the folder."""
        here = self._starting is not None and self._starting.get_loop() is asyncio.get_running_loop()
        return self._loaded if here and self._loaded else fingerprint(self._config.model)

    async def _running(self) -> _Engine:
        loop = asyncio.get_running_loop()
        if self._starting is None or self._starting.get_loop() is not loop:
            self._starting = loop.create_task(self._start())
        return await asyncio.shield(self._starting)

    async def _start(self) -> _Engine:
        await self._stop()  # an engine belongs to the loop that started it
        self._loaded = fingerprint(self._config.model)
        async with asyncio.timeout(START_TIMEOUT_S):
            renderer = await asyncio.to_thread(_renderer, self._config.model)
            self._llm = await asyncio.to_thread(_build, self._config)
            return _Engine(self._llm, renderer)

    async def _stop(self) -> None:
        llm, self._llm, self._loaded = self._llm, None, None
        if llm is not None:
            if llm.output_handler is not None and not llm.output_handler.get_loop().is_closed():
                llm.output_handler.cancel()  # or it logs the end of the core as an error
            await asyncio.to_thread(llm.shutdown, 10.0)


async def _generate(llm: AsyncLLM, ids: Sequence[int], params: VLLMSamplingParams) -> RequestOutput:
    from vllm.inputs import tokens_input

    async with aclosing(llm.generate(tokens_input(list(ids)), params, uuid.uuid4().hex)) as outputs:
        return [output async for output in outputs][-1]


def _renderer(model: str) -> ChatRenderer:
    from transformers import AutoTokenizer

    from arenarl.chat import ChatRenderer

    return ChatRenderer(AutoTokenizer.from_pretrained(model))


def _build(config: EngineConfig) -> AsyncLLM:
    """An engine with the grammar backend, which needs the tokenizer. Without white space between the parts of the JSON, which a
    weak model may otherwise go on writing to the end of its context."""
    arguments = prepare_vllm(config)
    from vllm.config import StructuredOutputsConfig

    grammar = StructuredOutputsConfig(backend="xgrammar", disable_any_whitespace=True)
    return build_llm(arguments | {"skip_tokenizer_init": False, "structured_outputs_config": grammar}, config.core)


def check_chat_template(model: str) -> None:
    folder = Path(model)
    config = folder / "tokenizer_config.json"
    if not config.is_file():
        raise ConfigError(f"model folder '{model}' has no tokenizer_config.json; save the tokenizer beside the model")
    if not (folder / "chat_template.jinja").is_file() and "chat_template" not in config.read_text():
        raise ConfigError(f"the tokenizer in '{model}' has no chat template; use an instruct model, or give it one")


def fingerprint(model: str) -> Fingerprint:
    """Path, size and time of the files of a model folder: what tells two models apart, in one folder or in two."""
    files = sorted(path for path in Path(model).resolve().iterdir() if path.is_file())
    return [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]


class VLLMJudge(LLMJudge):
    """An `LLMJudge` whose endpoint is a `VLLMEndpoint`.

    Args:
        model, max_model_len, max_concurrency, deadline_s, tokens_per_step, cache, engine: of the endpoint.
        judge: settings of `LLMJudge`: rubric, language, max_tokens ...

    Raises:
        ConfigError: an argument is refused.
    """

    def __init__(
        self,
        *,
        model: str,
        max_model_len: int | None = None,
        max_concurrency: int = 16,
        deadline_s: float = 180.0,
        tokens_per_step: int | None = None,
        cache: str | None = None,
        engine: Mapping[str, Any] | None = None,
        **judge: Any,
    ) -> None:
        endpoint = VLLMEndpoint(
            model,
            max_model_len=max_model_len,
            max_concurrency=max_concurrency,
            deadline_s=deadline_s,
            tokens_per_step=tokens_per_step,
            cache=cache,
            engine=engine,
        )
        super().__init__(endpoint=endpoint, **judge)
