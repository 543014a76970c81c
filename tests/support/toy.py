"""A model whose next token is a hash of every token before it, read back through the block tables.

It computes nothing, but it notices everything: a wrong block, slot, position or reused block changes the stream, and so
does KV that was computed under a mask. Its KV pool is shaped like a real one, so that it can be logged, and lie in a
log.
"""

import ctypes
import dataclasses
import os
import random
import time
import zlib
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from everserve import errors
from everserve.backends.cpu.reference import ReferenceOps
from everserve.config.engine import EngineConfig
from everserve.engine.batching import Rows, to_batch
from everserve.engine.engine import Engine
from everserve.engine.forward import EagerForward, Forward
from everserve.engine.journal import Journal
from everserve.engine.limits import EngineLimits
from everserve.engine.saved import Saved
from everserve.engine.sequence import Chunk, Sequence
from everserve.engine.speculation import Drafting
from everserve.kvlog.chains import key_of
from everserve.kvlog.layout import LogShape
from everserve.kvlog.log import Log
from everserve.kvlog.writer import LogWriter
from everserve.memory.owned import create_memory
from everserve.model.batch import StepBatch
from everserve.tables.requests import Flow, RequestSpec, SamplingParams, as_tokens
from tests.support import guides

VOCAB = 97
NUM_LAYERS = 2
NUM_PLANES = 2


class ToyModel:
    """The KV of a token is the token itself, once in each layer and plane, never in the same words."""

    def __init__(
        self, num_blocks: int, block_size: int, memory: memoryview | None = None, visible_keys: int | None = None
    ) -> None:
        self.block_size = block_size
        self.visible_keys = visible_keys
        shape = (num_blocks, NUM_LAYERS, NUM_PLANES, block_size)
        self.pool = np.full(shape, -1, np.int64) if memory is None else np.frombuffer(memory, np.int64).reshape(shape)
        self.fail_next = False
        self._last: StepBatch | None = None
        self.mask = 0
        self.on_write: Callable[[], None] = lambda: None  # called again and again while a step writes KV
        self.meanwhile: Callable[[int], None] = lambda layer: None  # called when a layer is written

    def use_mask(self, masked: bytes) -> None:
        self.mask = int.from_bytes(masked, "little")

    def pooled(self, rows: list[int]) -> torch.Tensor:
        """Of the last step: the logits of these rows, for want of anything else that depends on all tokens."""
        assert self._last is not None
        return self._logits(dataclasses.replace(self._last, logits_rows_L=torch.tensor(rows)))

    def __call__(self, batch: StepBatch) -> torch.Tensor:
        self._last = batch
        self._write(batch)
        if self.fail_next:
            self.fail_next = False
            raise StepAbandoned
        return self._logits(batch)

    def _logits(self, batch: StepBatch) -> torch.Tensor:
        wanted = set(batch.logits_rows_L.tolist())
        starts, rows = batch.query_starts_S.tolist(), []
        for i in range(batch.num_seqs):
            table = batch.block_tables_SB[i].numpy()
            for row in range(starts[i], starts[i + 1]):
                if row in wanted:
                    end = int(batch.positions_T[row]) + 1
                    positions = np.arange(max(end - self.visible_keys, 0) if self.visible_keys else 0, end)
                    rows.append(logits_after(self._read(table[positions // self.block_size], positions)))
        return torch.stack(rows) if rows else torch.empty(0, VOCAB)

    def _write(self, batch: StepBatch) -> None:
        blocks, slots = np.divmod(batch.kv_slots_T.numpy(), self.block_size)
        tokens, half = batch.tokens_T.numpy() + VOCAB * self.mask, len(blocks) // 2
        for layer in range(NUM_LAYERS):
            for rows in (slice(half), slice(half, None)):
                for plane in range(NUM_PLANES):
                    self.pool[blocks[rows], layer, plane, slots[rows]] = _kv(tokens[rows], layer, plane)
                self.on_write()
            self.meanwhile(layer)
            self.on_write()

    def _read(self, blocks: np.ndarray, positions: np.ndarray) -> list[int]:
        """The tokens, or -1 where layers or planes do not fit together."""
        found = self.pool[blocks, :, :, positions % self.block_size]
        tokens = found[:, 0, 0] // (NUM_LAYERS * NUM_PLANES)
        for layer in range(NUM_LAYERS):
            for plane in range(NUM_PLANES):
                tokens = np.where(found[:, layer, plane] == _kv(tokens, layer, plane), tokens, -1)
        return tokens.tolist()


def _kv(tokens: np.ndarray, layer: int, plane: int) -> np.ndarray:
    return tokens * (NUM_LAYERS * NUM_PLANES) + layer * NUM_PLANES + plane


class StepAbandoned(errors.StepAbandoned):
    """The injected fault."""

    def __init__(self) -> None:
        super().__init__(0, ())


def logits_after(context: list[int]) -> torch.Tensor:
    """Logits that depend on every token of the context and on their order."""
    seed = zlib.crc32(np.asarray(context, np.int64).tobytes())
    return torch.from_numpy(np.random.default_rng(seed).normal(size=VOCAB).astype(np.float32))


class ToyConfig(NamedTuple):
    """What an engine is told, and what its model allows."""

    engine: EngineConfig
    limits: EngineLimits


def make_config(num_blocks: int = 24, block_size: int = 4, max_model_len: int = 64, **overrides: object) -> ToyConfig:
    """With these limits of an engine, and fields of its config."""
    allowed = {field.name for field in dataclasses.fields(EngineLimits)}
    limits: dict = {name: value for name, value in overrides.items() if name in allowed}
    told: dict = {
        "max_num_seqs": 6,
        "max_num_batched_tokens": 16,
        "max_prefill_while_decoding": 16,
        "max_prefill_slowdown": 0.0,
        "kv_cache_bytes": 0,
        "launch_ahead": True,
        **{name: value for name, value in overrides.items() if name not in allowed},
    }
    return ToyConfig(
        EngineConfig(block_size=block_size, **told),
        EngineLimits(max_model_len=max_model_len, num_blocks=num_blocks, vocab_size=VOCAB, **limits),
    )


def eager(model: ToyModel) -> Forward:
    return EagerForward(
        lambda batch, experts: model(batch), torch.device("cpu"), use_mask=model.use_mask, pooled=model.pooled
    )


class LaggingForward:
    """A device: it computes what was launched in order, when it likes, at the latest when its end is read, and chooses
    tokens. A step behind one that failed is not computed."""

    num_captures = 0
    chooses = draws = True
    may_go_ahead = True

    def __init__(self, model: ToyModel, is_lazy: Callable[[], bool] = lambda: True) -> None:
        self.use_mask = model.use_mask
        self.due_s = 0.0  # when steps should end; and whether they are still running when that is asked
        self.is_running = True
        self.num_ahead = 0  # steps that were launched behind another one
        self._model = model
        self._is_lazy = is_lazy
        self._queue: list[_LaggingStep] = []
        self._chosen: list[int] = []  # by the last step that was computed

    def launch(self, rows: Rows) -> "_LaggingStep":
        self._queue.append(_LaggingStep(self, rows))
        self.num_ahead += len(self._queue) > 1
        assert len(self._queue) <= 2 and (rows.sources_T is not None) == (len(self._queue) == 2)
        if not self._is_lazy():
            self.compute(self._queue[-1])
        return self._queue[-1]

    def compute(self, last: "_LaggingStep") -> None:
        """Everything up to this step."""
        for step in self._queue[: self._queue.index(last) + 1]:
            if step.error is None and step.result is None:
                try:
                    step.result = self._compute(step.rows)
                except StepAbandoned as error:
                    step.error = error
            if step.error is not None:
                return

    def end(self, step: "_LaggingStep") -> None:
        assert step is self._queue.pop(0), "read out of order"
        if step.error is not None:
            self._queue.clear()

    def _compute(self, rows: Rows) -> torch.Tensor | list[int]:
        if rows.sources_T is not None:
            rows = rows._replace(tokens_T=np.array(self._chosen, np.int32)[rows.sources_T])
        logits_LV = self._model(to_batch(rows, torch.device("cpu")))
        if rows.draws_L is None:
            return logits_LV
        self._chosen = ReferenceOps().choose(logits_LV, rows.draws_L) if len(logits_LV) else []
        return self._chosen


class _LaggingStep:
    def __init__(self, forward: LaggingForward, rows: Rows) -> None:
        self.rows = rows
        self.result: torch.Tensor | list[int] | None = None
        self.error: StepAbandoned | None = None
        self._forward = forward

    @property
    def due_s(self) -> float:
        return self._forward.due_s

    def is_running_at(self, time_s: float) -> bool:
        assert time_s < self.due_s
        return self._forward.is_running

    def read(self) -> torch.Tensor | list[int]:
        self._forward.compute(self)
        self._forward.end(self)
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result


class Clairvoyant:
    """Drafts of which some are right: it knows what a stream is alone. `rng` says how many there are, and how many of
    them are what comes."""

    def __init__(
        self,
        rng: random.Random,
        visible_keys: int | None = None,
        alone: Callable[[RequestSpec], list[int]] | None = None,
    ) -> None:
        """`alone`: what a stream is alone; None: one of the toy model."""
        self.num_accepted = self.num_rejected = 0
        self._rng = rng
        self._find = alone or (lambda request: run_alone(request, visible_keys=visible_keys))
        self._alone: dict[str, list[int]] = {}

    def drafts(self, sequences: SequenceOf[Sequence]) -> list[tuple[int, ...]]:
        return [self._drafts(sequence) for sequence in sequences] if self._rng.random() < 0.7 else []

    def may_have_drafts(self, sequences: SequenceOf[Sequence]) -> bool:
        return self._rng.random() < 0.3

    def note(self, given: list[Chunk], counted: list[Chunk], seconds: float) -> None:
        for before, after in zip(given, counted, strict=True):
            assert after.num_tokens <= before.num_tokens
            self.num_accepted += after.num_tokens - 1
            self.num_rejected += before.num_tokens - after.num_tokens

    def _drafts(self, sequence: Sequence) -> tuple[int, ...]:
        """No more than could be of use: room for KV behind the last token is not to be had."""
        given = sequence.spec
        if given.id not in self._alone:
            request = msgspec.structs.replace(given, known=as_tokens([]), masked=None)
            self._alone[given.id] = self._find(request)
        num = min(self._rng.randrange(6), sequence.num_most - len(sequence.tokens) - 1)
        right = self._alone[given.id][sequence.num_output :][: self._rng.randrange(7)]
        wrong = [self._rng.randrange(VOCAB) for _ in range(max(num, 0))]
        return tuple([*right, *wrong][: max(num, 0)])


def make_engine(
    num_blocks: int = 24,
    block_size: int = 4,
    make_forward: Callable[[ToyModel], Forward] = eager,
    clock: Callable[[], float] = time.monotonic,
    drafting: Drafting | None = None,
    **overrides: object,
) -> tuple[Engine, ToyModel]:
    model = ToyModel(num_blocks, block_size, visible_keys=overrides.get("visible_keys"))  # type: ignore[arg-type]
    config = make_config(num_blocks, block_size, **overrides)  # type: ignore[arg-type]
    return Engine(*config, ReferenceOps(), make_forward(model), clock, drafting=drafting), model


class LoggedToy:
    """An engine with a log: beside its pool, or with the pool in it. Memory that holds a log already is adopted."""

    def __init__(
        self, config: ToyConfig, is_in_place: bool, memory: int | None = None, drafting: Drafting | None = None
    ) -> None:
        self.config = config
        self.shape = LogShape(
            num_blocks=config.limits.num_blocks,
            block_size=config.engine.block_size,
            num_layers=NUM_LAYERS,
            num_planes=NUM_PLANES,
            piece_bytes=8,
            num_records=2 * config.engine.max_num_seqs,
            max_blocks=-(-config.limits.max_model_len // config.engine.block_size),
        )
        self.memory = memory if memory is not None else create_memory("log", self.shape.num_bytes)
        self.log = self.open_log()
        pool = self.pool_memory() if is_in_place else None
        limits = config.limits
        self.model = ToyModel(limits.num_blocks, config.engine.block_size, pool, limits.visible_keys)
        writer = self.make_writer()
        assert writer.pool_is_in_log == is_in_place
        self.journal = Journal(writer)
        self.engine = Engine(*config, ReferenceOps(), self.make_forward(), journal=self.journal, drafting=drafting)

    def open_log(self) -> Log:
        return Log(self.memory, self.shape)

    def pool_memory(self) -> memoryview:
        return self.log.blocks

    def make_forward(self) -> Forward:
        return eager(self.model)

    def make_writer(self) -> LogWriter:
        writer = LogWriter(self.log, self.model.pool.ctypes.data)
        function, argument = writer.meanwhile
        meanwhile = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(function)
        self.model.meanwhile = lambda layer: meanwhile(argument, layer)
        return writer

    def find(self, log: Log, id: str) -> Saved | None:
        record = log.find(key_of(id))
        return Saved.of(log, record, self.log) if record is not None else None

    def photograph(self) -> int:
        """The log as it is now, which is how it would be found if this worker died now."""
        copy = create_memory("photograph", self.shape.num_bytes)
        os.pwrite(copy, os.pread(self.memory, self.shape.num_bytes, 0), 0)
        return copy

    def close(self) -> None:
        self.model.pool = np.empty(0, np.int64)
        self.log.close()
        os.close(self.memory)


def mask(mask_id: int) -> tuple[int, bytes]:
    """For `Engine.use_mask`: a mask that changes what the toy computes."""
    return mask_id, mask_id.to_bytes(4, "little") if mask_id else b""


def spec(
    id: str,
    prompt: list[int],
    max_tokens: int = 8,
    flow: Flow | None = None,
    cache_salt: bytes = b"",
    **params: object,
) -> RequestSpec:
    given = SamplingParams(max_tokens=max_tokens, **params)  # type: ignore[arg-type]
    if given.guided is not None:
        given = msgspec.structs.replace(given, stop_ids=(*given.stop_ids, *given.guided.end_ids))
    return RequestSpec(id=id, prompt=as_tokens(prompt), params=given, flow=flow or Flow(), cache_salt=cache_salt)


def run_alone(request: RequestSpec, num_blocks: int = 64, **overrides: object) -> list[int]:
    """The stream when nothing else is there and everything fits."""
    engine, _ = make_engine(num_blocks=num_blocks, max_num_batched_tokens=64, **overrides)
    guides.add(engine, request)
    tokens: list[int] = []
    while engine.has_work:
        tokens += [output.token for output in engine.step().outputs if output.token is not None]
    engine.check()
    return tokens
