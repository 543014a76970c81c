"""A new orchestrator before its machine resumes: which processes have reported their state?

Nothing is published until all existing workers have reported or the deadline has passed. Until then the data path
continues with the tables of the previous orchestrator, which is better than tables without workers that are only slow.
"""

from collections.abc import Sequence

from everserve.control import events
from everserve.control.seats import Found
from everserve.tables.ids import Epoch, WorkerId
from everserve.tables.slots import HeldSlots
from everserve.wire.messages import FoundProcess

REPORT_S = 1.0  # a worker in its loop reports within milliseconds; one that loads, after loading


class Recovery:
    """The processes found at the start, and the events since. Times are the host's monotonic clock."""

    def __init__(self, found: Sequence[FoundProcess], now: float) -> None:
        self.deadline = now + REPORT_S
        self.epoch = Epoch(0)  # the highest epoch that any process knows
        self._found = {WorkerId(process.rank, process.incarnation): process.pid for process in found}
        self._roles = {WorkerId(process.rank, process.incarnation): process.roles for process in found}
        self._awaited = {worker for worker, pid in self._found.items() if pid > 0}
        self._has_gateway_reported = False
        self._spoke: set[WorkerId] = set()
        self._ready: set[WorkerId] = set()
        self._leaving: set[WorkerId] = set()
        self._ended: set[WorkerId] = set()
        self._lost: set[WorkerId] = set()  # declared lost to the gateway
        self._slots: dict[WorkerId, HeldSlots] = {}

    def note(self, event: events.AnyEvent) -> None:
        """The machine will handle the same events afterwards."""
        if isinstance(event, events.GatewayReported):
            self._has_gateway_reported = True
            self._lost.update(event.lost)
            self.epoch = max(self.epoch, event.epoch)
        elif isinstance(event, events.SeatEvent):
            self._note_worker(event, WorkerId(event.rank, event.incarnation))

    def _note_worker(self, event: events.SeatEvent, worker: WorkerId) -> None:
        match event:
            case events.SaidHello():
                self._spoke.add(worker)
            case events.SaidReport():
                self._awaited.discard(worker)
                self._spoke.add(worker)
                self.epoch = max(self.epoch, event.epoch)
                if event.is_leaving:
                    self._leaving.add(worker)
                if event.slots is not None:
                    self._slots[worker] = event.slots
            case events.SaidHolds():
                self._slots[worker] = event.slots
            case events.SaidReady():
                self._ready.add(worker)
            case events.Exited():
                self._awaited.discard(worker)
                self._ended.add(worker)

    def is_over(self, now: float) -> bool:
        return now >= self.deadline or (not self._awaited and self._has_gateway_reported)

    def found(self) -> list[Found]:
        """Every incarnation, and what it has reported. Also those that were lost before the supervisor had heard of
        them: a number is never used again."""
        unknown = [
            Found(rank=worker.rank, incarnation=worker.incarnation, pid=-1, was_lost=True)
            for worker in self._lost - self._found.keys()
        ]
        return unknown + [
            Found(
                rank=worker.rank,
                incarnation=worker.incarnation,
                pid=-1 if worker in self._ended else pid,
                roles=self._roles[worker],
                has_reported=worker in self._spoke,
                is_ready=worker in self._ready,
                is_leaving=worker in self._leaving,
                was_lost=worker in self._lost,
                slots=self._slots.get(worker),
            )
            for worker, pid in self._found.items()
        ]
