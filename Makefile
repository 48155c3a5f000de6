# make demo: install and run the main job.  make test: all checks.  Nothing but Python 3.11+ and make is needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS := dev,parity
INSTALLED := $(VENV)/.installed

.PHONY: demo test lint format bench install clean
.DEFAULT_GOAL := help

help:
	@echo "make demo     install into $(VENV) and run search, derive, retrain, evaluate on an embedded corpus"
	@echo "make test     ruff, mypy, import-linter and pytest"
	@echo "make install  only make $(VENV) and install"
	@echo "make lint | format | bench | clean"
	@echo "PYTHON=python3.12 make ... takes another Python"

install: $(INSTALLED)

$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "error: $(PYTHON) is missing or older than 3.11; install Python 3.11 or newer, or run: make PYTHON=/path/to/python3.11 ..." >&2; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "error: $(PYTHON) has no venv module; on Debian and Ubuntu run: apt-get install python3-venv" >&2; exit 2; }
	@echo "Making $(VENV). About 350 MB will be downloaded, 200 MB of it torch for the CPU;"
	@echo "where the index at hand has only torch for CUDA, 3 GB: the README shows how to get the CPU build alone."
	$(PYTHON) -m venv $(VENV)

$(INSTALLED): $(VENV)/pyvenv.cfg pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $(INSTALLED)

demo: $(INSTALLED)
	@$(BIN)/parnas demo

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: lint
	$(BIN)/python -m pytest -n auto --cov --cov-report=term:skip-covered

bench: $(INSTALLED)
	$(BIN)/python benchmarks/cutoffs.py

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .coverage
