"""How far a run has come: counters that a checkpoint keeps and the summary shows."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from common.summary import Summary
from learner.batch import Batch


@dataclass
class Progress:
    step: int = 0  # rows of `steps`, skipped ones included
    version: int = 0  # of the weights as they are now
    samples_trained: int = 0
    tokens_trained: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    rolled_back_at: int = -1  # step of the newest rollback
    rollbacks: int = 0  # in the history that stands
    lr_factor: float = 1.0  # of the learning rates, since those of the guard
    given_up: int = 0  # steps that rollbacks gave up, and these themselves
    staleness_max: int | None = None
    first_scores: list[float] = field(default_factory=list)  # of the first `window` steps
    last_scores: list[float] = field(default_factory=list)  # of the last
    overlap_sum: float = 0.0
    overlap_count: int = 0
    publications: int = 0  # versions that were published
    newest_published: int = -1
    seconds: float = 0.0  # before this process

    def count(self, batch: Batch, *, window: int, limit: int) -> None:
        """One more row of `steps` that was applied."""
        self.step += 1
        self.skipped_in_a_row = 0
        score = float(batch.scores.mean())
        if len(self.first_scores) < window:
            self.first_scores.append(score)
        self.last_scores = [*self.last_scores, score][-window:]
        self.samples_trained += len(batch)
        self.tokens_trained += int(batch.young(self.version, limit).sum())
        _, oldest = batch.ages(self.version, limit=limit)
        self.staleness_max = max(self.staleness_max or 0, oldest)
        self.version += 1

    def count_skipped(self) -> None:
        """One more row of `steps` that was not."""
        self.step += 1
        self.skipped += 1
        self.skipped_in_a_row += 1

    def count_rollback(self, step: int, version: int, *, lr_factor: float = 1.0) -> None:
        """The row of a rollback to here, `step`: the weights as they are become `version`."""
        self.rollbacks += 1
        self.lr_factor *= lr_factor
        self.given_up += step - self.step
        self.step = self.rolled_back_at = step
        self.version = version
        self.skipped_in_a_row = 0

    def count_publication(self) -> None:
        """The version as it is now was published; again after a restart, it counts once."""
        if self.version > self.newest_published:
            self.publications += 1
            self.newest_published = self.version

    def count_overlap(self, ratio: float) -> None:
        self.overlap_sum += ratio
        self.overlap_count += 1

    def goal_mean(self, window: int) -> float | None:
        """Mean score of the last `window` steps, once there are as many."""
        return sum(self.last_scores) / window if len(self.last_scores) == window else None

    def as_state(self, seconds: float) -> dict[str, Any]:
        """seconds: since this process started."""
        return {**asdict(self), "seconds": self.seconds + seconds}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Progress:
        return cls(**{k: v for k, v in state.items() if k in cls.__dataclass_fields__})

    def summary(self, *, ended: str, window: int, dropped: dict[str, int], seconds: float, **more: Any) -> Summary:
        window = max(1, min(window, self.step // 2))  # first and last do not overlap
        return Summary(
            ended=ended,
            step=self.step,
            steps_given_up=self.given_up,
            version=self.version,
            score_first=_mean(self.first_scores[:window]),
            score_last=_mean(self.last_scores[-window:]),
            score_window=window,
            samples_trained=self.samples_trained,
            tokens_trained=self.tokens_trained,
            dropped=dropped,
            publications=self.publications,
            staleness_max=self.staleness_max,
            overlap_ratio=self.overlap_sum / self.overlap_count if self.overlap_count else None,
            seconds=self.seconds + seconds,
            **more,
        )


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
