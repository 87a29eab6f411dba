"""`python -m learner`, started by `torch.distributed.run`: one rank of the learner."""

from __future__ import annotations

import os
import sys
import time

from common.errors import LeewayError
from common.roles import Role, end_process, run_role

RANK = int(os.environ.get("RANK", "0"))


def main(role: Role) -> int:
    """Attach, resume or start, train, end."""
    started = time.monotonic()
    if RANK == 0:
        role.control.register("learner", role.name, state="starts")
    from learner.session import Session  # torch and transformers are imported from here on

    try:
        with Session(role, started=started) as session:
            try:
                learner = session.start()
                ended = learner.run()
                session.finish(ended)
            except LeewayError as e:
                session.fail(e)
                raise
    except RuntimeError as e:
        if isinstance(e, LeewayError) or not _lost_a_rank(e):
            raise
        # Not our fault to report: torch.distributed.run says who died, and ends the rest.
        role.log.error("another rank is gone: %s", str(e).splitlines()[0])
        os._exit(1)
    if RANK == 0:
        role.log.info("%s at step %d, version %d", ended, learner.progress.step, learner.progress.version)
    return 0


def _lost_a_rank(error: BaseException | None) -> bool:
    """Whether a collective failed because a peer closed its connection."""
    while error is not None:
        text = str(error)
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and any(
            sign in text for sign in ("Connection closed by peer", "Connection reset by peer", "remote process exited")
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


if __name__ == "__main__":
    # A rank beyond the first has a log of its own and is not in the registry.
    own_name = ["--name", f"learner-rank{RANK}"] if RANK else []
    end_process(run_role(main, "learner", [*sys.argv[1:], *own_name]))
