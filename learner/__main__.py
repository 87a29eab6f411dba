"""`python -m learner`, started by `torch.distributed.run`: one rank of the learner."""

from __future__ import annotations

import time

from common.roles import Role, end_process, run_role


def main(role: Role) -> int:
    """Attach, resume or start, train, end."""
    started = time.monotonic()
    role.control.register("learner", role.name, state="starts")
    from learner.session import Session  # torch and transformers are imported from here on

    with Session(role, started=started) as session:
        learner = session.start()
        ended = learner.run()
        session.finish(ended)
    role.log.info("%s at step %d, version %d", ended, learner.progress.step, learner.progress.version)
    return 0


if __name__ == "__main__":
    end_process(run_role(main, "learner"))
