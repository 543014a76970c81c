"""A new orchestrator, before it decides anything: who has told it what it needs to know?

Nothing is published until all workers that exist have reported, or have had their time to: until then the data path
goes on with the tables of the orchestrator before, which is better than tables without those who are merely slow.
"""

from collections.abc import Sequence

from everserve.control.seats import Found
from everserve.control.worker_ends import WorkerEnds
from everserve.tables.ids import Epoch, WorkerId
from everserve.wire.messages import FoundProcess, GatewayReport

REPORT_S = 1.0  # a worker in its loop reports within milliseconds; one that loads, when it has loaded


class Recovery:
    """What was found at the start, and what has been heard since."""

    def __init__(self, found: Sequence[FoundProcess], now: float) -> None:
        self.began_s = now
        self.deadline = now + REPORT_S
        self.epoch = Epoch(0)  # the highest that anybody knows
        self.logs_needed: Sequence[WorkerId] | None = None  # by streams; None: the gateway has not reported
        self._found = found
        self._awaited: set[WorkerId] = {
            WorkerId(process.rank, process.incarnation) for process in found if process.pid > 0
        }
        self._ended: set[WorkerId] = set()
        self._lost: set[WorkerId] = set()  # the gateway was told that these are gone

    def heard(self, seat: WorkerId, epoch: Epoch) -> None:
        """A worker has reported."""
        self._awaited.discard(seat)
        self.epoch = max(self.epoch, epoch)

    def heard_gateway(self, report: GatewayReport) -> None:
        self.logs_needed = report.logs
        self._lost.update(report.lost)
        self.epoch = max(self.epoch, report.epoch)

    def ended(self, seat: WorkerId) -> None:
        """Its process is no more."""
        self._awaited.discard(seat)
        self._ended.add(seat)

    def is_over(self, now: float) -> bool:
        return now >= self.deadline or (not self._awaited and self.logs_needed is not None)

    @property
    def num_missing(self) -> int:
        return len(self._awaited)

    def found(self, ends: WorkerEnds) -> list[Found]:
        """The machine's view: every incarnation, and what it said of itself."""
        result: list[Found] = []
        for process in self._found:
            seat = WorkerId(process.rank, process.incarnation)
            end = ends.get(*seat)
            has_ended = seat in self._ended
            report = end.report if end is not None else None
            result.append(
                Found(
                    rank=process.rank,
                    incarnation=process.incarnation,
                    pid=-1 if has_ended else process.pid,
                    has_reported=end is not None and end.has_said_hello,
                    is_ready=end is not None and end.is_ready,
                    is_leaving=report is not None and report.is_leaving,
                    was_lost=seat in self._lost,
                )
            )
        return result
