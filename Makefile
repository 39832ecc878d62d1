# make train | test | test-hosts | test-verl | test-servers | lint | format | types | docs | wheel | bench | venv | clean
# Variables: PYTHON (3.11 or later), VENV, CONFIG and ARGS (train), BENCH_ARGS (bench), WORKERS and TESTS (test),
# VLLM_PYTHON and SGLANG_PYTHON (test-servers).

PYTHON     ?= python3
VENV       ?= .venv
CONFIG     ?= examples/train.yaml
ARGS       ?=
BENCH_ARGS ?= --strategies resident,bulk
WORKERS    ?= 2
TESTS      ?=

BIN := $(VENV)/bin
# Of what is installed a tenth is imported: python compiles that when it first is. And pip run by root fails to build
# packages when it cannot write to its cache, where other users are just warned.
CACHE := $${XDG_CACHE_HOME:-$$HOME/.cache}/pip
PIP_OPTIONS = --disable-pip-version-check --no-compile \
	$$({ mkdir -p "$(CACHE)" && test -w "$(CACHE)"; } 2>/dev/null || echo --no-cache-dir)
# Installed without what they ask for: torchtitan's optimizers need none of its data sets and trackers, and `dev` names
# what they do need.
ALONE_dev := torchtitan
unexport PYTHONDONTWRITEBYTECODE  # some machines set it, and every process of the tests would compile all it imports

.DEFAULT_GOAL := help
.PHONY: help venv train test test-hosts test-verl test-servers lint format types docs wheel bench clean
.NOTPARALLEL:  # one pip at a time

help:
	@sed -n '1,3s/^# //p' Makefile

venv: $(VENV)/.dev $(VENV)/.docs

# One environment, and a stamp for each extra of setup.cfg that is in it: `make train` waits for no compiler and no
# documentation. Renewed when what is installed changes; otherwise the environment is used as it stands.
$(VENV)/.%: setup.cfg pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing what '$*' needs into $(VENV)"
	@$(BIN)/python -m pip install $(PIP_OPTIONS) --constraint constraints.txt --editable '.[$*]'
	@test -z "$(ALONE_$*)" || \
		$(BIN)/python -m pip install $(PIP_OPTIONS) --constraint constraints.txt --no-deps $(ALONE_$*)
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is not a Python 3.11 or later; name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)

train: $(VENV)/.train
	@$(BIN)/lightstep train $(CONFIG) $(ARGS)

# Two processes, each of one thread: tensors are small, some tests start processes of their own, and every worker imports
# torch again. WORKERS=8 spreads the tests over a larger machine.
test: $(VENV)/.dev
	@for each in $(TESTS); do case $$each in *.py|*.py::*|*/) \
		test -e "$${each%%::*}" || { echo "TESTS: $$each does not exist" >&2; exit 2; };; esac; done
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal --quiet --durations 20 --durations-min 5 $(TESTS)

# Two hosts, played by network namespaces. They need root and Linux; where they cannot be made, the tests say why.
test-hosts: $(VENV)/.dev
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest --quiet tests/hosts

# verl beside the other packages, without what it asks for: its engines need none of ray, vLLM and data sets. In a folder of
# its own, because it brings a package `tests` of its own.
test-verl: $(VENV)/.verl
	@OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/$(VENV)/verl $(BIN)/python -m pytest --quiet tests/distributed/test_verl.py

$(VENV)/.verl: $(VENV)/.dev Makefile
	@$(BIN)/python -m pip install $(PIP_OPTIONS) --no-deps --upgrade --target $(VENV)/verl verl==0.9.1 tensordict==0.15.3 \
		pyvers orjson cloudpickle hydra-core==1.3.8 omegaconf antlr4-python3-runtime==4.9.3 codetiming==1.4.0
	@touch $@

# Real servers of vLLM and SGLang, on CPUs: make test-servers VLLM_PYTHON=... SGLANG_PYTHON=...
test-servers: $(VENV)/.dev
	@test -n "$(VLLM_PYTHON)$(SGLANG_PYTHON)" || { echo "name a server's interpreter: VLLM_PYTHON or SGLANG_PYTHON" >&2; exit 2; }
	@OMP_NUM_THREADS=1 VLLM_PYTHON=$(VLLM_PYTHON) SGLANG_PYTHON=$(SGLANG_PYTHON) \
		$(BIN)/python -m pytest --quiet tests/servers

lint: $(VENV)/.dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: $(VENV)/.dev
	@$(BIN)/ruff check --fix --quiet .
	@$(BIN)/ruff format --quiet .

types: $(VENV)/.dev
	@$(BIN)/mypy

docs: $(VENV)/.docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

wheel: $(VENV)/.dev
	@VENV=$(VENV) PYTHON=$(PYTHON) PIP_OPTIONS="$(PIP_OPTIONS)" .ci/wheel

bench: $(VENV)/.bench
	@$(BIN)/lightstep bench $(BENCH_ARGS)

clean:
	rm -rf $(VENV) site build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find lightstep tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
