"""From a StartWorker message to what computes on a GPU.

Weights lie in memory of the seat, which outlives its workers: the first one fills it, the next ones find it full and
load nothing.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from everserve.backends.cuda.captured import CapturedExperts, CapturedForward
from everserve.backends.cuda.lanes.lane import CudaLaneShape
from everserve.backends.cuda.lanes.server import CudaServer
from everserve.backends.cuda.ops.experts import ExpertArena
from everserve.backends.cuda.ops.ops import CudaOps
from everserve.backends.cuda.placed_weights import PlacedWeights
from everserve.backends.cuda.recorder import Recorder
from everserve.backends.cuda.slots import CudaSlots
from everserve.backends.cuda.weights_state import WeightsState, identity_of
from everserve.engine.limits import EngineLimits
from everserve.engine.sizing import KvSizes
from everserve.memory.device import Driver, Mapping
from everserve.memory.names import BELL_BYTES, bell_at
from everserve.model.checkpoint import Checkpoint
from everserve.model.config import ModelConfig
from everserve.model.decoder import Decoder
from everserve.model.fingerprint import check_unchanged
from everserve.model.layout import Weights, check_checkpoint
from everserve.model.random_weights import RandomCheckpoint
from everserve.plan.steps import StepWork
from everserve.plan.weights import PlannedTensor, WeightsPlan
from everserve.tables.ids import Role
from everserve.tables.memory import Kind
from everserve.tables.slots import EMPTY
from everserve.wire.messages import StartWorker
from everserve.worker.loading import Loading

_MAX_RESTORED = {"anchor": 1 << 18, "mirror": 2048, "off": 0}  # tokens, while streams wait: some TB/s, or some GB/s


@dataclass(frozen=True)
class Device:
    """A device, opened, and what is to be computed on it."""

    start: StartWorker
    torch_device: torch.device
    driver: Driver
    model: ModelConfig
    checkpoint: Checkpoint
    sizes: KvSizes
    ops: CudaOps
    loading: Loading


def open_device(start: StartWorker, loading: Loading) -> Device:
    """Check everything that can be checked from headers. Raises UserError with one clear line."""
    settings = start.settings
    directory = Path(settings.model.directory)
    model = ModelConfig.from_directory(directory)
    torch_device = torch.device("cuda", start.device)
    torch.cuda.set_device(torch_device)
    torch.set_grad_enabled(False)
    checkpoint: Checkpoint
    if settings.model.load_format == "dummy":
        checkpoint = RandomCheckpoint(directory, model, torch_device)
    else:
        checkpoint = Checkpoint.open(directory)
        check_checkpoint(model, checkpoint)
    sizes = KvSizes.of(model, settings.engine, settings.model.dtype)
    torch.zeros(1, device=torch_device)  # the context
    driver = Driver(start.device)
    ops = CudaOps(
        torch_device,
        max_num_seqs=settings.engine.max_num_seqs,
        max_model_len=sizes.max_model_len,
        share=start.num_attention_on_device,
    )
    return Device(start, torch_device, driver, model, checkpoint, sizes, ops, loading)


class SeatWeights:
    """The weights of one seat, in its memory. `is_complete`: a predecessor has loaded them."""

    def __init__(self, device: Device, memory: dict[Kind, int]) -> None:
        start = device.start
        self._device = device
        self.num_slots = _num_slots(device)
        self.plan = self.plan_of(device)
        self._mapping = Mapping(device.driver, memory[Kind.WEIGHTS], self.plan.num_bytes)
        self._state = WeightsState(memory[Kind.WEIGHTS_STATE])
        for kind in (Kind.WEIGHTS, Kind.WEIGHTS_STATE):
            os.close(memory[kind])
        self._experts = [[*slots] for slots in start.slots.experts] if start.slots is not None else None
        self._identity = self._identity_now()
        self._state.claim(start.incarnation)
        self.is_complete = self._state.holds(self._identity)
        if not self.is_complete:
            check_unchanged(start.settings.model.directory, start.settings.model.fingerprint)
            self._state.begin(self._identity)

    @staticmethod
    def plan_of(device: Device) -> WeightsPlan:
        return WeightsPlan.of(device.model, device.start.roles, _num_slots(device))

    def view(self, tensor: PlannedTensor) -> Tensor:
        return tensor_at(self._mapping.address + tensor.offset, tensor.shape)

    def placed(self) -> PlacedWeights:
        """For a Decoder."""
        device = self._device
        return PlacedWeights(
            device.model, device.checkpoint, device.torch_device, self.plan, self.view, self.is_complete
        )

    def arena(self) -> ExpertArena | None:
        """The experts of this seat, loaded; None if the model has none."""
        plan, model = self.plan, self._device.model
        if not model.moe_layers:
            return None
        gate_up, down = self.view(plan.tensor("expert_gate_up")), self.view(plan.tensor("expert_down"))
        arena = ExpertArena(gate_up, down, num_layers=len(model.moe_layers), num_slots=self.num_slots)
        if self.is_complete:
            return arena
        places = [
            (index, expert, slot)
            for index, experts in enumerate(self.experts)
            for slot, expert in enumerate(experts)
            if expert != EMPTY
        ]
        progress = self._device.loading.part("experts")
        for done, (index, expert, slot) in enumerate(places):
            arena.fill(index, slot, *self._load(index, expert))
            progress(done + 1, len(places))
        return arena

    @property
    def experts(self) -> list[list[int]]:
        """[index of the MoE layer][slot], or EMPTY."""
        model = self._device.model
        return self._experts if self._experts is not None else [[*range(model.num_experts)] for _ in model.moe_layers]

    def load_checked(self, layer_index: int, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        """gate, up and down, for the arena to copy. Raises if the files are not those that this instance serves."""
        source = self._device.start.settings.model
        check_unchanged(source.directory, source.fingerprint)
        return self._load(layer_index, expert)

    def _load(self, layer_index: int, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        device = self._device
        weights = Weights(device.model, device.checkpoint, "bfloat16", device.torch_device)
        sources = weights.layout.expert(device.model.moe_layers[layer_index], expert)
        gate, up = weights.load_temporary(sources.gate), weights.load_temporary(sources.up)
        return gate, up, weights.load_temporary(sources.down)

    def begin_change(self, layer_index: int, slot: int, expert: int) -> None:
        """This slot will hold that expert, or nothing (EMPTY), when `complete` says so. Raises if the memory has
        another owner by now."""
        start = self._device.start
        assert self._experts is not None, "a worker whose slot numbers are expert numbers changes none"
        if not self._state.is_owned_by(start.incarnation):
            raise RuntimeError("another incarnation has this seat's weights by now")
        self._experts[layer_index][slot] = expert
        self._identity = self._identity_now()
        self._state.begin(self._identity)

    def _identity_now(self) -> bytes:
        start = self._device.start
        source = start.settings.model
        files = f"{source.load_format}:{source.directory}:{source.fingerprint}"
        return identity_of(files, self._device.model, source.dtype, start.roles, self._experts)

    def complete(self) -> None:
        """Everything is loaded: record that for the next incarnation."""
        torch.cuda.synchronize(self._device.torch_device)
        self._state.complete(self._identity)


def _num_slots(device: Device) -> int:
    """Expert slots per layer; 0 without the expert role."""
    start = device.start
    num_slots = start.slots.num_slots if start.slots is not None else device.model.num_experts
    return num_slots if Role.EXPERT in start.roles else 0


def lane_shape(device: Device, num_slots: int) -> CudaLaneShape:
    """The anchor that allocates a lane and both of its ends must compute the same shape."""
    model, engine = device.model, device.start.settings.engine
    return CudaLaneShape(
        engine.max_num_batched_tokens, max(model.experts_per_token, 1), model.hidden_size, max(num_slots, 1)
    )


def build_decoder(device: Device, weights: SeatWeights) -> Decoder:
    return Decoder(
        device.model,
        weights.placed(),
        device.ops,
        device.sizes.max_model_len,
        progress=device.loading.part("layers"),
    )


def make_pool(device: Device, decoder: Decoder) -> Tensor:
    shape = decoder.kv_shape(device.sizes.num_blocks, device.start.settings.engine.block_size)
    return torch.empty(shape, dtype=torch.bfloat16, device=device.torch_device)


def make_recorder(device: Device) -> Recorder:
    return Recorder(torch.cuda.Stream(device.torch_device, priority=-1))


def build_forward(
    device: Device, decoder: Decoder, kv_pool: Tensor, experts: CapturedExperts, recorder: Recorder
) -> CapturedForward:
    engine = device.start.settings.engine
    return CapturedForward(
        decoder,
        kv_pool,
        experts,
        recorder,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_blocks=-(-device.sizes.max_model_len // engine.block_size),
        progress=device.loading.part("graphs"),
    )


def build_server(device: Device, weights: SeatWeights, bell_fd: int) -> tuple[CudaServer, CudaSlots]:
    arena = weights.arena()
    assert arena is not None, "an expert worker has experts"
    bell = Mapping(device.driver, bell_fd, BELL_BYTES)
    os.close(bell_fd)
    server = CudaServer(
        device.driver,
        arena,
        lane_shape(device, device.start.capacity.slots_per_layer),
        device.start.capacity.max_workers,
        torch.tensor(weights.experts, dtype=torch.int32),
        bell_at(bell.address, device.start.incarnation),
        device.torch_device,
    )
    return server, CudaSlots(weights, arena, server, device.model.num_experts)


def engine_limits(device: Device) -> EngineLimits:
    return EngineLimits(
        max_model_len=device.sizes.max_model_len,
        num_blocks=device.sizes.num_blocks,
        vocab_size=device.model.vocab_size,
        max_restored_while_serving=_MAX_RESTORED[device.start.settings.log.mode],
        work=StepWork.of(device.model, device.start.num_attention_on_device),
    )


class _Array:
    """Device memory that torch does not own."""

    def __init__(self, address: int, shape: tuple[int, ...]) -> None:
        self.__cuda_array_interface__ = {"data": (address, False), "shape": shape, "typestr": "<i2", "version": 3}


def tensor_at(address: int, shape: tuple[int, ...]) -> Tensor:
    """bfloat16, which the interface does not know: 16-bit integers, looked at differently."""
    return torch.as_tensor(_Array(address, shape), device="cuda").view(torch.bfloat16)
