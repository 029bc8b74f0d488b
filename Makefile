# Thin: everything goes through uv, which is fetched with pip into .uv/ if this machine has none.
UV := $(shell uv --version >/dev/null 2>&1 && echo uv || echo .uv/bin/uv)
PYTHON ?= python3
CONFIG ?= configs/quickstart.yaml
PYTEST_ARGS ?=

.PHONY: quickstart test lint

quickstart: $(filter .uv/bin/uv,$(UV))
	$(UV) run dapo train $(CONFIG)

test: $(filter .uv/bin/uv,$(UV))
	$(UV) run pytest $(PYTEST_ARGS)

lint: $(filter .uv/bin/uv,$(UV))
	$(UV) run ruff check .
	$(UV) run ruff format --check .
	$(UV) run mypy

.uv/bin/uv:
	$(PYTHON) -m pip install --quiet --target .uv uv
