"""Families of models that the learner knows, at some 100,000 random parameters."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SMALL = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": 1,
    "pad_token_id": 0,
}  # fmt: skip
FAMILIES = {
    "llama": {"tie_word_embeddings": False},
    "llama tied": {"tie_word_embeddings": True},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": False},
    "mistral": {"sliding_window": 6, "tie_word_embeddings": False},
    "gemma": {"tie_word_embeddings": True},
    "gemma2": {"sliding_window": 6, "final_logit_softcapping": 2.0, "attn_logit_softcapping": 3.0},
    "gemma3_text": {"sliding_window": 6},
}


def write_family(folder: Path, family: str, **changes: object) -> Path:
    """A folder with config and weights of a random model of the family."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family.split()[0], **{**SMALL, **FAMILIES[family], **changes})
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p.normal_(0, 0.15)  # far from flat, so that a cap or a window shows
    model.save_pretrained(folder)
    return folder
