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
from everserve.gateway.streams.stream import Stream, StreamTable, count_blocks
from everserve.plan.prefill import TokenCost
from everserve.plan.spread import Room
from everserve.tables.ids import Incarnation, Rank, WorkerId
from everserve.tables.outputs import AttentionLoad, EngineStats, Output
from everserve.tables.prompts import PendingPrompt
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

    def on_ready(self, link: "WorkerLink") -> None: ...

    def on_given_back(self, link: "WorkerLink") -> None:
        """Its streams must go on elsewhere."""
        ...

    def on_divergence(self, link: "WorkerLink", stream: Stream, output: Output) -> None: ...

    def on_broken(self, link: "WorkerLink", stream: Stream, error: EverserveError) -> None:
        """It cannot go on, by our fault."""
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
        )
        self.ready: WorkerReady | None = None
        self.stats: EngineStats | None = None
        self.is_leaving = False
        self.is_fenced = False
        self.num_stale = 0  # messages since it was fenced
        self._num_blocks_given = 0  # to streams, since the last stats
        self._num_given = 0  # streams
        self._unseen: deque[PendingPrompt] = deque()  # the prompts of the last of them, which it has not reported yet
        self._unseen_cost = 0  # of all of these
        self.told: dict[Rank, tuple[PendingPrompt, ...]] = {}  # which prompts other homes have, as we said last
        self.turn = 0  # when it was last given a stream: counted by the fleet
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

    @property
    def max_total_tokens(self) -> int:
        """How many tokens, prompt and output together, one stream can have here."""
        assert self.ready is not None
        return min(self.ready.max_model_len, self.ready.num_blocks * self.ready.block_size)

    @property
    def capacity(self) -> int:
        """Streams at a time: its batch, and a few more, so that no place in it stays empty until the next message.

        Not more: streams that wait in the gateway can go to the first worker with room, and are not lost with this one.
        """
        assert self.ready is not None
        return self.ready.max_num_seqs + max(4, self.ready.max_num_seqs // 4)

    @property
    def room(self) -> Room:
        """What more it can take, as far as we know: its last report, and what it was given since."""
        assert self.ready is not None
        usage = self.stats.kv_usage if self.stats is not None else 0.0
        return Room(
            rank=self.rank,
            num_streams_free=self.capacity - len(self.streams),
            num_free_blocks=round((1.0 - usage) * self.ready.num_blocks) - self._num_blocks_given,
            owed=self._prefill_cost + self.streams.decode_cost,
        )

    @property
    def _prefill_cost(self) -> int:
        """As it was reported, and of what it was given since; what is answered or cancelled is no work in any case."""
        reported = self.stats.pending_prefill_cost if self.stats is not None else 0
        return min(self.streams.prefill_cost, reported + self._unseen_cost)

    @property
    def prompts(self) -> tuple[PendingPrompt, ...]:
        """That it has still to compute: the next of them, as far as we know."""
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
        for stream in siblings:
            stream.link, stream.metrics = self, self.metrics
            self.streams.add(stream)
            self._unseen.append(PendingPrompt(0, stream.num_given))
            self._unseen_cost += stream.prefill_cost
        self._num_given += len(siblings)
        self._unsent += siblings

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
            self._send(Submit(spec=spec, source=stream.source, num_following=len(unsent) - num_sent))

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
        for message in messages:
            self._handle(message)
        if self._channel.num_dropped and not self._said_bad_bytes:
            self._said_bad_bytes = True
            self._owner.on_bad_bytes(self._channel.num_dropped)

    def _handle(self, message: AnyMessage) -> None:
        if isinstance(message, StepOutput):
            self._note_stats(message.stats)
            for stream_id in self.streams.deliver(message.outputs, self._owner.clock()):
                self._send(Cancel(id=stream_id))
            self._owner.on_stats(self)
            self._owner.on_step()
        elif isinstance(message, Rejected):
            self.streams.reject(message.id, message.reason, message.is_server_fault)
            self._owner.on_step()
        elif isinstance(message, GivenBack):
            self.is_leaving = True
            self._owner.on_given_back(self)
        elif isinstance(message, WorkerReady) and (message.rank, message.incarnation) == self.log:
            self.ready, self.streams.cost = message, TokenCost(message.token_cost)
            if self.is_open:
                self._owner.on_ready(self)
        else:
            self._channel.num_dropped += 1  # one of our messages, but not one that this worker sends

    def _note_stats(self, stats: EngineStats) -> None:
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
