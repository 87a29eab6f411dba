"""What of a run's config can be changed while it goes on, and whether a change makes sense."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from common.config import Config
from common.errors import ConfigError
from common.loading import examine_config, flat

# Who enforces it, from when on: broker, the next claim.
STALENESS = "staleness.max"
# Learner, the next step.
OF_A_STEP = (
    "actor.optim.lr", "critic.optim.lr", "actor.clip_ratio_low", "actor.clip_ratio_high", "actor.entropy_coeff",
    "actor.kl_loss_coef",
)  # fmt: skip
# Generators, the next sample.
TEMPERATURE = "rollout.temperature"
LIVE = (STALENESS, *OF_A_STEP, TEMPERATURE)

Lookup = Callable[[str], Any]  # ``Control.limit``


def read_changes(items: list[str], config: Config, standing: dict[str, Any]) -> dict[str, Any]:
    """``["staleness.max=3", …]`` as values by key, checked with the config and the limits that stand.

    Raises:
        ConfigError: not of that form; no live key; a value that the config would refuse.
    """
    changes = asked_changes(items)
    whole = flat(config) | {k: v for k, v in standing.items() if k in LIVE}
    asked, faults = examine_config([], [*(f"{k}={json.dumps(v)}" for k, v in whole.items() if k not in changes),
                                        *(f"{k}={v}" for k, v in changes.items())])  # fmt: skip
    values = flat(asked) if not faults else {}
    faults += [f"{k}={text}: give a number" for k, text in changes.items() if not faults and values[k] is None]
    if faults:
        raise ConfigError(faults)
    return {k: values[k] for k in changes}


def asked_changes(items: list[str]) -> dict[str, str]:
    """``["staleness.max=3", …]`` as texts by key, before any run is asked.

    Raises:
        ConfigError: not of that form; no live key.
    """
    faults, changes = [], {}
    for item in items:
        key, equals, text = item.partition("=")
        key = key.removeprefix("actor_rollout_ref.")
        if not equals:
            faults.append(f"{item}: write KEY=VALUE")
        elif key not in LIVE:
            faults.append(f"{key}: cannot be changed while the run goes on; these can: {', '.join(LIVE)}")
        else:
            changes[key] = text
    if faults:
        raise ConfigError(faults)
    return changes


def number(value: Any, default: float, *, above: float = float("-inf")) -> float:
    """A live limit as a finite number above ``above``; else ``default``."""
    sound = isinstance(value, (int, float)) and not isinstance(value, bool) and above < value < float("inf")
    return float(value) if sound else default


# ---------------------------------------------------------------- how many generators, and who is to go
def size_key(fleet: str) -> str:
    return f"generators.count@{fleet}"


def asked_size(limit: Lookup, fleet: str) -> tuple[int, float] | None:
    """How many generators a fleet is to have, and when that was asked for (Unix seconds); None: never."""
    asked = limit(size_key(fleet))
    if not isinstance(asked, list) or len(asked) != 2 or any(number(x, -1.0) < 0 for x in asked):
        return None
    return int(asked[0]), float(asked[1])


def drain_key(generator: str) -> str:
    return f"generators.drain@{generator}"


def drains(limit: Lookup, generator: str) -> bool:
    """Whether a generator is to finish its leases and end."""
    return limit(drain_key(generator)) is True
