"""How long the main thread may be away, by what it is about to do.

A stopped process is noticed within `detect_ms`. A process that runs while its main thread hangs is noticed when the
lease ends for which its warden pulses. So a lease is as short as can be:

    between two operations        `least_s`: messages, tables and mappings take milliseconds
    an operation                  MARGIN times the longest that has lately been seen of its size, but at least `least_s`
    one larger than any seen      the longest of the next smaller size seen, in proportion
    nothing seen yet, too long    MOST_S

Operations are steps and batches, whose sizes differ by orders of magnitude: sizes of one power of two are one class.
There are many of them, so in the ordinary case nothing is computed here but a logarithm. What took long counts half as
much after every FORGET_S in which the same class was shorter.
"""

from typing import Protocol

MARGIN = 20.0
MOST_S = 120.0
# Nothing between two steps takes long on CPUs. On a GPU the first use of a kernel may compile it.
LEAST_S = {"cpu": 5.0, "cuda": 30.0}
FORGET_S = 30.0
_NUM_CLASSES = 64


class Renewable(Protocol):
    """What is needed of a `Warden`."""

    def renew(self, seconds: float | None = None) -> None: ...


class Lease:
    """The lease of one main thread. Times are those of any clock."""

    def __init__(self, warden: Renewable, least_s: float) -> None:
        self._renew = warden.renew
        self._least_s = least_s
        self._lately_s = [0.0] * _NUM_CLASSES  # the longest since `_forget_at` was set, by class of size
        self._longest_s = [0.0] * _NUM_CLASSES  # 0: none was seen
        self._leases_s = [MOST_S] * _NUM_CLASSES
        self._quick_size = 0
        self._forget_at = 0.0
        self._class = 0
        self._began_s = 0.0

    def renew(self) -> None:
        """Between two operations."""
        self._renew(self._least_s)

    @property
    def quick_size(self) -> int:
        """Operations of up to this size are covered by the shortest lease, as far as is known. 0: nothing is known."""
        return self._quick_size

    def begin(self, size: int, now: float) -> None:
        """An operation of this size begins."""
        self._class = size.bit_length()
        self._began_s = now
        self._renew(self._leases_s[self._class])

    def end(self, now: float) -> None:
        """It has ended, and did what it should."""
        took_s = now - self._began_s
        if took_s > self._lately_s[self._class]:
            self._lately_s[self._class] = took_s
            if took_s > self._longest_s[self._class]:
                self._longest_s[self._class] = took_s
                self._compute()
        if now >= self._forget_at:
            self._forget_at = now + FORGET_S
            for index, lately_s in enumerate(self._lately_s):
                if lately_s:
                    self._longest_s[index] = max(lately_s, self._longest_s[index] / 2)
            self._lately_s = [0.0] * _NUM_CLASSES
            self._compute()

    def _compute(self) -> None:
        """The leases of all classes. What takes so long for few parts takes at most proportionally longer for more."""
        known_s = next((seen for seen in self._longest_s if seen), MOST_S)  # of smaller ones: at most as long
        for index, seen in enumerate(self._longest_s):
            known_s = seen or (2 * known_s if any(self._longest_s[:index]) else known_s)
            self._leases_s[index] = min(MOST_S, max(self._least_s, MARGIN * known_s))
        too_long = (index for index, lease_s in enumerate(self._leases_s) if lease_s > self._least_s)
        self._quick_size = (1 << max(next(too_long, _NUM_CLASSES) - 1, 0)) - 1  # class i: i bits
