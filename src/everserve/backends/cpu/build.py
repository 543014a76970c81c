"""From a StartWorker message to what computes: an engine with its weights, or expert slots with theirs."""

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from everserve.backends.cpu.host_places import SeatMemory
from everserve.backends.cpu.kept_kv import KeptKv
from everserve.backends.cpu.remote_heads import RemoteHeads
from everserve.backends.cpu.select import HostOps, select_ops
from everserve.engine.engine import Engine
from everserve.engine.forward import EagerForward
from everserve.engine.journal import Journal
from everserve.engine.limits import EngineLimits
from everserve.engine.sizing import KvSizes
from everserve.engine.speculation import Speculator
from everserve.engine.warm_up import warm_up
from everserve.kvlog.layout import LogShape
from everserve.kvlog.log import Log, NoBlocks, open_own
from everserve.kvlog.writer import LogWriter
from everserve.memory.kv_pieces import KvPieces, PoolInUseError
from everserve.memory.names import KV_CACHE
from everserve.memory.pieces.parity_layout import ParityShape
from everserve.memory.weights.expert_memory import ExpertMemory
from everserve.model.checkpoint import Checkpoint
from everserve.model.config import ModelConfig
from everserve.model.decoder import Decoder, DecoderSteps
from everserve.model.expert_half import ExpertHalf
from everserve.model.fingerprint import check_unchanged, expert_identity
from everserve.model.head_half import HeadHalf
from everserve.model.layout import check_headers
from everserve.model.weights import Weights, resolve_dtype
from everserve.plan.expert_memory import ExpertMemoryPlan
from everserve.plan.prefill import TokenCost
from everserve.procs.host import num_cores
from everserve.seam.experts import Experts
from everserve.seam.heads import Heads, NoHeads
from everserve.tables.block_ranges import NO_BLOCKS, BlockRange, block_range_of, parking_range_of
from everserve.tables.calls import ShardKind
from everserve.tables.memory import Kind
from everserve.tables.slots import EMPTY, SeatSlots
from everserve.wire.messages import StartWorker
from everserve.worker.loading import Loading
from everserve.worker.shortage import memory_for

log = logging.getLogger(__name__)

_FREE_ROWS = 3.0  # first guess of what a step takes before its rows
_PREDECESSOR_S, _LOOK_EVERY_S = 30.0, 0.01


@dataclass(frozen=True)
class Opened:
    """A model with a checked directory, and the ops that will compute it."""

    model: ModelConfig
    checkpoint: Checkpoint
    ops: HostOps
    sizes: KvSizes
    loading: Loading


def open_model(start: StartWorker, loading: Loading | None = None) -> Opened:
    """Check everything that can be checked from headers. Raises UserError with one clear line."""
    settings = start.settings
    directory, compute = Path(settings.model.directory), settings.compute
    model = ModelConfig.from_source(settings.model)
    checkpoint = Checkpoint.open(directory)
    check_unchanged(directory, settings.model.fingerprint)
    check_headers(model, checkpoint.headers)
    sizes = KvSizes.of(model, settings.engine, settings.model.dtype)
    torch.set_num_threads(1)  # the ops have their own threads; two pools would fight for the cores
    torch.set_grad_enabled(False)
    ops = select_ops(model, compute.num_threads or fair_num_threads(start.num_workers), compute.batch_invariant)
    return Opened(model, checkpoint, ops, sizes, loading or Loading(start))


