"""Memory that requests hold: their bodies while they arrive, then what is made of them, until they are answered.

Hold            one request's: grows with its body, and with what that is decoded to; ends with the response, or,
                once streams run for it, with these
RequestMemory   of all of them, with one bound
"""

from collections.abc import Callable

from everserve.errors import OverloadedError


class RequestMemory:
    """The sum. `refuse_one` makes room by refusing a request that is still arriving; False: there is none."""

    def __init__(self, max_bytes: int, refuse_one: Callable[[], bool]) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_refused = 0  # of requests that had arrived
        self._refuse_one = refuse_one

    def hold(self) -> "Hold":
        """A hold for a new request."""
        return Hold(self)

    def add(self, num_bytes: int) -> bool:
        """So many more, or less. False: even without all that is arriving it is too much."""
        self.num_bytes += num_bytes
        while self.num_bytes > self.max_bytes and num_bytes > 0:
            if not self._refuse_one():
                return False
        return True


class Hold:
    """The memory that one request holds."""

    __slots__ = ("_memory", "has_ended", "is_kept", "num_body_bytes", "num_bytes")

    def __init__(self, memory: RequestMemory) -> None:
        self.num_bytes = 0
        self.num_body_bytes = 0  # of these
        self.is_kept = False  # by streams, beyond the connection
        self.has_ended = False
        self._memory = memory

    def grow(self, num_bytes: int) -> None:
        """More of its body has come. If that is too much, a request is refused: perhaps this one, which then ends."""
        if not self.has_ended:
            self.num_bytes += num_bytes
            self.num_body_bytes += num_bytes
            self._memory.add(num_bytes)

    def set(self, num_bytes: int) -> None:
        """It is so much now; OverloadedError if there is no room for that."""
        more, memory = num_bytes - self.num_bytes, self._memory
        if self.has_ended:
            return
        self.num_bytes = num_bytes
        if not memory.add(more):
            memory.num_refused += 1
            raise OverloadedError("The server has no memory for this request beside the others that it has.")

    def keep(self) -> None:
        """From now on `release` ends it."""
        self.is_kept = True

    def end(self) -> None:
        """The response is complete, or the connection has ended."""
        if not self.is_kept:
            self.release()

    def release(self) -> None:
        """Nothing of the request is there any more."""
        if not self.has_ended:
            self.has_ended = True
            self._memory.add(-self.num_bytes)
            self.num_bytes = 0
