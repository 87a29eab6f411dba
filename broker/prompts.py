"""The prompt stream: a seeded order over the rows, again and again, without a list in memory.

A place in the stream (0, 1, 2, …) names one prompt, so a run continues with the exact next prompt
from one number.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.data import Rows
from common.order import permute
from common.tasks import Row


@dataclass(frozen=True)
class Prompts:
    rows: Rows
    seed: int = 0
    shuffle: bool = True
    epochs: int | None = None  # passes over the rows; None: endless

    @property
    def count(self) -> int | None:
        """Prompts in the stream; None: endless."""
        return None if self.epochs is None else self.epochs * len(self.rows)

    def index(self, place: int) -> int:
        """Which row stands at a place of the stream."""
        epoch, i = divmod(place, len(self.rows))
        return permute(i, len(self.rows), f"{self.seed}/prompts/{epoch}") if self.shuffle else i

    def row(self, place: int) -> Row:
        return self.rows[self.index(place)]
