"""Connections of clients, and what each may cost before its request has arrived.

    arriving --the whole request--> being answered --the answer--> idle --a byte of the next request--> arriving
       '--too slow, too large, or one of too many--> closed         '--a minute, or room is needed--> closed

Only requests that are being answered are left alone. All others are bounded: in size, in time, in number, and in the
memory that they hold together. Clients that are closed early are those that have been arriving for longest, so that a
client that sends its request at once is served however many slow ones there are.
"""

import asyncio
import enum
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from everserve.gateway.http.errors import HttpError

UNREAD_S = 30.0  # that unsent bytes may stay unsent: the client does not read
_SLICE_BYTES = 16 << 10  # of what was received; between two slices the limits are looked at
_LINGER_BYTES = 1 << 20  # that a refused client may still send before it reads why
_LINGER_S = 1.0
REASONS = ("headers", "time", "number", "memory", "descriptors", "refused")  # why connections are closed early


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """What a request may cost until it has arrived."""

    head_bytes: int = 64 << 10  # the request line and all headers
    num_headers: int = 256
    head_s: float = 10.0  # from the connection, or its first byte, to the last header
    body_s: float = 30.0  # for a body ...
    body_bytes_per_s: int = 64 << 10  # ... and a second more for each of these
    num_arriving: int = 256  # requests that are arriving; beyond, those that take longer than ...
    patience_s: float = 1.0  # ... this are closed, longest first
    arriving_bytes: int = 256 << 20  # of all bodies that are arriving
    num_pipelined: int = 16  # requests that one connection has sent ahead


