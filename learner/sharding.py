"""From a folder to a sharded model, of which a rank never holds more than its shard and one tensor.

The model is built without weights, sharded, and then filled: each rank reads its own rows of each
tensor out of the safetensors files. Where the files are of another kind, or call their tensors
otherwise than the model does, rank 0 loads the whole model into host memory and hands it out tensor by
tensor.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils.checkpoint import checkpoint

from common.adapters import is_adapter
from common.errors import ConfigError
from common.logs import LOGGER
from learner.lora import BASE
from learner.model import DTYPES
from learner.ranks import Ranks

Sources = dict[str, tuple[str, str]]  # parameter -> (file, key in it)
_log = logging.getLogger(LOGGER)


def place(
    module: nn.Module, folder: Path, whole: Callable[[], nn.Module], ranks: Ranks, *, dtype: str, offload: bool = False
) -> nn.Module:
    """Shard a model that was built without weights, in place, and give it the weights in `folder`.

    whole: loads the same model with its weights; called on rank 0 where the slices cannot be read.
    offload: keep the shards in host memory; layers are gathered on the device one by one.
    Raises:
        ConfigError: see `whole`; or two tied tensors have different values.
    """
    shard(module, ranks.mesh, dtype=dtype, offload=offload)
    home = torch.device("cpu") if offload else ranks.device

    def make(tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return torch.empty_like(tensor, device=home)
        return tensor.to(home if isinstance(tensor, DTensor) else ranks.device)

    module._apply(make)
    _fill(module, folder, whole, ranks)
    return module


def shard(module: nn.Module, mesh: DeviceMesh, *, dtype: str, offload: bool = False) -> nn.Module:
    """`fully_shard` each layer and the root, in place; computes in `dtype`, reduces in float32.

    mesh: [ranks], or [copies, ranks that share one]. The root does not cast its inputs: temperatures
    stay float32.
    """
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)  # computed and reduced in the dtype of the parameters
    if dtype != "float32":
        policy = MixedPrecisionPolicy(param_dtype=DTYPES[dtype], reduce_dtype=torch.float32, cast_forward_inputs=False)
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": policy,
        "reshard_after_forward": mesh.size(mesh.ndim - 1) > 1,
        "offload_policy": CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy(),
    }
    for layer in layers(module):
        fully_shard(layer, **options)
    fully_shard(module, **options)
    return module


def layers(module: nn.Module) -> list[nn.Module]:
    names = {name for m in module.modules() for name in (getattr(m, "_no_split_modules", None) or ())}
    return [m for m in module.modules() if type(m).__name__ in names]


def checkpoint_activations(module: nn.Module) -> nn.Module:
    """Keep only each layer's input for the backward pass, which computes the rest of the layer again.

    Hugging Face's own switch acts in training mode alone, and so would dropout. The layer's hooks
    (FSDP2's) stay outside: its parameters are gathered once for recomputing and backward.
    """
    for layer in layers(module):
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    return module


def compile_layers(module: nn.Module, device: torch.device, *, key: str) -> nn.Module:
    """Compile each layer for any shape, in place. Before `checkpoint_activations` and `shard`.

    Raises:
        ConfigError: naming `key`, if there is no compiler for the device.
    """
    if fault := _compiler_fault(device):
        raise ConfigError(f"{key}=true: {fault}; install it, or set it to false")
    for layer in layers(module):
        layer.forward = torch.compile(layer.forward, dynamic=True)
    return module


def _compiler_fault(device: torch.device) -> str | None:
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        return None if has_triton() else "Triton, which makes GPU code, is not there"
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "a C++ compiler is not there"
    return None


# ---------------------------------------------------------------- weights
@torch.no_grad()
def _fill(module: nn.Module, folder: Path, whole: Callable[[], nn.Module], ranks: Ranks) -> None:
    module.reset_own()
    if (sources := ranks.share(lambda: _sources(module, folder))) is not None:
        _read(module, sources)
        return
    _log.info("%s: its tensors cannot be read by slices; rank 0 loads the whole model", folder)
    loaded: dict[str, Tensor] = {}
    ranks.share(lambda: loaded.update(whole().state_dict()))
    for name, p in module.named_parameters():
        if not name.startswith(module.holder) or is_adapter(name):
            continue
        full = loaded.pop(name.replace(BASE, ".")).to(p.dtype) if ranks.first else torch.empty(p.shape, dtype=p.dtype)
        if ranks.line is not None:
            dist.broadcast(full, 0, group=ranks.line)
        begin, end = _rows(p)
        _local(p).copy_(full[begin:end])


def _sources(module: nn.Module, folder: Path) -> Sources | None:
    """Where each weight of the model is; None if one is not to be found under its name and shape."""
    where = _files(folder)
    prefix = getattr(module.get_submodule(module.holder.rstrip(".")), "base_model_prefix", "")
    parameters = {
        name: p
        for name, p in module.named_parameters(remove_duplicate=False)
        if name.startswith(module.holder) and not is_adapter(name)
    }
    keys = {name: _key(name.removeprefix(module.holder).replace(BASE, "."), prefix, where) for name in parameters}
    unique = dict(module.named_parameters())
    sources: Sources = {}
    for name, p in parameters.items():
        if name not in unique:
            continue
        if (key := keys[name]) is None or _shape(where[key], key) != list(p.shape):
            return None
        sources[name] = (where[key], key)
    for name, p in parameters.items():  # a tied weight is listed once; its other names may have values too
        if name not in unique and (key := keys[name]) is not None:
            first = next(n for n, q in unique.items() if q is p)
            if not _equal((where[key], key), sources[first]):
                raise ConfigError(
                    f"{folder}: its config ties {key} to {sources[first][1]}, but their values differ; set "
                    "tie_word_embeddings to false in its config.json, or remove one of them"
                )
    return sources


def _files(folder: Path) -> dict[str, str]:
    """Key -> safetensors file, as Hugging Face names them."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), str(single))
    if index.exists():
        return {k: str(folder / f) for k, f in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items()}
    return {}


def _key(name: str, prefix: str, where: dict[str, str]) -> str | None:
    """A backbone's weights may be those of a whole model, and the other way round."""
    return next((k for k in (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")) if k in where), None)


def _shape(file: str, key: str) -> list[int]:
    with safe_open(file, framework="pt") as opened:
        return opened.get_slice(key).get_shape()


def _equal(a: tuple[str, str], b: tuple[str, str]) -> bool:
    if _shape(*a) != _shape(*b):
        return False
    with safe_open(a[0], framework="pt") as one, safe_open(b[0], framework="pt") as other:
        return torch.equal(one.get_tensor(a[1]), other.get_tensor(b[1]))


def _read(module: nn.Module, sources: Sources) -> None:
    """This rank's rows of each weight, one tensor at a time."""
    parameters = dict(module.named_parameters())
    for file in sorted({file for file, _ in sources.values()}):
        with safe_open(file, framework="pt") as opened:
            for name, (its_file, key) in sources.items():
                begin, end = _rows(parameters[name])
                if its_file == file and end > begin:
                    _local(parameters[name]).copy_(opened.get_slice(key)[begin:end])


def _rows(parameter: DTensor) -> tuple[int, int]:
    """Which rows of the whole tensor are this rank's."""
    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return offset[0], offset[0] + shape[0]


def _local(parameter: DTensor) -> Tensor:
    return parameter.to_local()
