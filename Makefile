# Every target sets itself up: a fresh clone needs only python3 (3.11 or newer) with venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help demo test lint typecheck layers pytest torchtests matrix bench format clean

help: ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(VENV)/.ready ## the main job on a fresh machine
	@$(BIN)/mgwfbp demo

test: lint typecheck layers pytest ## everything CI runs

lint: $(VENV)/.ready ## ruff: format and lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

typecheck: $(VENV)/.ready ## mypy --strict
	$(BIN)/mypy

layers: $(VENV)/.ready ## import-linter: the layers of docs/design.md
	$(BIN)/lint-imports

# Two processes share the files: most tests wait, or use one core.
pytest: $(VENV)/.ready ## tests and doctests, warnings are errors
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

torchtests: $(VENV)/.ready ## torch's own tests of DDP with our class (10 minutes, never part of test)
	$(BIN)/python -m tests.runtime.torchs_own docs/torchs-own-tests.md

matrix: $(VENV)/.ready ## the runtime's tests with every torch since 2.3, or VERSIONS="2.3 2.4": docs/torch-versions.md
	$(BIN)/nox -s $(if $(VERSIONS),$(VERSIONS:%="runtime(%)"),runtime)

bench: $(VENV)/.ready ## benchmarks (never part of test)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest benchmarks --benchmark-enable --benchmark-only --benchmark-columns=min,median,iqr,rounds

format: $(VENV)/.ready ## rewrite the code in our format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .benchmarks .nox .matrix
