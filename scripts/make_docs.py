"""Makes docs/config.md, docs/metrics.md, docs/protocol.md and docs/rollouts.md from the code.

python scripts/make_docs.py            write them
python scripts/make_docs.py --check    exit 1 if one is not up to date
"""

from __future__ import annotations

import json
import re
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from common import rollouts, wire  # noqa: E402
from common.loading import VERL_NAMES, config_paths  # noqa: E402
from common.metric_table import METRICS  # noqa: E402

NOTE = "<!-- Made by scripts/make_docs.py; change the code, not this file. -->"


def pages() -> dict[str, str]:
    """File name → content."""
    return {"config.md": config_page(), "metrics.md": metrics_page(), "protocol.md": protocol_page(),
            "rollouts.md": rollouts_page()}  # fmt: skip


# ---------------------------------------------------------------- config
def config_page() -> str:
    lines = [
        "# Configuration", "", NOTE, "",
        "YAML files are layered left to right, then `a.b=c` from the command line. verl's prefix "
        "`actor_rollout_ref.` is accepted and stripped. `launch.py run --help` prints the same list, "
        "`launch.py config FILES --print-config` the whole config that results.",
    ]  # fmt: skip
    section = ""
    for key, (kind, default, sentence) in config_paths().items():
        top = key.partition(".")[0]
        if top != section:
            section = top
            lines += ["", f"## {top}", "", "| key | type | default | meaning |", "|---|---|---|---|"]
        shown = default.model_dump() if hasattr(default, "model_dump") else default
        lines.append(f"| `{key}` | {_cell(type_name(kind))} | `{_cell(json.dumps(shown))}` | {_cell(sentence)} |")
    lines += ["", "## Other names of verl's that are understood", "", "| verl | here |", "|---|---|"]
    lines += [f"| `{theirs}` | `{ours}` |" for theirs, ours in VERL_NAMES.items()]
    return "\n".join(lines) + "\n"


def type_name(kind: Any) -> str:
    """A type for people: `int`, `"a" or "b"`, `number or null`."""
    origin = typing.get_origin(kind)
    if origin is typing.Annotated:
        return type_name(typing.get_args(kind)[0])
    if origin is typing.Literal:
        return " or ".join(f"`{value}`" for value in typing.get_args(kind))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(type_name(part) for part in typing.get_args(kind)))
    if origin in (list, tuple):
        inner = dict.fromkeys(type_name(part) for part in typing.get_args(kind) if part is not ...)
        return f"list of {' or '.join(inner)}"
    if origin is dict:
        return f"mapping of {' to '.join(type_name(part) for part in typing.get_args(kind))}"
    names = {type(None): "null", str: "text", bool: "true/false", float: "number", int: "integer"}
    return names.get(kind, getattr(kind, "__name__", str(kind)))


# ---------------------------------------------------------------- metrics
def metrics_page() -> str:
    lines = [
        "# Metrics", "", NOTE, "",
        "One line per step in `metrics.jsonl` (`step`, `time`, then the metrics), the same to the console and to "
        "wandb. `{a,b}` is one of several words, `<x>` any one. A metric is there only where it makes sense: "
        "`critic/values/*` only with a critic, `val-core/*` only at a validation. What is not finite is `null`.",
        "", "| metric | unit | meaning |", "|---|---|---|",
    ]  # fmt: skip
    lines += [f"| `{_cell(name)}` | {unit} | {_cell(meaning)} |" for name, (unit, meaning) in METRICS.items()]
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------- rollouts
EXAMPLE = """
rows = [
    {"group": 0, "prompt_ids": [5, 6], "response_ids": [9, 1], "behavior_logprobs": [-0.5, -0.1], "reward": 1.0},
    {"group": 0, "prompt_ids": [5, 6], "response_ids": [8, 1], "behavior_logprobs": [-1.5, -0.9], "reward": 0.0},
]
pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), "FILE.parquet")
""".strip().splitlines()


