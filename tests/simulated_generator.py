"""Processes for the tests of the fleet: ``python -m tests.simulated_generator`` is a generator without an
engine, ``… fleet`` a fleet of them. ``SIMULATED`` in the environment says how the generators behave.
"""

import os
import sys

from common.errors import ConfigError, EngineError
from common.limits import drains
from common.processes import spawn
from common.roles import Role, run_role
from generators.fleet import run_fleet


def behave(role: Role) -> None:
    behaviour = os.environ.get("SIMULATED", "works")
    if behaviour == "cannot start" or (behaviour == "first cannot start" and role.name.endswith("-0")):
        raise EngineError("vLLM does not start: no such device")
    if behaviour == "bad config":
        raise ConfigError("reward.custom_function.path=x.py: no such file")
    # like an engine's process: below the generator, in its process group
    engine = spawn([sys.executable, "-c", "import time; time.sleep(600)"])
    role.control.register("generator", role.name, engine_pid=engine.pid, ready=1)
    if behaviour == "ends by itself":
        return
    while not role.stop.wait(0.05) and not drains(role.control.limit, role.name):
        pass


if __name__ == "__main__":
    if sys.argv[1:2] == ["fleet"]:
        arguments = sys.argv[2:]
        sys.exit(
            run_role(
                lambda role: run_fleet(role, arguments, module="tests.simulated_generator"), "generator", arguments
            )
        )
    sys.exit(run_role(behave, "generator"))
