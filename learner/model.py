"""Actor, critic and reference: one root module each, so that FSDP2's hooks own the head.

Weights and optimizer state are float32; under `model.dtype: bfloat16` forward and backward compute
in bfloat16, and bfloat16 is what is served.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from common.errors import ConfigError
from learner.logprobs import at_least_float32, token_logprobs
from learner.lora import merged_parameters
from learner.packing import MicroBatch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
HEAD_TOLERANCE = 1e-4
UNKNOWN_LAYERS = {  # what a config calls them
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "state-space layers": ("mamba", "ssm", "state_size", "linear_key_head_dim", "time_step_rank"),
}


class Actor(nn.Module):
    """A causal LM that answers with log-probabilities, not logits."""

    def __init__(self, lm: nn.Module) -> None:
        super().__init__()
        self.lm = lm  # a Hugging Face causal LM
        self.vocab_size = lm.get_output_embeddings().weight.shape[0]
        self.hidden_size = _hidden_size(lm)
        self.shares_prompts = may_share_prompts(lm)

    def forward(self, micro: MicroBatch, *, with_entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """(log-probabilities [tokens], entropy [tokens] or None) of the micro-batch's targets, float32."""
        hidden = _hidden(self.lm.base_model, micro)
        return token_logprobs(
            hidden, self.head, micro.targets, micro.temperatures, vocab_size=self.vocab_size, with_entropy=with_entropy
        )

    def head(self, hidden: Tensor) -> Tensor:
        """[tokens, hidden] → logits [tokens, vocab], with the model's own output scaling."""
        return _scaled(self.lm.get_output_embeddings()(hidden), self.lm.config)


class Critic(nn.Module):
    """A backbone with a linear head that starts at 0: the value of the prefix before each target."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.hidden_size = _hidden_size(backbone)
        self.shares_prompts = may_share_prompts(backbone)
        self.value_head = nn.Linear(self.hidden_size, 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, micro: MicroBatch) -> Tensor:
        """Values [tokens], float32."""
        return at_least_float32(self.value_head(_hidden(self.backbone, micro))).sum(-1)  # not a view, for FSDP2


def _hidden(backbone: nn.Module, micro: MicroBatch) -> Tensor:
    """[tokens, hidden] at the wanted positions.

    Packed rows are exact only so: restarting position ids, no cache, and no mask but the one that
    says everything. With a cache or a mask of ones the sequences of a row see one another, silently.
    """
    out = backbone(
        input_ids=micro.input_ids,
        position_ids=micro.position_ids,
        attention_mask=micro.attention_mask,
        use_cache=False,
    ).last_hidden_state
    return out.flatten(0, 1).index_select(0, micro.wanted)


def _scaled(logits: Tensor, config) -> Tensor:
    config = config.get_text_config()
    if scale := getattr(config, "logit_scale", None):  # Cohere
        logits = logits * scale
    if scale := getattr(config, "logits_scaling", None):  # Granite
        logits = logits / scale
    if cap := getattr(config, "final_logit_softcapping", None):  # Gemma
        logits = torch.tanh(logits / cap) * cap
    return logits


def _hidden_size(model: nn.Module) -> int:
    return model.config.get_text_config().hidden_size


def may_share_prompts(model: nn.Module) -> bool:
    """Whether each layer obeys the mask it is given: full attention by sdpa; a sliding window would be ignored."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return kinds == {"full_attention"} and not windowed and config._attn_implementation == "sdpa"


def load_actor(folder: str | Path, *, trust_remote_code: bool = False) -> Actor:
    """The causal LM in `folder`, float32, without dropout.

    Raises:
        ConfigError: not a causal LM, or one whose output is not head(hidden) as we know it.
    """
    from transformers import AutoModelForCausalLM

    lm = _from_folder(AutoModelForCausalLM, folder, "model.path", "causal LM", trust_remote_code)
    actor = Actor(without_dropout(lm))
    check_head(actor)
    return actor


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


