import io
import json
import os
import re
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import torch

from common.errors import LeewayError
from common.loading import load_config
from common.metric_table import METRICS, declared
from common.metrics import MetricsWriter, read_metrics
from common.sinks import MAX_SERIES
from learner import report

BASE = ["model.toy=true", "data.task=reverse_digits", "run.id=x"]


@pytest.fixture
def writer(tmp_path, monkeypatch):
    monkeypatch.setenv("LEEWAY_STRICT", "1")
    made = []

    def make(*overrides, stream=None):
        made.append(MetricsWriter(tmp_path, load_config([], [*BASE, *overrides]), stream=stream))
        return made[-1]

    yield make
    for w in made:
        w.close()


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_one_line_a_step_at_once_and_the_same_on_the_console(writer, tmp_path):
    screen = io.StringIO()
    w = writer("trainer.logger=[console]", stream=screen)
    assert w.write(3, {"critic/score/mean": 0.125, "training/global_step": 4, "actor/lr": float("inf")})
    row = lines(tmp_path)[0]
    assert row.pop("time") > 1.7e9
    assert row == {"step": 3, "critic/score/mean": 0.125, "training/global_step": 4, "actor/lr": None}
    assert screen.getvalue() == "step:3 - critic/score/mean:0.125 - training/global_step:4 - actor/lr:nan\n"


def test_a_redone_step_is_written_only_if_missing(writer, tmp_path):
    first = writer("trainer.logger=[]")
    for step in (1, 2, 3):
        first.write(step, {"actor/lr": step})
    first.close()
    with open(tmp_path / "metrics.jsonl", "a") as f:
        f.write('{"step": 4, "acto')  # a crash in the middle of a line
    again = writer("trainer.logger=[]")
    assert [again.write(step, {"actor/lr": 10 * step}) for step in (3, 4)] == [False, True]
    assert [(r["step"], r["actor/lr"]) for r in lines(tmp_path)] == [(1, 1), (2, 2), (3, 3), (4, 40)]


def test_reading_goes_on_where_it_ended_and_leaves_a_line_being_written(writer, tmp_path):
    w = writer("trainer.logger=[]")
    w.write(1, {"actor/lr": 1})
    rows, place = read_metrics(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in rows] == [1]
    with open(tmp_path / "metrics.jsonl", "a") as f:
        f.write('{"step": 2')
    assert read_metrics(tmp_path / "metrics.jsonl", place) == ([], place)
    assert read_metrics(tmp_path / "none.jsonl") == ([], 0)


def test_an_undeclared_metric_is_an_error_in_tests_and_a_warning_elsewhere(writer, tmp_path, monkeypatch):
    w = writer("trainer.logger=[]")
    with pytest.raises(LeewayError, match="critic/scores/mean"):
        w.write(1, {"critic/scores/mean": 1.0})
    monkeypatch.delenv("LEEWAY_STRICT")
    assert w.write(1, {"critic/scores/mean": 1.0})
    assert lines(tmp_path)[0]["critic/scores/mean"] == 1.0


@pytest.mark.parametrize(
    ("name", "known"),
    [("critic/score/max", True), ("critic/score/median", False), ("queue/dropped/too_stale", True), ("queue/x", False),
     ("val-core/gsm8k/reward/mean@1", True), ("val-core/a/b/reward/mean@1", False), ("timing_s/step", True)],
)  # fmt: skip
def test_patterns(name, known):
    assert (declared(name) is not None) == known


def test_each_metric_has_a_unit_and_a_sentence():
    for name, (unit, meaning) in METRICS.items():
        assert unit and re.fullmatch(r".*[.)]", meaning), name


def test_a_fault_of_wandb_does_not_touch_the_run(writer, tmp_path, monkeypatch):
    def broken(*args):
        raise OSError("no space left")

    monkeypatch.setattr("common.sinks._start_wandb", broken)
    w = writer("trainer.logger=[wandb]")
    assert w.write(1, {"actor/lr": 1.0})
    assert len(lines(tmp_path)) == 1


