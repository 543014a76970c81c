"""What a spare does ahead of need on a GPU: it opens the device and builds what workers build, around weights that are
not there.

Kernels are compiled and loaded when they are first launched, for the very sizes that they are launched with, so nothing
less will do. But every kernel looks at the word `stop` first and does nothing if it is set (and an expert worker has
nothing to do before it gets a request): a weight only needs the right shape. That a model has many layers
makes no difference to its kernels either: the first of each kind is enough.

What a worker does only now and then is done too: send rows again, write and read a log, choose tokens in every way.

What stays is the context and the code of the kernels. Everything else is let go of.
"""

import gc
import os
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from everserve.backends.cuda.build import build_forward, make_recorder
from everserve.backends.cuda.device import Device, open_device, tensor_at
from everserve.backends.cuda.head_memory import head_shape, head_tables, load_norms
from everserve.backends.cuda.lanes.local_experts import LocalCudaExperts
from everserve.backends.cuda.lanes.page import page_shape
from everserve.backends.cuda.lanes.remote_experts import CudaExperts
from everserve.backends.cuda.lanes.server import CudaServer
from everserve.backends.cuda.logs import rehearse_log
from everserve.backends.cuda.ops.experts import ExpertArena
from everserve.backends.cuda.ops.heads import HeadArena
from everserve.backends.cuda.placed_weights import PlacedWeights
from everserve.backends.cuda.reaching import calls_of, make_heads, make_peers
from everserve.backends.cuda.sampling import rehearse_sampling
from everserve.backends.cuda.seat_experts import make_arena
from everserve.backends.cuda.transfer import DeviceStream
from everserve.memory.liveness import CELL_BYTES, Cell, Warden
from everserve.model.config import ModelConfig
from everserve.model.decoder import Decoder
from everserve.plan.head_memory import HeadMemoryPlan
from everserve.plan.weights import ALIGNMENT, PlannedTensor, WeightsPlan
from everserve.procs.device_descriptors import entrust
from everserve.seam.healing import NO_REPORTS
from everserve.tables.ids import Role
from everserve.tables.slots import EMPTY
from everserve.wire.channel import Channel
from everserve.wire.messages import StartWorker
from everserve.worker.loading import Loading

_NOWHERE_BYTES = 2 << 20  # a beginning for each tensor, and a row of the largest one
_DETECT_MS = 1000.0


def rehearse(like: Iterable[StartWorker], lifeline: Channel) -> None:
    """Does what can be done ahead for workers like these, which are on the same device."""
    for start in like:
        device = open_device(start, Loading(start))
        entrust(lifeline)
        if Role.ATTENTION in start.roles:
            _rehearse_attention(device)
            rehearse_log(device)
            rehearse_sampling(device)
        else:
            _rehearse_expert(device)
        torch.cuda.synchronize()
        device.driver.close()
        del device
        gc.collect()
        torch.cuda.empty_cache()


class _Nowhere:
    """Tensors of any shape, each at an address of its own, with hardly any memory behind them."""

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.zeros(_NOWHERE_BYTES, dtype=torch.uint8, device=device)
        self._num_tensors = 0

    def tensor(self, shape: tuple[int, ...], *, is_exact: bool = False) -> Tensor:
        self._num_tensors += 1
        return tensor_at(self.address + self._num_tensors * ALIGNMENT, shape, is_exact=is_exact)

    def view(self, place: PlannedTensor) -> Tensor:
        return self.tensor(place.shape, is_exact=place.is_exact)

    @property
    def address(self) -> int:
        return self._memory.data_ptr()


def _rehearse_attention(device: Device) -> None:
    start, ops, sizes = device.start, device.ops, device.sizes
    nowhere, model = _Nowhere(device.torch_device), _first_of_each_kind(device.model)
    ops.words.stop.fill_(1)
    torch.cuda.synchronize()  # or another stream's kernels would not see it, and read what is not there
    plan = WeightsPlan.of(model, (Role.ATTENTION,), num_slots=0)
    weights = PlacedWeights(model, device.checkpoint, device.torch_device, plan, nowhere.view, is_complete=True)
    decoder = Decoder(model, weights, ops, sizes.max_model_len, has_heads=not model.divides_heads)
    num_blocks, _, *block = decoder.kv_shape(sizes.num_blocks, start.settings.engine.block_size)
    kv_pool = nowhere.tensor((num_blocks, device.model.num_layers, *block))
    recorder = make_recorder(device)
    if Role.EXPERT in start.roles:
        arena = _arena(model, model.max_shards, nowhere)
        local = LocalCudaExperts(ops, arena, model.call_layers, model.max_shards)
        build_forward(device, decoder, kv_pool, local, recorder)
        return
    cell = _own_cell()
    peers = make_peers(device, cell, Warden(cell, _DETECT_MS), model)
    experts = CudaExperts(
        peers,
        ops,
        device.driver,
        recorder.cut,
        NO_REPORTS,
        detect_ms=_DETECT_MS,
        **calls_of(model),
    )
    kv = make_heads(device, experts, model) if model.divides_heads else kv_pool
    build_forward(device, decoder, kv, experts, recorder)
    experts.rehearse()
    torch.cuda.synchronize()
    peers.end()
    cell.close()


def _rehearse_expert(device: Device) -> None:
    start, model = device.start, device.model
    assert start.slots is not None, "an expert worker is told its slots"
    nowhere, num_slots = _Nowhere(device.torch_device), start.capacity.lane_slots
    arena, num_calls = _arena(model, num_slots, nowhere), len(model.calls)
    heads = is_head_L = None
    if model.divides_heads:
        heads = _heads(device, nowhere)
        is_head_L = torch.zeros(num_calls, dtype=torch.int32, device=device.torch_device)
        arena.number_by(range(len(model.cuts)), num_calls)
    server = CudaServer(
        device.driver,
        arena,
        device.lane_shape,
        start.capacity.max_workers,
        torch.full((num_calls, num_slots), EMPTY, dtype=torch.int32),
        nowhere.address,
        device.torch_device,
        model.max_shards,
        heads,
        is_head_L,
    )
    DeviceStream(device.driver, device.torch_device)
    server.end()


def _first_of_each_kind(model: ModelConfig) -> ModelConfig:
    """The same model, but no longer than it takes to have seen all kinds of layers."""
    kinds = model.layers
    num_layers = 1 + max(kinds.index(kind) for kind in {*kinds})
    return replace(model, spec=replace(model.spec, layers=kinds[:num_layers]))


def _arena(model: ModelConfig, num_slots: int, nowhere: _Nowhere) -> ExpertArena:
    plan = WeightsPlan.of(model, (Role.EXPERT,), num_slots)
    return make_arena(model, nowhere.view(plan.tensor("experts")), num_slots)


def _heads(device: Device, nowhere: _Nowhere) -> HeadArena:
    """There are no requests, so nothing of its memory is touched."""
    model, start, shape = device.model, device.start, head_shape(device)
    plan = HeadMemoryPlan.of(model, start.capacity.head_pieces, shape.num_blocks, shape.block_size)
    return HeadArena(
        shape,
        nowhere.tensor(plan.weights_shape),
        nowhere.tensor(plan.pool_shape),
        head_tables(device),
        load_norms(device),
        len(model.calls),
        start.capacity.lane_slots,
        device.lane_shape.max_rows,
        page_shape(model, start.settings.engine),
    )


def _own_cell() -> Cell:
    fd = os.memfd_create("everserve-rehearsal")
    os.ftruncate(fd, CELL_BYTES)
    cell = Cell(fd)
    os.close(fd)
    return cell
