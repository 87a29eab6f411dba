"""Guard rails: metrics of a step that have to stay within limits, and what is done when they do not.

What diverges seldom comes back by itself: after `trainer.guard.patience` steps in a row beyond a limit the
run goes back to a checkpoint from before them, or waits for a person, or ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common import config
from common.errors import RolledBackError, TrainingError
from learner.checkpoint import step_of
from learner.settings import live_settings

if TYPE_CHECKING:
    from learner.loop import Learner

WHO = "guard"
RATES = ("actor.optim.lr", "critic.optim.lr")


@dataclass
class Guard:
    rails: config.Guard
    beyond: int = 0  # steps in a row, up to the last one

    def watch(self, values: Mapping[str, float]) -> str:
        """What to say once the patience is used up; else "". values: metrics of the step."""
        if values.get("training/skipped"):
            return ""  # it changed no weights, and has no numbers of an update
        worst = {k: values[k] for k, limit in self.rails.limits.items() if k in values and not values[k] <= limit}
        self.beyond = self.beyond + 1 if worst else 0
        if self.beyond < self.rails.patience:
            return ""
        self.beyond = 0
        found = ", ".join(f"{name} = {value:.4g} (limit {self.rails.limits[name]:g})" for name, value in worst.items())
        return f"guard: {found}, beyond for {self.rails.patience} steps"


def heed(learner: Learner, guard: Guard, values: Mapping[str, float]) -> None:
    """After each step.

    Raises:
        TrainingError: the run is to end, or no checkpoint or rollback is left.
        RolledBackError: it goes on from a checkpoint; the learner is to be started again.
    """
    reason = learner.ranks.share(lambda: guard.watch(values))
    if not reason:
        return
    if guard.rails.action == "stop":
        raise TrainingError(f"{reason}; lower actor.optim.lr, or go back to a checkpoint (launch.py rollback)")
    if guard.rails.action == "rollback":
        roll_back(learner, guard.rails, reason)
    learner.log.error("%s; the run is paused: launch.py rollback, set or resume", reason)
    learner.ranks.share(lambda: learner.control.set_desired("paused", WHO))


def roll_back(learner: Learner, rails: config.Guard, reason: str) -> None:
    """Go back to the newest checkpoint from before the steps that were beyond a limit."""
    made = learner.progress.rollbacks
    if made >= rails.max_rollbacks:
        raise TrainingError(f"{reason}; after {made} rollbacks (trainer.guard.max_rollbacks) the run ends")
    learner.confirm_saved(wait=True)
    path = learner.checkpoints.latest(at_most=learner.progress.step - rails.patience)
    if path is None:
        raise TrainingError(f"{reason}; no checkpoint from before is left")
    settings = learner.ranks.share(lambda: live_settings(learner.config, learner.control))
    learner.feed.roll_back(step=step_of(path), who=WHO)
    for key in RATES:
        rate = settings[key] * rails.lr_factor
        learner.ranks.share(lambda key=key, rate=rate: learner.control.set_limit(key, rate, WHO))
    raise RolledBackError(f"{reason}; the run goes back to {path}, with {rails.lr_factor:g} of its learning rates")
