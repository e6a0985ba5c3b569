"""The inference engine: token ids in; ids, log-probabilities and weight versions out. Text never passes through here.

`VLLMEngine` wraps one vLLM `AsyncLLM`. The same class runs on two CPU cores and on a GPU: `arenarl.vllm_settings.engine_args`
is the only place where they differ.

Weights are replaced while requests are in flight. The engine pauses between two steps, drops every cached key and value, loads
one safetensors file in place, changes its version label and goes on. Each half of a sequence that spans an update was sampled by
exactly the weights that its version names. The cache needs no version in its keys: all that it holds was computed by the weights
that are loaded, and a salt would only hide from an episode the blocks that were recomputed for it after the update.
"""

from __future__ import annotations

import asyncio
import math
import os
import tempfile
import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, cast

from arenarl.errors import (
    ArenaError,
    DeadlineExceeded,
    EngineError,
    EngineUnavailable,
    InvalidRequest,
    WeightUpdateFailed,
    boundary,
)
from arenarl.types import Completion, SamplingParams
from arenarl.vllm_settings import EngineConfig, prepare_vllm, read_model
from arenarl.vllm_thread import build_llm

if TYPE_CHECKING:
    import torch
    from vllm import RequestOutput
    from vllm.logprobs import Logprob
    from vllm.v1.engine.async_llm import AsyncLLM

START_TIMEOUT_S = 600.0
KEPT_WEIGHT_FILES = 2


class Engine(Protocol):
    """What rollouts need from an inference engine."""

    engine_id: str
    max_model_len: int
    eos_token_ids: tuple[int, ...]

    async def start(self) -> None: ...

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, *, request_id: str, deadline_s: float
    ) -> Completion: ...

    async def abort(self, request_ids: Sequence[str]) -> None: ...

    async def update_weights(self, weights: Mapping[str, torch.Tensor], version: int, *, timeout_s: float) -> float: ...

    async def weight_version(self, timeout_s: float = 10.0) -> int: ...

    async def shutdown(self, timeout_s: float = 10.0) -> None: ...


def check_request(prompt_ids: Sequence[int], sampling: SamplingParams, *, vocab_size: int, max_model_len: int) -> int:
    """Refuse what vLLM must not see: one float among the ids stops its core for ever, without an error.

    Returns:
        how many tokens may be sampled: `max_tokens`, or what the context has left if that is less.

    Raises:
        InvalidRequest: naming the value.
    """
    for what, ids in (("prompt id", prompt_ids), ("stop token id", sampling.stop_token_ids)):
        for place, token in enumerate(ids):
            if type(token) is not int or not 0 <= token < vocab_size:
                raise InvalidRequest(
                    f"{what} at position {place} is {token!r} ({type(token).__name__}); ids are plain ints in [0, {vocab_size})"
                )
    if not prompt_ids:
        raise InvalidRequest("the prompt is empty")
    room = max_model_len - len(prompt_ids)
    if room < 1:
        raise InvalidRequest(f"a prompt of {len(prompt_ids)} tokens leaves no room in the context of {max_model_len}")
    temperature, seed, max_tokens = sampling.temperature, sampling.seed, sampling.max_tokens
    if type(temperature) not in (int, float) or not (temperature == 0 or 0.01 <= temperature <= 2):
        raise InvalidRequest(f"temperature={temperature!r} must be 0 or a number in [0.01, 2]")
    if type(max_tokens) is not int or max_tokens < 1:
        raise InvalidRequest(f"max_tokens={max_tokens!r} must be an int of at least 1")
    if seed is not None and (type(seed) is not int or not 0 <= seed < 2**63):
        raise InvalidRequest(f"seed={seed!r} must be None or an int in [0, 2**63)")
    return min(max_tokens, room)


def read_output(output: RequestOutput) -> Completion:
    """vLLM's final output as a `Completion`.

    Raises:
        EngineError: the request failed inside, a token lacks its version, or a log-prob is not finite (broken weights).
    """
    sample = output.outputs[0]
    ranked = cast("Sequence[Mapping[int, Logprob]]", sample.logprobs or ())  # one entry each: the sampled token
    logprobs = tuple(entry[token].logprob for entry, token in zip(ranked, sample.token_ids, strict=True))
    versions = tuple(int(span.version) for span in sample.weight_versions or () for _ in range(span.start, span.end))
    if sample.finish_reason not in ("stop", "length", "abort") or len(versions) != len(sample.token_ids):
        raise EngineError(
            f"request {output.request_id} ended with {sample.finish_reason!r}, {len(sample.token_ids)} tokens and "
            f"{len(versions)} versions"
        )
    if not all(map(math.isfinite, logprobs)):
        raise EngineError(
            f"request {output.request_id} has a log-prob that is not finite; weight versions {set(versions)}"
        )
    return Completion(
        token_ids=tuple(sample.token_ids),
        logprobs=logprobs,
        versions=versions,
        finish_reason=cast('Literal["stop", "length", "abort"]', sample.finish_reason),
        num_cached_tokens=output.num_cached_tokens or 0,
    )


