"""Ballast: low descriptor numbers that are in use for nothing.

On GPUs descriptors of the supervisor were found closed that none of its code closes, at about the time when it closed
copies of the device descriptors of dead workers (procs/device_descriptors.py). What closes them is not known. (NVIDIA's
kernel module has calls that close a number, which it remembers of one process, in the process that lets go of the last
copy.) Such a number may be the channel to a child, or memory that is handed on. So all low numbers, like those that
workers have for their devices, are taken by descriptors of /dev/null, and taken again when they are gone.
"""

import contextlib
import os
import resource

_END = 256  # a worker has fewer descriptors


class Ballast:
    """All numbers below `end` that are free when it is made; fewer where a process may have few descriptors."""

    def __init__(self, end: int = _END) -> None:
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._end = end if most == resource.RLIM_INFINITY else min(end, most // 4)
        self._numbers = self._take()

    def refill(self) -> list[int]:
        """Take numbers again that were closed; these."""
        taken = self._take()
        for number in taken - self._numbers:  # what the process had itself, and has closed
            os.close(number)
        return sorted(taken & self._numbers)

    def close(self) -> None:
        while self._numbers:
            os.close(self._numbers.pop())

    def _take(self) -> set[int]:
        """All that are free: the kernel gives the lowest one first. None when it gives none."""
        taken = set()
        with contextlib.suppress(OSError):
            while (number := os.open(os.devnull, os.O_RDONLY)) < self._end:
                taken.add(number)
            os.close(number)
        return taken
