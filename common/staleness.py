"""The arithmetic of bounded staleness: two gates and the deadline they share. Pure; see docs/design.md.

Symbols: ``v`` version of the learner (steps applied), ``g ≤ v`` version that a generator holds,
``η`` staleness limit, ``B`` groups per step, ``N`` groups leased, ready or claimed. A group's age
counts from its oldest token.

Why the lease gate is enough: groups are consumed B at a time, in order. A group handed out as number
N (from 0) behind the others is trained N // B versions from now, at version v + N // B; its first
token is sampled by g or later. It is young enough if v + N // B − g ≤ η, i.e. N < (η + 1 − (v − g))·B.
The claim gate makes sure, whatever the order in which groups really become ready.
"""

from __future__ import annotations


def lease_room(*, outstanding: int, version: int, held: int, limit: int, batch: int) -> int:
    """Groups that may still be handed out to a generator that holds version ``held`` (≤ 0: none).

    Args:
        outstanding: N.
        version: v.
        held: g.
        limit: η.
        batch: B.
    """
    return (limit + 1 - (version - held)) * batch - outstanding


def may_lease(*, outstanding: int, version: int, held: int, limit: int, batch: int) -> bool:
    """The lease gate: N < (η + 1 − (v − g))·B, for a generator with 0 ≤ g ≤ v."""
    if not 0 <= held <= version:
        return False
    return lease_room(outstanding=outstanding, version=version, held=held, limit=limit, batch=batch) > 0


def deadline(oldest: int, limit: int) -> int:
    """The last version at which a group whose oldest token is of version ``oldest`` may be trained."""
    return oldest + limit


def may_train(*, oldest: int, version: int, limit: int) -> bool:
    """The claim gate: trained at ``version``, no token is older than the limit (nor from the future)."""
    return oldest <= version <= deadline(oldest, limit)


def is_doomed(*, oldest: int, version: int, limit: int) -> bool:
    """Whether a group can no longer be trained in time: versions never go down."""
    return version > deadline(oldest, limit)


def num_left_late(deadlines: list[int], *, version: int, batch: int) -> int:
    """Policy `wait`: how many too many of the groups left behind by the batch for ``version`` are due by some time.

    For each d ≥ u at most (d − u)·B of them may have a deadline ≤ d: so many are trained by then. Those
    whose deadline has passed are lost whatever is done.

    Args:
        deadlines: of the groups that are leased or ready and not in the batch.
        version: u.
        batch: B.
    """
    due = sorted(d for d in deadlines if d >= version)
    return max([0, *(i - (d - version) * batch for i, d in enumerate(due, 1))])
