"""Log-probabilities, entropy and exact KL of tokens, from hidden states, without a whole [tokens, vocab] matrix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from learner.head import LinearHead
from learner.kl import kl_of_logprobs

CHUNK_ELEMENTS = 1 << 25  # logits held at once: 128 MiB in float32

# hidden [tokens, hidden] -> logits [tokens, vocab] as the model defines them, in a tensor of their own
Head = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Beside:
    """The reference's half of the exact KL: what it has at the same tokens. Without gradient."""

    hidden: Tensor  # [tokens, hidden]
    head: Head


def token_logprobs(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    temperatures: Tensor,
    *,
    vocab_size: int,
    with_entropy: bool,
    chunk_tokens: int | None = None,
    beside: Beside | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Log-probability of each target, the entropy of the distribution it was drawn from, its KL to a reference.

        log π(y) = z_y / T − log Σ_a exp(z_a / T),      H = log Σ_a exp(z_a / T) − Σ_a π(a) z_a / T
        KL = Σ_a π(a) (log π(a) − log π_ref(a)),        both at T

    hidden: [tokens, hidden]; targets: [tokens]; temperatures: [tokens], T of the sample a token is of.
    chunk_tokens: tokens whose logits are held at once (default: about `CHUNK_ELEMENTS` logits); more
    than one chunk is recomputed in the backward pass. The gradient of a `LinearHead` is summed over them in float32.
    beside: the reference; its logits are made chunk by chunk as well.
    Returns ([tokens], [tokens] or None, [tokens] or None), float32; softmax in float32.
    """
    chunk_tokens = chunk_tokens or max(1, CHUNK_ELEMENTS // vocab_size)
    if len(targets) <= chunk_tokens:
        return _of_chunk(hidden, head, targets, temperatures, with_entropy, beside)
    head = head.in_chunks() if isinstance(head, LinearHead) else head
    parts = [
        checkpoint(
            _of_chunk, hidden[i], head, targets[i], temperatures[i], with_entropy,
            beside and Beside(beside.hidden[i], beside.head), use_reentrant=False, preserve_rng_state=False,
        )
        for i in (slice(first, first + chunk_tokens) for first in range(0, len(targets), chunk_tokens))
    ]  # fmt: skip
    logprobs, entropies, kls = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies) if with_entropy else None, torch.cat(kls) if beside else None


def at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _of_chunk(
    hidden: Tensor, head: Head, targets: Tensor, temperatures: Tensor, with_entropy: bool, beside: Beside | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    logprobs = _all_logprobs(hidden, head, temperatures)
    chosen = logprobs.gather(-1, targets.unsqueeze(-1)).sum(-1)  # not `squeeze`: FSDP2 wants no views returned
    entropy = kl = None
    if with_entropy:  # a symbol that is never drawn (logit −inf) adds nothing
        surprise = torch.where(logprobs.isneginf(), 0, -logprobs)
        entropy = (logprobs.exp() * surprise).sum(-1)
    if beside is not None:
        with torch.no_grad():
            ref_logprobs = _all_logprobs(beside.hidden, beside.head, temperatures)
        kl = kl_of_logprobs(logprobs, ref_logprobs)
    return chosen, entropy, kl


def _all_logprobs(hidden: Tensor, head: Head, temperatures: Tensor) -> Tensor:
    """[tokens, vocab]"""
    logits = at_least_float32(head(hidden))
    if logits.requires_grad:
        logits = logits / temperatures.unsqueeze(-1)
    else:
        logits.div_(temperatures.unsqueeze(-1))  # no third matrix
    return logits.log_softmax(-1)
