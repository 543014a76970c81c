"""KvAt: where the KV of all heads is, for one home.

KV is where it was computed, and in one place. It is remembered by head of each layer at which worker that is, and of
each worker which *pool* that was: another process has another one, or the same memory as another pool. If a head would
have to be asked elsewhere, or the pool there is not the one that it was, the head is *displaced*. No step goes on
before the new places have the KV (`look`, then `settle`), or all is forgotten here (`forget`): from then on any place
will do.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from everserve.errors import KvLost, StepAbandoned
from everserve.tables.ids import MAX_RANKS, NO_RANK

NO_POOL = 0
_LOST = MAX_RANKS  # where KV is that is nowhere, which is no rank: its head is displaced wherever it gets a place


class KvAt:
    """`layers` have so many heads each. The arrays are changed in place: C holds their addresses."""

    def __init__(self, layers: Sequence[int], num_heads: int) -> None:
        self._layers = tuple(layers)
        self.rank_LG = np.full((len(layers), num_heads), NO_RANK, np.int32)
        self.pools = np.zeros(MAX_RANKS, np.int64)  # by rank: NO_POOL where no step has ended with KV there
        self.is_lost = False  # a step has found that KV is not where it should be
        self.num_changes = 0  # of `rank_LG`
        # See `look`.
        self.places_LG = self.rank_LG
        self.found = np.zeros_like(self.pools)

    @property
    def ranks(self) -> list[int]:
        """The workers that have some."""
        return sorted({int(rank) for rank in np.unique(self.rank_LG)} - {NO_RANK, _LOST})

    def is_displaced(self, places_LG: NDArray[np.int32]) -> bool:
        """Whether heads that are asked in these places are not asked where their KV is. One that has no place is not
        displaced yet."""
        is_elsewhere_LG = (self.rank_LG != places_LG) & (self.rank_LG != NO_RANK) & (places_LG != NO_RANK)
        return self.is_lost or bool(is_elsewhere_LG.any())

    def use(self, places_LG: NDArray[np.int32]) -> None:
        """KV that is nowhere yet is computed in these places."""
        is_new_LG = (self.rank_LG == NO_RANK) & (places_LG != NO_RANK)
        if is_new_LG.any():
            self.rank_LG[is_new_LG] = places_LG[is_new_LG]
            self.num_changes += 1

    def compare(self, rank: int, pool: int) -> None:
        """A worker with KV has this pool: the first that is known of it, or all is lost that should be there."""
        if self.pools[rank] == NO_POOL:
            self.pools[rank] = pool
        self.is_lost |= bool(self.pools[rank] != pool)

    def look(self, places_LG: NDArray[np.int32], found: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which heads are displaced, if they are asked in these places and workers have these pools."""
        self.places_LG, self.found = places_LG, found
        is_there_LG = (self.rank_LG == places_LG) & (self.pools == found)[places_LG]
        is_displaced_LG: NDArray[np.bool_] = (places_LG != NO_RANK) & ~is_there_LG
        return is_displaced_LG

    def settle(self) -> None:
        """From now on heads are asked there, and their KV is there.

        A head without a place may get one again where it was. If the pool is another one by then it is displaced all
        the same: that pool is known from here on, because of other heads."""
        has_place_LG = self.places_LG != NO_RANK
        other = np.flatnonzero(self.pools != self.found)
        self.rank_LG[~has_place_LG & np.isin(self.rank_LG, other)] = _LOST  # it was not looked for there
        self.rank_LG[has_place_LG] = self.places_LG[has_place_LG]
        self.pools[...] = np.where(np.isin(np.arange(MAX_RANKS), self.rank_LG), self.found, NO_POOL)
        self.is_lost = False
        self.num_changes += 1

    def forget(self) -> None:
        """No KV is in use any more."""
        self.rank_LG.fill(NO_RANK)
        self.pools.fill(NO_POOL)
        self.is_lost = False
        self.num_changes += 1

    def check_places(self, places_LG: NDArray[np.int32]) -> None:
        """Raise unless all heads can be asked where their KV is."""
        if self.is_displaced(places_LG):
            raise KvLost(0, "heads have to be computed elsewhere than where their KV is")
        if (places_LG == NO_RANK).any():
            index = int((places_LG == NO_RANK).any(axis=1).argmax())
            raise StepAbandoned(self._layers[index], tuple(np.flatnonzero(places_LG[index] == NO_RANK).tolist()))
