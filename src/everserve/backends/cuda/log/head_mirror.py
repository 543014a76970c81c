"""HeadMirror: the KV of one home's streams in host memory, for all heads, where these are divided over GPUs.

    [block][head]: words of its tokens        [block][head]: their keys and values        (memory/pieces/layout.py)

Blocks are those of the home's range. The home writes them on the side, together with the words in the pools
(head_writer.py). It fetches from there when heads have lost their device, and so does the next home of its streams.

A home's own mirror must be registered, as any host memory that a device reaches (registered_prefix.py). Mirrors of
other homes are not: what is needed of them is copied through memory that is.
"""

import ctypes
import logging
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from everserve.backends.cuda.log.device_writer import Shared
from everserve.backends.cuda.log.low_priority_stream import Side
from everserve.backends.cuda.log.registered_prefix import CHUNK_BYTES, HostPages, populate
from everserve.memory.pieces.layout import KvMemory, KvShape
from everserve.tables.block_ranges import block_range_of
from everserve.tables.ids import Rank

log = logging.getLogger(__name__)

NO_BLOCK = -1
_BOUNCE_BYTES = 64 << 20
_COPIERS = 4  # threads; one alone would be a good deal slower than the memory
_WORD_BYTES = 8


class HeadMirror:
    """The mirror of the home with this rank. The descriptor stays the caller's. `num_reached`: so many of its blocks,
    from the first one on, are within the device's reach.
    """

    def __init__(self, fd: int, shape: KvShape, home: Rank) -> None:
        self.shape = shape
        self.num_reached = 0
        self._memory = KvMemory(fd, shape)
        self._first_block = block_range_of(home, shape.num_blocks).first_block

    @property
    def strides(self) -> tuple[int, int]:
        """Bytes from one block to the next: of KV, and of words."""
        return strides_of(self.shape)

    def kv_at(self, head: int) -> int:
        """The address of what block 0 has of it."""
        return self._memory.at.blocks + head * self.shape.piece_bytes

    def words_at(self, head: int) -> int:
        return self._memory.at.words + head * self.shape.block_size * _WORD_BYTES

    def numbers_of(self, blocks: Sequence[int]) -> list[int]:
        """The numbers of these blocks in the mirror; NO_BLOCK where it does not have one, or not within reach."""
        return [n if 0 <= (n := block - self._first_block) < self.num_reached else NO_BLOCK for block in blocks]

    def has(self, block: int) -> bool:
        return 0 <= block - self._first_block < self.shape.num_blocks

    def copy_block(self, block: int, kv: int, words: int) -> None:
        """All that it has of this block, to these addresses."""
        number, (kv_bytes, words_bytes) = block - self._first_block, self.strides
        ctypes.memmove(words, self._memory.at.words + number * words_bytes, words_bytes)
        ctypes.memmove(kv, self._memory.at.blocks + number * kv_bytes, kv_bytes)

    def register(self, pages: HostPages) -> threading.Thread:
        """Make it reachable, in the background: words first, and then KV from the lowest blocks on."""
        thread = threading.Thread(target=self._register_all, args=(pages,), name="kv-mirror", daemon=True)
        thread.start()
        return thread

    def _register_all(self, pages: HostPages) -> None:
        at, (kv_bytes, words_bytes) = self._memory.at, self.strides
        pages.make_current()
        try:
            _register(pages, at.words, self.shape.num_blocks * words_bytes)
            total = self.shape.num_blocks * kv_bytes
            for first in range(0, total, CHUNK_BYTES):
                num_bytes = min(CHUNK_BYTES, total - first)
                _register(pages, at.blocks + first, num_bytes)
                self.num_reached = (first + num_bytes) // kv_bytes
        except Exception as error:
            log.warning(
                "only %d of %d blocks of the KV mirror can be used: %s", self.num_reached, self.shape.num_blocks, error
            )


def strides_of(shape: KvShape) -> tuple[int, int]:
    return shape.num_pieces * shape.piece_bytes, shape.num_pieces * shape.block_size * _WORD_BYTES


def _register(pages: HostPages, address: int, num_bytes: int) -> None:
    populate(address, num_bytes)
    on_device = pages.register_host(address, num_bytes)
    assert on_device == address, "one address for both"


class HeadMirrors:
    """The mirrors of all homes, as one of them sees them: its own, and those that it has to copy from."""

    def __init__(self, own: HeadMirror, side: Side) -> None:
        self.own = own
        self._others: dict[Rank, HeadMirror] = {}
        kv_bytes, words_bytes = own.strides
        self.num_at_once = max(_BOUNCE_BYTES // kv_bytes, 1)  # blocks
        self._kv = Shared(self.num_at_once * kv_bytes, torch.uint8, side)
        self._words = Shared(self.num_at_once * words_bytes, torch.uint8, side)
        self._copiers = ThreadPoolExecutor(_COPIERS, thread_name_prefix="kv-copier")

    def offer(self, rank: Rank, fd: int) -> None:
        """Takes the mirror of another home. Takes over the descriptor."""
        try:
            self._others[rank] = HeadMirror(fd, self.own.shape, rank)
        finally:
            os.close(fd)

    def withdraw(self, rank: Rank) -> None:
        self._others.pop(rank, None)

    def bounced_kv_at(self, head: int) -> int:
        return self._kv.address + head * self.own.shape.piece_bytes

    def bounced_words_at(self, head: int) -> int:
        return self._words.address + head * self.own.shape.block_size * _WORD_BYTES

    def bounce(self, blocks: Sequence[int]) -> list[int] | None:
        """Copy these blocks of other homes to where our device reaches them; their numbers there, NO_BLOCK where no
        mirror has one. None: none has any."""
        assert len(blocks) <= self.num_at_once
        found = [next((one for one in self._others.values() if one.has(block)), None) for block in blocks]
        if not any(found):
            return None
        kv_bytes, words_bytes = self.own.strides

        def copy(first: int) -> None:
            for i in range(first, len(blocks), _COPIERS):
                if (mirror := found[i]) is not None:
                    mirror.copy_block(blocks[i], self._kv.address + i * kv_bytes, self._words.address + i * words_bytes)

        for _ in self._copiers.map(copy, range(_COPIERS)):
            pass
        return [i if mirror is not None else NO_BLOCK for i, mirror in enumerate(found)]
