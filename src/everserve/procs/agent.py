"""The agent: what the supervisor is on the first host, on a host that has joined one.

    root ──> agent ──> carrier, anchor, zygote;    zygote ──forks──> workers

Instead of orchestrator and gateways it has one child, the carrier, which has the other end of a link to theirs. A
carrier is one *boot* of the host: when it ends, for whatever reason, all workers end, and the next carrier joins with
nothing. Anchor and zygote are replaced as on the first host. If the agent itself dies root ends the rest, and it begins
anew.
"""

import logging
import os
import selectors
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from everserve.procs import process
from everserve.procs.children import Child, Children
from everserve.procs.early_zygote import EarlyZygote
from everserve.procs.launching import ENVIRONMENT
from everserve.procs.provisioner import Workers
from everserve.procs.root_end import RootEnd
from everserve.procs.service_manager import SOCKET
from everserve.procs.signals import SignalPipe
from everserve.procs.steps import Steps
from everserve.tables.members import Process
from everserve.wire.channel import RETRY_S, Channel, Descriptors
from everserve.wire.event_log import EventLog
from everserve.wire.events import AnyEvent, ProcessEnded, ProcessStarted
from everserve.wire.messages import (
    AnchorAttached,
    AnyMessage,
    Attach,
    DeviceDescriptors,
    EventHappened,
    Failed,
    GatewayAttached,
    HandOver,
    HostAdmitted,
    OrchestratorAttached,
    ProcessesChanged,
    Provision,
    Ready,
    Release,
    SignalWorker,
    SpareForked,
    SparesChanged,
    StartFarEnd,
    StartZygote,
    WorkerForked,
)

_NAMES = ("carrier", "anchor", "zygote")
_MAX_RESTARTS, _RESTARTS_WITHIN_S = 10, 10.0  # of each; beyond that the agent gives up
_WAIT_S = 0.1
_STOPS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD})

log = logging.getLogger(__name__)


