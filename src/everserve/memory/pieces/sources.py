"""KvSources: where a worker can fetch the KV of its heads from, and fetching.

    its own pool           in the same blocks, or in others: a stream that another home had
    its own mirror         when the memory of the pool was lost
    pools of others        of workers that live, and of those whose process has died
    mirrors of others      of workers whose device is lost
    parities               what no memory has is rebuilt from the others of its group (parity.py)

Each token is verified on arrival by its word, so it does not matter which source is asked first, and no table says
where KV was: a source that does not have a (layer, head), or not these tokens of it, is passed over.
"""

import ctypes
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from everserve.memory.kv_pieces import KvPieces
from everserve.memory.pieces.layout import KvMemory
from everserve.memory.pieces.library import load
from everserve.memory.pieces.parity import Groups
from everserve.memory.pieces.parity_layout import ParityMemory
from everserve.tables.ids import Rank
from everserve.tables.memory import Kind


class Wanted(NamedTuple):
    """The first tokens of a stream, or those from the beginning of one of its blocks on."""

    pieces: NDArray[np.int32]  # of our pool
    sources: NDArray[np.int32]  # the blocks that they are in
    blocks: NDArray[np.int32]  # the blocks that they shall be in, all in our pool, or all in our mirror alone
    chains: NDArray[np.uint64]  # one for each token


class Got(NamedTuple):
    """What a fetch has achieved."""

    num_right: int  # leading tokens that are there, in all pieces
    num_bytes: int  # that were copied


class KvSources:
    """The sources of KV of the worker that has this pool."""

    def __init__(self, own: KvPieces) -> None:
        self._own = own
        self._others: dict[tuple[Rank, Kind], KvMemory] = {}
        self._parities: dict[Rank, ParityMemory] = {}

    def offer(self, rank: Rank, kind: Kind, fd: int) -> None:
        """The pool of another worker, its mirror, or its parity. Takes over the descriptor."""
        try:
            if kind is Kind.KV_PARITY:
                assert self._own.parity_shape is not None, "all workers have one, or none"
                self._parities[rank] = ParityMemory(fd, self._own.parity_shape)
            else:
                shape = self._own.shape
                self._others[rank, kind] = KvMemory(fd, shape.mirrored if kind is Kind.KV_MIRROR else shape)
        finally:
            os.close(fd)

    def withdraw(self, rank: Rank, kind: Kind) -> None:
        """This memory is lost."""
        self._others.pop((rank, kind), None)
        if kind is Kind.KV_PARITY:
            self._parities.pop(rank, None)

    @property
    def has_to_shadow(self) -> bool:
        """Whether stored rows wait to be copied into the mirror, or to become part of the parity."""
        mirror, parity = self._own.mirror, self._own.parity
        return (mirror is not None and mirror.num_waiting > 0) or (parity is not None and parity.is_due)

    @property
    def is_behind(self) -> bool:
        """Whether that cannot wait until there is nothing else to do. (A mirror sees to that itself.)"""
        return self._own.parity is not None and self._own.parity.is_behind

    def shadow_some(self, num_bytes: int) -> None:
        """About so many bytes of that."""
        mirror, parity = self._own.mirror, self._own.parity
        if mirror is not None and mirror.num_waiting:
            mirror.copy_some(num_bytes)
        if parity is not None and parity.is_due:
            parity.write_some(num_bytes, self._memories())

    def regroup(self, groups: Sequence[Groups]) -> None:
        """The parity that is kept here is that of these heads, by home."""
        if self._own.parity is not None:
            self._own.parity.regroup(groups)

    def fetch(self, wanted: Wanted) -> Got:
        """Have these tokens in our pool, as far as any source has them; or in our mirror, if these are blocks that only
        mirrors have."""
        own, num_tokens = self._target(wanted), len(wanted.chains)
        assert len(wanted.sources) == len(wanted.blocks) == -(-num_tokens // own.shape.block_size)
        memories = [memory.address for memory in self._memories()]
        num_copied = np.zeros(len(wanted.pieces), np.int64)
        parities = [parity.address for parity in self._all_parities()]
        num_right = load().blocking.es_pieces_fetch(
            own.address, (ctypes.c_void_p * len(memories))(*memories), len(memories),
            (ctypes.c_void_p * len(parities))(*parities), len(parities),
            wanted.pieces.ctypes.data, len(wanted.pieces), wanted.sources.ctypes.data, wanted.blocks.ctypes.data,
            num_tokens, wanted.chains.ctypes.data, num_copied.ctypes.data,
        )  # fmt: skip
        if own is self._own.memory:
            self._shadow(wanted, num_right, wanted.pieces[num_copied > 0])
        row_bytes = own.shape.piece_bytes // own.shape.block_size
        return Got(num_right, int(num_copied.sum()) * row_bytes)

    def _target(self, wanted: Wanted) -> KvMemory:
        mirror, shape = self._own.mirror, self._own.shape
        if mirror is None or not len(wanted.blocks) or wanted.blocks[0] < shape.num_blocks:
            return self._own.memory
        return mirror.memory

    def _memories(self) -> list[KvMemory]:
        mirror = self._own.mirror
        others = sorted(self._others.items())  # pools before mirrors, which may lag behind
        found = [memory for (_, kind), memory in others if kind is Kind.KV_PIECES]
        found += [memory for (_, kind), memory in others if kind is not Kind.KV_PIECES]
        return [self._own.memory, *([mirror.memory] if mirror is not None else []), *found]

    def _all_parities(self) -> list[ParityMemory]:
        own = self._own.parity
        return [*self._parities.values(), *([own.memory] if own is not None else [])]

    def _shadow(self, wanted: Wanted, num_right: int, copied: NDArray[np.int32]) -> None:
        """What was copied here belongs into the mirror too, as what is computed here does; and what the parity is told
        of a stream that was computed elsewhere it learns here."""
        size = self._own.shape.block_size
        all_slots = (wanted.blocks[:, None] * size + np.arange(size, dtype=np.int32)).reshape(-1)
        slots: NDArray[np.int32] = np.ascontiguousarray(all_slots[:num_right], np.int32)
        copied = np.ascontiguousarray(copied)
        if self._own.mirror is not None and num_right and len(copied):
            self._own.mirror.note(slots.ctypes.data, len(slots), copied.ctypes.data, len(copied))
        if self._own.parity is not None and num_right:
            self._own.parity.learn(slots, wanted.chains[:num_right])
