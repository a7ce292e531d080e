# The two main commands are `make quickstart` and `make test`. Both set up .venv first, without root access.
PYTHON ?= python3
VENV   := .venv/bin
export OMP_NUM_THREADS := 1
export MKL_CBWR := AUTO
export TORCH_COMPILE_DISABLE := 1
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1
# If this variable is set, every process of a test compiles the source files again.
export PYTHONDONTWRITEBYTECODE :=

PYTEST := $(VENV)/python -m pytest
# Unit tests are independent; a worker needs some 600 MB of memory.
UNIT   := $(PYTEST) -q -n logical --maxprocesses 4 --dist worksteal tests/unit
REAL   := $(PYTEST) tests/integration tests/gpu tests/cluster
QUICK  := -m "not full and not slow"
CHECK  := -m "not full and not slow and not gate"

# Lock files contain versions only: no index, and no hashes, which would be of files for other platforms.
LOCK   := uv pip compile pyproject.toml --universal --python-version 3.11 --no-annotate --quiet --upgrade \
          --custom-compile-command "make locks"

.PHONY: help setup setup-dev setup-test quickstart recipes check statics test test-all mutants baseline locks

help:
	@echo "make quickstart   set up, and train the small MoE model on the real stack (3 to 6 minutes)"
	@echo "make recipes      run the short form of each recipe of examples/recipes, and compare its scores with the recorded ones"
	@echo "make check        run ruff, mypy and the unit tests (about 8 minutes on two cores)"
	@echo "make test         also run the longer unit tests and a part of the tests on the real stack (about half an hour)"
	@echo "make test-all     run every test (hours)"
	@echo "make mutants      make 300 small changes to the code that unit tests should detect (up to 90 minutes, nightly)"
	@echo "make locks        write requirements/*.lock from pyproject.toml and the newest versions on PyPI (needs uv)"
	@echo "make baseline     record the results and the duration of the tests that ran here (tests/baseline.json)"
	@echo "Each command sets up .venv first, which takes minutes once."

setup:
	@$(PYTHON) launch/bootstrap.py

setup-dev:
	@$(PYTHON) launch/bootstrap.py --dev

setup-test:
	@$(PYTHON) launch/bootstrap.py --dev --parity

quickstart: setup
	@$(VENV)/rlsys train configs/quickstart.yaml $(ARGS)

# Some recipes need a package with a model, which this target does not install: examples/recipes/README.md.
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
