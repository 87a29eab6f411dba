"""Simulated generators and learners: they speak the real protocol over real sockets and sample nothing."""

from __future__ import annotations

import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable

import numpy as np

from common.errors import WireError
from common.sockets import Dealer
from common.wire import GENERATOR_OPS, Sample, decode, encode, encode_sample

RESEND_S = 1.0


def make_sample(group=0, attempt=0, index=0, *, num_tokens=6, version=0, **changes):
    """A valid sample whose tokens say which one it is."""
    ids = np.full(num_tokens, 3, dtype=np.int32)
    fields = dict(
        group=group, attempt=attempt, index=index, prompt_ids=np.arange(1, 5, dtype=np.int32), response_ids=ids,
        behavior_logprobs=np.full(num_tokens, -0.5, dtype=np.float32), spans=((version, 0, num_tokens),),
        sampling={"temperature": 1.0, "top_p": 1.0, "top_k": -1}, finish_reason="stop", reward=float(index % 2),
        generator="simulated",
    )  # fmt: skip
    return Sample(**{**fields, **changes})


class SimulatedGenerator:
    """A thread that answers each lease with made-up samples after ``delay_s``.

    ``only``: the indices it ever finishes. Keeps what was acknowledged in ``acked`` and sends the rest
    again, like a real one.
    """

    def __init__(
        self, address: Callable[[], str | None], run_id: str, name: str, *, version=0, capacity=64, delay_s=0.0,
        make: Callable[..., Sample] = make_sample, duplicate=1, only: set[int] | None = None,
    ):  # fmt: skip
        self.name, self.version, self.capacity, self.duplicate = name, version, capacity, duplicate
        self.acked: set[tuple[int, int, int]] = set()
        self.seen: Counter[str] = Counter()
        self.wait_reasons: list[str] = []
        self.cancelled: list[tuple[int, int, str]] = []
        self.paused = threading.Event()  # set: leases are taken, nothing is made
        self._address, self._run_id, self._delay_s, self._make = address, run_id, delay_s, make
        self._only = only
        self._incarnation = uuid.uuid4().hex
        self._unacked: dict[tuple[int, int, int], tuple[list[bytes], float]] = {}
        self._due: list[tuple[float, int, int, int]] = []
        self._reported = time.time()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self, *, bye=False):
        self._bye = bye
        self._stop.set()
        self._thread.join(10)
        assert not self._thread.is_alive()

    _bye = False

    def _run(self):
        num_dials, dealer, address, heard_at, welcome = 0, None, None, 0.0, False
        beat_at = 0.0
        while not self._stop.is_set():
            now = time.monotonic()
            if dealer is None or now - heard_at > 2.0 or self._address() not in (address, None):
                if dealer is not None:
                    dealer.close()
                address = self._address()
                if address is None:
                    self._stop.wait(0.05)
                    continue
                num_dials += 1
                dealer = Dealer(address, f"{self.name}/{self._incarnation}/{num_dials}".encode())
                dealer.send(
                    encode(
                        "hello", run=self._run_id, name=self.name, incarnation=self._incarnation, version=self.version
                    )
                )
                heard_at, welcome = now, False
            frames = dealer.receive(0.01)
            if frames is not None:
                heard_at = time.monotonic()
                op, fields, _ = decode(frames, GENERATOR_OPS)
                self.seen[op] += 1
                if op == "welcome":
                    welcome, beat_at = True, 0.0
                    for key, (again, _) in self._unacked.items():
                        dealer.send(again)
                        self._unacked[key] = (again, time.monotonic())
                self._on_message(op, fields)
                if op == "refused" and fields["reason"] == "unknown_generator":
                    heard_at = -1e9
                if frames is not None and op != "welcome":
                    continue
            if not welcome:
                continue
            now = time.monotonic()
            if now >= beat_at:
                beat_at = now + 0.1
                self._heartbeat(dealer)
            if not self.paused.is_set():
                self._work(dealer, now)
        if dealer is not None:
            if self._bye:
                dealer.send(encode("bye"))
            dealer.close(linger_s=1.0 if self._bye else 0.0)

    def _heartbeat(self, dealer):
        until = time.time()
        frames = encode(
            "heartbeat",
            version=self.version,
            capacity=self.capacity,
            progress=[],
            sampling=[[self._reported, until]],
            stats={"until": until, "tokens": 0, "idle_ratio": 0.0, "running": 1},
        )
        self._reported = until
        dealer.send(frames)

    def _on_message(self, op, fields):
        if op == "lease":
            for index in fields["indices"] if self._only is None else self._only & set(fields["indices"]):
                key = (fields["group"], fields["attempt"], index)
                if key not in self._unacked and not any(item[1:] == key for item in self._due):
                    self._due.append((time.monotonic() + self._delay_s, *key))
        elif op == "acks":
            for key in map(tuple, fields["keys"]):
                if self._unacked.pop(key, None) is not None:
                    self.acked.add(key)
        elif op == "cancel":
            lease = (fields["group"], fields["attempt"])
            self.cancelled.append((*lease, fields["reason"]))
            self._due = [item for item in self._due if item[1:3] != lease]
            self._unacked = {k: v for k, v in self._unacked.items() if k[:2] != lease}
        elif op == "wait":
            self.wait_reasons.append(fields["reason"])

    def _work(self, dealer, now):
        due = [item for item in self._due if item[0] <= now]
        self._due = [item for item in self._due if item[0] > now]
        for _, group, attempt, index in due:
            frames = encode_sample(self._make(group, attempt, index, version=self.version))
            self._unacked[group, attempt, index] = (frames, now)
            for _ in range(self.duplicate):
                dealer.send(frames)
        for key, (frames, sent_at) in list(self._unacked.items()):
            if now - sent_at > RESEND_S:
                self._unacked[key] = (frames, now)
                dealer.send(frames)


def raw_answers(address, identity, messages, *, until, timeout_s=5.0):
    """Send raw frames from a bare socket; the (op, fields) that come back, up to one for which ``until`` holds."""
    dealer, found = Dealer(address, identity), []
    try:
        for frames in messages:
            dealer.send(frames)
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            frames = dealer.receive(0.2)
            if frames is None:
                continue
            try:
                op, fields, _ = decode(frames, GENERATOR_OPS)
            except WireError:
                continue
            found.append((op, fields))
            if until(op, fields):
                return found
        raise AssertionError(f"no answer in {timeout_s} s: {found}")
    finally:
        dealer.close()