def test_wandb_is_offline_without_a_key_and_keeps_its_files_in_the_run(tmp_path):
    code = """
import sys, socket
real = socket.socket.connect
def connect(self, address):
    assert not isinstance(address, tuple) or address[0] in ("127.0.0.1", "localhost"), address
    return real(self, address)
socket.socket.connect = connect
from common.loading import load_config
from common.metrics import MetricsWriter
w = MetricsWriter(sys.argv[1], load_config([], sys.argv[2:]))
for step in range(3):
    w.write(step, {"critic/score/mean": step / 10})
assert "wandb" in sys.modules and w._sinks[0].sink is not None
w.close()
"""
    env = {k: v for k, v in os.environ.items() if not k.startswith("WANDB") and k != "PYTHONDONTWRITEBYTECODE"}
    env |= {"HOME": str(tmp_path), "LEEWAY_STRICT": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run"), *BASE, "trainer.logger=[wandb]"],
        env=env, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    kept = list(Path(tmp_path, "run", "wandb").glob("offline-run-*/*.wandb"))
    assert len(kept) == 1 and kept[0].stat().st_size > 0


def test_tensorboard_has_each_step(writer, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    w = writer("trainer.logger=[tensorboard]")
    for step in (1, 2):
        w.write(step, {"critic/score/mean": step / 4, "actor/lr": float("nan")})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("critic/score/mean")] == [(1, 0.25), (2, 0.5)]
    assert events.Tags()["scalars"] == ["critic/score/mean"]


def test_prometheus_is_told_the_newest_step(writer, tmp_path):
    w = writer("trainer.logger=[prometheus]")
    for step in (1, 2):
        w.write(step, {"critic/score/mean": step / 4, "queue/dropped/stale": 3, "actor/lr": float("nan")})
    port = w._sinks[0].sink.port
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    assert 'leeway_critic_score_mean{run="x"} 0.5\n' in text and 'leeway_step{run="x"} 2.0\n' in text
    assert 'leeway_queue_dropped_stale{run="x"} 3.0\n' in text and 'leeway_actor_lr{run="x"} NaN\n' in text
    assert "# HELP leeway_queue_dropped_stale Group attempts dropped so far for this reason. [groups]\n" in text


def scraped(writer_):
    """{series: value} of the metrics, as Prometheus gets them."""
    url = f"http://127.0.0.1:{writer_._sinks[0].sink.port}/metrics"
    lines = urllib.request.urlopen(url, timeout=10).read().decode().splitlines()
    return {name.removesuffix('{run="x"}'): float(v) for name, v in (x.split() for x in lines if x[0] != "#")}


def test_prometheus_has_what_the_step_has_and_one_series_of_names_that_are_one(writer, caplog):
    w = writer("trainer.logger=[prometheus]")
    parts = {f"reward_parts/{part}/mean": value for part, value in (("a-b", 1), ("a_b", 2), ("é", 3), ("ü", 4))}
    w.write(1, {**parts, "val/step": 1})
    first = {"leeway_step": 1, "leeway_reward_parts_a_b_mean": 1, "leeway_reward_parts___mean": 3}
    assert scraped(w) == first | {"leeway_val_step": 1}
    assert "prometheus: reward_parts/a_b/mean and 1 more are left out" in caplog.text
    w.write(2, {"reward_parts/a_b/mean": 5, "actor/lr": 0.5})
    assert scraped(w) == {"leeway_step": 2, "leeway_reward_parts_a_b_mean": 5, "leeway_actor_lr": 0.5}
    w.write(3, {"val/step": 3})
    assert scraped(w) == {"leeway_step": 3, "leeway_val_step": 3}
    for step in (4, 5):  # names that vary, and too many
        w.write(step, {"actor/lr": 1, **{f"reward_parts/{step}-{i}/mean": i for i in range(MAX_SERIES)}})
        seen = scraped(w)
        assert len(seen) == MAX_SERIES and seen["leeway_actor_lr"] == 1 and f"leeway_reward_parts_{step}_7_mean" in seen
    assert caplog.text.count("prometheus: ") == 1 and "switched off" not in caplog.text


def test_a_port_that_is_taken_ends_the_sink_and_not_the_run(writer, tmp_path, caplog):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        w = writer("trainer.logger=[prometheus]", f"trainer.prometheus_port={taken.getsockname()[1]}")
        assert w.write(1, {"actor/lr": 1.0}) and "prometheus is switched off for this run" in caplog.text
    assert len(lines(tmp_path)) == 1


def expanded(pattern):
    """The names a pattern stands for; ``<x>`` stays."""
    match = re.search(r"\{([^}]*)\}", pattern)
    if match is None:
        return [pattern]
    ways = [pattern[: match.start()] + word + pattern[match.end() :] for word in match[1].split(",")]
    return [name for way in ways for name in expanded(way)]


def test_no_metric_is_declared_that_no_code_writes():
    """Each name stands in the source: whole, as the stem of a spread, or as a word that code puts behind a prefix."""
    root = Path(__file__).resolve().parents[2]
    source = "\n".join(p.read_text() for part in ("learner", "broker") for p in sorted((root / part).glob("*.py")))

    def written(name):
        stem, _, word = name.rpartition("/")
        spread = re.fullmatch(r"(.*[/_])(mean|std|max|min)", name)
        ways = [f'"{name}"']
        ways += [f'"{spread[1]}"'] if spread else []
        ways += [f'"{word}"'] if stem in ("rollout_corr", "timing_s", "queue") else []
        ways += [f'name}}/{word}"'] if stem in ("actor", "critic") else []
        ways += [f"    {word}: "] if stem == "warmup" else []
        text = source.replace("{name}/", "<part>/").replace("{source}/", "<task>/").replace("{reason}", "<reason>")
        return any(way in text for way in ways)

    assert not written("queue/never_heard_of") and not written("critic/never/mean")
    missing = [name for pattern in METRICS for name in expanded(pattern) if not written(name)]
    assert missing == []


def test_a_phase_ends_when_the_device_has_done_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU: launching takes no time, so without it the next phase that waits would be charged."""
    now = [100.0]
    monkeypatch.setattr(report.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: now.append(now.pop() + 5))
    clock = report.Clock()
    with clock("ref"):
        pass
    with clock("values"):
        now[0] += 1
    assert clock.seconds == {"ref": 5, "values": 6}
