"""The two gates in a simulated run: generators that ask at every instant, random durations, no real parts."""

import heapq
import random
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import pytest

from common import staleness

B = 4
NUM_STEPS = 150
SETTINGS = [(k, limit) for k in (1, 2, 3) for limit in range(4) if k <= limit + 1]


@dataclass
class Group:
    number: int
    oldest: int  # version that its generator held when it was leased
    ready: bool = False


@dataclass
class Run:
    """Events in a heap; after each event every generator asks until refused, then the learner claims if it can."""

    publish_every: int
    limit: int
    policy: str  # "wait": the first B of all in flight, waited for; "drop": the first B that are ready
    seed: int
    extra_room: int = 0  # a seeded fault: so many groups too many are leased
    version: int = 0
    held: list[int] = field(default_factory=lambda: [0, 0, 0])
    groups: list[Group] = field(default_factory=list)  # leased or ready
    claimed: list[Group] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)  # of each trained group
    dropped: int = 0
    now: float = 0.0

    def __post_init__(self):
        self.rng = random.Random(self.seed)
        self.numbers, self.ties = count(), count()
        self.events = []

    def go(self):
        self.settle()
        while self.version < NUM_STEPS:
            assert self.events, f"deadlock at version {self.version}: held {self.held}, {len(self.groups)} in flight"
            self.now, _, happen = heapq.heappop(self.events)
            happen()
            self.settle()
        return self

    def after(self, seconds, happen):
        heapq.heappush(self.events, (self.now + seconds, next(self.ties), happen))

    def settle(self):
        if self.policy == "drop":
            doomed = [
                g for g in self.groups if staleness.is_doomed(oldest=g.oldest, version=self.version, limit=self.limit)
            ]
            self.dropped += len(doomed)
            self.groups = [g for g in self.groups if g not in doomed]
        while self.lease_somewhere() or self.claim():
            pass

    def lease_somewhere(self):
        for held in self.rng.sample(self.held, len(self.held)):
            outstanding = len(self.groups) + len(self.claimed) - self.extra_room
            if staleness.may_lease(outstanding=outstanding, version=self.version, held=held, limit=self.limit, batch=B):
                group = Group(next(self.numbers), oldest=held)
                self.groups.append(group)
                self.after(self.rng.choice([0.1, 1.0, 3.0]) * self.rng.random(), partial(setattr, group, "ready", True))
                return True
        return False

    def claim(self):
        if self.claimed:
            return False
        in_order = sorted(self.groups, key=lambda g: (staleness.deadline(g.oldest, self.limit), g.number))
        batch = [g for g in in_order if g.ready or self.policy == "wait"][:B]
        if len(batch) < B or not all(g.ready for g in batch):
            return False
        self.claimed = batch
        self.groups = [g for g in self.groups if g not in batch]
        self.after(self.rng.random(), self.finish_step)
        return True

    def finish_step(self):
        self.staleness += [self.version - g.oldest for g in self.claimed]
        self.claimed = []
        self.version += 1
        if self.version % self.publish_every == 0:
            for i in range(len(self.held)):
                # η = 0 is synchronous: the gate stays closed to whoever has not yet got the version
                self.after(2 * self.rng.random(), partial(self.receive, i, self.version))

    def receive(self, generator, version):
        self.held[generator] = max(self.held[generator], version)


@pytest.mark.parametrize(("publish_every", "limit"), SETTINGS)
def test_in_deadline_order_over_all_in_flight_nothing_is_ever_too_old(publish_every, limit):
    for seed in range(10):
        run = Run(publish_every, limit, "wait", seed).go()
        assert len(run.staleness) == NUM_STEPS * B
        assert min(run.staleness) >= 0 and max(run.staleness) <= limit


@pytest.mark.parametrize(("publish_every", "limit"), SETTINGS)
def test_first_ready_with_drop_claims_nothing_too_old_and_counts_drops(publish_every, limit):
    dropped = 0
    for seed in range(10):
        run = Run(publish_every, limit, "drop", seed).go()
        assert min(run.staleness) >= 0 and max(run.staleness) <= limit
        issued = next(run.numbers)
        assert issued == len(run.staleness) + len(run.claimed) + len(run.groups) + run.dropped
        dropped += run.dropped
    assert (dropped > 0) == (limit >= publish_every)  # else exactly what the next k steps consume is in flight


@pytest.mark.parametrize(("publish_every", "limit"), SETTINGS)
def test_the_lease_gate_is_tight(publish_every, limit):
    """One group more in flight than the gate allows, and sooner or later one is too old."""
    worst = [max(Run(publish_every, limit, "wait", seed, extra_room=1).go().staleness) for seed in range(10)]
    assert max(worst) > limit


def test_gates_by_value():
    gate = dict(version=7, limit=2, batch=64)
    assert staleness.lease_room(outstanding=100, held=7, **gate) == 92
    assert staleness.may_lease(outstanding=191, held=7, **gate) and not staleness.may_lease(
        outstanding=192, held=7, **gate
    )
    assert staleness.may_lease(outstanding=63, held=5, **gate) and not staleness.may_lease(
        outstanding=64, held=5, **gate
    )
    assert not staleness.may_lease(outstanding=0, held=4, **gate)
    assert not staleness.may_lease(outstanding=0, held=-1, version=0, limit=2, batch=64)  # no weights yet
    assert not staleness.may_lease(outstanding=0, held=8, **gate)  # from the future
    assert staleness.deadline(5, 2) == 7
    assert staleness.may_train(oldest=5, version=7, limit=2) and not staleness.may_train(oldest=4, version=7, limit=2)
    assert not staleness.may_train(oldest=8, version=7, limit=2)
    assert staleness.is_doomed(oldest=4, version=7, limit=2) and not staleness.is_doomed(oldest=5, version=7, limit=2)
