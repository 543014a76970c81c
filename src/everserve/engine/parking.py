"""Parking: what becomes of the KV of streams that have to give up their blocks.

When blocks run out, as after a loss of devices, whose homes' streams all come to those that are left, the stream that
has advanced least recently waits. Where heads' KV has a mirror in the memory of the host, that has more blocks than the
pools: the stream's KV is copied into some of these first, and its record says so. It is *parked*. When the stream is
admitted again its KV is brought back like that of a stream which another home had (restoring.py), and verified like
that: what is not right is computed again.

So parking is a fetch, into blocks that only mirrors have. Without a mirror, or without room in it, what the prefix
cache still has of the stream is used, and the rest is computed again.
"""

from collections import Counter
from collections.abc import Collection

from everserve.engine.blocks import BlockPool
from everserve.engine.journal import Journal
from everserve.engine.saved import Saved
from everserve.engine.sequence import Sequence
from everserve.engine.undo import UndoLog


class Parking:
    """The blocks of one home that only mirrors have. Everything that it does in a step is in the undo log."""

    def __init__(self, pool: BlockPool, undo: UndoLog, journal: Journal) -> None:
        self.pool = pool
        self._undo = undo
        self._journal = journal
        self._parked: dict[str, Saved] = {}  # by stream
        for record in journal.adopted.values():  # our predecessor's may be asked for soon
            pool.put_last(block for block in reversed(record.blocks) if pool.has(block))

    def begin_step(self) -> None:
        self.pool.taken.clear()

    def find(self, sequence: Sequence) -> Saved | None:
        """What is parked of this stream."""
        return self._parked.get(sequence.id)

    def park(self, sequence: Sequence) -> Saved | None:
        """Copy its KV; None if that is not possible, or there is another copy. May raise StepAbandoned."""
        num_tokens, num_blocks = sequence.num_computed, sequence.num_blocks_for(sequence.num_computed)
        needs_rows = sequence.params.prompt_logprobs is not None and not sequence.num_output
        is_elsewhere = sequence.saved is not None or sequence.id in self._parked
        if is_elsewhere or needs_rows or sequence.masked is not None or not 0 < num_blocks <= self.pool.num_free:
            return None
        journal = self._journal
        journal.settle()
        blocks, sources = self.pool.allocate_many(num_blocks), sequence.blocks[:num_blocks]
        chains = sequence.chains(num_tokens)
        num_right = journal.writer.copy_in(journal.log, sources, num_tokens, chains, blocks)
        num_kept = sequence.num_blocks_for(num_right)
        for block in blocks[num_kept:]:
            self.pool.release(block)
        if not num_right:
            return None
        saved = Saved(journal.log, num_right, tuple(blocks[:num_kept]), is_own=False)
        self._note(sequence, saved)
        return saved

    def park_again(self, sequence: Sequence, saved: Saved) -> None:
        """It was parked in a step that was abandoned, and has lost its blocks all the same: its copy is still there."""
        for block in saved.blocks:
            self.pool.share(block)
        self._note(sequence, saved)

    def release(self, id: str) -> None:
        """The stream has its KV again, or has ended."""
        saved = self._parked.pop(id, None)
        for block in saved.blocks if saved is not None else ():
            self.pool.release(block)

    def violations(self, waiting: Collection[str]) -> list[str]:
        """What is wrong between steps; `waiting`: streams that have not got back all that is parked of them."""
        held = Counter(block for saved in self._parked.values() for block in saved.blocks)
        refs = {block: count for block, count in enumerate(self.pool.refs) if count}
        found = [] if refs == dict(held) else [f"parking blocks {refs} are in use, and {dict(held)} have KV"]
        return found + [f"{id} is parked and does not wait" for id in self._parked.keys() - set(waiting)]

    def _note(self, sequence: Sequence, saved: Saved) -> None:
        self._parked[sequence.id] = saved
        self._undo.record(self._parked.pop, sequence.id)
