"""Files that are there whole or not at all: written beside their place, flushed to disk, renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from common.errors import LeewayError


def replace_folder(target: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a fresh folder, then put it in place of `target`."""
    fresh = fresh_folder(target)
    write(fresh)
    put_in_place(fresh, target)


def leave_folder(target: Path, write: Callable[[Path], None]) -> None:
    """`replace_folder`, for what a run leaves behind when its last step is in a checkpoint.

    Raises:
        LeewayError: it cannot be written: the disk is full, the place is not ours, ….
    """
    try:
        replace_folder(target, write)
    except (OSError, SafetensorError) as e:  # safetensors has an error of its own for a full disk
        reason = getattr(e, "strerror", None) or e
        raise LeewayError(
            f"{target}: cannot be written ({reason}); the last step is in a checkpoint, so mend that and run the same "
            "command again"
        ) from e


def fresh_folder(target: Path) -> Path:
    """An empty folder beside `target`; what a crash left over there is removed."""
    for kind in ("new", "old"):
        shutil.rmtree(beside(target, kind), ignore_errors=True)
    fresh = beside(target, "new")
    fresh.mkdir(parents=True)
    return fresh


def put_in_place(fresh: Path, target: Path, *, at: Callable[[str], None] = lambda point: None) -> None:
    """Flush a folder to disk and rename it to `target`.

    A crash leaves the old folder, the new one, or (between two renames) neither but both under
    other names. at: called with the name of each moment.
    """
    old = beside(target, "old")
    for path in sorted(fresh.rglob("*")):
        _readable(path)
        sync(path)
    sync(fresh)
    at("flushed")
    if target.exists():
        os.rename(target, old)
        at("aside")
    os.rename(fresh, target)
    at("renamed")
    sync(target.parent)
    at("settled")
    shutil.rmtree(old, ignore_errors=True)


def replace_file(target: Path, write: Callable[[Path], None]) -> None:
    """Let `write` make a fresh file, then put it in place of `target`."""
    fresh = beside(target, "new")
    write(fresh)
    _readable(fresh)
    sync(fresh)
    os.replace(fresh, target)
    sync(target.parent)


def sync(path: Path) -> None:
    """Flush a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _readable(path: Path) -> None:
    """For everybody; safetensors writes files that only their owner can read."""
    if path.is_file():
        path.chmod(path.stat().st_mode | 0o444)


def beside(target: Path, kind: str) -> Path:
    """A name in the same folder that nothing takes for the real thing: `.step_40.new`."""
    return target.with_name(f".{target.name}.{kind}")
