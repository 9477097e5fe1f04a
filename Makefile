# Trainyard's verbs. `make help` lists them; a machine needs Python 3.10 to 3.13 and make, nothing else.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.SUFFIXES:

VENV ?= .venv
BIN := $(VENV)/bin
RUN := $(VENV)/.installed
DEV := $(VENV)/.installed-dev
# Python writes and uses bytecode: without it every process of Airflow takes seconds longer to start.
unexport PYTHONDONTWRITEBYTECODE
# An activated environment of another project must not get into ours.
unexport VIRTUAL_ENV PYTHONHOME

DAG ?= digits_retrain
CONF ?=

.PHONY: help install venv lock run up down status test test-kubernetes test-one check format docs-check bench clean clean-venv

help: ## list the verbs
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(RUN) ## make .venv with the pinned requirements
venv: $(DEV) ## the same with what tests and checks need

$(RUN): requirements.txt pyproject.toml scripts/install scripts/uv.txt $(wildcard trainers/records/native/*.[ch])
	@scripts/install "$(VENV)"

$(DEV): requirements-dev.txt pyproject.toml scripts/install scripts/uv.txt $(wildcard trainers/records/native/*.[ch])
	@scripts/install "$(VENV)" --dev

lock: $(DEV) ## renew requirements.txt and requirements-dev.txt from the .in files
	@scripts/lock

run: $(RUN) ## start the platform, run a pipeline and watch it: make run DAG=digits_retrain CONF='{"steps": 100}'
	@$(BIN)/trainyard run "$(DAG)" $(if $(CONF),--conf '$(CONF)')

up: $(RUN) ## start the platform and keep it running
	@$(BIN)/trainyard up

down: $(RUN) ## stop the platform
	@$(BIN)/trainyard down

status: $(RUN) ## what runs, where, with how much memory
	@$(BIN)/trainyard status

test: $(DEV) ## run the whole test suite, with coverage
	@scripts/test

test-kubernetes: $(DEV) ## run the tests of pods on a cluster, the one that KUBECONFIG names
	@scripts/test-kubernetes

test-one: $(DEV) ## run some tests: make test-one T=tests/platform/test_ports.py
	@$(BIN)/python -m pytest $(T)

check: $(DEV) ## lint, format, types, import bans, docs' examples; under a minute
	@scripts/check

format: $(DEV) ## format the code
	@$(BIN)/ruff format . && $(BIN)/ruff check --fix-only --quiet .

docs-check: $(DEV) ## run the docs' examples and check their links
	@scripts/docs-check

bench: $(DEV) ## measure the pipeline and print its page, as in benchmarks/pipeline.md
	@$(BIN)/python benchmarks/pipeline.py

clean: ## stop the platform and remove its data and all caches
	@if [ -x $(BIN)/trainyard ]; then $(BIN)/trainyard down; fi
	@rm -rf .trainyard .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.* htmlcov build dist

clean-venv: ## remove .venv
	@rm -rf "$(VENV)"
