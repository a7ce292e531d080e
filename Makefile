# Two commands matter: `make quickstart` and `make test`. Both set up what they need, without root.
PYTHON ?= python3
VENV   := .venv/bin
export OMP_NUM_THREADS := 1
export TORCH_COMPILE_DISABLE := 1
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1

# Unit tests do not know of one another; a worker is some 600 MB.
UNIT   := $(VENV)/python -m pytest -q -m "not slow" -n logical --maxprocesses 4 --dist worksteal tests/unit

.PHONY: help setup setup-dev setup-test quickstart check test test-slow

help:
	@echo "make quickstart   set up and train the small MoE model with every part real (about 10 minutes)"
	@echo "make test         set up and run every test that is not marked slow"
	@echo "make check        ruff, mypy and the unit tests"

setup:
	@$(PYTHON) launch/bootstrap.py

setup-dev:
	@$(PYTHON) launch/bootstrap.py --dev

setup-test:
	@$(PYTHON) launch/bootstrap.py --dev --parity

quickstart: setup
	@$(VENV)/rlsys train configs/quickstart.yaml $(ARGS)

check: setup-dev
	$(VENV)/ruff check .
	$(VENV)/mypy
	$(UNIT)

test: setup-test
	$(VENV)/ruff check .
	$(VENV)/mypy
	$(UNIT)
	$(VENV)/python -m pytest -m "not slow" tests/integration tests/gpu tests/cluster

test-slow: setup-dev
	$(VENV)/python -m pytest -m slow
