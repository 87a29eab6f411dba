"""Memory and time of log-probabilities at a large vocabulary: `python -m benchmarks.logprob_program naive|chunked`.

Prints JSON: the peak of resident memory beyond the inputs in a forward, and in a forward with backward,
and the CPU time of the forward (the best of three).
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from learner.head import LinearHead
from learner.logprobs import token_logprobs

VOCAB, TOKENS, HIDDEN = 150_000, 2_048, 64


def main(kind: str) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN).mul_(0.1).requires_grad_()
    weight.grad = torch.zeros_like(weight)
    targets, temperatures = torch.randint(VOCAB, (TOKENS,)), torch.ones(TOKENS)

    def logprobs() -> Tensor:
        if kind == "naive":
            return (hidden @ weight.T).log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        head = LinearHead(weight)
        return token_logprobs(hidden, head, targets, temperatures, vocab_size=VOCAB, with_entropy=False)[0]

    times = []
    forget_peak()
    before = peak_bytes()
    for _ in range(3):
        start = time.process_time()
        with torch.no_grad():
            value = logprobs().sum()
        times.append(time.process_time() - start)
    forward = peak_bytes() - before
    forget_peak()
    before = peak_bytes()
    logprobs().sum().backward()
    both = peak_bytes() - before
    print(json.dumps({"forward": forward, "both": both, "forward_s": min(times), "value": float(value)}))


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    return 1024 * int(next(x for x in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in x).split()[1])


if __name__ == "__main__":
    main(sys.argv[1])
