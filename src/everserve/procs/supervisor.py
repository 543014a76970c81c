"""Starts the processes of one serving instance, watches them, and ends them together.

    supervisor --control--> gateway, orchestrator, anchor, zygote;    zygote --forks--> workers

               gateway <--tokens--> attention workers <--lanes--> expert workers
                  |                          |                          |
                  +------ cluster ---- orchestrator ----- control ------+---- memory: anchor

It decides nothing about workers: the orchestrator asks for them, the provisioner starts them. A dead orchestrator,
anchor or zygote is replaced, and its peers get a channel to its successor. If the gateway dies, the instance ends.

Sockets are unnamed pairs passed by descriptor, and memory has no name either, so nothing is left behind in the file
system. When the supervisor itself ends in any way, the kernel kills its children.
"""

import contextlib
import os
import selectors
import signal
import socket
import stat
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from everserve.procs import process
from everserve.procs.ballast import Ballast
from everserve.procs.deferred_close import DeferredClose, Held
from everserve.procs.early_zygote import EarlyZygote
from everserve.procs.launching import ENVIRONMENT, Launch, launch
from everserve.procs.listening import url_of
from everserve.procs.mps import Mps
from everserve.procs.provisioner import Workers
from everserve.procs.signals import SignalPipe
from everserve.tables.members import Process
from everserve.wire.channel import RETRY_S, Channel, ChannelClosed, Descriptors
from everserve.wire.events import (
    EventLog,
    ProcessEnded,
    ProcessStarted,
    Serving,
    ShutdownBegan,
    WorkerExitedEvent,
    WorkerStartedEvent,
)
from everserve.wire.messages import (
    AnchorAttached,
    AnyMessage,
    DeviceDescriptors,
    DropMemory,
    EventHappened,
    Failed,
    KeepGoal,
    OrchestratorAttached,
    ProcessesChanged,
    ProcessSignalled,
    Provision,
    Ready,
    Shutdown,
    SignalProcess,
    SignalWorker,
    SpareForked,
    SparesChanged,
    StartGateway,
    StartOrchestrator,
    StartZygote,
    WorkerForked,
)

_KILL_AFTER_S = 3.0  # after Shutdown or the end of its channel, until a process is killed
_MAX_RESTARTS = 10  # of the orchestrator, the anchor or the zygote, each ...
_RESTARTS_WITHIN_S = 10.0  # ... within this time; beyond that the instance fails

_STDERR = 2


