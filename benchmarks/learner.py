"""The learner's layout of batches, on the lengths that real rollouts have."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.figures import Figure, benchmark
from common.wire import Sample

SAMPLES, MEAN, CAP, PROMPT = 512, 200, 1024, 16
BUDGET = 16384  # tokens of one forward


@benchmark
def packing() -> Iterator[Figure]:
    """512 samples of lognormal lengths (mean 200, at most 1,024), prompts not shared: tokens that a forward
    processes per token that there is, and the busiest rank's work over the mean rank's."""
    from learner.batch import make_batch
    from learner.packing import Packing, micro_batches, shares

    batch, rows = make_batch(_samples()), np.arange(SAMPLES)
    packed = Packing(BUDGET, share_prompts=False)
    padded = Packing(None, rows_per_forward=8)
    useful = batch.num_tokens - SAMPLES  # a sequence's last token is only a target
    for name, how, aim in (("packed", packed, "≤ 1.03"), ("padded", padded, None)):
        processed = sum(micro.input_ids.numel() for micro in micro_batches(batch, rows, how))
        yield Figure(f"learner.processed_per_useful_token.{name}", float(processed / useful), "ratio", aim)
    for ranks in (2, 8):
        loads = [part.lengths.sum() for part in shares(batch, rows, packed, ranks)]
        yield Figure(f"learner.rank_imbalance.{ranks}", float(max(loads) / np.mean(loads)), "busiest/mean", "≤ 1.01")


def _samples() -> list[Sample]:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(MEAN) - 0.32, 0.8, SAMPLES), 8, CAP).astype(int)
    return [
        Sample(
            group=i, attempt=0, index=0, prompt_ids=np.full(PROMPT, 3, dtype=np.int32),
            response_ids=np.full(n, 4, dtype=np.int32), behavior_logprobs=np.full(n, -1, dtype=np.float32),
            spans=((0, 0, int(n)),), sampling={"temperature": 1.0}, finish_reason="stop", reward=0.0, generator="",
        )
        for i, n in enumerate(lengths)
    ]  # fmt: skip
