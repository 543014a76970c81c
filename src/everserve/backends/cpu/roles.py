"""The two roles of a worker that computes on CPUs."""

import importlib
from collections.abc import Sequence

from everserve.backends.cpu import lane, ops
from everserve.backends.cpu.build import (
    EngineBuilder,
    Opened,
    has_spare_cores,
    load_experts,
    load_heads,
    load_into_memory,
    open_model,
)
from everserve.backends.cpu.exchange import Exchange
from everserve.backends.cpu.expert_loop import ExpertLoop
from everserve.backends.cpu.lane import LaneShape
from everserve.backends.cpu.local_experts import LocalExperts
from everserve.backends.cpu.peers import ExpertPeers
from everserve.backends.cpu.remote_experts import RemoteExperts
from everserve.backends.cpu.remote_heads import RemoteHeads
from everserve.backends.cpu.slots import MappedSlots
from everserve.kvlog import library
from everserve.memory import liveness
from everserve.memory.pieces import library as pieces_library
from everserve.memory.weights import copying
from everserve.model.fingerprint import check_unchanged
from everserve.tables.calls import ShardKind
from everserve.tables.ids import Role
from everserve.tables.memory import Kind
from everserve.wire.channel import Channel
from everserve.wire.messages import StartWorker
from everserve.worker.expert_service import ExpertService
from everserve.worker.logs import KeptLogs
from everserve.worker.parts import AttentionParts, Seam, Surroundings
from everserve.worker.slot_changes import ChangeableSlots

_SPIN_US = 50.0  # before a worker that waits for another one sleeps


def prepare() -> None:
    """Compile, if that was never done on this machine, and load."""
    importlib.import_module("everserve.backends.cpu.whole_layers")  # ops import it only when they need it
    ops.unavailable()
    lane.load()
    library.load()
    liveness.load()
    copying.load()
    pieces_library.load()


def rehearse(like: Sequence[StartWorker], lifeline: Channel) -> None:
    """Does nothing: on CPUs nothing is left to do."""


def build_attention(around: Surroundings) -> AttentionParts:
    """Own requests and their KV."""
    start, log_fd = around.start, around.memory.get(Kind.LOG)
    opened = open_model(start, around.loading)
    builder = EngineBuilder(start, opened, log_fd)
    seam: Seam | None = None
    if Role.EXPERT in start.roles:
        engine = builder.build(LocalExperts(load_experts(opened, start.settings.model.dtype, slots=None)))
    else:
        peers, experts, heads = _reach_shards(around, opened)
        seam = Seam(peers, experts)
        engine = builder.build(experts, heads)
        if builder.writer is not None and not builder.writer.is_elsewhere:
            experts.do_meanwhile(*builder.writer.meanwhile)
    logs = KeptLogs(
        (lambda fd, _: builder.open_log(fd)) if log_fd is not None else None,
        builder.log,
        shares_blocks_with=start.rank if opened.model.divides_heads else None,
    )
    num_slots = opened.model.num_experts if seam is None else 0
    return AttentionParts(engine, seam, logs, opened.ops.name, num_slots)


def build_expert(around: Surroundings) -> tuple[ExpertService, str]:
    """Own expert slots. Returns the name of the ops too."""
    start, source = around.start, around.start.settings.model
    opened = open_model(start, around.loading)

    def check_source() -> None:
        check_unchanged(source.directory, source.fingerprint)

    slots: ChangeableSlots
    heads, kv, memory = None, None, None
    if opened.model.divides_heads:
        heads, kv = load_heads(opened, start, around.memory)
    if source.weights == "memory":
        experts, memory = load_into_memory(opened, start, around.memory, check_source)
        slots = memory.slots
    else:
        experts = load_experts(opened, source.dtype, start.slots)
        slots = MappedSlots(experts, check_source, heads)
    loop = ExpertLoop(
        start,
        experts,
        slots,
        around.cell,
        around.warden,
        around.control,
        around.leave,
        around.events,
        spin_us=_spin_us(around),
        heads=heads,
        kv=kv,
    )
    if memory is not None:
        memory.offers.fill_backups()
    return loop, opened.ops.name


def _reach_shards(around: Surroundings, opened: Opened) -> tuple[ExpertPeers, RemoteExperts, RemoteHeads | None]:
    start, model = around.start, opened.model
    shape = LaneShape.for_engine(model, start.settings.engine)
    peers = ExpertPeers(
        start.rank, start.incarnation, around.cell, around.warden, shape, model.call_numbers, model.max_shards
    )
    exchange = Exchange(
        peers,
        around.reports,
        detect_ms=around.detect_ms,
        spin_us=_spin_us(around),
        layer_of=dict(zip(model.call_numbers, (call.layer for call in model.calls), strict=True)),
    )
    experts = RemoteExperts(exchange, opened.ops, model.numbers_of(ShardKind.EXPERT, ShardKind.SLICE))
    if not model.divides_heads:
        return peers, experts, None
    answer_size = model.num_heads // model.num_kv_heads * model.head_size
    heads = RemoteHeads(
        exchange,
        model.numbers_of(ShardKind.HEAD),
        model.num_kv_heads,
        answer_size,
        row_bytes=2 * opened.sizes.log.piece_bytes,
        block_size=opened.sizes.log.block_size,
    )
    return peers, experts, heads


def _spin_us(around: Surroundings) -> float:
    return _SPIN_US if has_spare_cores(max(around.start.num_workers, around.start.capacity.max_workers)) else 0.0
