# Targets work on a machine that has only git, make and Python >= 3.11; see scripts/setup.sh.
#   make test      lint, types, layer contracts, tests
#   make finetune  fine-tune SmolLM2-135M on questions about the Python standard library; goes on
#                  from the newest checkpoint of an interrupted run
#   make lint      everything of `make test` but the tests
#   make test-matrix  the part of `make test` that needs matrix units, on a recent lavapipe
#   make bench     the quick benchmarks, appended to benchmarks/results/
#   make clean     remove what the targets made, except runs/

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST_ARGS ?=
# Two processes, a file at a time in one: whole files share devices and what they compiled.
PYTEST_JOBS ?= -n 2 --dist loadfile
CONFIG ?= configs/smollm2_stdlib.toml

.PHONY: test lint types contracts unit test-matrix finetune bench clean setup
.NOTPARALLEL:

test: lint unit test-matrix

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports --no-cache

unit: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST_JOBS) $(PYTEST_ARGS)

# Matrix units in software, from a Mesa of its own; where that cannot be had, this says so.
test-matrix: $(STAMP)
	@status=0; sh scripts/mesa26.sh || status=$$?; case $$status in \
	0) VKJIT_TEST_MATRIX=1 sh scripts/mesa26.sh $(BIN)/python -m pytest -m matrix \
		tests/runtime/matrix $(PYTEST_ARGS);; \
	3) echo '!!! NOT TESTED: kernels for matrix units, for want of Mesa 26.1: see above !!!';; \
	*) exit $$status;; \
	esac

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
