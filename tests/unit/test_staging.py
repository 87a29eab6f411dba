"""Staging without vLLM: one buffer for the workers of an engine, and what does not fit."""

from __future__ import annotations

import queue
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import common.buffers
import common.memory
from common.buffers import Buffer, Watermark, copy_out, pack_digests, with_digests
from common.errors import OtherModelError, WeightError
from common.snapshot import SnapshotTransport
from common.weights import encode_manifest, lay_out
from generators.receiving import Layout
from generators.staging import Staging, _Following

TIMEOUT_S = 5.0


class Engine:
    """Two workers' stagings and the learner's end of their transfers."""

    def __init__(self, folder: Path, num_workers: int = 2, device: torch.device | None = None) -> None:
        self.file = folder / "a.weights"
        shared = str(self.file) if num_workers > 1 else ""
        self.workers = [Staging(w, shared, device=device) for w in range(num_workers)]
        self.num_receivers = num_workers if device is not None else 1
        self.transport = SnapshotTransport("127.0.0.1", timeout_s=TIMEOUT_S)
        self.events: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue()
        self.number = 0
        self.groups: list[Any] = []

    def send(self, version: int, value: float, *, buckets: int | None = None) -> tuple[str, dict[str, Any]]:
        """Send a version, or only its first buckets; returns the first worker's event."""
        buffer = Buffer()
        copy_out([("w", torch.full((1000,), value)), ("b", torch.full((7,), value))], buffer, bucket_bytes=1024)
        sealed = with_digests(buffer)
        manifest = replace(sealed, digests=())  # as it is announced
        self.number += 1
        ticket = self.transport.announce(1, self.number)
        for worker in self.workers:
            worker.begin(
                number=self.number, version=version, manifest=encode_manifest(manifest), rank=1,
                world_size=1 + self.num_receivers,
                ticket=[ticket.transport, ticket.host, ticket.port, ticket.prefix], timeout_s=TIMEOUT_S,
                post=lambda op, **fields: self.events.put((op, fields)),
            )  # fmt: skip
        group = self.transport.open_group(ticket, self.num_receivers)
        for index in range(manifest.num_buckets if buckets is None else buckets):
            group.send(buffer.bucket(index))
        for before in self.groups:
            before.close()
        if buckets is not None:
            group.close()
        else:
            group.send(pack_digests(sealed))
        event = self.events.get(timeout=TIMEOUT_S)
        self.groups.append(group)  # closed at once it would cut off the others
        return event


def values(buffer: Buffer) -> set[float]:
    return {x for _, t in buffer.tensors() for x in t.tolist()}


def test_the_first_worker_receives_for_all(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    for version, value in ((0, 1.5), (3, 2.5)):
        op, fields = engine.send(version, value)
        assert (op, fields["worker"]) == ("staged", 0)
        taken = [worker.take(version) for worker in engine.workers]
        assert [values(t) for t in taken] == [{value}, {value}]
        assert taken[0].bytes.data_ptr() != taken[1].bytes.data_ptr()  # two views of one file
        taken[0].bytes[0] ^= 1
        assert torch.equal(taken[0].bytes, taken[1].bytes)
        engine.file.unlink(missing_ok=True)  # as the engine does once all have looked into it
    assert engine.events.empty()


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ({"w": (1000,), "b": (8,)}, r"tensor b: the learner sends \[7\], this engine's model has \[8\]"),
        ({"w": (1000,)}, r"tensor b: the learner sends \[7\], this engine's model has none"),
        ({"w": (1000,), "b": (7,), "c": ()}, r"tensor c: the learner sends none, this engine's model has \[\]"),
    ],
)
def test_another_model_is_refused_before_its_first_byte(model: dict[str, tuple[int, ...]], says: str) -> None:
    manifest = encode_manifest(lay_out([("w", "float32", (1000,)), ("b", "float32", (7,))], 1024))
    assert Layout({"b": (7,), "w": (1000,)}).accept(manifest).num_buckets == 4
    assert Layout().accept(manifest)  # nobody knows
    with pytest.raises(OtherModelError, match=says):
        Layout(model).accept(manifest)


def test_on_the_device_each_worker_has_a_copy_of_its_own(tmp_path: Path) -> None:
    engine = Engine(tmp_path, device=torch.device("cpu"))
    for version, value in ((0, 1.5), (3, 2.5)):
        first = engine.send(version, value)
        second = engine.events.get(timeout=TIMEOUT_S)
        assert {first[0], second[0]} == {"staged"} and {first[1]["worker"], second[1]["worker"]} == {0, 1}
        assert first[1]["digest"] == second[1]["digest"]
        taken = [worker.take(version) for worker in engine.workers]
        assert [values(t) for t in taken] == [{value}, {value}]
        taken[0].bytes[0] ^= 1
        assert not torch.equal(taken[0].bytes, taken[1].bytes)
    assert not engine.file.exists()


def test_what_was_torn_no_worker_loads(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.send(0, 1.5)
    for worker in engine.workers:
        worker.take(0)
    op, fields = engine.send(1, 2.5, buckets=2)
    assert op == "failed" and fields["reason"].startswith("bucket 2 of 4: the learner ended the transfer")
    for worker in engine.workers:
        with pytest.raises(WeightError, match="version 1 is not staged here"):
            worker.take(1)
    assert engine.send(1, 3.5)[0] == "staged"
    assert [values(worker.take(1)) for worker in engine.workers] == [{3.5}, {3.5}]


def test_what_does_not_fit_is_refused_with_both_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = lay_out([("w", "float32", (30_000_000,))], 1 << 20)
    monkeypatch.setattr(common.buffers, "free_bytes", lambda folder=None: 90_000_000)
    with pytest.raises(WeightError, match=r"needs 0\.12 GB of host memory, 0\.09 GB are free"):
        Buffer().prepare(manifest)
    with pytest.raises(WeightError, match=rf"needs 0\.12 GB in {tmp_path}, 0\.09 GB are free"):
        Buffer(tmp_path / "w").prepare(manifest)
    assert not (tmp_path / "w").exists()
    monkeypatch.undo()
    free = common.memory.free_bytes()
    assert free is None or 1 << 20 < common.memory.free_bytes(tmp_path) <= 2 * free


def test_a_tensor_may_come_slowly_as_long_as_it_comes() -> None:
    buffer, timeout_s, steps = Buffer(), 0.75, 20
    copy_out([("w", torch.arange(steps * 1000.0))], buffer, bucket_bytes=4000)
    filled = Watermark()
    following = _Following(buffer, filled, timeout_s)
    start = time.monotonic()
    for step in range(steps):
        time.sleep(0.1)  # all of them: more than the wait for any one of them
        filled.raise_to((step + 1) * 4000)
    assert time.monotonic() - start > 2 * timeout_s
    assert following.result().digests == with_digests(buffer).digests


def test_what_ends_the_digests_is_told() -> None:
    buffer = Buffer()
    copy_out([("w", torch.ones(1000)), ("b", torch.ones(7))], buffer, bucket_bytes=1024)
    stalled = _Following(buffer, filled := Watermark(), 0.05)
    filled.raise_to(1024)
    stalled.join(5)
    with pytest.raises(WeightError, match=r"only 1024 of 4000 bytes of the weights came; none for 0\.1 s"):
        stalled.result()
    torn = _Following(buffer, filled := Watermark(), 5)
    filled.fail("torn")
    with pytest.raises(WeightError, match="torn"):
        torn.result()
