# make train: train a small language model with four replicas. make test: run the tests. Both install first if needed.
PYTHON ?= python3
VENV ?= .venv
# a third of the tests' time is spent waiting for other processes, so 3 test processes suit a machine with 2 cores
TESTERS ?= 3
PYTHONS ?= 3.12 3.13
# without restarts, as pytest-xdist then waits for ever: it gives the new process files whose tests have all run
RESTARTS := --max-worker-restart 0
# tests start many processes, each of which would recompile the package without cached bytecode
unexport PYTHONDONTWRITEBYTECODE
BIN := $(VENV)/bin
TO_TRAIN := $(VENV)/.installed-to-train
STAMP := $(VENV)/.installed

.PHONY: setup train test test-browser coverage pythons check bench docs site wheel clean
.DEFAULT_GOAL := help

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

# without bytecode of all modules, which takes a minute; those that are imported get theirs then
$(TO_TRAIN): pyproject.toml setup.py constraints.txt src/diloco/algorithm/codec/_kernels.c
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt setuptools wheel torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt --no-build-isolation --editable '.[watch]'
	@touch $@

# the package itself is there already
$(STAMP): $(TO_TRAIN)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt 'diloco[dev]'
	@touch $@

setup: $(STAMP) ## create .venv and install the dependencies of tests, documentation and extras

train: $(TO_TRAIN) ## create .venv, install the package, and train the quick start: 4 replicas of Streaming DiLoCo on the text of the standard library
	$(BIN)/diloco train $(ARGS)

test: $(STAMP) ## run the tests in three processes (TESTERS=1: in one)
	$(BIN)/python -m pytest --numprocesses $(TESTERS) --dist loadfile --no-loadscope-reorder $(RESTARTS) $(ARGS)

coverage: $(STAMP) ## run the tests, and fail if they cover less of the package than pyproject.toml asks for (before a release; takes half as long again)
	$(MAKE) test ARGS="--cov --cov-report= $(ARGS)"

pythons: ## test the core under other versions of Python (PYTHONS="3.12 3.13"), where this machine has them
	@for version in $(PYTHONS); do .ci/python $$version || exit 1; done

test-browser: $(STAMP) ## install a browser if there is none, and test the page of diloco watch in it
	command -v chromium || command -v chromium-browser || command -v google-chrome || \
	  { apt-get update && apt-get install --yes --no-install-recommends chromium fonts-dejavu-core; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-build-isolation --editable '.[browser]'
	$(BIN)/python -m pytest tests/browser $(ARGS)

check: $(STAMP) ## run the linter, the formatter and the type checker
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP) ## run the benchmarks that take minutes (parity takes longer: see benchmarks/parity)
	$(BIN)/python -m benchmarks.codecs
	$(BIN)/python -m benchmarks.overhead

docs: $(STAMP) ## run every example in the documentation
	$(BIN)/python -m pytest README.md docs

site: $(STAMP) ## build the documentation site in build/site; broken links are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

wheel: $(STAMP) ## build the source distribution, and from it a wheel, which is tested in a new virtual environment
	rm -rf build/wheel
	$(BIN)/python setup.py --quiet sdist --dist-dir build/wheel
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/wheel build/wheel/*.tar.gz
	$(PYTHON) -m venv build/wheel/venv
	build/wheel/venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt build/wheel/*.whl
	cd build/wheel && venv/bin/diloco train --steps 20 --data-parallel-steps 0 --evaluation.every-steps 0 --out trial
	cd build/wheel && venv/bin/diloco evaluate trial --sequences 8
	@ls build/wheel/*.tar.gz build/wheel/*.whl

clean: ## remove .venv and all build output
	rm -rf $(VENV) build src/*.egg-info
