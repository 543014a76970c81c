"""Journal: the engine's side of its own KV log.

A step's tokens go into the log while and after they are computed; the *record* of a stream says how far it has come:

    schedule --> begin --> forward --> finish --> (outputs are sent) --> commit
                   '----------'-> abandon

    tokens          p p p p p p p p o o o o
    computed        ^^^^^^^^^^^^^^^^^^^^^        in the pool and, once the step is finished, in the log
    committed       ^^^^^^^^^^^^^^^^^^^          in the log, and the record says so

Most steps are like the one before: the same streams, one token more each. From the second one on, the writer follows
these streams by itself where it can (kvlog/writer.py), and commits them when they are computed. What this module knows
of them is brought up to date when it is asked for, which ends that.

On a device KV stays as it is for a while, and between two steps there is no time for any of this. So a step is begun
there when it computes, and the work at its end is deferred to the next step, or until something needs it.

A record never says more than what is in the log. It is cleared when its stream ends or is preempted: the blocks that it
names will soon belong to another stream.

A log that was there before us is our predecessor's: we *adopt* it. Its records are left alone for as long as possible,
because their streams may be asked for; one that goes on here goes on in its old place.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from everserve.engine.batching import Rows
from everserve.engine.sequence import Chunk, Sequence
from everserve.kvlog.chains import START, chain_before, chains, key_of
from everserve.kvlog.log import Record
from everserve.kvlog.writer import Commit, Writer
from everserve.tables.requests import Masked


@dataclass(slots=True)
class JournalEntry:
    """What the journal knows of one stream."""

    key: bytes
    chain: int  # after `num_chained` tokens. Tokens are never taken back, so this stays true
    index: int | None = None  # its record's place in the log; None: it has none
    num_committed: int = 0  # tokens; what the record says
    num_listed: int = 0  # blocks; what the record's list says
    num_chained: int = 0
    is_parked: bool = False  # the record is about blocks that only mirrors have (parking.py), and nothing is committed
    chained_for: Masked | None = None  # what the stream's KV was when the chain was computed


# One stream's part in a step: its tokens from the first to the end, and the blocks that they are in. A plain tuple,
# since one is made for every token of every stream.
_Part = tuple[JournalEntry, int, int, list[int]]


class Journal:
    """Writes one log, for the engine whose pool the writer knows."""

    def __init__(self, writer: Writer) -> None:
        self.log = log = writer.log
        self.writer = writer
        self._entries: dict[str, JournalEntry] = {}
        self.adopted: dict[bytes, Record] = {}  # by key, oldest first
        self.free = list(reversed(range(log.shape.num_records)))  # indices that no record has
        self.ended: list[int] = []  # indices of streams whose last output is on its way
        self._block_size = log.shape.block_size
        self._num_logged = [0] * log.shape.num_blocks  # leading slots of each block that are in the log
        self._step: list[_Part] = []  # the current one, or one that is computed and not settled
        self._is_computed = False
        self._kept: dict[int, int] = {}  # chains after what counts, of those parts of which not everything does
        self._chunks: list[Chunk] = []  # of the last step; the scheduler uses one list as long as streams just decode
        self._followed: list[Chunk] | None = None  # the same, while the writer follows their streams
        if log.was_there:
            self._adopt()

    @property
    def entries(self) -> dict[str, JournalEntry]:
        """Entries by the name of the stream."""
        self._let_go()
        return self._entries

    # -- one step --------------------------------------------------------------------------------

    def begin(self, chunks: list[Chunk], rows: Rows) -> None:
        """These rows are about to be computed.

        Streams that start with KV that is in the log (restored, or found in the prefix cache) are committed at once: if
        we die in this step, that much is not lost again. Not if they have an adopted record: it is as good, and must
        stay if this step is abandoned.
        """
        if chunks is self._followed:
            self.writer.begin_next(rows.tokens_T, rows.kv_slots_T)
            return
        self.settle()
        self._let_go()
        self._clear_ended()
        self._step = []
        chains_S: list[int] = []
        starting: list[Sequence] = []
        entries, block_size = self._entries, self._block_size
        for sequence, num_tokens, _, _ in chunks:
            entry = entries.get(sequence.id) or self._entry(sequence)
            first = sequence.num_computed
            end = first + num_tokens
            if num_tokens == 1:
                blocks = [sequence.blocks[first // block_size]]
            else:
                blocks = sequence.blocks[first // block_size : -(-end // block_size)]
            self._step.append((entry, first, end, blocks))
            is_chained = entry.num_chained == first and entry.chained_for is sequence.masked
            chains_S.append(entry.chain if is_chained else self._chain(entry, sequence))
            if entry.index is None and first and entry.key not in self.adopted:
                starting.append(sequence)
        self._commit(starting)
        self.writer.begin(rows.tokens_T, rows.kv_slots_T, rows.query_starts_S, np.array(chains_S, np.uint64))
        if chunks is self._chunks and self.writer.follows:
            self._follow(chunks)
        self._chunks = chunks

    def finish(self, chunks: list[Chunk]) -> None:
        """They were computed. (The engine does not count them as such yet.) `chunks`: what of them counts, where
        drafts were not what came. The log may have words of such rows; no record includes them, and what they certify
        is that the stream has other tokens than it has."""
        if self._followed is not None:
            self.writer.finish_next()
            return
        self._is_computed = True
        if chunks is not self._chunks:
            self._keep(chunks)
        if not self.writer.is_on_device:
            self.settle()

    def settle(self) -> None:
        """Have a computed step written into the log. To be called before any block is used for something else than
        what the next step stores there."""
        if not self._is_computed:
            return
        self._is_computed = False
        block_size, num_logged, reach = self._block_size, self._num_logged, self.writer.reach
        chains_S = self.writer.finish().tolist()
        for i, chain in self._kept.items():
            chains_S[i] = chain
        self._kept.clear()
        for (entry, first, end, blocks), chain in zip(self._step, chains_S, strict=True):
            entry.chain, entry.num_chained = chain, end
            if end - first > 1:
                self._note_slots(first, end, blocks)
                continue
            block, slot = blocks[0], first % block_size  # nearly always: a token of a stream that decodes
            if slot <= num_logged[block]:
                num_logged[block] = slot + 1 if block < reach else 0

    def abandon(self, waiting: Iterable[Sequence], running: Iterable[Sequence]) -> None:
        """The step never happened, if it was begun at all. Streams that wait, again or still, have no blocks; one that
        was coming back in several steps has not come as far as was committed when this one began."""
        self._let_go()
        if not self._is_computed:
            self.writer.abandon()
        self.settle()
        self.clear(sequence for sequence in waiting if not self.is_parked(sequence))
        self.clear(sequence for sequence in running if self.num_committed(sequence) > sequence.num_computed)

    def commit(self, running: Iterable[Sequence]) -> None:
        """The outputs of the last step that was computed are on their way: bring the records up to date."""
        if self._followed is not None:
            return
        self.settle()
        self._clear_ended()
        self._commit(running)

    # -- one stream ------------------------------------------------------------------------------

    def chains(self, sequence: Sequence, end: int) -> NDArray[np.uint64]:
        """Chains of the tokens that are not computed, up to this one."""
        if sequence.masked is not None:
            return sequence.chains(end)[sequence.num_computed :]
        before = self._chain(self._entry(sequence), sequence)
        return chains(sequence.tokens[sequence.num_computed : end], before)

    def note_chain(self, sequence: Sequence, num_tokens: int, chain: int) -> None:
        """The chain after so many tokens, to be used when so many are computed."""
        entry = self._entry(sequence)
        entry.chain, entry.num_chained, entry.chained_for = chain, num_tokens, sequence.masked
        if sequence.masked is not None and sequence.masked.position == num_tokens:
            entry.num_chained = -1  # the mask begins right behind it, and is not in this chain yet

    def note_logged(self, block: int, num_slots: int) -> None:
        """The log has the first slots of this block, if it is in the writer's reach."""
        self._let_go()
        self._num_logged[block] = num_slots if block < self.writer.reach else 0

    def note_all_logged(self, blocks: list[int], num_slots: int) -> None:
        """The same of several consecutive blocks: so many slots of all of them together."""
        self._let_go()
        num_logged, reach, block_size = self._num_logged, self.writer.reach, self._block_size
        for block in blocks:
            num_logged[block] = block_size if block < reach else 0
        if num_slots % block_size:
            self.note_logged(blocks[-1], num_slots % block_size)

    def num_committed(self, sequence: Sequence) -> int:
        entry = self.entries.get(sequence.id)
        return entry.num_committed if entry is not None else 0

    def count_intact(self, sequence: Sequence, num_tokens: int) -> int:
        """How many of its first tokens are in the log, as they should be. What has passed is."""
        first = min(sequence.num_passed * self._block_size, num_tokens)
        blocks = sequence.blocks[sequence.num_passed : sequence.num_blocks_for(num_tokens)]
        chains = sequence.chains(num_tokens)[first:]
        return first + self.writer.count_intact(blocks, num_tokens - first, chains)

    def lag(self, running: Iterable[Sequence]) -> int:
        """How many tokens are computed and not committed."""
        if self._followed is not None:
            return 0
        entries = self._entries
        both = [(sequence.num_computed, entries.get(sequence.id)) for sequence in running]
        return sum([num - (entry.num_committed if entry is not None else 0) for num, entry in both])

    def clear(self, sequences: Iterable[Sequence]) -> None:
        """These streams have lost their blocks."""
        for sequence in sequences:
            entry = self.entries.get(sequence.id)
            if entry is not None and entry.index is not None:
                self._give_back(entry.index)
                entry.index, entry.num_committed, entry.num_listed, entry.is_parked = None, 0, 0, False

    def park(self, sequence: Sequence, num_tokens: int, blocks: Sequence_[int]) -> None:
        """This stream has lost its blocks, and so many tokens of it are in these, which are not the pool's. It has no
        record if too many have: places are for streams that run."""
        entry = self._entry(sequence)
        num_parked = sum(entry.is_parked for entry in self.entries.values())
        if entry.index is None or num_parked >= self.log.shape.num_records // 3:
            self.clear([sequence])
            return
        self.writer.commit_many([Commit(entry.index, entry.key, num_tokens, blocks, 0)])
        entry.num_committed, entry.num_listed, entry.is_parked = 0, 0, True

    def is_parked(self, sequence: Sequence) -> bool:
        """Whether its record is about blocks that are not the pool's."""
        entry = self.entries.get(sequence.id)
        return entry is not None and entry.is_parked

    def cut(self, sequences: Iterable[Sequence]) -> None:
        """These streams have given up the end of their KV, with its blocks. Their records say so at once: the rest of
        it must not be lost if this worker dies now."""
        commits: list[Commit] = []
        entries = self.entries
        for sequence in sequences:
            entry = entries.get(sequence.id)
            if entry is None or entry.index is None:
                continue
            if not sequence.num_computed:
                self.clear([sequence])
                continue
            entry.num_committed = min(entry.num_committed, sequence.num_computed)
            num_blocks = sequence.num_blocks_for(entry.num_committed)
            entry.num_listed = min(entry.num_listed, num_blocks)
            blocks = sequence.blocks[:num_blocks]
            commits.append(Commit(entry.index, entry.key, entry.num_committed, blocks, entry.num_listed))
        if commits:
            self.writer.commit_many(commits)

    def end(self, sequence: Sequence, is_delivered: bool) -> None:
        """This stream has ended. Until its client can know that, another worker may have to continue it: its record
        stays until the next `commit`."""
        entry = self.entries.pop(sequence.id, None) or JournalEntry(key_of(sequence.id), chain=START)
        record = self.adopted.pop(entry.key, None)
        for index in (entry.index, record.index if record is not None else None):
            if index is not None and is_delivered:
                self._give_back(index)
            elif index is not None:
                self.ended.append(index)

    def forget_adopted(self, but: Iterable[str] = ()) -> None:
        """Drop the predecessor's records, except those of these streams: only they may still be resumed here."""
        kept = {key_of(id) for id in but}
        for key in self.adopted.keys() - kept:
            self._give_back(self.adopted.pop(key).index)

    # -- streams that the writer follows ---------------------------------------------------------

    def _follow(self, chunks: list[Chunk]) -> None:
        """The step that has just begun is like the one before: if nothing else is to be said of its streams, the writer
        goes on by itself."""
        self._commit([chunk[0] for chunk in chunks])
        commits: list[Commit] = []
        for (entry, first, end, _), (sequence, _, _, _) in zip(self._step, chunks, strict=True):
            if entry.index is None or entry.num_committed != first or end - first > 1:
                return
            blocks = sequence.blocks[: entry.num_listed]
            commits.append(Commit(entry.index, entry.key, first, blocks, entry.num_listed))
        self.writer.follow(commits)
        self._followed = chunks

    def _let_go(self) -> None:
        """The writer follows no stream any more, and what it has done is known here."""
        if self._followed is None:
            return
        chunks, self._followed, self._step = self._followed, None, []
        streams, slots = self.writer.let_go()
        entries, block_size = [self._entries[chunk[0].id] for chunk in chunks], self._block_size
        for entry, (num_tokens, num_blocks, chain) in zip(entries, streams, strict=True):
            first = entry.num_committed
            if num_tokens > first:
                assert entry.index is not None
                self._note_slots(first, num_tokens, self.log.listed(entry.index, first // block_size, num_blocks))
            entry.chain, entry.num_chained = chain, num_tokens
            entry.num_committed, entry.num_listed = num_tokens, num_blocks
        if slots:  # in the middle of a step, which goes on as any other
            parts = zip(entries, slots, strict=True)
            self._step = [(e, e.num_committed, e.num_committed + 1, [slot // block_size]) for e, slot in parts]

    # -- inside ----------------------------------------------------------------------------------

    def _keep(self, chunks: list[Chunk]) -> None:
        """Note how much of the step at hand counts."""
        block_size = self._block_size
        for i, chunk in enumerate(chunks):
            entry, first, end, blocks = self._step[i]
            if first + chunk.num_tokens < end:
                end = first + chunk.num_tokens
                self._kept[i] = int(chains(chunk.sequence.tokens[first:end], entry.chain)[-1])
                self._step[i] = entry, first, end, blocks[: -(-end // block_size) - first // block_size]

    def _note_slots(self, first: int, end: int, blocks: list[int]) -> None:
        """The log has these tokens of a stream, in these blocks."""
        block_size, num_logged, reach = self._block_size, self._num_logged, self.writer.reach
        for i, block in enumerate(blocks, first // block_size):
            slot, num_slots = max(first - i * block_size, 0), min(end - i * block_size, block_size)
            if slot <= num_logged[block]:  # what comes after a slot that is not logged does not count
                num_logged[block] = num_slots if block < reach else 0

    def _adopt(self) -> None:
        for record in sorted(self.log.records(), key=attrgetter("seq")):
            older = self.adopted.pop(record.key, None)
            if older is not None:
                self.writer.clear(older.index)
            self.adopted[record.key] = record
        taken = {record.index for record in self.adopted.values()}
        self.free = [index for index in self.free if index not in taken]

    def _entry(self, sequence: Sequence) -> JournalEntry:
        entry = self.entries.get(sequence.id)
        if entry is None:
            entry = self.entries[sequence.id] = JournalEntry(key_of(sequence.id), chain=sequence.chain_start)
        return entry

    def _chain(self, entry: JournalEntry, sequence: Sequence) -> int:
        """After the computed tokens."""
        num_computed = sequence.num_computed
        if entry.num_chained != num_computed or entry.chained_for is not sequence.masked:
            entry.chain = chain_before(sequence.tokens[:num_computed], sequence.masked, sequence.chain_start)
            entry.num_chained, entry.chained_for = num_computed, sequence.masked
        return entry.chain

    def _commit(self, sequences: Iterable[Sequence]) -> None:
        commits: list[Commit] = []
        entries, num_logged, block_size = self.entries, self._num_logged, self._block_size
        for sequence in sequences:
            entry = entries.get(sequence.id) or self._entry(sequence)
            num_tokens = sequence.num_computed
            if entry.num_committed == num_tokens or (entry.is_parked and sequence.saved is not None):
                continue  # nothing is new, or most is still where it is parked
            if entry.index is None:
                entry.index = self._take_index(entry.key)
            at, slot = divmod(num_tokens - 1, block_size)
            if entry.num_committed != num_tokens - 1 or num_logged[sequence.blocks[at]] <= slot:
                num_tokens = self._num_in_log(sequence, entry.num_committed)
            entry.num_committed = num_tokens
            num_blocks = -(-num_tokens // block_size)
            # Rarely more: blocks of a step that may still be abandoned are not part of the record yet.
            blocks = sequence.blocks if len(sequence.blocks) == num_blocks else sequence.blocks[:num_blocks]
            commits.append(Commit(entry.index, entry.key, num_tokens, blocks, entry.num_listed))
            entry.num_listed, entry.is_parked = num_blocks, False
        if commits:
            self.writer.commit_many(commits)

    def _num_in_log(self, sequence: Sequence, num_known: int) -> int:
        """How many of its computed tokens the log has, given that it has the first `num_known`."""
        num_computed, block_size = sequence.num_computed, self._block_size
        start = max(num_known // block_size, sequence.num_passed) * block_size
        while start < num_computed:
            num_logged = self._num_logged[sequence.blocks[start // block_size]]
            if num_logged < block_size:
                return min(start + num_logged, num_computed)
            start += block_size
        return num_computed

    def _take_index(self, key: bytes) -> int:
        """Its old place; a free one; or that of the oldest stream that our predecessor had."""
        if key not in self.adopted and self.free:
            return self.free.pop()
        return self.adopted.pop(key if key in self.adopted else next(iter(self.adopted))).index

    def _clear_ended(self) -> None:
        for index in self.ended:
            self._give_back(index)
        self.ended.clear()

    def _give_back(self, index: int) -> None:
        self.writer.clear(index)
        self.free.append(index)
