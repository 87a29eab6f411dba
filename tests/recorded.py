"""Small records made by hand: a ledger and store without sockets, samples of the toy vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from broker.ledger import Ledger
from broker.records import Attempt, Claim, Rules
from broker.store import NewSample, Store
from common.wire import GENERATOR_OPS, Sample, decode, decode_sample, encode_sample
from learner import feed

SETTINGS = {"actor.optim.lr": 1e-3, "actor.kl_loss_coef": 0.001}


def toy_sample(group: int, attempt: int, index: int, *, version: int = 0, **changes: object) -> Sample:
    """Tokens of the toy vocabulary that depend on the key alone."""
    rng = np.random.default_rng([group, attempt, index])
    prompt = np.random.default_rng(group).integers(3, 60, 6).astype(np.int32)
    num = int(rng.integers(2, 9))
    fields: dict = {
        "group": group, "attempt": attempt, "index": index, "prompt_ids": prompt,
        "response_ids": rng.integers(3, 60, num).astype(np.int32),
        "behavior_logprobs": (-4 - 0.3 * rng.random(num)).astype(np.float32),
        "spans": ((version, 0, num),) if version == 0 else ((version - 1, 0, 1), (version, 1, num)),
        "sampling": {"temperature": 1.0, "top_p": 1.0, "top_k": -1}, "finish_reason": "stop",
        "reward": float(rng.random() < 0.5), "generator": "simulated", "reward_parts": {"exact": 1.0},
        "timing": {"generate_s": 0.5},
    }  # fmt: skip
    return Sample(**(fields | changes))


def fresh_sample(group: int, attempt: int, index: int, *, version: int) -> Sample:
    """``toy_sample``, all of it sampled by ``version``."""
    sample = toy_sample(group, attempt, index)
    return replace(sample, spans=((version, 0, len(sample.response_ids)),))


def made_elsewhere(path: Path, rows: int = 4, **changes: Any) -> Path:
    """The least that is needed, in the types that pandas would choose."""
    columns = {
        "group": [i // 2 for i in range(rows)],
        "prompt_ids": [[5, 6]] * rows,
        "response_ids": [[7, 8, 1]] * rows,
        "behavior_logprobs": [[-0.5, -1.0, -0.25]] * rows,
        "reward": [float(i % 2) for i in range(rows)],
    } | changes
    pq.write_table(pa.table({k: v for k, v in columns.items() if v is not None}), path)
    return path


class Recorder:
    """A run whose broker and generators are function calls."""

    def __init__(self, folder: Path, *, B: int = 4, n: int = 4, limit: int = 2, keep_bytes: int = 1 << 30) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.B = folder / "ledger.sqlite", B
        self.store = Store(self.path, identity={"run.seed": 0}, keep_bytes=keep_bytes)
        rules = Rules(group_size=n, batch_size=B, max_attempts=2, lease_timeout_s=10.0, lease_limit_s=100.0)
        self.ledger = Ledger(rules, limit=limit, snapshot=self.store.snapshot())
        self.epoch = self.ledger.attach("learner", "1")

    def lease(self) -> Attempt:
        return self.ledger.lease("simulated", "1", self.ledger.counters.version, 0.0)

    def deliver(self, attempt: Attempt, make: Callable[..., Sample] = toy_sample, *, num: int | None = None) -> None:
        samples = []
        for index in range(attempt.size if num is None else num):
            sample = make(attempt.group, attempt.attempt, index, version=attempt.held)
            _, header, (payload,) = decode(encode_sample(sample), GENERATOR_OPS)
            assert self.ledger.commit("simulated", header, 0.0, len(payload)) == "stored"
            samples.append(NewSample(header, payload, "simulated", sample.spans))
        self.store.commit(self.ledger.take_changes(), samples)

    def claim(self, make: Callable[..., Sample] = toy_sample) -> Claim:
        for _ in range(self.B):
            self.deliver(self.lease(), make)
        c = self.ledger.counters
        return self.ledger.claim(self.epoch, c.step + 1, c.version, self.B)

    def acknowledge(self, claim: Claim, *, applied: bool = True, digest: str | None = None, **changes: object) -> None:
        self.ledger.acknowledge(
            self.epoch, claim.step, applied=applied, reason="" if applied else "nonfinite",
            settings={**SETTINGS, **changes}, digest=f"d{claim.step}" if digest is None else digest,
            optimizer_span=(1.0 * claim.step, claim.step + 0.5),
        )  # fmt: skip
        self.store.commit(self.ledger.take_changes())

    def step(self, **changes: object) -> Claim:
        claim = self.claim()
        self.acknowledge(claim, **changes)
        return claim

    def close(self) -> None:
        self.store.commit(self.ledger.take_changes())
        self.store.close()


class RecorderFeed:
    """The learner's feed, from a Recorder."""

    def __init__(self, recorder: Recorder, *, make: Callable[..., Sample] = toy_sample) -> None:
        self.recorder, self.make, self.digests = recorder, make, []

    def attach(self) -> feed.Attached:
        c = self.recorder.ledger.counters
        return feed.Attached(self.recorder.epoch, c.version, c.step, c.floor, -1)

    def claim(self, *, step: int, version: int, num_groups: int, on_wait: object = None) -> feed.Claim:
        c = self.recorder.claim(self.make)
        live = self.recorder.ledger.live
        groups = tuple(feed.Group(*k, tuple(live[k].sound)) for k in c.keys)
        assert (c.step, c.version) == (step, version)
        self._claim = c
        return feed.Claim(step, version, c.limit, c.short, groups)

    def fetch(self, claim: feed.Claim) -> list[Sample]:
        headers = [h for g in claim.groups for h in g.headers]
        payloads = self.recorder.store.payloads([(h["group"], h["attempt"], h["index"]) for h in headers])
        return [decode_sample(h, p) for h, p in zip(headers, payloads, strict=True)]

    def acknowledge(self, *, step: int, applied: bool, settings: dict, digest: str, **rest: object) -> feed.Stepped:
        assert applied
        self.recorder.acknowledge(self._claim, digest=digest, **settings)
        self.digests.append(digest)
        return feed.Stepped(self.recorder.ledger.counters.version, False, {})

    def checkpoint_valid(self, *, step: int, path: str) -> None: ...

    def rows(self, *, after: int) -> list:
        return []
