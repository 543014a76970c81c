"""KvPieces: the KV of some heads, in memory that outlives the process which computes them.

    page 0      magic | id | num_blocks | num_pieces | piece_bytes
    page 1 ...  for each piece the (layer, head) that it belongs to
    then        [block][piece][piece_bytes]: keys and values of block_size tokens

The *id* is a random number. Homes compute streams with the KV of a pool with a certain id; when KV was lost, the id is
another one, and requests that name the old one are refused. It is new

    when the memory is new, or of another shape           everything is lost
    when a piece is given to another (layer, head)        the KV of the one that had it is lost

A process that was stopped, declared gone and replaced would go on to write as soon as it wakes up. So the process that
uses a pool holds a lock that the kernel gives up when the process ends, and only then: its successor gets the pool when
that process has ended, and not before.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import struct
from dataclasses import dataclass

_PAGE = 4096
_MAGIC = 0x736563656970766B  # "kvpieces"
_MAGIC_AT, _ID_AT = 0, 1  # words of page 0
_FREE = 0
_HEAD_BITS = 16
_flock = struct.Struct("@hhqqi")


class PoolInUseError(RuntimeError):
    """The process that had this pool before has not ended."""


@dataclass(frozen=True)
class KvShape:
    """The pool of one worker."""

    num_blocks: int
    num_pieces: int
    piece_bytes: int  # keys and values of one block in one piece

    @property
    def blocks_at(self) -> int:
        return _PAGE + -(-self.num_pieces * 8 // _PAGE) * _PAGE

    @property
    def num_bytes(self) -> int:
        return self.blocks_at + self.num_blocks * self.num_pieces * self.piece_bytes


class KvPieces:
    """A pool in memory that another process owns. `fd` stays the caller's. Raises PoolInUseError."""

    def __init__(self, fd: int, shape: KvShape) -> None:
        if os.fstat(fd).st_size < shape.num_bytes:
            raise ValueError(f"a pool has {shape.num_bytes} bytes, this memory has {os.fstat(fd).st_size}")
        self.shape = shape
        # A description of our own: locks of descriptors that were passed between processes are one lock.
        self._lock_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            self._lock()
        except PoolInUseError:
            os.close(self._lock_fd)
            raise
        self._map = mmap.mmap(fd, shape.num_bytes)
        words = (ctypes.c_int64 * 5).from_buffer(self._map)
        self.id_address = ctypes.addressof(words) + 8 * _ID_AT
        self._id = ctypes.c_int64.from_address(self.id_address)
        self._owners = (ctypes.c_int64 * shape.num_pieces).from_buffer(self._map, _PAGE)
        facts = [shape.num_blocks, shape.num_pieces, shape.piece_bytes]
        if words[_MAGIC_AT] != _MAGIC or words[2:] != facts or not self._id.value:
            words[_MAGIC_AT] = 0
            self._owners[:] = [_FREE] * shape.num_pieces
            for at, fact in enumerate(facts, start=2):
                words[at] = fact
            self._id.value = _new_id()
            words[_MAGIC_AT] = _MAGIC  # last: a process that dies before leaves nothing that counts
        self._is_used = [False] * shape.num_pieces  # by this process

    @property
    def id(self) -> int:
        return self._id.value

    @property
    def blocks(self) -> memoryview:
        """All of the pool's KV."""
        return memoryview(self._map)[self.shape.blocks_at : self.shape.num_bytes]

    def piece_of(self, layer: int, head: int) -> int:
        """The piece of this head, from now on. If no piece is free, one is taken whose head is not used here, and the
        id changes."""
        owner = _owner(layer, head)
        owners = list(self._owners)
        if owner in owners:
            piece = owners.index(owner)
        elif _FREE in owners:
            piece = owners.index(_FREE)
        elif False in self._is_used:
            piece = self._is_used.index(False)
            self._id.value = _new_id()  # first: who dies here has lost more than it had to, never less
        else:
            raise ValueError(f"a pool with {self.shape.num_pieces} pieces, all in use, has none for layer {layer}")
        self._owners[piece] = owner
        self._is_used[piece] = True
        return piece

    def give_up(self, layer: int, head: int) -> None:
        """This head is not served here any more. Its KV stays until the piece is needed."""
        self._is_used[list(self._owners).index(_owner(layer, head))] = False

    def close(self) -> None:
        """Gives up the lock. The memory stays mapped for as long as there is a view of it."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
        self._lock_fd = -1

    def _lock(self) -> None:
        request = _flock.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, _PAGE, 0)
        try:
            fcntl.fcntl(self._lock_fd, fcntl.F_OFD_SETLK, request)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            raise PoolInUseError("the process that had this KV has not ended") from None


def _owner(layer: int, head: int) -> int:
    return 1 + (layer << _HEAD_BITS | head)


def _new_id() -> int:
    return 1 + (int.from_bytes(os.urandom(8), "little") >> 2)  # never 0, and a positive int64
