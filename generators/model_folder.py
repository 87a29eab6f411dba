"""The folder that this host's engine starts from: the learner's own, if it is here, else a copy of its files.

Consumes the registry (where the files lie, their digest, the learner's address). Waits, by name, for
the announcement and for the learner. No weights are read, engines start with dummy ones, except for the base under
`weights.adapters_only`.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

from common.config import Config
from common.control import Control
from common.errors import ConfigError, DeadlineError, Stopped
from common.logs import LOGGER
from common.model_files import digest_of, find_difference, list_files, pull_files
from common.sockets import Dealer
from common.wire import CONTROL_OPS, decode

ANSWER_S = 5.0  # longest wait for one answer; then the learner is looked up again

_log = logging.getLogger(LOGGER)


def model_folder(control: Control, config: Config, run_dir: Path, stop: threading.Event) -> str:
    """A folder with the learner's config and tokenizer; pulled over the control socket where it is not here.

    Raises:
        DeadlineError: no learner announced them, or answered, within ``run.start_timeout_s``. A learner that is in the
            registry may take longer under ``weights.adapters_only``: it announces the base once it has warmed it up.
        WeightError: what the learner sent is not what it announced.
        ConfigError: the model needs code, which does not travel; or the base, of which only adapters will be sent.
        Stopped: when ``stop`` is set.
    """
    deadline_s = config.run.start_timeout_s
    end = time.monotonic() + deadline_s
    path = control.wait_for_model(deadline_s, stop, after_warmup=config.weights.adapters_only)
    digest = control.model_digest()
    there = Path(path)
    if _has_these(there, digest):
        _refuse_without_weights(config, there)
        return path
    if config.weights.adapters_only:
        raise ConfigError(
            f"weights.adapters_only=true: the learner's {path} is not on this host, or has other files, and only "
            "adapters are sent; put it there on this host too, or leave adapters_only out"
        )
    target = run_dir / "model-files" / digest[:16]
    while True:
        address = control.wait_for(
            "learner", deadline_s=max(0.0, end - time.monotonic()), stop=stop,
            why=f"{path} is not on this host, or has other files",
        ).address  # fmt: skip
        try:
            _pull(str(address), target, digest)
            break
        except DeadlineError:
            if stop.is_set():
                raise Stopped("the learner's model files") from None
            if time.monotonic() > end:
                raise
    if there.is_dir():
        _log.warning("%s on this host is not the learner's: %s", there, find_difference(there, list_files(target)))
    _log.info("config and tokenizer of the learner's %s are now in %s", path, target)
    _refuse_code(config, target, path)
    return str(target)


def _has_these(folder: Path, digest: str) -> bool:
    """Whether it is the learner's folder, and not another one that lies at the same place."""
    try:
        return (folder / "config.json").is_file() and digest_of(list_files(folder)) == digest
    except ConfigError:
        return False


def _refuse_without_weights(config: Config, folder: Path) -> None:
    if config.weights.adapters_only and not any((*folder.glob("*.safetensors"), *folder.glob("*.bin"))):
        raise ConfigError(
            f"weights.adapters_only=true: {folder} has no weights of the base on this host (*.safetensors); put them "
            "there, or leave adapters_only out"
        )


def _pull(address: str, target: Path, digest: str) -> None:
    dealer = Dealer(address, f"files/{os.getpid()}/{time.time_ns()}".encode())

    def ask(frames: list[bytes]) -> tuple[str, dict[str, Any], list[bytes]]:
        dealer.send(frames)
        answer = dealer.receive(ANSWER_S)
        if answer is None:
            raise DeadlineError(f"an answer of the learner at {address} about its model files", ANSWER_S)
        return decode(answer, CONTROL_OPS)

    try:
        pull_files(ask, target, digest)
    finally:
        dealer.close()


def _refuse_code(config: Config, folder: Path, path: str) -> None:
    """A model whose config names code of its own needs the folder itself."""
    if config.model.trust_remote_code and "auto_map" in json.loads((folder / "config.json").read_text()):
        raise ConfigError(
            f"model.path={path}: this model comes with code, which never travels; put the folder there on this host too"
        )
