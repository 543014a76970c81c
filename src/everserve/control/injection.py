"""Faults that operators inject: a signal to one worker, or its main thread hangs (`--enable-chaos`)."""

import signal

from everserve.control.parts import Parts
from everserve.tables.ids import Incarnation
from everserve.wire.events import FaultInjectedEvent
from everserve.wire.messages import FaultInjected, Hang, InjectFault, Signalled, SignalWorker


class Injection:
    """Answered when the supervisor says which process got the signal."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._victims: dict[str, Incarnation] = {}  # targets that are not confirmed yet

    def inject(self, message: InjectFault) -> None:
        """Have the supervisor signal a worker: only the supervisor can target exactly one incarnation, by its pid."""
        ends = [end for end in self._parts.ends if end.rank == message.rank and end.pid]
        if not ends:
            reason = f"worker {message.rank} has no process at the moment"
            self._parts.gateway.send(FaultInjected(id=message.id, pid=None, incarnation=Incarnation(0), reason=reason))
            return
        # A seat may have two processes for a while: a fenced one and its successor. CONT is for the stopped one.
        oldest_first = sorted(ends, key=lambda end: end.incarnation)
        end = oldest_first[0] if message.signal == signal.SIGCONT else oldest_first[-1]
        if message.signal is None:
            end.send(Hang())
            answer = FaultInjected(id=message.id, pid=end.pid, incarnation=end.incarnation, reason="")
            self._parts.gateway.send(answer)
        else:
            self._victims[message.id] = end.incarnation
            order = SignalWorker(rank=end.rank, incarnation=end.incarnation, signal=message.signal, id=message.id)
            self._parts.supervisor.send(order)
        self._parts.records.append(
            FaultInjectedEvent(
                process="orchestrator",
                rank=end.rank,
                incarnation=end.incarnation,
                victim_pid=end.pid,
                signal="HANG" if message.signal is None else signal.Signals(message.signal).name.removeprefix("SIG"),
            )
        )

    def confirm(self, message: Signalled) -> None:
        """The supervisor reports which process got the signal."""
        incarnation = self._victims.pop(message.id, None)
        if incarnation is not None:  # else the previous orchestrator had ordered it
            answer = FaultInjected(id=message.id, pid=message.pid, incarnation=incarnation, reason=message.reason)
            self._parts.gateway.send(answer)
