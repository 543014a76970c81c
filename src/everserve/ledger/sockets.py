"""What the kernel knows of a connection: who it is, and how many bytes went in and out.

A FIN counts as a byte. After the client's, `bytes_received` is one more, which is not among the unread bytes; after
ours, one more is acknowledged, or waits to be. Both ends are seen in the state of the connection.
"""

import fcntl
import os
import socket
import struct
import termios
from typing import NamedTuple

_SO_COOKIE = 57
_SIOCOUTQ = termios.TIOCOUTQ
_SIOCINQ = termios.FIONREAD
_INFO_BYTES = 256
_COUNTS = struct.Struct("=QQ")
_COUNTS_AT = 120  # of struct tcp_info: bytes_acked, bytes_received
_FIN_WAIT1, _FIN_WAIT2, _TIME_WAIT, _CLOSE, _CLOSE_WAIT, _LAST_ACK, _CLOSING = 4, 5, 6, 7, 8, 9, 11
_OURS_IS_SENT = (_FIN_WAIT1, _FIN_WAIT2, _TIME_WAIT, _LAST_ACK, _CLOSING)
_THEIRS_HAS_COME = (_TIME_WAIT, _CLOSE_WAIT, _LAST_ACK, _CLOSING)
_TRIES = 100


class Counts(NamedTuple):
    """Positions of a connection: of the next byte to read, and of the next byte to send."""

    received: int
    sent: int


class NotConnected(OSError):
    """The connection has ended: what it had is not known any more."""


def cookie_of(sock: socket.socket) -> int:
    """A number that no other socket of this system has or had. Raises OSError where there is none."""
    return int.from_bytes(sock.getsockopt(socket.SOL_SOCKET, _SO_COOKIE, 8), "little")


def counts_of(sock: socket.socket) -> Counts:
    """Bytes received and sent, as long as no process reads or writes. Raises NotConnected. The client may send and
    acknowledge meanwhile, so the counts are taken together only if nothing has changed at a second look."""
    before = _info(sock)
    for _ in range(_TRIES):
        num_unacknowledged = _number(sock, _SIOCOUTQ)
        num_unread = _number(sock, _SIOCINQ)
        after = _info(sock)
        if before == after:
            state, acknowledged, received = after
            return Counts(
                received - num_unread - (state in _THEIRS_HAS_COME),
                acknowledged + num_unacknowledged - (state in _OURS_IS_SENT),
            )
        before = after
    raise NotConnected("the counts of this connection do not come to rest")


def is_of_listener(sock: socket.socket, listen: socket.socket) -> bool:
    """Whether this is a connection that was accepted from that socket."""
    try:
        return sock.family == listen.family and sock.getsockname()[1] == listen.getsockname()[1] and not _listens(sock)
    except OSError:
        return False


def connections_of(listen: socket.socket) -> list[int]:
    """The descriptors of all connections of this process that were accepted from that socket."""
    found = []
    for fd in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208 (names are enough)
        sock = socket_at(fd)
        if sock is not None:
            if is_of_listener(sock, listen):
                found.append(fd)
            sock.detach()
    return found


def socket_at(fd: int) -> socket.socket | None:
    """The stream socket of this number, if it is one; it must be detached or closed."""
    try:
        if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):  # noqa: PTH115
            return None
        return socket.socket(fileno=fd)
    except OSError:
        return None


def _listens(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _info(sock: socket.socket) -> tuple[int, int, int]:
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    if len(info) < _COUNTS_AT + _COUNTS.size:
        raise NotConnected("this kernel does not count the bytes of a connection")
    if info[0] == _CLOSE:
        raise NotConnected("the connection is closed")
    return (info[0], *_COUNTS.unpack_from(info, _COUNTS_AT))


def _number(sock: socket.socket, what: int) -> int:
    return int.from_bytes(fcntl.ioctl(sock.fileno(), what, bytes(4)), "little", signed=True)
