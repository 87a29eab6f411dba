"""``python -m tests.vllm_logprobs FOLDER``: for a JSON list of token-id prompts on stdin what vLLM samples, as JSON
``[[response ids, log-probs], …]``. Float32, temperature 1, no tokenizer."""

import json
import os
import sys

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1"}
os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"}


def main() -> None:
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=sys.argv[1], dtype="float32", max_model_len=128, enforce_eager=True, kv_cache_memory_bytes=64 << 20,
        disable_log_stats=True, skip_tokenizer_init=True, logprobs_mode="processed_logprobs",
    )  # fmt: skip
    prompts = [{"prompt_token_ids": ids} for ids in json.load(sys.stdin)]
    params = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True, logprobs=0, seed=1, detokenize=False)
    answers = []
    for output in engine.generate(prompts, params, use_tqdm=False):
        ids = list(output.outputs[0].token_ids)
        answers.append([ids, [step[t].logprob for t, step in zip(ids, output.outputs[0].logprobs, strict=True)]])
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
