"""The wire: samples survive it exactly, limits hold, and what is wrong is refused with a reason."""

import random
import zlib
from collections import Counter

import msgpack
import numpy as np
import pytest

from common import wire
from common.errors import WireError
from common.wire import CONTROL_OPS, GENERATOR_OPS, LEARNER_OPS, Sample, decode, decode_sample, encode, encode_sample
from tests.simulated import make_sample


def whole_sample():
    return make_sample(
        17, 1, 3,
        num_tokens=6, spans=((4, 0, 2), (5, 2, 6)), loss_mask_runs=(4, 2), reward=0.5, reward_parts={"format": 0.5},
        finish_reason="length", timing={"generate_s": 0.12}, generator="generator-héé-0",
        behavior_logprobs=np.array([-0.1, -2, 0, -1e-6, np.nan, np.inf], dtype=np.float32),
    )  # fmt: skip


def receive(frames, **options) -> Sample:
    op, header, (payload,) = decode(frames, GENERATOR_OPS)
    assert op == "sample"
    return decode_sample(header, payload, **options)


def reason_of(function, *args, **options):
    with pytest.raises(WireError) as caught:
        function(*args, **options)
    return caught.value.reason


def test_a_sample_comes_back_exactly():
    sent, got = whole_sample(), receive(encode_sample(whole_sample()), vocab_size=100)
    for name in Sample.__dataclass_fields__:
        a, b = getattr(sent, name), getattr(got, name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype and a.tobytes() == b.tobytes(), name
        else:
            assert a == b, name


def test_header_says_what_the_broker_needs():
    _, header, _ = decode(encode_sample(whole_sample()), GENERATOR_OPS)
    assert (header["num_tokens"], header["num_live_tokens"], header["oldest"], header["newest"]) == (6, 4, 4, 5)
    assert header["truncated"] is True and header["reward"] == 0.5 and header["fault"] is None


def test_masks_and_versions_are_per_token():
    sample = whole_sample()
    assert sample.loss_mask.tolist() == [True] * 4 + [False] * 2
    assert sample.behavior_versions.tolist() == [4, 4, 5, 5, 5, 5]
    assert make_sample(num_tokens=3).loss_mask.tolist() == [True] * 3
    assert make_sample(num_tokens=5, loss_mask_runs=(0, 2, 3)).loss_mask.tolist() == [False] * 2 + [True] * 3


def test_bytes_per_token():
    """At 2,048 response tokens; spans and prompt (4 bytes an id) aside."""
    with_prompt = make_sample(num_tokens=2048, prompt_ids=np.arange(512, dtype=np.int32))
    size = sum(map(len, encode_sample(with_prompt))) - 4 * 512
    assert size / 2048 <= 8.3
    more_spans = make_sample(num_tokens=2048, spans=tuple((v, v * 512, (v + 1) * 512) for v in range(4)))
    assert (
        sum(map(len, encode_sample(more_spans))) - sum(map(len, encode_sample(make_sample(num_tokens=2048))))
        <= 3 * 24 + 2
    )


def test_ids_at_the_edge_of_the_vocabulary():
    def with_id(i):
        return encode_sample(make_sample(num_tokens=3, response_ids=np.array([0, i, 1], dtype=np.int32)))

    assert receive(with_id(99), vocab_size=100).response_ids[1] == 99
    assert reason_of(receive, with_id(100), vocab_size=100) == "token_out_of_vocabulary"
    assert reason_of(receive, with_id(-1), vocab_size=100) == "token_out_of_vocabulary"
    assert reason_of(receive, with_id(-1)) == "token_out_of_vocabulary"
    assert receive(with_id(100)).response_ids[1] == 100  # no vocabulary known yet
    in_prompt = make_sample(prompt_ids=np.array([100], dtype=np.int32))
    assert reason_of(receive, encode_sample(in_prompt), vocab_size=100) == "token_out_of_vocabulary"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_tokens": 0, "spans": ()}, "empty_response"),
        ({"prompt_ids": np.array([], dtype=np.int32)}, "empty_prompt"),
        ({"behavior_logprobs": np.full(5, -1, np.float32)}, "lengths_disagree"),
        ({"behavior_logprobs": np.array([-1, np.nan, -1, -1, -1, -1], np.float32)}, "bad_logprob"),
        ({"behavior_logprobs": np.array([-1, -1, 0.1, -1, -1, -1], np.float32)}, "bad_logprob"),
        ({"behavior_logprobs": np.array([-1, -np.inf, -1, -1, -1, -1], np.float32)}, "bad_logprob"),
        ({"spans": ((0, 0, 5),)}, "bad_span"),
        ({"spans": ((0, 0, 3), (0, 4, 6))}, "bad_span"),
        ({"spans": ((0, 0, 3), (1, 3, 3), (1, 3, 6))}, "bad_span"),
        ({"spans": ((-1, 0, 6),)}, "bad_span"),
        ({"spans": ()}, "bad_span"),
        ({"loss_mask_runs": (4, 3)}, "lengths_disagree"),
        ({"reward": float("nan")}, "bad_reward"),
        ({"reward": None}, "bad_reward"),
        ({"finish_reason": "abort"}, "wrong_type"),
    ],
)
def test_samples_that_cannot_be_trained_are_refused(changes, reason):
    assert reason_of(receive, encode_sample(make_sample(**{"num_tokens": 6, **changes}))) == reason


