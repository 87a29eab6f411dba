"""What surrounds the steps: connections made, models loaded, state resumed; and the way back."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from common.metrics import MetricsWriter
from common.roles import Role
from learner import ending, resume
from learner.ahead import Ahead
from learner.canary import CanaryForward
from learner.checkpoint import Checkpoints
from learner.feed import Attached, Feed
from learner.initial import initial_folder, load_tokenizer, served_folder
from learner.loop import Learner
from learner.model import vocab_size
from learner.models import load_models
from learner.publish import Publisher
from learner.ranks import join_ranks, leave_ranks
from learner.replay import NullPublisher, RecordedFeed, open_replay, take_initial_weights


class Session:
    """One process of the learner. What was opened is closed in reverse order, whatever happens."""

    def __init__(self, role: Role, *, started: float) -> None:
        """started: `time.monotonic()` when this process began."""
        self.role, self.started = role, started
        self.learner: Learner | None = None
        self.tokenizer: Any = None
        self._open = ExitStack()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def start(self) -> Learner:
        """Everything up to the first claim: version v is on its way to the generators when this returns.

        Raises:
            DeadlineError: no broker appeared.
            ConfigError, CheckpointError, Stopped.
        """
        role, config, control = self.role, self.role.config, self.role.control
        if config.truncates_sampling:
            role.log.warning(
                "rollout.top_p=%g, rollout.top_k=%d: samples come from a part of the distribution, log-probs are those "
                "of the whole; the gradients are biased", config.rollout.top_p, config.rollout.top_k,
            )  # fmt: skip
        torch.use_deterministic_algorithms(config.trainer.deterministic)
        ranks = join_ranks()
        self._open.callback(leave_ranks)
        if config.replay.rollouts:
            take_initial_weights(config, role.run_dir)
        served = served_folder(config, role.run_dir)
        self.tokenizer = load_tokenizer(served, config)
        control.publish_model(str(served))

        checkpoints = Checkpoints(
            role.run_dir / "checkpoints", run_id=control.run_id, keep=config.trainer.max_ckpt_to_keep, ranks=ranks
        )
        feed, attached, publisher = self._replay(checkpoints, served) if config.replay.rollouts else self._join()
        folder, warmup = initial_folder(
            config, role.run_dir, served, self.tokenizer, stop=role.stop, on_state=self._state
        )
        self._state("loads the models")
        writer = MetricsWriter(role.run_dir, config)
        self._open.callback(writer.close)
        self.learner = Learner(
            config=config, ranks=ranks, models=load_models(config, folder, ranks), feed=feed, publisher=publisher,
            control=control, checkpoints=checkpoints, writer=writer, stop=role.stop, log=role.log, run_dir=role.run_dir,
            started=self.started, ahead=self._ahead(feed, ranks.device) if isinstance(feed, Feed) else None,
        )  # fmt: skip
        if isinstance(publisher, Publisher):
            publisher.prove_with(
                CanaryForward(
                    self.learner.models.actor.module.lm, dtype=config.model.dtype,
                    max_tokens=config.max_sequence_tokens - 1, trust_remote_code=config.model.trust_remote_code,
                )
            )  # fmt: skip
        if warmup is not None:
            writer.write(0, {f"warmup/{k}": v for k, v in vars(warmup).items()})
        resume.resume(self.learner, attached)
        self.learner.publish(always=True)
        if isinstance(publisher, Publisher):
            publisher.make_canary()
        return self.learner

    def _join(self) -> tuple[Feed, Attached, Publisher]:
        """Broker and engines."""
        role, config, control = self.role, self.role.config, self.role.control
        self._state("waits for the broker")
        control.wait_for(
            "broker", deadline_s=config.run.start_timeout_s, stop=role.stop, why="the learner trains what it hands out"
        )
        feed = Feed(self._broker_address, run_id=control.run_id, name=role.name, stop=role.stop)
        self._open.callback(feed.close)
        attached = feed.attach()
        publisher = Publisher(run_id=control.run_id, epoch=attached.epoch, config=config.weights)
        self._open.callback(publisher.close)
        control.update(address=publisher.address)
        return feed, attached, publisher

    def _replay(self, checkpoints: Checkpoints, served: Path) -> tuple[RecordedFeed, Attached, NullPublisher]:
        """A record in their place."""
        self._state("reads the record")
        vocabulary = vocab_size(served, trust_remote_code=self.role.config.model.trust_remote_code)
        feed = open_replay(self.role.config, start=checkpoints.position(), stop=self.role.stop, vocab_size=vocabulary)
        self._open.callback(feed.close)
        return feed, feed.attach(), NullPublisher()

    def finish(self, ended: str) -> None:
        """Leave behind what the user wants to find."""
        self._state(f"ends: {ended}")
        ending.finish(self.learner, ended, tokenizer=self.tokenizer)

    def _ahead(self, feed: Feed, device: torch.device) -> Ahead:
        ahead = Ahead(feed.another(), device=device)
        self._open.callback(ahead.close)
        return ahead

    def _broker_address(self) -> str | None:
        """Where the broker is now; a restarted one has another port."""
        return next((e.address for e in self.role.control.entries("broker") if e.address), None)

    def _state(self, text: str) -> None:
        self.role.control.update(state=text)
