"""``python -m tests.vllm_answers FOLDER``: greedy answers of vLLM to a JSON list of prompts on stdin, as JSON."""

import json
import os
import sys

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1"}
os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"}


def main() -> None:
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=sys.argv[1], dtype="float32", max_model_len=64, enforce_eager=True, kv_cache_memory_bytes=64 << 20,
        disable_log_stats=True,
    )  # fmt: skip
    answers = engine.generate(json.load(sys.stdin), SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    print(json.dumps([answer.outputs[0].text for answer in answers]))


if __name__ == "__main__":
    main()