def rollouts_page() -> str:
    lines = [
        "# Rollouts in a file", "", NOTE, "",
        "`launch.py export RUN_DIR OUT.parquet [--where SQL] [--no-text]` writes one row for each sample whose "
        "tokens the ledger still has (`ledger.keep_bytes`), and says how many were left out and why. "
        "`launch.py replay FILE.parquet CONFIG … replay.mode=offline` trains on such a file (docs/replay.md).",
        "", "A file that was made elsewhere is imported by just this: no other verb is needed. The bold columns must "
        "be there, any other may be absent or null. Integers and floats of another width are converted if nothing is "
        "lost.",
        "", "```python", *EXAMPLE, "```",
        "", "A list has one value per token. Log-probabilities are of the distribution that was really sampled "
        "(after temperature and any truncation): the correction of the algorithm is made of them.",
        "", "| column | type | meaning |", "|---|---|---|",
    ]  # fmt: skip
    for name, (kind, meaning) in rollouts.COLUMNS.items():
        shown = f"**`{name}`**" if name in rollouts.REQUIRED else f"`{name}`"
        lines.append(f"| {shown} | {kind} | {_cell(meaning)} |")
    lines += [
        "", "The file's metadata has `leeway.rollouts` (schema version), `leeway.config` (YAML of the run's config).",
        "", "A row is refused, by its number, if a list has another length than `response_ids`, a token is outside "
        "the model's vocabulary, a response or prompt is empty, or the log-probability of a sampled token is not "
        "finite or above 0. A sample with a fault or without a reward is left out of its group, and a held-out group "
        "is left out, both counted.",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------- protocol
def protocol_page() -> str:
    lines = [
        "# The wire", "", NOTE, "",
        "Every message is ZeroMQ frames `[header, payload, …]` between a DEALER (generator, engine, learner) and a "
        "ROUTER (broker, learner). The header is a msgpack map with `v` (schema version), `op` and exactly the fields "
        "below; another version, an unknown `op`, a missing, extra or ill-typed field refuses the message. Payload "
        "frames are msgpack too; no pickle, no extension types.",
        "", "Limits, held before anything is decoded or kept:", "", "| limit | value |", "|---|---|",
        f"| schema version | {wire.SCHEMA} |",
        f"| header | {wire.MAX_HEADER_BYTES:,} bytes |",
        f"| payload frame | {wire.MAX_PAYLOAD_BYTES:,} bytes |",
        f"| frames of a message | {wire.MAX_FRAMES:,} |",
        f"| containers in a frame | {wire.MAX_CONTAINERS:,} |",
        f"| depth | {wire.MAX_DEPTH} |",
    ]  # fmt: skip
    for title, table in (
        ("Broker and generators", "GENERATOR_OPS"),
        ("Broker and learner", "LEARNER_OPS"),
        ("Learner and engines: control of weights", "CONTROL_OPS"),
        ("Learner and workers of an engine: a snapshot", "SNAPSHOT_OPS"),
    ):
        lines += ["", f"## {title}", *_ops(table)]
    lines += [
        "", "## A sample", "",
        "The payload of `sample` is one map of `v` (schema version) and exactly these fields without the first three, "
        "which the header has. An array is `{dtype, len, data}` with raw little-endian bytes. The "
        "comments show a response of six tokens.", "", "```python", *_sample_fields(), "```",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _ops(table: str) -> Iterator[str]:
    """The messages of a table, with the directions and remarks that its source has as comments."""
    schemas, remarks = getattr(wire, table), []
    for line in _source().split(f"{table}: ", 1)[1].split("\n}", 1)[0].splitlines()[1:]:
        text = line.strip()
        if direction := re.fullmatch(r"# (\w+) -> (\w+)(?:; (.*))?", text):
            sender, receiver, remark = direction.groups()
            yield from ("", f"{sender} → {receiver}{f' ({remark})' if remark else ''}:", "")
            yield from ("| op | fields | remarks |", "|---|---|---|")
        elif text.startswith("#"):
            remarks.append(text.lstrip("# "))
        elif text.startswith('"') and text.split('"')[1] in schemas:
            op = text.split('"')[1]
            yield f"| `{op}` | {_fields(schemas[op])} | {_cell(' '.join(remarks))} |"
            remarks = []


def _source() -> str:
    return (ROOT / "common" / "wire.py").read_text(encoding="utf-8")


def _fields(schema: dict[str, Any]) -> str:
    return ", ".join(f"`{name}`: {_wire_type(kind)}" for name, kind in schema.items()) or "–"


def _wire_type(kind: Any) -> str:
    if isinstance(kind, tuple):
        names = dict.fromkeys("number" if k in (int, float) else _wire_type(k) for k in kind)
        return " or ".join(names)
    names = {str: "text", int: "integer", float: "number", bool: "true/false", list: "list", dict: "map"}
    return "null" if kind is type(None) else names.get(kind, str(kind))


def _sample_fields() -> Iterator[str]:
    """The fields of ``Sample`` as its source states them."""
    body = _source().split("class Sample:", 1)[1].split("@property", 1)[0]
    for line in body.splitlines():
        if ":" in line and not line.strip().startswith('"""'):
            yield line.strip()


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def main(argv: list[str]) -> int:
    stale = []
    for name, content in pages().items():
        path = ROOT / "docs" / name
        if path.exists() and path.read_text(encoding="utf-8") == content:
            continue
        stale.append(name)
        if "--check" not in argv:
            path.parent.mkdir(exist_ok=True)
            path.write_text(content, encoding="utf-8")
    if stale and "--check" in argv:
        print(f"not up to date: {', '.join(stale)}; run python scripts/make_docs.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
