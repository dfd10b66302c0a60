# Two commands for a newcomer: `make demo` and `make test`. The first use of either sets up $(VENV).
#   make VENV=/path ...     use (or create) another virtual environment
#   make PYTHON=python3.12  create it with this interpreter

VENV   ?= .venv
JOBS   ?= auto
SUITE  ?= steps
STEPS  ?=
PYTEST  = $(BIN)/python -m pytest
BIN     = $(VENV)/bin
READY   = $(VENV)/.trainfuse-ready
CXX_OK  = command -v $${CXX:-g++} >/dev/null || command -v clang++ >/dev/null

# The first interpreter on the path that is new enough, unless one is named.
NEW_ENOUGH = import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c "$(NEW_ENOUGH)" 2>/dev/null && echo $$p && break; done)

.PHONY: help demo test test-nightly gpu-test lint format accept bench check clean
.DEFAULT_GOAL := help

help: ## what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-13s %s\n", $$1, $$2}' Makefile

$(READY): pyproject.toml
	@$(or $(PYTHON),false) -c "$(NEW_ENOUGH)" 2>/dev/null || { \
		found=$$($(or $(PYTHON),python3) --version 2>/dev/null | head -n 1); \
		echo "trainfuse needs Python 3.11 or newer and found $${found:-none}: install one, or name it with make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@echo "Setting up $(VENV) (once; torch is a large download) ..."
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,lightning]'
	@touch $@

demo: $(READY) ## train a small GPT through trainfuse, and show what was fused (STEPS=n)
	@$(CXX_OK) || echo "No C++ compiler (g++ or clang++) was found: without a GPU the demo runs its plan on ATen." >&2
	@$(BIN)/python -m trainfuse demo $(if $(STEPS),--steps $(STEPS))

.PHONY: compiler
compiler:
	@$(CXX_OK) || { echo "The tests need a C++ compiler (g++ or clang++): install one, or name it in CXX." >&2; exit 1; }

test: compiler $(READY) ## the test suite (JOBS=n processes)
	$(PYTEST) -n $(JOBS) --dist worksteal -m "not nightly"

test-nightly: compiler $(READY) ## every test, the long ones too
	$(PYTEST) -n $(JOBS) --dist worksteal

gpu-test: $(READY) ## the tests that need a GPU
	@$(BIN)/python -c "import torch, sys; sys.exit(not torch.cuda.is_available())" || \
		{ echo "make gpu-test needs an NVIDIA GPU, and torch sees none." >&2; exit 1; }
	$(PYTEST) tests/gpu

lint: $(READY) ## ruff and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(READY) ## rewrite the sources as ruff likes them
	$(BIN)/ruff check --fix-only --exit-zero .
	$(BIN)/ruff format .

accept: $(READY) ## rewrite tests/golden/ from what the code makes now; review the diff as code
	$(PYTEST) --accept tests/codegen tests/fusion tests/autodiff tests/runtime

bench: $(READY) ## a benchmark suite, interleaved (SUITE=steps)
	$(BIN)/python -m trainfuse bench $(SUITE)

check: lint test ## what every commit passes

clean: ## remove the environment and what tools left
	rm -rf $(VENV) .pytest_cache .ruff_cache build dist *.egg-info
