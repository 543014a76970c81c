"""Exactly once: a client's token streams, by token index.

    waiting --bind--> running --> token 0 --> token 1 --> ... --> finished     (or failed, or cancelled, at any point)
       ^--its worker is lost, or leaves--'
       '---its client comes back--- suspended <--its client is gone, and may come back-- waiting or running

A stream outlives the workers that run it: it remembers every token that its client has, and goes on from there
elsewhere. A listener sees every token of its stream once and in order. An output that was delivered before is dropped
and counted; if it contradicts what was delivered, an event reports it. A gap means that a token is
lost: the stream fails, because what follows would be wrong. Outputs for streams that are no longer in the table
(cancelled, finished by a stop string) are late, not wrong: they are dropped.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from everserve.errors import EverserveError, RequestError
from everserve.gateway.streams.log_references import LostLogs
from everserve.gateway.streams.metrics import EngineMetrics, FleetMetrics
from everserve.ledger.writer import LEFT, WRITTEN, write
from everserve.plan.fairness import Places
from everserve.plan.prefill import KEYS_ONLY
from everserve.tables.ids import Rank, WorkerId
from everserve.tables.outputs import Output
from everserve.tables.requests import Masked, RequestSpec

if TYPE_CHECKING:
    from everserve.gateway.streams.links import WorkerLink
    from everserve.gateway.streams.plain import PlainStream

log = logging.getLogger(__name__)


class StreamListener(Protocol):
    """Receives a stream's outputs. After `on_failure`, or an output with a finish reason, nothing more comes."""

    def on_output(self, output: Output, now_s: float) -> None: ...

    def on_failure(self, error: EverserveError) -> None: ...


class StreamBroken(EverserveError):
    """One stream cannot go on and it is our fault; a new request may work."""


class Stream:
    """One token stream, from its client's request to its end."""

    __slots__ = (
        *(
            "group",
            "home",
            "is_first",
            "last_s",
            "link",
            "listener",
            "lost_s",
            "masked",
            "metrics",
            "moved_s",
            "num_losses",
            "plain",
        ),
        *("num_expected", "parted_rank", "prefill_cost", "source", "spec", "submitted_s", "tokens", "waited_s"),
    )

    def __init__(self, spec: RequestSpec, listener: StreamListener) -> None:
        self.spec = spec
        self.listener = listener
        self.tokens: list[int] = []  # what the client has
        self.masked: Masked | None = None  # what its worker said of its KV with the last token
        self.group = 0  # siblings have the same number
        self.plain: PlainStream | None = None  # C writes its events; only while a worker runs it
        self.link: WorkerLink | None = None  # None while it waits or is suspended, and after its end
        self.home: WorkerId | None = None  # that said its last token
        self.metrics: EngineMetrics  # of the rank that runs it, or ran it last; set by the fleet
        self.prefill_cost = 0  # of the tokens that its worker must compute before the next output
        self.num_expected = 0  # tokens that are still to come; an estimate
        self.submitted_s = 0.0
        self.waited_s = 0.0  # before it was given to its first worker
        self.last_s: float | None = None  # when its last token came
        # These six are about a stream that had a worker, until it goes on: until the next output.
        self.num_losses = 0  # workers (poison.py)
        self.is_first = False  # its client is in the middle of an answer: it is bound before streams that are new
        self.lost_s: float | None = None  # when it lost its worker
        self.moved_s: float | None = None  # when its worker gave it back
        self.parted_rank: Rank | None = None  # of that worker
        self.source: WorkerId | None = None  # the worker with a log that may have its KV; set by log_references.py

    @property
    def num_given(self) -> int:
        """Tokens that the next one follows."""
        return len(self.spec.prompt) + len(self.tokens)

    def leave_plain(self) -> None:
        """Python has its text and its connection again, with all tokens so far."""
        if self.plain is not None:
            assert self.link is not None
            self.link.streams.write_plain()
        plain, self.plain = self.plain, None
        if plain is not None:
            plain.leave()

    def mark_lost(self, rank: Rank, now_s: float) -> None:
        """Its worker is gone. A second loss before it went on belongs to the same stall."""
        self.is_first, self.parted_rank, self.moved_s = True, rank, None
        self.num_losses += 1
        if self.lost_s is None:
            self.lost_s = now_s

    def mark_moved(self, rank: Rank, now_s: float) -> None:
        """Its worker has given it back."""
        self.is_first, self.parted_rank = True, rank
        if self.moved_s is None:
            self.moved_s = now_s

    def mark_suspended(self) -> None:
        """No client waits for its next output. How many workers it has lost in a row still counts."""
        self.is_first, self.lost_s, self.moved_s = False, None, None

    def mark_going_on(self) -> None:
        """The first output from its worker."""
        self.mark_suspended()
        self.num_losses = 0


