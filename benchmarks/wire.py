"""Bytes on the wire."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.figures import Figure, benchmark
from common.wire import Sample, encode_sample

TOKENS = 2048


@benchmark
def wire_bytes() -> Iterator[Figure]:
    """Frames of one encoded sample of 2,048 response tokens, its prompt ids and spans aside."""
    prompt = np.arange(100, dtype=np.int32)
    sample = Sample(
        group=123456, attempt=0, index=7, prompt_ids=prompt, response_ids=np.arange(TOKENS, dtype=np.int32),
        behavior_logprobs=-np.ones(TOKENS, dtype=np.float32), spans=((41, 0, 1000), (42, 1000, TOKENS)),
        sampling={"temperature": 1.0, "top_p": 1.0, "top_k": -1}, finish_reason="stop", reward=1.0,
        generator="generator-host-0", timing={"generate_s": 1.25, "reward_s": 0.001},
    )  # fmt: skip
    size = sum(len(frame) for frame in encode_sample(sample))
    aside = prompt.nbytes + 8 * 3 * len(sample.spans)
    yield Figure("wire.bytes_per_token", (size - aside) / TOKENS, "bytes/token", "≤ 8.3")
