"""A version as a Hugging Face folder: what is written is read, by others too; what is damaged is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.buffers import Buffer, check_digests, copy_out, pack_digests, with_digests
from common.errors import CheckpointError, WeightError
from common.hashes import verify
from common.stored import INDEX, SINGLE, StoredVersion, write_version
from common.weights import Manifest
from tests import models

KINDS = {
    "w.float32": torch.randn(33, 7),
    "w.bfloat16": torch.randn(5, 3).bfloat16(),
    "w.float16": torch.randn(4).half(),
    "w.int64": torch.arange(9),
    "w.int8": torch.arange(5, dtype=torch.int8),
    "w.bool": torch.tensor([True, False, True]),
    "w.none": torch.zeros(0, 4),
    "w.scalar": torch.tensor(2.5),
}


def filled(tensors: dict[str, torch.Tensor], dtype: torch.dtype | None = None) -> Buffer:
    buffer = Buffer()
    copy_out(tensors.items(), buffer, bucket_bytes=192, dtype=dtype)
    return buffer


def read_all(path: Path, layout: Manifest) -> Buffer:
    """As a worker does: bucket by bucket, then the digests."""
    buffer = Buffer()
    buffer.prepare(layout)
    stored = StoredVersion(path, layout)
    for index in range(layout.num_buckets):
        stored.read(layout.bucket(index).start, buffer.bucket(index).numpy().data)
    stored.close()
    return buffer


@pytest.mark.parametrize("shard_bytes", [1 << 30, 500, 1])
def test_every_kind_of_tensor_comes_back_to_the_bit_in_one_file_or_in_many(tmp_path: Path, shard_bytes: int) -> None:
    buffer, pieces = filled(KINDS), []
    write_version(tmp_path, buffer, 17, shard_bytes=shard_bytes, on_bytes=pieces.append)
    assert buffer.manifest is not None
    for name, tensor in read_all(tmp_path, buffer.manifest).tensors():
        assert torch.equal(tensor, KINDS[name]) and tensor.dtype == KINDS[name].dtype
    files = sorted(tmp_path.glob("*.safetensors"))
    assert [f.name for f in files] == [SINGLE] if shard_bytes > 500 else len(files) == {500: 2, 1: 8}[shard_bytes]
    assert sum(pieces) == sum(f.stat().st_size for f in files)
    theirs = {name: t for f in files for name, t in load_file(f).items()}  # what safetensors itself reads
    assert theirs.keys() == KINDS.keys() and all(torch.equal(theirs[n], t) for n, t in KINDS.items())
    verify(tmp_path)
    assert json.loads((tmp_path / "manifest.json").read_text())["version"] == 17


@pytest.mark.parametrize("shard_bytes", [1 << 30, 100_000])
def test_transformers_loads_the_folder(tmp_path: Path, shard_bytes: int) -> None:
    model, served, folder = models.tiny_model(3), models.write_folder(tmp_path / "model"), tmp_path / "17"
    folder.mkdir()
    buffer = filled(dict(model.named_parameters()), torch.bfloat16)
    write_version(folder, buffer, 17, beside=sorted(served.iterdir()), shard_bytes=shard_bytes)
    assert (folder / INDEX).exists() == (shard_bytes == 100_000)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert loaded.dtype == torch.bfloat16 and loaded.lm_head.weight is loaded.model.embed_tokens.weight
    for name, p in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), p.bfloat16()), name
    assert AutoTokenizer.from_pretrained(folder)("12").input_ids == models.token_ids("12")


def test_what_is_not_there_or_otherwise_is_refused_by_tensor_name(tmp_path: Path) -> None:
    def refusal(folder: Path, tensors: dict[str, torch.Tensor]) -> str:
        layout = filled(tensors).manifest
        assert layout is not None
        with pytest.raises(WeightError) as error:
            read_all(folder, layout)
        return str(error.value)

    write_version(tmp_path, filled(KINDS), 1)
    file = tmp_path / SINGLE
    assert f"tensor w.more: is not in {file}" in refusal(tmp_path, {**KINDS, "w.more": torch.zeros(1)})
    assert refusal(tmp_path, {"w.float16": torch.zeros(4)}) == (
        f"tensor w.float16: {file} has F16 [4], the learner says F32 [4]"
    )
    assert "has F32 [33, 7], the learner says F32 [7, 33]" in refusal(tmp_path, {"w.float32": torch.zeros(7, 33)})
    assert "share that folder with this host, or set weights.snapshot=zmq" in refusal(tmp_path / "gone", KINDS)
    whole = file.read_bytes()
    file.write_bytes(whole[:-2])  # torn, and the last tensor is the scalar
    assert refusal(tmp_path, KINDS) == f"tensor w.scalar: {file} ends before its last byte"
    for broken in (b"", whole[:4], whole[:40], b"\xff" * 64, whole[:8] + b"[]" + whole[10:]):
        file.write_bytes(broken)
        assert f"{file}: is no safetensors file" in refusal(tmp_path, KINDS)
    file.write_bytes(whole)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(KINDS, "../model.safetensors")}))
    assert "names a file '../model.safetensors'" in refusal(tmp_path, KINDS)
    (tmp_path / INDEX).write_text("{")
    assert f"{tmp_path / INDEX}: cannot be read" in refusal(tmp_path, KINDS)


def test_an_altered_byte_is_seen_by_tensor_name_and_by_hash(tmp_path: Path) -> None:
    buffer = filled(KINDS)
    write_version(tmp_path, buffer, 1)
    assert buffer.manifest is not None
    digests = pack_digests(with_digests(buffer))
    check_digests(with_digests(read_all(tmp_path, buffer.manifest)), digests)
    data = bytearray((tmp_path / SINGLE).read_bytes())
    data[data.index(KINDS["w.bfloat16"].view(torch.uint8).numpy().tobytes())] ^= 4
    (tmp_path / SINGLE).write_bytes(data)
    with pytest.raises(WeightError, match=r"^tensor w\.bfloat16: the bytes received are not those sent"):
        check_digests(with_digests(read_all(tmp_path, buffer.manifest)), digests)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: is damaged"):
        verify(tmp_path)


def test_a_reader_survives_the_removal_of_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "1"
    folder.mkdir()
    buffer = filled(KINDS)
    write_version(folder, buffer, 1)
    assert buffer.manifest is not None
    stored = StoredVersion(folder, buffer.manifest)
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    entry = buffer.manifest.entries[0]
    into = bytearray(entry.num_bytes)
    stored.read(entry.offset, memoryview(into))
    assert bytes(into) == KINDS[entry.name].numpy().tobytes()
    stored.close()
