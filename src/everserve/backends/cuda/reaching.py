"""What an attention worker on a GPU reaches the shards of other workers with."""

from collections.abc import Collection, Mapping, Sequence
from typing import TypedDict

from everserve.backends.cuda.device import Device
from everserve.backends.cuda.head_memory import head_shape
from everserve.backends.cuda.lanes.head_kv import CudaHeadKv
from everserve.backends.cuda.lanes.page import page_shape
from everserve.backends.cuda.lanes.peers import CudaPeers
from everserve.backends.cuda.lanes.remote_experts import CudaExperts
from everserve.backends.cuda.lanes.remote_heads import CudaHeads
from everserve.backends.cuda.log.head_fetcher import HeadFetcher
from everserve.backends.cuda.log.head_mirror import HeadMirror, HeadMirrors
from everserve.backends.cuda.log.head_pools import HeadPools
from everserve.backends.cuda.log.low_priority_stream import SideStream
from everserve.memory.liveness import Cell
from everserve.model.config import ModelConfig
from everserve.plan.head_memory import HeadMemoryPlan
from everserve.seam.trust import Watcher
from everserve.tables.calls import ShardKind


class CallNumbers(TypedDict):
    """How layers and calls are numbered (CudaExperts)."""

    call_of: Mapping[int, int] | None
    layer_of: Sequence[int] | None
    to_all: Collection[int]


def calls_of(model: ModelConfig) -> CallNumbers:
    to_all = model.numbers_of(ShardKind.SLICE).keys()
    if not model.divides_heads:
        return CallNumbers(call_of=None, layer_of=None, to_all=to_all)
    call_of = model.numbers_of(ShardKind.EXPERT, ShardKind.SLICE)
    return CallNumbers(call_of=call_of, layer_of=[call.layer for call in model.calls], to_all=to_all)


def make_peers(device: Device, cell: Cell, warden: Watcher, model: ModelConfig | None = None) -> CudaPeers:
    """`model`: if it is not the device's."""
    start, model = device.start, model or device.model
    return CudaPeers(
        start.rank,
        start.incarnation,
        cell,
        warden,
        device.lane_shape,
        model.call_numbers,
        model.max_shards,
        device.driver,
        range(start.capacity.max_workers),
        device.ops.words,
    )


def make_head_fetcher(device: Device, mirror_fd: int | None, is_rehearsal: bool = False) -> HeadFetcher:
    """A fetcher for the heads of all layers, wherever they are. `mirror_fd`: of this home's mirror, if there is one; it
    stays the caller's. A rehearsal does without what takes long, and is not within the device's reach.
    """
    model, shape, side = device.model, head_shape(device), SideStream(device.torch_device)
    num_pieces = device.start.capacity.head_pieces
    plan = HeadMemoryPlan.of(model, num_pieces, shape.num_blocks, shape.block_size)
    heads = [(layer, head) for layer in model.numbers_of(ShardKind.HEAD) for head in range(model.num_kv_heads)]
    mirrors = None
    if mirror_fd is not None:
        own = HeadMirror(mirror_fd, device.sizes.mirror(), device.start.rank)
        if not is_rehearsal:
            own.register(device.driver)
        mirrors = HeadMirrors(own, side)
    return HeadFetcher(HeadPools(device.driver, plan, side.wait, mirrors), heads, side, mirrors)


def make_head_kv(device: Device, peers: CudaPeers, fetcher: HeadFetcher | None) -> CudaHeadKv:
    return CudaHeadKv(peers, device.model.numbers_of(ShardKind.HEAD), device.model.num_kv_heads, fetcher)


def make_heads(device: Device, experts: CudaExperts, model: ModelConfig | None = None) -> CudaHeads:
    """`model`: if it is not the device's."""
    model = model or device.model
    return CudaHeads(
        experts.calls,
        device.ops,
        model.numbers_of(ShardKind.HEAD),
        model.num_kv_heads,
        head_shape(device).answer_size,
        page_shape(model, device.start.settings.engine),
    )
