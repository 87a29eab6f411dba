"""The hash of a file, and whether a checkpoint's files are those that were written."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from common.errors import CheckpointError

MANIFEST = "manifest.json"  # of a checkpoint: size and SHA-256 of each file; written last


def sha256(path: Path) -> str:
    """In hex."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def verify(path: Path) -> None:
    """Every file is there and is what was written.

    Raises:
        CheckpointError: naming the file.
    """
    try:
        files = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["files"]
    except FileNotFoundError:
        raise CheckpointError(f"{path}: has no {MANIFEST}, so it was never finished") from None
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise CheckpointError(f"{path / MANIFEST}: cannot be read ({e})") from e
    for name, expected in files.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file}: is missing")
        if file.stat().st_size != expected["bytes"] or sha256(file) != expected["sha256"]:
            raise CheckpointError(f"{file}: is damaged (its hash is not the one in {MANIFEST})")
    if extra := {p.name for p in path.iterdir()} - files.keys() - {MANIFEST}:
        raise CheckpointError(f"{path / min(extra)}: does not belong to this checkpoint")
