# `make help` lists the targets. Everything is installed into .venv, nothing elsewhere.

SHELL := /bin/sh
.DEFAULT_GOAL := help

# The first Python on the path that is new enough; override with make PYTHON=/path/to/python.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
  if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
  then echo $$p; break; fi; done)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq

PROMPT ?= def fibonacci(n):
DEMO_ARGS ?= --max-new-tokens 128
# More than one worker pays because compiling is most of the time, and a file stays with one
# worker because its tests share compiled programs. PYTEST_ARGS="-n 0 -k name" runs in one process.
PYTEST_ARGS ?= -n auto --maxprocesses 8 --dist loadfile

# What the library is built from, and what is said of it when it has been.
NATIVE := CMakeLists.txt $(wildcard cmake/*) $(shell find csrc -type f)
define SAY_WHAT_WAS_BUILT
from hipjax.ffi.registration import report
r = report()
print("Kernels:", r.library, *(("for the CPU", *r.code_objects) if r.instruction_set else ()))
if r.missing: print(r.missing)
endef
export SAY_WHAT_WAS_BUILT

say_what_was_built = $(BIN)/python -c "$$SAY_WHAT_WAS_BUILT"; \
  { command -v $(CXX) || command -v c++ || command -v clang++; } >/dev/null || { \
    echo "There is no C++ compiler, so there are no kernels, and plain JAX takes their place."; \
    echo "On Debian and Ubuntu: apt-get install g++, then make clean."; } >&2

.PHONY: help demo test lint types format clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):[^#]*## /\1	/p' Makefile | expand -t 10

demo: $(VENV)/.runtime ## install hipjax and watch the bundled model write code
	@$(BIN)/hipjax generate '$(subst ','\'',$(PROMPT))' $(DEMO_ARGS)

test: lint types ## lint, types and the tests, on this machine's CPU
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.dev ## ruff: rules and formatting
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/.dev ## mypy
	$(BIN)/mypy

format: $(VENV)/.dev ## rewrite the sources the way lint wants them
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format

clean: ## remove everything that make has made
	rm -rf .venv .venv-oracle build dist hipjax/ffi/libhipjax.so .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps: the later runs are instant; an edit of pyproject.toml installs again, and an edit of
# the native sources builds again.
$(VENV)/.created:
	@'$(PYTHON)' -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "hipjax needs Python 3.11 or newer; '$(or $(PYTHON),python3)' is not that."; \
	  echo "Name one with: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; } >&2
	@'$(PYTHON)' -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make environments: its venv module is not complete."; \
	  echo "On Debian and Ubuntu: apt-get install python3-venv"; exit 1; } >&2
	'$(PYTHON)' -m venv --clear $(VENV)
	@touch $@

$(VENV)/.runtime: $(VENV)/.created pyproject.toml $(NATIVE)
	@echo "Installing hipjax into $(VENV) and building its kernels: some minutes, once."
	@$(PIP) install -e .
	@$(say_what_was_built)
	@touch $@

$(VENV)/.dev: $(VENV)/.created pyproject.toml $(NATIVE)
	@echo "Installing hipjax and the tools of its tests into $(VENV) and building its kernels:"
	@echo "some minutes, once."
	@$(PIP) install -e '.[test,lint]'
	@$(say_what_was_built)
	@touch $(VENV)/.runtime $@