def test_nan_is_allowed_where_the_policy_did_not_sample():
    logprobs = np.array([-1, np.nan, np.inf], dtype=np.float32)
    sample = make_sample(num_tokens=3, behavior_logprobs=logprobs, loss_mask_runs=(1, 2))
    assert np.isnan(receive(encode_sample(sample)).behavior_logprobs[1])


def test_a_sample_with_a_fault_needs_no_reward():
    assert receive(encode_sample(make_sample(reward=None, fault="reward_timeout"))).fault == "reward_timeout"


def test_a_header_that_disagrees_with_its_payload_is_refused():
    for name, wrong, reason in [
        ("num_tokens", 7, "lengths_disagree"), ("num_live_tokens", 1, "lengths_disagree"),
        ("reward", 0.7, "bad_reward"), ("oldest", 0, "bad_span"), ("newest", 9, "bad_span"),
        ("truncated", False, "wrong_type"), ("fault", "x", "bad_reward"), ("crc", 1, "checksum"),
    ]:  # fmt: skip
        _, header, (payload,) = decode(encode_sample(whole_sample()), GENERATOR_OPS)
        header[name] = wrong
        assert reason_of(decode_sample, header, payload) == reason, name


def test_a_sample_is_checked_without_being_made():
    _, header, (payload,) = decode(encode_sample(whole_sample()), GENERATOR_OPS)
    assert wire.check_sample(header, payload, vocab_size=100) == (((4, 0, 2), (5, 2, 6)), 1.0)
    assert reason_of(wire.check_sample, header, payload, vocab_size=3) == "token_out_of_vocabulary"


def deep(value, depth):
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("padding", [0, 2 * wire.MAX_CONTAINERS], ids=["small", "large"])
@pytest.mark.parametrize(
    ("change", "reasons"),
    [
        (lambda m: m.update(extra=1), {"extra_field"}),
        (lambda m: m.update(extra=deep(1, 300)), {"extra_field", "too_deep"}),
        (lambda m: m.update(reward=deep(1, 300)), {"bad_reward", "too_deep"}),
        (lambda m: m.update(fault=deep(1, 300)), {"bad_reward", "too_deep"}),
        (lambda m: m.update(generator=deep("x", 300)), {"wrong_type", "too_deep"}),
        (lambda m: m["timing"].update(x=deep(1, 300)), {"wrong_type", "too_deep"}),
        (lambda m: m["spans"].update(x=deep(1, 300)), {"wrong_type", "too_deep"}),
        (lambda m: m["spans"].update(len=deep(1, 300)), {"lengths_disagree", "too_deep"}),
        (lambda m: m.update(v=deep(1, 300)), {"schema_version", "too_deep"}),
        (lambda m: m.update(sampling=[[]] * 19_999), {"wrong_type", "too_many_containers"}),
        (lambda m: m.update(sampling=msgpack.ExtType(4, b"")), {"extension_type"}),
    ],
)
def test_nothing_hides_in_a_payload(change, reasons, padding):
    """Of more bytes than containers are allowed they are counted; below, each one's place is known."""
    sample = make_sample(num_tokens=6, prompt_ids=np.ones(4 + padding // 4, dtype=np.int32))
    _, header, (payload,) = decode(encode_sample(sample), GENERATOR_OPS)
    m = msgpack.unpackb(payload)
    change(m)
    mutated = msgpack.packb(m)
    assert reason_of(decode_sample, header | {"crc": zlib.crc32(mutated)}, mutated) in reasons


def test_headers_obey_their_schema():
    good = encode("hello", run="r", name="n", incarnation="i", version=-1)
    assert decode(good, GENERATOR_OPS) == ("hello", {"run": "r", "name": "n", "incarnation": "i", "version": -1}, [])
    for fields, reason in [
        ({}, "missing_field"), ({"name": 5}, "wrong_type"), ({"version": True}, "wrong_type"),
        ({"x": 1}, "extra_field"), ({"version": 1.5}, "wrong_type"), ({"version": 1 << 62}, "wrong_type"),
    ]:  # fmt: skip
        header = {"run": "r", "name": "n", "incarnation": "i", "version": 0, **fields}
        if not fields:
            del header["run"]
        assert reason_of(decode, encode("hello", **header), GENERATOR_OPS) == reason
    assert reason_of(decode, encode("no_such_op"), GENERATOR_OPS) == "unknown_op"
    assert reason_of(decode, [], GENERATOR_OPS) == "no_header"
    assert reason_of(decode, [wire.pack([1])], GENERATOR_OPS) == "no_header"
    assert reason_of(decode, [wire.pack({"v": 2, "op": "bye"})], GENERATOR_OPS) == "schema_version"
    assert reason_of(decode, [good[0], *[b""] * wire.MAX_FRAMES], GENERATOR_OPS) == "too_many_frames"


def nested(depth):
    value = []
    for _ in range(depth - 1):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not_msgpack"),
        (b"\xc1", "not_msgpack"),
        (b"\xdd\xff\xff\xff\xff", "not_msgpack"),  # a list of 4 billion elements, it says
        (b"\xdf\xff\xff\xff\xff", "not_msgpack"),
        (b"\xdb\xff\xff\xff\xff", "not_msgpack"),
        (msgpack.packb(msgpack.ExtType(5, b"")), "extension_type"),
        (msgpack.packb(msgpack.ExtType(5, b"x")), "not_msgpack"),
        (msgpack.packb(nested(17)), "too_deep"),
        (b"\x91" * 3_000 + b"\x90", "not_msgpack"),
        (msgpack.packb([[]] * 15_000 + [{}] * 4_999 + [[[]]]), "too_many_containers"),
        (msgpack.packb({1: 2}), "not_msgpack"),
        (msgpack.packb("x") + b"x", "not_msgpack"),
    ],
)
def test_bombs_are_refused(data, reason):
    assert reason_of(wire.unpack, data) == reason


