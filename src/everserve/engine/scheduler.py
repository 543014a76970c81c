"""Which streams run in this step, with how many tokens.

Each step has a budget of tokens. Decoding streams come first (one token each), then streams in the middle of their
prompt, then new ones, so that long prompts fill what is left of each step instead of delaying all streams. While
streams decode, prompts get a much smaller budget: each step is a pause between two tokens of every decoding stream. How
much that is follows from how long steps take (chunk_sizes.py).
While other homes that use the same workers have prompts too, they get a part of it (prefill_share.py).

Places in the batch are shared by API key and request, not by stream (plan/fairness.py): those that wait are started in
the order that this gives, and a request without a place gets one from a request with several. The stream that gives its
place back waits with its KV in the cache, or parked, and goes on later with the same tokens.

When blocks run out, the stream that has advanced least recently, among equals the one admitted last, gives its blocks
back and waits at the head of the queue; it is never dropped. Its KV is parked in the meantime (parking.py), or computed
again. The stream admitted first can take all other streams' blocks, and one stream alone always fits (checked when it
is added): so at least one stream always advances.

A stream that another worker had is brought back from a log when it is admitted, as far as possible (restoring.py).
While others are served, a step does only so much of that; a long stream comes back in several steps.

While experts are masked every stream that is computed notes from which position on its KV is not exact. Such KV is
shared among streams under the same mask only. When the mask is lifted it is given up, and computed again in chunks, as
prompts are.

Everything `schedule` changes is in the undo log until the step is committed or abandoned. What the log cannot bring
back is the content of blocks that were taken from another stream: see `abandon`. The next step may be scheduled before
the current one has ended, if it takes nothing but free blocks (ahead.py).
"""

import sys
from collections import deque
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from itertools import chain
from operator import attrgetter

from everserve.config.engine import EngineConfig
from everserve.engine.blocks import NO_BLOCKS_LEFT, BlockPool
from everserve.engine.chunk_sizes import ChunkSizes
from everserve.engine.limits import EngineLimits
from everserve.engine.parking import Parking
from everserve.engine.prefill_share import PrefillShare, pending
from everserve.engine.restoring import Restorer
from everserve.engine.saved import Restored, Saved
from everserve.engine.sequence import Chunk, Sequence, Status, is_of_masked
from everserve.engine.undo import UndoLog
from everserve.plan.fairness import FairQueue, Places
from everserve.tables.prompts import PendingPrompt
from everserve.tables.requests import Flow, Masked


