"""Shared memory without a name in any file system: it is gone when the last process that holds it is.

Host memory is a memfd, device memory a descriptor of the driver; a process that only keeps it need not know which.
"""

import mmap
import os
import sys
import tempfile

from everserve.memory.device import CudaError, Driver
from everserve.memory.names import ON_HOST


class NoMemoryError(Exception):
    """There is no such memory to be had. The message is one line."""


class OwnedMemory:
    """Descriptors by name. Asking twice for a name gives the same memory."""

    def __init__(self) -> None:
        self._fds: dict[str, int] = {}
        self._sizes: dict[str, int] = {}  # of what was allocated here: a device's descriptors do not tell theirs
        self._drivers: dict[int, Driver] = {}  # by device; a context costs memory and time, so only where it is needed

    def allocate(self, name: str, num_bytes: int, device: int = ON_HOST) -> int:
        """A descriptor of zeroed memory. Pages of the host are only paid for as they are touched. Raises NoMemoryError.

        Any other failure of the driver is raised as it is: a context that is broken stays so, and only a new process
        gets a new one.
        """
        if name not in self._fds:
            try:
                self._fds[name] = self._create(name, num_bytes, device)
            except OSError as error:
                raise NoMemoryError(error.strerror or str(error)) from error
            self._sizes[name] = num_bytes
        assert self._sizes.get(name, num_bytes) == num_bytes, f"{name} exists with another size"
        return self._fds[name]

    def _create(self, name: str, num_bytes: int, device: int) -> int:
        if device == ON_HOST:
            return create_memory(name, num_bytes)
        driver = self._driver(device)
        try:
            return driver.create(num_bytes)
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

    def adopt(self, name: str, fd: int) -> None:
        """Memory that exists already; the caller keeps its descriptor."""
        self.release(name)
        self._fds[name] = os.dup(fd)

    def release(self, name: str) -> None:
        """The anchor lets go of it; it exists for as long as a process maps it or has a descriptor."""
        self._sizes.pop(name, None)
        fd = self._fds.pop(name, None)
        if fd is not None:
            os.close(fd)

    def release_all(self) -> None:
        for name in list(self._fds):
            self.release(name)

    @property
    def num_devices(self) -> int:
        """On which we have a context."""
        return len(self._drivers)

    def __len__(self) -> int:
        return len(self._fds)


def create_memory(name: str, num_bytes: int) -> int:
    """An anonymous file in memory. The name is for people who read /proc/PID/maps."""
    if sys.platform == "linux":
        fd = os.memfd_create(f"everserve-{name}")
    else:
        fd, path = tempfile.mkstemp(prefix="everserve-")
        os.unlink(path)  # noqa: PTH108 (only the descriptor is used)
    os.ftruncate(fd, _whole_pages(num_bytes))
    return fd


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
