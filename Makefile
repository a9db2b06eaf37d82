# `make train` and `make test` set everything up by themselves; only Python 3.11+ and make needed.
PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= dev
PYTEST_ARGS ?=
RECIPE ?= tiny_gpt.py

BIN := $(VENV)/bin
COMMA := ,
STAMP := $(VENV)/installed-$(subst $(COMMA),-,$(EXTRAS))

.PHONY: train train-moe test lint benchmark clean

train: $(STAMP)
	$(BIN)/python launch.py --config $(RECIPE) $(ARGS)

train-moe: RECIPE = tiny_moe.py
train-moe: train

test: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy mtjax

benchmark: $(STAMP)
	$(BIN)/python benchmarks/cpu_step.py

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable ".[$(EXTRAS)]"
	touch $@

clean:
	rm -rf $(VENV) runs
