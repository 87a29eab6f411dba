"""Checkpoints: `checkpoints/step_<N>/`, whole or not there, proven by hashes before they are read.

    step_40/  __0_0.distcp …  .metadata    models, optimizers, RNG (torch.distributed.checkpoint)
              state.json                   step, version, KL controller, progress
              manifest.json                size and SHA-256 of each file; written last

DCP unpickles what it loads, so a checkpoint is trusted input: nothing is opened before its hash.
The latest is the largest step *number* whose manifest holds.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from common.errors import CheckpointError
from common.failpoints import failpoint
from common.logs import LOGGER
from learner.files import fresh_folder, put_in_place, sha256
from learner.models import Models
from learner.ranks import Ranks

SCHEMA = 1
MANIFEST, STATE = "manifest.json", "state.json"
_NAME = re.compile(r"step_(\d+)")
_log = logging.getLogger(LOGGER)


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, *, run_id: str, keep: int, ranks: Ranks) -> None:
        """keep: how many to keep; the newest valid one is never deleted."""
        self.folder, self.run_id, self.keep, self.ranks = folder, run_id, max(1, keep), ranks
        self.abandoned: Sequence[tuple[int, int]] = ()  # (first, last) step that rollbacks gave up: never loaded again

    def save(self, step: int, models: Models, state: dict[str, Any]) -> Path:
        """Write the checkpoint of `step`; it is there when this returns. Older ones beyond `keep` are removed.

        state: JSON values (progress, version, …).
        """
        target = self.folder / f"step_{step}"

        fresh = self.ranks.share(lambda: fresh_folder(target))
        dcp.save(_tensors(models), checkpoint_id=fresh)
        failpoint("learner.checkpoint.tensors")
        self.ranks.share(lambda: self._finish(step, fresh, {**state, "kl_coef": models.kl_controller.value}))
        return target

    def _finish(self, step: int, fresh: Path, state: dict[str, Any]) -> None:
        """Rank 0, once all ranks have written: state and manifest, then put in place."""
        _write_json(fresh / STATE, {**state, "schema": SCHEMA, "run": self.run_id, "step": step})
        files = {p.name: {"bytes": p.stat().st_size, "sha256": sha256(p)} for p in fresh.iterdir()}
        _write_json(fresh / MANIFEST, {"schema": SCHEMA, "files": files})
        failpoint("learner.checkpoint.written")
        put_in_place(fresh, self.folder / f"step_{step}")
        failpoint("learner.checkpoint.renamed")
        self._remove_old(newest=step)

    def steps(self) -> list[int]:
        """Steps that have a folder, ascending; whether it is whole is another question."""
        if not self.folder.is_dir():
            return []
        names = (_NAME.fullmatch(p.name) for p in self.folder.iterdir() if p.is_dir())
        return sorted(int(m.group(1)) for m in names if m)

    def latest(self, *, at_most: int | None = None) -> Path | None:
        """The valid checkpoint of the largest step (≤ `at_most`); a damaged one is passed over, by name."""
        return self.ranks.share(lambda: self._latest(at_most))

    def _latest(self, at_most: int | None) -> Path | None:
        for step in reversed(self.steps()):
            if (at_most is not None and step > at_most) or self._is_given_up(step):
                continue
            path = self.folder / f"step_{step}"
            try:
                verify(path)
                return path
            except CheckpointError as e:
                _log.error("%s; looking for an older checkpoint", e)
        return None

    def position(self) -> tuple[int, int]:
        """(step, version) of the latest checkpoint; (0, 0) without one."""
        path = self.latest()
        if path is None:
            return 0, 0
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        return state["step"], state["version"]

    def load(self, path: Path, models: Models) -> dict[str, Any]:
        """Put a checkpoint into `models`; returns its state.

        Raises:
            CheckpointError: damaged (naming the file), of another schema or run, or of other models.
        """
        self.ranks.share(lambda: verify(path))
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        if state.get("schema") != SCHEMA:
            raise CheckpointError(f"{path}: schema {state.get('schema')}, this program reads {SCHEMA}")
        if state["run"] != self.run_id:
            raise CheckpointError(f"{path}: belongs to run {state['run']!r}, not to {self.run_id!r}")
        tensors = _tensors(models)
        try:
            dcp.load(tensors, checkpoint_id=path)
        except (Exception, CheckpointException) as e:  # a missing key, another shape, …; DCP's is a BaseException
            last = str(e).strip().splitlines()[-1]
            raise CheckpointError(f"{path}: is not of these models ({last})") from e
        for t in models.trainees():
            part = tensors[t.name]
            set_state_dict(t.module, t.optimizer, model_state_dict=part["model"], optim_state_dict=part["optimizer"])
        torch.set_rng_state(tensors["rng"])
        models.kl_controller.value = state["kl_coef"]
        return state

    def _remove_old(self, *, newest: int) -> None:
        """Keep the newest `keep` up to the one just written, which is known to be valid; none that was given up."""
        older = [s for s in self.steps() if s < newest]
        kept = [s for s in reversed(older) if not self._is_given_up(s)][: self.keep - 1]
        for step in set(older) - set(kept):
            shutil.rmtree(self.folder / f"step_{step}", ignore_errors=True)

    def _is_given_up(self, step: int) -> bool:
        return any(first <= step <= last for first, last in self.abandoned)


def verify(path: Path) -> None:
    """Every file is there and is what was written.

    Raises:
        CheckpointError: naming the file.
    """
    try:
        files = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["files"]
    except FileNotFoundError:
        raise CheckpointError(f"{path}: has no {MANIFEST}, so it was never finished") from None
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise CheckpointError(f"{path / MANIFEST}: cannot be read ({e})") from e
    for name, expected in files.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file}: is missing")
        if file.stat().st_size != expected["bytes"] or sha256(file) != expected["sha256"]:
            raise CheckpointError(f"{file}: is damaged (its hash is not the one in {MANIFEST})")
    if extra := {p.name for p in path.iterdir()} - files.keys() - {MANIFEST}:
        raise CheckpointError(f"{path / min(extra)}: does not belong to this checkpoint")


def _tensors(models: Models) -> dict[str, Any]:
    """Model and optimizer of each trainee by full names, and the RNG: ranks draw alike, so one state is all."""
    tensors: dict[str, Any] = {"rng": torch.get_rng_state()}
    for t in models.trainees():
        model, optimizer = get_state_dict(t.module, t.optimizer)
        tensors[t.name] = {"model": model, "optimizer": optimizer}
    return tensors


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
