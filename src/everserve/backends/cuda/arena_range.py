"""ArenaRange: the experts of this seat, and behind them those of other seats on the same device, reached from one
beginning.

    own places 0, 1, 2 ...     | places of rank 0 ...   | places of rank 1 ...   | ...
    address: base                base + distance          base + 2 * distance

Kernels compute the address of an expert as base + place * place_bytes (ops/experts.py). `distance` is a whole number of
places and of pages, so every expert of every seat has a place, whatever is mapped at the moment. That costs addresses,
not memory. Nothing may be read where nothing is mapped: a device that does is lost, with all processes that share it.
"""

import math

from everserve.memory.device import CudaError, Driver

_MAX_ADDRESSES = 1 << 44  # of the 2**47 that a process has
_MAX_ROWS = (1 << 31) - 1  # that a descriptor can number


class ArenaRange:
    """`num_ranks`: how many there may be at most. `row_bytes`: of the shorter rows. The descriptor stays the caller's,
    and may be closed."""

    def __init__(
        self, driver: Driver, fd: int, num_bytes: int, place_bytes: int, row_bytes: int, num_ranks: int
    ) -> None:
        self._driver = driver
        self.place_bytes = place_bytes
        unit = math.lcm(place_bytes, driver.granularity)
        self._distance = -(-driver.whole(num_bytes) // unit) * unit
        self.num_ranks = min(num_ranks, min(_MAX_ADDRESSES, _MAX_ROWS * row_bytes) // self._distance - 1)
        self._mapped: dict[int, int] = {}  # rank -> size
        size = (1 + self.num_ranks) * self._distance
        self.num_places = size // place_bytes  # of the whole range
        self.address = driver.reserve(size)
        self._map(fd, self.address, driver.whole(num_bytes))

    def place_address(self, place: int) -> int:
        return self.address + place * self.place_bytes

    def first_place(self, rank: int) -> int:
        """The number of the first place in this seat's memory."""
        assert rank in self._mapped, rank
        return (1 + rank) * self._distance // self.place_bytes

    def has_room(self, rank: int, num_bytes: int) -> bool:
        return rank < self.num_ranks and self._driver.whole(num_bytes) <= self._distance

    def map(self, rank: int, fd: int, num_bytes: int) -> None:
        """Put another seat's memory into its part of the range. The descriptor stays the caller's."""
        assert self.has_room(rank, num_bytes) and rank not in self._mapped, rank
        size = self._driver.whole(num_bytes)
        self._map(fd, self.address + (1 + rank) * self._distance, size)
        self._mapped[rank] = size

    def unmap(self, rank: int) -> None:
        """No kernel or copy that touches it may be running or queued."""
        size = self._mapped.pop(rank)
        self._driver.unmap_handle(self.address + (1 + rank) * self._distance, size)

    def _map(self, fd: int, address: int, size: int) -> None:
        handle = self._driver.import_handle(fd)
        try:
            self._driver.map_handle(address, size, handle)
            try:
                self._driver.allow(address, size)
            except CudaError:
                self._driver.unmap_handle(address, size)
                raise
        finally:
            self._driver.release_handle(handle)
