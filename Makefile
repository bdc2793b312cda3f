# All developer commands; "make" alone prints the list.
#
# constraints.txt pins the packages of the environment .venv. The first target that needs the
# environment sets it up; the setup is repeated only when its inputs change.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.SILENT:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The extras to install, and the folders of the tests of "make test".
EXTRAS := dev,data,docs,eval,hf,plots,ray
TESTS := tests --ignore tests/gpu

# constraints.txt pins another megatron-core for Python 3.11 than for later ones. test-core runs the
# tests that touch megatron-core with the other Python: with 3.12 if PYTHON is 3.11, otherwise with
# 3.11. MEGATRON_CORE=0.18.2 selects another release for this Python.
CORE_VENV := .venv-core
CORE_TESTS := tests/distributed $(addprefix tests/unit/,model parallel blend training checkpoint \
  corpus/test_data_path.py corpus/test_indexed_object_storage.py)

# The name of the stamp file contains a digest of the environment's inputs: a changed pin, another
# interpreter or a moved clone (an editable install refers to its folder) triggers a new install.
SETUP_FILES := setup.py megatron_chameleon/parallel/releases.py pyproject.toml constraints.txt
SETUP_KEY := $(shell { echo "$(CURDIR) $(EXTRAS)"; command -v "$(PYTHON)"; cat $(SETUP_FILES); } | cksum | cut -d' ' -f1)
STAMP := $(VENV)/.installed-$(SETUP_KEY)

# Use one thread per process, because the tests and the ranks already use all cores.
test test-core test-slow test-gpu: export OMP_NUM_THREADS := 1

# The following targets test the CPU paths, even on a machine with a GPU.
test test-core test-numeric test-slow: export CUDA_VISIBLE_DEVICES :=

# Test with another processor's rounding and more threads; CONTRIBUTING.md lists more combinations.
test-numeric: export ATEN_CPU_CAPABILITY := default
test-numeric: export OMP_NUM_THREADS := 2
# The test of the memory estimate is excluded, because torch rejects bf16 attention on processors
# with AVX-512 if ATEN_CPU_CAPABILITY is lowered.
NUMERIC_TESTS := $(addprefix tests/unit/,mixture model embedding training) \
  --ignore tests/unit/model/test_memory.py

.PHONY: help setup quickstart test test-core core-python test-numeric test-slow test-gpu
.PHONY: measure-gpu install-matrix lint format lock docs doctor clean

help:
	echo "make quickstart   the whole pipeline on real text, in minutes on 2 cores"
	echo "make test         every test that needs no GPU"
	echo "make test-core    the tests of models and training with another Python's megatron-core"
	echo "make test-numeric the numeric tests under another processor's rounding, with two threads"
	echo "make test-slow    the long tests that 'make test' leaves out"
	echo "make test-gpu     the tests that need a CUDA device"
	echo "make measure-gpu  the GPU tests and benchmarks: 55 minutes, resumable"
	echo "make install-matrix  the wheel in fresh environments: Python 3.11 to 3.13, pip and uv"
	echo "make lint         ruff, mypy and the import rules"
	echo "make format       ruff format and ruff's fixes"
	echo "make lock         renew requirements.lock from setup.py and constraints.txt, with uv"
	echo "make docs         the documentation, into site/index.html"
	echo "make doctor       which acceleration is active here, and the cost of missing libraries"
	echo "make setup        set up .venv (the other targets do so when needed)"
	echo "make clean        remove .venv, caches and build output (keeps runs/)"
	echo
	echo "PYTHON=python3.12 make ...   uses another interpreter (3.11 or newer) for .venv"

setup: $(STAMP)

quickstart: $(STAMP)
	$(BIN)/megatron-chameleon quickstart $(if $(RUN),--run-dir "$(RUN)")

test: $(STAMP)
	$(BIN)/python -m pytest $(TESTS) -n 2 $(PYTEST_ARGS)

