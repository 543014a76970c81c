"""What carriers send each other: frames of a link between two hosts.

    Greeting ──> <── Welcome or Refused              once for each connection
    Beat                                             every period, both ways; it may be lost
    all others, in a Numbered each                   in order, once, whatever becomes of connections (resend.py)

A frame on the wire is a 4-byte little-endian length and that many bytes of msgpack. Bytes of a local socket are passed
on as they are, under the number of its *line*: the far end numbers its lines, and never uses a number twice.
"""

import functools
import hashlib
import operator
import struct
from typing import TYPE_CHECKING

import msgspec

from everserve import __version__
from everserve.errors import ProtocolError
from everserve.memory.liveness import CELL_BYTES
from everserve.tables.ids import Incarnation, Rank
from everserve.tables.memory import MemoryName
from everserve.wire import messages

MAX_FRAME_BYTES = 8 << 20
MAX_GREETING_BYTES = 64 << 10  # of what comes before the two ends know each other
LENGTH = struct.Struct("<I")
PROTOCOL = 1


class Frame(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of all frames."""


class Greeting(Frame, frozen=True):
    """Joined host to first host, first frame of a connection."""

    protocol: int
    layout: str  # what both ends must agree on besides that (`layout_hash`)
    instance: str  # that it belongs to; empty: none yet
    name: str  # of the host, for people
    boot: str  # of this carrier; a new one has nothing of the one before
    term: int  # the highest that it has seen of this instance
    num_received: int  # frames of this boot, so far
    host: int | None = None  # the number that it had before


class Welcome(Frame, frozen=True):
    """First host to joined host, the answer. What the host is to be is said with it."""

    instance: str
    term: int
    host: int
    num_received: int
    num_gateways: int
    device: str  # that workers compute on
    detect_ms: float
    grace_s: float  # how long a connection may be away


class Refused(Frame, frozen=True):
    """First host to joined host, instead: why. `is_final`: this boot is never let in."""

    reason: str
    is_final: bool


class Beat(Frame, frozen=True):
    """The sender lives, and has received so many frames. From a joined host: how its workers are."""

    num_received: int
    pulses: list["Pulse"] = []


class Pulse(msgspec.Struct, frozen=True, array_like=True):
    """One worker's cell, as its host sees it."""

    rank: Rank
    incarnation: Incarnation
    pulse: int
    lease_is_over: bool
    letter: str | None  # the state of its process, where the pulse stands still


class Numbered(Frame, frozen=True):
    """A frame that is sent until it is acknowledged."""

    number: int
    content: msgspec.Raw  # an AnyContent


class Content(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of what is numbered."""


class Said(Content, frozen=True):
    """A message (wire/messages.py). First host to joined host: what the orchestrator says to supervisor and anchor; the
    other way what these say, and the supervisor of the joined host to that of the first."""

    message: bytes


class Told(Content, frozen=True):
    """First host to joined host: what the orchestrator says to a worker."""

    line: int
    message: bytes


class SameMemory(Content, frozen=True):
    """First host to joined host: from now on that memory has this name, too."""

    name: MemoryName
    is_that_of: MemoryName


class Opened(Content, frozen=True):
    """Joined host to first host: a line to a worker. `gateway`: that it is for; None: for the orchestrator."""

    line: int
    rank: Rank
    incarnation: Incarnation
    gateway: int | None = None


class Bytes(Content, frozen=True):
    """Either way: bytes of a line, in order."""

    line: int
    data: bytes


class Closed(Content, frozen=True):
    """One end of the line was closed."""

    line: int


class Died(Content, frozen=True):
    """Joined host to first host: the kernel has marked this worker's life word."""

    rank: Rank
    incarnation: Incarnation


class HandOver(Content, frozen=True):
    """First host to joined host: there is another orchestrator. Every worker gets another line to it."""


class AttachGateway(Content, frozen=True):
    """First host to joined host: there is another gateway of this number. Every home gets another line to it."""

    gateway: int


class Fenced(Content, frozen=True):
    """First host to joined host: this boot counts as lost. Its workers must end."""

    reason: str


class Ended(Content, frozen=True):
    """First host to joined host: the instance has ended in order."""


if TYPE_CHECKING:
    AnyFrame = Frame
    AnyContent = Content
else:  # what can be decoded
    AnyFrame = functools.reduce(operator.or_, Frame.__subclasses__())
    AnyContent = functools.reduce(operator.or_, Content.__subclasses__())

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyFrame] = msgspec.msgpack.Decoder(AnyFrame)
_contents: msgspec.msgpack.Decoder[AnyContent] = msgspec.msgpack.Decoder(AnyContent)


def pack(frame: AnyFrame) -> bytes:
    """The frame as it goes over the wire."""
    payload = _encoder.encode(frame)
    assert len(payload) <= MAX_FRAME_BYTES, f"a {type(frame).__name__} of {len(payload)} bytes"
    return LENGTH.pack(len(payload)) + payload


def unpack(payload: bytes) -> AnyFrame:
    """The frame in these bytes, without their length. Raises ProtocolError."""
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ProtocolError(f"not a frame of a link: {error}") from error


def pack_content(content: AnyContent) -> msgspec.Raw:
    return msgspec.Raw(_encoder.encode(content))


def unpack_content(packed: msgspec.Raw) -> AnyContent:
    """The inverse. Raises ProtocolError."""
    try:
        return _contents.decode(packed)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ProtocolError(f"not what a link carries: {error}") from error


@functools.cache
def layout_hash() -> str:
    """What two hosts must agree on: the version, the size of cells, all messages with their fields."""
    parts = [f"{__version__} {CELL_BYTES}"]
    kinds = [*messages.Message.__subclasses__(), *Frame.__subclasses__(), *Content.__subclasses__()]
    parts += sorted(f"{kind.__name__} {' '.join(kind.__struct_fields__)}" for kind in kinds)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