def fair_num_threads(num_workers: int) -> int:
    """The cores of this machine, shared by the workers on it; one thread each where workers outnumber cores."""
    return max(1, num_cores() // num_workers)


def has_spare_cores(num_workers: int) -> bool:
    """Whether a worker may spin while it waits: there is a core for every process."""
    num_other_processes = 2  # the gateway is busy too, and the orchestrator now and then
    return num_cores() >= num_workers + num_other_processes


def load_experts(opened: Opened, dtype: str, slots: SeatSlots | None) -> ExpertHalf:
    """The expert slots of one seat; None: every expert in the slot of its own number."""
    filled: Sequence[Sequence[int]] = [range(cut.num_shards) for cut in opened.model.cuts]
    if slots is not None:
        filled = slots.experts
    if opened.model.divides_heads:
        calls = zip(opened.model.calls, filled, strict=True)
        filled = [experts for call, experts in calls if call.kind is not ShardKind.HEAD]
    num_slots = [len(experts) for experts in filled]
    half = ExpertHalf(opened.model, opened.checkpoint, opened.ops, num_slots=num_slots, dtype=dtype)
    progress = opened.loading.part("experts")
    if slots is None:
        half.load_all(progress=progress)
        return half
    places = [
        (layer, expert, slot)
        for layer, experts in zip(opened.model.call_layers, filled, strict=True)
        for slot, expert in enumerate(experts)
        if expert != EMPTY
    ]
    for done, (layer, expert, slot) in enumerate(places):
        half.load(layer, expert, slot)
        progress(done + 1, len(places))
    return half


def load_heads(opened: Opened, start: StartWorker, memory: dict[Kind, int]) -> tuple[HeadHalf, KvPieces]:
    """The heads of one seat, and their KV in the seat's own memory, where a predecessor may have left some."""
    model, slots, settings = opened.model, start.slots, start.settings
    assert slots is not None
    kv = _open_pool(opened, start, memory)
    shape = (kv.shape.num_blocks, kv.shape.num_pieces, 2, settings.engine.block_size, model.head_size)
    kv_pool = torch.frombuffer(kv.blocks, dtype=resolve_dtype(settings.model.dtype, model)).view(shape)
    held = {
        call.layer: heads for call, heads in zip(model.calls, slots.experts, strict=True) if call.kind is ShardKind.HEAD
    }
    num_slots = max(map(len, held.values()))
    half = HeadHalf(
        model, opened.checkpoint, opened.ops, num_slots, opened.sizes.max_model_len, kv, kv_pool, settings.model.dtype
    )
    progress = opened.loading.part("heads")
    places = [(layer, head, slot) for layer in held for slot, head in enumerate(held[layer]) if head != EMPTY]
    for done, place in enumerate(places):
        half.load(*place)
        progress(done + 1, len(places))
    return half, kv


def _open_pool(opened: Opened, start: StartWorker, memory: dict[Kind, int]) -> KvPieces:
    """Opens the pool with its mirror or its parity; takes over the descriptors."""
    fd, shadows = memory.pop(Kind.KV_PIECES), [memory.pop(kind, None) for kind in (Kind.KV_MIRROR, Kind.KV_PARITY)]
    pool = _wait_for_pool(fd, opened.sizes.parity(opened.model, start.capacity), *shadows)
    for one in (fd, *shadows):
        if one is not None:
            os.close(one)
    return pool


def _wait_for_pool(fd: int, parity: ParityShape, mirror_fd: int | None, parity_fd: int | None) -> KvPieces:
    """A predecessor that was stopped is killed within seconds; until then it could write to the pool."""
    deadline = time.monotonic() + _PREDECESSOR_S
    while True:
        try:
            return KvPieces(fd, parity.pool, mirror_fd, parity_fd, parity)
        except PoolInUseError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_LOOK_EVERY_S)


def load_into_memory(
    opened: Opened, start: StartWorker, memory: dict[Kind, int], check_source: Callable[[], None]
) -> tuple[ExpertHalf, SeatMemory]:
    """The expert slots of one seat in the seat's own memory. What a predecessor has left there is not loaded again."""
    source, slots, model = start.settings.model, start.slots, opened.model
    assert slots is not None
    num_slots = tuple(map(len, slots.experts))
    with_mapped = [num + start.capacity.mapped_slots for num in num_slots]
    half = ExpertHalf(model, opened.checkpoint, opened.ops, num_slots=with_mapped, dtype=source.dtype)
    dtype = model.dtype if source.dtype == "auto" else source.dtype
    plan = ExpertMemoryPlan.of(model, dtype, num_slots, source.shard_bytes)
    own = ExpertMemory(plan, [memory.pop(kind) for kind in (Kind.WEIGHTS, Kind.WEIGHTS_STATE)])
    identity = expert_identity(f"{source.directory}:{source.fingerprint}", model, source.dtype, plan.slot_bytes)
    seat = SeatMemory(half, own, identity, start.incarnation, check_source, start.rank % plan.num_layers)
    backup = next((piece for piece in start.memory if piece.kind is Kind.BACKUP), None)
    if backup is not None:
        seat.slots.offer(None, backup, [memory.pop(kind) for kind in (Kind.BACKUP, Kind.BACKUP_STATE)])
    num_found = seat.load(slots, opened.loading.part("experts"))
    log.info("%d expert slots were in memory already", num_found)
    return half, seat


