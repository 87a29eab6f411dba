"""Figures of the running system: the quick start itself, watched from outside."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.figures import Figure, benchmark