test-core:
	python="$$($(MAKE) --no-print-directory core-python)"
	if [ -z "$$python" ]; then
	  echo "make test-core: found neither Python 3.12 nor Python 3.11 next to $(PYTHON)." >&2
	  exit 1
	fi
	core() { $(MAKE) --no-print-directory "$$@" PYTHON="$$python" VENV=$(CORE_VENV) EXTRAS=dev,data,eval,hf; }
	core setup
	$(CORE_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  $(if $(MEGATRON_CORE),megatron-core==$(MEGATRON_CORE),--constraint constraints.txt megatron-core)
	core test TESTS="$(CORE_TESTS)"

# Print the Python of test-core; nothing if there is none. pyenv keeps Pythons that are not selected
# in its folder of versions.
core-python:
	"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info >= (3, 12))' && other=3.12 || other=3.11
	for python in python$$other "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/$$other.*/bin/python; do
	  if "$$python" -c 'import ensurepip, venv' 2> /dev/null; then
	    echo "$$python"
	    exit
	  fi
	done

test-numeric: $(STAMP)
	$(BIN)/python -m pytest $(NUMERIC_TESTS) -n 2 $(PYTEST_ARGS)

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow tests -n 2 $(PYTEST_ARGS)

test-gpu: $(STAMP)
	if ! $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
	  echo "make test-gpu: torch sees no CUDA device here, so no GPU test ran." >&2
	  exit 1
	fi
	$(BIN)/python -m pytest -m gpu tests/gpu

# When measure-gpu is run again, it skips finished steps. MEASURE_GPU="--seconds 570" limits a call
# to 10 minutes; benchmarks/measure_gpu.py exits with 75 while steps remain.
measure-gpu: $(STAMP)
	$(BIN)/python benchmarks/measure_gpu.py $(MEASURE_GPU)

# INSTALL_MATRIX="--pythons 3.12 --installers uv" selects environments.
install-matrix:
	"$(PYTHON)" benchmarks/install_matrix.py $(INSTALL_MATRIX)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Without --emit-index-url, the lock names no package index.
lock:
	uv pip compile setup.py --quiet --universal --python-version 3.11.0 --constraint constraints.txt \
	  --no-annotate --extra data --extra dev --extra docs --extra eval --extra hf --extra plots \
	  --extra ray --output-file requirements.lock --custom-compile-command 'make lock' > /dev/null

# Broken links and unlinked pages fail the build. With mkdocs's --quiet, they would not.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	echo "site/index.html is the first page."

doctor: $(STAMP)
	$(BIN)/megatron-chameleon doctor

clean:
	rm -rf $(VENV) $(CORE_VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -rf .import_linter_cache site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch is installed first, so that no other package pulls in a different build. Triton is listed
# because torch's CPU build does not depend on it. An environment without a stamp is incomplete and
# is recreated. An environment of another interpreter or of a moved clone is recreated too.
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off \
  --constraint constraints.txt

$(STAMP):
	if ! command -v "$(PYTHON)" > /dev/null; then
	  echo "make: $(PYTHON) not found: apt-get install python3 python3-venv, or PYTHON=..." >&2
	  exit 1
	fi
	if ! "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
	  echo "make: $(PYTHON) is older than Python 3.11, which setup.py needs: PYTHON=..." >&2
	  exit 1
	fi
	if ! "$(PYTHON)" -c 'import ensurepip, venv' 2> /dev/null; then
	  echo "make: $(PYTHON) cannot make virtual environments: apt-get install python3-venv" >&2
	  exit 1
	fi
	echo "Setting up $(VENV): about 3 minutes and 4 GB of disk, once."
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
	$(PIP_INSTALL) --no-build-isolation --editable '.[$(EXTRAS)]' triton 2>&1 \
	  | tee -a $(VENV)/setup.log | show_progress '2/2 the rest:'
	echo "$$made_by" > $@
	echo "$(VENV) is ready."
