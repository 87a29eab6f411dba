"""Manifest, buckets, digests and the copy-out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.buffers import Buffer, Watermark, check_digests, copy_out, copy_out_as, digest, pack_digests, with_digests
from common.errors import LeewayError, WeightError
from common.weights import ALIGNMENT, Manifest, decode_manifest, encode_manifest, lay_out

SHAPES = st.lists(
    st.tuples(st.sampled_from(["float32", "bfloat16", "int64", "bool"]), st.lists(st.integers(0, 9), max_size=3)),
    min_size=1,
    max_size=12,
)


def test_tensors_lie_end_to_end_and_buckets_cut_the_bytes() -> None:
    m = lay_out([("a", "float32", (3, 5)), ("b", "bfloat16", (7,)), ("c", "float32", (100,))], bucket_bytes=128)
    assert [(e.name, e.offset, e.num_bytes) for e in m.entries] == [("a", 0, 60), ("b", 64, 14), ("c", 128, 400)]
    assert m.total_bytes == 576 and m.num_buckets == 5
    assert [m.bucket(i) for i in (0, 4)] == [slice(0, 128), slice(512, 576)]


@given(SHAPES, st.integers(64, 1000))
def test_any_layout_is_aligned_disjoint_and_survives_the_wire(rows: list[tuple[str, list[int]]], size: int) -> None:
    tensors = [(f"t{i}", dtype, tuple(shape)) for i, (dtype, shape) in enumerate(rows)]
    try:
        m = lay_out(tensors, size)
    except WeightError:  # all tensors are empty
        assert all(0 in shape for _, _, shape in tensors)
        return
    for e, after in zip(m.entries, [*m.entries[1:], None], strict=True):
        assert e.offset % ALIGNMENT == 0
        assert e.end <= (after.offset if after else m.total_bytes)
    covered = [i for b in range(m.num_buckets) for i in range(m.total_bytes)[m.bucket(b)]]
    assert covered == list(range(m.total_bytes))
    sealed = Manifest(m.entries, m.bucket_bytes, tuple(range(-3, len(m.entries) - 3)))
    again = decode_manifest(encode_manifest(sealed))
    assert again == sealed and again.digest == sealed.digest


@pytest.mark.parametrize(
    ("tensors", "size", "fault"),
    [
        ([("a", "float32", (1,)), ("a", "float32", (1,))], 64, "tensor a is there twice"),
        ([("a", "complex64", (1,))], 64, "dtype complex64 does not travel"),
        ([], 64, "no weights"),
        ([("a", "float32", (1,))], 63, "bucket_bytes=63"),
    ],
)
def test_bad_layouts_are_refused(tensors: list[tuple[str, str, tuple[int, ...]]], size: int, fault: str) -> None:
    with pytest.raises(WeightError, match=fault):
        lay_out(tensors, size)


def test_what_is_no_manifest_is_refused() -> None:
    good = encode_manifest(lay_out([("a", "float32", (2, 3))], 64))
    for bad in (
        b"",
        b"\xc1",
        good[:-1],
        good.replace(b"ndims", b"ndimz"),
        good + b"\x00",
        good.replace(b"\x02\xa4", b"\x03\xa4"),
    ):
        with pytest.raises(LeewayError):
            decode_manifest(bad)


def test_copy_out_casts_keeps_the_buffer_and_the_layout() -> None:
    tensors = [("w", torch.randn(5, 7)), ("n", torch.arange(3)), ("t", torch.randn(4, 6).T)]
    buffer = Buffer()
    layout = copy_out(iter(tensors), buffer, bucket_bytes=256, dtype=torch.bfloat16)
    assert [e.dtype for e in layout.entries] == ["bfloat16", "int64", "bfloat16"]
    for (name, wanted), (got_name, got) in zip(tensors, buffer.tensors(), strict=True):
        assert name == got_name
        assert torch.equal(got, wanted.bfloat16() if wanted.is_floating_point() else wanted)
    where = buffer.bytes.data_ptr()
    assert copy_out_as(layout, iter([(n, t + 1) for n, t in tensors]), buffer, Watermark(), torch.bfloat16) == []
    assert buffer.bytes.data_ptr() == where
    assert torch.equal(buffer.view(layout.entries[1]), torch.arange(3) + 1)


def test_others_may_read_what_is_copied_out_already() -> None:
    tensors = [("a", torch.full((64,), 1.5)), ("b", torch.full((64,), 2.5))]
    buffer, filled = Buffer(), Watermark()
    layout = copy_out(tensors, buffer, bucket_bytes=256)
    buffer.bytes.zero_()
    seen = []

    def watched() -> Any:
        for name, tensor in tensors:
            seen.append((name, buffer.bytes.view(torch.float32).tolist()))
            yield name, tensor
        filled.wait_for(512, 0)
        with pytest.raises(WeightError, match="only 512 of 513 bytes of the weights came; none for 0 s"):
            filled.wait_for(513, 0)

    assert copy_out_as(layout, watched(), buffer, filled) == []
    assert seen == [("a", [0.0] * 128), ("b", [1.5] * 64 + [0.0] * 64)]
    filled.fail("gone")
    filled.wait_for(512, 0)
    with pytest.raises(WeightError, match="gone"):
        filled.wait_for(513, 60)


@pytest.mark.parametrize("change", ["shape", "name", "dtype", "fewer", "more"])
def test_another_layout_is_seen_and_nothing_is_lost(change: str) -> None:
    tensors = [(f"t{i}", torch.full((5,), float(i))) for i in range(4)]
    buffer = Buffer()
    layout = copy_out(tensors, buffer, bucket_bytes=256)
    if change == "fewer":
        changed = tensors[:2]
    elif change == "more":
        changed = [*tensors, ("t4", torch.ones(3)), ("t5", torch.ones(4))]
    else:
        other = {"shape": ("t2", torch.ones(6)), "name": ("x", tensors[2][1]), "dtype": ("t2", tensors[2][1].half())}
        changed = [*tensors[:2], other[change], tensors[3]]
    rest = iter(changed)
    seen = copy_out_as(layout, rest, buffer, Watermark())
    again = Buffer()
    copy_out([*seen, *rest], again, bucket_bytes=256)
    for (name, wanted), (got_name, got) in zip(changed, again.tensors(), strict=True):
        assert name == got_name and torch.equal(wanted, got)


def test_digest_is_the_wrapping_sum_of_words() -> None:
    rng = np.random.default_rng(0)
    for size in (0, 1, 7, 8, 9, 64, 1001):
        data = rng.integers(0, 256, size, dtype=np.uint8)
        words = [int.from_bytes(data[i : i + 8].tobytes(), "little") for i in range(0, size, 8)]
        signed = (sum(words) + 2**63) % 2**64 - 2**63
        assert digest(torch.from_numpy(data)) == signed


def test_digest_finds_any_flipped_bit_and_names_its_tensor() -> None:
    buffer = Buffer()
    copy_out([(f"t{i}", torch.randn(33)) for i in range(4)], buffer, bucket_bytes=64)
    before = with_digests(buffer)
    for index, entry in enumerate(before.entries):
        for bit in (0, 5, 8 * entry.num_bytes - 1):
            buffer.bytes[entry.offset + bit // 8] ^= 1 << (bit % 8)
            after = with_digests(buffer)
            assert [a != b for a, b in zip(after.digests, before.digests, strict=True)] == [
                i == index for i in range(4)
            ]
            assert after.digest != before.digest
            with pytest.raises(WeightError, match=f"tensor t{index}: the bytes received are not those sent"):
                check_digests(after, pack_digests(before))
            buffer.bytes[entry.offset + bit // 8] ^= 1 << (bit % 8)
