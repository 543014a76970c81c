"""Which worker should hold which shards. A plan: routes follow what workers really hold (slots.py).

Tables are indexed by calls (calls.py). Where a name says *expert*, any kind of shard is meant: in a model whose shards
are whole experts these are the experts.
"""

from collections.abc import Sequence
from functools import cached_property

import msgspec
import numpy as np

from everserve.tables.calls import Call
from everserve.tables.ids import Rank
from everserve.tables.slots import EMPTY, SeatSlots

PerLayer = tuple[tuple[int, ...], ...]  # [index of the call] -> experts


class SeatExperts(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The experts that one seat should hold: it serves the active ones, and takes over the shadows when another worker
    cannot serve them."""

    rank: Rank
    active: PerLayer
    shadows: PerLayer

    def __post_init__(self) -> None:
        if len(self.active) != len(self.shadows):
            raise ValueError(f"rank {self.rank} has active experts and shadows for different numbers of layers")
        for layer in range(len(self.active)):
            experts = self.experts(layer)
            if len(set(experts)) != len(experts):
                raise ValueError(f"rank {self.rank} should hold an expert twice in one layer")

    @cached_property
    def served(self) -> "np.ndarray[tuple[int, int], np.dtype[np.int64]]":
        """[call, expert][active expert]: index of the call and expert of each active one."""
        experts = [(index, expert) for index, active in enumerate(self.active) for expert in active]
        return np.array(experts, np.int64).reshape(len(experts), 2).T

    def experts(self, layer: int) -> tuple[int, ...]:
        """All of them, active ones first."""
        return self.active[layer] + self.shadows[layer]

    def slots(self, num_slots: int | Sequence[int]) -> SeatSlots:
        """The initial slots of a new worker in this seat: its experts in order, then empty slots up to `num_slots`, of
        every call or of each."""
        layers = [self.experts(layer) for layer in range(len(self.active))]
        numbers = (num_slots,) * len(layers) if isinstance(num_slots, int) else num_slots
        padded = (experts + (EMPTY,) * (num - len(experts)) for experts, num in zip(layers, numbers, strict=True))
        return SeatSlots(rank=self.rank, experts=tuple(padded))


class Placement(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """All expert seats. `deals_remainder`: shards that cannot be shared evenly, the last ones of each call, should have
    an active place on every seat, so that their rows are dealt among all. `head_copies`: further places of each head;
    other shards have as many as there are slots for. `num_shadows`: of whole experts, further places per seat and layer
    that were asked for (None: not known)."""

    calls: tuple[Call, ...]  # tables are indexed by position in this tuple
    seats: tuple[SeatExperts, ...]
    deals_remainder: bool = False
    head_copies: int = 0
    num_shadows: int | None = None

    def __post_init__(self) -> None:
        for seat in self.seats:
            if len(seat.active) != len(self.calls):
                raise ValueError(f"rank {seat.rank} has experts for {len(seat.active)} of {len(self.calls)} layers")
            for index, call in enumerate(self.calls):
                experts = seat.experts(index)
                if experts and not 0 <= min(experts) <= max(experts) < call.num_shards:
                    raise ValueError(f"rank {seat.rank} should hold an expert that layer {call.layer} does not have")

    def seat(self, rank: Rank) -> SeatExperts | None:
        """None: this rank should hold no experts."""
        return self._by_rank.get(rank)

    @cached_property
    def _by_rank(self) -> dict[Rank, SeatExperts]:
        return {seat.rank: seat for seat in reversed(self.seats)}

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The layer of each call."""
        return tuple(call.layer for call in self.calls)

    @property
    def num_experts(self) -> int:
        """Shards of the widest call: the width of tables."""
        return max((call.num_shards for call in self.calls), default=0)

    @property
    def num_slots(self) -> int:
        """Slots per layer of the seat that needs the most, in the layer where it does."""
        return max(self.slots_by_call, default=0)

    @property
    def slots_by_call(self) -> tuple[int, ...]:
        """For each call the slots of the seat that needs the most."""
        num_calls = range(len(self.calls))
        return tuple(max((len(seat.experts(index)) for seat in self.seats), default=0) for index in num_calls)

    def num_dealt(self, index: int, num_seats: int) -> int:
        """How many of the shards of a call should have an active place on each of so many seats. None where there are
        more seats than shards: every seat would hold every shard."""
        num_shards = self.calls[index].num_shards
        return num_shards % num_seats if self.deals_remainder and num_seats <= num_shards else 0
