# Each target makes .venv first where it is absent or older than pyproject.toml.
# `make VENV=/path/to/venv ...` uses (and installs into) another environment.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
JOBS ?= 2

.PHONY: install demo test test-layouts test-slurm test-torture lint bench doctor

install: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("Python >= 3.11 is needed, this is " + sys.version.split()[0] + "; set PYTHON=" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --editable '.[demo,dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/python -m pretrain.processes $(BIN)/python -m tools.demo $(DEMO)

test: $(STAMP)
	$(BIN)/python -m pytest -q -n $(JOBS)

test-layouts: $(STAMP)
	$(BIN)/python -m pytest -q -m layouts

test-slurm: $(STAMP)
	$(BIN)/python -m pytest -q -m slurm

test-torture: $(STAMP)
	$(BIN)/python -m pytest -q -n $(JOBS) -m torture

lint: $(STAMP)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy

bench: $(STAMP)
	$(BIN)/python -m tools.bench --set --out docs/benchmarks.md

doctor: $(STAMP)
	$(BIN)/python -m tools.doctor
