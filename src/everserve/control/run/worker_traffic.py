"""All workers, also those that were declared gone and do not know it yet: what they say is passed on to the machine,
and what it decides is said to them. What concerns channels, lanes, memory and counters is seen to here."""

import selectors
from dataclasses import dataclass

from everserve.control.decide.effects import Publish, ToWorker
from everserve.control.decide.inputs import ChannelEnded, Exited, FromWorker, Said, SaidRow, Started
from everserve.control.decide.machine import Machine
from everserve.control.hold.catalog import Catalog
from everserve.control.hold.worker_ends import WorkerEnd, WorkerEnds, send_routes
from everserve.control.run.input_queue import InputQueue
from everserve.control.tell.to_gateway import GatewayEnds
from everserve.control.watch.detector import Detector
from everserve.tables.ids import WorkerId
from everserve.wire.channel import ChannelClosed
from everserve.wire.events import StaleDropped
from everserve.wire.messages import (
    AnyMessage,
    EventHappened,
    ExpertReport,
    Failed,
    Fenced,
    Hello,
    LanesOpen,
    Leaving,
    LoadReported,
    PaceReported,
    Ready,
    Report,
    RoutesUsed,
    RoutesWanted,
    RowComputed,
    RowComputedAgain,
    SlotsReported,
    Suspected,
)


@dataclass(frozen=True, kw_only=True)
class WorkerTraffic:
    """Their ends, and what is done with them."""

    machine: Machine
    queue: InputQueue
    selector: selectors.BaseSelector
    ends: WorkerEnds
    catalog: Catalog
    detector: Detector
    gateway: GatewayEnds

    # -- they come and go ------------------------------------------------------------------------

    def add(self, end: WorkerEnd) -> None:
        """A process exists. Its channel is new."""
        assert end.control is not None
        self.selector.register(end.control, selectors.EVENT_READ, lambda: self.read(end))
        if self.queue.is_recovering:
            end.cell.ring_control()  # it may be in the middle of a layer: makes it read its lifeline
            self.detector.watch(end)
        self.queue.tell(Started(end.rank, end.incarnation, end.pid))

    def remove(self, worker: WorkerId, exit_status: int) -> None:
        """Its process has ended."""
        self.read_pending(worker)
        self.queue.tell(Exited(worker.rank, worker.incarnation, exit_status))
        end = self.ends.get(worker)
        if end is not None:
            if end.control is not None:
                self.selector.unregister(end.control)
            self.detector.unwatch(end)
            self.ends.forget(end)

    def read_detector(self) -> None:
        """Workers that died, fell silent, or pulse again. What a worker said before its end explains more."""
        with self.queue.together():
            for rank, incarnation, seen in self.detector.changes():
                self.read_pending(WorkerId(rank, incarnation))
                self.queue.tell(seen(rank, incarnation))

    # -- what they are told ----------------------------------------------------------------------

    def tell(self, worker: WorkerId, message: ToWorker) -> None:
        end = self.ends.get(worker)
        if end is not None:
            end.send(message)

    def publish(self, tables: Publish) -> None:
        send_routes(self.ends, tables)

    def fence(self, worker: WorkerId, reason: str) -> bool:
        """It is lost. Returns whether its process may exist."""
        end = self.ends.get(worker)
        if end is not None:
            self.ends.part(end)
            end.send(Fenced(reason=reason))
        return end is not None

    def probe(self, worker: WorkerId) -> None:
        """Look at it now. It may have said that it leaves, and a peer saw its end first."""
        end = self.ends.get(worker)
        if end is not None:
            self.read_pending(worker)
            self.queue.tell(self.detector.probe(end)(end.rank, end.incarnation))

    def clean_up(self) -> None:
        """After a recovery: peers may still know workers that have ended meanwhile. One that has not reported may still
        be loading: its pulse is looked at."""
        for end in self.ends:
            self.ends.dismiss_unknown_peers(end)
            if end.report is None and not end.is_lost:
                self.queue.tell(self.detector.probe(end)(end.rank, end.incarnation))

    # -- what they say ---------------------------------------------------------------------------

    def read(self, end: WorkerEnd) -> None:
        if end.control is None:
            return  # its exit was handled earlier in the same turn
        try:
            for message in end.control.receive_all():
                self._on_message(end, message)
        except ChannelClosed:
            self.selector.unregister(end.control)
            end.control.close()
            end.control = None
            self.queue.tell(ChannelEnded(end.rank, end.incarnation))

    def read_pending(self, worker: WorkerId) -> None:
        """Read its pending messages before its death is handled: its own Failed explains more than its exit status."""
        end = self.ends.get(worker)
        if end is not None:
            self.read(end)

    def _on_message(self, end: WorkerEnd, message: AnyMessage) -> None:
        if end.is_lost:
            self._on_stale(end, message)
            return
        match message:
            case RoutesUsed() | Leaving() | Failed() | Suspected() | LoadReported() | SlotsReported() | PaceReported():
                self._pass_on(end, message)
            case RowComputed() | RowComputedAgain():
                self.queue.tell(SaidRow(end.rank, end.incarnation, message))
            case Hello():
                self._connect(end)
                self._pass_on(end, message)
            case Report():
                self._on_report(end, message)
            case Ready():
                self.ends.give_lanes(end)
            case LanesOpen():
                self.ends.say_ready(end)
            case RoutesWanted():
                send_routes([end], self.machine.tables(), whole=True)
            case ExpertReport():
                self.gateway.count_expert(end.rank, message.stats)
            case EventHappened():
                self.gateway.tell(message.event)
            case _:
                raise AssertionError(f"a worker does not send {type(message).__name__} to the orchestrator")

    def _pass_on(self, end: WorkerEnd, message: FromWorker) -> None:
        self.queue.tell(Said(end.rank, end.incarnation, message))

    def _connect(self, end: WorkerEnd) -> None:
        """The worker is alive and reads its channel."""
        self.detector.watch(end)
        end.has_said_hello = True
        self.catalog.introduce(end)

    def _on_report(self, end: WorkerEnd, report: Report) -> None:
        """A worker that was started before this orchestrator."""
        end.report = report
        self._connect(end)
        self._pass_on(end, report)
        if report.is_ready:
            self.ends.give_lanes(end)
        if not self.queue.is_recovering:
            self.ends.dismiss_unknown_peers(end)
            send_routes([end], self.machine.tables())

    def _on_stale(self, end: WorkerEnd, message: AnyMessage) -> None:
        """A worker that was declared gone still sends: its messages are counted. Its events are forwarded all the same,
        and its Failed may explain why its successors will fail too. Everything else is dropped, such as its suspicions
        and its counters: it is no longer part of the cluster."""
        event = message.event if isinstance(message, EventHappened) else None
        self.gateway.count_stale(event.count if isinstance(event, StaleDropped) else 1)
        if event is not None:
            self.gateway.tell(event)
        elif isinstance(message, Failed):
            self._pass_on(end, message)