class Agent:
    """One host, from one boot to the next."""

    def __init__(
        self, start: StartFarEnd, root: RootEnd, take_zygote: Callable[[], EarlyZygote | None] = lambda: None
    ) -> None:
        self._start = start
        self._root = root
        self._take_zygote = take_zygote
        self._selector = selectors.DefaultSelector()
        self._selector.register(root, selectors.EVENT_READ, root)
        self._device = "cpu"  # that workers compute on, as the first host says
        self._events = EventLog("agent", tell=self._tell_event)
        self._starts_s: dict[str, deque[float]] = {name: deque(maxlen=_MAX_RESTARTS) for name in _NAMES}
        self._steps = Steps(log)
        self._children = Children(root, self._selector, _NAMES, self._environment, self._on_started)
        self._workers = self._make_workers(0)
        self._is_over = False
        self._failure = ""

    def run(self) -> int:
        """Until a signal ends it (exit status 0), or it cannot go on (1; 2: by the user's fault)."""
        process.set_name("es-agent")
        signals = SignalPipe(self._selector)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
        try:
            self._steps.owe("start the anchor", lambda: self._children.spawn("anchor", {}))
            self._steps.owe("start the carrier", self._spawn_carrier)
            self._steps.owe("connect the anchor", self._connect_anchor)
            while not self._is_over:
                self._turn(signals)
        finally:
            signals.close()
            self._end_all()
        if self._failure:
            log.error("%s", self._failure)
        return 2 if self._failure else 0

    def _make_workers(self, num_gateways: int) -> Workers:
        return Workers(
            to_zygote=self._children.sender("zygote"),
            to_orchestrator=self._children.sender("carrier"),
            to_gateway=self._to_gateway,
            record=lambda: None,  # if the agent dies, its workers do
            unannounced=self._unannounced,
            num_gateways=num_gateways,
        )

    # -- the loop --------------------------------------------------------------------------------

    def _turn(self, signals: SignalPipe) -> None:
        for ready, _ in self._selector.select(0.0 if self._root.has_exits else self._timeout_s()):
            child = ready.data
            if child is signals:
                self._is_over |= any(signum != signal.SIGCHLD for signum in signals.read())
            elif child in self._children.values():
                self._children.receive(child, self._on_message)
        for pid, status in self._root.exits():
            if not self._children.note_exit(pid, status):
                self._workers.exited(pid, status)
        self._children.flush()
        self._workers.flush()
        self._children.deferred.tend()
        for child, status in self._children.over():
            self._on_exit(child, status)
        for child in list(self._children.values()):
            if child.status is None and process.state_of(child.pid) == "T":
                child.signal(signal.SIGKILL)
        self._steps.do(lambda: not self._is_over)
        self._root.pulse(time.monotonic())

    def _timeout_s(self) -> float:
        is_held_back = self._workers.is_held_back or self._children.are_held_back or len(self._steps)
        return RETRY_S if is_held_back else 0.2

    # -- children --------------------------------------------------------------------------------

    def _spawn_carrier(self) -> None:
        self._children.spawn("carrier", {}, self._start)

    def _spawn_zygote(self) -> None:
        start = StartZygote(
            device=self._device, environment=self._environment(), num_spares=0, like=self._workers.kinds()
        )
        early = self._take_zygote()
        if early is None:
            self._children.spawn("zygote", {}, start)
        else:
            control = Channel.of_fd(early.control_fd, waits_for_room=True)
            self._children.add(Child("zygote", early.pid, control), start)

    def _connect_anchor(self) -> None:
        to_anchor, to_carrier = Channel.pair()
        self._children.give("anchor", OrchestratorAttached(), [to_carrier.detach()])
        self._children.give("carrier", AnchorAttached(), [to_anchor.detach()])

    def _on_started(self, child: Child) -> None:
        self._events.append(ProcessStarted(process="agent", child=child.title, child_pid=child.pid))
        self._tell_processes()

    def _on_exit(self, child: Child, status: int) -> None:
        self._children.drop(child)
        self._events.append(ProcessEnded(process="agent", child=child.title, exit_status=status))
        failure = child.failure
        if failure is not None and failure.user_error:
            self._failure, self._is_over = failure.reason, True
            return
        starts_s, now_s = self._starts_s[child.name], time.monotonic()
        if len(starts_s) == _MAX_RESTARTS and now_s - starts_s[0] < _RESTARTS_WITHIN_S:
            self._failure = f"the {child.name} died again and again ({process.how(status)})"
            self._is_over = True
            return
        starts_s.append(now_s)
        if status:
            log.warning("the %s died (%s); another one is started", child.name, process.how(status))
        match child.name:
            case "carrier":
                self._end_workers()
                self._steps.owe("start the carrier", self._spawn_carrier)
                self._steps.owe("connect the anchor", self._connect_anchor)
            case "anchor":
                self._steps.owe("start the anchor", lambda: self._children.spawn("anchor", {}))
                self._steps.owe("connect the anchor", self._connect_anchor)
            case _:
                self._steps.owe("start the zygote", self._spawn_zygote)
                self._steps.owe("repeat pending forks", self._workers.ask_again)

    def _end_workers(self) -> None:
        """The boot is over: all its workers, also those that were not announced yet, and all their memory."""
        zygote = self._children.get("zygote")
        if zygote is not None:  # it may be about to fork one
            zygote.signal(signal.SIGKILL)
        while left := self._left():
            for pid in left:
                process.kill(pid)
            self._root.wait(_WAIT_S)
            for pid, status in self._root.exits():
                if not self._children.note_exit(pid, status):
                    self._workers.exited(pid, status)
            self._root.pulse(time.monotonic())
        self._workers.close()
        self._workers = self._make_workers(0)

    def _left(self) -> set[int]:
        alive = {pid for pid in self._unannounced() if process.state_of(pid) not in (None, "Z", "X")}
        return alive | set(self._workers.pids)

    def _unannounced(self) -> list[int]:
        own = {child.pid for child in self._children.values()} | set(self._workers.pids)
        return [pid for pid in self._root.children() if pid not in own]

    def _end_all(self) -> None:
        """In order: the carrier first, so that the first host knows at once."""
        for child in self._children.values():
            child.signal(signal.SIGKILL)
        self._end_workers()
        self._root.done(2 if self._failure else 0)

    # -- messages --------------------------------------------------------------------------------

    def _on_message(self, child: Child, message: AnyMessage, fds: Descriptors) -> None:
        match message:
            case HostAdmitted():
                self._workers.num_gateways = message.num_gateways
                self._device = message.device
                self._start = msgspec.structs.replace(self._start, host=message.host)
                if "zygote" not in self._children:
                    self._steps.owe("start the zygote", self._spawn_zygote)
            case Provision():
                self._workers.provision(message, fds.take())
            case Release():
                self._workers.drop(message.memory)
            case SignalWorker():
                self._workers.signal(message)
            case HandOver():
                self._steps.owe("hand workers over", self._workers.hand_over)
            case GatewayAttached():
                number = message.gateway
                self._steps.owe(f"hand workers to gateway {number}", lambda: self._workers.attach_gateway(number))
            case WorkerForked():
                self._workers.forked(message)
            case SpareForked():
                (fd,) = fds.take()
                self._workers.spare_forked(message.pid, Channel.of_fd(fd, waits_for_room=True))
            case DeviceDescriptors():
                child.held.add(message, fds)
            case SparesChanged() | Ready():
                return
            case Failed():
                child.failure = message
            case _:
                raise AssertionError(f"the {child.name} does not send {type(message).__name__} to the agent")

    def _to_gateway(self, number: int, message: AnyMessage, fds: Sequence[int]) -> bool:
        assert isinstance(message, Attach), message
        attach = Attach(rank=message.rank, incarnation=message.incarnation, gateway=number)
        self._children.send("carrier", attach, fds)
        return True

    def _tell_event(self, event: AnyEvent) -> None:
        self._children.send("carrier", EventHappened(event=event))

    def _tell_processes(self) -> None:
        processes = [Process(name="root", pid=self._root.root_pid), Process(name="agent", pid=os.getpid())]
        processes += [Process(name=one.title, pid=one.pid) for one in self._children.values() if one.status is None]
        self._children.send("carrier", ProcessesChanged(processes=tuple(processes)))

    def _environment(self) -> dict[str, str]:
        own = {name: value for name, value in os.environ.items() if name != SOCKET}
        return {**own, **ENVIRONMENT}
