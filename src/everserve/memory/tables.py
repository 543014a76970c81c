"""Private memory for tables that C reads and writes."""

import ctypes
import mmap


class Memory:
    """Zero at first; only touched where it is used."""

    def __init__(self, num_bytes: int) -> None:
        self._map = mmap.mmap(-1, max(num_bytes, 1))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
