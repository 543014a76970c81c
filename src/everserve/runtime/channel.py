"""Framed messages over a stream socket, with descriptors passed along when needed.

A frame is a 4-byte little-endian length and that many bytes of msgpack. Neither end ever blocks in `send`: what the
kernel does not take at once waits in a buffer, so that a slow or stopped reader cannot hold the writer up.

Two faces of the same thing: `Channel` for loops that poll (worker, supervisor), `AsyncChannel` for asyncio (gateway).
"""

import asyncio
import os
import selectors
import socket
import struct
from collections import deque
from collections.abc import Sequence

from everserve.errors import ProtocolError
from everserve.runtime.messages import AnyMessage, decode, encode

MAX_FRAME_BYTES = 256 << 20
_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 16  # a larger buffer costs more to allocate than a second read
_MAX_FDS = 16


class ChannelClosed(Exception):
    """The other end is gone. Everything it had sent before has been delivered."""


class Channel:
    """One end. `receive_all` and `send` never block; `wait` does."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.num_dropped = 0  # frames that were not one of our messages
        self._incoming = bytearray()
        self._outgoing: deque[tuple[memoryview, Sequence[int]]] = deque()
        self._fds: deque[int] = deque()
        self._eof = False

    @classmethod
    def pair(cls) -> tuple[socket.socket, socket.socket]:
        """Two connected sockets without a name: nothing is left behind when both ends are gone."""
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)

    @classmethod
    def of_fd(cls, fd: int) -> "Channel":
        """The channel whose socket came as a descriptor."""
        return cls(socket.socket(fileno=fd))

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, message: AnyMessage, fds: Sequence[int] = ()) -> None:
        """Queue a message and write what the kernel takes. Descriptors are duplicated for the receiver."""
        payload = encode(message)
        frame = memoryview(_LENGTH.pack(len(payload)) + payload)
        self._outgoing.append((frame, [os.dup(fd) for fd in fds]))
        self.flush()

    @property
    def wants_write(self) -> bool:
        """Whether bytes are waiting for the kernel to take them."""
        return bool(self._outgoing)

    def flush(self) -> None:
        """Write what the kernel takes now."""
        while self._outgoing:
            frame, fds = self._outgoing[0]
            try:
                sent = socket.send_fds(self.sock, [frame], list(fds)) if fds else self.sock.send(frame)
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):
                self._drop_outgoing()  # the reader is gone; `receive_all` will say so
                return
            for fd in fds:
                os.close(fd)
            if sent == len(frame):
                self._outgoing.popleft()
            else:
                self._outgoing[0] = (frame[sent:], ())

    def receive_all(self) -> list[AnyMessage]:
        """Every message that has arrived. Raises ChannelClosed only when nothing is left to deliver."""
        self._read_available()
        messages = self._parse()
        if self._eof and not messages:
            raise ChannelClosed
        return messages

    def take_fd(self) -> int:
        """The next descriptor that came along, in the order of the messages that carried one."""
        return self._fds.popleft()

    def wait(self, timeout_s: float | None) -> bool:
        """Block until something can be received (or flushed), at most `timeout_s`. True if so."""
        if self._eof:
            return True
        with selectors.DefaultSelector() as selector:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)
            selector.register(self.sock, events)
            ready = selector.select(timeout_s)
        self.flush()
        return bool(ready)

    def receive(self, timeout_s: float | None = None) -> AnyMessage | None:
        """Wait for exactly one message (start-up handshakes); None on timeout."""
        while True:
            messages = self._parse(limit=1)
            if messages:
                return messages[0]
            if self._eof:
                raise ChannelClosed
            if not self.wait(timeout_s):
                return None
            self._read_available()

    def close(self) -> None:
        self.sock.close()
        self._drop_outgoing()
        while self._fds:
            os.close(self._fds.popleft())

    def _drop_outgoing(self) -> None:
        while self._outgoing:
            for fd in self._outgoing.popleft()[1]:
                os.close(fd)

    def _read_available(self) -> None:
        while not self._eof:
            try:
                data, fds, _, _ = socket.recv_fds(self.sock, _READ_BYTES, _MAX_FDS)
            except BlockingIOError:
                return
            except ConnectionResetError:
                data, fds = b"", []
            self._fds.extend(fds)
            self._incoming += data
            self._eof = not data  # a short read is not the end: one stops at each message that carries descriptors

    def _parse(self, limit: int | None = None) -> list[AnyMessage]:
        messages: list[AnyMessage] = []
        start = 0
        while len(self._incoming) - start >= _LENGTH.size and (limit is None or len(messages) < limit):
            (length,) = _LENGTH.unpack_from(self._incoming, start)
            if length > MAX_FRAME_BYTES:
                raise ProtocolError(f"a frame of {length} bytes: the stream is out of step")
            end = start + _LENGTH.size + length
            if len(self._incoming) < end:
                break
            try:
                messages.append(decode(bytes(self._incoming[start + _LENGTH.size : end])))
            except ProtocolError:
                self.num_dropped += 1
            start = end
        del self._incoming[:start]
        return messages


class AsyncChannel:
    """The same for asyncio: `await receive()` yields messages one by one."""

    def __init__(self, sock: socket.socket) -> None:
        self.channel = Channel(sock)
        self._inbox: deque[AnyMessage] = deque()
        self._failure: Exception | None = None  # why nothing more will come
        self._waiter: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._writing = False
        self._loop.add_reader(sock, self._on_readable)

    def send(self, message: AnyMessage) -> None:
        """Queue and write; never blocks."""
        self.channel.send(message)
        self._watch_writable()

    async def receive(self) -> AnyMessage:
        """The next message; ChannelClosed at the end."""
        while not self._inbox:
            if self._failure is not None:
                raise self._failure
            self._waiter = self._loop.create_future()
            await self._waiter
        return self._inbox.popleft()

    def take_fd(self) -> int:
        return self.channel.take_fd()

    def close(self) -> None:
        self._loop.remove_reader(self.channel.sock)
        self._loop.remove_writer(self.channel.sock)
        self.channel.close()

    def _on_readable(self) -> None:
        try:
            self._inbox.extend(self.channel.receive_all())
        except (ChannelClosed, ProtocolError, OSError) as error:
            self._failure = error
            self._loop.remove_reader(self.channel.sock)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _watch_writable(self) -> None:
        if self.channel.wants_write and not self._writing:
            self._writing = True
            self._loop.add_writer(self.channel.sock, self._on_writable)

    def _on_writable(self) -> None:
        self.channel.flush()
        if not self.channel.wants_write:
            self._writing = False
            self._loop.remove_writer(self.channel.sock)
