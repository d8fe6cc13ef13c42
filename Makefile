# Everything runs from a virtual environment in .venv, made on first use. PYTHON names the interpreter it is made with.
PYTHON ?= python3
HOST ?= 127.0.0.1
PORT ?= 8000
TEST_WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
ATOM := $(BIN)/python -m atom.entrypoints.cli
PIP := $(BIN)/python -m pip --disable-pip-version-check
REQUIREMENTS := pyproject.toml constraints.txt
# A forward in a test is small: two test processes with a thread each finish sooner than one with two.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_WORKERS)

.DEFAULT_GOAL := help
.PHONY: help install demo serve test test-slow docs replay-report clean

help:
	@echo "make demo       install into .venv, then show what prefix caching saves"
	@echo "make serve      install, then serve the shipped model on $(HOST):$(PORT)"
	@echo "make test       install what tests need; check style; run the tests"
	@echo "make test-slow  run the tests that take minutes"
	@echo "make docs       write docs/configuration.md from the settings"
	@echo "make replay-report  write the tables of docs/eviction.md, which takes hours on every core;"
	@echo "            QUICK=1: part of them; CACHE=FILE: go on where a broken-off run was"
	@echo "make clean      remove .venv and everything that was built"

# An environment whose interpreter is gone, or that was never finished, is made anew.
ifeq ($(shell $(BIN)/python -c 'import pip; print(1)' 2>/dev/null),)
.PHONY: $(BIN)/python $(VENV)/.installed $(VENV)/.installed-test
endif

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "atom needs Python 3.10 or newer, and PYTHON=$(PYTHON) is not; try e.g. make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)

$(VENV)/.installed: $(REQUIREMENTS) | $(BIN)/python
	$(PIP) install -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) install -c constraints.txt -e ".[test]"
	@touch $@

install: $(VENV)/.installed

demo: $(VENV)/.installed
	@$(ATOM) demo

serve: $(VENV)/.installed
	@echo "Once it says where it listens, ask it from another terminal:"
	@echo
	@echo "  curl http://$(HOST):$(PORT)/v1/chat/completions -H 'Content-Type: application/json' \\"
	@echo "    -d '{\"messages\": [{\"role\": \"user\", \"content\": \"Write a function that adds two numbers.\"}], \"max_tokens\": 64}'"
	@echo
	@$(ATOM) serve --host $(HOST) --port $(PORT)

test: $(VENV)/.installed-test
	$(BIN)/python -m ruff check .
	$(BIN)/python -m black --check --quiet .
	$(PYTEST)

test-slow: $(VENV)/.installed-test
	$(PYTEST) -m slow

docs: $(VENV)/.installed
	$(BIN)/python scripts/make_config_docs.py

replay-report: $(VENV)/.installed
	$(BIN)/python scripts/replay_report.py $(if $(QUICK),--quick) $(if $(CACHE),--cache $(CACHE))

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
