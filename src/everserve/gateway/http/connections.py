"""Connections of clients, and what each may cost before its request has arrived.

    arriving --the whole request--> being answered --the answer--> idle --a byte of the next request--> arriving
       '--too slow, too large, or one of too many--> refused        '--a minute, or room is needed--> closed
                                                        '--the client has read why, or takes too long--> closed

Only requests that are being answered are left alone. All others are bounded: in size, in time, in number, and in the
memory that all requests hold together (memory.py). Clients that are refused early are those that have been arriving for
longest, so that a client that sends its request at once is served however many slow ones there are.

A *refused* connection has its answer, and lingers: what its client still sends is read and thrown away. Closing at once
would make the kernel discard the answer, and the client would see a broken connection instead of a status.
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
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from everserve.gateway.http.errors import HttpError, unavailable
from everserve.gateway.http.memory import RequestMemory
from everserve.gateway.http.recorded import Recorded
from everserve.gateway.http.transport import Custody, LedgerTransport
from everserve.gateway.http.turns import Turns

UNREAD_S = 30.0  # that unsent bytes may stay unsent: the client does not read
_SLICE_BYTES = 16 << 10  # of what was received; between two slices the limits are looked at
_CHUNKED_SLICE_BYTES = 1 << 10  # the next request may begin anywhere in it
_END_OF_HEAD = b"\r\n\r\n"
_LINGER_BYTES = 33 << 20  # that a refused client may still send before it reads why: the rest of the largest body
_LINGER_S = 1.0
REASONS = ("headers", "time", "number", "memory", "descriptors", "refused")  # why connections are closed early
_TOO_BUSY = {
    "number": "Too many requests are arriving at once, and this one takes long.",
    "memory": "The server has no memory for this request beside the others that it has.",
    "descriptors": "The server needs this connection for another client, and this request takes long to arrive.",
    "refused": "The server has as many connections as it can have.",
}


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """What a request may cost until it has arrived."""

    head_bytes: int = 64 << 10  # the request line and all headers
    num_headers: int = 256
    head_s: float = 10.0  # from the connection, or its first byte, to the last header
    body_s: float = 30.0  # for a body ...
    body_bytes_per_s: int = 64 << 10  # ... and a second more for each of these
    num_arriving: int = 256  # requests that are arriving; beyond, those that take longer than ...
    patience_s: float = 1.0  # ... this are refused, longest first
    request_bytes: int = 256 << 20  # of all requests, from their first byte until nothing of them is needed any more
    ahead_bytes: int = 64 << 10  # that one connection has sent behind a request that has no answer yet


class Connections:
    """All connections of clients, and which of them may be closed."""

    def __init__(self, limits: ConnectionLimits | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits or ConnectionLimits()
        self.clock = clock
        self.closed = Counter(dict.fromkeys(REASONS, 0))
        self.turns = Turns()  # in which requests begin to be answered
        self.num_accepted = 0  # sockets that are not open yet
        self.num_extra = 0  # refused connections that may be there beyond the number that there may be
        self.memory = RequestMemory(self.limits.request_bytes, self._refuse_large)
        self.custody = Custody()
        self.should_accept: Callable[[], bool] = lambda: True  # False: another gateway has less to do
        self.on_number: Callable[[int], None] = lambda num_open: None  # there are so many now
        self._open: set[HttpProtocol] = set()
        self._arriving: dict[HttpProtocol, float] = {}  # since when; longest first
        self._idle: dict[HttpProtocol, None] = {}  # longest first
        self._refused: dict[HttpProtocol, None] = {}  # longest first

    @property
    def num_open(self) -> int:
        return len(self._open) + self.num_accepted - min(len(self._refused), self.num_extra)

    @property
    def num_arriving(self) -> int:
        return len(self._arriving)

    def has(self, cookie: int) -> bool:
        """Whether this very connection is here."""
        return any(one.ledger is not None and one.ledger.cookie == cookie for one in self._open)

    def opened(self, connection: "HttpProtocol") -> None:
        self.num_accepted -= 1
        self._open.add(connection)
        self.arriving(connection)
        self.on_number(self.num_open)

    def lost(self, connection: "HttpProtocol") -> None:
        self._open.discard(connection)
        self._idle.pop(connection, None)
        self._refused.pop(connection, None)
        self.arrived(connection)
        self.on_number(self.num_open)

    def arriving(self, connection: "HttpProtocol") -> None:
        """It begins to send a request."""
        self._idle.pop(connection, None)
        self._arriving.setdefault(connection, self.clock())
        self._close_impatiently()

    def arrived(self, connection: "HttpProtocol") -> None:
        """It has sent a whole request, or will not."""
        self._arriving.pop(connection, None)

    def refused(self, connection: "HttpProtocol") -> None:
        """It has been told why, and lingers."""
        self._idle.pop(connection, None)
        self.arrived(connection)
        self._refused[connection] = None

    def idle(self, connection: "HttpProtocol") -> None:
        """It has its answer, and may ask again."""
        self._idle[connection] = None

    def make_room(self) -> bool:
        """Close one that is not being answered: the longest idle, refused, or arriving. False: there is none."""
        if (connection := next(iter(self._idle), None)) is not None:
            self.closed["descriptors"] += 1
            self._close(connection)
        elif len(self._refused) > self.num_extra:
            self._close(next(iter(self._refused)))
        elif (connection := self._impatient()) is not None:
            self._refuse(connection, "descriptors")
        else:
            return False
        return True

    def _close(self, connection: "HttpProtocol") -> None:
        self.lost(connection)  # it gives its descriptor back in a moment
        connection.transport.abort()

    def sweep(self) -> None:
        """Close connections that take too long. To be called about once a second."""
        now_s = self.clock()
        for connection in list(self._arriving):
            if connection.deadline_s(now_s) < now_s:
                self.closed["time"] += 1
                connection.time_is_up()
        for connection in list(self._refused):
            if connection.deadline_s(now_s) < now_s:
                connection.transport.abort()
        self._close_impatiently()

    def _close_impatiently(self) -> None:
        while len(self._arriving) > self.limits.num_arriving and (connection := self._impatient()) is not None:
            self._refuse(connection, "number")

    def _impatient(self) -> "HttpProtocol | None":
        """The request that has been arriving for longest, if that is too long while its place is needed."""
        connection, since_s = next(iter(self._arriving.items()), (None, 0.0))
        return connection if self.clock() - since_s >= self.limits.patience_s else None

    def _refuse_large(self) -> bool:
        """Memory is short: of the requests that are arriving, the one with a body that has taken longest goes. False:
        there is none."""
        connection = next((other for other in self._arriving if other.num_body_bytes), None)
        if connection is not None:
            self._refuse(connection, "memory")
        return connection is not None

    def _refuse(self, connection: "HttpProtocol", reason: str) -> None:
        self.closed[reason] += 1
        self.arrived(connection)
        connection.turn_away(reason)

    def turn_away(self, connection: "HttpProtocol") -> None:
        """There are too many that are answered: this new one is not."""
        self._refuse(connection, "refused")
        while len(self._refused) > max(1, self.num_extra):
            self._close(next(iter(self._refused)))


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
        self.num_body_bytes = 0  # of the body that is arriving
        self._held = connections.memory.hold()  # by the request that is arriving, or being answered
        self._num_head_bytes = 0
        self._num_raw_bytes = 0  # that came for a body ...
        self._num_parsed_bytes = 0  # ... and those of them that are the body
        self._num_left_bytes: int | None = None  # of the body, to come; None: that is not known
        self._ahead = bytearray()  # behind a request that has no answer yet
        self._tail = b""  # the last bytes that the parser got: the end of a head may come in pieces
        self._num_fed = 0  # bytes that the parser got
        self._has_mixed = False  # one piece had the end of a request and the beginning of the next
        self._inbox_at = 0  # where in the ledger's inbox the first byte was that the parser got
        self.ledger: LedgerTransport | None = None  # None: in tests with a transport of their own
        self.on_lost: Callable[[], None] | None = None  # called once when the connection has ended
        self.recorded: Recorded | None = None  # what an earlier gateway had of the request that comes first
        self._read_again: Recorded | None = None  # the same, once its head is read
        self._refusal: HttpError | None = None
        self._is_refused = False  # its client has been told
        self._num_ignored = 0  # bytes after a refusal

    # -- time ------------------------------------------------------------------------------------

    def deadline_s(self, now_s: float) -> float:
        """When what is arriving must be there."""
        limits = self._limits
        if self._refusal is not None:
            return self.since_s + _LINGER_S + self._num_ignored / limits.body_bytes_per_s
        if self._stage is _Stage.HEAD:
            return self.since_s + limits.head_s
        if self.flow.read_paused:
            self.since_s = now_s  # the server, not the client, made it wait
        return self.since_s + limits.body_s + self.num_body_bytes / limits.body_bytes_per_s

    def time_is_up(self) -> None:
        self._refuse_begun(HttpError(408, "The request did not arrive in time.", code="request_timeout"))

    def turn_away(self, reason: str) -> None:
        """There is no room for this request."""
        error = unavailable(f"{_TOO_BUSY[reason]} Please try again.")
        if reason == "refused":
            self._refuse(error)  # whatever it was going to ask
        else:
            self._refuse_begun(error)

    def _refuse_begun(self, error: HttpError) -> None:
        """A client that has not begun to ask does not expect an answer."""
        if self._stage is _Stage.BODY or self._num_head_bytes > 0:
            self._refuse(error)
        else:
            self._all.lost(self)
            self.transport.abort()

    # -- what arrives ----------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._unread = UnreadWatch(transport)
        if isinstance(transport, LedgerTransport):
            self.ledger = transport
            self._inbox_at = transport.inbox_begin
        self._all.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """A request that an earlier gateway had begun is read to its end first: its client may come back for it."""
        if self._read_again is not None and not self._read_again.opened.done():
            self._read_again.opened.add_done_callback(lambda _: self._lose(exc))
        else:
            self._lose(exc)

    def _lose(self, exc: Exception | None) -> None:
        self._unread.end()
        self._all.lost(self)
        self._held.end()
        super().connection_lost(exc)
        on_lost, self.on_lost = self.on_lost, None
        if on_lost is not None:
            on_lost()

    def data_received(self, data: bytes) -> None:
        """In slices: what a client sends in one piece must not cost more than the limits, either. And one request after
        the other: what comes behind one is looked at when that has its answer."""
        at, view = 0, memoryview(data)
        while at < len(data) and not self.transport.is_closing():
            if self._refusal is not None:
                self._ignore(len(data) - at)
                return
            if self._stage is _Stage.NONE and not self.cycle.response_complete:
                self._put_ahead(view[at:])
                return
            end = self._end_of_slice(data, at)
            self._feed(view[at:end])
            at = end

    def _end_of_slice(self, data: bytes, at: int) -> int:
        """Where the next slice ends: not behind the end of a request. A head, and a body in chunks, ends with an empty
        line."""
        if self._stage is _Stage.BODY and self._num_left_bytes is not None:
            return at + min(max(self._num_left_bytes, 1), _SLICE_BYTES)
        if at == 0 and self._tail:
            begin = (self._tail + data[: len(_END_OF_HEAD) - 1]).find(_END_OF_HEAD)
            if begin >= 0:
                return begin + len(_END_OF_HEAD) - len(self._tail)
        most = at + (_SLICE_BYTES if self._stage is not _Stage.BODY else _CHUNKED_SLICE_BYTES)
        end = data.find(_END_OF_HEAD, max(at - len(_END_OF_HEAD) + 1, 0), most)
        return end + len(_END_OF_HEAD) if end >= 0 else most

    def _put_ahead(self, data: memoryview) -> None:
        self._ahead += data
        if len(self._ahead) > self._limits.ahead_bytes:
            self._refuse(HttpError(400, "Too much was sent ahead of the answer to another request."))

    def _feed(self, data: memoryview) -> None:
        before = self._stage
        self._num_fed += len(data)
        self._tail = (self._tail + bytes(data[-3:]))[-3:]
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
            if not self._is_refused:
                self._refuse(self._refusal or HttpError(400, "Invalid HTTP request received."))

    def on_message_begin(self) -> None:
        self._unset_keepalive_if_required()
        self._has_mixed = self._stage is _Stage.NONE and self.cycle is not None and not self.cycle.response_complete
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
        self._begin(_Stage.BODY)
        self._held = self._all.memory.hold()
        self.scope["state"].update(held=self._held, connection=self)
        if self.recorded is not None:
            self.scope["state"]["recorded"] = self._read_again = self.recorded
            self.recorded = None
        length = next((value for name, value in self.headers if name == b"content-length"), b"")
        self._num_left_bytes = int(length) if length.isdigit() else None
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_parsed_bytes += len(body)
        if self._num_left_bytes is not None:
            self._num_left_bytes -= len(body)
        if not self.cycle.response_complete:
            self.num_body_bytes += len(body)
            self._held.grow(len(body))
            if self._refusal is not None:
                raise _Refused
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._all.arrived(self)
        self._begin(_Stage.NONE)
        super().on_message_complete()
        self._rest()

    def on_response_complete(self) -> None:
        if self.ledger is not None:
            if self._stage is not _Stage.NONE or self._has_mixed:
                self.ledger.let_loose()  # where the next request begins cannot be told
            self.ledger.end_answer(self._inbox_at + self._num_fed)
        self.on_lost = None
        super().on_response_complete()
        self._held.end()
        if self._ahead and not self.transport.is_closing():
            ahead, self._ahead = bytes(self._ahead), bytearray()
            self.data_received(ahead)
        self._rest()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Requests of all connections take turns, and of each connection one after the other. One whose client has left
        is not begun; one that an earlier gateway has begun goes on, for its client may come back."""
        is_begun = "recorded" in self.scope["state"]

        def start() -> None:
            if is_begun or not self.transport.is_closing():
                if self.ledger is not None:
                    self.ledger.note_whole_request()
                HttpToolsProtocol._start_asgi_task(self, cycle, app)

        self._all.turns.call(start)

    def question_id(self) -> str:
        """A name of the request that is being answered, which no other one has, and which it has in every gateway."""
        return self.ledger.request_name() if self.ledger is not None else ""

    def raw_request(self) -> bytes:
        """The request that is being answered, as it came; nothing if it is not all in the ledger."""
        if self.ledger is None or self._stage is not _Stage.NONE or self._has_mixed:
            return b""
        return self.ledger.received_between(self.ledger.inbox_begin, self._inbox_at + self._num_fed)

    def _begin(self, stage: _Stage) -> None:
        self._stage, self.since_s = stage, self._all.clock()
        self._num_raw_bytes = self._num_parsed_bytes = self.num_body_bytes = 0

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
        """Answer, and let the client read it."""
        self._refusal, self._is_refused, self.since_s = error, True, self._all.clock()
        self._held.end()
        if error.status == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
            self._all.closed["headers"] += 1
        if self.cycle is not None and not self.cycle.response_complete:
            if self.cycle.response_started or self.pipeline:
                self.transport.abort()  # in the middle of another answer
                return
            self.cycle.disconnected = True  # the application must not answer, too
            self.cycle.body = bytearray()
            self.cycle.message_event.set()
        self._unset_keepalive_if_required()
        self._all.refused(self)
        self.transport.write(error.raw_response())
        self.transport.write_eof()
        if self.ledger is not None:
            self.ledger.ignore_input()
        self.flow.resume_reading()

    def _ignore(self, num_bytes: int) -> None:
        self._num_ignored += num_bytes
        if self._num_ignored > _LINGER_BYTES:
            self.transport.abort()


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
