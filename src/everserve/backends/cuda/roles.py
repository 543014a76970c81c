"""The two roles of a worker that computes on a GPU."""

import os

from torch import Tensor

from everserve.backends.cuda import kernel_keys, waiting
from everserve.backends.cuda.build import (
    SeatWeights,
    build_decoder,
    build_forward,
    build_server,
    engine_limits,
    make_recorder,
)
from everserve.backends.cuda.device import Device, open_device
from everserve.backends.cuda.expert_loop import CudaExpertLoop
from everserve.backends.cuda.lanes.head_kv import CudaHeadKv
from everserve.backends.cuda.lanes.local_experts import LocalCudaExperts
from everserve.backends.cuda.lanes.peers import CudaPeers
from everserve.backends.cuda.lanes.remote_experts import CudaExperts
from everserve.backends.cuda.lanes.remote_heads import CudaHeads
from everserve.backends.cuda.log.head_fetcher import HeadFetcher
from everserve.backends.cuda.logs import CudaLogs
from everserve.backends.cuda.reaching import calls_of, make_head_fetcher, make_head_kv, make_heads, make_peers
from everserve.backends.cuda.recorder import Recorder
from everserve.backends.cuda.rehearsal import rehearse
from everserve.backends.cuda.sampling import rehearse_sampling
from everserve.backends.cuda.seat_experts import SeatExperts
from everserve.backends.cuda.seat_heads import SeatHeads
from everserve.backends.cuda.step_queue import CapturedExperts
from everserve.engine.engine import Engine
from everserve.engine.speculation import Speculator
from everserve.engine.warm_up import warm_up
from everserve.tables.ids import Role
from everserve.tables.memory import Kind
from everserve.worker.expert_service import ExpertService
from everserve.worker.parts import AttentionParts, Seam, Surroundings

__all__ = ["build_attention", "build_expert", "prepare", "rehearse"]


_FREE_ROWS = 256.0  # first guess of what a step takes before its rows


def prepare() -> None:
    """The zygote must not touch a device: a fork could not use it."""
    kernel_keys.complete()
    waiting.load()


def build_attention(around: Surroundings) -> AttentionParts:
    """Own requests and their KV."""
    start, device = around.start, _open(around)
    logs = CudaLogs(device, around.memory)  # first: it may have to wait for the predecessor, in parallel with the rest
    with around.loading.phase("weights"):
        weights = SeatWeights(device, around.memory)
        decoder = build_decoder(device, weights)
        arena = weights.arena() if Role.EXPERT in start.roles else None
        weights.complete()
    recorder = make_recorder(device)
    seam: Seam | None = None
    heads: CudaHeads | None = None
    head_kv: CudaHeadKv | None = None
    fetcher: HeadFetcher | None = None
    experts: CapturedExperts
    if arena is not None:
        experts = LocalCudaExperts(device.ops, arena, device.model.call_layers, device.model.max_shards)
    else:
        peers = make_peers(device, around.cell, around.warden)
        if device.model.divides_heads:
            fetcher = _make_fetcher(device, around) if logs.is_on else None
            head_kv = make_head_kv(device, peers, fetcher)
        experts = _reach_experts(around, device, recorder, peers, head_kv)
        heads = make_heads(device, experts) if device.model.divides_heads else None
        seam = Seam(peers, experts)
    kv = logs.make_pool(decoder) if heads is None else heads
    forward = build_forward(device, decoder, kv, experts, recorder)
    journal = logs.make_journal(kv) if isinstance(kv, Tensor) else None
    if head_kv is not None and fetcher is not None:
        journal = logs.make_head_journal(head_kv, fetcher)
    limits = engine_limits(device)
    engine = Engine(
        start.settings.engine,
        limits,
        device.ops,
        forward,
        journal=journal,
        kv_elsewhere=head_kv,
        drafting=Speculator.of(start.settings.engine, limits, _FREE_ROWS),
    )
    with around.loading.phase("rehearsal"):
        rehearse_sampling(device)
        if isinstance(experts, CudaExperts):
            experts.rehearse()
        else:
            warm_up(engine)
    pools = fetcher.pools if fetcher is not None else None
    return AttentionParts(engine, seam, logs.keep(), device.ops.name, weights.num_slots, sends_late=True, kv=pools)


def build_expert(around: Surroundings) -> tuple[ExpertService, str]:
    """Own expert slots. Returns the name of the ops too."""
    start, device = around.start, _open(around)
    with around.loading.phase("weights"):
        heads = SeatHeads(device, around.memory.pop(Kind.KV_PIECES)) if device.model.divides_heads else None
    server, slots = build_server(device, SeatExperts(device, around.memory), around.memory[Kind.BELL], heads)
    loop = CudaExpertLoop(
        start, server, slots, around.cell, around.warden, around.control, around.leave, around.events
    )  # fmt: skip
    return loop, device.ops.name


def _make_fetcher(device: Device, around: Surroundings) -> HeadFetcher:
    mirror_fd = around.memory.pop(Kind.KV_MIRROR, None)
    fetcher = make_head_fetcher(device, mirror_fd)
    if mirror_fd is not None:
        os.close(mirror_fd)
    return fetcher


def _open(around: Surroundings) -> Device:
    device = open_device(around.start, around.loading)
    around.control.leave_behind()  # a worker that dies before it is ready has queued work too
    return device


def _reach_experts(
    around: Surroundings, device: Device, recorder: Recorder, peers: CudaPeers, kv: CudaHeadKv | None
) -> CudaExperts:
    return CudaExperts(
        peers,
        device.ops,
        device.driver,
        recorder.cut,
        around.reports,
        detect_ms=around.detect_ms,
        **calls_of(device.model),
        kv=kv,
    )