def count_blocks(siblings: Sequence[Stream], block_size: int) -> int:
    """How many KV blocks these streams fill now. They have one prompt, and share the blocks that it fills."""
    num_prompt = len(siblings[0].spec.prompt)
    num_shared = num_prompt // block_size
    return num_shared + sum(-(-(num_prompt + len(s.tokens) + 1) // block_size) - num_shared for s in siblings)


# A token that has come for a plain stream, and is not written: when, and how long after the one before.
_PlainToken = tuple["PlainStream", Stream, Output, int, float, float]


class StreamTable:
    """The streams that run at one worker, and how much work they are."""

    def __init__(
        self,
        totals: FleetMetrics,
        logs: LostLogs,
        on_divergence: Callable[[Stream, Output], None],
        on_broken: Callable[[Stream, EverserveError], None] = lambda stream, error: None,
        on_removed: Callable[[Stream], None] = lambda stream: None,
    ) -> None:
        self.cost = KEYS_ONLY
        self.places = Places()
        self.prefill_cost = 0  # of prompts without an answer, as if nothing of them were computed
        self._num_expected = self._num_keys = 0  # tokens that are still to come; tokens that there are
        self._streams: dict[str, Stream] = {}
        self._totals = totals
        self._logs = logs
        self._on_divergence = on_divergence
        self._on_broken = on_broken
        self._on_removed = on_removed
        self._plain: list[_PlainToken] = []  # that have come, and are not written
        self._broken: list[str] = []

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[Stream]:
        return iter(self._streams.values())

    def __contains__(self, stream_id: str) -> bool:
        return stream_id in self._streams

    @property
    def decode_cost(self) -> int:
        """The cost of the tokens that are still to come, with as many keys as streams have now."""
        return self._num_expected * (self.cost.constant + self._num_keys // max(1, len(self._streams)))

    def add(self, stream: Stream) -> None:
        assert stream.spec.id not in self._streams, f"two streams with the id {stream.spec.id}"
        num_given = stream.num_given
        stream.prefill_cost = self.cost.of(0, num_given)
        stream.num_expected = self._totals.answer_lengths.expect(stream.spec.params, len(stream.tokens))
        self.prefill_cost += stream.prefill_cost
        self._num_expected += stream.num_expected
        self._num_keys += num_given
        self._streams[stream.spec.id] = stream
        self.places.take(stream.spec.flow)

    def remove(self, stream: Stream) -> None:
        """It ends here: finished, failed, cancelled, given back or lost."""
        if stream.plain is not None:
            stream.leave_plain()
        del self._streams[stream.spec.id]
        self.prefill_cost -= stream.prefill_cost
        self._num_expected -= stream.num_expected
        self._num_keys -= stream.num_given
        self.places.give(stream.spec.flow)
        stream.link = None
        self._on_removed(stream)

    def remove_all(self) -> list[Stream]:
        """Every stream, oldest first: the worker is gone, or leaves."""
        streams = list(self._streams.values())
        for stream in streams:
            self.remove(stream)
        return streams

    def deliver(self, outputs: list[Output], now_s: float) -> list[str]:
        """Hand each output to its listener, or drop it. Returns the streams that broke; the worker may forget them.
        Tokens of plain streams wait for `write_plain`."""
        broken = self.take_broken()
        num_tokens, gaps = 0, []
        for output in outputs:
            stream = self._streams.get(output.id)
            if stream is None:
                continue  # late
            tokens, token = stream.tokens, output.token
            plain, is_next = stream.plain, output.index == len(tokens)
            if plain is not None:
                if is_next and token is not None and output.finish_reason is None and output.masked is None:
                    gap_s = now_s - (stream.last_s or now_s)
                    self._plain.append((plain, stream, output, token, now_s, gap_s))
                    self._note_token(stream, token)
                    stream.masked, stream.last_s = None, now_s
                    if gap_s > 0:
                        gaps.append(gap_s)
                    num_tokens += 1
                    continue
                stream.leave_plain()
            if not is_next:
                if output.index < len(tokens):
                    self._totals.num_stale += 1
                    if token is not None and token != tokens[output.index] and output.masked is stream.masked is None:
                        self._on_divergence(stream, output)
                    continue
                broken.append(output.id)
                self.fail(output.id, StreamBroken(f"Token {len(tokens)} of this stream was lost."))
                continue
            if stream.prefill_cost:
                self._note_answer(stream, now_s)
            stream.masked = output.masked
            if token is not None:
                self._note_token(stream, token)
                num_tokens += 1
                if stream.last_s is not None and now_s > stream.last_s:  # tokens that come together end one gap
                    gaps.append(now_s - stream.last_s)
                stream.last_s = now_s
            if output.finish_reason is not None:
                if stream.spec.params.max_tokens:
                    self._totals.answer_lengths.note(len(tokens))
                self.remove(stream)
            self._hand(stream, output, now_s)
        self._totals.cadence.note(now_s, num_tokens, gaps)
        return broken + self.take_broken()

    def _note_token(self, stream: Stream, token: int) -> None:
        stream.tokens.append(token)
        self._num_keys += 1
        if stream.num_expected > 1:
            stream.num_expected -= 1
            self._num_expected -= 1

    def take_broken(self) -> list[str]:
        """Streams that broke since the last look."""
        broken, self._broken = self._broken, []
        return broken

    def write_plain(self) -> None:
        """Writes what has come for plain streams, however many steps it is of: one send for each."""
        if not self._plain:
            return
        waiting, self._plain = self._plain, []
        outcomes = write([each[0].address for each in waiting], [each[3] for each in waiting])
        written = waiting
        if outcomes:
            written = [each for each, outcome in zip(waiting, outcomes, strict=True) if outcome != LEFT]
            for each, outcome in zip(waiting, outcomes, strict=True):
                if outcome != WRITTEN:
                    self._write_rest(each, is_written=outcome != LEFT)
        if written:
            metrics = written[0][1].metrics
            metrics.num_generation_tokens += len(written)
            metrics.inter_token_latency_s.observe_all([each[5] for each in written])

    def _write_rest(self, waiting: "_PlainToken", is_written: bool) -> None:
        """What C has left to Python: this token, or bytes that the client does not take yet."""
        plain, stream, output, token, now_s, gap_s = waiting
        if stream.plain is plain:
            stream.plain = None
            plain.leave()
        if not is_written:
            plain.hand_back(token, now_s - gap_s)
            self._hand(stream, output, now_s)

    def _hand(self, stream: Stream, output: Output, now_s: float) -> None:
        try:
            stream.listener.on_output(output, now_s)
        except Exception:  # our own bug: it costs this stream, not the rest of the step
            log.exception("a stream broke")
            self._broken.append(output.id)
            if stream.link is not None:
                self.remove(stream)
            self._break(stream, StreamBroken("Internal server error."))

    def fail(self, stream_id: str, error: EverserveError) -> None:
        """End one stream with an error; nothing happens if it has ended."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            self.remove(stream)
            self._logs.release(stream)
            self._break(stream, error)

    def reject(self, stream_id: str, reason: str, is_server_fault: bool, is_dead_end: bool = False) -> None:
        """The worker will not run it. Once a client has tokens, its request cannot be what is wrong, but for one that
        leaves no token to come next."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            is_ours = is_server_fault or (stream.tokens and not is_dead_end)
            error = StreamBroken if is_ours else RequestError
            self.fail(stream_id, error(reason))

    def _break(self, stream: Stream, error: EverserveError) -> None:
        if isinstance(error, StreamBroken):
            self._on_broken(stream, error)
        stream.listener.on_failure(error)

    def _note_answer(self, stream: Stream, now_s: float) -> None:
        """The first output from this worker: everything that was given is computed, and a stall is over."""
        self.prefill_cost -= stream.prefill_cost
        stream.prefill_cost = 0
        if stream.lost_s is not None:
            self._totals.stall_s.observe(now_s - stream.lost_s)
        stream.mark_going_on()
        self._logs.release(stream)  # what this worker has is at least as much
