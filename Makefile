# Two commands do everything on a fresh machine: `make run` and `make test`. Each makes .venv if there is none.
PYTHON ?= python3
BIN := .venv/bin
# Small torch operations run ten times slower when several threads share two cores.
export OMP_NUM_THREADS ?= 1

.PHONY: help run test chaos bench check format clean

help:  ## what each target does
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/ -/'

run: .venv/.run  ## install, then run the main job: sweep launch specs/capacity.yaml
	$(BIN)/sweep launch specs/capacity.yaml

test: .venv/.test check  ## install, then lint, type-check and run the test suite
	$(BIN)/python -m pytest -n 2

chaos: .venv/.test  ## five sweeps of 24 trials, each with ten SIGKILLs of workers, drivers and nodes, against an undisturbed one
	$(BIN)/python tests/chaos.py --rounds 5 --kills 10

bench: .venv/.run  ## times the kernels on this machine's CUDA card: sweep bench kernels
	$(BIN)/sweep bench kernels

check: .venv/.test  ## lint, types and layers only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/.test  ## rewrite the code in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the virtual environment and every cache (results stay)
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "memsweep needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1): make PYTHON=/path/to/python3.11 ..."; exit 1; }
	$(PYTHON) -m venv .venv

.venv/.run: pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/python -m pip install -c constraints.txt -e .
	@touch $@

.venv/.test: pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/python -m pip install -c constraints.txt -e '.[test]'
	@touch $@ .venv/.run
