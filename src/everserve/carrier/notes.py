"""What stands for memory of another host where a descriptor is expected: memory of our own, with the name in it.

So who keeps descriptors and passes them on (the orchestrator) need not know on which host the memory is, and what it
does with one (it keeps it under another name, too) can be done on the host that has the memory.
"""

import os

import msgspec

from everserve.errors import ProtocolError
from everserve.tables.memory import MemoryName

_MOST_BYTES = 1 << 16
_decoder = msgspec.msgpack.Decoder(MemoryName)


def write(memory: MemoryName) -> int:
    """A new descriptor, which is the caller's."""
    fd = os.memfd_create(f"everserve-note-{memory.name}")
    os.write(fd, msgspec.msgpack.encode(memory))
    return fd


def read(fd: int) -> MemoryName:
    """The name in it; the descriptor stays the caller's. Raises ProtocolError."""
    try:
        return _decoder.decode(os.pread(fd, _MOST_BYTES, 0))
    except msgspec.DecodeError as error:
        raise ProtocolError(f"no memory of another host: {error}") from error
