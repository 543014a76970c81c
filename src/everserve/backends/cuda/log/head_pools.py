"""HeadPools: the memory of the heads of all expert seats, as a home's device reaches it.

On a GPU homes fetch KV themselves: they write where heads will be asked, in blocks of their own range, which no other
process writes to meanwhile. (On CPUs the workers that have the heads do that: memory/pieces/sources.py.) What they read
may change at any moment, and is believed only where its word fits.

The memory outlives the workers of its seat. It is mapped and unmapped between two steps.
"""

import logging
import os
from collections.abc import Callable

from everserve.backends.cuda.head_table import HeadTable
from everserve.backends.cuda.log.head_mirror import HeadMirrors
from everserve.memory.device import CudaError, Driver, Mapping
from everserve.plan.head_memory import Head, HeadMemoryPlan
from everserve.tables.ids import Rank
from everserve.tables.memory import Kind

log = logging.getLogger(__name__)


class HeadPool:
    """The memory of one seat, mapped."""

    def __init__(self, driver: Driver, fd: int, plan: HeadMemoryPlan) -> None:
        self._plan = plan
        self._mapping = Mapping(driver, fd, plan.num_bytes)
        self._table = HeadTable(driver, self._mapping.address, plan.num_pieces)

    @property
    def pool(self) -> int:
        """The identity of all KV there."""
        return self._table.pool

    def pieces(self) -> dict[Head, int]:
        return self._table.pieces()

    def kv_at(self, piece: int) -> int:
        """The address of what block 0 has of it."""
        return self._mapping.address + self._plan.blocks_at + piece * self._plan.piece_bytes

    def words_at(self, piece: int) -> int:
        words_bytes = self._plan.block_words_bytes // self._plan.num_pieces
        return self._mapping.address + self._plan.words_at + piece * words_bytes

    def close(self) -> None:
        self._mapping.close()


class HeadPools:
    """`finish_use`: wait until nothing that was queued uses them. `mirrors`: where those of other homes are kept."""

    def __init__(
        self,
        driver: Driver,
        plan: HeadMemoryPlan,
        finish_use: Callable[[], None],
        mirrors: HeadMirrors | None = None,
    ) -> None:
        self.num_changes = 0
        self.plan = plan
        self._mirrors = mirrors
        self._driver = driver
        self._finish_use = finish_use
        self._pools: dict[Rank, HeadPool] = {}
        self._offered: dict[Rank, int] = {}
        self._left: list[HeadPool] = []

    @property
    def ranks(self) -> list[Rank]:
        return sorted(self._pools)

    def __getitem__(self, rank: Rank) -> HeadPool:
        return self._pools[rank]

    def pool_of(self, rank: Rank) -> int:
        """The identity of the KV of this seat; 0 if it is out of reach."""
        pool = self._pools.get(rank)
        return pool.pool if pool is not None else 0

    def offer(self, rank: Rank, kind: Kind, fd: int) -> None:
        """It is there, instead of what was there before. Takes over the descriptor."""
        if kind is Kind.KV_MIRROR and self._mirrors is not None:
            self._mirrors.offer(rank, fd)
            return
        assert kind is Kind.KV_PIECES, kind
        self.withdraw(rank, kind)
        self._offered[rank] = fd

    def withdraw(self, rank: Rank, kind: Kind) -> None:
        """It is lost: not used any more, and unmapped by the next `sweep`."""
        if kind is Kind.KV_MIRROR and self._mirrors is not None:
            self._mirrors.withdraw(rank)
        if kind is not Kind.KV_PIECES:
            return
        fd, pool = self._offered.pop(rank, None), self._pools.pop(rank, None)
        if fd is not None:
            os.close(fd)
        if pool is not None:
            self.num_changes += 1
            self._left.append(pool)

    def sweep(self) -> None:
        """Between two steps: map what was offered, unmap what was withdrawn."""
        if self._left:
            self._finish_use()
        while self._left:
            self._left.pop().close()
        while self._offered:
            rank, fd = self._offered.popitem()
            self.num_changes += 1
            try:
                self._pools[rank] = HeadPool(self._driver, fd, self.plan)
            except CudaError as error:
                log.warning("the KV of rank %d cannot be reached, and is computed again if it is lost: %s", rank, error)
            finally:
                os.close(fd)
