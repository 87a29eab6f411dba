"""Rollouts in parquet: what is exported is what was recorded; what was made elsewhere is checked."""

from __future__ import annotations

import json
import re
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet as pq
import pytest

from common.archive import Archive
from common.errors import ConfigError
from common.rollouts import COLUMNS, Rollouts, config_in
from generators.records import _is_whole, load_tokenizer, main
from learner.toy import toy_tokenizer, write_toy_folder
from tests.recorded import SETTINGS, Recorder, made_elsewhere, toy_sample


def test_the_example_of_the_docs_makes_a_file_that_can_be_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "rollouts.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(code, {"pyarrow": pyarrow})
    [group] = Rollouts(tmp_path / "FILE.parquet", vocab_size=64).complete_groups()
    assert (group.key, group.num_samples, group.num_tokens) == ((0, 0), 2, 2)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps, the second skipped; a sample with a tool's tokens; one group that is ready."""
    folder = tmp_path_factory.mktemp("run")
    recorder = Recorder(folder)
    recorder.step()
    recorder.step(applied=False)
    recorder.step(**{"actor.optim.lr": 5e-4})
    recorder.deliver(recorder.lease(), lambda *key, version: _with_tool(toy_sample(*key, version=version)))
    recorder.close()
    write_toy_folder(folder / "model")
    (folder / "config.yaml").write_text("model: {toy: true}\n")
    return folder


def _with_tool(s: Any) -> Any:
    n = len(s.response_ids)
    return type(s)(**{**vars(s), "loss_mask_runs": (n - 1, 1)})


@pytest.fixture(scope="module")
def exported(run_dir: Path) -> Path:
    assert main(["export", str(run_dir), str(run_dir / "all.parquet")]) == 0
    return run_dir / "all.parquet"


def test_each_sample_comes_back_as_it_was_stored(run_dir: Path, exported: Path) -> None:
    archive, rollouts = Archive(run_dir), Rollouts(exported, vocab_size=64)
    assert rollouts.complete_groups() == archive.complete_groups() != []
    for (group, attempt), _, _ in rollouts.complete_groups():
        make = _with_tool if group == 12 else lambda s: s
        version = {0: 0, 2: 1, 3: 2}[group // 4]
        for index, sample in enumerate(rollouts.samples((group, attempt))):
            expected = make(toy_sample(group, attempt, index, version=version))
            for name, value in vars(expected).items():
                assert np.array_equal(getattr(sample, name), value), name
    archive.close()


def test_the_steps_come_with_them(run_dir: Path, exported: Path) -> None:
    archive, rollouts = Archive(run_dir), Rollouts(exported)
    for number in (1, 3):
        assert rollouts.step(number) == archive.step(number) is not None
    assert rollouts.step(3).settings == {**SETTINGS, "actor.optim.lr": 5e-4}
    assert not rollouts.step(2).applied and not archive.step(2).applied
    assert rollouts.step(4) is None and archive.step(4) is None
    assert config_in(exported) == "model: {toy: true}\n"
    archive.close()


def test_the_file_has_the_documented_columns_and_text(exported: Path) -> None:
    table = pq.read_table(exported)
    assert table.column_names == list(COLUMNS)
    tokenizer = toy_tokenizer()
    for row in table.to_pylist():
        assert row["prompt_text"] == tokenizer.decode(row["prompt_ids"])
        assert row["response_text"] == tokenizer.decode(row["response_ids"])
        assert len(row["response_ids"]) == len(row["behavior_logprobs"]) == len(row["behavior_versions"])
    assert {(r["state"], r["step"]) for r in table.to_pylist()} == {("trained", 1), ("trained", 3), ("ready", None)}


def test_what_is_left_out_is_counted_by_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder(tmp_path / "run", keep_bytes=0)
    recorder.step()
    recorder.ledger.checkpoint_valid(recorder.epoch, 1, "step_1")  # the payloads of step 1 go
    recorder.step(applied=False)
    claim = recorder.step()
    recorder.close()
    with recorder_file(tmp_path) as db:
        db.execute("UPDATE payloads SET data = zeroblob(9) WHERE id = ?", (claim.keys[0][0] << 28,))
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out.parquet"), "--no-text"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"15 samples in {tmp_path / 'out.parquet'}",
        "left out: 1 damaged (checksum)",
        "left out: 16 of dropped groups (nonfinite): their tokens are not kept",
        "left out: 16 of trained groups: their tokens were freed (ledger.keep_bytes)",
    ]
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out.parquet")]) == 2
    assert "is there already" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "b.parquet"), "--where", "reward >"]) == 2
    assert not (tmp_path / "b.parquet").exists()


