"""Held-out validation: asked for with a published version, answered by the generators some steps later."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from learner.loop import Learner

FINAL_WAIT_S = 60.0
POLL_S = 0.2


@dataclass
class Validations:
    """What was asked and what came back."""

    asked: set[int] = field(default_factory=set)  # steps
    results: dict[int, dict[str, Any]] = field(default_factory=dict)  # by step
    reported: set[int] = field(default_factory=set)

    @property
    def latest(self) -> dict[str, Any] | None:
        return self.results[max(self.results)] if self.results else None

    def collect(self, learner: Learner) -> None:
        """Fetch results, if any are outstanding."""
        if self.asked - self.results.keys():
            for r in learner.feed.validations():
                if r["step"] in self.asked and r["step"] not in self.results:
                    self.results[r["step"]] = r
                    if r["score"] is None:
                        learner.log.warning(
                            "validation of version %d: no held-out prompt could be scored (%d dropped); see "
                            "the generators' logs", r["version"], r["num_dropped"],
                        )  # fmt: skip

    def metrics(self, learner: Learner) -> dict[str, float]:
        """The newest result that was not reported yet, for the metrics line of this step."""
        self.collect(learner)
        fresh = sorted(self.results.keys() - self.reported)
        if not fresh:
            return {}
        self.reported |= set(fresh)
        r = self.results[fresh[-1]]
        source = learner.config.data.task or "held_out"
        score = {} if r["score"] is None else {f"val-core/{source}/reward/mean@1": r["score"]}
        return score | {
            "val/version": r["version"],
            "val/step": r["step"],
            "val/num_samples": r["num_samples"],
        }


def ask_if_due(learner: Learner, *, always: bool = False) -> None:
    """Ask for a validation of the version just published, if one is due since the last that was asked for.

    Every `trainer.test_freq` steps, or as soon after as a version is published.
    """
    step, trainer, asked = learner.progress.step, learner.config.trainer, learner.validations.asked
    due = trainer.test_freq > 0 and step // trainer.test_freq > max(asked, default=0) // trainer.test_freq
    due |= always or (trainer.val_before_train and step == 0)
    if due and step not in asked:
        learner.feed.validate(step=step, version=learner.published)
        learner.validations.asked.add(step)


def validate_last(learner: Learner) -> None:
    """Validate the last version and wait for it, at most `FINAL_WAIT_S`; a stop ends the wait."""
    if learner.config.trainer.test_freq <= 0 or learner.progress.step == 0:
        return
    if not learner.ranks.share(lambda: bool(learner.control.entries("generator"))):
        return
    ask_if_due(learner, always=True)
    validations, deadline = learner.validations, time.monotonic() + FINAL_WAIT_S
    while learner.ranks.share(lambda: time.monotonic() < deadline and not learner.stop.is_set()):
        validations.collect(learner)
        if (result := validations.results.get(learner.progress.step)) is not None:
            if result["score"] is not None:
                learner.log.info("held-out score of version %d: %.3f", result["version"], result["score"])
            return
        learner.stop.wait(POLL_S)
    learner.log.warning("the last validation did not come back within %.0f s", FINAL_WAIT_S)
