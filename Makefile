# make train: train a small language model with four replicas. make test: run the tests. Both install first if needed.
PYTHON ?= python3
VENV ?= .venv
# a third of the tests' time is waiting for other processes: one tester more than a small machine has cores
TESTERS ?= 3
# tests start many processes, each of which would compile the package anew
unexport PYTHONDONTWRITEBYTECODE
BIN := $(VENV)/bin
TO_TRAIN := $(VENV)/.installed-to-train
STAMP := $(VENV)/.installed

.PHONY: setup train test test-browser check bench docs site wheel clean
.DEFAULT_GOAL := help

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

$(TO_TRAIN): pyproject.toml setup.py constraints.txt src/diloco/algorithm/codec/_kernels.c
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt setuptools wheel torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-build-isolation --editable '.[watch]'
	@touch $@

$(STAMP): $(TO_TRAIN)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	@touch $@

setup: $(STAMP) ## make .venv and install all that tests, documentation and extras need

train: $(TO_TRAIN) ## make .venv, install what training needs, and train the quick start: 4 replicas of Streaming DiLoCo on the standard library's text
	$(BIN)/diloco train $(ARGS)

test: $(STAMP) ## run the tests, in three processes (TESTERS=1: in one)
	$(BIN)/python -m pytest --numprocesses $(TESTERS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-browser: $(STAMP) ## install a browser if need be, test the page of diloco watch in it, and make the pictures of docs/watch.md
	command -v chromium || command -v chromium-browser || command -v google-chrome || \
	  { apt-get update && apt-get install --yes --no-install-recommends chromium fonts-dejavu-core; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-build-isolation --editable '.[browser]'
	DILOCO_PICTURES=docs/pictures $(BIN)/python -m pytest tests/browser $(ARGS)

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
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

wheel: $(STAMP) ## build a wheel, and try it in an environment of its own
	rm -rf build/wheel
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/wheel .
	$(PYTHON) -m venv build/wheel/venv
	build/wheel/venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt build/wheel/*.whl
	cd build/wheel && venv/bin/diloco train --steps 20 --data-parallel-steps 0 --evaluation.every-steps 0 --out trial
	cd build/wheel && venv/bin/diloco evaluate trial --sequences 8
	@ls build/wheel/*.whl

clean: ## remove what setup made
	rm -rf $(VENV) build src/*.egg-info
