# Everything a newcomer needs. `make` alone lists what there is.

# empty: what .venv was made with; without a .venv: cpu, and the first of python3.11, python3.12, python3 that runs (for
# cuda python3.12 comes first)
PLATFORM ?=
PYTHON ?=
CONFIG ?=
ARGS ?=

BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest -q
COMMA := ,
LAYER = @printf '\n== %s\n' "$(1)"

export OMP_NUM_THREADS := 1
# where a machine forbids caches, each of a test's hundreds of processes would compile the project's sources again
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup setup-slurm setup-browser setup-sandbox setup-agents setup-docs docs demo demo-llm round-trip train test test-unit proofs test-gpu test-agents test-other-line mutation lint bench house clean package need-config

help: ## This table
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s  %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo "  PLATFORM=cpu|cuda, PYTHON=python3.11|python3.12, CONFIG=configs/NAME.yaml, ARGS='key=value ...'"
	@echo "  Every target but help, clean, setup-slurm, setup-browser and setup-sandbox runs setup by itself."

setup: ## Make .venv with the pinned packages (PLATFORM=cuda on GPU machines)
	@PLATFORM='$(PLATFORM)' PYTHON='$(PYTHON)' sh requirements/setup.sh

setup-slurm: ## Install Slurm for the tests of the job scripts (Debian, Ubuntu; as root)
	@sh requirements/slurm.sh

setup-browser: ## Install Chromium for the tests of the report's page (Debian, Ubuntu; as root)
	@sh requirements/browser.sh

setup-sandbox: ## Install bubblewrap, in which the reward code_tests runs programs (Debian, Ubuntu; as root)
	@sh requirements/sandbox.sh

setup-agents: setup ## Programs of other people for tests and examples of agents, each in .cache/agents/NAME
	@$(BIN)/python requirements/agents.py $(ARGS)

setup-docs: setup ## MkDocs for the site of the pages, in .cache/docs
	@$(BIN)/python requirements/docs.py

docs: setup-docs ## The pages as a site in build/site, all links checked (seconds)
	@NO_MKDOCS_2_WARNING=1 .cache/docs/bin/mkdocs build # not --quiet: it hides the faults that end it
	@echo 'docs: build/site/index.html; with its search: .venv/bin/python -m http.server -b 127.0.0.1 -d build/site'

demo: setup ## DAPO on two-digit sums: TP=2, a real SGLang server, on this machine's GPUs or its CPU
	@$(BIN)/python -m examples.arithmetic.demo $(ARGS)

demo-llm: setup ## DAPO on SmolLM2-135M-Instruct: PP=2 (93 MB to download once)
	@$(BIN)/python -m examples.smollm2.demo $(ARGS)

round-trip: setup ## SmolLM2 to Megatron, back and served: equal files and log-probs (93 MB once)
	@$(BIN)/python -m examples.smollm2.round_trip

train: need-config setup ## Servers and trainer of CONFIG=... on this machine, with ARGS='key=value ...'
	@$(BIN)/python -m launch.local --config $(CONFIG) $(ARGS)

need-config:
	@test -f '$(CONFIG)' || { \
	    echo "make train: CONFIG='$(CONFIG)' is not a file. For example:" >&2; \
	    for recipe in configs/*.yaml; do echo "    make train CONFIG=$$recipe" >&2; done; exit 2; }

test: lint test-unit ## Lint, then all other tests, on a real server and a real Slurm too; stops at the first that fails
	$(call LAYER,tests with several processes$(COMMA) a real SGLang server$(COMMA) jobs on a Slurm of virtual nodes)
	@$(PYTEST) --junitxml=.cache/tests-processes.xml -n 3 --dist loadscope --no-loadscope-reorder tests/compile tests/distributed tests/slurm tests/e2e

test-unit: setup ## Unit tests only (minutes)
	$(call LAYER,unit tests)
	@$(PYTEST) --junitxml=.cache/tests-unit.xml -n 3 --dist loadfile --no-loadscope-reorder tests/unit

proofs: setup ## Long and second forms of tests: kills, random schedules, draws, all layouts (hours)
	@PROOFS=1 $(PYTEST) -n 2 --dist loadfile --timeout 7200 $$(grep -lE 'tests.proofs import|in_short' -r tests --include='test_*.py')

test-gpu: setup ## Kernels at real sizes, layers and policy, on a CUDA GPU (without one: skipped)
	@$(PYTEST) -c tests/gpu/pytest.ini tests/gpu

test-agents: setup-agents ## Agents of other people, each with its own interpreter, on a real server (minutes)
	@$(PYTEST) tests/agents

test-other-line: ## All tests of the last commit with the other Python's versions, in a clone
	@PLATFORM= PYTHON= sh requirements/setup.sh # PYTHON is the clone's
	@PYTHON='$(PYTHON)' sh tests/other_line.sh

lint: setup docs ## Ruff: rules and format; mypy: types; the site's links
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy --num-workers 2

mutation: setup ## Change the loss in every place in turn; a test must fail each time (minutes; ARGS=published: docs/exactness.md)
	@$(BIN)/python -m tests.mutation.mutate_loss $(ARGS)

bench: setup ## Time, memory and error of the kernels, on this machine (ARGS=--quick: seconds)
	@set -e; for file in benchmarks/bench_*.py; do \
	    echo "== $$file"; $(BIN)/python "$$file" $(ARGS); done

house: setup ## Sizes on one page: rooms, names, docs, functions, wording, last tests (no limits)
	@$(BIN)/python -m tests.house $(ARGS)

package: setup ## Source archive and wheel of the package, in dist/ (docs/install.md)
	@rm -rf build/lib build/bdist.* *.egg-info; mkdir -p .cache # build/site stays
	@$(BIN)/python -c 'from setuptools import build_meta as b; b.build_sdist("dist"); b.build_wheel("dist")' > .cache/package.log
	@ls dist/*

clean: ## Remove caches and build leftovers; .venv, .cache and runs/ stay
	@rm -rf .pytest_cache .ruff_cache .mypy_cache .hypothesis build *.egg-info
	@find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
