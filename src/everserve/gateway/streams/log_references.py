"""KV logs that streams still need: those of workers that they lost, until they go on elsewhere or end.

    its worker is lost --> needed, by so many streams --the last of them goes on, or ends--> settled, and reported
                     '--------------no stream needs it----------------------------^

The orchestrator keeps a lost worker's log until the gateway reports it as settled. A missing report would leak memory;
a report too early would cost streams a restore. It is sent once; a new orchestrator first gets what is still needed.
"""

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from everserve.tables.ids import Incarnation, Rank, WorkerId

if TYPE_CHECKING:
    from everserve.gateway.streams.stream import Stream


class LostLogs:
    """Which streams need which logs, and which of the logs' workers are lost."""

    def __init__(self) -> None:
        self._tell: Callable[[WorkerId], None] | None = None  # None while there is no orchestrator
        self._told: dict[Rank, Incarnation] = {}  # the latest that the present orchestrator knows to be settled
        self._num_needed: Counter[WorkerId] = Counter()  # by streams that have not gone on yet
        self._unsettled: set[WorkerId] = set()  # lost, and needed

    @property
    def unsettled(self) -> list[WorkerId]:
        return sorted(self._unsettled)

    @property
    def needed(self) -> set[WorkerId]:
        """The logs that are needed by streams that have not gone on yet, whether their workers are lost or not."""
        return set(self._num_needed)

    def report_to(self, tell: Callable[[WorkerId], None] | None) -> None:
        """Where to report from now on. A new orchestrator gets `unsettled` first; all other logs are settled."""
        self._tell = tell
        self._told.clear()

    def need(self, stream: "Stream", log: WorkerId) -> None:
        """The stream leaves the worker with this log. If it never had an output there, an older log may have more of
        its KV: then it keeps the older log."""
        if stream.source is None:
            stream.source = log
            self._num_needed[log] += 1

    def release(self, stream: "Stream") -> None:
        """The stream goes on at a worker, or has ended."""
        log, stream.source = stream.source, None
        if log is None:
            return
        self._num_needed[log] -= 1
        if self._num_needed[log] == 0:
            del self._num_needed[log]
            if log in self._unsettled:
                self._unsettled.remove(log)
                self._say_settled(log)

    def lose(self, log: WorkerId) -> None:
        """Its worker is lost. Several observers report this, so it may be called more than once."""
        rank, incarnation = log
        if log in self._num_needed:
            self._unsettled.add(log)
        elif incarnation > self._told.get(rank, 0):
            self._say_settled(log)

    def _say_settled(self, log: WorkerId) -> None:
        if self._tell is not None:
            rank, incarnation = log
            self._told[rank] = max(incarnation, self._told.get(rank, incarnation))
            self._tell(log)
