"""From a lease and an index to one sample: prompt → engine → reward → frames for the broker."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from common.config import Config
from common.limits import TEMPERATURE, number
from common.wire import Sample, encode_sample
from generators.activity import Activity
from generators.environments import Completion, Environment, Trajectory
from generators.leases import Lease
from generators.rewards import Score
from generators.rewards.scorer import Scorer

LANES = ("train", "eval")


class SamplingEngine(Protocol):
    """What sampling needs of ``generators/requests.py``."""

    version: int

    async def generate(
        self,
        prompt_ids: list[int],
        *,
        temperature: float,
        top_p: float,
        top_k: int,
        max_tokens: int,
        request_id: str,
        on_progress: Callable[[int], None] | None = None,
    ) -> Completion: ...


class SampleMaker:
    def __init__(
        self,
        name: str,
        config: Config,
        engine: SamplingEngine,
        environment: Environment,
        scorer: Scorer,
        activity: Activity,
        limit: Callable[[str], Any] = lambda name: None,
    ) -> None:
        self._limit = limit
        self._name, self._engine, self._environment = name, engine, environment
        self._scorer, self._activity = scorer, activity
        rollout = config.rollout
        self._settings: dict[str, dict[str, float]] = {  # by lane; held-out prompts are answered greedily
            "train": {"temperature": rollout.temperature, "top_p": rollout.top_p, "top_k": rollout.top_k},
            "eval": {"temperature": 0.0, "top_p": 1.0, "top_k": -1},
        }
        self._greedy_index = config.greedy_index  # … and so is the baseline of `remax`
        self._num_requests = 0

    async def make(self, lease: Lease, index: int) -> list[bytes]:
        """The frames of the finished sample; a reward that failed is a fault in it.

        Raises:
            EngineError: see ``Requests.generate``.
            LeewayError: the reward process cannot be started again.
        """
        start = time.time()
        settings = self._settings_of(lease, index)  # of the whole sample, should they change meanwhile
        trajectory = await self._play(lease, index, settings)
        sampled = time.time()
        text = self._environment.text(trajectory)
        score = await self._scorer.score(lease.row, text)
        timing = {"generate_s": sampled - start, "reward_s": time.time() - sampled}
        self._activity.samples += 1
        return encode_sample(self._sample(lease, index, settings, trajectory, score, timing))

    def _settings_of(self, lease: Lease, index: int) -> dict[str, float]:
        settings = self._settings["eval" if index == self._greedy_index else lease.lane]
        if settings is self._settings["train"]:
            settings = settings | {"temperature": number(self._limit(TEMPERATURE), settings["temperature"], above=0.0)}
        return settings

    async def _play(self, lease: Lease, index: int, settings: dict[str, float]) -> Trajectory:
        """One episode of the environment; each of its turns is a request of its own."""
        made_before = 0  # tokens of earlier turns

        def progress(num_tokens: int) -> None:
            total = made_before + num_tokens
            self._activity.tokens += total - lease.tokens.get(index, 0)
            lease.tokens[index] = total

        async def generate(prompt_ids: list[int], max_tokens: int) -> Completion:
            nonlocal made_before
            self._num_requests += 1
            request_id = f"{lease.group}.{lease.attempt}.{index}-{self._num_requests}"
            self._activity.begin(time.time())
            try:
                completion = await self._engine.generate(
                    prompt_ids, max_tokens=max_tokens, request_id=request_id, on_progress=progress, **settings
                )
            finally:
                self._activity.end(time.time())
            progress(len(completion.response_ids))
            made_before += len(completion.response_ids)
            return completion

        return await self._environment.play(lease.prompt_ids, lease.row, generate)

    def _sample(
        self, lease: Lease, index: int, settings: dict[str, float], t: Trajectory, score: Score,
        timing: dict[str, float],
    ) -> Sample:  # fmt: skip
        return Sample(
            group=lease.group,
            attempt=lease.attempt,
            index=index,
            prompt_ids=lease.prompt_array,
            response_ids=np.array(t.response_ids, dtype=np.int32),
            behavior_logprobs=np.array(t.logprobs, dtype=np.float32),
            spans=tuple(t.spans),
            sampling=settings,
            finish_reason=t.finish_reason,
            reward=score.value,
            generator=self._name,
            loss_mask_runs=t.loss_mask_runs,
            reward_parts=score.parts,
            timing=timing,
            fault=score.fault,
        )
