# make setup | train | test | lint | test-newest; each builds what it needs.

PYTHON ?= python3
BIN := .venv/bin
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
# setuptools warns of every editable installation at length
PIP := PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --disable-pip-version-check
TESTS ?=

.PHONY: setup train test lint docs test-newest clean

train: .venv/.ready
	$(BIN)/python scripts/train.py

test: .venv/.tests
	$(BIN)/python -m pytest -n 2 $(TESTS)

lint: .venv/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

setup: .venv/.tests

# All that runs, trains and tests; anew when the requirements change.
.venv/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"jremat needs Python 3.11 or newer, $(PYTHON) is {v[0]}.{v[1]}; name another: make PYTHON=python3.12 $(MAKECMDGOALS)")'
	rm -rf .venv
	$(PYTHON) -m venv .venv
	$(PIP) --upgrade pip
	$(PIP) --constraint constraints.txt --editable '.[dev]'
	touch $@

# And what the tests use besides: PyTorch, and the compilers for GPUs that aren't here (no CUDA library).
.venv/.tests: .venv/.ready
	$(PIP) --constraint constraints.txt --editable '.[dev,deviceless,torch]'
	touch $@

# The suite on the newest Python that is found (pyenv's and the path's), with the newest jax, without PyTorch.
test-newest:
	@newest=$$(ls ~/.pyenv/versions/*/bin/python3.*[0-9] $$(compgen -c python3. | grep -E '^python3\.[0-9]+$$' | xargs -r which) 2>/dev/null \
	  | awk -F'python3[.]' '{ print $$NF, $$0 }' | sort -rn | head -n 1 | cut -d' ' -f2); \
	echo "test-newest: $$newest"; \
	test -x .venv-newest/bin/python || $$newest -m venv .venv-newest; \
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip; \
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager --editable '.[dev,deviceless]'; \
	.venv-newest/bin/python -m pytest -n 2 $(TESTS)

clean:
	rm -rf .venv .venv-newest build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
