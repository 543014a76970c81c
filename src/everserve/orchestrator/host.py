"""The process around the machine: messages and detections become events, effects become messages.

    receive -> machine.handle(event, now) -> run effects

It decides nothing. Everything that can be decided is in machine.py; everything that is slow or remote is asked for here
and comes back as another event.
"""

import logging
import os
import selectors
import signal
import time
from collections import deque
from collections.abc import Callable

from everserve.orchestrator import effects, events
from everserve.orchestrator.design import Design, describe
from everserve.orchestrator.detector import Detector
from everserve.orchestrator.gateway_end import GatewayEnd
from everserve.orchestrator.machine import Machine, Policy
from everserve.orchestrator.memory import Memory
from everserve.orchestrator.workers import Seat, WorkerEnd, WorkerEnds, cell_name
from everserve.runtime.channel import Channel, ChannelClosed
from everserve.runtime.events import (
    EpochPublished,
    EventLog,
    FaultDetected,
    FaultInjectedEvent,
    StaleDropped,
    WorkerBackedOff,
    WorkerProvisioned,
)
from everserve.runtime.liveness import CELL_BYTES, Cell
from everserve.runtime.messages import (
    AnchorAttached,
    AnyMessage,
    EventHappened,
    ExpertReport,
    Failed,
    FaultInjected,
    Fenced,
    Hello,
    InjectFault,
    Provision,
    Ready,
    RoutesChanged,
    Shutdown,
    Signalled,
    SignalWorker,
    StartOrchestrator,
    StartWorker,
    Suspected,
    WorkerExited,
    WorkerStarted,
)
from everserve.tables.ids import Incarnation, Rank, Role

log = logging.getLogger(__name__)

_NO_DETECTION_MS = 1000.0  # with --detect-ms 0 nothing is silent; the machine's other times need some number


