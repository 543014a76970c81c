"""Faults that operators inject: a signal to one worker, or its main thread hangs, or it computes wrong
(`--enable-chaos`)."""

import signal

import msgspec

from everserve.control.hold.hosts import Hosts
from everserve.control.hold.worker_ends import WorkerEnd, WorkerEnds
from everserve.control.tell.records import Records
from everserve.control.tell.to_gateway import GatewayEnds
from everserve.tables.ids import Rank, Role
from everserve.wire.events import FaultInjected
from everserve.wire.messages import Answered, Flip, Hang, Signalled, SignalWorker
from everserve.wire.operators import FaultRequest, FaultView

_MESSAGES = {"HANG": Hang(), "FLIP": Flip()}


class Injection:
    """Answered when the supervisor says which process got the signal."""

    def __init__(self, ends: WorkerEnds, hosts: Hosts, gateway: GatewayEnds, records: Records) -> None:
        self._ends = ends
        self._hosts = hosts
        self._gateway = gateway
        self._records = records
        self._views: dict[str, FaultView] = {}  # of requests that are not confirmed yet

    def inject(self, id: str, fault: FaultRequest) -> None:
        """Have the supervisor signal a worker: only the supervisor can target exactly one incarnation, by its pid."""
        assert fault.rank is not None and fault.signal is not None, fault
        end = self._victim(Rank(fault.rank), fault.signal)
        if end is None:
            self._gateway.send(Answered(id=id, refused=f"worker {fault.rank} has no process at the moment"))
            return
        if fault.signal == "FLIP" and Role.ATTENTION in end.roles:
            self._gateway.send(Answered(id=id, refused=f"worker {fault.rank} computes no experts for others"))
            return
        view = FaultView(rank=end.rank, incarnation=end.incarnation, pid=end.pid, signal=fault.signal)
        if fault.signal in _MESSAGES:
            end.send(_MESSAGES[fault.signal])
            self._answer(id, view)
        else:
            self._views[id] = view
            number = signal.Signals[f"SIG{fault.signal}"]
            order = SignalWorker(rank=end.rank, incarnation=end.incarnation, signal=number, id=id)
            self._hosts.send(end.host, order)
        self._records.append(
            FaultInjected(rank=end.rank, incarnation=end.incarnation, victim_pid=end.pid, signal=fault.signal)
        )

    def confirm(self, message: Signalled) -> None:
        """The supervisor reports which process got the signal."""
        view = self._views.pop(message.id, None)
        if view is None:
            return  # the previous orchestrator had ordered it
        if message.pid is None:
            self._gateway.send(Answered(id=message.id, refused=message.reason))
        else:
            self._answer(message.id, msgspec.structs.replace(view, pid=message.pid))

    def _victim(self, rank: Rank, name: str) -> WorkerEnd | None:
        """A seat may have two processes for a while: a fenced one and its successor. CONT is for the stopped one."""
        ends = [end for end in self._ends if end.rank == rank and end.pid]
        choose = min if name == "CONT" else max
        return choose(ends, key=lambda end: end.incarnation, default=None)

    def _answer(self, id: str, view: FaultView) -> None:
        self._gateway.send(Answered(id=id, view=msgspec.json.encode(view)))
