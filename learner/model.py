"""Actor, critic and reference: one root module each, so that FSDP2's hooks own the head.

Weights and optimizer state are float32; under `model.dtype: bfloat16` forward and backward compute
in bfloat16, and bfloat16 is what is served.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from common.errors import ConfigError
from learner.attention import NAME, attend_by_rows, split_rows
from learner.families import attention_of
from learner.head import LinearHead
from learner.logprobs import Beside, Head, at_least_float32, token_logprobs
from learner.lora import gathered, reset_adapters
from learner.offload import Offload
from learner.packing import MicroBatch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
HEAD_TOLERANCE = 1e-4


class Actor(nn.Module):
    """A causal LM that answers with log-probabilities, not logits."""

    holder = "lm."  # where the Hugging Face model is
    split: dist.ProcessGroup | None = None  # ranks that divide the columns of each row
    varlen = False  # flash attention, sequence by sequence
    offload: Offload | None = None  # where it is while it is not in use
    lora: Any = None  # peft's LoraConfig, if only adapters are trained

    def __init__(self, lm: nn.Module) -> None:
        super().__init__()
        self.lm = lm  # a Hugging Face causal LM
        self.vocab_size = lm.get_output_embeddings().weight.shape[0]
        self.hidden_size = _hidden_size(lm)
        self.shares_prompts = may_share_prompts(lm)

    def forward(
        self, micro: MicroBatch, *, with_entropy: bool = False, hidden_only: bool = False, beside: Beside | None = None
    ) -> Any:
        """(log-probabilities [tokens], entropy [tokens] or None) of the micro-batch's targets, float32.

        hidden_only: instead, what the head would get, [tokens, hidden]; of this rank's part where rows are divided.
        beside: the same of the reference, and its head; the exact KL to it, [tokens], is then the third.
        """
        part = micro if self.split is None else split_rows(micro, self.split)
        hidden = _hidden(self.lm.base_model, part, self.varlen)
        if hidden_only:
            return hidden
        outputs = token_logprobs(
            hidden, self.head, part.targets, part.temperatures, vocab_size=self.vocab_size, with_entropy=with_entropy,
            beside=beside,
        )  # fmt: skip
        wanted = outputs if beside is not None else outputs[:2]
        return tuple(None if values is None else part.gather(values) for values in wanted)

    def reset_own(self) -> None:
        """What the folder of the Hugging Face model has not: adapters, if there are any."""
        reset_adapters(self.lm)

    @property
    def head(self) -> LinearHead:
        """[tokens, hidden] → logits [tokens, vocab], with the model's own output scaling."""
        ends = self.lm.get_output_embeddings()
        scale = functools.partial(_scaled, config=self.lm.config)
        return LinearHead(ends.weight, getattr(ends, "bias", None), scale)

    @torch.no_grad()
    def frozen_head(self, *, dtype: str) -> Head:
        """`head` as it is now, whole on each rank, to be used outside of `forward`; collective if it is sharded.

        dtype: `model.dtype`, in which the hidden states come, too (see `sharding.shard`). Each rank casts its rows, and
        what is gathered and kept are vocabulary · hidden numbers of it.
        """
        reshard(self)
        head = self.head

        def gather(p: Tensor | None) -> Tensor | None:
            if p is None:
                return None
            rows = shard_of(p.detach())[0]
            return gathered(rows if dtype == "float32" else rows.to(DTYPES[dtype]), p)

        weight, bias = gather(head.weight), gather(head.bias)

        @functools.cache
        def on(device: torch.device) -> LinearHead:  # rows of one rank may live on the host
            moved = (None if t is None else t.to(device) for t in (weight, bias))
            return LinearHead(*moved, scale=head.scale)

        return lambda hidden: on(hidden.device)(hidden)


class Critic(nn.Module):
    """A backbone with a linear head that starts at 0: the value of the prefix before each target."""

    holder = "backbone."
    split: dist.ProcessGroup | None = None
    varlen = False
    offload: Offload | None = None
    lora: Any = None

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.hidden_size = _hidden_size(backbone)
        self.shares_prompts = may_share_prompts(backbone)
        self.value_head = nn.Linear(self.hidden_size, 1, dtype=backbone.dtype)
        self.reset_own()

    def forward(self, micro: MicroBatch) -> Tensor:
        """Values [tokens], float32."""
        part = micro if self.split is None else split_rows(micro, self.split)
        values = at_least_float32(self.value_head(_hidden(self.backbone, part, self.varlen)))  # [tokens, 1]
        return part.gather(values.sum(-1))  # not a view, for FSDP2

    def reset_own(self) -> None:
        """What the Hugging Face model has not."""
        reset_adapters(self.backbone)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)


