"""What a worker starts with: the memory that must exist before its process does, and its StartWorker message."""

from dataclasses import dataclass

from everserve.memory.liveness import CELL_BYTES
from everserve.memory.names import BELL_BYTES, WEIGHTS_STATE_BYTES
from everserve.model.config import ModelConfig
from everserve.plan.weights import WeightsPlan
from everserve.tables.goal import Capacity, Goal, SeatGoal
from everserve.tables.ids import NO_DEVICE, Rank, Role, WorkerId
from everserve.tables.memory import Kind, Memory, seat_owner
from everserve.tables.slots import SeatSlots
from everserve.wire.messages import StartWorker, WorkerSettings


@dataclass(frozen=True)
class Needs:
    """The needs of all workers of one instance, and the settings that they share."""

    model: ModelConfig
    settings: WorkerSettings
    capacity: Capacity
    detect_ms: float

    def start(self, goal: Goal, worker: WorkerId) -> StartWorker:
        """The start message of this incarnation."""
        seat = _seat(goal, worker.rank)
        return StartWorker(
            rank=worker.rank,
            incarnation=worker.incarnation,
            roles=seat.roles,
            settings=self.settings,
            num_workers=len(goal.seats),
            slots=self._slots(goal, worker.rank),
            detect_ms=self.detect_ms,
            capacity=self.capacity,
            memory=self.memory(goal, worker)[1:],
            device=seat.device,
            num_attention_on_device=sum(_seat(goal, rank).device == seat.device for rank in goal.attention_ranks),
        )

    def memory(self, goal: Goal, worker: WorkerId) -> tuple[Memory, ...]:
        """The memory of this incarnation: its cell first, memory that belongs to the seat last."""
        seat = _seat(goal, worker.rank)
        needed = [self.cell(worker)]
        if Role.ATTENTION in seat.roles and self.capacity.kv_bytes:
            needed.append(self._of(Kind.KV, worker, self.capacity.kv_bytes, seat.device))
        if Role.ATTENTION in seat.roles and self.capacity.log_bytes:
            # After its blocks: the log completes the set.
            needed.append(self._of(Kind.LOG, worker, self.capacity.log_bytes))
        if seat.device != NO_DEVICE:
            owner, num_bytes = seat_owner(self.weights_owner(goal, worker.rank)), self.weights_bytes(goal, worker.rank)
            needed.append(self._of(Kind.WEIGHTS, owner, num_bytes, seat.device))
            needed.append(self._of(Kind.WEIGHTS_STATE, owner, WEIGHTS_STATE_BYTES))
        if (bell := self.bell(goal, worker.rank)) is not None:
            needed.append(bell)
        return tuple(needed)

    def cell(self, worker: WorkerId) -> Memory:
        return self._of(Kind.CELL, worker, CELL_BYTES)

    def bell(self, goal: Goal, rank: Rank) -> Memory | None:
        """The bell of an expert worker on a device; None for all other workers."""
        seat = goal.seat(rank)
        if seat is None or seat.device == NO_DEVICE or Role.ATTENTION in seat.roles:
            return None
        return self._of(Kind.BELL, seat_owner(rank), BELL_BYTES, seat.device)

    def lane(self, goal: Goal, attention: WorkerId, expert: WorkerId) -> Memory:
        """The lane between two workers, on the attention worker's device."""
        device = _seat(goal, attention.rank).device
        return Memory(
            kind=Kind.LANE, owners=(attention, expert), num_bytes=self.capacity.lane_bytes, device=device
        )  # fmt: skip

    def weights_bytes(self, goal: Goal, rank: Rank) -> int:
        """The size of the memory for this seat's weights on its device."""
        seat, slots = _seat(goal, rank), self._slots(goal, rank)
        num_slots = slots.num_slots if slots is not None else seat.own_experts
        return WeightsPlan.of(self.model, seat.roles, num_slots).num_bytes

    def weights_owner(self, goal: Goal, rank: Rank) -> Rank:
        """The seat that owns the memory with this seat's weights. Seats with the same weights on the same device share
        it: that saves memory, and concurrent reads of the same bytes hit the device's cache."""
        like = _seat(goal, rank)
        if goal.placement is not None and goal.placement.seat(rank) is not None:
            return rank
        return next(seat.rank for seat in goal.seats if (seat.device, seat.roles) == (like.device, like.roles))

    def _slots(self, goal: Goal, rank: Rank) -> SeatSlots | None:
        """The initial contents of an expert worker's slots; None for all other workers."""
        planned = goal.placement.seat(rank) if goal.placement is not None else None
        return planned.slots(self.capacity.slots_per_layer) if planned is not None else None

    def _of(self, kind: Kind, owner: WorkerId, num_bytes: int, device: int = NO_DEVICE) -> Memory:
        return Memory(kind=kind, owners=(owner,), num_bytes=num_bytes, device=device)


def _seat(goal: Goal, rank: Rank) -> SeatGoal:
    seat = goal.seat(rank)
    assert seat is not None, f"the goal has no rank {rank}"
    return seat
