"""Bringing a stream's KV back from a log, when the stream is admitted.

All blocks at once, behind what the prefix cache had of it, up to the first token that is not what its record promised;
at least one token stays pending, because its logits are needed. What comes back is in our own log too.

A death leaves many streams, which are admitted one after the other. On a device, where a copy takes much less time than
to ask for it, the next ones are brought together with the first; and while some are admitted, the next are copied.

What came back can be found by other prompts when the stream has filled its next block: to hash all of it takes longer
than to bring it. Only blocks that several of these streams had in common are found at once, so that they share them
again.

Where the log is the memory that our own pool lies in (our predecessor's pool), a block that has not been taken since is
used where it lies. The words of its slots show whether it still holds these tokens. So are blocks of the prefix cache
that have become doubtful (blocks.py).
"""

from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, repeat

import numpy as np
from numpy.typing import NDArray

from everserve.engine.blocks import BlockPool
from everserve.engine.journal import Journal
from everserve.engine.saved import Saved
from everserve.engine.sequence import Sequence
from everserve.engine.undo import UndoLog
from everserve.kvlog.writer import Copy


@dataclass
class _Brought:
    """A stream's first tokens, from the first one on that a row will see, in blocks that no sequence has yet."""

    num_passed: int  # blocks in front of them
    blocks: list[int]
    chains: NDArray[np.uint64]
    num_right: int | None = None  # None: they are still being copied


