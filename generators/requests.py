"""The requests of one engine: sampling, and which of what was sampled may leave.

Each token is stamped by vLLM with the version that made it. While a load is being proven nothing leaves; what was
sampled with one that is then disproved is sampled anew.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from common.config import Config
from common.errors import EngineError, RequestCancelled
from generators.starting import ADAPTER_ID, ADAPTER_NAME, PROGRESS_TOKENS

# vLLM only says "see above"; its processes write where their launcher writes.
ENDED = "the engine's process ended; what it said last is on stderr (of a launched run: RUN_DIR/logs/generators.out)"


@dataclass(frozen=True)
class Completion:
    """What the engine made of one prompt. Example for three tokens."""

    response_ids: list[int]  # [response]: [17, 4, 1], the end token included
    logprobs: list[float]  # [response], of the distribution actually sampled
    spans: list[tuple[int, int, int]]  # [(3, 0, 2), (4, 2, 3)]: version 4 made the last token
    finish_reason: str  # "stop" or "length"


class Requests:
    """``version`` is that of the weights they are sampled with; -1 until the first load. `Engine` changes it."""

    def __init__(self, llm: Any, config: Config) -> None:
        self.version = -1
        self._llm = llm
        self._recompute_kv = config.rollout.recompute_kv
        self._closed = False
        self._running: dict[str, str] = {}  # request -> vLLM's id of it
        self._trusted = asyncio.Event()  # cleared while a load is to be proven: no sample leaves
        self._trusted.set()
        self._num_disproofs = 0
        self._num_proofs = 0
        self._adapter = _adapter_request() if config.weights.adapters_only else None  # of every request

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
    ) -> Completion:
        """Sample one response. Cancelling the task ends the request.

        While a load is being proven the response is held back; if it is disproved, the request is made anew.

        Args:
            temperature: 0 is greedy; the log-probs are then those of temperature 1.
            request_id: unique among running requests.
            on_progress: called with the number of tokens made so far, about every 32 tokens.

        Raises:
            RequestCancelled: vLLM aborted it, and no disproof asked for that.
            EngineError: the engine died, refused the prompt, or has no weights of a known version.
        """
        stream = on_progress is not None and max_tokens > PROGRESS_TOKENS
        params = _sampling_params(temperature, top_p, max(top_k, 0), max_tokens, stream)
        try:
            while True:
                self._running[request_id] = request_id
                if self.version < 0:  # what it has was disproved, is being loaded, or is about to be proven
                    await self._trusted.wait()
                disproofs = self._num_disproofs
                self._running[request_id] = vllm_id = f"{request_id}~{disproofs}"
                try:
                    completion = await self._sample(prompt_ids, params, vllm_id, on_progress)
                except RequestCancelled:
                    if disproofs == self._num_disproofs:
                        raise
                await self._trusted.wait()
                if self._closed:
                    raise EngineError("the engine was closed")
                if disproofs == self._num_disproofs:
                    return completion
        finally:
            del self._running[request_id]

    async def _sample(
        self, prompt_ids: list[int], params: Any, request_id: str, on_progress: Callable[[int], None] | None
    ) -> Completion:
        """One request, whatever the proof of its weights will say."""
        from vllm.inputs.engine import tokens_input

        ids: list[int] = []
        logprobs: list[float] = []
        last = None
        held_at_start = self.version
        try:
            async for out in self._llm.generate(
                tokens_input(prompt_ids), params, request_id, lora_request=self._adapter
            ):
                last = out.outputs[0]
                ids += last.token_ids
                if last.token_ids:
                    logprobs += _sampled_logprobs(last.logprobs, len(last.token_ids))
                    if on_progress is not None:
                        on_progress(len(ids))
        except Exception as e:
            cause = e.__cause__ or e  # vLLM wraps what it does not expect
            what = ENDED if self._llm.errored else f"{type(cause).__name__}: {cause}"
            raise EngineError(f"request {request_id}: {what}") from e
        if last is None or last.finish_reason == "abort":
            raise RequestCancelled(f"request {request_id} was cancelled")
        if last.finish_reason not in ("stop", "length"):
            raise EngineError(f"request {request_id} ended with {last.finish_reason!r}")
        spans = _spans(last.weight_versions, len(ids), request_id)
        if not self._recompute_kv:  # its oldest keys and values may be of the version held when it came
            spans = [(min(spans[0][0], held_at_start), 0, len(ids))]
        return Completion(ids, logprobs, spans, last.finish_reason)

    async def prompt_logprobs(self, ids: tuple[int, ...]) -> list[float]:
        """[ids - 1]: log-probs of the tokens from the second on; goes before all that wait for their turn."""
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        self._num_proofs += 1
        params = SamplingParams(
            n=1, temperature=0.0, max_tokens=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        last = None
        async for out in self._llm.generate(
            tokens_input(list(ids)), params, f"canary-{self._num_proofs}", lora_request=self._adapter, priority=-1
        ):
            last = out
        if last is None or last.prompt_logprobs is None:
            raise EngineError("the engine gave no log-probs of the canary")
        flat = last.prompt_logprobs
        return [flat.logprobs[i] for i in flat.start_indices[1:]]


def _adapter_request() -> Any:
    """The adapter in the engine's one slot, whichever version fills it (``adapter_slot.py``); the path is not read."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(ADAPTER_NAME, ADAPTER_ID, "published")


@functools.lru_cache(maxsize=64)
def _sampling_params(temperature: float, top_p: float, top_k: int, max_tokens: int, stream: bool) -> Any:
    """vLLM's request settings. Requests share them: its own deep copy costs more than a short request's sampling."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        n=1,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        max_tokens=max_tokens,
        logprobs=0,  # the sampled token's only
        flat_logprobs=True,
        skip_clone=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY,
    )


def _sampled_logprobs(logprobs: Any, num_tokens: int) -> list[float]:
    """The first entry of each position is the sampled token's."""
    if len(logprobs) != num_tokens:
        raise EngineError(f"{len(logprobs)} log-probs for {num_tokens} tokens")
    return [logprobs.logprobs[i] for i in logprobs.start_indices]


def _spans(stamped: Any, num_tokens: int, request_id: str) -> list[tuple[int, int, int]]:
    """vLLM's stamps as numbers; an engine without published weights has none that count."""
    spans = [(s.version, s.start, s.end) for s in stamped or []]
    if not all(v.isdecimal() for v, _, _ in spans) or not spans or spans[-1][2] != num_tokens:
        raise EngineError(f"request {request_id}: the engine stamped {spans} on {num_tokens} tokens")
    return [(int(v), start, end) for v, start, end in spans if end > start]
