# make setup | train | test | lint | test-oldest | raise-jax; each builds what it needs.

# The newest Python found has the newest JAX; another one: make PYTHON=python3.12 VENV=.venv-3.12 test
PYTHON := $(or $(PYTHON),$(shell .ci/python))
VENV ?= .venv
OLDEST := 3.11
BIN := $(VENV)/bin
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
# setuptools warns of every editable installation at length
PIP := PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --disable-pip-version-check
TESTS ?=

VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
# The versions that the suite passed with; none for a Python that it never ran on.
PINNED ?= $(wildcard constraints/$(VERSION).txt)
# PyTorch is 0.2 GB for one Python and several for the others: it comes where it is pinned.
TORCH := $(shell cat constraints/$(VERSION).txt 2> /dev/null | grep '^torch==')

.PHONY: setup train test lint test-oldest raise-jax clean

train: $(VENV)/.ready-$(VERSION)
	$(BIN)/python scripts/train.py

test: $(VENV)/.tests-$(VERSION)
	$(BIN)/python -m pytest -n 2 --dist worksteal $(TESTS)

lint: $(VENV)/.ready-$(VERSION)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

setup: $(VENV)/.tests-$(VERSION)

# All that runs, trains and plans, the compilers for GPUs that aren't here among it (no CUDA library); anew when the
# requirements change.
$(VENV)/.ready-$(VERSION): pyproject.toml $(PINNED) jremat/quiet_cuda.py
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"jremat needs Python 3.11 or newer, $(PYTHON) is {v[0]}.{v[1]}; name another: make PYTHON=python3.12 $(MAKECMDGOALS)")'
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(addprefix --constraint ,$(PINNED)) --editable '.[dev,deviceless]'
	$(MAKE) --no-print-directory VENV=$(VENV) $(VENV)/.quiet
	touch $@

# Without an NVIDIA driver JAX's CUDA plugin complains at every start; in this environment it doesn't, with or without
# jremat: a copy of the file, so that a start of Python imports none of the checkout.
$(VENV)/.quiet: jremat/quiet_cuda.py
	site=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	cp jremat/quiet_cuda.py "$$site/_jremat_quiet_cuda.py"; \
	echo 'import _jremat_quiet_cuda' > "$$site/_jremat_quiet_cuda.pth"
	touch $@

# And what the tests use besides: PyTorch.
$(VENV)/.tests-$(VERSION): $(VENV)/.ready-$(VERSION)
	$(if $(TORCH),$(PIP) $(addprefix --constraint ,$(PINNED)) $(TORCH))
	touch $@

# What leans on JAX's insides, and PyTorch's side, with the oldest Python and its JAX.
test-oldest:
	@python=$$(.ci/python $(OLDEST)) || { echo "test-oldest: no Python $(OLDEST) here"; exit 0; }; \
	test "$(VERSION)" != $(OLDEST) || { echo "test-oldest: $(OLDEST) is the newest here"; exit 0; }; \
	$(MAKE) test PYTHON="$$python" VENV=.venv-$(OLDEST) TESTS="$(or $(TESTS),$(INSIDES))"

INSIDES := tests/graph tests/transform tests/plan tests/torch jremat/graph jremat/transform jremat/planner

# Past the upper bound of pyproject.toml: the suite with the newest JAX; where it passes, bound and pins are raised.
raise-jax:
	PYTHON=$(PYTHON) .ci/raise-jax $(TESTS)

clean:
	rm -rf .venv .venv-* build *.egg-info .jax_cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
