"""Who runs in this step, with how many tokens.

Each step has a budget of tokens. Decoding streams come first (one token each), then streams in the middle of their
prompt, then new ones, so that long prompts fill what is left of each step instead of holding everybody up. While
streams decode, prompts get a much smaller budget: each step is a pause between two tokens of every decoding stream.

When blocks run out, the stream admitted last gives its blocks back and waits at the head of the queue; it is
recomputed later, never dropped. The stream admitted first can take everybody's blocks, and one stream alone always fits
(checked when it is added): so somebody always advances.

Everything `schedule` changes is in the undo log until the step is committed or abandoned. What the log cannot bring
back is the content of blocks that were taken from somebody: see `abandon`.
"""

from collections import deque
from dataclasses import dataclass

from everserve.engine.blocks import NO_BLOCKS_LEFT, BlockPool
from everserve.engine.sequence import Sequence, Status
from everserve.engine.undo import UndoLog


@dataclass(frozen=True)
class Chunk:
    """The next `num_tokens` pending tokens of a sequence."""

    sequence: Sequence
    num_tokens: int

    @property
    def completes(self) -> bool:
        """Whether nothing is pending afterwards, so that the last row's logits give the next token."""
        return self.num_tokens == self.sequence.num_pending

    @property
    def num_prompt_tokens(self) -> int:
        """How many of them belong to the prompt."""
        return max(0, min(self.num_tokens, self.sequence.num_prompt - self.sequence.num_computed))

    @property
    def num_known_tokens(self) -> int:
        """How many of them a worker that is gone has computed before."""
        return max(0, min(self.num_tokens, self.sequence.num_resumed - self.sequence.num_computed))


