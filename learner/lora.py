"""LoRA: y = W x + (alpha / rank) · B (A x) with W frozen (Hu et al. 2021, arXiv 2106.09685).

The layers are peft's, put into the model in place; no wrapper around it, no generation code of peft's.
`fully_shard` takes frozen and trained parameters side by side. Engines get W + (alpha / rank) · B A, made
tensor by tensor as it is copied out, so that they need not know of adapters, and W itself stays as it was;
or the adapters alone (`weights.adapters_only`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from common.adapters import Adapters, is_adapter, sent_name
from common.errors import ConfigError
from learner.files import leave_folder

BASE = ".base_layer."  # what peft puts into the names of frozen parameters


def add_adapters(lm: nn.Module, adapters: Adapters, *, dtype: torch.dtype = torch.float32) -> Any:
    """Freeze `lm` in `dtype` and put adapters beside the linear layers that they name; peft's LoraConfig.

    B begins at 0, so the model computes what it did.

    Raises:
        ConfigError: peft is not installed; a target that is no linear layer of the backbone.
    """
    config = adapters.inject(lm)
    _refuse_other_layers(lm, adapters)
    for name, p in lm.named_parameters():
        if is_adapter(name):
            p.data = p.data.float()
        else:
            p.requires_grad_(False)
            p.data = p.data.to(dtype)
    return config


def _refuse_other_layers(lm: nn.Module, adapters: Adapters) -> None:
    """Only linear layers of the backbone are merged as they are trained."""
    ends = (lm.get_output_embeddings(), lm.get_input_embeddings())
    for name, module in _adapted(lm):
        if any(module is end for end in ends) or not isinstance(module.base_layer, nn.Linear):
            kind = type(module.base_layer).__name__
            raise ConfigError(
                f"{adapters.key}.target_modules={adapters.targets}: {name} is a {kind} at the model's end or of a kind "
                "that cannot be merged; name linear layers between the embeddings and the head"
            )


def _adapted(module: nn.Module) -> list[tuple[str, Any]]:
    return [(name, m) for name, m in module.named_modules() if hasattr(m, "lora_A")]


def merged_name(name: str) -> str:
    """Hugging Face's, of a parameter that may have an adapter beside it."""
    return name.replace(BASE, ".")


@torch.no_grad()
def merged_parameters(lm: nn.Module) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Of a model with or without adapters: Hugging Face name, this rank's rows, and the parameter whose rows they are.

    Without an adapter the rows are the parameter's own, with one they are new ones in float32. Collective if the
    model is sharded: A, which has `rank` rows, is gathered.
    """
    for name, p in lm.named_parameters():
        if is_adapter(name):
            continue
        rows = _local(p.detach())
        if name.endswith(BASE + "weight"):
            rows = rows.float() + _delta(lm.get_submodule(name.removesuffix(BASE + "weight")))
        yield merged_name(name), rows, p


def adapter_parameters(lm: nn.Module) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Of the adapters alone, float32: name as sent, this rank's rows, and the parameter whose rows they are."""
    for name, p in lm.named_parameters():
        if is_adapter(name):
            yield sent_name(name), _local(p.detach()), p


def _delta(layer: Any) -> Tensor:
    """This rank's rows (those of W and B) of (alpha / rank) · B A: [out, in], float32."""
    (key,) = layer.lora_A
    a, b = (side[key].weight.detach() for side in (layer.lora_A, layer.lora_B))
    return (_local(b).float() @ whole(a).float()) * layer.scaling[key]


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a sharded one; every rank must ask for the same ones in the same order."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gathered(rows: Tensor, like: Tensor) -> Tensor:
    """The full tensor of which each rank has such rows as it has of `like`, in their own dtype; collective as `whole`.

    Rows that live in host memory are gathered on the device that the ranks compute on.
    """
    if not isinstance(like, DTensor) or like.device_mesh.size() == 1:
        return rows
    sharded = DTensor.from_local(
        rows, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return sharded.full_tensor()


@torch.no_grad()
def reset_adapters(lm: nn.Module) -> None:
    """As they begin: B is 0, A is random, drawn whole on every rank, so that the number of ranks changes nothing."""
    for _, layer in _adapted(lm):
        for a, b in zip(layer.lora_A.values(), layer.lora_B.values(), strict=True):
            drawn = torch.empty(a.weight.shape)
            nn.init.kaiming_uniform_(drawn, a=math.sqrt(5))  # peft's
            _local(a.weight).copy_(drawn[_rows(a.weight)])
            _local(b.weight).zero_()


def _rows(tensor: Tensor) -> slice:
    """Which rows of the whole tensor are this rank's."""
    if not isinstance(tensor, DTensor):
        return slice(None)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return slice(offset[0], offset[0] + shape[0])


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@contextmanager
def adapters_off(module: nn.Module) -> Iterator[None]:
    """Within, the model computes what it did before it got adapters."""
    layers = [layer for _, layer in _adapted(module)]
    for layer in layers:  # not `enable_adapters`, which also asks for gradients anew
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


class WithoutAdapters(nn.Module):
    """An actor with its adapters off, in the place of a reference: there is no second copy of the weights."""

    def __init__(self, actor: nn.Module) -> None:
        super().__init__()
        self.actor = actor
        self.shares_prompts = actor.shares_prompts
        self.offload = getattr(actor, "offload", None)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with adapters_off(self.actor):
            return self.actor(*args, **kwargs)


def save_adapter(target: Path, lm: nn.Module, config: Any, *, base: str, first: bool) -> None:
    """The adapters alone, in peft's format, in place of what `target` was; collective, written by the first rank.

    base: the model they belong to, as peft is to find it.
    Raises LeewayError if they cannot be written.
    """
    from safetensors.torch import save_file

    weights = {
        f"base_model.model.{name}": gathered(rows, p).cpu().contiguous() for name, rows, p in adapter_parameters(lm)
    }
    if not first:
        return

    def write(folder: Path) -> None:
        save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        config.base_model_name_or_path, config.inference_mode = base, True
        config.save_pretrained(folder)

    leave_folder(target, write)
