# Everything runs from .venv, which is made from nothing but Python 3.11 or newer.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
INSTALLED := .venv/.installed

# Images that set it make every process that a test or the demo starts compile all of it again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo dev test lint types imports unit soak bench drill format clean

help:
	@echo "make demo    one clip from the request to the signed callback, then everything stops"
	@echo "make dev     Temporal, API and workers on this machine; Ctrl-C stops them"
	@echo "make test    lint, types, import rules and all tests"
	@echo "make soak    the repeated tests with their full counts"
	@echo "make bench   the figures of docs/performance.md"
	@echo "make drill   every symptom of the runbook, caused and mended on processes of its own"
	@echo "make format  format and fix"
	@echo "make clean   remove what the other targets made, .venv and .reelgate included"

# Made again when the dependencies change.
$(INSTALLED): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv"
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check -e '.[gpu,otel,dev]'
	@touch $@

demo: $(INSTALLED)
	@$(BIN)/reelgate demo

dev: $(INSTALLED)
	@$(BIN)/reelgate dev

# The types beside the tests, which wait a good deal.
test: lint imports
	@$(MAKE) --no-print-directory --jobs=2 types unit

lint: $(INSTALLED)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(INSTALLED)
	@$(BIN)/mypy

imports: $(INSTALLED)
	@$(BIN)/lint-imports

# Four processes, a file at a time, in the order of tests/conftest.py: each has servers and workers of its own.
# Real processes share two cores with each other here: what misses a wait is run again, and reported as a rerun.
unit: $(INSTALLED)
	@$(BIN)/pytest -n 4 --dist loadfile --no-loadscope-reorder --reruns 1 --reruns-delay 2 --rerun-show-tracebacks

soak: $(INSTALLED)
	@REELGATE_SOAK=1 $(BIN)/pytest -m soak --timeout=3600

bench: $(INSTALLED)
	@$(BIN)/python -m tests.benchmarks.performance

drill: $(INSTALLED)
	@$(BIN)/python -m tests.drill

format: $(INSTALLED)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:
	rm -rf .venv .reelgate reelgate-demo reelgate.egg-info build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
