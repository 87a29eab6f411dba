"""What a figure is, and the list of those that ``make bench`` measures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """One measured figure. ``aim`` is text such as ``"≤ 1.15"``; None: no aim, for information."""

    name: str
    value: float
    unit: str
    aim: str | None = None

    @property
    def ok(self) -> bool | None:
        if self.aim is None:
            return None
        relation, bound = self.aim.split()
        return {"≤": self.value <= float(bound), "≥": self.value >= float(bound)}[relation]


Benchmark = Callable[[], Iterator[Figure]]
BENCHMARKS: dict[str, Benchmark] = {}


def benchmark(function: Benchmark) -> Benchmark:
    """Register a function that yields figures; its docstring says how they are measured."""
    BENCHMARKS[function.__name__] = function
    return function
