"""Where things are in the memory of a parity. Without numpy: the orchestrator imports it.

    first       as in a pool (layout.py), with groups instead of pieces
    members     [home][group][max_members]: the heads of each group
    chains      [block][slot]: of the tokens that this worker knows there. A successor, and new groups, begin with them

Like a pool it has room for the worst case, here as many groups as there are heads, and is only paid for where used.
"""

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

from everserve.memory.pieces.layout import NO_OWNER, PAGE, KvMemory, KvShape
from everserve.memory.pieces.library import ParityAt

_WORD_BYTES = 8


@dataclass(frozen=True)
class ParityShape:
    """A parity beside pools of `pool`'s shape, whose blocks belong to so many homes in equal parts."""

    pool: KvShape
    num_homes: int
    max_members: int  # of a group: one on every device but that of the parity

    @property
    def num_groups(self) -> int:
        return self.pool.num_pieces

    @property
    def num_slots(self) -> int:
        return self.pool.num_blocks * self.pool.block_size

    @property
    def slots_per_home(self) -> int:
        return self.num_slots // self.num_homes

    @property
    def members_at(self) -> int:
        return _up(self.pool.num_bytes)

    @property
    def chains_at(self) -> int:
        return self.members_at + _up(self.num_homes * self.num_groups * self.max_members * _WORD_BYTES)

    @property
    def num_bytes(self) -> int:
        return self.chains_at + _up(self.num_slots * _WORD_BYTES)


class ParityMemory:
    """Such memory, mapped. `fd` stays the caller's, and may be closed."""

    def __init__(self, fd: int, shape: ParityShape) -> None:
        self.shape = shape
        self._pool = KvMemory(fd, shape.pool)
        self._map = mmap.mmap(fd, shape.num_bytes - shape.members_at, offset=shape.members_at)
        num_members = shape.num_homes * shape.num_groups * shape.max_members
        self._members = (ctypes.c_int64 * num_members).from_buffer(self._map)
        self.at = ParityAt(
            self._pool.address,
            ctypes.addressof(self._members),
            shape.max_members,
            shape.pool.num_blocks // shape.num_homes,
        )
        self.address = ctypes.addressof(self.at)  # for C

    @property
    def chains(self) -> memoryview:
        """One word for each slot; 0: nothing is known of it."""
        first = self.shape.chains_at - self.shape.members_at
        return memoryview(self._map)[first : first + self.shape.num_slots * _WORD_BYTES]

    def members(self, home: int, group: int) -> tuple[int, ...]:
        """Owners (layout.py); none: the group is not used."""
        first = self._first(home, group)
        found = self._members[first : first + self.shape.max_members]
        return tuple(owner for owner in found if owner != NO_OWNER)

    def set_members(self, home: int, group: int, owners: Sequence[int]) -> None:
        """What is in the group's rows is not believed from now on, until it is written anew."""
        first, num = self._first(home, group), self.shape.max_members
        assert len(owners) <= num, f"{len(owners)} heads in a group of at most {num}"
        self._members[first : first + num] = [*owners, *[NO_OWNER] * (num - len(owners))]

    def _first(self, home: int, group: int) -> int:
        return (home * self.shape.num_groups + group) * self.shape.max_members


def _up(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE
