"""The channel to one worker: streams out, tokens in.

    attached --WorkerReady--> ready --GivenBack--> leaving --EOF--> closed
        '---------------fence---'---------> fenced ------'

A *leaving* link has given its streams back and gets no others. A *fenced* link belongs to an incarnation that was
declared gone although its process may still run: it may be stopped, and wake up later. The link is read until its end
so that its messages can be counted; none of them is used.
"""

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from everserve.errors import EverserveError, ProtocolError
from everserve.gateway.streams.log_references import LostLogs
from everserve.gateway.streams.metrics import EngineMetrics, FleetMetrics
from everserve.gateway.streams.others import Others
from everserve.gateway.streams.prefixes import Prefixes, block_chains
from everserve.gateway.streams.stream import Stream, StreamTable, count_blocks
from everserve.guides.compiling import VERSION
from everserve.plan.prefill import TokenCost
from everserve.plan.spread import Room
from everserve.tables.ids import Incarnation, Rank, WorkerId
from everserve.tables.outputs import AttentionLoad, EngineStats, Output
from everserve.tables.prompts import PendingPrompt
from everserve.tables.requests import Flow, as_tokens
from everserve.wire.channel import Channel, ChannelClosed
from everserve.wire.messages import (
    AnyMessage,
    Cancel,
    GivenBack,
    PrefillsPending,
    Rejected,
    StepOutput,
    Submit,
    WorkerReady,
)


class LinkOwner(Protocol):
    """The fleet, as a link sees it."""

    totals: FleetMetrics
    logs: LostLogs
    clock: Callable[[], float]
    others: Others

    def on_ready(self, link: "WorkerLink") -> None: ...

    def on_given_back(self, link: "WorkerLink") -> None:
        """Its streams must go on elsewhere."""
        ...

    def on_divergence(self, link: "WorkerLink", stream: Stream, output: Output) -> None: ...

    def on_broken(self, link: "WorkerLink", stream: Stream, error: EverserveError) -> None:
        """It cannot go on, by our fault."""
        ...

    def on_removed(self, stream: Stream) -> None:
        """It runs no more at its worker, whose place is free."""
        ...

    def on_step(self) -> None:
        """Streams may have ended."""
        ...

    def on_stats(self, link: "WorkerLink") -> None: ...

    def on_bad_bytes(self, num_dropped: int) -> None:
        """Once per link."""
        ...

    def on_end(self, link: "WorkerLink") -> None: ...


