"""What each worker has in its prefix cache, as far as the gateway can tell: the blocks of the streams that it was
given, by their chains; as many as it has blocks, and of these the ones that were used last.

It is only a guess: a worker drops blocks by rules of its own. A wrong one costs time, never a token.
"""

from collections import OrderedDict
from collections.abc import Sequence

from everserve.kvlog.chains import chains, start_of


def block_chains(tokens: Sequence[int], block_size: int, salt: bytes = b"") -> list[int]:
    """One for each whole block: it says what the block has, and all before it, and for whom."""
    return chains(tokens, start_of(salt))[block_size - 1 :: block_size].tolist() if len(tokens) >= block_size else []


class Prefixes:
    """The prefixes that one worker has computed."""

    def __init__(self, block_size: int, num_blocks: int) -> None:
        self.block_size = block_size
        self._num_blocks = num_blocks
        self._known: OrderedDict[int, None] = OrderedDict()  # last used last

    def add(self, blocks: Sequence[int]) -> None:
        """It has these, or will have them soon."""
        known = self._known
        for block in reversed(blocks[: self._num_blocks]):  # those at the end are dropped first
            known[block] = None
            known.move_to_end(block)
        while len(known) > self._num_blocks:
            known.popitem(last=False)

    def num_cached(self, blocks: Sequence[int]) -> int:
        """How many of these it has, from the first one on."""
        return next((n for n, block in enumerate(blocks) if block not in self._known), len(blocks))
