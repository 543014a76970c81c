"""What the kernel says of a connection: which bytes came in and went out, whatever became of either end."""

import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest

from everserve.ledger.sockets import NotConnected, cookie_of, counts_of, is_of_listener, socket_at

Pair = tuple[socket.socket, socket.socket, socket.socket]


@pytest.fixture(params=["127.0.0.1", "::1"])
def pair(request) -> Iterator[Pair]:
    """A client, the server's end, and the listening socket."""
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    try:
        listen = socket.create_server((request.param, 0), family=family)
    except OSError:
        pytest.skip("this system has no such addresses")
    client = socket.create_connection(listen.getsockname()[:2])
    server, _ = listen.accept()
    with listen, client, server:
        yield client, server, listen


def arrive(server: socket.socket, num_bytes: int) -> None:
    """Wait until so many bytes can be read."""
    assert len(server.recv(num_bytes, socket.MSG_PEEK | socket.MSG_WAITALL)) == num_bytes


def wait_for_fin(server: socket.socket, num_unread: int) -> None:
    """With MSG_WAITALL a read of more than there is returns when the client has said its last word."""
    assert len(server.recv(num_unread + 1, socket.MSG_PEEK | socket.MSG_WAITALL)) == num_unread


def test_a_new_connection_begins_at_0(pair: Pair) -> None:
    assert counts_of(pair[1]) == (0, 0)


def test_unread_bytes_are_not_received(pair: Pair) -> None:
    client, server, _ = pair
    client.sendall(b"x" * 100)
    arrive(server, 100)
    assert counts_of(server) == (0, 0)
    server.recv(40)
    assert counts_of(server).received == 40


def test_what_the_kernel_took_is_sent(pair: Pair) -> None:
    """Whether the client has it, or it waits for the client to read."""
    client, server, _ = pair
    server.setblocking(False)
    num_sent = 0
    while True:
        try:
            num_sent += server.send(b"y" * 50_000)
        except BlockingIOError:
            break
        assert counts_of(server).sent == num_sent
    assert counts_of(server) == (0, num_sent)
    client.recv(1000)
    assert counts_of(server) == (0, num_sent)


def test_a_clients_last_word_is_no_byte(pair: Pair) -> None:
    """The trap: it counts as one that was received, and is not among the unread ones."""
    client, server, _ = pair
    client.sendall(b"x" * 100)
    client.shutdown(socket.SHUT_WR)
    wait_for_fin(server, 100)
    assert counts_of(server).received == 0
    server.recv(40)
    assert counts_of(server).received == 40
    server.recv(60)
    assert counts_of(server).received == 100
    assert server.recv(1) == b"" and counts_of(server).received == 100
    server.sendall(b"y" * 7)
    assert counts_of(server) == (100, 7)


def test_our_last_word_is_no_byte(pair: Pair) -> None:
    client, server, _ = pair
    server.sendall(b"y" * 1000)
    server.shutdown(socket.SHUT_WR)
    assert counts_of(server) == (0, 1000)
    assert len(client.recv(2000, socket.MSG_WAITALL)) == 1000
    assert counts_of(server) == (0, 1000)
    client.sendall(b"x" * 3)
    client.shutdown(socket.SHUT_WR)
    assert server.recv(4, socket.MSG_WAITALL) == b"xxx"
    with suppress(NotConnected):  # both have said their last words, and the connection may be gone
        assert counts_of(server) == (3, 1000)


def test_a_connection_that_broke_is_not_counted(pair: Pair) -> None:
    client, server, _ = pair
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    client.close()
    with pytest.raises(ConnectionResetError):
        while True:
            server.send(b"y")
    with pytest.raises(NotConnected):
        counts_of(server)


def test_each_socket_has_a_cookie_of_its_own(pair: Pair) -> None:
    client, server, listen = pair
    other = server.dup()
    assert len({cookie_of(sock) for sock in pair}) == 3 and cookie_of(other) == cookie_of(server)
    assert is_of_listener(server, listen) and is_of_listener(other, listen)
    assert not is_of_listener(client, listen) and not is_of_listener(listen, listen)
    other.close()


def test_sockets_are_found_by_their_numbers(pair: Pair) -> None:
    found = socket_at(pair[1].fileno())
    assert found is not None and cookie_of(found) == cookie_of(pair[1])
    found.detach()
    with open("/dev/null") as file:  # noqa: PTH123
        assert socket_at(file.fileno()) is None
    assert socket_at(99999) is None