class VLLMEngine:
    """One vLLM engine in the calling process, its core beside it. Use it from one event loop.

    Attributes:
        engine_id: names the engine in errors and logs.
        max_model_len: longest prompt plus completion, in tokens.
        eos_token_ids: end a completion, and are its last token then.
        version: of the weights that were loaded whole last.
    """

    def __init__(self, config: EngineConfig, *, engine_id: str = "engine-0") -> None:
        facts = read_model(config.model)
        self.engine_id = engine_id
        self.max_model_len = config.max_model_len
        self.eos_token_ids = facts.eos_token_ids
        self._vocab_size = facts.vocab_size
        self._config = config
        self.version = 0
        self._llm: AsyncLLM | None = None
        self._poison: str | None = None  # why the weights cannot be trusted
        self._updating = asyncio.Lock()
        self._running: set[str] = set()
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._files: deque[Path] = deque()

    async def start(self) -> None:
        """Load the model and label its weights version 0. A start after `shutdown` begins from the model folder again.

        Raises:
            ConfigError: the settings cannot work; vLLM is not imported then.
            EngineUnavailable: vLLM did not start.
        """
        if self._llm is not None:
            raise EngineError(f"{self.engine_id} is running already")
        self.version, self._poison = 0, None
        try:
            with boundary(EngineUnavailable, f"{self.engine_id} did not start"):
                async with asyncio.timeout(START_TIMEOUT_S):
                    arguments = await asyncio.to_thread(prepare_vllm, self._config)
                    self._llm = await asyncio.to_thread(build_llm, arguments, self._config.core)
                    await self._llm.update_weight_version("0")
        except BaseException:
            await self.shutdown()
            raise

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, *, request_id: str, deadline_s: float
    ) -> Completion:
        """Sample one completion. Cancelling the call stops the request in the engine too.

        Temperature 0 takes the likeliest token; its log-probs are then those of temperature 1.

        Args:
            prompt_ids: [T] plain ints.
            sampling: `max_tokens` is cut to what the context has left. With a seed, the same prompt under the same weights
                gives the same tokens.
            request_id: unique among the requests in flight.
            deadline_s: seconds from now, waiting in the engine and pauses for updates included.

        Raises:
            InvalidRequest: the request can never succeed.
            DeadlineExceeded: the request was stopped at its deadline.
            EngineUnavailable: the engine is not started, dead, or poisoned by a failed update.
        """
        llm = self._serving()
        max_tokens = check_request(prompt_ids, sampling, vocab_size=self._vocab_size, max_model_len=self.max_model_len)
        if request_id in self._running:
            raise InvalidRequest(f"request id {request_id!r} is in flight already")
        self._running.add(request_id)
        try:
            async with asyncio.timeout(deadline_s):
                return read_output(await self._sample(llm, prompt_ids, sampling, max_tokens, request_id))
        except TimeoutError as error:
            raise DeadlineExceeded(f"{self.engine_id}: request {request_id} unfinished after {deadline_s} s") from error
        finally:
            self._running.discard(request_id)

    async def _sample(
        self, llm: AsyncLLM, prompt_ids: Sequence[int], sampling: SamplingParams, max_tokens: int, request_id: str
    ) -> RequestOutput:
        from vllm import SamplingParams as VLLMSamplingParams
        from vllm.exceptions import VLLMClientError
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        params = VLLMSamplingParams(
            temperature=sampling.temperature,
            max_tokens=max_tokens,
            seed=sampling.seed,
            stop_token_ids=list(sampling.stop_token_ids),  # besides the model's own end of sequence
            logprobs=0,  # of the sampled token alone
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = tokens_input(list(prompt_ids))
        try:
            async with aclosing(llm.generate(prompt, params, request_id)) as outputs:
                return [output async for output in outputs][-1]
        except VLLMClientError as error:
            raise InvalidRequest(f"{self.engine_id} refused request {request_id}: {error}") from error
        except Exception as error:
            raise EngineUnavailable(f"{self.engine_id}: {type(error).__name__}: {error}") from error

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Stop requests; their `generate` calls return what they have, with finish reason "abort". Unknown ids are ignored."""
        if self._llm is not None:
            await self._llm.abort([r for r in request_ids if r in self._running])

    async def update_weights(self, weights: Mapping[str, torch.Tensor], version: int, *, timeout_s: float) -> float:
        """Replace all weights and resume the requests in flight under them.

        The requests keep their tokens and are computed again under the new weights. If the update fails after the engine has
        been touched, the engine stays paused and refuses requests until an update succeeds.

        Args:
            weights: every parameter by its Hugging Face name, unchanged until this returns. A tied model may leave
                `lm_head.weight` out.
            version: above the current one.
            timeout_s: for the whole call, the wait for an update that is running included.

        Returns:
            seconds it took.

        Raises:
            WeightUpdateFailed: the version does not rise, the weights do not fit, or the time is over.
            EngineUnavailable: the engine is not started.
        """
        began = time.perf_counter()
        attempt = f"{self.engine_id}: update to version {version}"
        try:
            async with asyncio.timeout(timeout_s), self._updating:
                if version <= self.version:
                    raise WeightUpdateFailed(
                        f"{attempt} refused: version {self.version} is loaded and versions only rise"
                    )
                llm = self._started()
                path = await asyncio.to_thread(self._write, weights, version)
                await self._swap(llm, path, version)
        except ArenaError:
            raise
        except TimeoutError as error:
            raise WeightUpdateFailed(f"{attempt} unfinished after {timeout_s} s") from error
        except Exception as error:
            raise WeightUpdateFailed(f"{attempt}: {type(error).__name__}: {error}") from error
        return time.perf_counter() - began

    def _write(self, weights: Mapping[str, torch.Tensor], version: int) -> Path:
        from safetensors.torch import save_file

        tensors: dict[str, torch.Tensor] = {}
        storages: set[int] = set()
        for name, weight in weights.items():
            tensor = weight.detach().cpu().contiguous()
            storage = tensor.untyped_storage().data_ptr()
            tensors[name] = tensor.clone() if storage in storages else tensor  # safetensors refuses shared memory
            storages.add(storage)
        if self._folder is None:
            parent = self._config.weights_dir or ("/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
            self._folder = tempfile.TemporaryDirectory(
                prefix="arenarl-weights-", dir=parent, ignore_cleanup_errors=True
            )
        unique = (
            f"version-{version}-{uuid.uuid4().hex}"  # a second attempt never meets what a stuck first one still writes
        )
        path = Path(self._folder.name) / f"{unique}.safetensors"
        partial = path.with_suffix(".partial")
        save_file(tensors, partial)
        partial.replace(path)
        self._files.append(path)
        while len(self._files) > KEPT_WEIGHT_FILES:
            self._files.popleft().unlink(missing_ok=True)
        return path

    async def _swap(self, llm: AsyncLLM, path: Path, version: int) -> None:
        try:
            await llm.pause_generation(mode="keep", clear_cache=True)
            await llm.collective_rpc("load_weight_file", args=(str(path),))
            await llm.update_weight_version(str(version))
            await llm.resume_generation()
        except BaseException:
            self._poison = f"its update to version {version} did not finish"
            raise
        self.version, self._poison = version, None

    async def weight_version(self, timeout_s: float = 10.0) -> int:
        """The version that the core itself reports: the health check, since vLLM's own says "fine" for a stuck core.

        Raises:
            EngineUnavailable: no answer in time, or the engine is not started, dead, or poisoned.
        """
        llm = self._serving()
        with boundary(EngineUnavailable, f"{self.engine_id} did not tell its version within {timeout_s} s"):
            async with asyncio.timeout(timeout_s):
                return int(await llm.get_weight_version())

    async def shutdown(self, timeout_s: float = 10.0) -> None:
        """Stop the core, which is killed if it does not end by itself in time, and remove the weight files.

        Requests in flight return what they have, with finish reason "abort". Shutting down twice is fine.
        """
        llm, folder = self._llm, self._folder
        try:
            if llm is not None:
                await self.abort(list(self._running))
                if llm.output_handler is not None:
                    llm.output_handler.cancel()  # or it logs the end of the core as an error
                await asyncio.to_thread(llm.shutdown, timeout_s)
        finally:
            self._llm = self._folder = None
            self._files.clear()
            if folder is not None:
                folder.cleanup()

    def num_unfinished(self) -> int:
        """Requests that wait or run in the engine."""
        return 0 if self._llm is None else self._llm.get_num_unfinished_requests()

    def _started(self) -> AsyncLLM:
        if self._llm is None:
            raise EngineUnavailable(f"{self.engine_id} is not started")
        return self._llm

    def _serving(self) -> AsyncLLM:
        llm = self._started()
        if self._poison is not None:
            raise EngineUnavailable(f"{self.engine_id} serves nothing until its weights are whole: {self._poison}")
        return llm
