"""Frames over one TLS connection that never blocks: what it does not take at once waits here.

A connection that is cut says nothing for minutes, by itself: who uses it has deadlines of its own, and the kernel is
told to give up unacknowledged bytes as soon (TCP_USER_TIMEOUT).
"""

import os
import select
import socket
import ssl
from collections import deque
from collections.abc import Iterator

from everserve.carrier.frames import LENGTH, MAX_FRAME_BYTES, MAX_GREETING_BYTES, AnyFrame, pack, unpack
from everserve.errors import ConfigError, ProtocolError

_READ_BYTES = 1 << 18


class LinkCut(Exception):
    """The connection is of no use any more. `by_peer`: the other host's kernel has closed it, so the process there has
    ended, or has given it up."""

    def __init__(self, reason: str, by_peer: bool) -> None:
        super().__init__(reason)
        self.by_peer = by_peer


def listen(port: int) -> socket.socket:
    """On all addresses of this host. Raises ConfigError."""
    has_both = socket.has_dualstack_ipv6()
    try:
        if has_both:
            return socket.create_server(("::", port), family=socket.AF_INET6, backlog=64, dualstack_ipv6=True)
        return socket.create_server(("", port), backlog=64)
    except OSError as error:
        raise ConfigError(f"--cluster-port {port}: cannot listen there ({error.strerror})") from None


class TlsLink:
    """One end. TLS is done in memory, so that the socket's own errors are seen as they are: which end has closed it."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, is_server: bool, timeout_s: float) -> None:
        """`timeout_s`: see `welcome`."""
        sock.getpeername()  # raises OSError where it was closed again by now
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self._keep_for(timeout_s)
        self.limit = MAX_GREETING_BYTES  # of a frame
        self.is_secure = False
        self._received, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._received, self._to_send, server_side=is_server)
        self._frames: deque[bytes] = deque()  # that wait for the handshake
        self._outgoing = memoryview(b"")
        self._incoming = bytearray()

    def fileno(self) -> int:
        return self.sock.fileno()

    @property
    def version(self) -> str | None:
        """The version of TLS that the two ends speak."""
        return self._tls.version()

    def welcome(self, timeout_s: float) -> None:
        """The other end is known. For so long the kernel keeps the connection, also if nothing comes through: longer
        than its users, to whom the end of one that was given up would look like the end of a carrier."""
        self.limit = MAX_FRAME_BYTES
        self._keep_for(timeout_s)

    def _keep_for(self, timeout_s: float) -> None:
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(timeout_s * 1000)))

    @property
    def num_waiting(self) -> int:
        """Bytes that the connection has not taken."""
        return sum(map(len, self._frames)) + self._to_send.pending + len(self._outgoing)

    def send(self, frame: AnyFrame) -> None:
        self.send_packed(pack(frame))

    def send_packed(self, frame: bytes) -> None:
        self._frames.append(frame)

    def flush(self) -> None:
        """Write what the connection takes. Raises LinkCut."""
        self._shake()
        if self.is_secure and self._frames:
            self._tls.write(b"".join(self._frames))  # memory takes all
            self._frames.clear()
        while self._outgoing or self._to_send.pending:
            if not self._outgoing:
                self._outgoing = memoryview(self._to_send.read())
            try:
                self._outgoing = self._outgoing[self.sock.send(self._outgoing) :]
            except BlockingIOError:
                return
            except OSError as error:
                raise _cut(error) from error

    def receive(self) -> Iterator[AnyFrame]:
        """The frames that have come. Raises LinkCut, and ProtocolError for what is not a frame."""
        end = self._read()
        while (frame := self._next()) is not None:
            yield frame
        if end is not None:
            raise end

    def wait(self, timeout_s: float) -> None:
        """Until something may be read, but no longer."""
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        poll.poll(max(0.0, timeout_s) * 1000)

    def close(self) -> None:
        self.sock.close()
        self._frames.clear()

    def _read(self) -> LinkCut | None:
        """What has come, and the end if that has come, too."""
        end = None
        try:
            while data := self.sock.recv(_READ_BYTES):
                self._received.write(data)
            end = LinkCut("the other end has closed it", by_peer=True)
        except BlockingIOError:
            pass
        except OSError as error:
            end = _cut(error)
        try:
            self.flush()  # what the handshake answers
            while self.is_secure and (plain := self._tls.read(_READ_BYTES)):
                self._incoming += plain
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            end = LinkCut(f"TLS: {error.reason or error}", by_peer=False)
        except LinkCut as cut:
            end = cut
        return end

    def _shake(self) -> None:
        """Go on with the handshake, if it is not done."""
        if self.is_secure:
            return
        try:
            self._tls.do_handshake()
            self.is_secure = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            raise LinkCut(f"TLS: {error.reason or error}", by_peer=False) from error

    def _next(self) -> AnyFrame | None:
        if len(self._incoming) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(self._incoming)
        if length > self.limit:
            raise ProtocolError(f"a frame of {length} bytes: at most {self.limit} are taken here")
        if len(self._incoming) < LENGTH.size + length:
            return None
        payload = bytes(self._incoming[LENGTH.size : LENGTH.size + length])
        del self._incoming[: LENGTH.size + length]
        return unpack(payload)


def _cut(error: OSError) -> LinkCut:
    """A reset is sent by the other end's kernel; all else (no route, no answer in time) is said by ours."""
    return LinkCut(os.strerror(error.errno or 0), by_peer=isinstance(error, (ConnectionResetError, BrokenPipeError)))
