"""The learner's step.

    claim batch → proximal, reference log-probs, values → correction (weights, rejection) → advantages
    → for each mini-batch: loss, backward, clip, step → acknowledge → publish → metrics → checkpoint

Consumes claims (batches of B groups) from the broker; the next one is claimed and fetched while this
one is trained. Produces versions of the weights. Waits for the broker alone, with a reason that is
logged. Unblocked by ready groups, the end of the data, stop.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import torch

from common.config import Config
from common.errors import LeewayError, Stopped, TrainingError
from common.failpoints import failpoint
from learner import ending, report, resume, validation
from learner.ahead import Ahead, can_be_mended
from learner.batch import Batch
from learner.checkpoint import Checkpoints, step_of
from learner.dealing import Part, part_of, put_together
from learner.estimates import make_targets
from learner.exact_kl import exact_kl
from learner.guard import Guard, heed
from learner.models import Models
from learner.progress import Progress
from learner.ranks import Ranks
from learner.report import Clock, Metrics
from learner.scoring import pack_all, start_of_step
from learner.served import PublishedWeights, weights_digest
from learner.settings import live_settings
from learner.updates import NotFinite, actor_loss, critic_loss, kl_coef_of, rate_of, train_on_batch

PAUSE_POLL_S = 0.2
SAY_AGAIN_S = 15.0  # between two lines of the log on what the learner waits for


@dataclass
class Learner:
    """A learner whose models are loaded and whose broker is attached."""

    config: Config
    ranks: Ranks
    models: Models
    feed: Any  # learner.feed.Feed, or one of learner.replay
    publisher: Any  # learner.publish.Publisher, or learner.replay.NullPublisher
    control: Any  # common.control.Control
    checkpoints: Checkpoints
    writer: Any  # common.metrics.MetricsWriter
    stop: Event
    log: logging.Logger
    run_dir: Path
    started: float = field(default_factory=time.monotonic)
    progress: Progress = field(default_factory=Progress)
    ahead: Ahead | None = None  # None: each batch is claimed when the one before it is done
    published: int = -1  # newest version handed to the publisher
    saved: int = -1  # step of the newest checkpoint, there or in the making
    valid: int = -1  # step of the newest one that is there: what a crash would have redone begins after it
    given_back: int = -1  # the step whose batch was given back last
    said_at: float = float("-inf")  # when the log last said what the learner waits for
    stats: dict[str, Any] = field(default_factory=dict)  # the broker's, of the last step
    clock: Clock = field(default_factory=Clock)  # of the step under way
    validations: validation.Validations = field(default_factory=validation.Validations)
    guard: Guard | None = None

    def run(self) -> str:
        """Steps until the steps, the goal or the data are reached, or a stop; returns which."""
        window, goal = self.config.run.goal_window, self.config.run.goal_score
        self.clock = Clock()
        try:
            while self.progress.step < self.config.run.max_steps:
                mean = self.progress.goal_mean(window)
                if goal is not None and mean is not None and mean > goal:
                    return "goal reached"
                if not self.step():
                    draining = self.ranks.share(lambda: self.control.desired() == "draining")
                    return "drained" if draining else "the data ended"
        except Stopped:
            return "stopped"
        finally:
            self.stop_looking_ahead()
        return "max_steps reached"

    def step(self) -> bool:
        """One row of `steps`, or a batch given back. False: the data ended.

        Raises:
            Stopped: told to stop while it waited for a batch.
            TrainingError: too many steps in a row were not finite, or beyond a limit of `trainer.guard`.
            RolledBackError: the guard has the run go back to a checkpoint.
            LeewayError: the batch that was given back as too old came back too old.
        """
        clock, step, version = self.clock, self.progress.step + 1, self.progress.version
        with clock("claim"):
            claim = self.claim(step)
        if claim is None:
            return False
        failpoint("learner.after_claim")
        if claim.skipped:
            self.progress.count_skipped()
            self.clock = Clock()
            return True
        with clock("fetch"):
            batch = self.fetch(claim)
        if not self.is_young(batch, version, claim.limit):
            self.give_back(step)
            self.clock = Clock()
            return True
        self.look_ahead(step + 1)
        settings = claim.settings or self.ranks.share(
            lambda: live_settings(self.config, self.control, lr_factor=self.progress.lr_factor)
        )
        began = time.time()
        outcome = self.train(batch, settings, step=step, version=version, limit=claim.limit, clock=clock)
        span = [began, time.time()]
        with clock("save"):
            self.bound_redo(step)
        failpoint("learner.before_ack")
        with clock("ack"):
            stepped = self.feed.acknowledge(
                step=step, applied=outcome.applied, reason=outcome.reason, settings=settings,
                digest=weights_digest(self.models.actor.module) if outcome.applied else "", optimizer_span=span,
            )  # fmt: skip
        failpoint("learner.after_ack")
        self.stats = stepped.stats
        self.count(batch, outcome, limit=claim.limit)
        with clock("publish"):
            self.publish()
        values = self.report(batch, outcome, clock, self.progress, version=version, limit=claim.limit)
        self.clock = Clock()
        with self.clock("save"):  # after the line of the step: it is not redone, so nothing would write it later
            self.save(wanted=stepped.checkpoint_wanted)
        self.refuse_to_go_on_skipping()
        if self.guard is not None:
            heed(self, self.guard, values)
        return True

    def train(
        self, batch: Batch, settings: dict[str, float], *, step: int, version: int, limit: int, clock: Clock
    ) -> Outcome:  # fmt: skip
        """`train_step` with what this learner has."""
        return train_step(
            self.models, batch, config=self.config, settings=settings, step=step, version=version, limit=limit,
            ranks=self.ranks, clock=clock,
        )  # fmt: skip

    def claim(self, step: int) -> Any:
        """The next batch, on every rank; None when the data ended. Waits while the run is paused."""
        return self.ranks.share(lambda: self.claim_first(step))

    def claim_first(self, step: int) -> Any:
        """`claim` on rank 0."""
        while (self.guard_pauses() or self.control.desired() == "paused") and not self.stop.is_set():
            self.control.update(state="paused")
            self.stop.wait(PAUSE_POLL_S)
        if self.stop.is_set():
            raise Stopped("a batch")
        self.control.update(state=f"step {step}", version=self.progress.version)
        if self.ahead is not None and self.ahead.step == step:
            try:
                return self.ahead.claim(stop=self.stop, on_wait=self.waits)
            except LeewayError as e:
                self.ask_again(step, e)
        return self.feed.claim(
            step=step,
            version=self.progress.version,
            num_groups=self.config.data.train_batch_size,
            on_wait=self.waits,
        )

    def fetch(self, claim: Any) -> Batch:
        """The whole batch of a claim, on every rank; each has fetched its own share."""
        return put_together(lambda: self.own_part(claim), self.ranks).to(self.ranks.device)

    def own_part(self, claim: Any) -> Part:
        """This rank's part; in host memory."""
        if self.ahead is not None and self.ahead.step == claim.step:
            try:
                return self.ahead.part(claim, stop=self.stop)
            except LeewayError as e:
                self.ask_again(claim.step, e)
        return part_of(claim, self.feed, self.ranks)

    def look_ahead(self, step: int) -> None:
        """Have the batch of `step` claimed and fetched while the one before it is trained."""
        if self.ahead is None or step > self.config.run.max_steps or self.control.desired() == "paused":
            return
        self.ahead.order(step=step, version=self.progress.version + 1, num_groups=self.config.data.train_batch_size)

    def stop_looking_ahead(self) -> None:
        if self.ahead is not None:
            self.ahead.cancel()

    def ask_again(self, step: int, error: LeewayError) -> None:
        """What was asked for ahead has failed: note it, if asking in step may mend it."""
        if not can_be_mended(error):
            raise error
        self.log.warning("the batch of step %d, asked for ahead: %s; it is asked for again", step, error)

    def guard_pauses(self) -> bool:
        """Whether the guard wants a pause that it could not tell the others of yet; tells them if it can."""
        return self.guard is not None and self.guard.pauses(self.control)

    def waits(self, reason: str) -> None:
        """Say what the learner waits for: in the registry at once, in the log now and then."""
        self.control.update(state=f"waits: {reason}")
        if (now := time.monotonic()) - self.said_at > SAY_AGAIN_S:
            self.said_at = now
            self.log.info("waits: %s", reason)

    def is_young(self, batch: Batch, version: int, limit: int) -> bool:
        """The staleness bound, asserted once more. All ranks hold the whole batch, so they agree."""
        youngest, oldest = batch.ages(version)
        masked = self.config.staleness.policy == "mask"  # older tokens get weight 0
        if youngest >= 0 and (youngest if masked else oldest) <= limit:
            return True
        self.log.error(
            "batch given back: its tokens are %d to %d versions old at version %d, the limit is %d",
            youngest, oldest, version, limit,
        )  # fmt: skip
        return False

    def give_back(self, step: int) -> None:
        """Give the batch of `step` back, once: a broker that judges otherwise would hand it out for ever."""
        self.feed.give_back(step=step, reason="stale")
        if step == self.given_back:
            raise LeewayError(
                f"step {step}: two batches in a row had tokens outside the staleness limit, though the broker took "
                "them for young enough; this is a fault of Leeway, please report it with the logs of both"
            )
        self.given_back = step

    def count(self, batch: Batch, outcome: Outcome, *, limit: int) -> None:
        """Note the row; after a skip make sure that the weights are still those of the version."""
        if outcome.applied:
            self.progress.count(batch, window=self.config.run.goal_window, limit=limit)
            return
        self.progress.count_skipped()
        self.stop_looking_ahead()  # its batch is trained at this version now, so it is claimed anew
        self.log.warning("step %d skipped: %s is not finite", self.progress.step, outcome.where)
        if outcome.partly:
            resume.restore_weights(self)

    def publish(self, *, always: bool = False) -> None:
        """Send the weights every `weights.publish_every` versions, or `always`. Returns once they are copied out."""
        version = self.progress.version
        if version - self.published < (1 if always else self.config.weights.publish_every):
            return
        failpoint("learner.publish")
        weights = PublishedWeights(
            self.models.actor.module, dtype=self.config.model.dtype, adapters_only=self.config.weights.adapters_only
        )
        self.publisher.publish(version, weights)
        self.published = version
        self.progress.count_publication()
        self.control.update(version=version)
        validation.ask_if_due(self)

    def save(self, *, wanted: bool = False, wait: bool = False) -> None:
        """A checkpoint once the newest is `trainer.save_freq` steps old, and whenever the broker wants one.

        Under `trainer.async_save` training goes on once its tensors are copied, unless `wait`.
        """
        step, freq, asynchronous = self.progress.step, self.config.trainer.save_freq, self.config.trainer.async_save
        self.confirm_saved()
        if step != self.saved and (wanted or 0 < freq <= step - max(self.saved, 0)):
            self.confirm_saved(wait=True)
            state = self.progress.as_state(time.monotonic() - self.started)
            self.checkpoints.begin(step, self.models, state, copy=asynchronous and not wait)
            self.saved = step
        self.confirm_saved(wait=wait or not asynchronous)

    def bound_redo(self, step: int) -> None:
        """Wait for the checkpoint in the making if a crash, once `step` is acknowledged, would have more than
        `trainer.save_freq` steps redone: it has had the time in which `step` was trained."""
        if 0 < self.config.trainer.save_freq < step - self.valid:
            self.confirm_saved(wait=True)

    def confirm_saved(self, *, wait: bool = False) -> None:
        """Tell the broker of the checkpoint that has been in the making, once it is in its place."""
        path = self.checkpoints.finished(wait=wait)
        if path is None:
            return
        self.valid = step_of(path)
        self.feed.checkpoint_valid(step=self.valid, path=str(path))
        failpoint("learner.checkpoint.told")
        ending.write_summary(self, "")

    def report(
        self, batch: Batch, outcome: Outcome, clock: Clock, progress: Progress, *, version: int, limit: int
    ) -> dict[str, float]:
        """The metrics line of the step that `progress` ends with, unless it has one (a redone step): then none."""
        if self.ranks.share(lambda: self.writer.has(progress.step)):
            return {}
        values = report.numbers(
            outcome.metrics | report.batch_metrics(batch, version=version, limit=limit, config=self.config)
        )
        values |= {"staleness/limit": limit, "training/skipped": int(not outcome.applied)}
        values |= report.progress_metrics(progress, self.config) | report.time_metrics(clock, batch)
        values |= report.broker_metrics(self.stats) | self.publisher.stats() | self.validations.metrics(self)
        if (ratio := values.get("generator/overlap_ratio")) is not None:
            progress.count_overlap(ratio)
        self.writer.write(progress.step, values)
        return values

    def refuse_to_go_on_skipping(self) -> None:
        if self.progress.skipped_in_a_row >= self.config.trainer.max_nonfinite_steps:
            raise TrainingError(
                f"{self.progress.skipped_in_a_row} steps in a row had a loss or gradient that is not finite "
                "(trainer.max_nonfinite_steps); lower actor.optim.lr, or continue from an earlier checkpoint"
            )


