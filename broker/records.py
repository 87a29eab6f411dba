"""What the ledger keeps and what it hands to the store: plain records, no behaviour."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Lane = Literal["train", "eval"]
State = Literal["pending", "leased", "ready", "claimed", "trained", "scored", "dropped"]
Key = tuple[int, int]  # (group, attempt)
Header = dict[str, Any]  # the fields of a `sample` message, see common/wire.py

LANES: tuple[Lane, ...] = ("train", "eval")
# An evaluation group ends as `scored` where a training group is claimed and trained.
STATES: tuple[State, ...] = ("pending", "leased", "ready", "claimed", "trained", "scored", "dropped")
LIVE: tuple[State, ...] = ("pending", "leased", "ready", "claimed")
NEVER = 1 << 60  # "oldest version" of a group without tokens: younger than everything


@dataclass(frozen=True, slots=True)
class Rules:
    """What the ledger needs of the config."""

    group_size: int  # n: samples per prompt
    batch_size: int  # B: groups per step
    max_attempts: int  # attempts per prompt, and leases per attempt
    lease_timeout_s: float  # a lease without progress for so long expires
    lease_limit_s: float  # … and at the latest after so long
    num_prompts: int | None = None  # prompts in the stream; None: endless
    policy: Literal["drop", "mask", "wait"] = "drop"  # what becomes of groups that grow too old
    wait_s: float = 60.0  # policy `wait`: a batch waits at most so long for them
    greedy_index: int | None = None  # sample without which a group cannot be trained: the baseline of the others
    untrained_bytes: int = 1 << 62  # at so many bytes of payloads nothing more is leased, if a batch is ready
    filter_groups: bool = False  # drop groups whose rewards are all equal
    max_lost: int = 0  # give up after so many attempts in a row that could not be sampled or scored; 0: never
    max_filtered: int = 0  # … and give up after so many in a row without a batch; 0: never


@dataclass(slots=True)
class Attempt:
    """One attempt at one group."""

    group: int
    attempt: int
    lane: Lane
    prompt: int  # place in the lane's prompt stream
    size: int  # samples that make it ready
    state: State = "pending"
    reason: str | None = None  # why it was dropped
    generator: str | None = None  # who has, or last had, the lease
    incarnation: str | None = None  # … which process of that name
    held: int = -1  # g: the version that generator held at the lease; eval: the least it must hold
    num_tokens: int = 0  # tokens known to be made (samples, or progress reports if they say more)
    step: int | None = None  # the step that trains it; eval: the step whose weights are validated
    num_leases: int = 0  # how often it was handed out
    samples: dict[int, Header] = field(default_factory=dict)  # committed, by index
    num_bytes: int = 0  # of the payloads of these
    # Not in the store: a lease starts anew when a ledger is restored.
    num_tokens_before: int = 0  # of samples that are no part of this lease's work
    leased_at: float = 0.0
    renewed_at: float = 0.0
    _found: tuple[int, int, int] = field(default=(-1, NEVER, NEVER), repr=False, compare=False)  # see `_versions`

    @property
    def key(self) -> Key:
        return self.group, self.attempt

    @property
    def missing(self) -> int:
        return self.size - len(self.samples)

    @property
    def sound(self) -> list[Header]:
        """The samples that can be trained, in order of index."""
        return [h for _, h in sorted(self.samples.items()) if h["fault"] is None]

    @property
    def oldest(self) -> int:
        """The version from which its age counts: its oldest token's; what a lease will bring counts from ``held``."""
        oldest = self._versions()[0]
        return min(oldest, self.held) if self.state == "leased" else oldest

    @property
    def newest(self) -> int:
        """The version of its newest token; a lease may yet bring tokens of any version."""
        return NEVER if self.missing else self._versions()[1]

    def _versions(self) -> tuple[int, int]:
        """(oldest, newest) of the tokens that are there; asked for often, so found once for each number of samples."""
        if self._found[0] != len(self.samples):
            oldest, newest = NEVER, -1
            for h in self.samples.values():
                if h["fault"] is None:
                    oldest, newest = min(oldest, h["oldest"]), max(newest, h["newest"])
            self._found = (len(self.samples), oldest, newest if newest >= 0 else NEVER)
        return self._found[1], self._found[2]


@dataclass(frozen=True, slots=True)
class Claim:
    """A batch that the learner of ``epoch`` is training, or has fetched ahead to train next."""

    epoch: int
    step: int
    version: int  # at which it is trained
    limit: int  # staleness limit in force at the claim
    short: bool  # the data ended: fewer groups than asked for
    keys: tuple[Key, ...]  # in order of deadline


@dataclass(frozen=True, slots=True)
class Step:
    """One acknowledged step, or a rollback, which takes a number of its own."""

    step: int
    epoch: int
    version: int
    limit: int
    applied: bool
    reason: str
    settings: dict[str, Any]
    digest: str
    keys: tuple[Key, ...]
    payload_bytes: int
    optimizer_span: tuple[float, float]  # Unix seconds
    restored: int | None = None  # a rollback, to the checkpoint of this step: nothing was trained


@dataclass(slots=True)
class Validation:
    """Held-out prompts sampled greedily, one each."""

    step: int
    version: int
    size: int
    num_scored: int = 0
    num_dropped: int = 0
    total: float = 0.0  # sum of the rewards

    @property
    def done(self) -> bool:
        return self.num_scored + self.num_dropped >= self.size


@dataclass(slots=True)
class Drops:
    """Groups dropped for one reason."""

    count: int = 0
    tokens: int = 0
    by_length: dict[int, int] = field(default_factory=dict)  # power of two ≥ mean tokens a sample -> groups

    def add(self, num_tokens: int, size: int, count: int = 1) -> None:
        """Count groups of ``size`` samples that had made ``num_tokens`` tokens each."""
        self.count += count
        self.tokens += num_tokens * count
        mean = -(-num_tokens // size)
        bucket = 1 << (mean - 1).bit_length() if mean else 0
        self.by_length[bucket] = self.by_length.get(bucket, 0) + count


@dataclass(slots=True)
class Counters:
    """The numbers that name the ledger's position."""

    version: int = 0  # v
    step: int = 0  # last acknowledged
    floor: int = 0  # no token of an older version is taken
    epoch: int = 0
    epoch_start: int = 0  # `step` when the epoch began
    next_group: int = 0
    next_prompt: int = 0
    num_exhausted: int = 0  # prompts given up after their last attempt
    num_leased_again: int = 0  # leases that ended early and left samples behind


@dataclass(slots=True)
class Changes:
    """What the store has to write in one transaction."""

    attempts: list[Attempt] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    epochs: list[tuple[int, str, str]] = field(default_factory=list)  # (epoch, name, incarnation)
    checkpoints: list[tuple[int, int, str]] = field(default_factory=list)  # (step, epoch, path)
    validations: list[Validation] = field(default_factory=list)
    claims: tuple[Claim, ...] = ()
    counters: Counters = field(default_factory=Counters)


@dataclass(slots=True)
class Snapshot:
    """A ledger as restored from the store (and what tests compare)."""

    counters: Counters
    live: list[Attempt]  # by key
    claims: tuple[Claim, ...]  # by step
    validations: list[Validation]  # by step
    counts: dict[Lane, dict[State, int]]
    drops: dict[str, Drops]
    attached: tuple[str, str] | None  # (name, incarnation) of the learner of the current epoch
    checkpoints: list[int]  # steps of the valid checkpoints that no rollback gave up, ascending
    abandoned: list[tuple[int, int]]  # (first, last) step of each run of steps that rollbacks gave up, ascending
