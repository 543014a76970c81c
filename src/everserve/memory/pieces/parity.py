"""Parity: what this worker keeps so that the heads of any one other worker can be rebuilt when its device is lost.

Heads of different workers form a *group*; its parity is kept by a worker that has none of them (plan/parity.py). Each
token of the parity is the exclusive or of that token in all members, and its word that of their words. So a member is
rebuilt from the others and the parity, and certifies itself as ever: a parity that is torn, or older than a member,
only shortens what is believed.

It is written by the worker that keeps it, behind the steps, out of the pools of the others: every token passes through
every worker that has heads, so each knows which slots have changed, and the chains by which it can tell whether a
member has stored its part yet. It does not depend on what was there before, so writing twice, or dying in between, does
no harm.

    note (rows were stored, or fetched)  --_REST_S-->  write  -->  covered
                                           ^             |  a member does not have it yet
                                           '-------------'  each time later; given up after _MOST_TRIES
"""

import ctypes
import heapq
import itertools
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from everserve.memory.pieces.layout import KvMemory
from everserve.memory.pieces.library import load
from everserve.memory.pieces.parity_layout import ParityMemory

_REST_S = 0.02  # a step goes through all layers, and so do the parts of other workers
_MOST_TRIES = 8
_TRIES_OF_KNOWN = 2  # of what was stored long ago: a member that does not have it now will hardly have it later
_MOST_WAITING = 64 << 20  # bytes of members
Groups = Sequence[Sequence[int]]  # the members of each, as owners (layout.py)


class _Rows(NamedTuple):
    due_s: float
    number: int  # among equals the first noted is the first written
    slots: NDArray[np.int32]
    num_tries: int


class Parity:
    """The parity of groups, in memory of this worker. What a predecessor may have left to do is done again."""

    def __init__(self, memory: ParityMemory, clock: Callable[[], float] = time.monotonic) -> None:
        self.memory = memory
        self._clock = clock
        self._chains = np.frombuffer(memory.chains, np.dtype(np.uint64))  # by slot
        self._is_missing = np.zeros(memory.shape.num_slots, bool)  # noted, and given up
        self._waiting: list[_Rows] = []  # a heap
        self._numbers = itertools.count()
        self._num_waiting = 0  # tokens
        self._row_bytes = 0  # of all members, for one token
        self._measure()
        for home in range(memory.shape.num_homes):
            self._note_all(home)

    def note(self, kv_slots: int, chains: int, num_rows: int) -> None:
        """These rows were stored: addresses of int32 and of uint64. Once for each layer, so usually nothing is new."""
        if not num_rows:
            return
        slots = (ctypes.c_int32 * num_rows).from_address(kv_slots)
        found = (ctypes.c_uint64 * num_rows).from_address(chains)
        self.learn(np.ctypeslib.as_array(slots), np.ctypeslib.as_array(found))

    def learn(self, slots: NDArray[np.int32], chains: NDArray[np.uint64]) -> None:
        """Tokens with these chains are in these slots."""
        is_new = (self._chains[slots] != chains) | self._is_missing[slots]
        if is_new.any():
            self._chains[slots] = chains
            self._wait(slots[is_new], self._clock() + _REST_S)

    def regroup(self, groups: Sequence[Groups]) -> None:
        """Takes new groups, by home. Groups that stay are left as they are; others are written behind the steps."""
        for home, wanted in enumerate(groups):
            if self._regroup(home, {tuple(members) for members in wanted if members}):
                self._note_all(home)
        self._measure()

    @property
    def is_due(self) -> bool:
        """Whether there is something to write now."""
        return bool(self._waiting) and self._waiting[0].due_s <= self._clock()

    @property
    def is_behind(self) -> bool:
        """Whether too much waits: requests have to wait for a little of it."""
        return self._num_waiting * self._row_bytes > _MOST_WAITING

    def write_some(self, num_bytes: int, sources: Sequence[KvMemory]) -> None:
        """About so many bytes of members, out of these pools."""
        left = max(num_bytes // max(self._row_bytes, 1), 1)  # tokens
        while left > 0 and self.is_due:
            rows = heapq.heappop(self._waiting)
            now, later = rows.slots[:left], rows.slots[left:]
            if len(later):
                heapq.heappush(self._waiting, rows._replace(slots=later))
            left -= len(now)
            self._num_waiting -= len(now)
            missing = self._write(now, sources)
            if not len(missing):
                continue
            if rows.num_tries < _MOST_TRIES:
                self._wait(missing, self._clock() + _REST_S * 2**rows.num_tries, rows.num_tries + 1)
            else:
                self._is_missing[missing] = True

    def _write(self, slots: NDArray[np.int32], sources: Sequence[KvMemory]) -> NDArray[np.int32]:
        """Those that a member does not have."""
        addresses = (ctypes.c_void_p * len(sources))(*(source.address for source in sources))
        missing, homes = [], slots // self.memory.shape.slots_per_home
        for home in np.unique(homes):
            part = np.ascontiguousarray(slots[homes == home])
            chains, is_done = self._chains[part], np.zeros(len(part), np.uint8)
            load().blocking.es_pieces_parity(
                self.memory.address, addresses, len(sources), part.ctypes.data, chains.ctypes.data, len(part),
                is_done.ctypes.data,
            )  # fmt: skip
            missing.append(part[is_done == 0])
        return np.concatenate(missing)

    def _wait(self, slots: NDArray[np.int32], due_s: float, num_tries: int = 0) -> None:
        self._is_missing[slots] = False
        self._num_waiting += len(slots)
        heapq.heappush(self._waiting, _Rows(due_s, next(self._numbers), np.array(slots, np.int32), num_tries))

    def _note_all(self, home: int) -> None:
        """All that is known of a home."""
        num = self.memory.shape.slots_per_home
        known = np.flatnonzero(self._chains[home * num : (home + 1) * num]) + home * num
        if len(known):
            self._wait(known.astype(np.int32), self._clock(), _MOST_TRIES - _TRIES_OF_KNOWN)

    def _regroup(self, home: int, wanted: set[tuple[int, ...]]) -> bool:
        """Whether there are others now."""
        memory, free = self.memory, []
        for group in range(memory.shape.num_groups):
            members = memory.members(home, group)
            if members in wanted:
                wanted.discard(members)
            else:
                free.append(group)
        new = sorted(wanted)
        assert len(new) <= len(free), "more groups than heads"
        for number, group in enumerate(free):
            memory.set_members(home, group, new[number] if number < len(new) else ())
        return bool(new)

    def _measure(self) -> None:
        shape = self.memory.shape
        num = sum(len(self.memory.members(0, group)) for group in range(shape.num_groups))
        self._row_bytes = num * (shape.pool.piece_bytes // shape.pool.block_size)
