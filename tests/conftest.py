"""What all tests share: no deadlines on examples, and one engine. Its weights and version change from test to test: read the version, do not assume it."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import hypothesis
import pytest

from arenarl.engine import EngineConfig, VLLMEngine

os.environ.setdefault("OMP_NUM_THREADS", "1")
# how long an example takes depends on who else runs
hypothesis.settings.register_profile("shared cores", deadline=None)
hypothesis.settings.load_profile("shared cores")


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random tied Qwen3: 512 ids, 2 layers, context 2048, logits far from flat. No tokenizer, no end of sequence."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=2048,
        initializer_range=0.2,
        tie_word_embeddings=True,
        eos_token_id=None,
    )
    folder = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
async def engine(tiny_model_dir: Path) -> AsyncIterator[VLLMEngine]:
    """A started engine on the tiny model, its core in a thread."""
    config = EngineConfig(model=str(tiny_model_dir), core="thread", kv_cache_bytes=32 << 20)
    engine = VLLMEngine(config, engine_id="shared")
    await engine.start()
    yield engine
    await engine.shutdown()
