# make train: train a small language model with four replicas. make test: run the tests. Both install first if needed.
PYTHON ?= python3
VENV ?= .venv
TESTERS ?= 2
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup train test check bench docs site clean
.DEFAULT_GOAL := help

help:
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 10

$(STAMP): pyproject.toml setup.py constraints.txt src/diloco/algorithm/codec/_kernels.c
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt setuptools wheel torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	@touch $@

setup: $(STAMP) ## make .venv and install

train: $(STAMP) ## train the quick start: 4 replicas of Streaming DiLoCo on the standard library's text
	$(BIN)/diloco train $(ARGS)

test: $(STAMP) ## run the tests, in two processes (TESTERS=1: in one)
	$(BIN)/python -m pytest --numprocesses $(TESTERS) --dist loadfile $(ARGS)

check: $(STAMP) ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP) ## the benchmarks that take minutes (parity takes longer: see benchmarks/parity)
	$(BIN)/python -m benchmarks.codecs
	$(BIN)/python -m benchmarks.overhead

docs: $(STAMP) ## run every example in the documentation
	$(BIN)/python -m pytest README.md docs

site: $(STAMP) ## the documentation as a site, in build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

clean: ## remove what setup made
	rm -rf $(VENV) build src/*.egg-info
