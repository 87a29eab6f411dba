"""One rank of the learner's maths, without a broker: `python -m tests.rank_program WEIGHTS OUT`.

With each way of laying out the rows the ranks train the same batches from the same weights; rank 0
writes gradients and weights, `{way: {"gradients": …, "weights": …}}`, to OUT/<world size>.pt.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from learner import models as loading
from learner.batch import make_batch
from learner.checkpoint import Checkpoints
from learner.loop import Outcome, train_step
from learner.model import published_weights, weights_digest, whole
from learner.models import Models, load_models
from learner.packing import MicroBatch, micro_batches
from learner.ranks import Ranks, join_ranks, leave_ranks
from learner.report import Clock
from learner.settings import live_settings
from learner.updates import Counts, Trainee, accumulate, packing_of
from tests.learner_parts import SimulatedControl, make_config, make_groups

COMMON = (
    "algorithm.adv_estimator=gae", "critic.optim.lr=1e-3", "actor.entropy_coeff=0.01", "actor.grad_clip=1e9",
    "critic.grad_clip=1e9", "data.train_batch_size=6",
)  # fmt: skip
BUDGET, ROWS = "ppo_max_token_len_per_gpu", "ppo_micro_batch_size_per_gpu"


def _both(*options: str) -> tuple[str, ...]:
    return tuple(f"{part}.{o}" for part in ("actor", "critic") for o in options)


WAYS = {
    "one forward": _both(f"{BUDGET}=4096"),
    "tight": _both(f"{BUDGET}=40"),
    "no shared prompts": _both(f"{BUDGET}=100", "share_prompts=false"),
    "padded": _both("use_dynamic_bsz=false", f"{ROWS}=3"),
    "activations recomputed": (*_both(f"{BUDGET}=64"), "model.enable_gradient_checkpointing=true"),
}


def main(weights: Path, out: Path) -> None:
    ranks = join_ranks(timeout_s=60)
    try:
        results = {way: _train(weights, options, ranks) for way, options in WAYS.items()}
        skip_alike(weights, ranks)
        save(weights, out, ranks)
        adapters = train_adapters(weights, ranks)
        if ranks.first:
            torch.save(results, out / f"{ranks.world_size}.pt")
            torch.save(adapters, out / f"{ranks.world_size}.adapters.pt")
    finally:
        leave_ranks()


def _train(weights: Path, options: tuple[str, ...], ranks: Ranks) -> dict[str, dict[str, Tensor]]:
    """Gradients over all rows in float32; weights after 3 steps of 2 updates in float64."""
    models = load_models(make_config(*COMMON, *options), weights, ranks)
    torch.nn.init.ones_(models.critic.module.value_head.weight)  # from 0 nothing would reach the backbone
    gradients = {f"{t.name} {name}": g for t in models.trainees() for name, g in _gradients(t, options, ranks)}
    with _Float64():
        models = load_models(make_config(*COMMON, *options), weights, ranks)
        for step in (1, 2, 3):
            _step(models, ranks, step, *options, *_both("ppo_mini_batch_size=3"))
    trained = {f"{t.name} {n}": whole(p.detach()) for t in models.trainees() for n, p in t.module.named_parameters()}
    return {"gradients": gradients, "weights": trained}


def _gradients(trainee: Trainee, options: tuple[str, ...], ranks: Ranks) -> list[tuple[str, Tensor]]:
    """Of a weighted mean of the outputs. (A policy loss, whose advantages add up to 0, cancels: float32 shows it.)"""
    config = make_config(*COMMON, *options)
    batch = make_batch(make_groups(config, 1))
    weights = torch.linspace(0.5, 1.5, batch.mask.numel()).view(batch.mask.shape)

    def loss(micro: MicroBatch, counts: Counts) -> tuple[Tensor, dict[str, Tensor]]:
        output = trainee.module(micro)
        values = micro.scatter(output[0] if isinstance(output, tuple) else output)
        return (values * weights[micro.rows]).sum() / counts.num_tokens, {}

    packing = packing_of(trainee.module, getattr(config, trainee.name))
    micros = micro_batches(batch, np.arange(len(batch)), packing, rank=ranks.rank, world_size=ranks.world_size)
    accumulate(trainee.module, micros, loss, Counts(int(batch.mask.sum()), len(batch), 1.0), ranks)
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
    """Models are loaded in float64, and their norms compute in it."""

    def __enter__(self) -> None:
        self.before = loading.load_actor, loading.load_critic, Qwen2RMSNorm.forward
        actor, critic, _ = self.before
        loading.load_actor = lambda *args, **options: actor(*args, **options).double()
        loading.load_critic = lambda *args, **options: critic(*args, **options).double()
        Qwen2RMSNorm.forward = lambda norm, x: (
            norm.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.variance_epsilon)
        )

    def __exit__(self, *_: object) -> None:
        loading.load_actor, loading.load_critic, Qwen2RMSNorm.forward = self.before


def skip_alike(weights: Path, ranks: Ranks) -> None:
    """A row that is not finite lies on one rank; all ranks refuse the update, and their weights stay equal."""
    models = load_models(make_config(*COMMON), weights, ranks)
    before = weights_digest(models.actor.module)
    assert not _step(models, ranks, 1, bad=True).applied
    assert weights_digest(models.actor.module) == before
    assert _step(models, ranks, 2).applied
    assert weights_digest(models.actor.module) != before


def save(weights: Path, out: Path, ranks: Ranks) -> None:
    """Go on from the checkpoint of the smaller world, if there is one: a step, and a checkpoint of it."""
    models = load_models(make_config(*COMMON), weights, ranks)
    checkpoints = Checkpoints(out / "checkpoints", run_id="test", keep=9, ranks=ranks)
    step = 0
    if (path := checkpoints.latest()) is not None:
        state = checkpoints.load(path, models)
        assert state["digests"] == [weights_digest(t.module) for t in models.trainees()]
        step = state["step"]
    assert _step(models, ranks, step + 1).applied
    checkpoints.begin(step + 1, models, {"digests": [weights_digest(t.module) for t in models.trainees()]})
    assert _step(models, ranks, step + 2).applied  # while the checkpoint is written
    assert checkpoints.finished(wait=True) == checkpoints.folder / f"step_{step + 1}"


def train_adapters(weights: Path, ranks: Ranks) -> dict[str, Tensor]:
    """Two steps with LoRA (KL against the base, which is the model without adapters): the merged weights."""
    options = ("model.lora_rank=4", "actor.optim.eps=1e-3", "actor.use_kl_loss=true", "actor.optim.lr=1e-2")
    models = load_models(make_config(*COMMON, *options), weights, ranks)
    for step in (1, 2):
        assert _step(models, ranks, step, *options).applied
    return {name: t.clone() for name, t in published_weights(models.actor.module, dtype="float32")}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
