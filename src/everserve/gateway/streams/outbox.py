"""From the callbacks that make events to the task that writes them to the client.

In between is a list of encoded events and one future: the task is woken once however many events are ready, and not at
all before the end if the client wants the whole answer. Nor is it woken for the plain events of a stream whose client
reads: these are poured straight into the connection, all of a turn of the loop at once.

    Outbox       an event is gone once it is taken
    KeptOutbox   events have ids, and stay: a client that lost its connection can have them again
"""

import asyncio
from collections.abc import Callable, Iterable

from everserve.gateway.http import sse
from everserve.gateway.http.errors import HttpError
from everserve.gateway.http.slices import Slices

MAX_PENDING_BYTES = 8 << 20  # a client so far behind is not reading


class Outbox:
    """What one client has not been sent yet."""

    def __init__(self) -> None:
        self.has_begun = False  # there was an event
        self.num_taken = 0  # events that were given to a connection
        self.is_finished = False  # nothing more comes
        self.error: HttpError | None = None  # why there is no answer at all
        self._pending: list[sse.Event] = []
        self._num_pending_bytes = 0  # put in since a client last took any; large events are bounded by sampling.py
        self._num_large = 0
        self._writer: asyncio.Task[None] | None = None
        self._cut: Callable[[], None] = lambda: None  # the connection that it writes to
        self._pour: Callable[[], bool] | None = None  # takes what is ready and writes it; False: not now
        self._is_pouring = False  # at the end of this turn
        self._has_left = False
        self._waiter: asyncio.Future[None] | None = None

    # -- for the producer of events --------------------------------------------------------------

    def put(self, events: Iterable[sse.Event]) -> None:
        """More to write. A client that does not read leaves its task hanging in a write: that task is ended."""
        if self.is_finished:
            return
        self.has_begun = True
        for event in events:
            self._pending.append(event)
            if isinstance(event, bytes):
                self._num_pending_bytes += len(event)
            else:
                self._num_large += 1
        if self._num_pending_bytes > MAX_PENDING_BYTES and self._writer is not None:
            self._writer.cancel()
        self._wake()

    def finish(self) -> None:
        """Nothing more comes."""
        self.is_finished = True
        self._wake()

    def fail(self, error: HttpError, event: sse.Event) -> None:
        """The answer cannot be completed. If it has begun, the client has a status already, and gets this event."""
        if self.is_finished:
            return
        if self.has_begun:
            self.put([event])
        else:
            self.error = error
        self.finish()

    # -- for the task that writes them -----------------------------------------------------------

    def attach(self, writer: "asyncio.Task[None]", cut: Callable[[], None] = lambda: None) -> None:
        """This task writes from now on. An older one ends: its client has come back on another connection. The older
        connection ends in this very moment, or the next gateway might find both."""
        if self._writer is not None:
            self._writer.cancel()
            self._cut()
        self._writer, self._cut, self._has_left, self._pour = writer, cut, False, None

    def pour_by(self, pour: Callable[[], bool]) -> None:
        """While the task waits in `ready`, this writes plain events, if it can."""
        self._pour = pour

    def detach(self, writer: "asyncio.Task[None]") -> bool:
        """This task has ended. False: another one had taken over."""
        if self._writer is not writer:
            return False
        self._writer = self._pour = None
        return True

    def leave(self, writer: "asyncio.Task[None]") -> None:
        """The client of this task has gone."""
        if self._writer is writer:
            self._has_left = True
            self._wake()

    async def ready(self) -> bool:
        """Wait until there is something to write, or nothing more will come. False: the client has gone."""
        while not self._pending and not self.is_finished and not self._has_left:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return not self._has_left

    async def encode_large(self, slices: Slices) -> None:
        """If the next events include a large one, encode it: then it is bytes like other events."""
        events = self._pending
        at = self._first_large()
        if at < len(events):
            large = events[at]
            assert isinstance(large, sse.LargeEvent)
            events[at] = event = b"".join(await slices.run(large.pieces()))
            self._num_large -= 1
            self._on_encoded(len(event))

    def take(self) -> bytes:
        """Everything that is ready, up to the next large event."""
        return b"".join(self._take())

    @property
    def has_pending(self) -> bool:
        """There is something to take."""
        return bool(self._pending)

    def begin_at(self, num_events: int) -> None:
        """So many events came before those that are put in from now on, and were taken by an earlier gateway."""
        self.num_taken = num_events
        self.has_begun = self.has_begun or num_events > 0

    def skip(self, num_events: int) -> None:
        """So many of those that wait were taken by an earlier gateway. Large ones among them are not written again."""
        for event in self._pending[:num_events]:
            self._num_large -= not isinstance(event, bytes)
        del self._pending[:num_events]
        self.num_taken += num_events
        self._num_pending_bytes = sum(len(event) for event in self._pending if isinstance(event, bytes))

    @property
    def is_empty(self) -> bool:
        """All that was put in was taken, and nothing more comes."""
        return self.is_finished and not self._pending

    def _take(self) -> list[bytes]:
        at = self._first_large()
        events, self._pending = self._pending[:at], self._pending[at:]
        taken = [event for event in events if isinstance(event, bytes)]
        self.num_taken += len(taken)
        self._num_pending_bytes = sum(len(event) for event in self._pending if isinstance(event, bytes))
        return taken

    def _first_large(self) -> int:
        if not self._num_large:
            return len(self._pending)
        return next(i for i, event in enumerate(self._pending) if isinstance(event, sse.LargeEvent))

    def _on_encoded(self, num_bytes: int) -> None:
        """A large event is bytes now."""

    def _wake(self) -> None:
        if self._waiter is None or self._waiter.done():
            return
        if not self._is_plain:
            self._waiter.set_result(None)
        elif not self._is_pouring:
            self._is_pouring = True
            self._waiter.get_loop().call_soon(self._pour_now)

    def _pour_now(self) -> None:
        self._is_pouring = False
        if self._waiter is None or self._waiter.done() or not self._pending:
            return
        if self._pour is None or not self._is_plain:
            self._waiter.set_result(None)
            return
        try:
            has_poured = self._pour()
        except BaseException:  # events that were taken would be missing
            self._cut()
            raise
        if not has_poured:
            self._waiter.set_result(None)

    @property
    def _is_plain(self) -> bool:
        """What is ready is small events in the middle of a stream."""
        return self._pour is not None and not (self.is_finished or self._has_left or self._num_large)