class Restorer:
    """Everything it does to sequences and blocks is in the undo log: a step that is abandoned has restored nothing."""

    def __init__(
        self,
        pool: BlockPool,
        undo: UndoLog,
        journal: Journal,
        enable_prefix_caching: bool,
        clock: Callable[[], float],
        visible_keys: int | None = None,
    ) -> None:
        self.num_restored = 0  # tokens
        self.num_broken = 0  # tokens that a record promised, and that were not there or not right
        self._pool = pool
        self._undo = undo
        self._journal = journal
        self._enable_prefix_caching = enable_prefix_caching
        self._clock = clock
        self._visible_keys = visible_keys
        self._ahead: dict[str, _Brought] = {}  # by stream: what is brought together with another one
        self._coming: Generator[bool] | None = None  # copies these, and more of them
        self._num_users: Counter[tuple[int, int]] | None = None  # of blocks of logs: streams that wait in this step

    def forget(self) -> None:
        """The step restores nothing more."""
        self._stop_coming()
        for brought in self._ahead.values():
            self._give_back(brought.blocks)
        self.abandon()

    def abandon(self) -> None:
        """The step never happened: all its blocks have been given back."""
        self._stop_coming()
        self._ahead.clear()
        self._num_users = None

    def num_ahead(self, sequence: Sequence) -> int:
        """How many blocks have been taken for this stream already."""
        brought = self._ahead.get(sequence.id)
        return len(brought.blocks) if brought is not None else 0

    def _stop_coming(self) -> None:
        """Nothing is written into these blocks any more."""
        if self._coming is not None:
            self._coming.close()
            self._coming = None

    def restore(self, sequence: Sequence, max_tokens: int, next_ones: Iterable[Sequence] = ()) -> int:
        """Bring back at most so many tokens (rounded up to whole blocks), as far as blocks last; returns how many.
        `next_ones` are probably restored after this one, in this step.

        Afterwards `sequence.saved` is None, unless there is more.
        """
        self._journal.settle()
        began_s, saved = self._clock(), sequence.saved
        assert saved is not None and sequence.num_computed % self._pool.block_size == 0
        num_promised = _num_useful(sequence, saved) if not saved.log.closed else 0
        self._pass_to(sequence, sequence.num_passed_at(num_promised, self._visible_keys))
        first = sequence.num_computed
        room = first + self._pool.num_free * self._pool.block_size
        end = min(num_promised, room, first + -(-max_tokens // self._pool.block_size) * self._pool.block_size)
        if self._num_users is None:
            self._num_users = _count_users(chain([sequence], next_ones))
        if (brought := self._take_ahead(sequence, max_tokens, next_ones)) is not None:
            reached = self._use_ahead(sequence, saved, brought, end)
        else:
            reached = self._bring(sequence, saved, end) if end > first else first
        is_broken = reached < end
        num_passed = sequence.num_passed
        if num_passed and first == num_passed * self._pool.block_size:  # any block will do that holds something
            sequence.blocks[:num_passed] = [sequence.blocks[-1]] * num_passed
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

    def _pass_to(self, sequence: Sequence, num_passed: int) -> None:
        """Leave out so many blocks, which no row will see: their tokens count as computed. If it does not come further
        than that, everything is computed again (scheduler.py)."""
        num_tokens = num_passed * self._pool.block_size
        if num_tokens <= sequence.num_computed:
            return
        self._undo.record(_set, sequence.blocks, list(sequence.blocks))
        for block in reversed(sequence.held_blocks):
            self._pool.release(block)
        sequence.blocks[:] = [self._pool.first_block] * num_passed
        self._undo.assign(sequence, num_computed=num_tokens, num_passed=num_passed, num_published=num_passed)

    def begin_again(self, sequence: Sequence) -> None:
        """All of it will be computed. What it has been brought so far may be on record."""
        self._journal.clear([sequence])

    def check(self, sequence: Sequence, cached: list[int]) -> list[int]:
        """Those of these cached blocks, which hold its first tokens if nothing has happened to them, that still do."""
        doubtful, size = self._pool.doubtful, self._pool.block_size
        first = next(i for i, block in enumerate(cached) if block in doubtful)
        self._journal.settle()
        chains = sequence.chains(len(cached) * size)[first * size :]
        num_right = first + self._journal.writer.count_intact(cached[first:], len(chains), chains) // size
        doubtful.difference_update(cached[:num_right])
        if num_right < len(cached):
            self._pool.withdraw(cached[num_right])
            self.num_broken += size
        return cached[:num_right]

    def _take_ahead(self, sequence: Sequence, max_tokens: int, next_ones: Iterable[Sequence]) -> _Brought | None:
        """What was brought of this stream together with an earlier one, or is brought now with later ones."""
        has_nothing = sequence.num_computed == sequence.num_passed * self._pool.block_size
        if not self._wait_for(sequence) and has_nothing and self._journal.writer.is_on_device:
            self._stop_coming()
            self._coming = self._bring_ahead([sequence, *next_ones], max_tokens)
            self._wait_for(sequence)
        return self._ahead.pop(sequence.id, None)

    def _wait_for(self, sequence: Sequence) -> bool:
        """Until what is brought of this stream is there; False if nothing is."""
        while (brought := self._ahead.get(sequence.id)) is None or brought.num_right is None:
            if self._coming is None or not next(self._coming, False):
                return False
        return True

    def _bring_ahead(self, sequences: Iterable[Sequence], max_tokens: int) -> Generator[bool]:
        """The first of these streams, while they have KV in other workers' logs and there is room. Each time it goes on
        one more of them is there: True."""
        coming: deque[_Brought] = deque()

        def copies() -> Iterator[Copy]:
            left = max_tokens
            for sequence in sequences:
                saved = sequence.saved
                if saved is None or saved.log.closed or saved.is_own or sequence.id in self._ahead:
                    return
                end = _num_useful(sequence, saved)
                num_passed = sequence.num_passed_at(end, self._visible_keys)
                sources = saved.blocks[num_passed : -(-end // self._pool.block_size)]
                begin = num_passed * self._pool.block_size
                left -= end - begin
                if left < 0 or len(sources) + len(self._ahead) >= self._pool.num_free:  # each may need one more
                    return
                blocks = self._pool.allocate_many(len(sources))
                chains = sequence.chains(end)[begin:]
                self._ahead[sequence.id] = brought = _Brought(num_passed, blocks, chains)
                coming.append(brought)
                yield Copy(saved.log, sources, end - begin, chains, blocks)

        with closing(self._journal.writer.copy_in_many(copies())) as brought_in:
            for num_right in brought_in:
                coming.popleft().num_right = num_right
                yield True

    def _use_ahead(self, sequence: Sequence, saved: Saved, brought: _Brought, end: int) -> int:
        """What was brought of this stream before it was asked for; returns up to which token all are right."""
        first, block_size = sequence.num_computed, self._pool.block_size
        begin = brought.num_passed * block_size
        assert brought.num_right is not None and begin <= first
        reached = max(min(begin + brought.num_right, end), first)
        used = slice((first - begin) // block_size, -(-(reached - begin) // block_size))
        self._give_back(brought.blocks[used.stop :])
        self._give_back(brought.blocks[: used.start])  # the prefix cache had these
        if reached > first:
            self._append(sequence, brought.blocks[used], reached - first)
            self._publish(sequence, saved, reached)
            self._journal.note_chain(sequence, reached, int(brought.chains[reached - begin - 1]))
        return reached

    def _bring(self, sequence: Sequence, saved: Saved, end: int) -> int:
        """The tokens up to `end`, as many blocks at once as possible; returns up to which one all are right."""
        first, block_size = sequence.num_computed, self._pool.block_size
        chains = self._journal.chains(sequence, end)
        reached = first
        while reached < end:
            sources = saved.blocks[reached // block_size : -(-end // block_size)]
            in_place = self._run_in_place(saved, sources)
            if in_place:
                num_wanted = min(len(in_place) * block_size, end - reached)
                num_right = self._use_in_place(sequence, in_place, chains[reached - first :][:num_wanted])
            else:
                blocks = self._allocate_for(saved, sources)
                num_wanted = min(len(blocks) * block_size, end - reached)
                wanted = chains[reached - first :][:num_wanted]
                num_right = self._copy(sequence, saved, sources[: len(blocks)], wanted, blocks)
            self._publish(sequence, saved, reached + num_right)
            reached += num_right
            if num_right < num_wanted:
                break
        if reached > first:
            self._journal.note_chain(sequence, reached, int(chains[reached - first - 1]))
        return reached

    def _run_in_place(self, saved: Saved, sources: tuple[int, ...]) -> list[int]:
        """The leading ones of these blocks that can be used where they lie."""
        run: dict[int, None] = {}
        for source in sources:
            if source in run or not self._is_in_place(saved, source):
                break
            run[source] = None
        return list(run)

    def _allocate_for(self, saved: Saved, sources: tuple[int, ...]) -> list[int]:
        """New blocks for the leading ones of these that cannot."""
        blocks: list[int] = []
        for source in sources:
            if blocks and self._is_in_place(saved, source):
                break
            blocks.append(self._pool.allocate())
        return blocks

    def _is_in_place(self, saved: Saved, source: int) -> bool:
        is_here = saved.is_own and self._journal.writer.pool_is_in_log and self._pool.has(source)
        return is_here and self._pool.is_forgotten(source)

    def _use_in_place(self, sequence: Sequence, blocks: list[int], chains: NDArray[np.uint64]) -> int:
        """These blocks for the sequence, as far as they hold the tokens that have these chains; returns how many are
        right. Blocks that fail the check belong to another stream; leave them."""
        num_right = self._journal.writer.count_intact(blocks, len(chains), chains)
        used = blocks[: -(-num_right // self._pool.block_size)]
        for block in used:
            self._pool.share(block)
        self._append(sequence, used, num_right)
        return num_right

    def _copy(
        self,
        sequence: Sequence,
        saved: Saved,
        sources: tuple[int, ...],
        chains: NDArray[np.uint64],
        blocks: list[int],
    ) -> int:
        """These blocks, taken from the pool, for the sequence, with the tokens that have these chains; returns how many
        are right. Blocks behind the first that is not are given back."""
        num_right = self._journal.writer.copy_in(saved.log, sources, len(chains), chains, blocks)
        num_kept = -(-num_right // self._pool.block_size)
        self._give_back(blocks[num_kept:])
        self._append(sequence, blocks[:num_kept], num_right)
        return num_right

    def _give_back(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self._pool.release(block)
            self._journal.note_logged(block, 0)

    def _append(self, sequence: Sequence, blocks: list[int], num_right: int) -> None:
        self._undo.record(_cut, sequence.blocks, len(sequence.blocks))
        sequence.blocks += blocks
        self._journal.note_all_logged(blocks, num_right)

    def _publish(self, sequence: Sequence, saved: Saved, end: int) -> None:
        """Full blocks up to this token that others of these streams have too are found by them."""
        assert self._num_users is not None
        first, num_full, log = sequence.num_published, end // self._pool.block_size, id(saved.log)
        end = first
        while end < num_full and self._num_users[log, saved.blocks[end]] > 1:
            end += 1
        if end > first and self._enable_prefix_caching:
            self._pool.publish_many(sequence.blocks[first:end], sequence.block_hashes(end)[first:end])
            self._undo.assign(sequence, num_published=end)


def _count_users(sequences: Iterable[Sequence]) -> Counter[tuple[int, int]]:
    """How many of these streams have a block, by log and number. If two have something in common, they begin alike:
    those with a first block of their own are left out."""
    all_saved = [sequence.saved for sequence in sequences if sequence.saved is not None and sequence.saved.blocks]
    num_first = Counter([(id(saved.log), saved.blocks[0]) for saved in all_saved])
    users: Counter[tuple[int, int]] = Counter()
    for saved in all_saved:
        if num_first[id(saved.log), saved.blocks[0]] > 1:
            users.update(zip(repeat(id(saved.log)), saved.blocks, strict=False))
    return users


def _num_useful(sequence: Sequence, saved: Saved) -> int:
    """How many of its first tokens should come back: at least one stays pending; and if no experts are masked now, what
    its last worker computed under a mask is of no use."""
    num_tokens, masked = min(saved.num_tokens, len(sequence.tokens) - 1), sequence.spec.masked
    return num_tokens if masked is None or sequence.masked is not None else min(num_tokens, masked.position)


def _set(blocks: list[int], before: list[int]) -> None:
    blocks[:] = before


def _cut(blocks: list[int], length: int) -> None:
    """Back to so many, in place: the list object is shared."""
    del blocks[length:]
