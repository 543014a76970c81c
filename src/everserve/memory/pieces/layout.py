"""Where things are in the memory of a pool, and of its mirror. Without numpy and C: the orchestrator imports it.

    page 0      magic | id | num_blocks | num_pieces | piece_bytes | block_size
    page 1 ...  for each piece the (layer, head) that it belongs to
    then        [block][piece][block_size]: a word for each token
    then        [block][piece][piece_bytes]: keys and values of block_size tokens

Memory is only touched, and paid for, where it is used.
"""

import ctypes
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from everserve.memory.pieces.library import PoolAt

PAGE = 4096
_MAGIC = 0x326563656970766B  # "kvpiece2"
_MAGIC_AT, _ID_AT, _FACTS_AT = 0, 1, 2  # words of page 0
_NUM_WORDS = 6
_WORD_BYTES = 8
NO_OWNER = 0
_HEAD_BITS = 16


def owner_of(layer: int, head: int) -> int:
    """What the memory says of a piece that belongs to this head."""
    return 1 + (layer << _HEAD_BITS | head)


@dataclass(frozen=True)
class KvShape:
    """The pool of one worker."""

    num_blocks: int
    num_pieces: int
    piece_bytes: int  # keys and values of one block in one piece
    block_size: int  # tokens

    @property
    def mirrored(self) -> "KvShape":
        """The shape of its mirror: as many blocks again, for streams that wait (engine/parking.py)."""
        return replace(self, num_blocks=2 * self.num_blocks)

    @property
    def words_at(self) -> int:
        return PAGE + _up(self.num_pieces * _WORD_BYTES)

    @property
    def blocks_at(self) -> int:
        return self.words_at + _up(self.num_blocks * self.num_pieces * self.block_size * _WORD_BYTES)

    @property
    def num_bytes(self) -> int:
        return self.blocks_at + self.num_blocks * self.num_pieces * self.piece_bytes


class KvMemory:
    """Such memory, mapped. `fd` stays the caller's, and may be closed."""

    def __init__(self, fd: int, shape: KvShape) -> None:
        if os.fstat(fd).st_size < shape.num_bytes:
            raise ValueError(f"a pool has {shape.num_bytes} bytes, this memory has {os.fstat(fd).st_size}")
        self.shape = shape
        self._map = mmap.mmap(fd, shape.num_bytes)
        self._words = (ctypes.c_int64 * _NUM_WORDS).from_buffer(self._map)
        self.owners = (ctypes.c_int64 * shape.num_pieces).from_buffer(self._map, PAGE)
        base = ctypes.addressof(self._words)
        self.id_address = base + _WORD_BYTES * _ID_AT
        self._id = ctypes.c_int64.from_address(self.id_address)
        self.at = PoolAt(
            base + shape.blocks_at, base + shape.words_at, base + PAGE,
            shape.num_blocks, shape.num_pieces, shape.block_size, shape.piece_bytes // (2 * shape.block_size),
        )  # fmt: skip
        self.address = ctypes.addressof(self.at)  # for C

    @property
    def id(self) -> int:
        return self._id.value

    @id.setter
    def id(self, value: int) -> None:
        self._id.value = value

    @property
    def blocks(self) -> memoryview:
        """All KV."""
        return memoryview(self._map)[self.shape.blocks_at : self.shape.num_bytes]

    @property
    def is_signed(self) -> bool:
        """Whether this is memory of this shape that a worker has used."""
        return self._words[_MAGIC_AT] == _MAGIC and self._words[_FACTS_AT:] == self._facts and self.id != 0

    def sign(self, owners: Sequence[int], id: int) -> None:
        """Begin anew, with pieces that belong to these. The magic comes last: a process that dies before leaves nothing
        that counts."""
        self._words[_MAGIC_AT] = 0
        self.owners[:] = list(owners)
        for at, fact in enumerate(self._facts, start=_FACTS_AT):
            self._words[at] = fact
        self.id = id
        self._words[_MAGIC_AT] = _MAGIC

    @property
    def _facts(self) -> list[int]:
        shape = self.shape
        return [shape.num_blocks, shape.num_pieces, shape.piece_bytes, shape.block_size]


def _up(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE
