"""One client's connection in the gateway's own hands: what comes in is received into the ledger, and what goes out is
in the ledger before the kernel gets it. So the next gateway can go on with it at the exact byte.

    write --> staged --commit--> ring --send--> kernel          staged: lost with this gateway, and written again by the
                                                                next one, which knows what is committed

It stands where asyncio has a transport. A response is staged until it is complete, and then committed as one; only a
stream of events, which has no length, is committed piece by piece, each with the number of events that it has so far.

A connection that the ledger has no room for is *loose*: it works as any other, and ends with this gateway.
"""

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from everserve.gateway.http import sse
from everserve.gateway.http.departures import Departing
from everserve.gateway.http.errors import HttpError
from everserve.gateway.http.recorded import Position, Recorded
from everserve.ledger.connections import (
    GONE_TO_AT,
    HAS_HEAD,
    IS_FEED,
    IS_GONE,
    IS_LAST,
    IS_LOOSE,
    IS_RETURN,
    Commit,
    Connection,
)
from everserve.ledger.ledger import Ledger
from everserve.ledger.pages import BrokenChain, LedgerFull
from everserve.ledger.sockets import Counts, cookie_of

_LOOSE_BYTES = 64 << 10  # that are received at once into memory of our own
_READS = 16  # of full pages, until others have their turn
_NUM_VIEWS = 64  # that are sent in one call
_CONTINUE = b"HTTP/1.1 100 "
_LAST_CHUNK = b"0\r\n\r\n"
_CHUNKED = b"transfer-encoding: chunked\r\n\r\n"  # the end of the head of a stream


class Receiver(Protocol):
    """What is at this end (connections.py)."""

    recorded: Recorded | None  # what an earlier gateway had of the request that comes first

    def connection_made(self, transport: asyncio.Transport) -> None: ...
    def connection_lost(self, exc: Exception | None) -> None: ...
    def data_received(self, data: bytes) -> None: ...
    def eof_received(self) -> None: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...


class Custody:
    """The ledger of this gateway, if there is one."""

    def __init__(self, ledger: Ledger | None = None) -> None:
        self.ledger = ledger
        self.num_loose = 0  # connections that a successor could not go on with, since the start

    def open(self, sock: socket.socket, received: int = 0, sent: int = 0) -> Connection | None:
        """A new connection, of which so much was received and sent already; None: there is no room for it."""
        if self.ledger is None:
            return None
        with contextlib.suppress(LedgerFull, OSError):
            return self.ledger.connection(cookie_of(sock), received, sent)
        self.num_loose += 1
        return None

    def close(self, record: Connection) -> None:
        assert self.ledger is not None
        self.ledger.close_connection(record)

    def handle(self, record: Connection | None = None) -> None:
        """The gateway is busy with this connection's request; None: with nothing of a client."""
        if self.ledger is not None:
            self.ledger.handling = record.index + 1 if record is not None else 0


