"""Guard rails: metrics of a step that have to stay within limits, and what is done when they do not.

What diverges seldom comes back by itself: after `trainer.guard.patience` steps in a row beyond a limit the
run goes back to a checkpoint from before them, or waits for a person, or ends.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from common import config
from common.errors import ControlError, RolledBackError, TrainingError
from common.logs import LOGGER
from learner.checkpoint import step_of

if TYPE_CHECKING:
    from learner.loop import Learner

WHO = "guard"
_log = logging.getLogger(LOGGER)


@dataclass
class Guard:
    """Rank 0's is the one that decides."""

    rails: config.Guard
    beyond: dict[str, list[int]] = field(default_factory=dict)  # metric → the last steps in a row beyond its limit
    missed: set[str] = field(default_factory=set)  # metrics that no step had yet; said once
    wants_pause: bool = False
    told: bool = False  # that Redis cannot be told of it

    def watch(self, step: int, values: Mapping[str, float | None]) -> tuple[str, int]:
        """(what to say once the patience is used up, else ""; the first of these steps).

        values: metrics of the step. One that it does not have (a skipped step has no numbers of an update, a
        validation comes now and then) neither adds to the count nor ends it.
        """
        for name, limit in self.rails.limits.items():
            if name in values:
                value = values[name]
                within = value is not None and value <= limit
                self.beyond[name] = [] if within else [*self.beyond.get(name, []), step]
        return self._verdict(values)

    def _verdict(self, values: Mapping[str, float | None]) -> tuple[str, int]:
        worst = {k: steps for k, steps in self.beyond.items() if len(steps) >= self.rails.patience}
        if not worst:
            return "", -1
        limits = self.rails.limits
        found = (f"{k} = {_short(values.get(k))} (limit {limits[k]:g}) for {len(worst[k])} steps" for k in worst)
        return "guard: beyond " + ", ".join(found), min(steps[0] for steps in worst.values())

    def recall(self, rows: Iterable[dict[str, Any]], *, after: int, to: int) -> None:
        """Take in what `metrics.jsonl` says of the steps after the newest rollback, up to the one that stands."""
        for row in rows:
            if after < row["step"] <= to:
                self.watch(row["step"], row)

    def say_what_is_missing(self, values: Mapping[str, float | None]) -> None:
        if missing := sorted(self.rails.limits.keys() - values.keys() - self.missed):
            self.missed.update(missing)
            _log.warning("trainer.guard.limits: this step has no %s; is it a metric of this run?", ", ".join(missing))

    def pauses(self, control: Any) -> bool:
        """Whether a pause is wanted that Redis does not know of yet."""
        if not self.wants_pause:
            return False
        try:
            control.set_desired("paused", WHO)
        except ControlError as e:
            if not self.told:
                _log.warning("the guard pauses the learner; the others are told once Redis is back (%s)", e)
            self.told = True
            return True
        self.wants_pause = self.told = False
        return False


def heed(learner: Learner, guard: Guard, values: Mapping[str, float]) -> None:
    """After each step.

    Raises:
        TrainingError: the run is to end, or no checkpoint or rollback is left.
        RolledBackError: it goes on from a checkpoint; the learner is to be started again.
    """
    step, applied = learner.progress.step, not values.get("training/skipped")
    if learner.ranks.first and applied:
        guard.say_what_is_missing(values)
    reason, first = learner.ranks.share(lambda: guard.watch(step, values))
    if not reason:
        return
    if guard.rails.action == "stop":
        raise TrainingError(f"{reason}; lower actor.optim.lr, or go back to a checkpoint (launch.py rollback)")
    if guard.rails.action == "rollback":
        roll_back(learner, guard.rails, reason, before=first)
    learner.log.error("%s; the run is paused: after launch.py set or rollback, if need be, launch.py resume", reason)
    guard.beyond.clear()
    guard.wants_pause = True  # heeded before the next batch is claimed


def roll_back(learner: Learner, rails: config.Guard, reason: str, *, before: int) -> None:
    """Go back to the newest checkpoint from before step `before`."""
    made = learner.progress.rollbacks
    if made >= rails.max_rollbacks:
        raise TrainingError(f"{reason}; after {made} rollbacks (trainer.guard.max_rollbacks) the run ends")
    learner.confirm_saved(wait=True)
    path = learner.checkpoints.latest(at_most=before - 1)
    if path is None:
        raise TrainingError(f"{reason}; no checkpoint from before is left")
    learner.feed.roll_back(step=step_of(path), who=WHO, lr_factor=rails.lr_factor)
    raise RolledBackError(f"{reason}; the run goes back to {path}, with {rails.lr_factor:g} of its learning rates")


def _short(value: float | None) -> str:
    return "nan" if value is None else f"{value:.4g}"
