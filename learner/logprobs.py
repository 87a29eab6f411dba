"""Log-probabilities and entropy of tokens, from hidden states, without a whole [tokens, vocab] matrix."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from learner.head import LinearHead

CHUNK_ELEMENTS = 1 << 25  # logits held at once: 128 MiB in float32

# hidden [tokens, hidden] -> logits [tokens, vocab] as the model defines them, in a tensor of their own
Head = Callable[[Tensor], Tensor]


def token_logprobs(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    temperatures: Tensor,
    *,
    vocab_size: int,
    with_entropy: bool,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each target, and the entropy of the distribution it was drawn from.

        log π(y) = z_y / T − log Σ_a exp(z_a / T),      H = log Σ_a exp(z_a / T) − Σ_a π(a) z_a / T

    hidden: [tokens, hidden]; targets: [tokens]; temperatures: [tokens], T of the sample a token is of.
    chunk_tokens: tokens whose logits are held at once (default: about `CHUNK_ELEMENTS` logits); more
    than one chunk is recomputed in the backward pass. The gradient of a `LinearHead` is summed over them in float32.
    Returns ([tokens], [tokens] or None), float32; softmax in float32.
    """
    chunk_tokens = chunk_tokens or max(1, CHUNK_ELEMENTS // vocab_size)
    if len(targets) <= chunk_tokens:
        return _of_chunk(hidden, head, targets, temperatures, with_entropy)
    head = head.in_chunks() if isinstance(head, LinearHead) else head
    chunks = zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), temperatures.split(chunk_tokens), strict=True)
    parts = [
        checkpoint(_of_chunk, h, head, y, t, with_entropy, use_reentrant=False, preserve_rng_state=False)
        for h, y, t in chunks
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies) if with_entropy else None


def at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _of_chunk(
    hidden: Tensor, head: Head, targets: Tensor, temperatures: Tensor, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    logits = at_least_float32(head(hidden))  # [tokens, vocab]
    if logits.requires_grad:
        logits = logits / temperatures.unsqueeze(-1)
    else:
        logits.div_(temperatures.unsqueeze(-1))  # no third matrix
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(-1, targets.unsqueeze(-1)).sum(-1)  # not `squeeze`: FSDP2 wants no views returned
    if not with_entropy:
        return chosen, None
    # A symbol that is never drawn (logit −inf) adds nothing.
    surprise = torch.where(logprobs.isneginf(), 0, -logprobs)
    return chosen, (logprobs.exp() * surprise).sum(-1)
