"""Log: one log, mapped. Who is in it, and whether what is there is what belongs there.

A descriptor of the memory is enough: whoever has one can read, also while its owner writes, and after its death.
"""

import ctypes
import os
from dataclasses import astuple
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from everserve.kvlog.chains import KEY_BYTES
from everserve.kvlog.layout import HEADER, HEADER_AT_SHAPE, MAGIC, SHAPE_AT, VERSION, LogShape
from everserve.kvlog.library import load


class LogMismatch(ValueError):
    """The memory holds a log of another shape, or something else."""


class Record(NamedTuple):
    """What a commit says: of this stream so many tokens are in the log, in these blocks. (Or were: see the words.)"""

    index: int  # type: ignore[assignment]  # a tuple has a method of that name
    key: bytes
    seq: int  # grows with every commit of a log
    num_tokens: int
    blocks: tuple[int, ...]


class _Found(ctypes.Structure):
    """struct found in csrc/log.h."""

    _fields_ = [
        ("index", ctypes.c_int64),
        ("seq", ctypes.c_uint64),
        ("key", ctypes.c_char * KEY_BYTES),
        ("num_tokens", ctypes.c_int64),
        ("num_blocks", ctypes.c_int64),
        ("blocks", ctypes.c_void_p),
    ]


class Log:
    """The descriptor stays the caller's, who may close it. Zeroed memory becomes an empty log.

    Mapped until `close`, and not just until the object is collected: C code and a pool may hold its addresses.
    """

    def __init__(self, fd: int, shape: LogShape) -> None:
        memory = os.fstat(fd)
        if memory.st_size < shape.num_bytes:  # reading beyond the end would be SIGBUS
            raise ValueError(f"this log has {shape.num_bytes} bytes, this memory has {memory.st_size}")
        base = load().brief.es_log_map(fd, shape.num_bytes)
        if base < 0:
            raise OSError(-base, os.strerror(-base))
        self.shape = shape
        self.identity = (memory.st_dev, memory.st_ino)
        self.layout = shape.layout()  # for C
        self.layout.base = base
        try:
            self.was_there = _sign(base, shape)
        except LogMismatch:
            self._unmap()
            raise
        self.address = ctypes.addressof(self.layout)
        self.blocks_address: int = base + self.layout.blocks_at
        self.blocks = _bytes_at(self.blocks_address, shape.num_blocks * shape.block_bytes)
        self._block_buffer = (ctypes.c_int32 * shape.max_blocks)()
        self._found = _Found(blocks=ctypes.addressof(self._block_buffer))
        self._found_address = ctypes.addressof(self._found)

    def close(self) -> None:
        """Unmap it, whoever still has an array or a pool over `blocks`: that must not be used any more.

        What is called afterwards fails; a second close does nothing.
        """
        if self.layout.base:
            self.blocks.release()
            self._unmap()

    def _unmap(self) -> None:
        error = load().brief.es_log_unmap(self.layout.base, self.shape.num_bytes)
        assert error == 0, os.strerror(-error)
        self.layout.base = 0

    @property
    def closed(self) -> bool:
        return not self.layout.base

    def find(self, key: bytes) -> Record | None:
        """The record of this stream: the newest, if there is more than one."""
        assert len(key) == KEY_BYTES and self.layout.base
        is_there = load().brief.es_log_find(self.address, key, self._found_address)
        return self._record() if is_there else None

    def records(self) -> list[Record]:
        """All records, by index. Of one stream there may be more than one."""
        assert self.layout.base
        read, indices = load().brief.es_log_read, range(self.shape.num_records)
        return [self._record() for index in indices if read(self.address, index, self._found_address)]

    def _record(self) -> Record:
        found = self._found
        key = ctypes.string_at(self._found_address + _Found.key.offset, KEY_BYTES)
        return Record(found.index, key, found.seq, found.num_tokens, tuple(self._block_buffer[: found.num_blocks]))

    def count_intact(self, block: int, num_tokens: int, chains: NDArray[np.uint64]) -> int:
        """How many of the first `num_tokens` slots of a block hold what belongs to these chains, intact.

        Verified where they lie: true for as long as nobody writes there. Who cannot be sure copies (`copy_in`).
        """
        assert self.layout.base and 0 <= block < self.shape.num_blocks
        chains = checked_chains(chains, num_tokens, self.shape)
        return load().blocking.es_log_count_intact(self.address, block, num_tokens, chains.ctypes.data)  # type: ignore[no-any-return]


def checked_chains(chains: NDArray[np.uint64], num_tokens: int, shape: LogShape) -> NDArray[np.uint64]:
    """As C wants them: contiguous, one per slot."""
    assert 0 <= num_tokens <= min(len(chains), shape.block_size) and chains.dtype == np.uint64
    return np.ascontiguousarray(chains)


def _sign(base: int, shape: LogShape) -> bool:
    """Whether this is a log of this shape; empty memory becomes one, the magic last: half a header is none."""
    header = _bytes_at(base, HEADER.size)
    expected = (MAGIC, VERSION, *astuple(shape))
    found = HEADER.unpack(header)
    if found[0] == 0:
        HEADER_AT_SHAPE.pack_into(header, SHAPE_AT, *expected[1:])
        ctypes.c_uint64.from_address(base).value = MAGIC
    elif found != expected:
        what = f"a log of another shape: {found[1:]}" if found[0] == MAGIC else "something else"
        raise LogMismatch(f"this memory holds {what}; expected {expected[1:]}")
    return bool(found[0])


def _bytes_at(address: int, num_bytes: int) -> memoryview:
    return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")
