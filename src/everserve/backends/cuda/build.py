"""From a StartWorker message to what computes on a GPU.

Weights lie in memory of the seat, which outlives its workers: the first one fills it, the next ones find it full and
load nothing.
"""

import os

import torch
from torch import Tensor

from everserve.backends.cuda.backup_copy import BackupCopy
from everserve.backends.cuda.call_slots import FfnKernels
from everserve.backends.cuda.captured import CapturedForward
from everserve.backends.cuda.device import Device, tensor_at
from everserve.backends.cuda.device_places import DevicePlaces, SlotKernels
from everserve.backends.cuda.expert_files import ExpertFiles
from everserve.backends.cuda.lanes.server import CudaServer
from everserve.backends.cuda.ops.experts import ExpertArena
from everserve.backends.cuda.placed_weights import PlacedWeights
from everserve.backends.cuda.recorder import Recorder
from everserve.backends.cuda.seat_experts import SeatExperts, make_arena
from everserve.backends.cuda.seat_heads import SeatHeads
from everserve.backends.cuda.step_queue import CapturedExperts
from everserve.backends.cuda.transfer import DeviceStream
from everserve.backends.cuda.weights_state import WeightsState, identity_of
from everserve.engine.limits import EngineLimits
from everserve.memory.device import Mapping
from everserve.memory.names import BELL_BYTES, bell_at
from everserve.memory.weights.offers import Offers
from everserve.memory.weights.slots import MemorySlots
from everserve.model.decoder import Decoder
from everserve.model.fingerprint import check_unchanged
from everserve.model.weights import Weights
from everserve.plan.prefill import TokenCost
from everserve.plan.steps import StepWork
from everserve.plan.weights import PlannedTensor, WeightsPlan
from everserve.seam.heads import Heads
from everserve.tables.block_ranges import block_range_of
from everserve.tables.ids import Role
from everserve.tables.memory import Kind
from everserve.worker.slot_changes import ChangeableSlots

_MAX_RESTORED = {"anchor": 1 << 19, "mirror": 2048, "off": 0}  # tokens, while streams wait: some TB/s, or some GB/s


class SeatWeights:
    """The weights of a seat with the attention role, in its memory: with the expert role too, all experts are among
    them. `is_complete`: a predecessor has loaded them."""

    def __init__(self, device: Device, memory: dict[Kind, int]) -> None:
        start = device.start
        self._device = device
        self.num_slots = _num_slots(device)
        self.plan = self.plan_of(device)
        self._mapping = Mapping(device.driver, memory[Kind.WEIGHTS], self.plan.num_bytes)
        self._state = WeightsState(memory[Kind.WEIGHTS_STATE])
        for kind in (Kind.WEIGHTS, Kind.WEIGHTS_STATE):
            os.close(memory[kind])
        source = start.settings.model
        files = f"{source.load_format}:{source.directory}:{source.fingerprint}"
        self._identity = identity_of(files, device.model, source.dtype, start.roles)
        self.is_complete = self._state.holds(self._identity)
        if not self.is_complete:
            check_unchanged(source.directory, source.fingerprint)
            self._state.begin(self._identity)

    @staticmethod
    def plan_of(device: Device) -> WeightsPlan:
        return WeightsPlan.of(device.model, device.start.roles, _num_slots(device))

    def view(self, tensor: PlannedTensor) -> Tensor:
        return tensor_at(self._mapping.address + tensor.offset, tensor.shape, is_exact=tensor.is_exact)

    def placed(self) -> PlacedWeights:
        """The weights in their places, for a Decoder."""
        device = self._device
        return PlacedWeights(
            device.model, device.checkpoint, device.torch_device, self.plan, self.view, self.is_complete
        )

    def arena(self) -> ExpertArena:
        """All experts or slices, loaded, each in the slot of its number."""
        model = self._device.model
        arena = make_arena(model, self.view(self.plan.tensor("experts")), self.num_slots)
        if not self.is_complete:
            self._load(arena)
        return arena

    def _load(self, arena: ExpertArena) -> None:
        device, model = self._device, self._device.model
        weights = Weights(model, device.checkpoint, "bfloat16", device.torch_device)
        places = [(index, expert) for index, cut in enumerate(model.cuts) for expert in range(cut.num_shards)]
        progress = device.loading.part("experts")
        for done, (index, expert) in enumerate(places):
            arena.fill(index, expert, *weights.shard(weights.layout.shard(model.call_layers[index], expert)).decoded())
            progress(done + 1, len(places))

    def complete(self) -> None:
        """Everything is loaded: record that for the next incarnation."""
        torch.cuda.synchronize(self._device.torch_device)
        self._state.complete(self._identity)


