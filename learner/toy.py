"""The small model of the quick start: a Qwen2 of 304,256 parameters with a character tokenizer.

Its folder (config, tokenizer, generation settings; no weights) is all an engine needs to start.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import Qwen2Config, Qwen2Tokenizer

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
ALPHABET = " \nabcdefghijklmnopqrstuvwxyz0123456789=+-*/%<>()[]{}.,:;?!'\"_"
VOCABULARY = [PAD, EOS, UNK, *ALPHABET]  # 64 tokens
EOS_ID = VOCABULARY.index(EOS)
PAD_ID = VOCABULARY.index(PAD)


def toy_config(*, max_tokens: int = 1024) -> Qwen2Config:
    """`max_tokens`: the longest sequence the model will see."""
    from transformers import Qwen2Config

    return Qwen2Config(
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max(max_tokens, 1024),
        tie_word_embeddings=True,
        attention_dropout=0.0,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        dtype="float32",
        architectures=["Qwen2ForCausalLM"],
    )


def toy_tokenizer() -> Qwen2Tokenizer:
    """One token per character of `ALPHABET`; other characters vanish. No chat template.

    AutoTokenizer makes a Qwen2Tokenizer of whatever lies beside a Qwen2 config, so it is one: byte
    level BPE without a merge. Its vocabulary writes a space as Ġ and a new line as Ċ.
    """
    from transformers import Qwen2Tokenizer

    vocabulary = {t.replace(" ", "Ġ").replace("\n", "Ċ"): i for i, t in enumerate(VOCABULARY)}
    return Qwen2Tokenizer(
        vocab=vocabulary, merges=[], pad_token=PAD, eos_token=EOS, unk_token=UNK, model_max_length=1024
    )


def write_toy_folder(folder: Path, *, max_tokens: int = 1024) -> None:
    """Write config, tokenizer and generation settings into `folder` (made if missing)."""
    from transformers import GenerationConfig

    folder.mkdir(parents=True, exist_ok=True)
    config = toy_config(max_tokens=max_tokens)
    toy_tokenizer().save_pretrained(folder)
    GenerationConfig(eos_token_id=EOS_ID, pad_token_id=PAD_ID).save_pretrained(folder)
    config.save_pretrained(folder)
