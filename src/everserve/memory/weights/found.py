"""Experts that were found, and how they are brought to a slot.

`At`, here and wherever slots are filled, is where an expert lies that this worker can compute with: on CPUs an address
in the memory of a seat, on a GPU the number of a place behind its own (backends).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from everserve.memory.weights.slot_table import Entry, SlotTable
from everserve.tables.ids import Rank
from everserve.tables.slots import Place, Source

At = TypeVar("At")


class Copy(Protocol):
    """The bytes of one expert on their way; or only being summed up, where they are."""

    def poll(self) -> int | None:
        """The checksum of what has arrived; None while something is missing. Raises if it never will arrive."""

    def give_up(self) -> None:
        """Its source goes away. `poll` must be called until it returns or raises: until nothing is written any more."""


@dataclass(frozen=True)
class Loan:
    """A slot of another seat's memory: while it is borrowed, no process changes it."""

    table: SlotTable
    at: Place
    entry: Entry

    def take(self) -> bool:
        """False: it does not hold the expert any more."""
        return self.table.borrow(self.at, self.entry)

    def end(self) -> None:
        """Nothing computes with it any more."""
        self.table.give_back(self.at)


@dataclass(frozen=True)
class Found(Generic[At]):
    """An expert in one of the sources."""

    source: Source
    begin: Callable[[At], Copy]  # to this place; or to sum it up there, if it is used where it is
    checksum: Callable[[], int | None]  # what its bytes should sum up to, known at the end; None: there is no such sum
    is_unchanged: Callable[[], bool] = lambda: True  # whether that still describes what was there
    rank: Rank | None = None  # whose memory it is
    at: At | None = None  # if it is to be used where it is
    loan: Loan | None = None  # likewise: it is taken before anything is read
