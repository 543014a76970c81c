"""What was sent and not acknowledged is sent again, so that a connection may end at any byte without loss.

    sender      numbers its contents 1, 2, ..., and keeps each until the receiver says that it has received so many
    receiver    takes number n + 1 after n, and drops what it has; a gap is a fault of the protocol

Both ends of a connection begin with how many they have received, and the sender repeats the rest.
"""

from collections import deque
from collections.abc import Iterator

import msgspec

from everserve.carrier.frames import AnyContent, Numbered, pack, pack_content, unpack_content
from everserve.errors import ProtocolError


class Outgoing:
    """What this end has sent. Numbers go on from connection to connection."""

    def __init__(self) -> None:
        self._num_sent = 0
        self._kept: deque[bytes] = deque()  # the last of what was sent, packed
        self.num_bytes = 0  # of these

    def add(self, content: AnyContent) -> bytes:
        """The frame to send."""
        self._num_sent += 1
        frame = pack(Numbered(number=self._num_sent, content=pack_content(content)))
        self._kept.append(frame)
        self.num_bytes += len(frame)
        return frame

    def acknowledge(self, num_received: int) -> None:
        """The other end has so many. Raises ProtocolError where it cannot have them."""
        num_new = num_received - (self._num_sent - len(self._kept))
        if num_received > self._num_sent:
            raise ProtocolError(f"{num_received} frames were received, of {self._num_sent}")
        for _ in range(num_new):  # an acknowledgement may be overtaken by a later one
            self.num_bytes -= len(self._kept.popleft())

    def resume(self, num_received: int) -> Iterator[bytes]:
        """The other end has so many: what is to be sent on a new connection, before anything else."""
        if num_received < self._num_sent - len(self._kept):
            raise ProtocolError(f"frames after {num_received} were acknowledged, and are not here any more")
        self.acknowledge(num_received)
        yield from self._kept


class Incoming:
    """What this end has received."""

    def __init__(self) -> None:
        self.num_received = 0

    def take(self, frame: Numbered) -> AnyContent | None:
        """The content; None if it has come before. Raises ProtocolError at a gap."""
        if frame.number <= self.num_received:
            return None
        if frame.number != self.num_received + 1:
            raise ProtocolError(f"frame {frame.number} came after {self.num_received}")
        content = unpack_content(msgspec.Raw(frame.content))
        self.num_received = frame.number
        return content
