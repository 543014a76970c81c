"""What operators ask for, through the gateway: that a worker leaves, or that a fault hits it. Each question is answered
once."""

import signal

from everserve.control import effects, events
from everserve.control.event_queue import Deciding
from everserve.control.to_gateway import GatewayEnd
from everserve.control.worker_ends import WorkerEnds
from everserve.tables.ids import Incarnation
from everserve.wire.channel import Channel
from everserve.wire.events import EventLog, FaultInjectedEvent
from everserve.wire.messages import DrainAnswered, DrainWorker, FaultInjected, InjectFault, Signalled, SignalWorker


class Orders:
    """Those that are not answered yet, and how they are carried out."""

    def __init__(
        self, ends: WorkerEnds, deciding: Deciding, gateway: GatewayEnd, supervisor: Channel, event_log: EventLog
    ) -> None:
        self._ends = ends
        self._deciding = deciding
        self._gateway = gateway
        self._supervisor = supervisor
        self._event_log = event_log
        self._victims: dict[str, Incarnation] = {}  # of faults that are not confirmed yet

    def drain(self, message: DrainWorker) -> None:
        """A worker shall leave. The machine decides whether it is asked to."""
        if self._deciding.recovery is not None:
            reason, asked = "the orchestrator has just been restarted; try again", []
        else:
            decision = self._deciding.ask(events.DrainAsked(message.rank))
            reason, asked = decision.reason, [e for e in decision.effects if isinstance(e, effects.AskToLeave)]
        incarnation = asked[0].incarnation if asked else Incarnation(0)
        self._gateway.send(DrainAnswered(id=message.id, incarnation=incarnation, reason=reason))

    def inject(self, message: InjectFault) -> None:
        """A signal for a worker, sent by the supervisor: only it can hit exactly one incarnation."""
        ends = [end for end in self._ends if end.rank == message.rank and end.pid]
        if not ends:
            reason = f"worker {message.rank} has no process at the moment"
            self._gateway.send(FaultInjected(id=message.id, pid=None, incarnation=Incarnation(0), reason=reason))
            return
        # A seat may have two processes for a while: a fenced one and its successor. CONT is for the stopped one.
        oldest_first = sorted(ends, key=lambda end: end.incarnation)
        end = oldest_first[0] if message.signal == signal.SIGCONT else oldest_first[-1]
        self._victims[message.id] = end.incarnation
        order = SignalWorker(rank=end.rank, incarnation=end.incarnation, signal=message.signal, id=message.id)
        self._supervisor.send(order)
        self._event_log.append(
            FaultInjectedEvent(
                process="orchestrator",
                rank=end.rank,
                incarnation=end.incarnation,
                victim_pid=end.pid,
                signal=signal.Signals(message.signal).name.removeprefix("SIG"),
            )
        )

    def signalled(self, message: Signalled) -> None:
        """The supervisor says whom the signal has hit."""
        incarnation = self._victims.pop(message.id, None)
        if incarnation is None:
            return  # asked by the orchestrator before us
        self._gateway.send(
            FaultInjected(id=message.id, pid=message.pid, incarnation=incarnation, reason=message.reason)
        )
