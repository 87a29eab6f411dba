"""Random operations on a ledger and what must hold after each of them.

A generator, a learner and a broker that crashes are played by one ``Walk``; ``pick(n)`` chooses one
of n possibilities, from a seed or from hypothesis. What an acknowledgement would have told somebody
counts only once it is committed, as in the real broker.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from broker.records import Claim, Rules
from broker.store import NewSample, Store
from common.errors import FencedError, LedgerError

B, N = 3, 3
GENERATORS = ("a", "b", "c")
RULES = Rules(group_size=N, batch_size=B, max_attempts=3, lease_timeout_s=10.0, lease_limit_s=60.0)


class Walk:
    def __init__(
        self,
        pick: Callable[[int], int],
        ledger_class,
        store: Store | None = None,
        *,
        limit=1,
        policy="drop",
        filter_groups=False,
    ):
        self.pick, self.ledger_class, self.store = pick, ledger_class, store
        self.rules = replace(RULES, policy=policy, filter_groups=filter_groups)
        self.ledger = ledger_class(self.rules, limit=limit, snapshot=store.snapshot() if store else None)
        self.now = 0.0
        self.held = dict.fromkeys(GENERATORS, 0)
        self.num_learners = 0
        self.epoch = 0
        self.steps: list[tuple[int, Claim, bool]] = []  # acknowledged and committed
        self.trained: dict[int, int] = {}  # group -> step, in the history that survives
        self.given_up: dict[int, int] = {}  # group -> step, in what rollbacks gave up
        self.num_rollbacks = 0
        self.stored: set[tuple[int, int, int]] = set()  # committed samples
        self._samples: list[NewSample] = []
        self._acknowledged: list[tuple[int, Claim, bool]] = []
        self._ended: list[tuple[int, int]] = []  # attempts that were live, newest last
        self.done: Counter[str] = Counter()
        self.attach()
        self.commit()

    OPERATIONS = (
        "lease", "lease", "lease", "sample", "sample", "sample", "sample", "sample", "finish", "produce", "produce",
        "duplicate",
        "stray", "fault", "progress", "give_back", "forget", "expire", "update", "update", "claim", "claim",
        "claim", "claim",
        "acknowledge", "acknowledge", "skip", "give_batch_back", "attach", "checkpoint", "roll_back",
        "old_epoch", "set_limit", "stop", "commit",
        "commit", "crash",
    )  # fmt: skip

    def step(self):
        name = self.OPERATIONS[self.pick(len(self.OPERATIONS))]
        getattr(self, name)()
        self.done[name] += 1
        self.check()

    # ------------------------------------------------------------ generators
    def lease(self):
        g = GENERATORS[self.pick(3)]
        held, v = self.held[g], self.ledger.counters.version
        before = self.ledger.outstanding
        attempt = self.ledger.lease(g, "1", held, self.now)
        if attempt is not None:
            assert held >= self.ledger.counters.floor, "leased to weights from before a rollback"
            charge = held
            if attempt.sound and self.rules.policy != "mask":
                charge = min(held, *(h["oldest"] for h in attempt.sound))
            assert before < (self.ledger.limit + 1 - (v - charge)) * B, "leased beyond the gate"
            assert attempt.group not in self.trained, "leased again after it was trained"

    def _some_lease(self):
        leased = [a for g in GENERATORS for a in self.ledger.leases_of(g)]
        return leased[self.pick(len(leased))] if leased else None

    def _header(self, attempt, index, **changes):
        v = self.ledger.counters.version
        low = attempt.held - (self.pick(20) == 0 and attempt.held > 0)  # now and then older than what was held
        oldest = min(v, low + self.pick(2))
        return {
            "group": attempt.group,
            "attempt": attempt.attempt,
            "index": index,
            "crc": 0,
            "num_tokens": 1 + self.pick(9),
            "num_live_tokens": 1,
            "reward": float(self.pick(2)),
            "truncated": False,
            "oldest": oldest,
            "newest": v,
            "fault": None,
            **changes,
        }

    def _deliver(self, generator, header):
        try:
            verdict = self.ledger.commit(generator, header, self.now, 1)
        except LedgerError:
            assert header["oldest"] < self.ledger.counters.floor
            assert self.ledger.give_back(generator, (header["group"], header["attempt"]), "bad_version", retry=True)
            return "refused"
        if verdict == "stored":
            key = (header["group"], header["attempt"], header["index"])
            assert key not in self.stored and key not in {_key(s) for s in self._samples}, "stored twice"
            self._samples.append(NewSample(header, b"x", generator, ((header["oldest"], 0, 1),)))
        return verdict

    def sample(self):
        attempt = self._some_lease()
        if attempt is not None:
            missing = [i for i in range(N) if i not in attempt.samples]
            header = self._header(attempt, missing[self.pick(len(missing))])
            assert self._deliver(attempt.generator, header) in ("stored", "refused")

    def finish(self):
        attempt = self._some_lease()
        while attempt is not None and attempt.state == "leased":
            missing = [i for i in range(N) if i not in attempt.samples]
            self._deliver(attempt.generator, self._header(attempt, missing[0]))

    def produce(self):
        """A generator that works well: whole groups with the newest weights."""
        g = GENERATORS[self.pick(3)]
        self.held[g] = self.ledger.counters.version
        for _ in range(1 + self.pick(2 * B)):
            attempt = self.ledger.lease(g, "1", self.held[g], self.now)
            while attempt is not None and attempt.state == "leased":
                index = min(i for i in range(N) if i not in attempt.samples)
                self._deliver(g, self._header(attempt, index))

    def duplicate(self):
        everything = [a for a in self.ledger.live.values() if a.samples]
        if everything:
            attempt = everything[self.pick(len(everything))]
            index = sorted(attempt.samples)[self.pick(len(attempt.samples))]
            assert self._deliver(attempt.generator, self._header(attempt, index)) == "duplicate"

    def stray(self):
        """A sample of a lease that ended, or of another generator's."""
        if self._ended:
            group, attempt = self._ended[self.pick(len(self._ended))]
            header = dict(
                group=group, attempt=attempt, index=0, num_tokens=1, oldest=0, newest=0, fault=None, reward=1.0
            )
            assert self._deliver("a", header) == "late"

    def fault(self):
        attempt = self._some_lease()
        if attempt is not None:
            missing = [i for i in range(N) if i not in attempt.samples]
            header = self._header(attempt, missing[0], fault="reward_error", reward=None)
            if self._deliver(attempt.generator, header) == "refused":
                return
            num_faulty = sum(h["fault"] is not None for h in attempt.samples.values())
            assert (attempt.state == "dropped") == (num_faulty > N - 2 or attempt.reason in ("stale", "no_signal"))

    def progress(self):
        attempt = self._some_lease()
        if attempt is not None:
            assert self.ledger.progress(attempt.generator, attempt.key, self.pick(50), self.now)

    def give_back(self):
        attempt = self._some_lease()
        if attempt is not None:
            assert self.ledger.give_back(attempt.generator, attempt.key, "no", retry=self.pick(3) > 0)

    def forget(self):
        self.ledger.forget_generator(GENERATORS[self.pick(3)], "generator_lost")

    def expire(self):
        for _ in range(1 + self.pick(3)):
            self.now += self.pick(12)
            self.ledger.expire(self.now)
            for g in GENERATORS:
                for attempt in self.ledger.leases_of(g):
                    assert self.now < attempt.renewed_at + RULES.lease_timeout_s, "a lease without progress lives on"
                    assert self.now < attempt.leased_at + RULES.lease_limit_s
            self.progress()

    def update(self):
        """A generator gets the newest weights."""
        self.held[GENERATORS[self.pick(3)]] = self.ledger.counters.version

    # ------------------------------------------------------------ the learner
    def attach(self):
        self.num_learners += 1
        self.epoch = self.ledger.attach("learner", str(self.num_learners))
        assert self.ledger.claimed is None

    def old_epoch(self, epoch=None):
        epoch = self.epoch - 1 if epoch is None else epoch
        for call in (self.ledger.claim, self.ledger.acknowledge):
            try:
                call(epoch, 1, version=0, num_groups=B) if call == self.ledger.claim else call(epoch, 1, applied=True)
            except FencedError:
                continue
            raise AssertionError("an old epoch was served")

    def claim(self):
        c, ahead = self.ledger.counters, len(self.ledger.claims)
        if ahead == 2:
            return
        claim = self.ledger.claim(self.epoch, c.step + 1 + ahead, c.version + ahead, B, self.now)
        if isinstance(claim, Claim):
            self.done["claimed ahead"] += ahead
            assert self.ledger.claims[-1] is claim
            ages = [claim.version - self.counts_from(self.ledger.live[key]) for key in claim.keys]
            assert min(ages) >= 0 and max(ages) <= claim.limit, "claimed too old"
            assert len(claim.keys) == B and len({g for g, _ in claim.keys}) == B

    def acknowledge(self, applied=True):
        claim = self.ledger.claimed
        if claim is None:
            return
        assert claim.version == self.ledger.counters.version, "claimed for another version"
        for key in claim.keys:
            sound = self.ledger.live[key].sound
            assert len(sound) >= 2, "trained too small a group"
            assert len({h["reward"] for h in sound}) == 2 or not self.rules.filter_groups, "trained without signal"
            assert claim.version - self.counts_from(self.ledger.live[key]) <= claim.limit, "trained too old"
            assert key[0] not in self.trained and key[0] not in self.given_up, "trained twice"
            floor = self.ledger.counters.floor
            assert min(h["oldest"] for h in sound) >= floor, "trained what was sampled before a rollback"
        before = self.ledger.counters.version
        for _ in range(1 + self.pick(2)):  # now and then the answer is lost and it is asked again
            self.ledger.acknowledge(self.epoch, claim.step, applied=applied)
        assert self.ledger.counters.version == before + applied
        self._acknowledged.append((claim.step, claim, applied))
        if applied:
            self.trained |= {g: claim.step for g, _ in claim.keys}

    def skip(self):
        if self.pick(4) == 0:
            self.acknowledge(applied=False)

    def give_batch_back(self):
        if self.ledger.claims:
            i = self.pick(len(self.ledger.claims))
            assert self.ledger.return_claim(self.epoch, self.ledger.claims[i].step)
            assert len(self.ledger.claims) == i, "a batch after the one returned is still claimed"

    def checkpoint(self):
        self.ledger.checkpoint_valid(self.epoch, self.ledger.counters.step, "c")

    def roll_back(self):
        """A person's decision, in a transaction of its own; now and then killed before it is committed."""
        if self.pick(6) or not self.ledger.checkpoints:
            return
        self.commit()
        before, ledger = replace(self.ledger.counters), self.ledger
        to = ledger.checkpoints[self.pick(len(ledger.checkpoints))]
        kept = {a.prompt for a in ledger.live.values() if a.lane == "train"}
        version = ledger.roll_back(to, who="somebody", at=1.0)
        c = ledger.counters
        assert version == c.version == c.floor == before.version + 1 and c.step == before.step + 1
        assert {a.state for a in ledger.live.values()} <= {"pending"} and not ledger.claims, "outstanding"
        assert not any(a.samples for a in ledger.live.values()), "kept what was sampled before"
        assert {a.prompt for a in ledger.live.values()} == kept, "a prompt is lost"
        assert ledger.checkpoint == to
        self.old_epoch(self.epoch)
        if self.store is not None and self.pick(3) == 0:
            self._restart()
            return
        self.num_rollbacks += 1
        self.steps.append((c.step, Claim(c.epoch, c.step, before.version, 0, False, ()), False))
        self.given_up |= {group: step for group, step in self.trained.items() if step > to}
        self.trained = {group: step for group, step in self.trained.items() if step <= to}
        self.commit()
        if self.store is not None:
            assert self.store.step_after(to)[0]["step"] == c.step, "a step given up would be redone"
        self.attach()

    def set_limit(self):
        self.ledger.set_limit(self.pick(3))

    def stop(self):
        if self.pick(5) == 0:
            self.ledger.release_leases("shutdown")

    # ------------------------------------------------------------ disk
    def commit(self):
        self._ended = (self._ended + [a.key for a in self.ledger._dirty.values() if a.key not in self.ledger.live])[
            -50:
        ]
        changes = self.ledger.take_changes()
        if self.store is not None:
            self.store.commit(changes, self._samples)
            assert comparable(self.store.snapshot()) == comparable(self.ledger.snapshot()), "restored differently"
        self.stored |= {_key(s) for s in self._samples}
        self.steps += self._acknowledged
        self._samples, self._acknowledged = [], []
        self.ledger.cancels.clear()

    def crash(self):
        """What was not committed is gone; nobody was told of it."""
        if self.store is not None and self.pick(3) == 0:
            self._restart()

    def _restart(self):
        self.ledger = self.ledger_class(
            self.rules, limit=self.ledger.limit, snapshot=self.store.snapshot(), now=self.now
        )
        for _, claim, applied in self._acknowledged:
            for group, _ in claim.keys if applied else ():
                del self.trained[group]
        self._samples, self._acknowledged = [], []
        self.epoch = self.ledger.counters.epoch  # a lost attach is asked again
        self.held = {g: min(v, self.ledger.counters.version) for g, v in self.held.items()}

    # ------------------------------------------------------------ what always holds
    def counts_from(self, attempt):
        """The version from which the age of a complete group counts."""
        if self.rules.policy == "mask":
            return max(h["newest"] for h in attempt.sound)
        return min(h["oldest"] for h in attempt.sound)

    def check(self):
        ledger = self.ledger
        live = Counter(a.state for a in ledger.live.values() if a.lane == "train")
        counts = ledger.counts["train"]
        assert all(counts[s] == live[s] for s in ("pending", "leased", "ready", "claimed")), "counts are wrong"
        assert min(counts.values(), default=0) >= 0 and ledger.issued == sum(counts.values())
        assert counts["trained"] == len(self.trained) + len(self.given_up), "trained groups are miscounted"
        assert counts["dropped"] == sum(d.count for d in ledger.drops.values())
        claimed = {key for claim in ledger.claims for key in claim.keys}
        assert claimed == {a.key for a in ledger.live.values() if a.state == "claimed"}, "claimed by no claim"
        assert ledger.untrained_bytes == sum(len(a.samples) for a in ledger.live.values()), "bytes are miscounted"
        groups = [a.group for a in ledger.live.values()]
        assert len(groups) == len(set(groups)), "two live attempts of one group"
        for a in ledger.live.values():
            if a.state in ("leased", "ready") and a.missing == 0:
                assert ledger.counters.version - self.counts_from(a) <= ledger.limit, "doomed, but still outstanding"
            assert a.state != "leased" or a.missing, "complete, but not ready"
            assert a.state != "pending" or not a.samples or a.num_leases < RULES.max_attempts
        for g in GENERATORS:
            assert ledger.load_of(g) == sum(a.missing for a in ledger.leases_of(g)), "owed samples are miscounted"
        applied = sum(applied for *_, applied in [*self.steps, *self._acknowledged])
        assert ledger.counters.version == applied + self.num_rollbacks, "version and ledger disagree"
        assert ledger.counters.step == len(self.steps) + len(self._acknowledged)


def _key(s: NewSample) -> tuple[int, int, int]:
    return s.header["group"], s.header["attempt"], s.header["index"]


def comparable(snapshot):
    """Without what a restored ledger begins anew: times and progress of leases."""
    live = [
        replace(
            copy.deepcopy(a),
            leased_at=0,
            renewed_at=0,
            num_tokens_before=0,
            num_tokens=0 if a.state == "leased" else a.num_tokens,
        )
        for a in snapshot.live
    ]
    return replace(snapshot, live=live)


def reachable(walk: Walk) -> None:
    """The walk has been everywhere it should."""
    reasons = set(walk.ledger.drops)
    expected = {"stale", "lease_expired", "generator_lost", "reward_error", "no", "skipped", "rolled_back"}
    assert walk.num_rollbacks > 20 and walk.given_up and walk.trained
    assert walk.ledger.counters.num_leased_again > 20
    assert expected <= reasons, f"never dropped: {expected - reasons}"
    assert walk.done["claimed ahead"] > 50
    assert len(walk.steps) > 50 and walk.ledger.counters.num_exhausted > 0
