"""HeadKv: where the KV of all heads is, for one home, and how it gets to where heads will be asked next.

KV is where it was computed, and in one place. `kv_at` remembers the rank for each head of each layer, `pools` the
identity of each rank's pool. If a head would have to be asked elsewhere, or a pool is another one than before, heads
are *displaced*: no step goes on before their new places have fetched KV (`look`, `fetch` and `settle`), or all is
forgotten here (`forget`): from then on any place will do.

If routes prefer another worker for a head, but still name the one that has its KV, that one is asked until the KV has
been copied beside the steps (`aim`, `begin_fetch`, `poll_fetch`; engine/precopying.py).
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from everserve.backends.cpu.exchange import Exchange, Fetch, Fetched
from everserve.backends.cpu.lane import row_word
from everserve.errors import FetchFailed, StepAbandoned
from everserve.seam.outcomes import Status
from everserve.tables.ids import MAX_RANKS, Rank

_NO_RANK, _NO_POOL = -1, 0
_LOST = MAX_RANKS  # where KV is that is nowhere, which is no rank: its head is displaced wherever it gets a place
_FETCH_BYTES = 1 << 20  # of one request, about: a worker that copies does not serve meanwhile
_BESIDE_BYTES = 1 << 18  # likewise, while streams go on
_NO_WORDS = np.empty(0, np.int32)
_NOTHING = Fetch(_NO_WORDS, _NO_WORDS, _NO_WORDS, _NO_WORDS, np.empty(0, np.uint64))


class _Heads(NamedTuple):
    """Heads at one worker."""

    calls: NDArray[np.int32]
    words: NDArray[np.int32]


class HeadKv:
    """`KvElsewhere` (engine/regaining.py) over lanes. `call_of`: the call of each layer's heads; `row_bytes`: keys and
    values of one token in one head; `block_size`: tokens."""

    def __init__(
        self, exchange: Exchange, call_of: Mapping[int, int], num_heads: int, row_bytes: int, block_size: int
    ) -> None:
        self.num_fetched_bytes = 0
        self.is_lost = False  # a step has found that KV is not where it should be
        self._exchange = exchange
        self._peers = exchange.peers
        self._call_of = dict(call_of)
        self._num_heads = num_heads
        self._row_bytes = row_bytes
        self._block_size = block_size
        # By index of the layer, and by rank. Changed in place: C holds their addresses.
        self.kv_at_LG = np.full((len(call_of), num_heads), _NO_RANK, np.int32)
        self.pools = np.zeros(MAX_RANKS, np.int64)
        self._calls_L = np.array([self._peers.moe_layers.index(call) for call in call_of.values()])
        self._are_in_place, self._num_changes = True, -1  # of the peers, when we last compared places
        # See `look`.
        self._places_LG = self._slots_LG = self.kv_at_LG
        self._found = np.zeros_like(self.pools)
        self._displaced: dict[Rank, _Heads] = {}
        # See `aim`.
        self._is_moving, self._num_changes_wanted, self._aimed_at = False, -1, -1
        self._has_begun, self._begun = False, list[Rank]()
        self._peers.stick(self._calls_L, self.kv_at_LG)
        exchange.step.pools = self.pools.ctypes.data

    def forget(self) -> None:
        """No KV is in use any more."""
        self.kv_at_LG.fill(_NO_RANK)
        self.pools.fill(_NO_POOL)
        self.is_lost, self._aimed_at = False, -1
        self._resolve()

    @property
    def is_displaced(self) -> bool:
        """Whether heads would be asked where their KV is not. One that has no place is not displaced yet."""
        if self._peers.num_changes != self._num_changes:
            places_LG = self._places()
            is_in_place_LG = (self.kv_at_LG == places_LG) | (self.kv_at_LG == _NO_RANK) | (places_LG == _NO_RANK)
            self._are_in_place = bool(is_in_place_LG.all())
            self._num_changes = self._peers.num_changes
        return self.is_lost or not self._are_in_place

    def _places(self) -> NDArray[np.int32]:
        """Where heads are asked now."""
        return self._peers.owner_LN[self._calls_L, : self._num_heads].copy()

    @property
    def is_moving(self) -> bool:
        """Whether routes prefer other workers for heads than those that have their KV, and all of them are there."""
        if self._peers.num_changes != self._num_changes_wanted:
            wanted_LG = self._wanted()
            is_there = bool((wanted_LG != _NO_RANK).all() and (self.kv_at_LG != _NO_RANK).all())
            self._is_moving = is_there and bool((wanted_LG != self.kv_at_LG).any())
            self._num_changes_wanted = self._peers.num_changes
        return self._is_moving

    def aim(self) -> bytes:
        """`look`, for heads that move. What they move to: workers, and their pools."""
        if self._aimed_at != self._peers.num_changes:
            self._aimed_at = -1
            self._look(self._wanted(), self._peers.wanted_slot_LN)
            self._aimed_at = self._peers.num_changes
        return self._places_LG.tobytes() + self._found.tobytes()

    def num_at_once(self, num_tokens: int) -> int:
        """Blocks of one request to all workers that heads move to: at least so many tokens, if there is room."""
        num_blocks = max(self._num_blocks(self._displaced, _BESIDE_BYTES), -(-num_tokens // self._block_size))
        return min(num_blocks, self._peers.shape.fetch_blocks)

    def begin_fetch(self, blocks: Sequence[int], chains: NDArray[np.uint64]) -> bool:
        """Ask for these tokens where heads move to, without waiting. Whether that was possible."""
        numbers = np.array(blocks, np.int32)
        asked = {rank: Fetch(*one, numbers, numbers, chains) for rank, one in self._displaced.items()}
        self._begun = list(asked)
        self._has_begun = self._exchange.begin_fetch(asked)
        return self._has_begun

    def poll_fetch(self) -> int | None:
        """How many of the tokens asked for last are right; None: that is not known yet."""
        if self._has_begun and self._exchange.is_fetching:
            return None
        answers = self._exchange.fetched(self._begun) if self._has_begun else None
        self._has_begun = False
        if answers is None or any(not self._is_good(rank, answer) for rank, answer in answers.items()):
            return 0
        self.num_fetched_bytes += sum(answer.num_bytes for answer in answers.values())
        return min(answer.num_right for answer in answers.values())

    def _is_good(self, rank: Rank, answer: Fetched) -> bool:
        return bool(answer.status == Status.COMPUTED and answer.pool == self._found[rank])

    def _wanted(self) -> NDArray[np.int32]:
        """Where heads would be asked if it did not matter where their KV is."""
        return self._peers.wanted_LN[self._calls_L, : self._num_heads].copy()

    def look(self) -> None:
        """Which heads are displaced, and where they will be asked from now on. Raises StepAbandoned."""
        self._aimed_at = -1
        self._look(self._places(), self._peers.slot_LN)

    def _look(self, places_LG: NDArray[np.int32], slot_LN: NDArray[np.int32]) -> None:
        self._places_LG, self._slots_LG = places_LG, slot_LN[self._calls_L, : self._num_heads].copy()
        has_place_LG = places_LG != _NO_RANK
        everywhere = {Rank(int(rank)): _NOTHING for rank in np.unique(places_LG[has_place_LG])}
        self._found = self.pools.copy()
        for rank, answer in self._ask(everywhere).items():
            self._found[rank] = answer.pool
        is_there_LG = (self.kv_at_LG == places_LG) & (self.pools == self._found)[places_LG]
        self._displaced = self._at(has_place_LG & ~is_there_LG, places_LG)

    def fetch(self, blocks: Sequence[int], num_tokens: int, chains: NDArray[np.uint64]) -> int:
        """Have the first tokens of a stream where displaced heads will be asked. How many are right in all of them.
        Raises FetchFailed."""
        return self._fetch(self._displaced, blocks, blocks, num_tokens, chains, self._found)

    def settle(self) -> None:
        """From now on heads are asked there.

        A head without a place may get one again where it was. If the pool is another one by then it is displaced all
        the same: that pool is known from here on, because of other heads."""
        has_place_LG = self._places_LG != _NO_RANK
        other = np.flatnonzero(self.pools != self._found)
        self.kv_at_LG[~has_place_LG & np.isin(self.kv_at_LG, other)] = _LOST  # it was not looked for there
        self.kv_at_LG[has_place_LG] = self._places_LG[has_place_LG]
        self.pools[...] = self._found
        self.is_lost, self._aimed_at = False, -1
        self._resolve()

    def _resolve(self) -> None:
        """Where KV is has changed: so may the places where heads are asked."""
        self._peers.resolve()
        self._num_changes = self._num_changes_wanted = -1

    def fetch_all(
        self, sources: Sequence[int], blocks: Sequence[int], num_tokens: int, chains: NDArray[np.uint64]
    ) -> int:
        """Have tokens of a stream in these blocks, for all heads, wherever they are asked; they are in the blocks
        `sources` in some pools. How many are right in all of them. Raises FetchFailed."""
        if self.is_displaced:
            raise StepAbandoned(0, (), "heads have to be computed elsewhere than where their KV is")
        places_LG = self._places()
        if (places_LG == _NO_RANK).any():
            index = int((places_LG == _NO_RANK).any(axis=1).argmax())
            missing = tuple(np.flatnonzero(places_LG[index] == _NO_RANK).tolist())
            raise StepAbandoned([*self._call_of][index], missing)
        if (self.kv_at_LG == _NO_RANK).any():  # no KV is in use yet
            self.look()
            self.settle()
        self._aimed_at = -1
        self._slots_LG = self._peers.slot_LN[self._calls_L, : self._num_heads].copy()
        everything = self._at(np.ones_like(self.kv_at_LG, bool), self.kv_at_LG)
        return self._fetch(everything, sources, blocks, num_tokens, chains, self.pools)

    def _at(self, which_LG: NDArray[np.bool_], places_LG: NDArray[np.int32]) -> dict[Rank, _Heads]:
        """These heads, by the worker that they are at."""
        slots_LG, found = self._slots_LG, dict[Rank, _Heads]()
        for place in np.unique(places_LG[which_LG]):
            index_H, head_H = np.nonzero(which_LG & (places_LG == place))
            words = [row_word(int(slots_LG[i, g]), int(g)) for i, g in zip(index_H, head_H, strict=True)]
            calls = np.array(list(self._call_of.values()), np.int32)[index_H]
            found[Rank(int(place))] = _Heads(calls, np.array(words, np.int32))
        return found

    def _fetch(
        self,
        heads: Mapping[Rank, _Heads],
        sources: Sequence[int],
        blocks: Sequence[int],
        num_tokens: int,
        chains: NDArray[np.uint64],
        pools: NDArray[np.int64],
    ) -> int:
        """A part of the tokens at a time, at all workers at once. Their pools must be these."""
        if not heads:
            return num_tokens
        size, num_blocks = self._block_size, self._num_blocks(heads, _FETCH_BYTES)
        needed = slice(-(-num_tokens // size))
        all_sources, all_blocks = np.array(sources[needed], np.int32), np.array(blocks[needed], np.int32)
        reached = 0
        while reached < num_tokens:
            part, first = slice(reached // size, reached // size + num_blocks), reached
            end = min(first + num_blocks * size, num_tokens)
            wanted = np.ascontiguousarray(chains[first:end])
            answers = self._ask(
                {rank: Fetch(*one, all_sources[part], all_blocks[part], wanted) for rank, one in heads.items()}
            )
            if any(answer.pool != pools[rank] for rank, answer in answers.items()):
                self.is_lost = True
                raise StepAbandoned(0, (), "a pool has changed while KV was fetched into it")
            reached += min(answer.num_right for answer in answers.values())
            if reached < end:
                break
        return reached

    def _num_blocks(self, heads: Mapping[Rank, _Heads], num_bytes: int) -> int:
        """That have so many bytes at the worker with the most of these heads."""
        most = max(len(one.calls) for one in heads.values()) * self._row_bytes * self._block_size
        return max(min(num_bytes // most, self._peers.shape.fetch_blocks), 1)

    def _ask(self, asked: Mapping[Rank, Fetch]) -> dict[Rank, Fetched]:
        self._has_begun = False
        answers = self._exchange.fetch(asked)
        if answers is None:
            raise StepAbandoned(0, (), "a worker that should fetch KV is not there")
        refused = {rank: answer.status for rank, answer in answers.items() if answer.status != Status.COMPUTED}
        if any(status == Status.MOVED for status in refused.values()):
            raise StepAbandoned(0, (), "heads are not where routes lead")
        if refused:
            raise FetchFailed(f"workers have not fetched KV: {refused}")
        self.num_fetched_bytes += sum(answer.num_bytes for answer in answers.values())
        return answers
