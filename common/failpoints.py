"""Named points at which a test makes the real process fail.

``LEEWAY_FAILPOINT=name[:n][:kill|stop|raise|delay=s]``, several separated by commas: at the n-th
hit of ``name`` (default the first) this process kills itself with SIGKILL (default), stops with
SIGSTOP, raises, or sleeps. A delay acts at every hit from the n-th on. Inert without the
variable. The supervisors start a *restarted* role without it.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass

from common.errors import ConfigError

VARIABLE = "LEEWAY_FAILPOINT"


@dataclass
class _Point:
    nth: int = 1
    action: str = "kill"
    delay_s: float = 0.0
    hits: int = 0


_points: dict[str, _Point] | None = None  # None: the environment was not read yet


def arm(text: str | None = None) -> None:
    """Read ``text`` (default: the environment). Raises ConfigError for what cannot be read."""
    global _points
    _points = _parse(os.environ.get(VARIABLE, "") if text is None else text)


def failpoint(name: str) -> None:
    """A place where tests can make this process fail; does nothing otherwise."""
    if _points is None:
        arm()
    if not _points:
        return
    point = _points.get(name)
    if point is None:
        return
    point.hits += 1
    if point.hits == point.nth or (point.action == "delay" and point.hits > point.nth):
        _act(name, point)


def _act(name: str, point: _Point) -> None:
    if point.action == "raise":
        raise RuntimeError(f"failpoint {name}")
    if point.action == "delay":
        time.sleep(point.delay_s)
    else:
        os.kill(os.getpid(), signal.SIGKILL if point.action == "kill" else signal.SIGSTOP)


def _parse(text: str) -> dict[str, _Point]:
    points: dict[str, _Point] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, *options = item.split(":")
        point = points[name] = _Point()
        for option in options:
            if option.isdecimal() and int(option) > 0:
                point.nth = int(option)
            elif option in ("kill", "stop", "raise"):
                point.action = option
            elif option.startswith("delay="):
                point.action, point.delay_s = "delay", _seconds(option, item)
            else:
                raise _unreadable(item)
    return points


def _seconds(option: str, item: str) -> float:
    try:
        return float(option.removeprefix("delay="))
    except ValueError:
        raise _unreadable(item) from None


def _unreadable(item: str) -> ConfigError:
    return ConfigError(f"{VARIABLE}: {item!r} is not of the form name[:n][:kill|stop|raise|delay=seconds]")
