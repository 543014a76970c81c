"""Shared memory without a name in any file system: it is gone when the last process that holds it is."""

import mmap
import os
import sys
import tempfile


class OwnedMemory:
    """Descriptors by name. Asking twice for a name gives the same memory."""

    def __init__(self) -> None:
        self._fds: dict[str, int] = {}

    def allocate(self, name: str, num_bytes: int) -> int:
        """A descriptor of zeroed memory; pages are only paid for as they are touched."""
        if name not in self._fds:
            self._fds[name] = create_memory(name, num_bytes)
        assert os.fstat(self._fds[name]).st_size == _whole_pages(num_bytes), f"{name} exists with another size"
        return self._fds[name]

    def adopt(self, name: str, fd: int) -> None:
        """Memory that exists already; the caller keeps its descriptor."""
        self.release(name)
        self._fds[name] = os.dup(fd)

    def release(self, name: str) -> None:
        """Whoever still maps it keeps it; the anchor does not."""
        fd = self._fds.pop(name, None)
        if fd is not None:
            os.close(fd)

    def release_all(self) -> None:
        for name in list(self._fds):
            self.release(name)

    def __len__(self) -> int:
        return len(self._fds)


def create_memory(name: str, num_bytes: int) -> int:
    """An anonymous file in memory. The name is for people who read /proc/PID/maps."""
    if sys.platform == "linux":
        fd = os.memfd_create(f"everserve-{name}")
    else:
        fd, path = tempfile.mkstemp(prefix="everserve-")
        os.unlink(path)  # noqa: PTH108 (nobody needs the name)
    os.ftruncate(fd, _whole_pages(num_bytes))
    return fd


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
