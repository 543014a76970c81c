"""What workers say becomes events, and the machine judges what it means. What a lost worker says is only counted."""

import selectors

from everserve.control import events
from everserve.control.detector import Detector
from everserve.control.event_queue import Deciding
from everserve.control.log_references import Logs
from everserve.control.to_gateway import GatewayEnd
from everserve.control.worker_ends import WorkerEnd, WorkerEnds
from everserve.tables.ids import Incarnation, Rank, Role
from everserve.wire.channel import ChannelClosed
from everserve.wire.events import EventLog, StaleDropped, WorkerLeaving
from everserve.wire.messages import (
    AnyMessage,
    EventHappened,
    ExpertReport,
    Failed,
    Hello,
    Leaving,
    Ready,
    Report,
    RoutesChanged,
    SlotsReported,
    Suspected,
)


class Hearing:
    """The control channels of all workers, from the start of a process to its end."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        ends: WorkerEnds,
        logs: Logs,
        detector: Detector,
        deciding: Deciding,
        gateway: GatewayEnd,
        event_log: EventLog,
    ) -> None:
        self._selector = selector
        self._ends = ends
        self._logs = logs
        self._detector = detector
        self._deciding = deciding
        self._gateway = gateway
        self._event_log = event_log

    def listen_to(self, end: WorkerEnd) -> None:
        assert end.control is not None
        self._selector.register(end.control, selectors.EVENT_READ, lambda: self._read(end))

    def stop_listening_to(self, end: WorkerEnd) -> None:
        if end.control is not None:
            self._selector.unregister(end.control)

    def last_words(self, rank: Rank, incarnation: Incarnation) -> None:
        """Before judging: what it has said itself explains more than how it was seen to end."""
        end = self._ends.get(rank, incarnation)
        if end is not None:
            self._read(end)

    def _read(self, end: WorkerEnd) -> None:
        if end.control is None:
            return  # its end was handled a moment ago, in the same turn
        try:
            for message in end.control.receive_all():
                self._on_message(end, message)
        except ChannelClosed:
            self._selector.unregister(end.control)
            end.control.close()
            end.control = None
            self._deciding.tell(events.ChannelEnded(end.rank, end.incarnation))

    def _on_message(self, end: WorkerEnd, message: AnyMessage) -> None:
        if end.is_lost:
            self._on_stale(end, message)
        elif isinstance(message, EventHappened):
            self._gateway.tell(message.event)
        elif isinstance(message, Hello):
            self._connect(end)
        elif isinstance(message, Report):
            self._on_report(end, message)
        elif isinstance(message, Ready):
            self._ends.say_ready(end)
        elif isinstance(message, Leaving):
            self._event_log.append(WorkerLeaving(process="orchestrator", rank=end.rank, incarnation=end.incarnation))
            self._deciding.tell(events.SaidLeaving(end.rank, end.incarnation))
        elif isinstance(message, Failed):
            self._on_failed(end, message)
        elif isinstance(message, Suspected):
            reported = events.Reported(message.rank, message.incarnation, by=end.rank, reason=message.reason)
            self._deciding.tell(reported)
        elif isinstance(message, ExpertReport):
            self._gateway.count_expert(end.rank, message.stats)
        elif isinstance(message, SlotsReported):
            pass  # placement is what the goal says, until routes follow from what workers hold
        else:
            raise AssertionError(f"a worker does not send {type(message).__name__} to the orchestrator")

    def _connect(self, end: WorkerEnd) -> None:
        """It lives, and hears us."""
        self._detector.watch(end)
        self._ends.connect(end)
        self._logs.introduce(end, but=end.report.logs if end.report is not None else ())
        self._deciding.tell(events.SaidHello(end.rank, end.incarnation))

    def _on_report(self, end: WorkerEnd, report: Report) -> None:
        """A worker that was there before us."""
        end.report = report
        self._connect(end)
        if report.is_ready:
            self._ends.say_ready(end)
        if self._deciding.recovery is not None:
            self._deciding.recovery.heard(end.seat, report.epoch)
            return
        self._deciding.tell(events.EpochReported(report.epoch))
        self._ends.dismiss_unknown_peers(end)
        if report.is_leaving:
            self._deciding.tell(events.SaidLeaving(end.rank, end.incarnation))
        routes = self._deciding.tables().routes
        if routes is not None and Role.ATTENTION in end.roles:
            end.send(RoutesChanged(routes=routes))

    def _on_failed(self, end: WorkerEnd, message: Failed) -> None:
        self._deciding.tell(events.SaidFailed(end.rank, end.incarnation, message.reason, message.user_error))

    def _on_stale(self, end: WorkerEnd, message: AnyMessage) -> None:
        """A worker that was declared gone is still there: whatever it says is counted. Its events are news all the
        same, and its last words may say why its successors will fail too. Nothing else acts: its suspicions and its
        counters are those of a process that is no part of the cluster."""
        event = message.event if isinstance(message, EventHappened) else None
        self._gateway.count_stale(event.count if isinstance(event, StaleDropped) else 1)
        if event is not None:
            self._gateway.tell(event)
        elif isinstance(message, Failed):
            self._on_failed(end, message)
