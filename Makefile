# Everything needed is set up on first use; Python 3.11 or newer and make are all that must be there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
unexport PYTHONDONTWRITEBYTECODE # tests start many processes, each of which would compile everything anew

.PHONY: help run test check format bench reproduction clean

help: ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $(READY)

run: $(READY) ## the first thing to try: train a model with SAFA on the Boston task
	$(BIN)/safa run boston

test: $(READY) ## all tests, with the programs that they need; the protocol package must be covered to the last branch
	@sh tests/programs.sh
	$(BIN)/pytest tests/protocol --cov=src/safa/protocol --cov-report=term-missing:skip-covered --cov-fail-under=100
	OMP_NUM_THREADS=1 $(BIN)/pytest tests --ignore=tests/protocol -m 'not quiet' -n 3 --dist loadgroup --durations=40 --durations-min=5
	$(BIN)/pytest tests --ignore=tests/protocol -m quiet

check: $(READY) ## linter, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY) ## put the code into the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY) ## whether something has become slower than benchmarks/baseline.json says, as ratios (two minutes)
	$(BIN)/python benchmarks/bench.py

REPRODUCTION := runs/reproduction
reproduction: $(READY) ## Tasks 1 and 3 of the paper (half an hour), then docs/reproduction.md of all that is in runs/reproduction
	$(BIN)/safa reproduce --task boston,kdd99 --worlds 40 --out $(REPRODUCTION)
	$(BIN)/safa reproduce --task mnist --what timing,lag --worlds 40 --out $(REPRODUCTION)
	mkdir -p docs/reproduction/tables && cp $(REPRODUCTION)/tables/*.csv docs/reproduction/tables/
	mkdir -p docs/reproduction/figures && cp $(REPRODUCTION)/figures/*.svg docs/reproduction/figures/
	sed 's#](figures/#](reproduction/figures/#' $(REPRODUCTION)/reproduction.md > docs/reproduction.md

clean: ## remove everything that make made
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
