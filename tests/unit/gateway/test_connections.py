"""Slow, endless and too many requests, against the real HTTP server around a toy application."""

import asyncio
import itertools
import json
import resource
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
import uvloop

from everserve.gateway.http import server as serving
from everserve.gateway.http.connections import ConnectionLimits, Connections
from everserve.gateway.http.server import Server, max_connections
from everserve.gateway.http.transport import Custody
from tests.support.ledgers import mapped_ledger

GET = b"GET /answer HTTP/1.1\r\nhost: x\r\n\r\n"
POST = b"POST /answer HTTP/1.1\r\nhost: x\r\n"


class Toy:
    """A server whose application reads the body and says how large it was; `/stream` goes on until it is told."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.connections = Connections(limits)
        self.connections.custody = Custody(mapped_ledger())
        self.ends = asyncio.Event()
        self.num_asked = 0
        self.num_streams = 0
        self.left: list[str] = []  # paths of requests whose clients left before the body was there
        self.port = 0
        self.errors: list[dict[str, Any]] = []

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        self.num_asked += 1
        num_bytes, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left.append(scope["path"])
                return
            num_bytes, more = num_bytes + len(message["body"]), message["more_body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/stream":
            self.num_streams += 1
            await send({"type": "http.response.body", "body": b"begin", "more_body": True})
            await self.ends.wait()
        await send({"type": "http.response.body", "body": b"%d bytes" % num_bytes, "more_body": False})

    async def connect(self, data: bytes = b"") -> "Client":
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        return Client(reader, writer)


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def read_until(self, text: bytes) -> bytes:
        return await self.reader.readuntil(text)

    async def rest(self) -> bytes:
        """Until the server ends the connection, in whatever way."""
        data = b""
        try:
            while part := await self.reader.read(1 << 16):
                data += part
        except ConnectionError:
            pass
        return data

    async def status(self) -> int:
        """Of the error that ends the connection."""
        head, _, body = (await self.rest()).partition(b"\r\n\r\n")
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
        return int(head.split()[1])

    def close(self) -> None:
        self.writer.transport.abort()


@asynccontextmanager
async def toy(limits: ConnectionLimits) -> AsyncIterator[Toy]:
    made = Toy(limits)
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: made.errors.append(context))
    sock = socket.create_server(("127.0.0.1", 0))
    made.port = sock.getsockname()[1]
    config = uvicorn.Config(
        made.app, interface="asgi3", lifespan="off", log_config=None, log_level="critical", timeout_graceful_shutdown=1
    )
    server = Server(config, made.connections)
    task = asyncio.create_task(server.serve(sockets=[sock]))
    await until(lambda: server.started)
    try:
        yield made
    finally:
        made.ends.set()
        server.should_exit = True
        await task
        for connection in list(server.server_state.connections):  # that it did not wait for
            connection.transport.abort()
    assert made.errors == [], "the gateway would have ended"
    ledger = made.connections.custody.ledger
    assert ledger is not None and ledger.open().connections == {}
    assert ledger.num_free_pages == ledger.shape.num_pages, "nothing is left in the ledger"


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


def run(test: Callable[[], Awaitable[None]]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(test(), 30))  # type: ignore[arg-type]


def headers(num_bytes: int, num: int = 8) -> bytes:
    lines = [b"x-%d: " % i for i in range(num)]
    return b"".join(line + b"a" * (num_bytes // num - len(line) - 2) + b"\r\n" for line in lines)


def test_headers_have_a_size() -> None:
    async def test() -> None:
        async with toy(ConnectionLimits()) as server:
            for size in (100, 60 << 10):
                client = await server.connect(GET[:-2] + headers(size) + b"\r\n")
                assert b"0 bytes" in await client.read_until(b"0 bytes")
                client.close()
            assert server.num_asked == 2
            for data in (
                GET[:-2] + headers(65 << 10) + b"\r\n",
                GET[:-2] + b"x: " + b"a" * (65 << 10) + b"\r\n\r\n",
                GET[:-2] + b"x: " + b"a" * (1 << 20),  # without an end
                b"GET /" + b"a" * (70 << 10),
                b"GET /answer?" + b"a" * (70 << 10) + b" HTTP/1.1\r\n\r\n",
                GET[:-2] + headers(20 << 10, 257) + b"\r\n",
                GET[:-2] + b"a:\r\n" * 5000,
            ):
                client = await server.connect(data)
                assert await client.status() == 431
                client.close()
            assert server.num_asked == 2 and server.connections.closed["headers"] == 7
            client = await server.connect(GET)  # on a connection that has been used before, too
            await client.read_until(b"0 bytes")
            client.writer.write(GET[:-2] + b"x: " + b"a" * (200 << 10))
            assert b"HTTP/1.1 431 " in await client.rest()

    run(test)


def test_endless_headers_are_not_read_to_their_end() -> None:
    async def test() -> None:
        async with toy(ConnectionLimits()) as server:
            client = await server.connect(GET[:-2] + b"x: ")
            num_sent = 0
            with pytest.raises(ConnectionError):
                while True:
                    client.writer.write(b"a" * (1 << 16))
                    num_sent += 1 << 16
                    await client.writer.drain()
                    assert num_sent < 64 << 20
            await until(lambda: server.connections.num_open == 0)

    run(test)


def test_headers_and_bodies_must_arrive_in_time() -> None:
    async def test() -> None:
        limits = ConnectionLimits(head_s=0.1, body_s=0.1)
        async with toy(limits) as server:
            silent = await server.connect()
            assert await silent.rest() == b"", "a connection that never asked is not answered"
            bodies = (b"content-length: 10\r\n\r\n12345", b"transfer-encoding: chunked\r\n\r\n5\r\n12345\r\n")
            begun = (b"G", GET[:-2], POST + b"x: y", *(POST + body for body in bodies))
            clients = [await server.connect(begin) for begin in begun]
            assert await asyncio.gather(*(client.status() for client in clients)) == [408] * 5
            for client in clients:
                client.close()
            again = await server.connect(GET)
            await again.read_until(b"0 bytes")
            again.writer.write(GET[:10])  # the second request of its connection
            assert b"HTTP/1.1 408 " in await again.rest()
            stream = await server.connect(b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n")
            await stream.read_until(b"begin")
            assert server.connections.closed["time"] >= 6 and server.left == ["/answer"] * 2
            server.ends.set()
            assert b"0 bytes" in await stream.read_until(b"0 bytes"), "an answer may take longer than its request"

    run(test)


def test_a_body_that_keeps_coming_may_take_longer() -> None:
    """Its deadline moves with what has arrived, and does not while it is the server that does not read."""

    async def test() -> None:
        now_s = [0.0]
        async with toy(ConnectionLimits()) as server:
            server.connections.clock = lambda: now_s[0]
            client = await server.connect(POST + b"content-length: 10000000\r\n\r\n")
            await until(lambda: server.num_asked == 1)
            (connection,) = server.connections._arriving
            assert connection.deadline_s(now_s[0]) == pytest.approx(30.0)
            client.writer.write(b"a" * (640 << 10))
            await until(lambda: connection.num_body_bytes == 640 << 10)
            assert connection.deadline_s(now_s[0]) == pytest.approx(40.0)
            now_s[0] = 39.0
            server.connections.sweep()
            client.writer.write(b"a" * (10_000_000 - (640 << 10)))
            await client.read_until(b"10000000 bytes")
            client.close()

    run(test)


def test_too_many_that_have_not_asked() -> None:
    """Those that take longest are closed; a client that asks at once is served, and a stream goes on."""

    async def test() -> None:
        now_s = [0.0]
        async with toy(ConnectionLimits(num_arriving=10)) as server:
            server.connections.clock = lambda: now_s[0]
            stream = await server.connect(b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n")
            await stream.read_until(b"begin")
            slow = [await server.connect(GET[:-2] if i % 2 else b"") for i in range(30)]
            await until(lambda: server.connections.num_arriving == 30)  # they may just be a burst
            now_s[0] = 2.0
            fresh = await server.connect(GET)
            assert b"0 bytes" in await fresh.read_until(b"0 bytes")
            await until(lambda: server.connections.num_arriving <= 10)
            assert server.connections.closed["number"] >= 20
            for begun, silent in zip(slow[1:20:2], slow[0:20:2], strict=True):
                assert await begun.status() == 503, "it has begun to ask"
                assert await silent.rest() == b""
            assert server.connections.num_open <= 12
            server.ends.set()
            assert b"0 bytes" in await stream.read_until(b"0 bytes")

    run(test)


def test_bodies_that_are_arriving_have_a_size_together() -> None:
    async def test() -> None:
        async with toy(ConnectionLimits(request_bytes=1 << 20)) as server:
            begin = POST + b"content-length: 400001\r\n\r\n"
            slow = [await server.connect(begin + b"a" * 400_000) for _ in range(2)]
            await until(lambda: server.connections.memory.num_bytes == 800_000)
            third = await server.connect(begin + b"a" * 400_001)
            assert b"400001 bytes" in await third.read_until(b"400001 bytes")
            assert await slow[0].status() == 503 and server.connections.closed["memory"] == 1
            await until(lambda: server.connections.memory.num_bytes == 400_000)
            slow[1].writer.write(b"a")
            assert b"400001 bytes" in await slow[1].read_until(b"400001 bytes")
            assert server.connections.memory.num_bytes == 0

    run(test)


def test_bodies_count_until_they_are_answered() -> None:
    """One that has arrived is not refused for another one that arrives."""

    async def test() -> None:
        async with toy(ConnectionLimits(request_bytes=1 << 20)) as server:
            held = POST.replace(b"/answer", b"/stream") + b"content-length: 800000\r\n\r\n" + b"a" * 800_000
            stream = await server.connect(held)
            await stream.read_until(b"begin")
            assert server.connections.memory.num_bytes == 800_000
            late = await server.connect(POST + b"content-length: 400000\r\n\r\n" + b"a" * 400_000)
            assert await late.status() == 503
            server.ends.set()
            assert b"800000 bytes" in await stream.read_until(b"800000 bytes")
            assert server.connections.memory.num_bytes == 0

    run(test)


def test_a_client_that_sends_everything_before_it_reads_sees_why_it_is_refused() -> None:
    """Long after it was refused, and more than any buffer between us holds."""
    num_bytes = 24 << 20

    def ask(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
            sock.sendall(POST + b"content-length: %d\r\n\r\n" % num_bytes + b"a" * num_bytes)
            answer = b""
            while part := sock.recv(1 << 16):
                answer += part
            return answer

    async def test() -> None:
        async with toy(ConnectionLimits(request_bytes=1 << 20)) as server:
            answer = await asyncio.to_thread(ask, server.port)
            assert answer.startswith(b"HTTP/1.1 503 ") and b"\r\nretry-after: 1\r\n" in answer
            assert server.connections.memory.num_bytes == 0 and server.connections.closed["memory"] == 1

    run(test)


@pytest.mark.parametrize(
    "rest",
    [
        b"1\r\na\r\n" * 200_000,
        b"5;" + b"x" * (1 << 20),
        b"1\r\na\r\n0\r\nx: " + b"y" * (1 << 20),
        b"1\r\na\r\n0\r\n" + b"x: y\r\n" * 100_000,
    ],
    ids=["tiny chunks", "endless extension", "endless trailer", "many trailers"],
)
def test_what_surrounds_a_body_has_a_size(rest: bytes) -> None:
    async def test() -> None:
        async with toy(ConnectionLimits()) as server:
            client = await server.connect(POST + b"transfer-encoding: chunked\r\n\r\n" + rest)
            assert await client.status() in (400, 431)
            client.close()
            usual = b"".join(b"%x\r\n%s\r\n" % (size, b"a" * size) for size in (1, 10, 100_000, 7) * 20)
            good = await server.connect(POST + b"transfer-encoding: chunked\r\n\r\n" + usual + b"0\r\n\r\n")
            assert b"2000360 bytes" in await good.read_until(b"2000360 bytes")

    run(test)


CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n"
AHEAD = {GET * 20: [0] * 20, POST + b"content-length: 3\r\n\r\nabc": [3], CHUNKED * 30: [2] * 30, GET: [0]}


@pytest.mark.parametrize("size", [1, 3, 50, 1 << 20])
def test_requests_sent_ahead(size: int) -> None:
    """They are answered one after the other, whatever the pieces in which they come."""

    async def test() -> None:
        async with toy(ConnectionLimits()) as server:
            client, data = await server.connect(), b"".join(AHEAD)
            for start in range(0, len(data), size):
                client.writer.write(data[start : start + size])
                await asyncio.sleep(0)
            for num_bytes in itertools.chain(*AHEAD.values()):
                assert b"\r\n%d bytes\r\n" % num_bytes in await client.read_until(b"\r\n0\r\n\r\n")
            assert server.connections.num_arriving == 0

    run(test)


def test_requests_sent_ahead_without_end() -> None:
    async def test() -> None:
        async with toy(ConnectionLimits(ahead_bytes=10_000)) as server:
            stream = b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n"
            few, many = [await server.connect(stream) for _ in range(2)]
            for client, num in ((few, 100), (many, 1000)):
                await client.read_until(b"begin")
                client.writer.write(GET * num)
            await many.rest()
            await until(lambda: server.connections.num_open == 1)
            assert server.num_asked == 2 and not any(connection.pipeline for connection in server.connections._open)

    run(test)


def test_a_few_requests_begin_in_each_turn_of_the_loop() -> None:
    """Of all connections together, and of each connection one at a time."""

    async def test() -> None:
        async with toy(ConnectionLimits()) as server:
            most, seen = 0, 0

            async def watch() -> None:
                nonlocal most, seen
                while True:
                    await asyncio.sleep(0)
                    most, seen = max(most, server.num_asked - seen), server.num_asked

            clients = [await server.connect() for _ in range(60)]
            watching = asyncio.create_task(watch())
            for client in clients:
                client.writer.write(GET * 8)
            for client in clients:
                for _ in range(8):
                    await client.read_until(b"0 bytes\r\n0\r\n\r\n")
            watching.cancel()
            assert server.num_asked == 480 and most <= 8, "four, and another turn may be counted with it"

    run(test)


def test_descriptors_are_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all places taken, a new client gets that of an idle or slow one; if all are answered, it gets a 503."""
    monkeypatch.setattr(serving, "max_connections", lambda num_other: 4)

    async def test() -> None:
        now_s = [0.0]
        async with toy(ConnectionLimits()) as server:
            server.connections.clock = lambda: now_s[0]
            streams = [await server.connect(b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n") for _ in range(2)]
            idle, slow = await server.connect(GET), await server.connect(b"GET")
            await idle.read_until(b"0 bytes\r\n0\r\n\r\n")
            await until(lambda: server.num_streams == 2 and server.connections.num_arriving == 1)
            now_s[0] = 2.0
            streams.append(await server.connect(b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n"))
            assert await idle.rest() == b""
            streams.append(await server.connect(b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n"))
            assert await slow.status() == 503
            await until(lambda: server.num_streams == 4)
            for _ in range(100):
                late = await server.connect(GET)
                assert await late.status() == 503
            assert server.connections.num_open == 4 and server.connections.closed["refused"] == 100
            server.ends.set()
            for stream in streams:
                await stream.read_until(b"0 bytes\r\n0\r\n\r\n")
            again = await server.connect(GET)
            assert b"0 bytes" in await again.read_until(b"0 bytes")

    run(test)


@pytest.mark.parametrize(("soft", "expected"), [(1024, 1024 - 20 - 256), (256, 256 - 20 - 64), (-1, 65536 - 20 - 256)])
def test_how_many_connections_there_may_be(soft: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, soft))
    assert max_connections(20) == expected
