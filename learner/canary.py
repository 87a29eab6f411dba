"""The learner's half of the proof of a load: a forward of the weights as sent (``common/canary.py``)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.func import functional_call

from common.canary import Canary, canary_ids


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
        given = {**self._buffers, **dict(tensors)}
        logits = functional_call(self._lm, given, (), {"input_ids": ids, "use_cache": False}, strict=True).logits
        logprobs = logits[0, :-1].float().log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1)
        return Canary(self.ids, tuple(logprobs.tolist()), self._dtype)
