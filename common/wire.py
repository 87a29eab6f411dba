"""The wire: every message and its fields, in one place (``docs/protocol.md`` is made from it).

A message is ``[header, payload, …]``: a small msgpack map that names an ``op``, then frames that
the broker checks, stores and forwards. No pickle, no extension types; limits hold before anything
is decoded. Arrays are raw little-endian bytes with dtype and length in a map.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import msgpack
import numpy as np
from numpy.typing import NDArray

from common.errors import WireError

SCHEMA = 1
MAX_HEADER_BYTES = 1 << 20
MAX_PAYLOAD_BYTES = 64 << 20
MAX_FRAMES = 4096
MAX_CONTAINERS = 20_000
MAX_DEPTH = 16
_INT32_END = 1 << 31
_INT_END = 1 << 62
_MISSING: Any = object()

# ---------------------------------------------------------------- headers
# op -> field -> type. `int` excludes bool; `float` admits int; a tuple is "one of".
Number = (int, float)
_OPTIONAL_NUMBER = (int, float, type(None))

GENERATOR_OPS: dict[str, dict[str, Any]] = {
    # generator -> broker
    "hello": {"run": str, "name": str, "incarnation": str, "version": int},
    # `capacity`: samples it is willing to hold at once; `progress`: [group, attempt, tokens] of each
    # lease it works on; `sampling`: [start, end] spans (Unix seconds) in which requests ran.
    "heartbeat": {"version": int, "capacity": int, "progress": list, "sampling": list, "stats": dict},
    # payload: one sample (`encode_sample`)
    "sample": {
        "group": int, "attempt": int, "index": int, "crc": int, "num_tokens": int, "num_live_tokens": int,
        "reward": _OPTIONAL_NUMBER, "truncated": bool, "oldest": int, "newest": int, "fault": (str, type(None)),
    },
    # the generator cannot work on a lease; `retry` false: the prompt itself is at fault
    "give_back": {"group": int, "attempt": int, "reason": str, "retry": bool},
    "bye": {},
    # broker -> generator
    "welcome": {"version": int, "floor": int},
    # payload: the prompt row (`pack`)
    "lease": {"group": int, "attempt": int, "indices": list, "lane": str, "limit_s": float},
    "acks": {"keys": list},
    "cancel": {"group": int, "attempt": int, "reason": str},
    # why nothing is leased to this generator now
    "wait": {"reason": str},
    "refused": {"re": str, "reason": str, "detail": str},
}  # fmt: skip

LEARNER_OPS: dict[str, dict[str, Any]] = {
    # learner -> broker; every request carries `id`, the answer repeats it
    # takes the run: learners before this one are fenced off; the same incarnation gets the same epoch again
    "attach": {"id": int, "run": str, "name": str, "incarnation": str},
    # the batch of the next step, to be trained at `version`; while step s is trained at version v, also that of
    # step s + 1 at v + 1; answered by `claimed` or `ended`, `waiting` before
    "claim": {"id": int, "epoch": int, "step": int, "version": int, "num_groups": int},
    # for the learner's other ranks: the batch of this step once it is claimed; answered as a claim is
    "see_claim": {"id": int, "epoch": int, "step": int},
    # `keys`: [[group, attempt, index], …], at most 4,000
    "fetch": {"id": int, "epoch": int, "keys": list},
    # the claimed step was applied (or skipped, for `reason`) on all ranks; `optimizer_span`: [start, end], Unix seconds
    "ack_step": {
        "id": int, "epoch": int, "step": int, "applied": bool, "reason": str, "settings": dict,
        "digest": str, "optimizer_span": list,
    },
    # the claimed batch is not trained: its groups are ready again
    "return": {"id": int, "epoch": int, "step": int, "reason": str},
    # a checkpoint of an acknowledged step is complete on disk
    "checkpoint": {"id": int, "epoch": int, "step": int, "path": str},
    # the next acknowledged step after this one, to be redone
    "row": {"id": int, "epoch": int, "after": int},
    # have the held-out prompts sampled by generators that hold at least `version`
    "validate": {"id": int, "epoch": int, "step": int, "version": int},
    "validations": {"id": int, "epoch": int},
    # anybody may ask these two, without `attach`. `step`: of the checkpoint that the run shall go back to; `epoch`: of
    # the learner that decides it, -1: a person does; `lr_factor`: of the learning rates from then on
    "status": {"id": int},
    "rollback": {"id": int, "run": str, "epoch": int, "step": int, "who": str, "lr_factor": float},
    # broker -> learner
    # `abandoned`: [first, last] of each run of steps that a rollback gave up
    "attached": {
        "id": int, "epoch": int, "version": int, "step": int, "floor": int, "checkpoint": int, "abandoned": list,
    },
    # why a claim has to wait, about once a second
    "waiting": {"id": int, "reason": str},
    # payloads: the groups in order, each [{group, attempt, samples: [sample header fields]}, …] (`pack`);
    # `limit`: staleness limit in force; `short`: the data ended and fewer groups than asked for are left
    "claimed": {"id": int, "step": int, "version": int, "limit": int, "short": bool},
    "ended": {"id": int, "reason": str},
    # payloads: the samples in the order of `keys`
    "samples": {"id": int, "keys": list},
    "stepped": {"id": int, "version": int, "checkpoint_wanted": bool, "stats": dict},
    "done": {"id": int},
    # payloads: the next acknowledged step {step, epoch, version, limit, applied, reason, settings, digest,
    # restored} (`pack`), then its groups as in `claimed` (none if nothing was trained); no payload: there is none;
    # `restored`: null, or it is a rollback to the checkpoint of this step
    "step_row": {"id": int},
    # `asked`: steps; `results`: [{step, version, score, num_samples, num_dropped}], complete ones only
    "validation_results": {"id": int, "asked": list, "results": list},
    "status_is": {"id": int, "status": dict},
    # `step`: the number that the rollback took; `version`: from which the run goes on
    "rolled_back": {"id": int, "step": int, "version": int, "dropped": int},
    "error": {"id": int, "kind": str, "detail": str},
    # a request that could not be read
    "refused": {"re": str, "reason": str, "detail": str},
}  # fmt: skip

# The learner's control socket (weights). `number` names one transfer to one engine.
CONTROL_OPS: dict[str, dict[str, Any]] = {
    # engine -> learner
    # `num_workers`: how many of its workers receive (one does for all that share its memory)
    "hello": {"run": str, "name": str, "incarnation": str, "version": int, "num_workers": int},
    "beat": {"version": int, "state": str},
    "prepared": {"number": int},
    "staged": {"number": int, "digest": int},
    # loaded, and proven if a canary came with `swap`: `difference` of log-probs; -1: nothing was compared
    "held": {"number": int, "version": int, "pause_s": float, "difference": float},
    # loaded, but the canary's log-probs are others: the engine now holds nothing, and no sample of it leaves
    "disproved": {"number": int, "version": int, "difference": float, "reason": str},
    # `version`: that the engine holds now; -1 if it was being loaded directly and is neither the one nor the other
    "failed": {"number": int, "version": int, "reason": str},
    "leave": {},
    # before the engine starts: the files it starts from (config, tokenizer, chat template), if it has none
    "files": {},
    "file": {"name": str, "offset": int},
    # the engine has met a learner with a higher epoch, and takes nothing from this one any more
    "fenced": {"epoch": int},
    # learner -> engine; `welcome` answers `hello` and each `beat`
    "welcome": {"epoch": int, "timeout_s": float},
    # payload: the manifest. Ranks of the engine's workers: rank, rank + 1, …
    "prepare": {
        "epoch": int, "version": int, "number": int, "rank": int, "world_size": int,
        "transport": str, "host": str, "port": int, "prefix": str, "timeout_s": float,
    },
    # payload: the canary, if this load is to be proven
    "swap": {"number": int, "version": int},
    "abort": {"number": int, "reason": str},
    # payload: [[name, size, SHA-256], …] (`pack`)
    "file_list": {},
    # payload: the file's bytes from `offset` on, at most 1 MiB
    "file_part": {"name": str, "offset": int},
    "refused": {"re": str, "reason": str, "detail": str},
}  # fmt: skip

# A snapshot: the learner's socket of one transfer (ROUTER) and the workers of the engine (DEALER).
SNAPSHOT_OPS: dict[str, dict[str, Any]] = {
    # worker -> learner: shows the secret that came with `prepare`; then one credit for each chunk taken
    "pull": {"prefix": str},
    "credit": {"count": int},
    "bye": {},
    # learner -> worker
    "go": {},
    # payload: the next `size` bytes of the version
    "chunk": {"size": int},
    # from a folder: not yet, it is being written
    "wait": {},
    # payload: the layout of what lies in the learner's folder `path`
    "folder": {"path": str},
    # the next `size` bytes of the version are to be read there; taken, they are a credit
    "stored": {"size": int},
    "end": {},
}

# A worker inside the engine -> its generator (a local socket).
WORKER_OPS: dict[str, dict[str, Any]] = {
    "staged": {"number": int, "worker": int, "digest": int, "receive_s": float},
    "failed": {"number": int, "worker": int, "reason": str},
}


def pack(value: Any) -> bytes:
    return msgpack.packb(value, use_bin_type=True)  # type: ignore[no-any-return]


def unpack(data: bytes, *, max_bytes: int = MAX_PAYLOAD_BYTES) -> Any:
    """Decode one msgpack value within the limits.

    Raises:
        WireError: `too_large`, `too_many_containers`, `too_deep`, `extension_type`, `not_msgpack`.
    """
    if len(data) > max_bytes:
        raise WireError("too_large", f"{len(data)} bytes, at most {max_bytes}")
    left = MAX_CONTAINERS

    def count(container: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise WireError("too_many_containers", f"more than {MAX_CONTAINERS}")
        return container

    try:
        value = _unpackb(data, object_hook=count, list_hook=count)
    except WireError:
        raise
    except Exception as e:  # msgpack raises ValueError, UnicodeDecodeError, TypeError, its own…
        raise WireError("not_msgpack", f"{type(e).__name__}: {e}") from None
    if MAX_CONTAINERS - left > MAX_DEPTH and _depth(value) > MAX_DEPTH:  # few containers cannot be deep
        raise WireError("too_deep", f"deeper than {MAX_DEPTH}")
    return value


def _unpack_known(data: bytes) -> Any:
    """``unpack`` for a caller that checks every container by type and size, so that none can be deep: it need not be
    asked for the depth, nor be counted, since n bytes hold at most n containers."""
    if len(data) > MAX_CONTAINERS:
        return unpack(data)
    try:
        return _unpackb(data)
    except WireError:
        raise
    except Exception as e:
        raise WireError("not_msgpack", f"{type(e).__name__}: {e}") from None


def _no_extension(code: int, _data: bytes) -> Any:
    raise WireError("extension_type", f"code {code}")


_unpackb = partial(
    msgpack.unpackb, raw=False, strict_map_key=True, ext_hook=_no_extension, max_array_len=MAX_CONTAINERS,
    max_map_len=1024, max_str_len=1 << 20, max_ext_len=0,
)  # fmt: skip


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level := [x for x in level if isinstance(x, (dict, list))]:
        depth += 1
        if depth > MAX_DEPTH:
            break
        level = [x for c in level for x in (c.values() if isinstance(c, dict) else c)]
    return depth


def encode(op: str, *payload: bytes, **fields: Any) -> list[bytes]:
    """A message as frames."""
    return [pack({"v": SCHEMA, "op": op, **fields}), *payload]


def decode(frames: list[bytes], ops: dict[str, dict[str, Any]]) -> tuple[str, dict[str, Any], list[bytes]]:
    """``(op, fields, payload frames)`` of a message whose header obeys the table ``ops``.

    Raises:
        WireError: see ``unpack``; also `no_header`, `schema_version`, `unknown_op`,
            `missing_field`, `extra_field`, `wrong_type`, `too_many_frames`.
    """
    if not frames:
        raise WireError("no_header")
    if len(frames) > MAX_FRAMES:
        raise WireError("too_many_frames", f"{len(frames)}")
    header = unpack(frames[0], max_bytes=MAX_HEADER_BYTES)
    if not isinstance(header, dict):
        raise WireError("no_header", f"a {type(header).__name__}")
    if header.pop("v", None) != SCHEMA:
        raise WireError("schema_version", f"this side speaks {SCHEMA}; run the same Leeway everywhere")
    op = header.pop("op", None)
    schema = ops.get(op) if isinstance(op, str) else None
    if schema is None:
        raise WireError("unknown_op", repr(op)[:80])
    for name, kind in schema.items():
        value = header.get(name, _MISSING)
        if type(value) is kind and (kind is not int or -_INT_END < value < _INT_END):
            continue
        if value is _MISSING:
            raise WireError("missing_field", f"{op}.{name}")
        if not _is(value, kind):
            raise WireError("wrong_type", f"{op}.{name} is a {type(value).__name__}")
    if len(header) > len(schema):
        raise WireError("extra_field", f"{op}.{next(iter(header.keys() - schema.keys()))}"[:80])
    return str(op), header, frames[1:]


def _is(value: Any, kind: Any) -> bool:
    found = type(value)
    if found is not kind and not (found in kind if type(kind) is tuple else kind is float and found is int):
        return False
    return found is not int or -_INT_END < value < _INT_END


# ---------------------------------------------------------------- samples
Spans = tuple[tuple[int, int, int], ...]  # (version, start, end) over the response tokens, end to end


@dataclass(frozen=True)
class Sample:
    """One response, as it travels and as it is stored. Example in comments, for a response of 6 tokens."""

    group: int  # 17
    attempt: int  # 0
    index: int  # 3: the fourth of its group
    prompt_ids: NDArray[np.int32]  # [prompt]
    response_ids: NDArray[np.int32]  # [response]
    behavior_logprobs: NDArray[np.float32]  # [response], of the distribution actually sampled
    spans: Spans  # ((4, 0, 2), (5, 2, 6)): version 4 made the first two tokens
    sampling: dict[str, float]  # {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
    finish_reason: str  # "stop" or "length"
    reward: float | None  # None: the reward failed, see `fault`
    generator: str  # name of the generator
    loss_mask_runs: tuple[int, ...] = ()  # (4, 2): four trained tokens, then two that are not; (): all are
    reward_parts: dict[str, float] = field(default_factory=dict)
    timing: dict[str, float] = field(default_factory=dict)  # seconds: {"generate_s": 0.12, "reward_s": 0.001}
    fault: str | None = None  # "reward_timeout", "reward_error", …: the sample cannot be trained

    @property
    def loss_mask(self) -> NDArray[np.bool_]:
        """[response]: 1 on tokens that the policy sampled, 0 on tool and environment tokens."""
        return _mask(self.loss_mask_runs or (len(self.response_ids),))

    @property
    def num_live_tokens(self) -> int:
        """Sum of ``loss_mask``, without making it."""
        return sum(self.loss_mask_runs[::2]) if self.loss_mask_runs else len(self.response_ids)

    @property
    def behavior_versions(self) -> NDArray[np.int64]:
        """[response]: the version that sampled each token."""
        return np.repeat(
            np.array([v for v, _, _ in self.spans], dtype=np.int64),
            [end - start for _, start, end in self.spans],
        )


def encode_sample(s: Sample) -> list[bytes]:
    """The frames of a ``sample`` message."""
    payload = pack(
        {
            "v": SCHEMA,
            "prompt_ids": _array(s.prompt_ids, "<i4"),
            "response_ids": _array(s.response_ids, "<i4"),
            "behavior_logprobs": _array(s.behavior_logprobs, "<f4"),
            "spans": _array(np.asarray(s.spans, dtype=np.int64).reshape(-1), "<i8"),
            "loss_mask_runs": _array(np.asarray(s.loss_mask_runs, dtype=np.int32), "<i4"),
            "sampling": s.sampling,
            "finish_reason": s.finish_reason,
            "reward": s.reward,
            "reward_parts": s.reward_parts,
            "generator": s.generator,
            "timing": s.timing,
            "fault": s.fault,
        }
    )
    versions = [v for v, _, _ in s.spans]
    return encode(
        "sample", payload,
        group=s.group, attempt=s.attempt, index=s.index, crc=zlib.crc32(payload),
        num_tokens=len(s.response_ids), num_live_tokens=s.num_live_tokens, reward=s.reward,
        truncated=s.finish_reason == "length", oldest=min(versions, default=-1), newest=max(versions, default=-1),
        fault=s.fault,
    )  # fmt: skip


def decode_sample(header: dict[str, Any], payload: bytes, *, vocab_size: int | None = None) -> Sample:
    """The sample of a ``sample`` header (or a claim's sample fields) and its payload, checked whole.

    Raises:
        WireError: `checksum`, `missing_field`, `wrong_type`, `lengths_disagree`, `empty_response`,
            `token_out_of_vocabulary`, `bad_logprob`, `bad_span`, `bad_reward`, `extra_field`; see ``unpack``.
    """
    c = _contents(header, payload, vocab_size)
    return Sample(
        group=header["group"], attempt=header["attempt"], index=header["index"],
        prompt_ids=np.frombuffer(c.prompt_ids, dtype=_I4), response_ids=np.frombuffer(c.response_ids, dtype=_I4),
        behavior_logprobs=c.logprobs, spans=c.spans, loss_mask_runs=c.loss_mask_runs, sampling=c.fields["sampling"],
        finish_reason=c.fields["finish_reason"], reward=c.fields["reward"], reward_parts=c.fields["reward_parts"],
        generator=c.fields["generator"], timing=c.fields["timing"], fault=c.fields["fault"],
    )  # fmt: skip


def check_sample(header: dict[str, Any], payload: bytes, *, vocab_size: int | None = None) -> tuple[Spans, Any]:
    """``(version spans, temperature)`` of a sample that passes every check of ``decode_sample``; raises as that does.
    For the broker, which forwards the payload and needs nothing more of it."""
    c = _contents(header, payload, vocab_size)
    return c.spans, c.fields["sampling"].get("temperature")


class _Contents(NamedTuple):
    """A checked payload."""

    fields: dict[str, Any]
    prompt_ids: bytes
    response_ids: bytes
    logprobs: NDArray[np.float32]
    spans: Spans
    loss_mask_runs: tuple[int, ...]


def _contents(header: dict[str, Any], payload: bytes, vocab_size: int | None) -> _Contents:
    if zlib.crc32(payload) != header["crc"]:
        raise WireError("checksum", f"sample {header['group']}/{header['attempt']}/{header['index']}")
    m = _unpack_known(payload)
    if type(m) is not dict or m.get("v") != SCHEMA:
        raise WireError("schema_version", "payload")
    try:
        c = _Contents(
            m, _read_array(m["prompt_ids"], "<i4", 4), _read_array(m["response_ids"], "<i4", 4),
            np.frombuffer(_read_array(m["behavior_logprobs"], "<f4", 4), dtype=_F4),
            _read_spans(_read_array(m["spans"], "<i8", 8)), _read_runs(_read_array(m["loss_mask_runs"], "<i4", 4)),
        )  # fmt: skip
        for name in ("sampling", "reward_parts", "timing"):
            _check_numbers(m[name])
        reward, fault, reason = m["reward"], m["fault"], m["finish_reason"]
        if type(reason) is not str or type(m["generator"]) is not str:
            raise TypeError("not a string")
        if len(m) > _PAYLOAD_FIELDS:
            raise WireError("extra_field", "payload")
    except KeyError as e:
        raise WireError("missing_field", f"payload.{e.args[0]}") from None
    except (TypeError, ValueError) as e:
        raise WireError("wrong_type", f"payload: {e}") from None
    _check_tokens(c, header, vocab_size)
    _check_spans(c.spans, header)
    if fault is None and not (isinstance(reward, (int, float)) and math.isfinite(reward)):
        raise WireError("bad_reward", repr(reward) if isinstance(reward, float) else type(reward).__name__)
    if header["reward"] != reward or header["fault"] != fault:
        raise WireError("bad_reward", "header disagrees")
    if reason not in ("stop", "length") or header["truncated"] != (reason == "length"):
        raise WireError("wrong_type", f"finish_reason {reason!r}"[:80])
    return c


def _check_tokens(c: _Contents, header: dict[str, Any], vocab_size: int | None) -> None:
    n, sampled, runs = len(c.response_ids) // 4, c.logprobs, c.loss_mask_runs
    if n == 0 or not c.prompt_ids:
        raise WireError("empty_response" if n == 0 else "empty_prompt")
    if len(sampled) != n or header["num_tokens"] != n:
        raise WireError("lengths_disagree", f"{n} tokens, {len(sampled)} log-probs, header {header['num_tokens']}")
    if runs:
        if min(runs) < 0 or sum(runs) != n:
            raise WireError("lengths_disagree", "loss mask")
        sampled = sampled[_mask(runs)]
    if header["num_live_tokens"] != len(sampled):
        raise WireError("lengths_disagree", "num_live_tokens")
    # `argmax` and `argmin` are quicker than `max` and `min` on so few; both find a NaN, which compares with nothing.
    ids = np.frombuffer(c.prompt_ids + c.response_ids, dtype=_U4)  # a negative id is a large one
    if (largest := ids[ids.argmax()]) >= (_INT32_END if vocab_size is None else vocab_size):
        raise WireError("token_out_of_vocabulary", f"{int(largest.astype(_I4))}, vocabulary {vocab_size}")
    if len(sampled) and not (sampled[sampled.argmax()] <= 1e-3 and sampled[sampled.argmin()] > -math.inf):
        raise WireError("bad_logprob", "not finite, or above 0, on a sampled token")


def _check_spans(spans: Spans, header: dict[str, Any]) -> None:
    """They lie end to end over all tokens, and the header names the oldest and the newest version."""
    n, edge, oldest, newest = header["num_tokens"], 0, _INT_END, -1
    for version, start, end in spans:
        if version < 0 or start != edge or end <= start:
            raise WireError("bad_span", f"{spans} over {n} tokens")
        edge, oldest, newest = end, min(oldest, version), max(newest, version)
    if edge != n:
        raise WireError("bad_span", f"{spans} over {n} tokens")
    if header["oldest"] != oldest or header["newest"] != newest:
        raise WireError("bad_span", "header disagrees")


_PAYLOAD_FIELDS = 13  # of `encode_sample`
_I4, _U4, _F4 = np.dtype("<i4"), np.dtype("<u4"), np.dtype("<f4")
_SPAN, _RUN = struct.Struct("<qqq"), struct.Struct("<i")


def _array(a: NDArray[Any], dtype: str) -> dict[str, Any]:
    a = np.ascontiguousarray(a, dtype=dtype)
    return {"dtype": dtype, "len": a.size, "data": a.tobytes()}


def _read_array(m: Any, dtype: str, item_bytes: int) -> bytes:
    """The bytes of an array."""
    if type(m) is not dict or len(m) != 3 or m.get("dtype") != dtype or type(data := m.get("data")) is not bytes:
        raise TypeError(f"no array of {dtype}")
    if len(data) % item_bytes:
        raise TypeError(f"{len(data)} bytes are no array of {dtype}")
    if len(data) != item_bytes * m.get("len", -1):
        raise WireError("lengths_disagree", "array")
    return data


def _read_spans(data: bytes) -> Spans:
    if len(data) % _SPAN.size:
        raise WireError("lengths_disagree", "spans")
    return tuple(_SPAN.iter_unpack(data))  # type: ignore[arg-type]


def _read_runs(data: bytes) -> tuple[int, ...]:
    return tuple(run for (run,) in _RUN.iter_unpack(data)) if data else ()


def _mask(runs: Sequence[int]) -> NDArray[np.bool_]:
    """[response]: alternating runs, the first one true."""
    return np.repeat(np.arange(len(runs)) % 2 == 0, runs)


def _check_numbers(m: Any) -> None:
    if type(m) is not dict:
        raise TypeError("not a map of numbers")
    for value in m.values():
        if type(value) not in Number:
            raise TypeError("not a map of numbers")
