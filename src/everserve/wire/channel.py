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
with DescriptorsLost, the process ends, and its successor is told anew. A process without a successor (supervisor,
gateway) looks first (MSG_PEEK) and leaves such a frame in the socket until there is room: `waits_for_room`.

The kernel also limits the descriptors that a user has in flight, sent and not read yet (ETOOMANYREFS beyond
RLIMIT_NOFILE). Such a frame waits as if the buffer were full, but no event says when to try again: see `is_held_back`.

Channels that must outlive one of their processes are packets (SOCK_SEQPACKET): lifelines, and the supervisor's to the
gateway. The next supervisor goes on with the same socket, in which there can be no half frame: the kernel takes all of
a packet, or nothing. A frame that is too large for one (the goal of a model with many experts) lies in memory of its
own, whose descriptor is the last that goes with the packet.

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

from everserve.errors import DescriptorsLost, ProtocolError
from everserve.wire.messages import AnyMessage, decode, encode

MAX_FRAME_BYTES = 256 << 20
MAX_PACKET_BYTES = 160 << 10  # what a socket with the buffer that every system has takes at once
MAX_FDS = 253  # with one frame: the kernel's SCM_MAX_FD
RETRY_S = 0.01  # after this time a frame that is held back, or for which there is no room, is tried again
_LENGTH = struct.Struct("<I")
_IN_MEMORY = 0xFFFFFFFF  # instead of a length: the message is in the packet's last descriptor
_FD = struct.Struct("i")
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

    @property
    def numbers(self) -> tuple[int, ...]:
        """Those that were not taken."""
        return tuple(self._fds)

    def take(self) -> list[int]:
        """All of them. The caller must close them."""
        fds, self._fds = self._fds, []
        return fds

    def take_last(self) -> int:
        return self._fds.pop()

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
    """One end of a socket pair. Only `wait` and `receive` block. `waits_for_room`: see above."""

    def __init__(self, sock: socket.socket, waits_for_room: bool = False) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._are_packets = sock.type == socket.SOCK_SEQPACKET
        self._read_bytes = MAX_PACKET_BYTES if self._are_packets else _READ_BYTES
        self.has_no_room = False  # for descriptors that have come: the socket stays readable; read again after RETRY_S
        self.num_dropped = 0  # frames that were not one of our messages
        self.is_held_back = False  # too many descriptors are in flight, or no memory: flush again after RETRY_S
        self._incoming = bytearray()
        self._parsed = 0  # bytes of `_incoming` whose frames were delivered
        self._origin = 0  # where in the stream `_incoming` begins
        self._batches: deque[_Batch] = deque()
        self._outgoing: deque[tuple[memoryview, list[int]]] = deque()
        self._eof = False
        self._waits_for_room = waits_for_room

    @classmethod
    def pair(cls, buffer_bytes: int | None = None, are_packets: bool = False) -> tuple[socket.socket, socket.socket]:
        """Two connected unnamed sockets: nothing is left behind when both are closed. `buffer_bytes`: what each may
        send before the other reads; less if the kernel does not allow it (net.core.wmem_max)."""
        pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET if are_packets else socket.SOCK_STREAM)
        if buffer_bytes is not None:
            for end in pair:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        return pair

    @classmethod
    def of_fd(cls, fd: int, waits_for_room: bool = False) -> "Channel":
        """A channel over a socket that was received as a descriptor."""
        return cls(socket.socket(fileno=fd), waits_for_room)

    def fileno(self) -> int:
        return self.sock.fileno()

    # -- sending ---------------------------------------------------------------------------------

    def send(self, message: AnyMessage, fds: Sequence[int] = ()) -> None:
        """Queue a message and write what the kernel takes. Descriptors are duplicated for the receiver; OSError, and
        nothing is queued, if they have to wait here and there is no room for duplicates."""
        frame, memory = self._frame(message, fds)
        try:
            num_sent = self._begin(frame, [*fds, *memory])
            if num_sent < len(frame):
                self._outgoing.append((frame[num_sent:], [] if num_sent else _duplicates([*fds, *memory])))
        finally:
            _close_all(memory)

    def give(self, message: AnyMessage, fds: list[int]) -> None:
        """Send, and give the descriptors away: they belong to the channel from now on, so it needs no room for them."""
        num_sent = -1
        try:
            frame, memory = self._frame(message, fds)
            fds = [*fds, *memory]
            num_sent = self._begin(frame, fds)
            if num_sent < len(frame):
                self._outgoing.append((frame[num_sent:], [] if num_sent else fds))
        finally:
            if num_sent:
                _close_all(fds)

    def try_send(self, message: AnyMessage, fds: Sequence[int]) -> bool:
        """On packets: send all of it, or nothing. Nothing waits here, so that who sends it knows where it is."""
        frame, memory = self._frame(message, fds)
        try:
            return self._begin(frame, [*fds, *memory]) == len(frame)
        finally:
            _close_all(memory)

    def _frame(self, message: AnyMessage, fds: Sequence[int]) -> tuple[memoryview, list[int]]:
        """What is sent, and the memory that the message is in if it does not fit into a packet."""
        payload = encode(message)
        is_elsewhere = self._are_packets and _LENGTH.size + len(payload) > MAX_PACKET_BYTES
        assert len(fds) + is_elsewhere <= MAX_FDS, f"{len(fds)} descriptors with one {type(message).__name__}"
        if is_elsewhere:
            return memoryview(_LENGTH.pack(_IN_MEMORY)), [_in_memory(payload)]
        return memoryview(_LENGTH.pack(len(payload)) + payload), []

    def _begin(self, frame: memoryview, fds: Sequence[int]) -> int:
        """How many bytes of it the kernel takes behind all that waits already."""
        self.flush()
        return 0 if self._outgoing else self._write(frame, fds)

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
            if error.errno not in (errno.ETOOMANYREFS, errno.ENOMEM, errno.ENOBUFS):
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
        """Receives as `receive_frames`, where no message comes with descriptors that are needed."""
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
        with selectors.PollSelector() as selector:  # which needs no descriptor
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
        """Receives as `receive_frame`, for a message whose descriptors are not needed."""
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
        """Closes as `close`, but the socket's descriptor is left as it is: by now it may be another file's."""
        self.sock.detach()
        self.close()

    @property
    def undelivered(self) -> frozenset[int]:
        """The descriptors of frames that have been read, and not asked for yet."""
        return frozenset(fd for batch in self._batches for fd in batch.fds.numbers)

    def _read_available(self) -> None:
        self.has_no_room = False
        while not self._eof:
            try:
                data, fds, flags = _receive(self.sock, self._read_bytes, socket.MSG_PEEK if self._waits_for_room else 0)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # said once: the peer has not read all; of packets its own last ones come after this
            if self._waits_for_room:
                if flags & socket.MSG_CTRUNC:
                    _close_all(fds)
                    self.has_no_room = True
                    return
                self._consume(len(data))  # the descriptors that we have stay, those in the socket are closed
            self._incoming += data
            self._eof = not data  # a short read is not the end: one stops at each frame that carries descriptors
            is_complete = not flags & socket.MSG_CTRUNC
            if fds or not is_complete:
                self._batches.append(_Batch(self._origin + len(self._incoming), Descriptors(fds), is_complete))

    def _consume(self, num_bytes: int) -> None:
        while num_bytes:
            num_bytes -= len(self.sock.recv(num_bytes))

    def _next(self) -> Frame | None:
        """The next complete frame that is one of our messages; None if there is none yet."""
        while (end := self._end_of_frame()) is not None:
            payload = bytes(self._incoming[self._parsed + _LENGTH.size : end])
            fds = self._descriptors_before(self._origin + end)
            self._parsed = end
            try:
                return Frame(decode(payload or (_from_memory(fds) if self._are_packets else b"")), fds)
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
        if length == _IN_MEMORY and self._are_packets:
            return self._parsed + _LENGTH.size
        if length > MAX_FRAME_BYTES:
            raise ProtocolError(f"a frame of {length} bytes: the stream is out of step")
        return self._parsed + _LENGTH.size + length if num_bytes >= _LENGTH.size + length else None

    def _descriptors_before(self, end: int) -> Descriptors:
        """The descriptors of the frame that ends there."""
        batches = list(takewhile(lambda batch: batch.end <= end, self._batches))
        if not all(batch.is_complete for batch in batches):
            raise DescriptorsLost("descriptors of a message were lost: too many open files (ulimit -n)")
        return Descriptors([fd for _ in batches for fd in self._batches.popleft().fds.take()])


