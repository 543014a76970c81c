"""What an instance begins with, and keeps for good: its seats, where experts live, what all workers have in common, and
which memory a worker must have before it can be started."""

import logging
from dataclasses import dataclass
from pathlib import Path

from everserve.backends.cpu.lane import LaneShape
from everserve.control.seats import SeatSpec
from everserve.engine.sizing import KvSizes
from everserve.memory.liveness import CELL_BYTES
from everserve.memory.names import (
    BELL_BYTES,
    ON_HOST,
    WEIGHTS_STATE_BYTES,
    bell_name,
    cell_name,
    kv_name,
    log_name,
    weights_name,
    weights_state_name,
)
from everserve.model.config import ModelConfig
from everserve.plan.placement import place_experts, survivable_deaths
from everserve.plan.weights import WeightsPlan
from everserve.tables.ids import Rank, Role, WorkerId
from everserve.tables.placement import Placement, SeatSlots
from everserve.wire.events import PlacementMade
from everserve.wire.messages import StartOrchestrator, WorkerSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NeededMemory:
    """A piece of memory that a worker is born with."""

    name: str
    num_bytes: int
    device: int = ON_HOST


@dataclass(frozen=True)
class Design:
    """Attention seats first, then expert seats. Without expert seats every seat has both roles, and no placement."""

    seats: tuple[SeatSpec, ...]
    placement: Placement | None
    settings: WorkerSettings
    lane_bytes: int
    log_bytes: int  # 0: no logs
    kv_bytes: int  # of KV caches that outlive their workers on a device, beside the log; 0: there are none
    model: ModelConfig
    num_devices: int  # 0: workers compute on CPUs

    @classmethod
    def of(cls, start: StartOrchestrator) -> "Design":
        """Raises UserError if the model cannot be served like this."""
        model = ModelConfig.from_directory(Path(start.model))
        expert_ranks = [Rank(start.num_attention + i) for i in range(start.num_expert)]
        roles: tuple[Role, ...] = (Role.ATTENTION, Role.EXPERT)
        slots, placement = model.num_experts, None
        if expert_ranks:
            placement = place_experts(model.num_experts, model.moe_layers, expert_ranks, start.shadow_experts)
            roles, slots = (Role.ATTENTION,), 0
        attention = [SeatSpec(rank=Rank(i), roles=roles, slots=slots) for i in range(start.num_attention)]
        experts = [SeatSpec(rank=rank, roles=(Role.EXPERT,)) for rank in expert_ranks]
        num_slots = max((seat.num_slots for seat in placement.seats), default=0) if placement is not None else 0
        lane_bytes = lane_bytes_of(model, start.worker, num_slots)
        log_bytes, kv_bytes = log_bytes_of(model, start.worker)
        seats = (*attention, *experts)
        return cls(seats, placement, start.worker, lane_bytes, log_bytes, kv_bytes, model, start.num_devices)

    @property
    def num_attention(self) -> int:
        return sum(Role.ATTENTION in seat.roles for seat in self.seats)

    @property
    def lane_slots(self) -> int:
        """Expert slots per layer of the seat that has the most: lanes have room for that many."""
        return max((seat.num_slots for seat in self.placement.seats), default=0) if self.placement is not None else 0

    def roles_of(self, rank: Rank) -> tuple[Role, ...]:
        return next(seat.roles for seat in self.seats if seat.rank == rank)

    def slots_of(self, rank: Rank) -> SeatSlots | None:
        """The expert slots of this seat; None where the placement does not name it."""
        seats = self.placement.seats if self.placement is not None else ()
        return next((seat for seat in seats if seat.rank == rank), None)

    def device_of(self, rank: Rank) -> int:
        """The device that this worker computes on; ON_HOST without one."""
        return rank % self.num_devices if self.num_devices else ON_HOST

    def num_attention_beside(self, rank: Rank) -> int:
        """Attention workers on this worker's device, itself included."""
        ranks = [seat.rank for seat in self.seats if Role.ATTENTION in seat.roles]
        return sum(self.device_of(other) == self.device_of(rank) for other in ranks)

    def weights_of(self, rank: Rank) -> WeightsPlan:
        """What lies where in the memory for this seat's weights."""
        seat, slots = next(seat for seat in self.seats if seat.rank == rank), self.slots_of(rank)
        return WeightsPlan.of(self.model, seat.roles, slots.num_slots if slots is not None else seat.slots)

    def weights_owner(self, rank: Rank) -> Rank:
        """Whose memory this seat's weights are in. Seats with the same weights on the same device share one: that
        saves memory, and readers of the same bytes at the same time find them in the device's cache."""
        like = (self.device_of(rank), self.roles_of(rank), self.slots_of(rank))
        seats = (seat.rank for seat in self.seats)
        return next(r for r in seats if (self.device_of(r), self.roles_of(r), self.slots_of(r)) == like)

    def memory_of(self, seat: WorkerId) -> tuple[NeededMemory, ...]:
        """What this incarnation is born with: its cell first, what belongs to the seat last."""
        rank, device = seat[0], self.device_of(seat[0])
        needed = [NeededMemory(cell_name(seat), CELL_BYTES)]
        if Role.ATTENTION in self.roles_of(rank) and self.kv_bytes:
            needed.append(NeededMemory(kv_name(seat), self.kv_bytes, device))
        if Role.ATTENTION in self.roles_of(rank) and self.log_bytes:
            needed.append(NeededMemory(log_name(seat), self.log_bytes))  # after its blocks: whoever has it has all
        if device != ON_HOST:
            owner = self.weights_owner(rank)
            needed.append(NeededMemory(weights_name(owner), self.weights_of(rank).num_bytes, device))
            needed.append(NeededMemory(weights_state_name(owner), WEIGHTS_STATE_BYTES))
        if device != ON_HOST and self.roles_of(rank) == (Role.EXPERT,):
            needed.append(NeededMemory(bell_name(rank), BELL_BYTES, device))
        return tuple(needed)


