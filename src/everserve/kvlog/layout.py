"""What a log has room for, and where things are in it.

    header         one line: magic, version, shape
    records        for each stream two copies, a line each, written in turns: one is whole whenever the writer dies
    block lists    for each record the numbers of its blocks, in order
    words          for each slot of each block
    blocks         from a page boundary on; each as in the KV pool: [layer, plane, slot, piece]

A *plane* is the keys, or the values, of one head in one layer of a block; a *piece* is one token's part of it:

    one token in one layer = num_planes pieces, block_size * piece_bytes apart

Where the pool itself is memory that outlives its worker, but on a device, the blocks are there, and the rest is a log
without blocks. Memory is only touched, and paid for, where it is used. This module needs neither numpy nor C.
"""

import ctypes
import mmap
from dataclasses import astuple, dataclass
from struct import Struct

from everserve.native.structs import source

_LINE = 64
_RECORD_BYTES = 2 * _LINE  # struct record in csrc/log.h
_INT32_BYTES, _WORD_BYTES = 4, 8
_MAX_INT32 = 2**31 - 1
MAX_BLOCK_SIZE = 1024  # csrc/log.h

MAGIC = 0x676F6C2D766B7365
VERSION = 2
HEADER = Struct("Q8i")  # magic, version, the shape
HEADER_AT_SHAPE = Struct("8i")  # the same without the magic
SHAPE_AT = 8
assert HEADER.size <= _LINE


class LogLayout(ctypes.Structure):
    """struct log in csrc/log.h: a log's shape, where its regions are, and where it is mapped (0: nowhere)."""

    _fields_ = source("kvlog", "log.h").fields("log")
    records_at: int
    lists_at: int
    words_at: int
    blocks_at: int
    base: int


@dataclass(frozen=True, kw_only=True)
class LogShape:
    """What a log has room for: a pool of blocks, and `num_records` streams of at most `max_blocks` blocks each."""

    num_blocks: int
    block_size: int  # tokens
    num_layers: int
    num_planes: int  # keys and values of each head; 1 with latent attention
    piece_bytes: int
    num_records: int
    max_blocks: int

    def __post_init__(self) -> None:
        assert min(astuple(self)) > 0, self
        assert self.piece_bytes % 4 == 0 and self.block_size <= MAX_BLOCK_SIZE, self
        assert max(self.num_blocks * self.block_size, *astuple(self)) <= _MAX_INT32, "a slot is numbered by an int32"

    @property
    def block_bytes(self) -> int:
        return self.num_layers * self.num_planes * self.block_size * self.piece_bytes

    @property
    def num_bytes(self) -> int:
        """How much memory a log needs: a whole number of pages."""
        return _up(self.layout().blocks_at + self.num_blocks * self.block_bytes, mmap.PAGESIZE)

    @property
    def head_bytes(self) -> int:
        """How much of that is not blocks: all that a log needs whose blocks are elsewhere."""
        return int(self.layout().blocks_at)

    def has_blocks_like(self, other: "LogShape") -> bool:
        """Whether blocks of the two have the same layout."""
        return self.block_size == other.block_size and (
            (self.num_layers, self.num_planes, self.piece_bytes)
            == (other.num_layers, other.num_planes, other.piece_bytes)
        )

    def layout(self) -> LogLayout:
        records_at = _LINE
        lists_at = records_at + self.num_records * _RECORD_BYTES
        words_at = _up(lists_at + self.num_records * self.max_blocks * _INT32_BYTES, _LINE)
        blocks_at = _up(words_at + self.num_blocks * self.block_size * _WORD_BYTES, mmap.PAGESIZE)
        return LogLayout(*astuple(self), records_at, lists_at, words_at, blocks_at, 0)


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
