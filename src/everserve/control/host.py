"""The process around the machine: messages become events, decisions become messages.

    a message, a death, a silence  ->  event  ->  machine.handle(event, now)  ->  effects  ->  messages

All decisions are in machine.py. Slow or remote work is requested here, and its result comes back as another event.

If there was an orchestrator before, the host starts with a recovery (recovery.py): the supervisor sends a channel to
each existing worker, the workers report their state, and only then does the machine resume. Events wait until then.
"""

import logging
import selectors
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import assert_never

from everserve.control import effects, events
from everserve.control.anchor_client import AnchorClient
from everserve.control.design import capacity_of, describe, first_goal, lost_expert_policy, max_fills
from everserve.control.detector import Detector
from everserve.control.experts_view import ExpertsView
from everserve.control.health_sources import HealthInbox, HealthSource
from everserve.control.log_references import Logs
from everserve.control.machine import Machine, Policy
from everserve.control.needs import Needs
from everserve.control.nvml import NvmlSource
from everserve.control.provisioning import Births
from everserve.control.recovery import Recovery
from everserve.control.repairs import Repairs
from everserve.control.scaling import size_of
from everserve.control.slowness import SlowPolicy, Standing
from everserve.control.survivals_view import SurvivalsView
from everserve.control.to_gateway import GatewayEnd
from everserve.control.weights_sources import WeightsSources
from everserve.control.worker_ends import WorkerEnd, WorkerEnds
from everserve.model.config import ModelConfig
from everserve.plan.balance import BalancePolicy
from everserve.plan.evacuation import reason_of
from everserve.plan.health import Judge
from everserve.tables.health import Diagnosis, Level
from everserve.tables.ids import Incarnation, Rank, Role, WorkerId
from everserve.tables.memory import seat_owner
from everserve.wire.channel import RETRY_S, Channel, ChannelClosed, Descriptors
from everserve.wire.events import (
    BalanceDecided,
    DeviceHealthEvent,
    DeviceLostEvent,
    DeviceReturnedEvent,
    EpochPublished,
    EventLog,
    ExpertsMasked,
    ExpertsMoved,
    FaultDetected,
    FaultInjectedEvent,
    MaskLifted,
    OrchestratorRecovered,
    ScaleBegan,
    ScaleDone,
    StaleDropped,
    SwitchBegan,
    SwitchDone,
    WorkerBackedOff,
    WorkerLeaving,
    WorkerLeft,
    WorkerProvisioned,
    WorkerRecovered,
    WorkerSlow,
)
from everserve.wire.messages import (
    AnchorAttached,
    AnyMessage,
    DeviceAnswered,
    DrainAnswered,
    DrainWorker,
    DropMemory,
    EventHappened,
    ExpertReport,
    Failed,
    FaultInjected,
    Fenced,
    FillSlots,
    GatewayReport,
    Hang,
    HealthAnswered,
    Hello,
    InjectFault,
    KeepGoal,
    Leave,
    Leaving,
    LoadReported,
    LogSettled,
    LoseDevice,
    MemoryKept,
    PaceReported,
    Ready,
    Report,
    ReturnDevice,
    RoutesChanged,
    RoutesUsed,
    SayHealth,
    ScaleAnswered,
    ScaleCluster,
    Shutdown,
    Signalled,
    SignalWorker,
    SlotsReported,
    StartOrchestrator,
    StreamsReported,
    Suspected,
    SwitchAnswered,
    SwitchWorker,
    WorkerExited,
    WorkerStarted,
)

log = logging.getLogger(__name__)

_NO_DETECTION_MS = 1000.0  # with --detect-ms 0 silence is not detected; the machine's other timeouts need a value


_ASKED = DrainWorker | LoseDevice | ReturnDevice | ScaleCluster | SwitchWorker | SayHealth  # by operators


