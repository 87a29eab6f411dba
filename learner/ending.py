"""How a run ends: last version out, last validation in, checkpoint, Hugging Face folder, summary."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from common.errors import LeewayError, Stopped
from learner import validation
from learner.export import save_hf
from learner.lora import save_adapter

if TYPE_CHECKING:
    from learner.loop import Learner


def finish(learner: Learner, ended: str, *, tokenizer: Any) -> None:
    """Leave everything as the user wants to find it.

    The checkpoint comes first: what fails or is killed after it costs no step.

    ended: why, as it stands in the summary; after "stopped" or "drained" nothing is waited for.
    """
    stopped = ended == "stopped"
    try:
        learner.save(wanted=True, wait=True)
    except Stopped as e:
        learner.log.warning("%s", e)
    target = learner.run_dir / "hf"
    save_hf(target, learner.models.actor.module, tokenizer, dtype=learner.config.model.dtype, ranks=learner.ranks)
    actor = learner.models.actor.module
    if actor.lora is not None:
        base = learner.config.model.path or str(learner.run_dir / "model")
        save_adapter(learner.run_dir / "adapter", actor.lm, actor.lora, base=base, first=learner.ranks.first)
    try:
        if ended not in ("stopped", "drained"):  # nobody samples any more
            learner.publish(always=True)
            validation.validate_last(learner)
    except Stopped as e:
        learner.log.warning("%s", e)
    write_summary(learner, ended, hf=True)
    if not stopped and learner.ranks.first:
        end_the_others(learner, ended)


def write_summary(learner: Learner, ended: str, *, hf: bool = False) -> None:
    """`summary.json`, which the launcher prints; `ended` is empty while the run goes on. hf: `hf/` is of this end."""
    if not learner.ranks.first:
        return
    wandb = learner.run_dir / "wandb"
    val = learner.validations.latest
    summary = learner.progress.summary(
        ended=ended,
        window=learner.config.run.goal_window,
        dropped=dict(learner.stats.get("dropped", {})),
        seconds=time.monotonic() - learner.started,
        equal_steps=learner.stats.get("replay/num_equal_steps"),
        val_score=val and val["score"],
        val_version=val and val["version"],
        hf_dir=str(learner.run_dir / "hf") if hf else None,
        wandb_dir=str(wandb) if wandb.is_dir() else None,
    )
    if learner.config.replay.rollouts:
        summary.publications = 0  # to nobody
    summary.write(learner.run_dir)


def end_the_others(learner: Learner, ended: str) -> None:
    """The run is over for every role, wherever it was started."""
    try:
        learner.control.set_desired("stopped", f"learner: {ended}")
    except LeewayError as e:
        learner.log.warning("cannot tell the other roles that the run is over: %s", e)
