"""How much memory is free, so that what will not fit is refused by its size and not by the kernel."""

from __future__ import annotations

import shutil
from pathlib import Path

from common.errors import WeightError


def free_bytes(folder: Path | None = None) -> int | None:
    """Of the host's memory, or of the file system of ``folder`` (e.g. /dev/shm) if that is less; None: not known."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        host = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None
    return host if folder is None else min(host, shutil.disk_usage(folder).free)


def refuse_what_does_not_fit(what: str, wanted: int, *, free: int | None, where: str) -> None:
    """Raises WeightError, with the figures, if ``wanted`` bytes are more than is free ``where``."""
    if free is not None and wanted > free:
        raise WeightError(f"{what} needs {wanted / 1e9:.2f} GB {where}, {free / 1e9:.2f} GB are free; make room there")
