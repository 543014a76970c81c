"""A connection over the deaths of its gateways: each life is a new ledger and a new transport over the same memory and
the same socket, and whatever the last life had only in its own memory is gone."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable

import pytest

from everserve.gateway.http.recorded import Position
from everserve.gateway.http.transport import Custody, LedgerTransport
from everserve.ledger.layout import Shape
from everserve.ledger.ledger import Ledger
from everserve.ledger.pages import BrokenChain
from everserve.ledger.sockets import Counts, cookie_of, counts_of

SHAPE = Shape.of(num_connections=4, num_requests=4, num_bytes=8 << 20)
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


class Receiver:
    """What is at this end: it remembers everything."""

    def __init__(self) -> None:
        self.recorded = None
        self.received = b""
        self.has_ended = self.is_lost = self.is_paused = False

    def connection_made(self, transport: asyncio.Transport) -> None:
        pass

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True

    def data_received(self, data: bytes) -> None:
        self.received += data

    def eof_received(self) -> None:
        self.has_ended = True

    def pause_writing(self) -> None:
        self.is_paused = True

    def resume_writing(self) -> None:
        self.is_paused = False


class Connection:
    """One connection, and the gateway that has it now."""

    def __init__(self) -> None:
        self.ledger_fd = Ledger.create(SHAPE)
        with socket.create_server(("127.0.0.1", 0)) as listen:
            self.client = socket.create_connection(listen.getsockname())
            self.server, _ = listen.accept()
        self.server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4608)
        self.client.setblocking(False)
        self._begin_life(None)

    def _begin_life(self, counts: Counts | None) -> None:
        self.ledger = Ledger.map(self.ledger_fd)
        left = self.ledger.open()
        custody = Custody(self.ledger)
        sock = self.server.dup()
        sock.setblocking(False)
        self.receiver = Receiver()
        if counts is None:
            self.transport = LedgerTransport(sock, self.receiver, custody, custody.open(sock))
        else:
            record = left.connections[cookie_of(sock)]
            with contextlib.closing(sock):
                self.transport = LedgerTransport.adopt(sock.dup(), self.receiver, custody, record, counts)
        self.transport.start()

    def die(self, counts: Callable[[socket.socket], Counts] = counts_of) -> None:
        """And the next gateway goes on."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self.transport._sock)
        loop.remove_writer(self.transport._sock)
        self.transport._sock.close()
        self._begin_life(counts(self.server))

    async def read(self, num_bytes: int) -> bytes:
        """By the client."""
        data = b""
        while len(data) < num_bytes:
            data += await asyncio.wait_for(asyncio.get_running_loop().sock_recv(self.client, num_bytes - len(data)), 20)
        return data

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0)

    def close(self) -> None:
        if self.transport._sock.fileno() >= 0:
            self.transport.abort()
        self.client.close()
        self.server.close()
        os.close(self.ledger_fd)


def run(test: Callable[[Connection], Awaitable[None]]) -> None:
    async def main() -> None:
        connection = Connection()
        try:
            await test(connection)
        finally:
            connection.close()
            await asyncio.sleep(0)

    asyncio.run(main())


def numbers(begin: int, end: int) -> bytes:
    return b"".join(b"%08d" % i for i in range(begin, end))


def test_what_was_committed_and_not_sent_is_sent_by_the_next() -> None:
    async def test(connection: Connection) -> None:
        whole = numbers(0, 200_000)
        connection.transport.write(whole)
        connection.transport.end_answer(0)
        assert connection.receiver.is_paused, "the kernel has not taken all of it"
        read = await connection.read(50_000)
        for _ in range(3):
            connection.die()
            read += await connection.read(50_000)
        read += await connection.read(len(whole) - len(read))
        assert read == whole

    run(test)


def test_the_test_finds_bytes_that_are_believed_to_be_sent() -> None:
    """The negative control: a gateway that believes that everything committed was sent."""

    async def test(connection: Connection) -> None:
        whole = numbers(0, 100_000)
        connection.transport.write(whole)
        connection.transport.end_answer(0)
        end = connection.transport._record.ring.end
        connection.die(lambda sock: Counts(counts_of(sock).received, end))
        connection.transport.write(b"next")
        connection.transport.end_answer(0)
        read = b""
        while not read.endswith(b"next"):
            read += await connection.read(1)
        assert read[:-4] != whole and whole.startswith(read[:-4])

    run(test)


def test_what_was_staged_and_not_committed_was_never_sent() -> None:
    async def test(connection: Connection) -> None:
        connection.transport.write(b"a whole answer, but for its end")
        connection.die()
        connection.transport.write(b"the same answer, made again")
        connection.transport.end_answer(0)
        assert await connection.read(27) == b"the same answer, made again"

    run(test)


def test_an_answer_that_has_begun_goes_on_without_a_second_head() -> None:
    async def test(connection: Connection) -> None:
        transport = connection.transport
        transport.begin_request(3)
        transport.write(HEAD)
        transport.mark(Position(2, 40))
        transport.write(b"two events")
        transport.commit()
        transport.mark(Position(3, 60))
        transport.write(b"lost")
        connection.die()
        transport = connection.transport
        assert transport.has_head and transport.request == 3 and transport.position == Position(2, 40)
        transport.write(HEAD)
        transport.mark(Position(3, 60))
        transport.write(b" and a third")
        transport.end_answer(0)
        assert await connection.read(len(HEAD) + 22) == HEAD + b"two events and a third"
        assert not transport.has_head and transport.request == 0

    run(test)


