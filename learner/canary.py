"""The learner's half of the proof of a load: a forward of the weights as sent (``common/canary.py``)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from common.adapters import Adapters, peft_name
from common.canary import Canary, canary_ids
from common.weights import DTYPES
from learner.families import attention_of


class CanaryForward:
    """A model without weights of its own, on the CPU: it computes with those it is given, in their dtype."""

    def __init__(self, lm: nn.Module, *, dtype: str, max_tokens: int, trust_remote_code: bool = False) -> None:
        """
        Args:
            lm: the Hugging Face causal LM whose weights are published; its config and buffers are taken.
            max_tokens: longest prompt that engines take.
        """
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            self._lm = AutoModelForCausalLM.from_config(
                lm.config, attn_implementation=lm.config._attn_implementation, trust_remote_code=trust_remote_code
            ).eval()
        self._buffers = {name: b.detach().cpu().clone() for name, b in lm.named_buffers()}
        self._dtype = dtype
        self.ids = canary_ids(lm.config.get_text_config().vocab_size, max_tokens)

    @torch.no_grad()
    def __call__(self, tensors: Iterable[tuple[str, Tensor]]) -> Canary:
        """The canary of a version whose tensors are these."""
        ids = torch.tensor([self.ids])
        logits = self._forward(dict(tensors), {"input_ids": ids, "use_cache": False}).logits
        logprobs = logits[0, :-1].float().log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1)
        return Canary(self.ids, tuple(logprobs.tolist()), self._dtype)

    def _forward(self, tensors: dict[str, Tensor], inputs: dict[str, Any]) -> Any:
        return functional_call(self._lm, {**self._buffers, **tensors}, (), inputs, strict=True)


class AdapterCanary(CanaryForward):
    """The same for adapters that are sent alone: beside the base that engines read, from the same folder.

    It keeps a copy of the base in host memory, in the served dtype.
    """

    def __init__(
        self, folder: Path, adapters: Adapters, *, dtype: str, max_tokens: int, trust_remote_code: bool = False
    ) -> None:
        from transformers import AutoModelForCausalLM

        attention = attention_of(folder, key="model.path", what="causal LM", trust_remote_code=trust_remote_code)
        self._lm = AutoModelForCausalLM.from_pretrained(
            folder, dtype=DTYPES[dtype], attn_implementation=attention, trust_remote_code=trust_remote_code
        ).eval()
        adapters.inject(self._lm)
        self._dtype = dtype
        self.ids = canary_ids(self._lm.config.get_text_config().vocab_size, max_tokens)

    def _forward(self, tensors: dict[str, Tensor], inputs: dict[str, Any]) -> Any:
        given = {peft_name(name): t for name, t in tensors.items()}
        return functional_call(self._lm, given, (), inputs)
