"""Real vLLM that starts from stored versions (`weights.snapshot=file`), and what it does with a damaged one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests import models
from tests.system.test_engine import WEIGHTS, Bench, largest_difference
from tests.system.test_publish import until

pytestmark = pytest.mark.engine
FILES = WEIGHTS.model_copy(update={"snapshot": "file", "timeout_s": 10.0})


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    b = Bench(tmp_path_factory.mktemp("files"), FILES, first=1)
    yield b
    b.close()


def wait_stored(bench: Bench) -> None:
    until(lambda: bench.publisher.stats()["weights/stored_version"] == bench.version, 20, "the version on disk")


def join_as_a_newcomer(bench: Bench) -> None:
    """As an engine that holds nothing; its next load is proven."""
    bench.task.cancel()
    until(lambda: bench.task.done() and not bench.publisher.members(), 10, "the goodbye")
    bench.engine.version = -1
    bench.task = asyncio.run_coroutine_threadsafe(bench.run(bench._join()).run(), bench.loop)


def way(bench: Bench) -> str:
    bench.publisher.wait_held(bench.version, timeout_s=60)
    (member,) = bench.publisher.members()
    assert member.proven is not None
    return member.transport


def test_a_newcomer_starts_from_the_file(bench: Bench) -> None:
    assert way(bench) == "file"
    assert largest_difference(models.tiny_model(1), bench.run(bench.sample(40))) < 1e-4
    assert 0 <= bench.publisher.stats()["weights/canary_difference"] < 1e-4
    folder = bench.folder / "weights" / "0"
    loaded = AutoModelForCausalLM.from_pretrained(folder)  # and so does anybody else
    assert all(torch.equal(loaded.get_parameter(n), p) for n, p in models.tiny_model(1).named_parameters())
    bench.push(2)
    assert way(bench) == "gloo"


def test_a_damaged_file_is_refused_by_name_and_the_generator_is_ready_by_the_other_way(bench: Bench) -> None:
    model = bench.push(3)
    wait_stored(bench)
    name = "model.layers.1.mlp.up_proj.weight"
    file = bench.folder / "weights" / str(bench.version) / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[data.index(model.get_parameter(name).detach().numpy().tobytes()) + 1000] ^= 16
    file.write_bytes(data)
    join_as_a_newcomer(bench)
    assert way(bench) == "snapshot"
    assert any(f"it says: worker 0: tensor {name}: the bytes received" in note for note in bench.notes)
    assert largest_difference(model, bench.run(bench.sample(40))) < 1e-4
    file.unlink()
    join_as_a_newcomer(bench)
    assert way(bench) == "snapshot" and any("No such file" in note for note in bench.notes)
    model = bench.push(4)  # a later version lies there whole
    wait_stored(bench)
    join_as_a_newcomer(bench)
    assert way(bench) == "file"
    assert largest_difference(model, bench.run(bench.sample(40))) < 1e-4
