# make setup | train | test | lint | test-newest; each builds what it needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
# setuptools warns of every editable installation at length
PIP := PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --disable-pip-version-check
TESTS ?=

.PHONY: setup train test lint docs test-newest clean

train: $(VENV)/.quiet
	$(BIN)/python scripts/train.py

test: $(VENV)/.tests
	$(BIN)/python -m pytest -n 2 $(TESTS)

lint: $(VENV)/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

setup: $(VENV)/.tests

# All that runs, trains and plans, the compilers for GPUs that aren't here among it (no CUDA library); anew when the
# requirements change.
$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"jremat needs Python 3.11 or newer, $(PYTHON) is {v[0]}.{v[1]}; name another: make PYTHON=python3.12 $(MAKECMDGOALS)")'
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) --constraint constraints.txt --editable '.[dev,deviceless]'
	touch $@

# Without an NVIDIA driver JAX's CUDA plugin complains at every start; in this environment it doesn't, with or without
# jremat. A copy, so that a start of Python imports none of the checkout.
$(VENV)/.quiet: $(VENV)/.ready jremat/quiet_cuda.py
	site=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	cp jremat/quiet_cuda.py "$$site/_jremat_quiet_cuda.py"; \
	echo 'import _jremat_quiet_cuda' > "$$site/_jremat_quiet_cuda.pth"
	touch $@

# And what the tests use besides: PyTorch.
$(VENV)/.tests: $(VENV)/.quiet
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
	rm -rf $(VENV) .venv-newest build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
