"""``python -m generators.records samples|export``: what is in a run's record, with the text of its tokens.

Reads the ledger and, where text is wanted, the tokenizer. The run may be going on, or be over.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from common.archive import Archive, Key, RecordedStep, header_columns, header_of
from common.errors import ConfigError, LeewayError, WireError
from common.rollouts import arrow_schema, row_of, table_of
from common.wire import decode_sample

SHOWN = ("grp", "attempt", "idx", "lane", "state", "reason", "step", "reward", "num_tokens", "oldest", "newest",
         "generator")  # fmt: skip
TEXT_WIDTH = 2000
ROWS_PER_BATCH = 4096
STEPS_KEPT = 64


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    try:
        return int(args.do(args))
    except BrokenPipeError:  # `| head`
        sys.stderr.close()
        return 0
    except LeewayError as e:
        print(f"launch.py: error: {e}", file=sys.stderr)
        return e.exit_code


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="launch.py", allow_abbrev=False)
    verbs = made.add_subparsers(required=True)
    samples = verbs.add_parser("samples", allow_abbrev=False)
    samples.set_defaults(do=show_samples)
    samples.add_argument("folder")
    samples.add_argument("--where", default="")
    samples.add_argument("--columns", default="")
    samples.add_argument("--order", default="")
    samples.add_argument("--limit", type=int, default=20)
    samples.add_argument("--text", action="store_true")
    samples.add_argument("--json", action="store_true")
    samples.add_argument("--tokenizer")
    export = verbs.add_parser("export", allow_abbrev=False)
    export.set_defaults(do=export_samples)
    export.add_argument("folder")
    export.add_argument("out", type=Path)
    export.add_argument("--where", default="")
    export.add_argument("--no-text", action="store_true")
    export.add_argument("--tokenizer")
    return made


# ---------------------------------------------------------------- samples
def show_samples(args: argparse.Namespace) -> int:
    """A table, or one JSON object a line; the number of all that match goes to stderr."""
    archive = Archive(args.folder)
    columns = chosen_columns(archive, args.columns)
    tokenizer = load_tokenizer(args.folder, args.tokenizer) if args.text else None
    number = archive.count(args.where)
    limit = args.limit if args.limit > 0 else None
    order = args.order or "grp, attempt, idx"
    found = archive.rows([*columns, *header_columns(), "payload_id"], args.where, order=order, limit=limit)
    rows = ((r[: len(columns)], texts(archive, tokenizer, r[len(columns) :]) if tokenizer else {}) for r in found)
    shown = print_json(columns, rows) if args.json else print_table(columns, rows)
    print(f"{shown:,} of {number:,} samples" + (f" with {args.where}" if args.where else ""), file=sys.stderr)
    return 0


def chosen_columns(archive: Archive, text: str) -> list[str]:
    """Raises ConfigError for a name that the view does not have."""
    there = archive.columns()
    columns = [c.strip() for c in text.split(",") if c.strip()] or list(SHOWN)
    if unknown := [c for c in columns if c not in there]:
        raise ConfigError(f"--columns: no column {', '.join(unknown)}; there are {', '.join(there)}")
    return columns


def texts(archive: Archive, tokenizer: Any, row: tuple[Any, ...]) -> dict[str, Any]:
    """Prompt and response of one sample, or why they cannot be shown."""
    payload = archive.payload(row[-1])
    if payload is None:
        return {"prompt": None, "response": None, "missing": "its payload was freed"}
    try:
        sample = decode_sample(header_of(row[:-1]), payload)
    except WireError as e:
        return {"prompt": None, "response": None, "missing": f"damaged: {e}"}
    prompt, response = decode_all(tokenizer, [sample.prompt_ids, sample.response_ids])
    return {"prompt": prompt, "response": response}


def decode_all(tokenizer: Any, ids: list[Any]) -> list[str]:
    """Texts of token ids, special tokens included."""
    return [str(tokenizer.decode(i.tolist(), skip_special_tokens=False)) for i in ids]


def print_json(columns: list[str], rows: Iterator[tuple[tuple[Any, ...], dict[str, Any]]]) -> int:
    shown = 0
    for values, text in rows:
        print(json.dumps({**dict(zip(columns, values, strict=True)), **text}, ensure_ascii=False))
        shown += 1
    return shown


def print_table(columns: list[str], rows: Iterator[tuple[tuple[Any, ...], dict[str, Any]]]) -> int:
    """Columns as wide as the first thousand rows need; text below its row."""
    ahead = list(islice(rows, 1000))
    cells = [[_cell(v) for v in values] for values, _ in ahead]
    widths = [max([len(c), *(len(row[i]) for row in cells)]) for i, c in enumerate(columns)]
    shown = 0
    print("  ".join(c.ljust(w) for c, w in zip(columns, widths, strict=True)).rstrip())
    for source in (ahead, rows):
        for values, text in source:
            line = "  ".join(_cell(v).ljust(w) for v, w in zip(values, widths, strict=True))
            print(line.rstrip())
            for name, value in text.items():
                if value is not None:
                    print(f"    {name}: {value[:TEXT_WIDTH]!r}")
            shown += 1
    return shown


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


# ---------------------------------------------------------------- export
def export_samples(args: argparse.Namespace) -> int:
    """A parquet file as docs/rollouts.md describes it; says what could not be written, and why."""
    import pyarrow.parquet as pq

    archive = Archive(args.folder)
    if args.out.exists():
        raise ConfigError(f"{args.out}: is there already; choose another name")
    archive.count(args.where)  # a bad condition is refused before anything is written
    tokenizer = None if args.no_text else load_tokenizer(args.folder, args.tokenizer)
    schema = arrow_schema(config_text(Path(args.folder)))
    left_out: Counter[str] = Counter()
    rows = exported_rows(archive, args.where, tokenizer, left_out)
    fresh, number = args.out.with_name(args.out.name + ".tmp"), 0
    try:
        with pq.ParquetWriter(fresh, schema, compression="zstd") as writer:
            while batch := list(islice(rows, ROWS_PER_BATCH)):
                writer.write_table(table_of(batch, schema))
                number += len(batch)
        fresh.replace(args.out)
    except OSError as e:
        raise ConfigError(f"{args.out}: cannot be written ({e.strerror or e})") from e
    finally:
        fresh.unlink(missing_ok=True)
    print(f"{number:,} samples in {args.out}")
    for reason, count in sorted(left_out.items()):
        print(f"left out: {count:,} {reason}")
    return 0


def exported_rows(archive: Archive, where: str, tokenizer: Any, left_out: Counter[str]) -> Iterator[dict[str, Any]]:
    """A row for each sample whose payload is there; the others are counted by reason."""
    steps = StepsOf(archive)
    names = ("lane", "prompt", "state", "reason", "step", "abandoned")
    for row in archive.rows([*names, *header_columns(), "payload_id"], where):
        fate, header = dict(zip(names, row, strict=False)), header_of(row[len(names) : -1])
        payload = archive.payload(row[-1])
        if payload is None:
            left_out[_why_gone(fate)] += 1
            continue
        try:
            sample = decode_sample(header, payload)
        except WireError as e:
            left_out[f"damaged ({e.reason})"] += 1
            continue
        text = decode_all(tokenizer, [sample.prompt_ids, sample.response_ids]) if tokenizer else (None, None)
        yield {
            **row_of(sample), **fate, **steps.columns((header["group"], header["attempt"]), fate),
            "prompt_text": text[0], "response_text": text[1],
        }  # fmt: skip


def _why_gone(fate: dict[str, Any]) -> str:
    if fate["state"] == "dropped":
        return f"of dropped groups ({fate['reason']}): their tokens are not kept"
    if fate["state"] == "scored":
        return "held-out: their tokens are not kept once they are scored"
    return f"of {fate['state']} groups: their tokens were freed (ledger.keep_bytes)"


class StepsOf:
    """What the steps say of their groups; some steps are kept (groups of a step are near each other)."""

    def __init__(self, archive: Archive) -> None:
        self._archive = archive
        self._known: dict[int, tuple[RecordedStep, dict[Key, int]]] = {}

    def columns(self, key: Key, fate: dict[str, Any]) -> dict[str, Any]:
        number = fate["step"]
        if fate["state"] != "trained" or number is None:
            return {}
        if number not in self._known:
            if len(self._known) > STEPS_KEPT:
                self._known.pop(next(iter(self._known)))
            step = self._archive.step(number)
            if step is None:
                return {}
            self._known[number] = step, {k: i for i, k in enumerate(step.keys)}
        step, places = self._known[number]
        return {
            "place": places.get(key), "trained_at": step.version, "staleness_limit": step.limit,
            "settings": json.dumps(step.settings), "digest": step.digest,
        }  # fmt: skip


def config_text(folder: Path) -> str | None:
    """The config of the run, if its folder has it."""
    try:
        return (folder / "config.yaml").read_text(encoding="utf-8")
    except OSError:
        return None


# ---------------------------------------------------------------- the tokenizer
def load_tokenizer(folder: str, given: str | None) -> Any:
    """The tokenizer of a run: as given, else of its own model folder, else of `model.path` in its config.

    Raises:
        ConfigError: none of them is there, or it cannot be loaded.
    """
    place = Path(given) if given else tokenizer_folder(Path(folder))
    try:
        if _is_whole(place):
            from tokenizers import Tokenizer  # transformers takes seconds to import

            return Tokenizer.from_file(str(place / "tokenizer.json"))
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(place)
    except Exception as e:  # `tokenizers` raises bare Exceptions
        raise ConfigError(f"{place}: its tokenizer cannot be loaded ({str(e).splitlines()[0]})") from e


def _is_whole(place: Path) -> bool:
    """Whether `tokenizer.json` alone decodes as transformers would with what lies beside it."""
    try:
        own = json.loads((place / "tokenizer.json").read_text(encoding="utf-8"))
        beside = json.loads((place / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    known = {t["content"] for t in own.get("added_tokens", ())}
    added = {t["content"] for t in beside.get("added_tokens_decoder", {}).values()}
    return not beside.get("clean_up_tokenization_spaces") and added <= known


def tokenizer_folder(folder: Path) -> Path:
    folder = folder.parent if folder.is_file() else folder
    for name in ("model", "hf"):
        if (folder / name / "tokenizer_config.json").is_file():
            return folder / name
    try:
        tree = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        return Path(str(tree["model"]["path"] or "")).expanduser()
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        raise ConfigError(f"{folder}: does not say which tokenizer it used; give --tokenizer FOLDER") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
