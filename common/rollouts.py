"""Rollouts in a parquet file: a row for each sample. Written by `launch.py export`, or made elsewhere.

`docs/rollouts.md` is made from `COLUMNS`. pyarrow is imported when a file is opened.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.archive import Group, Key, RecordedStep
from common.errors import ConfigError
from common.wire import Sample

SCHEMA = "1"
META_SCHEMA, META_CONFIG = b"leeway.rollouts", b"leeway.config"
REQUIRED = ("group", "prompt_ids", "response_ids", "behavior_logprobs", "reward")
STEP_COLUMNS = ("step", "place", "trained_at", "staleness_limit", "settings", "digest")  # of a run's own record
MAX_LOGPROB = 1e-3  # rounding

# name: (type, meaning). A list holds one value per token.
COLUMNS: dict[str, tuple[str, str]] = {
    "group": ("int64", "Samples of one prompt have the same number."),
    "attempt": ("int64", "Attempt at the prompt. Absent: 0."),
    "index": ("int64", "Place in the group. Absent: in the order of the rows."),
    "lane": ("string", "`train` or `eval`. Absent: `train`."),
    "prompt": ("int64", "Place of the prompt in its lane's stream."),
    "state": ("string", "What had become of the group: `ready`, `claimed`, `trained`, … (docs/ledger.md)."),
    "reason": ("string", "Why it was dropped."),
    "step": ("int64", "The step that trained it."),
    "abandoned": ("int64", "0, or step of the rollback that gave that step up: such a group is left out."),
    "place": ("int64", "Place of the group in that step's batch."),
    "trained_at": ("int64", "Version of the weights at which it was trained."),
    "staleness_limit": ("int64", "`staleness.max` in force at that step."),
    "settings": ("string", "JSON: live settings of that step."),
    "digest": ("string", "Digest of the weights after that step."),
    "prompt_text": ("string", "`prompt_ids` decoded, special tokens included. Not read back."),
    "response_text": ("string", "`response_ids` decoded. Not read back."),
    "prompt_ids": ("list<int32>", "Token ids of the prompt, exactly as the model saw them."),
    "response_ids": ("list<int32>", "Token ids of the response, the end token included."),
    "behavior_logprobs": (
        "list<float>",
        "Log-probability of each response token under the distribution that it was sampled from.",
    ),
    "behavior_versions": ("list<int64>", "Version of the weights that sampled each response token. Absent: 0."),
    "loss_mask": ("list<bool>", "False on response tokens that the policy did not sample (tools). Absent: all true."),
    "temperature": ("double", "Sampling temperature; 0: the greedy sample of its group (`remax`). Absent: 1."),
    "sampling": ("string", "JSON: all sampling settings."),
    "finish_reason": ("string", "`stop` or `length`. Absent: `stop`."),
    "reward": ("double", "Score of the sample. A sample without one is left out of its group."),
    "reward_parts": ("string", "JSON: parts of the score."),
    "generator": ("string", "Who made it."),
    "fault": ("string", "Why it cannot be trained: it is left out of its group."),
    "timing": ("string", "JSON: seconds."),
}


def arrow_schema(config_text: str | None = None) -> Any:
    """The schema of a file that Leeway writes; ``config_text``: YAML of the run's config."""
    import pyarrow as pa

    kinds = {
        "int64": pa.int64(), "string": pa.string(), "double": pa.float64(), "list<int32>": pa.list_(pa.int32()),
        "list<float>": pa.list_(pa.float32()), "list<int64>": pa.list_(pa.int64()), "list<bool>": pa.list_(pa.bool_()),
    }  # fmt: skip
    metadata = {META_SCHEMA: SCHEMA.encode()} | ({META_CONFIG: config_text.encode()} if config_text else {})
    return pa.schema([(name, kinds[kind]) for name, (kind, _) in COLUMNS.items()], metadata=metadata)


def row_of(s: Sample) -> dict[str, Any]:
    """The columns that a sample itself fills."""
    return {
        "group": s.group, "attempt": s.attempt, "index": s.index,
        "prompt_ids": s.prompt_ids, "response_ids": s.response_ids, "behavior_logprobs": s.behavior_logprobs,
        "behavior_versions": s.behavior_versions, "loss_mask": s.loss_mask if s.loss_mask_runs else None,
        "temperature": s.sampling.get("temperature", 1.0), "sampling": json.dumps(s.sampling),
        "finish_reason": s.finish_reason, "reward": s.reward, "reward_parts": json.dumps(s.reward_parts),
        "generator": s.generator, "fault": s.fault, "timing": json.dumps(s.timing),
    }  # fmt: skip


def config_in(path: Path) -> str | None:
    """The config (YAML) of the run that a file was exported from."""
    text = (_schema_of(path).metadata or {}).get(META_CONFIG)
    return None if text is None else text.decode()


def check_columns(path: Path, *, exact: bool) -> None:
    """What can be told without reading the rows. Raises ConfigError: a column that is needed is missing."""
    there = set(_schema_of(path).names)
    if missing := [name for name in REQUIRED if name not in there]:
        raise ConfigError(f"{path}: no column {', '.join(missing)}; docs/rollouts.md describes the file")
    if exact and not there.issuperset(STEP_COLUMNS):
        raise ConfigError(f"{path}: has rollouts, but not the steps of a run; set replay.mode=offline to train on them")


def _schema_of(path: Path) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_schema(path)
    except (OSError, pa.ArrowException) as e:
        raise ConfigError(f"{path}: not a parquet file ({str(e).splitlines()[0]})") from e


@dataclass(frozen=True)
class _Lists:
    """A column of lists: row i is ``values[starts[i]:starts[i + 1]]``."""

    starts: NDArray[np.int64]
    values: NDArray[Any]

    def __getitem__(self, row: int) -> NDArray[Any]:
        return self.values[self.starts[row] : self.starts[row + 1]]

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.starts)


class Rollouts:
    """A parquet file of rollouts, held in memory (about 10 bytes per token), checked whole when it is opened."""

    def __init__(self, path: Path | str, *, vocab_size: int | None = None) -> None:
        """Raises ConfigError: unreadable, a column missing or of another type, rows that cannot be trained."""
        self.path = Path(path)
        self._table = _read(self.path)
        self._len = self._table.num_rows
        self.left_out: dict[str, int] = {}  # groups by reason
        self.num_faulty = 0  # samples with a fault or without a reward, left out of their groups
        self._read_columns()
        if faults := self._faults(vocab_size):
            raise ConfigError([f"{path}: {fault}" for fault in faults])
        self._rows = self._groups()
        self._steps = self._recorded_steps()

    def complete_groups(self) -> list[Group]:
        """Training groups with a sample to train, by key. Held-out ones, and those that a rollback gave up, are
        counted in ``left_out``."""
        held_out, given_up = self._text("lane") == "eval", self._numbers("abandoned", 0) > 0
        lengths, left_out, found = self._response_ids.lengths, Counter[str](), []
        for key, rows in sorted(self._rows.items()):
            if held_out[rows].any():
                left_out["eval"] += 1
            elif given_up[rows].any():
                left_out["abandoned"] += 1
            else:
                found.append(Group(key, len(rows), int(lengths[rows].max())))
        self.left_out = dict(left_out)
        return found

    def samples(self, key: Key) -> list[Sample]:
        """A group's samples, by index."""
        return [self._sample(row, place) for place, row in enumerate(self._rows[key])]

    def step(self, number: int) -> RecordedStep | None:
        """A recorded step; one between others that left no samples was skipped. None: beyond the last."""
        if number in self._steps:
            return self._steps[number]
        if number > max(self._steps, default=0):
            return None
        return RecordedStep(number, -1, 0, False, {}, "", ())

    def outline(self) -> list[tuple[int, str, bool, bool]]:
        """(step, why it was not applied, applied, payloads kept), in order. Each step makes one version; a rollback,
        which leaves no samples, makes one more."""
        found: list[tuple[int, str, bool, bool]] = []
        for expected, (_, s) in enumerate(sorted(self._steps.items())):
            if s.version != expected:
                return [*found, (s.step - 1, "rollback", False, True)]
            found.append((s.step, "", True, True))
        return found

    # ------------------------------------------------------------ reading
    def _read_columns(self) -> None:
        self._prompt_ids, self._response_ids = self._lists("prompt_ids"), self._lists("response_ids")
        self._logprobs = self._lists("behavior_logprobs")
        self._versions, self._masks = self._lists("behavior_versions"), self._lists("loss_mask")
        self._group, self._attempt = self._numbers("group", 0), self._numbers("attempt", 0)
        self._index = self._numbers("index", -1)
        self._reward = self._numbers("reward", np.nan)
        self._temperature = self._numbers("temperature", 1.0)

    def _numbers(self, name: str, default: float) -> NDArray[Any]:
        kind = np.float64 if COLUMNS[name][0] == "double" else np.int64
        if name not in self._table.column_names:
            return np.full(self._len, default, dtype=kind)
        return self._table[name].fill_null(default).to_numpy().astype(kind)  # type: ignore[no-any-return]

    def _text(self, name: str) -> NDArray[Any]:
        """Nulls are empty."""
        if name not in self._table.column_names:
            return np.full(self._len, "", dtype=object)
        return np.array([v or "" for v in self._table[name].to_pylist()], dtype=object)

    def _lists(self, name: str) -> _Lists:
        if name not in self._table.column_names:
            return _Lists(np.zeros(self._len + 1, dtype=np.int64), np.zeros(0))
        column = self._table[name].combine_chunks()
        lengths = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
        values = column.flatten()  # a null has no values
        if values.null_count:
            raise ConfigError(f"{self.path}: {name}: has a null among the tokens of a row")
        values = values.to_numpy(zero_copy_only=False)
        return _Lists(np.concatenate([[0], np.cumsum(lengths)]), values)

    def _faults(self, vocab_size: int | None) -> list[str]:
        """What makes the file unfit, with the first row of each kind."""
        n = self._response_ids.lengths
        faults = []

        def refuse(bad: NDArray[np.bool_], what: str) -> None:
            if bad.any():
                first = int(np.flatnonzero(bad)[0])
                faults.append(f"row {first}: {what}" + (f" ({int(bad.sum())} rows)" if bad.sum() > 1 else ""))

        refuse(n == 0, "response_ids is empty")
        refuse(self._prompt_ids.lengths == 0, "prompt_ids is empty")
        refuse(self._logprobs.lengths != n, "behavior_logprobs has another length than response_ids")
        for name, lists in (("loss_mask", self._masks), ("behavior_versions", self._versions)):
            refuse((lists.lengths != n) & (lists.lengths != 0), f"{name} has another length than response_ids")
        bound = vocab_size or 1 << 31
        for name, lists in (("prompt_ids", self._prompt_ids), ("response_ids", self._response_ids)):
            out = (lists.values < 0) | (lists.values >= bound)
            refuse(_any_in_row(lists, out), f"{name} has a token outside the vocabulary of {bound}")
        if faults:
            return faults
        sampled = np.concatenate([self._mask(row) for row in range(self._len)]) if self._len else np.zeros(0, bool)
        bad = ~(self._logprobs.values <= MAX_LOGPROB) | ~np.isfinite(self._logprobs.values)  # true for NaN
        refuse(_any_in_row(self._logprobs, bad & sampled), "behavior_logprobs is not finite, or above 0")
        refuse(_any_in_row(self._versions, self._versions.values < 0), "behavior_versions has a negative version")
        refuse(~(self._temperature >= 0), "temperature is below 0")
        return faults

    def _groups(self) -> dict[Key, NDArray[np.int64]]:
        """Rows of each group that can be trained, by index."""
        sound = (self._text("fault") == "") & np.isfinite(self._reward)
        self.num_faulty = int((~sound).sum())
        order = np.lexsort((np.arange(self._len), self._index, self._attempt, self._group))
        order = order[sound[order]]
        keys = np.stack([self._group[order], self._attempt[order]], axis=1)
        cuts = np.flatnonzero((keys[1:] != keys[:-1]).any(axis=1)) + 1
        return {(int(self._group[r[0]]), int(self._attempt[r[0]])): r for r in np.split(order, cuts) if len(r)}

    def _recorded_steps(self) -> dict[int, RecordedStep]:
        if not set(STEP_COLUMNS) <= set(self._table.column_names):
            return {}
        columns = {name: self._table[name].to_pylist() for name in STEP_COLUMNS}
        states = self._text("state")
        batches: dict[int, list[tuple[int, Key]]] = {}
        first: dict[int, int] = {}
        for key, rows in self._rows.items():
            row = int(rows[0])
            if states[row] == "trained" and columns["step"][row] is not None:
                batches.setdefault(columns["step"][row], []).append((columns["place"][row], key))
                first[columns["step"][row]] = row
        return {
            step: RecordedStep(
                step, columns["trained_at"][first[step]], columns["staleness_limit"][first[step]], True,
                json.loads(columns["settings"][first[step]]), columns["digest"][first[step]],
                tuple(key for _, key in sorted(batch)),
            )
            for step, batch in sorted(batches.items())
        }  # fmt: skip

    def _mask(self, row: int) -> NDArray[np.bool_]:
        mask = self._masks[row]
        return mask.astype(bool) if len(mask) else np.ones(self._response_ids.lengths[row], dtype=bool)

    def _sample(self, row: int, place: int) -> Sample:
        row = int(row)
        ids = self._response_ids[row]
        index = int(self._index[row])
        sampling = json.loads(self._value("sampling", row) or "{}")
        reward = float(self._reward[row])
        return Sample(
            group=int(self._group[row]), attempt=int(self._attempt[row]), index=place if index < 0 else index,
            prompt_ids=self._prompt_ids[row].astype(np.int32), response_ids=ids.astype(np.int32),
            behavior_logprobs=self._logprobs[row].astype(np.float32), spans=_spans(self._versions[row], len(ids)),
            sampling={**sampling, "temperature": float(self._temperature[row])},
            finish_reason=self._value("finish_reason", row) or "stop", reward=reward if np.isfinite(reward) else None,
            generator=self._value("generator", row) or "", loss_mask_runs=_runs(self._masks[row]),
            reward_parts=json.loads(self._value("reward_parts", row) or "{}"),
            timing=json.loads(self._value("timing", row) or "{}"), fault=self._value("fault", row),
        )  # fmt: skip

    def _value(self, name: str, row: int) -> Any:
        return self._table[name][row].as_py() if name in self._table.column_names else None


