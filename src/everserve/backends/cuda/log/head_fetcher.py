"""HeadFetcher: have tokens of a stream where its heads are, from whatever memory has them.

    targets        for each head the pool of the worker that is, or will be, asked for it
    sources        the pools of all expert seats, of those too whose worker has died; each has some heads
                   our own mirror, if there are mirrors (head_mirror.py): it has all heads of our own blocks
                   the mirrors of other homes, for what nothing else has: it takes a copy more

Everything is verified by the words that stand beside it, so no table says where KV was: a source that does not have a
head, or not these tokens of it, is passed over. What fits nowhere is computed again.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from everserve.backends.cuda.log import head_kernels
from everserve.backends.cuda.log.device_writer import Shared, num_leading
from everserve.backends.cuda.log.head_kernels import Places
from everserve.backends.cuda.log.head_mirror import NO_BLOCK, HeadMirrors
from everserve.backends.cuda.log.head_pools import HeadPools
from everserve.backends.cuda.log.low_priority_stream import Side
from everserve.errors import FetchFailed
from everserve.memory.pieces.layout import owner_of
from everserve.plan.head_memory import Head
from everserve.tables.ids import MAX_RANKS, Rank

_TOKENS_AT_ONCE = 16384  # asked for before we wait for them; rounded to whole blocks
# Short kernels: other workers may have to wait for them if this one dies; copies to the host are shorter.
_LAUNCH_BYTES, _MIRRORED_LAUNCH_BYTES = 64 << 20, 16 << 20
_MAX_SOURCES = MAX_RANKS + 2


class PlacesOfHeads:
    """`Places` that the host fills, for one memory or several in a row."""

    def __init__(self, num_heads: int, num_memories: int, side: Side) -> None:
        self.kv = Shared(num_memories * num_heads, torch.int64, side)
        self.words = Shared(num_memories * num_heads, torch.int64, side)
        self.strides = Shared(2 * num_memories, torch.int64, side)

    @property
    def arguments(self) -> Places:
        return Places(self.kv.address, self.words.address, self.strides.address)

    def fill(self, number: int, kv: Sequence[int], words: Sequence[int], strides: tuple[int, int]) -> None:
        """The memory with this number: the addresses of these heads, 0 where it does not have one."""
        part = slice(number * len(kv), (number + 1) * len(kv))
        self.kv.view[part], self.words.view[part] = kv, words
        self.strides.view[2 * number : 2 * number + 2] = strides


class _Source(NamedTuple):
    """A place that the heads that are aimed at are read from."""

    kv: list[int]
    words: list[int]
    strides: tuple[int, int]
    numbers_of: Callable[[Sequence[int]], Sequence[int]]  # what it calls blocks


class HeadFetcher:
    """Fetches KV of heads for one home. `heads`: all of the model's; by their numbers here they are named."""

    def __init__(self, pools: HeadPools, heads: Sequence[Head], side: Side, mirrors: HeadMirrors | None = None) -> None:
        plan = pools.plan
        self.pools = pools
        self.mirrors = mirrors
        self.heads = tuple(heads)
        self.rows = head_kernels.Rows(plan.block_size, plan.piece_bytes // (2 * plan.block_size))
        self.owners_H = np.array([owner_of(*head) for head in heads], np.int64)
        self.num_fetched_bytes = 0
        self.side = side
        self._wanted: Sequence[int] = ()  # see `aim`
        self._sources: list[_Source] = []
        self._num_blocks = max(_TOKENS_AT_ONCE // plan.block_size, 1)
        num_heads, num_tokens = len(self.heads), self._num_blocks * plan.block_size
        self._owners = Shared(num_heads, torch.int64, side)
        self._source_places = PlacesOfHeads(num_heads, _MAX_SOURCES, side)
        self._targets = PlacesOfHeads(num_heads, 1, side)
        self._mirror = PlacesOfHeads(num_heads, 1, side)
        self._source_blocks = Shared(_MAX_SOURCES * self._num_blocks, torch.int32, side)
        self._blocks = Shared(self._num_blocks, torch.int32, side)
        self._mirror_blocks = Shared(self._num_blocks, torch.int32, side)
        self._chains = Shared(num_tokens, torch.int64, side)
        self._right = Shared(num_tokens, torch.int32, side)
        self._copied = torch.zeros(1, dtype=torch.int64, device=side.device)
        self._copied_on_host = torch.zeros(1, dtype=torch.int64, pin_memory=side.device.type == "cuda")
        self._run(1, 0, 1, 1)  # before a stream waits for the kernels: of one token, which no source has

    def sweep(self) -> None:
        """Between two steps: use what was offered since the last one."""
        self.pools.sweep()

    def pool_of(self, rank: Rank) -> int:
        return self.pools.pool_of(rank)

    def places_of(self, ranks_H: NDArray[np.int32], filled: PlacesOfHeads, wanted: Sequence[int]) -> None:
        """Where these heads are in the memory of these seats (-1: nowhere)."""
        plan, kv, words = self.pools.plan, [0] * len(wanted), [0] * len(wanted)
        for rank in {Rank(int(ranks_H[head])) for head in wanted} & set(self.pools.ranks):
            pool = self.pools[rank]
            pieces = pool.pieces()
            for i, head in enumerate(wanted):
                piece = pieces.get(self.heads[head])
                if ranks_H[head] == rank and piece is not None:
                    kv[i], words[i] = pool.kv_at(piece), pool.words_at(piece)
        filled.fill(0, kv, words, (plan.block_bytes, plan.block_words_bytes))

    def mirror_of(self, filled: PlacesOfHeads, wanted: Sequence[int]) -> None:
        """Where these heads are in our own mirror."""
        if self.mirrors is not None:
            own = self.mirrors.own
            filled.fill(0, [*map(own.kv_at, wanted)], [*map(own.words_at, wanted)], own.strides)

    def aim(self, wanted: Sequence[int], ranks_H: NDArray[np.int32]) -> None:
        """What is fetched from now on is of these heads, which are, or will be, at ranks_H. FetchFailed if one is not
        in reach there."""
        self.side.wait()
        self.places_of(ranks_H, self._targets, wanted)
        if not self._targets.kv.view[: len(wanted)].all():
            raise FetchFailed("the memory in which heads should have their KV is out of reach")
        self._owners.view[: len(wanted)] = self.owners_H[list(wanted)]
        self.mirror_of(self._mirror, wanted)
        self._wanted = wanted
        self._sources = self._list_sources({Rank(int(ranks_H[head])) for head in wanted})

    def fetch(self, sources: Sequence[int], blocks: Sequence[int], num_tokens: int, chains: NDArray[np.uint64]) -> int:
        """Have the first tokens of a stream, which are in the blocks `sources` of some memory, in these blocks where
        the heads are. How many are right in all of them."""
        if not self._wanted:
            return num_tokens
        size, num_right = self.pools.plan.block_size, 0
        for first in range(0, num_tokens, self._num_blocks * size):
            end = min(first + self._num_blocks * size, num_tokens)
            part = slice(first // size, -(-end // size))
            right = self._fetch_part(sources[part], blocks[part], chains[first:end])
            num_right += right
            if right < end - first:
                break
        return num_right

    def _fetch_part(self, sources: Sequence[int], blocks: Sequence[int], chains: NDArray[np.uint64]) -> int:
        """Fetches at first from what our device reaches; behind that from mirrors of other homes."""
        num_right, size = self._fetch_from(self._sources, sources, blocks, chains), self.pools.plan.block_size
        reached = num_right - num_right % size
        while self.mirrors is not None and num_right < len(chains):
            part = slice(reached // size, reached // size + self.mirrors.num_at_once)
            numbers = self.mirrors.bounce(sources[part])
            if numbers is None:
                break
            wanted = chains[reached : part.stop * size]
            all_sources = [*self._sources, self._bounced(self.mirrors, numbers)]
            right = self._fetch_from(all_sources, sources[part], blocks[part], wanted)
            num_right = reached = reached + right
            if right < len(wanted):
                break
        return num_right

    def _list_sources(self, asked: set[Rank]) -> list[_Source]:
        """The memories that have some of the heads. Where these should be is looked at first."""
        plan, found = self.pools.plan, list[_Source]()

        def numbers_of(blocks: Sequence[int]) -> list[int]:
            return [block if 0 <= block < plan.num_blocks else NO_BLOCK for block in blocks]

        for rank in sorted(self.pools.ranks, key=lambda rank: (rank not in asked, rank)):
            pool = self.pools[rank]
            of_heads = pool.pieces()
            pieces = [of_heads.get(self.heads[head]) for head in self._wanted]
            if any(piece is not None for piece in pieces):
                kv = [0 if piece is None else pool.kv_at(piece) for piece in pieces]
                words = [0 if piece is None else pool.words_at(piece) for piece in pieces]
                found.append(_Source(kv, words, (plan.block_bytes, plan.block_words_bytes), numbers_of))
        if self.mirrors is not None:
            own = self.mirrors.own
            kv, words = [*map(own.kv_at, self._wanted)], [*map(own.words_at, self._wanted)]
            found.append(_Source(kv, words, own.strides, own.numbers_of))
        return found

    def _bounced(self, mirrors: HeadMirrors, numbers: Sequence[int]) -> _Source:
        kv = [mirrors.bounced_kv_at(head) for head in self._wanted]
        words = [mirrors.bounced_words_at(head) for head in self._wanted]
        return _Source(kv, words, mirrors.own.strides, lambda blocks: numbers)

    def _fetch_from(
        self, found: Sequence[_Source], sources: Sequence[int], blocks: Sequence[int], chains: NDArray[np.uint64]
    ) -> int:
        num_blocks = len(blocks)
        for i, source in enumerate(found):
            self._source_places.fill(i, *source[:3])
            self._source_blocks.view[i * num_blocks : (i + 1) * num_blocks] = source.numbers_of(sources)
        self._blocks.view[:num_blocks] = blocks
        if self.mirrors is not None:
            self._mirror_blocks.view[:num_blocks] = self.mirrors.own.numbers_of(blocks)
        self._chains.view[: len(chains)] = np.ascontiguousarray(chains, np.uint64).view(np.int64)
        return self._run(len(self._wanted), len(found), len(chains), num_blocks)

    def _run(self, num_heads: int, num_sources: int, num_tokens: int, num_blocks: int) -> int:
        """What was staged; how many leading tokens are right."""
        self._right.view[:num_tokens] = 1
        mirror = self._mirror.arguments if self.mirrors is not None else None
        num_bytes = _LAUNCH_BYTES if mirror is None else _MIRRORED_LAUNCH_BYTES
        at_once = max(num_bytes // (num_heads * self.pools.plan.piece_bytes), 1)

        def launch() -> None:
            self._copied.zero_()
            for first in range(0, num_blocks, at_once):
                head_kernels.fetch(
                    self.rows, self._source_places.arguments, num_sources, self._source_blocks.address,
                    self._targets.arguments, self._blocks.address, mirror, self._mirror_blocks.address,
                    self._owners.address, num_heads, self._chains.address, num_tokens, num_blocks,
                    self._right.address, self._copied.data_ptr(), first, min(at_once, num_blocks - first),
                )  # fmt: skip
            self._copied_on_host.copy_(self._copied, non_blocking=True)

        self.side.wait()
        self.side.run(launch)
        self.side.wait()
        self.num_fetched_bytes += int(self._copied_on_host.item()) * 2 * self.rows.row_bytes
        return num_leading(self._right.view[:num_tokens] != 0)
