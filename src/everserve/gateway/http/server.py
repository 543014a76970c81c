"""The HTTP server: uvicorn, with a listener of our own that reserves descriptors for workers.

A process has a limit of open descriptors. If clients could use all of them, the gateway could not receive the channel
of the next worker, or of the next orchestrator. So connections are accepted one at a time, and only while enough
descriptors are left; beyond that, one that is idle or slow is closed for each new one, and if there is none, the new
one gets a 503.
"""

import asyncio
import contextlib
import functools
import os
import resource
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from everserve.gateway.http.connections import Connections, HttpProtocol, raw_response
from everserve.gateway.http.errors import unavailable

_SWEEP_TICKS = 10  # of uvicorn's tenths of a second
_BATCH = 32  # connections accepted before the event loop's other tasks run
_PAUSE_S = 0.1  # after the kernel had no descriptor, or no memory
_WANTED_DESCRIPTORS = 65536
_RESERVED_DESCRIPTORS = 256  # for channels to workers, the orchestrator and the supervisor, for files and exporters ...
_RESERVED_SHARE = 0.25  # ... but no more than this, where the limit is low
_TURNED_AWAY = raw_response(unavailable("The server has as many connections as it can have. Please try again."))


def max_connections(num_other: int) -> int:
    """How many clients may be connected while so many other descriptors are open. The limit may change any time."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _WANTED_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
    return max(1, limit - num_other - min(_RESERVED_DESCRIPTORS, int(limit * _RESERVED_SHARE)))


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
        self._opening: set[asyncio.Task[None]] = set()
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
        num_allowed = max_connections(self._num_other)
        for _ in range(_BATCH):
            try:
                sock, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:  # no descriptor, no memory: trying again at once would only be busy
                self._loop.remove_reader(self._sock)
                self._loop.call_later(_PAUSE_S, self._listen)
                return
            if self._connections.num_open >= num_allowed and not self._connections.make_room():
                self._turn_away(sock)
                continue
            self._connections.num_accepted += 1
            task = self._loop.create_task(self._open(sock))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self, sock: socket.socket) -> None:
        try:
            sock.setblocking(False)
            await self._loop.connect_accepted_socket(self._create, sock)
        except OSError:  # it is gone already
            self._connections.num_accepted -= 1
            sock.close()

    def _turn_away(self, sock: socket.socket) -> None:
        self._connections.closed["refused"] += 1
        with contextlib.suppress(OSError):
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                sock.recv(1 << 16)  # what is left unread would make the kernel discard our answer
            sock.send(_TURNED_AWAY)
        sock.close()


class Server(uvicorn.Server):
    """uvicorn with this listener, and without its signal handlers."""

    def __init__(self, config: uvicorn.Config, connections: Connections) -> None:
        super().__init__(config)
        self._connections = connections

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        create = functools.partial(
            HttpProtocol,
            connections=self._connections,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        self.servers: list[Any] = [ListeningSocket(sock, self._connections, create) for sock in sockets or []]
        self.started = True

    async def on_tick(self, counter: int) -> bool:
        if counter % _SWEEP_TICKS == 0:
            self._connections.sweep()
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