def _read(path: Path) -> Any:
    """The known columns of a file, in their types."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        check_columns(path, exact=False)
        there = set(pq.read_schema(path).names)
        known = [name for name in COLUMNS if name in there and not name.endswith("_text")]
        table = pq.read_table(path, columns=known)
        kinds = arrow_schema()
        wanted = [_large(kinds.field(name).type) for name in known]
        columns = [table[name].cast(kind) for name, kind in zip(known, wanted, strict=True)]
        return pa.table(dict(zip(known, columns, strict=True)))
    except (OSError, pa.ArrowException) as e:
        raise ConfigError(f"{path}: cannot be read as rollouts ({str(e).splitlines()[0]})") from e


def _large(kind: Any) -> Any:
    """Lists whose offsets have 64 bits."""
    import pyarrow as pa

    return pa.large_list(kind.value_type) if pa.types.is_list(kind) else kind


def _any_in_row(lists: _Lists, bad: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """[rows]: whether a value of the row is bad."""
    rows = np.repeat(np.arange(len(lists.starts) - 1), lists.lengths)
    return np.bincount(rows[bad], minlength=len(lists.starts) - 1) > 0


def _spans(versions: NDArray[np.int64], num_tokens: int) -> tuple[tuple[int, int, int], ...]:
    if not len(versions):
        return ((0, 0, num_tokens),)
    edges = [0, *(np.flatnonzero(versions[1:] != versions[:-1]) + 1).tolist(), num_tokens]
    return tuple((int(versions[a]), a, b) for a, b in pairwise(edges))


def _runs(mask: NDArray[Any]) -> tuple[int, ...]:
    """Run lengths that begin with sampled tokens; () if all are, or nothing is said."""
    flags = [bool(m) for m in mask]
    if all(flags):
        return ()
    runs, value = [0], True
    for flag in flags:
        if flag is not value:
            runs.append(0)
            value = flag
        runs[-1] += 1
    return tuple(runs)


def table_of(rows: Iterable[dict[str, Any]], schema: Any) -> Any:
    """Rows of ``COLUMNS`` (absent: null) as an Arrow table."""
    import pyarrow as pa

    rows = list(rows)
    return pa.table({f.name: pa.array([r.get(f.name) for r in rows], type=f.type) for f in schema}, schema=schema)
