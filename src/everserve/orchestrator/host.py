"""The process around the machine: messages and detections become events, effects become messages.

    receive -> machine.handle(event, now) -> run effects

It decides nothing. Everything that can be decided is in machine.py; everything that is slow or remote is asked for here
and comes back as another event.

If there was an orchestrator before, everything begins with a recovery: the supervisor introduces the workers that
exist, they report what they know, and only then does the machine resume. Events wait until then.
"""

import logging
import os
import selectors
import signal
import time
from collections import deque
from collections.abc import Callable

from everserve.orchestrator import effects, events
from everserve.orchestrator.design import Design, NeededMemory, describe, lack
from everserve.orchestrator.detector import Detector
from everserve.orchestrator.gateway_end import GatewayEnd
from everserve.orchestrator.logs import Logs
from everserve.orchestrator.machine import Machine, Policy
from everserve.orchestrator.memory import Memory
from everserve.orchestrator.recovery import Recovery
from everserve.orchestrator.workers import Seat, WorkerEnd, WorkerEnds
from everserve.runtime.channel import Channel, ChannelClosed
from everserve.runtime.events import (
    EpochPublished,
    EventLog,
    FaultDetected,
    FaultInjectedEvent,
    OrchestratorRecovered,
    StaleDropped,
    WorkerBackedOff,
    WorkerLeaving,
    WorkerLeft,
    WorkerProvisioned,
)
from everserve.runtime.liveness import ORCHESTRATOR_WORD, Cell
from everserve.runtime.memories import LANE, cell_name, kind_of, kv_name, log_name, log_of
from everserve.runtime.messages import (
    AnchorAttached,
    AnyMessage,
    DrainAnswered,
    DrainWorker,
    EventHappened,
    ExpertReport,
    Failed,
    FaultInjected,
    Fenced,
    GatewayReport,
    Hello,
    InjectFault,
    Leave,
    Leaving,
    LogSettled,
    MemoryKept,
    Provision,
    Ready,
    Report,
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
from everserve.runtime.provisioner import take_memory
from everserve.tables.ids import Incarnation, LogId, Rank, Role
from everserve.tables.members import WorkerState

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
        self._recovery = Recovery(start.found, time.monotonic()) if start.found is not None else None
        self._logs_needed: list[LogId] | None = None  # by the gateway, when it met us

        self._design = Design.of(start)
        self._ends = WorkerEnds(
            self._memory,
            self._design.lane_bytes,
            self._design.device_of,
            on_lanes=self._maybe_ready,
            on_no_lane=lambda end, reason: self._lack_memory(end.seat, LANE, reason),
        )
        self._logs = Logs(self._memory, self._ends, supervisor)
        self._detector = Detector(start.detect_ms)
        policy = Policy(detect_s=(start.detect_ms or _NO_DETECTION_MS) / 1e3)
        self._machine = Machine(self._design.seats, self._design.placement, policy)
        if self._design.placement is not None and self._recovery is None:
            self._log.append(describe(self._design.placement))

    def run(self) -> None:
        """Until the supervisor says so, or is gone (ChannelClosed)."""
        self._register(self._supervisor, self._read_supervisor)
        assert self._gateway.channel is not None
        self._register(self._gateway.channel, self._read_gateway)
        self._selector.register(self._detector, selectors.EVENT_READ, self._read_detector)
        if self._recovery is None:
            self._carry_out(self._machine.start(time.monotonic()))
        self._read_supervisor()  # what came together with the first message
        while not self._is_over:
            for key, _ in self._selector.select(self._timeout_s()):
                key.data()
            if self._recovery is not None and self._recovery.is_over(time.monotonic()):
                self._resume(self._recovery)
            deadline = self._next_deadline()
            if deadline is not None and time.monotonic() >= deadline and self._recovery is None:
                self._decide(events.Tick())
            self._flush()

    def _resume(self, recovery: Recovery) -> None:
        """All that can be known is known: decide from here on."""
        self._recovery = None
        found = recovery.found(self._ends)
        self._carry_out(self._machine.resume(time.monotonic(), found, recovery.epoch, self._start.is_serving))
        for end in self._ends:
            self._ends.dismiss_unknown_peers(end)
            if end.report is None and not end.is_lost:  # it may still load: is there a pulse?
                self._decide(self._detector.probe(end)(end.rank, end.incarnation))
        self._let_go_of_logs()
        self._decide(events.Tick())  # and whatever has happened in the meantime
        took_s = time.monotonic() - recovery.began_s
        log.warning("a new orchestrator: epoch %d, rebuilt in %.2f s", self._machine.epoch, took_s)
        self._log.append(
            OrchestratorRecovered(
                process="orchestrator",
                epoch=self._machine.epoch,
                num_reports=sum(process.has_reported for process in found),
                num_missing=recovery.num_missing,
                took_s=took_s,
            )
        )

    # -- events in -------------------------------------------------------------------------------

    def _read_supervisor(self) -> None:
        for message in self._supervisor.receive_all():
            if isinstance(message, AnchorAttached):
                self._drop_anchor()  # we may hear of the new one before the end of the old one
                anchor = Channel.of_fd(self._supervisor.take_fd())
                self._register(anchor, self._read_anchor)
                self._memory.attach(anchor)
            elif isinstance(message, WorkerStarted):
                self._on_started(message)
            elif isinstance(message, MemoryKept):
                self._on_kept(message.name, self._supervisor.take_fd())
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
                self._on_gateway_message(message)
        except ChannelClosed:
            self._selector.unregister(channel)
            self._gateway.channel = None

    def _on_gateway_message(self, message: AnyMessage) -> None:
        if isinstance(message, InjectFault):
            self._inject(message)
        elif isinstance(message, DrainWorker):
            self._drain(message)
        elif isinstance(message, LogSettled):
            self._logs.settle((message.rank, message.incarnation))
        elif isinstance(message, GatewayReport):
            self._logs_needed = message.logs
            if self._recovery is not None:
                self._recovery.heard_gateway(message.epoch, message.lost)
            else:
                self._decide(events.EpochReported(message.epoch))
                self._let_go_of_logs()
        else:
            raise AssertionError(f"the gateway does not send {type(message).__name__} to the orchestrator")

    def _let_go_of_logs(self) -> None:
        """What the gateway may have told the orchestrator before us, it does not tell again."""
        if self._logs_needed is not None:
            self._logs.settle_lost_but(self._logs_needed)

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
            self._connect(end)
        elif isinstance(message, Report):
            self._on_report(end, message)
        elif isinstance(message, Ready):
            end.has_said_ready = True
            self._maybe_ready(end)
        elif isinstance(message, Leaving):
            self._log.append(WorkerLeaving(process="orchestrator", rank=end.rank, incarnation=end.incarnation))
            self._decide(events.SaidLeaving(end.rank, end.incarnation))
        elif isinstance(message, Failed):
            self._decide(events.SaidFailed(end.rank, end.incarnation, message.reason, message.user_error))
        elif isinstance(message, Suspected):
            self._decide(events.Reported(message.rank, message.incarnation, by=end.rank, reason=message.reason))
        elif isinstance(message, ExpertReport):
            self._gateway.count_expert(end.rank, message.stats)
        else:
            raise AssertionError(f"a worker does not send {type(message).__name__} to the orchestrator")

    def _connect(self, end: WorkerEnd) -> None:
        """It lives, and hears us."""
        if not end.is_lost:
            self._detector.watch(end)
            self._ends.connect(end)
            self._logs.introduce(end, but=end.report.logs if end.report is not None else ())
        self._decide(events.SaidHello(end.rank, end.incarnation))

    def _on_report(self, end: WorkerEnd, report: Report) -> None:
        """A worker that was there before us."""
        end.report = report
        self._connect(end)
        end.has_said_ready = report.is_ready
        self._maybe_ready(end)
        if self._recovery is not None:
            self._recovery.heard(end.seat, report.epoch)
            return
        self._decide(events.EpochReported(report.epoch))
        self._ends.dismiss_unknown_peers(end)
        if report.is_leaving:
            self._decide(events.SaidLeaving(end.rank, end.incarnation))
        routes = self._machine.routes
        if routes is not None and Role.ATTENTION in end.roles:
            end.send(RoutesChanged(routes=routes))

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

    def _on_started(self, message: WorkerStarted) -> None:
        """A new process; or, while we recover, one that we are introduced to."""
        start, channel = message.start, Channel.of_fd(self._supervisor.take_fd())
        cell_fd, *memory = take_memory(self._supervisor, start)
        seat = (start.rank, start.incarnation)
        cell_fd = self._memory.hold(cell_name(seat), cell_fd)
        end = WorkerEnd(start.rank, start.incarnation, start.roles, message.pid, cell_fd, Cell(cell_fd), channel)
        end.is_lost = self._is_lost(seat)
        self._ends.add(end)
        for name, fd in zip(start.memory, memory, strict=True):
            if (log_id := log_of(name)) is not None:
                self._logs.add(log_id, fd)
            else:
                self._memory.hold(name, fd)
        if end.is_lost:
            self._logs.lose(seat)
        self._register(channel, lambda: self._read_worker(end))
        if self._recovery is not None:
            end.cell.ring_control()  # it may be in the middle of something: look at your lifeline
            self._detector.watch(end)
        self._decide(events.Started(start.rank, start.incarnation, message.pid))

    def _on_kept(self, name: str, fd: int) -> None:
        """Memory of a worker that had exited before we came."""
        if (log_id := log_of(name)) is None:
            self._memory.hold(name, fd)
        else:
            self._logs.add(log_id, fd)
            self._logs.lose(log_id)

    def _is_lost(self, seat: Seat) -> bool:
        """Whether it was given up before it came to be. While we recover nobody is."""
        if self._recovery is not None:
            return False
        worker = next(worker for worker in self._machine.members.workers if worker.rank == seat[0])
        return worker.incarnation != seat[1] or worker.state is WorkerState.GONE

    def _on_exited(self, message: WorkerExited) -> None:
        self._read_last_words(message.rank, message.incarnation)
        if self._recovery is not None:
            self._recovery.ended((message.rank, message.incarnation))
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
        if self._is_deciding or self._recovery is not None:
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
            self._provision((effect.rank, effect.incarnation))
        elif isinstance(effect, effects.AskToLeave):
            end = self._ends.get(effect.rank, effect.incarnation)
            if end is not None:
                end.send(Leave())
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
        seat = (effect.rank, effect.incarnation)
        if effect.cause == "left":
            self._log.append(WorkerLeft(process="orchestrator", rank=effect.rank, incarnation=effect.incarnation))
        elif not effect.is_expected:
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
        end = self._ends.get(*seat)
        if end is not None:
            self._ends.part(end)
            end.send(Fenced(reason=effect.reason))
        if self._logs.has(seat):
            self._logs.lose(seat)
        elif end is None:  # its memory is still being allocated, or its process is just being born
            for name in (cell_name(seat), kv_name(seat), log_name(seat)):
                self._memory.release(name)

    def _give_up(self, effect: effects.GiveUp) -> None:
        self._supervisor.send(Failed(reason=effect.reason, user_error=effect.user_error))
        self._is_over = True

    def _shut_down(self, message: Shutdown) -> None:
        self._decide(events.Stopping())
        for end in self._ends:
            end.send(message)
        self._is_over = True

    # -- starting workers ------------------------------------------------------------------------

    def _provision(self, seat: Seat) -> None:
        """One piece of memory after the other is asked for; when the last one is there, the worker is started."""
        if self._is_lost(seat):
            return  # it was given up while its memory was being allocated
        for needed in self._design.memory_of(seat):
            if self._memory.held(needed.name) is None:
                self._ask_for(seat, needed)
                return
        self._start_worker(seat)

    def _ask_for(self, seat: Seat, needed: NeededMemory) -> None:
        def go_on(fd: int) -> None:
            self._memory.hold(needed.name, os.dup(fd))
            self._provision(seat)

        of_log = [each.name for each in self._design.memory_of(seat) if each.name in (kv_name(seat), log_name(seat))]
        if needed.name in of_log[:1] and (inherited := self._inherited_log(seat[0])):
            for name, fd in zip(of_log, inherited, strict=True):  # all of it, or nothing
                self._memory.hold(name, os.dup(fd))
            self._provision(seat)
            return
        self._memory.allocate(
            needed.name,
            needed.num_bytes,
            then=go_on,
            otherwise=lambda reason: self._lack_memory(seat, kind_of(needed.name), reason),
            device=needed.device,
        )

    def _lack_memory(self, seat: Seat, kind: str, reason: str) -> None:
        """As if the worker had found out itself: a start ends with this line, and who serves already is replaced."""
        self._decide(events.SaidFailed(*seat, lack(seat[0], kind, reason), user_error=True))

    def _inherited_log(self, rank: Rank) -> tuple[int, ...]:
        """With `--kv-log anchor` the predecessor's KV is adopted where it lies, if nobody can write to it any more."""
        log_id = self._logs.last_of(rank)
        if self._design.settings.kv_log != "anchor" or log_id is None:
            return ()
        end = self._ends.get(*log_id)
        is_dead = end is None or end.cell.is_dead(ORCHESTRATOR_WORD)
        return self._logs.descriptors(log_id) if is_dead else ()

    def _start_worker(self, seat: Seat) -> None:
        """The new worker's memory is there."""
        start, (rank, incarnation) = self._start, seat
        roles = self._design.roles_of(rank)
        names = [needed.name for needed in self._design.memory_of(seat)]
        memory = [fd for name in names if (fd := self._memory.held(name)) is not None]
        worker = StartWorker(
            rank=rank,
            incarnation=incarnation,
            roles=roles,
            settings=self._design.settings,
            num_workers=start.num_attention + start.num_expert,
            slots=self._design.slots_of(rank),
            detect_ms=start.detect_ms,
            memory=tuple(names[1:]),
            device_index=max(self._design.device_of(rank), 0),
            num_attention=self._design.num_attention,
            lane_slots=self._design.lane_slots,
        )
        self._supervisor.send(Provision(start=worker), fds=memory)
        self._log.append(WorkerProvisioned(process="orchestrator", rank=rank, incarnation=incarnation, roles=roles))

    def _drain(self, message: DrainWorker) -> None:
        """An operator wants a worker to leave."""
        if self._recovery is not None:
            reason, asked = "the orchestrator has just been restarted; try again", []
        else:
            decision = self._machine.handle(events.DrainAsked(message.rank), time.monotonic())
            self._carry_out(decision)
            reason, asked = decision.reason, [e for e in decision.effects if isinstance(e, effects.AskToLeave)]
        incarnation = asked[0].incarnation if asked else Incarnation(0)
        self._gateway.send(DrainAnswered(id=message.id, incarnation=incarnation, reason=reason))

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
        end = self._faults.pop(message.id, None)
        if end is None:
            return  # asked by the orchestrator before us
        self._gateway.send(
            FaultInjected(id=message.id, pid=message.pid, incarnation=end.incarnation, reason=message.reason)
        )

    # -- plumbing --------------------------------------------------------------------------------

    def _register(self, channel: Channel, read: Callable[[], None]) -> None:
        self._selector.register(channel, selectors.EVENT_READ, read)

    def _flush(self) -> None:
        self._gateway.flush(self._machine.tables() if self._recovery is None else None)
        for channel in (self._supervisor, self._memory.anchor):
            if channel is not None:
                channel.flush()
        for end in self._ends:
            end.flush()

    def _timeout_s(self) -> float:
        deadline = self._next_deadline()
        return 0.5 if deadline is None else min(0.5, max(0.0, deadline - time.monotonic()))

    def _next_deadline(self) -> float | None:
        return self._recovery.deadline if self._recovery is not None else self._machine.next_deadline()
