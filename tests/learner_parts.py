"""What tests of the learner share: a tiny config and models, made-up samples, simulated neighbours."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from common.config import Config
from common.errors import ControlError
from common.loading import load_config
from common.wire import Sample
from learner.checkpoint import Checkpoints
from learner.export import save_weights
from learner.initial import random_toy
from learner.loop import Learner
from learner.models import Models
from learner.ranks import Ranks, join_ranks
from learner.toy import write_toy_folder

BASE = (
    "model.toy=true", "model.dtype=float32", "data.task=reverse_digits", "data.train_batch_size=4", "rollout.n=4",
    "data.max_prompt_length=16", "data.max_response_length=8", "actor.ppo_mini_batch_size=2", "actor.optim.lr=1e-3",
    "actor.use_kl_loss=true", "trainer.save_freq=-1", "trainer.async_save=false", "run.max_steps=100",
    "run.id=test", "trainer.logger=[]",
)  # fmt: skip


@functools.cache
def alone() -> Ranks:
    """This process as the only rank; its process group lives as long as the process."""
    return join_ranks()


def make_config(*overrides: str) -> Config:
    return load_config([], [*BASE, *overrides])


def initial_weights(folder: Path, config: Config) -> Path:
    """A folder with a random toy model, as a first start makes it."""
    write_toy_folder(folder)
    save_weights(folder, random_toy(config))
    return folder


def make_sample(
    rng: np.random.Generator, group: int, index: int, *, version: int = 0, prompt_tokens: int = 6,
    response_tokens: int = 5, **changes: Any,
) -> Sample:  # fmt: skip
    """Random tokens of the toy vocabulary; one version span."""
    fields: dict[str, Any] = {
        "group": group, "attempt": 0, "index": index,
        "prompt_ids": rng.integers(3, 64, prompt_tokens).astype(np.int32),
        "response_ids": rng.integers(3, 64, response_tokens).astype(np.int32),
        "behavior_logprobs": (-4 - 0.3 * rng.random(response_tokens)).astype(np.float32),
        "spans": ((version, 0, response_tokens),),
        "sampling": {"temperature": 1.0, "top_p": 1.0, "top_k": -1},
        "finish_reason": "stop", "reward": float(rng.random() < 0.5), "generator": "simulated",
    }  # fmt: skip
    return Sample(**(fields | changes))


def make_groups(config: Config, seed: int, *, version: int = 0) -> list[Sample]:
    """One batch: groups of one prompt each, responses of 1 to 8 tokens."""
    rng = np.random.default_rng(seed)
    samples = []
    for g in range(config.data.train_batch_size):
        prompt = rng.integers(3, 64, rng.integers(3, 12)).astype(np.int32)
        samples += [
            make_sample(
                rng, seed * 1000 + g, i, version=version, response_tokens=int(rng.integers(1, 9)), prompt_ids=prompt
            )
            for i in range(config.samples_per_group)
        ]
    return samples


@dataclass
class SimulatedClaim:
    step: int
    limit: int
    samples: list[Sample]
    short: bool = False
    settings: dict[str, float] | None = None
    skipped: bool = False


@dataclass
class SimulatedStepped:
    version: int
    checkpoint_wanted: bool = False
    stats: dict[str, Any] = field(default_factory=lambda: {"states": {"ready": 0}, "dropped": {}})


@dataclass
class SimulatedRow:
    step: int
    applied: bool
    settings: dict[str, float]
    digest: str
    claim: SimulatedClaim | None
    restored: int | None = None
    version: int = 0


@dataclass
class SimulatedAttached:
    version: int
    step: int
    epoch: int = 1
    floor: int = 0
    checkpoint: int = -1
    abandoned: tuple[tuple[int, int], ...] = ()


class SimulatedFeed:
    """A broker that hands out batches made by `samples(step, version)` and remembers the rows."""

    def __init__(self, samples: Callable[[int, int], list[Sample] | None], *, limit: int = 2) -> None:
        self.samples, self.limit = samples, limit
        self.version = 0
        self.step_rows: list[SimulatedRow] = []
        self.abandoned: tuple[tuple[int, int], ...] = ()
        self.returned: list[tuple[int, str]] = []
        self.checkpoints: list[int] = []
        self.stop = threading.Event()
        self.num_ahead = 0  # batches claimed while the one before was trained
        self._claims: dict[int, SimulatedClaim | None] = {}

    def attach(self) -> SimulatedAttached:
        return SimulatedAttached(self.version, len(self.step_rows), abandoned=self.abandoned)

    def claim(self, *, step: int, version: int, num_groups: int, on_wait: Any = None) -> SimulatedClaim | None:
        ahead = step - len(self.step_rows) - 1
        assert ahead in (0, 1)
        assert version == self.version + ahead
        if self._claims.get(step) is None:
            self.num_ahead += ahead
            samples = self.samples(step, self.version)
            self._claims[step] = None if samples is None else SimulatedClaim(step, self.limit, samples)
        return self._claims[step]

    def fetch(self, claim: SimulatedClaim) -> list[Sample]:
        return claim.samples

    def acknowledge(
        self,
        *,
        step: int,
        applied: bool,
        reason: str,
        settings: dict[str, float],
        digest: str,
        optimizer_span: list[float],
    ) -> SimulatedStepped:
        claim = self._claims.pop(step)
        assert claim is not None
        assert applied == (reason == "")
        self.step_rows.append(SimulatedRow(step, applied, settings, digest, claim))
        self.version += applied
        return SimulatedStepped(self.version)

    def roll_back(self, *, step: int, who: str = "somebody", lr_factor: float = 1.0) -> None:
        """What the ledger does when somebody decides it."""
        to, step = step, len(self.step_rows) + 1
        self.abandoned += ((to + 1, step - 1),)
        settings = {"lr_factor": lr_factor}
        self.step_rows.append(SimulatedRow(step, False, settings, "", None, restored=to, version=self.version))
        self.version += 1
        self._claims.clear()

    def give_back(self, *, step: int, reason: str) -> None:
        self.returned.append((step, reason))
        self._claims.clear()

    def rows(self, *, after: int) -> list[SimulatedRow]:
        given_up = {step for first, last in self.abandoned for step in range(first, last + 1)}
        return [row for row in self.step_rows[after:] if row.step not in given_up]

    def checkpoint_valid(self, *, step: int, path: str) -> None:
        self.checkpoints.append(step)

    def validate(self, *, step: int, version: int) -> None: ...

    def validations(self) -> list[dict[str, Any]]:
        return []

    def validations_asked(self) -> list[int]:
        return []


class SimulatedPublisher:
    def __init__(self) -> None:
        self.versions: list[int] = []

    def publish(self, version: int, tensors: Iterator[tuple[str, Any]]) -> None:
        assert all(name.startswith(("model.", "lm_head.")) for name, _ in tensors)
        self.versions.append(version)

    def stats(self) -> dict[str, Any]:
        return {"weights/members": 0}


class SimulatedControl:
    def __init__(self) -> None:
        self.away = False
        self.limits: dict[str, Any] = {}
        self.state = "running"

    def limit(self, name: str) -> Any:
        return self.limits.get(name)

    def desired(self) -> str:
        return self.state

    def entries(self, role: str | None = None) -> list[Any]:
        return []

    def set_desired(self, state: str, who: str) -> None:
        if self.away:
            raise ControlError("Redis is away")
        self.state = state

    def update(self, **fields: Any) -> None: ...


class SimulatedWriter:
    def __init__(self) -> None:
        self.lines: dict[int, dict[str, float]] = {}

    def has(self, step: int) -> bool:
        return step in self.lines

    def write(self, step: int, values: dict[str, float]) -> None:
        self.lines[step] = dict(values)


def make_learner(config: Config, models: Models, feed: SimulatedFeed, run_dir: Path, **changes: Any) -> Learner:
    """A learner among simulated neighbours."""
    ranks = changes.get("ranks") or alone()
    parts: dict[str, Any] = {
        "config": config, "ranks": ranks, "models": models, "feed": feed, "publisher": SimulatedPublisher(),
        "control": SimulatedControl(), "writer": SimulatedWriter(), "stop": threading.Event(), "run_dir": run_dir,
        "checkpoints": Checkpoints(
            run_dir / "checkpoints", run_id="test", keep=config.trainer.max_ckpt_to_keep, ranks=ranks
        ),
        "log": logging.getLogger("test"),
    }  # fmt: skip
    return Learner(**(parts | changes))
