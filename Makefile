# Everything here sets up its own virtual environment; only Python and make are needed.
PYTHON ?= python3
VENV ?= .venv
MINUTES ?= 30
SEED ?= 1
BIN := $(VENV)/bin
# A file's tests stay together, for the clusters that they share, and the slow fault tests come first. Unit tests run in
# more processes than there are cores, as many of them wait.
PYTEST := $(BIN)/python -m pytest -q --dist loadfile --no-loadscope-reorder
# What only `make test-all` runs: second cases of a kind, pages of the docs, the browser, the wheel.
QUICK := -m "not full"
# Lint, types and tests beside each other.
TOGETHER := +$(MAKE) --no-print-directory -j3
STAMP := $(VENV)/.installed
# Some hundred processes import the same: what one has compiled is kept, whatever the environment says.
unexport PYTHONDONTWRITEBYTECODE

# uv looks for packages where pip is told to look.
UV_SETTINGS = UV_FIND_LINKS="$${PIP_FIND_LINKS:-$$($(BIN)/python -m pip config get global.find-links 2>/dev/null)}" \
	$(if $(PIP_INDEX_URL),UV_DEFAULT_INDEX="$(PIP_INDEX_URL)") UV_INDEX="$(PIP_EXTRA_INDEX_URL)"

.PHONY: help install check lint types unit integration faults quick every test test-all matrix soak api reference docs bench demo clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

# uv installs in seconds what pip takes minutes for.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt uv
	$(UV_SETTINGS) $(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt -e '.[dev]'
	@touch $@

install: $(STAMP)  ## create the virtual environment and install the project with its development extras

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

types: $(STAMP)
	$(BIN)/mypy

unit: $(STAMP)
	$(PYTEST) -n 4 tests/unit

integration: $(STAMP)
	$(PYTEST) -n 2 $(QUICK) tests/integration

faults: $(STAMP)
	$(PYTEST) -n 2 $(QUICK) tests/faults

quick: $(STAMP)
	$(PYTEST) -n 2 $(QUICK) tests

every: $(STAMP)
	$(PYTEST) -n 2 tests

check: $(STAMP)  ## lint, types and unit tests, in a minute and a half
	$(TOGETHER) lint types unit

test: $(STAMP)  ## what CI runs: check, one integration or fault test of each kind, thirty random faults
	$(TOGETHER) lint types quick

test-all: $(STAMP)  ## every test: second cases, docs, browser (needs /usr/bin/chromium), wheel
	$(TOGETHER) lint types every

matrix: $(STAMP)  ## other versions of Python, Ray, Prefect, torch and JAX; ONLY="NAME ..." for some; writes docs/compatibility.md
	PATH="$(CURDIR)/$(BIN):$$PATH" $(UV_SETTINGS) $(BIN)/python -m tests.matrix $(ONLY)

soak: $(STAMP)  ## random faults on random trainings; MINUTES=30 SEED=1, of which the trainings count on
	$(BIN)/python -m tests.soak --minutes $(MINUTES) --seed $(SEED)

api: $(STAMP)  ## write the snapshot of the public API anew, after a change of it that is meant
	$(BIN)/python -m tests.support.public_api

reference: $(STAMP)  ## write docs/reference/ from the code
	$(BIN)/python -m tests.support.reference

# The variable turns off a notice of the theme about its successor.
docs: $(STAMP)  ## build the site of docs/ into site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(STAMP)  ## overhead, recovery, warm starts, growth, goodput, checkpoints, reporting, loop and old runs, against raw Ray Train, torchrun and other S3 clients
	$(BIN)/python -m benchmarks.overhead
	$(BIN)/python -m benchmarks.recovery
	$(BIN)/python -m benchmarks.warm_starts
	$(BIN)/python -m benchmarks.growth
	$(BIN)/python -m benchmarks.goodput
	$(BIN)/python -m benchmarks.checkpoint
	$(BIN)/python -m benchmarks.reporting
	$(BIN)/python -m benchmarks.loop
	$(BIN)/python -m benchmarks.run_growth

demo: $(STAMP)  ## prepare data, train elastically, evaluate: the digits pipeline
	PREFECT_SERVER_ANALYTICS_ENABLED=false PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS=120 $(BIN)/python -m flows.digits

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .demo site
