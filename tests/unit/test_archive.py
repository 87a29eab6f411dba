"""Asking a record: the view, its conditions, the examples of docs/ledger.md."""

from __future__ import annotations

import json
import re
import sqlite3
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from broker.schema import SCHEMA_VERSION
from common.archive import READABLE, Archive
from common.errors import ConfigError, LedgerError
from generators import records
from learner.toy import toy_tokenizer, write_toy_folder
from tests.recorded import Recorder, fresh_sample, toy_sample

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = re.findall(r"```sql\n(.*?)```", (ROOT / "docs" / "ledger.md").read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two applied steps, a skipped one, a rollback, two groups that are ready, one half done, a validation."""
    folder = tmp_path_factory.mktemp("run")
    recorder = Recorder(folder)
    for applied in (True, True, False):
        recorder.step(applied=applied)
    recorder.ledger.checkpoint_valid(recorder.epoch, 2, "")
    recorder.ledger.roll_back(2, who="somebody", at=9.0)  # so that step 3 is given up, which was skipped
    recorder.epoch = recorder.ledger.attach("learner", "2")
    recorder.ledger.validate(recorder.epoch, 2, 3, 2)
    for _ in range(2):
        recorder.deliver(recorder.lease(), fresh_sample)  # held-out
    for num in (4, 4, 1):
        recorder.deliver(recorder.lease(), fresh_sample, num=num)
    recorder.close()
    write_toy_folder(folder / "model")
    return folder


def launch(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "launch.py", *args], capture_output=True, text=True, timeout=60, cwd=ROOT)


def test_the_schema_that_the_broker_writes_can_be_read() -> None:
    assert SCHEMA_VERSION in READABLE


def test_the_view_has_each_sample_once_with_its_fate(run_dir: Path) -> None:
    archive = Archive(run_dir)
    assert archive.count() == (3 * 4 + 2) * 4 + 2 + 1
    fates = Counter(archive.rows(["state", "reason", "step", "trained_at", "kept"], "lane = 'train'"))
    assert fates == {
        ("trained", None, 1, 0, 1): 16, ("trained", None, 2, 1, 1): 16, ("dropped", "nonfinite", 3, None, 0): 16,
        ("ready", None, None, None, 1): 8, ("leased", None, None, None, 1): 1,
    }  # fmt: skip
    ages = list(archive.rows(["oldest", "newest", "staleness", "spans"], "step = 2", limit=1))
    assert ages[0][:3] == (0, 1, 1) and json.loads(ages[0][3])[0] == [0, 0, 1]
    archive.close()


def test_the_file_has_the_same_view_for_plain_sql(run_dir: Path) -> None:
    with sqlite3.connect(f"file:{run_dir / 'ledger.sqlite'}?mode=ro", uri=True) as db:
        assert db.execute("SELECT COUNT(*) FROM rollouts WHERE state = 'trained'").fetchone() == (32,)


@pytest.mark.parametrize("sql", EXAMPLES)
def test_an_example_of_the_docs(run_dir: Path, sql: str) -> None:
    with sqlite3.connect(f"file:{run_dir / 'ledger.sqlite'}?mode=ro", uri=True) as db:
        cursor = db.execute(sql)
        rows = [dict(zip([c[0] for c in cursor.description], row, strict=True)) for row in cursor]
    expected = {
        "trained_share": lambda r: r["trained_share"] == 32 / 57,
        "beyond": lambda r: r["beyond"] <= 0,
        "agree": lambda r: r["agree"] == 1,
        "lr": lambda r: r["lr"] == 1e-3 and r["seconds"] == 0.5,
        "fates": lambda r: r["attempts"] > 1,
    }
    assert rows or "HAVING" in sql
    for name, holds in expected.items():
        assert all(holds(r) for r in rows if name in r)


def test_the_docs_name_each_column(run_dir: Path) -> None:
    page = (ROOT / "docs" / "ledger.md").read_text(encoding="utf-8")
    table = page.split("## The view", 1)[1].split("## Tables")[0]
    archive = Archive(run_dir)
    assert [c for c in archive.columns() if f"`{c}`" not in table] == []
    archive.close()


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("reward >", "syntax error|incomplete input"),
        ("group = 3", "write grp and idx"),
        ("score > 0", "no such column: score"),
        ("1); DELETE FROM samples; --", "one statement|syntax"),
    ],
)
def test_a_condition_that_is_not_sql_is_refused_by_name(run_dir: Path, where: str, said: str) -> None:
    archive = Archive(run_dir)
    with pytest.raises(ConfigError, match=said):
        archive.count(where)
    archive.close()


def test_nothing_can_be_written(run_dir: Path) -> None:
    archive = Archive(run_dir)
    with pytest.raises(sqlite3.OperationalError, match="attempt to write"):
        archive._db.execute("DELETE FROM samples")
    archive.close()


def test_what_is_no_ledger_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no ledger here"):
        Archive(tmp_path)
    (tmp_path / "ledger.sqlite").write_bytes(b"something else entirely" * 100)
    with pytest.raises(LedgerError, match="not a ledger"):
        Archive(tmp_path)


def test_the_command_shows_a_table(run_dir: Path) -> None:
    done = launch("samples", str(run_dir), "--where", "reward > 0.9 AND trained_at = 1", "--limit", "3")
    lines = done.stdout.splitlines()
    assert lines[0].split()[:4] == ["grp", "attempt", "idx", "lane"] and len(lines) == 4
    assert re.search(r"3 of \d+ samples with reward > 0.9 AND trained_at = 1", done.stderr)


def test_samples_as_json_with_their_text(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def ask(*args: str) -> list[dict[str, Any]]:
        assert records.main(["samples", str(run_dir), "--json", "--text", *args]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    rows = ask("--where=trained_at = 1", "--columns=grp,idx,reward", "--order=reward DESC, grp", "--limit=0")
    assert len(rows) == 16 and [r["reward"] for r in rows] == sorted((r["reward"] for r in rows), reverse=True)
    tokenizer = toy_tokenizer()
    for row in rows:
        sample = toy_sample(row["grp"], 0, row["idx"], version=1)
        assert row["prompt"] == tokenizer.decode(sample.prompt_ids.tolist())
        assert row["response"] == tokenizer.decode(sample.response_ids.tolist())
    [gone] = ask("--where=state = 'dropped'", "--limit=1")
    assert gone["missing"] == "its payload was freed"


@pytest.mark.parametrize(
    ("args", "said"),
    [(["--where", "reward >"], "Columns: grp"), (["--columns", "nothing"], "no column nothing"),
     (["--limit", "many"], "invalid int")],
)  # fmt: skip
def test_a_bad_question_ends_with_exit_code_2(run_dir: Path, args: list[str], said: str) -> None:
    done = launch("samples", str(run_dir), *args)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
