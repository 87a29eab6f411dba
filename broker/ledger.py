"""The ledger: which group is where, and what may happen to it next. Pure: no socket, no disk, no clock.

    pending → leased → ready → claimed → trained(step)          (evaluation: pending → leased → scored)
       ▲         │
       └─────────┘ the lease ended early: what has come is kept, only the rest is leased again
        any of the first four → dropped(reason), and its prompt → a new attempt, `pending`

A sample with a fault counts as come; the group goes on without it while two sound ones (or all of one)
can be left, else it is dropped for the fault.

Every method that changes something marks it; ``take_changes`` hands all of it to the store at once.
Time is passed in, in seconds of any clock that does not go back. Training attempts always sum up:
``issued = pending + leased + ready + claimed + trained + dropped``.
"""

from __future__ import annotations

import heapq
from bisect import insort
from dataclasses import replace
from typing import Any, Literal

from broker.book import NO_SIGNAL, ROLLED_BACK, Book
from broker.records import Attempt, Claim, Header, Key, Rules, Snapshot, Step, Validation
from common import staleness
from common.errors import FencedError, LedgerError, NoSignalError, RolledBackError

ROLLBACK = "rollback"  # in the place of a learner's name: the epoch that nobody holds
Verdict = Literal["stored", "duplicate", "late"]


