# Two commands: `make demo` runs the main job on this machine's CPU, `make test` runs the test suite.
# Both make .venv first; later calls find it ready.

PYTHON ?= python3
VENV ?= .venv
SGLANG_CPU := 0.5.23
BIN := $(VENV)/bin
READY := $(VENV)/.ready-$(SGLANG_CPU)

.PHONY: setup demo test lint bench-codec bench-source bench-batch clean

setup: $(READY)

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"needs Python 3.11 or newer, {sys.executable} is {sys.version.split()[0]}; try: make PYTHON=python3.12")'
	@mkdir -p outputs && date +%s > outputs/.setup_started
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip || (echo "pip cannot reach PyPI: check the network, then run make again" >&2; exit 3)
	$(BIN)/python -m pip install -q -e '.[serve-cpu,ray,slurm,dev]'
	$(BIN)/python -m pip install -q --no-deps sglang==$(SGLANG_CPU)
	@touch $@
	@echo "set-up: $$(( $$(date +%s) - $$(cat outputs/.setup_started) )) s"

demo: setup
	$(BIN)/nvfp4lab run params/cpu_demo.yaml

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: setup
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

bench-codec: setup
	$(BIN)/python bench/codec.py

bench-source: setup
	$(BIN)/python bench/source.py

bench-batch: setup
	$(BIN)/python bench/batch.py

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis
