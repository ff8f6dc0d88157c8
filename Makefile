# `make` lists the targets. `make train` and `make test` set up what they need on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS ?= dev

.DEFAULT_GOAL := help
.PHONY: help setup train study test stress check format cards clean

help: ## list the targets
	@grep -E '^[a-z%-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(VENV)/.ready ## make .venv here and install the project into it

# A user who has a CPU build of torch in mind sets PIP_INDEX_URL or PIP_FIND_LINKS; nothing here overrides them.
$(VENV)/.ready: pyproject.toml
	$(PYTHON) -c 'import sys; assert (3, 11) <= sys.version_info < (3, 14), "Python 3.11 to 3.13 is needed: make PYTHON=python3.11"'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -e '.[$(EXTRAS)]'
	touch $@

train: setup ## the main job: a small residual network, N:M sparse by BAME, on handwritten digits
	$(BIN)/bame train

scale ?= paper
table-%: setup ## a paper's table: make table-cifar10 scale=smoke runs, finishes or finds its runs, and prints it
	$(BIN)/bame train +table=$* scale=$(scale); code=$$?; $(BIN)/bame table $* scale=$(scale) && exit $$code

# Each run by itself on one core; one that is finished, here or in results/, is found, and one that was cut goes on.
STUDIES ?= study_bame study_swap study
jobs ?= $(shell nproc)
study: setup ## docs/study.md's runs and results/: make study jobs=2 STUDIES=study
	code=0; for name in $(STUDIES); do \
		mkdir -p results/$$name; lines=results/$$name/runs.jsonl; kept=kept=$$(ls $$lines 2>/dev/null); \
		OMP_NUM_THREADS=1 $(BIN)/bame train +table=$$name $$kept hydra/launcher=joblib hydra.launcher.n_jobs=$(jobs) || code=1; \
		$(BIN)/bame table $$name $$kept format=md against=SR-STE out=results/$$name/table.md && \
		$(BIN)/bame plot $$name $$kept out=results/$$name && \
		$(BIN)/bame table $$name $$kept format=jsonl out=$$lines || exit 1; \
	done; exit $$code

# As many workers as cores, a file to a worker: tests compute on one thread each.
PYTEST := $(BIN)/python -m pytest -n auto --dist loadfile

test: setup ## all tests, slow ones included
	$(PYTEST)

stress: setup ## kill training at 50 random instants, and compare with runs that were not (minutes)
	$(BIN)/python -m pytest -m stress

check: setup ## the gate: format, lint, types, tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(PYTEST)

format: setup ## put the code into its format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

cards: setup ## write docs/methods.md from the methods' own docstrings
	$(BIN)/python scripts/method_cards.py

clean: ## remove what was built, not what was trained
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
