# Every target sets up what it needs in .venv, and again only when the requirements change.
PYTHON ?= python3
# Extra flags for pip, for example an index that holds CPU-only wheels of torch.
PIP_FLAGS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check $(PIP_FLAGS)
REQUIREMENTS := pyproject.toml constraints.txt
RUN_READY := $(VENV)/.ready-run
TEST_READY := $(VENV)/.ready-test
DOCS_READY := $(VENV)/.ready-docs
OUT := out
# Runs at a time, each on its share of the cores.
JOBS ?= 2
PYTEST_FLAGS ?=
# How long the fuzzer runs, and its first seed; `last` goes on behind the last run.
FUZZ_SECONDS ?= 120
FUZZ_FROM ?= 0
# One process a core, one thread each; with PYTEST_WORKERS= the tests run in one process.
PYTEST_WORKERS ?= --numprocesses auto --maxprocesses 4 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help run example test test-slow fuzz lint types format figures paper-map docs clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|'

run: $(RUN_READY) ## train subset routing (quick preset), print it beside the paper, write the report
	$(BIN)/smat run subset-routing --preset quick --jobs $(JOBS) --out $(OUT)/experiments
	$(BIN)/smat report --out $(OUT)/experiments

example: $(RUN_READY) ## train a byte model on the sources here, or on TEXT=file, and let it write
	$(BIN)/python examples/byte_model.py $(TEXT)

test: lint types ## lint, types, doctests and tests, without the slow ones
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_WORKERS) $(PYTEST_FLAGS)

test-slow: $(TEST_READY) ## the tests marked slow
	$(BIN)/python -m pytest -m slow $(PYTEST_FLAGS) || [ $$? -eq 5 ]  # 5: no test is marked slow

fuzz: $(TEST_READY) ## random calls against the dense oracle, malformed ones, damaged files
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --seconds $(FUZZ_SECONDS) --from $(FUZZ_FROM)

lint: $(TEST_READY) ## ruff: rules and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(TEST_READY) ## mypy, strict for geometry, masks and ops
	$(BIN)/mypy

format: $(TEST_READY) ## let ruff fix and format what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

figures: $(RUN_READY) ## redraw the pictures that the documentation shows
	$(BIN)/smat mask --seq-len 128 --vc-dim 3 --boundary rebuilt --boundary window --out docs/masks.png

paper-map: ## write the line numbers of the paper's map, docs/paper.md, anew
	$(PYTHON) tools/paper_map.py

docs: $(DOCS_READY) ## build the documentation into site/, with every warning an error
	NO_MKDOCS_2_WARNING=1 PATH="$(BIN):$$PATH" $(BIN)/mkdocs build --strict

clean: ## remove the environment, the caches and what the commands wrote
	rm -rf $(VENV) $(OUT) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find smat tests -type d -name __pycache__ -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "smat needs Python 3.10 or newer; name one: make PYTHON=python3.11 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# A stamp is written last, so that an interrupted installation starts again.
$(RUN_READY): $(REQUIREMENTS) | $(BIN)/python
	$(PIP) --constraint constraints.txt --editable '.[cli,train]'
	@touch $@

$(TEST_READY): $(REQUIREMENTS) | $(BIN)/python
	$(PIP) --constraint constraints.txt --editable '.[dev]'
	@touch $@

$(DOCS_READY): $(REQUIREMENTS) | $(BIN)/python
	$(PIP) --constraint constraints.txt --editable '.[docs]'
	@touch $@
