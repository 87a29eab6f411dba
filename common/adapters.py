"""LoRA adapters, as learner and engines both see them: which layers have one, what its tensors are called.

The layers are peft's, put into the model in place. On the wire an adapter's tensors have the Hugging Face name of
their layer: ``model.layers.0.self_attn.q_proj.lora_A.weight``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from common.errors import ConfigError

MAX_SERVED_RANK = 512  # vLLM's
_PEFT_NAME = ".default."  # peft's own, between `lora_A` and `weight`


@dataclass(frozen=True)
class Adapters:
    """``Adapters(16, 32, "all-linear")``"""

    rank: int
    alpha: int
    targets: str | list[str]
    key: str = "model"  # part of the config that says so

    @classmethod
    def of(cls, part: Any, key: str = "model") -> Adapters:
        """part: that part of the config."""
        return cls(part.lora_rank, part.lora_alpha, part.target_modules, key)

    def inject(self, lm: Any) -> Any:
        """Put an adapter beside each linear layer of `lm` that `targets` names; peft's LoraConfig.

        Raises:
            ConfigError: peft is not installed; a target that is no layer it knows.
        """
        try:
            from peft import LoraConfig, inject_adapter_in_model
        except ImportError as e:
            raise ConfigError(f"{self.key}.lora_rank: needs peft; install it (the extra `lora`), or set it to 0") from e
        config = LoraConfig(
            r=self.rank, lora_alpha=self.alpha, target_modules=self.targets, lora_dropout=0.0, bias="none",
            task_type="CAUSAL_LM",
        )  # fmt: skip
        try:
            inject_adapter_in_model(config, lm, low_cpu_mem_usage=next(lm.parameters()).is_meta)
        except ValueError as e:
            raise ConfigError(f"{self.key}.target_modules={self.targets}: {str(e).splitlines()[0]}") from e
        return config


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def sent_name(name: str) -> str:
    return name.replace(_PEFT_NAME, ".")


def peft_name(name: str) -> str:
    """Of what was sent, in the model that it was injected into."""
    return name.removesuffix(".weight") + _PEFT_NAME + "weight"
