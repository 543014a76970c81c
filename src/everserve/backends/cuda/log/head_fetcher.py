"""HeadFetcher: have tokens of a stream where its heads are, from whatever memory has them.

    sources        the pools of all expert seats, of those too whose worker has died; each has some heads
    targets        for each head the pool of the worker that is, or will be, asked for it

Everything is verified by the words that stand beside it, so no table says where KV was: a source that does not have a
head, or not these tokens of it, is passed over. What fits nowhere is computed again.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from everserve.backends.cuda.log import head_kernels
from everserve.backends.cuda.log.device_writer import Shared, num_leading
from everserve.backends.cuda.log.head_kernels import Places
from everserve.backends.cuda.log.head_pools import HeadPools
from everserve.backends.cuda.log.low_priority_stream import Side
from everserve.errors import FetchFailed
from everserve.memory.pieces.layout import owner_of
from everserve.plan.head_memory import Head
from everserve.tables.ids import MAX_RANKS, Rank

_TOKENS_AT_ONCE = 16384  # asked for before we wait for them; rounded to whole blocks
_LAUNCH_BYTES = 64 << 20  # short kernels: other workers may have to wait for them if this one dies
_MAX_SOURCES = MAX_RANKS
_NO_BLOCK = -1


class PlacesOfHeads:
    """`Places` that the host fills, for one memory or several in a row."""

    def __init__(self, num_heads: int, num_memories: int, side: Side) -> None:
        self.kv = Shared(num_memories * num_heads, torch.int64, side)
        self.words = Shared(num_memories * num_heads, torch.int64, side)
        self.strides = Shared(2 * num_memories, torch.int64, side)

    @property
    def arguments(self) -> Places:
        return Places(self.kv.address, self.words.address, self.strides.address)


class HeadFetcher:
    """Of one home. `heads`: all of the model's; by their numbers here they are named."""

    def __init__(self, pools: HeadPools, heads: Sequence[Head], side: Side) -> None:
        plan = pools.plan
        self.pools = pools
        self.heads = tuple(heads)
        self.rows = head_kernels.Rows(plan.block_size, plan.piece_bytes // (2 * plan.block_size))
        self.owners_H = np.array([owner_of(*head) for head in heads], np.int64)
        self.num_fetched_bytes = 0
        self._num_aimed = self._num_sources = 0  # see `aim`
        self.side = side
        self._num_blocks = max(_TOKENS_AT_ONCE // plan.block_size, 1)
        num_heads, num_tokens = len(self.heads), self._num_blocks * plan.block_size
        self._owners = Shared(num_heads, torch.int64, side)
        self._sources = PlacesOfHeads(num_heads, _MAX_SOURCES, side)
        self._targets = PlacesOfHeads(num_heads, 1, side)
        self._source_blocks = Shared(_MAX_SOURCES * self._num_blocks, torch.int32, side)
        self._blocks = Shared(self._num_blocks, torch.int32, side)
        self._chains = Shared(num_tokens, torch.int64, side)
        self._right = Shared(num_tokens, torch.int32, side)
        self._copied = torch.zeros(1, dtype=torch.int64, device=side.device)
        self._copied_on_host = torch.zeros(1, dtype=torch.int64, pin_memory=side.device.type == "cuda")
        self._load_kernels()

    def _load_kernels(self) -> None:
        """Before a stream waits for them: of one token, which no source has."""
        self._chains.view[0] = 0
        self.side.wait()
        self._run(1, 0, 1, 1)

    def sweep(self) -> None:
        self.pools.sweep()

    def pool_of(self, rank: Rank) -> int:
        return self.pools.pool_of(rank)

    def places_of(self, ranks_H: NDArray[np.int32], filled: PlacesOfHeads, wanted: Sequence[int]) -> None:
        """Where these heads are in the memory of these seats (-1: nowhere); 0 where they are not."""
        plan = self.pools.plan
        kv, words = filled.kv.view, filled.words.view
        kv[: len(wanted)] = words[: len(wanted)] = 0
        filled.strides.view[:2] = plan.block_bytes, plan.block_words_bytes
        for rank in {Rank(int(ranks_H[head])) for head in wanted} & set(self.pools.ranks):
            pool = self.pools[rank]
            pieces = pool.pieces()
            for i, head in enumerate(wanted):
                piece = pieces.get(self.heads[head])
                if ranks_H[head] == rank and piece is not None:
                    kv[i], words[i] = pool.kv_at(piece), pool.words_at(piece)

    def aim(self, wanted: Sequence[int], ranks_H: NDArray[np.int32]) -> None:
        """What is fetched from now on is of these heads, which are, or will be, at ranks_H. FetchFailed if one is not
        in reach there."""
        self.side.wait()
        self._num_aimed = len(wanted)
        self.places_of(ranks_H, self._targets, wanted)
        if not self._targets.kv.view[: len(wanted)].all():
            raise FetchFailed("the memory in which heads should have their KV is out of reach")
        self._owners.view[: len(wanted)] = self.owners_H[list(wanted)]
        self._num_sources = self._list_sources(wanted, ranks_H)

    def fetch(self, sources: Sequence[int], blocks: Sequence[int], num_tokens: int, chains: NDArray[np.uint64]) -> int:
        """Have the first tokens of a stream, which are in the blocks `sources` of some pools, in these blocks where the
        heads are. How many are right in all of them."""
        if not self._num_aimed:
            return num_tokens
        size, num_right = self.pools.plan.block_size, 0
        for first in range(0, num_tokens, self._num_blocks * size):
            end = min(first + self._num_blocks * size, num_tokens)
            part = slice(first // size, -(-end // size))
            self._stage(sources[part], blocks[part], chains[first:end])
            right = self._run(self._num_aimed, self._num_sources, end - first, part.stop - part.start)
            num_right += right
            if right < end - first:
                break
        return num_right

    def _list_sources(self, wanted: Sequence[int], ranks_H: NDArray[np.int32]) -> int:
        """Pools that have some of these heads; how many there are. Where heads should be they may be already, so that
        is looked at first."""
        plan, num = self.pools.plan, 0
        asked = {Rank(int(ranks_H[head])) for head in wanted}
        for rank in sorted(self.pools.ranks, key=lambda rank: (rank not in asked, rank))[:_MAX_SOURCES]:
            pool = self.pools[rank]
            pieces = pool.pieces()
            found = [pieces.get(self.heads[head]) for head in wanted]
            if any(piece is not None for piece in found):
                part = slice(num * len(wanted), (num + 1) * len(wanted))
                self._sources.kv.view[part] = [0 if piece is None else pool.kv_at(piece) for piece in found]
                self._sources.words.view[part] = [0 if piece is None else pool.words_at(piece) for piece in found]
                self._sources.strides.view[2 * num : 2 * num + 2] = plan.block_bytes, plan.block_words_bytes
                num += 1
        return num

    def _stage(self, sources: Sequence[int], blocks: Sequence[int], chains: NDArray[np.uint64]) -> None:
        num_blocks = len(blocks)
        are_there = [block if 0 <= block < self.pools.plan.num_blocks else _NO_BLOCK for block in sources]
        for source in range(self._num_sources):
            self._source_blocks.view[source * num_blocks : (source + 1) * num_blocks] = are_there
        self._blocks.view[:num_blocks] = blocks
        self._chains.view[: len(chains)] = np.ascontiguousarray(chains, np.uint64).view(np.int64)

    def _run(self, num_heads: int, num_sources: int, num_tokens: int, num_blocks: int) -> int:
        """What was staged; how many leading tokens are right."""
        self._right.view[:num_tokens] = 1
        at_once = max(_LAUNCH_BYTES // (num_heads * self.pools.plan.piece_bytes), 1)

        def launch() -> None:
            self._copied.zero_()
            for first in range(0, num_blocks, at_once):
                head_kernels.fetch(
                    self.rows, self._sources.arguments, num_sources, self._source_blocks.address,
                    self._targets.arguments, self._blocks.address, None, self._blocks.address, self._owners.address,
                    num_heads, self._chains.address, num_tokens, num_blocks, self._right.address,
                    self._copied.data_ptr(), first, min(at_once, num_blocks - first),
                )  # fmt: skip
            self._copied_on_host.copy_(self._copied, non_blocking=True)

        self.side.run(launch)
        self.side.wait()
        self.num_fetched_bytes += int(self._copied_on_host.item()) * 2 * self.rows.row_bytes
        return num_leading(self._right.view[:num_tokens] != 0)
