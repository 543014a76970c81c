"""One step: schedule -> run -> postprocess.

The engine owns its streams' tokens and KV. It knows nothing of processes, sockets or text.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, repeat
from time import monotonic
from typing import NamedTuple

import numpy as np
import torch

from everserve.config.engine import EngineConfig
from everserve.engine import integrity
from everserve.engine.ahead import Launched, Lead
from everserve.engine.batching import BatchLayout, wanted_rows
from everserve.engine.blocks import BlockPool
from everserve.engine.forward import Forward
from everserve.engine.journal import Journal
from everserve.engine.limits import EngineLimits
from everserve.engine.parking import Parking
from everserve.engine.regaining import KvElsewhere, Regained, Regainer
from everserve.engine.restoring import Restorer
from everserve.engine.saved import Restored, Saved
from everserve.engine.scheduler import Scheduler
from everserve.engine.sequence import Chunk, Sequence
from everserve.engine.speculation import Drafting
from everserve.engine.step_times import StepTimes
from everserve.engine.undo import UndoLog
from everserve.errors import KvLost, RequestError, StepAbandoned
from everserve.guides.guide import Guide
from everserve.kvlog.log import Log
from everserve.model.choosing import Draw
from everserve.model.ops import Ops
from everserve.model.sampling import GREEDY, NOT_A_NUMBER, draw, sample, token_logprobs
from everserve.tables.ids import Rank
from everserve.tables.outputs import EngineStats, Output, TokenLogprobs
from everserve.tables.prompts import PendingPrompt
from everserve.tables.requests import Masked, RequestSpec

_Next = tuple[Sequence, int, TokenLogprobs | None]  # a stream's next token, or NOT_A_NUMBER or NONE_ALLOWED


# A stream that has one more token, or has ended without one: it, the token's index, the token, why it has ended (or
# None), by which stop id, logprobs, and from where on its KV is not exact.
# Plain tuples, since they are made between two tokens of every stream.
_Advanced = tuple[Sequence, int, int | None, str | None, int | None, TokenLogprobs | None, Masked | None]


class Failure(NamedTuple):
    """A stream that cannot go on."""

    id: str
    reason: str
    is_dead_end: bool  # no token may come next: the request's own fault


@dataclass(frozen=True)
class StepResult:
    """What one step produced: streams that advanced, streams that failed, streams that were preempted, and
    streams whose KV was brought back. `kv_lost`: why the step was abandoned, because KV was not where it was needed;
    then nothing else has happened. `regained`: what became of the KV then, or before this step."""

    advanced: list[_Advanced]
    failed: list[Failure]
    preempted: list[Sequence]
    restored: list[Restored]
    kv_lost: str | None = None
    regained: Regained | None = None

    @cached_property
    def outputs(self) -> list[Output]:
        """Outputs for the streams' clients. Made when they are asked for: the next step need not wait for it."""
        return [_output(*advanced) for advanced in self.advanced]


class _Found(NamedTuple):
    """What a step has found out. Streams have their tokens, and nothing else has changed."""

    chunks: list[Chunk]  # what counts of those that were computed
    advanced: list[_Advanced]
    failed: list[Failure]
    ended: list[Sequence]


def _output(
    sequence: Sequence,
    index: int,
    token: int | None,
    finish_reason: str | None,
    stop_id: int | None,
    logprobs: TokenLogprobs | None,
    masked: Masked | None,
) -> Output:
    is_first = index == 0
    wants_scores = is_first and sequence.params.prompt_logprobs is not None
    return Output(
        id=sequence.id,
        index=index,
        token=token,
        finish_reason=finish_reason,
        stop_id=stop_id,
        logprobs=logprobs if token is not None else None,
        prompt_logprobs=sequence.prompt_logprobs if wants_scores else None,
        pooled=sequence.pooled if is_first else None,
        num_cached=sequence.num_cached if is_first else 0,
        queued_s=sequence.queued_s if is_first else 0.0,
        masked=masked,
    )