class Host:
    """One instance's orchestrator, from start to end."""

    def __init__(self, start: StartOrchestrator, supervisor: Channel, gateway: Channel) -> None:
        self._began_s = time.monotonic()
        model = ModelConfig.from_source(start.worker.model)
        detect_ms = start.cluster.detect_ms
        first = first_goal(start, model)  # the capacity is that of the start, whatever the goal has become
        goal = start.goal or first
        capacity = capacity_of(start, model, first)
        needs = Needs(model, start.worker, capacity, detect_ms)
        # Where KV lies with the heads, to route around a worker is to compute it again: slowness is only shown.
        slow = SlowPolicy(factor=0.0 if model.divides_heads else start.cluster.slow_factor)
        policy = Policy(detect_s=(detect_ms or _NO_DETECTION_MS) / 1e3, max_fills=max_fills(model), slow=slow)
        if model.divides_heads:  # all streams wait for the KV that a stopped process could still write to
            policy = replace(policy, fence_grace_s=0.0)
        self._needs = needs
        balance = BalancePolicy.of(model) if start.cluster.enable_eplb else None
        self._machine = Machine(goal, policy, capacity, balance, lost_expert_policy(start.cluster, model))
        self._recovery = Recovery(start.found, self._began_s) if start.found is not None else None
        self._was_serving = start.is_serving
        self._undecided: deque[events.AnyEvent] = deque()
        self._asked_early: deque[AnyMessage] = deque()  # by operators, during the recovery
        self._is_deciding = False
        self.is_over = False

        self._selector = selectors.DefaultSelector()
        self._supervisor = supervisor
        self._gateway = GatewayEnd(gateway)
        self._experts_view = ExpertsView(self._gateway)
        self._survivals_view = SurvivalsView(self._gateway, capacity, start.worker.log.mode)
        self._event_log = EventLog("orchestrator", start.worker.event_log, self._gateway.tell)
        self._anchor = AnchorClient()
        self._ends = WorkerEnds(self._anchor, needs, lambda: self._machine.goal, self._tell)
        self._logs = Logs(self._anchor, self._ends, supervisor)
        self._logs_needed: Sequence[WorkerId] | None = None  # by streams, as the gateway reported during the recovery
        self._weights = WeightsSources(self._anchor, self._ends, supervisor, needs, lambda: self._machine.goal)
        self._births = Births(needs, self._anchor, self._ends, self._logs, self._weights, supervisor, self._tell)
        self._detector = Detector(detect_ms)
        self._victims: dict[str, Incarnation] = {}  # targets of injected faults that are not confirmed yet
        self._repairs = Repairs(self._machine)
        self._health_inbox = HealthInbox()
        self._judge = Judge(goal.health)
        self._start_health_sources(start)
        if goal.placement is not None and self._recovery is None:
            self._event_log.append(describe(goal, goal.placement, capacity))
            needs.describe_backup()

    def run(self) -> None:
        """Until the supervisor sends Shutdown, or its channel ends (ChannelClosed)."""
        self.begin()
        while not self.is_over:
            self.turn(self._timeout_s())

    def begin(self) -> None:
        """Start, or wait for reports."""
        assert self._gateway.channel is not None
        self._selector.register(self._supervisor, selectors.EVENT_READ, self._read_supervisor)
        self._selector.register(self._gateway.channel, selectors.EVENT_READ, self._read_gateway)
        self._selector.register(self._detector, selectors.EVENT_READ, self._read_detector)
        self._selector.register(self._health_inbox, selectors.EVENT_READ, self._read_health)
        if self._recovery is None:
            self._decide(self._machine.start)
        self._read_supervisor()  # messages that came together with the first one

    def turn(self, timeout_s: float) -> None:
        """One turn of the loop: wait for input, handle it, run what is due, flush."""
        for key, _ in self._selector.select(timeout_s):
            key.data()
        self._tick()
        self._flush()

    # -- events and decisions --------------------------------------------------------------------

    def _tell(self, event: events.AnyEvent) -> None:
        """Queue an event. Events raised by an effect are decided after all effects of the current decision."""
        self._undecided.append(event)
        if self._recovery is not None:
            self._recovery.note(event)
        elif not self._is_deciding:
            self._decide_waiting()

    def _decide(self, decide: Callable[[float], effects.Decision]) -> effects.Decision:
        """Make one decision and carry it out before the next; then decide the events that its effects have raised."""
        assert not self._is_deciding, "an effect must queue its event with _tell"
        self._is_deciding = True
        decision = decide(time.monotonic())
        self._carry_out(decision)
        self._is_deciding = False
        self._decide_waiting()
        return decision

    def _decide_waiting(self) -> None:
        self._is_deciding = True
        while self._undecided:
            event = self._undecided.popleft()
            self._carry_out(self._machine.handle(event, time.monotonic()), event)
        self._is_deciding = False

    def _tick(self) -> None:
        """Handle what is due: the end of a recovery, or a deadline of the machine."""
        now = time.monotonic()
        recovery, deadline = self._recovery, self._machine.next_deadline()
        if recovery is not None:
            if recovery.is_over(now):
                self._recovery = None
                was_serving = self._was_serving
                self._decide(lambda now: self._machine.resume(now, recovery.found(), recovery.epoch, was_serving))
                while self._asked_early:
                    self._on_gateway_message(self._asked_early.popleft())
        elif deadline is not None and now >= deadline:
            self._tell(events.Tick())

    # -- the supervisor --------------------------------------------------------------------------

    def _read_supervisor(self) -> None:
        for message, fds in self._supervisor.receive_frames():
            if isinstance(message, AnchorAttached):
                self._drop_anchor()  # the new anchor may be announced before the old channel ends
                (anchor_fd,) = fds.take()
                anchor = Channel.of_fd(anchor_fd)
                self._selector.register(anchor, selectors.EVENT_READ, self._read_anchor)
                self._anchor.attach(anchor)
            elif isinstance(message, WorkerStarted):
                self._on_started(message, fds)
            elif isinstance(message, MemoryKept):
                (memory_fd,) = fds.take()
                self._births.take_in_memory(message.memory, memory_fd)
            elif isinstance(message, WorkerExited):
                self._on_exited(message)
            elif isinstance(message, Signalled):
                self._on_signalled(message)
            elif isinstance(message, Shutdown):
                self._tell(events.Stopping())
                for end in self._ends:
                    end.send(message)
                self.is_over = True
            else:
                raise AssertionError(f"the supervisor does not send {type(message).__name__}")

    def _on_started(self, message: WorkerStarted, fds: Descriptors) -> None:
        """A new process; or, during a recovery, an existing one."""
        worker = WorkerId(message.start.rank, message.start.incarnation)
        is_lost = self._recovery is None and not self._machine.counts(worker)
        end = self._births.take_in(message, fds.take(), is_lost)
        assert end.control is not None
        self._selector.register(end.control, selectors.EVENT_READ, lambda: self._read_worker(end))
        if self._recovery is not None:
            end.cell.ring_control()  # it may be in the middle of a layer: makes it read its lifeline
            self._detector.watch(end)
        self._tell(events.Started(end.rank, end.incarnation, end.pid))

    def _on_exited(self, message: WorkerExited) -> None:
        worker = WorkerId(message.rank, message.incarnation)
        self._read_pending(worker)
        self._tell(events.Exited(worker.rank, worker.incarnation, message.exit_status))
        end = self._ends.get(worker)
        if end is not None:
            if end.control is not None:
                self._selector.unregister(end.control)
            self._detector.unwatch(end)
            self._ends.forget(end)

    # -- workers ---------------------------------------------------------------------------------

    def _read_worker(self, end: WorkerEnd) -> None:
        if end.control is None:
            return  # its exit was handled earlier in the same turn
        try:
            for message in end.control.receive_all():
                self._on_worker_message(end, message)
        except ChannelClosed:
            self._selector.unregister(end.control)
            end.control.close()
            end.control = None
            self._tell(events.ChannelEnded(end.rank, end.incarnation))

    def _read_pending(self, worker: WorkerId) -> None:
        """Read its pending messages before its death is handled: its own Failed explains more than its exit status."""
        end = self._ends.get(worker)
        if end is not None:
            self._read_worker(end)

    def _on_worker_message(self, end: WorkerEnd, message: AnyMessage) -> None:
        rank, incarnation = end.id
        if end.is_lost:
            self._on_stale(end, message)
        elif isinstance(message, EventHappened):
            self._gateway.tell(message.event)
        elif isinstance(message, Hello):
            self._connect(end)
        elif isinstance(message, Report):
            self._on_report(end, message)
        elif isinstance(message, SlotsReported):
            self._tell(events.SaidHolds(rank, incarnation, message.slots, tuple(message.failed), message.num_left))
            self._record_moves(end, message)
        elif isinstance(message, Ready):
            self._ends.say_ready(end)
        elif isinstance(message, RoutesUsed):
            self._tell(events.SaidUses(rank, incarnation, message.epoch))
        elif isinstance(message, Leaving):
            self._event_log.append(WorkerLeaving(process="orchestrator", rank=rank, incarnation=incarnation))
            self._tell(events.SaidLeaving(rank, incarnation))
        elif isinstance(message, Failed):
            self._tell(events.SaidFailed(rank, incarnation, message.reason, message.user_error))
        elif isinstance(message, Suspected):
            self._tell(events.Suspected(message.rank, message.incarnation, by=rank, reason=message.reason))
        elif isinstance(message, LoadReported):
            self._tell(events.SaidLoads(rank, incarnation, message.rows))
        elif isinstance(message, PaceReported):
            self._tell(events.SaidPace(rank, incarnation, message.own, tuple(message.peers)))
            self._gateway.count_slowness(self._machine.slowness)
        elif isinstance(message, ExpertReport):
            self._gateway.count_expert(rank, message.stats)
        else:
            raise AssertionError(f"a worker does not send {type(message).__name__} to the orchestrator")

    def _connect(self, end: WorkerEnd) -> None:
        """The worker is alive and reads its channel."""
        self._detector.watch(end)
        self._ends.connect(end)
        self._logs.introduce(end, but=end.report.logs if end.report is not None else ())
        self._weights.introduce(end)
        self._tell(events.SaidHello(end.rank, end.incarnation))

    def _on_report(self, end: WorkerEnd, report: Report) -> None:
        """A worker that was started before this orchestrator."""
        end.report = report
        self._connect(end)
        self._tell(events.SaidReport(end.rank, end.incarnation, report.epoch, report.is_leaving, report.slots))
        if report.is_ready:
            self._ends.say_ready(end)
        if self._recovery is None:
            self._ends.dismiss_unknown_peers(end)
            self._send_routes([end], self._machine.tables())

    def _on_stale(self, end: WorkerEnd, message: AnyMessage) -> None:
        """A worker that was declared gone still sends: its messages are counted. Its events are forwarded all the same,
        and its Failed may explain why its successors will fail too. Everything else is dropped, such as its suspicions
        and its counters: it is no longer part of the cluster."""
        event = message.event if isinstance(message, EventHappened) else None
        self._gateway.count_stale(event.count if isinstance(event, StaleDropped) else 1)
        if event is not None:
            self._gateway.tell(event)
        elif isinstance(message, Failed):
            self._tell(events.SaidFailed(end.rank, end.incarnation, message.reason, message.user_error))

    # -- the gateway, and operators' requests through it -----------------------------------------

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
        elif self._recovery is not None and isinstance(message, _ASKED):
            self._asked_early.append(message)
        elif isinstance(message, DrainWorker):
            self._drain(message)
        elif isinstance(message, ScaleCluster):
            self._scale(message)
        elif isinstance(message, SwitchWorker):
            self._switch(message)
        elif isinstance(message, StreamsReported):
            self._tell(events.StreamsCounted(message.loads))
        elif isinstance(message, LoseDevice | ReturnDevice):
            self._change_device(message)
        elif isinstance(message, SayHealth):
            self._say_health(message)
        elif isinstance(message, LogSettled):
            self._logs.settle(WorkerId(message.rank, message.incarnation))
        elif isinstance(message, GatewayReport):
            self._tell(events.GatewayReported(message.epoch, tuple(message.lost)))
            if self._recovery is not None:
                self._logs_needed = message.logs
            else:
                self._logs.settle_lost_but(message.logs)
        else:
            raise AssertionError(f"the gateway does not send {type(message).__name__} to the orchestrator")

    def _drain(self, message: DrainWorker) -> None:
        """An operator wants a worker to leave. The machine decides whether it is asked to."""
        decision = self._decide(lambda now: self._machine.handle(events.DrainAsked(message.rank), now))
        asked = [effect for effect in decision.effects if isinstance(effect, effects.AskToLeave)]
        incarnation = asked[0].incarnation if asked else Incarnation(0)
        self._gateway.send(DrainAnswered(id=message.id, incarnation=incarnation, reason=decision.reason))

    def _change_device(self, message: LoseDevice | ReturnDevice) -> None:
        """An operator takes a device away, or gives it back. Answered when the supervisor has been told: it stays so,
        whatever happens to this process."""
        device, goal = message.device, self._machine.goal
        on_it = [worker.rank for worker in self._machine.members.workers if worker.device == device]
        is_gone = device in goal.gone
        reason = ""
        if not on_it and not is_gone:
            reason = f"there is no device {device}"
        elif isinstance(message, ReturnDevice) and goal.level(device):
            reason = self._return_healthy(device)
        elif is_gone == isinstance(message, LoseDevice):
            reason = f"device {device} is {'gone already' if is_gone else 'not gone'}"
        elif isinstance(message, LoseDevice):
            lost = DeviceLostEvent(process="orchestrator", device=device, gone=message.gone, ranks=[*on_it])
            self._event_log.append(lost)
            self._tell(events.DeviceLost(device, message.gone))
        else:
            self._event_log.append(DeviceReturnedEvent(process="orchestrator", device=device, ranks=[*on_it]))
            self._tell(events.DeviceReturned(device))
        self._gateway.send(DeviceAnswered(id=message.id, ranks=[] if reason else on_it, reason=reason))

    def _return_healthy(self, device: int) -> str:
        """A device that is not used because of its health. Returns why it is not used now either."""
        self._judge.forget(device)
        self._decide(lambda now: self._machine.handle(events.DeviceReturned(device), now))
        goal = self._machine.goal
        if device not in goal.absent:
            return ""
        return f"device {device} still has health level {goal.level(device).value}: {reason_of(goal, device)}"

    def _say_health(self, message: SayHealth) -> None:
        """An operator says how healthy a device is."""
        diagnosis = Diagnosis(device=message.device, level=message.level, reason=message.reason)
        if diagnosis.level is Level.HEALTHY:
            self._judge.forget(message.device)
        decision = self._decide(lambda now: self._machine.handle(events.HealthSaid(diagnosis), now))
        goal = self._machine.goal
        if all(seat.device != message.device for seat in goal.seats):
            self._gateway.send(HealthAnswered(id=message.id, refused=decision.reason))
            return
        level, reason = goal.level(message.device), reason_of(goal, message.device)
        self._gateway.send(HealthAnswered(id=message.id, level=level, reason=reason, done=decision.reason))

    def _scale(self, message: ScaleCluster) -> None:
        """An operator wants more or fewer workers. The machine decides whether that is possible."""
        asked = events.ScaleAsked(message.attention, message.expert, message.devices)
        decision = self._decide(lambda now: self._machine.handle(asked, now))
        began = next((effect for effect in decision.effects if isinstance(effect, effects.BeginScaling)), None)
        if began is None:
            self._gateway.send(ScaleAnswered(id=message.id, refused=decision.reason))
            return
        size = size_of(self._machine.goal)._asdict()
        self._gateway.send(ScaleAnswered(id=message.id, **size, added=[*began.added], retired=[*began.retired]))

    def _switch(self, message: SwitchWorker) -> None:
        """An operator wants a worker to have another role. The machine decides whether that is possible."""
        asked = events.SwitchAsked(message.rank, message.role)
        decision = self._decide(lambda now: self._machine.handle(asked, now))
        is_begun = any(isinstance(effect, effects.BeginSwitch) for effect in decision.effects)
        self._gateway.send(SwitchAnswered(id=message.id, refused="" if is_begun else decision.reason))

    def _inject(self, message: InjectFault) -> None:
        """Have the supervisor signal a worker: only the supervisor can target exactly one incarnation, by its pid."""
        ends = [end for end in self._ends if end.rank == message.rank and end.pid]
        if not ends:
            reason = f"worker {message.rank} has no process at the moment"
            self._gateway.send(FaultInjected(id=message.id, pid=None, incarnation=Incarnation(0), reason=reason))
            return
        # A seat may have two processes for a while: a fenced one and its successor. CONT is for the stopped one.
        oldest_first = sorted(ends, key=lambda end: end.incarnation)
        end = oldest_first[0] if message.signal == signal.SIGCONT else oldest_first[-1]
        if message.signal is None:
            end.send(Hang())
            answer = FaultInjected(id=message.id, pid=end.pid, incarnation=end.incarnation, reason="")
            self._gateway.send(answer)
        else:
            self._victims[message.id] = end.incarnation
            order = SignalWorker(rank=end.rank, incarnation=end.incarnation, signal=message.signal, id=message.id)
            self._supervisor.send(order)
        self._event_log.append(
            FaultInjectedEvent(
                process="orchestrator",
                rank=end.rank,
                incarnation=end.incarnation,
                victim_pid=end.pid,
                signal="HANG" if message.signal is None else signal.Signals(message.signal).name.removeprefix("SIG"),
            )
        )

    def _on_signalled(self, message: Signalled) -> None:
        """The supervisor reports which process got the signal."""
        incarnation = self._victims.pop(message.id, None)
        if incarnation is not None:  # else the previous orchestrator had ordered it
            answer = FaultInjected(id=message.id, pid=message.pid, incarnation=incarnation, reason=message.reason)
            self._gateway.send(answer)

    # -- anchor, detector ------------------------------------------------------------------------

    def _read_anchor(self) -> None:
        if self._anchor.channel is None:
            return
        try:
            self._anchor.read()
        except ChannelClosed:
            self._drop_anchor()

    def _drop_anchor(self) -> None:
        if self._anchor.channel is not None:
            self._selector.unregister(self._anchor.channel)
            self._anchor.detach()

    def _read_detector(self) -> None:
        for rank, incarnation, found in self._detector.changes():
            self._read_pending(WorkerId(rank, incarnation))
            self._tell(found(rank, incarnation))

    # -- health ----------------------------------------------------------------------------------

    def _start_health_sources(self, start: StartOrchestrator) -> None:
        """Their threads end with this process."""
        if start.cluster.health_source:
            HealthSource(start.cluster.health_source, self._health_inbox).start()
        if start.gpus:
            NvmlSource(start.gpus, self._devices_on, self._health_inbox.post).start()

    def _devices_on(self, gpu: int) -> list[int]:
        """The device that a GPU is, or those that have a share of it."""
        return sorted({seat.device for seat in self._machine.goal.seats if seat.gpu == gpu})

    def _read_health(self) -> None:
        for seen in self._health_inbox.take():
            for diagnosis in self._judge.note(seen, time.monotonic()):
                self._tell(events.HealthSaid(diagnosis))
        self._gateway.count_health_troubles(self._health_inbox.num_troubles)

    def _note_level(self, effect: effects.LevelChanged) -> None:
        health = effect.health
        log.warning("device %d has health level %d (%s): %s", health.device, health.level, health.reason, effect.done)
        self._event_log.append(
            DeviceHealthEvent(
                process="orchestrator",
                device=health.device,
                level=health.level,
                before=effect.before,
                reason=health.reason,
                done=effect.done,
            )
        )

    # -- effects ---------------------------------------------------------------------------------

    def _carry_out(self, decision: effects.Decision, event: events.AnyEvent | None = None) -> None:
        for effect in decision.effects:
            self._do(effect, decision.reason)
        for phase in self._repairs.note(event, decision, time.monotonic()):
            self._event_log.append(phase)

    def _do(self, effect: effects.AnyEffect, reason: str) -> None:
        match effect:
            case effects.Keep():
                self._supervisor.send(KeepGoal(goal=effect.goal))
            case effects.Lost():
                self._lose(effect)
            case effects.Publish():
                self._publish(effect, reason)
            case effects.Show():
                self._gateway.note_change()
            case effects.FillSlots():
                end = self._ends.get(WorkerId(effect.rank, effect.incarnation))
                if end is not None:
                    end.send(FillSlots(fills=list(effect.fills)))
                    self._gateway.note_change()
            case effects.BalanceDecided():
                self._note_balance(effect)
            case effects.LevelChanged():
                self._note_level(effect)
            case effects.SlownessDecided():
                self._note_slowness(effect)
            case effects.DropDevice():
                self._drop_device(effect.device)
            case effects.Provision():
                self._provision(WorkerId(effect.rank, effect.incarnation))
            case effects.BackOff():
                self._back_off(effect)
            case effects.Probe():
                end = self._ends.get(WorkerId(effect.rank, effect.incarnation))
                if end is not None:
                    self._read_pending(end.id)  # it may have said that it leaves, and a peer saw its end first
                    self._tell(self._detector.probe(end)(effect.rank, effect.incarnation))
            case effects.Kill():
                kill = SignalWorker(rank=effect.rank, incarnation=effect.incarnation, signal=signal.SIGKILL, id=None)
                self._supervisor.send(kill)
            case effects.AskToLeave():
                end = self._ends.get(WorkerId(effect.rank, effect.incarnation))
                if end is not None:
                    end.send(Leave())
            case effects.Retire():
                self._retire(effect.rank)
            case effects.BeginScaling() | effects.EndScaling():
                self._note_scaling(effect)
            case effects.BeginSwitch() | effects.EndSwitch():
                self._note_switch(effect)
            case effects.ChangeRole():
                self._change_role(effect.rank)
            case effects.ChangeMask():
                self._note_mask(effect)
            case effects.Resumed():
                self._note_resumed(effect)
            case effects.AllReady():
                self._supervisor.send(Ready())
            case effects.GiveUp():
                self._supervisor.send(Failed(reason=effect.reason, user_error=effect.user_error))
                self.is_over = True
            case _:
                assert_never(effect)

    def _provision(self, worker: WorkerId) -> None:
        start = self._births.provision(worker, self._machine.goal)
        provisioned = WorkerProvisioned(
            process="orchestrator", rank=worker.rank, incarnation=worker.incarnation, roles=start.roles
        )
        self._event_log.append(provisioned)

    def _publish(self, effect: effects.Publish, reason: str) -> None:
        epoch = effect.members.epoch
        log.info("epoch %d: %s", epoch, reason)
        published = EpochPublished(process="orchestrator", epoch=epoch, reason=reason, violations=effect.violations)
        self._event_log.append(published)
        self._send_routes(self._ends, effect)
        self._gateway.tell_cluster(effect, self._machine.moves)

    def _send_routes(self, ends: Sequence[WorkerEnd] | WorkerEnds, tables: effects.Publish) -> None:
        for end in ends if tables.routes is not None else ():
            if tables.routes is not None and Role.ATTENTION in end.roles and end.is_connected:
                end.send(RoutesChanged(routes=tables.routes))

    def _lose(self, effect: effects.Lost) -> None:
        """Fence it: notify all processes that know it; its messages are only counted from now on."""
        self._record_loss(effect)
        self._gateway.tell_lost(effect)
        worker = WorkerId(effect.rank, effect.incarnation)
        end = self._ends.get(worker)
        if end is not None:
            self._ends.part(end)
            end.send(Fenced(reason=effect.reason))
        if self._logs.has(worker):
            self._logs.lose(worker)
        elif end is None:
            self._births.call_off(worker)

    def _retire(self, rank: Rank) -> None:
        for owner in self._needs.seat_owners(self._machine.goal, rank):
            self._weights.retire(owner.rank)
            for memory in self._anchor.held_by(owner):
                self._anchor.release(memory)
                self._supervisor.send(DropMemory(memory=memory))

    def _change_role(self, rank: Rank) -> None:
        """What the seat had in its earlier role is not needed any more, nor what seats shared with it; workers that
        still use it keep it mapped."""
        goal = self._machine.goal
        self._weights.retire(rank)
        needed = {piece for seat in goal.seats for piece in self._needs.memory(goal, seat_owner(seat.rank))}
        for owner in [seat_owner(seat.rank) for seat in goal.seats]:
            for memory in self._anchor.held_by(owner):
                if memory not in needed:
                    self._anchor.release(memory)
                    self._supervisor.send(DropMemory(memory=memory))

    def _note_switch(self, effect: effects.BeginSwitch | effects.EndSwitch) -> None:
        if isinstance(effect, effects.BeginSwitch):
            log.info("%s", effect.reason)
            began = SwitchBegan(process="orchestrator", rank=effect.rank, role=effect.role, reason=effect.reason)
            self._event_log.append(began)
            return
        took_s = time.monotonic() - effect.began_s
        log.info("rank %d is ready as %s worker, %.2f s after that was decided", effect.rank, effect.role, took_s)
        self._event_log.append(SwitchDone(process="orchestrator", rank=effect.rank, role=effect.role, took_s=took_s))

    def _note_mask(self, effect: effects.ChangeMask) -> None:
        placement, mask = self._machine.goal.placement, effect.mask
        if not mask.experts or placement is None:
            log.warning("the mask is lifted: %s", effect.reason)
            self._event_log.append(MaskLifted(process="orchestrator", reason=effect.reason))
            return
        experts = [(placement.moe_layers[layer], expert) for layer, expert in mask.experts]
        log.warning("%s", effect.reason)
        self._event_log.append(
            ExpertsMasked(process="orchestrator", mask_id=mask.id, experts=experts, reason=effect.reason)
        )

    def _note_scaling(self, effect: effects.BeginScaling | effects.EndScaling) -> None:
        size, goal = size_of(self._machine.goal), self._machine.goal
        if isinstance(effect, effects.BeginScaling):
            log.info("scaling to %s", size)
            began = ScaleBegan(process="orchestrator", **size._asdict(), added=effect.added, retired=effect.retired)
            self._event_log.append(began)
            return
        took_s = time.monotonic() - effect.began_s
        log.info("scaled to %s in %.2f s", size, took_s)
        self._event_log.append(ScaleDone(process="orchestrator", **size._asdict(), took_s=took_s))
        if goal.placement is not None:
            self._event_log.append(describe(goal, goal.placement, self._needs.capacity))

    def _drop_device(self, device: int) -> None:
        """Nothing that was kept in its memory is there any more, also not for a new orchestrator."""
        self._logs.lose_device(device)
        self._weights.drop(device)
        for memory in self._anchor.on_device(device):
            self._anchor.release(memory)
            self._supervisor.send(DropMemory(memory=memory))

    def _record_moves(self, end: WorkerEnd, message: SlotsReported) -> None:
        for source in sorted({filled.source for filled in message.filled}):
            moved = [filled for filled in message.filled if filled.source is source]
            self._event_log.append(
                ExpertsMoved(
                    process="orchestrator",
                    rank=end.rank,
                    source=source,
                    num_experts=len(moved),
                    num_bytes=sum(filled.num_bytes for filled in moved),
                    took_s=sum(filled.seconds for filled in moved),
                )
            )
        for failed in message.failed:
            log.warning("worker %d could not load expert %d: %s", end.rank, failed.expert, failed.reason)

    def _record_loss(self, effect: effects.Lost) -> None:
        if effect.cause == "left":
            left = WorkerLeft(process="orchestrator", rank=effect.rank, incarnation=effect.incarnation)
            self._event_log.append(left)
        elif not effect.is_expected:
            log.warning("worker %d is gone: %s", effect.rank, effect.reason)
            self._event_log.append(
                FaultDetected(
                    process="orchestrator",
                    rank=effect.rank,
                    incarnation=effect.incarnation,
                    roles=effect.roles,
                    cause=effect.cause,
                    reason=effect.reason,
                )
            )

    def _back_off(self, effect: effects.BackOff) -> None:
        rank, num_crashes, delay_s = effect.rank, effect.num_crashes, effect.delay_s
        log.warning("worker %d ended %d times while starting; next start in %.1f s", rank, num_crashes, delay_s)
        waits = WorkerBackedOff(process="orchestrator", rank=rank, num_crashes=num_crashes, delay_s=delay_s)
        self._event_log.append(waits)

    def _note_balance(self, effect: effects.BalanceDecided) -> None:
        log.info("balance: %s", effect.reason)
        self._event_log.append(
            BalanceDecided(
                process="orchestrator",
                is_accepted=effect.is_accepted,
                reason=effect.reason,
                max_over_mean=effect.max_over_mean,
                expected=effect.expected,
                num_moves=effect.num_moves,
                goal=self._machine.goal.version,
            )
        )

    def _note_slowness(self, effect: effects.SlownessDecided) -> None:
        verdict, incarnation = effect.verdict, effect.incarnation
        log.warning("worker %d, slowness: %s: %s", verdict.rank, verdict.level, verdict.reason)
        if verdict.level is Standing.FINE:
            self._event_log.append(
                WorkerRecovered(
                    process="orchestrator", rank=verdict.rank, incarnation=incarnation, reason=verdict.reason
                )
            )
        elif verdict.level is not Standing.TRIAL:
            self._event_log.append(
                WorkerSlow(
                    process="orchestrator",
                    rank=verdict.rank,
                    incarnation=incarnation,
                    level=verdict.level,
                    ratio=verdict.ratio,
                    reason=verdict.reason,
                )
            )

    def _note_resumed(self, effect: effects.Resumed) -> None:
        """Clean up after workers that ended while there was no orchestrator: peers may still know them, and their logs
        may still be kept."""
        for end in self._ends:
            self._ends.dismiss_unknown_peers(end)
            if end.report is None and not end.is_lost:  # it may still be loading: check its pulse
                self._tell(self._detector.probe(end)(end.rank, end.incarnation))
        self._logs.lose_all_but(self._machine.counts)
        if self._logs_needed is not None:
            self._logs.settle_lost_but(self._logs_needed)
        epoch, took_s = self._machine.epoch, time.monotonic() - self._began_s
        log.warning("a new orchestrator: epoch %d, rebuilt in %.2f s", epoch, took_s)
        self._event_log.append(
            OrchestratorRecovered(
                process="orchestrator",
                epoch=epoch,
                num_reports=effect.num_reports,
                num_missing=effect.num_missing,
                took_s=took_s,
            )
        )

    # -- once in every turn ----------------------------------------------------------------------

    def _flush(self) -> None:
        if self._recovery is None:
            self._experts_view.flush(self._machine, time.monotonic())
            self._survivals_view.flush(self._machine, time.monotonic())
        self._gateway.flush(self._machine.tables() if self._recovery is None else None, self._machine.moves)
        for channel in self._helpers():
            channel.flush()
        for end in self._ends:
            end.flush()

    def _helpers(self) -> list[Channel]:
        return [channel for channel in (self._supervisor, self._anchor.channel) if channel is not None]

    def _channels(self) -> list[Channel]:
        return self._helpers() + [end.control for end in self._ends if end.control is not None]

    def _timeout_s(self) -> float:
        deadline = self._recovery.deadline if self._recovery is not None else self._machine.next_deadline()
        idle_s = RETRY_S if any(channel.wants_write for channel in self._channels()) else 0.5
        return idle_s if deadline is None else min(idle_s, max(0.0, deadline - time.monotonic()))