def _hidden(backbone: nn.Module, micro: MicroBatch, varlen: bool) -> Tensor:
    """[tokens, hidden] at the wanted positions.

    Packed rows are exact only so: restarting position ids, no cache, and no mask but the one that
    says everything. With a cache or a mask of ones the sequences of a row see one another, silently.
    Masks live as long as this forward and its backward; layers that are computed again find them.
    """
    ours = backbone.config._attn_implementation == NAME
    out = backbone(
        input_ids=micro.input_ids,
        position_ids=micro.position_ids,
        use_cache=False,
        **({"rows": micro, "varlen": varlen, "masks": {}} if ours else {"attention_mask": micro.attention_mask()}),
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


def build_actor(
    folder: str | Path, *, split: dist.ProcessGroup | None = None, varlen: bool = False,
    dtype: torch.dtype = torch.float32, trust_remote_code: bool = False,
) -> Actor:  # fmt: skip
    """The same without its weights, which are on the meta device.

    split: ranks that divide the columns of each row; varlen: flash attention, sequence by sequence.
    Raises:
        ConfigError: as `load_actor`; or see `attend_by_rows`.
    """
    from transformers import AutoModelForCausalLM

    lm = _from_config(AutoModelForCausalLM, folder, "model.path", "causal LM", dtype, trust_remote_code)
    check_head(_without_layers(lm))
    return _attending(Actor(without_dropout(lm)), lm, split, varlen)


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


@torch.no_grad()
def _without_layers(lm: nn.Module) -> Actor:
    """A model of 64 tokens whose hidden states are its embeddings: from there to the logits it is the same."""
    config = copy.deepcopy(lm.config)
    text = config.get_text_config()
    text.num_hidden_layers, text.vocab_size = 0, 64
    if getattr(text, "layer_types", None):
        text.layer_types = []
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(text, name, None)
    with torch.random.fork_rng(devices=()):
        small = Actor(without_dropout(type(lm)(config).float()))
        small.lm.get_output_embeddings().weight.normal_()  # so that a cap acts
    return small


def load_critic(folder: str | Path, *, trust_remote_code: bool = False) -> Critic:
    """A value head on the backbone in `folder`.

    Raises:
        ConfigError: not a model.
    """
    from transformers import AutoModel

    return Critic(without_dropout(_from_folder(AutoModel, folder, "critic.model_path", "model", trust_remote_code)))


def build_critic(
    folder: str | Path, *, split: dist.ProcessGroup | None = None, varlen: bool = False,
    dtype: torch.dtype = torch.float32, trust_remote_code: bool = False,
) -> Critic:  # fmt: skip
    """The same without its weights; see `build_actor`."""
    from transformers import AutoModel

    backbone = _from_config(AutoModel, folder, "critic.model_path", "model", dtype, trust_remote_code)
    return _attending(Critic(without_dropout(backbone)), backbone, split, varlen)


def _attending(module: Any, model: nn.Module, split: dist.ProcessGroup | None, varlen: bool) -> Any:
    if split is not None or varlen:
        attend_by_rows(model, group=split, varlen=varlen)
        module.split, module.varlen = split, varlen
        module.shares_prompts = module.shares_prompts and not varlen  # their mask is not one of sequences
    return module


def _from_folder(kind: Any, folder: str | Path, key: str, what: str, trust_remote_code: bool) -> Any:
    attention = attention_of(folder, key=key, what=what, trust_remote_code=trust_remote_code)
    with _config_errors(folder, key, what):
        model, found = kind.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=attention, trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )  # fmt: skip
    if missing := sorted(found["missing_keys"]):
        raise ConfigError(
            f"{key}={folder}: has no weights for {', '.join(missing[:3])}"
            + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
            + "; they would be random"
        )
    return model


def _from_config(
    kind: Any, folder: str | Path, key: str, what: str, dtype: torch.dtype, trust_remote_code: bool
) -> Any:
    from transformers import AutoConfig, GenerationConfig

    attention = attention_of(folder, key=key, what=what, trust_remote_code=trust_remote_code)
    with _config_errors(folder, key, what), without_weights():
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        model = kind.from_config(
            config, dtype=dtype, attn_implementation=attention, trust_remote_code=trust_remote_code
        )
        if (Path(folder) / "generation_config.json").exists():
            model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


@contextmanager
def without_weights() -> Iterator[None]:
    """Modules made within have their parameters on the meta device; buffers are real."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


@contextmanager
def _config_errors(folder: str | Path, key: str, what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as e:
        first = str(e).splitlines()[0] if str(e) else type(e).__name__
        raise ConfigError(f"{key}={folder}: not a loadable {what} ({first})") from e


def without_dropout(module: nn.Module) -> nn.Module:
    """In evaluation mode for good: dropout would make the learner's log-probs differ from the sampler's."""
    return module.eval()


def freeze(module: nn.Module) -> nn.Module:
    for p in module.parameters():
        p.requires_grad_(False)
    return module


def reshard(module: nn.Module) -> None:
    """Back to the float32 shards: after a forward without backward the gathered parameters still stand in."""
    for m in module.modules():
        if isinstance(m, FSDPModule):
            m.reshard()


def shard_of(tensor: Tensor) -> tuple[Tensor, tuple[DeviceMesh, int] | None]:
    """What this rank has of a tensor, without padding, and among whom the rest is (None: it has all of it)."""
    if not isinstance(tensor, DTensor):
        return tensor, None
    sharded = [dim for dim, placement in enumerate(tensor.placements) if placement.is_shard()]
    assert len(sharded) <= 1, f"sharded over {len(sharded)} dimensions of the mesh"
    return tensor.to_local(), (tensor.device_mesh, sharded[0]) if sharded else None