@dataclass(eq=False)
class Child:
    """One started process and the supervisor's end of its control channel."""

    name: str
    process: "subprocess.Popen[bytes]"
    control: Channel
    is_ready: bool = False
    failure: Failed | None = None
    end_by: float | None = None  # set when its channel has ended: killed if it still runs at this time
    held: Held = field(init=False)

    def __post_init__(self) -> None:
        self.held = Held(self.name)


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
        listen: socket.socket,
        start_gateway: StartGateway,
        start_orchestrator: StartOrchestrator,
        grace_s: float,
        event_log: str | None,
        on_ready: Callable[[str], None],
        share_device: bool = False,
        num_spares: int = 0,
        take_zygote: Callable[[], EarlyZygote | None] = lambda: None,
        launch: Launch = launch,
    ) -> None:
        self._launch = launch
        self._listen = listen
        self._url = url_of(listen)
        self._start_gateway = start_gateway
        self._start_orchestrator = start_orchestrator
        self._grace_s = grace_s
        self._on_ready = on_ready
        self._share_device = share_device
        self._num_spares = num_spares  # for each device
        self._spares = SparesChanged(pids=(), num_wanted=0)
        self._deferred = DeferredClose()  # of the children in `_children`; `_workers` has its own
        self._take_zygote = take_zygote  # one that was started before us
        self._mps_environment: dict[str, str] = {}
        self._ballast: Ballast | None = None
        self._children: dict[str, Child] = {}
        self._restarts = {"orchestrator": _Restarts(), "anchor": _Restarts(), "zygote": _Restarts()}
        self._kill_at: float | None = None  # set while stopping
        self._is_serving = False
        self._failure: str | None = None
        self._exit_status = 0
        self._selector = selectors.DefaultSelector()
        self._events = EventLog(
            "supervisor", event_log, lambda event: self._send("gateway", EventHappened(event=event))
        )
        self._workers = Workers(
            to_zygote=self._sender("zygote"),
            to_orchestrator=self._sender("orchestrator"),
            to_gateway=self._sender("gateway"),
        )

    def run(self) -> int:
        """Serve until a signal (exit status 0), the death of a process (1) or a user error (2) ends it."""
        process.raise_open_files()
        if self._start_orchestrator.worker.compute.device == "cuda":
            self._ballast = Ballast()
        mps = Mps.start() if self._share_device else None
        try:
            self._mps_environment = mps.environment if mps is not None else {}
            self._serve()
        finally:
            if mps is not None:
                mps.stop()  # last: a process that uses the device does not survive it
            if self._ballast is not None:
                self._ballast.close()
        _say(self._failure or "stopped")
        return self._exit_status

    def _serve(self) -> None:
        process.adopt_orphans()
        signals = SignalPipe(self._selector)
        try:
            self._spawn_all()
            while self._children or self._workers.pids:
                self._step(signals)
        finally:
            signals.close()
            self._kill_everything()

    # -- starting --------------------------------------------------------------------------------

    def _spawn_all(self) -> None:
        self._spawn("gateway", {"--listen-fd": self._listen}, self._start_gateway)
        self._listen.close()
        self._spawn_orchestrator(self._start_orchestrator)
        self._spawn("anchor", {})
        self._connect_anchor()
        self._spawn_zygote()

    def _spawn_zygote(self) -> None:
        self._spares = msgspec.structs.replace(self._spares, pids=())
        start = StartZygote(
            device=self._start_orchestrator.worker.compute.device,
            environment=self._environment(),
            num_spares=self._num_spares,
            like=self._workers.kinds(),
        )
        early = self._take_zygote()
        if early is None:
            self._spawn("zygote", {}, start, _stderr())
        else:
            self._add(Child("zygote", early.process, Channel(early.control)), start, _stderr())

    def _spawn_orchestrator(self, start: StartOrchestrator) -> None:
        to_gateway, to_orchestrator = Channel.pair()
        self._spawn("orchestrator", {"--gateway-fd": to_gateway}, start)
        self._send("gateway", OrchestratorAttached(), fds=[to_orchestrator.fileno()])
        to_gateway.close()
        to_orchestrator.close()

    def _connect_anchor(self) -> None:
        to_anchor, to_orchestrator = Channel.pair()
        self._send("anchor", OrchestratorAttached(), fds=[to_orchestrator.fileno()])
        self._send("orchestrator", AnchorAttached(), fds=[to_anchor.fileno()])
        to_anchor.close()
        to_orchestrator.close()

    def _spawn(
        self, name: str, sockets: dict[str, socket.socket], start: AnyMessage | None = None, fds: Sequence[int] = ()
    ) -> None:
        ours, theirs = Channel.pair()
        popen = self._launch(name, {"--control-fd": theirs, **sockets}, self._environment())
        theirs.close()
        self._add(Child(name, popen, Channel(ours)), start, fds)

    def _add(self, child: Child, start: AnyMessage | None, fds: Sequence[int]) -> None:
        if start is not None:
            child.control.send(start, fds)
        self._children[child.name] = child
        self._selector.register(child.control, selectors.EVENT_READ, child)
        self._events.append(ProcessStarted(process="supervisor", child=child.name, child_pid=child.process.pid))
        self._tell_processes()

    def _environment(self) -> dict[str, str]:
        """Of the processes of this instance."""
        return {**os.environ, **ENVIRONMENT, **self._mps_environment}

    # -- the loop --------------------------------------------------------------------------------

    def _step(self, signals: "SignalPipe") -> None:
        for key, _ in self._selector.select(RETRY_S if self._is_held_back() else 0.2):
            child = key.data
            if child is signals:
                self._on_signals(signals.read())
            elif child in self._children.values():  # it may have ended earlier in this turn
                self._on_readable(child)
        for child in self._children.values():
            with self._replaced_if_broken(child):
                child.control.flush()
        self._workers.flush()
        self._deferred.tend()
        for number in self._ballast.refill() if self._ballast is not None else ():
            _say(f"descriptor {number} was closed, by no code of this process")
        self._handle_exits()
        self._end_stopped_helpers()
        if self._kill_at is not None and time.monotonic() > self._kill_at:
            self._kill_everything()

    def _is_held_back(self) -> bool:
        return self._workers.is_held_back or any(child.control.is_held_back for child in self._children.values())

    def _on_readable(self, child: Child) -> None:
        try:
            for message, fds in child.control.receive_frames():
                self._on_message(child, message, fds)
        except ChannelClosed:
            self._selector.unregister(child.control)
            child.control.close()
            child.end_by = time.monotonic() + _KILL_AFTER_S

    @contextlib.contextmanager
    def _replaced_if_broken(self, child: Child) -> Iterator[None]:
        try:
            yield
        except OSError:
            if not self._is_broken(child):
                raise

    def _is_broken(self, child: Child) -> bool:
        """Whether the descriptor of its channel is not that socket any more: other code has closed it by mistake.
        Then the child is killed, and its end is handled as any other. What has that number now is not closed."""
        fd = child.control.fileno()
        if child.end_by is not None or _is_socket(fd):
            return False
        _say(f"the {child.name} is replaced: descriptor {fd}, which was its channel, is {_file_of(fd)}")
        self._selector.unregister(child.control)
        child.control.abandon()
        child.end_by = time.monotonic() + _KILL_AFTER_S
        child.process.kill()
        return True

    def _handle_exits(self) -> None:
        """Handle the exit of children whose channel has ended; kill those that take too long. Never blocks."""
        for child in [child for child in self._children.values() if child.end_by is not None]:
            status = child.process.poll()
            if status is not None:
                self._on_exit(child, status)
            elif child.end_by is not None and time.monotonic() >= child.end_by:
                child.process.kill()

    def _on_message(self, child: Child, message: AnyMessage, fds: Descriptors) -> None:
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
            self._workers.spare_forked(message.pid, Channel.of_fd(fd))
        elif isinstance(message, DeviceDescriptors):
            child.held.add(message, fds)
        elif isinstance(message, SparesChanged):
            self._spares = message
            self._tell_processes()
        elif isinstance(message, KeepGoal):
            self._start_orchestrator = msgspec.structs.replace(self._start_orchestrator, goal=message.goal)
        elif isinstance(message, DropMemory):
            self._workers.drop(message.memory)
        elif isinstance(message, SignalWorker):
            self._workers.signal(message)
        elif isinstance(message, SignalProcess):
            self._signal(message)
        elif isinstance(message, Ready):
            child.is_ready = True
            self._maybe_say_ready()
        elif isinstance(message, Failed):
            child.failure = message
        else:
            raise AssertionError(f"the {child.name} does not send {type(message).__name__} to the supervisor")

    def _maybe_say_ready(self) -> None:
        needed = [self._children.get(name) for name in ("gateway", "orchestrator")]
        if not self._is_serving and self._kill_at is None and all(child and child.is_ready for child in needed):
            self._is_serving = True
            self._events.append(Serving(process="supervisor", url=self._url))
            self._on_ready(self._url)

    def _on_signals(self, signums: bytes) -> None:
        if signal.SIGCHLD in signums:
            self._reap()
        asked = [signum for signum in signums if signum != signal.SIGCHLD]
        if not asked:
            return
        is_to_finish = self._is_serving and self._kill_at is None  # otherwise: a second signal, or not serving yet
        if self._kill_at is None:
            name = signal.Signals(asked[0]).name
            _say(f"{name}: stopping" + (f"; running requests get {self._grace_s:g} s" if is_to_finish else ""))
            self._stop(f"received {name}", self._grace_s if is_to_finish else 0.0)
        if not is_to_finish:
            self._kill_everything()

    # -- exits ---------------------------------------------------------------------------------

    def _reap(self) -> None:
        """Reap workers, and note the exit status of other children, which is handled when their channel ends."""
        ours = {child.process.pid: child for child in self._children.values()}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            exit_status = os.waitstatus_to_exitcode(status)
            if pid in ours:
                ours[pid].process.returncode = exit_status  # what Popen.wait would have set
                self._is_broken(ours[pid])  # then its channel would not end
            elif (seat := self._workers.exited(pid, exit_status)) is not None:
                rank, incarnation = seat
                self._events.append(
                    WorkerExitedEvent(process="supervisor", rank=rank, incarnation=incarnation, exit_status=exit_status)
                )

    def _on_exit(self, child: Child, status: int) -> None:
        """A child has exited: expected while stopping. Without the gateway the instance ends; others are replaced."""
        self._deferred.close_later(child.held)
        del self._children[child.name]
        self._events.append(ProcessEnded(process="supervisor", child=child.name, exit_status=status))
        if self._kill_at is not None:
            if child.name == "gateway":  # no process is left to receive tokens
                self._send_all(Shutdown(grace_s=0.0))
                self._kill_at = time.monotonic() + _KILL_AFTER_S
            return
        restarts = self._restarts.get(child.name)
        if restarts is not None and child.failure is None and restarts.may_restart(time.monotonic()):
            self._restart(child.name)
            return
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        self._failure = child.failure.reason if child.failure else f"the {child.name} died ({how}); stopping"
        self._exit_status = 2 if child.failure and child.failure.user_error else 1
        self._stop(self._failure, grace_s=0.0)

    def _restart(self, name: str) -> None:
        if name == "orchestrator":
            found = self._workers.found()
            start = msgspec.structs.replace(self._start_orchestrator, found=found, is_serving=self._is_serving)
            self._spawn_orchestrator(start)
            self._connect_anchor()
            self._workers.hand_over()
        elif name == "anchor":
            self._spawn("anchor", {})
            self._connect_anchor()
        else:
            self._spawn_zygote()
            self._workers.ask_again({child.process.pid for child in self._children.values()})

    def _end_stopped_helpers(self) -> None:
        """Kill helpers that are stopped (SIGSTOP): their channel stays open, so nothing else would detect it."""
        for name in self._restarts:
            child = self._children.get(name)
            if child is not None and process.state_of(child.process.pid) == "T":
                child.process.kill()  # the end of its channel starts the restart

    def _stop(self, reason: str, grace_s: float) -> None:
        """The gateway finishes its streams first; all other processes must outlive them."""
        self._kill_at = time.monotonic() + grace_s + _KILL_AFTER_S
        self._events.append(ShutdownBegan(process="supervisor", reason=reason, grace_s=grace_s))
        if "gateway" in self._children:
            self._send("gateway", Shutdown(grace_s=grace_s))
        else:
            self._send_all(Shutdown(grace_s=0.0))

    def _kill_everything(self) -> None:
        for child in self._children.values():
            child.process.kill()
            child.process.wait()
        self._workers.kill_all()
        for pid in process.children_of(os.getpid()):  # spares, and workers that the zygote has not announced yet
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def _signal(self, message: SignalProcess) -> None:
        """An operator's signal. The pid of a child cannot be reused before it is reaped."""
        child = self._children.get(message.name)
        if child is not None and child.process.poll() is None:
            child.process.send_signal(message.signal)
            answer = ProcessSignalled(id=message.id, pid=child.process.pid, reason="")
        else:
            reason = f"the {message.name} has no process at the moment"
            answer = ProcessSignalled(id=message.id, pid=None, reason=reason)
        self._send("gateway", answer)

    # -- sending ---------------------------------------------------------------------------------

    def _send(self, name: str, message: AnyMessage, fds: Sequence[int] = ()) -> None:
        child = self._children.get(name)
        if child is not None and child.end_by is None:
            with self._replaced_if_broken(child):
                child.control.send(message, fds)

    def _sender(self, name: str) -> Callable[..., None]:
        def send(message: AnyMessage, fds: Sequence[int] = ()) -> None:
            self._send(name, message, fds)

        return send

    def _send_all(self, message: AnyMessage) -> None:
        for name in self._children:
            self._send(name, message)

    def _tell_processes(self) -> None:
        processes = [Process(name="supervisor", pid=os.getpid())]
        processes += [Process(name=child.name, pid=child.process.pid) for child in self._children.values()]
        spares, num_wanted = self._spares.pids, self._spares.num_wanted
        self._send("gateway", ProcessesChanged(processes=tuple(processes), spares=spares, num_spares_wanted=num_wanted))


def _stderr() -> list[int]:
    """To hand it on; nothing if it is closed."""
    try:
        os.fstat(_STDERR)
    except OSError:
        return []
    return [_STDERR]


def _is_socket(fd: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:
        return False


def _file_of(fd: int) -> str:
    try:
        return str(Path(f"/proc/self/fd/{fd}").readlink())
    except OSError:
        return "closed"


def _say(text: str) -> None:
    """Print for the user or the service manager. The terminal may be closed."""
    with contextlib.suppress(OSError):
        print(f"everserve: {text}", file=sys.stderr, flush=True)