class Scheduler:
    """Owns the queues and every sequence's blocks."""

    def __init__(
        self,
        pool: BlockPool,
        undo: UndoLog,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_prefill_while_decoding: int,
        max_logits_rows: int,
        enable_prefix_caching: bool,
    ) -> None:
        self.pool = pool
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest admission first
        self.preempted: list[Sequence] = []  # in the current step
        self.num_preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._undo = undo
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_prefill_while_decoding = max_prefill_while_decoding
        self._max_logits_rows = max_logits_rows
        self._enable_prefix_caching = enable_prefix_caching

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence between steps: finished or cancelled. Its full blocks stay findable in the cache."""
        assert len(self._undo) == 0, "sequences leave between steps only"
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
        elif sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        sequence.status = Status.FINISHED
        self._release_all(sequence)
        self._undo.commit()

    def schedule(self) -> list[Chunk]:
        """The chunks of the next step; empty if there is nothing to do."""
        assert len(self._undo) == 0, "the previous step was neither committed nor abandoned"
        self.preempted = []
        self.pool.taken.clear()
        chunks: list[Chunk] = []
        budget = self._max_num_batched_tokens
        decoding = [sequence for sequence in self.running if sequence.num_pending == 1]
        prefilling = [sequence for sequence in self.running if sequence.num_pending > 1]
        for sequence in decoding:
            if budget > 0 and sequence.status is Status.RUNNING:
                budget -= self._extend(sequence, budget, chunks)
        if chunks:
            budget = min(budget, self._max_prefill_while_decoding)
        for sequence in prefilling:
            if budget > 0 and sequence.status is Status.RUNNING:
                budget -= self._extend(sequence, budget, chunks)
        if not self.preempted:
            self._admit(budget, chunks)
        return chunks

    def commit(self, chunks: list[Chunk]) -> None:
        """The step happened: its tokens are computed, and blocks that became full may be shared from now on."""
        self._undo.commit()
        for chunk in chunks:
            sequence = chunk.sequence
            num_full_before = sequence.num_computed // self.pool.block_size
            sequence.num_computed += chunk.num_tokens
            num_full = sequence.num_computed // self.pool.block_size
            if self._enable_prefix_caching and num_full > num_full_before:
                hashes = sequence.block_hashes()
                for i in range(num_full_before, num_full):
                    self.pool.publish(sequence.blocks[i], hashes[i])

    def abandon(self) -> None:
        """The step never happened; but it may have written into every block that it took.

        Where such a block had held something, that is lost: a cached prefix is withdrawn, and a stream that was
        preempted for it stays preempted. All other blocks of the step lie beyond what any stream has computed.
        """
        overwritten, victims = set(self.pool.taken), self.preempted
        self._undo.rollback()
        for block in overwritten:
            self.pool.withdraw(block)
        for victim in victims:
            if not overwritten.isdisjoint(victim.blocks):
                self._preempt(victim)
        self._undo.commit()
        self.preempted = []

    def _extend(self, sequence: Sequence, budget: int, chunks: list[Chunk]) -> int:
        """Schedule a running sequence; returns how many tokens it got."""
        num_tokens = min(self._chunk_limit(sequence), budget)
        scheduled = {chunk.sequence.id for chunk in chunks}
        while (room := self._grow(sequence, num_tokens)) == 0:
            victim = next((s for s in reversed(self.running) if s.id not in scheduled), None)
            assert victim is not None, "this sequence itself is not scheduled yet"
            if victim is sequence and chunks:
                if sequence.num_pending == 1:
                    self._preempt(sequence)  # the newest decoder makes way; a prompt just waits for the next step
                return 0
            assert victim is not sequence, "one sequence alone must fit into the pool"
            self._preempt(victim)
        chunks.append(Chunk(sequence, room))
        return room

    def _admit(self, budget: int, chunks: list[Chunk]) -> None:
        """Start waiting sequences, in order, while budget, seats and blocks last."""
        if not self.waiting:
            return
        in_flight = self._prefixes_in_flight()
        for sequence in list(self.waiting):
            if budget <= 0 or len(self.running) >= self._max_num_seqs:
                return
            cached = self._cached_blocks(sequence)
            if self._worth_waiting(sequence, len(cached), in_flight):
                continue
            num_needed = sequence.num_blocks_for(len(sequence.tokens)) - len(cached)
            num_free = self.pool.num_free - sum(self.pool.refs[block] == 0 for block in cached)
            if num_needed > num_free:
                return
            self._start(sequence, cached)
            budget -= self._extend(sequence, budget, chunks)
            in_flight.update(sequence.block_hashes()[len(cached) :])

    def _start(self, sequence: Sequence, cached: list[int]) -> None:
        """waiting -> running, holding the blocks of its cached prefix."""
        self._undo.record(self.waiting.insert, self.waiting.index(sequence), sequence)
        self.waiting.remove(sequence)
        self.running.append(sequence)
        self._undo.record(self.running.pop)
        self._set(sequence, status=Status.RUNNING, num_computed=len(cached) * self.pool.block_size)
        if sequence.num_output == 0:
            self._set(sequence, num_cached=sequence.num_computed)
        self._undo.record(sequence.blocks.clear)
        for block in cached:
            self.pool.share(block)
            sequence.blocks.append(block)
        self._set(
            self,
            prefix_queries=self.prefix_queries + len(sequence.tokens),
            prefix_hits=self.prefix_hits + sequence.num_computed,
        )

    def _preempt(self, sequence: Sequence) -> None:
        """running -> waiting, at the head of the queue; its tokens will be computed again."""
        index = self.running.index(sequence)
        self.running.pop(index)
        self._undo.record(self.running.insert, index, sequence)
        self.waiting.appendleft(sequence)
        self._undo.record(self.waiting.popleft)
        self._set(sequence, status=Status.WAITING, num_computed=0)
        self._release_all(sequence)
        self.preempted.append(sequence)
        self._set(self, num_preemptions=self.num_preemptions + 1)

    def _grow(self, sequence: Sequence, num_tokens: int) -> int:
        """Take blocks so that up to `num_tokens` more tokens fit; returns how many do fit."""
        num_wanted = sequence.num_blocks_for(sequence.num_computed + num_tokens)
        while len(sequence.blocks) < num_wanted:
            block = self.pool.allocate()
            if block == NO_BLOCKS_LEFT:
                break
            sequence.blocks.append(block)
            self._undo.record(sequence.blocks.pop)
        room = len(sequence.blocks) * self.pool.block_size - sequence.num_computed
        return min(num_tokens, room)

    def _release_all(self, sequence: Sequence) -> None:
        """Give back all blocks, last first: the beginning of a prompt is the part worth keeping longest."""
        self._undo.record(sequence.blocks.extend, list(sequence.blocks))
        for block in reversed(sequence.blocks):
            self.pool.release(block)
        sequence.blocks.clear()

    def _chunk_limit(self, sequence: Sequence) -> int:
        """Logits are dear when the vocabulary is large: prompts that want logprobs go in smaller chunks."""
        return (
            min(sequence.num_pending, self._max_logits_rows) if sequence.wants_prompt_logprobs else sequence.num_pending
        )

    def _cached_blocks(self, sequence: Sequence) -> list[int]:
        """The blocks of the longest cached prefix. At least one token stays pending: its logits are needed."""
        cached: list[int] = []
        if self._enable_prefix_caching and not sequence.wants_prompt_logprobs:
            usable = (len(sequence.tokens) - 1) // self.pool.block_size
            for chain_hash in sequence.block_hashes()[:usable]:
                block = self.pool.find(chain_hash)
                if block is None:
                    break
                cached.append(block)
        return cached

    def _prefixes_in_flight(self) -> set[bytes]:
        """Hashes of the full blocks that running prompts are about to compute."""
        hashes: set[bytes] = set()
        if self._enable_prefix_caching:
            for sequence in self.running:
                if sequence.num_pending > 1:
                    hashes.update(sequence.block_hashes()[sequence.num_computed // self.pool.block_size :])
        return hashes

    def _worth_waiting(self, sequence: Sequence, num_cached: int, in_flight: set[bytes]) -> bool:
        """Whether the next block this prompt needs is being computed right now by another one (`n` siblings, say)."""
        if not in_flight or sequence.wants_prompt_logprobs:
            return False
        usable = (len(sequence.tokens) - 1) // self.pool.block_size
        return num_cached < usable and sequence.block_hashes()[num_cached] in in_flight

    def _set(self, owner: object, **values: object) -> None:
        """Assign attributes, recording what they were."""
        for name, value in values.items():
            self._undo.record(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
