"""What workers say becomes events."""

from everserve.control import events
from everserve.control.event_queue import EventQueue
from everserve.control.parts import Parts
from everserve.control.worker_ends import WorkerEnd, send_routes
from everserve.tables.ids import WorkerId
from everserve.wire.channel import ChannelClosed
from everserve.wire.events import StaleDropped, WorkerLeaving
from everserve.wire.messages import (
    AnyMessage,
    EventHappened,
    ExpertReport,
    Failed,
    Hello,
    LanesOpen,
    Leaving,
    LoadReported,
    PaceReported,
    Ready,
    Report,
    RoutesUsed,
    SlotsReported,
    Suspected,
)


class FromWorkers:
    """All workers, also those that were declared gone and do not know it yet."""

    def __init__(self, parts: Parts, queue: EventQueue) -> None:
        self._parts = parts
        self._queue = queue

    def read(self, end: WorkerEnd) -> None:
        if end.control is None:
            return  # its exit was handled earlier in the same turn
        try:
            for message in end.control.receive_all():
                self._on_message(end, message)
        except ChannelClosed:
            self._parts.selector.unregister(end.control)
            end.control.close()
            end.control = None
            self._queue.tell(events.ChannelEnded(end.rank, end.incarnation))

    def read_pending(self, worker: WorkerId) -> None:
        """Read its pending messages before its death is handled: its own Failed explains more than its exit status."""
        end = self._parts.ends.get(worker)
        if end is not None:
            self.read(end)

    def _on_message(self, end: WorkerEnd, message: AnyMessage) -> None:
        (rank, incarnation), tell = end.id, self._queue.tell
        if end.is_lost:
            self._on_stale(end, message)
        elif isinstance(message, EventHappened):
            self._parts.gateway.tell(message.event)
        elif isinstance(message, Hello):
            self._connect(end)
        elif isinstance(message, Report):
            self._on_report(end, message)
        elif isinstance(message, SlotsReported):
            tell(events.SaidHolds(rank, incarnation, message.slots, tuple(message.failed), message.num_done))
            self._parts.records.note_moves(rank, message)
        elif isinstance(message, Ready):
            self._parts.ends.give_lanes(end)
        elif isinstance(message, LanesOpen):
            self._parts.ends.say_ready(end)
        elif isinstance(message, RoutesUsed):
            tell(events.SaidUses(rank, incarnation, message.epoch))
        elif isinstance(message, Leaving):
            self._parts.records.append(WorkerLeaving(process="orchestrator", rank=rank, incarnation=incarnation))
            tell(events.SaidLeaving(rank, incarnation))
        elif isinstance(message, Failed):
            tell(events.SaidFailed(rank, incarnation, message.reason, message.user_error))
        elif isinstance(message, Suspected):
            tell(events.Suspected(message.rank, message.incarnation, by=rank, reason=message.reason))
        elif isinstance(message, LoadReported):
            tell(events.SaidLoads(rank, incarnation, message.rows))
        elif isinstance(message, PaceReported):
            tell(events.SaidPace(rank, incarnation, message.own, tuple(message.peers)))
            self._parts.gateway.count_slowness(self._parts.machine.slowness)
        elif isinstance(message, ExpertReport):
            self._parts.gateway.count_expert(rank, message.stats)
        else:
            raise AssertionError(f"a worker does not send {type(message).__name__} to the orchestrator")

    def _connect(self, end: WorkerEnd) -> None:
        """The worker is alive and reads its channel."""
        self._parts.detector.watch(end)
        end.has_said_hello = True
        self._parts.logs.introduce(end, but=end.report.logs if end.report is not None else ())
        self._parts.weights.introduce(end)
        self._parts.kv.introduce(end)
        self._queue.tell(events.SaidHello(end.rank, end.incarnation))

    def _on_report(self, end: WorkerEnd, report: Report) -> None:
        """A worker that was started before this orchestrator."""
        end.report = report
        self._connect(end)
        self._queue.tell(events.SaidReport(end.rank, end.incarnation, report.epoch, report.is_leaving, report.slots))
        if report.is_ready:
            self._parts.ends.give_lanes(end)
        if not self._queue.is_recovering:
            self._parts.ends.dismiss_unknown_peers(end)
            send_routes([end], self._parts.machine.tables())

    def _on_stale(self, end: WorkerEnd, message: AnyMessage) -> None:
        """A worker that was declared gone still sends: its messages are counted. Its events are forwarded all the same,
        and its Failed may explain why its successors will fail too. Everything else is dropped, such as its suspicions
        and its counters: it is no longer part of the cluster."""
        event = message.event if isinstance(message, EventHappened) else None
        self._parts.gateway.count_stale(event.count if isinstance(event, StaleDropped) else 1)
        if event is not None:
            self._parts.gateway.tell(event)
        elif isinstance(message, Failed):
            self._queue.tell(events.SaidFailed(end.rank, end.incarnation, message.reason, message.user_error))
