"""What a worker of the engine needs to receive a version, staged or not (no vLLM here).

Which tensors it takes (``Layout``), its groups with the learner (``Line``), one bucket, the digests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from common.errors import LeewayError, OtherModelError, WeightError
from common.failpoints import failpoint
from common.transfer import Group, KeptGroups, Ticket, first_line, join_group
from common.weights import Manifest, decode_manifest

Shapes = Mapping[str, tuple[int, ...]]


class Layout:
    """Which tensors this engine takes: those of its model, later exactly those of the version before."""

    def __init__(self, model: Shapes | None = None) -> None:
        """model: name and shape of each tensor of the engine's model; None: not known."""
        self._model = model
        self._before: Manifest | None = None

    def accept(self, manifest: bytes) -> Manifest:
        """What is to come.

        Raises:
            WeightError: it cannot be read, or is not laid out as the version before.
            OtherModelError: it is not this engine's model.
        """
        wanted = decode_manifest(manifest)
        if self._before is None:
            self._refuse_other_model(wanted)
        elif self._before.entries != wanted.entries:
            mine: dict[str, Any] = {e.name: (e.dtype, e.shape) for e in self._before.entries}
            new: dict[str, Any] = {e.name: (e.dtype, e.shape) for e in wanted.entries}
            for name in [*mine, *new]:
                if mine.get(name) != new.get(name):
                    was, sent = _text(mine.get(name)), _text(new.get(name))
                    raise WeightError(f"tensor {name}: {sent} is sent, {was} was before")
            raise WeightError("the tensors come in another order than before")
        return wanted

    def keep(self, manifest: Manifest) -> None:
        """A version laid out like this is complete here."""
        self._before = self._before or manifest

    def _refuse_other_model(self, wanted: Manifest) -> None:
        if self._model is None:
            return
        sent = {e.name: e.shape for e in wanted.entries}
        for name in [*self._model, *sent]:
            if sent.get(name) != self._model.get(name):
                theirs, mine = (
                    str(list(s)) if s is not None else "none" for s in (sent.get(name), self._model.get(name))
                )
                raise OtherModelError(f"tensor {name}: the learner sends {theirs}, this engine's model has {mine}")


class Line:
    """A worker's groups with the learner: one at a time, kept for the next transfer while all goes well."""

    def __init__(self) -> None:
        self._kept = KeptGroups()
        self._joined = ""  # prefix of the group that was joined last

    def join(self, ticket: Ticket, *, rank: int, world_size: int, timeout_s: float) -> Group:
        """The group kept from the transfer before, if this is its ticket; else another one. Raises WeightError."""
        kept = self._kept.take(b"", ticket.transport)
        if kept is not None and kept[0] == ticket:
            return kept[1]
        if kept is not None:
            kept[1].close()
        if ticket.prefix == self._joined:
            raise WeightError("the group of the transfer before is gone here")
        self._joined = ticket.prefix
        return join_group(ticket, rank=rank, world_size=world_size, timeout_s=timeout_s)

    def end(self, ticket: Ticket, group: Group, *, well: bool) -> None:
        if well:
            self._kept.keep(b"", ticket, group)
        else:
            group.close()


def receive_bucket(group: Group, bucket: torch.Tensor, index: int, manifest: Manifest) -> None:
    try:
        failpoint("staging.bucket")
        group.receive(bucket)
    except (RuntimeError, WeightError) as e:
        raise WeightError(f"bucket {index} of {manifest.num_buckets}: {first_line(e)}") from None


def receive_digests(group: Group, manifest: Manifest) -> torch.Tensor:
    """[8 · tensors] uint8, as ``pack_digests`` has them."""
    digests = torch.empty(8 * len(manifest.entries), dtype=torch.uint8)
    try:
        group.receive(digests)
    except (RuntimeError, WeightError) as e:
        raise WeightError(f"digests: {first_line(e)}") from None
    return digests


def _text(kind: tuple[str, tuple[int, ...]] | None) -> str:
    return "nothing" if kind is None else f"{kind[0]} {list(kind[1])}"


def reason_of(error: Exception) -> str:
    return str(error) if isinstance(error, LeewayError) else f"{type(error).__name__}: {first_line(error)}"