def lane_bytes_of(model: ModelConfig, settings: WorkerSettings, num_slots: int) -> int:
    """How much memory the lanes of these workers need, in the memory of the device that they compute on."""
    if settings.compute.device == "cuda":
        from everserve.backends.cuda.lanes.lane import CudaLaneShape  # noqa: PLC0415 (nobody else needs it)

        top_k = max(model.experts_per_token, 1)
        shape = CudaLaneShape(settings.engine.max_num_batched_tokens, top_k, model.hidden_size, max(num_slots, 1))
        return shape.lane_bytes()
    return LaneShape.of(model, settings.engine.max_num_batched_tokens).lane_bytes()


def log_bytes_of(model: ModelConfig, settings: WorkerSettings) -> tuple[int, int]:
    """How much memory each log needs: of the host, and of a device, for blocks that are the KV cache itself."""
    if settings.log.mode == "off":
        return 0, 0
    shape = KvSizes.of(model, settings.engine, settings.model.dtype).log
    if settings.compute.device == "cuda" and settings.log.mode == "anchor":
        return shape.head_bytes, shape.num_blocks * shape.block_bytes
    return shape.num_bytes, 0


def describe(placement: Placement) -> PlacementMade:
    """Say how many deaths the placement survives: in the log, and as an event."""
    seat, deaths = placement.seats[0], survivable_deaths(placement)
    num_shadow = seat.num_slots - seat.num_active
    log.info(
        "%d expert workers with %d active and %d shadow experts per layer each: %s",
        len(placement.seats), seat.num_active, num_shadow,
        f"any {deaths} may die at once without a pause" if deaths else "every death makes streams wait",
    )  # fmt: skip
    return PlacementMade(
        process="orchestrator",
        num_expert_workers=len(placement.seats),
        active_per_worker=seat.num_active,
        shadow_per_worker=num_shadow,
        survivable_deaths=deaths,
    )
