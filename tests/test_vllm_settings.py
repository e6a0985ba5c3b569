"""What the engine refuses before vLLM is imported, and what it asks of vLLM on each device."""

import subprocess
import sys

import pytest

from arenarl.engine import EngineConfig
from arenarl.errors import ConfigError
from arenarl.vllm_settings import engine_args, read_model


def test_a_missing_model_is_refused_before_vllm_is_imported():
    code = (
        "import sys; from arenarl.engine import EngineConfig\n"
        "try: EngineConfig(model='no/such')\n"
        "except Exception as e: print(type(e).__name__, e, 'vllm' in sys.modules, 'torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout
    assert out.startswith("ConfigError model folder 'no/such' does not exist; ") and out.endswith("False False\n")


def test_settings_that_cannot_work_are_refused_by_name(tiny_model_dir, tmp_path):
    folder = str(tiny_model_dir)
    with pytest.raises(ConfigError, match="max_model_len=2049 must lie in \\[1, 2048\\]"):
        EngineConfig(model=folder, max_model_len=2049)
    for wrong in ({"core": "gpu"}, {"dtype": "int8"}, {"max_num_seqs": 0}, {"gpu_memory_utilization": 1.5}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            EngineConfig(model=folder, **wrong)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="no usable configuration: KeyError"):
        read_model(str(tmp_path))
    # (2048 / 32 + 1) blocks x 32 tokens x 2 (key, value) x 2 layers x 32 values x 4 bytes
    with pytest.raises(ConfigError, match="give at least 1064960 bytes"):
        engine_args(EngineConfig(model=folder, kv_cache_bytes=1064959), "cpu")
    with pytest.raises(ConfigError, match="core='thread'"):
        engine_args(EngineConfig(model=folder, core="thread"), "cuda")


def test_no_setting_of_the_cpu_reaches_a_gpu(tiny_model_dir):
    config = EngineConfig(model=str(tiny_model_dir))
    cpu, cuda = engine_args(config, "cpu"), engine_args(config, "cuda")
    assert (cpu["dtype"], cuda["dtype"]) == ("float32", "bfloat16")
    assert not {"enforce_eager", "distributed_executor_backend", "kv_cache_memory_bytes", "block_size"} & set(cuda)
    assert cpu["logprobs_mode"] == cuda["logprobs_mode"] == "processed_logprobs"
