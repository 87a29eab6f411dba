"""`actor.kl_loss_type=full`: the reference's half of the exact KL, made as the updates need it.

The KL sums over the vocabulary, so the log-probs of the sampled tokens do not tell it, and whole logits of a batch do
not fit anywhere. In each micro-step the reference runs its backbone on the same rows; its hidden states ([tokens,
hidden]) go into the actor's forward, where both heads are computed chunk by chunk (`learner/logprobs.py`). This takes
the place of the reference's pass at the start of the step: as much work, once for each of `actor.ppo_epochs`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch

from common.config import Config
from learner.logprobs import Beside
from learner.lora import WithoutAdapters
from learner.model import Actor, reshard
from learner.offload import at_work
from learner.packing import MicroBatch

Besides = Callable[[MicroBatch], Beside]


@contextmanager
def exact_kl(config: Config, reference: Actor | WithoutAdapters | None) -> Iterator[Besides | None]:
    """Within, what gives the reference's half of a micro-batch; None if no exact KL is asked for. Collective."""
    if reference is None or not config.needs_exact_kl:
        yield None
        return
    # Adapters lie beside the backbone alone: without them it is the reference, and its head is the reference's.
    without = isinstance(reference, WithoutAdapters)
    with nullcontext() if without else at_work(reference):
        head = (reference.actor if without else reference).frozen_head(dtype=config.model.dtype)

        @torch.no_grad()
        def beside(micro: MicroBatch) -> Beside:
            return Beside(reference(micro, hidden_only=True), head)

        yield beside
        reshard(reference)
