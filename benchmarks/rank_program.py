"""Training steps on this many ranks: `python -m benchmarks.rank_program FOLDER`, once per rank.

FOLDER has a model's weights. Rank 0 prints JSON: useful tokens per second of forward and backward with each
way of laying out rows (on one rank), and the seconds of a whole step.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.learner import samples
from common.config import Config
from common.loading import load_config
from learner.batch import Batch, make_batch
from learner.loop import train_step
from learner.models import Models, load_models
from learner.packing import MicroBatch, Packing, micro_batches
from learner.ranks import Ranks, join_ranks, leave_ranks
from learner.report import Clock
from learner.updates import Counts, accumulate

SETTINGS = ("model.toy=true", "data.task=reverse_digits", "model.dtype=float32", "data.max_response_length=600",
            "data.max_prompt_length=32", "actor.optim.lr=1e-4", "actor.ppo_max_token_len_per_gpu=2048",
            "run.id=benchmark")  # fmt: skip
LAYOUTS = {
    "packed": Packing(2048, share_prompts=False, hidden_size=128),
    "padded": Packing(2048, packed=False),
    "padded_in_order": Packing(None, rows_per_forward=8, packed=False),
}


def main(folder: Path) -> None:
    ranks = join_ranks(timeout_s=120)
    try:
        config = load_config([], [*SETTINGS, "data.train_batch_size=8", "rollout.n=6"])
        models = load_models(config, folder, ranks)
        batch = make_batch(samples(48, prompts=8, cap=512))
        result = {"step_s": _step_s(models, batch, config, ranks)}
        if ranks.world_size == 1:
            for name, packing in LAYOUTS.items():
                result[name] = batch.num_tokens / _fastest(lambda p=packing: _forward_backward(models, batch, p, ranks))
        if ranks.first:
            print(json.dumps(result))
    finally:
        leave_ranks()


def _step_s(models: Models, batch: Batch, config: Config, ranks: Ranks) -> float:
    settings = {
        "actor.optim.lr": 1e-4, "actor.clip_ratio_low": 0.2, "actor.clip_ratio_high": 0.2, "actor.entropy_coeff": 0.0,
        "actor.kl_loss_coef": 0.0,
    }  # fmt: skip

    def step() -> None:
        train_step(
            models, batch, config=config, settings=settings, step=1, version=0, limit=0, ranks=ranks, clock=Clock()
        )

    return _fastest(step)


def _forward_backward(models: Models, batch: Batch, packing: Packing, ranks: Ranks) -> None:
    module = models.actor.module

    def loss(micro: MicroBatch, counts: Counts) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return module(micro)[0].sum() / counts.num_tokens, {}

    micros = micro_batches(batch, np.arange(len(batch)), packing)
    accumulate(module, micros, loss, Counts(int(batch.mask.sum()), len(batch), 1.0), ranks)
    models.actor.optimizer.zero_grad()


def _fastest(act: Callable[[], None], times: int = 2) -> float:
    """Seconds of the fastest of some runs, after one that does not count."""
    act()
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        act()
        taken.append(time.perf_counter() - start)
    return min(taken)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
