"""Framed messages over a stream socket; descriptors belong to the frame that they were sent with.

A frame is a 4-byte little-endian length and that many bytes of msgpack. Neither end ever blocks in `send`: what the
kernel does not take at once waits in a buffer, so that a slow or stopped reader cannot block the writer.

Why a stream: SOCK_SEQPACKET keeps frames and descriptors together by itself, but a packet must fit into the
socket's buffer (200 KiB), and routes or prompts may not. On a stream Linux works as follows (unix(7), SCM_RIGHTS):

    the sender      one sendmsg per frame; descriptors go with its first bytes, also if the kernel takes only these
    the receiver    a recvmsg may begin with bytes of earlier sends, but ends with, or inside, the first send that
                    carries descriptors. So the received descriptors belong to the frame with the last byte read.

That needs no counting, and a lost or dropped frame does not shift the descriptors of other frames. If the receiver has
too many open files, the kernel discards descriptors (MSG_CTRUNC) and their frame is useless: the channel ends there
with a ProtocolError.

The kernel also limits the descriptors that a user has in flight, sent and not read yet (ETOOMANYREFS beyond
RLIMIT_NOFILE). Such a frame waits as if the buffer were full, but no event says when to try again: see `is_held_back`.

Two interfaces: `Channel` for loops that poll (worker, supervisor), `AsyncChannel` for asyncio (gateway).
"""

import asyncio
import errno
import math
import os
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

from everserve.errors import ProtocolError
from everserve.wire.messages import AnyMessage, decode, encode

MAX_FRAME_BYTES = 256 << 20
MAX_FDS = 253  # with one frame: the kernel's SCM_MAX_FD
RETRY_S = 0.01  # after this time a frame that is held back is tried again
_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 16  # a larger buffer costs more to allocate than a second read


class ChannelClosed(Exception):
    """The peer has closed its end. Everything that it had sent before has been delivered."""


class Descriptors:
    """The descriptors of one frame. Those that are not taken are closed together with it."""

    __slots__ = ("_fds",)

    def __init__(self, fds: Iterable[int] = ()) -> None:
        self._fds = list(fds)

    def __len__(self) -> int:
        return len(self._fds)

    def take(self) -> list[int]:
        """All of them. The caller must close them."""
        fds, self._fds = self._fds, []
        return fds

    def close(self) -> None:
        for fd in self.take():
            os.close(fd)

    def __del__(self) -> None:
        self.close()


class Frame(NamedTuple):
    """A message and its descriptors."""

    message: AnyMessage
    fds: Descriptors


class _Batch(NamedTuple):
    """The descriptors of one recvmsg: they belong to the frame with byte `end` - 1 of the stream."""

    end: int
    fds: Descriptors
    is_complete: bool


