# Two commands on a fresh machine: `make demo` and `make test`. Both create .venv themselves.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt

# Otherwise every process of every test compiles all of our modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-long check bench chaos gpu clean

demo: $(STAMP)-run
	$(BIN)/everserve demo

# Three files at once on two cores, for tests also wait; those with servers first, so that small ones fill up the end.
# On a GPU one test after the other: they fill its memory.
test: $(STAMP)-dev
ifdef ARGS
	$(BIN)/python -m pytest $(ARGS)
else
	$(BIN)/python -m pytest -m "not long" $(AT_ONCE) $(TESTS)
	$(BIN)/python -m pytest tests/gpu
endif
# What `make test` leaves out: further cases of what it shows, and forty times as many examples. Every night.
test-long: $(STAMP)-dev
	$(BIN)/python -m pytest -m long $(AT_ONCE) $(TESTS)
	EVERSERVE_TEST_LONG=1 $(BIN)/python -m pytest --timeout 3600 $(AT_ONCE) tests/property
AT_ONCE = --durations=40 -n $(NUM_AT_ONCE) --dist loadfile --no-loadscope-reorder
NUM_AT_ONCE ?= $(shell echo $$(( $$(nproc) * 3 / 2 )))
TESTS := $(addprefix tests/,process chaos serving browser kernels property unit)

check: $(STAMP)-check
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

bench: $(STAMP)-dev
	$(BIN)/everserve bench engine
	$(BIN)/everserve bench failover
	$(BIN)/everserve bench overhead
	$(BIN)/everserve bench checkpoint
	$(BIN)/everserve bench restore
	$(BIN)/everserve bench balance
	$(BIN)/everserve bench degree
	$(BIN)/everserve bench prefill

# Half an hour of faults under streams; every token is compared. See docs/reliability.md.
chaos: $(STAMP)-run
	$(BIN)/everserve chaos --seconds 1800 --json bench/results/chaos.json $(ARGS)

# Needs an NVIDIA GPU and a torch built for it: the same kernels' tests that run in an interpreter elsewhere, the tests
# of device memory and of whole clusters on one device, then what it can do. See docs/performance.md.
GPU_PYTHON ?= $(PYTHON)
GPU_SHAPE ?= --shape mixtral
GPU_RESULTS ?= bench/results/gpu
gpu:
	$(GPU_PYTHON) -m pytest -q tests/kernels tests/gpu $(ARGS)
	$(GPU_PYTHON) -m everserve.cli bench decode --out $(GPU_RESULTS)
	$(GPU_PYTHON) -m everserve.cli bench prefill --alone --beside $(GPU_SHAPE) --layers 8 --out $(GPU_RESULTS)
	$(GPU_PYTHON) -m everserve.cli bench overhead $(GPU_SHAPE) --layers 12 --rounds 2 --out $(GPU_RESULTS)
	$(GPU_PYTHON) -m everserve.cli bench checkpoint $(GPU_SHAPE) --layers 8 --rounds 2 --out $(GPU_RESULTS)
	$(GPU_PYTHON) -m everserve.cli bench failover $(GPU_SHAPE) --layers 16 --streams 64 --prompt 512 --tokens 600 --rounds 5 --baseline-rounds 1 --kv-log anchor --spares 1 --out $(GPU_RESULTS)
	$(GPU_PYTHON) -m everserve.cli bench restore $(GPU_SHAPE) --layers 8 --rounds 3 --out $(GPU_RESULTS)
	$(GPU_PYTHON) -m everserve.cli bench scaling $(GPU_SHAPE) --layers 8 --kv-log anchor --spares 1 --rounds 1 --out $(GPU_RESULTS)
	$(GPU_PYTHON) -m everserve.cli bench show --markdown $(GPU_RESULTS)/*.json > $(GPU_RESULTS)/tables.md

clean:
	rm -rf $(VENV)

# Installed once; again only when the pins or the project's metadata change. torch comes first and pinned, so that
# no other package pulls in a different build of it.
$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "everserve needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)

$(STAMP)-run: constraints.txt pyproject.toml | $(VENV)/bin/python
	@echo "installing into $(VENV) (once; a minute or two)"
	$(PIP) torch
	$(PIP) -e .
	@touch $@

$(STAMP)-dev: $(STAMP)-run
	$(PIP) -e '.[dev]'
	@touch $@

$(STAMP)-check: $(STAMP)-run
	$(PIP) -e '.[check]'
	@touch $@