def _receive(sock: socket.socket, num_bytes: int, flags: int) -> tuple[bytes, list[int], int]:
    """Bytes, descriptors and flags. (`socket.recv_fds` takes flags, and does not use them.)"""
    data, ancillary, returned, _ = sock.recvmsg(num_bytes, socket.CMSG_SPACE(MAX_FDS * _FD.size), flags)
    fds: list[int] = []
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds += [fd for (fd,) in _FD.iter_unpack(content[: len(content) - len(content) % _FD.size])]
    return data, fds, returned


def _in_memory(payload: bytes) -> int:
    fd = os.memfd_create("message")
    try:
        with os.fdopen(fd, "wb", closefd=False) as file:
            file.write(payload)
    except OSError:
        os.close(fd)
        raise
    return fd


def _from_memory(fds: Descriptors) -> bytes:
    """The message that is in the last of them; the others stay. ProtocolError if there is none."""
    if not fds:
        raise ProtocolError("an empty frame")
    with os.fdopen(fds.take_last(), "rb") as file:
        file.seek(0)
        return file.read(MAX_FRAME_BYTES)


def _close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def _duplicates(fds: Iterable[int]) -> list[int]:
    made: list[int] = []
    try:
        for fd in fds:
            made.append(os.dup(fd))
    except OSError:
        _close_all(made)
        raise
    return made


