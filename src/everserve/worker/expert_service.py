"""An expert worker, apart from computing: its clients (attention workers), control messages, exit.

    wait for requests -> leave, if asked to -> handle control messages -> change a slot, if one is pending -> compute

It has no state between requests, so its death loses nothing. It serves every attention worker with a lane to it; the
orchestrator adds and removes these. Without an orchestrator it continues to serve the ones it has.
"""

import logging
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass

from everserve.memory.liveness import Cell, PeerState, Warden, life_word
from everserve.memory.liveness.lease import LEAST_S, Lease
from everserve.memory.local import LocalMemory
from everserve.tables.ids import Epoch, Incarnation, Rank, WorkerId
from everserve.tables.outputs import ExpertStats
from everserve.wire.channel import Descriptors
from everserve.wire.event_log import EventLog
from everserve.wire.events import StaleDropped
from everserve.wire.messages import (
    AnyMessage,
    ClearSlots,
    ComputeRow,
    ExpertReport,
    Fenced,
    FillSlots,
    Flip,
    KvGrouped,
    LanesOpen,
    LanesSent,
    Leave,
    Leaving,
    Offer,
    PeerJoined,
    PeerLeft,
    Report,
    RoutesChanged,
    RowComputedAgain,
    Shutdown,
    SlotsReported,
    StartWorker,
    StopChanges,
    Withdraw,
)
from everserve.words import count
from everserve.worker.control import ControlEnd, LeaveRequest
from everserve.worker.load_reports import LoadReports
from everserve.worker.offered import OF_HEADS, OF_WEIGHTS, FetchesKv, HeadsKv, Offered, Weights, users
from everserve.worker.slot_changes import ChangeableSlots, SlotChanges

log = logging.getLogger(__name__)

ATTEND_EVERY_S = 0.25
_REPORT_EVERY_S = 1.0
_QUIET_S = 0.2  # a leaving worker exits after this long without a request ...
_LEAVE_S = 5.0  # ... and in any case after this long


class _WasFenced(Exception):
    """The orchestrator has declared this incarnation gone."""


@dataclass
class Customer:
    """One incarnation of an attention worker that has a lane to this worker."""

    incarnation: Incarnation
    cell: Cell
    is_healthy: bool = True  # alive with a pulse: shutdown waits for it


