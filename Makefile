# The two main commands are `make quickstart` and `make test`. Both set up what they need, without root.
PYTHON ?= python3
VENV   := .venv/bin
export OMP_NUM_THREADS := 1
export MKL_CBWR := AUTO
export TORCH_COMPILE_DISABLE := 1
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1
# If it is set, every process of a test recompiles our files.
export PYTHONDONTWRITEBYTECODE :=

PYTEST := $(VENV)/python -m pytest
# Unit tests are independent; a worker takes some 600 MB.
UNIT   := $(PYTEST) -q -n logical --maxprocesses 4 --dist worksteal tests/unit
REAL   := $(PYTEST) tests/integration tests/gpu tests/cluster
QUICK  := -m "not full and not slow"
CHECK  := -m "not full and not slow and not gate"

# Versions only: no index, and no hashes of files for other platforms.
LOCK   := uv pip compile pyproject.toml --universal --python-version 3.11 --no-annotate --quiet --upgrade \
          --custom-compile-command "make locks"

.PHONY: help setup setup-dev setup-test quickstart recipes check statics test test-all mutants baseline locks

help:
	@echo "make quickstart   set up and train the small MoE model with every part real (3 to 6 minutes)"
	@echo "make recipes      the short form of each recipe of examples/recipes against its recorded scores; continues after a kill"
	@echo "make check        ruff, mypy and the unit tests: about 8 minutes on two cores"
	@echo "make test         the same, the longer unit tests, and a part of the tests on the real stack: about half an hour on two cores"
	@echo "make test-all     every test: hours"
	@echo "make mutants      300 small changes to the code, which unit tests should detect: up to 90 minutes, nightly"
	@echo "make locks        requirements/*.lock from pyproject.toml and the registry's current versions (needs uv)"
	@echo "make baseline     record the results and seconds of the tests that ran here (tests/baseline.json)"
	@echo "Each sets up .venv first; that takes minutes once, and no time when nothing has changed."

setup:
	@$(PYTHON) launch/bootstrap.py

setup-dev:
	@$(PYTHON) launch/bootstrap.py --dev

setup-test:
	@$(PYTHON) launch/bootstrap.py --dev --parity

quickstart: setup
	@$(VENV)/rlsys train configs/quickstart.yaml $(ARGS)

# Some need a package with a model, which is not installed here: examples/recipes/README.md.
recipes: setup
	@$(VENV)/python bench/recipes.py --short $(ARGS)

check: setup-dev statics
	$(UNIT) $(CHECK)

statics: setup-dev
	$(VENV)/ruff check .
	$(VENV)/ruff format --check .
	$(VENV)/mypy

test: setup-test statics
	$(UNIT) $(QUICK)
	$(REAL) $(QUICK)

test-all: setup-test statics
	$(UNIT)
	$(REAL)

mutants: setup-test
	$(VENV)/python -m tests.gate.mutants $(ARGS)

baseline:
	$(PYTEST) --collect-only -q --store-baseline

locks:
	$(LOCK) --extra cpu --extra dev -o requirements/cpu.lock
	$(LOCK) --extra gpu -o requirements/cuda.lock
