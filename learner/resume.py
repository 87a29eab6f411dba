"""From the ledger and the last checkpoint to the weights of the version that stands.

A learner that comes back loads its last checkpoint and redoes the acknowledged steps beyond it from
their rows: same batches, order and settings. A redone step acknowledges and publishes nothing. Steps that
a rollback gave up are passed over; the rollback itself makes the weights it found another version.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from common.errors import CheckpointError
from learner.batch import make_batch
from learner.model import weights_digest
from learner.progress import Progress
from learner.report import Clock, progress_metrics

if TYPE_CHECKING:
    from learner.loop import Learner


def resume(learner: Learner, attached: Any) -> None:
    """Bring models and progress to the last acknowledged step; the first start makes checkpoint 0.

    attached: what the broker said (`step`: last acknowledged, `version`, `abandoned`).

    Raises:
        CheckpointError: the ledger has steps but no checkpoint can be loaded, or redoing them does
            not end at the ledger's version.
    """
    learner.checkpoints.abandoned = attached.abandoned
    path = learner.checkpoints.latest(at_most=attached.step)
    if path is None:
        refuse_to_start_over(learner, attached)
        path = learner.checkpoints.save(0, learner.models, learner.progress.as_state(0.0))
        learner.feed.checkpoint_valid(step=0, path=str(path))
        learner.saved = 0
        return
    learner.log.info("continues from %s, redoes steps up to %d", path, attached.step)
    learner.progress, learner.saved = replay(learner, path)
    if (learner.progress.step, learner.progress.version) != (attached.step, attached.version):
        raise CheckpointError(
            f"redoing from {path} ends at step {learner.progress.step}, version {learner.progress.version}; the ledger "
            f"says step {attached.step}, version {attached.version}"
        )
    learner.feed.checkpoint_valid(step=learner.saved, path=str(path))
    # It may have died in saving these very steps: never is more than one interval redone. After a rollback a crash
    # shall find it, whatever becomes of the checkpoint gone back to.
    learner.save(wanted=learner.progress.step == learner.progress.rolled_back_at)
    learner.validations.asked |= set(learner.feed.validations_asked())


def refuse_to_start_over(learner: Learner, attached: Any) -> None:
    """Without a checkpoint to continue from, only a run without steps and without checkpoints may start."""
    folder, newer = learner.checkpoints.folder, learner.checkpoints.latest()
    if attached.step > 0:
        raise CheckpointError(
            f"{folder}: no valid checkpoint, but the ledger has {attached.step} steps; "
            "restore the folder from a copy, or start a new run"
        )
    if newer is not None:
        raise CheckpointError(
            f"{newer}: is there, but the ledger has no steps; restore the ledger from a copy, or start a new run"
        )


def restore_weights(learner: Learner) -> None:
    """Undo the updates of a step that was given up half-way: its version's weights, as redoing makes them."""
    path = learner.checkpoints.latest(at_most=learner.progress.step)
    if path is None:
        raise CheckpointError(f"{learner.checkpoints.folder}: no valid checkpoint to restore the weights from")
    learner.log.info("restores the weights of version %d from %s", learner.progress.version, path)
    replay(learner, path)


def replay(learner: Learner, path: Any) -> tuple[Progress, int]:
    """Load `path` and redo the rows after it; (progress there, step of the checkpoint).

    Raises:
        CheckpointError: a row is missing, or a step that was applied cannot be redone.
    """
    state = learner.checkpoints.load(path, learner.models)
    progress = Progress.from_state(state)
    if progress.newest_published < 0:
        progress.count_publication()  # the first start publishes right after its checkpoint
    loaded = progress.step
    for row in learner.feed.rows(after=loaded):
        if row.restored == progress.step:
            learner.log.warning("step %d: rolled back to the checkpoint of step %d", row.step, row.restored)
            progress.count_rollback(row.step, row.version + 1)
            values = progress_metrics(progress, learner.config) | {"training/rolled_back_to": row.restored}
            learner.writer.write(row.step, values)
            continue
        if row.step != progress.step + 1:
            raise CheckpointError(f"{path}: the ledger has no row of step {progress.step + 1}, so it cannot be redone")
        if row.applied:
            redo(learner, row, progress)
        else:
            progress.count_skipped()
    return progress, loaded


def redo(learner: Learner, row: Any, progress: Progress) -> None:
    """One acknowledged step again."""
    clock, version = Clock(), progress.version
    with clock("fetch"):
        batch = make_batch(learner.feed.fetch(row.claim), device=learner.ranks.device)
    limit = row.claim.limit
    outcome = learner.train(batch, row.settings, step=row.step, version=version, limit=limit, clock=clock)
    if not outcome.applied:
        raise CheckpointError(f"step {row.step} was applied, but is not finite when redone; is this the same software?")
    progress.count(batch, window=learner.config.run.goal_window, limit=limit)
    if progress.version - progress.newest_published >= learner.config.weights.publish_every:
        progress.count_publication()
    if row.digest and weights_digest(learner.models.actor.module) != row.digest:
        learner.log.info("step %d redone: equal up to rounding, not to the bit", row.step)
    learner.report(batch, outcome, clock, progress, version=version, limit=row.claim.limit)