class Scheduler:
    """Owns the queues and every sequence's blocks."""

    def __init__(
        self,
        config: EngineConfig,
        limits: EngineLimits,
        pool: BlockPool,
        undo: UndoLog,
        restorer: Restorer | None,
        parking: Parking | None = None,
    ) -> None:
        self.pool = pool
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest admission first
        self.preempted: list[Sequence] = []  # in the current step
        self.restored: list[Restored] = []  # in the current step
        self.started: list[Sequence] = []  # in the current step
        self.num_preemptions = 0
        self.num_taken_back = 0  # of these, because another request had no place
        self.places = Places()  # of running streams
        self._may_take_back = False  # streams have come or gone since no place could be taken back
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.chunk_sizes = ChunkSizes(config.max_prefill_slowdown, limits.token_cost)
        self.share = PrefillShare(limits.token_cost, config.max_num_batched_tokens, config.block_size)
        self.mask_id = 0  # of the experts that are masked in the next steps; 0: none are
        self.most_decoded = 1 + config.speculation.num_speculative_tokens  # tokens that a stream gets in one step
        self._round: list[Chunk] = []  # the last step, if every running stream decoded in it
        self._undo = undo
        self._restorer = restorer
        self.parking = parking
        self.visible_keys = limits.visible_keys
        self._num_steps = 0
        self._restoring_left = 0  # tokens that the current step may still restore, if it serves others too
        self._logits_left = 0  # rows of prompts whose logits the current step may still compute
        self._config = config
        self._limits = limits
        self._work = limits.work  # None: a step may take as long as its tokens take
        self._work_left = 0.0  # for prompts, in the current step

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self._expect(sequence)
        self.waiting.append(sequence)
        self._may_take_back = True

    def use_mask(self, mask_id: int) -> list[Sequence]:
        """Between two steps: what is computed from now on is computed under this mask (0: exactly). Returns the streams
        that have lost KV.

        From one mask to another no KV is given up: it is not exact before, and not after.
        """
        assert len(self._undo) == 0, "masks change between steps only"
        self.mask_id, self._round = mask_id, []
        self.pool.withdraw_all(is_of_masked)
        cut = [] if mask_id else [sequence for sequence in self.running if self._cut(sequence)]
        for sequence in self.running:
            if sequence.saved is None:
                self._note_masked(sequence)
        for sequence in self.waiting:
            self._expect(sequence)
        self._undo.commit()
        return cut

    def _cut(self, sequence: Sequence) -> bool:
        """Give up what is not exact, in whole blocks: they may be shared. Returns whether there was such KV."""
        masked, sequence.masked = sequence.masked, None
        if masked is None or masked.position >= sequence.num_computed:
            return False
        self._cut_to(sequence, masked.position - masked.position % self.pool.block_size)
        return True

    def _expect(self, sequence: Sequence) -> None:
        """What a log has of a waiting sequence is not exact from a position on that the last worker has named. If no
        experts are masked now, that part is of no use."""
        sequence.masked = sequence.spec.masked if self.mask_id and sequence.saved is not None else None

    def _note_masked(self, sequence: Sequence) -> None:
        """What is computed next is not exact, if experts are masked."""
        masked = sequence.masked
        if self.mask_id and (masked is None or masked.position > sequence.num_computed):
            self._undo.assign(sequence, masked=Masked(sequence.num_computed, self.mask_id))

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence between steps: finished or cancelled. Its full blocks stay findable in the cache."""
        assert len(self._undo) == 0, "sequences leave between steps only"
        self._may_take_back = True
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
            self.places.give(sequence.flow)
        elif sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        sequence.status = Status.FINISHED
        self._publish(sequence)
        self._release_all(sequence)
        if self.parking is not None:
            self.parking.release(sequence.id)
        self._undo.commit()

    def schedule(self) -> list[Chunk]:
        """The chunks of the next step; empty if there is nothing to do. The same list as before, if all streams just
        decode on."""
        self.take_up()
        self._restoring_left, self._logits_left = self._limits.max_restored_while_serving, self._limits.max_logits_rows
        self._work_left = self._work.most if self._work is not None else 0.0
        chunks = self._round if self._goes_on() else self._distribute()
        if self._restorer is not None:
            self._restorer.forget()
        return chunks

    def all_decode(self, chunks: list[Chunk]) -> bool:
        """Whether this step, just scheduled, is one more token of every running stream, and nothing else."""
        return chunks is self._round

    def with_drafts(self, chunks: list[Chunk], drafts: SequenceOf[tuple[int, ...]]) -> list[Chunk]:
        """The same step with these drafts behind each stream's token, as far as there is room. Other streams give no
        blocks for that, and so many stay free that each can take one."""
        extended: list[Chunk] = []
        size, num_running = self.pool.block_size, len(self.running)
        for chunk, tokens in zip(chunks, drafts, strict=True):
            sequence = chunk.sequence
            room = len(sequence.blocks) * size - sequence.num_computed
            if room <= len(tokens) and self.pool.num_free > num_running:
                room = self._grow(sequence, 1 + len(tokens))
            fitting = tokens[: room - 1]
            extended.append(Chunk(sequence, 1 + len(fitting), True, fitting))
        return extended

    def schedule_ahead(self, chunks: list[Chunk]) -> list[Chunk]:
        """The step after the one with these chunks, which has not ended: all its streams decode on, but for those whose
        last token it brings. Empty if there is something else to do in that step, or if blocks are short.

        Blocks that are taken here are their streams' for good when the current step is committed.
        """
        if self.waiting and self._may_start:
            return []
        if len(chunks) != len(self.running) or not all([chunk[2] for chunk in chunks]):  # noqa: C419
            return []
        size, num_last = self.pool.block_size, self._limits.max_model_len - 1
        going_on = [c for c in chunks if len(c[0].tokens) < c[0].num_most - 1 and len(c[0].tokens) < num_last]
        short = [c for c in going_on if c[0].num_computed + c[1] >= len(c[0].blocks) * size]
        if any(self._grow(chunk[0], chunk[1] + 1) <= chunk[1] for chunk in short):
            return []
        if len(going_on) < len(chunks) or any([chunk[1] > 1 for chunk in chunks]):  # noqa: C419
            chunks = self._round = [Chunk(chunk[0], 1, True) for chunk in going_on]
        return chunks

    def take_up(self) -> None:
        """A step that is scheduled now, or was scheduled ahead, is the current one."""
        assert len(self._undo) == 0, "the previous step was neither committed nor abandoned"
        self.preempted, self.restored, self.started = [], [], []
        self.pool.taken.clear()
        if self.parking is not None:
            self.parking.begin_step()

    def forget_ahead(self) -> None:
        """The step that was scheduled ahead is not computed. Its blocks are needed when it is scheduled again."""
        self._round = []

    def _goes_on(self) -> bool:
        """Whether every running stream has one more token to compute, as in the last step, and a slot for it, and no
        other stream may run. (Lists, since this is done between any two tokens of every stream.)"""
        if not self._round or (self.waiting and self._may_start):
            return False
        if [chunk[0] for chunk in self._round] != self.running:
            return False
        if not all([len(sequence.tokens) - sequence.num_computed == 1 for sequence in self.running]):  # noqa: C419
            return False
        block_size = self.pool.block_size
        short = [s for s in self.running if s.num_computed == len(s.blocks) * block_size]
        return all(self._grow(sequence, 1) for sequence in short)

    @property
    def _may_start(self) -> bool:
        """Whether there is a place for a stream that waits, or may be one."""
        return self._may_take_back or len(self.running) < self._config.max_num_seqs

    def _distribute(self) -> list[Chunk]:
        """Divide the budget among running and waiting streams."""
        chunks: list[Chunk] = []
        budget = self._config.max_num_batched_tokens
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        for sequence in self.running:
            (decoding if len(sequence.tokens) - sequence.num_computed == 1 else prefilling).append(sequence)
        if self.waiting and self._may_take_back and not prefilling:
            self._take_back()
        num_waiting = len(self.preempted)
        block_size = self.pool.block_size
        for sequence in decoding:
            if budget > 0 and sequence.status is Status.RUNNING:
                if sequence.num_computed < len(sequence.blocks) * block_size:  # nearly always: there is room
                    chunks.append(Chunk(sequence, 1, True))
                    budget -= 1
                else:
                    budget -= self._extend(sequence, budget, chunks)
        if chunks and (prefilling or self.waiting):
            most = min(budget, self._config.max_prefill_while_decoding)
            position = prefilling[0].num_computed if prefilling else 0
            budget = self.chunk_sizes.limit(len(chunks), position, most)
        budget = self.share.limit(chain(prefilling, self.waiting), budget)
        for sequence in prefilling:
            if budget > 0 and sequence.status is Status.RUNNING and self._restore(sequence, chunks):
                budget -= self._extend(sequence, budget, chunks)
        if len(self.preempted) == num_waiting:
            self._admit(budget, chunks)
        self._round = chunks if len(chunks) == len(decoding) == len(self.running) else []
        return chunks

    def pending_prompts(self) -> Iterator[PendingPrompt]:
        """What is still to compute, apart from the next token of each decoding stream, in this order."""
        if self._round and not self.waiting:
            return iter(())  # nearly always
        return pending(chain(self.running, self.waiting))

    def certain(self) -> list[Sequence]:
        """The running streams. In the middle of a step, without those that it has started or restored: if the step is
        abandoned, they have not begun."""
        if not len(self._undo):
            return self.running
        uncertain = {sequence.id for sequence in self.started} | {restored.id for restored in self.restored}
        return [sequence for sequence in self.running if sequence.saved is None and sequence.id not in uncertain]

    def commit(self, chunks: list[Chunk]) -> None:
        """The step happened: its tokens are computed, and blocks that became full may be shared from now on."""
        block_size = self.pool.block_size
        self._num_steps += 1
        for sequence, num_tokens, _, drafts in chunks:
            sequence.last_step = self._num_steps
            num_full_before = sequence.num_computed // block_size
            sequence.num_computed += num_tokens
            if sequence.num_computed // block_size > num_full_before and self._config.enable_prefix_caching:
                self._publish(sequence)
            if drafts:
                self._give_back_unused(sequence)
            if self.visible_keys is not None:
                self._give_back_passed(sequence)
        if self.parking is not None:
            for restored in self.restored:
                self.parking.release(restored.id)
        self._undo.commit()

    def _give_back_unused(self, sequence: Sequence) -> None:
        """Blocks in which there is nothing but drafts that did not come."""
        num_used = sequence.num_blocks_for(sequence.num_computed)
        for block in reversed(sequence.blocks[num_used:]):
            self.pool.release(block)
        del sequence.blocks[num_used:]

    def _give_back_passed(self, sequence: Sequence) -> None:
        """The blocks that no row of this stream sees any more; but one, for its client may not get its last tokens, and
        then another worker goes on in front of them. The prefix cache may have them as long as they are free: what was
        not published until now will not be."""
        num_certain = sequence.num_computed - self.pool.block_size
        first, end = sequence.num_passed, sequence.num_passed_at(num_certain, self.visible_keys)
        for block in sequence.blocks[first:end]:
            self.pool.release(block)
        if end > first:
            self._undo.assign(sequence, num_passed=end, num_published=max(sequence.num_published, end))

    def _publish(self, sequence: Sequence) -> None:
        """All its full blocks may be shared."""
        first, end = sequence.num_published, sequence.num_computed // self.pool.block_size
        if first < end and self._config.enable_prefix_caching:
            self.pool.publish_many(sequence.blocks[first:end], sequence.block_hashes(end)[first:end])
            self._undo.assign(sequence, num_published=end)

    def abandon(self) -> None:
        """The step never happened; but it may have written into every block that it took.

        Where such a block had held something, that is lost: a cached prefix is withdrawn, and a stream that was
        preempted for it stays preempted, and parked. All other blocks of the step lie beyond what any stream has
        computed.
        """
        self._round = []  # its blocks may be taken by other streams
        overwritten, victims = self.pool.taken, [(victim, self.parked(victim)) for victim in self.preempted]
        self._undo.rollback()
        if self._restorer is not None:
            self._restorer.abandon()
        for block in overwritten:
            self.pool.withdraw(block)
        for victim, parked in victims:
            if not overwritten.isdisjoint(victim.held_blocks):
                self._preempt(victim)
                if parked is not None and self.parking is not None:
                    self.parking.park_again(victim, parked)
                    victim.saved = parked
        self._undo.commit()
        self.preempted, self.restored, self.started = [], [], []

    def keep_kv(self, num_right: Mapping[str, int]) -> tuple[list[Sequence], list[Sequence]]:
        """KV was lost, or may be: of each running stream so many of its first tokens are left (none, if it is not
        named), and all else that is cached is doubtful. Returns the streams that have nothing left, which wait again in
        the order in which they were admitted, and those that have lost a part."""
        assert len(self._undo) == 0, "KV is lost between steps only"
        self._round, self.preempted = [], []
        cut: list[Sequence] = []
        size = self.pool.block_size
        right = {block for s in self.running for block in s.blocks[s.num_passed : num_right.get(s.id, 0) // size]}
        for block in list(self.pool.block_of.values()):
            if block not in right:
                if self.pool.refs[block] or self._restorer is None:
                    self.pool.withdraw(block)
                else:
                    self.pool.doubtful.add(block)
        for sequence in self.running[::-1]:
            num_kept = self._num_kept(sequence, num_right.get(sequence.id, 0))
            if not num_kept:
                self._preempt(sequence)
            elif num_kept < sequence.num_computed:
                self._cut_to(sequence, num_kept)
                cut.append(sequence)
        self._undo.commit()
        return self.preempted, cut

    def _num_kept(self, sequence: Sequence, num_right: int) -> int:
        """Whole blocks only, if the last one is shared or the rest is still to be restored."""
        size = self.pool.block_size
        if num_right >= sequence.num_computed:
            return sequence.num_computed
        is_shared = num_right % size and self.pool.refs[sequence.blocks[num_right // size]] > 1
        return num_right - num_right % size if is_shared or sequence.saved is not None else num_right

    def _cut_to(self, sequence: Sequence, num_kept: int) -> None:
        """Give up what comes after so many tokens; everything, if the next row would see blocks that have passed."""
        if sequence.num_passed > sequence.num_passed_at(num_kept, self.visible_keys):
            num_kept = 0
        num_blocks = sequence.num_blocks_for(num_kept)
        for block in reversed(sequence.blocks[max(num_blocks, sequence.num_passed) :]):
            self.pool.release(block)
        del sequence.blocks[num_blocks:]
        sequence.num_computed = num_kept
        sequence.num_passed = min(sequence.num_passed, num_blocks)
        sequence.num_published = min(sequence.num_published, num_kept // self.pool.block_size)
        if sequence.masked is not None and sequence.masked.position >= num_kept:
            sequence.masked = None
        if sequence.saved is None:
            self._note_masked(sequence)
        sequence.forget_prompt_scores()

    def _extend(self, sequence: Sequence, budget: int, chunks: list[Chunk]) -> int:
        """Schedule a running sequence; returns how many tokens it got."""
        num_tokens = min(self._chunk_limit(sequence), budget)
        if num_tokens == 0:
            return 0
        self._note_masked(sequence)
        while (room := self._grow(sequence, num_tokens)) == 0:
            victim = self._victim({chunk.sequence.id for chunk in chunks})
            if victim is sequence and len(self.running) > 1:
                if sequence.num_pending == 1:  # a prompt just waits for the next step
                    self._preempt(sequence, parks=True)
                return 0
            assert victim is not sequence, "one sequence alone must fit into the pool"
            self._preempt(victim, parks=True)
        if self._work is not None and sequence.num_pending > 1:
            self._work_left -= self._work.cost(sequence.num_computed, room)
        chunks.append(Chunk(sequence, room, completes=room == sequence.num_pending))
        if sequence.wants_prompt_logprobs:
            self._logits_left -= room
        return room

    def _victim(self, scheduled: set[str]) -> Sequence:
        """Who gives up its blocks: not one that this step has already, and the one admitted first only for itself."""
        left = [sequence for sequence in self.running if sequence.id not in scheduled]
        others = [sequence for sequence in left if sequence is not self.running[0]] or left
        return min(reversed(others), key=attrgetter("last_step"))

    def parked(self, sequence: Sequence) -> Saved | None:
        """Its KV while it waits, if that is somewhere."""
        return self.parking.find(sequence) if self.parking is not None else None

    def _in_turn(self) -> FairQueue[Sequence]:
        """The streams that wait, in the order in which they get places."""
        queue: FairQueue[Sequence] = FairQueue(self.places)
        for sequence in self.waiting:
            queue.add(sequence, sequence.flow)
        return queue

    def _take_back(self) -> None:
        """A request that has no place gets one of another one, if that has too many (plan/fairness.py): its streams
        wait, last come first, until there are a place and blocks. For one request in a step."""
        is_full = len(self.running) >= self._config.max_num_seqs
        tried: set[str] = set()
        for flow, sequence in self._in_turn().newcomers():
            if flow.key in tried:
                continue  # another request of the key would not get one, either
            tried.add(flow.key)
            num_lacking = self._num_lacking(sequence, self._cached_blocks(sequence))
            if not is_full and num_lacking <= 0:
                return  # there is room
            if losers := self._losers(flow, num_lacking):
                for loser in losers:
                    self._preempt(loser, parks=True)
                self._undo.assign(self, num_taken_back=self.num_taken_back + len(losers))
                return
        self._may_take_back = False

    def _losers(self, winner: Flow, num_blocks: int) -> list[Sequence]:
        """Which running streams give back a place and so many blocks for this request; none, if that is not enough."""
        places, losers = self.places.copy(), list[Sequence]()
        left = self.running[::-1]
        while not losers or num_blocks > 0:
            flow = places.loser(winner)
            if flow is None:
                return []
            loser = next(sequence for sequence in left if sequence.flow == flow)
            left.remove(loser)
            losers.append(loser)
            places.give(flow)
            num_blocks -= sum(self.pool.refs[block] == 1 for block in loser.held_blocks)
        return losers

    def _admit(self, budget: int, chunks: list[Chunk]) -> None:
        """Start waiting sequences, in turn, while budget, places in the batch and blocks last."""
        if not self.waiting or budget <= 0 or len(self.running) >= self._config.max_num_seqs:
            return
        in_flight = self._prefixes_in_flight()
        queue = self._in_turn()
        while (sequence := queue.pop()) is not None:
            if budget <= 0 or len(self.running) >= self._config.max_num_seqs:
                return
            if sequence.saved is not None and chunks and self._restoring_left <= 0:
                return
            if self._chunk_limit(sequence) == 0:
                return
            cached = self._cached_blocks(sequence)
            if self._restorer is not None and not self.pool.doubtful.isdisjoint(cached):
                cached = self._restorer.check(sequence, cached)
            if self._worth_waiting(sequence, len(cached), in_flight):
                continue
            num_ahead = self._restorer.num_ahead(sequence) if self._restorer is not None else 0
            if self._num_lacking(sequence, cached, num_ahead) > 0:
                return
            self._start(sequence, cached)
            queue.moved(sequence.flow)
            if not self._restore(sequence, chunks):
                return
            budget -= self._extend(sequence, budget, chunks)
            if self._config.enable_prefix_caching and sequence.num_pending > 1:
                in_flight.update(sequence.block_hashes()[sequence.num_computed // self.pool.block_size :])

    def _num_lacking(self, sequence: Sequence, cached: list[int], num_ahead: int = 0) -> int:
        """How many blocks there are too few for it; negative if some are left."""
        num_needed = sequence.num_blocks_for(len(sequence.tokens)) - max(len(cached), num_ahead)
        return num_needed - self.pool.num_free + sum(self.pool.refs[block] == 0 for block in cached)

    def _start(self, sequence: Sequence, cached: list[int]) -> None:
        """waiting -> running, holding the blocks of its cached prefix."""
        self._undo.record(self.waiting.insert, self.waiting.index(sequence), sequence)
        self.waiting.remove(sequence)
        self.running.append(sequence)
        self.started.append(sequence)
        self._undo.record(self.running.pop)
        self.places.take(sequence.flow)
        self._undo.record(self.places.give, sequence.flow)
        num_computed = len(cached) * self.pool.block_size
        self._undo.assign(
            sequence,
            status=Status.RUNNING,
            num_computed=num_computed,
            num_published=len(cached),
            num_cached=num_computed if sequence.num_output == 0 else sequence.num_cached,
            num_restored=0,
            restoring_s=0.0,
            last_step=self._num_steps,
        )
        self._undo.record(sequence.blocks.clear)
        for block in cached:
            self.pool.share(block)
            sequence.blocks.append(block)
        self._undo.assign(
            self,
            prefix_queries=self.prefix_queries + len(sequence.tokens),
            prefix_hits=self.prefix_hits + sequence.num_computed,
        )

    def _restore(self, sequence: Sequence, chunks: list[Chunk]) -> bool:
        """Bring back what is saved of a sequence that was started; False if the rest must wait for the next step."""
        if sequence.saved is None:
            return True
        assert self._restorer is not None, "without a log of our own nothing is restored"
        if chunks and self._restoring_left <= 0:
            return False
        limit = self._restoring_left if chunks else sys.maxsize
        self._restoring_left -= self._restorer.restore(sequence, limit, self.waiting)
        if sequence.saved is not None and chunks:
            return False
        self._undo.assign(sequence, saved=None)  # alone, and yet there is more: blocks are short, and it must go on
        num_passed = sequence.num_passed_at(sequence.num_computed, self.visible_keys)
        if sequence.num_passed > num_passed:  # not far enough: what the next row sees was left out
            self._restorer.begin_again(sequence)
            self._release_all(sequence)
            self._undo.assign(sequence, num_computed=0, num_published=0, num_restored=0, masked=None)
        num_again = max(0, sequence.num_resumed - sequence.num_computed)
        self.restored.append(Restored(sequence.id, sequence.num_restored, num_again, sequence.restoring_s * 1000))
        return True

    def _preempt(self, sequence: Sequence, parks: bool = False) -> None:
        """running -> waiting, at the head of the queue. `parks`: its KV is as it should be; it is parked if possible.
        Otherwise it will be found in the cache, or computed again."""
        if parks:
            self._publish(sequence)
        parked = self.parking.park(sequence) if parks and self.parking is not None else None
        if parked is not None:
            self._undo.assign(sequence, saved=parked)
        index = self.running.index(sequence)
        self.running.pop(index)
        self._undo.record(self.running.insert, index, sequence)
        self.places.give(sequence.flow)
        self._undo.record(self.places.take, sequence.flow)
        self.waiting.appendleft(sequence)
        self._undo.record(self.waiting.popleft)
        self._undo.assign(sequence, status=Status.WAITING, num_computed=0, num_published=0, masked=None)
        self._release_all(sequence)
        self.preempted.append(sequence)
        self._undo.assign(self, num_preemptions=self.num_preemptions + 1)

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
        for block in reversed(sequence.held_blocks):
            self.pool.release(block)
        sequence.blocks.clear()
        if sequence.num_passed:
            self._undo.assign(sequence, num_passed=0)

    def _chunk_limit(self, sequence: Sequence) -> int:
        """How much of a prompt a step can compute.

        Logits are expensive when the vocabulary is large: prompts that want logprobs go in smaller chunks, and no step
        has more of them than a chunk.
        """
        limit = sequence.num_pending
        if sequence.wants_prompt_logprobs:
            limit = min(limit, self._logits_left)
        if self._work is not None and limit > 1:
            affordable = self._work.affordable(sequence.num_computed, self._work_left)
            limit = min(limit, affordable or int(self._work_left == self._work.most))  # the first prompt always goes on
        return limit

    def _cached_blocks(self, sequence: Sequence) -> list[int]:
        """The blocks of the longest cached prefix. At least one token stays pending: its logits are needed.

        While experts are masked, first exact blocks, then those that were computed behind them under the same mask.
        """
        cached: list[int] = []
        if self.mask_id and sequence.saved is None:
            sequence.masked = None  # it has no KV: what the last look at it assumed is of no interest
        if self._config.enable_prefix_caching and not sequence.wants_prompt_logprobs:
            self._find_blocks(sequence, cached)
            if self.mask_id and sequence.saved is None:
                sequence.masked = Masked(len(cached) * self.pool.block_size, self.mask_id)
                self._find_blocks(sequence, cached)
        return cached

    def _find_blocks(self, sequence: Sequence, cached: list[int]) -> None:
        """The blocks that follow these in the cache."""
        usable = (len(sequence.tokens) - 1) // self.pool.block_size
        while len(cached) < usable:
            end = min(2 * len(cached) + 1, usable)  # hashes take time, and often none is needed but the first
            for chain_hash in sequence.block_hashes(end)[len(cached) : end]:
                block = self.pool.find(chain_hash)
                if block is None:
                    return
                cached.append(block)

    def _prefixes_in_flight(self) -> set[bytes]:
        """Hashes of the full blocks that running prompts are about to compute."""
        hashes: set[bytes] = set()
        if self._config.enable_prefix_caching:
            for sequence in self.running:
                if sequence.num_pending > 1:
                    hashes.update(sequence.block_hashes()[sequence.num_computed // self.pool.block_size :])
        return hashes

    def _worth_waiting(self, sequence: Sequence, num_cached: int, in_flight: set[bytes]) -> bool:
        """Whether the next block this prompt needs is being computed right now by another one (`n` siblings, say)."""
        if not in_flight or sequence.wants_prompt_logprobs:
            return False
        if sequence.saved is not None and sequence.saved.num_tokens > num_cached * self.pool.block_size:
            return False  # it has that block itself
        usable = (len(sequence.tokens) - 1) // self.pool.block_size
        return num_cached < usable and sequence.block_hashes(num_cached + 1)[num_cached] in in_flight
