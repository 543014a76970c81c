"""Typed events, recent and new: `/events`.

Readers see the ids of their own requests only (http/access.py): an event that names a stream is written twice, once for
readers that may see its name, and once for all other readers.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from everserve.gateway.http import sse
from everserve.gateway.http.access import ANYONE, Owner, audience_of, seen_by
from everserve.gateway.http.turns import Turns
from everserve.gateway.observe.readers import ReaderStream
from everserve.wire.events import AnyEvent

_NUM_RECENT = 1000
_MAX_BEHIND = 2000  # events; a reader further behind is dropped
_HEARTBEAT_S = 15.0


@dataclass(frozen=True, slots=True)
class _Item:
    """One event as it is sent."""

    data: bytes
    may_see: str = ANYONE  # readers with this key get ...
    own_data: bytes = b""  # ... this instead

    @classmethod
    def of(cls, event: AnyEvent) -> "_Item":
        kind, name = str(event.__struct_config__.tag), getattr(event, "request_id", None)
        if name is None:
            return cls(sse.named_event(kind, event))
        may_see = audience_of(name)
        data, own_data = (
            sse.named_event(kind, msgspec.structs.replace(event, request_id=seen_by(name, reader)))
            for reader in (ANYONE, may_see)
        )
        return cls(data, may_see, own_data)

    def seen_by(self, reader: Owner) -> bytes:
        return self.own_data if self.own_data and self.may_see == reader else self.data


class EventFeed:
    """The recent events of all processes, and their readers."""

    def __init__(self) -> None:
        self._recent: deque[_Item] = deque(maxlen=_NUM_RECENT)
        self._readers: set[_Reader] = set()
        self.listeners: list[Callable[[AnyEvent], None]] = []  # in this process
        self.tell_others: Callable[[AnyEvent], None] = lambda event: None  # the other gateways of this address

    @property
    def num_readers(self) -> int:
        return len(self._readers)

    def publish(self, event: AnyEvent) -> None:
        """Remember it and tell all readers."""
        item = _Item.of(event)
        self._recent.append(item)
        for reader in list(self._readers):
            reader.put(item)
        for listen in self.listeners:
            listen(event)

    def publish_own(self, event: AnyEvent) -> None:
        """What has happened in this gateway, for all."""
        self.publish(event)
        self.tell_others(event)

    def open_reader(self, owner: Owner = ANYONE) -> "_Reader":
        """A reader that begins with the recent events, as the owner of this key may see them."""
        reader = _Reader(owner, self._recent)
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

    def __init__(self, owner: Owner, recent: Iterable[_Item]) -> None:
        self._owner = owner
        self._waiting = deque(item.seen_by(owner) for item in recent)
        self._ended = False
        self._changed = asyncio.Event()

    def put(self, item: _Item) -> None:
        if len(self._waiting) >= _MAX_BEHIND:
            self.end()  # it does not read; remembering more for it would have no end
        elif not self._ended:
            self._waiting.append(item.seen_by(self._owner))
        self._changed.set()

    def end(self) -> None:
        self._ended = True
        self._changed.set()

    async def wait(self) -> None:
        """Until something has happened, or nothing has for long."""
        if not self._waiting and not self._ended:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _HEARTBEAT_S)

    async def take(self) -> bytes | None:
        """Everything that waits (a heartbeat if nothing does), or None at the end."""
        if self._ended:
            return None
        data = b"".join(self._waiting) or sse.HEARTBEAT
        self._waiting.clear()
        return data


class EventsResponse(ReaderStream):
    """The recent events, and then each as it happens."""

    def __init__(self, feed: EventFeed, owner: Owner, turns: Turns) -> None:
        super().__init__(turns, lambda: feed.open_reader(owner), feed.close_reader)
