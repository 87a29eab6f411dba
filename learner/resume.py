"""From the ledger and the last checkpoint to the weights of the version that stands.

A learner that comes back loads its last checkpoint and redoes the acknowledged steps beyond it from
their rows: same batches, order and settings. A redone step acknowledges and publishes nothing. Steps that
a rollback gave up are passed over; the rollback itself makes the weights it found another version.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import CheckpointError
from learner.checkpoint import step_of
from learner.files import replace_file
from learner.progress import Progress
from learner.report import Clock, progress_metrics
from learner.served import weights_digest

if TYPE_CHECKING:
    from learner.loop import Learner


RESUMED = "resumed.json"  # in the folder of checkpoints: which beginning of the run resumed from a named one


def resume(learner: Learner, attached: Any, *, begun: str = "") -> None:
    """Bring models and progress to the last acknowledged step; the first start makes checkpoint 0.

    attached: what the broker said (`step`: last acknowledged, `version`, `abandoned`).
    begun: which beginning of the run this is; a restart in it does not resume from a named path again.

    Raises:
        FencedError: a later learner writes the checkpoints.
        CheckpointError: the ledger has steps but no checkpoint can be loaded, or redoing them does
            not end at the ledger's version; `trainer.resume_from_path` cannot be resumed from.
    """
    learner.checkpoints.take_over(attached.epoch)
    learner.checkpoints.tidy()
    learner.checkpoints.abandoned = attached.abandoned
    if learner.config.trainer.resume_mode == "resume_path" and not _has_resumed(learner, begun):
        resume_from_path(learner, attached)
        mark = learner.checkpoints.folder / RESUMED
        learner.ranks.share(lambda: replace_file(mark, lambda fresh: fresh.write_text(json.dumps({"begun": begun}))))
        return
    path = learner.checkpoints.latest(at_most=attached.step)
    if path is None:
        refuse_to_start_over(learner, attached)
        save_now(learner)
        return
    redo_from(learner, path, attached)
    learner.feed.checkpoint_valid(step=learner.saved, path=str(path))
    # It may have died in saving these very steps, again and again: this waits, so that what is redone stays bounded.
    # After a rollback a crash shall find it, whatever becomes of the checkpoint gone back to.
    learner.save(wanted=learner.progress.step == learner.progress.rolled_back_at, wait=True)


def resume_from_path(learner: Learner, attached: Any) -> None:
    """From the checkpoint `trainer.resume_from_path`; what stands then is saved, for later restarts."""
    given = learner.config.trainer.resume_from_path
    if given is None:
        raise CheckpointError("trainer.resume_mode=resume_path: give trainer.resume_from_path on the learner's host")
    path = Path(given).expanduser().resolve()
    if path.parent == learner.checkpoints.folder.resolve():
        if step_of(path) > attached.step:
            raise CheckpointError(f"trainer.resume_from_path={path}: the ledger has only {attached.step} steps")
        if learner.checkpoints.is_given_up(step_of(path)):
            raise CheckpointError(f"trainer.resume_from_path={path}: a rollback has given it up; name another one")
        redo_from(learner, path, attached)
    elif attached.step > 0:
        raise CheckpointError(
            f"trainer.resume_from_path={path}: is another run's, and this one already has {attached.step} steps; "
            "give a new run.dir, or trainer.resume_mode=auto"
        )
    else:
        learner.log.info("begins with the models, optimizers and KL controller of %s", path)
        learner.checkpoints.load(path, learner.models, foreign=True)
    save_now(learner)


def save_now(learner: Learner) -> None:
    """A checkpoint of what stands."""
    step = learner.progress.step
    path = learner.checkpoints.save(step, learner.models, learner.progress.as_state(0.0))
    learner.feed.checkpoint_valid(step=step, path=str(path))
    learner.saved = learner.valid = step


def _has_resumed(learner: Learner, begun: str) -> bool:
    def read() -> bool:
        mark = learner.checkpoints.folder / RESUMED
        return mark.exists() and json.loads(mark.read_text())["begun"] == begun

    return learner.ranks.share(read)


def redo_from(learner: Learner, path: Path, attached: Any) -> None:
    """Load `path` and redo the acknowledged steps after it."""
    learner.log.info("continues from %s, redoes steps up to %d", path, attached.step)
    learner.progress, learner.saved = replay(learner, path)
    learner.valid = learner.saved
    if (learner.progress.step, learner.progress.version) != (attached.step, attached.version):
        raise CheckpointError(
            f"redoing from {path} ends at step {learner.progress.step}, version {learner.progress.version}; the ledger "
            f"says step {attached.step}, version {attached.version}"
        )
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
    learner.confirm_saved(wait=True)  # it may be the one to restore, and removes older ones
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
            progress.count_rollback(row.step, row.version + 1, lr_factor=row.settings.get("lr_factor", 1.0))
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
        batch = learner.fetch(row.claim)
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
