"""Mirror: the second memory of a pool, which survives the loss of the pool's device.

Rows go there behind the steps that have stored them, a little at a time, when no request waits. What has not come that
far when the device is lost is computed again. A row is never left out: if too much waits, the oldest is copied at once.
"""

import ctypes
from collections import deque

from everserve.memory.pieces.layout import KvMemory
from everserve.memory.pieces.library import load

_MOST_WAITING = 64 << 20  # bytes
_INT32_BYTES = 4


class _Rows:
    """Some rows of some pieces."""

    def __init__(self, kv_slots: int, num_rows: int, pieces: int, num_pieces: int) -> None:
        self.kv_slots = ctypes.create_string_buffer(ctypes.string_at(kv_slots, _INT32_BYTES * num_rows))
        self.pieces = ctypes.create_string_buffer(ctypes.string_at(pieces, _INT32_BYTES * num_pieces))
        self.num_rows, self.num_pieces, self.num_done = num_rows, num_pieces, 0


class Mirror:
    """The mirror of the pool in `own`, in `memory` of the same shape, but for more blocks: into these only `fetch`
    copies.
    """

    def __init__(self, own: KvMemory, memory: KvMemory) -> None:
        self._own = own
        self.memory = memory
        self._waiting: deque[_Rows] = deque()
        self.num_waiting = 0  # bytes
        self._row_bytes = own.shape.piece_bytes // own.shape.block_size  # keys and values

    @property
    def owners(self) -> list[int] | None:
        """What each of its pieces belongs to; None if there is nothing in it."""
        return list(self.memory.owners) if self.memory.is_signed else None

    def note_owners(self) -> None:
        """The same as in the pool, from now on."""
        if not self.memory.is_signed:
            self.memory.sign(list(self._own.owners), id=1)
        self.memory.owners[:] = list(self._own.owners)

    def note(self, kv_slots: int, num_rows: int, pieces: int, num_pieces: int) -> None:
        """These rows were stored in these pieces: addresses of int32."""
        if not num_rows * num_pieces:
            return
        self._waiting.append(_Rows(kv_slots, num_rows, pieces, num_pieces))
        self.num_waiting += num_rows * num_pieces * self._row_bytes
        if self.num_waiting > _MOST_WAITING:
            self.copy_some(self.num_waiting - _MOST_WAITING)

    def copy_some(self, num_bytes: int) -> None:
        """About so many of those that wait, the oldest first."""
        left = num_bytes
        while self._waiting and left > 0:
            rows = self._waiting[0]
            per_row = rows.num_pieces * self._row_bytes
            num_rows = min(rows.num_rows - rows.num_done, -(-left // per_row))
            first = ctypes.addressof(rows.kv_slots) + _INT32_BYTES * rows.num_done
            load().blocking.es_pieces_mirror(
                self._own.address, self.memory.address, first, num_rows, rows.pieces, rows.num_pieces
            )
            rows.num_done += num_rows
            left -= num_rows * per_row
            self.num_waiting -= num_rows * per_row
            if rows.num_done == rows.num_rows:
                self._waiting.popleft()
