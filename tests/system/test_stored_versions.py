"""`weights.snapshot=file`: a real publisher that stores versions, and processes that fill tensors from them."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

import learner.storing
from common import failpoints
from common.errors import CheckpointError, ConfigError, FencedError
from common.hashes import verify
from learner.publish import Publisher
from tests.system.test_publish import CONFIG, PATIENCE_S, PATIENT, Bench, until, weights_of

FILES = PATIENT.model_copy(update={"snapshot": "file"})
HASTY = CONFIG.model_copy(update={"snapshot": "file"})


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    b = Bench(tmp_path)
    yield b
    failpoints.arm("")
    b.close()


def folder_of(bench: Bench) -> Path:
    return bench.file.parent / "weights"


def stored(bench: Bench) -> list[int]:
    """Versions on disk, each of them whole."""
    while True:
        names = sorted(int(p.name) for p in folder_of(bench).iterdir() if p.name.isdecimal())
        try:
            for name in names:
                verify(folder_of(bench) / str(name))
            return names
        except CheckpointError:
            if all((folder_of(bench) / str(name)).exists() for name in names):
                raise  # else one went while it was looked at


def wait_stored(publisher: Publisher, version: int) -> None:
    until(lambda: publisher.stats()["weights/stored_version"] >= version, PATIENCE_S, f"version {version} on disk")


def ways(publisher: Publisher) -> dict[str, str]:
    return {m.name: m.transport for m in publisher.members()}


def test_newcomers_and_whom_a_transfer_failed_read_the_file(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.chdir(bench.file.parent)  # where engines are not
        patch.setattr(bench, "file", Path(bench.file.name))
        publisher = bench.publisher(config=FILES)
    publisher.publish(0, weights_of(0))
    wait_stored(publisher, 0)
    a = bench.receiver("a", "staging.bucket:14:raise")  # in the middle of its second version
    assert a.wait_held(0) == [0] and ways(publisher) == {"a": "file"}
    publisher.publish(1, weights_of(1))
    assert a.wait_held(1) == [1]
    publisher.wait_held(1, timeout_s=PATIENCE_S)
    assert ways(publisher) == {"a": "file"} and "a: version 1 not delivered" in bench.wait_note("failpoint", 5)
    for version in range(2, 7):
        publisher.publish(version, weights_of(version))
        assert a.wait_held(version) == [version] and ways(publisher) == {"a": "gloo"}
        wait_stored(publisher, version)  # nobody asked for it
        assert stored(bench) == [version - 1, version]
    last = load_file(folder_of(bench) / "6" / "model.safetensors")
    assert last.keys() == dict(weights_of(6)).keys() and all(torch.equal(last[n], t) for n, t in weights_of(6))
    assert publisher.stats()["weights/failures"] == 1


def test_everything_by_files_also_from_versions_that_nobody_had_time_to_store(bench: Bench) -> None:
    publisher = bench.publisher(config=FILES.model_copy(update={"transport": "snapshot"}))
    a, b = bench.receiver("a"), bench.receiver("b", staging="none")
    until(lambda: len(publisher.members()) == 2, PATIENCE_S, "the members")
    for version in range(12):
        publisher.publish(version, weights_of(version))
    a.wait_held(11)
    b.wait_held(11)
    publisher.wait_held(11, timeout_s=PATIENCE_S, minimum=2)
    assert ways(publisher) == {"a": "file", "b": "file"} and publisher.stats()["weights/failures"] == 0
    assert len(stored(bench)) <= 2 and stored(bench)[-1] == 11


@pytest.mark.parametrize("action", ["stop", "kill"])
def test_a_reader_that_freezes_or_dies_is_left_out_and_its_version_may_go(bench: Bench, action: str) -> None:
    publisher = bench.publisher(config=HASTY.model_copy(update={"transport": "snapshot", "timeout_s": 4.0}))
    publisher.publish(0, weights_of(0))
    a, bad = bench.receiver("a"), bench.receiver("bad", f"staging.bucket:5:{action}")
    assert a.wait_held(0) == [0]
    publisher.wait_held(0, timeout_s=PATIENCE_S)  # the other one is left out
    assert "bad" not in ways(publisher)
    for version in (1, 2):
        publisher.publish(version, weights_of(version))
        assert a.wait_held(version) == [version]
    wait_stored(publisher, 2)
    until(lambda: 0 not in stored(bench), PATIENCE_S, "version 0 to go")
    if action == "stop":
        bad.send_signal(signal.SIGCONT)
    else:
        bad = bench.receiver("bad")
    assert bad.wait_held(2)[-1] == 2


@pytest.mark.parametrize("staging", ["host", "none"])
def test_a_damaged_file_is_refused_by_tensor_name_and_the_socket_takes_its_place(bench: Bench, staging: str) -> None:
    publisher = bench.publisher(config=FILES)
    publisher.publish(3, weights_of(3))
    wait_stored(publisher, 3)
    file = folder_of(bench) / "3" / "model.safetensors"
    data = bytearray(file.read_bytes())
    odd = dict(weights_of(3))["odd"].view(torch.uint8).numpy().tobytes()
    data[data.rindex(odd)] ^= 1
    file.write_bytes(data)
    a = bench.receiver("a", staging=staging)
    assert a.wait_held(3) == [3]
    publisher.wait_held(3, timeout_s=PATIENCE_S)
    assert ways(publisher) == {"a": "snapshot"}
    assert bench.wait_note("not delivered", 1).replace("worker 0: ", "").startswith(
        "a: version 3 not delivered: it says: tensor odd: the bytes received are not those sent"
    )
    file.write_bytes(data[:-100])
    b = bench.receiver("b", staging=staging)
    assert b.wait_held(3) == [3]
    torn = f"tensor layer.8: {file} ends before its last byte"
    assert bench.wait_note("b: version 3 not delivered: it says: ", 1).endswith(torn)
    publisher.publish(4, weights_of(4))  # a later version, and the usual way
    assert a.wait_held(4) == [4] and b.wait_held(4) == [4]
    wait_stored(publisher, 4)
    c = bench.receiver("c", staging=staging)
    assert c.wait_held(4) == [4] and ways(publisher)["c"] == "file"


def test_a_version_that_is_read_stays_and_two_at_most_are_there(bench: Bench) -> None:
    publisher = bench.publisher(config=FILES)
    slow = bench.receiver("slow", "staging.bucket:3:stop")
    publisher.publish(0, weights_of(0))
    until(lambda: psutil.Process(slow.process.pid).status() == psutil.STATUS_STOPPED, PATIENCE_S, "its third bucket")
    seen = []
    for version in range(1, 8):
        publisher.publish(version, weights_of(version))
        wait_stored(publisher, 1)
        seen.append(stored(bench))
    slow.send_signal(signal.SIGCONT)
    assert all(versions[0] == 0 and len(versions) == 2 for versions in seen), seen
    assert slow.wait_held(7)[0] == 0
    until(lambda: stored(bench)[-1] == 7 and len(stored(bench)) == 2, PATIENCE_S, "the newest version on disk")


def test_a_disk_that_hangs_holds_up_neither_the_learner_nor_newcomers(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, write = threading.Event(), threading.Event(), learner.storing.write_version

    def hang(*args: Any, **kwargs: Any) -> None:
        begun.set()
        assert go_on.wait(2 * PATIENCE_S)
        write(*args, **kwargs)

    monkeypatch.setattr(learner.storing, "write_version", hang)
    publisher = bench.publisher(config=HASTY)
    publisher.publish(0, weights_of(0))
    assert begun.wait(PATIENCE_S)
    for version in range(1, 20):  # many more than there are buffers: DeadlineError if the disk held more than one
        publisher.publish(version, weights_of(version))
    assert publisher.stats()["weights/stored_version"] == -1, "it still hangs"
    a = bench.receiver("a")
    assert a.wait_held(19) == [19]
    publisher.wait_held(19, timeout_s=PATIENCE_S)
    assert ways(publisher) == {"a": "snapshot"}
    assert f"nothing was written to {folder_of(bench)} for 2 s" in bench.wait_note("a: version 19 not delivered", 1)
    go_on.set()
    wait_stored(publisher, 19)


def test_a_version_that_cannot_be_written_is_named_and_comes_over_the_socket(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(bench)

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    failpoints.arm("publish.stored:1:raise")
    publisher = bench.publisher(config=FILES)
    with monkeypatch.context() as patch:
        patch.setattr(learner.storing, "write_version", full)
        publisher.publish(0, weights_of(0))
        assert bench.wait_note("0 is not stored", PATIENCE_S) == (
            f"version 0 is not stored: {folder}: No space left on device"
        )
        a = bench.receiver("a")
        assert a.wait_held(0) == [0]
        publisher.wait_held(0, timeout_s=PATIENCE_S)
        assert ways(publisher) == {"a": "snapshot"}
    publisher.publish(1, weights_of(1))  # written, but it dies before it is named
    assert "failpoint publish.stored" in bench.wait_note("1 is not stored", PATIENCE_S)
    assert [p.name for p in folder.iterdir()] == ["epoch"]
    assert a.wait_held(1) == [1]
    b = bench.receiver("b")
    assert b.wait_held(1) == [1]
    publisher.wait_held(1, timeout_s=PATIENCE_S, minimum=2)
    assert ways(publisher) == {"a": "gloo", "b": "file"}  # it was written when it was asked for
    assert stored(bench) == [1]


LEARNER = """
import sys
from pathlib import Path
from common import failpoints
from common.config import Weights
from learner.publish import Publisher
from tests.system.test_publish import until, weights_of
failpoints.arm()
publisher = Publisher(run_id="run", epoch=1, config=Weights(snapshot="file"), folder=Path(sys.argv[1]))
for version in range(3):
    publisher.publish(version, weights_of(version))
    until(lambda: publisher.stats()["weights/stored_version"] == version, 60, "the version on disk")
