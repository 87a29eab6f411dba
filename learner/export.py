"""The Hugging Face folder: what `from_pretrained` and vLLM load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from learner.files import replace_file, replace_folder
from learner.model import DTYPES, Actor, published_weights
from learner.ranks import Ranks


def save_hf(target: Path, actor: Actor, tokenizer: Any, *, dtype: str, ranks: Ranks) -> None:
    """Weights (safetensors), config, generation settings and tokenizer, in place of what `target` was."""
    weights = {}
    for name, tensor in published_weights(actor, dtype=dtype):  # gathered by all ranks, kept by the first
        if ranks.first:
            weights[name] = tensor.cpu().contiguous()
    if not ranks.first:
        return

    def write(folder: Path) -> None:
        before, actor.lm.config.dtype = actor.lm.config.dtype, DTYPES[dtype]
        try:
            actor.lm.save_pretrained(folder, state_dict=weights)
        finally:
            actor.lm.config.dtype = before
        tokenizer.save_pretrained(folder)

    replace_folder(target, write)


def save_weights(folder: Path, actor: Actor) -> None:
    """Add `model.safetensors` to a folder that has config and tokenizer already (an unsharded model)."""
    from safetensors.torch import save_file

    weights = {name: p.detach().to(torch.float32).contiguous() for name, p in actor.lm.named_parameters()}
    replace_file(folder / "model.safetensors", lambda fresh: save_file(weights, fresh, metadata={"format": "pt"}))
