"""The Hugging Face folder: what `from_pretrained` and vLLM load."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from common.logs import LOGGER
from learner.files import leave_folder, replace_file
from learner.model import DTYPES, Actor
from learner.ranks import Ranks
from learner.served import PublishedWeights

_log = logging.getLogger(LOGGER)


def save_hf(target: Path, actor: Actor, tokenizer: Any, *, dtype: str, ranks: Ranks) -> None:
    """Weights (safetensors), config, generation settings and tokenizer, in place of what `target` was.

    Raises LeewayError if it cannot be written.
    """
    weights = {}
    for name, tensor in PublishedWeights(actor, dtype=dtype):  # gathered by all ranks, kept by the first
        if ranks.first:
            weights[name] = tensor.cpu().contiguous()
    if not ranks.first:
        return

    actor.lm.generation_config = _writable(actor.lm.generation_config)

    def write(folder: Path) -> None:
        before, actor.lm.config.dtype = actor.lm.config.dtype, DTYPES[dtype]
        try:
            actor.lm.save_pretrained(folder, state_dict=weights)
        finally:
            actor.lm.config.dtype = before
        tokenizer.save_pretrained(folder)

    leave_folder(target, write)


def _writable(config: Any) -> Any:
    """Generation settings as transformers consents to save them: many models come with some that it only reads."""
    try:
        config.validate(strict=True)
    except ValueError:
        config.do_sample = True  # else temperature, top_p, … make no sense to it
        try:
            config.validate(strict=True)
        except ValueError as e:
            _log.warning("generation settings of the model are left out: %s", str(e).splitlines()[0])
            kept = ("bos_token_id", "eos_token_id", "pad_token_id")
            return type(config)(**{name: getattr(config, name, None) for name in kept})
    return config


def save_weights(folder: Path, actor: Actor) -> None:
    """Add `model.safetensors` to a folder that has config and tokenizer already (an unsharded model)."""
    from safetensors.torch import save_file

    weights = {name: p.detach().to("cpu", torch.float32).contiguous() for name, p in actor.lm.named_parameters()}
    replace_file(folder / "model.safetensors", lambda fresh: save_file(weights, fresh, metadata={"format": "pt"}))
