"""Rows in verl's columns: what is read, what is refused and how it is said."""

import json

import pytest

from common.config import Config
from common.data import MAX_OF_KIND, open_files, open_rows, row_fault
from common.errors import ConfigError
from common.preflight import checked_config


def row(i=0, **changes):
    return {
        "data_source": "gsm8k",
        "prompt": [{"role": "user", "content": f"What is {i} + {i}?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(2 * i)},
        "extra_info": {"index": i},
        **changes,
    }


def fault_free(row):
    return row_fault(row) is None


def write_lines(path, lines):
    path.write_text("".join(x if isinstance(x, str) else json.dumps(x) + "\n" for x in lines))
    return str(path)


def faults_of(*paths):
    with pytest.raises(ConfigError) as caught:
        open_files(list(paths))
    return caught.value.faults


def test_jsonl_rows_by_index_over_several_files(tmp_path):
    a = write_lines(tmp_path / "a.jsonl", [row(0), "\n", row(1)])
    b = write_lines(tmp_path / "b.jsonl", [row(2), row(3)])
    rows = open_files([a, b])
    assert [rows[i]["extra_info"]["index"] for i in (3, 0, 2, 1)] == [3, 0, 2, 1]
    assert len(rows) == 4 and rows[3] == row(3)


def test_parquet_rows(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist([row(i) for i in range(2_000)]), path)
    rows = open_files([str(path)])
    assert len(rows) == 2_000 and rows[1_234] == row(1_234)


def test_bad_rows_are_all_named_with_file_and_line(tmp_path):
    bad = row(2)
    del bad["reward_model"]
    a = write_lines(tmp_path / "a.jsonl", [row(0), '{"data_source": \n', row(1), bad])
    b = write_lines(tmp_path / "b.jsonl", [row(0, prompt="2 + 2?")])
    faults = faults_of(a, b, str(tmp_path / "none.jsonl"))
    assert faults[0].startswith(f"{a}:2: not valid JSON")
    assert faults[1].startswith(f"{a}:4: reward_model.ground_truth is missing; add")
    assert faults[2].startswith(f"{b}:1: prompt is not a list of chat messages; write")
    assert faults[3].startswith(f"{tmp_path}/none.jsonl: cannot be read (No such file or directory)")


def test_bad_parquet_row_is_named(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist([row(0), row(1, data_source=None)]), path)
    assert faults_of(str(path))[0].startswith(f"{path}:2: data_source is missing")
    text = write_lines(tmp_path / "b.parquet", [row(0)])
    assert "not a parquet file" in faults_of(text)[0]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"data_source": ""}, "data_source"),
        ({"prompt": []}, "prompt is not a list"),
        ({"prompt": [{"role": "robot", "content": "x"}]}, r"prompt\[0\].role"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, r"prompt\[0\].content"),
        ({"prompt": [{"role": "user", "content": ""}]}, "prompt is empty"),
        ({"reward_model": {"ground_truth": None}}, "ground_truth is missing"),
        ({"extra_info": "x"}, "extra_info"),
        ({"extra_info": {"big": 1 << 70}}, "cannot be sent"),
    ],
)
def test_faults_of_a_row(changes, what):
    with pytest.raises(AssertionError, match=what):
        fault = row_fault(row(0, **changes))
        assert fault is None, fault


def test_many_faults_are_counted_not_listed(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", ["[]\n"] * 1_000)
    faults = faults_of(path)
    assert len(faults) == MAX_OF_KIND + 1 and faults[-1] == f"… and {1_000 - MAX_OF_KIND} more bad rows"
    kinds = [json.dumps(row(i, data_source=f"s{i}", reward_model={})) + "\n" for i in range(20)]
    faults = faults_of(write_lines(tmp_path / "b.jsonl", ["[]\n"] * 500 + kinds))
    assert len(faults) == 2 * MAX_OF_KIND + 1 and "b.jsonl:501" in faults[MAX_OF_KIND], "another kind is not buried"


def test_empty_file_is_a_fault(tmp_path):
    assert faults_of(write_lines(tmp_path / "a.jsonl", []))[0].endswith("fill it")


def test_open_rows_by_config(tmp_path):
    task = Config.model_validate({"data": {"task": "reverse_digits", "val_size": 10}})
    assert len(open_rows(task, "train")) == 95_000
    held_out = open_rows(task, "val")
    assert len(held_out) == 10 and held_out[9]["extra_info"] == {"split": "val", "index": 9}
    files = {"train_files": write_lines(tmp_path / "a.jsonl", [row(0), row(1)]), "val_size": 1}
    assert len(open_rows(Config.model_validate({"data": files}), "train")) == 2
    assert len(open_rows(Config.model_validate({"data": files}), "val")) == 0
    files["val_files"] = [files["train_files"]]
    assert len(open_rows(Config.model_validate({"data": files}), "val")) == 1


def test_rows_that_no_built_in_reward_can_score_are_found_before_the_run(tmp_path):
    rows = [row(0), row(1, data_source="acme/secret"), row(2, reward_model={"ground_truth": "none"})]
    path = write_lines(tmp_path / "a.jsonl", rows)
    given = ["model.toy=true", f"data.train_files={path}", f"run.dir={tmp_path}/run", "trainer.test_freq=-1"]
    with pytest.raises(ConfigError) as caught:
        checked_config([], given)
    assert [f.split(":")[1] for f in caught.value.faults] == ["2", "3"]
    assert "no built-in reward" in caught.value.faults[0] and "no single number" in caught.value.faults[1]
    (tmp_path / "own.py").write_text("def compute_score(**a):\n    return 1.0\n")
    checked_config([], [*given, f"reward.custom_function.path={tmp_path}/own.py"])


def test_a_folder_is_no_file_of_rows(tmp_path):
    assert faults_of(str(tmp_path)) == [f"{tmp_path}: is a folder; name its files, as a list"]
