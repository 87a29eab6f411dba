"""``python -m tests.saving_program FOLDER KILL…``: a learner's checkpoints under kills, one process after the other.

Each process loads the latest checkpoint, proves that its weights are those which were saved, and goes on changing
and saving them until it is killed: at a point of `learner.saving.POINTS`, or, for `random:SEED`, by its parent at
any moment of its first saves. Processes are forked from one that has imported everything. Prints the last step.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

import torch

from common import failpoints
from learner.checkpoint import Checkpoints
from learner.models import Models, load_models
from learner.ranks import join_ranks
from learner.saving import POINTS, at
from learner.served import weights_digest
from tests.learner_parts import initial_weights, make_config

OPTIONS = ("algorithm.adv_estimator=gae",)
LONGEST_S = 0.5  # of the moments at which a process is killed at random, from its first save on


def main(folder: Path, kills: list[str]) -> None:
    initial_weights(folder / "weights", make_config(*OPTIONS))
    for kill in kills:
        assert kill in POINTS or kill.startswith("random:"), kill
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                save_on(folder, kill, writing)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        os.close(writing)
        if kill.startswith("random:"):
            os.read(reading, 1)  # it saves now
            time.sleep(random.Random(kill).uniform(0, LONGEST_S))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (kill, status)
        os.close(reading)
    print((folder / "told").read_text())


def save_on(folder: Path, kill: str, writing: int) -> None:
    """What a restarted learner does, until it is killed."""
    ranks = join_ranks()
    models = load_models(make_config(*OPTIONS), folder / "weights", ranks)
    checkpoints = Checkpoints(folder / "checkpoints", run_id="test", keep=1, ranks=ranks)
    checkpoints.tidy()
    told = folder / "told"
    step = int(told.read_text()) if told.exists() else 0
    if (path := checkpoints.latest()) is not None:
        state = checkpoints.load(path, models)
        assert state["digests"] == digests(models)
        assert state["step"] in (step, step + 1), "what the broker was told of is there"
        step = state["step"]
        tell(told, step)
    else:
        assert step == 0
    if not kill.startswith("random:"):
        failpoints.arm(f"learner.checkpoint.{kill}:kill")
    os.write(writing, b".")
    for count in range(100):
        if kill != "aside" or count != 1:  # that point is passed when a step is saved again
            step += 1
        change(models, step)
        checkpoints.begin(step, models, {"digests": digests(models)})
        change(models, -step)  # training goes on
        assert checkpoints.finished(wait=True) is not None
        tell(told, step)
        at("told")
    raise AssertionError(f"was not killed at {kill!r}")


def tell(told: Path, step: int) -> None:
    told.with_name("telling").write_text(str(step))
    os.replace(told.with_name("telling"), told)


@torch.no_grad()
def change(models: Models, step: int) -> None:
    for t in models.trainees():
        for p in t.parameters:
            p.add_(0.001 * step)


def digests(models: Models) -> list[str]:
    return [weights_digest(t.module) for t in models.trainees()]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
