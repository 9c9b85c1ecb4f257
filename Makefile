# Targets work on a machine that has only git, make and Python >= 3.11; see scripts/setup.sh.
#   make test      lint, types, layer contracts, tests
#   make finetune  fine-tune SmolLM2-135M on questions about the Python standard library; goes on
#                  from the newest checkpoint of an interrupted run
#   make lint      everything of `make test` but the tests
#   make bench     the quick benchmarks, appended to benchmarks/results/
#   make clean     remove what the targets made, except runs/

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST_ARGS ?=
CONFIG ?= configs/smollm2_stdlib.toml

.PHONY: test lint types contracts unit finetune bench clean setup
.NOTPARALLEL:

test: lint unit

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports --no-cache

unit: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

finetune: $(STAMP)
	$(BIN)/vkjit train $(CONFIG) --resume

bench: $(STAMP)
	$(BIN)/python -m benchmarks

setup: $(STAMP)

$(STAMP): pyproject.toml scripts/setup.sh
	sh scripts/setup.sh $(VENV)
	touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
