"""What runs inside vLLM's worker: loading new weights in place. vLLM imports this module before it builds the model.

Two things happen at import, in the process of the engine core:

* On CPU, vLLM packs every linear layer's weight into a oneDNN handle and empties the parameter. New weights then cannot be
  loaded in place, and vLLM's own reload leaves a tied output projection at its old values without an error. With the oneDNN
  dispatch off, layers call `torch.nn.functional.linear` on a parameter that stays, at the same float32 speed.
* The core ends when its parent does, however the parent ended.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open
from vllm import _custom_ops
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from arenarl.vllm_thread import end_with_parent, leftovers

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

if current_platform.is_cpu():
    _custom_ops._supports_onednn = False
end_with_parent()


class WeightFileExtension:
    """Mixed into vLLM's worker class (`worker_extension_cls`); `collective_rpc` calls its methods by name."""

    vllm_config: VllmConfig
    model_runner: GPUModelRunner

    def load_weight_file(self, path: str) -> int:
        """Replace every parameter of the model by the tensors of one safetensors file with Hugging Face names.

        A tied model may leave `lm_head.weight` out. CUDA graphs hold the storage of the parameters, so on GPU the layer-wise
        reload copies into it; the parameters of a CPU model are written directly.

        Returns:
            how many parameters of the model were written.

        Raises:
            ValueError: the file lacks parameters of the model. The model is a mixture of old and new from then on, as after
                any other failure in here.
        """
        leftovers.add(str(Path(path).parent))
        model: Any = self.model_runner.get_model()
        wanted = {name for name, _ in model.named_parameters()}
        in_place = current_platform.is_cpu()
        with set_current_vllm_config(self.vllm_config), safe_open(path, "pt") as file:
            if not in_place:
                initialize_layerwise_reload(model)
            written = model.load_weights((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
            if not in_place:
                finalize_layerwise_reload(model, self.vllm_config.model_config)
        if missing := sorted(wanted - written):
            raise ValueError(f"the update lacks {len(missing)} parameters of the model, {missing[0]} first")
        return len(written)
