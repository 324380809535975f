# make demo   trains four LeNets on M0, M20, M40 and M60 and shows how each does on everybody's digits
# make test   runs everything not marked slow; make test-all runs everything
# Both set up .venv by themselves. PYTHON chooses the interpreter (3.11 or newer), WORKERS how many files of tests run
# at a time.

PYTHON ?= python3
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-all lint bench soak clean

demo: $(VENV)/.core
	$(BIN)/fedh2l run --rounds 500

test: $(VENV)/.test
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile -m "not slow"

test-all: $(VENV)/.test
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/sizes

bench: $(VENV)/.core
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/cores.py
	$(BIN)/python benchmarks/gpu.py
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[peer]'
	$(BIN)/python benchmarks/wire.py
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[ray]'
	$(BIN)/python benchmarks/cluster.py
	$(BIN)/python benchmarks/scale.py
	$(BIN)/python benchmarks/flower.py

soak: $(VENV)/.test
	$(BIN)/python tests/soak.py

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "fedh2l needs Python 3.11 or newer; name one with: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.core: pyproject.toml | $(BIN)/python
	@echo "Installing into $(VENV); PyTorch may take a while ..."
	$(BIN)/pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(VENV)/.test: pyproject.toml | $(BIN)/python
	@echo "Installing into $(VENV); PyTorch may take a while ..."
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[test]'
	@touch $@ $(VENV)/.core

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
