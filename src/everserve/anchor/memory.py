"""Shared memory without a name in any file system: it is gone when the last process that holds it is."""

import mmap
import os
import sys
import tempfile


class OwnedMemory:
    """Descriptors by name. Asking twice for a name gives the same memory."""

    def __init__(self) -> None:
        self._fds: dict[str, int] = {}
        self._sizes: dict[str, int] = {}

    def allocate(self, name: str, num_bytes: int) -> int:
        """A descriptor of zeroed memory; pages are only paid for as they are touched."""
        if name not in self._fds:
            self._fds[name] = create_memory(name, num_bytes)
            self._sizes[name] = num_bytes
        assert self._sizes[name] == num_bytes, f"{name} exists with another size"
        return self._fds[name]

    def release(self, name: str) -> None:
        """Whoever still maps it keeps it; the anchor does not."""
        fd = self._fds.pop(name, None)
        self._sizes.pop(name, None)
        if fd is not None:
            os.close(fd)

    def __len__(self) -> int:
        return len(self._fds)


def create_memory(name: str, num_bytes: int) -> int:
    """An anonymous file in memory. The name is for people who read /proc/PID/maps."""
    if sys.platform == "linux":
        fd = os.memfd_create(f"everserve-{name}")
    else:
        fd, path = tempfile.mkstemp(prefix="everserve-")
        os.unlink(path)  # noqa: PTH108 (nobody needs the name)
    os.ftruncate(fd, -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
    return fd
