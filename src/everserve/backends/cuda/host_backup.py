"""HostBackup: the backup of all experts in host memory, ready to be copied from at the speed of the bus.

The driver must register the memory first: its pages are pinned. That holds the driver's lock, which every launch needs
too, for 40 ms for each GiB, so a thread does it ahead of need, in pieces with pauses between them. An expert is there
for this worker when all of its pieces are registered and the table says that it is complete.
"""

import ctypes
import logging
import threading
from typing import Protocol

from everserve.backends.cuda.transfer import FROM_HOST, MemoryFeed
from everserve.memory.weights.expert_memory import ExpertMemory
from everserve.memory.weights.slot_table import Entry
from everserve.tables.slots import Place

log = logging.getLogger(__name__)

PIECE_BYTES = 16 << 20  # registered at once: 0.6 ms
_PAUSE_S = 0.002
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE


class HostPages(Protocol):
    """memory/device.py: Driver."""

    def make_current(self) -> None: ...
    def register_host(self, address: int, num_bytes: int) -> int: ...
    def unregister_host(self, address: int) -> None: ...


class HostBackup:
    """Owns the memory from now on."""

    def __init__(self, memory: ExpertMemory, pages: HostPages) -> None:
        self._memory = memory
        self._pages = pages
        self._address = int(self._memory.data.ctypes.data)
        self._num_registered = 0  # bytes, from the first one on
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._register, name="expert-backup", daemon=True)
        self._thread.start()

    @property
    def memory(self) -> ExpertMemory:
        return self._memory

    def find(self, call_index: int, expert: int, num_bytes: int) -> tuple[Place, Entry] | None:
        """Where this expert is, if it can be copied from now."""
        found = self._memory.table.find(call_index, expert)
        if found is None or self._memory.plan.offset(found[0]) + num_bytes > self._num_registered:
            return None
        return found

    def feed(self, place: Place, num_bytes: int) -> MemoryFeed:
        address = self._memory.address(place)
        return MemoryFeed(address, num_bytes, FROM_HOST, first=self._address, piece_bytes=PIECE_BYTES)

    def read(self, place: Place) -> Entry | None:
        return self._memory.table.read(place)

    def wait(self) -> None:
        """Until all of it is registered."""
        self._thread.join()

    def close(self) -> None:
        """Nothing may be queued that reads it."""
        self._is_closing.set()
        self._thread.join()
        for at in range(0, self._num_registered, PIECE_BYTES):
            self._pages.unregister_host(self._address + at)
        self._num_registered = 0

    def _register(self) -> None:
        total = self._memory.plan.num_bytes
        self._pages.make_current()
        for at in range(0, total, PIECE_BYTES):
            if self._is_closing.wait(_PAUSE_S):
                return
            size = min(PIECE_BYTES, total - at)
            # Faulted in first, so that the driver holds its lock for less time.
            ctypes.CDLL(None).madvise(ctypes.c_void_p(self._address + at), ctypes.c_size_t(size), _POPULATE_WRITE)
            try:
                self._pages.register_host(self._address + at, size)
            except Exception as error:
                log.warning("only %d of %d bytes of the expert backup can be used: %s", at, total, error)
                return
            self._num_registered = at + size
