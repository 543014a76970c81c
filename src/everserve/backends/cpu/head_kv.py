"""HeadKv: how the KV of heads gets to where they will be asked next, on CPUs. Where it is, seam/kv_at.py keeps.

Heads that are displaced are fetched by the workers that will be asked for them, out of each other's memory.

If routes prefer another worker for a head, but still name the one that has its KV, that one is asked until the KV has
been copied beside the steps (`aim`, `begin_fetch`, `poll_fetch`; engine/precopying.py).
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from everserve.backends.cpu.exchange import Exchange, Fetch, Fetched
from everserve.backends.cpu.lane import row_word
from everserve.errors import FetchFailed, KvLost, StepAbandoned
from everserve.seam.kv_at import KvAt
from everserve.seam.outcomes import Status
from everserve.tables.ids import NO_RANK, Rank

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
        self._exchange = exchange
        self._peers = exchange.peers
        self._call_of = dict(call_of)
        self._num_heads = num_heads
        self._row_bytes = row_bytes
        self._block_size = block_size
        self.at = KvAt([*call_of], num_heads)
        self._calls_L = np.array([self._peers.calls.index(call) for call in call_of.values()])
        self._is_displaced, self._num_changes = False, -1  # of the peers, when we last compared places
        # See `look`.
        self._slots_LG = self.at.rank_LG
        self._displaced: dict[Rank, _Heads] = {}
        # See `aim`.
        self._is_moving, self._num_changes_wanted, self._aimed_at = False, -1, -1
        self._has_begun, self._begun = False, list[Rank]()
        self._peers.stick(self._calls_L, self.at.rank_LG)
        exchange.step.pools = self.at.pools.ctypes.data

    def forget(self) -> None:
        self.at.forget()
        self._aimed_at = -1
        self._resolve()

    @property
    def is_displaced(self) -> bool:
        if self._peers.num_changes != self._num_changes:
            self._is_displaced = self.at.is_displaced(self._places())
            self._num_changes = self._peers.num_changes
        return self.at.is_lost or self._is_displaced

    def _places(self) -> NDArray[np.int32]:
        """Where heads are asked now."""
        return self._peers.owner_LN[self._calls_L, : self._num_heads].copy()

    @property
    def is_moving(self) -> bool:
        """Whether routes prefer other workers for heads than those that have their KV, and all of them are there."""
        if self._peers.num_changes != self._num_changes_wanted:
            wanted_LG = self._wanted()
            is_there = bool((wanted_LG != NO_RANK).all() and (self.at.rank_LG != NO_RANK).all())
            self._is_moving = is_there and bool((wanted_LG != self.at.rank_LG).any())
            self._num_changes_wanted = self._peers.num_changes
        return self._is_moving

    def aim(self) -> bytes:
        """`look`, for heads that move. What they move to: workers, and their pools."""
        if self._aimed_at != self._peers.num_changes:
            self._aimed_at = -1
            self._look(self._wanted(), self._peers.wanted_slot_LN)
            self._aimed_at = self._peers.num_changes
        return self.at.places_LG.tobytes() + self.at.found.tobytes()

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
        return bool(answer.status == Status.COMPUTED and answer.pool == self.at.found[rank])

    def _wanted(self) -> NDArray[np.int32]:
        """Where heads would be asked if it did not matter where their KV is."""
        return self._peers.wanted_LN[self._calls_L, : self._num_heads].copy()

    def look(self) -> None:
        """Which heads are displaced, and where they will be asked from now on. Raises StepAbandoned."""
        self._aimed_at = -1
        self._look(self._places(), self._peers.slot_LN)

    def _look(self, places_LG: NDArray[np.int32], slot_LN: NDArray[np.int32]) -> None:
        self._slots_LG, found = slot_LN[self._calls_L, : self._num_heads].copy(), self.at.pools.copy()
        ranks = np.unique(places_LG[places_LG != NO_RANK])
        for rank, answer in self._ask({Rank(int(rank)): _NOTHING for rank in ranks}).items():
            found[rank] = answer.pool
        self._displaced = self._by_worker(self.at.look(places_LG, found), places_LG)

    def fetch(self, blocks: Sequence[int], num_tokens: int, chains: NDArray[np.uint64]) -> int:
        """Have the first tokens of a stream where displaced heads will be asked. How many are right in all of them.
        Raises FetchFailed."""
        return self._fetch(self._displaced, blocks, blocks, num_tokens, chains, self.at.found)

    def settle(self) -> None:
        """From now on heads are asked there."""
        self.at.settle()
        self._aimed_at = -1
        self._resolve()

    def _resolve(self) -> None:
        """Where KV is has changed: so may the places where heads are asked."""
        self._peers.resolve()
        self._num_changes = self._num_changes_wanted = -1

    def fetch_all(
        self, sources: Sequence[int], blocks: Sequence[int], num_tokens: int, chains: NDArray[np.uint64]
    ) -> int:
        """Have tokens of a stream in these blocks, for all heads, wherever they are asked; they are in the blocks
        `sources` in some pools. How many are right in all of them. Raises FetchFailed, or KvLost."""
        self.at.check_places(self._places())
        if (self.at.rank_LG == NO_RANK).any():  # no KV is in use yet
            self.look()
            self.settle()
        self._aimed_at = -1
        self._slots_LG = self._peers.slot_LN[self._calls_L, : self._num_heads].copy()
        everything = self._by_worker(np.ones_like(self.at.rank_LG, bool), self.at.rank_LG)
        return self._fetch(everything, sources, blocks, num_tokens, chains, self.at.pools)

    def _by_worker(self, which_LG: NDArray[np.bool_], places_LG: NDArray[np.int32]) -> dict[Rank, _Heads]:
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
                self.at.is_lost = True
                raise KvLost(0, "a pool has changed while KV was fetched into it")
            reached += min(answer.num_right for answer in answers.values())
            if reached < end:
                break
        return reached

    def _num_blocks(self, heads: Mapping[Rank, _Heads], num_bytes: int) -> int:
        """The blocks that take so many bytes at the worker with the most of these heads."""
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
