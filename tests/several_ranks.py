"""Starts a test's program on several ranks, as the launcher does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run_on_ranks(world_size: int, module: str, *args: str, within_s: float) -> None:
    """`python -m MODULE ARGS` on each; fails unless every rank ends with 0."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", module, *args], cwd=ROOT,
            env=os.environ | {"RANK": str(r), "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1",
                              "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"},
        )
        for r in range(world_size)
    ]  # fmt: skip
    try:
        assert [p.wait(within_s) for p in ranks] == [0] * world_size
    finally:
        for p in ranks:
            p.kill()
            p.wait()