@dataclass(frozen=True)
class Outcome:
    """What became of a batch."""

    applied: bool
    metrics: Metrics
    reason: str = ""  # why it was not applied
    where: str = ""  # "actor", "critic"
    partly: bool = False  # not applied, but the weights are no longer those of the version


def train_step(
    models: Models, batch: Batch, *, config: Config, settings: dict[str, float], step: int, version: int, limit: int,
    ranks: Ranks, clock: Clock,
) -> Outcome:  # fmt: skip
    """One batch, from its log-probs to new weights. The same for a step and for its redoing.

    step: number of the row this becomes; version: of the weights as they are now; limit: oldest age of a
    token that carries loss weight.
    """
    actor, critic, reward_kl_coef = models.actor, models.critic, models.kl_controller.value
    micros = pack_all(batch, models, config, ranks)
    start = start_of_step(models, batch, micros, config=config, ranks=ranks, clock=clock)
    with clock("adv"):
        targets, metrics = make_targets(
            config, batch, start, kl_controller=models.kl_controller, step=step, young=batch.young(version, limit)
        )
        metrics |= report.target_metrics(targets, batch.mask)
        metrics |= report.drift_metrics(batch, start, targets, version=version, young=batch.young(version, limit))
        metrics |= report.packing_metrics(batch, micros, ranks)
        del micros  # the updates lay out their own
        metrics["actor/kl_coef"] = torch.tensor(kl_coef_of(config, settings, step))
    failpoint("learner.before_update")
    critic_updates: list[Metrics] = []
    actor_updates: list[Metrics] = []
    try:
        if critic is not None:
            with clock("update_critic"):
                loss = critic_loss(config, critic.module, targets)
                lr = rate_of(config, "critic", settings, step)
                critic_updates = train_on_batch(critic, batch, targets.live, loss, config=config, lr=lr, ranks=ranks)
        if critic is None or step > config.critic.warmup_steps:
            with clock("update_actor"), exact_kl(config, models.reference) as besides:
                loss = actor_loss(
                    config, actor.module, batch, targets, settings, step=step, version=version, besides=besides
                )
                lr = rate_of(config, "actor", settings, step)
                actor_updates = train_on_batch(actor, batch, targets.live, loss, config=config, lr=lr, ranks=ranks)
    except NotFinite as e:
        models.kl_controller.value = reward_kl_coef
        return Outcome(False, metrics, "nonfinite", where=e.part, partly=e.partly or bool(critic_updates))
    return Outcome(
        True, metrics | report.of_updates("critic", critic_updates) | report.of_updates("actor", actor_updates)
    )
