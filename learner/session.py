"""What surrounds the steps: connections made, models loaded, state resumed; and the way back."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from common.adapters import Adapters
from common.errors import GO_BACK, LeewayError
from common.metrics import FILE as METRICS_FILE
from common.metrics import MetricsWriter, read_metrics
from common.model_files import FileServer, digest_of, list_files
from common.roles import Role
from learner import ending, resume
from learner.ahead import Ahead
from learner.canary import AdapterCanary, CanaryForward
from learner.checkpoint import Checkpoints
from learner.families import vocab_size
from learner.feed import Feed
from learner.gathering import Gathering
from learner.guard import Guard
from learner.initial import initial_folder, load_tokenizer, served_folder
from learner.loop import Learner
from learner.models import load_models
from learner.publish import Publisher
from learner.ranks import Ranks, arrange, join_ranks, leave_ranks
from learner.replay import NullPublisher, RecordedFeed, open_replay, take_initial_weights
from learner.together import Helper, SharedFeed
from learner.warmup import WarmupResult


class Session:
    """One process of the learner. What was opened is closed in reverse order, whatever happens."""

    def __init__(self, role: Role, *, started: float) -> None:
        """started: `time.monotonic()` when this process began."""
        self.role, self.started = role, started
        self.learner: Learner | None = None
        self.tokenizer: Any = None
        self._files: FileServer | None = None  # what engines on other hosts start from
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
        if ranks.world_size != config.trainer.nproc_per_node:
            role.log.warning(
                "%d ranks were started, the config says trainer.nproc_per_node=%d",
                ranks.world_size, config.trainer.nproc_per_node,
            )  # fmt: skip
        split, shard_size = config.actor.ulysses_sequence_parallel_size, config.actor.fsdp_config.fsdp_size
        ranks = arrange(ranks, split=split, shard_size=shard_size)
        if config.replay.rollouts:
            ranks.share(lambda: take_initial_weights(config, role.run_dir))
        served = ranks.share(self._announce_model)
        self.tokenizer = load_tokenizer(served, config)
        checkpoints = Checkpoints(
            role.run_dir / "checkpoints", run_id=control.run_id, keep=config.trainer.max_ckpt_to_keep, ranks=ranks
        )
        own: Feed | RecordedFeed | None = None
        if config.replay.rollouts:
            own = self._recorded_feed(ranks, checkpoints.position(), served)
        else:
            ranks.share(self._wait_for_broker)
            own = self._own_feed()
        feed = SharedFeed(own, ranks)
        attached = feed.attach()
        alone = ranks.first or bool(config.replay.rollouts)  # a replay gathers no weights: nobody is sent them
        own_publisher = self._own_publisher(attached.epoch) if alone else Helper()
        publisher = own_publisher
        if ranks.world_size > 1 and not config.replay.rollouts:
            publisher = Gathering(own_publisher, ranks)
            self._open.callback(publisher.close)
        folder, warmup = ranks.share(lambda: self._initial_weights(served, ranks.device))
        if config.weights.adapters_only:
            ranks.share(lambda: self._announce(folder))  # engines read the base
        self._state("loads the models")
        writer = self._own_writer() if ranks.first else Helper()
        self.learner = Learner(
            config=config, ranks=ranks, models=load_models(config, folder, ranks), feed=feed, publisher=publisher,
            control=control, checkpoints=checkpoints, writer=writer, stop=role.stop, log=role.log, run_dir=role.run_dir,
            started=self.started, ahead=self._ahead(own, ranks) if isinstance(own, Feed) else None,
            guard=self._guard(),
        )  # fmt: skip
        if ranks.first and isinstance(own, Feed):
            self.learner.stats = own.status()
        if isinstance(own_publisher, Publisher):
            own_publisher.prove_with(self._canary(folder))
        if warmup is not None:
            writer.write(0, {f"warmup/{k}": v for k, v in vars(warmup).items()})
        resume.resume(self.learner, attached, begun=role.begun)
        self._recall(self.learner)
        self.learner.publish(always=True)
        if isinstance(publisher, Gathering):
            publisher.wait()
        if isinstance(own_publisher, Publisher):
            own_publisher.make_canary()
        return self.learner

    def finish(self, ended: str) -> None:
        """Leave behind what the user wants to find."""
        self._state(f"ends: {ended}")
        ending.finish(self.learner, ended, tokenizer=self.tokenizer)

    def fail(self, error: LeewayError) -> None:
        """Leave behind how far the run came; what fails in that is not of interest any more."""
        if self.learner is not None and error.exit_code not in (0, GO_BACK):
            with suppress(Exception):
                ending.write_summary(self.learner, f"ended by an error: {str(error).splitlines()[0]}")

    # ------------------------------------------------------------ parts, most of them rank 0's alone
    def _announce_model(self) -> Path:
        served = served_folder(self.role.config, self.role.run_dir)
        if not self.role.config.weights.adapters_only:  # else its weights may still be on their way
            self._announce(served)
        return served

    def _announce(self, folder: Path) -> None:
        if self.role.config.replay.rollouts:
            return  # no engine starts from it
        files = list_files(folder)
        self._files = FileServer(folder, files)
        self.role.control.publish_model(str(folder), digest_of(files))

    def _wait_for_broker(self) -> None:
        self._state("waits for the broker")
        self.role.control.wait_for(
            "broker", deadline_s=self.role.config.run.start_timeout_s, stop=self.role.stop,
            why="the learner trains what it hands out",
        )  # fmt: skip

    def _own_feed(self) -> Feed:
        role = self.role
        feed = Feed(self._broker_address, run_id=role.control.run_id, name=role.name, stop=role.stop)
        self._open.callback(feed.close)
        return feed

    def _recorded_feed(self, ranks: Ranks, start: tuple[int, int], served: Path) -> RecordedFeed | None:
        """A record in the broker's place, on rank 0; what is wrong with it is raised on all."""
        feeds: list[RecordedFeed] = []

        def read() -> None:
            self._state("reads the record")
            vocabulary = vocab_size(served, trust_remote_code=self.role.config.model.trust_remote_code)
            feeds.append(open_replay(self.role.config, start=start, stop=self.role.stop, vocab_size=vocabulary))

        ranks.share(read)
        for feed in feeds:
            self._open.callback(feed.close)
        return feeds[0] if feeds else None

    def _own_publisher(self, epoch: int) -> Publisher | NullPublisher:
        role = self.role
        if role.config.replay.rollouts:
            return NullPublisher()
        publisher = Publisher(
            run_id=role.control.run_id, epoch=epoch, config=role.config.weights, files=self._files,
            folder=role.run_dir / "weights",
        )  # fmt: skip
        self._open.callback(publisher.close)
        role.control.update(address=publisher.address)
        return publisher

    def _guard(self) -> Guard | None:
        config = self.role.config
        return Guard(config.trainer.guard) if config.trainer.guard.limits and not config.replay.rollouts else None

    def _recall(self, learner: Learner) -> None:
        """What the guard knew when the learner before this one ended."""
        if learner.guard is not None and learner.ranks.first:
            rows, _ = read_metrics(self.role.run_dir / METRICS_FILE)
            learner.guard.recall(rows, after=learner.progress.rolled_back_at, to=learner.progress.step)

    def _canary(self, folder: Path) -> CanaryForward:
        config, model = self.role.config, self.role.config.model
        served: dict[str, Any] = {
            "dtype": model.dtype, "max_tokens": config.max_sequence_tokens - 1,
            "trust_remote_code": model.trust_remote_code,
        }  # fmt: skip
        if config.weights.adapters_only:
            return AdapterCanary(folder, Adapters.of(model), **served)
        return CanaryForward(self.learner.models.actor.module.lm, **served)

    def _own_writer(self) -> MetricsWriter:
        writer = MetricsWriter(self.role.run_dir, self.role.config)
        self._open.callback(writer.close)
        return writer

    def _initial_weights(self, served: Path, device: torch.device) -> tuple[Path, WarmupResult | None]:
        role = self.role
        return initial_folder(
            role.config, role.run_dir, served, self.tokenizer, stop=role.stop, on_state=self._state, device=device
        )

    def _ahead(self, feed: Feed, ranks: Ranks) -> Ahead:
        ahead = Ahead(feed.another(), ranks)
        self._open.callback(ahead.close)
        return ahead

    def _broker_address(self) -> str | None:
        """Where the broker is now; a restarted one has another port."""
        return next((e.address for e in self.role.control.entries("broker") if e.address), None)

    def _state(self, text: str) -> None:
        self.role.control.update(state=text)
