# Two commands on a fresh machine: `make demo` and `make test`. Both create .venv themselves. TORCH_INDEX=URL is the
# index to take PyTorch's build for CPUs from (tools/install.py).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
INSTALL := $(BIN)/python -m tools.install

# Otherwise every process of every test compiles all of our modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-long clients check pins bench chaos gpu clean

demo: $(STAMP)-run
	$(BIN)/everserve demo

# Three files at once on two cores, for tests also wait; those with servers first, so that small ones fill up the end.
# On a GPU one test after the other: they fill its memory. The last line counts the tests of both runs.
test: $(STAMP)-dev
ifdef ARGS
	$(BIN)/python -m tools.run_tests $(ARGS)
else
	$(BIN)/python -m tools.run_tests -m "not long" $(AT_ONCE) $(TESTS) --then tests/gpu
endif
# What `make test` leaves out: further cases of what it shows, and forty times as many examples. Every night.
test-long: $(STAMP)-dev
	$(BIN)/python -m pytest -m long $(AT_ONCE) $(TESTS)
	EVERSERVE_TEST_LONG=1 $(BIN)/python -m pytest --timeout 3600 $(AT_ONCE) tests/property
AT_ONCE = --durations=40 -n $(NUM_AT_ONCE) --dist loadfile --no-loadscope-reorder
NUM_AT_ONCE ?= $(shell echo $$(( $$(nproc) * 3 / 2 )))
TESTS := $(addprefix tests/,wheel process clients chaos serving browser kernels property bench unit)

check: $(STAMP)-check
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# What tests/clients needs besides: without it they are skipped.
clients: $(STAMP)-clients

# Are the versions in constraints.txt to be had together, from the public index alone, on x86-64 and aarch64?
pins: $(STAMP)-run
	$(BIN)/python -m tools.check_pins

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
	$(BIN)/everserve chaos --seconds 1800 --json bench/results/local/chaos.json $(ARGS)

# Needs an NVIDIA GPU and a torch built for it: the same kernels' tests that run in an interpreter elsewhere, the tests
# of device memory and of whole clusters on one device, then what it can do. See docs/performance.md.
GPU_PYTHON ?= $(PYTHON)
GPU_SHAPE ?= --shape mixtral
GPU_RESULTS ?= bench/results/local/gpu
gpu:
	$(GPU_PYTHON) -m pytest -q tests/kernels tests/gpu $(ARGS)
	$(GPU_PYTHON) -m everserve.cli bench decode --out $(GPU_RESULTS)
	$(GPU_PYTHON) -m everserve.cli bench prefill --alone --beside $(GPU_SHAPE) --layers 8 --out $(GPU_RESULTS)
	$(GPU_PYTHON) -m everserve.cli bench overhead $(GPU_SHAPE) --layers 12 --rounds 2 --out $(GPU_RESULTS)
	$(GPU_PYTHON) -m everserve.cli bench checkpoint $(GPU_SHAPE) --layers 8 --rounds 2 --out $(GPU_RESULTS)
	$(GPU_PYTHON) -m everserve.cli bench failover $(GPU_SHAPE) --layers 16 --streams 64 --prompt 512 --tokens 600 --rounds 5 --baseline-rounds 1 --kv-log anchor --spares 1 --out $(GPU_RESULTS)
	$(GPU_PYTHON) -m everserve.cli bench restore $(GPU_SHAPE) --layers 8 --rounds 3 --out $(GPU_RESULTS)
	$(GPU_PYTHON) -m everserve.cli bench scaling $(GPU_SHAPE) --layers 8 --kv-log anchor --spares 1 --rounds 1 --out $(GPU_RESULTS)

clean:
	rm -rf $(VENV)

# Installed once; again only when the pins or the project's metadata change.
$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "everserve needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)

$(STAMP)-run: constraints.txt pyproject.toml | $(VENV)/bin/python
	$(INSTALL) run
	@touch $@

$(STAMP)-dev: $(STAMP)-run
	$(INSTALL) dev
	@touch $@

$(STAMP)-check: $(STAMP)-run
	$(INSTALL) check
	@touch $@

$(STAMP)-clients: $(STAMP)-run
	$(INSTALL) clients
	@touch $@
