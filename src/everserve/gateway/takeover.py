"""What a new gateway does with what the one before has left: it goes on with every connection and every request.

    a connection    is it in the table of descriptors?  -> what is committed and was not sent is sent;
                                                           the request at hand is read again, and what is behind it
                    it was accepted, no more            -> it is a new one
                    it was on its way to another one    -> it is sent there again
    a record        its connection reads the request    -> the same answer goes on (http/recorded.py)
                    its client is away, may come back   -> the request is read again, for a client that is away
                    neither                             -> it is not needed

A request that the gateway was busy with when it crashed, three times in a row, may be the cause: it gets a 500.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Collection, Coroutine
from typing import Any

from everserve.gateway.gateway import Gateway
from everserve.gateway.http.connections import HttpProtocol
from everserve.gateway.http.departures import Departing
from everserve.gateway.http.errors import HttpError
from everserve.gateway.http.recorded import Recorded
from everserve.gateway.http.transport import LedgerTransport
from everserve.gateway.streams.journal import birth_of
from everserve.ledger.connections import GONE_TO_AT, IS_GONE, IS_RETURN, Connection
from everserve.ledger.ledger import Ledger
from everserve.ledger.pages import BrokenChain
from everserve.ledger.requests import KEPT
from everserve.ledger.sockets import Counts, cookie_of, counts_of, is_of_listener, socket_at
from everserve.procs.process import open_fds

# What deaths say against a request. Three are enough at the instruction that handles it, or crashes while it is being
# prepared; of those that came from outside, or for want of memory, while it was being prepared, ten.
_CERTAIN, _VAGUE, _MAX_SUSPICION = 10, 3, 30
_WITHIN_S = 2.0  # for requests to be read again; new ones do not wait for those that take longer
_AT_MOST_S = 60.0  # until a client that comes back for one of these is told that there is nothing

log = logging.getLogger(__name__)

CreateProtocol = Callable[[], HttpProtocol]


class Takeover:
    """One, at the start of a gateway."""

    def __init__(
        self,
        gateway: Gateway,
        ledger: Ledger,
        listen: socket.socket,
        create: CreateProtocol,
        handed_over: Callable[[], Collection[int]] = tuple,
    ) -> None:
        """`handed_over`: descriptors that have come in messages, which are still to be handled."""
        self._gateway = gateway
        self._ledger = ledger
        self._listen = listen
        self._create = create
        self._handed_over = handed_over
        self._busy = ledger.left_handling
        self._late: set[asyncio.Task[None]] = set()
        self._recorded: dict[int, Recorded] = {}  # by reference
        self.num_connections = 0

    async def run(self) -> None:
        """Everything is under way when this returns. What takes longer, a large grammar for example, goes on: clients
        who come back for it wait for it (Keeper.expect)."""
        self._gateway.is_taking_over = True
        self._adopt_connections()
        self._drop_rest()
        away = [self._read_for_absent(recorded) for recorded in self._absent()]
        for recorded in self._recorded.values():
            self._gateway.keeper.expect(recorded.birth.request_id, recorded.opened)
        end = asyncio.create_task(self._end(away))
        self._late.add(end)
        end.add_done_callback(self._late.discard)
        await asyncio.wait([end], timeout=_WITHIN_S)

    async def _end(self, away: list[Coroutine[Any, Any, None]]) -> None:
        """When all that was begun goes on, and no longer: what is taken over needs no place, for it has one."""
        reading = asyncio.gather(*away, *(recorded.opened for recorded in self._recorded.values()))
        try:
            await asyncio.wait_for(reading, _AT_MOST_S)
        except TimeoutError:
            log.warning("a request could not be read again within %.0f s", _AT_MOST_S)
        finally:
            self._gateway.is_taking_over = False
            self._gateway.on_taken_over()
            for recorded in self._recorded.values():
                recorded.done()

    # -- connections -----------------------------------------------------------------------------

    def _adopt_connections(self) -> None:
        left = dict(self._ledger.left.connections)
        others = set(self._handed_over())
        found = [sock for fd in open_fds() if fd not in others and (sock := socket_at(fd)) is not None]
        for sock in found:
            if not is_of_listener(sock, self._listen):
                sock.detach()
                continue
            record = left.pop(cookie_of(sock), None)
            try:
                counts = counts_of(sock)
                if record is None:
                    self._adopt_new(sock, counts)
                else:
                    self._adopt(sock, counts, record)
            except (OSError, BrokenChain):
                sock.close()
                if record is not None:
                    self._ledger.close_connection(record)
        for record in left.values():
            self._ledger.close_connection(record)

    def _adopt_new(self, sock: socket.socket, counts: Counts) -> None:
        """It was accepted, and no more; or it was about to be closed."""
        if counts != (0, 0):
            sock.close()
            return
        self._transport(sock, self._gateway.connections.custody.open(sock), counts).start()

    def _adopt(self, sock: socket.socket, counts: Counts, record: Connection) -> None:
        commit = record.commit
        sock.setblocking(False)
        if commit.flags & IS_GONE:
            received, to = commit.num_rendered, commit.flags >> GONE_TO_AT
            record.inbox.resume(received)
            self._gateway.departures.add(Departing(sock, record, to, commit.inbox_begin, received, commit.ring_end))
            return
        transport = LedgerTransport.adopt(sock, self._protocol(), self._gateway.connections.custody, record, counts)
        protocol = transport.receiver
        self._count_deaths(record)
        if record.suspicion >= _MAX_SUSPICION:
            transport.refuse(HttpError(500, "The gateway died again and again while it handled this request."))
            return
        if commit.request and not commit.flags & IS_RETURN:
            protocol.recorded = self._recorded_as(commit.request)
        if commit.request and protocol.recorded is None and not commit.flags & IS_RETURN:
            transport.forget_request()
        transport.start()
        if protocol.recorded is not None:  # the connection broke before the request was read from it
            del self._recorded[commit.request]

    def _transport(self, sock: socket.socket, record: Connection | None, counts: Counts) -> LedgerTransport:
        sock.setblocking(False)
        return LedgerTransport(sock, self._protocol(), self._gateway.connections.custody, record, counts)

    def _protocol(self) -> HttpProtocol:
        self._gateway.connections.num_accepted += 1
        self.num_connections += 1
        return self._create()

    def _count_deaths(self, record: Connection) -> None:
        """How much one death says against a request, if the one before did, too."""
        suspicion = 0
        if self._busy == record.index + 1 or (record.is_preparing and self._ledger.has_crashed):
            suspicion = _CERTAIN
        elif record.is_preparing:
            suspicion = _VAGUE
        record.suspicion = record.suspicion + suspicion if suspicion else 0
        record.is_preparing = False

    # -- requests --------------------------------------------------------------------------------

    def _recorded_as(self, reference: int) -> Recorded | None:
        request = self._ledger.left.requests.get(reference)
        if request is None or reference in self._recorded:
            return None
        birth = birth_of(request)
        if birth is None:
            return None
        self._recorded[reference] = recorded = Recorded(request, birth)
        return recorded

    def _drop_rest(self) -> None:
        """Records whose connections are gone, and whose clients cannot come back."""
        for reference, request in self._ledger.left.requests.items():
            if reference not in self._recorded and not (request.state == KEPT and self._gateway.keeper.is_on):
                self._ledger.close_request(request)

    def _absent(self) -> list[Recorded]:
        """Requests whose clients are away."""
        left = [reference for reference in self._ledger.left.requests if reference not in self._recorded]
        found = []
        for reference in left:
            request = self._ledger.left.requests[reference]
            if request.state != KEPT:
                continue
            recorded = self._recorded_as(reference)
            if recorded is not None and recorded.birth.raw:
                found.append(recorded)
            else:
                self._recorded.pop(reference, None)
                self._ledger.close_request(request)
        return found

    async def _read_for_absent(self, recorded: Recorded) -> None:
        """Read a request again whose client has left: as if the client had come with it, and left at once."""
        ours, theirs = socket.socketpair()
        with theirs:
            transport = self._transport(ours, None, Counts(0, 0))
            transport.receiver.recorded = recorded
            transport.start_with(recorded.birth.raw)
            await asyncio.wait([recorded.opened])
            transport.abort()
