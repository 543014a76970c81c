"""The carrier's far end: to the agent of this host it is orchestrator and gateways.

    first host ══ link ══ far end <── control ── agent       WorkerStarted, Attach, WorkerExited, ...
                             │────────────────── anchor      memory, by its name
                             └── lines ───────── workers     their channels to orchestrator and gateways

It has descriptors, and sends names. This process is one *boot* of its host: if the link is away for too long, or the
first host says that the boot is past, it ends, and so do the workers of the host. The agent then starts another one.
"""

import logging
import os
import select
import selectors
import socket
import time
import uuid
from dataclasses import dataclass
from functools import partial

import msgspec

from everserve.carrier import key
from everserve.carrier.frames import (
    PROTOCOL,
    AnyContent,
    AttachGateway,
    Beat,
    Bytes,
    Closed,
    Died,
    Ended,
    Fenced,
    Greeting,
    HandOver,
    Opened,
    Pulse,
    Refused,
    Said,
    SameMemory,
    Told,
    Welcome,
    layout_hash,
)
from everserve.carrier.session import Session
from everserve.carrier.sockets import Pipe
from everserve.carrier.tls import LinkCut, TlsLink
from everserve.config.events import EventLogConfig
from everserve.errors import ProtocolError
from everserve.memory.anchor_client import AnchorClient
from everserve.memory.liveness import CELL_BYTES, ORCHESTRATOR_WORD, Cell, PeerState, Warden
from everserve.procs import process
from everserve.tables.ids import WorkerId
from everserve.tables.members import Process
from everserve.tables.memory import Kind, MemoryName
from everserve.wire import messages
from everserve.wire.channel import RETRY_S, Channel, ChannelClosed, Descriptors
from everserve.wire.messages import (
    Allocate,
    AnchorAttached,
    AnyMessage,
    Attach,
    EventHappened,
    Failed,
    GatewayAttached,
    HostAdmitted,
    LeftMemory,
    Offer,
    ProcessesChanged,
    Provision,
    Release,
    Shutdown,
    Signalled,
    SignalWorker,
    StartFarEnd,
    StartWorker,
    Withdraw,
    WorkerExited,
    WorkerStarted,
)

_TRY_S = 0.5  # for one connection, and between two that were refused
_OUTLIVES = 2.0  # times the grace: for so long the host waits for the first one, which has given it up by then
_SAY_AGAIN_S = 60.0  # that there is still no first host
_STILL = 3  # beats without a pulse, until the state of a process is looked at

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Worker:
    """A worker of this host."""

    start: StartWorker
    pid: int
    key: int  # in the warden
    cell: Cell
    channel: Channel | None = None  # to write to it as the orchestrator
    line: int = 0  # by which what it answers is read
    pulse: int = 0
    num_still: int = 0  # beats since that has moved


