"""Starts the processes of one serving instance, watches them, and ends them together.

    supervisor --control--> gateway  <--tokens--> worker  <--control-- supervisor

Every child holds one end of a control channel; when the supervisor is gone, however it went, the children see the end
of that channel and exit. Sockets are nameless pairs passed by descriptor, so nothing is left behind in the file system.
"""

import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from everserve.errors import ConfigError
from everserve.runtime.channel import Channel, ChannelClosed
from everserve.runtime.events import (
    AnyEvent,
    EpochPublished,
    EventLog,
    ProcessStarted,
    Serving,
    ShutdownBegan,
    WorkerGone,
)
from everserve.runtime.messages import (
    AnyMessage,
    Attach,
    ClusterChanged,
    EventHappened,
    Failed,
    Ready,
    Shutdown,
    StartGateway,
    StartWorker,
)
from everserve.tables.ids import Epoch
from everserve.tables.members import Members, Process, Worker, WorkerState

_KILL_AFTER_S = 5.0  # a child that ignores Shutdown for this long beyond its grace is killed


@dataclass
class Child:
    """One started process and our end of its control channel."""

    name: str
    process: "subprocess.Popen[bytes]"
    control: Channel
    is_ready: bool = False
    failure: Failed | None = None
    state: WorkerState = field(default=WorkerState.STARTING)


