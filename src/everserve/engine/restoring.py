"""Bringing a stream's KV back from a log, when the stream is admitted.

Block by block, behind what the prefix cache had of it, up to the first token that is not what its record promised; at
least one token stays pending, because its logits are needed. What comes back is in our own log too.

Where the log is the memory that our own pool lies in (our predecessor's pool), a block that nobody has taken since is
used where it lies. Whether it still holds these tokens is not a question of who had it: its words tell.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from everserve.engine.blocks import BlockPool
from everserve.engine.journal import Journal
from everserve.engine.saved import Saved
from everserve.engine.sequence import Sequence
from everserve.engine.undo import UndoLog


class Restorer:
    """Everything it does to sequences and blocks is in the undo log: a step that is abandoned has restored nothing."""

    def __init__(
        self,
        pool: BlockPool,
        undo: UndoLog,
        journal: Journal,
        enable_prefix_caching: bool,
        clock: Callable[[], float],
    ) -> None:
        self.num_restored = 0  # tokens
        self.num_broken = 0  # tokens that a record promised, and that were not there or not right
        self._pool = pool
        self._undo = undo
        self._journal = journal
        self._enable_prefix_caching = enable_prefix_caching
        self._clock = clock

    def restore(self, sequence: Sequence, max_tokens: int) -> int:
        """Bring back at most so many tokens (rounded up to whole blocks), as far as blocks last; returns how many.

        Afterwards `sequence.saved` is None, unless there is more.
        """
        began_s, saved, first = self._clock(), sequence.saved, sequence.num_computed
        assert saved is not None and first % self._pool.block_size == 0
        num_promised = min(saved.num_tokens, len(sequence.tokens) - 1) if not saved.log.closed else 0
        room = first + self._pool.num_free * self._pool.block_size
        end = min(num_promised, room, first + -(-max_tokens // self._pool.block_size) * self._pool.block_size)
        reached = self._bring(sequence, saved, end) if end > first else first
        is_broken = reached < end
        self._undo.assign(
            sequence,
            num_computed=reached,
            num_restored=sequence.num_restored + reached - first,
            restoring_s=sequence.restoring_s + self._clock() - began_s,
            saved=None if is_broken or reached >= num_promised else saved,
        )
        self._undo.assign(
            self,
            num_restored=self.num_restored + reached - first,
            num_broken=self.num_broken + (num_promised - reached if is_broken else 0),
        )
        return reached - first

    def _bring(self, sequence: Sequence, saved: Saved, end: int) -> int:
        """The tokens up to `end`, block by block; returns up to which one all are right."""
        first, block_size = sequence.num_computed, self._pool.block_size
        chains = self._journal.chains(sequence, end)
        reached = first
        for start in range(first, end, block_size):
            num_wanted = min(block_size, end - start)
            wanted = chains[start - first : start - first + num_wanted]
            num_right = self._bring_block(sequence, saved, saved.blocks[start // block_size], wanted)
            reached += num_right
            if num_right == block_size and self._enable_prefix_caching:
                self._pool.publish(sequence.blocks[-1], sequence.block_hashes()[start // block_size])
            if num_right < num_wanted:
                break
        if reached > first:
            self._journal.note_chain(sequence, reached, int(chains[reached - first - 1]))
        return reached

    def _bring_block(self, sequence: Sequence, saved: Saved, source: int, chains: NDArray[np.uint64]) -> int:
        """One more block for the sequence, with the tokens that have these chains; returns how many are right."""
        if saved.is_own and self._journal.writer.pool_is_in_log and self._pool.is_forgotten(source):
            block, num_right = source, saved.log.count_intact(source, len(chains), chains)
            if num_right == 0:
                return 0  # by now it is somebody else's, who may need it
            self._pool.share(block)
        else:
            block = self._pool.allocate()
            num_right = self._journal.writer.copy_in(saved.log, source, len(chains), chains, block)
        sequence.blocks.append(block)
        self._undo.record(sequence.blocks.pop)
        self._journal.note_logged(block, num_right)
        return num_right
