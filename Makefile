# Every target sets itself up: a fresh clone needs only python3 (3.11 or newer) with venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help demo test lint typecheck layers pytest docs wheel torchtests matrix bench format clean

help: ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(VENV)/.ready ## the main job on a fresh machine
	@$(BIN)/mgwfbp demo

test: lint typecheck layers docs wheel pytest ## everything CI runs

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

docs: $(VENV)/.ready ## the documentation site, build/docs/index.html; warnings are errors
	OMP_NUM_THREADS=1 $(BIN)/sphinx-build -W --keep-going -q -c docs -d build/doctrees . build/docs
	@! grep -rlE '<(script|link|img|iframe)[^>]+(src|href)="(https?:)?//' build/docs --include='*.html' || { echo 'these pages fetch something when they are opened'; exit 1; }

wheel: $(VENV)/.ready ## the package in build/wheel: built, installed into an empty environment and tried there
	@mkdir -p build
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m build --outdir build/wheel . >build/wheel.log 2>&1 || { cat build/wheel.log; exit 1; }
	$(BIN)/python -m tests.try_wheel build/wheel

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
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .benchmarks .nox .matrix