@torch.no_grad()
def check_head(actor: Actor) -> None:
    """Our hidden states and head give the logits of the model's own forward.

    Raises:
        ConfigError: naming the family, when they do not.
    """
    ids = torch.arange(4).unsqueeze(0) % actor.vocab_size
    theirs = actor.lm(input_ids=ids, use_cache=False).logits
    ours = actor.head(actor.lm.base_model(input_ids=ids, use_cache=False).last_hidden_state)
    if (ours - theirs).abs().max() > HEAD_TOLERANCE * (1 + theirs.abs().max()):
        raise ConfigError(
            f"model.path: models of type {actor.lm.config.model_type!r} scale their output in a way the learner "
            "does not know; add it to `_scaled` in learner/model.py"
        )


def load_critic(folder: str | Path, *, trust_remote_code: bool = False) -> Critic:
    """A value head on the backbone in `folder`.

    Raises:
        ConfigError: not a model.
    """
    from transformers import AutoModel

    return Critic(without_dropout(_from_folder(AutoModel, folder, "critic.model_path", "model", trust_remote_code)))


def _from_folder(kind: Any, folder: str | Path, key: str, what: str, trust_remote_code: bool) -> Any:
    attention = attention_of(folder, key=key, what=what, trust_remote_code=trust_remote_code)
    try:
        return kind.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=attention, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError) as e:
        first = str(e).splitlines()[0] if str(e) else type(e).__name__
        raise ConfigError(f"{key}={folder}: not a loadable {what} ({first})") from e


def without_dropout(module: nn.Module) -> nn.Module:
    """In evaluation mode for good: dropout would make the learner's log-probs differ from the sampler's."""
    return module.eval()


def shard(module: nn.Module, mesh: DeviceMesh, *, dtype: str) -> nn.Module:
    """`fully_shard` each layer and the root, in place; computes in `dtype`, reduces in float32.

    The root does not cast its inputs: temperatures stay float32.
    """
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)  # computed and reduced in the dtype of the parameters
    if dtype != "float32":
        policy = MixedPrecisionPolicy(param_dtype=DTYPES[dtype], reduce_dtype=torch.float32, cast_forward_inputs=False)
    reshard = mesh.size() > 1
    for layer in _layers(module):
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    return module


def _layers(module: nn.Module) -> list[nn.Module]:
    names = {name for m in module.modules() for name in (getattr(m, "_no_split_modules", None) or ())}
    return [m for m in module.modules() if type(m).__name__ in names]


def checkpoint_activations(module: nn.Module) -> nn.Module:
    """Keep only each layer's input for the backward pass, which computes the rest of the layer again.

    Hugging Face's own switch acts in training mode alone, and so would dropout. The layer's hooks
    (FSDP2's) stay outside: its parameters are gathered once for recomputing and backward.
    """
    for layer in _layers(module):
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    return module


def freeze(module: nn.Module) -> nn.Module:
    for p in module.parameters():
        p.requires_grad_(False)
    return module


def reshard(module: nn.Module) -> None:
    """Back to the float32 shards: after a forward without backward the gathered parameters still stand in."""
    for m in module.modules():
        if isinstance(m, FSDPModule):
            m.reshard()


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a sharded one; every rank must ask for the same ones in the same order."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def published_weights(actor: Actor, *, dtype: str) -> Iterator[tuple[str, Tensor]]:
    """Hugging Face names and whole tensors in the served dtype, adapters merged; a tied head is not listed.

    On one rank in float32 these are the parameters themselves: copy them before the next update.
    """
    reshard(actor)
    for name, tensor in merged_parameters(actor.lm):
        yield name, tensor.to(DTYPES[dtype])


@torch.no_grad()
def weights_digest(module: nn.Module) -> str:
    """16 hex digits that change with any bit of the weights: a sum of words, each tensor with its own factor.

    Of those that are trained, if only some are.
    """
    reshard(module)
    total = torch.zeros((), dtype=torch.int64)
    for i, p in enumerate([p for p in module.parameters() if p.requires_grad] or module.parameters()):
        words = whole(p.detach()).contiguous().view(-1).view(torch.int32)
        total += words.sum(dtype=torch.int64).cpu() * (2 * i + 1)
    return f"{int(total) & 0xFFFF_FFFF_FFFF_FFFF:016x}"
