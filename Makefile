# make train | test | lint | format | types | docs | bench | venv | clean
# Variables: PYTHON (3.11 or later), VENV, CONFIG and ARGS (train), BENCH_ARGS (bench), WORKERS and TESTS (test).

PYTHON     ?= python3
VENV       ?= .venv
CONFIG     ?= examples/train.yaml
ARGS       ?=
BENCH_ARGS ?= --strategies resident,bulk
WORKERS    ?= 2
TESTS      ?=

BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet

.DEFAULT_GOAL := help
.PHONY: help venv train test lint format types docs bench clean

help:
	@sed -n '1,2s/^# //p' Makefile

venv: $(STAMP)

# Rebuilt when what is installed changes; otherwise the environment is used as it stands.
$(STAMP): setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is not a Python 3.11 or later; name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "installing into $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install --constraint constraints.txt --editable '.[dev,docs]'
	@touch $@

train: $(STAMP)
	@$(BIN)/lightstep train $(CONFIG) $(ARGS)

# Two processes, each of one thread: tensors are small, some tests start processes of their own, and every worker imports
# torch again. WORKERS=8 spreads the tests over a larger machine.
test: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal --quiet $(TESTS)

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: $(STAMP)
	@$(BIN)/ruff check --fix --quiet .
	@$(BIN)/ruff format --quiet .

types: $(STAMP)
	@$(BIN)/mypy

docs: $(STAMP)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(STAMP)
	@$(BIN)/lightstep bench $(BENCH_ARGS)

clean:
	rm -rf $(VENV) site build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find lightstep tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
