"""Starts the processes of one serving instance, watches them, and ends them together.

    supervisor --control--> gateway, orchestrator, anchor, zygote;    zygote --forks--> workers

               gateway <--tokens--> attention workers <--lanes--> expert workers
                  |                          |                          |
                  +------ cluster ---- orchestrator ----- control ------+---- memory: anchor

It decides nothing about workers: the orchestrator asks for them, the provisioner starts them. A dead orchestrator,
anchor or zygote is replaced, and its peers get a channel to its successor.

    children.py    those that it has started, and their channels
    keepers.py     gateways and their keepers, of which there are as many as --gateways says
    provisioner.py workers
    agent.py       what the supervisor is on other hosts; the carrier joins them
    steps.py       what is to be done, and may have to wait
    upgrading.py   another version goes on

It is no process's parent: root starts what it asks for, and tells it what has ended (root.py). So it may die, too:

    process table --> the next supervisor (next_supervisor.py)
                  --> ends orchestrator, anchor, zygote and whatever the table does not name
                  --> goes on with workers and gateway over the same sockets --> starts the three again

Sockets are unnamed pairs passed by descriptor, and memory has no name either, so nothing is left behind in the file
system. When root ends in any way, the kernel kills all others.
"""

import contextlib
import errno
import logging
import os
import selectors
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial

import msgspec

from everserve import __version__
from everserve.errors import ProtocolError
from everserve.procs import process
from everserve.procs.ballast import Ballast
from everserve.procs.children import KILL_AFTER_S, Child, Children
from everserve.procs.deferred_close import Held
from everserve.procs.early_zygote import EarlyZygote
from everserve.procs.keepers import GatewayMemory, Keeper, Keepers
from everserve.procs.launching import ENVIRONMENT
from everserve.procs.mps import Mps
from everserve.procs.process_table import (
    Instance,
    MpsRow,
    ProcessTable,
    TableFile,
    encode,
    goal_of,
)
from everserve.procs.provisioner import Workers
from everserve.procs.root_end import RootEnd
from everserve.procs.service_manager import SOCKET
from everserve.procs.signals import SignalPipe
from everserve.procs.steps import Steps
from everserve.procs.upgrading import Upgrade
from everserve.tables.members import Process, gateway_name
from everserve.wire.channel import RETRY_S, Channel, ChannelClosed, Descriptors
from everserve.wire.event_log import EventLog
from everserve.wire.events import (
    AnyEvent,
    ProcessEnded,
    ProcessStarted,
    Serving,
    ShutdownBegan,
    WorkerExitedEvent,
    WorkerStartedEvent,
)
from everserve.wire.messages import (
    AnchorAttached,
    Answered,
    AnyMessage,
    Ask,
    Attach,
    CarrierAttached,
    DeviceDescriptors,
    EventHappened,
    Failed,
    GatewayAttached,
    GatewayBegun,
    GatewayKnown,
    HandedOver,
    HostProcesses,
    KeepGoal,
    OrchestratorAttached,
    ProcessesChanged,
    Provision,
    Ready,
    Release,
    Shutdown,
    SignalWorker,
    SpareForked,
    SparesChanged,
    StartOrchestrator,
    StartZygote,
    TakenIn,
    WorkerForked,
)
from everserve.wire.operators import FaultRequest, FaultView, UpgradeRequest, UpgradeView

_MAX_RESTARTS = 10  # of the orchestrator, the anchor or the zygote, each ...
_RESTARTS_WITHIN_S = 10.0  # ... within this time; beyond that the instance fails

_START_WITHIN_S = 30.0  # for want of processes or descriptors; a server that has served tries for ever

_ALWAYS = ("orchestrator", "anchor", "zygote")  # in every instance
_HELPERS = (*_ALWAYS, "carrier")  # which are started anew when anything of them is lost
_WAIT_S = 0.1  # for ends; then it looks again what is left
_STDERR = 2
_STOPS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD})

log = logging.getLogger(__name__)


@dataclass
class _Restarts:
    times_s: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_RESTARTS))

    def may_restart(self, now_s: float) -> bool:
        is_too_often = len(self.times_s) == _MAX_RESTARTS and now_s - self.times_s[0] < _RESTARTS_WITHIN_S
        self.times_s.append(now_s)
        return not is_too_often


