"""The ledger's file: opened by one broker at a time, checked, and only if it belongs to this run."""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from broker.schema import SCHEMA, SCHEMA_VERSION
from common.errors import LedgerError

PAGE_BYTES = 16384
LOG_BYTES = 32 << 20  # the write-ahead log is carried over into the file once it is so large


class HeldError(LedgerError):
    """Another process has the ledger."""


class Database:
    """An open ledger file and its lock."""

    def __init__(self, path: Path, *, identity: dict[str, Any], fsync: bool) -> None:
        """Opens or creates the file.

        Raises:
            LedgerError: another broker has it; it is damaged; of another config; it cannot be written.
        """
        self._path = path
        self._lock = _lock(path)
        try:
            with damage(path):
                self.db = sqlite3.connect(path, isolation_level=None, timeout=5.0)
                self._configure(fsync)
                self._check_identity(identity)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if hasattr(self, "db"):
            self.db.close()
        os.close(self._lock)

    def put(self, name: str, value: Any) -> None:
        self.db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, json.dumps(value)))

    def get(self, name: str) -> Any:
        row = self.db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return None if row is None else json.loads(row[0])

    def _configure(self, fsync: bool) -> None:
        found = self.db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise sqlite3.DatabaseError(found.splitlines()[-1])  # the first may be a heading
        self.db.execute(f"PRAGMA page_size={PAGE_BYTES}")  # of a new file: it holds several payloads
        mode = self.db.execute("PRAGMA journal_mode=WAL").fetchone()[0]
        if mode != "wal":
            raise LedgerError(f"{self._path}: this file system has no write-ahead log; put run.dir on a local disk")
        self.db.execute(f"PRAGMA synchronous={'FULL' if fsync else 'NORMAL'}")
        self.db.execute(f"PRAGMA wal_autocheckpoint={LOG_BYTES // PAGE_BYTES}")

    def _check_identity(self, identity: dict[str, Any]) -> None:
        if self.db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0] == 0:
            with transaction(self.db):
                for statement in SCHEMA.split(";\n"):
                    self.db.execute(statement)
                self.put("schema_version", SCHEMA_VERSION)
                self.put("identity", identity)
        version = self.get("schema_version")
        if version != SCHEMA_VERSION:
            raise LedgerError(
                f"{self._path}: schema version {version}, this Leeway writes {SCHEMA_VERSION}; "
                "continue the run with the Leeway that began it, or choose another run.dir"
            )
        begun: dict[str, Any] = self.get("identity")
        now = json.loads(json.dumps(identity))
        changed = [f"{k}: {begun[k]!r} != {v!r}" for k, v in now.items() if k in begun and begun[k] != v]
        if changed:
            raise LedgerError(
                f"{self._path}: the run began with another config ({'; '.join(changed)}); "
                "restore these values, or choose another run.dir"
            )


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        if db.in_transaction:  # SQLite has not ended it by itself, as it does when the disk is full
            db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")


@contextmanager
def damage(path: Path) -> Iterator[None]:
    """Every way in which SQLite says that a file is not a ledger becomes one clear refusal."""
    try:
        yield
    except (sqlite3.DatabaseError, ValueError, TypeError) as e:
        raise LedgerError(
            f"{path}: the ledger is damaged ({str(e).splitlines()[0]}); nothing was changed. Put back a copy of it, "
            "or move it away together with its -wal and -shm files and start anew (checkpoints are not affected)"
        ) from e


def _lock(path: Path) -> int:
    """Raises LedgerError if another process holds the ledger, or if its folder cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as e:
        raise LedgerError(f"{path}: cannot be written ({e.strerror}); choose another run.dir") from e
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        owner = os.read(handle, 100).decode(errors="replace").strip()
        os.close(handle)
        raise HeldError(
            f"{path}: another broker (pid {owner or 'unknown'}) has this ledger; end it first, or use another run.dir"
        ) from None
    os.truncate(handle, 0)
    os.write(handle, f"{os.getpid()}\n".encode())
    return handle
