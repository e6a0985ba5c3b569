"""How vLLM is configured: what the model folder says, what the user chose, and what CPU and GPU each ask for."""

from __future__ import annotations

import json
import logging
import math
import os
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, get_args

from arenarl.errors import ConfigError

log = logging.getLogger(__name__)

BLOCK = 32  # tokens in a block of the prefix cache: the smallest that vLLM takes on CPU
PREFILL_TOKENS = 4096  # prompt tokens that one step of the engine computes at most on CPU
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Core = Literal["process", "thread"]
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What a Hugging Face model folder says about the model.

    Attributes:
        context: longest sequence that the positions allow, in tokens.
        eos_token_ids: ids that end a generation, those of `generation_config.json` first.
        kv_values_per_token: numbers that the key-value cache keeps for one token, over all layers.
    """

    vocab_size: int
    context: int
    eos_token_ids: tuple[int, ...]
    kv_values_per_token: int


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How to build a `VLLMEngine`.

    Attributes:
        model: folder of a Hugging Face model; no tokenizer is needed.
        dtype: "auto" is float32 on CPU, where bfloat16 is slower and its log-probs are off by 0.1, and bfloat16 on GPU.
        max_model_len: longest prompt plus completion, in tokens.
        max_num_seqs: sequences that one step of the engine may hold; further requests wait in the engine.
        kv_cache_bytes: size of the key-value cache on CPU.
        gpu_memory_utilization: share of the GPU's memory for weights and cache.
        weights_dir: where weight updates are written, two versions of them; None is /dev/shm, or the folder for temporary files
            if there is none. Containers often have a small /dev/shm.
        core: where vLLM's core runs. "thread" is for CPU: it starts faster and shares one interpreter with the caller.

    Raises:
        ConfigError: the folder is missing or holds no model, or a number is out of range.
    """

    model: str
    dtype: Dtype = "auto"
    max_model_len: int = 2048
    max_num_seqs: int = 64
    kv_cache_bytes: int = 128 << 20
    gpu_memory_utilization: float = 0.9
    seed: int = 0
    weights_dir: str | None = None
    core: Core = "process"

    def __post_init__(self) -> None:
        context = read_model(self.model).context
        if not 1 <= self.max_model_len <= context:
            raise ConfigError(f"max_model_len={self.max_model_len} must lie in [1, {context}], the model's context")
        if self.max_num_seqs < 1:
            raise ConfigError(f"max_num_seqs={self.max_num_seqs} must be at least 1")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization={self.gpu_memory_utilization} must lie in (0, 1]")
        for name, choices in (("dtype", get_args(Dtype)), ("core", get_args(Core))):
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be one of {', '.join(choices)}")


def read_model(folder: str) -> ModelFacts:
    """Read `config.json` and `generation_config.json` of a model folder.

    Raises:
        ConfigError: the folder does not exist or has no readable `config.json` of a decoder model.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ConfigError(f"model folder '{folder}' does not exist; give the path of a saved Hugging Face model")
    try:
        config = json.loads((path / "config.json").read_text())
        heads = config["num_attention_heads"]
        head_size = config.get("head_dim") or config["hidden_size"] // heads
        kv_heads = config.get("num_key_value_heads") or heads
        vocab_size, context = config["vocab_size"], config["max_position_embeddings"]
        kv_values = 2 * config["num_hidden_layers"] * kv_heads * head_size
        generation = path / "generation_config.json"
        settings = json.loads(generation.read_text()) if generation.is_file() else {}
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"model folder '{folder}' has no usable configuration: {type(error).__name__}: {error}"
        ) from error
    eos = settings.get("eos_token_id", config.get("eos_token_id"))
    eos = [eos] if isinstance(eos, int) else eos or []
    return ModelFacts(
        vocab_size=vocab_size,
        context=context,
        eos_token_ids=tuple(t for t in eos if 0 <= t < vocab_size),
        kv_values_per_token=kv_values,
    )


def cpu_environment() -> dict[str, str]:
    """Variables that vLLM must find on CPU when it is imported; what the user has set already wins.

    One thread for each process: with two on two busy cores the threads wait for one another and decoding is ten times slower.
    The core is the only process (no separate worker), and nothing is compiled, since the first request would wait for it.
    """
    return {
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }


def engine_args(config: EngineConfig, device: Literal["cpu", "cuda"]) -> dict[str, Any]:
    """Arguments of vLLM's `AsyncEngineArgs` for a device.

    Raises:
        ConfigError: the CPU cache cannot hold one request of full length, or a GPU core is asked to run in a thread.
    """
    common = {
        "model": config.model,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "seed": config.seed,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # the model's file must not change the sampling
        "logprobs_mode": "processed_logprobs",  # of the distribution that was sampled, after temperature
        "enable_prefix_caching": True,
        "worker_extension_cls": "arenarl.vllm_worker.WeightFileExtension",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if device == "cuda":
        if config.core == "thread":
            raise ConfigError("core='thread' is for engines on CPU; use core='process' on a GPU")
        dtype = "bfloat16" if config.dtype == "auto" else config.dtype
        return common | {"dtype": dtype, "gpu_memory_utilization": config.gpu_memory_utilization}

    dtype = "float32" if config.dtype == "auto" else config.dtype
    blocks = math.ceil(config.max_model_len / BLOCK) + 1  # vLLM keeps one block for itself
    needed = blocks * BLOCK * read_model(config.model).kv_values_per_token * (4 if dtype == "float32" else 2)
    if config.kv_cache_bytes < needed:
        raise ConfigError(
            f"kv_cache_bytes={config.kv_cache_bytes} cannot hold one request of max_model_len={config.max_model_len} tokens; "
            f"give at least {needed} bytes or shorten max_model_len"
        )
    return common | {
        "dtype": dtype,
        "enforce_eager": True,
        "distributed_executor_backend": "uni",
        "kv_cache_memory_bytes": config.kv_cache_bytes,
        "block_size": BLOCK,
        # a prompt cut in two kills the core if its request has a seed: CPU generators cannot be set back (vLLM 0.32)
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(config.max_model_len, PREFILL_TOKENS),
    }


def installed_device() -> Literal["cpu", "cuda"]:
    """What the installed vLLM was built for, told without importing it.

    Raises:
        ConfigError: vLLM is not installed.
    """
    for name in ("vllm-cpu", "vllm"):
        try:
            return "cpu" if "cpu" in name + metadata.version(name) else "cuda"
        except metadata.PackageNotFoundError:
            continue
    raise ConfigError("vLLM is not installed; install arenarl[cpu] or arenarl[gpu]")


def prepare_vllm(config: EngineConfig) -> dict[str, Any]:
    """Set vLLM's environment, import vLLM, and return the arguments of its `AsyncEngineArgs`.

    Raises:
        ConfigError: the settings cannot work; vLLM is not imported then.
    """
    device = installed_device()
    arguments = engine_args(config, device)
    environment = QUIET | (cpu_environment() if device == "cpu" else {})
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    log.info("vLLM for %s, core in a %s, %s, %s", device, config.core, arguments, environment)
    import vllm.v1.engine.async_llm  # noqa: F401

    return arguments