class Channel:
    """One end of a socket pair. Only `wait` and `receive` block."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.num_dropped = 0  # frames that were not one of our messages
        self.is_held_back = False  # too many descriptors are in flight: flush again after RETRY_S
        self._incoming = bytearray()
        self._parsed = 0  # bytes of `_incoming` whose frames were delivered
        self._origin = 0  # where in the stream `_incoming` begins
        self._batches: deque[_Batch] = deque()
        self._outgoing: deque[tuple[memoryview, list[int]]] = deque()
        self._eof = False

    @classmethod
    def pair(cls, buffer_bytes: int | None = None) -> tuple[socket.socket, socket.socket]:
        """Two connected unnamed sockets: nothing is left behind when both are closed. `buffer_bytes`: what each may
        send before the other reads; less if the kernel does not allow it (net.core.wmem_max)."""
        pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        if buffer_bytes is not None:
            for end in pair:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        return pair

    @classmethod
    def of_fd(cls, fd: int) -> "Channel":
        """A channel over a socket that was received as a descriptor."""
        return cls(socket.socket(fileno=fd))

    def fileno(self) -> int:
        return self.sock.fileno()

    # -- sending ---------------------------------------------------------------------------------

    def send(self, message: AnyMessage, fds: Sequence[int] = ()) -> None:
        """Queue a message and write what the kernel takes. Descriptors are duplicated for the receiver."""
        assert len(fds) <= MAX_FDS, f"{len(fds)} descriptors with one {type(message).__name__}"
        payload = encode(message)
        frame = memoryview(_LENGTH.pack(len(payload)) + payload)
        self.flush()
        num_sent = 0 if self._outgoing else self._write(frame, fds)
        if num_sent < len(frame):
            self._outgoing.append((frame[num_sent:], [] if num_sent else [os.dup(fd) for fd in fds]))

    @property
    def wants_write(self) -> bool:
        """Whether bytes are waiting for the kernel to take them."""
        return bool(self._outgoing)

    def flush(self) -> None:
        """Write what the kernel takes now."""
        while self._outgoing:
            frame, fds = self._outgoing[0]
            num_sent = self._write(frame, fds)
            if not num_sent:
                return
            _close_all(fds)
            if num_sent == len(frame):
                self._outgoing.popleft()
            else:
                self._outgoing[0] = (frame[num_sent:], [])

    def _write(self, frame: memoryview, fds: Sequence[int]) -> int:
        """How many bytes the kernel took; with the first of them it has taken the descriptors."""
        self.is_held_back = False
        try:
            return socket.send_fds(self.sock, [frame], list(fds)) if fds else self.sock.send(frame)
        except BlockingIOError:
            return 0
        except (BrokenPipeError, ConnectionResetError):
            return len(frame)  # the peer is gone; the next receive raises ChannelClosed
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:
                raise
            self.is_held_back = True
            return 0

    # -- receiving -------------------------------------------------------------------------------

    def receive_frames(self) -> Iterator[Frame]:
        """Everything that has arrived, frame by frame. Raises ChannelClosed only when nothing is left to deliver.

        Frames that were not consumed stay in the channel: if the caller's loop ends early, the next call yields them,
        and `close` closes their descriptors (also in the child of a fork).
        """
        self._read_available()
        has_come = False
        while (frame := self._next()) is not None:
            has_come = True
            yield frame
        if self._eof and not has_come:
            raise ChannelClosed

    def receive_all(self) -> list[AnyMessage]:
        """As `receive_frames`, where no message comes with descriptors that are needed."""
        return [message for message, _ in self.receive_frames()]

    def wait(self, timeout_s: float | None) -> bool:
        """Block until something can be received (or was flushed), at most `timeout_s`. True if so."""
        deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not self._eof:
            was_held_back = self.is_held_back
            is_ready = self._select(deadline_s - time.monotonic())
            self.flush()
            if is_ready or (was_held_back and not self.is_held_back):
                return True
            if time.monotonic() >= deadline_s:
                return False
        return True

    def _select(self, timeout_s: float) -> bool:
        """The socket of a frame that is held back is always writable, so that frame is retried after RETRY_S."""
        events, nap_s = selectors.EVENT_READ, timeout_s
        if self.is_held_back:
            nap_s = min(RETRY_S, timeout_s)
        elif self._outgoing:
            events |= selectors.EVENT_WRITE
        with selectors.DefaultSelector() as selector:
            selector.register(self.sock, events)
            return bool(selector.select(None if nap_s == math.inf else max(0.0, nap_s)))

    def receive_frame(self, timeout_s: float | None = None) -> Frame | None:
        """Wait for exactly one message (start-up handshakes); None on timeout."""
        while True:
            frame = self._next()
            if frame is not None:
                return frame
            if self._eof:
                raise ChannelClosed
            if not self.wait(timeout_s):
                return None
            self._read_available()

    def receive(self, timeout_s: float | None = None) -> AnyMessage | None:
        """As `receive_frame`, for a message whose descriptors are not needed."""
        frame = self.receive_frame(timeout_s)
        return frame.message if frame is not None else None

    def close(self) -> None:
        self.sock.close()
        self._eof, self.is_held_back = True, False
        while self._outgoing:
            _close_all(self._outgoing.popleft()[1])
        self._incoming.clear()
        self._parsed = 0
        while self._batches:
            self._batches.popleft().fds.close()

    def abandon(self) -> None:
        """As `close`, but the socket's descriptor is left as it is: by now it may be another file's."""
        self.sock.detach()
        self.close()

    def _read_available(self) -> None:
        while not self._eof:
            try:
                data, fds, flags, _ = socket.recv_fds(self.sock, _READ_BYTES, MAX_FDS)
            except BlockingIOError:
                return
            except ConnectionResetError:
                data, fds, flags = b"", [], 0
            self._incoming += data
            self._eof = not data  # a short read is not the end: one stops at each frame that carries descriptors
            is_complete = not flags & socket.MSG_CTRUNC
            if fds or not is_complete:
                self._batches.append(_Batch(self._origin + len(self._incoming), Descriptors(fds), is_complete))

    def _next(self) -> Frame | None:
        """The next complete frame that is one of our messages; None if there is none yet."""
        while (end := self._end_of_frame()) is not None:
            payload = bytes(self._incoming[self._parsed + _LENGTH.size : end])
            fds = self._descriptors_before(self._origin + end)
            self._parsed = end
            try:
                return Frame(decode(payload), fds)
            except ProtocolError:
                self.num_dropped += 1
                fds.close()
        self._origin += self._parsed
        del self._incoming[: self._parsed]
        self._parsed = 0
        return None

    def _end_of_frame(self) -> int | None:
        """Where in `_incoming` the frame ends that begins at `_parsed`; None if it is not complete yet."""
        num_bytes = len(self._incoming) - self._parsed
        if num_bytes < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._incoming, self._parsed)
        if length > MAX_FRAME_BYTES:
            raise ProtocolError(f"a frame of {length} bytes: the stream is out of step")
        return self._parsed + _LENGTH.size + length if num_bytes >= _LENGTH.size + length else None

    def _descriptors_before(self, end: int) -> Descriptors:
        """The descriptors of the frame that ends there."""
        batches = list(takewhile(lambda batch: batch.end <= end, self._batches))
        if not all(batch.is_complete for batch in batches):
            raise ProtocolError("descriptors of a message were lost: too many open files (ulimit -n)")
        return Descriptors([fd for _ in batches for fd in self._batches.popleft().fds.take()])


def _close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


class AsyncChannel:
    """The same for asyncio: `await receive()` yields messages one by one."""

    def __init__(self, sock: socket.socket) -> None:
        self.channel = Channel(sock)
        self._inbox: deque[Frame] = deque()
        self._failure: Exception | None = None  # why no more frames will come
        self._waiter: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._writing = False
        self._loop.add_reader(sock, self._on_readable)

    def send(self, message: AnyMessage) -> None:
        """Queue and write; never blocks."""
        self.channel.send(message)
        self._watch_writable()

    async def receive_frame(self) -> Frame:
        """The next message and its descriptors; ChannelClosed at the end."""
        while not self._inbox:
            if self._failure is not None:
                raise self._failure
            self._waiter = self._loop.create_future()
            await self._waiter
        return self._inbox.popleft()

    async def receive(self) -> AnyMessage:
        """As `receive_frame`, where no message comes with descriptors that are needed."""
        return (await self.receive_frame()).message

    def close(self) -> None:
        self._loop.remove_reader(self.channel.sock)
        self._loop.remove_writer(self.channel.sock)
        self.channel.close()

    def _on_readable(self) -> None:
        try:
            self._inbox.extend(self.channel.receive_frames())
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
