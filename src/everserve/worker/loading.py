"""Progress of a start: typed events at a low rate, for progress bars; log lines where no bars are shown; and how long
its phases took."""

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from everserve.wire.event_log import EventLog
from everserve.wire.events import WorkerLoading
from everserve.wire.messages import StartWorker

log = logging.getLogger(__name__)

START_BARS = "EVERSERVE_START_BARS"  # environment variable: the start is shown as progress bars
_TELL_AFTER_S, _TELL_EVERY_S = 0.25, 0.5  # no events if loading is quick
_TELL_SHARE = 0.02  # at least this much progress between two events
_LOG_EVERY_S = 3.0

Progress = Callable[[int, int], None]


class Loading:
    """Reports the progress of one worker. Without an event log (benchmarks, tests) no events."""

    def __init__(self, start: StartWorker, events: EventLog | None = None) -> None:
        self.phases: dict[str, float] = {}  # seconds of each that was entered so far
        self._start = start
        self._events = events

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What happens inside belongs to it; it can be entered again. Phases do not contain others."""
        began_s = time.monotonic()
        yield
        self.phases[name] = self.phases.get(name, 0.0) + time.monotonic() - began_s

    def part(self, what: str) -> Progress:
        """A callback `progress(done, total)` for one part: "layers", "experts"."""
        began_s = time.monotonic()
        told_s, logged_s, told_share = began_s + _TELL_AFTER_S - _TELL_EVERY_S, began_s, 0.0
        has_bar = self._start.incarnation == 1 and START_BARS in os.environ

        def progress(done: int, total: int) -> None:
            nonlocal told_s, logged_s, told_share
            now_s, share = time.monotonic(), done / max(total, 1)
            if now_s - told_s > _TELL_EVERY_S and share >= told_share + _TELL_SHARE:
                told_s, told_share = now_s, share
                self._tell(what, done, total)
            if now_s - logged_s > _LOG_EVERY_S and not has_bar:
                logged_s = now_s
                log.info("loaded %d of %d %s", done, total, what)

        return progress

    def _tell(self, what: str, done: int, total: int) -> None:
        if self._events is not None:
            rank, incarnation = self._start.rank, self._start.incarnation
            self._events.append(
                WorkerLoading(
                    process=self._events.process, rank=rank, incarnation=incarnation, what=what, done=done, total=total
                )
            )
