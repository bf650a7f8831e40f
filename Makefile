# Everything happens in .venv, which is made on first use and again when pyproject.toml changes.
# Needs Python 3.11 or newer and make; PYTHON=/path/to/python chooses one.

SHELL := /bin/sh
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# Nothing of the caller's own Python environment may leak into .venv.
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV DJANGO_SETTINGS_MODULE PYTEST_ADDOPTS

# The first Python that runs and is new enough: a name on the PATH may be a shim that does not.
FIND_PYTHON = for python in $(PYTHON) python3 python3.13 python3.12 python3.11 python; do \
	if "$$python" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	echo "$$python"; exit 0; fi; done; echo "Python 3.11 or newer is needed; none was found." >&2; exit 1
NEED = python=$$($(FIND_PYTHON)) && "$$python" .ci/venv.py
RUN := .venv/bin/python

.PHONY: help venv test demo lint format types imports sizes migrations messages docs wheel bench faults suites mutants simulate clean

help: ## show this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | while IFS="$$(printf '\t')" read -r name text; do \
	printf '  make %-12s %s\n' "$$name" "$$text"; done

venv: ## make .venv with everything a developer needs
	@$(NEED) dev

test: ## run every test, on every database and broker that is there (ARGS="-k name" narrows it)
	@$(NEED) tests
	@exec $(RUN) -m tests.run $(ARGS)

demo: ## send 300 calls under three rules to a stub API (KEEP=1 leaves the admin up)
	@$(NEED) demo
	@exec $(RUN) -m example_project.demo $(if $(filter-out 0,$(KEEP)),--keep)

lint: ## ruff: mistakes and format
	@$(NEED) dev
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .

format: ## ruff: put it right
	@$(NEED) dev
	@$(RUN) -m ruff check --fix .
	@$(RUN) -m ruff format .

types: ## mypy, strict
	@$(NEED) dev
	@$(RUN) -m mypy

imports: ## import-linter: layers import downward only
	@$(NEED) dev
	@.venv/bin/lint-imports

sizes: ## how many modules, lines, arrows between them, circles (AT="v1 main" shows commits beside the checkout)
	@$(NEED) dev
	@$(RUN) .ci/sizes.py $(if $(AT),--at $(AT))

migrations: ## fail where a model has no migration
	@$(NEED) dev
	@CALLQUEUE_TEST_DATABASE=sqlite CALLQUEUE_TEST_DB_NAME=:memory: DJANGO_SETTINGS_MODULE=tests.settings \
	$(RUN) -m django makemigrations callqueue --check --dry-run

messages: ## collect the strings to translate and compile the translations (needs gettext's programs)
	@$(NEED) dev
	@cd callqueue && PYTHONPATH=.. ../$(RUN) -P -m django makemessages --all --no-location --no-wrap
	@cd callqueue && PYTHONPATH=.. ../$(RUN) -P -m django compilemessages

docs: ## the documentation, warnings as errors, into docs/_build/html
	@$(NEED) dev
	@$(RUN) -m sphinx -W --keep-going -q -b html docs docs/_build/html

wheel: ## build the wheel into dist, check what is in it, and that its types hold for others
	@$(NEED) dev
	@$(RUN) -m build --no-isolation --wheel --outdir dist . >/dev/null
	@CALLQUEUE_TEST_WHEEL=dist $(RUN) -m pytest -q --database=sqlite -p no:cacheprovider tests/packaging

bench: ## print the tables of docs/explanation/performance.md (ARGS="flat parts" chooses)
	@$(NEED) tests
	@exec $(RUN) -m tests.benchmarks $(ARGS)

faults: ## kill, freeze and disconnect things, at length
	@$(NEED) tests
	@exec $(RUN) -m tests.run --faults $(ARGS)

suites: ## Celery's and Django's own tests (about 20 minutes)
	@$(NEED) tests
	@exec $(RUN) -m pytest -s -p no:cacheprovider tests/suites $(ARGS)

mutants: ## put small faults into the core, one at a time, and show those that no test finds (ARGS="--count 400 --seed 1")
	@$(NEED) tests
	@exec $(RUN) -m tests.mutants $(ARGS)

simulate: ## run seeds of the simulation (SEEDS=1000; FROM=5000 begins there; ARGS="--seed 17 --story" shows one)
	@$(NEED) tests
	@exec $(RUN) -m tests.simulation --seeds $(or $(FROM),0):$(shell echo $$(($(or $(FROM),0) + $(or $(SEEDS),200)))) $(ARGS)

clean: ## remove what make made
	rm -rf .venv .suites build dist docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .nox .mutants.json
