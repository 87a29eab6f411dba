"""Supervised start: teach a model the form of the answers from prompt/answer pairs, before RL.

Ends when the *sampled* score reaches its target, so that RL starts from a policy that is sometimes
right, and no further: a supervised optimum leaves nothing to explore.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Event
from typing import Any

import numpy as np
import torch
from torch import nn

from common.config import Config, Warmup
from common.data import open_rows
from common.errors import Stopped
from common.logs import LOGGER
from common.prompting import Messages, prompt_ids
from common.tasks import get_task
from common.wire import Sample
from learner.batch import make_batch
from learner.model import Actor
from learner.packing import Packing, micro_batches
from learner.plain import between_ranks

CHECK_PROMPTS = 256  # the score is then known to ± 0.02
CHECK_OFFSET = 1_000_000  # checks take their pairs from there on, training from 0
TOKEN_BUDGET = 16384


@dataclass(frozen=True)
class Lesson:
    """Where the pairs come from and what an answer is worth."""

    pair: Callable[[int], tuple[Messages, str]]  # any i ≥ 0 → (chat messages, right answer)
    score: Callable[[str, str], float]  # (sampled text, right answer)


@between_ranks
@dataclass(frozen=True)
class WarmupResult:
    steps: int
    score: float  # sampled, at the last check
    loss: float  # nats per answer token, last step
    time_s: float


def lesson_of(config: Config) -> Lesson:
    """The pairs of the configured task, or of the training files (`extra_info.answer`, else the ground truth).

    Raises:
        ConfigError: unknown task, unreadable files.
    """
    seed = config.run.seed
    if config.data.task:
        task = get_task(config.data.task)

        def task_pair(i: int) -> tuple[Messages, str]:
            prompt, answer = task.pair(i, seed=seed)
            return [{"role": "user", "content": prompt}], answer

        return Lesson(task_pair, lambda text, answer: task.score(text, answer))
    rows = open_rows(config, "train")

    def row_pair(i: int) -> tuple[Messages, str]:
        row = rows[i % len(rows)]
        answer = (row.get("extra_info") or {}).get("answer", row["reward_model"]["ground_truth"])
        return row["prompt"], str(answer)

    return Lesson(row_pair, lambda text, answer: float(text.strip() == answer.strip()))


def warm_up(
    actor: Actor, tokenizer: Any, lesson: Lesson, options: Warmup, *, max_new_tokens: int, seed: int,
    stop: Event | None = None, on_check: Callable[[int, float, float], None] | None = None,
) -> WarmupResult:  # fmt: skip
    """Train `actor` (unsharded, on any device) until its sampled score reaches `options.target_score`.

    At most `options.steps` AdamW steps of `options.batch_size` pairs; the score is looked at every
    `options.check_every` steps, and before the first. `on_check(steps, score, loss)`.

    Raises:
        Stopped: `stop` was set.
    """
    start = time.perf_counter()
    optimizer = torch.optim.AdamW(actor.parameters(), lr=options.lr)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        steps, loss = 0, float("nan")
        score = sampled_score(actor, tokenizer, lesson, max_new_tokens=max_new_tokens)
        while score < options.target_score and steps < options.steps:
            for _ in range(min(options.check_every, options.steps - steps)):
                first = steps * options.batch_size
                pairs = [lesson.pair(i) for i in range(first, first + options.batch_size)]
                loss = supervised_step(actor, optimizer, tokenizer, pairs)
                steps += 1
            score = sampled_score(actor, tokenizer, lesson, max_new_tokens=max_new_tokens)
            if on_check:
                on_check(steps, score, loss)
            if stop is not None and stop.is_set():
                raise Stopped("the warm-up")
    if score < options.target_score:
        logging.getLogger(LOGGER).warning(
            "the warm-up ended after %d steps (model.warmup.steps) at a sampled score of %.3f, below its target of %g",
            steps, score, options.target_score,
        )  # fmt: skip
    return WarmupResult(steps, score, loss, time.perf_counter() - start)


def supervised_step(
    actor: Actor, optimizer: torch.optim.Optimizer, tokenizer: Any, pairs: list[tuple[Messages, str]]
) -> float:
    """One AdamW step on the answers (and their end); the loss per answer token before it."""
    batch = make_batch([_as_sample(tokenizer, i, *pair) for i, pair in enumerate(pairs)], device=_device(actor))
    num_tokens = int(batch.mask.sum())
    total = 0.0
    budget = max(TOKEN_BUDGET, int(batch.lengths.max()))
    for micro in micro_batches(batch, np.arange(len(batch)), Packing(budget, hidden_size=actor.hidden_size)):
        logprobs, _ = actor(micro)
        loss = -logprobs.sum() / num_tokens
        loss.backward()
        total += loss.detach()
    nn.utils.clip_grad_norm_(actor.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(total)


@torch.no_grad()
def sampled_score(actor: Actor, tokenizer: Any, lesson: Lesson, *, max_new_tokens: int) -> float:
    """Mean score of one sampled answer (temperature 1) to each of `CHECK_PROMPTS` prompts."""
    pairs = [lesson.pair(CHECK_OFFSET + i) for i in range(CHECK_PROMPTS)]
    prompts = [prompt_ids(tokenizer, messages) for messages, _ in pairs]
    texts = sample_texts(actor, tokenizer, prompts, max_new_tokens=max_new_tokens)
    return float(np.mean([lesson.score(text, answer) for text, (_, answer) in zip(texts, pairs, strict=True)]))


@torch.no_grad()
def sample_texts(actor: Actor, tokenizer: Any, prompts: list[list[int]], *, max_new_tokens: int) -> list[str]:
    """One response to each prompt, sampled at temperature 1, by Hugging Face's `generate`."""
    width = max(len(p) for p in prompts)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=_device(actor))
    there = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=_device(actor))
    out = actor.lm.generate(
        ids, attention_mask=there, do_sample=True, temperature=1.0, top_p=1.0, top_k=0,
        max_new_tokens=max_new_tokens, pad_token_id=pad,
    )  # fmt: skip
    return tokenizer.batch_decode(out[:, width:], skip_special_tokens=True)


def _as_sample(tokenizer: Any, i: int, messages: Messages, answer: str) -> Sample:
    ids = [*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    return Sample(
        group=i, attempt=0, index=0,
        prompt_ids=np.array(prompt_ids(tokenizer, messages), dtype=np.int32),
        response_ids=np.array(ids, dtype=np.int32),
        behavior_logprobs=np.zeros(len(ids), dtype=np.float32),
        spans=((0, 0, len(ids)),), sampling={"temperature": 1.0}, finish_reason="stop", reward=0.0, generator="",
    )  # fmt: skip


def _device(module: nn.Module) -> torch.device:
    return next(module.parameters()).device
