"""What a gateway gives to the next keeper, and when it does not."""

import asyncio
import contextlib
import gc
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from everserve.gateway import succession
from everserve.gateway.succession import Given, Giver, take
from everserve.ledger.ledger import Ledger
from everserve.ledger.sockets import cookie_of
from everserve.wire.channel import AsyncChannel, Channel
from everserve.wire.messages import HandedOver
from tests.unit.gateway.test_transport import SHAPE


class Ended(Exception):
    """Instead of the end of the process."""


class World:
    """A gateway with some clients, and the keeper that is to follow its own."""

    def __init__(self, num_clients: int) -> None:
        self.listen = socket.create_server(("127.0.0.1", 0))
        self.clients: list[socket.socket] = []
        self.servers: list[socket.socket] = []
        for _ in range(num_clients):
            self.clients.append(socket.create_connection(self.listen.getsockname()))
            self.servers.append(self.listen.accept()[0])
        self.ledger = Ledger.map(Ledger.create(SHAPE))
        self.supervisor, self.control = Channel.pair(are_packets=True)
        self.to_heir, self.to_gateway = socket.socketpair()
        self.given: Given | None = None

    def take(self) -> threading.Thread:
        """The next keeper's part."""

        def run() -> None:
            self.given = take(self.to_gateway, self.ledger)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    async def give(self, turns: int = 50) -> bool:
        """The gateway's part. Whether it has ended."""
        ended = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().set_exception_handler(
            lambda loop, context: ended.set_result(True) if isinstance(context.get("exception"), Ended) else None
        )
        self.channel = AsyncChannel(self.control)
        Giver(self.channel, self.ledger, self.listen).begin(self.to_heir)
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(asyncio.shield(ended), turns / 100)
        return False


def num_open() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def end(status: int) -> None:
        raise Ended

    monkeypatch.setattr(succession.os, "_exit", end)
    yield


def test_everything_is_given_and_the_ledger_says_so(ends: None) -> None:
    world = World(num_clients=450)
    heir = world.take()
    assert asyncio.run(world.give(turns=6000))
    heir.join()
    assert world.ledger.num_given == 1
    assert world.given is not None
    assert os.path.samestat(os.fstat(world.given.control), os.fstat(world.control.fileno()))
    found = {cookie_of(socket.socket(fileno=fd)) for fd in world.given.connections}
    assert found == {cookie_of(server) for server in world.servers}


def test_a_keeper_that_dies_before_it_is_ready_gets_nothing(ends: None) -> None:
    world = World(num_clients=2)
    world.to_gateway.close()
    assert not asyncio.run(world.give())
    assert world.ledger.num_given == 0
    assert all(server.fileno() >= 0 for server in world.servers)


def test_without_the_note_in_the_ledger_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway dies when it has sent everything and written nothing."""
    gc.collect()  # other tests' sockets
    world, before = World(num_clients=3), num_open()

    def die(ledger: Ledger) -> None:
        raise Ended

    monkeypatch.setattr(Ledger, "note_given", die)
    heir = world.take()
    assert asyncio.run(world.give(turns=6000))
    heir.join()
    assert world.given is None
    assert num_open() == before - 2, "both ends of the channel are closed, and nothing else"


def test_connections_in_messages_are_handled_first(ends: None) -> None:
    """They would belong to no stream."""

    async def run(world: World) -> None:
        message = HandedOver(gateway=0, by=1, cookie=1, begin=0, data=b"", sent=0)
        Channel(world.supervisor).send(message, [world.servers[0].fileno()])
        assert not await world.give(turns=30)
        _, fds = await world.channel.receive_frame()
        for fd in fds.take():
            os.close(fd)
        while not world.ledger.num_given:
            await asyncio.sleep(0.01)

    world = World(num_clients=2)
    heir = world.take()
    asyncio.run(run(world))
    assert world.ledger.num_given == 1
    heir.join()
