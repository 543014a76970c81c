"""KvSources: where a worker can fetch the KV of its heads from, and fetching.

    its own pool           in the same blocks, or in others: a stream that another home had
    its own mirror         when the memory of the pool was lost
    pools of others        of workers that live, and of those whose process has died
    mirrors of others      of workers whose device is lost

Each token is verified on arrival by its word, so it does not matter which source is asked first, and no table says
where KV was: a source that does not have a (layer, head), or not these tokens of it, is passed over.
"""

import ctypes
import os
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from everserve.memory.kv_pieces import KvPieces
from everserve.memory.pieces.layout import KvMemory
from everserve.memory.pieces.library import load
from everserve.tables.ids import Rank
from everserve.tables.memory import Kind


class Wanted(NamedTuple):
    """The first tokens of a stream, or those from the beginning of one of its blocks on."""

    pieces: NDArray[np.int32]  # of our pool
    sources: NDArray[np.int32]  # the blocks that they are in
    blocks: NDArray[np.int32]  # the blocks that they shall be in, in our pool
    chains: NDArray[np.uint64]  # one for each token


class Got(NamedTuple):
    """What a fetch has achieved."""

    num_right: int  # leading tokens that are there, in all pieces
    num_bytes: int  # that were copied


class KvSources:
    """Of the worker that has this pool."""

    def __init__(self, own: KvPieces) -> None:
        self._own = own
        self._others: dict[tuple[Rank, Kind], KvMemory] = {}

    def offer(self, rank: Rank, kind: Kind, fd: int) -> None:
        """The pool of another worker, or its mirror. Takes over the descriptor."""
        try:
            self._others[rank, kind] = KvMemory(fd, self._own.shape)
        finally:
            os.close(fd)

    def withdraw(self, rank: Rank, kind: Kind) -> None:
        """This memory is lost."""
        self._others.pop((rank, kind), None)

    def fetch(self, wanted: Wanted) -> Got:
        """Have these tokens in our pool, as far as any source has them."""
        own, num_tokens = self._own.memory, len(wanted.chains)
        assert len(wanted.sources) == len(wanted.blocks) == -(-num_tokens // own.shape.block_size)
        memories = [memory.address for memory in self._memories()]
        num_copied = np.zeros(len(wanted.pieces), np.int64)
        num_right = load().blocking.es_pieces_fetch(
            own.address, (ctypes.c_void_p * len(memories))(*memories), len(memories),
            wanted.pieces.ctypes.data, len(wanted.pieces), wanted.sources.ctypes.data, wanted.blocks.ctypes.data,
            num_tokens, wanted.chains.ctypes.data, num_copied.ctypes.data,
        )  # fmt: skip
        self._mirror(wanted, num_right, wanted.pieces[num_copied > 0])
        row_bytes = own.shape.piece_bytes // own.shape.block_size
        return Got(num_right, int(num_copied.sum()) * row_bytes)

    def _memories(self) -> list[KvMemory]:
        mirror = self._own.mirror
        others = sorted(self._others.items())  # pools before mirrors, which may lag behind
        found = [memory for (_, kind), memory in others if kind is Kind.KV_PIECES]
        found += [memory for (_, kind), memory in others if kind is not Kind.KV_PIECES]
        return [self._own.memory, *([mirror.memory] if mirror is not None else []), *found]

    def _mirror(self, wanted: Wanted, num_right: int, copied: NDArray[np.int32]) -> None:
        """What was copied here belongs into the mirror too, as what is computed here does."""
        if self._own.mirror is None or not num_right or not len(copied):
            return
        size = self._own.shape.block_size
        slots = (wanted.blocks[:, None] * size + np.arange(size, dtype=np.int32)).reshape(-1)[:num_right]
        slots, copied = np.ascontiguousarray(slots, np.int32), np.ascontiguousarray(copied)
        self._own.mirror.note(slots.ctypes.data, len(slots), copied.ctypes.data, len(copied))