class AsyncChannel:
    """The same for asyncio: `await receive()` yields messages one by one."""

    def __init__(self, sock: socket.socket | Channel, waits_for_room: bool = False, reads: bool = True) -> None:
        """`reads`: otherwise what comes stays in the socket until `begin_to_read`."""
        self._was_used = isinstance(sock, Channel)  # and may have read more than its user has taken
        self.channel = sock if isinstance(sock, Channel) else Channel(sock, waits_for_room)
        self._inbox: deque[Frame] = deque()
        self._failure: Exception | None = None  # why no more frames will come
        self._waiter: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._writing = False
        if reads:
            self.begin_to_read()

    def begin_to_read(self) -> None:
        self._loop.add_reader(self.channel.sock, self._on_readable)
        if self._was_used:
            self._loop.call_soon(self._on_readable)

    def send(self, message: AnyMessage) -> None:
        """Queue and write; never blocks."""
        self.channel.send(message)
        self._watch_writable()

    def give(self, message: AnyMessage, fds: list[int]) -> None:
        """Send; the descriptors belong to the channel from now on."""
        self.channel.give(message, fds)
        self._watch_writable()

    def descriptors(self) -> frozenset[int]:
        """Those of messages that have come, and were not asked for yet."""
        return self.channel.undelivered | {fd for frame in self._inbox for fd in frame.fds.numbers}

    async def receive_frame(self) -> Frame:
        """The next message and its descriptors; ChannelClosed at the end."""
        while not self._inbox:
            if self._failure is not None:
                raise self._failure
            self._waiter = self._loop.create_future()
            await self._waiter
        return self._inbox.popleft()

    async def receive(self) -> AnyMessage:
        """Receives as `receive_frame`, where no message comes with descriptors that are needed."""
        return (await self.receive_frame()).message

    def close(self) -> None:
        self._loop.remove_reader(self.channel.sock)
        self._loop.remove_writer(self.channel.sock)
        self.channel.close()

    def _on_readable(self) -> None:
        if self.channel.fileno() == -1:
            return  # it was closed in this turn
        try:
            self._inbox.extend(self.channel.receive_frames())
        except (ChannelClosed, ProtocolError, OSError) as error:
            self._failure = error
            self._loop.remove_reader(self.channel.sock)
        if self.channel.has_no_room:
            self._loop.remove_reader(self.channel.sock)
            self._loop.call_later(RETRY_S, self._read_again)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _read_again(self) -> None:
        if self.channel.fileno() != -1:
            self._loop.add_reader(self.channel.sock, self._on_readable)

    def _watch_writable(self) -> None:
        if self.channel.wants_write and not self._writing:
            self._writing = True
            self._loop.add_writer(self.channel.sock, self._on_writable)

    def _on_writable(self) -> None:
        self.channel.flush()
        if not self.channel.wants_write:
            self._writing = False
            self._loop.remove_writer(self.channel.sock)
