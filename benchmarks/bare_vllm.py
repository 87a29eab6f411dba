"""``python -m benchmarks.bare_vllm FOLDER MAX_NUM_SEQS NUM``: AsyncLLM and nothing else, as a yardstick.

The quick start's requests (same prompts, sampling, log-probs and engine arguments), 512 at a time.
Prints JSON: response tokens and CPU seconds of this process and its children.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1"}

import psutil

from common.tasks import get_task

BATCH = 512


async def main(folder: str, max_num_seqs: int, num: int) -> None:
    from transformers import AutoTokenizer
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    tokenizer = AutoTokenizer.from_pretrained(folder)
    task = get_task("reverse_digits")
    llm = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=folder, dtype="float32", max_model_len=44, enforce_eager=True, max_num_seqs=max_num_seqs,
            disable_log_stats=True, logprobs_mode="processed_logprobs", distributed_executor_backend="uni",
            kv_cache_memory_bytes=64 << 20,
        )
    )  # fmt: skip
    settings = SamplingParams(
        n=1, logprobs=0, max_tokens=12, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
    )

    async def one(i: int) -> int:
        text = task.row("train", i // 8, seed=0)["prompt"][0]["content"]
        ids = tokenizer(text)["input_ids"]
        async for out in llm.generate({"prompt_token_ids": ids}, settings, str(i)):
            last = out
        return len(last.outputs[0].token_ids)

    await asyncio.gather(*(one(i) for i in range(BATCH)))  # warm
    before, tokens = cpu_seconds(), 0
    for batch in range(num):
        tokens += sum(await asyncio.gather(*(one(i) for i in range(BATCH * batch, BATCH * (batch + 1)))))
    print(json.dumps({"tokens": tokens, "cpu_s": cpu_seconds() - before}), flush=True)
    llm.shutdown(1)


def cpu_seconds() -> float:
    """User and system seconds of this process and its children so far."""
    me = psutil.Process()
    return sum(t.user + t.system for t in (p.cpu_times() for p in [me, *me.children(recursive=True)]))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
