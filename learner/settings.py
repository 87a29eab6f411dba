"""Settings of a step that can be changed while the run goes on; each step's stand in its row."""

from __future__ import annotations

from typing import Any, Protocol

from common.config import Config
from common.limits import number


class Limits(Protocol):
    def limit(self, name: str) -> Any: ...


def live_settings(config: Config, control: Limits, *, lr_factor: float = 1.0) -> dict[str, float]:
    """Value of each live setting by its path: the live limit where a number is set, else the config's.

    lr_factor: of the learning rates, wherever they come from.
    """
    actor = config.actor
    settings = {
        "actor.optim.lr": actor.optim.lr,
        "critic.optim.lr": config.critic.optim.lr,
        "actor.clip_ratio_low": actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low,
        "actor.clip_ratio_high": actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high,
        "actor.entropy_coeff": actor.entropy_coeff,
        "actor.kl_loss_coef": actor.kl_loss_coef,
    }
    for name in settings:
        settings[name] = number(control.limit(name), settings[name])
        if name.endswith(".lr"):
            settings[name] *= lr_factor
    return settings
