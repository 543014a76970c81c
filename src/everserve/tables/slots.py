"""Slots: physical places for one expert's weights, in each layer of an expert worker."""

import msgspec

from everserve.tables.ids import Rank

EMPTY = -1


class SeatSlots(msgspec.Struct, frozen=True, kw_only=True):
    """What the slots of one worker hold."""

    rank: Rank
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


class HeldSlots(msgspec.Struct, frozen=True, kw_only=True):
    """What an incarnation of an expert worker reports to hold. A slot's generation grows with each change of it."""

    experts: tuple[tuple[int, ...], ...]  # [index of the MoE layer][slot] -> expert, or EMPTY
    generations: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if [len(slots) for slots in self.experts] != [len(slots) for slots in self.generations]:
            raise ValueError("slots and their generations differ in number")

    @property
    def num_slots(self) -> int:
        return len(self.experts[0]) if self.experts else 0
