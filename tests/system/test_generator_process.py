"""``python -m generators`` with a real engine: weights of a real publisher, a broker by script."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from common.config import Weights
from common.control import Control, start_server
from common.model_files import FileServer, digest_of, find_difference, list_files
from common.tasks import get_task
from learner.publish import Publisher
from learner.toy import EOS_ID, toy_config, write_toy_folder
from tests.simulated_engine import SimulatedBroker

RUN = "process"


def model(seed: int):
    from transformers import Qwen2ForCausalLM

    torch.manual_seed(seed)
    return Qwen2ForCausalLM(toy_config()).float().eval()


def logprobs(weights, prompt: list[int], response: list[int]) -> list[float]:
    """[response]: what Hugging Face's forward says of the tokens sampled."""
    ids = torch.tensor([[*prompt, *response]])
    with torch.no_grad():
        logits = weights(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None]).squeeze(-1).tolist()


@pytest.mark.engine
def test_a_fleet_of_one_from_start_to_stop(tmp_path: Path):
    url, redis = start_server(tmp_path)
    control = Control(url, RUN)
    broker = SimulatedBroker()
    write_toy_folder(tmp_path / "elsewhere")  # the learner's; the generator's host does not have it
    files = list_files(tmp_path / "elsewhere")
    publisher = Publisher(run_id=RUN, epoch=1, config=Weights(), files=FileServer(tmp_path / "elsewhere", files))
    learner = Control(url, RUN)
    fleet = subprocess.Popen(
        [sys.executable, "-m", "generators", "--redis-url", url, "--run-id", RUN, "--name", "g",
         "generators.count=1", "model.toy=true", "model.dtype=float32", "data.task=reverse_digits",
         "data.max_prompt_length=32", "data.max_response_length=8", "rollout.max_num_seqs=32",
         f"run.dir={tmp_path / 'run'}"],
        env={**os.environ, "LEEWAY_PDEATHSIG": "1"}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        control.register("broker", "broker", address=broker.address)
        learner.register("learner", "learner", address=publisher.address)
        learner.publish_model("/not/on/this/host", digest_of(files))

        assert broker.welcome(deadline_s=120)["version"] == -1
        assert find_difference(tmp_path / "run" / "model-files" / digest_of(files)[:16], files) is None
        assert broker.expect("heartbeat")[0]["capacity"] == 0
        weights = model(0)
        publisher.publish(0, weights.named_parameters())
        beat, _ = broker.expect("heartbeat", lambda f: f["version"] == 0, deadline_s=30)
        assert beat["capacity"] == 40

        row = get_task("reverse_digits").row("train", 0, seed=0)
        broker.lease(row, 7, [0, 1, 2, 3])
        samples = broker.samples(4, deadline_s=60)
        assert [s.index for s in samples] == [0, 1, 2, 3] and {s.generator for s in samples} == {"g-0"}
        for s in samples:
            n = len(s.response_ids)
            assert s.spans == ((0, 0, n),) and s.reward == 0.0 and s.fault is None
            assert (s.finish_reason, n) == ("length", 8) or s.response_ids[-1] == EOS_ID
            assert (s.response_ids[:-1] != EOS_ID).all()
            expected = logprobs(weights, s.prompt_ids.tolist(), s.response_ids.tolist())
            assert s.behavior_logprobs.tolist() == pytest.approx(expected, abs=1e-4)
        assert len({tuple(s.response_ids) for s in samples}) > 1  # each sampled on its own

        broker.lease(row, 8, [0], lane="eval")
        broker.lease(row, 9, [0], lane="eval")
        greedy = broker.samples(2, deadline_s=60)
        assert greedy[0].response_ids.tolist() == greedy[1].response_ids.tolist()

        end = time.monotonic() + 10
        while (entry := control.entry("g-0")) is None or entry.version != 0:  # the registry follows within a second
            assert time.monotonic() < end
            control.refresh()
        assert entry.fields["ready"] == "1"
        tree = psutil.Process(fleet.pid).children(recursive=True)
        assert len(tree) >= 2  # generator and engine
        listening = [c.laddr.ip for p in tree for c in p.net_connections() if c.status == psutil.CONN_LISTEN]
        assert set(listening) <= {"127.0.0.1", "::1"}

        broker.lease(row, 10, list(range(32)))  # in flight when the stop comes
        before = time.monotonic()
        fleet.send_signal(signal.SIGTERM)
        broker.expect("bye")
        assert fleet.wait(12) == 0
        assert time.monotonic() - before < 10
        assert all(not p.is_running() or p.status() == psutil.STATUS_ZOMBIE for p in tree)
    finally:
        fleet.kill()
        _, said = fleet.communicate()
        print(said)
        publisher.close()
        broker.close()
        learner.close()
        control.close()
        redis.kill()
        redis.wait()
