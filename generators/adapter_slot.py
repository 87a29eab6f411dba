"""vLLM's slot for one LoRA adapter: each version fills it anew, the base stays as the engine read it at its start.

Every request asks for the same adapter (``requests.py``), so vLLM finds it registered and never looks for a file.
Prefix and KV caches are reset by the pause around a swap, as for whole weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import parse_fine_tuned_lora_name

from common.adapters import Adapters
from common.errors import ConfigError
from generators.starting import ADAPTER_ID


class AdapterSlot:
    def __init__(self, worker_manager: Any, adapters: Adapters, vocab_size: int) -> None:
        """worker_manager: vLLM's ``LRUCacheWorkerLoRAManager`` of this worker."""
        self._manager = worker_manager._adapter_manager
        self._dtype = worker_manager.lora_config.lora_dtype
        self._helper = PEFTHelper(r=adapters.rank, lora_alpha=adapters.alpha, target_modules=adapters.targets)
        self._vocab_size = vocab_size
        mapper = getattr(self._manager.model, "hf_to_vllm_mapper", None)
        self._mapper = mapper and mapper.get_rename_mapper()

    def refuse_unknown_layers(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises ConfigError, naming the layer, for an adapter that vLLM would silently leave out."""
        known: set[str] = set()
        for name in self._manager.modules:
            known.update(self._manager.packed_modules.get(name, [name]))
        for name in shapes:
            layer, _ = parse_fine_tuned_lora_name(name, self._mapper)
            if layer not in known:
                raise ConfigError(
                    f"weights.adapters_only=true: vLLM computes no adapter beside {layer} of this model; "
                    "leave it out of model.target_modules, or set weights.adapters_only=false"
                )

    def fill(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Put these in the place of the adapter before; between two steps of the engine."""
        # Copies: vLLM keeps what it is given, and scales B in place.
        adapter = LoRAModel.from_lora_tensors(
            ADAPTER_ID, {name: tensor.clone() for name, tensor in tensors}, self._helper, device="cpu",
            dtype=self._dtype, model_vocab_size=self._vocab_size, weights_mapper=self._mapper,
        )  # fmt: skip
        self._manager.remove_adapter(ADAPTER_ID)
        self._manager.add_adapter(adapter)
        self._manager.activate_adapter(ADAPTER_ID)
