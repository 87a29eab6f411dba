"""One rank of the learner's maths, without a broker: `python -m tests.rank_program WEIGHTS OUT`.

In each way of laying out rows and dividing the work the ranks train the same batches from the same weights;
rank 0 writes gradients and weights, `{way: {"gradients": …, "weights": …}}`, to OUT/<world size>.pt.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from common.config import Config
from learner import logprobs
from learner import models as loading
from learner.batch import make_batch
from learner.checkpoint import Checkpoints
from learner.gathering import Gathering
from learner.loop import Outcome, train_step
from learner.lora import whole
from learner.model import DTYPES, build_actor, load_actor, reshard
from learner.models import Models, load_models
from learner.packing import MicroBatch, Packing, micro_batches
from learner.ranks import Ranks, arrange, join_ranks, leave_ranks
from learner.report import Clock
from learner.served import PublishedWeights, digest_of, weights_digest
from learner.settings import live_settings
from learner.sharding import place, shard
from learner.updates import Counts, Trainee, accumulate, packing_of
from tests.learner_parts import SimulatedControl, make_config, make_groups

COMMON = (
    "algorithm.adv_estimator=gae", "critic.optim.lr=1e-3", "actor.entropy_coeff=0.01", "actor.grad_clip=1e9",
    "critic.grad_clip=1e9", "data.train_batch_size=6",
)  # fmt: skip
# so that clipping acts in each update, and what AdamW does depends on it
CLIPPED = ("actor.grad_clip=1", "critic.grad_clip=0.5", "actor.optim.eps=1e-3", "critic.optim.eps=1e-3")
BUDGET, ROWS = "ppo_max_token_len_per_gpu", "ppo_micro_batch_size_per_gpu"


def _both(*options: str) -> tuple[str, ...]:
    return tuple(f"{part}.{o}" for part in ("actor", "critic") for o in options)


# micro-batches, rows, activations recomputed, FSDP2's offload, ranks that divide a row, copies of the model,
# gradients reduced in each micro-step: each pair of values of two of them occurs (`test_ranks.py` counts)
GRID = (
    ("one", "shared", False, False, 1, 1, False),
    ("count", "shared", True, True, 2, 2, True),
    ("tight", "packed", True, False, 1, 2, True),
    ("tight", "padded", False, True, 2, 1, False),
    ("count", "padded", False, False, 1, 2, True),
    ("one", "packed", False, True, 2, 1, True),
    ("one", "padded", True, True, 1, 2, False),
    ("count", "packed", True, False, 2, 1, False),
    ("tight", "shared", True, False, 2, 1, True),
)
MICRO = {"one": [f"{BUDGET}=4096"], "tight": [f"{BUDGET}=40"], "count": ["use_dynamic_bsz=false", f"{ROWS}=3"]}


def _options(way: tuple, world_size: int) -> tuple[str, ...]:
    """Config of a row of the grid, as far as so many ranks can be divided."""
    micro, rows, recompute, offload, split, copies, often = way
    split = {1: 1, 2: split, 3: 1, 4: split * (1 if copies == 1 else split)}[world_size]  # 4 ranks: 1, 2 and 4
    shard = -1 if copies == 1 else max(1, world_size // 2) if world_size != 3 else 1
    return (
        *_both(*MICRO[micro], f"share_prompts={str(rows == 'shared').lower()}"),
        *_both(f"fsdp_config.offload_policy={str(offload).lower()}"),
        *_both(f"fsdp_config.reduce_every_micro_step={str(often).lower()}"),
        f"model.use_remove_padding={str(rows != 'padded').lower()}",
        f"model.enable_gradient_checkpointing={str(recompute).lower()}",
        f"actor.ulysses_sequence_parallel_size={split}", f"actor.fsdp_config.fsdp_size={shard}",
        f"trainer.nproc_per_node={world_size}",
    )  # fmt: skip


def main(weights: Path, out: Path) -> None:
    ranks = join_ranks(timeout_s=180)
    try:
        families(out / "families", ranks)
        bounded_memory(out / "large", ranks)
        results = {}
        for way in GRID:
            with chunks(of_tokens=7 if way[0] == "tight" else None):
                results[way] = _train(weights, _options(way, ranks.world_size), ranks)
        one_reduction(weights, ranks)
        one_digest(ranks)
        gathered_as_served(weights, ranks)
        gathered_as_computed(weights, ranks)
        gathered_beside(weights, ranks)
        skip_alike(weights, ranks)
        save(weights, out, ranks)
        rounded = in_bfloat16(weights, ranks)
        adapters = train_adapters(weights, ranks)
        exact = train_with_exact_kl(weights, ranks)
        if ranks.first:
            torch.save(results, out / f"{ranks.world_size}.pt")
            torch.save({"adapters": adapters, **exact}, out / f"{ranks.world_size}.more.pt")
            torch.save(rounded, out / f"{ranks.world_size}.bfloat16.pt")
    finally:
        leave_ranks()


def _train(weights: Path, options: tuple[str, ...], ranks: Ranks) -> dict[str, dict[str, Tensor]]:
    """Gradients over all rows in float32; weights after 3 steps of 2 updates in float64, all of them clipped."""
    config = make_config(*COMMON, *options)
    ranks = arranged(ranks, config)
    models = load_models(config, weights, ranks)
    for t in models.trainees():
        _check(t, config, ranks)
    torch.nn.init.ones_(models.critic.module.value_head.weight)  # from 0 nothing would reach the backbone
    gradients = {f"{t.name} {name}": g for t in models.trainees() for name, g in _gradients(t, options, ranks)}
    with _Float64():
        models = load_models(make_config(*COMMON, *options, *CLIPPED), weights, ranks)
        for step in (1, 2, 3):
            norms = _step(models, ranks, step, *options, *CLIPPED, *_both("ppo_mini_batch_size=3")).metrics
            assert norms["actor/grad_norm"] > 2 and norms["critic/grad_norm"] > 1, norms
    trained = {f"{t.name} {n}": whole(p.detach()) for t in models.trainees() for n, p in t.module.named_parameters()}
    return {"gradients": gradients, "weights": trained}


@contextmanager
def chunks(*, of_tokens: int | None) -> Iterator[None]:
    """The head's logits are made for so many tokens at once."""
    before = logprobs.CHUNK_ELEMENTS
    logprobs.CHUNK_ELEMENTS = before if of_tokens is None else of_tokens * 64  # the toy vocabulary
    try:
        yield
    finally:
        logprobs.CHUNK_ELEMENTS = before


