"""Proof of a load: the log-probs of a few fixed tokens, as the weights that were sent give them.

The learner makes a ``Canary`` with a forward of the very bytes it sends; the engine has its own
log-probs of the same prompt compared with it before any sample of that version leaves it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from common.errors import DisprovedError, WeightError
from common.wire import pack, unpack

NUM_TOKENS = 64
# dtype served -> (what of the absolute differences, its limit)
LIMITS = {"float32": ("max", 1e-4), "bfloat16": ("mean", 0.05)}
# bfloat16 rounds a logit by up to 0.4 % of itself, and tokens drawn at random are improbable: a pretrained model of
# 135 M parameters gives them −14 on average, and two right computations of that differ by 0.09 (0.6 %).
RELATIVE = {"float32": 0.0, "bfloat16": 0.01}


def canary_ids(vocab_size: int, max_tokens: int) -> tuple[int, ...]:
    """The fixed tokens: spread over the vocabulary, the same for every version of a run."""
    count = max(2, min(NUM_TOKENS, max_tokens))
    return tuple(int(i) for i in np.random.default_rng(20_240_229).integers(0, vocab_size, count))


@dataclass(frozen=True)
class Canary:
    """A prompt and the log-probs of its tokens from the second on."""

    ids: tuple[int, ...]  # [tokens]
    logprobs: tuple[float, ...]  # [tokens - 1]
    dtype: str  # in which the engine computes

    def check(self, measured: Sequence[float]) -> float:
        """The difference between the engine's log-probs and ours, as ``LIMITS`` measures it; in bfloat16 it may also be
        a hundredth of the mean log-prob.

        Raises:
            DisprovedError: it is above the limit, or not a number.
        """
        if len(measured) != len(self.logprobs):
            raise DisprovedError(float("inf"), f"canary: {len(measured)} log-probs for {len(self.logprobs)} tokens")
        kind, limit = LIMITS[self.dtype]
        limit = max(limit, RELATIVE[self.dtype] * float(np.abs(self.logprobs).mean()))
        differences = np.abs(np.asarray(measured, dtype=np.float64) - np.asarray(self.logprobs))
        difference = float(differences.max() if kind == "max" else differences.mean())
        if not difference <= limit:  # NaN, too
            raise DisprovedError(
                difference,
                f"canary: its log-probs differ from those of the weights sent by {difference:.3g} ({kind} over "
                f"{len(self.ids)} tokens; at most {limit:g} in {self.dtype})",
            )
        return difference

    def encode(self) -> bytes:
        logprobs = np.asarray(self.logprobs, dtype="<f8").tobytes()
        return pack({"ids": np.asarray(self.ids, dtype="<i4").tobytes(), "logprobs": logprobs, "dtype": self.dtype})

    @classmethod
    def decode(cls, data: bytes) -> Canary:
        """Raises WeightError (WireError from the decoder) for what is not a canary."""
        try:
            m = unpack(data)
            ids, logprobs = np.frombuffer(m["ids"], dtype="<i4"), np.frombuffer(m["logprobs"], dtype="<f8")
            canary = cls(tuple(ids.tolist()), tuple(logprobs.tolist()), str(m["dtype"]))
        except (KeyError, TypeError, ValueError) as e:
            raise WeightError(f"not a canary ({type(e).__name__}: {e})") from None
        if canary.dtype not in LIMITS or len(ids) != len(logprobs) + 1:
            raise WeightError(f"not a canary ({len(ids)} tokens, {len(logprobs)} log-probs, {canary.dtype})")
        return canary
