# `make` lists the targets. Each sets up what it needs.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
KERNEL := $(VENV)/.kernel
PROTOC := $(BIN)/python -m grpc_tools.protoc -I proto
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup model demo serve test check format protos stubs-current clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(INSTALLED) $(KERNEL)  ## make a virtual environment in .venv and build the CPU kernel

model: $(INSTALLED)  ## fetch the demo model
	@$(BIN)/kvferry model pull

demo: setup  ## fetch the demo model, serve it on this machine, ask it one question
	@$(BIN)/kvferry demo

serve: setup model  ## serve the demo model until Ctrl-C; ARGS="--prefill 2" and the like
	@$(BIN)/kvferry serve deploy/local.yaml $(ARGS)

test: setup model  ## run the tests; ARGS="-k handoff" and the like
	$(BIN)/python -m pytest $(ARGS)

check: $(INSTALLED) stubs-current  ## lint, format, types, imports between packages, protos and their stubs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint

format: $(INSTALLED)  ## format the code and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

protos: $(INSTALLED)  ## generate the stubs in kvferry/v1
	$(PROTOC) --python_out=. --pyi_out=. --grpc_python_out=. proto/kvferry/v1/*.proto

stubs-current: $(INSTALLED)
	@fresh=$$(mktemp -d); trap 'rm -rf $$fresh' EXIT
	$(PROTOC) --python_out=$$fresh --pyi_out=$$fresh --grpc_python_out=$$fresh proto/kvferry/v1/*.proto
	diff -r -x __pycache__ -x __init__.py $$fresh/kvferry/v1 kvferry/v1 || { echo 'stale stubs: run `make protos`'; exit 1; }

clean:  ## remove the virtual environment and all caches in this folder
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

# pip's own lines go to a log; on a terminal the latest of them is shown.
$(INSTALLED): pyproject.toml constraints.txt
	@echo 'installing into $(VENV): takes minutes the first time'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]' 2>&1 \
	  | tee $(VENV)/install.log \
	  | while IFS= read -r line; do if [ -t 1 ]; then printf '\r\033[K%.78s' "$$line"; fi; done \
	  || { tail -n 20 $(VENV)/install.log; exit 1; }
	if [ -t 1 ]; then printf '\r\033[K'; fi
	touch $@

$(KERNEL): $(INSTALLED) engine/kernels.py $(wildcard engine/csrc/*)
	@echo 'building the CPU kernel'
	$(BIN)/python -m engine.kernels
	touch $@
