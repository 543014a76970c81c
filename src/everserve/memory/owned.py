"""Shared memory without a name in any file system: it is gone when the last process that holds it is.

Host memory is a memfd, device memory a descriptor of the driver; a process that only keeps it need not know which.
"""

import errno
import mmap
import os
import sys
import tempfile

from everserve.memory.device import CudaError, Driver
from everserve.tables.ids import NO_DEVICE
from everserve.tables.memory import MemoryName


class NoMemoryError(Exception):
    """There is no such memory to be had. The message is one line."""


class OwnedMemory:
    """The descriptor of each piece. Asking twice for the same piece gives the same memory."""

    def __init__(self) -> None:
        self._fds: dict[MemoryName, int] = {}
        self._drivers: dict[int, Driver] = {}  # by device; a context costs memory and time, so only where it is needed

    def allocate(self, memory: MemoryName) -> int:
        """A descriptor of zeroed memory. Pages of the host are only paid for as they are touched. Raises NoMemoryError.

        Any other failure of the driver is raised as it is: a context that is broken stays so, and only a new process
        gets a new one. So is a want of descriptors.
        """
        if memory not in self._fds:
            try:
                self._fds[memory] = self._create(memory)
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    raise
                raise NoMemoryError(error.strerror or str(error)) from error
        return self._fds[memory]

    def _create(self, memory: MemoryName) -> int:
        if memory.gpu == NO_DEVICE:
            return create_memory(memory.name, memory.num_bytes)
        driver = self._driver(memory.gpu)
        try:
            return driver.create(memory.num_bytes)
        except CudaError as error:
            if not error.is_out_of_memory:
                raise
            raise NoMemoryError(str(error)) from error

    def _driver(self, device: int) -> Driver:
        if device not in self._drivers:
            try:
                self._drivers[device] = Driver(device)
            except CudaError as error:
                raise NoMemoryError(f"device {device} cannot be used: {error}") from error
        self._drivers[device].make_current()
        return self._drivers[device]

    def adopt(self, memory: MemoryName, fd: int) -> None:
        """Memory that exists already; the caller keeps its descriptor."""
        self.release(memory)
        self._fds[memory] = os.dup(fd)

    def release(self, memory: MemoryName) -> None:
        """A process that still maps it keeps it; the anchor does not."""
        fd = self._fds.pop(memory, None)
        if fd is not None:
            os.close(fd)

    def release_all(self) -> None:
        for memory in list(self._fds):
            self.release(memory)

    @property
    def num_devices(self) -> int:
        """The number of devices on which we have a context."""
        return len(self._drivers)

    @property
    def fds(self) -> set[int]:
        """The descriptors of all pieces."""
        return set(self._fds.values())

    def __len__(self) -> int:
        return len(self._fds)


def create_memory(name: str, num_bytes: int) -> int:
    """An anonymous file in memory. The name shows in /proc/PID/maps."""
    if sys.platform == "linux":
        fd = os.memfd_create(f"everserve-{name}")
    else:
        fd, path = tempfile.mkstemp(prefix="everserve-")
        os.unlink(path)  # noqa: PTH108 (only the descriptor is used)
    os.ftruncate(fd, _whole_pages(num_bytes))
    return fd


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
