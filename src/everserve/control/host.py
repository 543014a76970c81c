"""The process around the machine: messages and detections become events, effects become messages.

    receive       ->  machine.handle(event, now)  ->  run effects
    inbox.py          event_queue.py                  effect_runner.py

It decides nothing. Everything that can be decided is in machine.py; everything that is slow or remote is asked for here
and comes back as another event.

If there was an orchestrator before, everything begins with a recovery: the supervisor introduces the workers that
exist, they report what they know, and only then does the machine resume. Events wait until then.
"""

import logging
import selectors
import time

from everserve.control import events
from everserve.control.anchor_client import Memory
from everserve.control.design import Design, describe
from everserve.control.detector import Detector
from everserve.control.effect_runner import Acting
from everserve.control.effects import Decision
from everserve.control.event_queue import Deciding
from everserve.control.inbox import Hearing
from everserve.control.log_references import Logs
from everserve.control.machine import Machine, Policy
from everserve.control.operator_orders import Orders
from everserve.control.provisioning import Births
from everserve.control.recovery import Recovery
from everserve.control.to_gateway import GatewayEnd
from everserve.control.worker_ends import WorkerEnds
from everserve.tables.ids import WorkerId
from everserve.wire.channel import RETRY_S, Channel, ChannelClosed, Descriptors
from everserve.wire.events import EventLog, OrchestratorRecovered
from everserve.wire.messages import (
    AnchorAttached,
    AnyMessage,
    DrainWorker,
    GatewayReport,
    InjectFault,
    LogSettled,
    MemoryKept,
    Shutdown,
    Signalled,
    StartOrchestrator,
    WorkerExited,
    WorkerStarted,
)

log = logging.getLogger(__name__)

_NO_DETECTION_MS = 1000.0  # with --detect-ms 0 nothing is silent; the machine's other times need some number


