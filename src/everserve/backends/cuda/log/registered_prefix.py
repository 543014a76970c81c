"""A mirror in host memory comes within the device's reach, in a thread of its own.

Such memory must be registered: its pages are pinned, which takes more than half a second for each GiB. Nobody waits for
that. The lowest blocks come first, because they are the first that a pool hands out; a block that is not there yet is
not logged.

Mirrors of others are *not* registered. A restore brings some 32 MiB for each stream, 2 GiB for a worker that had 64 of
them. A few threads copy that through a registered buffer (writer.py) at the speed of memory, not much slower than the
device could fetch it, and the first stream has what it needs after some milliseconds. To register all mirrors of all
peers, again with each new incarnation, would mean half a second of the driver's lock for each GiB, which every launch
of a healthy worker also needs: everybody would pay at any time for what is rarely needed.
"""

import ctypes
import logging
import threading
from typing import Protocol

from everserve.kvlog.log import Log

log = logging.getLogger(__name__)

_CHUNK_BYTES = 64 << 20  # who launches something meanwhile may have to wait for a chunk
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
        for at in range(0, total, _CHUNK_BYTES):
            num_bytes = min(_CHUNK_BYTES, total - at)
            try:
                _populate(base + at, num_bytes)
                on_device = self._pages.register_host(base + at, num_bytes)
            except Exception as error:
                log.warning(
                    "only %d of %d blocks of the KV log can be used: %s", self.num_blocks, shape.num_blocks, error
                )
                return
            assert on_device == base + at, "one address for both"
            self.num_blocks = min((at + num_bytes) // shape.block_bytes, shape.num_blocks)


def _populate(address: int, num_bytes: int) -> None:
    """Touch the pages before the driver does, whose lock others need. If the kernel cannot do that, the driver does."""
    ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), _POPULATE_WRITE)
