"""What the gateway says: what it knows of streams, and what operators ask for through it.

An operator's request is an event for the machine; the answer is the reason of its decision.
"""

from collections import deque

from everserve.control import effects, events
from everserve.control.event_queue import EventQueue
from everserve.control.health_watch import HealthWatch
from everserve.control.injection import Injection
from everserve.control.parts import Parts
from everserve.control.scaling import size_of
from everserve.plan.evacuation import reason_of
from everserve.tables.health import Diagnosis, Level
from everserve.tables.ids import Incarnation, WorkerId
from everserve.wire.channel import ChannelClosed
from everserve.wire.events import DeviceLostEvent, DeviceReturnedEvent
from everserve.wire.messages import (
    AnyMessage,
    DeviceAnswered,
    DrainAnswered,
    DrainWorker,
    GatewayReport,
    HealthAnswered,
    InjectFault,
    LogSettled,
    LoseDevice,
    ReturnDevice,
    SayHealth,
    ScaleAnswered,
    ScaleCluster,
    StreamsReported,
    SwitchAnswered,
    SwitchWorker,
)

_ASKED = DrainWorker | LoseDevice | ReturnDevice | ScaleCluster | SwitchWorker | SayHealth  # by operators


class FromGateway:
    """Requests that come during a recovery wait for its end."""

    def __init__(self, parts: Parts, queue: EventQueue, health: HealthWatch, injection: Injection) -> None:
        self._parts = parts
        self._queue = queue
        self._health = health
        self._injection = injection
        self._asked_early: deque[AnyMessage] = deque()

    def handle_early(self) -> None:
        """The recovery is over."""
        while self._asked_early:
            self._on_message(self._asked_early.popleft())

    def read(self) -> None:
        channel = self._parts.gateway.channel
        assert channel is not None
        try:
            for message in channel.receive_all():
                self._on_message(message)
        except ChannelClosed:
            self._parts.selector.unregister(channel)
            self._parts.gateway.channel = None

    def _on_message(self, message: AnyMessage) -> None:
        if isinstance(message, InjectFault):
            self._injection.inject(message)
        elif self._queue.is_recovering and isinstance(message, _ASKED):
            self._asked_early.append(message)
        elif isinstance(message, DrainWorker):
            self._drain(message)
        elif isinstance(message, ScaleCluster):
            self._scale(message)
        elif isinstance(message, SwitchWorker):
            self._switch(message)
        elif isinstance(message, StreamsReported):
            self._queue.tell(events.StreamsCounted(message.loads))
        elif isinstance(message, LoseDevice | ReturnDevice):
            self._change_device(message)
        elif isinstance(message, SayHealth):
            self._say_health(message)
        elif isinstance(message, LogSettled):
            self._parts.logs.settle(WorkerId(message.rank, message.incarnation))
        elif isinstance(message, GatewayReport):
            self._queue.tell(events.GatewayReported(message.epoch, tuple(message.lost)))
            if self._queue.is_recovering:
                self._parts.logs.needed = message.logs
            else:
                self._parts.logs.settle_lost_but(message.logs)
        else:
            raise AssertionError(f"the gateway does not send {type(message).__name__} to the orchestrator")

    def _drain(self, message: DrainWorker) -> None:
        """An operator wants a worker to leave. The machine decides whether it is asked to."""
        decision = self._queue.decide(lambda now: self._parts.machine.handle(events.DrainAsked(message.rank), now))
        asked = [effect for effect in decision.effects if isinstance(effect, effects.AskToLeave)]
        incarnation = asked[0].incarnation if asked else Incarnation(0)
        self._parts.gateway.send(DrainAnswered(id=message.id, incarnation=incarnation, reason=decision.reason))

    def _change_device(self, message: LoseDevice | ReturnDevice) -> None:
        """An operator takes a device away, or gives it back. Answered when the supervisor has been told: it stays so,
        whatever happens to this process."""
        device, goal = message.device, self._parts.machine.goal
        on_it = [worker.rank for worker in self._parts.machine.members.workers if worker.device == device]
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
            self._parts.records.append(lost)
            self._queue.tell(events.DeviceLost(device, message.gone))
        else:
            self._parts.records.append(DeviceReturnedEvent(process="orchestrator", device=device, ranks=[*on_it]))
            self._queue.tell(events.DeviceReturned(device))
        self._parts.gateway.send(DeviceAnswered(id=message.id, ranks=[] if reason else on_it, reason=reason))

    def _return_healthy(self, device: int) -> str:
        """A device that is not used because of its health. Returns why it is not used now either."""
        self._health.forget(device)
        self._queue.decide(lambda now: self._parts.machine.handle(events.DeviceReturned(device), now))
        goal = self._parts.machine.goal
        if device not in goal.absent:
            return ""
        return f"device {device} still has health level {goal.level(device).value}: {reason_of(goal, device)}"

    def _say_health(self, message: SayHealth) -> None:
        """An operator says how healthy a device is."""
        diagnosis = Diagnosis(device=message.device, level=message.level, reason=message.reason)
        if diagnosis.level is Level.HEALTHY:
            self._health.forget(message.device)
        decision = self._queue.decide(lambda now: self._parts.machine.handle(events.HealthSaid(diagnosis), now))
        goal = self._parts.machine.goal
        if all(seat.device != message.device for seat in goal.seats):
            self._parts.gateway.send(HealthAnswered(id=message.id, refused=decision.reason))
            return
        level, reason = goal.level(message.device), reason_of(goal, message.device)
        self._parts.gateway.send(HealthAnswered(id=message.id, level=level, reason=reason, done=decision.reason))

    def _scale(self, message: ScaleCluster) -> None:
        """An operator wants more or fewer workers. The machine decides whether that is possible."""
        asked = events.ScaleAsked(message.attention, message.expert, message.devices)
        decision = self._queue.decide(lambda now: self._parts.machine.handle(asked, now))
        began = next((effect for effect in decision.effects if isinstance(effect, effects.BeginScaling)), None)
        if began is None:
            self._parts.gateway.send(ScaleAnswered(id=message.id, refused=decision.reason))
            return
        size = size_of(self._parts.machine.goal)._asdict()
        self._parts.gateway.send(ScaleAnswered(id=message.id, **size, added=[*began.added], retired=[*began.retired]))

    def _switch(self, message: SwitchWorker) -> None:
        """An operator wants a worker to have another role. The machine decides whether that is possible."""
        asked = events.SwitchAsked(message.rank, message.role)
        decision = self._queue.decide(lambda now: self._parts.machine.handle(asked, now))
        is_begun = any(isinstance(effect, effects.BeginSwitch) for effect in decision.effects)
        self._parts.gateway.send(SwitchAnswered(id=message.id, refused="" if is_begun else decision.reason))
