"""The ledger on disk: SQLite with a write-ahead log, one writer, one transaction for many changes.

What is committed survives ``kill -9``; with ``fsync`` also power loss. A lock file keeps a second
broker out. Payloads carry a checksum; the file is checked as a whole when it is opened.
"""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from broker.database import Database, damage, transaction
from broker.records import (
    LANES,
    LIVE,
    Attempt,
    Changes,
    Claim,
    Counters,
    Drops,
    Header,
    Key,
    Snapshot,
    Step,
    Validation,
)
from common.archive import VALID_CHECKPOINTS
from common.config import MAX_ATTEMPTS, MAX_GROUP_SAMPLES
from common.errors import LedgerError
from common.failpoints import failpoint

MAX_INDEX, MAX_ATTEMPT = MAX_GROUP_SAMPLES - 1, MAX_ATTEMPTS - 1
_INDEX_BITS, _ATTEMPT_BITS = MAX_INDEX.bit_length(), MAX_ATTEMPT.bit_length()
_COUNTERS = [f.name for f in fields(Counters)]
_HEADER = ("crc", "num_tokens", "num_live_tokens", "reward", "truncated", "oldest", "newest", "fault")
_HEADER_VALUES, _KEY_VALUES = itemgetter(*_HEADER), itemgetter("group", "attempt", "index")
_SAMPLE_COLUMNS = ", ".join(("grp", "attempt", "idx", *_HEADER, "generator", "spans"))
_PUT_SAMPLE = f"INSERT INTO samples ({_SAMPLE_COLUMNS}) VALUES ({','.join('?' * 13)})"
_ATTEMPT_COLUMNS = (
    "grp, attempt, lane, prompt, size, state, reason, generator, incarnation, held, num_tokens, step, num_leases"
)

# What can change of an attempt; an update touches only the indexes whose column changes.
_MUTABLE = ("state", "reason", "generator", "incarnation", "held", "num_tokens", "step", "num_leases")
_PUT_ATTEMPT = (
    f"INSERT INTO attempts ({_ATTEMPT_COLUMNS}) VALUES ({','.join('?' * 13)}) ON CONFLICT DO UPDATE SET "
    + ", ".join(f"{name} = excluded.{name}" for name in _MUTABLE)
)
_NUM_BYTES = "SELECT COALESCE(SUM(LENGTH(data)), 0) FROM payloads WHERE id BETWEEN ? AND ?"


@dataclass(frozen=True, slots=True)
class NewSample:
    """A sample to be stored."""

    header: Header
    payload: bytes
    generator: str
    spans: Sequence[tuple[int, int, int]]


