# make demo: install and run the main job.  make test: all checks.  Nothing but Python 3.11+ and make is needed;
# tests and benchmarks of torch.compile want g++ besides.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BENCHMARKS := choices compressive_step cutoffs data inference plan ranks saving scaling search_step train_step
PIP := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off --quiet -c constraints.txt
FIND_CHROMIUM := { command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo test coverage test-browser lint format docs audit soak bench bench-quality clean

help:
	@echo "make demo     install into $(VENV) and run search, derive, retrain, evaluate on an embedded corpus"
	@echo "make test     install with the tools of development, then ruff, mypy, import-linter and pytest"
	@echo "make coverage the tests again, with the lines that they reach: at least 97 %"
	@echo "make test-browser  install Chromium (Debian or Ubuntu, as root) and test the report page in it"
	@echo "make install  install only"
	@echo "make soak     kill a search and a retraining 34 times, disturb them otherwise, and see that nothing is lost"
	@echo "make bench    install with the libraries to compare with, then each short benchmark (up to three minutes each)"
	@echo "make bench-quality PARNAS_DATA=DIR  seconds to 1.488 bits per byte on WikiText-2, about ten minutes; DIR holds wikitext-2"
	@echo "make docs     build the documentation into site/ and run what it shows; a broken link or snippet is an error"
	@echo "make audit    look for known weaknesses of the versions in constraints.txt"
	@echo "make lint | format | clean"
	@echo "PYTHON=python3.12 make ... takes another Python"

install: $(VENV)/installed

demo: $(VENV)/installed
	@$(BIN)/parnas demo

test: lint
	$(BIN)/python -m pytest -n auto --dist worksteal

# Tracing each line doubles the time of the tests, so that it is a run of its own.
coverage: $(VENV)/installed-dev
	$(BIN)/python -m pytest -n auto --dist worksteal --cov --cov-report=term:skip-covered --cov-fail-under=97

# The browser is the system's; playwright only drives it and downloads none.
test-browser: $(VENV)/installed-dev
	@$(FIND_CHROMIUM) || { command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; } || { echo "error: Chromium is missing. On \
	Debian and Ubuntu install it as root: apt-get install chromium; elsewhere by your system's means, so that 'chromium' \
	is found" >&2; exit 2; }
	@$(FIND_CHROMIUM) || { apt-get update && apt-get install -y chromium; }
	$(PIP) -e '.[browser]'
	$(BIN)/python -m pytest tests/figures/test_browser.py tests/figures/test_report*.py

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	$(BIN)/python -m pytest -q -n auto tests/meta/test_documented_commands.py
	@echo "built: site/index.html"

# pip-audit exits with 1 both for a finding and for no answer of the service; only a finding leaves a report. --strict:
# versions that the service does not know count as no answer.
audit: $(VENV)/pyvenv.cfg
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off --quiet pip-audit
	@rm -f $(VENV)/audit.json
	@$(BIN)/pip-audit -r constraints.txt --no-deps --disable-pip --strict --progress-spinner off -f json -o $(VENV)/audit.json; \
	found=$$?; [ -s $(VENV)/audit.json ] || { echo "error: the versions were not audited, since the service that knows of \
	weaknesses did not answer for all of them (see above); try again where it can be reached" >&2; exit 2; }; exit $$found

# The figures in benchmarks/results are of the full benchmarks: python benchmarks/NAME.py.
bench: $(VENV)/installed-bench
	@for name in $(BENCHMARKS); do $(BIN)/python benchmarks/$$name.py --short --out runs/benchmarks || exit; done

soak: $(VENV)/installed-dev
	$(BIN)/python tests/soak/soak.py --out runs/soak

bench-quality: $(VENV)/installed-bench
	$(BIN)/python benchmarks/time_to_quality.py --out runs/benchmarks

clean:
	rm -rf $(VENV) build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .coverage

$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo "error: $(PYTHON) is missing or \
	older than Python 3.11; install a newer one, or name it: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "error: $(PYTHON) cannot make virtual environments; \
	on Debian and Ubuntu run: apt-get install python3-venv" >&2; exit 2; }
	@echo "Making $(VENV). About 300 MB are downloaded now, most of it torch for the CPU (make test: about 150 MB more)."
	@echo "Where the package index has torch for CUDA only, it is 3 GB: the README shows how to get the CPU build alone."
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(VENV)/pyvenv.cfg pyproject.toml constraints.txt
	$(PIP) -e .
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(PIP) -e '.[dev,parity,bench,docs,export]'
	@touch $@

$(VENV)/installed-bench: $(VENV)/installed
	$(PIP) -e '.[bench]'
	@touch $@
