"""Connections on their way to another gateway: sent until they are there, and never twice there."""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Iterator

import pytest

from everserve.gateway.http import departures as module
from everserve.gateway.http.connections import Connections, HttpProtocol
from everserve.gateway.http.departures import Departing, Departures
from everserve.gateway.http.handing_over import take_in
from everserve.gateway.http.transport import Custody
from everserve.ledger.sockets import cookie_of
from everserve.wire.messages import HandedOver
from tests.support.descriptors import num_fds
from tests.support.ledgers import new_ledger

REQUEST = b"POST /v1/completions HTTP/1.1\r\ncontent-length: 2\r\n\r\n{}"


class Reading(asyncio.Protocol):
    """What reads requests, at the other gateway."""

    def __init__(self, connections: Connections) -> None:
        self.connections = connections
        self.recorded = self.ledger = None
        self.read = b""

    def connection_made(self, transport) -> None:
        self.ledger = transport
        self.connections.opened(self)

    def connection_lost(self, exc) -> None:
        self.connections.lost(self)

    def data_received(self, data: bytes) -> None:
        self.read += data


class World:
    """A client, the gateway that has read its request, and another one."""

    def __init__(self, send: Callable[[HandedOver, int], None]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listen:
            self.client = socket.create_connection(listen.getsockname())
            self.sock, _ = listen.accept()
        self.here, self.there = Custody(new_ledger()[0]), Connections()
        self.there.custody = Custody(new_ledger()[0])
        self.protocols: list[Reading] = []
        self.departures = Departures(0, self.here.close)
        self.departures.send = send
        self.cookie = cookie_of(self.sock)

    def depart(self) -> None:
        """It has read the request, and nothing more."""
        record = self.here.open(self.sock)
        assert record is not None
        self.client.sendall(REQUEST)
        assert self.sock.recv(1000) == REQUEST
        record.inbox.append(REQUEST)
        self.departures.add(Departing(self.sock, record, 1, 0, len(REQUEST), 0))

    def take_in(self, message: HandedOver, fd: int) -> None:
        take_in(message, fd, self.there, self._create)

    def _create(self) -> HttpProtocol:
        self.protocols.append(Reading(self.there))
        return self.protocols[-1]  # type: ignore[return-value]

    def close(self) -> None:
        self.client.close()
        for protocol in self.protocols:
            protocol.ledger.abort()


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "_AGAIN_S", 0.01)
    before = num_fds()
    yield
    assert num_fds() == before


def test_it_is_sent_until_it_is_there() -> None:
    async def test() -> None:
        def lose(message: HandedOver, fd: int) -> None:
            """The first two."""
            lost.append(message)
            if len(lost) < 3:
                os.close(fd)
            else:
                world.take_in(message, fd)
                world.departures.arrived(message.cookie)

        lost: list[HandedOver] = []
        world = World(lose)
        world.depart()
        while not world.protocols:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        assert len(lost) == 3 and len(world.protocols) == 1 and world.protocols[0].read == REQUEST
        assert world.sock.fileno() == -1 and world.there.has(world.cookie)
        world.close()

    run(test)


@pytest.mark.parametrize("has_answered", [False, True])
def test_what_comes_twice_is_read_once(has_answered: bool) -> None:
    """The word that it is there was lost. It may be over by then: more was sent on it than when it left."""

    async def test() -> None:
        world = World(lambda message, fd: come.append((message, fd)))
        come: list[tuple[HandedOver, int]] = []
        world.depart()
        world.take_in(*come.pop(0))
        if has_answered:
            world.protocols[0].ledger.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            world.protocols[0].ledger.close()
            assert await asyncio.to_thread(world.client.recv, 100)
            while world.there.has(world.cookie):
                await asyncio.sleep(0.001)
        while not come:
            await asyncio.sleep(0.001)
        world.take_in(*come.pop(0))
        assert len(world.protocols) == 1 and world.protocols[0].read == REQUEST
        world.departures.arrived(world.cookie)
        for _, fd in come:
            os.close(fd)
        world.close()
        await asyncio.sleep(0.01)

    run(test)


def test_a_connection_that_none_takes_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AT_MOST_S", 0.03)

    async def test() -> None:
        world = World(lambda message, fd: os.close(fd))
        world.depart()
        assert await asyncio.to_thread(world.client.recv, 1000) == b""
        world.close()

    run(test)