class FarEnd:
    """One boot of a joined host."""

    def __init__(self, start: StartFarEnd, agent: Channel) -> None:
        self._start = start
        self._agent = agent
        self._context = key.context(start.key_file, is_server=False)
        self._boot = uuid.uuid4().hex
        self._anchor = AnchorClient()
        self._selector = selectors.DefaultSelector()
        self._selector.register(agent, selectors.EVENT_READ, self._read_agent)
        self._welcome: Welcome | None = None
        self._session: Session | None = None
        self._dialed: socket.socket | None = None  # TCP is connecting
        self._next: TlsLink | None = None  # a connection that is being made
        self._next_by_s = 0.0
        self._try_s = 0.0
        self._said_s: dict[str, float] = {}  # what was logged, and when
        self._workers: dict[WorkerId, _Worker] = {}
        self._lines: dict[int, Pipe] = {}
        self._watched: dict[int, WorkerId] = {}
        self._num_lines = self._num_watched = 0
        self._processes: tuple[Process, ...] = ()
        self._over = ""  # why this boot is

    def run(self) -> None:
        """Until this boot is over."""
        self._read_agent()  # what came with the first message
        while not self._over:
            self._turn()
        log.warning("this host leaves the instance: %s", self._over)
        for link in (self._next, self._session.link if self._session is not None else None):
            if link is not None:
                link.close()

    # -- the loop --------------------------------------------------------------------------------

    def _turn(self) -> None:
        for ready, _ in self._selector.select(self._timeout_s()):
            ready.data()
        now_s = time.monotonic()
        self._tend_link(now_s)
        self._anchor.flush()
        self._agent.flush()
        for pipe in self._lines.values():
            pipe.flush()
        for worker in self._workers.values():
            if worker.channel is not None and worker.channel.wants_write:
                worker.channel.flush()
                worker.cell.ring_control()

    def _timeout_s(self) -> float:
        if self._session is None or self._welcome is None:
            return 0.05
        idle_s = self._session.timeout_s(time.monotonic())
        waits = self._agent.wants_write or any(pipe.wants_write for pipe in self._lines.values())
        return min(idle_s, RETRY_S) if waits else idle_s

    # -- the link --------------------------------------------------------------------------------

    def _tend_link(self, now_s: float) -> None:
        session = self._session
        if session is not None:
            silent_s = session.silent_s(now_s)
            if silent_s > _OUTLIVES * session.grace_s:
                self._over = f"the first host has said nothing for {silent_s:.1f} s"
                return
            if session.is_due(now_s):
                session.beat(now_s, self._pulses())
            self._flush(session)
        lacks_link = session is None or session.link is None or session.silent_s(now_s) > session.grace_s / 4
        if self._dialed is not None or self._next is not None:
            self._go_on_connecting(now_s)
        elif lacks_link and now_s >= self._try_s:
            self._connect(now_s)

    def _flush(self, session: Session) -> None:
        try:
            session.flush()
        except LinkCut as cut:
            self._lose_link(session, cut)

    def _connect(self, now_s: float) -> None:
        """Begin a connection; the one before stays open until this one is taken, so that its end says nothing."""
        self._try_s, self._next_by_s = now_s + _TRY_S, now_s + _TRY_S
        if self._session is None:
            self._next_by_s = now_s + 4 * _TRY_S  # nothing waits for it
        try:
            self._dialed = _begin_to_connect(self._start.address)
        except OSError as error:
            self._say_once(f"cannot reach {_address(self._start.address)}: {error.strerror or error}", now_s)

    def _secure(self, sock: socket.socket) -> None:
        """TCP has connected, or has failed."""
        self._dialed = None
        try:
            if error := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(error, os.strerror(error))
            self._next = TlsLink(sock, self._context, is_server=False, timeout_s=_TRY_S * 4)
        except OSError:
            sock.close()
            raise
        self._next.send(self._greeting())

    def _greeting(self) -> Greeting:
        welcome = self._welcome
        return Greeting(
            protocol=PROTOCOL,
            layout=layout_hash(),
            instance=welcome.instance if welcome is not None else "",
            name=self._start.name,
            boot=self._boot,
            term=welcome.term if welcome is not None else 0,
            num_received=self._session.incoming.num_received if self._session is not None else 0,
            host=welcome.host if welcome is not None else self._start.host,
        )

    def _go_on_connecting(self, now_s: float) -> None:
        try:
            if self._dialed is not None and _is_connected(self._dialed):
                self._secure(self._dialed)
            if self._next is not None:
                self._next.flush()
            for frame in self._next.receive() if self._next is not None else ():
                link, self._next = self._next, None
                assert link is not None
                match frame:
                    case Welcome():
                        self._on_welcome(link, frame, now_s)
                    case Refused():
                        self._on_refused(link, frame, now_s)
                    case _:
                        raise ProtocolError(f"a {type(frame).__name__} instead of a welcome")
                return  # what came behind it is read by the session
        except (LinkCut, ProtocolError) as error:
            self._say_once(f"{_address(self._start.address)} does not let this host in: {error}", now_s)
            self._drop_next()
            return
        except OSError as error:
            self._say_once(f"cannot reach {_address(self._start.address)}: {error.strerror}", now_s)
            return
        if now_s > self._next_by_s:
            self._say_once(f"{_address(self._start.address)} does not answer", now_s)
            self._drop_next()

    def _drop_next(self) -> None:
        for made in (self._dialed, self._next):
            if made is not None:
                made.close()
        self._dialed = self._next = None

    def _on_welcome(self, link: TlsLink, welcome: Welcome, now_s: float) -> None:
        if self._session is not None and self._session.link is not None:
            self._selector.unregister(self._session.link)
        is_first, self._welcome = self._welcome is None, welcome
        self._anchor.host = welcome.host
        if self._session is None:
            self._session = Session(welcome.detect_ms, welcome.grace_s, now_s)
            self._warden = self._make_warden(welcome.detect_ms)
        self._session.attach(link, welcome.num_received, now_s)
        self._selector.register(link, selectors.EVENT_READ, self._read_link)
        self._said_s.clear()
        if is_first:
            log.info("this is host %d of the instance at %s", welcome.host, _address(self._start.address))
            self._agent.send(HostAdmitted(host=welcome.host, num_gateways=welcome.num_gateways, device=welcome.device))
            self._tell_processes()
        else:
            log.info("the link to the first host is back")
        self._read_link()

    def _on_refused(self, link: TlsLink, refused: Refused, now_s: float) -> None:
        link.close()
        if refused.is_final and self._session is not None:
            self._over = refused.reason
        else:
            self._say_once(f"{_address(self._start.address)} does not let this host in: {refused.reason}", now_s)
            self._try_s = now_s + _TRY_S

    def _read_link(self) -> None:
        session, now_s = self._session, time.monotonic()
        if session is None or session.link is None:
            return
        try:
            for content in session.receive(now_s):
                self._on_content(content)
        except LinkCut as cut:
            self._lose_link(session, cut)
        except ProtocolError as error:
            self._over = f"the first host says what this one does not understand: {error}"

    def _lose_link(self, session: Session, cut: LinkCut) -> None:
        """It is made again at once."""
        if session.link is not None:
            self._selector.unregister(session.link)
            session.detach()
        self._try_s = 0.0
        log.warning("the link to the first host is cut: %s", cut)

    def _say_once(self, what: str, now_s: float) -> None:
        if now_s > self._said_s.get(what, -_SAY_AGAIN_S) + _SAY_AGAIN_S:
            self._said_s[what] = now_s
            log.warning("%s; it is tried again", what)

    def _send(self, content: AnyContent) -> None:
        assert self._session is not None, "nothing is there before the first welcome"
        self._session.send(content)

    def _say(self, message: AnyMessage) -> None:
        if self._session is None:
            return  # there is no first host yet that it would be for
        self._send(Said(message=messages.encode(message)))

    # -- what the first host says ----------------------------------------------------------------

    def _on_content(self, content: AnyContent | Beat) -> None:
        match content:
            case Beat():
                return
            case Bytes():
                if (pipe := self._lines.get(content.line)) is not None:
                    pipe.write(content.data)
            case Told():
                self._tell_worker(content)
            case Said():
                self._on_said(messages.decode(content.message))
            case Closed():
                self._close_line(content.line)
            case SameMemory():
                if (fd := self._anchor.held(content.is_that_of)) is not None:
                    self._anchor.hold(content.name, os.dup(fd))
            case HandOver():
                self._hand_over()
            case AttachGateway():
                self._agent.send(GatewayAttached(gateway=content.gateway))
            case Fenced():
                self._over = content.reason
            case Ended():
                self._over = "the instance has ended"
            case _:
                raise ProtocolError(f"the first host does not send {type(content).__name__}")

    def _on_said(self, message: AnyMessage) -> None:
        match message:
            case Allocate():
                self._allocate(message.memory)
            case Release():
                self._anchor.release(message.memory)
                self._agent.send(message)
            case Provision():
                self._provision(message.start)
            case SignalWorker():
                self._agent.send(message)
            case _:
                raise ProtocolError(f"the orchestrator does not say {type(message).__name__} to another host")

    def _allocate(self, memory: MemoryName) -> None:
        def offer(fd: int) -> None:
            self._anchor.hold(memory, os.dup(fd))
            self._say(Offer(memory=memory))

        if memory in self._anchor.memory:
            self._say(Offer(memory=memory))
        else:
            self._anchor.allocate(
                memory, then=offer, otherwise=lambda reason: self._say(Withdraw(memory=memory, reason=reason))
            )

    def _provision(self, start: StartWorker) -> None:
        worker = WorkerId(start.rank, start.incarnation)
        fds = [self._anchor.held(memory) for memory in (_cell_of(worker, start.host), *start.memory)]
        if None in fds:  # it was released meanwhile: the worker is lost already
            self._say(WorkerExited(rank=start.rank, incarnation=start.incarnation, exit_status=1))
            return
        self._agent.send(Provision(start=self._as_here(start)), fds=[fd for fd in fds if fd is not None])

    def _as_here(self, start: StartWorker) -> StartWorker:
        """With the paths of this host. Its workers' events are told, and written on the first host only."""
        settings = msgspec.structs.replace(start.settings, event_log=EventLogConfig())
        if self._start.model:
            model = msgspec.structs.replace(settings.model, directory=self._start.model)
            settings = msgspec.structs.replace(settings, model=model)
        return msgspec.structs.replace(start, settings=settings)

    def _tell_worker(self, told: Told) -> None:
        """What names memory gets its descriptor here."""
        worker = next((one for one in self._workers.values() if one.line == told.line), None)
        if worker is None or worker.channel is None:
            return
        message, fds = messages.decode(told.message), tuple[int, ...]()
        if isinstance(message, Offer):
            fd = self._anchor.held(message.memory)
            if fd is None:
                return  # it is withdrawn by what comes behind this
            fds = (fd,)
        worker.channel.send(message, fds)
        worker.cell.ring_control()

    def _hand_over(self) -> None:
        """The workers' channels to the orchestrator before must end first: each reads until there."""
        for worker in self._workers.values():
            self._close_line(worker.line)
        self._agent.send(messages.HandOver())

    # -- what this host says ---------------------------------------------------------------------

    def _read_agent(self) -> None:
        for message, fds in self._agent.receive_frames():
            self._on_agent(message, fds)

    def _on_agent(self, message: AnyMessage, fds: Descriptors) -> None:
        match message:
            case WorkerStarted():
                self._on_started(message, fds.take())
            case Attach():
                (fd,) = fds.take()
                self._open_line(WorkerId(message.rank, message.incarnation), fd, message.gateway)
            case WorkerExited():
                self._on_exited(message)
            case Offer():
                (fd,) = fds.take()
                self._anchor.hold(message.memory, fd)
                self._say(LeftMemory(memory=message.memory))
            case AnchorAttached():
                (fd,) = fds.take()
                self._attach_anchor(Channel.of_fd(fd))
            case ProcessesChanged():
                self._processes = message.processes
                self._tell_processes()
            case Signalled() | EventHappened():
                self._say(message)
            case Failed():
                self._over = message.reason
            case Shutdown():
                self._over = "it is stopped"
            case _:
                raise AssertionError(f"the agent does not send {type(message).__name__}")

    def _tell_processes(self) -> None:
        if self._welcome is not None:
            self._say(messages.HostProcesses(host=self._welcome.host, processes=self._processes))

    def _attach_anchor(self, channel: Channel) -> None:
        self._detach_anchor()
        self._selector.register(channel, selectors.EVENT_READ, self._read_anchor)
        self._anchor.attach(channel)

    def _read_anchor(self) -> None:
        if self._anchor.channel is None:
            return
        try:
            self._anchor.read()
        except ChannelClosed:
            self._detach_anchor()

    def _detach_anchor(self) -> None:
        if self._anchor.channel is not None:
            self._selector.unregister(self._anchor.channel)
            self._anchor.detach()

    # -- workers ---------------------------------------------------------------------------------

    def _on_started(self, message: WorkerStarted, fds: list[int]) -> None:
        control_fd, cell_fd, *memory_fds = fds
        start = message.start
        id = WorkerId(start.rank, start.incarnation)
        for memory, fd in zip(start.memory, memory_fds, strict=True):
            if memory in message.dropped:
                os.close(fd)
            else:
                self._anchor.hold(memory, fd)
        cell_fd = self._anchor.hold(_cell_of(id, start.host), cell_fd)
        if id not in self._workers:
            self._num_watched += 1
            worker = _Worker(start, message.pid, self._num_watched, Cell(cell_fd))
            self._workers[id] = worker
            self._watched[worker.key] = id
            self._warden.watch(worker.key, worker.cell, ORCHESTRATOR_WORD)
        worker = self._workers[id]
        self._say(message)
        # One socket, two objects: a channel to write messages with descriptors, a pipe to read bytes.
        worker.channel = Channel.of_fd(os.dup(control_fd))
        worker.line = self._open_line(id, control_fd, gateway=None)
        worker.cell.ring_control()  # it may be in the middle of a step: makes it read its lifeline

    def _on_exited(self, message: WorkerExited) -> None:
        """What it said last comes before."""
        id = WorkerId(message.rank, message.incarnation)
        worker = self._workers.pop(id, None)
        if worker is not None:
            self._read_line(worker.line)
            self._close_line(worker.line)
            if worker.channel is not None:
                worker.channel.close()
            del self._watched[worker.key]
            self._warden.unwatch(worker.key)
            self._anchor.release(_cell_of(id, worker.start.host))
            worker.cell.close()
        self._say(message)

    def _make_warden(self, detect_ms: float) -> Warden:
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        warden = Warden(None, detect_ms or 1.0, event_fd=self._event_fd)
        self._selector.register(self._event_fd, selectors.EVENT_READ, self._read_warden)
        warden.start()
        return warden

    def _read_warden(self) -> None:
        os.eventfd_read(self._event_fd)
        for number, state in self._warden.changes():
            if state is PeerState.DIED and (id := self._watched.get(number)) is not None:
                self._send(Died(rank=id.rank, incarnation=id.incarnation))

    def _pulses(self) -> list[Pulse]:
        return [self._pulse(worker) for worker in self._workers.values()]

    def _pulse(self, worker: _Worker) -> Pulse:
        pulse = worker.cell.pulse
        worker.num_still = 0 if pulse != worker.pulse else worker.num_still + 1
        worker.pulse = pulse
        letter = process.state_of(worker.pid) if worker.num_still >= _STILL else None
        start = worker.start
        return Pulse(start.rank, start.incarnation, pulse, worker.cell.lease_is_over, letter)

    # -- lines -----------------------------------------------------------------------------------

    def _open_line(self, id: WorkerId, fd: int, gateway: int | None) -> int:
        self._num_lines += 1
        line = self._num_lines
        self._lines[line] = pipe = Pipe(socket.socket(fileno=fd))
        self._send(Opened(line=line, rank=id.rank, incarnation=id.incarnation, gateway=gateway))
        self._selector.register(pipe, selectors.EVENT_READ, partial(self._read_line, line))
        return line

    def _read_line(self, line: int) -> None:
        pipe = self._lines.get(line)
        if pipe is None or self._session is None or self._session.is_behind:
            return
        while data := pipe.read():
            self._send(Bytes(line=line, data=data))
            if self._session.is_behind:
                return
        if pipe.has_ended:
            self._send(Closed(line=line))
            self._close_line(line)

    def _close_line(self, line: int) -> None:
        pipe = self._lines.pop(line, None)
        if pipe is not None:
            self._selector.unregister(pipe)
            pipe.close()
        for worker in self._workers.values():
            if line == worker.line and worker.channel is not None:
                worker.channel.close()
                worker.channel = None


def _cell_of(worker: WorkerId, host: int) -> MemoryName:
    return MemoryName(kind=Kind.CELL, owners=(worker,), num_bytes=CELL_BYTES, host=host)


def _begin_to_connect(address: tuple[str, int]) -> socket.socket:
    """Without waiting for it."""
    family, kind, protocol, _, where = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setblocking(False)
        sock.connect(where)
    except BlockingIOError:
        pass
    except OSError:
        sock.close()
        raise
    return sock


def _is_connected(sock: socket.socket) -> bool:
    """Whether TCP has connected, or has failed to."""
    poll = select.poll()
    poll.register(sock, select.POLLOUT)
    return bool(poll.poll(0))


def _address(address: tuple[str, int]) -> str:
    return f"{address[0]}:{address[1]}"
