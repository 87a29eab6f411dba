#!/usr/bin/env bash
# Writes requirements/{cpu,gpu}-constraints.txt anew: the newest versions that pyproject.toml allows.
# Needs .venv (`make setup`). The files hold names and versions only: no index, no path.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

extras=(dev maths tasks sinks lora data smollm2)
for accelerator in cpu gpu; do
    overrides=requirements/$accelerator-overrides.txt
    target=requirements/$accelerator-constraints.txt
    (
        sources=$(.venv/bin/python scripts/uv_sources.py "$accelerator" 2.13.0)
        eval "$sources"
        echo "# Versions that work together, for the extra \`$accelerator\`. Made by scripts/pin.sh; do not edit."
        .venv/bin/uv pip compile pyproject.toml --quiet --universal --python-version 3.11 \
            --no-header --no-annotate --no-emit-index-url --no-emit-find-links \
            "${extras[@]/#/--extra=}" --extra "$accelerator" \
            $([[ -f $overrides ]] && echo --override "$overrides")
    ) >"$target.new"
    mv "$target.new" "$target"
done
