"""Attention workers without their processes, on a CPU, on one thread unless more are asked for."""

import os

from everserve.backends.cpu.build import EngineBuilder, load_experts, open_model
from everserve.backends.cpu.local_experts import LocalExperts
from everserve.config.compute import ComputeConfig
from everserve.config.engine import EngineConfig
from everserve.config.kvlog import LogConfig
from everserve.config.model import ModelSource
from everserve.kvlog.log import Log
from everserve.memory.owned import create_memory
from everserve.tables.ids import Incarnation, Rank, Role
from everserve.wire.messages import StartWorker, WorkerSettings
from everserve.worker.logs import KeptLogs
from everserve_bench.micro.restore_stage import Worker


class CpuWorkers:
    """`Workers` of the model in this directory; they share its experts."""

    row_item_bytes = 4

    def __init__(self, model: str, context: int, num_streams: int = 1, num_threads: int = 1) -> None:
        self._directory = model
        self._context = context
        self._num_streams = num_streams
        self._opened = open_model(start_of(settings_of(model, context, num_streams=num_streams, threads=num_threads)))
        self._experts = LocalExperts(load_experts(self._opened, "auto", slots=None))
        self.model = self._opened.model
        self.shape = self._opened.sizes.log

    def build(self, kv_log: str, max_batched: int) -> Worker:
        settings = settings_of(self._directory, self._context, kv_log, max_batched, self._num_streams)
        start, shape = start_of(settings), self.shape
        if kv_log == "off":
            return Worker(EngineBuilder(start, self._opened).build(self._experts), KeptLogs(None, None))
        fd = create_memory("log", shape.num_bytes)
        builder = EngineBuilder(start, self._opened, os.dup(fd))
        return Worker(builder.build(self._experts), KeptLogs(lambda fd, _: Log(fd, shape), builder.log), fd)


def settings_of(
    model: str, context: int, kv_log: str = "off", max_batched: int = 512, num_streams: int = 1, threads: int = 1
) -> WorkerSettings:
    """The settings of a worker that has so many streams at most."""
    return WorkerSettings(
        model=ModelSource(directory=model),
        engine=EngineConfig(
            max_model_len=context,
            max_num_seqs=num_streams,
            max_num_batched_tokens=max_batched,
            max_prefill_while_decoding=max_batched,
            max_prefill_slowdown=0.0,
            block_size=16,
            kv_cache_bytes=1 << 60,  # all that its streams can use
            enable_prefix_caching=False,
        ),
        log=LogConfig(mode=kv_log),
        compute=ComputeConfig(device="cpu", num_threads=threads),
    )


def start_of(settings: WorkerSettings) -> StartWorker:
    """With both roles."""
    return StartWorker(
        rank=Rank(0),
        incarnation=Incarnation(1),
        roles=(Role.ATTENTION, Role.EXPERT),
        settings=settings,
        num_workers=1,
        slots=None,
        detect_ms=0.0,
    )
