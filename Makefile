# `make` prints the targets.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PACKAGES := kvferry engine kv_transfer scheduling rpc router prefill_worker decode_worker deploy

.DEFAULT_GOAL := help
.PHONY: help setup check test format protos demo serve

help:  ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

protos: $(STAMP)  ## regenerate the stubs in kvferry/v1
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=. --pyi_out=. --grpc_python_out=. proto/kvferry/v1/*.proto
