# make demo       set up what it needs and translate a document with the shipped model
# make tour       set everything up, train two small models, translate and score
# make quick      lint, types, import contracts and the fast tests: for daily work
# make test       lint, types, import contracts, printed numbers and the whole suite: before a merge
# make test-all   the same with more generated examples and line coverage: before a release
# make test-versions  the kernel tests with the newest Triton, on a CPU: after changes of kernels
# make docs       build the documentation site into site/
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
BASE   := $(VENV)/.base
READY  := $(VENV)/.ready
KERNELS := $(VENV)/.kernels
PIP    := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo tour lint quick test test-all test-versions docs clean

# The library with its web server.
$(BASE): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e ".[serve]"
	touch $@

# Everything for development.
$(READY): $(BASE)
	$(PIP) -e ".[dev,docs,export,hf]"
	$(PIP) --no-deps timm
	touch $@

# Faster CPU kernels. Without a C++ compiler this prints one line and the Python tiles are used.
$(KERNELS): $(BASE) $(wildcard reluformer/ops/backends/cpu/native/* reluformer/ops/backends/cpu/native/decoder/*)
	$(BIN)/python -m reluformer.ops.backends.cpu.native || true
	touch $@

demo: $(KERNELS)
	$(BIN)/python -m reluformer.demo

tour: $(KERNELS)
	$(BIN)/python -m reluformer.tour

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

# One xdist worker runs all tests of a group, for example those that share processes.
PYTEST := $(BIN)/pytest -n 2 --dist loadgroup

# Folders and files whose tests take longest; `make test` runs them.
LONG := tests/fuzz tests/study tests/ops/backends/triton tests/ops/test_frames.py \
	tests/ops/test_hidden.py tests/ops/test_transforms.py tests/train/test_initialise.py \
	tests/train/test_loop.py tests/translation/search/test_beam.py

quick: $(KERNELS) lint
	$(PYTEST) -m "not slow and not release and not gpu" $(LONG:%=--ignore=%)

# Said first, because skipped tests are easily overlooked.
CHROMIUM := command -v chromium >/dev/null || \
	echo "NOT TESTED: the web page, because Chromium is missing (apt-get install chromium)"

test: $(KERNELS) lint
	@$(CHROMIUM)
	$(BIN)/python tools/check_numbers.py
	$(PYTEST) -m "not release and not gpu"

test-all: $(KERNELS) lint
	@$(CHROMIUM)
	$(BIN)/python tools/check_numbers.py
	$(PYTEST) -m "not gpu" --hypothesis-profile=release --cov --cov-report=term --cov-fail-under=90

# A second environment, because an environment holds one version of Triton.
VENV39  := .venv-triton39
READY39 := $(VENV39)/.ready

$(READY39): pyproject.toml constraints.txt constraints-triton39.txt
	$(PYTHON) -m venv $(VENV39)
	$(VENV39)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(VENV39)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e ".[plots]" entmax hypothesis pytest pytest-xdist
	$(VENV39)/bin/pip install --quiet --disable-pip-version-check --no-deps -r constraints-triton39.txt
	touch $@

# Interpreter, emulator and compiled code; none of them needs a GPU.
test-versions: $(READY39)
	$(VENV39)/bin/pytest -n 2 --dist loadgroup -m "not release and not gpu" tests/ops/backends/triton

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "Open site/index.html in a browser."

clean:
	rm -rf $(VENV) $(VENV39) site .mypy_cache .ruff_cache .pytest_cache .coverage
