"""A tiny random model for tests: a Qwen2 of about 0.3 M parameters with a character tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 =+-"
PAD, EOS = 0, 1
VOCAB_SIZE = len(CHARACTERS) + 2


def token_ids(text: str) -> list[int]:
    """One id per character; what the tokenizer of ``write_tokenizer`` does."""
    return [CHARACTERS.index(c) + 2 for c in text]


def tiny_config(**changes: object) -> Qwen2Config:
    settings: dict[str, object] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "dtype": "float32",
    }
    return Qwen2Config(**{**settings, **changes})


def tiny_model(seed: int = 0, *, scale: float = 4.0, **changes: object) -> Qwen2ForCausalLM:
    """Random weights; ``scale`` times the usual spread, so that distributions are far from flat."""
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(tiny_config(**changes)).float().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 2:
                p.mul_(scale)
            elif name.endswith("bias"):
                p.normal_(0, 0.1)
    return model


def write_folder(folder: Path, model: Qwen2ForCausalLM | None = None) -> Path:
    """``config.json`` and tokenizer files, with weights if a model is given."""
    folder.mkdir(parents=True, exist_ok=True)
    (model.config if model is not None else tiny_config()).save_pretrained(folder)
    if model is not None:
        model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """A character-level tokenizer that ``AutoTokenizer.from_pretrained`` loads."""
    vocab = {"<pad>": PAD, "<eos>": EOS} | {c: i + 2 for i, c in enumerate(CHARACTERS)}
    special = [
        {"id": i, "content": t, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for t, i in (("<pad>", PAD), ("<eos>", EOS))
    ]  # fmt: skip
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False},
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<pad>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


@torch.no_grad()
def logprobs_of(
    model: Qwen2ForCausalLM, prompt: list[int], response: list[int], temperature: float = 1.0
) -> list[float]:
    """Log-probability of each response token under ``model``, in float32."""
    ids = torch.tensor([prompt + response])
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float() / temperature
    chosen = logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])
    return chosen.squeeze(-1).tolist()
