"""KvPieces: the KV of some heads, in memory that outlives the process which computes them (pieces/layout.py has the
picture).

The memory certifies itself: beside each token's keys and values in each piece stands a *word* of their checksum and of
the token's chain (kvlog/chains.py). So what is in a pool, or in its mirror, can be used by a process that knows the
chains of a stream: what is torn, missing or of another stream only shortens what is believed.

The *id* is a random number. Homes compute streams with the KV of a pool with a certain id; when KV was lost, or has to
be checked, the id is another one, and requests that name the old one are refused. It is new

    when the memory is new, or of another shape           everything is lost
    when a piece is given to another (layer, head)        the KV of the one that had it is lost
    when another process takes the pool over              what its predecessor has left may be damaged: each home has
                                                          its streams' KV checked where it is (engine/regaining.py)

A process that was stopped, declared gone and replaced would go on to write as soon as it wakes up. So the process that
uses a pool holds a lock that the kernel gives up when the process ends, and only then: its successor gets the pool when
that process has ended, and not before.
"""

import errno
import fcntl
import os
import struct
import time
from collections.abc import Callable

from everserve.memory.pieces.layout import NO_OWNER, PAGE, KvMemory, KvShape, owner_of
from everserve.memory.pieces.library import load
from everserve.memory.pieces.mirror import Mirror
from everserve.memory.pieces.parity import Parity
from everserve.memory.pieces.parity_layout import ParityMemory, ParityShape

__all__ = ["KvPieces", "KvShape", "PoolInUseError"]

_flock = struct.Struct("@hhqqi")


class PoolInUseError(RuntimeError):
    """The process that had this pool before has not ended."""


class KvPieces:
    """A pool in memory that another process owns. `fd` stays the caller's. Raises PoolInUseError.

    `mirror_fd`: of a second memory, if there is one, into which everything is copied that is stored here. New memory
    takes over from it which piece belongs to which head: so what the mirror has can be fetched (pieces/sources.py).
    `parity_fd`: of memory for the parity of other workers' pools, which has this shape.
    """

    def __init__(
        self,
        fd: int,
        shape: KvShape,
        mirror_fd: int | None = None,
        parity_fd: int | None = None,
        parity_shape: ParityShape | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.shape = shape
        # A description of our own: locks of descriptors that were passed between processes are one lock.
        self._lock_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            self._lock()
            self.memory = KvMemory(fd, shape)
        except (PoolInUseError, ValueError):
            os.close(self._lock_fd)
            raise
        self.mirror = Mirror(self.memory, KvMemory(mirror_fd, shape.mirrored)) if mirror_fd is not None else None
        if not self.memory.is_signed:
            owners = self.mirror.owners if self.mirror is not None else None
            self.memory.sign(owners or [NO_OWNER] * shape.num_pieces, _new_id())
        self.memory.id = _new_id()
        if self.mirror is not None:
            self.mirror.note_owners()
        self.parity_shape, self.parity = parity_shape, None
        if parity_fd is not None and parity_shape is not None:
            self.parity = Parity(ParityMemory(parity_fd, parity_shape), clock)
        self._is_used = [False] * shape.num_pieces  # by this process

    @property
    def num_parking(self) -> int:
        """Blocks that only the mirror has."""
        return self.mirror.memory.shape.num_blocks - self.shape.num_blocks if self.mirror is not None else 0

    @property
    def id(self) -> int:
        return self.memory.id

    @property
    def id_address(self) -> int:
        return self.memory.id_address

    @property
    def blocks(self) -> memoryview:
        """All of the pool's KV."""
        return self.memory.blocks

    def piece_of(self, layer: int, head: int) -> int:
        """The piece of this head, from now on. If no piece is free, one is taken whose head is not used here, and the
        id changes."""
        owner = owner_of(layer, head)
        owners = list(self.memory.owners)
        if owner in owners:
            piece = owners.index(owner)
        elif NO_OWNER in owners:
            piece = owners.index(NO_OWNER)
        elif False in self._is_used:
            piece = self._is_used.index(False)
            self.memory.id = _new_id()  # first: who dies here has lost more than it had to, never less
        else:
            raise ValueError(f"a pool with {self.shape.num_pieces} pieces, all in use, has none for layer {layer}")
        self.memory.owners[piece] = owner
        self._is_used[piece] = True
        if self.mirror is not None:
            self.mirror.note_owners()
        return piece

    def give_up(self, layer: int, head: int) -> None:
        """This head is not served here any more. Its KV stays until the piece is needed."""
        self._is_used[list(self.memory.owners).index(owner_of(layer, head))] = False

    def sign(self, kv_slots: int, chains: int, num_rows: int, pieces: int, num_pieces: int) -> None:
        """Rows are stored in all of these pieces: addresses of int32, of uint64, and of int32."""
        load().brief.es_pieces_sign(self.memory.address, kv_slots, chains, num_rows, pieces, num_pieces)
        if self.mirror is not None:
            self.mirror.note(kv_slots, num_rows, pieces, num_pieces)
        if self.parity is not None:
            self.parity.note(kv_slots, chains, num_rows)

    def close(self) -> None:
        """Gives up the lock. The memory stays mapped for as long as there is a view of it."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
        self._lock_fd = -1

    def _lock(self) -> None:
        request = _flock.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, PAGE, 0)
        try:
            fcntl.fcntl(self._lock_fd, fcntl.F_OFD_SETLK, request)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            raise PoolInUseError("the process that had this KV has not ended") from None


def _new_id() -> int:
    return 1 + (int.from_bytes(os.urandom(8), "little") >> 2)  # never 0, and a positive int64
