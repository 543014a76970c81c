"""Transfer: one expert on its way into a slot, in chunks, beside the graphs that serve requests.

    feed ──chunk──> slot ──> checksum of the chunk ──> ... ──> the checksum of all that is in the slot

The host queues chunks on a stream of its own and asks now and then how far they are; nothing here waits. Each chunk is
short, for three reasons: other work gets in between; a copy that is given up ends soon; and where processes share a
device, work of a killed process that runs for more than some 0.3 ms can end the others with it.

The pace. Inside the device at most one chunk of 8 MiB is queued at each turn of the worker's loop (some 100 us, so
80 GB/s, of the memory's 4,800). From the host the bus is the limit: four chunks are kept queued, which is its full
speed, and slows steps by some 6 % while it lasts. Sums are computed while a chunk is in the device's cache.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

from everserve.backends.cuda.ops.checksum import WORD_BYTES, add_checksum
from everserve.memory.device import Driver

CHUNK_BYTES = 8 << 20
IN_DEVICE, FROM_HOST = 1, 4  # chunks that are queued at a time
_CHECK_CHUNK_BYTES, _CHECKS = 32 << 20, 16  # where nothing is copied
_WORD = (1 << 64) - 1


class CopyStream(Protocol):
    """Where chunks are queued: in order, beside everything else."""

    def begin(self) -> None:
        """The sum is 0."""

    def copy(self, target: int, source: int, num_bytes: int) -> None: ...
    def launch(self, kernels: Callable[[], None]) -> None: ...
    def add(self, address: int, num_bytes: int, first_word: int) -> None:
        """Add the checksum of what is there then to the sum."""

    def end(self) -> None:
        """The sum is complete; `total` is it as soon as a later mark is reached."""

    def mark(self) -> Callable[[], bool]:
        """Whether everything is done that was queued before."""

    def total(self) -> int: ...
    def wait(self) -> None:
        """Until everything is done."""


class DeviceStream:
    """`CopyStream` on a device, with the lowest priority."""

    def __init__(self, driver: Driver, device: torch.device) -> None:
        self._driver = driver
        self._stream = torch.cuda.Stream(device, priority=0)
        self._sum = torch.zeros(1, dtype=torch.int64, device=device)
        self._sum_on_host = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        self._rehearse()

    def begin(self) -> None:
        with torch.cuda.stream(self._stream):
            self._sum.zero_()

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        self._driver.copy_async(self._stream.cuda_stream, target, source, num_bytes)

    def launch(self, kernels: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):
            kernels()

    def add(self, address: int, num_bytes: int, first_word: int) -> None:
        with torch.cuda.stream(self._stream):
            add_checksum(address, num_bytes, first_word, self._sum)

    def end(self) -> None:
        with torch.cuda.stream(self._stream):
            self._sum_on_host.copy_(self._sum, non_blocking=True)

    def mark(self) -> Callable[[], bool]:
        event = torch.cuda.Event()
        event.record(self._stream)
        return lambda: bool(event.query())

    def total(self) -> int:
        return int(self._sum_on_host.item()) & _WORD

    def wait(self) -> None:
        self._stream.synchronize()

    def _rehearse(self) -> None:
        """While no graph waits: loading a kernel may need the whole device."""
        memory = torch.zeros(2, dtype=torch.int64, device=self._sum.device)
        self.begin()
        self.add(memory.data_ptr(), 2 * WORD_BYTES, 0)
        self.copy(memory.data_ptr(), memory.data_ptr() + WORD_BYTES, WORD_BYTES)
        self.end()
        self.wait()


class Feed(Protocol):
    """Where the bytes of one expert come from, in order."""

    max_queued: int  # chunks

    def put(self, stream: CopyStream, target: int) -> int | None:
        """Queue the next chunk; how many bytes that is. None: it is not there yet. Raises if it never will be."""

    def release(self) -> None:
        """The oldest chunk that was put has arrived."""

    def close(self) -> None:
        """No more is needed, and nothing is queued."""


class MemoryFeed:
    """Memory that a stream can copy from. No copy goes over a boundary of `piece_bytes` behind `first`: host memory is
    registered in pieces."""

    def __init__(
        self, address: int, num_bytes: int, max_queued: int, *, first: int = 0, piece_bytes: int | None = None
    ) -> None:
        self.max_queued = max_queued
        self._address, self._end = address, address + num_bytes
        self._first, self._piece_bytes = first, piece_bytes

    def put(self, stream: CopyStream, target: int) -> int | None:
        size = min(CHUNK_BYTES, self._end - self._address)
        if self._piece_bytes is not None:
            size = min(size, self._piece_bytes - (self._address - self._first) % self._piece_bytes)
        stream.copy(target, self._address, size)
        self._address += size
        return size

    def release(self) -> None: ...

    def close(self) -> None: ...


class NoFeed:
    """What is in place already, and only has to be checked."""

    max_queued = _CHECKS

    def __init__(self, num_bytes: int) -> None:
        self._left = num_bytes

    def put(self, stream: CopyStream, target: int) -> int | None:
        size = min(_CHECK_CHUNK_BYTES, self._left)
        self._left -= size
        return size

    def release(self) -> None: ...

    def close(self) -> None: ...


class Transfer:
    """`num_bytes` from a feed to the address `target`."""

    def __init__(self, stream: CopyStream, feed: Feed, target: int, num_bytes: int) -> None:
        self._stream = stream
        self._feed = feed
        self._target = target
        self._num_bytes = num_bytes
        self._num_put = 0
        self._marks: deque[Callable[[], bool]] = deque()
        self.num_idle = 0  # polls since something arrived
        stream.begin()

    def poll(self) -> int | None:
        """Queue what may be queued. The checksum of what is there, once everything is."""
        self.num_idle += bool(self._marks)
        while self._marks and self._marks[0]():
            self._marks.popleft()
            self._feed.release()
            self.num_idle = 0
        while len(self._marks) < self._feed.max_queued and self._num_put < self._num_bytes:
            if not self._put():
                return None
        if self._marks or self._num_put < self._num_bytes:
            return None
        self._feed.close()
        return self._stream.total()

    def give_up(self) -> None:
        """Nothing is copied afterwards."""
        self._stream.wait()
        self._feed.close()

    def _put(self) -> bool:
        target = self._target + self._num_put
        size = self._feed.put(self._stream, target)
        if size is None:
            return False
        self._stream.add(target, size, self._num_put // WORD_BYTES)
        self._num_put += size
        if self._num_put == self._num_bytes:
            self._stream.end()
        self._marks.append(self._stream.mark())
        return True
