"""Which worker should hold which experts. A plan: routes follow what workers really hold (slots.py)."""

import msgspec

from everserve.tables.ids import Rank
from everserve.tables.slots import EMPTY, SeatSlots

PerLayer = tuple[tuple[int, ...], ...]  # [index of the MoE layer] -> experts


class SeatExperts(msgspec.Struct, frozen=True, kw_only=True):
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

    def experts(self, layer: int) -> tuple[int, ...]:
        """All of them, active ones first."""
        return self.active[layer] + self.shadows[layer]

    @property
    def num_slots(self) -> int:
        """Slots per layer that this needs."""
        return max((len(self.experts(layer)) for layer in range(len(self.active))), default=0)

    def slots(self, num_slots: int) -> SeatSlots:
        """The initial slots of a new worker in this seat: its experts in order, then empty slots up to `num_slots`."""
        layers = (self.experts(layer) for layer in range(len(self.active)))
        padded = tuple(experts + (EMPTY,) * (num_slots - len(experts)) for experts in layers)
        return SeatSlots(rank=self.rank, experts=padded)


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """All expert seats."""

    num_experts: int
    moe_layers: tuple[int, ...]  # layer numbers; tables are indexed by position in this tuple
    seats: tuple[SeatExperts, ...]

    def __post_init__(self) -> None:
        for seat in self.seats:
            num_layers = len(seat.active)
            if num_layers != len(self.moe_layers):
                raise ValueError(f"rank {seat.rank} has experts for {num_layers} of {len(self.moe_layers)} layers")

    def seat(self, rank: Rank) -> SeatExperts | None:
        """None: this rank should hold no experts."""
        return next((seat for seat in self.seats if seat.rank == rank), None)

    @property
    def num_slots(self) -> int:
        """Slots per layer of the seat that needs the most."""
        return max((seat.num_slots for seat in self.seats), default=0)