class LedgerTransport(asyncio.Transport):
    """Reads and writes one socket, by callbacks."""

    def __init__(
        self,
        sock: socket.socket,
        receiver: Receiver,
        custody: Custody,
        record: Connection | None,
        counts: Counts = Counts(0, 0),
    ) -> None:
        super().__init__({"socket": sock, "peername": _name(sock.getpeername), "sockname": _name(sock.getsockname)})
        self.inbox_begin = counts.received  # where the request at hand begins
        self.request = 0  # its record: a reference
        self.position = Position()  # of its answer, when what is staged will have been committed
        self.is_loose = record is None
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self.cookie = cookie_of(sock)
        self.receiver = receiver
        self._custody = custody
        self._record = record
        self._received = counts.received
        self._sent = counts.sent
        self._staged: list[bytes] = []
        self._num_staged = 0
        self._flags = 0
        self._loose: deque[memoryview] = deque()  # behind the ring, where it has no room
        self._num_loose = 0
        self._next_position: Position | None = None
        self._ignores = False
        self._is_stream = False  # commit what is staged in each turn of the loop
        self._skips_head = False
        self._is_due = self._is_sending = self._is_paused = self._is_reading = False
        self._is_closing = self._is_closed = self._wants_eof = False
        self.end_plain: Callable[[], None] | None = None  # set while C writes to this connection (streams/plain.py)
        if record is not None:
            self._take_over(record)

    @classmethod
    def adopt(
        cls, sock: socket.socket, receiver: Receiver, custody: Custody, record: Connection, counts: Counts
    ) -> "LedgerTransport":
        """The connection of an earlier gateway, which has received and sent so much. Raises BrokenChain if that is not
        what it has left."""
        record.inbox.resume(counts.received)
        if counts.sent > record.commit.ring_end:
            raise BrokenChain("more was sent than was committed")
        record.ring.drop(counts.sent)
        return cls(sock, receiver, custody, record, counts)

    def _take_over(self, record: Connection) -> None:
        """What an earlier gateway has left; of a new connection, nothing."""
        commit = record.commit
        self.inbox_begin, self.position = commit.inbox_begin, Position(commit.num_rendered, commit.journal)
        self.request, self._flags = commit.request, commit.flags
        self._is_stream = self._skips_head = bool(commit.flags & HAS_HEAD)
        self.is_loose = bool(commit.flags & IS_LOOSE)

    def start(self) -> None:
        """Begin to read. What the gateway before had not sent is sent first, and what it had received comes again."""
        self.receiver.connection_made(self)
        self._send()
        record = self._record
        if record is None or self._is_closed:
            self.resume_reading()
            return
        is_cut = self._flags & IS_LOOSE or (self._flags & HAS_HEAD and not self.request)
        if is_cut or self._flags & IS_LAST:
            if self._flags & IS_FEED and not self._flags & (IS_LOOSE | IS_LAST):
                self._staged.append(_LAST_CHUNK)
            self.close()  # when all is sent; the answer, if it was one, cannot be gone on with
            return
        if self.inbox_begin < self._received:
            self._hand_over(record.inbox.read(self.inbox_begin, self._received))
        self.resume_reading()

    def start_with(self, data: bytes) -> None:
        """Begin as if this had been received. Of a connection without a client."""
        self.receiver.connection_made(self)
        self._hand_over(data)

    def forget_request(self) -> None:
        """Its record cannot be used."""
        self.request = 0

    def refuse(self, error: HttpError) -> None:
        """Begin, and end with this error, instead of an answer or in the middle of one."""
        self.receiver.connection_made(self)
        if self._skips_head:
            event = sse.error_event(error.body())
            self._staged.append(b"%x\r\n%b\r\n%b" % (len(event), event, _LAST_CHUNK))
        else:
            self._staged.append(error.raw_response())
        self.close()

    # -- reading ---------------------------------------------------------------------------------

    def is_reading(self) -> bool:
        return self._is_reading

    def resume_reading(self) -> None:
        if not self._is_reading and not self._is_closing:
            self._is_reading = True
            self._loop.add_reader(self._sock, self._on_readable)

    def pause_reading(self) -> None:
        if self._is_reading:
            self._is_reading = False
            self._loop.remove_reader(self._sock)

    def _on_readable(self) -> None:
        for _ in range(_READS):
            place = self._reserve()
            try:
                num_bytes = self._sock.recv_into(place)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._close(error)
                return
            if num_bytes == 0:
                self.pause_reading()
                self.receiver.eof_received()
                self.close()  # a client that has said its last word has left
                return
            self._received += num_bytes
            if self._is_recording and self._record is not None:
                self._record.inbox.advance(num_bytes)
            self._hand_over(bytes(place[:num_bytes]))
            if num_bytes < len(place) or not self._is_reading:
                return

    @property
    def _is_recording(self) -> bool:
        """Whether what comes in is received into the ledger."""
        return not self.is_loose and not self._ignores and self._record is not None

    def ignore_input(self) -> None:
        """What still comes in is thrown away, and need not be remembered."""
        self._ignores = True
        if self._record is not None:
            self._record.inbox.clear()

    def _reserve(self) -> memoryview:
        if self._is_recording:
            assert self._record is not None
            with contextlib.suppress(LedgerFull):
                return self._record.inbox.reserve()
            self.let_loose()
        return memoryview(bytearray(_LOOSE_BYTES))

    def _hand_over(self, data: bytes) -> None:
        self._custody.handle(self._record)
        try:
            self.receiver.data_received(data)
        finally:
            self._custody.handle()

    # -- writing ---------------------------------------------------------------------------------

    def write(self, data: Any) -> None:
        if self._is_closed or not data:
            return
        if self._skips_head:  # the client has it already, or it is in the ring
            self._skips_head = data[: len(_CONTINUE)] == _CONTINUE
            if not self._skips_head and data[-len(_CHUNKED) :] != _CHUNKED:
                self.abort()  # it was the head of a stream, and cannot become another answer
            return
        self._stage(bytes(data))
        if data[-len(_CHUNKED) :] == _CHUNKED:
            self._is_stream = True
            self._flags |= HAS_HEAD
        if self._is_stream:
            self._commit_soon()
        elif data[: len(_CONTINUE)] == _CONTINUE:  # the client waits for it, and then sends the rest of its request
            self.commit()

    def _stage(self, data: bytes) -> None:
        self._end_plain()
        if self._next_position is not None:
            self.position, self._next_position = self._next_position, None
        self._staged.append(data)
        self._num_staged += len(data)

    @property
    def bare_record(self) -> Connection | None:
        """Its slot, if all that was written is committed there and sent, and it takes more of a stream."""
        if not self.takes_chunks or self.is_loose or self._staged or self._num_loose or self._next_position is not None:
            return None
        return self._record

    @property
    def ledger(self) -> Ledger:
        assert self._custody.ledger is not None
        return self._custody.ledger

    def fileno(self) -> int:
        return self._sock.fileno()

    def went_on(self, num_unsent: int) -> None:
        """More of the stream was committed in its slot by others, of which so many bytes were not sent."""
        assert self._record is not None
        commit = self._record.commit
        self.position = Position(commit.num_rendered, commit.journal)
        self._sent = commit.ring_end - num_unsent
        if num_unsent:
            self._send()

    def _end_plain(self) -> None:
        if self.end_plain is not None:
            self.end_plain()

    @property
    def takes_chunks(self) -> bool:
        """A stream is written here, and its client reads."""
        return self._is_stream and not (self._skips_head or self._is_sending or self._is_closing)

    def write_chunk(self, body: bytes) -> None:
        """More of a stream; committed and sent at once, with what is staged."""
        self._stage(b"%x\r\n%b\r\n" % (len(body), body))
        self.commit()

    def begin_request(self, reference: int, is_return: bool = False) -> None:
        """What is answered has this record from now on."""
        if self._record is not None:
            self._record.is_preparing = False
        if self.request == reference:
            return
        self.request = reference
        if is_return:
            self._flags |= IS_RETURN
        self.commit()

    def begin_feed(self) -> None:
        """What is answered goes on for as long as its client and this gateway are there."""
        self._flags |= IS_FEED

    def note_whole_request(self) -> None:
        """It is about to be handled."""
        if self._record is not None:
            self._record.is_preparing = True

    def handle(self) -> None:
        """The gateway makes something of this request's answer."""
        self._custody.handle(self._record)

    def mark(self, position: Position) -> None:
        """Notes that with what is written next the answer has got to here."""
        self._next_position = position

    def end_answer(self, inbox_begin: int) -> None:
        """The response is complete, and this is where the next request begins."""
        self.inbox_begin = inbox_begin
        self.request, self.position, self._next_position = 0, Position(), None
        self._flags &= ~(HAS_HEAD | IS_RETURN | IS_FEED)
        self._is_stream = self._skips_head = False
        self.commit()
        if self._record is not None:
            self._record.suspicion, self._record.is_preparing = 0, False
            if not self.is_loose:
                self._record.inbox.drop(inbox_begin)
                if inbox_begin == self._received:
                    self._record.inbox.clear()

    def let_loose(self) -> None:
        """The ledger does not hold all of it any more."""
        self._end_plain()
        if not self.is_loose:
            self.is_loose = True
            self._custody.num_loose += 1
            self._flags |= IS_LOOSE
            if self._record is not None:
                commit = self._record.commit  # what is staged does not count in it
                self._record.put(commit._replace(flags=commit.flags | IS_LOOSE))
                self._record.inbox.clear()

    def commit(self) -> None:
        """What is staged counts, and is sent as far as the kernel takes it now."""
        self._end_plain()
        data, self._staged, self._num_staged = b"".join(self._staged), [], 0
        if self._is_closed:
            return
        if self._record is not None and not self.is_loose:
            try:
                self._record.ring.append(data)
                self._put(self._record)
                data = b""
            except LedgerFull:
                self._record.ring.end = self._record.commit.ring_end
                self.let_loose()
        if data:
            self._loose.append(memoryview(data))
            self._num_loose += len(data)
        if not self._is_sending:
            self._send()

    def _put(self, record: Connection) -> None:
        num_events, journal = self.position.num_events, self.position.journal
        record.put(Commit(0, record.ring.end, num_events, journal, self.inbox_begin, self.request, self._flags))

    def _commit_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._commit_due)

    def _commit_due(self) -> None:
        self._is_due = False
        if self._staged:
            self.commit()

    def _send(self) -> None:
        """Sends as much as the kernel takes. Bytes that it has taken are not needed here."""
        try:
            while self._send_some():
                pass
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self._close(error)
            return
        if self._num_unsent:
            self._wait_for_room()
        else:
            self._on_all_sent()

    def _send_some(self) -> bool:
        ring = self._record.ring if self._record is not None else None
        if ring is not None and self._sent < ring.end:
            view = ring.view(self._sent)
            if self._sent + len(view) < ring.end:
                views = [view for view, _ in zip(ring.views(self._sent, ring.end), range(_NUM_VIEWS), strict=False)]
                self._sent += self._sock.sendmsg(views)
            else:
                self._sent += self._sock.send(view)
            if self._sent < ring.end:
                ring.drop(self._sent)
                return True
            ring.clear() if not self._is_stream else ring.drop(self._sent)
        if not self._loose:
            return False
        num_sent = self._sock.send(self._loose[0])
        self._num_loose -= num_sent
        if num_sent == len(self._loose[0]):
            self._loose.popleft()
        else:
            self._loose[0] = self._loose[0][num_sent:]
        return bool(self._loose)

    @property
    def has_head(self) -> bool:
        """The head of the answer at hand is committed, by an earlier gateway."""
        return self._skips_head

    @property
    def _num_unsent(self) -> int:
        """Bytes that are committed."""
        in_ring = self._record.ring.end - self._sent if self._record is not None else 0
        return in_ring + self._num_loose

    def _wait_for_room(self) -> None:
        if not self._is_sending:
            self._is_sending = True
            self._loop.add_writer(self._sock, self._send)
        if not self._is_paused and not self._is_closing:
            self._is_paused = True
            self.receiver.pause_writing()

    def _on_all_sent(self) -> None:
        if self._is_sending:
            self._is_sending = False
            self._loop.remove_writer(self._sock)
        if self._is_paused:
            self._is_paused = False
            self.receiver.resume_writing()
        if self._is_closing and not self._num_staged:
            self._close(None)
        elif self._wants_eof and not self._num_staged:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_WR)

    # -- its end ---------------------------------------------------------------------------------

    def write_eof(self) -> None:
        """Nothing more is written; what the client still sends is read."""
        self._wants_eof = True
        self._flags |= IS_LAST
        self.commit()

    def can_write_eof(self) -> bool:
        return True

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        """When all that is committed or staged has been sent."""
        if self._is_closing:
            return
        self._end_plain()
        self._is_closing = True
        self._flags |= IS_LAST
        self.pause_reading()
        self._loop.call_soon(self._close_if_sent)  # the response that ends it may not be staged wholly yet

    def _close_if_sent(self) -> None:
        if not self._is_closed:
            self.commit()

    def abort(self) -> None:
        self._close(None)

    def _close(self, error: Exception | None) -> None:
        if self._is_closed:
            return
        if self.end_plain is not None:
            self.end_plain()
            if self._is_closed:  # by that: not all could be sent
                return
        self._leave()
        if self._record is not None:
            self._sent = self._record.ring.end
            self._custody.close(self._record)  # before its descriptor is another connection's
            self._record = None
        self._loose.clear()
        self._num_loose = 0
        self._sock.close()
        self._loop.call_soon(self.receiver.connection_lost, error)

    def _leave(self) -> None:
        """Nothing more is read or written here."""
        self._is_closed = self._is_closing = True
        self._staged.clear()
        self._num_staged = 0
        self._is_reading = False
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)

    def hand_over(self, number: int) -> Departing | None:
        """Leave the connection, with the request at hand, of which nothing is answered, to the gateway of this number.
        None: not all of that is known here."""
        record = self._record
        if record is None or not self._is_recording or self._is_closing or self._is_stream or self._num_unsent:
            return None
        flags = record.commit.flags | IS_GONE | number << GONE_TO_AT
        record.put(record.commit._replace(flags=flags, num_rendered=self._received))
        departing = Departing(self._sock, record, number, self.inbox_begin, self._received, record.ring.end)
        self._record = None
        self._leave()
        self._loop.call_soon(self.receiver.connection_lost, None)
        return departing

    def request_name(self) -> str:
        """The name of the request at hand: its connection, and where in it the request begins. Nothing if it is not
        recorded.
        """
        if self._record is None or self.is_loose:
            return ""
        return f"{self._record.cookie:x}-{self.inbox_begin}"

    def received_between(self, begin: int, end: int) -> bytes:
        """These bytes, as they came; none if the ledger does not have them."""
        if self._record is None or self.is_loose:
            return b""
        return self._record.inbox.read(begin, end)

    # -- asyncio's questions ---------------------------------------------------------------------

    def get_write_buffer_size(self) -> int:
        return self._num_staged + self._num_unsent

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Always 0: `pause_writing` as soon as the kernel does not take all."""

    def get_protocol(self) -> Any:
        return self.receiver


def _name(ask: Any) -> Any:
    try:
        return ask()
    except OSError:
        return None
