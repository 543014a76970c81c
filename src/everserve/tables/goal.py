"""The goal: which workers there should be, where, and which experts each of them should hold.

The orchestrator's machine owns it. The supervisor stores each version before it takes effect, so that the next
orchestrator continues with it. The current state may differ: see members.py and slots.py.
"""

from enum import StrEnum
from functools import cached_property

import msgspec

from everserve.tables.health import Diagnosis, Level
from everserve.tables.ids import NO_DEVICE, Rank, Role
from everserve.tables.placement import Placement

_MOST_RANKS = 1 << 15  # routes have 16 bits for one; what workers can do today is less (config/cluster.py)


class Wanted(StrEnum):
    """What should become of a seat."""

    STAY = "stay"  # its process is replaced whenever it ends
    RETIRE = "retire"  # it ends, and is not replaced
    SWITCH = "switch"  # it ends, and its next process has the other role


class SeatGoal(msgspec.Struct, frozen=True, kw_only=True):
    """One seat. Any rank may have any role on any device."""

    rank: Rank
    roles: tuple[Role, ...]
    host: int = 0  # which machine: its workers are lost together, with all memory there
    device: int = NO_DEVICE  # which device: workers on one device are lost together, with all memory on it
    gpu: int = NO_DEVICE  # the machine's GPU that the device is, or has a share of; NO_DEVICE: it is a CPU
    own_experts: int = 0  # experts per layer that a worker with both roles computes itself
    wanted: Wanted = Wanted.STAY
    stands_in: bool = (
        False  # for an expert worker whose device is gone: it is an attention worker again when that returns
    )
    switch_s: float | None = None  # how long its change of role had taken at this version; None: it has its role

    @property
    def role(self) -> Role:
        """The role of its process now. A worker with both roles counts as an attention worker."""
        return Role.ATTENTION if Role.ATTENTION in self.roles else Role.EXPERT

    @property
    def next_role(self) -> Role:
        """The role that the seat should have."""
        if self.wanted is not Wanted.SWITCH:
            return self.role
        return Role.EXPERT if self.role is Role.ATTENTION else Role.ATTENTION


class Mask(msgspec.Struct, frozen=True, kw_only=True):
    """Experts that are masked while they have no place."""

    last_id: int = 0  # the highest number that any set of masked experts has had
    experts: tuple[tuple[int, int], ...] = ()  # (call, expert) in order

    @property
    def id(self) -> int:
        """The number of this set, as routes name it."""
        return self.last_id if self.experts else 0


class Goal(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One version of the plan. Without expert workers there is no placement: every worker has both roles."""

    version: int
    seats: tuple[SeatGoal, ...]
    placement: Placement | None
    scaling_s: float | None = None  # how long it had taken at this version; None: there are the workers asked for
    gone: tuple[int, ...] = ()  # devices that were lost and have not come back: seats on them stay empty
    health: tuple[Diagnosis, ...] = ()  # what sources say about devices that are not healthy
    away: tuple[int, ...] = ()  # devices that are emptied because of their health: seats on them become, or are, empty
    mask: Mask = Mask()
    lost_hosts: tuple[int, ...] = ()  # that are not there now: seats on them stay empty
    gone_hosts: tuple[int, ...] = ()  # of these, hosts that may not join before an operator returns them

    def __post_init__(self) -> None:
        ranks = [seat.rank for seat in self.seats]
        if len(set(ranks)) != len(ranks):
            raise ValueError(f"two seats share a rank: {sorted(ranks)}")
        if not all(0 <= rank < _MOST_RANKS for rank in ranks):
            raise ValueError(f"ranks must be below {_MOST_RANKS}: {sorted(ranks)}")
        placed = {seat.rank for seat in self.placement.seats} if self.placement is not None else set()
        experts = {seat.rank for seat in self.seats if Role.ATTENTION not in seat.roles}
        if not placed <= experts:
            raise ValueError(f"experts are placed on ranks that are no expert workers: {sorted(placed - experts)}")

    def seat(self, rank: Rank) -> SeatGoal | None:
        return self._by_rank.get(rank)

    @cached_property
    def _by_rank(self) -> dict[Rank, SeatGoal]:
        return {seat.rank: seat for seat in self.seats}

    @cached_property
    def hosts(self) -> frozenset[int]:
        """Hosts with seats."""
        return frozenset(seat.host for seat in self.seats)

    @cached_property
    def absent(self) -> frozenset[int]:
        """Devices on which no worker should be."""
        return self.lost_devices.union(self.away)

    @cached_property
    def lost_devices(self) -> frozenset[int]:
        """Devices that are gone, by themselves or with their host."""
        with_host = (seat.device for seat in self.seats if seat.host in self.lost_hosts)
        return frozenset(self.gone).union(with_host) if self.lost_hosts else frozenset(self.gone)

    @cached_property
    def are_all_staying(self) -> bool:
        """Whether no worker should leave."""
        return not self.absent and all(seat.wanted is Wanted.STAY for seat in self.seats)

    def level(self, device: int) -> Level:
        return max((said.level for said in self.health if said.device == device), default=Level.HEALTHY)

    def is_given_up(self, device: int) -> bool:
        """Whether nothing should be kept in its memory."""
        return device in self.gone or (device in self.away and self.level(device) >= Level.EVACUATE)


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes that are fixed when the instance starts: lanes, arenas, logs and captured graphs are made for them, and
    every later goal must fit."""

    max_workers: int = 1  # ranks are below it
    num_gpus: int = 0  # of the machine; 0: CPUs
    devices: int | None = None  # that were asked for at the start; None: each GPU is one, on CPUs each worker
    slots_per_layer: int = 0  # expert slots of every expert worker; 0: there are no expert workers
    slots_by_call: tuple[int, ...] = ()  # where calls have different numbers; `slots_per_layer` is the largest
    mapped_slots: int = 0  # further slots per layer, without memory: for experts that others left (plan/mapping.py)
    head_pieces: int = 0  # on GPUs where heads are divided: the most heads of an expert worker, in all layers together
    heads_stay: bool = False  # with their KV, on GPUs: there is no room elsewhere, or they would come without it
    lane_bytes: int = 0  # of the memory between one attention worker and one expert worker
    log_bytes: int = 0  # of each attention worker's KV log in host memory; 0: no logs
    kv_bytes: int = 0  # of each KV cache in device memory that outlives its worker, beside the log; 0: none

    def slots(self, num_calls: int) -> tuple[int, ...]:
        """The slots of every expert worker, in each call."""
        assert len(self.slots_by_call) in (0, num_calls), f"slots for {len(self.slots_by_call)} of {num_calls} calls"
        return self.slots_by_call or (self.slots_per_layer,) * num_calls

    @property
    def lane_slots(self) -> int:
        """All slots of a layer of an expert worker, which a lane has room for."""
        return self.slots_per_layer + self.mapped_slots
