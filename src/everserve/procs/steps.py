"""What a supervisor has to do, in order: a row of steps, each of which is done wholly or not at all.

A step makes what it needs, then sends it. What it needs may not be had at the moment (scarcity.py): then it is tried
again, and those behind it wait.
"""

import logging
import time
from collections.abc import Callable

from everserve.procs.scarcity import Retry

Step = Callable[[], None]


class Steps:
    def __init__(self, log: logging.Logger) -> None:
        self._steps: dict[str, Step] = {}  # by what they do
        self._retry = Retry(log)

    def __len__(self) -> int:
        return len(self._steps)

    def __contains__(self, what: str) -> bool:
        return what in self._steps

    def owe(self, what: str, step: Step) -> None:
        """Puts it behind all others, also if it was due already: it may be for the successor of a process."""
        self._steps.pop(what, None)
        self._steps[what] = step

    def do(self, may_go_on: Callable[[], bool]) -> tuple[str, OSError | MemoryError] | None:
        """Does what is to be done, as far as what that needs can be had now. Returns what could not be done."""
        self._retry.tend(time.monotonic())
        while self._steps and may_go_on() and self._retry.is_due(time.monotonic()):
            what, step = next(iter(self._steps.items()))
            try:
                step()
            except (OSError, MemoryError) as error:
                self.fail(what, error)
                return what, error
            self._steps.pop(what, None)
        return None

    def fail(self, what: str, error: OSError | MemoryError) -> None:
        """It is tried again. Raises the error if it would fail later, too."""
        self._retry.fail(what, error, time.monotonic())

    @property
    def failing_s(self) -> float:
        """Seconds for which nothing could be had."""
        return self._retry.failing_s(time.monotonic())
