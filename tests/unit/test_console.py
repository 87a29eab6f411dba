import io
import json

from rich.console import Console

from common.console import Feed, PlainLines, render, sparkline
from common.control import Entry
from common.loading import load_config
from common.summary import Summary

CONFIG = load_config([], ["model.toy=true", "data.task=reverse_digits", "run.id=demo", "run.max_steps=400",
                          "run.goal_score=0.9"])  # fmt: skip


def text_of(view, width=110):
    screen = Console(file=io.StringIO(), width=width, height=60)
    screen.print(view)
    return screen.file.getvalue()


def test_sparkline_spans_0_to_1_and_averages_what_does_not_fit():
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([0.0, 1.0] * 40, width=40) == "▅" * 40
    assert sparkline([]) == ""
    assert sparkline([-1.0, 1.0]) == "▁█"


def test_the_table_shows_what_a_user_asks_for():
    rows = [{"step": s, "critic/score/mean": s / 40, "staleness/mean": 1.25, "staleness/max": 2, "queue/ready": 12,
             "queue/trained": 64 * s, "generator/tokens_per_s": 9123.4, "trainer/idle_ratio": 0.1,
             "generator/overlap_ratio": 0.83} for s in range(1, 31)]  # fmt: skip
    entries = [
        Entry("generator", "generator-1", 12, "h", None, "samples", 29),
        Entry("broker", "broker", 10, "h", "tcp://127.0.0.1:1", "serves", -1),
    ]
    text = text_of(render(CONFIG, rows, entries, "running", ["12:00:00 learner INFO saved"], seconds=125))
    for expected in ("demo · running", "30 of 400", "2:05", "0.750, mean of 20: 0.512 (goal 0.9)", "mean 1.25  max 2",
                     "ready 12", "trained 1,920", "9,123", "overlap 83%", "learner INFO saved"):  # fmt: skip
        assert expected in text
    lines = text.splitlines()
    broker, generator = (next(line for line in lines if name in line) for name in ("broker", "generator-1"))
    assert lines.index(broker) < lines.index(generator)
    assert broker.split()[1:5] == ["broker", "10", "–", "serves"]
    assert generator.split()[1:5] == ["generator-1", "12", "29", "samples"]


def test_the_table_of_a_run_that_has_not_begun():
    text = text_of(render(CONFIG, [], [], "running", [], seconds=0))
    assert "no step yet" in text and "0 of 400" in text


def test_plain_lines_show_steps_and_new_log_lines_only(tmp_path):
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "learner.log"
    log.write_text("2026-01-01 00:00:00.000 learner INFO of an earlier launch\n")
    screen = io.StringIO()
    lines = PlainLines(Feed(tmp_path), screen)
    with log.open("a") as f:
        f.write("2026-01-01 10:00:00.000 learner INFO new\nhalf a li")
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "time": 3.0, "actor/lr": 0.5}) + "\n")
    lines.tick()
    lines.tick()
    assert screen.getvalue() == "10:00:00.000 learner INFO new\nstep:1 - actor/lr:0.5\n"


def test_the_summary_is_a_paragraph_for_people(tmp_path):
    Summary(
        ended="goal reached", step=210, version=209, score_first=0.14, score_last=0.93, samples_trained=107520,
        tokens_trained=640000, dropped={"too_stale": 3, "expired": 0}, publications=209, staleness_max=2,
        overlap_ratio=0.81, hf_dir="/r/hf", wandb_dir="/r/wandb", seconds=312.4,
    ).write(tmp_path)  # fmt: skip
    text = Summary.read(tmp_path).paragraph(tmp_path)
    flat = " ".join(text.split())
    for expected in ("210 steps in 5 min 12 s, goal reached.", "Mean score 0.140 → 0.930", "107,520 samples",
                     "groups dropped: too_stale 3.", "Published 209 versions; largest staleness 2.", "/r/hf",
                     "/r/wandb", f"metrics: {tmp_path}/metrics.jsonl"):  # fmt: skip
        assert expected in flat
    assert Summary.read(tmp_path / "none") is None
