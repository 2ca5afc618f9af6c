# Entry point for people and for CI: every target first makes the virtual environment that it needs, from nothing but
# Python >= 3.10 with venv, a C++17 compiler and pip's index. `make help` lists the targets; CONTRIBUTING.md explains them.
#
# Variables: PYTHON (interpreter that the environment is made with), VENV (its folder), TORCH (what pip installs as torch),
# CUTLASS (what it installs as the CUTLASS headers, where there is nvcc), ARGS (passed on by test, test-dist-gpu and demo).

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
CUTLASS ?= nvidia-cutlass==4.2.0.0
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
CXX_FILES := $(sort $(shell find kernels cutlass_configs tests benchmarks -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh'))
# What the installed package depends on beside its Python sources, which an editable install reads in place.
PACKAGE_INPUTS := pyproject.toml CMakeLists.txt $(wildcard cmake/*) $(filter kernels/% cutlass_configs/%,$(CXX_FILES))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help build test test-dist-gpu demo docs lint format clean FORCE

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

build: $(VENV)/.stamp-package ## make the environment, compile the C++ and (with nvcc) CUDA libraries, install the package editable

test: $(VENV)/.stamp-package ## run the test suite; ARGS="tests/unit -k route" goes to pytest
	$(BIN)/python -m pytest -q $(ARGS)

test-dist-gpu: $(VENV)/.stamp-package ## test several ranks on this machine's GPUs, under NVIDIA MPS where they share one; ARGS as for test
	$(BIN)/python -m tests.dist_gpu $(ARGS)

demo: $(VENV)/.stamp-package ## train a small language model on this machine, into runs/demo; ARGS="--ranks 4" goes to train
	$(BIN)/moe-megakernel train $(ARGS)

docs: $(VENV)/.stamp-package ## write the tables and plots of the docs from the plan and from the benchmark's results
	$(BIN)/python docs/tables.py
	$(BIN)/python docs/results.py

lint: $(VENV)/.stamp-package ## check style, types and formatting of everything
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy src
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)
	$(BIN)/pre-commit validate-config

format: $(VENV)/.stamp-package ## rewrite Python and C++ files in the project's format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(CXX_FILES)

clean: ## remove build outputs and caches; the environment and runs/ stay
	rm -rf build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache $(VENV)/.stamp-package

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "make: PYTHON: expected Python >= 3.10, got $(PYTHON): $$($(PYTHON) --version 2>&1)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Changes only when TORCH does, so that another torch is installed exactly then.
$(VENV)/.torch: FORCE | $(BIN)/python
	@echo '$(TORCH)' | cmp -s - $@ || echo '$(TORCH)' > $@

$(VENV)/.stamp-torch: $(VENV)/.torch
	$(PIP) install '$(TORCH)'
	@touch $@

$(VENV)/.stamp-package: $(VENV)/.stamp-torch $(PACKAGE_INPUTS)
	@command -v $${CXX:-c++} > /dev/null \
	  || { echo "make: expected a C++17 compiler named c++, or by CXX=, got none" >&2; exit 1; }
	$(PIP) install 'scikit-build-core>=0.10' 'cmake>=3.20' ninja
	@# The headers that the CUDA kernels are compiled with; --no-deps, because its dependencies (scipy, ...) serve its scripts.
	if command -v $${CUDACXX:-nvcc} > /dev/null; then $(PIP) install --no-deps '$(CUTLASS)'; fi
	$(PIP) install --no-build-isolation -e '.[test,dev]'
	@touch $@
