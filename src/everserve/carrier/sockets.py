"""A local socket whose bytes go over a link as they are."""

import socket
from collections import deque

_READ_BYTES = 1 << 16


class Pipe:
    """Neither end blocks: what the kernel does not take at once waits here."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.has_ended = False  # the other end was closed
        self._outgoing: deque[memoryview] = deque()

    def fileno(self) -> int:
        return self.sock.fileno()

    @property
    def wants_write(self) -> bool:
        return bool(self._outgoing)

    def write(self, data: bytes) -> None:
        self._outgoing.append(memoryview(data))
        self.flush()

    def flush(self) -> None:
        while self._outgoing and not self.has_ended:
            part = self._outgoing[0]
            try:
                num_sent = self.sock.send(part)
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):
                self._outgoing.clear()  # what it has said is still read
                return
            if num_sent == len(part):
                self._outgoing.popleft()
            else:
                self._outgoing[0] = part[num_sent:]

    def read(self) -> bytes:
        """What has come; nothing also at the end, which `has_ended` says."""
        try:
            data = self.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return b""
        except ConnectionResetError:
            data = b""
        self.has_ended |= not data
        return data

    def close(self) -> None:
        self.flush()
        self.sock.close()
