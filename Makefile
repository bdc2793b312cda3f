# Everything a person does with this repository. "make" alone prints the list.
#
# The environment is .venv, pinned by constraints.txt. It is set up by the first target that needs
# it and not again until what it was made from changes.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.SILENT:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# The stamp's name is a digest of what the environment was made from: a changed pin, another
# interpreter or a moved clone (an editable install points at its folder) asks for a new install.
SETUP_FILES := setup.py pyproject.toml constraints.txt
SETUP_KEY := $(shell { echo "$(CURDIR)"; command -v "$(PYTHON)"; cat $(SETUP_FILES); } | cksum | cut -d' ' -f1)
STAMP := $(VENV)/.installed-$(SETUP_KEY)

# One thread a process: the tests and the ranks already fill the cores.
test test-slow test-gpu: export OMP_NUM_THREADS := 1

# What these test has to hold without a GPU, also where there is one.
test test-numeric test-slow: export CUDA_VISIBLE_DEVICES :=

# The rounding of another processor and of more threads; CONTRIBUTING.md has more combinations.
test-numeric: export ATEN_CPU_CAPABILITY := default
test-numeric: export OMP_NUM_THREADS := 2
NUMERIC_TESTS := $(addprefix tests/unit/,mixture model embedding methods/test_swarm_stacked_gpt.py \
  $(addprefix training/test_training_,step.py hook.py boundaries.py gradient_rows.py validation.py))

.PHONY: help setup quickstart test test-numeric test-slow test-gpu measure-gpu lint format docs doctor clean

help:
	echo "make quickstart   the whole pipeline on real text, in minutes on 2 cores"
	echo "make test         every test that needs no GPU"
	echo "make test-numeric the numeric tests as another processor rounds, with two threads"
	echo "make test-slow    the tests left out of 'make test' for their length"
	echo "make test-gpu     the tests that need a CUDA device"
	echo "make measure-gpu  the GPU tests and benchmarks: 45 minutes, resumable; commits results"
	echo "make lint         ruff, mypy and the import rules"
	echo "make format       let ruff format and mend the sources"
	echo "make docs         the documentation, into site/index.html"
	echo "make doctor       what acceleration is active here, and what is lost without the rest"
	echo "make setup        only set up .venv (the others do it by themselves)"
	echo "make clean        remove .venv, caches and build leftovers (runs/ stays)"
	echo
	echo "PYTHON=python3.12 make ...   uses another interpreter (3.11 or newer) for .venv"

setup: $(STAMP)

quickstart: $(STAMP)
	PATH="$(CURDIR)/$(BIN):$$PATH" bash examples/quickstart.sh

# Unit tests share the cores; the others launch ranks of their own and go one at a time. Both parts
# run whatever the first says, so that one failure does not hide another.
test: $(STAMP)
	status=0
	$(BIN)/python -m pytest tests/unit -n 2 || status=1
	$(BIN)/python -m pytest tests --ignore tests/unit --ignore tests/gpu || status=1
	exit $$status

test-numeric: $(STAMP)
	$(BIN)/python -m pytest $(NUMERIC_TESTS) -n 2

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow tests

test-gpu: $(STAMP)
	if ! $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
	  echo "make test-gpu: torch sees no CUDA device here, so no GPU test was run." >&2
	  exit 1
	fi
	$(BIN)/python -m pytest -m gpu tests/gpu

# Finished steps are skipped when it is started again: MEASURE_GPU="--seconds 570" makes pieces of
# less than 10 minutes; benchmarks/measure_gpu.py exits with 75 while steps are left.
measure-gpu: $(STAMP)
	$(BIN)/python benchmarks/measure_gpu.py $(MEASURE_GPU)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# A link that leads nowhere, or a page that nothing leads to, ends the build. Not --quiet: it would
# also keep warnings from being counted.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	echo "site/index.html is the first page."

doctor: $(STAMP)
	$(BIN)/python tools/doctor.py

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -rf .import_linter_cache site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch goes first, so that its pinned build is there before anything that could pull another.
# Triton is named because torch's CPU build does not bring it. An environment without a stamp is a
# half-done one and is made anew; so is one of another interpreter or of a clone that was moved.
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off \
  --constraint constraints.txt

$(STAMP):
	if ! command -v "$(PYTHON)" > /dev/null; then
	  echo "make: there is no $(PYTHON): apt-get install python3 python3-venv, or PYTHON=..." >&2
	  exit 1
	fi
	if ! "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
	  echo "make: $(PYTHON) is not Python 3.11 or newer: give one that is by PYTHON=..." >&2
	  exit 1
	fi
	if ! "$(PYTHON)" -c 'import ensurepip, venv' 2> /dev/null; then
	  echo "make: $(PYTHON) cannot make virtual environments: apt-get install python3-venv" >&2
	  exit 1
	fi
	echo "Setting up $(VENV): about 2 minutes and 2.5 GB of disk, this once."
	made_by="$(CURDIR), $$("$(PYTHON)" -VV | tr '\n' ' ')"
	if ! grep -qsxF "$$made_by" $(VENV)/.installed-*; then
	  "$(PYTHON)" -m venv --clear $(VENV)
	fi
	rm -f $(VENV)/.installed-*
	show_progress() {
	  printf '%s' "$$1"
	  while read -r word name rest; do
	    case "$$word" in
	      Collecting) printf ' %s' "$${name%%[<>=!~;[]*}" ;;
	      Installing) printf '\n  now unpacking them ...' ;;
	      ERROR:) printf '\n%s' "$$word $$name $$rest" >&2 ;;
	    esac
	  done
	  echo
	}
	$(PIP_INSTALL) torch setuptools 2>&1 | tee $(VENV)/setup.log | show_progress '1/2 torch:'
	$(PIP_INSTALL) --no-build-isolation --editable '.[dev,data,docs,eval,hf,plots]' triton 2>&1 \
	  | tee -a $(VENV)/setup.log | show_progress '2/2 the rest:'
	echo "$$made_by" > $@
	echo "$(VENV) is ready."