def test_a_chunk_of_a_stream_is_committed_when_it_is_written() -> None:
    async def test(connection: Connection) -> None:
        transport = connection.transport
        assert not transport.takes_chunks, "it has no head yet"
        transport.begin_request(3)
        transport.write(HEAD)
        transport.mark(Position(1, 20))
        transport.write_chunk(b"event")
        connection.die()
        transport = connection.transport
        assert transport.position == Position(1, 20)
        assert not transport.takes_chunks, "its head is to be skipped"
        transport.write(HEAD)
        assert transport.takes_chunks
        transport.write_chunk(b"more")
        assert await connection.read(len(HEAD) + 19) == HEAD + b"5\r\nevent\r\n4\r\nmore\r\n"
        transport.end_answer(0)
        assert not transport.takes_chunks

    run(test)


def test_a_stream_that_waits_for_its_client_takes_no_chunks() -> None:
    async def test(connection: Connection) -> None:
        transport = connection.transport
        transport.write(HEAD)
        while transport.takes_chunks:
            transport.write_chunk(bytes(100_000))
        assert connection.receiver.is_paused

    run(test)


def test_a_stream_does_not_become_another_answer() -> None:
    """An error after the head, of a request that is read again, would be part of the stream."""

    async def test(connection: Connection) -> None:
        connection.transport.begin_request(3)
        connection.transport.write(HEAD)
        connection.transport.commit()
        connection.die()
        connection.transport.write(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n")
        assert connection.transport.is_closing()
        assert await connection.read(len(HEAD)) == HEAD

    run(test)


@pytest.mark.parametrize("num_read", [0, 1, 3])
def test_a_request_that_was_arriving_comes_again_from_its_beginning(num_read: int) -> None:
    """However much of it the kernel had still to give."""

    async def test(connection: Connection) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(num_read):
            before = len(connection.receiver.received)
            await loop.sock_sendall(connection.client, b"x" * 20_000)
            await connection.until(lambda before=before: len(connection.receiver.received) == before + 20_000)
        await loop.sock_sendall(connection.client, b"y" * 100)
        connection.die()
        await connection.until(lambda: len(connection.receiver.received) == num_read * 20_000 + 100)
        assert connection.receiver.received == b"x" * 20_000 * num_read + b"y" * 100

    run(test)


def test_requests_that_were_answered_do_not_come_again() -> None:
    async def test(connection: Connection) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(connection.client, b"first second")
        await connection.until(lambda: len(connection.receiver.received) == 12)
        connection.transport.write(b"done")
        connection.transport.end_answer(6)
        connection.die()
        assert connection.receiver.received == b"second"
        connection.die()
        assert connection.receiver.received == b"second"

    run(test)


def test_the_last_word_of_a_client_with_bytes_before_it() -> None:
    """A FIN counts as a byte that was received: a gateway that forgets it reads one byte too many from its inbox."""

    async def test(connection: Connection) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(connection.client, b"read ")
        await connection.until(lambda: connection.receiver.received == b"read ")
        connection.transport.pause_reading()
        await loop.sock_sendall(connection.client, b"unread")
        connection.client.shutdown(socket.SHUT_WR)
        assert connection.server.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != 0
        await connection.until(lambda: _state(connection.server) == _CLOSE_WAIT)
        connection.die()
        await connection.until(lambda: connection.receiver.has_ended)
        assert connection.receiver.received == b"read unread"

    run(test)


def test_a_count_that_forgets_the_last_word_is_found() -> None:
    """The negative control for it."""

    async def test(connection: Connection) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(connection.client, b"read ")
        await connection.until(lambda: connection.receiver.received == b"read ")
        connection.transport.pause_reading()
        await loop.sock_sendall(connection.client, b"unread")
        connection.client.shutdown(socket.SHUT_WR)
        await connection.until(lambda: _state(connection.server) == _CLOSE_WAIT)
        connection.die(lambda sock: counts_of(sock)._replace(received=counts_of(sock).received + 1))
        await connection.until(lambda: connection.receiver.has_ended)
        assert connection.receiver.received != b"read unread"

    run(test)


def test_without_room_in_the_ledger_a_connection_works_and_ends_with_its_gateway() -> None:
    async def test(connection: Connection) -> None:
        connection.server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)  # there is much to send
        whole = numbers(0, 3_000_000)
        connection.transport.write(whole)
        connection.transport.end_answer(0)
        assert connection.transport.is_loose
        read = b""
        while len(read) < len(whole):
            read += await connection.read(min(1 << 20, len(whole) - len(read)))
        assert read == whole
        with pytest.raises(BrokenChain):
            connection.die()

    run(test)


def test_more_than_there_is_was_not_received() -> None:
    async def test(connection: Connection) -> None:
        await asyncio.get_running_loop().sock_sendall(connection.client, b"some")
        await connection.until(lambda: connection.receiver.received == b"some")
        with pytest.raises(BrokenChain):
            connection.die(lambda sock: Counts(1 << 30, 0))

    run(test)


_CLOSE_WAIT = 8


def _state(sock: socket.socket) -> int:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