class Engine:
    """Advances many streams together. With a journal their KV is logged, and streams can be taken over from logs."""

    def __init__(
        self,
        config: EngineConfig,
        limits: EngineLimits,
        ops: Ops,
        forward: Forward,
        clock: Callable[[], float] = monotonic,
        journal: Journal | None = None,
        kv_elsewhere: KvElsewhere | None = None,
        drafting: Drafting | None = None,
    ) -> None:
        self.config = config
        self.limits = limits
        self._ops = ops
        self._forward = forward
        self._drafting = drafting
        self._clock = clock
        self._journal = journal
        self.times = StepTimes(clock)
        self._undo = UndoLog()
        self._layout = BatchLayout(config.block_size)
        self._decoding: list[Chunk] | None = None  # the last step's, if no prompt was in it
        self._greedy: tuple[list[Chunk], list[Draw]] = [], []  # the last step in which all tokens were most likely ones
        self._queued: Launched | None = None  # behind the step that has ended last: it is being computed
        self._lead = Lead()
        self._sequences: dict[str, Sequence] = {}
        self._num_steps = 0
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0
        self._num_known_tokens = 0
        self._num_drafts = self._num_draft_tokens = self._num_accepted_tokens = 0
        self._num_masked_tokens = 0
        self._num_unmasked_tokens = 0
        self._prefill_cost = 0
        self._load = (0, 0)  # of the step at hand: streams that decode, cost of everything else
        pool = BlockPool(limits.num_blocks, config.block_size, self._undo, limits.first_block)
        self._restorer = self._make_restorer(pool, journal) if journal is not None else None
        self.scheduler = Scheduler(config, limits, pool, self._undo, self._restorer, self._make_parking(journal))
        self._regained: Regained | None = None  # not told yet: the step after it was abandoned
        self._regainer = Regainer(kv_elsewhere, self.scheduler, journal, clock) if kv_elsewhere is not None else None

    def _make_restorer(self, pool: BlockPool, journal: Journal) -> Restorer:
        """Blocks of streams that our predecessor had may be asked for soon: they are the last to be taken."""
        shape, config = journal.log.shape, self.config
        end = self.limits.first_block + self.limits.num_blocks
        assert shape.num_blocks >= end and shape.block_size == config.block_size, "one pool, one log"
        assert shape.num_records >= 2 * config.max_num_seqs, "a predecessor's records need places too"
        for record in journal.adopted.values():
            pool.put_last(block for block in reversed(record.blocks) if pool.has(block))
        visible_keys = self.limits.visible_keys
        return Restorer(pool, self._undo, journal, config.enable_prefix_caching, self._clock, visible_keys)

    def _make_parking(self, journal: Journal | None) -> Parking | None:
        first, num = self.limits.parking
        if journal is None or not num:
            return None
        return Parking(BlockPool(num, self.config.block_size, self._undo, first), self._undo, journal)

    def alike(
        self, config: EngineConfig, limits: EngineLimits | None = None, drafting: Drafting | None = None
    ) -> "Engine":
        """Another one that computes with the same memory, if this one has no streams: for measurements. `limits`: if
        it has other blocks than another one."""
        assert not self.has_work and self._journal is None, "two engines would write into the same blocks"
        return Engine(config, limits or self.limits, self._ops, self._forward, self._clock, drafting=drafting)

    @property
    def has_work(self) -> bool:
        return bool(self._sequences) or self._queued is not None

    @property
    def is_ahead(self) -> bool:
        """Whether a step is on its way, between two calls of `step`."""
        return self._queued is not None

    def stream_ids(self) -> list[str]:
        """The ids of all streams, running and waiting."""
        return list(self._sequences)

    def add(self, spec: RequestSpec, saved: Saved | None = None, guide: Guide | None = None) -> None:
        """Accept a stream, or say why not. An accepted stream ends by finishing or by `cancel`, never by itself.

        `saved`: where a log has KV of it. Only KV: all else that a stream needs to go on is in its spec.
        `guide`: of the grammar in its spec, after the output that is known.
        """
        assert (guide is not None) == (spec.params.guided is not None), "a grammar has a guide"
        if spec.id in self._sequences:
            raise RequestError(f"a request with the id {spec.id!r} is running already")
        self._check(spec)
        sequence = Sequence(spec, self.config.block_size, added_s=self._clock(), guide=guide)
        if self._journal is not None and not sequence.wants_prompt_logprobs:
            sequence.saved = saved
        self._sequences[spec.id] = sequence
        self.scheduler.add(sequence)

    def _check(self, spec: RequestSpec) -> None:
        """Raise unless this stream can run to its end here; a resumed one, unless it could have come this far."""
        limits = self.limits
        limit = min(limits.max_model_len, limits.num_blocks * self.config.block_size)
        params, given = spec.params, spec.prompt + spec.known
        if not spec.prompt:
            raise RequestError("the prompt has no tokens")
        if len(given) + (params.max_tokens > 0) > limit:
            what = "prompt and known output have" if spec.known else "the prompt has"
            raise RequestError(f"{what} {len(given)} tokens; at most {limit - 1} fit")
        given_T = np.frombuffer(given, np.int32)
        if given_T.min() < 0 or given_T.max() >= limits.vocab_size:
            raise RequestError(f"token ids must be between 0 and {limits.vocab_size - 1}")
        num_most = min(len(spec.prompt) + params.max_tokens, limits.max_model_len)
        if num_most > limit:
            raise RequestError(f"prompt and output may have {num_most} tokens; the KV cache holds {limit}")
        if spec.known and len(spec.known) >= params.max_tokens:
            raise RequestError(
                f"{len(spec.known)} output tokens are known, of at most {params.max_tokens}: it has ended"
            )
        if not set(params.stop_ids).isdisjoint(spec.known):
            raise RequestError("the known output contains a stop id: it has ended")

    def waits_for(self, log: Log) -> bool:
        """Whether a stream is still to be restored from this log."""
        return any(sequence.saved is not None and sequence.saved.log is log for sequence in self._sequences.values())

    def cancel(self, id: str) -> bool:
        """Forget a stream; False if it has ended already."""
        sequence = self._sequences.get(id)
        if sequence is not None:
            self._end(sequence, is_delivered=True)
        return sequence is not None

    def cancel_all(self) -> None:
        """Forget every stream."""
        for id in list(self._sequences):
            self.cancel(id)

    def step(
        self,
        meanwhile: Callable[[], None] = lambda: None,
        may_go_ahead: bool = True,
        is_quiet: Callable[[], bool] | None = None,
    ) -> StepResult:
        """Advance. If the forward pass is abandoned (it raises), all streams are as they were before the call (one
        whose blocks were taken in it waits to be computed again). If KV was lost, all streams wait for that.

        `meanwhile` is called in every step, while a device computes if there is one.
        `may_go_ahead`: the next step may be launched too, and be on its way when this returns (ahead.py).
        `is_quiet`: asked as late as that allows, whether there is still nothing else to do in the next step.
        """
        began_s = self._clock()
        if self._queued is None:
            self.regain()
        try:
            step = self._take_queued() if self._queued is not None else self._begin()
            if step is None:
                meanwhile()
                return StepResult([], [], [], [], regained=self._take_regained())
            found = self._run(step, meanwhile, may_go_ahead, is_quiet)
        except KvLost as lost:
            self._abandon()
            return self._without_kv(str(lost))
        except BaseException:
            self._abandon()
            raise
        self._count(found.chunks)
        self.scheduler.commit(found.chunks)
        self._note_preempted()
        for sequence in self.scheduler.started:
            sequence.note_start(began_s)
        for sequence in found.ended:
            self._end(sequence, is_delivered=False)
        for failure in found.failed:
            self.cancel(failure.id)
        if self.scheduler.mask_id:
            self._num_masked_tokens += len(found.advanced)
        self._note_time(step, found)
        regained = self._take_regained()
        preempted = [*(regained.preempted if regained is not None else ()), *self.scheduler.preempted]
        return StepResult(found.advanced, found.failed, preempted, self.scheduler.restored, regained=regained)

    def forget_ahead(self) -> None:
        """Between two calls of `step`: wait for the end of a step that is on its way. It never happened."""
        queued, self._queued = self._queued, None
        if queued is not None:
            self.scheduler.forget_ahead()
            with suppress(StepAbandoned):
                queued.pending.read()

    def regain(self) -> None:
        """Between two steps: have KV where heads will be asked, if that is elsewhere now. StepAbandoned if workers are
        missing that have to fetch it; nothing has happened then."""
        if self._regainer is not None:
            self._regained = self._regainer.regain() or self._regained

    def use_mask(self, mask_id: int, masked: bytes = b"") -> None:
        """Between two steps: the router leaves these experts out from now on (`Routes.masked`). 0: no experts are
        masked. Then streams give up all KV that is not exact, and compute it again."""
        scheduler, journal = self.scheduler, self._journal
        if mask_id == scheduler.mask_id:
            return
        self.forget_ahead()
        if journal is not None:
            journal.settle()  # blocks are given up
        self._forward.use_mask(masked)
        before = {sequence.id: sequence.num_computed for sequence in scheduler.running}
        cut = scheduler.use_mask(mask_id)
        self._num_unmasked_tokens += sum(before[sequence.id] - sequence.num_computed for sequence in cut)
        if journal is not None:
            journal.cut(cut)

    @property
    def mask_id(self) -> int:
        """The number of the set of experts that are masked; 0: none are."""
        return self.scheduler.mask_id

    def log_step(self) -> None:
        """Say in the log how far streams have come. After each step, as soon as its outputs are on their way; that may
        be in the middle of the next one."""
        if self._journal is not None:
            self._journal.commit(self.scheduler.certain())

    def spare(self, blocks: Iterable[int]) -> None:
        """Between two steps: a predecessor's streams have KV in these blocks. They are the last to be taken."""
        pool = self.scheduler.pool
        pool.put_last([block for block in dict.fromkeys(blocks) if pool.has(block) and pool.is_forgotten(block)][::-1])

    def forget_adopted(self) -> None:
        """No stream that our predecessor in this log had will come to us any more, but those that came."""
        if self._journal is not None:
            self._journal.forget_adopted(but=self._sequences)

    def check(self) -> None:
        """Die loudly if the engine's tables contradict each other."""
        found = integrity.violations(self.scheduler, self._journal)
        assert not found, "; ".join(found)

    def share_prefill(self, home: Rank, others: Mapping[Rank, tuple[PendingPrompt, ...]]) -> None:
        """Other homes have these prompts to compute, on the same workers."""
        self.scheduler.share.use(home, others)

    def stats(self) -> EngineStats:
        scheduler, restorer, journal, regainer = self.scheduler, self._restorer, self._journal, self._regainer
        prompts = list(scheduler.pending_prompts())
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            kv_usage=scheduler.pool.num_used / scheduler.pool.num_blocks,
            num_steps=self._num_steps,
            num_preemptions=scheduler.num_preemptions,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generated_tokens=self._num_generated_tokens,
            prefix_cache_queries=scheduler.prefix_queries,
            prefix_cache_hits=scheduler.prefix_hits,
            num_known_tokens=self._num_known_tokens,
            num_restored_tokens=restorer.num_restored if restorer is not None else 0,
            num_broken_tokens=restorer.num_broken if restorer is not None else 0,
            log_lag_tokens=journal.lag(scheduler.running) if journal is not None else 0,
            num_captures=self._forward.num_captures,
            num_masked_tokens=self._num_masked_tokens,
            num_unmasked_tokens=self._num_unmasked_tokens,
            prefill_cost=self._prefill_cost,
            pending_prefill_cost=scheduler.share.cost.of_all(prompts),
            prompts=scheduler.share.first_of(prompts),
            num_regained_tokens=regainer.num_kept if regainer is not None else 0,
            num_lost_tokens=regainer.num_lost if regainer is not None else 0,
            num_regained_bytes=regainer.num_bytes if regainer is not None else 0,
            num_taken_back=scheduler.num_taken_back,
            num_drafts=self._num_drafts,
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_tokens=self._num_accepted_tokens,
        )

    def _note_time(self, step: Launched, found: _Found) -> None:
        """How long it took, for those who decide what the next steps should have."""
        seconds, has_drafts = self.times.end(), found.chunks is not step.chunks
        if not self.scheduler.restored and not has_drafts:
            self.scheduler.chunk_sizes.add(*self._load, seconds)
        if has_drafts:
            self._note_drafts(step.chunks, found.chunks)
        if self._drafting is not None and step.is_decoding:
            self._drafting.note(step.chunks, found.chunks, seconds)

    def _note_drafts(self, given: list[Chunk], counted: list[Chunk]) -> None:
        for before, after in zip(given, counted, strict=True):
            if before.drafts:
                self._num_drafts += 1
                self._num_draft_tokens += len(before.drafts)
                self._num_accepted_tokens += after.num_tokens - 1

    def _count(self, chunks: list[Chunk]) -> None:
        """This step happened."""
        self._num_steps += 1
        if chunks is self._decoding:
            self._load = (len(chunks), 0)
            return  # nearly always: streams that decode do so until they end
        cost, prompts = self.limits.token_cost, [chunk for chunk in chunks if chunk[1] > 1 and not chunk[3]]
        self._load = len(chunks) - len(prompts), sum(cost.of(c.sequence.num_computed, c.num_tokens) for c in prompts)
        given = [chunk for chunk in chunks if chunk[0].num_computed < chunk[0].num_given]
        self._decoding = chunks if not given else None
        for chunk in given:
            self._num_prompt_tokens += chunk.num_prompt_tokens
            self._num_known_tokens += chunk.num_known_tokens
            self._prefill_cost += cost.of(chunk.sequence.num_computed, chunk.num_tokens)

    def _begin(self) -> Launched | None:
        """Schedule a step and launch it. None: there is nothing to do. StepAbandoned if a stream could not be restored,
        because workers are missing that every step needs."""
        chunks = self.scheduler.schedule()
        assert chunks or not self._sequences, "there is work but nothing could be scheduled"
        if not chunks:
            return None
        is_decoding = self.scheduler.all_decode(chunks)
        if is_decoding and self._drafting is not None:
            drafts = self._drafting.drafts([chunk[0] for chunk in chunks])
            chunks = self.scheduler.with_drafts(chunks, drafts) if drafts else chunks
        rows = self._layout(chunks)
        if self._forward.chooses and not _has_drafts(chunks):
            rows = rows._replace(draws_L=self._draws(chunks))
        return Launched(chunks, rows, self._forward.launch(rows), is_decoding=is_decoding)

    def _take_queued(self) -> Launched:
        """The step that is on its way is the current one."""
        queued, self._queued = self._queued, None
        assert queued is not None
        self.scheduler.take_up()
        return queued.of_running()

    def _may_launch_behind(self, step: Launched) -> bool:
        if not self.config.launch_ahead or step.rows.draws_L is None or not self._forward.may_go_ahead:
            return False
        drafting = self._drafting
        return drafting is None or not drafting.may_have_drafts([chunk[0] for chunk in step.chunks])

    def _launch_behind(self, step: Launched) -> Launched | None:
        """The next step, before this one has ended; None if it must wait for that."""
        if not self._may_launch_behind(step):
            return None
        chunks = self.scheduler.schedule_ahead(step.chunks)
        if not chunks:
            return None
        rows = self._layout(chunks, step.num_ahead(chunks))
        rows = rows._replace(sources_T=step.sources(chunks), draws_L=self._draws(chunks, num_ahead=1))
        return Launched(chunks, rows, self._forward.launch(rows), is_decoding=True)

    def _draws(self, chunks: list[Chunk], num_ahead: int = 0) -> list[Draw] | None:
        """How the token of each chunk that completes its sequence is chosen, where logits need not be looked at. Its
        index is so much higher than the sequence says."""
        if chunks is self._greedy[0]:
            return self._greedy[1]  # nearly always: the streams of the last step
        sequences = [chunk[0] for chunk in chunks]
        if any([sequence.needs_logits for sequence in sequences]):  # noqa: C419 (a list is quicker)
            return None
        if all([sequence.is_plain for sequence in sequences]):  # noqa: C419
            self._greedy = chunks, [GREEDY] * sum([chunk[2] for chunk in chunks])
            return self._greedy[1]
        if not self._forward.draws:
            return None
        return [draw(chunk[0].params, chunk[0].num_output + num_ahead) for chunk in chunks if chunk[2]]

    def _has_time(self, step: Launched) -> bool:
        """Wait as long as the next step need not be launched. False if this one has to be read before that."""
        return step.pending.is_running_at(self._lead.launch_at(step.pending.due_s))

    def _run(
        self, step: Launched, meanwhile: Callable[[], None], may_go_ahead: bool, is_quiet: Callable[[], bool] | None
    ) -> _Found:
        """See it through, logging what is computed."""
        chunks, rows, journal = step.chunks, step.rows, self._journal
        num_rows = len(rows.positions_T)
        self.times.begin(num_rows, int(np.add.reduce(rows.positions_T)) + num_rows)
        if journal is not None and not journal.writer.is_on_device:
            journal.begin(chunks, rows)
        may_go_ahead = may_go_ahead and self._may_launch_behind(step)
        is_late = is_quiet is not None and self._lead.is_worth_waiting_for(step.pending.due_s)
        if may_go_ahead and not is_late:
            self._queued = self._lead.timed(self._launch_behind, step)
        meanwhile()
        if journal is not None and journal.writer.is_on_device:
            # What `meanwhile` is about is the step before this one, and its end must be in the log first.
            journal.begin(chunks, rows)
        if may_go_ahead and is_quiet is not None and is_late and self._has_time(step) and is_quiet():
            self._queued = self._lead.timed(self._launch_behind, step)
        read = step.pending.read()
        if isinstance(read, list):
            tokens = step.chosen(read)
            found = _Found(chunks, [], [], [])
            self._advance(zip([chunk[0] for chunk in chunks if chunk[2]], tokens, repeat(None)), found)
        elif _has_drafts(chunks):
            found = self._verify(chunks, read)
        else:
            self._pool(step)
            found = _Found(chunks, [], [], [])
            self._advance(self._read_logits(chunks, read), found)
        if journal is not None:
            journal.finish(found.chunks)
        return found

    def _abandon(self) -> None:
        self._queued = None
        self.scheduler.abandon()
        if self._journal is not None:
            self._journal.abandon(self.scheduler.waiting, self.scheduler.running)

    def _note_preempted(self) -> None:
        """Notes in the log that streams that were preempted have no blocks, or those in which they are parked."""
        if self._journal is None:
            return
        for sequence in self.scheduler.preempted:
            parked = self.scheduler.parked(sequence)
            if parked is not None:
                self._journal.park(sequence, parked.num_tokens, parked.blocks)
            else:
                self._journal.clear([sequence])

    def _without_kv(self, why: str) -> StepResult:
        """The step was abandoned, because KV is not where it was needed. Raises StepAbandoned if heads have no place:
        then the next step begins with this."""
        assert self._regainer is not None, "only KV that others keep can be lost"
        if self._regained is None:
            self._regained = self._regainer.regain()
        regained = self._take_regained()
        return StepResult([], [], regained.preempted if regained else [], [], kv_lost=why, regained=regained)

    def _take_regained(self) -> Regained | None:
        """What has not been told yet."""
        regained, self._regained = self._regained, None
        return regained

    def _end(self, sequence: Sequence, is_delivered: bool) -> None:
        del self._sequences[sequence.id]
        self.scheduler.remove(sequence)
        if self._journal is not None:
            self._journal.end(sequence, is_delivered)

    def _read_logits(self, chunks: list[Chunk], logits_LV: torch.Tensor) -> list[_Next]:
        """Choose a token for each chunk that completes its sequence, and score prompt rows where that is wanted."""
        if all([chunk[1] == 1 and chunk[2] for chunk in chunks]):  # noqa: C419 (a list is quicker)
            return self._choose([chunk[0] for chunk in chunks], logits_LV)  # nearly always: all streams decode
        completing: list[Sequence] = []
        last_rows: list[int] = []
        row = 0
        for chunk in chunks:
            sequence, num_tokens, completes, _ = chunk
            if completes and num_tokens == 1:  # prompt logprobs, if wanted, were computed before
                row += 1
            else:
                num_rows = len(wanted_rows(chunk, 0))
                if sequence.wants_prompt_logprobs:
                    self._score_prompt(chunk, logits_LV[row : row + num_rows])
                row += num_rows
            if completes:
                last_rows.append(row - 1)
                completing.append(sequence)
        if not completing:
            return []
        return self._choose(completing, logits_LV if len(last_rows) == len(logits_LV) else logits_LV[last_rows])

    def _verify(self, chunks: list[Chunk], logits_LV: torch.Tensor) -> _Found:
        """Draw each stream's tokens one after the other, as long as they are its drafts."""
        found = _Found([], [], [], [])
        first_rows = list(accumulate([chunk.num_tokens for chunk in chunks], initial=0))
        nums, left, row = [1] * len(chunks), list(range(len(chunks))), 0
        at_once = self._draw_at_once(chunks, logits_LV)
        while left:
            rows, sequences = [first_rows[i] + row for i in left], [chunks[i].sequence for i in left]
            results: list[_Next]
            if at_once is not None:
                results = [(s, at_once[at], None) for s, at in zip(sequences, rows, strict=True)]
            else:
                results = self._choose(sequences, logits_LV[rows])
            self._advance(results, found)
            over = {sequence.id for sequence in found.ended}
            left = [
                i
                for i, (sequence, token, _) in zip(left, results, strict=True)
                if chunks[i].drafts[row : row + 1] == (token,) and sequence.id not in over
            ]
            row += 1
            for i in left:
                nums[i] = row + 1
        found.chunks.extend([chunk._replace(num_tokens=num) for chunk, num in zip(chunks, nums, strict=True)])
        return found

    def _draw_at_once(self, chunks: list[Chunk], logits_LV: torch.Tensor) -> list[int] | None:
        """The tokens of all rows, if none depends on those before it but by its logits and its index."""
        if any([chunk[0].needs_logits for chunk in chunks]):  # noqa: C419 (a list is quicker)
            return None
        indices = [(chunk[0], chunk[0].num_output + at) for chunk in chunks for at in range(chunk[1])]
        return self._ops.choose(logits_LV, [draw(sequence.params, index) for sequence, index in indices])

    def _choose(self, sequences: list[Sequence], logits_LV: torch.Tensor) -> list[_Next]:
        if all([sequence.is_plain for sequence in sequences]):  # noqa: C419 (a list is quicker)
            tokens = self._ops.choose(logits_LV, [GREEDY] * len(sequences))
            return list(zip(sequences, tokens, repeat(None)))
        choices = sample(self._ops, logits_LV, [sequence.sampling_row() for sequence in sequences])
        return [(sequence, *choice) for sequence, choice in zip(sequences, choices, strict=True)]

    def _pool(self, step: Launched) -> None:
        """Keep what prompts that are complete now say, where that is wanted instead of tokens. From the step's hidden
        states, which the next one overwrites."""
        ends = step.rows.query_starts_S
        wanted = {
            int(ends[i + 1]) - 1: chunk[0] for i, chunk in enumerate(step.chunks) if chunk[2] and chunk[0].is_pooled
        }
        if wanted:
            pooled_LD = step.pending.pooled(list(wanted)).numpy()
            for sequence, pooled_D in zip(wanted.values(), pooled_LD, strict=True):
                sequence.pooled = pooled_D.tobytes()

    def _score_prompt(self, chunk: Chunk, logits_LV: torch.Tensor) -> None:
        """Logprobs of the prompt tokens that this chunk's rows predict: row j predicts token j + 1."""
        sequence = chunk.sequence
        first = sequence.num_computed + 1
        targets = sequence.tokens[first : min(first + chunk.num_tokens, sequence.num_prompt)].tolist()
        scores = token_logprobs(logits_LV[: len(targets)], targets, sequence.params.prompt_logprobs or 0)
        sequence.prompt_logprobs[first : first + len(scores)] = scores

    def _advance(self, results: Iterable[_Next], found: _Found) -> None:
        """Extend streams by what the step found. Those whose last token this was end with the step."""
        _, advanced, failed, ended = found
        max_model_len = self.limits.max_model_len
        for sequence, token, logprobs in results:
            if token < 0:
                failed.append(_failure(sequence, token))
                continue
            params, num_tokens = sequence.params, len(sequence.tokens)
            index = num_tokens - sequence.num_prompt
            if params.max_tokens == 0:
                advanced.append((sequence, index, None, "length", None, logprobs, sequence.masked))
                ended.append(sequence)
                continue
            sequence.append(token)
            self._num_generated_tokens += 1
            finish = stop_id = None
            if token in params.stop_ids and index + 1 >= params.min_tokens:
                finish, stop_id = "stop", token
            elif index + 1 >= params.max_tokens or num_tokens + 1 >= max_model_len:
                finish = "length"
            advanced.append((sequence, index, token, finish, stop_id, logprobs, sequence.masked))
            if finish is not None:
                ended.append(sequence)
            elif sequence.guide is not None:
                sequence.guide.advance(token)


def _has_drafts(chunks: list[Chunk]) -> bool:
    return any([chunk[3] for chunk in chunks])  # noqa: C419 (a list is quicker)


def _failure(sequence: Sequence, token: int) -> Failure:
    if token == NOT_A_NUMBER:
        reason = "the model's output is not a number: broken weights, or a dtype too narrow"
        return Failure(sequence.id, reason, is_dead_end=False)
    why = sequence.guide.why_empty if sequence.guide is not None else "bad_words leave no token"
    return Failure(sequence.id, f"the stream cannot go on after {sequence.num_output} tokens: {why}", is_dead_end=True)
