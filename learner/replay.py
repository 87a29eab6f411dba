"""Recorded rollouts instead of a broker: feeds with the methods of `learner/feed.py`.

    exact     the record's own steps: same batches, order and live settings; after each step the
              weights must have the digest that the record has
    offline   whatever complete groups there are, in a seeded order, under any config; the
              recorded log-probabilities correct for the distance to the policy that sampled

Where a batch stands depends on seed and step number alone, so a run that is started again goes on
with the next batch. Nothing here waits, and nothing is published.
"""

from __future__ import annotations

import dataclasses
import logging
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any, Protocol

from common import archive
from common.archive import Archive, Key, RecordedStep, is_ledger
from common.config import Config
from common.errors import ReplayError, Stopped, WireError
from common.logs import LOGGER
from common.order import permute
from common.rollouts import Rollouts
from common.wire import Sample, decode_sample
from learner.estimates import GROUP_ESTIMATORS
from learner.feed import Attached, Claim, Group, Stepped, StepRow
from learner.initial import WEIGHTS

_log = logging.getLogger(LOGGER)


class Source(Protocol):
    """Where rollouts come from: a ledger or a parquet file."""

    def complete_groups(self) -> list[archive.Group]: ...

    def samples(self, key: Key) -> list[Sample]: ...

    def step(self, number: int) -> RecordedStep | None: ...

    def outline(self) -> list[tuple[int, str, bool, bool]]: ...


class LedgerRollouts:
    """A run's ledger as a source."""

    def __init__(self, path: Path, *, vocab_size: int | None = None) -> None:
        self._archive, self._vocab_size = Archive(path), vocab_size
        self.complete_groups, self.step = self._archive.complete_groups, self._archive.step
        self.outline, self.close = self._archive.outline, self._archive.close

    def samples(self, key: Key) -> list[Sample]:
        """Raises ReplayError for one that was freed, is damaged, or is of another model."""
        return [self._sample(header, payload) for header, payload in self._archive.samples(key)]

    def _sample(self, header: dict[str, Any], payload: bytes | None) -> Sample:
        name = f"{self._archive.path}: sample {header['group']}/{header['attempt']}/{header['index']}"
        if payload is None:
            raise ReplayError(f"{name}: its tokens were freed; record with a larger ledger.keep_bytes")
        try:
            return decode_sample(header, payload, vocab_size=self._vocab_size)
        except WireError as e:
            raise ReplayError(f"{name} is damaged or not of this model ({e})") from e


class RecordedFeed:
    """What both feeds have in common: a learner that asks, one step after the other, and redoes its own."""

    epoch = 1

    def __init__(self, source: Source, *, start: tuple[int, int], stop: Event) -> None:
        """start: (step, version) of the checkpoint that the learner continues from."""
        self.source, self._stop = source, stop
        self._step, self._version = start
        self._rows: list[StepRow] = []  # since the newest checkpoint
        self._claim: Claim | None = None

    def close(self) -> None:
        if isinstance(self.source, LedgerRollouts):
            self.source.close()

    def attach(self) -> Attached:
        return Attached(self.epoch, self._version, self._step, 0, self._step if self._step else -1)

    def claim(
        self, *, step: int, version: int, num_groups: int, on_wait: Callable[[str], None] | None = None
    ) -> Claim | None:
        """The batch of ``step``; None at the end of the record."""
        if self._stop.is_set():
            raise Stopped("a batch")
        self._claim = claim = self._batch(step, version, num_groups)
        if claim is not None and claim.skipped:
            self._rows.append(StepRow(step, self.epoch, version, False, "skipped", {}, "", claim))
        return claim

    def _batch(self, step: int, version: int, num_groups: int) -> Claim | None:
        raise NotImplementedError

    def fetch(self, claim: Claim) -> list[Sample]:
        """The samples of a batch: groups in order, in each the samples by index."""
        return [s for g in claim.groups for s in self.source.samples((g.group, g.attempt))]

    def acknowledge(
        self, *, step: int, applied: bool, reason: str, settings: dict[str, Any], digest: str,
        optimizer_span: list[float],
    ) -> Stepped:  # fmt: skip
        claim = self._claim
        assert claim is not None and claim.step == step
        self._rows.append(StepRow(step, self.epoch, claim.version, applied, reason, settings, digest, claim))
        self._version += applied
        return Stepped(self._version, False, self.stats())

    def stats(self) -> dict[str, Any]:
        return {}

    def give_back(self, *, step: int, reason: str) -> None:
        """Raises ReplayError: nobody could hand the batch out again."""
        raise ReplayError(f"step {step}: the recorded batch cannot be trained ({reason})")

    def rows(self, *, after: int) -> list[StepRow]:
        return [row for row in self._rows if row.step > after]

    def checkpoint_valid(self, *, step: int, path: str) -> None:
        self._rows = self.rows(after=step)

    def validate(self, *, step: int, version: int) -> None:
        """There are no generators: the held-out prompts are not sampled."""

    def validations_asked(self) -> list[int]:
        return []

    def validations(self) -> list[dict[str, Any]]:
        return []