def recorder_file(folder: Path) -> Any:
    return sqlite3.connect(folder / "run" / "ledger.sqlite")


def test_a_file_made_elsewhere_needs_five_columns(tmp_path: Path) -> None:
    rollouts = Rollouts(made_elsewhere(tmp_path / "a.parquet"), vocab_size=64)
    assert rollouts.complete_groups() == [((0, 0), 2, 3), ((1, 0), 2, 3)] and rollouts.step(1) is None
    first, second = rollouts.samples((1, 0))
    assert (first.index, first.reward, second.index, second.reward) == (0, 0.0, 1, 1.0)
    assert first.spans == ((0, 0, 3),) and first.loss_mask.tolist() == [True] * 3
    assert first.sampling == {"temperature": 1.0} and first.finish_reason == "stop"
    assert first.response_ids.dtype == np.int32 and first.behavior_logprobs.dtype == np.float32


def test_groups_that_cannot_be_trained_are_counted(tmp_path: Path) -> None:
    path = made_elsewhere(
        tmp_path / "a.parquet", 8, reward=[1.0, None, *[0.0] * 6], lane=["train"] * 2 + ["eval"] * 2 + ["train"] * 4,
        fault=[None] * 4 + ["reward_timeout"] + [None] * 3,
    )  # fmt: skip
    rollouts = Rollouts(path)
    assert rollouts.complete_groups() == [((0, 0), 1, 3), ((2, 0), 1, 3), ((3, 0), 2, 3)]
    assert rollouts.left_out == {"eval": 1} and rollouts.num_faulty == 2
    assert [s.index for s in rollouts.samples((2, 0))] == [0] and rollouts.samples((2, 0))[0].reward == 0.0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"reward": None}, "no column reward"),
        ({"response_ids": [[7, 8, 1]] * 3 + [[]]}, "row 3: response_ids is empty"),
        ({"prompt_ids": [[], [5], [5], []]}, "row 0: prompt_ids is empty (2 rows)"),
        ({"behavior_logprobs": [[-0.5] * 3, [-0.5] * 2, [-0.5] * 3, [-0.5] * 3]}, "row 1: behavior_logprobs has an"),
        ({"loss_mask": [[True] * 3, [True] * 2, [True] * 3, [True] * 3]}, "row 1: loss_mask has an"),
        ({"response_ids": [[7, 8, 1]] * 2 + [[7, 64, 1]] * 2}, "row 2: response_ids has a token outside"),
        ({"prompt_ids": [[5, -1]] + [[5]] * 3}, "row 0: prompt_ids has a token outside"),
        ({"behavior_logprobs": [[-0.5, float("nan"), -1.0]] + [[-0.5] * 3] * 3}, "row 0: behavior_logprobs is not"),
        ({"behavior_logprobs": [[-0.5] * 3] * 3 + [[-0.5, 0.5, -1.0]]}, "row 3: behavior_logprobs is not finite, or"),
        ({"response_ids": [[7, None, 1]] * 4}, "response_ids: has a null"),
        ({"behavior_versions": [[0, 0, -1]] * 4}, "row 0: behavior_versions has a negative"),
        ({"temperature": [1.0, 1.0, -1.0, 1.0]}, "row 2: temperature is below 0"),
        ({"response_ids": ["abc"] * 4}, "cannot be read as rollouts"),
    ],
)
def test_a_file_that_is_unfit_is_refused_by_row(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        Rollouts(made_elsewhere(tmp_path / "a.parquet", **changes), vocab_size=64)


def test_log_probs_of_tokens_that_were_not_sampled_do_not_matter(tmp_path: Path) -> None:
    nan = float("nan")
    path = made_elsewhere(
        tmp_path / "a.parquet", behavior_logprobs=[[-0.5, nan, -1.0]] * 4, loss_mask=[[True, False, True]] * 4
    )
    assert Rollouts(path).samples((0, 0))[0].loss_mask_runs == (1, 1, 1)


def test_what_is_not_parquet_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text("no")
    with pytest.raises(ConfigError, match="not a parquet file"):
        Rollouts(tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="not a parquet file"):
        Rollouts(tmp_path / "b.parquet")


def test_the_quick_tokenizer_is_taken_only_where_it_decodes_alike(tmp_path: Path) -> None:
    write_toy_folder(tmp_path, max_tokens=32)
    beside = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert type(load_tokenizer("", str(tmp_path))).__name__ == "Tokenizer"
    for change in ({"clean_up_tokenization_spaces": True}, {"added_tokens_decoder": {"99": {"content": "<|tool|>"}}}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(beside | change))
        assert not _is_whole(tmp_path)
