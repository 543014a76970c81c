"""What a worker starts with: the memory that must exist before its process does, and its StartWorker message."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from everserve.engine.sizing import KvSizes
from everserve.memory.liveness import CELL_BYTES
from everserve.memory.names import BELL_BYTES
from everserve.memory.weights.slot_table import state_bytes
from everserve.model.config import ModelConfig
from everserve.plan.expert_memory import ExpertMemoryPlan
from everserve.plan.head_memory import HeadMemoryPlan
from everserve.plan.weights import WeightsPlan
from everserve.tables.calls import ShardKind
from everserve.tables.goal import Capacity, Goal, SeatGoal, Wanted
from everserve.tables.ids import NO_DEVICE, Rank, Role, WorkerId
from everserve.tables.memory import Kind, MemoryName, seat_owner
from everserve.tables.slots import EMPTY, SeatSlots
from everserve.wire.messages import StartWorker, WorkerSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Needs:
    """The needs of all workers of one instance, and the settings that they share."""

    model: ModelConfig
    settings: WorkerSettings
    capacity: Capacity
    detect_ms: float

    def start(self, goal: Goal, worker: WorkerId, memory: Sequence[MemoryName] | None = None) -> StartWorker:
        """The start message of this incarnation. `memory`: what is there for its needs, besides its cell."""
        seat = _seat(goal, worker.rank)
        return StartWorker(
            rank=worker.rank,
            incarnation=worker.incarnation,
            roles=seat.roles,
            settings=self.settings,
            num_workers=max(sum(o.wanted is not Wanted.RETIRE and o.host == seat.host for o in goal.seats), 1),
            slots=self._slots(goal, worker.rank),
            detect_ms=self.detect_ms,
            capacity=self.capacity,
            memory=tuple(memory) if memory is not None else self.memory(goal, worker)[1:],
            host=seat.host,
            device=seat.device,
            gpu=seat.gpu,
            num_attention_on_gpu=_num_attention(goal, seat.gpu),
        )

    def memory(self, goal: Goal, worker: WorkerId) -> tuple[MemoryName, ...]:
        """The memory that this incarnation needs: its cell first, memory that belongs to the seat last."""
        seat = _seat(goal, worker.rank)
        needed = [self.cell(worker, seat.host)]
        if Role.ATTENTION in seat.roles and self.capacity.kv_bytes:
            needed.append(_of(seat, Kind.KV, worker, self.capacity.kv_bytes, seat.device, seat.gpu))
        if Role.ATTENTION in seat.roles and self.capacity.log_bytes:
            # After its blocks: the log completes the set.
            device = NO_DEVICE if self._logs_outlive_devices else seat.device
            needed.append(_of(seat, Kind.LOG, worker, self.capacity.log_bytes, device))
        if Role.ATTENTION in seat.roles and self._homes_have_mirrors:
            sizes = KvSizes.of(self.model, self.settings.engine, self.settings.model.dtype)
            needed.append(_of(seat, Kind.KV_MIRROR, seat_owner(worker.rank), sizes.mirror().num_bytes))
        needed += self._weights(goal, seat)
        if self.model.divides_heads and Role.ATTENTION not in seat.roles:
            owner, num_bytes = seat_owner(worker.rank), self._head_bytes(seat)
            needed.append(_of(seat, Kind.KV_PIECES, owner, num_bytes, seat.device, seat.gpu))
            if self._kv_shadow != "off" and not self._homes_have_mirrors:
                needed.append(self._shadow(owner, seat))
        if (bell := self.bell(goal, worker.rank)) is not None:
            needed.append(bell)
        if Role.ATTENTION not in seat.roles and self.settings.model.expert_backup == "host":
            needed += self.backup(seat.host)
        return tuple(needed)

    def _shadow(self, owner: WorkerId, seat: SeatGoal) -> MemoryName:
        """The shadow of the KV of a seat's heads, on CPUs."""
        sizes = KvSizes.of(self.model, self.settings.engine, self.settings.model.dtype)
        if self._kv_shadow == "mirror":
            return _of(seat, Kind.KV_MIRROR, owner, sizes.pieces(self.model, self.capacity).mirrored.num_bytes)
        num_bytes = sizes.parity(self.model, self.capacity).num_bytes
        return _of(seat, Kind.KV_PARITY, owner, num_bytes, seat.device)

    def _head_bytes(self, seat: SeatGoal) -> int:
        """The KV of an expert seat's heads; on a GPU their weights too."""
        sizes = KvSizes.of(self.model, self.settings.engine, self.settings.model.dtype)
        if seat.gpu == NO_DEVICE:
            return sizes.pieces(self.model, self.capacity).num_bytes
        return self.head_plan(sizes.num_blocks).num_bytes

    def head_plan(self, blocks_per_home: int) -> HeadMemoryPlan:
        """The memory of the heads of an expert seat on a GPU."""
        assert self.capacity.devices is not None, "divided heads have devices"
        num_blocks, block_size = self.capacity.devices * blocks_per_home, self.settings.engine.block_size
        return HeadMemoryPlan.of(self.model, self.capacity.head_pieces, num_blocks, block_size)

    def backup(self, host: int = 0) -> tuple[MemoryName, MemoryName]:
        """Every expert in the slot of its own number, and the table of these slots: once on each host. All expert
        workers there have it, so that it outlives each of them."""
        plan = self._expert_plan([cut.num_shards for cut in self.model.cuts])
        table_bytes = state_bytes(plan.num_layers, plan.num_slots)
        return (
            MemoryName(kind=Kind.BACKUP, owners=(), num_bytes=plan.num_bytes, host=host),
            MemoryName(kind=Kind.BACKUP_STATE, owners=(), num_bytes=table_bytes, host=host),
        )

    @property
    def logs_are_inherited(self) -> bool:
        """Whether the next worker in a seat goes on with its predecessor's log: KV stays where it is."""
        return self.settings.log.mode == "anchor" or self.model.divides_heads

    @property
    def fetches_kv(self) -> Role | None:
        """Who has KV of heads copied from one memory to another: on CPUs those who have the heads, on a GPU homes."""
        if self.settings.compute.device != "cuda":
            return Role.EXPERT
        return Role.ATTENTION if self.model.divides_heads and self.settings.log.mode != "off" else None

    @property
    def _kv_shadow(self) -> str:
        return self.settings.log.kv_shadow

    @property
    def _homes_have_mirrors(self) -> bool:
        """Whether homes have mirrors of heads' KV: on a GPU homes write them, on CPUs those who have the heads."""
        return self.fetches_kv is Role.ATTENTION and self._kv_shadow == "mirror"

    @property
    def _logs_outlive_devices(self) -> bool:
        """A mirror is in the host's memory. So are the records of streams whose heads' KV has a shadow."""
        has_shadow = self.model.divides_heads and self._kv_shadow != "off"
        return self.settings.log.mode == "mirror" or has_shadow

    def describe_shadows(self, goal: Goal) -> None:
        """Log the size of all shadows of heads' KV: each has room for all heads, and takes as much as it covers."""
        pieces = {piece for seat in goal.seats for piece in self.memory(goal, seat_owner(seat.rank))}
        pools = [piece.num_bytes for piece in pieces if piece.kind is Kind.KV_PIECES]
        if not pools or self._kv_shadow == "off":
            return
        if self._homes_have_mirrors:
            mirrors = [piece.num_bytes for piece in pieces if piece.kind is Kind.KV_MIRROR]
            log.info("the mirrors of KV take up to %.2f GB of host memory", sum(mirrors) / 1e9)
            return
        most = sum(pools) / len(pools)  # all heads once
        if self._kv_shadow == "mirror":
            log.info(
                "the mirrors of KV take up to %.2f GB of host memory, and as much again for streams that are parked",
                most / 1e9,
            )
        else:
            log.info("the parities of KV take up to %.2f GB, on all devices", most / max(len(pools) - 1, 1) / 1e9)

    def describe_backup(self) -> None:
        """Log its size."""
        if self.settings.model.expert_backup == "host":
            log.info("the backup of all experts takes %.2f GB of host memory", self.backup()[0].num_bytes / 1e9)

    def cell(self, worker: WorkerId, host: int) -> MemoryName:
        return MemoryName(kind=Kind.CELL, owners=(worker,), num_bytes=CELL_BYTES, host=host)

    def bell(self, goal: Goal, rank: Rank) -> MemoryName | None:
        """The bell of an expert worker on a device; None for all other workers."""
        seat = goal.seat(rank)
        if seat is None or seat.gpu == NO_DEVICE or Role.ATTENTION in seat.roles:
            return None
        return _of(seat, Kind.BELL, seat_owner(rank), BELL_BYTES, seat.device, seat.gpu)

    def lane(self, goal: Goal, attention: WorkerId, expert: WorkerId) -> MemoryName:
        """The lane between two workers, on the attention worker's device."""
        seat = _seat(goal, attention.rank)
        return MemoryName(
            kind=Kind.LANE,
            owners=(attention, expert),
            num_bytes=self.capacity.lane_bytes,
            host=seat.host,
            device=seat.device,
            gpu=seat.gpu,
        )

    def expert_weights(self, goal: Goal, rank: Rank) -> tuple[MemoryName, ...]:
        """The memory with the weights of this seat and their table, if it is one of an expert worker."""
        seat = goal.seat(rank)
        return self._weights(goal, seat) if seat is not None and Role.ATTENTION not in seat.roles else ()

    def _weights(self, goal: Goal, seat: SeatGoal) -> tuple[MemoryName, ...]:
        if seat.gpu == NO_DEVICE and not self._has_experts_in_memory(seat):
            return ()
        owner, num_bytes = seat_owner(self.weights_owner(goal, seat.rank)), self.weights_bytes(goal, seat.rank)
        return (
            _of(seat, Kind.WEIGHTS, owner, num_bytes, seat.device, seat.gpu),
            _of(seat, Kind.WEIGHTS_STATE, owner, self._state_bytes(seat), seat.device),
        )

    def weights_bytes(self, goal: Goal, rank: Rank) -> int:
        """The size of the memory for this seat's weights on its device."""
        seat = _seat(goal, rank)
        if self._has_experts_in_memory(seat):
            return self._expert_plan(self._num_slots).num_bytes
        num_slots = self.model.max_shards if Role.ATTENTION in seat.roles else self.num_ffn_slots
        return WeightsPlan.of(self.model, seat.roles, num_slots).num_bytes

    def weights_owner(self, goal: Goal, rank: Rank) -> Rank:
        """The seat that owns the memory with this seat's weights. Seats with the same weights on the same device share
        it: that saves memory, and concurrent reads of the same bytes hit the device's cache."""
        like = _seat(goal, rank)
        if Role.ATTENTION not in like.roles:
            return rank
        place = (like.host, like.device, like.roles)
        return next(seat.rank for seat in goal.seats if (seat.host, seat.device, seat.roles) == place)

    def seat_owners(self, goal: Goal, retired: Rank) -> list[WorkerId]:
        """The owners of memory that belongs to a seat, and that no seat needs any more after this one has retired."""
        stay = [s for s in goal.seats if s.wanted is not Wanted.RETIRE and not goal.is_given_up(s.device)]
        needed = {self.weights_owner(goal, seat.rank) for seat in stay}
        return [seat_owner(rank) for rank in {retired, self.weights_owner(goal, retired)} - needed]

    def _has_experts_in_memory(self, seat: SeatGoal) -> bool:
        """Whether a seat has experts in memory: on CPUs, with --weights memory."""
        is_memory = self.settings.compute.device != "cuda" and self.settings.model.weights == "memory"
        return is_memory and Role.ATTENTION not in seat.roles

    def _state_bytes(self, seat: SeatGoal) -> int:
        """A page for what is not an expert, and a table of the slots of an expert worker."""
        num_slots = self.num_ffn_slots if Role.ATTENTION not in seat.roles else 0
        return state_bytes(len(self.model.cuts), num_slots)

    @property
    def num_ffn_slots(self) -> int:
        """The slots of an expert worker for shards of FFNs, in the call with the most."""
        slots = zip(self.model.calls, self._num_slots, strict=True)
        return max((num for call, num in slots if call.kind is not ShardKind.HEAD), default=0)

    @property
    def _num_slots(self) -> tuple[int, ...]:
        """The slots of an expert worker, in each call."""
        return self.capacity.slots(len(self.model.calls))

    def _expert_plan(self, num_slots: Sequence[int]) -> ExpertMemoryPlan:
        """Experts in host memory. On a GPU they are decoded."""
        source = self.settings.model
        if self.settings.compute.device == "cuda":
            return ExpertMemoryPlan.of(self.model, "bfloat16", num_slots)
        dtype = self.model.dtype if source.dtype == "auto" else source.dtype
        return ExpertMemoryPlan.of(self.model, dtype, num_slots, source.shard_bytes)

    def _slots(self, goal: Goal, rank: Rank) -> SeatSlots | None:
        """The initial contents of an expert worker's slots; None for all other workers."""
        if goal.placement is None or Role.ATTENTION in _seat(goal, rank).roles:
            return None
        planned = goal.placement.seat(rank)
        if planned is None:
            return SeatSlots(rank=rank, experts=tuple((EMPTY,) * num for num in self._num_slots))
        return planned.slots(self._num_slots)


def _of(
    seat: SeatGoal, kind: Kind, owner: WorkerId, num_bytes: int, device: int = NO_DEVICE, gpu: int = NO_DEVICE
) -> MemoryName:
    """Memory of the worker in this seat, on its host."""
    return MemoryName(kind=kind, owners=(owner,), num_bytes=num_bytes, host=seat.host, device=device, gpu=gpu)


def _num_attention(goal: Goal, gpu: int) -> int:
    """Attention workers on this GPU, at least one."""
    seats = (seat for seat in goal.seats if seat.wanted is Wanted.STAY and Role.ATTENTION in seat.roles)
    return max(sum(seat.gpu == gpu for seat in seats), 1)


def _seat(goal: Goal, rank: Rank) -> SeatGoal:
    seat = goal.seat(rank)
    assert seat is not None, f"the goal has no rank {rank}"
    return seat