class ExactFeed(RecordedFeed):
    """The record's own steps, from the first."""

    def __init__(self, source: Source, *, start: tuple[int, int], stop: Event) -> None:
        """Raises ReplayError: the record cannot be replayed whole."""
        super().__init__(source, start=start, stop=stop)
        check_outline(source.outline())
        self._recorded: RecordedStep | None = None
        self.num_equal = start[1]  # the steps before were compared when they were made

    def _batch(self, step: int, version: int, num_groups: int) -> Claim | None:
        self._recorded = r = self.source.step(step)
        if r is None:
            _log.info("replayed: the weights after each of %d steps are those of the record", self.num_equal)
            return None
        groups = tuple(Group(group, attempt, ()) for group, attempt in r.keys) if r.applied else ()
        return Claim(step, version, r.limit, False, groups, settings=r.settings, skipped=not r.applied)

    def acknowledge(self, *, step: int, applied: bool, digest: str, **rest: Any) -> Stepped:
        """Raises ReplayError if the weights are not those of the record."""
        r = self._recorded
        assert r is not None and r.step == step
        if not applied:
            raise ReplayError(f"step {step}: was applied in the record, and is not finite in the replay")
        if digest != r.digest:
            raise ReplayError(
                f"step {step}: the weights after it differ from the record (digest {digest}, recorded {r.digest}); "
                f"{self.num_equal} steps before were equal. Replay to the bit needs the same rollouts, packages, "
                "kind of CPU, ranks and OMP_NUM_THREADS=1"
            )
        self.num_equal += 1
        return super().acknowledge(step=step, applied=applied, digest=digest, **rest)

    def stats(self) -> dict[str, Any]:
        return {"replay/num_equal_steps": self.num_equal}