class Ledger(Book):
    def __init__(self, rules: Rules, *, limit: int, snapshot: Snapshot | None = None, now: float = 0.0) -> None:
        """See ``Book``; the limit may be another one than when the snapshot was taken."""
        super().__init__(rules, limit=limit, snapshot=snapshot, now=now)
        self.draining = False  # told to hand out nothing more: what is out comes in, is trained, and that is all
        self._drop_doomed()

    # ------------------------------------------------------------ what a caller may ask
    @property
    def data_ended(self) -> bool:
        """Nothing is left to lease, now or later, unless a lease fails."""
        if self.draining:
            return True
        rules, counters = self.rules, self.counters
        fresh = rules.num_prompts is None or counters.next_prompt < rules.num_prompts
        return not fresh and not self.counts["train"]["pending"]

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    def holders(self) -> list[str]:
        """Generators that have leases."""
        return [generator for generator, leases in self._leased.items() if leases]

    def leases_of(self, generator: str) -> list[Attempt]:
        return list(self._leased.get(generator, {}).values())

    def load_of(self, generator: str) -> int:
        """Samples that the generator still owes."""
        return self._owed[generator]

    def oldest_lease(self) -> Attempt | None:
        """The training lease that was handed out first."""
        leased = (a for leases in self._leased.values() for a in leases.values() if a.lane == "train")
        return min(leased, key=lambda a: a.leased_at, default=None)

    def next_size(self, held: int) -> int:
        """Samples of the group that a generator holding ``held`` would get next."""
        return 1 if self._evaluation_waits(held) else self.rules.group_size

    def refusal(self, held: int) -> str | None:
        """Why a generator that holds version ``held`` gets no training lease now; None: it may."""
        c = self.counters
        if held < 0:
            return "no weights held yet"
        if held > c.version:
            return f"holds version {held}, newer than the learner's {c.version}"
        if held < c.floor:
            return f"holds version {held}, older than the rollback to {c.floor}"
        if self.data_ended:
            return "the data ended"
        batch, counts = self.rules.batch_size, self.counts["train"]
        if self.untrained_bytes >= self.rules.untrained_bytes and counts["ready"] + counts["claimed"] >= batch:
            return f"untrained data: {self.untrained_bytes} bytes wait for the learner (ledger.untrained_bytes)"
        if not staleness.may_lease(
            outstanding=self.outstanding, version=c.version, held=held, limit=self.limit, batch=batch
        ):
            return f"staleness gate: {self.outstanding} groups outstanding at version {c.version}, {held} held"
        return None

    def next_expiry(self) -> float | None:
        """No lease expires before this time."""
        return self._expiries[0][0] if self._expiries else None

    # ------------------------------------------------------------ generators
    def lease(self, generator: str, incarnation: str, held: int, now: float) -> Attempt | None:
        """The next group for a generator that holds version ``held``: evaluation first, then training."""
        attempt = self._next_eval(held)
        if attempt is None:
            attempt = self._next_train(held) if self.refusal(held) is None else None
            if attempt is None:
                return None
            attempt.held = held
        attempt.generator, attempt.incarnation = generator, incarnation
        attempt.leased_at = attempt.renewed_at = now
        attempt.num_leases += 1
        attempt.num_tokens = attempt.num_tokens_before = sum(h["num_tokens"] for h in attempt.samples.values())
        self._move(attempt, "leased")
        self._hand_out(attempt, generator)
        return attempt

    def progress(self, generator: str, key: Key, num_tokens: int, now: float) -> bool:
        """Tokens made so far for a lease; more than before renews it. False: it has no such lease any more."""
        attempt = self._leased.get(generator, {}).get(key)
        if attempt is None:
            return False
        if attempt.num_tokens_before + num_tokens > attempt.num_tokens:
            attempt.num_tokens = attempt.num_tokens_before + num_tokens
            attempt.renewed_at = now
        return True

    def commit(self, generator: str, header: Header, now: float, num_bytes: int = 0) -> Verdict:
        """A sample arrived, checked by itself. ``stored``: the caller must store its payload (of ``num_bytes``) with
        the changes.

        Raises:
            LedgerError: an index outside the group, a version that does not exist (yet, or any more).
        """
        key = (header["group"], header["attempt"])
        attempt = self.live.get(key)
        if attempt is None or attempt.generator != generator:
            return "late"
        index = header["index"]
        if index in attempt.samples:
            return "duplicate"
        if attempt.state != "leased":
            return "late"
        self._check(attempt, header)
        attempt.samples[index] = header
        attempt.num_bytes += num_bytes
        self.untrained_bytes += num_bytes
        self._owed[generator] -= 1
        attempt.renewed_at = now
        complete = not attempt.missing
        if complete:
            attempt.num_tokens = max(attempt.num_tokens, sum(h["num_tokens"] for h in attempt.samples.values()))
        if header["fault"] is not None and self._is_lost(attempt):
            self._at_fault(attempt, str(header["fault"]))
            self._drop(attempt, str(header["fault"]), retry=True)
        elif complete:
            self._complete(attempt)
        return "stored"

    def give_back(self, generator: str, key: Key, reason: str, *, retry: bool) -> bool:
        """A generator cannot work on its lease; ``retry`` false: nobody can."""
        attempt = self._leased.get(generator, {}).get(key)
        if attempt is None:
            return False
        if reason != "shutdown":
            self._at_fault(attempt, reason)
        if retry:
            self._lose(attempt, reason, tell=False)
        else:
            self._drop(attempt, reason, retry=False, tell=False)
        return True

    def forget_generator(self, generator: str, reason: str, *, but: str | None = None) -> int:
        """Take back all leases of a generator that is gone (except those of its process ``but``)."""
        gone = [a for a in self.leases_of(generator) if a.incarnation != but or but is None]
        for attempt in gone:
            self._lose(attempt, reason, tell=False)
        return len(gone)

    def expire(self, now: float) -> int:
        """End the leases whose time is over."""
        num = 0
        while self._expiries and self._expiries[0][0] <= now:
            _, key = heapq.heappop(self._expiries)
            attempt = self.live.get(key)
            if attempt is None or attempt.state != "leased":
                continue
            due = self._expiry(attempt)
            if due > now:
                heapq.heappush(self._expiries, (due, key))
                continue
            limit_reached = now >= attempt.leased_at + self.rules.lease_limit_s
            self._lose(attempt, "lease_limit" if limit_reached else "lease_expired")
            num += 1
        return num

    def release_leases(self, reason: str) -> int:
        """The run ends: nobody works on anything any more; the prompts stay to be tried again."""
        leased = [a for leases in self._leased.values() for a in leases.values()]
        for attempt in leased:
            self._lose(attempt, reason, counted=False)
        return len(leased)

    # ------------------------------------------------------------ the learner
    def attach(self, name: str, incarnation: str) -> int:
        """A learner process begins: the epoch it holds from now on. Asking again gives the same.

        The claims of an older epoch end: their groups are ready again, if still young enough.
        """
        if self.attached != (name, incarnation):
            self._return_claims(0)
            self.attached = (name, incarnation)
            self.counters.epoch += 1
            self._num_filtered = 0
            self.counters.epoch_start = self.counters.step
            self._changes.epochs.append((self.counters.epoch, name, incarnation))
        return self.counters.epoch

    def fence(self, epoch: int) -> None:
        """Raises FencedError unless ``epoch`` is the current one; RolledBackError if a rollback has just ended it."""
        if self.attached is not None and self.attached[0] == ROLLBACK and epoch == self.counters.epoch - 1:
            raise RolledBackError(
                f"{self.attached[1]} rolled the run back: the weights of this learner are given up; started again, it "
                f"goes on from the checkpoint of step {self.checkpoint}"
            )
        if epoch != self.counters.epoch or epoch == 0:
            raise FencedError(
                f"epoch {epoch} is over: the learner of epoch {self.counters.epoch} "
                f"({self.attached[0] if self.attached else 'nobody'}) has taken the run; end this process"
            )

    def claim(self, epoch: int, step: int, version: int, num_groups: int, now: float = 0.0) -> Claim | str | None:
        """The batch of ``step``, to be trained at ``version``: a Claim, why it has to wait, or None at the data's end.

        One batch may be claimed ahead: that of step s + 1 at version v + 1 while step s is trained at v.

        Raises:
            FencedError: an old epoch.
            LedgerError: not the step that can be claimed next, or not at its version.
            NoSignalError: nothing comes that could be trained.
        """
        self.fence(epoch)
        for claim in self.claims:
            if (claim.step, claim.version) == (step, version):
                return claim
        c, ahead = self.counters, len(self.claims)
        if ahead > 1 or (step, version) != (c.step + 1 + ahead, c.version + ahead):
            standing = f"; claimed: step {', '.join(str(claim.step) for claim in self.claims)}" if ahead else ""
            raise LedgerError(
                f"claim of step {step} at version {version} refused: the next is step {c.step + 1 + ahead} "
                f"at version {c.version + ahead}{standing}"
            )
        if 0 < self.rules.max_filtered < self._num_filtered and len(self._ready) < num_groups:
            raise NoSignalError(
                f"{self._num_filtered} groups in a row had equal rewards only, {len(self._ready)} others are ready: "
                "the data are too easy or too hard for this model, or the reward function is wrong. Change them, raise "
                "rollout.n, or see algorithm.filter_groups.max_num_gen_batches"
            )
        ended = self.data_ended and not self.counts["train"]["leased"]
        num_lost = self._lost.total()
        in_vain = ended and not c.step and not self.draining
        if not self._ready and num_lost and (0 < self.rules.max_lost <= num_lost or in_vain):
            reasons = ", ".join(f"{reason} ({num})" for reason, num in self._lost.most_common(4))
            raise NoSignalError(
                f"{num_lost} attempts in a row gave no group that could be trained: {reasons}. The data, the limits "
                "of data.* or the reward function are wrong; the generators' logs have the details"
            )
        if len(self._ready) < num_groups and not ended:
            return f"{len(self._ready)} of {num_groups} groups are ready for step {step}"
        young = [
            a
            for a in self._ready.values()
            if staleness.may_train(oldest=self._ages_from(a), version=version, limit=self.limit)
        ]
        if len(young) < num_groups and not ended:
            return f"{len(young)} of {num_groups} groups are ready and young enough for step {step}"
        if not young:
            return None
        young.sort(key=lambda a: (staleness.deadline(self._ages_from(a), self.limit), a.group, a.attempt))
        batch = young[:num_groups]
        if self.rules.policy == "wait" and (reason := self._wait_for_others(batch, step, version, now)):
            return reason
        return self._claim(epoch, step, version, batch, short=len(young) < num_groups)

    def acknowledge(
        self,
        epoch: int,
        step: int,
        *,
        applied: bool,
        reason: str = "",
        settings: dict[str, Any] | None = None,
        digest: str = "",
        optimizer_span: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        """The claimed step was applied (or skipped) on all ranks. Repeating it changes nothing.

        Raises:
            FencedError: an old epoch.
            LedgerError: not the claimed step, nor one acknowledged in this epoch.
        """
        self.fence(epoch)
        c = self.counters
        if c.epoch_start < step <= c.step:
            return
        claim = self.claimed
        if claim is None or claim.step != step:
            raise LedgerError(
                f"acknowledgement of step {step} refused: "
                + (f"step {claim.step} is claimed" if claim else f"nothing is claimed, step {c.step} was the last")
            )
        num_bytes = sum(self.live[key].num_bytes for key in claim.keys) if applied else 0
        for key in claim.keys:
            attempt = self.live[key]
            attempt.step = step
            if applied:
                self._end(attempt, "trained")
            else:
                self._drop(attempt, reason or "skipped", retry=False)
        del self.claims[0]
        self._changes.steps.append(
            Step(
                step=step,
                epoch=epoch,
                version=claim.version,
                limit=claim.limit,
                applied=applied,
                reason=reason,
                settings=settings or {},
                digest=digest,
                keys=claim.keys,
                payload_bytes=num_bytes,
                optimizer_span=optimizer_span,
            )
        )
        c.step = step
        if applied:
            c.version += 1
            self._drop_doomed()
        elif self.claims:  # the batch claimed ahead is trained at this version instead, where it is younger
            self.claims[0] = replace(self.claims[0], version=c.version)

    def return_claim(self, epoch: int, step: int) -> bool:
        """The claimed batch is not trained: its groups, and those of a batch claimed after it, are ready again, if
        still young enough."""
        self.fence(epoch)
        for i, claim in enumerate(self.claims):
            if claim.step == step:
                self._return_claims(i)
                return True
        return False

    def checkpoint_valid(self, epoch: int, step: int, path: str) -> None:
        """A checkpoint of ``step`` is complete on disk. Raises LedgerError if that step is not acknowledged."""
        self.fence(epoch)
        if step > self.counters.step:
            raise LedgerError(f"checkpoint of step {step} refused: step {self.counters.step} was the last acknowledged")
        if any(first <= step <= last for first, last in self.abandoned):
            raise LedgerError(f"checkpoint of step {step} refused: a rollback gave that step up")
        if step not in self.checkpoints:
            insort(self.checkpoints, step)
        self._changes.checkpoints.append((step, epoch, path))

    def roll_back(self, to: int, *, who: str, at: float, lr_factor: float = 1.0) -> int:
        """Give up every step after the checkpoint of ``to``; the version from which the run goes on.

        Versions and steps never go down: the rollback raises v by one and takes a step number of its own.
        Everything outstanding is dropped, its prompts are tried again; nothing sampled by an older version
        is taken from now on, and the learner that holds the weights given up has lost its epoch.

        Args:
            to: step of a valid checkpoint; 0: the first.
            who: decided it. at: Unix seconds. lr_factor: of the learning rates from then on; it stands in the row.

        Raises:
            LedgerError: there is no such checkpoint, or an earlier rollback gave it up.
        """
        if to not in self.checkpoints:
            there = ", ".join(map(str, self.checkpoints)) or "none"
            raise LedgerError(f"rollback to step {to} refused: its checkpoint is not valid; valid are: {there}")
        c = self.counters
        c.step, c.version = c.step + 1, c.version + 1
        c.floor, c.epoch_start = c.version, c.step
        if self.attached is None or self.attached[0] != ROLLBACK:  # the second in a row finds nobody to end
            c.epoch, self.attached = c.epoch + 1, (ROLLBACK, who)
            self._changes.epochs.append((c.epoch, *self.attached))
        self._changes.steps.append(
            Step(
                step=c.step, epoch=c.epoch, version=c.version - 1, limit=0, applied=False, reason="rollback",
                settings={} if lr_factor == 1 else {"lr_factor": lr_factor}, digest="", keys=(), payload_bytes=0,
                optimizer_span=(at, at), restored=to,
            )
        )  # fmt: skip
        self.abandoned = [(first, last) for first, last in self.abandoned if first <= to]
        if to < c.step - 1:
            self.abandoned.append((to + 1, c.step - 1))
        self.checkpoints = [step for step in self.checkpoints if step <= to]
        self.claims.clear()
        self._num_filtered, self._waits = 0, None
        self._lost.clear()
        self._pending["eval"].clear()
        for validation in self.validations.values():
            if not validation.done:  # of weights that are gone: it ends, without a score
                validation.num_dropped += validation.num_scored
                validation.num_scored, validation.total = 0, 0.0
        for attempt in list(self.live.values()):
            if attempt.lane == "eval":
                self._drop(attempt, ROLLED_BACK, retry=False)
            elif attempt.state != "pending" or attempt.samples:
                self._drop(attempt, ROLLED_BACK, retry=True, counted=False)
        return c.version

    def set_limit(self, limit: int) -> None:
        """Another η, for the leases and claims from now on."""
        if limit != self.limit:
            self.limit = limit
            self._drop_doomed()

    def drop_damaged(self, key: Key) -> None:
        """A ready group whose stored payload does not fit its checksum."""
        if key in self._ready:
            self._drop(self._ready[key], "damaged", retry=True)

    # ------------------------------------------------------------ evaluation
    def validate(self, epoch: int, step: int, version: int, num_prompts: int) -> None:
        """Lease the held-out prompts, one sample each, to generators that hold at least ``version``."""
        self.fence(epoch)
        if step in self.validations:
            return
        self._set_validation(Validation(step=step, version=version, size=num_prompts))
        for prompt in range(num_prompts):
            attempt = Attempt(self._new_group(), 0, "eval", prompt, size=1, held=version, step=step)
            self._issue(attempt)

    def _next_eval(self, held: int) -> Attempt | None:
        return self.live[heapq.heappop(self._pending["eval"])] if self._evaluation_waits(held) else None

    def _evaluation_waits(self, held: int) -> bool:
        waiting = self._pending["eval"]  # in order of group, so of version
        return bool(waiting) and self.live[waiting[0]].held <= held

    def _score(self, attempt: Attempt) -> None:
        validation = self.validations.get(attempt.step if attempt.step is not None else -1)
        if validation is not None:
            validation.num_scored += 1
            validation.total += sum(float(h["reward"]) for h in attempt.samples.values())
            self._set_validation(validation)
        self._end(attempt, "scored")

    # ------------------------------------------------------------ moves
    def _next_train(self, held: int) -> Attempt | None:
        """The oldest prompt that waits, else a fresh one; None: the data ended.

        A group that has samples is charged at the lowest version it contains (but under `mask`, where it
        may be trained with old tokens). Where that closes the gate it would only grow older behind the
        fresh ones: it is dropped, and its prompt is tried anew.
        """
        waiting = self._pending["train"]
        while waiting:
            attempt = self.live.get(heapq.heappop(waiting))
            if attempt is None or attempt.state != "pending":
                continue  # dropped meanwhile
            if not attempt.samples or self.rules.policy == "mask" or staleness.may_lease(
                outstanding=self.outstanding, version=self.counters.version, held=min(held, attempt.oldest),
                limit=self.limit, batch=self.rules.batch_size,
            ):  # fmt: skip
                return attempt
            self._drop(attempt, "stale", retry=True)
        if self.data_ended:
            return None
        c = self.counters
        attempt = Attempt(self._new_group(), 0, "train", c.next_prompt, size=self.rules.group_size)
        c.next_prompt += 1
        self._issue(attempt, wait=False)
        return attempt

    def _lose(self, attempt: Attempt, reason: str, *, tell: bool = True, counted: bool = True) -> None:
        """A lease ends before all its samples have come. Those that have are kept while it may be leased again."""
        if not counted:
            attempt.num_leases -= 1
        if not attempt.sound or attempt.num_leases >= self.rules.max_attempts:
            self._drop(attempt, reason, retry=True, tell=tell, counted=counted)
            return
        if tell and attempt.generator is not None:
            self.cancels.append((attempt.generator, attempt.key, reason))
        self.counters.num_leased_again += 1
        self._move(attempt, "pending")

    def _is_lost(self, attempt: Attempt) -> bool:
        """Whether its faulty samples leave too few, or not the one that the others are measured against."""
        greedy = attempt.samples.get(-1 if self.rules.greedy_index is None else self.rules.greedy_index)
        no_baseline = attempt.lane == "train" and greedy is not None and greedy["fault"] is not None
        return no_baseline or len(attempt.sound) + attempt.missing < min(2, attempt.size)

    def _at_fault(self, attempt: Attempt, reason: str) -> None:
        """Nothing that passes with time: its row, or the scoring of its samples."""
        if attempt.lane == "train":
            self._lost[reason] += 1

    def _complete(self, attempt: Attempt) -> None:
        if attempt.lane == "train":
            self._lost.clear()
        if attempt.lane == "eval":
            self._score(attempt)
        elif self._is_doomed(attempt):
            self._drop(attempt, "stale", retry=True)
        elif self.rules.filter_groups and len({h["reward"] for h in attempt.sound}) == 1:
            self._num_filtered += 1
            self._drop(attempt, NO_SIGNAL, retry=False)
        else:
            self._move(attempt, "ready")

    def _drop_doomed(self) -> None:
        """What can no longer be trained in time leaves N at once."""
        leased = [a for leases in self._leased.values() for a in leases.values() if a.lane == "train"]
        waiting = (self.live.get(key) for key in self._pending["train"])
        begun = [a for a in waiting if a is not None and a.state == "pending" and a.samples]
        for attempt in [*self._ready.values(), *leased, *begun]:
            if self._is_doomed(attempt):
                self._drop(attempt, "stale", retry=True)

    def _is_doomed(self, attempt: Attempt) -> bool:
        return staleness.is_doomed(oldest=self._ages_from(attempt), version=self.counters.version, limit=self.limit)

    def _ages_from(self, attempt: Attempt) -> int:
        """The version from which the deadline of a group counts: of its oldest token; under `mask`, which needs
        but one that is young enough, of its newest."""
        return attempt.newest if self.rules.policy == "mask" else attempt.oldest

    def _wait_for_others(self, batch: list[Attempt], step: int, version: int, now: float) -> str | None:
        """Why the claim of ``batch`` would leave groups behind that no later step can train in time."""
        taken = {a.key for a in batch}
        leased = (a for leases in self._leased.values() for a in leases.values() if a.lane == "train")
        left = [
            staleness.deadline(a.oldest, self.limit) for a in (*self._ready.values(), *leased) if a.key not in taken
        ]
        num_late = staleness.num_left_late(left, version=version, batch=self.rules.batch_size)
        if self._waits is None or self._waits[0] != step:
            self._waits = (step, now)
        waited_s = now - self._waits[1]
        if not num_late or waited_s >= self.rules.wait_s:
            return None
        return f"policy wait: step {step} would leave {num_late} groups to grow too old; for {waited_s:.1f} s"

    def _claim(self, epoch: int, step: int, version: int, batch: list[Attempt], *, short: bool) -> Claim:
        for attempt in batch:
            self._move(attempt, "claimed")
        claim = Claim(epoch, step, version, self.limit, short, tuple(a.key for a in batch))
        self.claims.append(claim)
        self._num_filtered = 0
        return claim

    def _return_claims(self, first: int) -> None:
        for claim in self.claims[first:]:
            for key in claim.keys:
                self._move(self.live[key], "ready")
        del self.claims[first:]
        self._drop_doomed()

    def _check(self, attempt: Attempt, header: Header) -> None:
        if not 0 <= header["index"] < attempt.size:
            raise LedgerError(f"bad_index: sample {header['index']} of a group of {attempt.size}")
        if header["newest"] > self.counters.version:
            raise LedgerError(f"bad_version: {header['newest']} is newer than the learner's {self.counters.version}")
        if header["oldest"] < self.counters.floor:
            raise LedgerError(f"bad_version: {header['oldest']} is older than the rollback to {self.counters.floor}")
