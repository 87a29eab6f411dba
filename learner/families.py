"""What is read off a model's config before its weights are touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common.errors import ConfigError

UNKNOWN_LAYERS = {  # what a config calls them
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "state-space layers": ("mamba", "ssm", "state_size", "linear_key_head_dim", "time_step_rank"),
}


def vocab_size(folder: str | Path, *, trust_remote_code: bool = False) -> int:
    """Number of token ids of the model in `folder`."""
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code).get_text_config().vocab_size)


def attention_of(
    folder: str | Path, *, key: str = "model.path", what: str = "causal LM", trust_remote_code: bool = False
) -> str:
    """The attention that computes what the model in `folder` defines: sdpa would leave out a cap on its scores.

    Raises:
        ConfigError: naming the family, if its layers are not attention and one feed-forward part. Experts
            are not served as they are trained, and state spaces would not see the sequences of a row apart.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code).get_text_config()
    except (OSError, ValueError) as e:
        raise ConfigError(f"{key}={folder}: not a loadable {what} ({str(e).splitlines()[0]})") from e
    fields = config.to_dict()
    for kind, signs in UNKNOWN_LAYERS.items():
        if found := sorted(name for name in fields if any(sign in name for sign in signs) and fields[name]):
            raise ConfigError(
                f"{key}: models of type {config.model_type!r} have {kind} ({', '.join(found[:3])}), which the "
                "learner cannot train; take one whose layers are attention and one feed-forward part"
            )
    return "eager" if fields.get("attn_logit_softcapping") else "sdpa"


def refuse_moving_positions(config: Any, max_tokens: int, *, key: str = "model.path") -> None:
    """Positions that stretch with the longest sequence of a forward would differ with what shares a micro-batch.

    config: the model's, as transformers has it; max_tokens: of the longest sequence.

    Raises:
        ConfigError: naming the kind, if a sequence may become so long that they do.
    """
    text = config.get_text_config()
    for kind in rope_types(text) & {"dynamic", "longrope"}:
        rope = getattr(text, "rope_parameters", None) or {}
        original = rope.get("original_max_position_embeddings") or text.max_position_embeddings
        if max_tokens > original:
            raise ConfigError(
                f"{key}: its positions of type {kind!r} stretch beyond {original} tokens with the longest of a "
                f"batch; keep data.max_prompt_length + data.max_response_length (now {max_tokens}) within that"
            )


def rope_types(config: Any) -> set[str]:
    """How a model turns positions into rotations, by transformers' names."""
    rope = getattr(config, "rope_parameters", None) or {}
    return {p["rope_type"] for p in (rope, *rope.values()) if isinstance(p, dict) and "rope_type" in p}
