"""Publishing from several ranks: each copies its shards out, threads bring them to rank 0 over a group of their own.

The copy is all that training waits for. What rank 0's thread hands to the publisher are whole tensors, one at a
time; the mesh of training takes no part.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from common.errors import DeadlineError
from common.logs import LOGGER
from learner.ranks import Ranks
from learner.saving import in_thread
from learner.served import PublishedWeights

GATHER_S = 600.0  # for one version
_log = logging.getLogger(LOGGER)


@dataclass(frozen=True)
class Rows:
    """This rank's rows of a tensor, in host memory."""

    name: str
    rows: Tensor
    shape: tuple[int, ...]  # of the whole
    is_whole: bool  # each rank has all of it


class Gathering:
    """The publisher of every rank of a learner that has several."""

    def __init__(self, publisher: Any, ranks: Ranks) -> None:
        """publisher: rank 0's own, or what takes its place elsewhere. Collective."""
        self._publisher = publisher
        self._size = ranks.mesh.size(ranks.mesh.ndim - 1)  # ranks that share a copy of the model, rank 0's first
        self._rank = ranks.rank
        self._group = dist.new_group(list(range(self._size)), backend="gloo", timeout=timedelta(seconds=GATHER_S))
        self._kept: dict[str, Tensor] = {}  # host memory, from one version to the next
        self._running: tuple[int, Future[None]] | None = None
        self._copy_out_s = 0.0

    def publish(self, version: int, weights: PublishedWeights) -> None:
        """Returns once this rank's shards are copied out, and the version before has been gathered. Collective.

        Raises:
            What publishing the version before has raised; see `Publisher.publish`.
        """
        start = time.perf_counter()
        self.wait()
        shards = [self._copied(name, rows, p) for name, rows, p in weights.shards()]
        self._copy_out_s = time.perf_counter() - start
        if self._rank < self._size:
            whole = Gathered(weights, shards, self._group, self._size)
            work = in_thread(lambda: self._publisher.publish(version, whole), name=f"gather-{version}")
            self._running = version, work

    def wait(self) -> None:
        """Until what was published is gathered and with rank 0's publisher. Raises what that has raised."""
        if self._running is None:
            return
        version, work = self._running
        self._running = None
        try:
            work.result(GATHER_S)
        except TimeoutError:
            raise DeadlineError(f"the shards of version {version} from all ranks", GATHER_S) from None

    def close(self) -> None:
        """Before the process group ends; what went wrong with the last version is only said."""
        try:
            self.wait()
        except Exception as e:
            _log.warning("the last version was not gathered: %s", e)

    def stats(self) -> dict[str, float]:
        return {**self._publisher.stats(), "weights/copy_out_s": self._copy_out_s}

    def _copied(self, name: str, rows: Tensor, parameter: Tensor) -> Rows:
        kept = self._kept.get(name)
        if kept is None or (kept.shape, kept.dtype) != (rows.shape, rows.dtype):
            pinned = rows.device.type == "cuda"
            kept = self._kept[name] = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=pinned)
        kept.copy_(rows)
        return Rows(name, kept, tuple(parameter.shape), not _is_sharded(parameter))


class Gathered:
    """What a publisher is given: whole tensors on rank 0; elsewhere a rank's own rows, which iterating sends."""

    def __init__(self, weights: PublishedWeights, shards: list[Rows], group: dist.ProcessGroup, size: int) -> None:
        self._weights, self._shards, self._group, self._size = weights, shards, group, size

    def kinds(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        return self._weights.kinds()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for shard in self._shards:
            if shard.is_whole or self._size == 1:
                yield shard.name, shard.rows
            elif dist.get_rank() == 0:
                yield shard.name, self._received(shard)
            else:
                if shard.rows.numel():
                    dist.send(_bytes(shard.rows), 0, group=self._group)
                yield shard.name, shard.rows

    def _received(self, shard: Rows) -> Tensor:
        """The whole tensor: equal runs of rows by rank, the last ones shorter or empty, as `torch.chunk` cuts them."""
        whole = torch.empty(shard.shape, dtype=shard.rows.dtype)
        for rank, rows in enumerate(whole.split(-(-shard.shape[0] // self._size))):
            if rank == 0:
                rows.copy_(shard.rows)
            else:
                dist.recv(_bytes(rows), rank, group=self._group)
        return whole


def _bytes(rows: Tensor) -> Tensor:
    return rows.view(-1).view(torch.uint8)


def _is_sharded(parameter: Tensor) -> bool:
    if not isinstance(parameter, DTensor):
        return False
    sharded = [p for p in parameter.placements if p.is_shard()]
    assert all(isinstance(p, Shard) and p.dim == 0 for p in sharded), f"sharded as {parameter.placements}"
    return bool(sharded)