class Store:
    """Consumes: changes and payloads. Produces: what was committed. One thread owns it."""

    def __init__(self, path: Path, *, identity: dict[str, Any], fsync: bool = False, keep_bytes: int = 1 << 30) -> None:
        """Opens or creates the ledger at ``path``.

        Args:
            path: the SQLite file; ``<path>.lock`` is held while it is open.
            identity: what must be the same for the life of the run (data, seed, group size).
            fsync: survive power loss too.
            keep_bytes: trained payloads kept beyond what redo needs.

        Raises:
            LedgerError: another broker has it; it is damaged; it belongs to something else.
        """
        self.path = path
        self._keep_bytes = keep_bytes
        self._file = Database(path, identity=identity, fsync=fsync)
        self._db = self._file.db
        try:
            with damage(path):
                self.redo_bytes = self._sum_redo_bytes()  # trained payloads beyond the newest valid checkpoint
                self._counters = Counters(**self._read_counters())
                self._claims = self._read_claims()
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        self._file.close()

    # ------------------------------------------------------------ writing
    def commit(self, changes: Changes | None, samples: Sequence[NewSample] = ()) -> None:
        """Write everything in one transaction; what is returned from here survives a kill.

        Raises:
            LedgerError: the disk is full or fails. The ledger in memory is then ahead of the one on
                disk: end the process.
        """
        if changes is None and not samples:
            return
        failpoint("broker.before_commit")
        try:
            with transaction(self._db):
                self._write_samples(samples)
                if changes is not None:
                    self._write(changes)
        except sqlite3.Error as e:
            raise LedgerError(f"{self.path}: cannot write the ledger ({e}); free disk space, then restart") from e
        failpoint("broker.after_commit")

    def _write(self, changes: Changes) -> None:
        db = self._db
        db.executemany(_PUT_ATTEMPT, map(_row, changes.attempts))
        if ended := [_payload_range(a.key) for a in changes.attempts if a.state in ("dropped", "scored") and a.samples]:
            db.executemany("DELETE FROM payloads WHERE id BETWEEN ? AND ?", ended)
        for step in changes.steps:
            self._write_step(step)
        if changes.epochs:
            db.executemany("INSERT INTO epochs VALUES (?, ?, ?)", changes.epochs)
        if changes.checkpoints:
            db.executemany("INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?)", changes.checkpoints)
        if changes.validations:
            validations = [tuple(asdict(v).values()) for v in changes.validations]
            db.executemany("INSERT OR REPLACE INTO validations VALUES (?, ?, ?, ?, ?, ?)", validations)
        self._write_claims(changes.claims)
        self._write_counters(changes.counters)
        if changes.checkpoints:
            self._free_payloads(max(step for step, _, _ in changes.checkpoints))

    def _write_samples(self, samples: Iterable[NewSample]) -> None:
        rows, payloads = [], []
        for s in samples:
            key = _KEY_VALUES(s.header)
            rows.append((*key, *_HEADER_VALUES(s.header), s.generator, _spans(s.spans)))
            payloads.append((_payload_id(*key), s.payload))
        if rows:
            self._db.executemany(_PUT_SAMPLE, rows)
            self._db.executemany("INSERT INTO payloads VALUES (?, ?)", payloads)

    def _write_step(self, s: Step) -> None:
        self._db.execute(
            "INSERT INTO steps VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0)",
            (s.step, s.epoch, s.version, s.limit, s.applied, s.reason, json.dumps(s.settings), s.digest,
             json.dumps(s.keys), *s.optimizer_span, s.payload_bytes, 1, s.restored),
        )  # fmt: skip
        self.redo_bytes += s.payload_bytes
        if s.restored is not None:
            self._db.execute(
                "UPDATE steps SET abandoned = ? WHERE step > ? AND step < ? AND NOT abandoned",
                (s.step, s.restored, s.step),
            )
            self.redo_bytes = self._sum_redo_bytes()

    def _write_claims(self, claims: tuple[Claim, ...]) -> None:
        if claims == self._claims:
            return
        self._db.execute("DELETE FROM claims")
        rows = [(c.step, c.epoch, c.version, c.limit, c.short, json.dumps(c.keys)) for c in claims]
        self._db.executemany("INSERT INTO claims VALUES (?, ?, ?, ?, ?, ?)", rows)
        self._claims = claims

    def _write_counters(self, counters: Counters) -> None:
        for name in _COUNTERS:
            value = getattr(counters, name)
            if value != getattr(self._counters, name):
                self.put(name, value)
                setattr(self._counters, name, value)

    def _free_payloads(self, checkpoint: int) -> None:
        """Trained payloads that no redo needs any more go, oldest step first, down to ``keep_bytes``."""
        kept = self._db.execute(
            "SELECT step, payload_bytes, group_keys FROM steps WHERE payloads_kept AND step <= ? ORDER BY step DESC",
            (checkpoint,),
        )
        total = 0
        for step, size, keys in kept.fetchall():
            total += size
            if total > self._keep_bytes:
                ranges = [_payload_range((g, a)) for g, a in json.loads(keys)]
                self._db.executemany("DELETE FROM payloads WHERE id BETWEEN ? AND ?", ranges)
                self._db.execute("UPDATE steps SET payloads_kept = 0 WHERE step = ?", (step,))
                failpoint("broker.during_compaction")
        self.redo_bytes = self._sum_redo_bytes()

    def put(self, name: str, value: Any) -> None:
        """One value of ``meta`` (in the caller's transaction, or one of its own)."""
        self._file.put(name, value)

    def get(self, name: str) -> Any:
        return self._file.get(name)

    # ------------------------------------------------------------ reading
    def snapshot(self) -> Snapshot:
        """The ledger as it was last committed.

        Raises:
            LedgerError: its parts contradict each other.
        """
        with damage(self.path):
            counters = Counters(**self._read_counters())
            self._check_sums(counters)
            attached = self._one("SELECT name, incarnation FROM epochs ORDER BY epoch DESC LIMIT 1", ())
            return Snapshot(
                counters=counters,
                live=self._read_live(),
                claims=self._read_claims(),
                validations=[Validation(*row) for row in self._db.execute("SELECT * FROM validations ORDER BY step")],
                counts=self._read_counts(),
                drops=self._read_drops(),
                attached=attached,
                checkpoints=[step for (step,) in self._db.execute(f"{VALID_CHECKPOINTS} ORDER BY step")],
                abandoned=self._read_abandoned(),
            )

    def payloads(self, keys: Iterable[tuple[int, int, int]]) -> list[bytes | None]:
        """The payload of each sample; None where it is gone. Quick for samples of a group one after the other."""
        out: list[bytes | None] = []
        for key, samples in groupby(keys, key=lambda key: key[:2]):
            found = dict(self._payloads(key))
            out += [found.get(index) for *_, index in samples]
        return out

    def _payloads(self, key: Key) -> Iterator[tuple[int, bytes]]:
        """(index, payload) of an attempt's samples."""
        rows = self._db.execute("SELECT id, data FROM payloads WHERE id BETWEEN ? AND ?", _payload_range(key))
        return ((i & MAX_INDEX, data) for i, data in rows)

    def is_sound(self, attempt: Attempt) -> bool:
        """Whether all payloads of an attempt are there and fit their checksums."""
        found = {index: zlib.crc32(data) for index, data in self._payloads(attempt.key)}
        return all(found.get(index) == header["crc"] for index, header in attempt.samples.items())

    def step_after(self, step: int) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
        """The next step that no rollback gave up, ``{step, epoch, version, limit, applied, reason, settings,
        digest, restored}``, and its groups in order, ``[{group, attempt, samples: [header]}]`` (none if nothing
        was trained)."""
        row = self._one(
            "SELECT step, epoch, version, staleness_limit, applied, reason, settings, digest, restored, group_keys "
            "FROM steps WHERE step > ? AND NOT abandoned ORDER BY step LIMIT 1",
            (step,),
        )
        if row is None:
            return None
        names = ("step", "epoch", "version", "limit", "applied", "reason", "settings", "digest", "restored")
        found = dict(zip(names, row, strict=False))
        found["applied"], found["settings"] = bool(found["applied"]), json.loads(found["settings"])
        return found, [self._group(key) for key in _keys(row[-1])] if found["applied"] else []

    def size_bytes(self) -> int:
        """On disk, with its log."""
        log = self.path.with_name(f"{self.path.name}-wal")
        return sum(file.stat().st_size for file in (self.path, log) if file.exists())

    def _group(self, key: Key) -> dict[str, Any]:
        sound = [h for h in self._read_headers(key).values() if h["fault"] is None]
        return {"group": key[0], "attempt": key[1], "samples": sound}

    def _read_headers(self, key: Key) -> dict[int, Header]:
        rows = self._db.execute(
            f"SELECT idx, {', '.join(_HEADER)} FROM samples WHERE grp = ? AND attempt = ? ORDER BY idx", key
        )
        return {index: _header(key, index, values) for index, *values in rows}

    def _read_live(self) -> list[Attempt]:
        marks = ",".join("?" * len(LIVE))
        rows = self._db.execute(
            f"SELECT {_ATTEMPT_COLUMNS} FROM attempts WHERE state IN ({marks}) ORDER BY grp, attempt", LIVE
        )
        live = [Attempt(*row) for row in rows.fetchall()]
        for attempt in live:
            attempt.samples = self._read_headers(attempt.key)
            attempt.num_bytes = self._one(_NUM_BYTES, _payload_range(attempt.key))[0]
        return live

    def _read_counts(self) -> dict[Any, dict[Any, int]]:
        counts: dict[Any, dict[Any, int]] = {lane: {} for lane in LANES}
        for lane, state, n in self._db.execute("SELECT lane, state, COUNT(*) FROM attempts GROUP BY lane, state"):
            counts[lane][state] = n
        return counts

    def _read_drops(self) -> dict[str, Drops]:
        drops: dict[str, Drops] = {}
        rows = self._db.execute(
            "SELECT reason, num_tokens, size, COUNT(*) FROM attempts "
            "WHERE state = 'dropped' AND lane = 'train' GROUP BY reason, num_tokens, size"
        )
        for reason, num_tokens, size, count in rows:
            drops.setdefault(reason, Drops()).add(num_tokens, size, count)
        return drops

    def _read_claims(self) -> tuple[Claim, ...]:
        rows = self._db.execute(
            "SELECT epoch, step, version, staleness_limit, short, group_keys FROM claims ORDER BY step"
        )
        return tuple(Claim(e, step, v, limit, bool(short), _keys(keys)) for e, step, v, limit, short, keys in rows)

    def _read_counters(self) -> dict[str, int]:
        return {name: value for name in _COUNTERS if (value := self.get(name)) is not None}

    def _check_sums(self, counters: Counters) -> None:
        raised = "COALESCE(SUM(applied), 0) + COUNT(restored)"  # by a step, by a rollback
        last, version = self._one(f"SELECT COALESCE(MAX(step), 0), {raised} FROM steps", ())
        if (last, version) != (counters.step, counters.version):
            raise sqlite3.DatabaseError(f"the steps make version {version}, the last is {last}, but counted {counters}")

    def _sum_redo_bytes(self) -> int:
        needed = f"step > (SELECT COALESCE(MAX(step), -1) FROM ({VALID_CHECKPOINTS})) AND NOT abandoned"
        return int(self._one(f"SELECT COALESCE(SUM(payload_bytes), 0) FROM steps WHERE {needed}", ())[0])

    def _read_abandoned(self) -> list[tuple[int, int]]:
        """Runs of steps that follow each other; a later rollback may have given up more around an earlier one."""
        runs: list[tuple[int, int]] = []
        for (step,) in self._db.execute("SELECT step FROM steps WHERE abandoned ORDER BY step"):
            if runs and runs[-1][1] == step - 1:
                runs[-1] = runs[-1][0], step
            else:
                runs.append((step, step))
        return runs

    def _one(self, sql: str, parameters: Sequence[Any]) -> Any:
        return self._db.execute(sql, parameters).fetchone()


def _row(a: Attempt) -> tuple[Any, ...]:
    return (a.group, a.attempt, a.lane, a.prompt, a.size, a.state, a.reason, a.generator, a.incarnation, a.held,
            a.num_tokens, a.step, a.num_leases)  # fmt: skip


def _spans(spans: Sequence[tuple[int, int, int]]) -> str:
    """As JSON."""
    if len(spans) == 1:
        version, start, end = spans[0]
        return f"[[{version},{start},{end}]]"
    return f"[{','.join(f'[{version},{start},{end}]' for version, start, end in spans)}]"


def _header(key: Key, index: int, values: Sequence[Any]) -> Header:
    header = {"group": key[0], "attempt": key[1], "index": index, **dict(zip(_HEADER, values, strict=True))}
    header["truncated"] = bool(header["truncated"])
    return header


def _keys(text: str) -> tuple[Key, ...]:
    return tuple((group, attempt) for group, attempt in json.loads(text))


def _payload_id(group: int, attempt: int, index: int) -> int:
    return group << (_ATTEMPT_BITS + _INDEX_BITS) | attempt << _INDEX_BITS | index


def _payload_range(key: Key) -> tuple[int, int]:
    return _payload_id(*key, 0), _payload_id(*key, MAX_INDEX)
