"""``python -m benchmarks [NAME …]``: measure, print a table, write ``benchmarks/results/latest.json``."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from benchmarks.figures import BENCHMARKS, Figure

RESULTS = Path(__file__).parent / "results" / "latest.json"


def main(names: list[str]) -> int:
    from benchmarks import broker, checkpoints, learner, system, weights, wire  # noqa: F401  (they register themselves)

    unknown = [n for n in names if n not in BENCHMARKS]
    if unknown:
        print(f"no benchmark {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    figures: list[Figure] = []
    failed = []
    for name in names or BENCHMARKS:
        start = time.monotonic()
        print(f"[bench] {name} …", flush=True)
        try:
            figures += list(BENCHMARKS[name]())
        except Exception as e:  # one broken benchmark must not hide the others' figures
            print(f"[bench] {name} failed: {type(e).__name__}: {e}", file=sys.stderr)
            failed.append(name)
        print(f"[bench] {name}: {time.monotonic() - start:.0f} s", flush=True)
    show(figures)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(
        json.dumps({f.name: {"value": f.value, "unit": f.unit, "aim": f.aim, "ok": f.ok} for f in figures}, indent=1)
    )
    return 1 if failed else 0


def show(figures: list[Figure]) -> None:
    width = max((len(f.name) for f in figures), default=0)
    for f in figures:
        verdict = {True: "ok", False: "MISSED", None: ""}[f.ok]
        print(f"{f.name:<{width}}  {f.value:>10.4g} {f.unit:<24} {f.aim or '':<8} {verdict}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
