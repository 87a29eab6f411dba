"""Real vLLM on two tensor-parallel workers, for each place in which a version can wait (`weights.staging`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from common import failpoints
from common.config import Config
from tests.system.test_engine import CONFIG, WEIGHTS, Bench, largest_difference

pytestmark = pytest.mark.engine
TORN = 25  # bucket that each worker refuses: of the third version, which has nine


@pytest.mark.parametrize("staging", ["host", "device", "none"])
def test_each_of_two_workers_loads_its_part_of_each_version_also_after_a_torn_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staging: str
) -> None:
    failpoints.arm("")  # none here, only in the engine's processes
    monkeypatch.setenv(failpoints.VARIABLE, f"staging.bucket:{TORN}:raise")
    weights = WEIGHTS.model_copy(update={"staging": staging, "timeout_s": 20.0, "canary_every": 1})
    config = Config.model_validate({
        **CONFIG.model_dump(), "weights": weights.model_dump(), "rollout": {"tensor_model_parallel_size": 2},
    })  # fmt: skip
    bench = Bench(tmp_path, weights, config)
    try:
        assert bench.engine.num_receivers == (1 if staging == "host" else 2)
        for seed in (1, 2, 3, 4):
            model = bench.push(seed)
            for c in bench.run(bench.sample_many(3, 30)):
                assert c.spans == [(bench.version, 0, len(c.response_ids))] and largest_difference(model, c) < 1e-4
        assert 0 <= bench.publisher.stats()["weights/canary_difference"] < 1e-4
        (fault,) = [n for n in bench.notes if "not delivered" in n]
        assert "version 2 not delivered" in fault and bench.publisher.stats()["weights/failures"] == 1
    finally:
        bench.close()
