"""What stands at the head of safetensors files: names, dtypes, shapes, places. No torch here."""

from __future__ import annotations

import json
import math
import os
import struct
from pathlib import Path
from typing import Any

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"  # as Hugging Face names them
MAX_HEADER_BYTES = 100 << 20  # as safetensors has it


def read_header(file: int) -> tuple[dict[str, dict[str, Any]], int]:
    """``({"model.norm.weight": {"dtype": "F32", "shape": [128], "data_offsets": [0, 512]}}, start of the data)``.

    file: a descriptor.

    Raises:
        ValueError, struct.error, OSError: it is no such file.
    """
    (length,) = struct.unpack("<Q", os.pread(file, 8, 0))
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {length} bytes")
    header = json.loads(os.pread(file, length, 8))
    if not isinstance(header, dict):
        raise ValueError("the header is no map")
    header.pop("__metadata__", None)
    return header, 8 + length


def num_elements(folder: Path) -> int | None:
    """Elements of all tensors of a Hugging Face folder, without a tied head; None: there are none, or none readable.

    Other safetensors files that lie there (`consolidated.safetensors`: the same weights once more) do not count.
    """
    total = 0
    try:
        tied = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("tie_word_embeddings", False)
        files = _files(folder)
        for path in files:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                tensors, _ = read_header(file)
            finally:
                os.close(file)
            total += sum(math.prod(t["shape"]) for n, t in tensors.items() if not (tied and n == "lm_head.weight"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error):
        return None
    return total if files else None


def _files(folder: Path) -> list[Path]:
    """The files that `from_pretrained` reads."""
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    if not (folder / INDEX).exists():
        return []
    shards = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
    return [folder / name for name in sorted(set(shards))]
