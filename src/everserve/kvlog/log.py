"""Log: one log, mapped. Which streams are in it, and whether their KV is intact.

A descriptor of the memory is enough to read it, also while its owner writes, and after its owner's death.

Any bit of it may be wrong, in the header too: then it is no log (LogMismatch). A worker that would have restored
streams from it computes them again, and one whose own log it is begins it anew (`open_own`).
"""

import ctypes
import itertools
import logging
import os
from array import array
from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from everserve.kvlog.chains import KEY_BYTES
from everserve.kvlog.layout import HEADER, HEADER_AT_SHAPE, MAGIC, SHAPE_AT, VERSION, LogShape
from everserve.kvlog.library import load
from everserve.native.structs import source

log = logging.getLogger(__name__)


class LogMismatch(ValueError):
    """The memory holds a log of another shape, or something else, or is too small for a log."""


class Record(NamedTuple):
    """What a commit says: of this stream so many tokens are in the log, in these blocks. (Or were: see the words.)"""

    index: int  # type: ignore[assignment]  # a tuple has a method of that name
    key: bytes
    seq: int  # grows with every commit of a log
    num_tokens: int
    blocks: tuple[int, ...]


class _Found(ctypes.Structure):
    """struct found in csrc/log.h."""

    _fields_ = source("kvlog", "log.h").fields("found", {"key": ctypes.c_char * KEY_BYTES, "blocks": ctypes.c_void_p})


class BlocksElsewhere(Protocol):
    """Memory of a device, mapped (memory/device.py: Mapping)."""

    address: int

    def close(self) -> None: ...


class NoBlocks:
    """Where the blocks of a log are whose streams' KV other workers keep: it has records only."""

    address = 0

    def close(self) -> None: ...


class Log:
    """The descriptor stays the caller's, and may be closed. Zeroed memory becomes an empty log.

    Mapped until `close`, and not just until the object is collected: C code and a pool may hold its addresses.

    `elsewhere`: the blocks are there, and closed with the log; everything else is here. `blocks_address` is that one,
    and `blocks` is empty.
    """

    def __init__(self, fd: int, shape: LogShape, elsewhere: BlocksElsewhere | None = None) -> None:
        memory = os.fstat(fd)
        self.elsewhere = elsewhere
        self.was_unreadable = False  # and was begun anew
        self._num_bytes = shape.num_bytes if elsewhere is None else shape.head_bytes
        if memory.st_size < self._num_bytes:  # reading beyond the end would be SIGBUS
            raise LogMismatch(f"this log has {self._num_bytes} bytes, this memory has {memory.st_size}")
        base = load().brief.es_log_map(fd, self._num_bytes)
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
        blocks_at, num_bytes = base + self.layout.blocks_at, shape.num_blocks * shape.block_bytes
        self.blocks_address: int = blocks_at if elsewhere is None else elsewhere.address
        self.blocks = _bytes_at(blocks_at, num_bytes if elsewhere is None else 0)
        self._block_buffer = (ctypes.c_int32 * shape.max_blocks)()
        self._found = _Found(blocks=ctypes.addressof(self._block_buffer))
        self._found_address = ctypes.addressof(self._found)

    def close(self) -> None:
        """Unmap it. An array or a pool over `blocks` must not be used any more.

        What is called afterwards fails; a second close does nothing.
        """
        if self.layout.base:
            self.blocks.release()
            self._unmap()
            if self.elsewhere is not None:
                self.elsewhere.close()

    def _unmap(self) -> None:
        error = load().brief.es_log_unmap(self.layout.base, self._num_bytes)
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

    def listed(self, index: int, first: int, end: int) -> list[int]:
        """Some of the blocks that the record at this index lists, for its writer, as far as these are numbers of
        blocks: not even what we have written ourselves is certainly there."""
        assert self.layout.base and 0 <= index < self.shape.num_records and 0 <= first <= end <= self.shape.max_blocks
        at = self.layout.base + self.layout.lists_at + 4 * (index * self.shape.max_blocks + first)
        blocks = list((ctypes.c_int32 * (end - first)).from_address(at))
        return list(itertools.takewhile(lambda block: 0 <= block < self.shape.num_blocks, blocks))

    def words(self, blocks: Sequence[int], num_tokens: int) -> NDArray[np.uint64]:
        """What stands beside the first `num_tokens` tokens in these blocks, as it is now."""
        assert self.layout.base and are_blocks(blocks, self.shape)
        num_blocks, size = self.shape.num_blocks, self.shape.block_size
        memory = _bytes_at(self.layout.base + self.layout.words_at, 8 * num_blocks * size)
        words_NB = np.frombuffer(memory, np.uint64).reshape(num_blocks, size)
        return words_NB[np.array(blocks, np.int64)].reshape(-1)[:num_tokens]

    def count_intact(self, blocks: Sequence[int], num_tokens: int, chains: NDArray[np.uint64]) -> int:
        """How many of the first `num_tokens` tokens of a stream with these chains lie in these blocks, intact.

        Verified where they lie: true for as long as the blocks are not written. Where that is not certain, copy first
        (`copy_in`).
        """
        assert self.layout.base and self.elsewhere is None
        chains = checked_chains(chains, num_tokens)
        packed = packed_blocks(blocks, num_tokens, self.shape)
        return load().blocking.es_log_count_intact(self.address, packed, num_tokens, chains.ctypes.data)  # type: ignore[no-any-return]


def checked_chains(chains: NDArray[np.uint64], num_tokens: int) -> NDArray[np.uint64]:
    """Chains as C wants them: contiguous, one per token."""
    assert 0 <= num_tokens <= len(chains) and chains.dtype == np.uint64
    return np.ascontiguousarray(chains)


def packed_blocks(blocks: Sequence[int], num_tokens: int, shape: LogShape) -> bytes:
    """Blocks as C wants them, if these are blocks of such a log, and enough for so many tokens."""
    assert len(blocks) >= -(-num_tokens // shape.block_size), f"{num_tokens} tokens in {len(blocks)} blocks"
    assert are_blocks(blocks, shape), "no blocks of this log"
    return array("i", blocks).tobytes()


def are_blocks(blocks: Sequence[int], shape: LogShape) -> bool:
    return not blocks or (min(blocks) >= 0 and max(blocks) < shape.num_blocks)


def open_own(open_log: Callable[[], Log], fd: int, shape: LogShape) -> Log:
    """The log that this process is going to write, in memory where a predecessor may have left one. If that cannot be
    read it is begun anew: without records nothing is promised, so words and blocks may stay as they are."""
    try:
        return open_log()
    except LogMismatch as error:
        log.warning("what is left of the KV log of this rank cannot be read, and is begun anew: %s", error)
    layout = shape.layout()
    os.pwrite(fd, bytes(HEADER.size), 0)
    os.pwrite(fd, bytes(layout.lists_at - layout.records_at), layout.records_at)
    opened = open_log()
    opened.was_unreadable = True
    return opened


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
