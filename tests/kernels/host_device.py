"""A driver and a stream over the host's memory, so that everything around copies and mappings runs without a device."""

import ctypes
import mmap
import os
from collections import deque
from collections.abc import Callable

import torch

from everserve.backends.cuda.ops.checksum import add_checksum

_NONE, _READ_WRITE = 0, 3
_SHARED, _PRIVATE_ANONYMOUS_NORESERVE, _FIXED = 1, 0x4022, 0x10
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]


class HostDriver:
    """What is used of `Driver`. Addresses without memory behind them cannot be read, as on a device."""

    device = 0
    granularity = mmap.PAGESIZE

    def __init__(self) -> None:
        self.registered: set[int] = set()

    def make_current(self) -> None: ...

    def whole(self, num_bytes: int) -> int:
        return -(-num_bytes // self.granularity) * self.granularity

    def reserve(self, num_bytes: int) -> int:
        return _map(None, num_bytes, _NONE, _PRIVATE_ANONYMOUS_NORESERVE, -1)

    def free_addresses(self, address: int, num_bytes: int) -> None: ...

    def import_handle(self, fd: int) -> int:
        return os.dup(fd)

    def release_handle(self, handle: int) -> None:
        os.close(handle)

    def map_handle(self, address: int, num_bytes: int, handle: int) -> None:
        _map(address, num_bytes, _READ_WRITE, _SHARED | _FIXED, handle)

    def allow(self, address: int, num_bytes: int) -> None: ...

    def unmap_handle(self, address: int, num_bytes: int) -> None:
        _map(address, num_bytes, _NONE, _PRIVATE_ANONYMOUS_NORESERVE | _FIXED, -1)

    def register_host(self, address: int, num_bytes: int) -> int:
        self.registered.add(address)
        return address

    def unregister_host(self, address: int) -> None:
        self.registered.remove(address)

    def create_stream(self) -> int:
        return 1

    def read_async(self, stream: int, address: int, host_address: int, num_bytes: int) -> None:
        ctypes.memmove(host_address, address, num_bytes)

    def synchronize(self, stream: int) -> None: ...


class HostStream:
    """`CopyStream`: what is queued is done when a mark is looked at, unless it `is_stuck`."""

    def __init__(self) -> None:
        self.is_stuck = False
        self._queue: deque[Callable[[], object]] = deque()
        self._num_queued = self._num_done = 0
        self._sum = torch.zeros(1, dtype=torch.int64)
        self._total = 0

    def begin(self) -> None:
        self._put(self._sum.zero_)

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        self._put(lambda: ctypes.memmove(target, source, num_bytes))

    def launch(self, kernels: Callable[[], None]) -> None:
        kernels()

    def add(self, address: int, num_bytes: int, first_word: int) -> None:
        self._put(lambda: add_checksum(address, num_bytes, first_word, self._sum))

    def end(self) -> None:
        self._put(lambda: setattr(self, "_total", int(self._sum.item())))

    def mark(self) -> Callable[[], bool]:
        number = self._num_queued

        def is_reached() -> bool:
            while not self.is_stuck and self._num_done < number:
                self._do_one()
            return self._num_done >= number

        return is_reached

    def total(self) -> int:
        return self._total % (1 << 64)

    def wait(self) -> None:
        while self._queue:
            self._do_one()

    def _put(self, work: Callable[[], object]) -> None:
        self._queue.append(work)
        self._num_queued += 1

    def _do_one(self) -> None:
        self._queue.popleft()()
        self._num_done += 1


def _map(address: int | None, num_bytes: int, rights: int, flags: int, fd: int) -> int:
    found = _libc.mmap(address, num_bytes, rights, flags, fd, 0)
    assert found is not None and found != ctypes.c_void_p(-1).value, os.strerror(ctypes.get_errno())
    return found
