"""Leases: which KV blocks belong to which home.

A block number means the same on every worker that has KV of some heads, and each worker has memory for all of them. So
homes must not use the same numbers: each has a range of its own, its *lease*. Workers refuse whatever names a block
outside the lease of the home that asks.
"""

from typing import NamedTuple

from everserve.tables.ids import Rank


class Lease(NamedTuple):
    """The blocks first_block .. first_block + num_blocks - 1."""

    first_block: int
    num_blocks: int


NO_LEASE = Lease(0, 0)


def lease_of(home: Rank, blocks_per_home: int) -> Lease:
    """Homes have the ranks from 0 on."""
    return Lease(home * blocks_per_home, blocks_per_home)