class Connections:
    """All connections of clients, and which of them may be closed."""

    def __init__(self, limits: ConnectionLimits | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits or ConnectionLimits()
        self.clock = clock
        self.closed = Counter(dict.fromkeys(REASONS, 0))
        self.num_accepted = 0  # sockets that are not open yet
        self._open: set[HttpProtocol] = set()
        self._arriving: dict[HttpProtocol, float] = {}  # since when; longest first
        self._idle: dict[HttpProtocol, None] = {}  # longest first
        self._num_bytes = 0  # of bodies that are arriving

    @property
    def num_open(self) -> int:
        return len(self._open) + self.num_accepted

    @property
    def num_arriving(self) -> int:
        return len(self._arriving)

    def opened(self, connection: "HttpProtocol") -> None:
        self.num_accepted -= 1
        self._open.add(connection)
        self.arriving(connection)

    def lost(self, connection: "HttpProtocol") -> None:
        self._open.discard(connection)
        self._idle.pop(connection, None)
        self.arrived(connection)

    def arriving(self, connection: "HttpProtocol") -> None:
        """It begins to send a request."""
        self._idle.pop(connection, None)
        self._arriving.setdefault(connection, self.clock())
        self._close_impatiently()

    def grew(self, connection: "HttpProtocol", num_bytes: int) -> None:
        """So much of a body has come."""
        self._num_bytes += num_bytes
        while self._num_bytes > self.limits.arriving_bytes:
            self._close(next(other for other in self._arriving if other.num_body_bytes), "memory")

    def arrived(self, connection: "HttpProtocol") -> None:
        """It has sent a whole request, or will not."""
        self._arriving.pop(connection, None)
        self._num_bytes -= connection.num_body_bytes
        connection.num_body_bytes = 0

    def idle(self, connection: "HttpProtocol") -> None:
        """It has its answer, and may ask again."""
        self._idle[connection] = None

    def make_room(self) -> bool:
        """Close one that is not being answered: the longest idle, or arriving. False: there is none."""
        connection = next(iter(self._idle), None) or self._impatient()
        if connection is not None:
            self._close(connection, "descriptors")
        return connection is not None

    def sweep(self) -> None:
        """Close connections that take too long. To be called about once a second."""
        now_s = self.clock()
        for connection in list(self._arriving):
            if connection.deadline_s(now_s) < now_s:
                self.closed["time"] += 1
                connection.time_is_up()
        self._close_impatiently()

    def _close_impatiently(self) -> None:
        while len(self._arriving) > self.limits.num_arriving and (connection := self._impatient()) is not None:
            self._close(connection, "number")

    def _impatient(self) -> "HttpProtocol | None":
        """The request that has been arriving for longest, if that is too long while its place is needed."""
        connection, since_s = next(iter(self._arriving.items()), (None, 0.0))
        return connection if self.clock() - since_s >= self.limits.patience_s else None

    def _close(self, connection: "HttpProtocol", reason: str) -> None:
        self.closed[reason] += 1
        self.lost(connection)  # it gives its descriptor back in a moment
        connection.transport.abort()


class _Stage(enum.Enum):
    """Which part of a request comes next."""

    HEAD = "head"
    BODY = "body"
    NONE = "none"  # the request has arrived; the next one may begin


class _Refused(Exception):
    """Ends the parsing of a request that will not be answered by the application."""


class HttpProtocol(HttpToolsProtocol):
    """HTTP on one connection, within the limits. What cannot be answered by the application gets an error of the same
    shape as all others."""

    def __init__(self, *arguments: Any, connections: Connections, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._all = connections
        self._limits = connections.limits
        self._stage = _Stage.HEAD
        self.since_s = connections.clock()  # when this stage began
        self.num_body_bytes = 0  # that are kept until the rest is there
        self._num_head_bytes = 0
        self._num_raw_bytes = 0  # that came for a body ...
        self._num_parsed_bytes = 0  # ... and those of them that are the body
        self._refusal: HttpError | None = None
        self._num_ignored = 0  # bytes after a refusal

    # -- time ------------------------------------------------------------------------------------

    def deadline_s(self, now_s: float) -> float:
        """When what is arriving must be there."""
        limits = self._limits
        if self._refusal is not None:
            return self.since_s + _LINGER_S
        if self._stage is _Stage.HEAD:
            return self.since_s + limits.head_s
        if self.flow.read_paused:
            self.since_s = now_s  # the server, not the client, made it wait
        return self.since_s + limits.body_s + self.num_body_bytes / limits.body_bytes_per_s

    def time_is_up(self) -> None:
        has_begun = self._stage is _Stage.BODY or self._num_head_bytes > 0
        if self._refusal is not None or not has_begun:
            self.transport.abort()
        else:
            self._refuse(HttpError(408, "The request did not arrive in time.", code="request_timeout"))

    # -- what arrives ----------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._unread = UnreadWatch(transport)
        self._all.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._unread.end()
        self._all.lost(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """In slices: what a client sends in one piece must not cost more than the limits, either."""
        view = memoryview(data)
        for start in range(0, len(data), _SLICE_BYTES):
            if self._refusal is not None:
                self._ignore(len(data) - start)
                return
            if self.transport.is_closing():
                return
            self._feed(view[start : start + _SLICE_BYTES])

    def _feed(self, data: memoryview) -> None:
        before = self._stage
        if before is _Stage.HEAD:
            self._num_head_bytes += len(data)
        try:
            self.parser.feed_data(data)
            if self._stage is _Stage.HEAD and self._num_head_bytes > self._limits.head_bytes:
                raise self._too_large()
            if self._stage is _Stage.BODY and before is _Stage.BODY:
                self._num_raw_bytes += len(data)
                if self._num_raw_bytes > self._limits.head_bytes + 2 * self._num_parsed_bytes:
                    raise _Refused  # chunks, their extensions or trailers without end
        except httptools.HttpParserUpgrade:
            return  # to a protocol that is not spoken here: it is answered as if it had not asked
        except (httptools.HttpParserError, _Refused):
            self._refuse(self._refusal or HttpError(400, "Invalid HTTP request received."))

    def on_message_begin(self) -> None:
        self._unset_keepalive_if_required()
        if self._stage is not _Stage.HEAD:
            self._begin(_Stage.HEAD)
            self._num_head_bytes = 1
            self._all.arriving(self)
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) >= self._limits.num_headers:
            raise self._too_large()
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        num_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if num_bytes > self._limits.head_bytes:
            raise self._too_large()
        if len(self.pipeline) >= self._limits.num_pipelined:
            raise _Refused
        self._begin(_Stage.BODY)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_parsed_bytes += len(body)
        if not self.cycle.response_complete:
            self.num_body_bytes += len(body)
            self._all.grew(self, len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._all.arrived(self)
        self._begin(_Stage.NONE)
        super().on_message_complete()
        self._rest()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._rest()

    def _begin(self, stage: _Stage) -> None:
        self._stage, self.since_s = stage, self._all.clock()
        self._num_raw_bytes = self._num_parsed_bytes = 0

    def _rest(self) -> None:
        if self._stage is _Stage.NONE and self.cycle.response_complete and not self.transport.is_closing():
            self._all.idle(self)

    # -- what leaves -----------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread.begin()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread.end()

    # -- what is refused -------------------------------------------------------------------------

    def _too_large(self) -> _Refused:
        limits = self._limits
        self._refusal = HttpError(
            431,
            f"The headers are larger than {limits.head_bytes >> 10} KiB, or more than {limits.num_headers}.",
            code="headers_too_large",
        )
        return _Refused()

    def _refuse(self, error: HttpError) -> None:
        """Answer, and let the client read it: closing at once would discard the answer with what is still under way."""
        self._refusal, self.since_s = error, self._all.clock()
        if error.status == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
            self._all.closed["headers"] += 1
        if self.cycle is not None and not self.cycle.response_complete:
            if self.cycle.response_started or self.pipeline:
                self.transport.abort()  # in the middle of another answer
                return
            self.cycle.disconnected = True  # the application must not answer, too
            self.cycle.message_event.set()
        self._unset_keepalive_if_required()
        self._all.arriving(self)
        self.transport.write(raw_response(error))
        self.transport.write_eof()

    def _ignore(self, num_bytes: int) -> None:
        self._num_ignored += num_bytes
        if self._num_ignored > _LINGER_BYTES:
            self.transport.abort()


def raw_response(error: HttpError) -> bytes:
    """An error as bytes, for clients that the application does not hear of."""
    body = error.body()
    headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in (headers | (error.headers or {})).items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


class UnreadWatch:
    """One connection's unsent bytes: a client that does not read what it asked for is cut off.

        unsent bytes --some leave within UNREAD_S--> watched for another UNREAD_S
            |  '--all leave--> nothing to watch
            '--none leaves--> the connection is aborted

    Before that, such a client costs little: its task waits until all that it has written has left for the kernel,
    events that wait for that task are bounded (streams/outbox.py), and an answer that is not read yet holds a place
    (Gateway.check_room). The transport must call `begin` when there are unsent bytes, and `end` when there are none:
    its upper limit of buffered bytes is 0.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        transport.set_write_buffer_limits(high=0)
        self._transport = transport
        self._num_unsent = 0
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        self._num_unsent = self._transport.get_write_buffer_size()
        self._timer = asyncio.get_running_loop().call_later(UNREAD_S, self.look)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def look(self) -> None:
        """Time is up. Nothing is added while bytes are unsent, so fewer of them means that the client reads."""
        self.end()
        if self._transport.get_write_buffer_size() < self._num_unsent:
            self.begin()
        else:
            self._transport.abort()