class WorkerLink:
    """One incarnation of one rank: its channel and the streams that it runs for us.

    The channel is read by a callback, not a task: a step's outputs reach their streams without a switch in between.
    """

    def __init__(
        self, rank: Rank, incarnation: Incarnation, sock: socket.socket, metrics: EngineMetrics, owner: LinkOwner
    ) -> None:
        self.rank = rank
        self.incarnation = incarnation
        self.metrics = metrics
        self.streams = StreamTable(
            owner.totals,
            owner.logs,
            lambda stream, output: owner.on_divergence(self, stream, output),
            lambda stream, error: owner.on_broken(self, stream, error),
            self._on_removed,
        )
        self.ready: WorkerReady | None = None
        self.prefixes: Prefixes | None = None  # that it has cached
        self.stats: EngineStats | None = None
        self.is_leaving = False
        self.is_fenced = False
        self.num_stale = 0  # messages since it was fenced
        self._num_blocks_given = 0  # to streams, since the last stats
        self._num_given = 0  # streams
        self._unseen: deque[PendingPrompt] = deque()  # the prompts of the last of them, which it has not reported yet
        self._unseen_cost = 0  # of all of these
        self.told: dict[Rank, tuple[PendingPrompt, ...]] = {}  # which prompts other homes have, as we said last
        self._unsent: list[Stream] = []  # submitted, and still to be sent
        self._owner = owner
        self._channel = Channel(sock)
        self._loop = asyncio.get_running_loop()
        self._is_writing = False
        self._said_bad_bytes = False
        self._loop.add_reader(sock, self.read)

    @property
    def log(self) -> WorkerId:
        """The worker's KV log."""
        return WorkerId(self.rank, self.incarnation)

    @property
    def is_open(self) -> bool:
        """Whether it may get streams."""
        return self.ready is not None and not self.is_leaving

    @property
    def shares_workers(self) -> bool:
        """Whether other homes use the same expert workers."""
        return self.ready is not None and self.ready.shares_workers

    def can_run(self, stream: Stream) -> bool:
        """Whether it would say the same as any other: grammars are followed by the version that the gateway has."""
        return stream.spec.params.guided is None or (self.ready is not None and self.ready.guides == VERSION)

    @property
    def max_total_tokens(self) -> int:
        """How many tokens, prompt and output together, one stream can have here."""
        assert self.ready is not None
        return min(self.ready.max_model_len, self.ready.num_blocks * self.ready.block_size)

    @property
    def capacity(self) -> int:
        """Streams at a time: its batch, and a few more, so that no place in it stays empty until the next message.

        Not more: streams that wait in the gateway can go to the first worker with room, and are not lost with this one.
        But for requests that have no place anywhere (`has_part_for`).
        """
        assert self.ready is not None
        return self.ready.max_num_seqs + max(4, self.ready.max_num_seqs // 4)

    @property
    def num_free(self) -> int:
        """So many more streams can it be given; negative if it has some beyond its capacity."""
        return self.capacity - len(self.streams) - self._owner.others.given(self.log)

    def has_part_for(self, flow: Flow) -> bool:
        """Whether it would take a place in its batch from other requests for this one, which has none there."""
        assert self.ready is not None
        places = self.streams.places
        num_requests = places.num_requests(flow) + self._owner.others.requests_at(self.log)
        return num_requests < places.part(flow, self.ready.max_num_seqs)

    @property
    def room(self) -> Room:
        """What more it can take, as far as we know: its last report, and what it was given since."""
        assert self.ready is not None
        usage = self.stats.kv_usage if self.stats is not None else 0.0
        return Room(
            rank=self.rank,
            num_streams_free=self.num_free,
            num_free_blocks=round((1.0 - usage) * self.ready.num_blocks) - self._num_blocks_given,
            owed=self._prefill_cost + self._decode_cost,
        )

    def saved(self, blocks: Sequence[int]) -> int:
        """What it need not compute of a prompt of these blocks. Nothing if it looks nothing up in a cache."""
        if self.prefixes is None or self.stats is None or not self.stats.prefix_cache_queries:
            return 0
        return self.streams.cost.of(0, self.prefixes.num_cached(blocks) * self.prefixes.block_size)

    @property
    def _prefill_cost(self) -> int:
        """The cost of prompts as reported, and of what was given since; what is answered or cancelled is no work."""
        reported = self.stats.pending_prefill_cost if self.stats is not None else 0
        if self._owner.others.given(self.log):
            return reported + self._unseen_cost
        return min(self.streams.prefill_cost, reported + self._unseen_cost)

    @property
    def _decode_cost(self) -> int:
        """The cost of the streams of all gateways, as if those of the others were like ours."""
        num_others = self._owner.others.given(self.log)
        if not num_others:
            return self.streams.decode_cost
        if not len(self.streams):
            return num_others * round(self._owner.totals.answer_lengths.mean) * self.streams.cost.constant
        return self.streams.decode_cost * (len(self.streams) + num_others) // len(self.streams)

    @property
    def prompts(self) -> tuple[PendingPrompt, ...]:
        """The prompts that it has still to compute: the next of them, as far as we know."""
        return (*(self.stats.prompts if self.stats is not None else ()), *self._unseen)

    @property
    def load(self) -> AttentionLoad:
        """What it has, as far as we know."""
        assert self.ready is not None
        num_free = max(0, self.room.num_free_blocks)
        num_used = max(0, self.ready.num_blocks - num_free)
        return AttentionLoad(num_streams=len(self.streams), num_used_blocks=num_used, num_free_blocks=num_free)

    def submit(self, siblings: Sequence[Stream]) -> None:
        """Start streams, or continue them after the tokens that their client has. They are sent by `send_submitted`."""
        assert self.ready is not None
        self._num_blocks_given += count_blocks(siblings, self.ready.block_size)
        self._note_prefix(siblings[0])
        for stream in siblings:
            stream.link, stream.metrics = self, self.metrics
            self.streams.add(stream)
            self._unseen.append(PendingPrompt(0, stream.num_given))
            self._unseen_cost += stream.prefill_cost
        self._num_given += len(siblings)
        self._unsent += siblings
        self._note_given()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send_submitted(self) -> None:
        """Each says how many come behind it: the worker begins with all of them at once."""
        unsent, self._unsent = self._unsent, []
        for num_sent, stream in enumerate(unsent, start=1):
            spec = stream.spec
            if stream.tokens:
                spec = spec.after(stream.tokens, stream.masked)
            source = stream.source if stream.source != self.log else None
            self._send(Submit(spec=spec, source=source, num_following=len(unsent) - num_sent))

    def tell_prompts(self, others: dict[Rank, tuple[PendingPrompt, ...]]) -> None:
        """What other homes have still to compute, on the same workers. Only news is sent."""
        if others != self.told:
            self.told = others
            self._send(PrefillsPending(homes=others))

    def cancel(self, stream: Stream) -> None:
        """The client of this stream has left, or needs no more of it."""
        self.streams.remove(stream)
        self._send(Cancel(id=stream.spec.id))

    def fence(self) -> None:
        """Use nothing more of what comes, and send nothing more."""
        self.is_fenced = True
        self.ready = None
        self._loop.remove_writer(self._channel.sock)

    def close(self) -> None:
        self.ready = None
        self._loop.remove_reader(self._channel.sock)
        self._loop.remove_writer(self._channel.sock)
        self._channel.close()

    def read(self) -> None:
        """Handle what has arrived, or the end of the channel."""
        try:
            messages = self._channel.receive_all()
        except (ChannelClosed, ProtocolError, OSError):  # at its end, or out of step: no more can come of it
            self._owner.on_end(self)
            return
        if self.is_fenced:
            self.num_stale += len(messages)
            self._owner.totals.num_stale += len(messages)
            return
        now_s = self._owner.clock()  # of all of them: steps that come together end one gap of their clients
        for message in messages:
            self._handle(message, now_s)
        self.streams.write_plain()
        for stream_id in self.streams.take_broken():
            self._send(Cancel(id=stream_id))
        if self._channel.num_dropped and not self._said_bad_bytes:
            self._said_bad_bytes = True
            self._owner.on_bad_bytes(self._channel.num_dropped)

    def _handle(self, message: AnyMessage, now_s: float) -> None:
        if isinstance(message, StepOutput):
            self._note_stats(message.stats)
            for stream_id in self.streams.deliver(message.outputs, now_s):
                self._send(Cancel(id=stream_id))
            self._owner.on_stats(self)
            self._owner.on_step()
        elif isinstance(message, Rejected):
            self.streams.reject(message.id, message.reason, message.is_server_fault, message.is_dead_end)
            self._owner.on_step()
        elif isinstance(message, GivenBack):
            self.is_leaving = True
            self._owner.on_given_back(self)
        elif isinstance(message, WorkerReady) and (message.rank, message.incarnation) == self.log:
            self.ready, self.streams.cost = message, TokenCost(message.token_cost)
            self.prefixes = Prefixes(message.block_size, message.num_blocks)
            if self.is_open:
                self._owner.on_ready(self)
        else:
            self._channel.num_dropped += 1  # one of our messages, but not one that this worker sends

    def _note_given(self) -> None:
        if self._owner.others.looks_again:
            self._owner.others.note_given(self.log, len(self.streams), self.streams.places.num_of_all)

    def _note_prefix(self, stream: Stream) -> None:
        """It has the blocks of this stream, or will have them. What is not exact is found under its mask only."""
        if self.prefixes is not None and stream.masked is None:
            tokens = stream.spec.prompt + as_tokens(stream.tokens)
            self.prefixes.add(block_chains(tokens, self.prefixes.block_size, stream.spec.cache_salt))

    def _on_removed(self, stream: Stream) -> None:
        self._note_prefix(stream)
        self._note_given()
        self._owner.on_removed(stream)

    def _note_stats(self, stats: EngineStats) -> None:
        self.metrics.note_steps(self.stats, stats)
        self.stats, self._num_blocks_given = stats, 0
        while len(self._unseen) > max(0, self._num_given - stats.num_received):
            self._unseen_cost -= self.streams.cost.of(*self._unseen.popleft())

    def _send(self, message: Submit | Cancel | PrefillsPending) -> None:
        self._channel.send(message)
        if self._channel.wants_write and not self._is_writing:
            self._is_writing = True
            self._loop.add_writer(self._channel.sock, self._on_writable)

    def _on_writable(self) -> None:
        self._channel.flush()
        if not self._channel.wants_write:
            self._is_writing = False
            self._loop.remove_writer(self._channel.sock)
