"""Block ranges: which KV blocks belong to which home.

A block number means the same on every worker that has KV of some heads, and each worker has memory for all of them. So
homes must not use the same numbers: each has a range of its own. Workers refuse whatever names a block outside the
range of the home that asks.

Mirrors have as many blocks again, with the numbers that follow those of the pools: for streams that wait without blocks
of a pool (engine/parking.py).
"""

from typing import NamedTuple

from everserve.tables.ids import Rank


class BlockRange(NamedTuple):
    """The blocks first_block .. first_block + num_blocks - 1."""

    first_block: int
    num_blocks: int


NO_BLOCKS = BlockRange(0, 0)


def block_range_of(home: Rank, blocks_per_home: int) -> BlockRange:
    """Homes have the ranks from 0 on."""
    return BlockRange(home * blocks_per_home, blocks_per_home)


def parking_range_of(home: Rank, blocks_per_home: int, num_homes: int) -> BlockRange:
    """The blocks of a home that only mirrors have."""
    return BlockRange((num_homes + home) * blocks_per_home, blocks_per_home)
