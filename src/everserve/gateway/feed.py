"""What happened, and what happens: `/events`."""

import asyncio
from collections import deque
from collections.abc import Callable

from starlette.types import Receive, Scope, Send

from everserve.gateway import sse
from everserve.gateway.http import watch_disconnect
from everserve.runtime.events import AnyEvent

_NUM_RECENT = 1000
_MAX_BEHIND = 2000  # events; a reader further behind is dropped
_HEARTBEAT_S = 15.0


class EventFeed:
    """The recent events of all processes, and who reads along."""

    def __init__(self) -> None:
        self._recent: deque[bytes] = deque(maxlen=_NUM_RECENT)
        self._readers: set[_Reader] = set()
        self.listeners: list[Callable[[AnyEvent], None]] = []  # in this process

    @property
    def num_readers(self) -> int:
        return len(self._readers)

    def publish(self, event: AnyEvent) -> None:
        """Remember it and tell all readers."""
        data = sse.named_event(str(event.__struct_config__.tag), event)
        self._recent.append(data)
        for reader in list(self._readers):
            reader.put(data)
        for listen in self.listeners:
            listen(event)

    def open_reader(self) -> "_Reader":
        """A reader that begins with the recent events."""
        reader = _Reader(self._recent)
        self._readers.add(reader)
        return reader

    def close_reader(self, reader: "_Reader") -> None:
        self._readers.discard(reader)

    def close(self) -> None:
        """The gateway ends: so do all event streams."""
        for reader in self._readers:
            reader.end()


class _Reader:
    """One client of /events: what it has not been sent yet."""

    def __init__(self, recent: deque[bytes]) -> None:
        self._waiting = deque(recent)
        self._ended = False
        self._changed = asyncio.Event()

    def put(self, data: bytes) -> None:
        if len(self._waiting) >= _MAX_BEHIND:
            self.end()  # it does not read; remembering more for it would have no end
        elif not self._ended:
            self._waiting.append(data)
        self._changed.set()

    def end(self) -> None:
        self._ended = True
        self._changed.set()

    async def take(self) -> bytes | None:
        """Everything that waits (a heartbeat if nothing happens for long), or None at the end."""
        if not self._waiting and not self._ended:
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), _HEARTBEAT_S)
            except TimeoutError:
                return sse.HEARTBEAT
        if self._ended:
            return None
        data = b"".join(self._waiting)
        self._waiting.clear()
        return data


class EventsResponse(sse.EventStream):
    """The recent events, and then each as it happens."""

    def __init__(self, feed: EventFeed) -> None:
        super().__init__()
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.start(send)
        reader = self._feed.open_reader()
        try:
            with watch_disconnect(receive, reader.end):
                while scope["method"] != "HEAD" and (data := await reader.take()) is not None:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._feed.close_reader(reader)
