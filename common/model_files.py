"""The files an engine starts from, beside the weights: config, tokenizer, chat template.

The learner says in the registry where they lie and what they are (``digest``). A generator that has
the same files at the same place uses them; another one pulls them over the learner's control socket
into its own run directory. Only data travels: files of a few kinds, by plain names, of bounded size,
each with its SHA-256. Code never does.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ConfigError, WeightError, WireError
from common.hashes import sha256
from common.wire import encode, pack, unpack

SUFFIXES = (".json", ".txt", ".model", ".jinja")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
NOT_SENT = re.compile(r"\.index\.json$|^(trainer_state|optimizer|scheduler|training_args)\.")
MAX_FILES = 64
MAX_FILE_BYTES = 128 << 20
MAX_TOTAL_BYTES = 256 << 20
PART_BYTES = 1 << 20
LEFTOVER_S = 3600.0


@dataclass(frozen=True)
class ModelFile:
    """``("tokenizer.json", 1_961_548, "9f86d0…")``"""

    name: str
    size: int
    sha256: str  # hex


Listing = tuple[ModelFile, ...]
# One question to the learner, its answer: (op, fields, payload frames).
Ask = Callable[[list[bytes]], tuple[str, dict[str, Any], list[bytes]]]


def list_files(folder: Path) -> Listing:
    """What of ``folder`` an engine needs and may be sent, by name.

    Raises:
        ConfigError: no config.json, or more than the bounds allow.
    """
    paths = sorted(p for p in folder.iterdir() if p.is_file() and _travels(p.name))
    sizes = [p.stat().st_size for p in paths]
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model.path={folder}: has no config.json; give a Hugging Face model folder")
    if len(paths) > MAX_FILES or max(sizes) > MAX_FILE_BYTES or sum(sizes) > MAX_TOTAL_BYTES:
        size, largest = max(zip(sizes, paths, strict=True))
        raise ConfigError(
            f"model.path={folder}: {len(paths)} files ({', '.join(SUFFIXES)}) of {_MB(sum(sizes))} beside the weights, "
            f"the largest {largest.name} of {_MB(size)}; engines start from at most {MAX_FILES} files of at most "
            f"{_MB(MAX_FILE_BYTES)} each, {_MB(MAX_TOTAL_BYTES)} together; keep there only config and tokenizer"
        )
    return tuple(ModelFile(p.name, n, sha256(p)) for p, n in zip(paths, sizes, strict=True))


def _MB(size: int) -> str:
    return f"{size / (1 << 20):.4g} MiB"


def _travels(name: str) -> bool:
    return bool(NAME.fullmatch(name)) and name.endswith(SUFFIXES) and not NOT_SENT.search(name)


def digest_of(files: Listing) -> str:
    """One name for a set of files: 64 hex digits."""
    return hashlib.sha256(_encode(files)).hexdigest()


def _encode(files: Listing) -> bytes:
    return pack([[f.name, f.size, f.sha256] for f in files])


def _decode(data: bytes) -> Listing:
    """Raises WeightError for what is no list of files that may travel."""
    try:
        files = tuple(ModelFile(str(name), int(size), str(sha)) for name, size, sha in unpack(data))
    except (OverflowError, TypeError, ValueError, WireError) as e:
        raise WeightError(f"the learner's list of model files cannot be read ({type(e).__name__}: {e})") from None
    for f in files:
        if not _travels(f.name) or not 0 <= f.size <= MAX_FILE_BYTES:
            raise WeightError(f"the learner offers a file {f.name[:140]!r} of {f.size} bytes: not one that travels")
    if len({f.name for f in files}) != len(files) or len(files) > MAX_FILES or _total(files) > MAX_TOTAL_BYTES:
        raise WeightError(f"the learner offers {len(files)} model files of {_total(files)} bytes: too many, or twice")
    return files


def _total(files: Listing) -> int:
    return sum(f.size for f in files)


def find_difference(folder: Path, files: Listing) -> str | None:
    """The first file that ``folder`` lacks or has otherwise; None: it has them all."""
    for f in files:
        path = folder / f.name
        if not path.is_file():
            return f"{f.name} is missing"
        if path.stat().st_size != f.size or sha256(path) != f.sha256:
            return f"{f.name} is another"
    return None


# ---------------------------------------------------------------- the learner's side
class FileServer:
    """Answers the questions for the files of one folder."""

    def __init__(self, folder: Path, files: Listing) -> None:
        self._folder, self._files = folder, {f.name: f for f in files}
        self._listing = _encode(files)

    @property
    def paths(self) -> list[Path]:
        return [self._folder / name for name in self._files]

    def answer(self, op: str, fields: dict[str, Any]) -> list[bytes]:
        """To ``files``: the list; to ``file``: at most ``PART_BYTES`` of one file, from ``offset`` on."""
        if op == "files":
            return encode("file_list", self._listing)
        name, offset = fields["name"], fields["offset"]
        if name not in self._files or not 0 <= offset < max(1, self._files[name].size):
            return encode("refused", re="file", reason="no_such_file", detail=f"{name[:140]!r} at {offset}")
        try:
            with open(self._folder / name, "rb") as f:
                f.seek(offset)
                return encode("file_part", f.read(PART_BYTES), name=name, offset=offset)
        except OSError as e:
            return encode("refused", re="file", reason="unreadable", detail=f"{name}: {e.strerror}")


# ---------------------------------------------------------------- the generator's side
def pull_files(ask: Ask, target: Path, digest: str) -> Path:
    """Have the learner's files in ``target``, whole or not at all.

    Args:
        ask: sends a question to the learner and returns its answer, or raises DeadlineError.
        digest: of the set of files, as the registry has it.

    Raises:
        WeightError: what comes is not what was announced.
        DeadlineError: the learner does not answer.
    """
    op, fields, payload = ask(encode("files"))
    files = _decode(payload[0]) if op == "file_list" and payload else ()
    if digest_of(files) != digest:
        why = fields.get("detail") or "they are not those that the registry announces"
        raise WeightError(f"the learner's model files cannot be had: {why}")
    if find_difference(target, files) is None:
        return target
    _remove_leftovers(target)
    fresh = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    fresh.mkdir(parents=True)
    try:
        for f in files:
            _pull_file(ask, fresh, f)
        _put_in_place(fresh, target, files)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return target


def _put_in_place(fresh: Path, target: Path, files: Listing) -> None:
    """The generators of a host do this at the same time; nothing is ever missing for who reads ``target`` already."""
    try:
        fresh.rename(target)
    except OSError:  # it is there: another generator was faster, or it is damaged
        for f in files:
            if find_difference(target, (f,)) is not None:
                (fresh / f.name).replace(target / f.name)


def _remove_leftovers(target: Path) -> None:
    """What pulls have left behind that were killed: nothing was added for an hour."""
    for left in target.parent.glob(f".{target.name}.*"):
        with contextlib.suppress(OSError):  # its owner lives after all, and is done
            if time.time() - left.stat().st_mtime > LEFTOVER_S:
                shutil.rmtree(left, ignore_errors=True)


def _pull_file(ask: Ask, folder: Path, file: ModelFile) -> None:
    offset, sha = 0, hashlib.sha256()
    with open(folder / file.name, "xb") as out:
        while offset < file.size:
            op, fields, payload = ask(encode("file", name=file.name, offset=offset))
            if op != "file_part" or (fields["name"], fields["offset"]) != (file.name, offset) or len(payload) != 1:
                raise WeightError(f"{file.name} at {offset}: the learner says {fields.get('detail') or op}")
            part = payload[0]
            if not 0 < len(part) <= file.size - offset:
                raise WeightError(f"{file.name}: {len(part)} bytes where {file.size - offset} are missing")
            out.write(part)
            sha.update(part)
            offset += len(part)
    if sha.hexdigest() != file.sha256:
        raise WeightError(f"{file.name}: what came is not what the learner announced; its folder was changed meanwhile")