class Host:
    """One instance's orchestrator, from start to end."""

    def __init__(self, start: StartOrchestrator, supervisor: Channel, gateway: Channel) -> None:
        recovery = Recovery(start.found, time.monotonic()) if start.found is not None else None
        design = Design.of(start)
        policy = Policy(detect_s=(start.detect_ms or _NO_DETECTION_MS) / 1e3)
        machine = Machine(design.seats, design.placement, policy)

        self._was_serving = start.is_serving
        self._is_over = False
        self._selector = selectors.DefaultSelector()
        self._supervisor = supervisor
        to_gateway = self._gateway = GatewayEnd(gateway)
        event_log = self._event_log = EventLog("orchestrator", start.event_log, to_gateway.tell)
        deciding = self._deciding = Deciding(machine, recovery, self._carry_out)
        memory = self._memory = Memory()
        ends = self._ends = WorkerEnds(memory, design.lane_bytes, design.device_of, deciding.tell)
        logs = self._logs = Logs(memory, ends, supervisor)
        births = self._births = Births(design, start.detect_ms, memory, ends, logs, deciding, supervisor, event_log)
        detector = self._detector = Detector(start.detect_ms)
        self._hearing = Hearing(self._selector, ends, logs, detector, deciding, to_gateway, event_log)
        self._acting = Acting(ends, logs, births, detector, deciding, to_gateway, supervisor, event_log)
        self._orders = Orders(ends, deciding, to_gateway, supervisor, event_log)
        if design.placement is not None and recovery is None:
            event_log.append(describe(design.placement))

    def run(self) -> None:
        """Until the supervisor says so, or is gone (ChannelClosed)."""
        assert self._gateway.channel is not None
        self._selector.register(self._supervisor, selectors.EVENT_READ, self._read_supervisor)
        self._selector.register(self._gateway.channel, selectors.EVENT_READ, self._read_gateway)
        self._selector.register(self._detector, selectors.EVENT_READ, self._read_detector)
        if self._deciding.recovery is None:
            self._deciding.start()
        self._read_supervisor()  # what came together with the first message
        while not self._is_over and not self._acting.has_given_up:
            for key, _ in self._selector.select(self._timeout_s()):
                key.data()
            recovery = self._deciding.recovery
            if recovery is not None and recovery.is_over(time.monotonic()):
                self._resume(recovery)
            self._deciding.tick()
            self._flush()

    def _carry_out(self, decision: Decision) -> None:
        for effect in decision.effects:
            self._acting.do(effect, decision.reason)

    def _resume(self, recovery: Recovery) -> None:
        """All that can be known is known: decide from here on."""
        found = recovery.found(self._ends)
        self._deciding.resume(found, recovery.epoch, self._was_serving)
        for end in self._ends:
            self._ends.dismiss_unknown_peers(end)
            if end.report is None and not end.is_lost:  # it may still load: is there a pulse?
                self._deciding.tell(self._detector.probe(end)(end.rank, end.incarnation))
        if recovery.logs_needed is not None:
            self._logs.settle_lost_but(recovery.logs_needed)
        self._deciding.tell(events.Tick())  # and whatever has happened in the meantime
        epoch, took_s = self._deciding.tables().members.epoch, time.monotonic() - recovery.began_s
        log.warning("a new orchestrator: epoch %d, rebuilt in %.2f s", epoch, took_s)
        self._event_log.append(
            OrchestratorRecovered(
                process="orchestrator",
                epoch=epoch,
                num_reports=sum(process.has_reported for process in found),
                num_missing=recovery.num_missing,
                took_s=took_s,
            )
        )

    # -- the supervisor --------------------------------------------------------------------------

    def _read_supervisor(self) -> None:
        for message, fds in self._supervisor.receive_frames():
            if isinstance(message, AnchorAttached):
                self._drop_anchor()  # we may hear of the new one before the end of the old one
                (anchor_fd,) = fds.take()
                anchor = Channel.of_fd(anchor_fd)
                self._selector.register(anchor, selectors.EVENT_READ, self._read_anchor)
                self._memory.attach(anchor)
            elif isinstance(message, WorkerStarted):
                self._on_started(message, fds)
            elif isinstance(message, MemoryKept):
                (memory_fd,) = fds.take()
                self._births.take_in_memory(message.name, memory_fd)
            elif isinstance(message, WorkerExited):
                self._on_exited(message)
            elif isinstance(message, Signalled):
                self._orders.signalled(message)
            elif isinstance(message, Shutdown):
                self._shut_down(message)
            else:
                raise AssertionError(f"the supervisor does not send {type(message).__name__}")

    def _on_started(self, message: WorkerStarted, fds: Descriptors) -> None:
        """A new process; or, while we recover, one that we are introduced to."""
        end = self._births.take_in(message, fds.take())
        self._hearing.listen_to(end)
        if self._deciding.recovery is not None:
            end.cell.ring_control()  # it may be in the middle of something: look at your lifeline
            self._detector.watch(end)
        self._deciding.tell(events.Started(end.rank, end.incarnation, end.pid))

    def _on_exited(self, message: WorkerExited) -> None:
        rank, incarnation = message.rank, message.incarnation
        self._hearing.last_words(rank, incarnation)
        if self._deciding.recovery is not None:
            self._deciding.recovery.ended(WorkerId(rank, incarnation))
        self._deciding.tell(events.Exited(rank, incarnation, message.exit_status))
        end = self._ends.get(rank, incarnation)
        if end is not None:
            self._hearing.stop_listening_to(end)
            self._detector.unwatch(end)
            self._ends.forget(end)

    def _shut_down(self, message: Shutdown) -> None:
        self._deciding.tell(events.Stopping())
        for end in self._ends:
            end.send(message)
        self._is_over = True

    # -- gateway, anchor, detector ---------------------------------------------------------------

    def _read_gateway(self) -> None:
        channel = self._gateway.channel
        assert channel is not None
        try:
            for message in channel.receive_all():
                self._on_gateway_message(message)
        except ChannelClosed:
            self._selector.unregister(channel)
            self._gateway.channel = None

    def _on_gateway_message(self, message: AnyMessage) -> None:
        if isinstance(message, InjectFault):
            self._orders.inject(message)
        elif isinstance(message, DrainWorker):
            self._orders.drain(message)
        elif isinstance(message, LogSettled):
            self._logs.settle(WorkerId(message.rank, message.incarnation))
        elif isinstance(message, GatewayReport):
            if self._deciding.recovery is not None:
                self._deciding.recovery.heard_gateway(message)
            else:
                self._deciding.tell(events.EpochReported(message.epoch))
                self._logs.settle_lost_but(message.logs)
        else:
            raise AssertionError(f"the gateway does not send {type(message).__name__} to the orchestrator")

    def _read_anchor(self) -> None:
        if self._memory.anchor is None:
            return
        try:
            self._memory.read()
        except ChannelClosed:
            self._drop_anchor()

    def _drop_anchor(self) -> None:
        if self._memory.anchor is not None:
            self._selector.unregister(self._memory.anchor)
            self._memory.detach()

    def _read_detector(self) -> None:
        for rank, incarnation, found in self._detector.changes():
            self._hearing.last_words(rank, incarnation)
            self._deciding.tell(found(rank, incarnation))

    # -- once in every turn ----------------------------------------------------------------------

    def _flush(self) -> None:
        self._gateway.flush(self._deciding.tables() if self._deciding.recovery is None else None)
        for channel in self._helpers():
            channel.flush()
        for end in self._ends:
            end.flush()

    def _helpers(self) -> list[Channel]:
        return [channel for channel in (self._supervisor, self._memory.anchor) if channel is not None]

    def _channels(self) -> list[Channel]:
        return self._helpers() + [end.control for end in self._ends if end.control is not None]

    def _timeout_s(self) -> float:
        deadline = self._deciding.next_deadline()
        idle_s = RETRY_S if any(channel.wants_write for channel in self._channels()) else 0.5
        return idle_s if deadline is None else min(idle_s, max(0.0, deadline - time.monotonic()))
