"""SlotTable: which slot of a weights memory holds which expert, for every process that has the memory.

Host memory beside the weights (Kind.WEIGHTS_STATE), sized by the capacity of the instance:

    page 0      of the backend: the state of the weights that are not experts (on a GPU)
    page 1      magic | owner | identity (SHA-256)
    page 2 ...  [call][slot]:  expert | generation | checksum | seal

A *seal* is a hash of the three words before it and of the place. It is erased before a slot is changed and written
last, when all weights are there: a slot whose writer died has none, and a torn entry has a wrong one.

The *identity* is a hash of everything that decides the bytes of an expert: model files, config, dtype. A table with
another identity says nothing.

Writers. A slot is changed under a lock on its entry. The kernel gives it up when the process ends, and only then: a
process that was stopped in the middle of a copy, declared gone and replaced may go on to write as soon as it wakes up.
So its successor

    claim      writes its incarnation into `owner`
    begin      takes the lock; refuses if the owner is another one; erases the seal

and finds each slot either unlocked, where an older incarnation can never begin again, or locked, where it must wait
until that process has ended. The backup has no owner: any expert worker may fill any slot that it can lock.

Readers that copy take no lock: they read an entry, copy, and compare the entry and the checksum of their copy.

A worker of another seat that computes with a slot where it is *borrows* it: it shares a lock on the entry with other
borrowers, which keeps writers away until the last of them has given it back or has ended. Its entry stays what it was.
"""

import errno
import fcntl
import mmap
import os
import struct
import weakref
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from everserve.tables.ids import Incarnation
from everserve.tables.slots import EMPTY, Place

_PAGE = 4096
_MAGIC = 0x656C6261742D7478  # "xt-table"
_MAGIC_AT, _OWNER_AT, _IDENTITY_AT = 0, 1, 8  # words of page 1
_IDENTITY_BYTES = 32
_ENTRY_WORDS = 4
_EXPERT, _GENERATION, _CHECKSUM, _SEAL = range(_ENTRY_WORDS)
_WORD = (1 << 64) - 1
_flock = struct.Struct("@hhqqi")


class Entry(NamedTuple):
    """What a slot holds, completely."""

    expert: int
    generation: int  # how often this slot was filled, by any incarnation
    checksum: int


class NotOwnerError(RuntimeError):
    """Another incarnation has this memory by now."""


def state_bytes(num_layers: int, num_slots: int) -> int:
    """The size of the memory for a table of so many slots."""
    return 2 * _PAGE + num_layers * num_slots * _ENTRY_WORDS * 8