@functools.cache
def _arrange(ranks: int, split: int, shard_size: int) -> Ranks:
    return arrange(_RANKS[ranks], split=split, shard_size=shard_size)


_RANKS: dict[int, Ranks] = {}


def arranged(ranks: Ranks, config: Config) -> Ranks:
    """Groups are made once for each division."""
    _RANKS.setdefault(ranks.world_size, ranks)
    split, shard_size = config.actor.ulysses_sequence_parallel_size, config.actor.fsdp_config.fsdp_size
    return _arrange(ranks.world_size, split, shard_size)


def _check(trainee: Trainee, config: Config, ranks: Ranks) -> None:
    """What the config asks for is what the model does."""
    split = config.actor.ulysses_sequence_parallel_size
    assert (trainee.module.split is None) == (split == 1)
    seen: list[int] = []
    base = trainee.module.lm.base_model if trainee.name == "actor" else trainee.module.backbone
    hook = base.embed_tokens.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape[1]))
    batch = make_batch(make_groups(config, 1))
    packing = packing_of(trainee.module, getattr(config, trainee.name), config)
    micro = micro_batches(batch, np.arange(len(batch)), packing, rank=ranks.data_rank, world_size=ranks.data_size)[0]
    with torch.no_grad():
        trainee.module(micro)
    hook.remove()
    reshard(trainee.module)
    assert seen == [micro.input_ids.shape[1] // split]
    mesh = trainee.parameters[0].device_mesh
    assert mesh.size(mesh.ndim - 1) == (config.actor.fsdp_config.fsdp_size % (ranks.world_size + 1))
    policies = {g.offload_policy.__class__.__name__ for g in trainee.module._get_fsdp_state()._fsdp_param_groups}
    offload = trainee.options.fsdp_config.offload_policy
    assert policies == ({"CPUOffloadPolicy"} if offload else {"OffloadPolicy"})


def _gradients(trainee: Trainee, options: tuple[str, ...], ranks: Ranks) -> list[tuple[str, Tensor]]:
    """Of a weighted mean of the outputs. (A policy loss, whose advantages add up to 0, cancels: float32 shows it.)"""
    config = make_config(*COMMON, *options)
    batch = make_batch(make_groups(config, 1))
    weights = torch.linspace(0.5, 1.5, batch.mask.numel()).view(batch.mask.shape)

    def loss(micro: MicroBatch, counts: Counts) -> tuple[Tensor, dict[str, Tensor]]:
        output = trainee.module(micro)
        values = micro.scatter(output[0] if isinstance(output, tuple) else output)
        return (values * weights[micro.rows]).sum() / counts.num_tokens, {}

    packing = packing_of(trainee.module, getattr(config, trainee.name), config)
    micros = micro_batches(batch, np.arange(len(batch)), packing, rank=ranks.data_rank, world_size=ranks.data_size)
    counts = Counts(int(batch.mask.sum()), len(batch), 1.0)
    often = trainee.options.fsdp_config.reduce_every_micro_step
    accumulate(trainee.module, micros, loss, counts, ranks, reduce_often=often)
    gradients = [(name, whole(p.grad)) for name, p in trainee.module.named_parameters()]
    trainee.optimizer.zero_grad()
    return gradients


def _step(models: Models, ranks: Ranks, step: int, *options: str, bad: bool = False) -> Outcome:
    config = make_config(*COMMON, *options)
    samples = make_groups(config, step)
    if bad:
        samples[-1] = dataclasses.replace(samples[-1], reward=float("nan"))
    settings = live_settings(config, SimulatedControl())
    return train_step(
        models, make_batch(samples), config=config, settings=settings, step=step, version=0, limit=2, ranks=ranks,
        clock=Clock(),
    )  # fmt: skip


class _Float64:
    """Models are built in float64, and their norms compute in it."""

    def __enter__(self) -> None:
        self.before = loading.build_actor, loading.build_critic, Qwen2RMSNorm.forward
        actor, critic, _ = self.before
        loading.build_actor = functools.partial(actor, dtype=torch.float64)
        loading.build_critic = functools.partial(critic, dtype=torch.float64)
        Qwen2RMSNorm.forward = lambda norm, x: (
            norm.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.variance_epsilon)
        )

    def __exit__(self, *_: object) -> None:
        loading.build_actor, loading.build_critic, Qwen2RMSNorm.forward = self.before


def families(folder: Path, ranks: Ranks) -> None:
    """Rows divided among 2 or 4 ranks give log-probs and gradients of the whole model, in every family there.

    The shards come from the files' slices; in "unnamed" they cannot, and rank 0 hands its weights out.
    """
    config = make_config("actor.share_prompts=true")
    batch = make_batch(make_groups(config, 1))
    ranks = arrange(ranks, split=math.gcd(4, ranks.world_size), shard_size=-1)  # the models have 4 heads
    for path in sorted(folder.iterdir() if folder.exists() else ()):
        plain = load_actor(path)
        actor = build_actor(path, split=ranks.split_group)
        place(actor, path, functools.partial(load_actor, path), ranks, dtype="float32")
        assert weights_digest(actor) == weights_digest(plain), path
        packing = Packing(96 * ranks.split, share_prompts=plain.shares_prompts, hidden_size=64, split=ranks.split)
        ours, theirs = [], []
        for micro in micro_batches(batch, np.arange(len(batch)), packing):  # the same on each group of ranks
            for module, outputs, factor in ((plain, theirs, 1), (actor, ours, ranks.split)):
                logprobs, entropy = module(micro, with_entropy=True)
                ((logprobs.sum() + entropy.sum()) * factor).backward()
                outputs.append(torch.cat([logprobs.detach(), entropy.detach()]))
        assert (torch.cat(ours) - torch.cat(theirs)).abs().max() <= 1e-5, path
        for (name, p), (_, q) in zip(actor.named_parameters(), plain.named_parameters(), strict=True):
            assert (whole(p.grad) - q.grad).abs().max() <= 1e-5 * q.grad.abs().max(), (path, name)


