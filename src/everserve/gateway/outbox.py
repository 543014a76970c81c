"""From the callbacks that make events to the task that writes them to the client.

In between is a list of encoded events and one future: the task is woken once however many events are ready, and not at
all before the end if the client wants the whole answer.

    Outbox       an event is gone once it is taken
    KeptOutbox   events have ids, and stay: a client that lost its connection can have them again
"""

import asyncio
from collections.abc import Callable, Iterable

from everserve.gateway import sse
from everserve.gateway.errors import HttpError

_MAX_PENDING_EVENTS = 1 << 16  # a client so far behind is not reading


class Outbox:
    """What one client has not been sent yet."""

    def __init__(self) -> None:
        self.has_begun = False  # there was an event
        self.is_finished = False  # nothing more comes
        self.error: HttpError | None = None  # why there is no answer at all
        self._pending: list[bytes] = []
        self._writer: asyncio.Task[None] | None = None
        self._has_left = False
        self._waiter: asyncio.Future[None] | None = None

    # -- for whoever makes the events ------------------------------------------------------------

    def put(self, events: Iterable[bytes]) -> None:
        """More to write. A client that does not read leaves its task hanging in a write: that task is ended."""
        if self.is_finished:
            return
        self.has_begun = True
        self._pending += events
        if len(self._pending) > _MAX_PENDING_EVENTS and self._writer is not None:
            self._writer.cancel()
        self._wake()

    def finish(self) -> None:
        """Nothing more comes."""
        self.is_finished = True
        self._wake()

    def fail(self, error: HttpError) -> None:
        """The answer cannot be completed. If it has begun, the client has a status already, and gets an event."""
        if self.is_finished:
            return
        if self.has_begun:
            self.put([sse.error_event(error.body())])
        else:
            self.error = error
        self.finish()

    # -- for whoever writes them -----------------------------------------------------------------

    def attach(self, writer: "asyncio.Task[None]") -> None:
        """This task writes from now on. An older one ends: its client has come back on another connection."""
        if self._writer is not None:
            self._writer.cancel()
        self._writer, self._has_left = writer, False

    def detach(self, writer: "asyncio.Task[None]") -> bool:
        """This task has ended. False: another one had taken over."""
        if self._writer is not writer:
            return False
        self._writer = None
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

    def take(self) -> bytes:
        """Everything that is ready."""
        events, self._pending = self._pending, []
        return b"".join(events)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class KeptOutbox(Outbox):
    """Numbers events from 0, and remembers those that were taken until `forget`."""

    def __init__(self) -> None:
        super().__init__()
        self.num_sent = 0  # events that a connection was given, at least once
        self.on_grown: Callable[[int], None] = lambda num_bytes: None
        self._sent: list[bytes] = []
        self._next_id = 0
        self._is_kept = True

    def put(self, events: Iterable[bytes]) -> None:
        if self.is_finished:
            return
        numbered = [sse.with_id(id, event) for id, event in enumerate(events, start=self._next_id)]
        self._next_id += len(numbered)
        super().put(numbered)
        self.on_grown(sum(map(len, numbered)))

    def take(self) -> bytes:
        if self._is_kept:
            self._sent += self._pending
            self.num_sent = max(self.num_sent, len(self._sent))
        return super().take()

    def rewind(self, after: int) -> None:
        """What comes next is the event after this one."""
        assert self._is_kept and after < self.num_sent
        events = self._sent + self._pending
        self._sent, self._pending = events[: after + 1], events[after + 1 :]

    def forget(self) -> None:
        """Nobody will come back for what was sent."""
        self._is_kept = False
        self._sent.clear()
        self.on_grown = lambda num_bytes: None
