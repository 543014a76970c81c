"""Clients that do not read: bounded by bytes, by time, and counted; and what a shutdown leaves them time for."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import uvloop

from everserve.gateway.http.connections import UnreadWatch
from everserve.gateway.streams import outbox as outboxes
from everserve.gateway.streams.outbox import Outbox
from everserve.gateway.supervised import Supervised
from everserve.tables.requests import RequestSpec
from tests.support.gateway_toy import byte_level_tokenizer, settle, toy_server, until

TOKENS = byte_level_tokenizer().encode("one two", add_special_tokens=False).ids
BODY = {"prompt": "say", "max_tokens": len(TOKENS)}


def script(spec: RequestSpec) -> list[int]:
    return TOKENS


def run(test: Callable[[], Awaitable[None]], loop_factory: Any = None) -> None:
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(asyncio.wait_for(test(), 20))  # type: ignore[arg-type]


class Connection(asyncio.Protocol):
    """One that is watched."""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.watch = UnreadWatch(transport)
        self.is_watched = self.is_lost = False

    def pause_writing(self) -> None:
        self.is_watched = True
        self.watch.begin()

    def resume_writing(self) -> None:
        self.is_watched = False
        self.watch.end()

    def connection_lost(self, exc: Exception | None) -> None:
        self.watch.end()
        self.is_lost = True


def test_a_connection_ends_when_its_client_has_read_nothing_for_long() -> None:
    async def test() -> None:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        loop = asyncio.get_running_loop()
        _, connection = await loop.connect_accepted_socket(Connection, ours)
        connection.transport.write(b"x")
        assert not connection.is_watched, "the kernel has it"
        connection.transport.write(bytes(8 << 20))
        assert connection.is_watched
        for _ in range(3):  # it reads, if slowly: it keeps its connection whenever the time is up
            before = connection.transport.get_write_buffer_size()
            while connection.transport.get_write_buffer_size() == before:
                await loop.sock_recv(theirs, 1 << 16)
                await asyncio.sleep(0)
            connection.watch.look()
            await settle()
            assert connection.is_watched and not connection.is_lost
        connection.transport.close()  # also if the server has nothing more to say: the rest may still be read
        await settle()
        assert not connection.is_lost
        connection.watch.look()
        await until(lambda: connection.is_lost)
        theirs.close()

    run(test, uvloop.new_event_loop)


def test_a_client_that_reads_all_is_not_watched_any_more() -> None:
    async def test() -> None:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        loop = asyncio.get_running_loop()
        _, connection = await loop.connect_accepted_socket(Connection, ours)
        connection.transport.write(bytes(4 << 20))
        assert connection.is_watched
        num_left = 4 << 20
        while num_left:
            num_left -= len(await loop.sock_recv(theirs, 1 << 20))
        await until(lambda: not connection.is_watched)
        assert connection.watch._timer is None
        connection.transport.abort()
        theirs.close()

    run(test, uvloop.new_event_loop)


def test_what_waits_for_a_client_is_bounded_by_bytes() -> None:
    async def test() -> None:
        outbox, event = Outbox(), bytes(1 << 20)
        writer = asyncio.ensure_future(asyncio.Event().wait())
        outbox.attach(writer)  # type: ignore[arg-type]
        for _ in range(outboxes.MAX_PENDING_BYTES >> 20):
            outbox.put([event])
        await settle()
        assert not writer.cancelled()
        outbox.take()
        outbox.put([event])
        await settle()
        assert not writer.cancelled(), "it has read what was there"
        for _ in range(outboxes.MAX_PENDING_BYTES >> 20):
            outbox.put([event])
        await settle()
        assert writer.cancelled()

    run(test)


def test_an_answer_has_a_place_until_it_is_read() -> None:
    async def test() -> None:
        async with toy_server(script, is_paced=True, max_queue=2) as server:
            tasks = []
            for stream in (False, True):
                task, answer, _ = server.begin("POST", "/v1/completions", {**BODY, "stream": stream}, reads=False)
                tasks.append(task)
                while not answer.body or server.worker.advance():
                    server.worker.advance()
                    await settle()
            assert server.gateway.fleet.num_streams == 0 and server.gateway.num_requests == 2
            refused = await server.post("/v1/completions", BODY)
            assert refused.status == 503 and "2 of 2 places" in refused.error["message"]
            tasks[0].cancel()
            await settle()
            task, answer, _ = server.begin("POST", "/v1/completions", BODY)
            while not answer.is_complete:
                server.worker.advance()
                await settle()
            assert answer.status == 200
            tasks[1].cancel()

    run(test)


class Unsent:
    """A connection with bytes that its client has not read."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.transport = self

    def get_write_buffer_size(self) -> int:
        return self.num_bytes


def test_a_shutdown_waits_for_clients_that_still_read() -> None:
    async def test() -> None:
        async with toy_server(script) as server:
            unsent = Unsent(100)
            http = SimpleNamespace(should_exit=False, server_state=SimpleNamespace(connections={unsent, Unsent(0)}))
            jobs = SimpleNamespace(close=lambda: None)
            nothing: Any = SimpleNamespace()
            process = Supervised(nothing, server.gateway, http, jobs, nothing, nothing)  # type: ignore[arg-type]
            draining = asyncio.ensure_future(process._drain(grace_s=3600))
            await until(lambda: server.gateway.is_draining)
            await asyncio.wait([draining], timeout=0.1)
            assert not http.should_exit
            unsent.num_bytes = 0
            await draining
            assert http.should_exit

            unsent.num_bytes, http.should_exit = 100, False
            await process._drain(grace_s=0)
            assert http.should_exit, "the time is up"

    run(test)