def bounded_memory(folder: Path, ranks: Ranks) -> None:
    """A rank never holds more than its shard (float32, and the pages of a bfloat16 file that it read) and a tensor."""
    if not folder.exists():
        return
    actor = build_actor(folder)
    numels = [p.numel() for p in actor.parameters()]
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    before = _peak_bytes()
    place(actor, folder, functools.partial(load_actor, folder), ranks, dtype="float32")
    used = _peak_bytes() - before
    assert used <= (4 + 2) * sum(numels) / ranks.world_size + 6 * max(numels) + (32 << 20), (used, sum(numels))


def _peak_bytes() -> int:
    return 1024 * int(next(x for x in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in x).split()[1])


class _Collectives(TorchDispatchMode):
    """Counts collectives by name, and the elements that are gathered by dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.gathered: Counter[torch.dtype] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = op(*args, **(kwargs or {}))
        if op.namespace in ("c10d", "_c10d_functional"):
            self.counts[op._schema.name] += 1
            if op._schema.name == "_c10d_functional::all_gather_into_tensor":  # DTensor's
                self.gathered[result.dtype] += result.numel()
        return result


def one_reduction(weights: Path, ranks: Ranks) -> None:
    """Gradients travel once an update, or once a micro-step if asked; by `all_reduce` too between copies."""
    if ranks.world_size == 1:
        return
    for shard_size, often in ((-1, False), (-1, True), (1 if ranks.world_size < 4 else 2, False)):
        config = make_config(
            *COMMON, *_both("use_dynamic_bsz=false", f"{ROWS}=1"), f"actor.fsdp_config.fsdp_size={shard_size}",
            f"trainer.nproc_per_node={ranks.world_size}",
        )  # fmt: skip
        ranks = arranged(ranks, config)
        actor = load_models(config, weights, ranks).actor
        batch = make_batch(make_groups(config, 1))
        packing = packing_of(actor.module, config.actor, config)
        micros = micro_batches(batch, np.arange(len(batch)), packing, rank=ranks.data_rank, world_size=ranks.data_size)
        assert len(micros) >= 4

        def loss(micro: MicroBatch, counts: Counts, module: torch.nn.Module = actor.module) -> tuple[Tensor, dict]:
            return module(micro)[0].sum(), {}

        with _Collectives() as seen:
            accumulate(actor.module, micros, loss, Counts(1, 1, 1.0), ranks, reduce_often=often)
        counts = seen.counts
        groups = 3 * (len(micros) if often else 1)  # two layers and the root
        assert sum(n for op, n in counts.items() if "reduce_scatter" in op) == groups * (shard_size != 1), counts
        copies = groups if shard_size != -1 else 0
        assert sum(n for op, n in counts.items() if "allreduce" in op) == copies + 1, counts  # and the metrics


def one_digest(ranks: Ranks) -> None:
    """The digest of shards is that of the whole tensors, and takes one number from each rank; so with copies."""
    torch.manual_seed(0)
    whole_ones = [torch.randn(1), torch.randn(5, 3), torch.randn(7, 2).bfloat16(), torch.randn(4)]
    expected = digest_of([torch.nn.Parameter(t, requires_grad=t.dtype == torch.float32) for t in whole_ones])
    for shard_size in (-1, 1 if ranks.world_size < 4 else 2):
        module = torch.nn.ParameterList(
            [torch.nn.Parameter(t.clone(), requires_grad=t.dtype == torch.float32) for t in whole_ones]
        )
        ranks = arranged(ranks, make_config(f"actor.fsdp_config.fsdp_size={shard_size}", "trainer.nproc_per_node=4"))
        shard(module, ranks.mesh, dtype="bfloat16")
        with _Collectives() as seen:
            assert digest_of(list(module.parameters())) == expected, shard_size
        assert dict(seen.counts) == {"c10d::allreduce_": 1}, seen.counts


def gathered_as_served(weights: Path, ranks: Ranks) -> None:
    """A publication gathers what is served, in its dtype; with adapters nothing more but A."""
    if ranks.world_size == 1:
        return
    for options in ((), ("model.lora_rank=4",)):
        actor = load_models(make_config("model.dtype=bfloat16", *options), weights, ranks).actor.module
        with _Collectives() as seen:
            published = dict(PublishedWeights(actor, dtype="bfloat16"))
        a = sum(p.numel() for name, p in actor.named_parameters() if ".lora_A." in name)
        padding = ranks.world_size * sum(2 * max(p.shape[1:], default=1) for p in actor.parameters())
        total = sum(t.numel() for t in published.values())
        assert total <= seen.gathered[torch.bfloat16] <= total + padding, seen.gathered
        assert a <= seen.gathered[torch.float32] <= a + bool(options) * padding, seen.gathered


class Keeping:
    """A publisher that waits for `go`, then keeps what it is given."""

    def __init__(self) -> None:
        self.go, self.kept = threading.Event(), {}

    def publish(self, version: int, tensors: Any) -> None:
        assert self.go.wait(60)
        self.kept[version] = {name: t.clone() for name, t in tensors}
        assert list(self.kept[version]) == [name for name, _, _ in tensors.kinds()]

    def stats(self) -> dict[str, float]:
        return {"weights/members": 0}


def gathered_beside(weights: Path, ranks: Ranks) -> None:
    """A version is what the weights were when `publish` returned, though training goes on before it is gathered."""
    if ranks.world_size == 1:
        return
    layouts = ((), ("actor.fsdp_config.fsdp_size=1",), ("model.lora_rank=4",))
    for layout, dtype in zip(layouts, ("float32", "bfloat16", "float32"), strict=True):
        layout = (*layout, "actor.optim.lr=1e-2")
        config = make_config(*COMMON, *layout)
        arranged_ranks = arranged(ranks, config)
        models = load_models(config, weights, arranged_ranks)
        publisher = Keeping()
        gathering = Gathering(publisher, arranged_ranks)
        expected = {}
        for version in (1, 2):
            served = PublishedWeights(models.actor.module, dtype=dtype)
            expected[version] = {name: t.clone() for name, t in served}
            publisher.go.clear()
            gathering.publish(version, served)
            assert _step(models, arranged_ranks, version, *layout).applied  # collectives of its own meanwhile
            assert version not in publisher.kept
            publisher.go.set()
        gathering.wait()
        if ranks.first:
            assert expected[1].keys() == expected[2].keys() and publisher.kept.keys() == {1, 2}
            for version, tensors in publisher.kept.items():
                assert all(torch.equal(t, expected[version][name]) for name, t in tensors.items()), (version, layout)
            assert any(not torch.equal(expected[1][name], t) for name, t in expected[2].items())


def gathered_as_computed(weights: Path, ranks: Ranks) -> None:
    """The reference's head for the exact KL travels in the dtype of the hidden states, and is that of the weights."""
    for dtype in ("bfloat16", "float32"):
        actor = load_models(make_config(f"model.dtype={dtype}"), weights, ranks).actor.module
        with _Collectives() as seen:
            head = actor.frozen_head(dtype=dtype)
        assert set(seen.gathered) <= {DTYPES[dtype]} and bool(seen.gathered) == (ranks.world_size > 1), seen.gathered
        hidden = torch.eye(actor.hidden_size, dtype=DTYPES[dtype])
        expected = dict(PublishedWeights(actor, dtype=dtype))["model.embed_tokens.weight"]  # tied
        assert torch.equal(head(hidden), expected.T)


