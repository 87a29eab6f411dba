"""Checkpoints: `checkpoints/step_<N>/`, whole or not there, proven by hashes before they are read.

    step_40/  __0_0.distcp …  .metadata    models, optimizers, RNG (torch.distributed.checkpoint)
              state.json                   step, version, KL controller, progress
              manifest.json                size and SHA-256 of each file; written last

DCP unpickles what it loads, so a checkpoint is trusted input: nothing is opened before its hash.
The latest is the largest step *number* whose manifest holds.

A checkpoint is begun (its tensors copied to host memory, which is what the step waits for), written by
a thread while training goes on, and reported once it is in its place. One is in the making at most.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from common.errors import CheckpointError, DeadlineError, FencedError
from common.hashes import MANIFEST, sha256, verify
from common.logs import LOGGER
from learner.files import beside, fresh_folder, put_in_place, replace_file
from learner.kl import AdaptiveKLController
from learner.models import Models
from learner.offload import put_away
from learner.ranks import Ranks
from learner.saving import Stager, at, in_thread, write_tensors

SCHEMA = 1
STATE = "state.json"
EPOCH = "epoch"  # in the folder of checkpoints: whose they are
WRITE_S = 3600.0  # longest time that writing one takes
_NAME = re.compile(r"step_(\d+)")
_LEFTOVER = re.compile(r"\.(step_\d+)\.(new|old)")
_log = logging.getLogger(LOGGER)


@dataclass(frozen=True)
class _Writing:
    """A checkpoint in the making."""

    step: int
    future: Future[None]


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, *, run_id: str, keep: int, ranks: Ranks) -> None:
        """keep: how many to keep; the newest valid one is never deleted."""
        self.folder, self.run_id, self.keep, self.ranks = folder, run_id, max(1, keep), ranks
        self._epoch = -1
        self._writing: _Writing | None = None
        self._stage = Stager()
        self._group: dist.ProcessGroup | None = None  # its own: training's collectives go on beside it
        self.abandoned: Sequence[tuple[int, int]] = ()  # (first, last) step that rollbacks gave up: never loaded again

    def save(self, step: int, models: Models, state: dict[str, Any]) -> Path:
        """Write the checkpoint of `step`; it is there when this returns. Older ones beyond `keep` are removed.

        state: JSON values (progress, version, …).

        Raises:
            CheckpointError: it cannot be written.
        """
        self.begin(step, models, state, copy=False)
        self.finished(wait=True)
        return self.folder / f"step_{step}"

    def begin(self, step: int, models: Models, state: dict[str, Any], *, copy: bool = True) -> None:
        """Have the checkpoint of `step` written by a thread, from a copy that training does not change.

        copy: false if the weights stay as they are until `finished` has said so.
        """
        assert self._writing is None, "one at a time: wait for `finished`"
        at("begin")
        target = self.folder / f"step_{step}"
        fresh = self.ranks.share(lambda: fresh_folder(target))
        at("folder")
        if self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=WRITE_S))
        tensors = _tensors(models)
        tensors = self._stage(tensors) if copy else tensors
        at("staged")
        state = {**state, "kl_coef": models.kl_controller.value, "adapters": _adapters(models)}
        self._writing = _Writing(
            step, in_thread(lambda: self._write(step, fresh, tensors, state), name=f"checkpoint-{step}")
        )

    def finished(self, *, wait: bool = False) -> Path | None:
        """The checkpoint in the making, once it is in its place (told once); `wait` for it if there is one.

        Raises:
            CheckpointError: it cannot be written.
        """
        writing = self._writing
        if writing is None or not self.ranks.share(lambda: wait or writing.future.done()):
            return None
        self._writing = None
        self.ranks.share(lambda: _result(writing))
        _result(writing)  # the other ranks' part ended before rank 0's
        return self.folder / f"step_{writing.step}"

    def _write(self, step: int, fresh: Path, tensors: dict[str, Any], state: dict[str, Any]) -> None:
        """The thread's work on each rank."""
        at("thread")
        assert self._group is not None
        write_tensors(tensors, fresh, self._group)
        at("tensors")
        if self.ranks.first:
            self._finish(step, fresh, state)

    def _finish(self, step: int, fresh: Path, state: dict[str, Any]) -> None:
        """Rank 0, once all ranks have written: state and manifest, then put in place."""
        _write_json(fresh / STATE, {**state, "schema": SCHEMA, "run": self.run_id, "step": step})
        at("state")
        files = {p.name: {"bytes": p.stat().st_size, "sha256": sha256(p)} for p in fresh.iterdir()}
        at("hashes")
        _write_json(fresh / MANIFEST, {"schema": SCHEMA, "files": files})
        at("written")
        self._refuse_if_replaced()
        put_in_place(fresh, self.folder / f"step_{step}", at=at)
        self._remove_old(newest=step)
        at("end")

    def take_over(self, epoch: int) -> None:
        """Be the folder's only writer from now on: a learner of a lower epoch, frozen while it saved, comes too late.

        Raises:
            FencedError: a higher epoch was here.
        """
        self._epoch = epoch
        self.ranks.share(self._take_over)

    def _take_over(self) -> None:
        self._refuse_if_replaced()
        replace_file(self.folder / EPOCH, lambda fresh: fresh.write_text(f"{self._epoch}\n"))

    def _refuse_if_replaced(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / EPOCH
        if file.exists() and (newest := int(file.read_text())) > self._epoch:
            raise FencedError(
                f"{self.folder}: is written by the learner of epoch {newest}; this one has {self._epoch}. "
                f"If there is no other, and the ledger was restored from a copy, remove {file}"
            )

    def tidy(self) -> None:
        """Remove what a crash left behind. One that was just being replaced by its successor gets its name back."""
        self.ranks.share(self._tidy)

    def _tidy(self) -> None:
        for path in sorted(self.folder.glob(".step_*")):
            if (match := _LEFTOVER.fullmatch(path.name)) is None:
                continue
            target = self.folder / match.group(1)
            if match.group(2) == "old" and not target.exists() and (path / MANIFEST).exists():
                os.rename(path, target)
            else:
                shutil.rmtree(path, ignore_errors=True)

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
            if (at_most is not None and step > at_most) or self.is_given_up(step):
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

    def load(self, path: Path, models: Models, *, foreign: bool = False) -> dict[str, Any]:
        """Put a checkpoint into `models`; returns its state.

        foreign: it may be another run's.

        Raises:
            CheckpointError: damaged (naming the file), of another schema or run, or of other models.
        """
        self.ranks.share(lambda: verify(path))
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        if state.get("schema") != SCHEMA:
            raise CheckpointError(f"{path}: schema {state.get('schema')}, this program reads {SCHEMA}")
        if state["run"] != self.run_id and not foreign:
            raise CheckpointError(f"{path}: belongs to run {state['run']!r}, not to {self.run_id!r}")
        if (theirs := state.get("adapters")) != (ours := _adapters(models)):
            raise CheckpointError(
                f"{path}: has {theirs or 'no adapters'}, this run has {ours or 'none'} (base: a digest)"
            )
        tensors = _tensors(models)
        try:
            dcp.load(tensors, checkpoint_id=path)
        except (Exception, CheckpointException) as e:  # a missing key, another shape, …; DCP's is a BaseException
            last = str(e).strip().splitlines()[-1]
            raise CheckpointError(f"{path}: is not of these models ({last})") from e
        for t in models.trainees():
            part = tensors[t.name]
            ours = [{k: v for k, v in group.items() if k != "params"} for group in t.optimizer.param_groups]
            set_state_dict(
                t.module, t.optimizer, model_state_dict=part["model"], optim_state_dict=part["optimizer"],
                options=StateDictOptions(strict=False),  # what is frozen is not in it
            )  # fmt: skip
            for group, options in zip(t.optimizer.param_groups, ours, strict=True):
                group.update(options)  # the config's, also where another run's were saved
            put_away(t.module, t.optimizer)
        torch.set_rng_state(tensors["rng"])
        if isinstance(models.kl_controller, AdaptiveKLController):  # else it is the config's
            models.kl_controller.value = state["kl_coef"]
        return state

    def _remove_old(self, *, newest: int) -> None:
        """Keep the newest `keep` up to the one just written, which is known to be valid; none that was given up.

        One that goes is renamed first: a crash meanwhile leaves nothing that looks like a damaged checkpoint.
        """
        older = [s for s in self.steps() if s < newest]
        kept = [s for s in reversed(older) if not self.is_given_up(s)][: self.keep - 1]
        for step in sorted(set(older) - set(kept)):
            path = self.folder / f"step_{step}"
            gone = beside(path, "new")  # what `tidy` removes
            shutil.rmtree(gone, ignore_errors=True)
            os.rename(path, gone)
            at("retired")
            shutil.rmtree(gone, ignore_errors=True)
            at("removed")

    def is_given_up(self, step: int) -> bool:
        return any(first <= step <= last for first, last in self.abandoned)


def _result(writing: _Writing) -> None:
    """Raises CheckpointError if the checkpoint cannot be written, or what else ended its thread."""
    try:
        writing.future.result(WRITE_S)
    except TimeoutError:
        raise DeadlineError(f"the checkpoint of step {writing.step} to be written", WRITE_S) from None
    except OSError as e:
        raise CheckpointError(
            f"the checkpoint of step {writing.step} cannot be written ({e.strerror}: {e.filename}); is the disk full?"
        ) from e


def _adapters(models: Models) -> dict[str, Any] | None:
    """What adapters are made of, by trainee; they mean nothing beside another base."""
    return {
        t.name: _made_of(t.module, models.base_digests[t.name]) for t in models.trainees() if t.module.lora is not None
    } or None


def _made_of(module: Any, base: str) -> dict[str, Any]:
    lora = module.lora
    names = (name.partition(".lora_A.") for name, _ in module.named_parameters())
    layers = sorted(layer for layer, found, _ in names if found)
    return {"rank": lora.r, "alpha": lora.lora_alpha, "base": base, "layers": layers}


def _tensors(models: Models) -> dict[str, Any]:
    """What is trained of each model, its optimizer, by full names; the RNG: ranks draw alike, so one state is all."""
    tensors: dict[str, Any] = {"rng": torch.get_rng_state()}
    for t in models.trainees():
        model, optimizer = get_state_dict(t.module, t.optimizer)
        frozen = {name for name, p in t.module.named_parameters(remove_duplicate=False) if not p.requires_grad}
        tensors[t.name] = {"model": {n: v for n, v in model.items() if n not in frozen}, "optimizer": optimizer}
    return tensors


def step_of(path: Path) -> int:
    """Raises CheckpointError if it is no checkpoint's name."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise CheckpointError(f"{path}: is no checkpoint of a run; give …/checkpoints/step_N")
    return int(match.group(1))


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
