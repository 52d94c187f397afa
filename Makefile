# Every target sets up what it needs: .venv (or VENV=dir) and the tiny models in build/models.
# CUDA=1 installs the CUDA build of vLLM instead of the CPU build; PYTHON picks the interpreter.
PYTHON ?= python3
VENV ?= .venv
export VENV
# Python keeps compiled code, whatever the environment says: else each process compiles the package and the tests anew.
export PYTHONDONTWRITEBYTECODE =

BIN = $(abspath $(VENV))/bin
SETUP = $(PYTHON) tools/setup_env.py $(if $(CUDA),--cuda)
PYTEST = $(BIN)/python -m pytest -n 2 --no-loadscope-reorder  # which process runs what: tests/conftest.py

# The release of vLLM that no CPU build exists of, and the tests that its Python files pass with another one's kernels
COMPAT_RELEASE = 0.33.0
COMPAT_TESTS = tests/compat tests/vllm_patches tests/connector tests/kv_manager tests/attention tests/cpu \
	tests/test_config.py tests/test_examples.py tests/test_releases.py tests/campaign/test_lives.py tests/campaign/test_damage.py

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-unit test-slow test-all test-compat campaign sanitize pages docs types lint clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 10

setup: ## create the environment and the tiny models
	@$(SETUP)

demo: setup ## run the prefill/decode demo
	@$(BIN)/python -m tools.demo $(ARGS)

test: setup ## run the tests but slow ones, in ten minutes, e.g. make test ARGS="-k tiny_model"
	@$(PYTEST) -m "not slow" $(ARGS)

test-unit: setup ## run the short tests that start no engine: about a minute
	@$(PYTEST) -m "not slow and not e2e and not long" --ignore=tests/campaign --ignore=tests/e2e --ignore=tests/gpu $(ARGS)

test-slow: setup ## run what `make test` leaves out: Ray, several ranks, variants of engines; an hour
	@$(PYTEST) -m slow $(ARGS)

test-all: setup ## run all tests
	@$(PYTEST) $(ARGS)
	@$(MAKE) --no-print-directory test-compat

test-compat: setup ## check and test against the other release of vLLM, whose Python files are put beside the CPU build
	@$(BIN)/python tools/vllm_compat.py $(COMPAT_RELEASE) --tree
	@PYTHONPATH=$(abspath build/vllm-$(COMPAT_RELEASE)) $(PYTEST) -m "not slow and not e2e" $(COMPAT_TESTS) $(ARGS)

campaign: setup ## run many lives of requests and kill engines, e.g. make campaign ARGS="--part lives"
	@$(BIN)/python -m tests.campaign $(ARGS)

sanitize: setup ## run the kernel tests under compute-sanitizer; needs a CUDA device
	@compute-sanitizer --tool memcheck --error-exitcode 1 $(BIN)/python -m pytest -q tests/gpu/test_cuda_ops.py
	@compute-sanitizer --tool racecheck --error-exitcode 1 $(BIN)/python -m pytest -q tests/gpu/test_cuda_ops.py -k random

pages: setup ## write the generated pages of the documentation: results, index of decisions
	@$(BIN)/python tools/docs_pages.py

docs: setup ## build the site in build/site; a link that leads nowhere fails
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

types: setup ## check types
	@$(BIN)/mypy

lint: setup types ## check style, formatting and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/clang-format --dry-run --Werror csrc/cuda/*

clean: ## remove the environment and everything built
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
