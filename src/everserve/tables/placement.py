"""Which expert is in which slot of which seat."""

import msgspec

from everserve.tables.ids import Rank

EMPTY = -1


class SeatSlots(msgspec.Struct, frozen=True, kw_only=True):
    """The slots of one expert seat. In each layer the first `num_active` slots are active, the others are shadows."""

    rank: Rank
    num_active: int
    experts: tuple[tuple[int, ...], ...]  # [index of the MoE layer][slot] -> expert, or EMPTY

    def __post_init__(self) -> None:
        if len({len(slots) for slots in self.experts}) > 1:
            raise ValueError(f"rank {self.rank} has a different number of slots in different layers")
        for slots in self.experts:
            filled = [expert for expert in slots if expert != EMPTY]
            if len(set(filled)) != len(filled):
                raise ValueError(f"rank {self.rank} holds an expert twice in one layer")

    @property
    def num_slots(self) -> int:
        return len(self.experts[0]) if self.experts else 0


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """All expert seats. It does not say who is alive: routes do."""

    num_experts: int
    moe_layers: tuple[int, ...]  # layer numbers; tables are indexed by position in this tuple
    seats: tuple[SeatSlots, ...]

    def __post_init__(self) -> None:
        for seat in self.seats:
            if len(seat.experts) != len(self.moe_layers):
                raise ValueError(f"rank {seat.rank} has slots for {len(seat.experts)} of {len(self.moe_layers)} layers")

    def seat(self, rank: Rank) -> SeatSlots:
        return next(seat for seat in self.seats if seat.rank == rank)