class KeptOutbox(Outbox):
    """Numbers events from 0, and remembers those that were taken until `forget`."""

    def __init__(self) -> None:
        super().__init__()
        self.num_sent = 0  # events that a connection was given, at least once
        self.on_grown: Callable[[int], None] = lambda num_bytes: None
        self.again: Callable[[], list[sse.Event]] = list  # makes events again that an earlier gateway has sent
        self._num_elsewhere = 0  # of these, those that are not in `_sent` yet
        self._sent: list[bytes] = []
        self._next_id = 0
        self._is_kept = True

    def put(self, events: Iterable[sse.Event]) -> None:
        if self.is_finished:
            return
        numbered = [sse.with_id(id, event) for id, event in enumerate(events, start=self._next_id)]
        self._next_id += len(numbered)
        super().put(numbered)
        self.on_grown(sum(len(event) for event in numbered if isinstance(event, bytes)))

    def rewind(self, after: int) -> None:
        """What comes next is the event after this one."""
        assert self._is_kept and after < self.num_sent
        if self._num_elsewhere:
            again = enumerate(self.again()[: self._num_elsewhere])
            made = [_as_bytes(sse.with_id(id, event)) for id, event in again]
            self._sent[:0] = made
            self._num_elsewhere = 0
            self.on_grown(sum(map(len, made)))
        self.num_taken -= len(self._sent) - after - 1
        self._pending[:0] = self._sent[after + 1 :]
        del self._sent[after + 1 :]

    def begin_at(self, num_events: int) -> None:
        super().begin_at(num_events)
        self._next_id = self.num_sent = self._num_elsewhere = num_events

    def skip(self, num_events: int) -> None:
        self._sent = [_as_bytes(event) for event in self._pending[:num_events]]
        super().skip(num_events)
        self.num_sent = num_events

    def _take(self) -> list[bytes]:
        taken = super()._take()
        if self._is_kept:
            self._sent += taken
            self.num_sent = max(self.num_sent, self._num_elsewhere + len(self._sent))
        return taken

    def _on_encoded(self, num_bytes: int) -> None:
        self.on_grown(num_bytes)

    def forget(self) -> None:
        """The client cannot come back: what was sent is not kept."""
        self._is_kept = False
        self._sent.clear()
        self._num_elsewhere = 0
        self.on_grown = lambda num_bytes: None


def _as_bytes(event: sse.Event) -> bytes:
    return event if isinstance(event, bytes) else b"".join(event.pieces())