class Host:
    """One instance's orchestrator, from start to end."""

    def __init__(self, start: StartOrchestrator, supervisor: Channel, gateway: Channel) -> None:
        self._start = start
        self._supervisor = supervisor
        self._gateway = GatewayEnd(gateway)
        self._memory = Memory()
        self._selector = selectors.DefaultSelector()
        self._log = EventLog("orchestrator", start.event_log, self._gateway.tell)
        self._is_over = False
        self._faults: dict[str, WorkerEnd] = {}  # injected and not confirmed yet
        self._undecided: deque[events.AnyEvent] = deque()
        self._is_deciding = False

        self._design = Design.of(start)
        self._ends = WorkerEnds(self._memory, self._design.lane_bytes, on_lanes=self._maybe_ready)
        self._detector = Detector(start.detect_ms)
        policy = Policy(detect_s=(start.detect_ms or _NO_DETECTION_MS) / 1e3)
        self._machine = Machine(self._design.seats, self._design.placement, policy)
        if self._design.placement is not None:
            self._log.append(describe(self._design.placement))

    def run(self) -> None:
        """Until the supervisor says so, or is gone (ChannelClosed)."""
        self._register(self._supervisor, self._read_supervisor)
        assert self._gateway.channel is not None
        self._register(self._gateway.channel, self._read_gateway)
        self._selector.register(self._detector, selectors.EVENT_READ, self._read_detector)
        self._carry_out(self._machine.start(time.monotonic()))
        self._read_supervisor()  # what came together with the first message
        while not self._is_over:
            for key, _ in self._selector.select(self._timeout_s()):
                key.data()
            deadline = self._machine.next_deadline()
            if deadline is not None and time.monotonic() >= deadline:
                self._decide(events.Tick())
            self._flush()

    # -- events in -------------------------------------------------------------------------------

    def _read_supervisor(self) -> None:
        for message in self._supervisor.receive_all():
            if isinstance(message, AnchorAttached):
                anchor = Channel.of_fd(self._supervisor.take_fd())
                self._register(anchor, self._read_anchor)
                self._memory.attach(anchor)
            elif isinstance(message, WorkerStarted):
                self._on_started(message, self._supervisor.take_fd())
            elif isinstance(message, WorkerExited):
                self._on_exited(message)
            elif isinstance(message, Signalled):
                self._on_signalled(message)
            elif isinstance(message, Shutdown):
                self._shut_down(message)
            else:
                raise AssertionError(f"the supervisor does not send {type(message).__name__}")

    def _read_gateway(self) -> None:
        channel = self._gateway.channel
        assert channel is not None
        try:
            for message in channel.receive_all():
                if isinstance(message, InjectFault):
                    self._inject(message)
        except ChannelClosed:
            self._selector.unregister(channel)
            self._gateway.channel = None

    def _read_anchor(self) -> None:
        if self._memory.anchor is None:
            return
        try:
            self._memory.read()
        except ChannelClosed:
            self._selector.unregister(self._memory.anchor)
            self._memory.detach()

    def _read_worker(self, end: WorkerEnd) -> None:
        if end.control is None:
            return  # its end was handled a moment ago, in the same turn
        try:
            for message in end.control.receive_all():
                self._on_worker_message(end, message)
        except ChannelClosed:
            self._selector.unregister(end.control)
            end.control.close()
            end.control = None
            self._decide(events.ChannelEnded(end.rank, end.incarnation))

    def _on_worker_message(self, end: WorkerEnd, message: AnyMessage) -> None:
        if end.is_lost:
            self._count_stale(message)
        if isinstance(message, EventHappened):
            self._gateway.tell(message.event)
        elif isinstance(message, Hello):
            if not end.is_lost:
                self._detector.watch(end)
                self._ends.connect(end)
            self._decide(events.SaidHello(end.rank, end.incarnation))
        elif isinstance(message, Ready):
            end.has_said_ready = True
            self._maybe_ready(end)
        elif isinstance(message, Failed):
            self._decide(events.SaidFailed(end.rank, end.incarnation, message.reason, message.user_error))
        elif isinstance(message, Suspected):
            self._decide(events.Reported(message.rank, message.incarnation, by=end.rank, reason=message.reason))
        elif isinstance(message, ExpertReport):
            self._gateway.count_expert(end.rank, message.stats)
        else:
            raise AssertionError(f"a worker does not send {type(message).__name__} to the orchestrator")

    def _count_stale(self, message: AnyMessage) -> None:
        """A worker that was declared gone is still there. Its events are news all the same; nothing else of it counts,
        and the machine sees to that."""
        event = message.event if isinstance(message, EventHappened) else None
        self._gateway.count_stale(event.count if isinstance(event, StaleDropped) else 1)

    def _read_detector(self) -> None:
        for rank, incarnation, found in self._detector.changes():
            self._read_last_words(rank, incarnation)
            self._decide(found(rank, incarnation))

    def _read_last_words(self, rank: Rank, incarnation: Incarnation) -> None:
        """Before judging: what it has said itself explains more than how it was seen to end."""
        end = self._ends.get(rank, incarnation)
        if end is not None:
            self._read_worker(end)

    def _on_started(self, message: WorkerStarted, control_fd: int) -> None:
        end = self._ends.get(message.rank, message.incarnation)
        assert end is not None, "a worker that nobody asked for"
        end.control = Channel.of_fd(control_fd)
        end.pid = message.pid
        self._register(end.control, lambda: self._read_worker(end))
        self._decide(events.Started(message.rank, message.incarnation, message.pid))

    def _on_exited(self, message: WorkerExited) -> None:
        self._read_last_words(message.rank, message.incarnation)
        self._decide(events.Exited(message.rank, message.incarnation, message.exit_status))
        end = self._ends.get(message.rank, message.incarnation)
        if end is None:
            return
        if end.control is not None:
            self._selector.unregister(end.control)
        self._detector.unwatch(end)
        self._ends.forget(end)

    def _maybe_ready(self, end: WorkerEnd) -> None:
        """Ready means ready for others: it has said so, and its lanes are there."""
        if end.has_said_ready and not end.is_ready and not end.waits_for:
            end.is_ready = True
            self._decide(events.SaidReady(end.rank, end.incarnation))

    # -- effects out -----------------------------------------------------------------------------

    def _decide(self, event: events.AnyEvent) -> None:
        """One event after the other: what an effect leads to is decided when all effects before it are done."""
        self._undecided.append(event)
        if self._is_deciding:
            return
        self._is_deciding = True
        while self._undecided:
            self._carry_out(self._machine.handle(self._undecided.popleft(), time.monotonic()))
        self._is_deciding = False

    def _carry_out(self, decision: effects.Decision) -> None:
        for effect in decision.effects:
            self._run(effect, decision.reason)

    def _run(self, effect: effects.AnyEffect, reason: str) -> None:
        if isinstance(effect, effects.Provision):
            seat = (effect.rank, effect.incarnation)
            self._memory.allocate(cell_name(seat), CELL_BYTES, lambda fd: self._provision(seat, fd))
        elif isinstance(effect, effects.Publish):
            self._publish(effect, reason)
        elif isinstance(effect, effects.Lost):
            self._lose(effect)
        elif isinstance(effect, effects.Kill):
            self._signal(effect.rank, effect.incarnation, signal.SIGKILL, id=None)
        elif isinstance(effect, effects.Probe):
            end = self._ends.get(effect.rank, effect.incarnation)
            if end is not None:
                self._decide(self._detector.probe(end)(effect.rank, effect.incarnation))
        elif isinstance(effect, effects.BackOff):
            log.warning("worker %d ended %d times while starting; next start in %.1f s", effect.rank,
                        effect.num_crashes, effect.delay_s)  # fmt: skip
            self._log.append(
                WorkerBackedOff(
                    process="orchestrator",
                    rank=effect.rank,
                    num_crashes=effect.num_crashes,
                    delay_s=effect.delay_s,
                )
            )
        elif isinstance(effect, effects.AllReady):
            self._supervisor.send(Ready())
        else:
            self._give_up(effect)

    def _publish(self, effect: effects.Publish, reason: str) -> None:
        members = effect.members
        log.info("epoch %d: %s", members.epoch, reason)
        self._log.append(
            EpochPublished(process="orchestrator", epoch=members.epoch, reason=reason, violations=effect.violations)
        )
        if effect.routes is not None:
            for end in self._ends:
                if Role.ATTENTION in end.roles and end.is_connected:
                    end.send(RoutesChanged(routes=effect.routes))
        self._gateway.tell_cluster(effect)

    def _lose(self, effect: effects.Lost) -> None:
        if not effect.is_expected:
            log.warning("worker %d is gone: %s", effect.rank, effect.reason)
            self._log.append(
                FaultDetected(
                    process="orchestrator",
                    rank=effect.rank,
                    incarnation=effect.incarnation,
                    roles=effect.roles,
                    cause=effect.cause,
                    reason=effect.reason,
                )
            )
        self._gateway.tell_lost(effect)
        end = self._ends.get(effect.rank, effect.incarnation)
        if end is None:
            self._memory.release(cell_name((effect.rank, effect.incarnation)))  # it never came to be
        else:
            self._ends.part(end)
            end.send(Fenced(reason=effect.reason))

    def _give_up(self, effect: effects.GiveUp) -> None:
        self._supervisor.send(Failed(reason=effect.reason, user_error=effect.user_error))
        self._is_over = True

    def _shut_down(self, message: Shutdown) -> None:
        self._decide(events.Stopping())
        for end in self._ends:
            end.send(message)
        self._is_over = True

    # -- starting workers ------------------------------------------------------------------------

    def _provision(self, seat: Seat, cell_fd: int) -> None:
        """The new worker's cell is there: have it started."""
        start, (rank, incarnation) = self._start, seat
        roles = next(worker.roles for worker in self._machine.members.workers if worker.rank == rank)
        own_fd = os.dup(cell_fd)
        self._ends.add(WorkerEnd(rank, incarnation, roles, own_fd, Cell(own_fd)))
        worker = StartWorker(
            rank=rank,
            incarnation=incarnation,
            roles=roles,
            settings=self._design.settings,
            num_workers=start.num_attention + start.num_expert,
            slots=self._design.slots_of(rank),
            detect_ms=start.detect_ms,
        )
        self._supervisor.send(Provision(start=worker), fds=[cell_fd])
        self._log.append(WorkerProvisioned(process="orchestrator", rank=rank, incarnation=incarnation, roles=roles))

    # -- signals ---------------------------------------------------------------------------------

    def _inject(self, message: InjectFault) -> None:
        ends = [end for end in self._ends if end.rank == message.rank and end.pid]
        if not ends:
            reason = f"worker {message.rank} has no process at the moment"
            self._gateway.send(FaultInjected(id=message.id, pid=None, incarnation=Incarnation(0), reason=reason))
            return
        # A seat may have two processes for a while: a fenced one and its successor. CONT is for the stopped one.
        oldest_first = sorted(ends, key=lambda end: end.incarnation)
        end = oldest_first[0] if message.signal == signal.SIGCONT else oldest_first[-1]
        self._faults[message.id] = end
        self._signal(end.rank, end.incarnation, message.signal, id=message.id)
        self._log.append(
            FaultInjectedEvent(
                process="orchestrator",
                rank=end.rank,
                incarnation=end.incarnation,
                victim_pid=end.pid,
                signal=signal.Signals(message.signal).name.removeprefix("SIG"),
            )
        )

    def _signal(self, rank: Rank, incarnation: Incarnation, signum: int, id: str | None) -> None:
        self._supervisor.send(SignalWorker(rank=rank, incarnation=incarnation, signal=signum, id=id))

    def _on_signalled(self, message: Signalled) -> None:
        end = self._faults.pop(message.id)
        self._gateway.send(
            FaultInjected(id=message.id, pid=message.pid, incarnation=end.incarnation, reason=message.reason)
        )

    # -- plumbing --------------------------------------------------------------------------------

    def _register(self, channel: Channel, read: Callable[[], None]) -> None:
        self._selector.register(channel, selectors.EVENT_READ, read)

    def _flush(self) -> None:
        self._gateway.flush(self._machine.tables())
        for channel in (self._supervisor, self._memory.anchor):
            if channel is not None:
                channel.flush()
        for end in self._ends:
            end.flush()

    def _timeout_s(self) -> float:
        deadline = self._machine.next_deadline()
        return 0.5 if deadline is None else min(0.5, max(0.0, deadline - time.monotonic()))
