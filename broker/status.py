"""What the broker knows, for people and for the learner's metrics."""

from __future__ import annotations

from typing import Any

from broker.records import STATES
from broker.service import Service


def stats(s: Service) -> dict[str, Any]:
    """Figures of one moment, given with each acknowledged step.

    ``states`` are the group attempts of training by state, which add up to ``issued``; ``dropped``
    are groups by reason, ``dropped_by_length`` by reason and by mean tokens a sample (the power of two
    above); ``versions`` are those the generators hold. Numbers under a name with a slash are metrics,
    see docs/metrics.md; one that is not known yet is missing.
    """
    ledger, drops = s.ledger, s.ledger.drops
    counts, size = ledger.counts["train"], ledger.rules.group_size
    metrics = {
        "queue/issued": ledger.issued,
        "training/epoch": -(-ledger.counters.next_prompt // len(s.prompts["train"].rows)),
        "queue/dropped_samples": sum(d.count for d in drops.values()) * size,
        "queue/refused_samples": s.counted["refused"],
        "queue/duplicate_samples": s.counted["duplicate"],
        "queue/late_samples": s.counted["late"],
        "queue/faulty_samples": s.counted["faulty"],
        "queue/leased_again": ledger.counters.num_leased_again,
        "queue/ready_samples": counts["ready"] * size,
        "queue/exhausted_prompts": ledger.counters.num_exhausted,
        "queue/untrained_bytes": ledger.untrained_bytes,
        "queue/redo_bytes": s.store.redo_bytes,
        "queue/ledger_bytes": s.store.size_bytes(),
        "generator/overlap_ratio": s.overlap.ratio,
        **s.peers.figures(),
    }
    return {
        "states": {state: counts[state] for state in STATES if state != "scored"},
        "issued": ledger.issued,
        "dropped": {reason: d.count for reason, d in drops.items()},
        "dropped_by_length": {r: {str(k): n for k, n in sorted(d.by_length.items())} for r, d in drops.items()},
        "refused": dict(s.refused),
        "versions": {p.name: p.version for p in s.peers},
        **{name: value for name, value in metrics.items() if value is not None},
    }


def status(s: Service) -> dict[str, Any]:
    """The above, and where everybody stands."""
    ledger, c, now = s.ledger, s.ledger.counters, s.clock()
    return {
        "run": s.config.run.id,
        "version": c.version,
        "step": c.step,
        "epoch": c.epoch,
        "floor": c.floor,
        "staleness_limit": ledger.limit,
        "checkpoint": ledger.checkpoint,
        "next_prompt": c.next_prompt,
        "claimed_step": ledger.claimed.step if ledger.claimed else None,
        **stats(s),
        "evaluation": {state: n for state, n in ledger.counts["eval"].items() if n},
        "fetched": dict(s.fetched),
        "learner_silent_s": None if s.learner_heard_at is None else round(now - s.learner_heard_at, 1),
        "peers": [
            {
                "name": p.name,
                "version": p.version,
                "capacity": p.capacity,
                "owes": ledger.load_of(p.name),
                "silent_s": round(now - p.heard_at, 1),
            }
            for p in s.peers
        ],
        "waits": waits(s),
    }


def waits(s: Service) -> list[str]:
    """Who waits for what, since when."""
    now = s.clock()
    lines = [f"{p.name} waits: {p.waits_for}, for {now - p.waits_since:.1f} s" for p in s.peers if p.waits_for]
    claimed, parked = s.ledger.claimed, s.parked
    if claimed is not None:
        since = s.handed_out_at.get(claimed.step)
        age = "" if since is None else f", for {now - since:.1f} s"  # None: by the broker before this one
        lines.append(f"broker waits: step {claimed.step} is at the learner{age}")
    if parked is not None and claimed is not None:
        lines.append(f"step {parked.step}, asked for ahead, waits: {parked.reason}, for {now - parked.since:.1f} s")
    elif parked is not None:
        lines.append(f"learner waits: {parked.reason}, for {now - parked.since:.1f} s")
    return lines


def why_not_ready(s: Service, reason: str) -> str:
    """``reason`` (so many groups are ready) and what is missing for more, by name."""
    drops = max(s.ledger.drops.items(), key=lambda d: d[1].count, default=None)
    return _missing(s, reason) + (f"; dropped most often: {drops[0]} ({drops[1].count} groups)" if drops else "")


def _missing(s: Service, reason: str) -> str:
    counts = s.ledger.counts["train"]
    if not len(s.peers):
        return f"{reason}; no generator is connected"
    leased = s.ledger.oldest_lease()
    if leased is not None:
        age = s.clock() - leased.leased_at
        oldest = f"{leased.group}/{leased.attempt}, for {age:.1f} s to {leased.generator}"
        return f"{reason}; {counts['leased']} are leased (the oldest, {oldest})"
    reasons = sorted({f"{p.name}: {p.waits_for or 'offers no capacity'}" for p in s.peers})
    return f"{reason}; nothing is leased ({'; '.join(reasons[:4])})"
