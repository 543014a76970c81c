"""How long the main thread may be away, by what it is about to do.

A stopped process is noticed within `detect_ms`. A process that runs while its main thread hangs is noticed when the
lease ends for which its warden pulses. So a lease is as short as can be:

    between two operations        `least_s`: messages, tables and mappings take milliseconds
    an operation                  MARGIN times the longest that has lately been seen of its size, but at least `least_s`
    one larger than any seen      the longest of the next smaller size seen, in proportion
    nothing seen yet, too long    MOST_S

Operations are steps and batches, whose sizes differ by orders of magnitude: sizes of one power of two are one class.
"""

import time
from collections.abc import Callable
from typing import Protocol

MARGIN = 20.0
MOST_S = 120.0
# Nothing between two steps takes long on CPUs. On a GPU the first use of a kernel may compile it.
LEAST_S = {"cpu": 5.0, "cuda": 30.0}
_FORGET = 0.99  # a single long operation is forgotten after some hundreds that are not


class Renewable(Protocol):
    """What is needed of a `Warden`."""

    def renew(self, seconds: float | None = None) -> None: ...


class Lease:
    """Of one main thread."""

    def __init__(self, warden: Renewable, least_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._warden = warden
        self._least_s = least_s
        self._clock = clock
        self._longest_s: dict[int, float] = {}  # by class of size
        self._class = 0
        self._began_s = 0.0

    def renew(self) -> None:
        """Between two operations."""
        self._warden.renew(self._least_s)

    def begin(self, size: int) -> None:
        """An operation of this size begins."""
        self._class = size.bit_length()
        self._warden.renew(self.for_class(self._class))
        self._began_s = self._clock()

    def end(self) -> None:
        """It has ended, and did what it should."""
        took_s = self._clock() - self._began_s
        self._longest_s[self._class] = max(took_s, _FORGET * self._longest_s.get(self._class, 0.0))

    def for_class(self, size: int) -> float:
        """The lease of an operation with 2**(size - 1) parts or a little more."""
        longest_s = self._longest_s.get(size)
        if longest_s is None:
            longest_s = self._guess_s(size)
        return min(MOST_S, max(self._least_s, MARGIN * longest_s))

    def _guess_s(self, size: int) -> float:
        """What takes so long for few parts takes at most proportionally longer for more of them."""
        if not self._longest_s:
            return MOST_S
        smaller = [seen for seen in self._longest_s if seen < size]
        if smaller:
            return self._longest_s[max(smaller)] * float(2 ** (size - max(smaller)))
        return self._longest_s[min(self._longest_s)]
