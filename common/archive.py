"""The record of a run: its ledger, read and never written. The tables are described in docs/ledger.md.

Reading does not disturb a broker that is at work on the file.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from common.errors import ConfigError, LedgerError

LEDGER = "ledger.sqlite"
READABLE = (1, 2, 3)  # schema versions
Key = tuple[int, int]  # (group, attempt)

# The view that a condition (`--where`) is about: one row for each committed sample, with its fate.
ROLLOUTS = """
SELECT s.grp, s.attempt, s.idx,
       a.lane, a.prompt, a.size, a.state, a.reason, a.step, t.version AS trained_at,
       COALESCE(t.abandoned, 0) AS abandoned,
       s.reward, s.num_tokens, s.num_live_tokens, s.truncated, s.fault,
       s.oldest, s.newest, t.version - s.oldest AS staleness, s.generator, a.held, s.spans,
       EXISTS (SELECT 1 FROM payloads p WHERE p.id = (s.grp << 28) | (s.attempt << 16) | s.idx) AS kept,
       s.crc, (s.grp << 28) | (s.attempt << 16) | s.idx AS payload_id
FROM samples s
JOIN attempts a ON a.grp = s.grp AND a.attempt = s.attempt
LEFT JOIN steps t ON t.step = a.step AND a.state = 'trained'
"""
VALID_CHECKPOINTS = (
    "SELECT DISTINCT step FROM checkpoints WHERE step NOT IN (SELECT step FROM steps WHERE abandoned)"
)
_HEADER = "grp, attempt, idx, crc, num_tokens, num_live_tokens, reward, truncated, oldest, newest, fault"
_HEADER_FIELDS = ("group", "attempt", "index", *_HEADER.split(", ")[3:])


@dataclass(frozen=True)
class RecordedStep:
    """An acknowledged step as it stands in the record."""

    step: int
    version: int  # at which it was trained
    limit: int  # staleness limit in force at its claim
    applied: bool
    settings: dict[str, Any]
    digest: str  # of the weights after it
    keys: tuple[Key, ...]  # its groups, in order


class Group(NamedTuple):
    """A group that can be trained."""

    key: Key
    num_samples: int
    num_tokens: int  # of its longest response


class Archive:
    """An open ledger, read-only."""

    def __init__(self, path: Path | str) -> None:
        """``path``: the SQLite file or the run's folder.

        Raises:
            ConfigError: there is no ledger. LedgerError: it cannot be read.
        """
        self.path = ledger_path(path)
        if not self.path.is_file():
            raise ConfigError(f"{path}: no ledger here ({LEDGER} is missing); give the folder of a run")
        with self._readable():
            uri = f"file:{quote(str(self.path.absolute()))}?mode=ro"
            self._db = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=5.0)
            (version,) = self._db.execute("SELECT value FROM meta WHERE name = 'schema_version'").fetchone()
            if json.loads(version) not in READABLE:
                raise LedgerError(f"{self.path}: schema version {version}, this Leeway reads {READABLE[-1]}")
            view = ROLLOUTS if json.loads(version) > 2 else ROLLOUTS.replace("COALESCE(t.abandoned, 0)", "0")
            self._db.execute(f"CREATE TEMP VIEW rollouts AS {view}")  # a ledger of earlier times has none
            self._db.execute("PRAGMA query_only=1")

    def close(self) -> None:
        self._db.close()

    # ------------------------------------------------------------ samples
    def columns(self) -> list[str]:
        """Of the view ``rollouts``."""
        return [c[0] for c in self._db.execute("SELECT * FROM rollouts LIMIT 0").description]

    def count(self, where: str = "") -> int:
        """Samples for which the condition holds. Raises ConfigError, see ``rows``."""
        [(count,)] = self._ask(f"SELECT COUNT(*) FROM rollouts{_where(where)}", where)
        return int(count)

    def rows(
        self, columns: Sequence[str], where: str = "", *, order: str = "grp, attempt, idx", limit: int | None = None
    ) -> Iterator[tuple[Any, ...]]:
        """Columns of the samples for which the SQL condition holds.

        Raises:
            ConfigError: the condition, a column or the order is not SQL over ``rollouts``.
        """
        sql = f"SELECT {', '.join(columns)} FROM rollouts{_where(where)} ORDER BY {order}\nLIMIT ?"
        yield from self._ask(sql, where or order, (-1 if limit is None else limit,))

    def payload(self, payload_id: int) -> bytes | None:
        """None: it was freed."""
        with self._readable():
            row = self._db.execute("SELECT data FROM payloads WHERE id = ?", (payload_id,)).fetchone()
        return None if row is None else row[0]

    def samples(self, key: Key) -> list[tuple[dict[str, Any], bytes | None]]:
        """(header, payload or None) of a group's samples without a fault, by index. Header: `sample` in
        common/wire.py."""
        with self._readable():
            rows = self._db.execute(
                f"SELECT {_HEADER}, payload_id FROM rollouts "
                "WHERE grp = ? AND attempt = ? AND fault IS NULL ORDER BY idx",
                key,
            ).fetchall()
        return [(header_of(row[:-1]), self.payload(row[-1])) for row in rows]

    def complete_groups(self) -> list[Group]:
        """Training groups that have become ready and whose tokens are there, by key; faulty samples do not count,
        nor do groups of steps that a rollback gave up."""
        with self._readable():
            rows = self._db.execute(
                "SELECT grp, attempt, COUNT(*), MAX(num_tokens) FROM rollouts "
                "WHERE lane = 'train' AND state IN ('ready', 'claimed', 'trained') AND fault IS NULL AND NOT abandoned "
                "GROUP BY grp, attempt HAVING MIN(kept) = 1 ORDER BY 1, 2"
            )
            return [Group((group, attempt), size, longest) for group, attempt, size, longest in rows]

    # ------------------------------------------------------------ steps
    def step(self, number: int) -> RecordedStep | None:
        """None: there is no such row."""
        with self._readable():
            row = self._db.execute(
                "SELECT step, version, staleness_limit, applied, settings, digest, group_keys FROM steps "
                "WHERE step = ?", (number,),
            ).fetchone()  # fmt: skip
            if row is None:
                return None
            step, version, limit, applied, settings, digest, keys = row
            return RecordedStep(
                step, version, limit, bool(applied), json.loads(settings), digest,
                tuple((group, attempt) for group, attempt in json.loads(keys)),
            )  # fmt: skip

    def outline(self) -> list[tuple[int, str, bool, bool]]:
        """(step, why it was not applied, applied, payloads kept) of each step and rollback, in order."""
        with self._readable():
            rows = self._db.execute("SELECT step, reason, applied, payloads_kept FROM steps ORDER BY step")
            return [(step, reason, bool(applied), bool(kept)) for step, reason, applied, kept in rows]

    def checkpoints(self) -> list[int]:
        """Steps of the valid ones that can be gone back to, ascending."""
        with self._readable():
            rows = self._db.execute(f"{VALID_CHECKPOINTS} ORDER BY step")
            return [step for (step,) in rows]

    def abandoned_steps(self) -> set[int]:
        """Steps that rollbacks gave up."""
        with self._readable():
            return {step for (step,) in self._db.execute("SELECT step FROM steps WHERE abandoned")}

    def broker_port(self) -> int:
        """Where the broker listened last."""
        with self._readable():
            row = self._db.execute("SELECT value FROM meta WHERE name = 'port'").fetchone()
        return 0 if row is None else int(json.loads(row[0]))

    def _ask(self, sql: str, what: str, parameters: Sequence[Any] = ()) -> Iterator[tuple[Any, ...]]:
        try:
            yield from self._db.execute(sql, parameters)
        except (sqlite3.OperationalError, sqlite3.ProgrammingError, sqlite3.Warning) as e:
            named = re.search(r'near "(group|index)"', str(e), re.IGNORECASE)
            hint = "; group and index are words of SQL: write grp and idx" if named else ""
            raise ConfigError(f"{what!r}: {e}{hint}. Columns: {', '.join(self.columns())}") from e
        except sqlite3.DatabaseError as e:
            raise LedgerError(f"{self.path}: cannot be read ({e})") from e

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, ValueError, TypeError) as e:
            raise LedgerError(f"{self.path}: not a ledger that can be read ({e}); put back a copy of it") from e


def is_ledger(path: Path) -> bool:
    """Whether a path is a run's folder or an SQLite file, and not a file of rollouts."""
    if path.is_dir():
        return True
    with open(path, "rb") as f:
        return f.read(16) == b"SQLite format 3\0"


def ledger_path(path: Path | str) -> Path:
    """The ledger of a run's folder; a file is taken as it is."""
    return Path(path) / LEDGER if Path(path).is_dir() else Path(path)


def header_of(row: Sequence[Any]) -> dict[str, Any]:
    """The `sample` header of common/wire.py from the columns of the same names, in their order."""
    header = dict(zip(_HEADER_FIELDS, row, strict=True))
    header["truncated"] = bool(header["truncated"])
    return header


def header_columns() -> list[str]:
    """What ``header_of`` wants."""
    return _HEADER.split(", ")


def _where(where: str) -> str:
    return f" WHERE ({where}\n)" if where else ""  # the new line ends a comment
