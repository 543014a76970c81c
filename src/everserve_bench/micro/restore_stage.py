"""Workers that lose a stream, and workers that go on with it; all in this process, on whatever computes."""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from everserve.engine.engine import Engine
from everserve.errors import EverserveError
from everserve.kvlog.layout import LogShape
from everserve.model.config import ModelConfig
from everserve.tables.ids import Incarnation, Rank, WorkerId
from everserve.tables.memory import Kind, MemoryName
from everserve.tables.requests import RequestSpec, SamplingParams, as_tokens
from everserve.worker.logs import KeptLogs
from everserve_bench.load import random_prompts

NUM_PROMPT = 32
_LOST = WorkerId(Rank(1), Incarnation(1))
_LOG = MemoryName(kind=Kind.LOG, owners=(_LOST,), num_bytes=0)
_BLOCKS = MemoryName(kind=Kind.KV, owners=(_LOST,), num_bytes=0)


@dataclass(frozen=True)
class Way:
    """How a stream goes on."""

    kv_log: str  # of the worker that is lost, and of the one that goes on; "off": it is computed again
    max_batched: int  # most tokens in one step of the one that goes on


@dataclass(frozen=True)
class Worker:
    """An attention worker without its process."""

    engine: Engine
    logs: KeptLogs  # of others
    log_fd: int | None = None  # of its own log, for others
    kv_fd: int | None = None  # of that log's blocks, if these are in memory of their own


class Workers(Protocol):
    """Makes them, all of one model."""

    model: ModelConfig
    shape: LogShape
    row_item_bytes: int  # of what travels between attention and expert workers

    def build(self, kv_log: str, max_batched: int) -> Worker: ...


@dataclass(frozen=True)
class Sample:
    """One restored stream."""

    point: int
    round: int
    way: str
    time_ms: float
    compute_ms: float  # core time
    bytes_moved: int
    token: int


class Stage:
    """For each log there is a worker that is lost again and again, for each way one that goes on with its streams."""

    def __init__(self, workers: Workers, ways: Mapping[str, Way]) -> None:
        self.ways = ways
        self.bytes_per_token = workers.shape.block_bytes // workers.shape.block_size
        self._model = workers.model
        self._row_item_bytes = workers.row_item_bytes
        logged = {way.kv_log: way.max_batched for way in ways.values() if way.kv_log != "off"}
        self._losers = {kv_log: workers.build(kv_log, max_batched) for kv_log, max_batched in logged.items()}
        self._survivors = {name: workers.build(way.kv_log, way.max_batched) for name, way in ways.items()}

    @contextmanager
    def lost(self, point: int, seed: int) -> Iterator[RequestSpec]:
        """A stream that has come so far: `point` tokens in all, each but the last in the logs."""
        tokens = random_prompts(self._model.vocab_size, 1, point, seed)[0]
        id = f"stream-{point}-{seed}"
        for loser in self._losers.values():
            _compute(loser.engine, RequestSpec(id=id, prompt=as_tokens(tokens[:-1]), params=_greedy(2)))
        for name, way in self.ways.items():
            if way.kv_log in self._losers:
                _hand_over(self._losers[way.kv_log], self._survivors[name])
        prompt, known = as_tokens(tokens[:NUM_PROMPT]), as_tokens(tokens[NUM_PROMPT:])
        yield RequestSpec(id=id, prompt=prompt, known=known, params=_greedy(point + 1))
        for survivor in self._survivors.values():
            _withdraw(survivor)
        for loser in self._losers.values():
            loser.engine.cancel_all()

    def restore(self, spec: RequestSpec, way: str, round_: int) -> Sample:
        """From the moment that the stream is given to a worker to its next token."""
        engine, logs = self._survivors[way].engine, self._survivors[way].logs
        num_tokens, num_restored = len(spec.prompt) + len(spec.known), 0
        began_s, cpu_s = time.perf_counter(), time.process_time()
        engine.add(spec, logs.find(spec, _LOST))
        while not (result := engine.step()).outputs:
            num_restored += sum(restored.num_restored for restored in result.restored)
        took_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
        num_restored += sum(restored.num_restored for restored in result.restored)
        engine.log_step()
        engine.cancel_all()
        expected = num_tokens - 1 if self.ways[way].kv_log != "off" else 0
        if num_restored != expected:
            raise EverserveError(f"{way}: {num_restored} tokens came from the log instead of {expected}")
        token = result.outputs[0].token
        assert token is not None
        moved = self._bytes_moved(num_tokens, is_restored=expected > 0)
        return Sample(num_tokens, round_, way, 1e3 * took_s, 1e3 * cpu_s, moved, token)

    def _bytes_moved(self, num_tokens: int, is_restored: bool) -> int:
        if is_restored:
            return num_tokens * self.bytes_per_token
        model = self._model
        num_rows = num_tokens * len(model.moe_layers) * (1 + model.experts_per_token)
        return num_rows * model.hidden_size * self._row_item_bytes


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0)


def _compute(engine: Engine, spec: RequestSpec) -> None:
    """Up to its first token, with all that was computed committed to the log."""
    engine.add(spec)
    while not engine.step().outputs:
        engine.log_step()
    engine.log_step()


def _hand_over(lost: Worker, survivor: Worker) -> None:
    """Its log. Others have it, and perhaps mapped it, long before a worker is lost."""
    assert lost.log_fd is not None
    for memory, fd in ((_BLOCKS, lost.kv_fd), (_LOG, lost.log_fd)):
        if fd is not None:
            survivor.logs.memory.put(memory, os.dup(fd))
            survivor.logs.offer(memory)
    survivor.logs.sweep(survivor.engine)


def _withdraw(survivor: Worker) -> None:
    for memory in (_LOG, _BLOCKS):
        if memory in survivor.logs.memory:
            survivor.logs.withdraw(memory, survivor.engine)
            survivor.logs.memory.drop(memory)
    survivor.logs.sweep(survivor.engine)
