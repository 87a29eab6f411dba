"""Config and tokenizer on their way to a generator that has none."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.config import Config
from common.errors import ConfigError, WeightError
from common.model_files import (
    MAX_FILES,
    PART_BYTES,
    Ask,
    FileServer,
    ModelFile,
    _encode,
    digest_of,
    find_difference,
    list_files,
    pull_files,
)
from common.wire import CONTROL_OPS, decode, encode, pack
from generators import model_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text("{}")
    (made / "tokenizer.model").write_bytes(bytes(range(256)) * (PART_BYTES // 200))  # more than one part
    (made / "chat_template.jinja").write_text("")
    for name in ("model.safetensors", "modeling.py", "model.safetensors.index.json", ".hidden.json", "optimizer.json"):
        (made / name).write_text("not sent")
    (made / "folder.json").mkdir()
    return made


def asking(answer: Any) -> Ask:
    return lambda frames: decode(answer(*decode(frames, CONTROL_OPS)[:2]), CONTROL_OPS)


def test_config_and_tokenizer_travel_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    files = list_files(folder)
    assert [f.name for f in files] == ["chat_template.jinja", "config.json", "tokenizer.model"]
    server, asked = FileServer(folder, files), []
    ask = asking(lambda op, fields: asked.append(op) or server.answer(op, fields))
    target = pull_files(ask, tmp_path / "run" / "files" / "x", digest_of(files))
    assert sorted(p.name for p in target.iterdir()) == [f.name for f in files]
    assert all((target / f.name).read_bytes() == (folder / f.name).read_bytes() for f in files)
    assert asked == ["files", *["file"] * 3]  # 1, and 2 parts; the empty one needs none
    assert [p.name for p in target.parent.iterdir()] == ["x"]
    asked.clear()
    assert pull_files(ask, target, digest_of(files)) == target and asked == ["files"]  # it is there already
    (target / "config.json").write_text("[]")
    assert find_difference(target, files) == "config.json is another"
    assert find_difference(pull_files(ask, target, digest_of(files)), files) is None  # damaged: pulled again


def test_generators_of_a_host_that_pull_at_the_same_time_disturb_nobody(folder: Path, tmp_path: Path) -> None:
    """The second one begins and ends while the first still pulls."""
    files, target = list_files(folder), tmp_path / "run" / "x"
    server, seen = FileServer(folder, files), []

    def last_part(fields: dict[str, Any]) -> bool:
        return bool(fields["name"] == "tokenizer.model" and fields["offset"] == PART_BYTES)

    def answer(op: str, fields: dict[str, Any]) -> list[bytes]:
        if op == "file" and last_part(fields) and not seen:
            seen.append(pull_files(asking(server.answer), target, digest_of(files)))
            seen.extend(p.stat().st_ino for p in (target, *sorted(target.iterdir())))
        return server.answer(op, fields)

    assert pull_files(asking(answer), target, digest_of(files)) == target
    assert seen == [target, *(p.stat().st_ino for p in (target, *sorted(target.iterdir())))]  # the second one's files
    (target / "config.json").write_text("[]")
    pull_files(asking(server.answer), target, digest_of(files))
    kept = [p.stat().st_ino for p in (target, target / "chat_template.jinja", target / "tokenizer.model")]
    assert kept == [seen[1], seen[2], seen[4]] and find_difference(target, files) is None  # only what was damaged
    assert [p.name for p in target.parent.iterdir()] == ["x"]


def test_what_a_killed_pull_has_left_is_removed_after_an_hour(folder: Path, tmp_path: Path) -> None:
    files, target = list_files(folder), tmp_path / "run" / "x"
    old, fresh = target.with_name(".x.old"), target.with_name(".x.fresh")
    for left in (old, fresh):
        left.mkdir(parents=True)
        (left / "config.json").write_text("{}")
    os.utime(old, (0, 0))
    pull_files(asking(FileServer(folder, files).answer), target, digest_of(files))
    assert sorted(p.name for p in target.parent.iterdir()) == [".x.fresh", "x"]


@pytest.mark.parametrize(
    "name",
    ["../config.json", "/etc/x.json", "a/b.json", "..", ".json", "model.py", "x.safetensors", "a\x00.json", "A" * 200],
)
def test_a_name_that_leaves_the_folder_or_is_no_data_is_refused(tmp_path: Path, name: str) -> None:
    listing = (ModelFile(name, 3, "0" * 64),)
    ask = asking(lambda op, fields: encode("file_list", _encode(listing)))
    with pytest.raises(WeightError, match="not one that travels"):
        pull_files(ask, tmp_path / "x", digest_of(listing))
    assert list(tmp_path.iterdir()) == []


def test_lists_out_of_bounds_or_unreadable_are_refused(folder: Path, tmp_path: Path) -> None:
    one = ModelFile("a.json", 3, "0" * 64)
    many = tuple(ModelFile(f"a{i}.json", 3, "0" * 64) for i in range(MAX_FILES + 1))
    large = tuple(ModelFile(f"a{i}.json", 128 << 20, "0" * 64) for i in range(3))
    for listing in ((one, one), many, large, (ModelFile("a.json", 129 << 20, ""),)):
        with pytest.raises(WeightError, match=r"too many, or twice|not one that travels"):
            pull_files(
                asking(lambda op, fields, data=listing: encode("file_list", _encode(data))), tmp_path / "x", "any"
            )
    for junk in (b"", b"\xc1", pack({"a": 1}), pack([["a.json", 3]]), pack([["a.json", float("inf"), ""]])):
        with pytest.raises(WeightError, match=r"cannot be read|cannot be had"):
            pull_files(asking(lambda op, fields, data=junk: encode("file_list", data)), tmp_path / "x", "any")
    for i in range(MAX_FILES):
        (folder / f"extra{i}.txt").write_text("x")
    says = r"67 files .* largest tokenizer\.model of 1\.28 MiB; .* 64 files of at most 128 MiB each"
    with pytest.raises(ConfigError, match=says):
        list_files(folder)


def test_another_folder_at_the_learners_path_is_left_alone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, digest = FileServer(folder, list_files(folder)), digest_of(list_files(folder))
    monkeypatch.setattr(model_folder, "_pull", lambda address, *args: pull_files(asking(server.answer), *args))

    def find(there: Path) -> str:
        control: Any = SimpleNamespace(
            wait_for_model=lambda *args, **kwargs: str(there), model_digest=lambda: digest,
            wait_for=lambda *args, **kwargs: SimpleNamespace(address="learner"),
        )  # fmt: skip
        return model_folder.model_folder(control, Config(), tmp_path / "run", threading.Event())

    pulled = str(tmp_path / "run" / "model-files" / digest[:16])
    other = tmp_path / "other"
    assert find(folder) == str(folder) and find(other) == pulled
    other.mkdir()
    assert find(other) == pulled
    (other / "config.json").write_text("{}")
    assert find(other) == pulled
    for i in range(MAX_FILES):
        (other / f"log{i}.txt").write_text("x")
    assert find(other) == pulled  # too much to be the learner's


def test_where_only_adapters_are_sent_the_base_must_be_here(folder: Path, tmp_path: Path) -> None:
    config = Config.model_validate({"model": {"lora_rank": 4}, "weights": {"adapters_only": True}})
    digest = digest_of(list_files(folder))

    def find(there: Path) -> str:
        def announced(_deadline_s: float, _stop: threading.Event, *, after_warmup: bool) -> str:
            assert after_warmup, "the learner announces it after a supervised start, which may be long"
            return str(there)

        control: Any = SimpleNamespace(wait_for_model=announced, model_digest=lambda: digest)
        return model_folder.model_folder(control, config, tmp_path / "run", threading.Event())

    with pytest.raises(ConfigError, match="is not on this host, or has other files, and only adapters are sent"):
        find(tmp_path / "elsewhere")
    for file in folder.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(ConfigError, match="has no weights of the base on this host"):
        find(folder)
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"")
    assert find(folder) == str(folder)


def test_what_comes_otherwise_than_announced_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    files = list_files(folder)
    server = FileServer(folder, files)
    with pytest.raises(WeightError, match="not those that the registry announces"):
        pull_files(asking(server.answer), tmp_path / "x", "0" * 64)

    def flipped(op: str, fields: dict[str, Any]) -> list[bytes]:
        header, *payload = server.answer(op, fields)
        return [header, payload[0][:-1] + b"~"] if op == "file" else [header, *payload]

    with pytest.raises(WeightError, match=r"config\.json: what came is not what the learner announced"):
        pull_files(asking(flipped), tmp_path / "x", digest_of(files))

    def too_long(op: str, fields: dict[str, Any]) -> list[bytes]:
        header, *payload = server.answer(op, fields)
        return [header, payload[0] + b"~"] if op == "file" else [header, *payload]

    with pytest.raises(WeightError, match=r"config\.json: 3 bytes where 2 are missing"):
        pull_files(asking(too_long), tmp_path / "x", digest_of(files))
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_the_learner_gives_no_other_file_than_those_it_listed(folder: Path) -> None:
    server = FileServer(folder, list_files(folder))
    for name, offset in (("modeling.py", 0), ("../model/config.json", 0), ("config.json", 2), ("config.json", -1)):
        op, fields, _ = decode(server.answer("file", {"name": name, "offset": offset}), CONTROL_OPS)
        assert (op, fields["reason"]) == ("refused", "no_such_file")
    (folder / "config.json").unlink()
    op, fields, _ = decode(server.answer("file", {"name": "config.json", "offset": 0}), CONTROL_OPS)
    assert (op, fields["reason"]) == ("refused", "unreadable")
