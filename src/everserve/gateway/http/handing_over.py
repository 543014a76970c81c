"""A connection is handed to the gateway that its request is for, where several have one address.

    resume by id            the gateway that has the stream (streams/kept_names.py)
    views, stored things    the first gateway: it has what all have said, the files and the batches

Nothing of the request has been answered. What has come of it goes along, and the other gateway reads it again as if it
had accepted the connection itself; the connection stays there.

    here      marked in the ledger --> sent, through the supervisor (departures.py); the client sees nothing of it
    there     its record begins where the request begins --> the request is read --> it says that it has it
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from everserve.gateway.http.connections import Connections, HttpProtocol
from everserve.gateway.http.departures import Departures
from everserve.gateway.http.errors import unavailable
from everserve.gateway.http.transport import LedgerTransport
from everserve.ledger.pages import LedgerFull
from everserve.ledger.sockets import Counts, counts_of
from everserve.wire.messages import HandedOver

_FOR_FIRST = ("/metrics", "/events", "/load", "/v1/responses", "/v1/files", "/v1/batches")  # and all below them
_VIEWS = ("/cluster", "/cluster/experts", "/cluster/live")

log = logging.getLogger(__name__)


class Neighbourly(Protocol):
    """What is needed of the gateway here."""

    departures: Departures


class HandedAway(Response):
    """Another gateway answers."""

    def __init__(self) -> None:
        """Nothing is rendered."""
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Nothing is sent."""


async def hand_over(request: Request, gateway: Neighbourly, number: int) -> HandedAway:
    """To the gateway of this number."""
    connection: HttpProtocol | None = request.scope["state"].get("connection")
    ledger = connection.ledger if connection is not None else None
    departing = ledger.hand_over(number) if ledger is not None else None
    if departing is None:
        raise unavailable("Another process of this server has what this request needs. Please try again.")
    gateway.departures.add(departing)
    await asyncio.sleep(0)  # now the server knows that this connection is not its any more
    return HandedAway()


class FirstOnly:
    """Middleware of all gateways but the first: what is the first one's is handed to it."""

    def __init__(self, app: ASGIApp, gateway: Neighbourly) -> None:
        self._app = app
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _is_for_first(scope["method"], scope["path"]):
            await (await hand_over(Request(scope, receive), self._gateway, 0))(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _is_for_first(method: str, path: str) -> bool:
    if path in _VIEWS:
        return method != "POST"
    return any(path == prefix or path.startswith(f"{prefix}/") for prefix in _FOR_FIRST)


def take_in(message: HandedOver, fd: int, connections: Connections, create: Callable[[], HttpProtocol]) -> None:
    """Go on with a connection of another gateway, unless it is here, or was: it is sent until we say so."""
    sock = socket.socket(fileno=fd)
    if connections.has(message.cookie):
        sock.close()
        return
    try:
        sock.setblocking(False)
        counts = counts_of(sock)
        if counts != (message.begin + len(message.data), message.sent):
            raise ConnectionError("it was here before, and has gone on since")
        connections.num_accepted += 1
        _begin(sock, counts, message, connections, create())
    except OSError as error:  # its client has left
        log.debug("a connection was handed over, and has ended: %s", error)
        sock.close()


def _begin(
    sock: socket.socket, counts: Counts, message: HandedOver, connections: Connections, protocol: HttpProtocol
) -> None:
    record = connections.custody.open(sock, message.begin, counts.sent)
    if record is not None:
        try:
            record.inbox.append(message.data)
        except LedgerFull:
            connections.custody.close(record)
            record = None
    transport = LedgerTransport(sock, protocol, connections.custody, record, counts)
    if record is not None:
        transport.start()
    else:
        transport.start_with(message.data)
        transport.resume_reading()