class OfflineFeed(RecordedFeed):
    """Complete groups in a seeded order, epoch after epoch; an epoch's last batch may be short.

    Versions of the record mean nothing to this run: every token counts as sampled by version 0, and
    no limit of age holds. The recorded log-probabilities say how far the policy is from its sampler.
    """

    def __init__(self, source: Source, config: Config, *, start: tuple[int, int], stop: Event) -> None:
        """Raises ReplayError: there is no group to train."""
        super().__init__(source, start=start, stop=stop)
        self._config = config
        groups = source.complete_groups()
        self.left_out: Counter[str] = Counter(getattr(source, "left_out", {}))
        unfit = {g.key: reason for g in groups if (reason := self._unfit(g.num_samples, g.num_tokens))}
        self.left_out.update(unfit.values())
        self._keys = [g.key for g in groups if g.key not in unfit]
        said = ", ".join(f"{n} {reason}" for reason, n in self.left_out.items()) or "none"
        if not self._keys:
            raise ReplayError(f"{config.replay.rollouts}: no complete training group to train (left out: {said})")
        _log.info("offline: %d groups; left out: %s", len(self._keys), said)
        self._held: dict[Key, list[Sample]] = {}  # of the newest claim
        self._empty = 0  # batches in a row without a sound group

    def _batch(self, step: int, version: int, num_groups: int) -> Claim | None:
        per_epoch = -(-len(self._keys) // num_groups)
        epoch, number = divmod(step - 1, per_epoch)
        last = self._config.trainer.total_epochs
        if last is not None and epoch >= last:
            return None
        self._epoch = epoch
        places = range(number * num_groups, min((number + 1) * num_groups, len(self._keys)))
        keys = [self._keys[self._shuffled(place, epoch)] for place in places]
        self._held.clear()
        groups = tuple(Group(*key, ()) for key in keys if self._is_sound(key, step))
        self._empty = 0 if groups else self._empty + 1
        if self._empty >= per_epoch:
            raise ReplayError(f"{self._config.replay.rollouts}: a whole epoch without a group that can be trained")
        return Claim(step, version, version, len(groups) < num_groups, groups, skipped=not groups)

    def _shuffled(self, place: int, epoch: int) -> int:
        if not self._config.data.shuffle:
            return place
        return permute(place, len(self._keys), f"{self._config.run.seed}/replay/{epoch}")

    def _is_sound(self, key: Key, step: int) -> bool:
        """Whether a group can be trained, seen from its samples; one that cannot is counted and named."""
        try:
            samples = self.source.samples(key)
            reason = self._unsound(samples)
            if reason is None:
                self._held[key] = samples
                return True
        except ReplayError as e:
            reason = "damaged"
            _log.error("%s", e)
        self.left_out[reason] += 1
        _log.warning("step %d: group %d/%d is left out: %s", step, *key, reason)
        return False

    def _unsound(self, samples: list[Sample]) -> str | None:
        """What only the samples themselves can tell of their group."""
        if max(len(s.prompt_ids) for s in samples) > self._config.data.max_prompt_length:
            return "prompt_too_long"
        num_rows = sum(s.sampling.get("temperature") != 0 for s in samples)  # a greedy sample is a baseline
        if self._config.greedy_index is not None and num_rows == len(samples):
            return "no_baseline"
        return self._unfit(num_rows, 0) if num_rows else "single_sample"

    def _unfit(self, num_samples: int, num_tokens: int) -> str | None:
        """Why a group of so many samples, the longest of so many tokens, cannot be trained: a word to count by."""
        algorithm = self._config.algorithm
        if num_tokens > self._config.data.max_response_length:
            return "response_too_long"
        compares = algorithm.adv_estimator in GROUP_ESTIMATORS and not algorithm.allow_single_sample_groups
        return "single_sample" if compares and num_samples < 2 else None

    def fetch(self, claim: Claim) -> list[Sample]:
        """As above; groups are numbered by their place, since two attempts may stand for one prompt."""
        return [
            dataclasses.replace(s, group=number, spans=((0, 0, len(s.response_ids)),))
            for number, g in enumerate(claim.groups)
            for s in self._held.get((g.group, g.attempt)) or self.source.samples((g.group, g.attempt))
            if self._config.greedy_index is not None or s.sampling.get("temperature") != 0
        ]

    def stats(self) -> dict[str, Any]:
        return {"training/epoch": self._epoch + 1, "dropped": dict(self.left_out)}


class NullPublisher:
    """Nobody samples, so nobody is sent weights."""

    def publish(self, version: int, tensors: Any) -> None: ...

    def stats(self) -> dict[str, Any]:
        return {}


def open_replay(config: Config, *, start: tuple[int, int], stop: Event, vocab_size: int | None) -> RecordedFeed:
    """The feed that `replay.rollouts` and `replay.mode` name.

    Raises:
        ReplayError, ConfigError, LedgerError: nothing to replay, or a record that cannot be read.
    """
    path = Path(str(config.replay.rollouts)).expanduser()
    source: Source
    source = (LedgerRollouts if is_ledger(path) else Rollouts)(path, vocab_size=vocab_size)
    if num := getattr(source, "num_faulty", 0):
        _log.warning("%d samples with a fault or without a reward are left out of their groups", num)
    if config.replay.mode == "exact":
        return ExactFeed(source, start=start, stop=stop)
    return OfflineFeed(source, config, start=start, stop=stop)


def take_initial_weights(config: Config, run_dir: Path) -> None:
    """An exact replay starts from the very weights that the recorded run started from, if it kept any."""
    record = Path(str(config.replay.rollouts)).expanduser()
    source, target = (record if record.is_dir() else record.parent) / "model", run_dir / "model"
    if config.replay.mode != "exact" or not is_ledger(record) or not (source / WEIGHTS).is_file() or target.exists():
        return
    fresh = target.with_name("model.tmp")
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.copytree(source, fresh)
    fresh.rename(target)


def check_outline(steps: list[tuple[int, str, bool, bool]]) -> None:
    """Raises ReplayError: no steps; tokens of some were freed; the run was rolled back."""
    if not steps:
        raise ReplayError("the record has no steps to replay; replay.mode=offline trains on its rollouts")
    gone = [step for step, _, applied, kept in steps if applied and not kept]
    if gone:
        raise ReplayError(
            f"the tokens of {len(gone)} steps ({gone[0]}…{gone[-1]}) were freed, so the record cannot be replayed "
            "from its beginning; record with a larger ledger.keep_bytes, or use replay.mode=offline"
        )
    back = [step for step, reason, _, _ in steps if reason == "rollback"]
    if back:
        raise ReplayError(
            f"row {back[0]} is a rollback: steps before it were given up, so the record is no one history; "
            "replay.mode=offline trains on the rollouts of the steps that stand"
        )
