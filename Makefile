# `make demo` and `make test` work on a fresh clone: they build .venv first, and again when the requirements change.
PYTHON ?= python3
WORKERS ?= 2
PIP_ARGS ?=
BIN := .venv/bin
STAMP := .venv/.stamp
PIP := $(BIN)/python -m pip install --quiet -c constraints.txt $(PIP_ARGS)

.DEFAULT_GOAL := help
.PHONY: help demo test lint bench docs

help: ## list what make can do
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|'

demo: $(STAMP) ## train on real data, print a table and draw one figure
	$(BIN)/primal demo

test: $(STAMP) ## run the whole test suite
	$(BIN)/python -m pytest -n $(WORKERS)

lint: $(STAMP) ## lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP) ## time attention against sequence length on this machine
	$(BIN)/primal bench attention

docs: $(STAMP) ## run the documents' code and check every link
	$(BIN)/python docs/check.py

# torch comes first and by its pinned version, so that nothing later asks for another build of it. Its GPU builds bring
# their own Triton; beside a CPU build the kernels are tested in Triton's interpreter.
$(STAMP): pyproject.toml constraints.txt $(wildcard requirements-oracles.txt)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) torch
	$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) triton==3.6.0
	$(PIP) -e '.[dev,ksvd,train,timeseries,report,language,hf,rl]'
	if test -f requirements-oracles.txt; then $(PIP) -r requirements-oracles.txt; fi
	touch $@
