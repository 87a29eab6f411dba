"""What a run came to: written by the learner as ``RUN_DIR/summary.json``, printed by the launcher."""

from __future__ import annotations

import json
import os
import textwrap
from dataclasses import asdict, dataclass, field
from pathlib import Path

FILE = "summary.json"


@dataclass
class Summary:
    """Figures of a run so far. Written after each checkpoint and at the end (so a killed run has one too)."""

    ended: str = ""  # why: "max_steps reached", "goal reached", "stopped", "the data ended"; "" while it runs
    step: int = 0  # rows of `steps`
    version: int = 0
    steps_given_up: int = 0  # of these, by rollbacks, which are counted too
    score_first: float | None = None  # mean of the first / last `score_window` steps
    score_last: float | None = None
    score_window: int = 20
    val_score: float | None = None  # of the latest held-out validation
    val_version: int | None = None  # the version it was sampled with
    samples_trained: int = 0
    tokens_trained: int = 0
    dropped: dict[str, int] = field(default_factory=dict)  # groups by reason
    publications: int = 0
    staleness_max: int | None = None
    overlap_ratio: float | None = None  # mean over the steps
    equal_steps: int | None = None  # exact replay: steps whose weights were those of the record
    hf_dir: str | None = None  # written at a clean end
    wandb_dir: str | None = None
    seconds: float = 0.0  # since the learner started

    def write(self, run_dir: Path | str) -> None:
        """Replace the file in one go."""
        path = Path(run_dir) / FILE
        fresh = path.with_suffix(".tmp")
        fresh.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        os.replace(fresh, path)

    @classmethod
    def read(cls, run_dir: Path | str, *, newer_than: float = 0.0) -> Summary | None:
        """The summary of a run; None if there is none that can be read, or it is of before (Unix seconds)."""
        try:
            if (Path(run_dir) / FILE).stat().st_mtime < newer_than:
                return None
            tree = json.loads((Path(run_dir) / FILE).read_text(encoding="utf-8"))
            return cls(**{k: v for k, v in tree.items() if k in cls.__dataclass_fields__})
        except (OSError, ValueError, TypeError, AttributeError):
            return None

    def paragraph(self, run_dir: Path | str, *, width: int = 100) -> str:
        """One paragraph for people."""
        parts = [f"{self._head()}."]
        if self.steps_given_up:
            parts.append(f"Rollbacks gave up {self.steps_given_up} of the steps.")
        if self.score_first is not None and self.score_last is not None:
            parts.append(
                f"Mean score {self.score_first:.3f} → {self.score_last:.3f} (first and last {self.score_window} steps)."
            )
        if self.val_score is not None:
            parts.append(f"Held-out score {self.val_score:.3f} (version {self.val_version}, greedy).")
        dropped = ", ".join(f"{reason} {n}" for reason, n in sorted(self.dropped.items()) if n)
        parts.append(
            f"Trained {self.samples_trained:,} samples ({self.tokens_trained:,} tokens); "
            f"groups dropped: {dropped or 'none'}."
        )
        if self.equal_steps is not None:
            parts.append(f"The weights after each of {self.equal_steps} steps are those of the record.")
        published = f"Published {self.publications} versions; largest" if self.publications else "Largest"
        parts.append(f"{published} staleness {_or_none(self.staleness_max)}.")
        if self.overlap_ratio is not None:
            parts.append(f"Generators sampled during {self.overlap_ratio:.0%} of the optimizer's time.")
        places = [
            ("Hugging Face folder", self.hf_dir),
            ("metrics", str(Path(run_dir) / "metrics.jsonl")),
            ("wandb", self.wandb_dir),
        ]
        text = textwrap.fill(" ".join(parts), width)
        return "\n".join([text, *(f"  {name}: {place}" for name, place in places if place)])

    def _head(self) -> str:
        minutes, seconds = divmod(int(self.seconds), 60)
        time = f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
        return f"{self.step} steps in {time}, {self.ended or 'as of the newest checkpoint'}"


def _or_none(value: int | None) -> str:
    return "none" if value is None else str(value)
