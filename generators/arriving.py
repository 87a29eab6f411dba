"""`weights.staging=none`: the tensors of a version as they come (no vLLM here)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from common.buffers import check_digests, digest, view_as
from common.errors import WeightError
from common.transfer import Ticket
from common.weights import Entry, Manifest
from generators.receiving import Line, receive_bucket, receive_digests


class Arriving:
    """A version that is loaded as it comes, without a copy of it in between; of the worker's main thread.

    Until the first bucket is there nothing has changed. After that the model is a mixture until
    ``check`` has returned.
    """

    def __init__(
        self, manifest: Manifest, line: Line, *, ticket: list[Any], rank: int, world_size: int, timeout_s: float
    ) -> None:
        """Joins the group and takes the first bucket. Raises WeightError."""
        self._manifest = manifest
        self._bucket = torch.empty(manifest.bucket(0).stop, dtype=torch.uint8)
        self._digests: list[int] = []
        self._line, self._ticket, self._went_well = line, Ticket(*ticket), False
        self._group = line.join(self._ticket, rank=rank, world_size=world_size, timeout_s=timeout_s)
        try:
            receive_bucket(self._group, self._bucket, 0, manifest)
        except BaseException:
            self.close()
            raise

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor when its last byte is there; the caller may keep it."""
        m, index = self._manifest, 0
        for entry in m.entries:
            data = torch.empty(entry.num_bytes, dtype=torch.uint8)
            at = entry.offset
            while at < entry.end:
                while at >= m.bucket(index).stop:
                    index += 1
                    receive_bucket(self._group, self._bucket[: _size(m, index)], index, m)
                at += self._take(data, entry, at, index)
            self._digests.append(digest(data))
            yield entry.name, view_as(data, entry)

    def _take(self, data: torch.Tensor, entry: Entry, at: int, index: int) -> int:
        """What of ``entry`` this bucket has, from byte ``at`` of the version on; how much."""
        bucket = self._manifest.bucket(index)
        stop = min(entry.end, bucket.stop)
        data[at - entry.offset : stop - entry.offset] = self._bucket[at - bucket.start : stop - bucket.start]
        return stop - at

    def check(self) -> int:
        """After all tensors: the version's digest. Raises WeightError, naming the tensor that is not what was sent."""
        m = self._manifest
        sealed = Manifest(m.entries, m.bucket_bytes, tuple(self._digests))
        if len(self._digests) != len(m.entries):
            raise WeightError(f"the engine took {len(self._digests)} of {len(m.entries)} tensors")
        check_digests(sealed, receive_digests(self._group, m))
        self._went_well = True
        return sealed.digest

    def close(self) -> None:
        self._line.end(self._ticket, self._group, well=self._went_well)


def _size(manifest: Manifest, index: int) -> int:
    bucket = manifest.bucket(index)
    return bucket.stop - bucket.start
