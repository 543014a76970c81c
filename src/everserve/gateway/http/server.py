"""The HTTP server: uvicorn, with a listener of our own that reserves descriptors for workers.

A process has a limit of open descriptors. If clients could use all of them, the gateway could not receive the channel
of the next worker, or of the next orchestrator. So connections are accepted one at a time, and only while enough
descriptors are left; beyond that, one that is idle or slow is closed for each new one, and if there is none, the new
one gets a 503. Some of the reserved descriptors are for refused connections, until their clients have read why.
"""

import asyncio
import contextlib
import os
import resource
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from everserve.gateway.http.connections import Connections, HttpProtocol
from everserve.gateway.http.transport import LedgerTransport

_SWEEP_TICKS = 10  # of uvicorn's tenths of a second
_BATCH = 32  # connections accepted before the event loop's other tasks run
_PAUSE_S = 0.1  # after the kernel had no descriptor, or no memory
_LEAVE_S = 0.005  # for a gateway that has less to do to accept a connection
_WANTED_DESCRIPTORS = 65536
_RESERVED_DESCRIPTORS = 256  # for channels to workers, the orchestrator and the supervisor, for files and exporters ...
_RESERVED_SHARE = 0.25  # ... but no more than this, where the limit is low
_REFUSED_SHARE = 0.25  # of the reserved ones that refused connections may have


def max_connections(num_other: int) -> int:
    """How many clients may be connected while so many other descriptors are open. The limit may change any time."""
    limit = _limit()
    return max(1, limit - num_other - _num_reserved(limit))


def max_refused() -> int:
    """How many refused clients may be connected besides."""
    return int(_num_reserved(_limit()) * _REFUSED_SHARE)


def _limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _WANTED_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def _num_reserved(limit: int) -> int:
    return min(_RESERVED_DESCRIPTORS, int(limit * _RESERVED_SHARE))


def _num_descriptors() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 (names are enough)
    except OSError:
        return 0


class ListeningSocket:
    """Accepts connections from one socket. Stands where uvicorn has an asyncio.Server."""

    def __init__(self, sock: socket.socket, connections: Connections, create: Callable[[], HttpProtocol]) -> None:
        self._sock = sock
        self._connections = connections
        self._create = create
        self._loop = asyncio.get_running_loop()
        self._is_closed = False
        self._num_other = _num_descriptors()
        sock.setblocking(False)
        self._listen()

    def close(self) -> None:
        self._is_closed = True
        self._loop.remove_reader(self._sock)

    async def wait_closed(self) -> None:
        """Nothing of it is left after `close`."""

    def _listen(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._sock, self._accept)

    def _accept(self) -> None:
        for _ in range(_BATCH):
            if not self._connections.should_accept():
                self._leave_to_others()
                return
            if not self._accept_one():
                return

    def _leave_to_others(self) -> None:
        """All gateways of this address are told of a connection. If no other takes it, this one does."""
        self._loop.remove_reader(self._sock)
        self._loop.call_later(_LEAVE_S, self._accept_left)

    def _accept_left(self) -> None:
        if not self._is_closed:
            self._listen()
            self._accept_one()

    def _accept_one(self) -> bool:
        """False: there is none, or it cannot be had now."""
        try:
            sock, _ = self._sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return False
        except OSError:  # no descriptor, no memory: trying again at once would only be busy
            self._loop.remove_reader(self._sock)
            self._loop.call_later(_PAUSE_S, self._listen)
            return False
        num_allowed, self._connections.num_extra = max_connections(self._num_other), max_refused()
        while self._connections.num_open >= num_allowed and self._connections.make_room():
            pass
        has_room = self._connections.num_open < num_allowed
        self._connections.num_accepted += 1
        self._open(sock, has_room)
        return True

    def _open(self, sock: socket.socket, has_room: bool) -> None:
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:  # it is gone already
            self._connections.num_accepted -= 1
            sock.close()
            return
        connection, custody = self._create(), self._connections.custody
        LedgerTransport(sock, connection, custody, custody.open(sock)).start()
        if not has_room:
            self._connections.turn_away(connection)


class Server(uvicorn.Server):
    """uvicorn with this listener, and without its signal handlers."""

    def __init__(self, config: uvicorn.Config, connections: Connections) -> None:
        super().__init__(config)
        self._connections = connections

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        create = self.create_protocol
        self.servers: list[Any] = [ListeningSocket(sock, self._connections, create) for sock in sockets or []]
        self.started = True

    def create_protocol(self) -> HttpProtocol:
        """The protocol for one connection."""
        return HttpProtocol(
            connections=self._connections,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )

    async def on_tick(self, counter: int) -> bool:
        if counter % _SWEEP_TICKS == 0:
            self._connections.sweep()
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
