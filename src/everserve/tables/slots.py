"""What an expert worker's slots hold, by its report, and requested changes.

A *generation* counts the changes of one slot: two reports with the same generation are about the same weights.
"""

from enum import StrEnum
from typing import NamedTuple

import msgspec

from everserve.tables.ids import Rank

EMPTY = -1


class Place(NamedTuple):
    """One slot of one layer of a worker."""

    layer_index: int  # the index of the call
    slot: int


class Fill(NamedTuple):
    """An expert for a slot."""

    layer_index: int
    slot: int
    expert: int


class FailedFill(msgspec.Struct, frozen=True, kw_only=True):
    """A slot that is empty because its expert could not be loaded."""

    layer_index: int
    slot: int
    expert: int
    reason: str


class Source(StrEnum):
    """Where the weights of a filled slot came from, cheapest first."""

    MAPPED = "mapped"  # memory that a dead process left on the same device: no copy
    SLOT = "slot"  # another slot of the same worker
    PEER = "peer"  # the memory of another worker
    HOST = "host"  # the backup in host memory
    FILE = "file"  # the model's files


class Filled(msgspec.Struct, frozen=True, kw_only=True):
    """A slot that holds its expert now."""

    fill: Fill
    source: Source
    num_bytes: int  # copied; 0 if the weights are used where they were
    seconds: float


class SeatSlots(msgspec.Struct, frozen=True, kw_only=True):
    """What the slots of one worker hold."""

    rank: Rank
    experts: tuple[tuple[int, ...], ...]  # [index of the call][slot] -> expert, or EMPTY

    def __post_init__(self) -> None:
        for slots in self.experts:
            filled = [expert for expert in slots if expert != EMPTY]
            if len(set(filled)) != len(filled):
                raise ValueError(f"rank {self.rank} holds an expert twice in one layer")

    @property
    def num_slots(self) -> int:
        """Of the call with the most."""
        return max(map(len, self.experts), default=0)


class HeldSlots(msgspec.Struct, frozen=True, kw_only=True):
    """All slots of one incarnation, [index of the call][slot]. Calls may have different numbers of slots."""

    experts: tuple[tuple[int, ...], ...]  # or EMPTY
    generations: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if [len(slots) for slots in self.experts] != [len(slots) for slots in self.generations]:
            raise ValueError("slots without a generation, or generations without a slot")
        if any(expert < EMPTY for slots in self.experts for expert in slots):
            raise ValueError("a slot holds an expert with a negative number")
        if any(generation < 0 for slots in self.generations for generation in slots):
            raise ValueError("a generation is negative")

    @property
    def num_slots(self) -> int:
        """Of the call with the most."""
        return max(map(len, self.experts), default=0)
