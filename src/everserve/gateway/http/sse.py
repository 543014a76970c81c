"""Server-sent events: how a stream looks on the wire."""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Send

DONE = b"data: [DONE]\n\n"
HEARTBEAT = b": still here\n\n"  # a comment: keeps proxies from closing an idle stream

_encode = msgspec.json.Encoder().encode


class EventStream(Response):
    """A response that writes itself, event by event, in its subclass' `__call__`."""

    media_type = "text/event-stream"

    def __init__(self) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache"})  # without a body, so without a content-length

    async def start(self, send: Send) -> None:
        """Status and headers."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})


class LargeEvent:
    """An event that takes long to write down. The task that sends it does that, in slices (slices.py)."""

    def __init__(self, encode: Callable[[], Iterator[bytes]], id: int | None = None) -> None:
        self._encode = encode  # the event's data as JSON
        self._id = id

    def pieces(self) -> Iterator[bytes]:
        yield b"data: " if self._id is None else b"id: %d\ndata: " % self._id
        yield from self._encode()
        yield b"\n\n"

    def with_id(self, id: int) -> "LargeEvent":
        return LargeEvent(self._encode, id)


Event = bytes | LargeEvent


def event(data: Any) -> bytes:
    """One event without a name: what OpenAI clients read. JSON has no raw newlines, so one `data:` line is enough."""
    return b"data: " + _encode(data) + b"\n\n"


def with_id(id: int, event: Event) -> Event:
    """The event with a name: what `Last-Event-ID` says when the client comes back."""
    return event.with_id(id) if isinstance(event, LargeEvent) else b"id: %d\n%b" % (id, event)


def error_event(body: bytes) -> bytes:
    """The last event of a stream that broke; no [DONE] follows, so that it cannot be taken for a complete answer."""
    return b"data: " + body + b"\n\n"


def named_event(name: str, data: Any) -> bytes:
    """One typed event, for `EventSource.addEventListener(name, ...)`."""
    return b"event: " + name.encode() + b"\ndata: " + _encode(data) + b"\n\n"
