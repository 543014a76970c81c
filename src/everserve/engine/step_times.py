"""How long this worker's steps take, and how much work was in them."""

import time
from collections.abc import Callable

from everserve.tables.work import Work


class StepTimes:
    """Only complete steps count. `on_begin(size, now)` and `on_end(now)` tell the caller's lease of them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.on_begin: Callable[[int, float], None] = lambda size, now: None
        self.on_end: Callable[[float], None] = lambda now: None
        self.ended_s = 0.0  # the last one
        self._clock = clock
        self._seconds = 0.0
        self._num_steps = self._num_rows = self._num_keys = 0
        self._step = (0.0, 0, 0)

    def begin(self, num_rows: int, num_keys: int) -> None:
        """`num_keys`: over all rows of the step, how many keys each attends to."""
        now = self._clock()
        self._step = (now, num_rows, num_keys)
        self.on_begin(num_keys, now)

    def end(self) -> float:
        """How long it took."""
        began_s, num_rows, num_keys = self._step
        self.ended_s = now = self._clock()
        self._seconds += now - began_s
        self._num_steps += 1
        self._num_rows += num_rows
        self._num_keys += num_keys
        self.on_end(now)
        return now - began_s

    def take(self) -> Work | None:
        """The work since the last call."""
        if not self._num_steps:
            return None
        work = Work(self._seconds, (self._num_steps, self._num_rows, self._num_keys))
        self._seconds = 0.0
        self._num_steps = self._num_rows = self._num_keys = 0
        return work
