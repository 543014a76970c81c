"""FileFeed: an expert out of the model's files, through a few buffers of registered host memory.

    files ──a thread: read, convert to bfloat16, sum──> buffer ──the device's stream──> slot

Reading may wait for a disk, so the worker's loop does none of it. The buffers are registered when the worker starts.
"""

import ctypes
import mmap
import queue
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from everserve.backends.cuda.transfer import CHUNK_BYTES, CopyStream
from everserve.memory.weights import copying
from everserve.memory.weights.checksum import WORD_BYTES

_NUM_BUFFERS = 4
_ITEM_BYTES = 2


class Buffers:
    """Registered memory for chunks on their way; used by one feed at a time."""

    def __init__(self, register: Callable[[int, int], object], chunk_bytes: int = CHUNK_BYTES) -> None:
        self.chunk_bytes = chunk_bytes
        self._memory = mmap.mmap(-1, _NUM_BUFFERS * chunk_bytes)
        first = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.addresses = [first + i * chunk_bytes for i in range(_NUM_BUFFERS)]
        register(first, len(self._memory))


class FileFeed:
    """`load` gives gate, up and down, in host memory: it is called in the thread. `checksum` is that of all bytes that
    were put."""

    max_queued = _NUM_BUFFERS

    def __init__(self, buffers: Buffers, load: Callable[[], Sequence[Tensor]]) -> None:
        self.checksum = 0
        self._buffers = buffers
        self._load = load
        self._free: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        for address in buffers.addresses:
            self._free.put(address)
        self._ready: queue.SimpleQueue[tuple[int, int, int] | Exception] = queue.SimpleQueue()
        self._in_flight: list[int] = []
        self._thread = threading.Thread(target=self._read, name="expert-file", daemon=True)
        self._thread.start()

    def put(self, stream: CopyStream, target: int) -> int | None:
        try:
            found = self._ready.get_nowait()
        except queue.Empty:
            return None
        if isinstance(found, Exception):
            raise found
        address, size, part = found
        self.checksum = (self.checksum + part) % (1 << 64)
        stream.copy(target, address, size)
        self._in_flight.append(address)
        return size

    def release(self) -> None:
        self._free.put(self._in_flight.pop(0))

    def close(self) -> None:
        self._free.put(None)
        self._thread.join()

    def _read(self) -> None:
        copying.be_nice(copying.FILL_NICE)
        try:
            first_word = 0
            for matrix in self._load():
                numbers, step = matrix.reshape(-1), self._buffers.chunk_bytes // _ITEM_BYTES
                for start in range(0, len(numbers), step):
                    address = self._free.get()
                    if address is None:
                        return
                    size = convert(numbers[start : start + step], address)
                    self._ready.put((address, size, _sum_at(address, size, first_word)))
                    first_word += size // WORD_BYTES
        except Exception as error:
            self._ready.put(error)


def convert(numbers: Tensor, address: int) -> int:
    """Write them there as bfloat16; how many bytes that is."""
    size = len(numbers) * _ITEM_BYTES
    buffer = (ctypes.c_char * size).from_address(address)
    torch.frombuffer(buffer, dtype=torch.bfloat16).copy_(numbers)
    return size


def _sum_at(address: int, num_bytes: int, first_word: int) -> int:
    return int(copying.load().es_weights_copy(address, None, num_bytes, first_word, 0))


class GeneratedFeed:
    """Weights that are made on the device (`--load-format dummy`), each matrix right where it belongs: `make(i,
    address)` launches what makes the i-th and says how many bytes it has."""

    max_queued = 1
    checksum = None  # there is nothing to compare them with

    def __init__(self, make: Callable[[int, int], int]) -> None:
        self._make = make
        self._num_made = 0

    def put(self, stream: CopyStream, target: int) -> int | None:
        sizes: list[int] = []
        stream.launch(lambda: sizes.append(self._make(self._num_made, target)))
        self._num_made += 1
        return sizes[0]

    def release(self) -> None: ...

    def close(self) -> None: ...