class SlotTable:
    """The table, mapped. The descriptor stays the caller's, and may be closed."""

    def __init__(self, fd: int, num_layers: int, num_slots: int, *, read_only: bool = False) -> None:
        needed, size = state_bytes(num_layers, num_slots), os.fstat(fd).st_size
        if size < needed:
            raise ValueError(f"a table of {num_layers} x {num_slots} slots has {needed} bytes, this memory has {size}")
        self.num_layers, self.num_slots = num_layers, num_slots
        access = mmap.ACCESS_READ if read_only else mmap.ACCESS_WRITE
        words = np.frombuffer(mmap.mmap(fd, needed, access=access), dtype=np.uint64)
        self._header = words[_PAGE // 8 : 2 * _PAGE // 8]
        self._entries = words[2 * _PAGE // 8 :].reshape(num_layers, num_slots, _ENTRY_WORDS)
        # A description of our own: locks of descriptors that were passed between processes are one lock.
        mode = os.O_RDONLY if read_only else os.O_RDWR
        self._lock_fd = os.open(f"/proc/self/fd/{fd}", mode | os.O_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self._lock_fd)
        self._close.atexit = False  # a thread may still fill a backup then; the kernel closes it
        self._owner: Incarnation | None = None

    def close(self) -> None:
        """Gives up all locks. Without it, they are given up with the last reference to the table."""
        self._close()
        self._lock_fd = -1

    # -- reading ---------------------------------------------------------------------------------

    def has(self, identity: bytes) -> bool:
        """Whether the entries are about experts of this identity."""
        return int(self._header[_MAGIC_AT]) == _MAGIC and self._identity() == identity

    def read(self, place: Place) -> Entry | None:
        """None: the slot is empty, being changed, or was left half-written."""
        layer, slot = place
        expert, generation, checksum, seal = (int(word) for word in self._entries[layer, slot])
        if not seal or seal != self._seal(place, expert, generation, checksum):
            return None
        return Entry(expert, generation, checksum)

    def find(self, call_index: int, expert: int) -> tuple[Place, Entry] | None:
        """A slot that holds this expert."""
        for slot in np.flatnonzero(self._entries[call_index, :, _EXPERT] == expert):
            place = Place(call_index, int(slot))
            entry = self.read(place)
            if entry is not None and entry.expert == expert:
                return place, entry
        return None

    def experts(self) -> list[list[int]]:
        """[call][slot] -> expert, or EMPTY."""
        entries = [[self.read(Place(i, slot)) for slot in range(self.num_slots)] for i in range(self.num_layers)]
        return [[entry.expert if entry is not None else EMPTY for entry in slots] for slots in entries]

    def places(self) -> Iterator[Place]:
        return (Place(layer, slot) for layer in range(self.num_layers) for slot in range(self.num_slots))

    def missing(self) -> list[Place]:
        """Slots without a seal."""
        return [Place(int(layer), int(slot)) for layer, slot in np.argwhere(self._entries[:, :, _SEAL] == 0)]

    # -- writing ---------------------------------------------------------------------------------

    def claim(self, identity: bytes, owner: Incarnation | None) -> None:
        """From now on this incarnation changes slots, and no older one. `owner` None: a memory that several workers
        fill. Forgets entries of another identity."""
        self._owner = owner
        if owner is not None:
            self._header[_OWNER_AT] = owner
        if not self.has(identity):
            assert len(identity) == _IDENTITY_BYTES, identity
            self._entries[:, :, _SEAL] = 0
            self._header[_IDENTITY_AT : _IDENTITY_AT + _IDENTITY_BYTES // 8] = np.frombuffer(identity, dtype=np.uint64)
            self._header[_MAGIC_AT] = _MAGIC

    def is_locked(self, place: Place) -> bool:
        """Whether another process changes this slot, or did when it was stopped."""
        if not self._lock(place, fcntl.F_RDLCK):
            return True
        self.end(place)
        return False

    def borrow(self, place: Place, entry: Entry) -> bool:
        """From now on this slot does not change, until `give_back`. False: it does not hold that any more."""
        if not self._lock(place, fcntl.F_RDLCK):
            return False
        if self.read(place) != entry:
            self.give_back(place)
            return False
        return True

    def give_back(self, place: Place) -> None:
        self.end(place)

    def begin(self, place: Place) -> bool:
        """Lock and empty a slot; `end` must follow. False: another process changes it at the moment, or has borrowed
        it; or the memory has no owner, and the slot is full. Raises NotOwnerError if an older incarnation calls it."""
        if not self._lock(place):
            return False
        if self._owner is None and self.read(place) is not None:
            self.end(place)
            return False  # another worker has filled it meanwhile
        if self._owner is not None and int(self._header[_OWNER_AT]) != self._owner:
            self.end(place)
            raise NotOwnerError("another incarnation has this seat's weights by now")
        self._entries[place.call_index, place.slot, _SEAL] = 0
        return True

    def complete(self, place: Place, expert: int, checksum: int) -> None:
        """All weights of this expert are there."""
        words = self._entries[place.call_index, place.slot]
        generation = (int(words[_GENERATION]) + 1) & _WORD
        words[_EXPERT], words[_GENERATION], words[_CHECKSUM] = expert, generation, checksum
        words[_SEAL] = self._seal(place, expert, generation, checksum)

    def end(self, place: Place) -> None:
        """The change is over, completed or not."""
        self._set_lock(place, fcntl.F_UNLCK)

    def clear(self, place: Place) -> None:
        """Empty a slot."""
        if self.begin(place):
            self.end(place)

    def _identity(self) -> bytes:
        return bytes(self._header[_IDENTITY_AT : _IDENTITY_AT + _IDENTITY_BYTES // 8].tobytes())

    def _seal(self, place: Place, expert: int, generation: int, checksum: int) -> int:
        """Never 0."""
        mixed = place.call_index * self.num_slots + place.slot + 1
        for word in (expert, generation, checksum):
            mixed = ((mixed ^ word) * 0x9E3779B97F4A7C15) & _WORD
            mixed ^= mixed >> 29
        return mixed | 1

    def _lock(self, place: Place, kind: int = fcntl.F_WRLCK) -> bool:
        try:
            self._set_lock(place, kind)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    def _set_lock(self, place: Place, kind: int) -> None:
        start = 2 * _PAGE + (place.call_index * self.num_slots + place.slot) * _ENTRY_WORDS * 8
        fcntl.fcntl(self._lock_fd, fcntl.F_OFD_SETLK, _flock.pack(kind, os.SEEK_SET, start, 1, 0))
