"""Makes a mirror in host memory accessible to the device, in a background thread.

Such memory must be registered: its pages are pinned, which takes more than half a second for each GiB. No stream waits
for that. The lowest blocks are registered first, because a pool hands them out first; a block that is not registered
yet is not logged.

Mirrors of other workers are *not* registered. A restore copies some 32 MiB for each stream, 2 GiB for a worker that had
64 of them. A few threads copy that through a registered buffer (writer.py) at memory speed, not much slower than the
device could fetch it, and the first stream has what it needs after some milliseconds. Registering all mirrors of all
peers, again with each new incarnation, would hold the driver's lock for half a second for each GiB. Every launch of a
healthy worker needs that lock too, so all workers would pay for something that is rarely needed.
"""

import ctypes
import logging
import threading
from typing import Protocol

from everserve.kvlog.log import Log

log = logging.getLogger(__name__)

CHUNK_BYTES = 64 << 20  # a kernel launch may have to wait until one chunk is registered
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE


class HostPages(Protocol):
    """memory/device.py: Driver."""

    def make_current(self) -> None: ...

    def register_host(self, address: int, num_bytes: int) -> int: ...


class Reach:
    """`num_blocks` of the log's blocks are there, from the first one on."""

    def __init__(self, mirror: Log, pages: HostPages) -> None:
        assert mirror.elsewhere is None
        self.num_blocks = 0
        self._log = mirror
        self._pages = pages
        self._thread = threading.Thread(target=self._register_all, name="kv-mirror", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until all of it is there."""
        self._thread.join()

    def _register_all(self) -> None:
        shape, base = self._log.shape, self._log.blocks_address
        total = shape.num_bytes - shape.head_bytes  # whole pages
        self._pages.make_current()
        for at in range(0, total, CHUNK_BYTES):
            num_bytes = min(CHUNK_BYTES, total - at)
            try:
                populate(base + at, num_bytes)
                on_device = self._pages.register_host(base + at, num_bytes)
            except Exception as error:
                log.warning(
                    "only %d of %d blocks of the KV log can be used: %s", self.num_blocks, shape.num_blocks, error
                )
                return
            assert on_device == base + at, "one address for both"
            self.num_blocks = min((at + num_bytes) // shape.block_bytes, shape.num_blocks)


def populate(address: int, num_bytes: int) -> None:
    """Fault the pages in first, so that the driver holds its lock for less time. If this fails, the driver does it."""
    ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), _POPULATE_WRITE)
