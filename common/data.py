"""Prompt rows in verl's columns, from JSONL, parquet or a procedural task; checked before work starts.

A row is ``{"data_source": str, "prompt": [{"role": str, "content": str}, …], "reward_model":
{"ground_truth": …}, …}``; other columns (``ability``, ``extra_info``) travel along. Files are read
whole once, to check every row; after that rows are read when asked for.
"""

from __future__ import annotations

import json
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from common.answers import scoring_fault
from common.config import Config
from common.errors import ConfigError, WireError
from common.tasks import Row, Split, Task, get_task
from common.wire import pack, unpack

MAX_FAULTS = 20  # rows reported one by one; the others are counted
MAX_OF_KIND = 3
_ROLES = ("system", "user", "assistant", "tool", "developer")


class Rows(Protocol):
    """A finite list of prompt rows."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> Row: ...


def open_rows(config: Config, split: Split, *, scored: bool = False) -> Rows:
    """The rows of a split as the config names them; no held-out data is an empty list.

    scored: a row that no built-in reward can score is at fault too.

    Raises:
        ConfigError: unknown task; unreadable file; each bad row as ``file:line: what; remedy``.
    """
    data = config.data
    if data.task:
        size = None if split == "train" else data.val_size
        return TaskRows(get_task(data.task), split, config.run.seed, size)
    files = as_list(data.train_files if split == "train" else data.val_files)
    rows = open_files(files, _scored_row_fault if scored else row_fault)
    return Head(rows, data.val_size) if split == "val" else rows


def as_list(files: list[str] | str | None) -> list[str]:
    return [files] if isinstance(files, str) else list(files or [])


def open_files(paths: list[str], fault_of: Callable[[Any], str | None] | None = None) -> Rows:
    """Read and check all files, row by row with ``fault_of`` (default: ``row_fault``).

    Raises:
        ConfigError: every fault of every file (of a great many, the first and their number).
    """
    faults: list[str] = []
    parts: list[Rows] = []
    for path in paths:
        before = len(faults)
        if Path(path).is_dir():
            faults.append(f"{path}: is a folder; name its files, as a list")
            continue
        try:
            part = _open_file(path, faults, fault_of or row_fault)
        except OSError as e:
            faults.append(f"{path}: cannot be read ({e.strerror or e}); check data.train_files and data.val_files")
            continue
        if len(part) == 0 and len(faults) == before:
            faults.append(f"{path}: has no rows; remove it from the config or fill it")
        parts.append(part)
    if faults:
        raise ConfigError(_few(faults))
    return parts[0] if len(parts) == 1 else Chain(parts)


def _few(faults: list[str]) -> list[str]:
    """Of each kind the first, and no more than can be read; the others are counted."""
    of_kind: Counter[str] = Counter()
    shown: list[str] = []
    for fault in faults:
        kind = fault.partition(": ")[2]
        of_kind[kind] += 1
        if of_kind[kind] <= MAX_OF_KIND and len(shown) < MAX_FAULTS:
            shown.append(fault)
    left = len(faults) - len(shown)
    return [*shown, f"… and {left} more bad rows"] if left else shown


def row_fault(row: Any) -> str | None:
    """What is wrong with a row and what to do, or None."""
    if not isinstance(row, dict):
        return f"a {type(row).__name__}, not an object; write one JSON object per line"
    source = row.get("data_source")
    if not isinstance(source, str) or not source:
        return "data_source is missing or not a string; name the data set, it chooses the reward"
    fault = _prompt_fault(row.get("prompt"))
    if fault:
        return fault
    model = row.get("reward_model")
    if not isinstance(model, dict) or model.get("ground_truth") is None:
        return 'reward_model.ground_truth is missing; add "reward_model": {"ground_truth": …}'
    if not isinstance(row.get("extra_info", {}), dict | None):
        return "extra_info is not an object; remove it or make it one"
    return _transport_fault(row)


def _scored_row_fault(row: Any) -> str | None:
    """``row_fault``, or why no built-in reward can score the row."""
    fault = row_fault(row)
    if fault:
        return fault
    unscored = scoring_fault(row["data_source"], row["reward_model"]["ground_truth"])
    return unscored[1] if unscored else None


def _prompt_fault(prompt: Any) -> str | None:
    if not isinstance(prompt, list) or not prompt:
        return 'prompt is not a list of chat messages; write [{"role": "user", "content": "…"}]'
    for i, message in enumerate(prompt):
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            return f"prompt[{i}].role is missing or unknown; use one of {', '.join(_ROLES)}"
        if not isinstance(message.get("content"), str):
            return f"prompt[{i}].content is missing or not a string; only text prompts are supported"
    return None if any(m["content"] for m in prompt) else "prompt is empty; give it some text"


def _transport_fault(row: Row) -> str | None:
    try:
        unpack(pack(row))
    except (TypeError, ValueError, OverflowError, WireError) as e:
        return f"cannot be sent to a generator ({e}); use plain strings, numbers, lists and objects"
    return None


# ---------------------------------------------------------------- kinds of rows
@dataclass(frozen=True)
class TaskRows:
    """Rows of a procedural task."""

    task: Task
    split: Split
    seed: int
    size: int | None = None  # at most so many

    def __len__(self) -> int:
        n = self.task.num_rows(self.split)
        return n if self.size is None else min(n, self.size)

    def __getitem__(self, i: int) -> Row:
        return self.task.row(self.split, i, seed=self.seed)


@dataclass(frozen=True)
class Head:
    """The first rows of another list."""

    rows: Rows
    size: int

    def __len__(self) -> int:
        return min(self.size, len(self.rows))

    def __getitem__(self, i: int) -> Row:
        return self.rows[i]


class Chain:
    """Lists of rows, one after the other."""

    def __init__(self, parts: list[Rows]) -> None:
        self._parts = parts
        self._ends = list(accumulate(len(p) for p in parts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, i: int) -> Row:
        part = bisect_right(self._ends, i)
        return self._parts[part][i - (self._ends[part - 1] if part else 0)]


class JsonLines:
    """A JSONL file, of which only the places of its rows are kept in memory."""

    def __init__(self, path: str, faults: list[str], fault_of: Callable[[Any], str | None]) -> None:
        self._path = path
        self._places = array("Q")
        place = 0
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    fault = _line_fault(line, fault_of)
                    if fault:
                        faults.append(f"{path}:{number}: {fault}")
                    self._places.append(place)
                place += len(line)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, i: int) -> Row:
        with open(self._path, "rb") as file:
            file.seek(self._places[i])
            return json.loads(file.readline())  # type: ignore[no-any-return]


def _line_fault(line: bytes, fault_of: Callable[[Any], str | None]) -> str | None:
    try:
        return fault_of(json.loads(line))
    except (ValueError, RecursionError) as e:
        return f"not valid JSON ({e}); write one JSON object per line"


class Parquet:
    """A parquet file, kept as Arrow columns."""

    def __init__(self, path: str, faults: list[str], fault_of: Callable[[Any], str | None]) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            self._table = pq.read_table(path)
        except pa.ArrowException as e:
            faults.append(f"{path}: not a parquet file ({str(e).splitlines()[0]}); JSONL must be named .jsonl or .json")
            self._table = pa.table({"nothing": pa.array([], pa.int64())})
            return
        for number, row in enumerate(self._iterate(), start=1):
            fault = fault_of(row)
            if fault:
                faults.append(f"{path}:{number}: {fault}")

    def _iterate(self) -> Iterator[Row]:
        for batch in self._table.to_batches(max_chunksize=1024):
            yield from batch.to_pylist()

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, i: int) -> Row:
        return self._table.slice(i, 1).to_pylist()[0]  # type: ignore[no-any-return]


def _open_file(path: str, faults: list[str], fault_of: Callable[[Any], str | None]) -> Rows:
    kind = Path(path).suffix.lower()
    return (JsonLines if kind in (".jsonl", ".json", ".ndjson") else Parquet)(path, faults, fault_of)