def _num_slots(device: Device) -> int:
    """Expert slots per layer, one for each expert or slice; 0 without the expert role."""
    return device.model.max_shards if Role.EXPERT in device.start.roles else 0


def build_decoder(device: Device, weights: SeatWeights) -> Decoder:
    return Decoder(
        device.model,
        weights.placed(),
        device.ops,
        device.sizes.max_model_len,
        progress=device.loading.part("layers"),
        has_heads=not device.model.divides_heads,
    )


def make_pool(device: Device, decoder: Decoder) -> Tensor:
    shape = decoder.kv_shape(device.sizes.num_blocks, device.start.settings.engine.block_size)
    return torch.empty(shape, dtype=torch.bfloat16, device=device.torch_device)


def make_recorder(device: Device) -> Recorder:
    return Recorder(torch.cuda.Stream(device.torch_device, priority=-1))


def build_forward(
    device: Device, decoder: Decoder, kv: Tensor | Heads, experts: CapturedExperts, recorder: Recorder
) -> CapturedForward:
    engine = device.start.settings.engine
    return CapturedForward(
        decoder,
        kv,
        experts,
        recorder,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_blocks=-(-device.sizes.max_model_len // engine.block_size),
        block_size=engine.block_size,
        loading=device.loading,
    )


def build_server(
    device: Device, experts: SeatExperts, bell_fd: int, heads: SeatHeads | None = None
) -> tuple[CudaServer, ChangeableSlots]:
    """Everything that slots need later is made here: no graph waits yet, and some of it may need the whole device.
    `heads`: where they are divided."""
    start = device.start
    with device.loading.phase("weights"):
        experts.prepare()
    held_LS = torch.tensor(experts.table.experts(), dtype=torch.int32)
    if heads is not None:
        held_LS = heads.by_call(held_LS)
        experts.arena.number_by(heads.ffn_calls, len(held_LS))
    bell = Mapping(device.driver, bell_fd, BELL_BYTES)
    os.close(bell_fd)
    with device.loading.phase("graphs"):
        server = CudaServer(
            device.driver,
            experts.arena,
            device.lane_shape,
            start.capacity.max_workers,
            held_LS,
            bell_at(bell.address, start.incarnation),
            device.torch_device,
            device.model.max_shards,
            heads.memory.arena if heads is not None else None,
            heads.is_head_L if heads is not None else None,
            heads.memory.pool if heads is not None else 0,
        )
    slots = _build_slots(device, experts, server if heads is None else FfnKernels(server, heads.ffn_calls))
    if heads is None:
        return server, slots
    heads.memory.own()
    return server, heads.slots(slots, server)


def _build_slots(device: Device, experts: SeatExperts, kernels: SlotKernels) -> MemorySlots[int]:
    start, model = device.start, device.model
    files, num_layers = ExpertFiles(device), len(model.cuts)
    stream = DeviceStream(device.driver, device.torch_device)
    places = DevicePlaces(device.driver, experts.range, experts.plan, model.max_shards, kernels, stream, files)
    copy_out = BackupCopy(
        device.driver,
        experts.table,
        lambda index, slot: experts.range.place_address(experts.arena.own_place(index, slot)),
        experts.range.place_bytes,
        files.load if files.are_there else None,
    )
    offers = Offers(places, experts.identity, copy_out, first_layer=start.rank % num_layers)
    offers.fill_backups()
    num_slots, num_own = [experts.arena.num_slots] * num_layers, [experts.table.num_slots] * num_layers
    slots = MemorySlots(experts.table, num_slots, num_own, [model.max_shards] * num_layers, places, offers)
    slots.take_over()
    return slots


def engine_limits(device: Device) -> EngineLimits:
    divides = device.model.divides_heads
    return EngineLimits(
        first_block=block_range_of(device.start.rank, device.sizes.num_blocks).first_block if divides else 0,
        max_model_len=device.sizes.max_model_len,
        num_blocks=device.sizes.num_blocks,
        vocab_size=device.model.vocab_size,
        max_restored_while_serving=_MAX_RESTORED[device.start.settings.log.mode],
        token_cost=TokenCost.of_model(device.model),
        work=StepWork.of(device.model, device.start.num_attention_on_gpu),
    )