"""


def test_a_learner_that_is_killed_while_it_stores_leaves_only_whole_versions(bench: Bench) -> None:
    folder = folder_of(bench)
    env = {**os.environ, failpoints.VARIABLE: "publish.stored:2:kill", "OMP_NUM_THREADS": "1"}
    killed = subprocess.run([sys.executable, "-c", LEARNER, str(folder)], env=env, timeout=150)
    assert killed.returncode == -signal.SIGKILL
    assert stored(bench) == [0] and (folder / ".1.new").is_dir()
    publisher = bench.publisher(epoch=2, config=FILES)
    publisher.publish(1, weights_of(1))
    a = bench.receiver("a")
    assert a.wait_held(1) == [1]
    publisher.wait_held(1, timeout_s=PATIENCE_S)
    assert ways(publisher) == {"a": "file"}
    until(lambda: sorted(p.name for p in folder.iterdir()) == ["1", "epoch"], PATIENCE_S, "what was left goes")


def test_a_later_learner_takes_the_folder_over(bench: Bench) -> None:
    folder = folder_of(bench)
    for name in ("1", "5", ".4.new"):
        (folder / name).mkdir(parents=True)
    (folder / "mine.txt").write_text("")
    old = bench.publisher(config=FILES)
    new = bench.publisher(epoch=2, config=FILES)
    new.publish(5, weights_of(5))  # the number that a learner before had, too
    wait_stored(new, 5)
    until(
        lambda: sorted(p.name for p in folder.iterdir()) == ["5", "epoch", "mine.txt"], PATIENCE_S,
        "what was left is gone",
    )  # fmt: skip
    assert stored(bench) == [5]
    old.publish(7, weights_of(7))  # frozen until now
    assert "is written by the learner of epoch 2" in bench.wait_note("version 7 is not stored", PATIENCE_S)
    assert stored(bench) == [5]
    with pytest.raises(FencedError):
        bench.publisher(epoch=1, config=FILES)
    blocked = bench.file.parent / "blocked"
    blocked.write_text("")
    with pytest.raises(ConfigError, match=r"weights\.snapshot=file: .*blocked.* cannot be written"):
        Publisher(run_id="run", epoch=3, config=FILES, folder=blocked / "weights")