class ExpertService(ABC):
    """Serves expert slots to attention workers. Backends implement how rows are computed."""

    def __init__(
        self,
        start: StartWorker,
        slots: ChangeableSlots,
        cell: Cell,
        warden: Warden,
        control: ControlEnd,
        leave: LeaveRequest,
        events: EventLog,
        kv: FetchesKv | None = None,
    ) -> None:
        self._start = start
        self.slots = slots
        self._changes = SlotChanges(slots, control.send)
        memory = LocalMemory()
        of_heads = users(OF_HEADS, HeadsKv(memory, kv)) if kv is not None else {}
        self._offered = Offered(memory, users(OF_WEIGHTS, Weights(memory, slots, self._changes)) | of_heads)
        self._cell = cell
        self._warden = warden
        self._lease = Lease(warden, LEAST_S[start.settings.compute.device])
        self._control = control
        self._leave_request = leave
        self._events = events
        self._customers: dict[Rank, Customer] = {}
        self._reported = ExpertStats()
        self._loads = LoadReports()
        self._report_at = time.monotonic() + _REPORT_EVERY_S
        self._attend_at = 0.0
        self._stop_at: float | None = None
        self._leave_at: float | None = None  # set while leaving
        self._asked_s = 0.0  # time of the last request; updated while leaving
        control.make_report = self._make_report

    # -- implemented by backends -----------------------------------------------------------------

    @abstractmethod
    def stats(self) -> ExpertStats:
        """Counters since the start."""

    def rows_by_expert(self) -> list[list[int]]:
        """[index of the MoE layer][expert]: rows computed since the start. Empty where they are not counted."""
        return []

    @abstractmethod
    def _wait(self) -> None:
        """Wait until there is work or news, or a short time has passed: no longer than `_changes.wait_s` says."""

    @abstractmethod
    def _work(self) -> None:
        """Compute the pending requests."""

    @property
    @abstractmethod
    def _has_news(self) -> bool:
        """Whether the alarm rang or the control word changed since `_note_news`."""

    @abstractmethod
    def _note_news(self) -> None: ...

    @property
    @abstractmethod
    def _num_pending(self) -> int:
        """Requests that are not computed yet."""

    @abstractmethod
    def _open(self, rank: Rank, cell: Cell, lane_fd: int) -> None:
        """Serve this lane from now on. Takes over the descriptor."""

    @abstractmethod
    def _close(self, rank: Rank) -> None:
        """Stop serving the lane of this worker."""

    @abstractmethod
    def _note_health(self, rank: Rank, state: PeerState) -> None:
        """A customer has died, has become silent, or is alive again."""

    def _regroup_kv(self, groups: list[list[list[tuple[int, int]]]]) -> None:  # noqa: B027 (only where heads are divided)
        """The parity kept here is that of these heads, by home and group."""

    def _compute_again(self, asked: ComputeRow) -> bytes:
        """The bits of this row; none where rows are not computed twice."""
        return b""

    def _flip_bits(self) -> None:  # noqa: B027 (only where rows are computed twice)
        """An injected fault."""

    def report_slots(self) -> None:
        """Report what all slots hold; sent before Ready."""
        self._control.send(SlotsReported(slots=self.slots.held))

    # -- the loop --------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until fenced; or until told to stop or to leave, and no attention worker needs this worker."""
        try:
            while not self._is_over():
                self._lease.renew()
                self._wait()
                if self._leave_request.was_asked and self._leave_at is None:
                    self._begin_to_leave()
                if self._has_news or time.monotonic() >= self._attend_at:
                    self._attend()
                if self._changes.is_pending:
                    self._changes.do_one()
                self._work()
        except _WasFenced as fenced:
            self._report_fenced(str(fenced))

    def _is_over(self) -> bool:
        if self._control.is_cut:
            return True
        if self._leave_at is not None:
            now = time.monotonic()
            return now >= self._leave_at or (not self._num_pending and now - self._asked_s >= _QUIET_S)
        if self._stop_at is None:
            return False
        # Attention workers may still finish running requests with this worker.
        has_customers = any(customer.is_healthy for customer in self._customers.values())
        return not has_customers or time.monotonic() >= self._stop_at

    def _begin_to_leave(self) -> None:
        """New routes will lead to other workers. Attention workers with older routes are still served."""
        log.info("leaving")
        self._asked_s = time.monotonic()
        self._leave_at = self._asked_s + _LEAVE_S
        self._control.send(Leaving())

    def _make_report(self) -> Report:
        self._changes.forget()
        return Report(
            is_ready=True,
            is_leaving=self._leave_at is not None,
            epoch=Epoch(0),
            peers=[WorkerId(rank, customer.incarnation) for rank, customer in self._customers.items()],
            memory=self._offered.names,
            slots=self.slots.held,
        )

    # -- everything that is not a request --------------------------------------------------------

    def _attend(self) -> None:
        """Handle health changes and control messages: on an alarm, on a new control word, and every ATTEND_EVERY_S."""
        self._attend_at = time.monotonic() + ATTEND_EVERY_S
        self._note_news()
        for rank in {Rank(key) for key, _ in self._warden.changes()} & self._customers.keys():
            state = self._warden.state(rank)
            self._customers[rank].is_healthy = state is PeerState.ALIVE
            self._note_health(rank, state)
        self._control.read(self._handle)
        self._control.flush()
        self.slots.tend()
        self._report()

    def _handle(self, message: AnyMessage, fds: Descriptors) -> None:
        if isinstance(message, PeerJoined):
            self._join(message)
        elif isinstance(message, PeerLeft):
            self._leave(message.rank, message.incarnation)
        elif isinstance(message, LanesSent):
            self._control.send(LanesOpen())
        elif isinstance(message, FillSlots | ClearSlots):
            self._changes.add(message)
        elif isinstance(message, StopChanges):
            self._changes.stop()
        elif isinstance(message, Offer | Withdraw):
            self._offered.take(message, fds)
        elif isinstance(message, KvGrouped):
            self._regroup_kv(message.groups)
        elif isinstance(message, ComputeRow):
            self._control.send(RowComputedAgain(id=message.id, y=self._compute_again(message)))
        elif isinstance(message, Flip):
            log.warning("an injected fault: from now on one bit of each row is wrong")
            self._flip_bits()
        elif isinstance(message, Fenced):
            raise _WasFenced(message.reason)
        elif isinstance(message, Leave):
            self._leave_request.ask()
        elif isinstance(message, Shutdown):
            self._stop_at = time.monotonic() + message.grace_s
        elif not isinstance(message, RoutesChanged):  # routes are for attention workers
            log.warning("dropped a %s: not for an expert worker", type(message).__name__)

    def _join(self, message: PeerJoined) -> None:
        cell, lane_fd, _ = self._offered.of_peer(message)
        if message.rank in self._customers:
            self._leave(message.rank, self._customers[message.rank].incarnation)
        self._open(message.rank, cell, lane_fd)
        self._customers[message.rank] = Customer(message.incarnation, cell)
        self._warden.watch(message.rank, cell, life_word(self._start.rank, self._start.incarnation))

    def _leave(self, rank: Rank, incarnation: Incarnation) -> None:
        customer = self._customers.get(rank)
        if customer is None or customer.incarnation != incarnation:
            return
        del self._customers[rank]
        self._close(rank)
        self._warden.unwatch(rank)
        customer.cell.close()

    def _report(self) -> None:
        now, stats = time.monotonic(), self.stats()
        if now >= self._report_at and stats != self._reported:
            self._control.send(ExpertReport(stats=stats))
            self._reported = stats
            if (loads := self._loads.next(self.rows_by_expert())) is not None:
                self._control.send(loads)
            self._report_at = now + _REPORT_EVERY_S

    def _report_fenced(self, reason: str) -> None:
        """This worker was declared gone while it could not read messages. Its lanes are no longer read."""
        num_pending, what = self._num_pending, "requests to an expert worker that was declared gone"
        log.warning("declared gone (%s): exiting; not computed: %s", reason, count(num_pending, "request"))
        rank, incarnation = self._start.rank, self._start.incarnation
        self._events.append(
            StaleDropped(process=self._events.process, rank=rank, incarnation=incarnation, count=num_pending, what=what)
        )
