# Everything runs in .venv, which the first target that needs it creates.
PYTHON ?= python3
CONFIG ?= ray_jobs/configs/quickstart.yaml
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PARITY := $(VENV)/.installed-parity
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help run test test-all bench lint fmt clean
.DELETE_ON_ERROR:

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12
	@echo
	@echo "ARGS=... is passed on, e.g. make run ARGS='--set seed=1', make test ARGS='-k solver'"

run: $(INSTALLED) ## evaluate and calibrate a small real model: the quickstart (CONFIG=... for another run file)
	@$(BIN)/caltune run --config $(CONFIG) $(ARGS)

test: $(INSTALLED) ## the tests that need neither a GPU, a cluster nor much time
	@$(BIN)/python -m pytest $(ARGS)

test-all: $(INSTALLED) $(PARITY) ## the slow tests too
	@$(BIN)/python -m pytest -m "not gpu and not cluster" $(ARGS)

bench: $(INSTALLED) ## what a step costs
	@for script in tests/benchmarks/*.py; do $(BIN)/python $$script $(ARGS) || exit 1; done

lint: $(INSTALLED) ## style, types, and the direction of imports
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

fmt: $(INSTALLED) ## put the code into shape
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean: ## remove caches and build results; .venv and outputs stay
	@rm -rf build dist .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis *.egg-info
	@find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# setuptools, wheel and ninja come first because DeepSpeed is built from source, and torch before it because its
# set-up imports torch; its operators are compiled when first used, not here.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "caltune needs Python 3.11 or newer; '$(PYTHON)' is not. Name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(BIN)/python -c '' 2>/dev/null || { \
	  echo "creating $(VENV) with $$($(PYTHON) --version)" >&2; rm -rf $(VENV); $(PYTHON) -m venv $(VENV); }
	@echo "installing into $(VENV), about three minutes the first time" >&2
	@echo "  1/4 build tools" >&2
	@$(PIP) setuptools wheel ninja packaging
	@echo "  2/4 torch" >&2
	@$(PIP) torch
	@echo "  3/4 DeepSpeed" >&2
	@DS_BUILD_OPS=0 $(PIP) --no-build-isolation deepspeed
	@echo "  4/4 caltune and everything else" >&2
	@$(PIP) --no-build-isolation -e '.[dev,kubeflow]'
	@touch $@

$(PARITY): $(INSTALLED)
	@echo "installing lm-evaluation-harness, which the parity tests compare with" >&2
	@$(PIP) --no-build-isolation -e '.[parity]'
	@touch $@