def skip_alike(weights: Path, ranks: Ranks) -> None:
    """A row that is not finite lies on one rank; all ranks refuse the update, and their weights stay equal."""
    models = load_models(make_config(*COMMON), weights, ranks)
    before = weights_digest(models.actor.module)
    assert not _step(models, ranks, 1, bad=True).applied
    assert weights_digest(models.actor.module) == before
    assert _step(models, ranks, 2).applied
    assert weights_digest(models.actor.module) != before


def save(weights: Path, out: Path, ranks: Ranks) -> None:
    """Go on from the checkpoint of the smaller world, if there is one: a step, and a checkpoint of it.

    With rows divided, copies of the models, and weights and moments on the host.
    """
    options = _options(GRID[1], ranks.world_size)
    config = make_config(*COMMON, *options)
    ranks = arranged(ranks, config)
    models = load_models(config, weights, ranks)
    checkpoints = Checkpoints(out / "checkpoints", run_id="test", keep=9, ranks=ranks)
    step = 0
    if (path := checkpoints.latest()) is not None:
        state = checkpoints.load(path, models)
        assert state["digests"] == [weights_digest(t.module) for t in models.trainees()]
        step = state["step"]
    assert _step(models, ranks, step + 1, *options).applied
    checkpoints.begin(step + 1, models, {"digests": [weights_digest(t.module) for t in models.trainees()]})
    assert _step(models, ranks, step + 2, *options).applied  # while the checkpoint is written
    assert checkpoints.finished(wait=True) == checkpoints.folder / f"step_{step + 1}"


