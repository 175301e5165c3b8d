# make demo   sets everything up and shows the main job on what ships in the repository
# make test   sets everything up and runs lint, types and tests
# make docs   sets everything up and builds the documentation site into site/
# make coverage   the tests again, with the share of lines they reach (half as long again)
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
KERNELS := $(VENV)/.kernels
DOCS   := $(VENV)/.docs

.PHONY: demo test docs coverage clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

# Faster CPU kernels; where no C++ compiler is, one line says so and everything runs without.
$(KERNELS): $(READY) $(wildcard reluformer/ops/backends/cpu/native/*)
	$(BIN)/python -m reluformer.ops.backends.cpu.native || true
	touch $@

$(DOCS): $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	touch $@

demo: $(KERNELS)
	$(BIN)/python -m reluformer.demo

test: $(KERNELS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2

docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "Open site/index.html in a browser."

coverage: $(KERNELS)
	$(BIN)/pytest -n 2 --cov --cov-report=term --cov-fail-under=90

clean:
	rm -rf $(VENV) site .mypy_cache .ruff_cache .pytest_cache .coverage
