"""HeadTable: which piece of a seat's heads is of which (layer, head), in front of the memory itself.

    words of 8 bytes:  magic | model | pool | pid | born | check of both | ... | for each piece: its head, or 0

The entry of a piece is written when its weights are there, and erased before they change. `model` is a hash of what
decides their bytes. `pool` is the identity of the KV: a number that changes when KV was lost, because the memory is
new, or a piece has got another head; and when another process takes the memory over, since what its predecessor has
left there has to be checked. `pid`, `born`: the process that writes there.
"""

import secrets
from typing import Protocol

import numpy as np

from everserve.plan.head_memory import HEADER_BYTES, Head

_MAGIC = 0x7364616568  # "heads"
_MAGIC_AT, _MODEL_AT, _POOL_AT, _PID_AT, _BORN_AT, _CHECK_AT, _PIECES_AT = 0, 1, 2, 3, 4, 5, 8  # words
_WORD_BYTES = 8
_EMPTY = 0


class NoPieceError(RuntimeError):
    """All pieces have heads that are in use."""


class WordMemory(Protocol):
    """What is needed of `Driver`."""

    def read(self, address: int, num_bytes: int) -> bytes: ...
    def write(self, address: int, data: bytes) -> None: ...


class HeadTable:
    """`in_use`: heads whose pieces are not given to others."""

    def __init__(self, memory: WordMemory, address: int, num_pieces: int) -> None:
        assert _WORD_BYTES * (_PIECES_AT + num_pieces) <= HEADER_BYTES, "more heads than a header has room for"
        self._memory = memory
        self._address = address
        self._num_pieces = num_pieces
        self.in_use: set[Head] = set()

    def claim(self, model: bytes) -> None:
        """Memory that is new, or of another model, has nothing."""
        number = int.from_bytes(model[:_WORD_BYTES], "little") >> 1
        if (self._word(_MAGIC_AT), self._word(_MODEL_AT)) != (_MAGIC, number):
            self._set(_MAGIC_AT, 0)
            self._memory.write(self._address + _WORD_BYTES * _PIECES_AT, bytes(_WORD_BYTES * self._num_pieces))
            self._set(_POOL_AT, new_identity())
            self._set(_MODEL_AT, number)
            self._set(_MAGIC_AT, _MAGIC)

    @property
    def pool(self) -> int:
        return self._word(_POOL_AT)

    @property
    def owner(self) -> tuple[int, int, int]:
        """The process that wrote there last, when it was born, and a check of both; all 0 if there was none."""
        return self._word(_PID_AT), self._word(_BORN_AT), self._word(_CHECK_AT)

    def own(self, pid: int, born: int, check: int, pool: int) -> None:
        """This process writes there from now on, and has told homes that this is the identity of the KV."""
        self._set(_POOL_AT, pool)
        self._set(_PID_AT, pid)
        self._set(_BORN_AT, born)
        self._set(_CHECK_AT, check)

    def pieces(self) -> dict[Head, int]:
        """The piece of each head that is there, as another process sees it: nothing before it was claimed."""
        if self._word(_MAGIC_AT) != _MAGIC:
            return {}
        return {_head(entry): piece for piece, entry in enumerate(self._entries()) if entry != _EMPTY}

    def find(self, head: Head) -> int | None:
        """The piece that has it."""
        entries = self._entries()
        return entries.index(_entry(head)) if _entry(head) in entries else None

    def take(self, head: Head) -> int:
        """A piece for it, empty until it is complete. Raises NoPieceError."""
        entries, kept = self._entries(), {_entry(other) for other in self.in_use}
        free = sorted({entry for entry in entries if entry not in kept})  # an empty one first
        if not free:
            raise NoPieceError(f"layer {head[0]}, head {head[1]}: all {len(entries)} pieces have other heads")
        piece = entries.index(free[0])
        if free[0] != _EMPTY:
            self._set(_POOL_AT, new_identity())
        self._set(_PIECES_AT + piece, _EMPTY)
        return piece

    def complete(self, piece: int, head: Head) -> None:
        self._set(_PIECES_AT + piece, _entry(head))

    def _entries(self) -> list[int]:
        address, num_bytes = self._address + _WORD_BYTES * _PIECES_AT, _WORD_BYTES * self._num_pieces
        entries: list[int] = np.frombuffer(self._memory.read(address, num_bytes), np.int64).tolist()
        return entries

    def _word(self, at: int) -> int:
        return int.from_bytes(self._memory.read(self._address + _WORD_BYTES * at, _WORD_BYTES), "little")

    def _set(self, at: int, value: int) -> None:
        self._memory.write(self._address + _WORD_BYTES * at, value.to_bytes(_WORD_BYTES, "little"))


def _entry(head: Head) -> int:
    layer, number = head
    return (layer << 32) + number + 1


def _head(entry: int) -> Head:
    return entry - 1 >> 32, entry - 1 & 0xFFFFFFFF


def new_identity() -> int:
    return secrets.randbits(62) + 1
