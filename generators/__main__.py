"""``python -m generators --redis-url URL --run-id ID [CONFIG.yaml … a.b=c …]``: this host's generators."""

import sys

from common.roles import Role, end_process, run_role
from generators.fleet import run_fleet


def main(role: Role) -> None:
    run_fleet(role, sys.argv[1:])


if __name__ == "__main__":
    end_process(run_role(main, "generator"))
