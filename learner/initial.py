"""Where the initial weights come from: a folder, a random toy model, and a supervised start on top.

The folder with config and tokenizer is announced at once, so that engines start (with dummy
weights) while the learner is still warming up. The folder with the initial weights is what actor,
critic and reference are loaded from, at the first start and at every later one.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from threading import Event
from typing import Any

import torch

from common.config import Config
from common.errors import ConfigError
from common.logs import LOGGER
from learner.export import save_weights
from learner.model import Actor, load_actor, without_dropout
from learner.toy import toy_config, write_toy_folder
from learner.warmup import WarmupResult, lesson_of, warm_up

WEIGHTS = "model.safetensors"
_log = logging.getLogger(LOGGER)


def served_folder(config: Config, run_dir: Path) -> Path:
    """The folder that engines start from: config and tokenizer are there when this returns.

    Raises:
        ConfigError: `model.path` is no folder and no model of the hub.
    """
    if config.model.toy:
        folder = run_dir / "model"
        if not (folder / "config.json").exists():
            write_toy_folder(folder, max_tokens=config.max_sequence_tokens)
        return folder
    return model_folder("model.path", str(config.model.path))


def model_folder(key: str, path: str) -> Path:
    """The folder that `key` names, fetched from the hub if it is none here.

    Raises:
        ConfigError: no folder and no model of the hub.
    """
    folder = Path(path).expanduser()
    return folder.resolve() if folder.is_dir() else _from_hub(key, path)


def load_tokenizer(folder: Path, config: Config) -> Any:
    """Raises ConfigError for a folder without one."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=config.model.trust_remote_code)
    except (OSError, ValueError) as e:
        raise ConfigError(f"model.path={folder}: its tokenizer cannot be loaded ({str(e).splitlines()[0]})") from e


def initial_folder(
    config: Config, run_dir: Path, served: Path, tokenizer: Any, *, stop: Event, on_state: Any = None,
    device: torch.device | str = "cpu",
) -> tuple[Path, WarmupResult | None]:  # fmt: skip
    """The folder with the initial weights, made if this is the first start; the result of a warm-up made now.

    device: where the warm-up trains; the model is there whole, with AdamW (16 bytes per parameter).

    Raises:
        ConfigError: see `load_actor` and `lesson_of`.
        Stopped: `stop` was set during the warm-up.
    """
    if not config.model.toy and config.model.warmup.steps == 0:
        return served, None
    folder = run_dir / "model"
    if (folder / WEIGHTS).exists():
        return folder, None
    actor = (
        random_toy(config) if config.model.toy else load_actor(served, trust_remote_code=config.model.trust_remote_code)
    )
    result = None
    if config.model.warmup.steps > 0:
        result = _warm_up(config, actor.to(device), tokenizer, stop, on_state)
    if folder != served:
        folder.mkdir(parents=True, exist_ok=True)
        for file in served.glob("*.json"):
            if "index" not in file.name:  # of weights in several files
                shutil.copy(file, folder)
        tokenizer.save_pretrained(folder)
    save_weights(folder, actor)
    return folder, result


def random_toy(config: Config) -> Actor:
    from transformers import Qwen2ForCausalLM

    torch.manual_seed(config.run.seed)
    return Actor(without_dropout(Qwen2ForCausalLM(toy_config(max_tokens=config.max_sequence_tokens))))


def _warm_up(config: Config, actor: Actor, tokenizer: Any, stop: Event, on_state: Any) -> WarmupResult:
    options = config.model.warmup

    def on_check(steps: int, score: float, loss: float) -> None:
        if on_state:
            on_state(f"warm-up: step {steps}, score {score:.3f} of {options.target_score:g}")

    _log.info("supervised start: until a sampled score of %g, at most %d steps", options.target_score, options.steps)
    result = warm_up(
        actor, tokenizer, lesson_of(config), options,
        max_new_tokens=config.data.max_response_length, seed=config.run.seed, stop=stop, on_check=on_check,
    )  # fmt: skip
    _log.info(
        "supervised start: %d steps in %.1f s, sampled score %.3f, loss %.3f",
        result.steps, result.time_s, result.score, result.loss,
    )  # fmt: skip
    return result


def _from_hub(key: str, name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as e:
        raise ConfigError(
            f"{key}={name}: no such folder, and not to be had from the hub ({str(e).splitlines()[0]})"
        ) from e