class Supervisor:
    """One serving instance from start to end."""

    def __init__(
        self,
        listen: socket.socket,
        start_gateway: StartGateway,
        start_worker: StartWorker,
        grace_s: float,
        event_log: str | None,
        on_ready: Callable[[str], None],
    ) -> None:
        self._listen = listen
        self._url = _url_of(listen)
        self._start_gateway = start_gateway
        self._start_worker = start_worker
        self._grace_s = grace_s
        self._on_ready = on_ready
        self._children: dict[str, Child] = {}
        self._epoch = 0
        self._stopping_since: float | None = None
        self._failure: str | None = None
        self._exit_status = 0
        self._selector = selectors.DefaultSelector()
        self._events = EventLog("supervisor", event_log, self._tell_gateway)

    def run(self) -> int:
        """Serve until a signal (exit status 0), a death (1) or a user's mistake (2) ends it."""
        signals = _SignalPipe(self._selector)
        try:
            self._spawn_all()
            while self._children:
                self._step(signals)
        finally:
            signals.close()
            self._kill_everything()
        if self._failure is not None:
            print(f"everserve: {self._failure}", file=sys.stderr)
        return self._exit_status

    # -- starting --------------------------------------------------------------------------------

    def _spawn_all(self) -> None:
        to_gateway, to_worker = Channel.pair()
        gateway = self._spawn("gateway", self._start_gateway, {"--listen-fd": self._listen})
        self._spawn("worker", self._start_worker, {"--gateway-fd": to_worker})
        attach = Attach(rank=self._start_worker.rank, incarnation=self._start_worker.incarnation)
        gateway.control.send(attach, fds=[to_gateway.fileno()])
        to_gateway.close()
        to_worker.close()
        self._listen.close()
        self._publish()

    def _spawn(self, name: str, start: AnyMessage, sockets: dict[str, socket.socket]) -> Child:
        ours, theirs = Channel.pair()
        sockets = {"--control-fd": theirs, **sockets}
        arguments = [text for flag, sock in sockets.items() for text in (flag, str(sock.fileno()))]
        process = subprocess.Popen(
            [sys.executable, "-m", f"everserve.{name}", *arguments],
            pass_fds=[sock.fileno() for sock in sockets.values()],
            stdin=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C reaches the supervisor alone, which then stops everybody in order
        )
        theirs.close()
        child = Child(name, process, Channel(ours))
        child.control.send(start)
        self._children[name] = child
        self._selector.register(child.control, selectors.EVENT_READ, child)
        self._events.append(ProcessStarted(process="supervisor", child=name, child_pid=process.pid))
        return child

    # -- the loop --------------------------------------------------------------------------------

    def _step(self, signals: "_SignalPipe") -> None:
        for key, _ in self._selector.select(timeout=0.2):
            if key.data is signals:
                self._on_signal(signals.read())
            else:
                self._on_readable(key.data)
        for child in self._children.values():
            child.control.flush()
        self._enforce_deadline()

    def _on_readable(self, child: Child) -> None:
        try:
            for message in child.control.receive_all():
                self._on_message(child, message)
        except ChannelClosed:
            self._on_exit(child)

    def _on_message(self, child: Child, message: AnyMessage) -> None:
        if isinstance(message, Ready):
            child.is_ready, child.state = True, WorkerState.READY
            self._publish()
            if self._stopping_since is None and all(other.is_ready for other in self._children.values()):
                self._events.append(Serving(process="supervisor", url=self._url))
                self._on_ready(self._url)
        elif isinstance(message, Failed):
            child.failure = message
        elif isinstance(message, EventHappened):
            self._tell_gateway(message.event)

    def _on_exit(self, child: Child) -> None:
        """A child is gone: expected while stopping, otherwise the reason to stop."""
        self._selector.unregister(child.control)
        child.control.close()
        status = _wait_or_kill(child.process)
        del self._children[child.name]
        if child.name == "worker":
            start = self._start_worker
            self._events.append(
                WorkerGone(process="supervisor", rank=start.rank, incarnation=start.incarnation, exit_status=status)
            )
        if self._stopping_since is None:
            how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
            self._failure = child.failure.reason if child.failure else f"the {child.name} died ({how}); stopping"
            self._exit_status = 2 if child.failure and child.failure.user_error else 1
            self._publish()
            self._stop(self._failure, grace_s=0.0)
        elif child.name == "gateway":
            self._send_all(Shutdown(grace_s=0.0))  # nobody is left to receive tokens

    def _on_signal(self, signums: bytes) -> None:
        if self._stopping_since is None:
            self._stop(f"received {signal.Signals(signums[0]).name}", self._grace_s)
        else:
            self._kill_everything()  # asked twice: now

    def _stop(self, reason: str, grace_s: float) -> None:
        """The gateway finishes its streams first; the worker must outlive them."""
        self._stopping_since = time.monotonic()
        self._grace_s = grace_s
        self._events.append(ShutdownBegan(process="supervisor", reason=reason, grace_s=grace_s))
        first = self._children.get("gateway") or self._children.get("worker")
        if first is not None:
            first.control.send(Shutdown(grace_s=grace_s))

    def _enforce_deadline(self) -> None:
        if self._stopping_since is None:
            return
        if time.monotonic() - self._stopping_since > self._grace_s + _KILL_AFTER_S:
            self._kill_everything()

    def _kill_everything(self) -> None:
        for child in self._children.values():
            child.process.kill()
            child.process.wait()

    # -- telling ---------------------------------------------------------------------------------

    def _send_all(self, message: AnyMessage) -> None:
        for child in self._children.values():
            child.control.send(message)

    def _tell_gateway(self, event: AnyEvent) -> None:
        gateway = self._children.get("gateway")
        if gateway is not None:
            gateway.control.send(EventHappened(event=event))

    def _publish(self) -> None:
        """A new epoch of the membership table, to whoever shows it."""
        self._epoch += 1
        members = self._members()
        self._events.append(EpochPublished(process="supervisor", epoch=self._epoch, violations=members.violations()))
        gateway = self._children.get("gateway")
        if gateway is not None:
            gateway.control.send(ClusterChanged(members=members))

    def _members(self) -> Members:
        processes = [Process(name="supervisor", pid=os.getpid())]
        workers = []
        for child in self._children.values():
            if child.name != "worker":
                processes.append(Process(name=child.name, pid=child.process.pid))
                continue
            workers.append(
                Worker(
                    rank=self._start_worker.rank,
                    incarnation=self._start_worker.incarnation,
                    pid=child.process.pid,
                    roles=("attention", "expert"),
                    state=child.state,
                )
            )
        return Members(epoch=Epoch(self._epoch), processes=tuple(processes), workers=tuple(workers))


def _wait_or_kill(process: "subprocess.Popen[bytes]") -> int:
    """The exit status of a process that has closed its channel; it may be slow to die, but not forever."""
    try:
        return process.wait(timeout=_KILL_AFTER_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


class _SignalPipe:
    """SIGINT and SIGTERM as bytes on a descriptor, so that the loop has one place to wait."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno())
        self._previous = {s: signal.signal(s, lambda *_: None) for s in (signal.SIGINT, signal.SIGTERM)}
        selector.register(self._reader, selectors.EVENT_READ, self)

    def read(self) -> bytes:
        return self._reader.recv(64)

    def close(self) -> None:
        self._selector.unregister(self._reader)
        signal.set_wakeup_fd(-1)
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self._reader.close()
        self._writer.close()


def listen_on(host: str, port: int) -> socket.socket:
    """A bound socket, or a line that says why not. Port 0 picks a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(1024)  # clients that come early wait for the gateway
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on {host}:{port} ({error.strerror}): choose another --host or --port"
        ) from error
    return sock


def _url_of(listen: socket.socket) -> str:
    host, port = listen.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
