"""CudaHeadKv: where the KV of all heads is, for one home, where heads are divided on GPUs.

KV is where it was computed, and in one place: in memory of the expert worker's seat, which outlives its processes
(head_memory.py). If a head would have to be asked elsewhere, or memory is another one than before, it is lost, and all
running streams are computed again: on GPUs KV of heads is not fetched from one worker to another yet.

A pool has an identity, which its worker writes into each lane (lane.py). It can only change with the worker's process,
or before routes change: so it is compared after steps that are the first since then, before their tokens count.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from everserve.seam.trust import Peers
from everserve.tables.ids import Rank

_NO_RANK = -1


class CudaHeadKv:
    """`KvElsewhere` (engine/regaining.py). `calls`: those about heads; `read_pool(rank)`: the identity in the lane."""

    num_fetched_bytes = 0
    is_moving = False

    def __init__(self, peers: Peers, calls: Sequence[int], num_heads: int, read_pool: Callable[[Rank], int]) -> None:
        self._peers = peers
        self._calls_L = np.array(calls)
        self._num_heads = num_heads
        self._read_pool = read_pool
        self._kv_at_LG = np.full((len(calls), num_heads), _NO_RANK, np.int32)
        self._pools: dict[Rank, int] = {}
        self._is_lost = False
        self._num_changes = -1  # of the peers, when pools were compared last

    @property
    def is_displaced(self) -> bool:
        """Whether heads would be asked where their KV is not. One that has no place is not displaced yet."""
        places_LG = self._places()
        is_elsewhere_LG = (self._kv_at_LG != places_LG) & (self._kv_at_LG != _NO_RANK) & (places_LG != _NO_RANK)
        return self._is_lost or bool(is_elsewhere_LG.any())

    def use(self) -> None:
        """A step begins: what it computes is where heads are asked now."""
        places_LG = self._places()
        self._kv_at_LG = np.where(self._kv_at_LG == _NO_RANK, places_LG, self._kv_at_LG)

    def has_same_pools(self) -> bool:
        """A step has ended: whether all of it was computed with KV that was there before. Else all is lost."""
        if self._num_changes != self._peers.num_changes:
            for rank in map(Rank, np.unique(self._kv_at_LG[self._kv_at_LG != _NO_RANK]).tolist()):
                found = self._read_pool(rank)
                self._is_lost |= self._pools.setdefault(rank, found) != found
            self._num_changes = self._peers.num_changes
        return not self._is_lost

    def forget(self) -> None:
        """No KV is in use any more: heads may be asked anywhere."""
        self._kv_at_LG.fill(_NO_RANK)
        self._pools.clear()
        self._is_lost, self._num_changes = False, -1

    def _places(self) -> NDArray[np.int32]:
        return self._peers.owner_LN[self._calls_L, : self._num_heads]

    # -- what is only asked of KV that can be fetched ----------------------------------------------

    def look(self) -> None:
        raise AssertionError("without a log nothing is fetched")

    def fetch(self, blocks: Sequence[int], num_tokens: int, chains: NDArray[np.uint64]) -> int:
        raise AssertionError("without a log nothing is fetched")

    def settle(self) -> None:
        raise AssertionError("without a log nothing is fetched")

    def aim(self) -> bytes:
        raise AssertionError("heads do not move beside steps")

    def num_at_once(self, num_tokens: int) -> int:
        raise AssertionError("heads do not move beside steps")

    def begin_fetch(self, blocks: Sequence[int], chains: NDArray[np.uint64]) -> bool:
        raise AssertionError("heads do not move beside steps")

    def poll_fetch(self) -> int | None:
        raise AssertionError("heads do not move beside steps")
