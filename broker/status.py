"""What the broker knows, for people and for the learner's metrics."""

from __future__ import annotations

from typing import Any

from broker.records import STATES
from broker.service import Service


def stats(s: Service) -> dict[str, Any]:
    """Figures of one moment, given with each acknowledged step.

    ``states`` (group attempts of training by state; they add up to ``issued``), ``dropped``
    (groups by reason), ``dropped_by_length`` (by reason and by mean tokens a sample, as the power of
    two above), ``samples`` (stored, duplicate, late), ``refused`` (messages by reason),
    ``overlap_ratio`` (None: not known yet), ``generators`` (count, versions, idle_ratio,
    tokens_per_s, num_running), ``ledger_bytes``.
    """
    ledger = s.ledger
    counts = ledger.counts["train"]
    return {
        "states": {state: counts[state] for state in STATES if state != "scored"},
        "issued": ledger.issued,
        "dropped": {reason: d.count for reason, d in ledger.drops.items()},
        "dropped_tokens": {reason: d.tokens for reason, d in ledger.drops.items()},
        "dropped_by_length": {r: {str(k): n for k, n in sorted(d.by_length.items())} for r, d in ledger.drops.items()},
        "dropped_samples": sum(d.count for d in ledger.drops.values()) * ledger.rules.group_size,
        "ready_samples": counts["ready"] * ledger.rules.group_size,
        "prompts_exhausted": ledger.counters.num_exhausted,
        "samples": {name: s.counted[name] for name in ("stored", "duplicate", "late")},
        "refused": dict(s.refused),
        "overlap_ratio": s.overlap.ratio,
        "generators": s.peers.figures(),
        "ledger_bytes": s.store.size_bytes(),
    }


def status(s: Service) -> dict[str, Any]:
    """The above, and where everybody stands."""
    ledger, c, now = s.ledger, s.ledger.counters, s.clock()
    return {
        **stats(s),
        "run": s.config.run.id,
        "version": c.version,
        "step": c.step,
        "epoch": c.epoch,
        "floor": c.floor,
        "staleness_limit": ledger.limit,
        "checkpoint": ledger.checkpoint,
        "next_prompt": c.next_prompt,
        "eval": {state: n for state, n in ledger.counts["eval"].items() if n},
        "claimed_step": ledger.claimed.step if ledger.claimed else None,
        "learner_silent_s": None if s.learner_heard_at is None else round(now - s.learner_heard_at, 1),
        "peers": [
            {
                "name": p.name,
                "version": p.version,
                "capacity": p.capacity,
                "owes": ledger.load_of(p.name),
                "silent_s": round(now - p.heard_at, 1),
                "waits_for": p.waits_for,
            }
            for p in s.peers
        ],
        "waits": waits(s),
    }


def waits(s: Service) -> list[dict[str, Any]]:
    """Who waits for what, since when."""
    now = s.clock()
    found = [
        {"who": p.name, "for": p.waits_for, "since_s": round(now - p.waits_since, 1)} for p in s.peers if p.waits_for
    ]
    if s.parked is not None:
        found.append({"who": "learner", "for": s.parked.reason, "since_s": round(now - s.parked.since, 1)})
    if s.ledger.claimed is not None:
        found.append({"who": "broker", "for": f"the learner's step {s.ledger.claimed.step}", "since_s": None})
    return found


def why_not_ready(s: Service, reason: str) -> str:
    """``reason`` (so many groups are ready) and what is missing for more, by name."""
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
