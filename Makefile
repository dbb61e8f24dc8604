# `make demo` and `make test` work on a fresh clone: they build .venv first, and again when the requirements change.
PYTHON ?= python3
WORKERS ?= 2
PIP_ARGS ?=
BIN := .venv/bin
STAMP := .venv/.stamp
PIP := $(BIN)/python -m pip install --quiet $(PIP_ARGS)
EXTRAS := dev ksvd train timeseries report language hf onnx rl docs ray

.DEFAULT_GOAL := help
.PHONY: help demo test lint bench docs notebooks lock

help: ## list what make can do
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|'

demo: $(STAMP) ## train on real data and write a page about it
	$(BIN)/primal demo

test: $(STAMP) ## run the whole test suite
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

lint: $(STAMP) ## lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP) ## time attention against sequence length on this machine
	$(BIN)/primal bench attention

docs: $(STAMP) ## build the site and check links, code and tables of the documents
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build
	$(BIN)/python docs/check.py

notebooks: $(STAMP) ## run three examples and write them as notebooks
	$(BIN)/python docs/notebooks.py

# Everything but torch is installed by hash, from requirements-ci.txt. torch and Triton are pinned by version alone, for
# their builds differ between machines: GPU builds of torch bring their own Triton, and beside a CPU build the kernels are
# tested in Triton's interpreter. Needs Python 3.11 or newer.
$(STAMP): pyproject.toml constraints.txt requirements-ci.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) --require-hashes --no-deps -r requirements-ci.txt
	$(PIP) -c constraints.txt torch
	$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) triton==3.6.0
	$(PIP) --no-deps --no-build-isolation -e .
	touch $@

# The build backend and the browser's driver are in no extra of pyproject.toml. torch brings its NVIDIA packages itself.
lock: ## write requirements-ci.txt again (needs uv)
	printf 'hatchling\neditables\nplaywright\n' | uv pip compile --quiet --universal --generate-hashes \
		--python-version 3.11 --no-annotate --custom-compile-command 'make lock' \
		$(EXTRAS:%=--extra %) -c constraints.txt -o requirements-ci.txt pyproject.toml requirements-oracles.txt -
	sed -i -E '/^(torch|triton|cuda-[^=]*|nvidia-[^=]*)==/,/[^\\]$$/d' requirements-ci.txt
