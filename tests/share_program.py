"""One rank of a learner whose ranks fetch their own shares; writes what it saw to OUT/<rank>.json.

`python -m tests.share_program exchange OUT` makes parts without a broker; `python -m tests.share_program train OUT
ADDRESS RUN_ID WEIGHTS LEDGER STEPS [gone] CONFIG…` takes steps with a real one. gone: before rank 1 fetches its share
of the third step, the payloads of that share are deleted.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sqlite3
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from common.errors import DeadlineError, LedgerError, LeewayError, Stopped, WireError
from common.wire import Sample
from learner.ahead import Ahead
from learner.batch import make_batch
from learner.dealing import own_share, part_of, put_together
from learner.feed import Claim, Feed, Group
from learner.models import load_models
from learner.ranks import Ranks, join_ranks, leave_ranks
from learner.served import weights_digest
from learner.together import Helper, SharedFeed
from tests.learner_parts import SimulatedPublisher, SimulatedWriter, make_config, make_groups, make_learner


class Payloads:
    """A feed of samples in memory; notes the groups that were fetched."""

    def __init__(self, samples: list[Sample]) -> None:
        self.samples, self.fetched = samples, []

    def fetch(self, claim: Claim) -> list[Sample]:
        self.fetched += [g.group for g in claim.groups]
        return [s for s in self.samples if s.group in {g.group for g in claim.groups}]


def claim_of(samples: list[Sample]) -> Claim:
    groups = dict.fromkeys(s.group for s in samples)
    headers = {g: tuple({"num_tokens": len(s.response_ids)} for s in samples if s.group == g) for g in groups}
    return Claim(1, 0, 2, False, tuple(Group(g, 0, headers[g]) for g in groups))


def exchange(ranks: Ranks) -> dict[str, Any]:
    """Batches put together equal those of one rank; what one rank raises is raised on all."""
    seen: dict[str, Any] = {"shares": [], "raised": []}
    for num_groups, greedy in ((1, False), (2, True), (5, False), (5, True)):
        samples = make_groups(make_config("data.train_batch_size=6"), num_groups)
        samples = [s for s in samples if s.group % 1000 < num_groups]
        samples = [dataclasses.replace(s, reward_parts={"exact": s.reward, "é": 0.5 * s.index}) for s in samples]
        if greedy:  # the last of each group is the baseline of the others
            samples = [dataclasses.replace(s, sampling={"temperature": 0.0}) if s.index == 3 else s for s in samples]
        feed, claim = Payloads(samples), claim_of(samples)
        batch = put_together(functools.partial(part_of, claim, feed, ranks), ranks)
        whole = make_batch(samples)
        for f in dataclasses.fields(whole):
            ours, theirs = getattr(batch, f.name), getattr(whole, f.name)
            same = ours == theirs
            assert type(ours) is type(theirs) and (same if isinstance(same, bool) else same.all()), f.name
            assert getattr(ours, "dtype", None) == getattr(theirs, "dtype", None), f.name
        seen["shares"].append(feed.fetched)
    for at, error in ((0, DeadlineError("a", 1.0)), (1, LedgerError("b")), (1, WireError("c")), (1, Stopped("d"))):

        def get(at: int = at, error: LeewayError = error) -> Any:
            if ranks.rank == at:
                raise error
            return part_of(claim_of(samples), Payloads(samples), ranks)

        try:
            put_together(get, ranks)
        except LeewayError as e:
            seen["raised"].append([isinstance(e, Stopped), str(e), e.exit_code])
    assert len(put_together(lambda: part_of(claim_of(samples), Payloads(samples), ranks), ranks))  # and it goes on
    return seen


class NotingFeed(Feed):
    """Notes the keys of what it fetches; `deletes`: the step whose payloads are gone by then, and the ledger's file."""

    def __init__(self, *args: Any, fetched: list, deletes: tuple[int, str] = (0, ""), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fetched, self.deletes, self.is_ahead = fetched, deletes, False

    def another(self) -> NotingFeed:
        feed = NotingFeed(
            self._lookup, run_id=self._run_id, name=self._name, stop=threading.Event(), fetched=self.fetched,
            deletes=self.deletes,
        )  # fmt: skip
        feed.epoch, feed.is_ahead = self.epoch, True
        return feed

    def fetch(self, claim: Claim) -> list[Sample]:
        if claim.step == self.deletes[0]:
            with sqlite3.connect(self.deletes[1], timeout=20) as ledger:
                ledger.executemany("DELETE FROM payloads WHERE id >> 28 = ?", [(g.group,) for g in claim.groups])
        self.fetched += [[claim.step, g.group, g.attempt, self.is_ahead] for g in claim.groups]
        return super().fetch(claim)


def train(ranks: Ranks, address: str, run_id: str, weights: str, ledger: str, steps: str, *rest: str) -> dict[str, Any]:
    gone, overrides = rest[:1] == ("gone",), [x for x in rest if x != "gone"]
    config, fetched = make_config(*overrides, f"run.max_steps={steps}", f"run.id={run_id}"), []
    own = NotingFeed(
        address, run_id=run_id, name=f"learner-rank{ranks.rank}" if ranks.rank else "learner", stop=threading.Event(),
        timeout_s=20, fetched=fetched, deletes=(3, ledger) if gone and ranks.rank == 1 else (0, ""),
    )  # fmt: skip
    feed, run_dir = SharedFeed(own, ranks), Path(ledger).parent
    feed.attach()
    models, ahead = load_models(config, Path(weights), ranks), Ahead(own.another(), ranks)
    learner = make_learner(
        config, models, feed, run_dir, ranks=ranks, ahead=ahead,
        publisher=SimulatedPublisher() if ranks.first else Helper(),
        writer=SimulatedWriter() if ranks.first else Helper(),
    )  # fmt: skip
    try:
        ended = learner.run()
    except LeewayError as e:
        ended = str(e)
    ahead.close()
    status = own.status() if ranks.first else {}
    own.close()
    digest = weights_digest(models.actor.module)
    return {"ended": ended, "fetched": fetched, "digest": digest, "step": learner.progress.step, "status": status}


def main(what: str, out: str, *rest: str) -> None:
    torch.set_num_threads(1)
    ranks = join_ranks(timeout_s=120)
    try:
        assert own_share(claim_of([]), ranks).groups == ()
        seen = {"exchange": exchange, "train": train}[what](ranks, *rest)
        Path(out, f"{ranks.rank}.json").write_text(json.dumps(seen))
    finally:
        leave_ranks()


if __name__ == "__main__":
    main(*sys.argv[1:])
