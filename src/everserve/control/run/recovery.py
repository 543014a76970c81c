"""A new orchestrator before its machine resumes: which processes have reported their state?

Nothing is published until all existing workers have reported or the deadline has passed. Until then the data path
continues with the tables of the previous orchestrator, which is better than tables without workers that are only slow.
"""

from collections.abc import Collection, Sequence

from everserve.control.decide.inputs import AnyInput, Exited, FromWorker, Said
from everserve.control.decide.seats import Found
from everserve.tables.ids import Epoch, Role, WorkerId
from everserve.tables.slots import HeldSlots
from everserve.wire.messages import (
    FoundProcess,
    GatewayReport,
    Hello,
    HostJoined,
    HostLeft,
    Ready,
    Report,
    SlotsReported,
)

REPORT_S = 1.0  # a worker in its loop reports within milliseconds; one that loads, after loading


class Recovery:
    """The processes found at the start, and the inputs since. Times are the computer's monotonic clock."""

    def __init__(
        self, found: Sequence[FoundProcess], now: float, num_gateways: int = 1, hosts: Collection[int] = ()
    ) -> None:
        self.deadline = now + REPORT_S
        self.epoch = Epoch(0)  # the highest epoch that any process knows
        self._found: dict[WorkerId, int] = {}
        self._roles: dict[WorkerId, tuple[Role, ...]] = {}
        self._awaited: set[WorkerId] = set()
        self._awaited_hosts = set(hosts)
        self._add(found)
        self._num_silent_gateways = num_gateways
        self._spoke: set[WorkerId] = set()
        self._ready: set[WorkerId] = set()
        self._leaving: set[WorkerId] = set()
        self._ended: set[WorkerId] = set()
        self._lost: set[WorkerId] = set()  # declared lost to the gateway
        self._slots: dict[WorkerId, HeldSlots] = {}

    def _add(self, found: Sequence[FoundProcess]) -> None:
        for one in found:
            worker = WorkerId(one.rank, one.incarnation)
            self._found[worker], self._roles[worker] = one.pid, one.roles
            if one.pid > 0:
                self._awaited.add(worker)

    def note(self, given: AnyInput) -> None:
        """The machine will handle the same inputs afterwards."""
        match given:
            case HostJoined():
                self._awaited_hosts.discard(given.host)
                self._add(given.found)
            case HostLeft():
                self._awaited_hosts.discard(given.host)
            case GatewayReport():
                self._num_silent_gateways -= 1
                self._lost.update(given.lost)
                self.epoch = max(self.epoch, given.epoch)
            case Said():
                self._note_said(WorkerId(given.rank, given.incarnation), given.message)
            case Exited():
                worker = WorkerId(given.rank, given.incarnation)
                self._awaited.discard(worker)
                self._ended.add(worker)

    def _note_said(self, worker: WorkerId, message: FromWorker) -> None:
        match message:
            case Hello():
                self._spoke.add(worker)
            case Report():
                self._awaited.discard(worker)
                self._spoke.add(worker)
                self.epoch = max(self.epoch, message.epoch)
                if message.is_leaving:
                    self._leaving.add(worker)
                if message.slots is not None:
                    self._slots[worker] = message.slots
            case SlotsReported():
                self._slots[worker] = message.slots
            case Ready():
                self._ready.add(worker)

    def is_over(self, now: float) -> bool:
        is_silent = self._awaited or self._awaited_hosts or self._num_silent_gateways > 0
        return now >= self.deadline or not is_silent

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
