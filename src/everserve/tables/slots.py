"""What an expert worker's slots hold, by its report, and requested changes.

A *generation* counts the changes of one slot: two reports with the same generation are about the same weights.
"""

from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

import msgspec
import numpy as np

from everserve.tables.ids import Rank

EMPTY = -1


class Place(NamedTuple):
    """One slot of a worker, in one call."""

    call_index: int
    slot: int


class Fill(NamedTuple):
    """An expert for a slot."""

    call_index: int
    slot: int
    expert: int


class FailedFill(msgspec.Struct, frozen=True, kw_only=True):
    """A slot that is empty because its expert could not be loaded."""

    call_index: int
    slot: int
    expert: int
    reason: str


class Source(StrEnum):
    """Where the weights of a filled slot came from, cheapest first."""

    MAPPED = "mapped"  # memory of a seat that is not served now, on the same device: used where it is, no copy
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
        """The slots of the call with the most."""
        return max(map(len, self.experts), default=0)


class HeldSlots(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """All slots of one incarnation, [index of the call][slot]. Calls may have different numbers of slots. The last
    `num_mapped` ones of each call have no memory of their own: what they hold lies in the memory of another seat."""

    experts: tuple[tuple[int, ...], ...]  # or EMPTY
    generations: tuple[tuple[int, ...], ...]
    num_mapped: int = 0

    def __post_init__(self) -> None:
        if [len(slots) for slots in self.experts] != [len(slots) for slots in self.generations]:
            raise ValueError("slots without a generation, or generations without a slot")
        if any(min(slots, default=EMPTY) < EMPTY for slots in self.experts):
            raise ValueError("a slot holds an expert with a negative number")
        if any(min(slots, default=0) < 0 for slots in self.generations):
            raise ValueError("a generation is negative")
        if not 0 <= self.num_mapped <= min(map(len, self.experts), default=0):
            raise ValueError(f"{self.num_mapped} slots without memory of their own, and fewer slots than that")

    @property
    def num_slots(self) -> int:
        """The slots of the call with the most."""
        return max(map(len, self.experts), default=0)

    @cached_property
    def filled(self) -> "np.ndarray[tuple[int, int], np.dtype[np.int64]]":
        """[call, slot or expert][filled slot]: index of the call, slot and expert of each slot that is not empty."""
        places = [(i, s, e) for i, slots in enumerate(self.experts) for s, e in enumerate(slots) if e != EMPTY]
        return np.array(places, np.int64).reshape(len(places), 3).T

    def num_own(self, index: int) -> int:
        """Slots of a call with memory of their own: the first ones."""
        return len(self.experts[index]) - self.num_mapped

    def own(self, index: int) -> tuple[int, ...]:
        """What these hold."""
        return self.experts[index][: self.num_own(index)]

    def mapped(self, index: int) -> dict[int, int]:
        """The other slots of a call, with what each holds, or EMPTY."""
        first = self.num_own(index)
        return {first + i: expert for i, expert in enumerate(self.experts[index][first:])}

    def is_mapped(self, place: Place) -> bool:
        return place.slot >= self.num_own(place.call_index)
