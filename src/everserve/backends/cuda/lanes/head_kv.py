"""CudaHeadKv: where the KV of all heads is, for one home, where heads are divided on GPUs.

KV is in memory of the expert worker's seat, which outlives its processes (head_memory.py); where, seam/kv_at.py keeps.
Heads that are displaced the home has fetched, by kernels of its own. That takes milliseconds inside of a device
(log/head_fetcher.py), so heads that move are not copied beside the steps, as they are on CPUs.

A pool has an identity, which its worker writes into each lane (lane.py). It can only change with the worker's process,
or before routes change: so it is compared after steps that are the first since then, before their tokens count.

A worker that has not answered an abandoned step may still do so, and store rows of it: nothing is fetched into its pool
before. One that never answers is asked again, by a step that computes everything again, and is found deaf by that.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from everserve.errors import FetchFailed, KvLost, StepAbandoned
from everserve.kvlog.writer import Copy
from everserve.seam.kv_at import NO_POOL, KvAt
from everserve.tables.ids import NO_RANK, Rank

_MOST_LOOKS = 20  # at workers that are not there yet; about 0.1 s apart
ANSWER_WITHIN_S, _POLL_S = 0.05, 0.0002  # how long to wait for answers at each look


class HeadPeers(Protocol):
    """What is needed of `CudaPeers`."""

    owner_LN: NDArray[np.int32]
    num_changes: int

    def pool_of(self, rank: Rank) -> int: ...
    def has_answered(self, rank: Rank) -> bool: ...


class Fetcher(Protocol):
    """`HeadFetcher`: heads have numbers, layer by layer."""

    num_fetched_bytes: int

    def sweep(self) -> None:
        """No step runs: use what it was offered since the last one."""

    def pool_of(self, rank: Rank) -> int:
        """The identity of the KV in the memory that it has of this seat; 0 if it has none."""

    def aim(self, wanted: Sequence[int], ranks_H: NDArray[np.int32]) -> None:
        """Aims at these heads, at these ranks, from now on. Raises FetchFailed."""

    def fetch(self, sources: Sequence[int], blocks: Sequence[int], num_tokens: int, chains: NDArray[np.uint64]) -> int:
        """How many leading tokens are right there, in all of these heads."""


class CudaHeadKv:
    """`KvElsewhere` (engine/regaining.py). `call_of`: the call of each layer's heads, which is the index of its line in
    the peers' tables; `fetcher`: None without a log: then nothing is fetched."""

    is_moving = False

    def __init__(
        self, peers: HeadPeers, call_of: Mapping[int, int], num_heads: int, fetcher: Fetcher | None = None
    ) -> None:
        self._peers = peers
        self._calls_L = np.array([*call_of.values()])
        self._num_heads = num_heads
        self._fetcher = fetcher
        self.at = KvAt([*call_of], num_heads)
        self._num_changes = -1  # of the peers, when pools were compared last
        self._num_looks = 0  # in a row, in vain

    @property
    def num_fetched_bytes(self) -> int:
        return self._fetcher.num_fetched_bytes if self._fetcher is not None else 0

    @property
    def is_displaced(self) -> bool:
        return self.at.is_displaced(self._places())

    def use(self) -> None:
        """A step begins: what it computes is where heads are asked now."""
        self.at.use(self._places())

    def has_same_pools(self) -> bool:
        """A step has ended: whether all of it was computed with KV that was there before. Else all is lost."""
        if self._num_changes != self._peers.num_changes:
            for rank in self._ranks():
                self.at.compare(rank, self._peers.pool_of(rank))
            self._num_changes = self._peers.num_changes
        return not self.at.is_lost

    def is_in(self, rank: Rank, pool: int) -> bool:
        """Whether this is the pool that streams were computed with there, as far as steps have ended."""
        return bool(self.at.pools[rank] == pool)

    @property
    def is_checked(self) -> bool:
        """Whether a step has ended since anything has changed. Before, none is launched behind one that may be in
        vain."""
        return self._num_changes == self._peers.num_changes and not self.at.is_lost

    def forget(self) -> None:
        self.at.forget()
        self._num_changes, self._num_looks = -1, 0

    def _places(self) -> NDArray[np.int32]:
        return self._peers.owner_LN[self._calls_L, : self._num_heads]

    def _ranks(self) -> list[Rank]:
        return [Rank(rank) for rank in self.at.ranks]

    # -- KV that is elsewhere --------------------------------------------------------------------

    def look(self) -> None:
        """Which heads are displaced, and where they will be asked from now on. Raises StepAbandoned if a worker there
        is not ready for it, and FetchFailed if it never is."""
        places_LG = self._places().copy()
        ranks = [Rank(int(rank)) for rank in np.unique(places_LG[places_LG != NO_RANK])]
        found = self.at.pools.copy()
        for rank, pool in self._find(ranks).items():
            found[rank] = pool
        displaced_LG = self.at.look(places_LG, found)
        assert self._fetcher is not None
        self._fetcher.aim(np.flatnonzero(displaced_LG).tolist(), places_LG.reshape(-1))

    def _find(self, ranks: Sequence[Rank]) -> dict[Rank, int]:
        """The pools of these workers, in which no late request stores anything."""
        assert self._fetcher is not None, "without a log nothing is fetched"
        until_s = time.monotonic() + ANSWER_WITHIN_S
        while (late := self._late(ranks)) and time.monotonic() < until_s:
            time.sleep(_POLL_S)  # they compute what the step has asked that was abandoned just now
        self._num_looks = self._num_looks + 1 if late else 0
        if self._num_looks > _MOST_LOOKS:
            self._num_looks = 0
            raise FetchFailed(f"workers {late} have not answered older requests")
        if late:
            raise StepAbandoned(0, (), f"workers {late} are not ready to get KV")
        self._fetcher.sweep()
        pools = {rank: self._peers.pool_of(rank) for rank in ranks}
        unknown = [rank for rank in ranks if self._fetcher.pool_of(rank) != pools[rank]]
        if unknown:
            raise FetchFailed(f"the memory of workers {unknown} is out of reach")
        return pools

    def _late(self, ranks: Sequence[Rank]) -> list[Rank]:
        """Those that do not know of us yet, or have still to answer."""
        peers = self._peers
        return [rank for rank in ranks if peers.pool_of(rank) == NO_POOL or not peers.has_answered(rank)]

    def fetch(self, blocks: Sequence[int], num_tokens: int, chains: NDArray[np.uint64]) -> int:
        """Have the first tokens of a stream where displaced heads will be asked. How many are right in all of them."""
        assert self._fetcher is not None, "without a log nothing is fetched"
        return self._fetcher.fetch(blocks, blocks, num_tokens, chains)

    def settle(self) -> None:
        """From now on heads are asked there. Raises KvLost if a pool has changed meanwhile."""
        looked_at = [Rank(int(rank)) for rank in np.unique(self.at.places_LG[self.at.places_LG != NO_RANK])]
        self._check({rank: int(self.at.found[rank]) for rank in looked_at})
        self.at.settle()
        self._num_changes = -1

    def fetch_all(self, copies: Sequence[Copy]) -> list[int]:
        """Have tokens of streams in other blocks, for all heads, wherever they are asked. How many of each are right in
        all of them. Raises FetchFailed, KvLost, or StepAbandoned if a worker is not there."""
        assert self._fetcher is not None, "without a log nothing is fetched"
        self.at.check_places(self._places())
        self.use()
        pools = self._find(self._ranks())
        for rank, pool in pools.items():
            self.at.compare(rank, pool)
        if self.at.is_lost:
            raise KvLost(0, "a worker has not the KV that streams were computed with")
        self._fetcher.aim(range(self.at.rank_LG.size), self.at.rank_LG.reshape(-1))
        nums_right = [self._fetcher.fetch(c.source_blocks, c.blocks, c.num_tokens, c.chains) for c in copies]
        self._check(pools)
        return nums_right

    def _check(self, pools: Mapping[Rank, int]) -> None:
        """Raise if a pool is not the one that it was."""
        changed = [rank for rank, pool in pools.items() if self._peers.pool_of(rank) != pool]
        if changed:
            self.at.is_lost = True
            raise KvLost(0, f"the pools of workers {changed} have changed while KV was fetched into them")

    # -- what is only asked of heads that move beside steps ----------------------------------------

    def aim(self) -> bytes:
        raise AssertionError("heads do not move beside steps")

    def num_at_once(self, num_tokens: int) -> int:
        raise AssertionError("heads do not move beside steps")

    def begin_fetch(self, blocks: Sequence[int], chains: NDArray[np.uint64]) -> bool:
        raise AssertionError("heads do not move beside steps")

    def poll_fetch(self) -> int | None:
        raise AssertionError("heads do not move beside steps")
