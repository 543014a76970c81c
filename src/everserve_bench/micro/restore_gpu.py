"""Attention workers without their processes, on a GPU: `backends/cuda/roles.py` without what surrounds a worker."""

import os
import time
from dataclasses import replace

from msgspec import structs

from everserve.backends.cuda.build import (
    SeatWeights,
    build_decoder,
    build_forward,
    engine_limits,
    make_recorder,
)
from everserve.backends.cuda.device import open_device
from everserve.backends.cuda.lanes.local_experts import LocalCudaExperts
from everserve.backends.cuda.logs import CudaLogs
from everserve.config.compute import ComputeConfig
from everserve.config.model import ModelSource
from everserve.engine.engine import Engine
from everserve.engine.journal import Journal
from everserve.engine.warm_up import warm_up
from everserve.errors import EverserveError
from everserve.memory.names import WEIGHTS_STATE_BYTES
from everserve.memory.owned import create_memory
from everserve.tables.memory import Kind
from everserve.wire.messages import StartWorker
from everserve.worker.loading import Loading
from everserve_bench.micro.restore_cpu import settings_of, start_of
from everserve_bench.micro.restore_stage import Worker

_FEWEST_ROWS = 64  # of a captured step with prompts
_REACH_S = 120.0


class GpuWorkers:
    """`Workers` of a shape with random weights; they share its weights."""

    row_item_bytes = 2

    def __init__(self, model: str, context: int) -> None:
        self._directory = model
        self._context = context
        start = self._start("off", _FEWEST_ROWS)
        self._device = device = open_device(start, Loading(start))
        num_bytes = SeatWeights.plan_of(device).num_bytes
        state_fd = create_memory(Kind.WEIGHTS_STATE, WEIGHTS_STATE_BYTES)
        weights = SeatWeights(device, {Kind.WEIGHTS: device.driver.create(num_bytes), Kind.WEIGHTS_STATE: state_fd})
        self._decoder = build_decoder(device, weights)
        self.model = device.model
        self._experts = LocalCudaExperts(device.ops, weights.arena(), self.model.call_layers, self.model.max_shards)
        self.shape = device.sizes.log

    def build(self, kv_log: str, max_batched: int) -> Worker:
        device = replace(self._device, start=self._start(kv_log, max(max_batched, _FEWEST_ROWS)))
        fds = self._memory(kv_log)
        logs = CudaLogs(device, {kind: os.dup(fd) for kind, fd in fds.items()})
        kv_pool = logs.make_pool(self._decoder)
        forward = build_forward(device, self._decoder, kv_pool, self._experts, make_recorder(device))
        journal = logs.make_journal(kv_pool)
        config = structs.replace(
            device.start.settings.engine, max_num_batched_tokens=max_batched, max_prefill_while_decoding=max_batched
        )
        engine = Engine(config, engine_limits(device), device.ops, forward, journal=journal)
        warm_up(engine)
        if journal is not None:
            _wait_for_reach(engine, journal)
        return Worker(engine, logs.keep(), fds.get(Kind.LOG), fds.get(Kind.KV))

    def _start(self, kv_log: str, max_batched: int) -> StartWorker:
        on_cpu = settings_of(self._directory, self._context, kv_log, max_batched)
        settings = structs.replace(
            on_cpu,
            model=ModelSource(directory=self._directory, dtype="bfloat16", load_format="dummy"),
            engine=structs.replace(on_cpu.engine, block_size=64),
            compute=ComputeConfig(device="cuda", batch_invariant=True),
        )
        return structs.replace(start_of(settings), device=0, gpu=0)

    def _memory(self, kv_log: str) -> dict[Kind, int]:
        """What the anchor would have made for it (control/hold/design.py)."""
        shape = self.shape
        if kv_log == "mirror":
            return {Kind.LOG: create_memory(Kind.LOG, shape.num_bytes)}
        if kv_log == "anchor":
            kv_fd = self._device.driver.create(shape.num_blocks * shape.block_bytes)
            return {Kind.LOG: create_memory(Kind.LOG, shape.head_bytes), Kind.KV: kv_fd}
        return {}


def _wait_for_reach(engine: Engine, journal: Journal) -> None:
    """Until all of its log can be written by the device. The writer looks again in each step."""
    deadline = time.monotonic() + _REACH_S
    while journal.writer.reach < journal.log.shape.num_blocks:
        if time.monotonic() > deadline:
            raise EverserveError(f"the device does not reach the Kind.KV log in host memory after {_REACH_S:.0f} s")
        warm_up(engine)