class EngineBuilder:
    """Loads the attention half and makes an engine of it, whatever its experts are reached through.

    `log_fd`: the memory of its log; None without one. The descriptor is ours.
    """

    def __init__(self, start: StartWorker, opened: Opened, log_fd: int | None = None) -> None:
        self._start = start
        self._opened = opened
        self.log: Log | None = None
        self.writer: LogWriter | None = None
        if log_fd is not None:
            with memory_for(start.rank, Kind.LOG, self._log_shape.num_bytes):
                self.log = open_own(lambda: self.open_log(log_fd), log_fd, self._log_shape)
            os.close(log_fd)

    @property
    def _log_shape(self) -> LogShape:
        sizes, capacity = self._opened.sizes, self._start.capacity
        if not self._opened.model.divides_heads:
            return sizes.log
        assert capacity.devices is not None
        return sizes.records(capacity.devices)

    def open_log(self, fd: int) -> Log:
        """One like ours. The descriptor stays the caller's."""
        return Log(fd, self._log_shape, NoBlocks() if self._opened.model.divides_heads else None)

    def build(self, experts: Experts, heads: RemoteHeads | None = None) -> Engine:
        """`heads`: where they and their KV are; None: here."""
        settings, ops, sizes = self._start.settings, self._opened.ops, self._opened.sizes
        decoder = Decoder(
            self._opened.model,
            Weights(self._opened.model, self._opened.checkpoint, settings.model.dtype, ops.device, ops.reads_quantised),
            ops,
            sizes.max_model_len,
            progress=self._opened.loading.part("layers"),
            has_heads=heads is None,
        )
        pool = self._make_pool(decoder) if heads is None else None
        kv: Tensor | Heads = pool if pool is not None else self._no_heads()
        if self.log is not None:
            self.writer = LogWriter(self.log, pool.data_ptr()) if pool is not None else _kept(self.log, heads)
        steps = DecoderSteps(decoder, kv)
        forward = EagerForward(
            steps.compute,
            ops.device,
            use_mask=decoder.masks.use,
            pooled=steps.pooled,
        )
        limits = EngineLimits(
            max_model_len=sizes.max_model_len,
            num_blocks=sizes.num_blocks,
            first_block=block_range_of(self._start.rank, sizes.num_blocks).first_block if heads is not None else 0,
            parking=self._parking() if heads is not None else NO_BLOCKS,
            visible_keys=self._opened.model.visible_keys if heads is None else None,
            vocab_size=self._opened.model.vocab_size,
            token_cost=TokenCost.of_model(self._opened.model),
        )
        engine = Engine(
            settings.engine,
            limits,
            ops,
            forward,
            journal=Journal(self.writer) if self.writer is not None else None,
            kv_elsewhere=heads.kv if heads is not None else None,
            drafting=Speculator.of(settings.engine, limits, _FREE_ROWS),
        )
        warm_up(engine)  # alone: the experts, and heads that are elsewhere, may not be there yet
        forward.experts, steps.kv = experts, heads if heads is not None else kv
        return engine

    def _parking(self) -> BlockRange:
        """Blocks that only mirrors have."""
        num_homes, rank = self._start.capacity.devices, self._start.rank
        if self._start.settings.log.kv_shadow != "mirror":
            return NO_BLOCKS
        assert num_homes is not None, "divided heads have devices"
        return parking_range_of(rank, self._opened.sizes.num_blocks, num_homes)

    def _no_heads(self) -> Heads:
        return NoHeads(self._opened.model.num_heads * self._opened.model.head_size)

    def _make_pool(self, decoder: Decoder) -> Tensor:
        """A pool that is not zeroed: pages are only touched, and paid for, as streams need them."""
        shape = decoder.kv_shape(self._opened.sizes.num_blocks, self._start.settings.engine.block_size)
        if self.log is not None and self._start.settings.log.mode == "anchor":
            return torch.frombuffer(self.log.blocks, dtype=decoder.kv_dtype).view(shape)
        with memory_for(self._start.rank, KV_CACHE, math.prod(shape) * decoder.kv_dtype.itemsize):
            return torch.empty(shape, dtype=decoder.kv_dtype, device=self._opened.ops.device)


def _kept(log: Log, heads: RemoteHeads | None) -> KeptKv:
    assert heads is not None, "KV is here, or where heads are"
    return KeptKv(log, heads)