class Supervisor:
    """One serving instance from start to end."""

    def __init__(
        self,
        instance: Instance,
        root: RootEnd,
        memory: GatewayMemory,
        on_ready: Callable[[str], None] = lambda url: None,
        take_zygote: Callable[[], EarlyZygote | None] = lambda: None,
    ) -> None:
        self._instance = instance
        self._encoded = encode(instance)
        self._root = root
        self._file = TableFile(root.table_fd)
        config = instance.start_gateway.config
        self._start_orchestrator = msgspec.structs.replace(instance.start_orchestrator, num_gateways=config.gateways)
        self._on_ready = on_ready
        self._take_zygote = take_zygote  # one that was started before us
        self._spares = SparesChanged(pids=(), num_wanted=0)
        self._processes_of: dict[int, tuple[Process, ...]] = {}  # joined hosts
        self._mps: Mps | None = None
        self._ballast: Ballast | None = None
        self._kill_at: float | None = None  # set while stopping
        self._num_stops = 0  # signals that asked for the end
        self._last_words: Channel | None = None  # of the orchestrator that the supervisor before has left
        self._is_serving = False
        self._failure: str | None = None
        self._exit_status = 0
        self._goal = encode(None)  # the last one
        self._selector = selectors.DefaultSelector()
        self._selector.register(root, selectors.EVENT_READ, root)
        self._events = EventLog("supervisor", instance.event_log, self._tell_event)
        self._restarts = {
            name: _Restarts() for name in (*(gateway_name(number) for number in range(config.gateways)), *_HELPERS)
        }
        self._steps = Steps(log)
        self._children = Children(root, self._selector, tuple(self._restarts), self._environment, self._on_started)
        self._keepers = Keepers(self._children, self._steps, instance.start_gateway, memory, self._record, self._events)
        self._upgrade = Upgrade(root, self._start_orchestrator.worker.model, self._keepers.send, self._record)
        self._workers = Workers(
            to_zygote=self._children.sender("zygote"),
            to_orchestrator=self._children.sender("orchestrator"),
            to_gateway=self._keepers.try_send,
            record=self._record,
            unannounced=self._unannounced,
            num_gateways=config.gateways,
        )

    def run(self, found: ProcessTable | None = None, devices: Collection[int] = ()) -> int:
        """Serve until a signal (exit status 0), the death of a process (1) or a user error (2) ends it. `found`: what
        the supervisor before has left; `devices`: and descriptors of processes that end now, to be closed later."""
        process.set_name("es-supervisor")
        if self._start_orchestrator.worker.compute.device == "cuda":
            self._ballast = Ballast()
        if found is not None:
            self._restore(found)
            self._children.deferred.close_later(Held.of_fds(devices))
        elif self._instance.share_device:
            self._mps = Mps.start()
        try:
            self._serve(is_first=found is None)
        finally:
            if self._mps is not None:
                self._mps.stop()  # last: a process that uses the device does not survive it
            if self._ballast is not None:
                self._ballast.close()
            self._keepers.memory.close()
        if self._failure is not None:
            log.error("%s", self._failure)
        else:
            log.info("stopped")
        self._root.done(self._exit_status)
        return self._exit_status

    def _serve(self, is_first: bool) -> None:
        signals = SignalPipe(self._selector)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
        try:
            if is_first:
                self._record()
                self._spawn_all()
            else:
                self._take_over()
            while self._children or self._workers.pids or (self._steps and self._kill_at is None):
                self._step(signals)
        finally:
            signals.close()
            self._kill_everything()

    # -- from one supervisor to the next -----------------------------------------------------------

    def _record(self) -> None:
        """Write the process table, if it has changed."""
        memory = self._keepers.memory
        self._file.write(
            ProcessTable(
                instance=self._encoded,
                listen=memory.listen,
                ledgers=list(memory.ledgers),
                shared=memory.shared,
                gateways=[keeper.row() for keeper in self._keepers.there()],
                orchestrator=self._fd_of("orchestrator"),
                helpers=[child.pid for child in self._helpers() if child.status is None],
                workers=self._workers.table(),
                goal=self._goal,
                is_serving=self._is_serving,
                restarts={name: list(restarts.times_s) for name, restarts in self._restarts.items()},
                kill_at=self._kill_at,
                num_stops=self._num_stops,
                failure=self._failure,
                exit_status=self._exit_status,
                mps=_mps_row(self._mps) if self._mps is not None else None,
            )
        )

    def _restore(self, table: ProcessTable) -> None:
        """Goes on as the table says."""
        self._is_serving, self._goal = table.is_serving, table.goal
        self._start_orchestrator = msgspec.structs.replace(self._start_orchestrator, goal=goal_of(table))
        self._kill_at, self._num_stops = table.kill_at, table.num_stops
        self._failure, self._exit_status = table.failure, table.exit_status
        for name, times_s in table.restarts.items():
            self._restarts[name].times_s.extend(times_s)
        self._workers.restore(table.workers)
        if table.orchestrator is not None:
            self._last_words = Channel.of_fd(table.orchestrator)
        self._mps = _mps_of(table.mps) if table.mps is not None else None
        for row in table.gateways:
            self._keepers.restore(row)

    def _take_over(self) -> None:
        """End what can be started anew, and go on with the rest."""
        unannounced = self._unannounced()
        for pid in unannounced:
            process.kill(pid)
        process.wait_for_ends(unannounced, KILL_AFTER_S)  # the orchestrator says nothing more
        self._read_last_words()
        before = self._root.before
        assert before is not None, "there was another one"
        if self._root.news == "upgraded":
            log.warning("version %s goes on, of %s", __version__, sys.executable)
            self._upgrade.begin_to_confirm(_ALWAYS)
        elif self._root.news:
            log.error("%s: version %s goes on, of %s", self._root.news, __version__, sys.executable)
            self._root.has_taken_over()
        else:
            log.warning("the supervisor died (%s); the next one goes on", process.how(before))
        self._events.append(ProcessEnded(process="supervisor", child="supervisor", exit_status=before))
        self._events.append(ProcessStarted(process="supervisor", child="supervisor", child_pid=os.getpid()))
        self._tell_processes()
        if self._kill_at is None:
            self._restart_everything()
        elif not self._keepers.there():
            self._kill_everything()
        else:  # they may not have heard of it
            self._keepers.send(Shutdown(grace_s=max(0.0, self._kill_at - KILL_AFTER_S - time.monotonic())))
        for signum in self._root.stops[self._num_stops :]:
            self._on_stop(signum)

    def _read_last_words(self) -> None:
        """Reads what the orchestrator before has sent: what it told operators is in the goal, which must be kept."""
        if self._last_words is None:
            return
        with contextlib.suppress(ChannelClosed, ProtocolError):
            for message in self._last_words.receive_all():
                if isinstance(message, KeepGoal):
                    self._keep(message)
                elif isinstance(message, Release):
                    self._workers.drop(message.memory)
        last_words, self._last_words = self._last_words, None
        self._record()
        last_words.close()

    def _keep(self, message: KeepGoal) -> None:
        self._start_orchestrator = msgspec.structs.replace(self._start_orchestrator, goal=message.goal)
        self._goal = encode(message.goal)

    def _fd_of(self, name: str) -> int | None:
        """The channel of this helper, or of the one that the supervisor before has left."""
        if self._last_words is not None:
            return self._last_words.fileno()
        child = self._children.get(name)
        return child.control.fileno() if child is not None and child.end_by is None else None

    def _restart_everything(self) -> None:
        """Starts everything again but the gateway and workers that go on."""
        self._keepers.owe_missing()
        self._owe_orchestrator(self._replace_orchestrator)
        self._owe_anchor()
        self._owe_carrier()
        self._steps.owe("start the zygote", self._spawn_zygote)
        self._steps.owe("hand workers over", self._workers.hand_over)
        self._steps.owe("repeat pending forks", self._workers.ask_again)
        self._do_steps()

    def _unannounced(self) -> list[int]:
        """Processes of the instance that are not known here: those that the supervisor before had just started, or a
        zygote has forked."""
        own = {child.pid for child in self._children.values()} | {*self._workers.pids, *self._instance.keeps}
        if self._mps is not None:
            own.add(self._mps.watcher)
        own |= self._keepers.pids()
        return [pid for pid in self._root.children() if pid not in own]

    def _helpers(self) -> list[Child]:
        return [child for name, child in self._children.items() if name in _HELPERS]

    # -- starting --------------------------------------------------------------------------------

    def _spawn_all(self) -> None:
        self._keepers.owe_missing()
        self._owe_orchestrator(lambda: self._spawn_orchestrator(self._start_orchestrator))
        self._owe_anchor()
        self._owe_carrier()
        self._steps.owe("start the zygote", self._spawn_zygote)
        self._do_steps()

    def _owe_orchestrator(self, start: Callable[[], None]) -> None:
        self._steps.owe("start the orchestrator", start)
        for number in range(1, len(self._keepers.names)):
            self._steps.owe(f"connect the {gateway_name(number)}", partial(self._connect_gateway, number))

    def _owe_anchor(self) -> None:
        self._steps.owe("start the anchor", lambda: self._children.spawn("anchor", {}))
        self._steps.owe("connect the anchor", self._connect_anchor)

    def _owe_carrier(self) -> None:
        """Where there are other hosts."""
        start = self._instance.start_carrier
        if start is not None:
            self._steps.owe("start the carrier", lambda: self._children.spawn("carrier", {}, start))
            self._steps.owe("connect the carrier", self._connect_carrier)

    def _connect_carrier(self) -> None:
        to_carrier, to_orchestrator = Channel.pair()
        self._children.give("carrier", OrchestratorAttached(), [to_orchestrator.detach()])
        self._children.give("orchestrator", CarrierAttached(), [to_carrier.detach()])

    def _do_steps(self) -> None:
        failed = self._steps.do(lambda: self._kill_at is None)
        if failed is not None:
            self._note_failed_start(*failed)

    def _note_failed_start(self, what: str, error: OSError | MemoryError) -> None:
        """It is tried again; but a start that takes too long has failed, and no stream is lost with it."""
        if not self._is_serving and self._steps.failing_s > _START_WITHIN_S:
            self._failure, self._exit_status = f"cannot {what}: {error}", 1
            self._stop(self._failure, grace_s=0.0)

    def _spawn_zygote(self) -> None:
        self._spares = msgspec.structs.replace(self._spares, pids=())
        start = StartZygote(
            device=self._start_orchestrator.worker.compute.device,
            environment=self._environment(),
            num_spares=self._instance.num_spares,
            like=self._workers.kinds(),
        )
        early = self._take_zygote()
        if early is None:
            self._children.spawn("zygote", {}, start, _stderr())
        else:
            control = Channel.of_fd(early.control_fd, waits_for_room=True)
            self._children.add(Child("zygote", early.pid, control), start, _stderr())

    def _spawn_orchestrator(self, start: StartOrchestrator) -> None:
        to_gateway, to_orchestrator = Channel.pair()
        with to_gateway, to_orchestrator:
            fds = {"--gateway-fd": to_gateway.fileno()}
            self._children.spawn("orchestrator", fds, start, are_packets=True)
            self._children.give("gateway", OrchestratorAttached(), [to_orchestrator.detach()])

    def _connect_gateway(self, number: int) -> None:
        to_gateway, to_orchestrator = Channel.pair()
        self._children.give(gateway_name(number), OrchestratorAttached(), [to_orchestrator.detach()])
        self._children.give("orchestrator", GatewayAttached(gateway=number), [to_gateway.detach()])

    def _connect_anchor(self) -> None:
        to_anchor, to_orchestrator = Channel.pair()
        self._children.give("anchor", OrchestratorAttached(), [to_orchestrator.detach()])
        self._children.give("orchestrator", AnchorAttached(), [to_anchor.detach()])

    def _on_started(self, child: Child) -> None:
        self._events.append(ProcessStarted(process="supervisor", child=child.title, child_pid=child.pid))
        self._tell_processes()

    def _environment(self) -> dict[str, str]:
        """The environment of the processes of this instance."""
        own = {name: value for name, value in os.environ.items() if name != SOCKET}
        return {**own, **ENVIRONMENT, **(self._mps.environment if self._mps is not None else {})}

    # -- the loop --------------------------------------------------------------------------------

    def _step(self, signals: "SignalPipe") -> None:
        for key, _ in self._selector.select(self._timeout_s()):
            child = key.data
            if child is signals:
                self._on_signals(signals.read())
            elif child in self._children.values():  # it may have ended earlier in this turn
                self._children.receive(child, self._on_message)
        self._note_exits()
        self._children.flush()
        self._workers.flush()
        self._children.deferred.tend()
        for number in self._ballast.refill() if self._ballast is not None else ():
            log.warning("descriptor %d was closed, by no code of this process", number)
        for child, status in self._children.over():
            self._on_exit(child, status)
        self._end_stopped_helpers()
        self._keepers.tend_stopped()
        if self._kill_at is None and self._is_serving and not self._upgrade.is_unconfirmed:
            self._keepers.owe_heirs()
        self._do_steps()
        self._record()
        self._root.pulse(time.monotonic())
        self._upgrade.tend()
        if self._children.have_no_room:
            time.sleep(RETRY_S)
        if self._kill_at is not None and time.monotonic() > self._kill_at:
            self._kill_everything()

    def _timeout_s(self) -> float:
        if self._root.has_exits:
            return 0.0
        return RETRY_S if self._is_held_back() else 0.2

    def _is_held_back(self) -> bool:
        return self._workers.is_held_back or self._children.are_held_back

    def _on_message(self, child: Child, message: AnyMessage, fds: Descriptors) -> None:
        self._upgrade.confirm(child.name)
        if isinstance(message, Provision):
            self._workers.provision(message, fds.take())
        elif isinstance(message, WorkerForked):
            self._events.append(
                WorkerStartedEvent(
                    process="supervisor",
                    rank=message.rank,
                    incarnation=message.incarnation,
                    worker_pid=message.pid,
                )
            )
            self._workers.forked(message)
        elif isinstance(message, SpareForked):
            (fd,) = fds.take()
            self._workers.spare_forked(message.pid, Channel.of_fd(fd, waits_for_room=True))
        elif isinstance(message, DeviceDescriptors):
            child.held.add(message, fds)
        elif isinstance(message, SparesChanged):
            self._spares = message
            self._tell_processes()
        elif isinstance(message, KeepGoal):
            self._keep(message)
        elif isinstance(message, Attach):
            self._children.give(gateway_name(message.gateway), message, fds.take())
        elif isinstance(message, HostProcesses):
            self._processes_of[message.host] = message.processes
            self._tell_processes()
        elif isinstance(message, Release):
            self._workers.drop(message.memory)
        elif isinstance(message, SignalWorker):
            self._workers.signal(message)
        elif isinstance(message, Ask):
            self._on_question(message)
        elif isinstance(message, HandedOver):
            self._children.give(gateway_name(message.gateway), message, fds.take())
        elif isinstance(message, TakenIn):
            self._children.send(gateway_name(message.gateway), message)
        elif isinstance(message, EventHappened):  # of a gateway, for the others
            for name in self._keepers.names:
                if name != child.name:
                    self._children.send(name, message)
        elif isinstance(message, GatewayBegun):
            self._on_gateway_begun(child, message)
        elif isinstance(message, Ready):
            child.is_ready = True
            self._maybe_say_ready()
        elif isinstance(message, Failed):
            child.failure = message
        else:
            raise AssertionError(f"the {child.name} does not send {type(message).__name__} to the supervisor")

    def _on_gateway_begun(self, keeper: Child, begun: GatewayBegun) -> None:
        assert isinstance(keeper, Keeper), "only gateways begin"
        if self._keepers.on_begun(keeper, begun):
            keeper.control.send(GatewayKnown(generation=begun.generation))
            attach = partial(self._workers.attach_gateway, keeper.number)
            self._steps.owe(f"hand workers to the {keeper.name}", attach)
            self._children.send("carrier", GatewayAttached(gateway=keeper.number))
            self._steps.owe(f"connect the {keeper.name}", partial(self._connect_gateway, keeper.number))
            self._do_steps()
        self._tell_processes()

    def _on_question(self, ask: Ask) -> None:
        """A gateway may have died after it had asked: what comes twice is done once."""
        answers = self._children.answers
        if answers.is_new(ask.id):
            self._on_ask(ask)
        elif (answered := answers.find(ask.id)) is not None:
            self._keepers.send(answered)

    def _maybe_say_ready(self) -> None:
        needed = [self._children.get(name) for name in (*self._keepers.names, "orchestrator")]
        if not self._is_serving and self._kill_at is None and all(child and child.is_ready for child in needed):
            self._is_serving = True
            url = self._instance.url
            self._events.append(Serving(process="supervisor", url=url))
            self._on_ready(url)
            self._root.tell("READY=1", f"STATUS=serving at {url}")

    def _on_signals(self, signums: bytes) -> None:
        for signum in signums:
            if signum != signal.SIGCHLD:
                self._on_stop(signum)

    def _on_stop(self, signum: int) -> None:
        """Finish; at a second signal, or when it does not serve yet, at once."""
        self._num_stops += 1
        is_to_finish = self._is_serving and self._kill_at is None
        if self._kill_at is None:
            name = signal.Signals(signum).name
            grace_s = self._instance.grace_s
            log.info("%s: stopping%s", name, f"; running requests get {grace_s:g} s" if is_to_finish else "")
            self._stop(f"received {name}", grace_s if is_to_finish else 0.0)
        if not is_to_finish:
            self._kill_everything()

    # -- exits ---------------------------------------------------------------------------------

    def _note_exits(self) -> None:
        """Notes the exits of workers, and of other children, whose end is handled when their channel ends. Each is
        recorded before root reaps it.
        """
        for pid, status in self._root.exits():
            self._note_exit(pid, status)
            self._record()

    def _note_exit(self, pid: int, status: int) -> None:
        if self._keepers.note_exit(pid, status) or self._children.note_exit(pid, status):
            return
        seat = self._workers.exited(pid, status)
        if seat is not None:
            rank, incarnation = seat
            self._events.append(
                WorkerExitedEvent(process="supervisor", rank=rank, incarnation=incarnation, exit_status=status)
            )

    def _on_exit(self, child: Child, status: int) -> None:
        """A child has exited: expected while stopping. Where a gateway ends by itself the instance does; others are
        replaced."""
        self._children.drop(child)
        self._events.append(ProcessEnded(process="supervisor", child=child.title, exit_status=status))
        self._tell_processes()  # it may take a while until there is another
        if self._kill_at is not None:
            is_last = isinstance(child, Keeper) and not self._keepers.there()
            if is_last and "orchestrator" not in self._children:
                self._kill_everything()  # no process is left to end workers in order
            elif is_last:  # no process is left to receive tokens
                self._children.send_all(Shutdown(grace_s=0.0))
                self._kill_at = time.monotonic() + KILL_AFTER_S
            return
        self._upgrade.note_end(child.name, status)
        restarts = self._restarts.get(child.name)
        if isinstance(child, Keeper) and status >= 0 and not child.num_heirs:
            restarts = None  # it has ended by itself
        if restarts is not None and child.failure is not None and child.failure.is_temporary:
            error = OSError(errno.EAGAIN, f"the one before: {child.failure.reason}")
            what = f"start the {child.name}"
            self._steps.fail(what, error)
            self._note_failed_start(what, error)
            if self._kill_at is None:
                self._restart(child.name)
            return
        if restarts is not None and child.failure is None and restarts.may_restart(time.monotonic()):
            self._restart(child.name)
            return
        self._failure = (
            child.failure.reason if child.failure else f"the {child.name} died ({process.how(status)}); stopping"
        )
        self._exit_status = 2 if child.failure and child.failure.user_error else 1
        self._stop(self._failure, grace_s=0.0)

    def _restart(self, name: str) -> None:
        if name in self._keepers.names:
            self._keepers.owe_missing()
        elif name == "orchestrator":
            self._owe_orchestrator(self._replace_orchestrator)
            self._steps.owe("connect the anchor", self._connect_anchor)
            if "carrier" in self._children:
                self._steps.owe("connect the carrier", self._connect_carrier)
            self._steps.owe("hand workers over", self._workers.hand_over)
        elif name == "anchor":
            self._owe_anchor()
        elif name == "carrier":
            self._processes_of.clear()
            self._owe_carrier()
        else:
            self._steps.owe("start the zygote", self._spawn_zygote)
            self._steps.owe("repeat pending forks", self._workers.ask_again)
        self._do_steps()

    def _replace_orchestrator(self) -> None:
        found = self._workers.found()
        start = msgspec.structs.replace(self._start_orchestrator, found=found, is_serving=self._is_serving)
        self._spawn_orchestrator(start)

    def _end_stopped_helpers(self) -> None:
        """Kill helpers that are stopped (SIGSTOP): their channel stays open, so nothing else would detect it. Its end
        starts the restart."""
        for child in self._helpers():
            if process.state_of(child.pid) == "T":
                child.signal(signal.SIGKILL)

    def _stop(self, reason: str, grace_s: float) -> None:
        """The gateways finish their streams first; all other processes must outlive them."""
        self._kill_at = time.monotonic() + grace_s + KILL_AFTER_S
        self._root.tell("STOPPING=1", f"STATUS={reason}")
        self._events.append(ShutdownBegan(process="supervisor", reason=reason, grace_s=grace_s))
        if self._keepers.there():
            self._keepers.send(Shutdown(grace_s=grace_s))
        else:
            self._children.send_all(Shutdown(grace_s=0.0))

    def _kill_everything(self) -> None:
        """Kill all processes, also those that were not announced yet, and wait for their ends."""
        self._kill_at = time.monotonic()
        self._record()
        while left := self._left():
            for pid in left:
                process.kill(pid)
            self._root.wait(_WAIT_S)
            self._note_exits()
            self._root.pulse(time.monotonic())
        self._workers.close()

    def _left(self) -> set[int]:
        running = {child.pid for child in self._children.values() if child.status is None}
        unannounced = {pid for pid in self._unannounced() if process.state_of(pid) not in (None, "Z", "X")}
        of_keepers = {pid for pid in self._keepers.pids() if process.state_of(pid) not in (None, "Z", "X")}
        return running | set(self._workers.pids) | unannounced | of_keepers

    def _on_ask(self, ask: Ask) -> None:
        if not isinstance(ask.request, UpgradeRequest):
            self._signal(ask)
        elif self._upgrade.is_under_way or self._kill_at is not None:
            self._keepers.send(Answered(id=ask.id, refused="an upgrade is under way, or the end"))
        elif ask.request.python is not None and self._instance.start_carrier is not None:
            refused = "an instance of several hosts is upgraded host by host, by starting it again"
            self._keepers.send(Answered(id=ask.id, refused=refused))
        elif ask.request.python is None:
            left = self._keepers.num_of_others
            view = UpgradeView(version=__version__, python=sys.executable, gateways_left=left)
            self._keepers.send(Answered(id=ask.id, view=msgspec.json.encode(view)))
        else:
            self._upgrade.ask(ask.id, ask.request.python)

    def _signal(self, ask: Ask) -> None:
        """An operator's signal. The pid of a child cannot be reused before its end is recorded."""
        fault = ask.request
        assert isinstance(fault, FaultRequest) and fault.process is not None and fault.signal is not None, ask
        is_keeper, name = fault.process.startswith("keeper"), fault.process.replace("keeper", "gateway")
        child = self._children.get(name)
        pid = os.getpid() if fault.process == "supervisor" else child.pid if child and child.status is None else None
        if pid is not None and isinstance(child, Keeper) and not is_keeper:
            pid = child.gateway_pid
        if pid is None:
            refused = Answered(id=ask.id, refused=f"the {fault.process} has no process at the moment")
            self._keepers.send(refused)
            return
        view = FaultView(process=fault.process, pid=pid, signal=fault.signal)
        answered = Answered(id=ask.id, view=msgspec.json.encode(view))
        if pid == os.getpid():  # which says nothing afterwards
            self._keepers.send(answered)
        os.kill(pid, signal.Signals[f"SIG{fault.signal}"])
        if pid != os.getpid():
            self._keepers.send(answered)

    # -- sending ---------------------------------------------------------------------------------

    def _tell_event(self, event: AnyEvent) -> None:
        self._keepers.send(EventHappened(event=event))

    def _tell_processes(self) -> None:
        processes = [Process(name="root", pid=self._root.root_pid), Process(name="supervisor", pid=os.getpid())]
        processes += [Process(name=one.title, pid=one.pid) for one in self._children.values() if one.status is None]
        gateways = [(keeper.name, keeper.gateway_pid) for keeper in self._keepers.there()]
        processes += [Process(name=name, pid=pid) for name, pid in gateways if pid is not None]
        for host, found in sorted(self._processes_of.items()):
            processes += [msgspec.structs.replace(one, host=host) for one in found]
        spares, num_wanted = self._spares.pids, self._spares.num_wanted
        self._keepers.send(ProcessesChanged(processes=tuple(processes), spares=spares, num_spares_wanted=num_wanted))


def _stderr() -> list[int]:
    """Standard error, to hand it on; nothing if it is closed."""
    try:
        os.fstat(_STDERR)
    except OSError:
        return []
    return [_STDERR]


def say_ready(model: str, url: str) -> None:
    log.info("%s ready at %s", model, url)


def _mps_row(mps: Mps) -> MpsRow | None:
    """None: it is not ours."""
    if mps.lifeline is None or mps.report is None:
        return None
    return MpsRow(environment=mps.environment, lifeline=mps.lifeline, report=mps.report, watcher=mps.watcher)


def _mps_of(row: MpsRow) -> Mps:
    return Mps(row.environment, row.lifeline, row.report, row.watcher)
