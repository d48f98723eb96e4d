# Everything a person or CI runs here; `make` alone lists it. Needs Python 3.11 or newer, a JDK 17 or newer for Spark, and
# with it Maven for the tests on real brokers.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# A virtual environment that happens to be active must not receive this project's packages.
unexport VIRTUAL_ENV
unexport PYTHONPATH
# Tests start hundreds of Pythons, and each would compile Tidewal, and each process of pytest all of the tests.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
UV_VERSION := 0.13.8
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.tidewal-setup
UV := $(BIN)/python -m uv
RIGHT_PYTHON = $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	echo "Python 3.11 or newer is needed; $(PYTHON) is $$($(PYTHON) --version 2>&1 || true): make PYTHON=/path/to/python3.11" >&2; exit 2; }

.PHONY: help setup demo quick test test-all torture check format bench docs docs-site dashboards dist image lock

help: ## Show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 18

setup: $(STAMP) ## Create .venv with everything locked, and fetch or build what tests need: brokers, promtool, wheels (done once)
	@$(BIN)/python -m tests.brokers
	@$(BIN)/python -m tests.promtool
	@$(BIN)/python -m tests.wheels

$(STAMP): requirements.lock pyproject.toml Makefile
	@test -x $(BIN)/python || { $(RIGHT_PYTHON); $(PYTHON) -m venv $(VENV); }
	@$(BIN)/python -m uv --version 2>/dev/null | grep -qF "uv $(UV_VERSION)" \
		|| $(BIN)/python -m pip install --quiet "uv==$(UV_VERSION)"
	@# Compiled once: where PYTHONDONTWRITEBYTECODE is set, each Python that Spark starts would compile pandas and pyarrow.
	$(UV) pip install --quiet --compile-bytecode --python $(BIN)/python --require-hashes -r requirements.lock
	@rm -rf tidewal.egg-info # of an earlier build: its entry points would be found first
	$(UV) pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation -e .
	@touch $@

demo: $(STAMP) ## Run the demo; options go into ARGS, as in: make demo ARGS="--help"
	@$(BIN)/python -m examples.flights $(ARGS)

# Where a process of pytest dies the run ends: with another in its place it may wait for ever for what the first had.
PYTEST := $(BIN)/python -m pytest --dist loadgroup --no-loadscope-reorder --max-worker-restart 0

# Three processes on two cores: for a third of the time tests wait for brokers and disks.
quick: $(STAMP) ## Run the tests that need neither broker nor Spark and take seconds; options go into ARGS
	@$(PYTEST) --numprocesses 3 -m "not slow and not broker and not spark and not long and not kills" $(ARGS)

test: setup ## Run each feature's tests, on each log and with Spark; options go into ARGS
	@$(PYTEST) --numprocesses 3 -m "not long and not kills" $(ARGS)

# The long ones beside those of `make test`, not behind them: tests are collected, and brokers and Spark started, once.
# The kill series one by one: several nodes, a broker and Spark in each leave a small machine no time for a second one.
test-all: setup ## Run the rest, too: repetitions, every log for everything, and the kill series
	@$(PYTEST) --numprocesses 3 -m "not kills" $(ARGS)
	@$(BIN)/python -m pytest -m kills $(ARGS)

torture: setup ## Clients, groups and Spark under faults for a while: make torture ARGS="--minutes 30 --log kafka"
	@$(BIN)/python -m tests.torture $(ARGS)

check: $(STAMP) ## Check format, lint, types, the direction of imports, and the calls in tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python -m tests.calls

format: $(STAMP) ## Format the code and fix what the linter can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup ## Run one benchmark of benchmarks/, as in: make bench NAME=proxy ARGS="--seconds 5"
	@test -n "$(NAME)" || { echo "make bench NAME=...; there are:"; find benchmarks -mindepth 1 -maxdepth 1 ! -name '_*' ! -name report.py ! -name '*.md' -exec basename -s .py {} ';' | sort; exit 2; }
	@$(BIN)/python -m benchmarks.$(NAME) $(ARGS)

docs: $(STAMP) ## Write the reference pages of docs/ from the commands and the tables of settings and metrics
	@$(BIN)/python docs/reference.py

docs-site: $(STAMP) ## Build the documentation as a site, build/site/index.html; any warning ends the build
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dashboards: $(STAMP) ## Write the dashboard and alert rules of compose/ from the table of metrics
	@$(BIN)/python compose/dashboards.py

dist: $(STAMP) ## Build wheel and sdist into dist/, as a release does: from what git knows of the tree
	@rm -rf dist
	@$(BIN)/python -m tests.packages dist
	$(BIN)/python -m twine check --strict dist/*

image: dist ## Build the container image `tidewal`; needs Docker
	docker build --tag tidewal .

lock: ## Choose the versions anew and write requirements.lock
	@test -x $(BIN)/python || { $(RIGHT_PYTHON); $(PYTHON) -m venv $(VENV); }
	@$(BIN)/python -m uv --version >/dev/null 2>&1 || $(BIN)/python -m pip install --quiet "uv==$(UV_VERSION)"
	$(UV) pip compile pyproject.toml --quiet --universal --python-version 3.11 --extra all --group dev --group demo --group docs --group examples --group peers \
		--generate-hashes --no-emit-index-url --no-emit-find-links --custom-compile-command "make lock" \
		--upgrade --output-file requirements.lock