def test_limits_themselves_are_allowed():
    assert wire.unpack(msgpack.packb(nested(16))) == nested(16)
    assert len(wire.unpack(msgpack.packb([[]] * 19_999))) == 19_999
    assert reason_of(wire.unpack, b"\xc4\x05hello", max_bytes=6) == "too_large"


def mutate(rng, frames):
    """One message with one thing wrong; True if its payload's checksum was made to fit again."""
    header, payload = (bytearray(f) for f in frames)
    kind, mended = rng.randrange(8), False
    target = payload if rng.random() < 0.5 else header
    if kind == 0:
        target[rng.randrange(len(target))] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del target[rng.randrange(len(target)) :]
    elif kind == 2:
        i = rng.randrange(len(target))
        target[i : i + 4] = rng.randbytes(4)
    elif kind == 3:
        return [bytes(header)], False
    elif kind == 4:
        return [bytes(header), bytes(payload), b""], False
    else:  # a field with another value, checksum and all
        m = msgpack.unpackb(bytes(payload))
        name = rng.choice(sorted(m))
        value = rng.choice(
            [None, -1, 1 << 40, "x", b"", [], {}, {"dtype": "<i4", "len": 3, "data": b"123"}, 2.5, float("nan")]
        )
        if kind == 5:
            m[name] = value
        elif kind == 6:
            del m[name]
        elif isinstance(m[name], dict) and "data" in m[name]:
            m[name]["data"] = m[name]["data"][: rng.randrange(len(m[name]["data"]) + 1)]
        payload = bytearray(msgpack.packb(m))
        h = msgpack.unpackb(bytes(header))
        h["crc"], mended = zlib.crc32(payload), True
        header = bytearray(msgpack.packb(h))
    return [bytes(header), bytes(payload)], mended


def check_mutations(num, seed):
    rng, reasons, frames = random.Random(seed), Counter(), encode_sample(whole_sample())
    for _ in range(num):
        mutated, _ = mutate(rng, frames)
        try:
            op, header, payload = decode(mutated, GENERATOR_OPS)
            if op != "sample" or len(payload) != 1:
                raise WireError("bad_payload")
            decode_sample(header, payload[0], vocab_size=100)
            reasons["accepted"] += 1
        except WireError as e:
            reasons[e.reason] += 1
    return reasons


def test_mutated_samples_are_refused_with_a_reason_never_with_another_error():
    reasons = check_mutations(20_000, seed=0)
    assert sum(reasons.values()) == 20_000
    assert {"checksum", "not_msgpack", "missing_field", "wrong_type", "lengths_disagree", "bad_payload"} <= set(reasons)
    # What is accepted differs in a field that no rule speaks of: a key, a sampling setting, a masked log-prob.
    assert reasons["accepted"] < 0.12 * 20_000


@pytest.mark.soak
def test_many_mutated_samples():
    assert sum(check_mutations(200_000, seed=1).values()) == 200_000


@pytest.mark.parametrize("ops", [GENERATOR_OPS, LEARNER_OPS, CONTROL_OPS], ids=["generator", "learner", "control"])
def test_every_message_of_the_tables_can_be_sent(ops):
    examples = {str: "x", int: 3, float: 0.5, bool: True, list: [], dict: {}}
    for op, schema in ops.items():
        fields = {name: examples[kind] if kind in examples else examples[kind[0]] for name, kind in schema.items()}
        assert decode(encode(op, b"payload", **fields), ops) == (op, fields, [b"payload"])