def in_bfloat16(weights: Path, ranks: Ranks) -> dict[str, dict[str, Tensor]]:
    """The actor's gradients, as in the grid, computed in bfloat16 and reduced in float32: once, and often."""
    gradients = {}
    for name, often, offload in (("once", False, False), ("often", True, True)):
        options = (
            *_both(*MICRO["tight"], f"fsdp_config.reduce_every_micro_step={str(often).lower()}"),
            "model.dtype=bfloat16",
            f"actor.fsdp_config.offload_policy={str(offload).lower()}", f"trainer.nproc_per_node={ranks.world_size}",
        )  # fmt: skip
        actor = load_models(make_config(*COMMON, *options), weights, ranks).actor
        with chunks(of_tokens=7):
            gradients[name] = dict(_gradients(actor, options, ranks))
        assert {g.dtype for g in gradients[name].values()} == {torch.float32}
    return gradients


def train_adapters(weights: Path, ranks: Ranks) -> dict[str, Tensor]:
    """Two steps with LoRA (KL against the base, which is the model without adapters): the merged weights, the
    critic's with adapters of its own."""
    options = ("model.lora_rank=4", "actor.optim.eps=1e-3", "actor.use_kl_loss=true", "actor.optim.lr=1e-2",
               "critic.lora_rank=2", "critic.optim.eps=1e-3")  # fmt: skip
    models = load_models(make_config(*COMMON, *options), weights, ranks)
    for step in (1, 2):
        assert _step(models, ranks, step, *options).applied
    critic = {f"critic {name}": whole(p.detach()) for name, p in models.critic.module.named_parameters()}
    return critic | {name: t.clone() for name, t in PublishedWeights(models.actor.module, dtype="float32")}


def train_with_exact_kl(weights: Path, ranks: Ranks) -> dict[str, dict[str, Tensor]]:
    """Two steps that the KL over the vocabulary dominates: with a reference (rows divided, where ranks allow it), and
    with adapters, without which the actor is the reference."""
    common = ("actor.use_kl_loss=true", "actor.kl_loss_type=full", "actor.kl_loss_coef=10", "actor.optim.eps=1e-3",
              "actor.optim.lr=1e-2", "actor.ppo_mini_batch_size=3", f"actor.{BUDGET}=40",
              f"trainer.nproc_per_node={ranks.world_size}")  # fmt: skip
    split = 2 if ranks.world_size % 2 == 0 else 1
    trained = {}
    for name, options in (
        ("exact KL", (*common, f"actor.ulysses_sequence_parallel_size={split}")),
        ("exact KL, adapters", (*common, "model.lora_rank=4")),
    ):
        config = make_config(*COMMON, *options)
        divided = arranged(ranks, config)
        models = load_models(config, weights, divided)
        for step in (1, 2):
            assert _step(models, divided, step, *options).applied
        trained[name] = {n: t.clone() for n, t in PublishedWeights(models.actor.module, dtype="float32")}
    return trained


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
