"""The carrier's near end: the first host's side of all joined hosts.

    orchestrator ── one channel ──> near end ══ a link for each host ══> far ends
    gateways <── a socket for each of their workers ──┘

A host is lost when its link's other end has ended, when nothing was heard of it for the grace time, or when the
orchestrator says so (an operator's fault). Its next boot gets the same number, and starts from nothing.
"""

import contextlib
import logging
import os
import selectors
import ssl
import time
from dataclasses import dataclass, field

from everserve.carrier import key
from everserve.carrier.frames import Ended, Fenced, Greeting, Refused, Welcome, layout_hash
from everserve.carrier.greeting import Admitted, Known, judge
from everserve.carrier.remote_host import RemoteHost
from everserve.carrier.session import Session
from everserve.carrier.tls import LinkCut, TlsLink, listen
from everserve.errors import ProtocolError
from everserve.wire.channel import RETRY_S, Channel, ChannelClosed
from everserve.wire.messages import (
    AdmitHost,
    Allocate,
    AnyMessage,
    EvictHost,
    GatewayAttached,
    HostJoined,
    HostLeft,
    HostProcesses,
    Offer,
    OrchestratorAttached,
    Provision,
    Release,
    Shutdown,
    SignalWorker,
    StartCarrier,
    Withdraw,
    WorkerExited,
)

_GREET_WITHIN_S = 5.0
_MOST_GREETING = 64  # connections that have not said who they are
_LAST_WORDS_S = 0.5

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Host:
    """One number."""

    number: int
    name: str
    address: str = ""
    there: RemoteHost | None = None
    is_refused: bool = False  # until an operator returns it


@dataclass(eq=False)
class _Guest:
    """A connection that has not said who it is."""

    link: TlsLink
    address: str
    by_s: float


@dataclass
class _Refusals:
    """Each reason is said once for each address."""

    num: int = 0
    said: set[tuple[str, str]] = field(default_factory=set)

    def note(self, address: str, reason: str) -> None:
        self.num += 1
        where = address.rpartition(":")[0]
        if (where, reason) not in self.said:
            self.said.add((where, reason))
            log.warning("a host at %s is not let in: %s (%d refused so far)", where, reason, self.num)


class NearEnd:
    """Until the supervisor says Shutdown, or its channel ends (ChannelClosed)."""

    def __init__(self, start: StartCarrier, supervisor: Channel) -> None:
        self._start = start
        self._supervisor = supervisor
        self._orchestrator: Channel | None = None
        self._context = key.context(start.key_file, is_server=True)
        self._term = time.time_ns() // 1_000_000  # each carrier of the instance has a later one
        self._selector = selectors.DefaultSelector()
        self._hosts: dict[int, _Host] = {}
        self._guests: set[_Guest] = set()
        self._refusals = _Refusals()
        self._is_over = False
        self._listener = listen(start.port)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(supervisor, selectors.EVENT_READ, self._read_supervisor)

    def run(self) -> None:
        self._read_supervisor()
        while not self._is_over:
            for ready, _ in self._selector.select(self._timeout_s()):
                ready.data()
            self._tend(time.monotonic())

    def _timeout_s(self) -> float:
        now_s = time.monotonic()
        there = self._there()
        waits = [host.session.timeout_s(now_s) for host in there]
        is_behind = any(host.wants_write for host in there)
        return min([0.1 if self._guests else 0.5, RETRY_S if is_behind else 0.5, *waits])

    def _tend(self, now_s: float) -> None:
        for guest in list(self._guests):
            if now_s > guest.by_s:
                self._drop_guest(guest)
        for host in list(self._hosts.values()):
            if host.there is not None:
                self._tend_host(host, host.there, now_s)
        self._supervisor.flush()
        if self._orchestrator is not None:
            self._orchestrator.flush()

    def _there(self) -> list[RemoteHost]:
        return [host.there for host in self._hosts.values() if host.there is not None]

    # -- hosts -----------------------------------------------------------------------------------

    def _tend_host(self, host: _Host, there: RemoteHost, now_s: float) -> None:
        session = there.session
        silent_s = session.silent_s(now_s)
        if silent_s > session.grace_s:
            self._lose(host, f"nothing was heard of it for {silent_s:.1f} s")
            return
        if self._start.detect_ms and silent_s * 1000 > self._start.detect_ms:
            there.fall_silent()
        if session.is_due(now_s):
            session.beat(now_s, [])
        there.flush()
        try:
            session.flush()
        except LinkCut as cut:
            self._cut(host, there, cut)

    def _read_host(self, host: _Host) -> None:
        there = host.there
        if there is None or there.session.link is None:
            return
        try:
            for content in there.session.receive(time.monotonic()):
                there.handle(content)
                if host.there is not there:
                    return
        except LinkCut as cut:
            self._cut(host, there, cut)
        except ProtocolError as error:
            there.session.send(Fenced(reason=str(error)))
            self._lose(host, f"it says what is not understood here: {error}")

    def _cut(self, host: _Host, there: RemoteHost, cut: LinkCut) -> None:
        """A carrier keeps its connection for as long as it lives. So one that its host's kernel has closed means that
        the carrier has ended, and another one has nothing of this boot."""
        if cut.by_peer:
            self._lose(host, "its carrier has ended")
        elif there.session.link is not None:
            self._selector.unregister(there.session.link)
            there.session.detach()
            log.warning("the link to host %d (%s) is cut: %s", host.number, host.name, cut)

    def _lose(self, host: _Host, reason: str) -> None:
        """All that knows its workers is told."""
        there, host.there = host.there, None
        assert there is not None
        log.error("host %d (%s) is lost: %s", host.number, host.name, reason)
        self._tell_orchestrator(HostLeft(host=host.number, reason=reason), [])
        self._part(there)

    def _part(self, there: RemoteHost) -> None:
        if there.session.link is not None:
            self._selector.unregister(there.session.link)
            self._flush_last(there.session)
        there.lose()
        self._supervisor.send(HostProcesses(host=there.number, processes=()))

    def _flush_last(self, session: Session) -> None:
        """Last words, as far as they can be sent at once."""
        try:
            session.flush()
        except LinkCut:
            return

    # -- connections -----------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            sock, where = self._listener.accept()
        except OSError:
            return
        if len(self._guests) >= _MOST_GREETING:
            sock.close()
            return
        try:
            link = TlsLink(sock, self._context, is_server=True, timeout_s=_GREET_WITHIN_S)
        except (OSError, ValueError, ssl.SSLError):
            sock.close()
            return
        guest = _Guest(link, f"{where[0]}:{where[1]}", time.monotonic() + _GREET_WITHIN_S)
        self._guests.add(guest)
        self._selector.register(link, selectors.EVENT_READ, lambda: self._read_guest(guest))

    def _drop_guest(self, guest: _Guest) -> None:
        self._guests.discard(guest)
        self._selector.unregister(guest.link)
        guest.link.close()

    def _read_guest(self, guest: _Guest) -> None:
        if guest not in self._guests:
            return
        try:
            guest.link.flush()
            for frame in guest.link.receive():
                if not isinstance(frame, Greeting):
                    raise ProtocolError(f"a {type(frame).__name__} instead of a greeting")
                self._greet(guest, frame)
                return
        except LinkCut as cut:
            if not cut.by_peer:
                self._refusals.note(guest.address, str(cut))
            self._drop_guest(guest)
        except ProtocolError as error:
            self._refusals.note(guest.address, str(error))
            self._drop_guest(guest)

    def _greet(self, guest: _Guest, said: Greeting) -> None:
        start = self._start
        verdict = judge(
            said,
            layout=layout_hash(),
            instance=start.instance,
            term=self._term,
            num_hosts=start.num_hosts,
            hosts={number: _known(host) for number, host in self._hosts.items()},
        )
        if isinstance(verdict, Refused):
            self._refusals.note(guest.address, verdict.reason)
            guest.link.send(verdict)
            with contextlib.suppress(LinkCut):
                guest.link.flush()
            self._drop_guest(guest)
            return
        self._selector.unregister(guest.link)
        self._guests.discard(guest)
        host = self._hosts.setdefault(verdict.host, _Host(verdict.host, said.name))
        host.name, host.address = said.name, guest.address
        if verdict.is_new:
            self._begin(host, said)
        assert host.there is not None
        self._attach(host, host.there, guest.link, said, verdict)

    def _begin(self, host: _Host, said: Greeting) -> None:
        session = Session(self._start.detect_ms, self._start.grace_s, time.monotonic())
        host.there = RemoteHost(
            host.number, said.boot, session, self._selector, self._tell_orchestrator, self._supervisor.give
        )
        log.info("host %d (%s) has joined from %s", host.number, host.name, host.address)

    def _attach(self, host: _Host, there: RemoteHost, link: TlsLink, said: Greeting, verdict: Admitted) -> None:
        start, session = self._start, there.session
        if session.link is not None:
            self._selector.unregister(session.link)
        link.send(
            Welcome(
                instance=start.instance,
                term=self._term,
                host=host.number,
                num_received=session.incoming.num_received,
                num_gateways=start.num_gateways,
                device=start.device,
                detect_ms=start.detect_ms,
                grace_s=start.grace_s,
            )
        )
        try:
            session.attach(link, said.num_received, time.monotonic())
        except ProtocolError as error:
            self._lose(host, str(error))
            return
        self._selector.register(link, selectors.EVENT_READ, lambda: self._read_host(host))
        if verdict.is_new:
            self._tell_orchestrator(_joined(host, there), [])
        else:
            log.info("the link to host %d (%s) is back", host.number, host.name)
        self._read_host(host)

    # -- the first host --------------------------------------------------------------------------

    def _tell_orchestrator(self, message: AnyMessage, fds: list[int]) -> None:
        """What there is none for is dropped: the next one is told everything."""
        if self._orchestrator is not None:
            self._orchestrator.give(message, fds)
        else:
            for fd in fds:
                os.close(fd)

    def _read_supervisor(self) -> None:
        for message, fds in self._supervisor.receive_frames():
            match message:
                case OrchestratorAttached():
                    (fd,) = fds.take()
                    self._attach_orchestrator(Channel.of_fd(fd))
                case GatewayAttached():
                    for there in self._there():
                        there.attach_gateway(message.gateway)
                case Shutdown():
                    self._end()
                case _:
                    raise AssertionError(f"the supervisor does not send {type(message).__name__} to the carrier")

    def _attach_orchestrator(self, channel: Channel) -> None:
        self._detach_orchestrator()
        self._orchestrator = channel
        self._selector.register(channel, selectors.EVENT_READ, self._read_orchestrator)
        for host in self._hosts.values():
            if host.there is not None:
                self._tell_orchestrator(_joined(host, host.there), [])
                host.there.hand_over()

    def _detach_orchestrator(self) -> None:
        if self._orchestrator is not None:
            self._selector.unregister(self._orchestrator)
            self._orchestrator.close()
            self._orchestrator = None

    def _read_orchestrator(self) -> None:
        if self._orchestrator is None:
            return
        try:
            for message, fds in self._orchestrator.receive_frames():
                self._on_order(message, fds.numbers)
        except ChannelClosed:
            self._detach_orchestrator()

    def _on_order(self, message: AnyMessage, fds: tuple[int, ...]) -> None:
        match message:
            case EvictHost():
                self._evict(message)
            case AdmitHost():
                if (host := self._hosts.get(message.host)) is not None:
                    host.is_refused = False
            case Provision():
                self._tell(message.start.host, message, fds)
            case Allocate() | Offer() | Release():
                self._tell(message.memory.host, message, fds)
            case SignalWorker():
                for there in self._there():
                    if there.has(message.rank, message.incarnation):
                        there.tell(message, ())
            case _:
                raise AssertionError(f"the orchestrator does not send {type(message).__name__} to the carrier")

    def _tell(self, number: int, message: AnyMessage, fds: tuple[int, ...]) -> None:
        """Nothing is started on a host that is not there, nor is there memory."""
        host = self._hosts.get(number)
        if host is not None and host.there is not None:
            host.there.tell(message, fds)
        elif isinstance(message, Allocate):
            self._tell_orchestrator(Withdraw(memory=message.memory, reason=f"host {number} is not there"), [])
        elif isinstance(message, Provision):
            start = message.start
            exited = WorkerExited(rank=start.rank, incarnation=start.incarnation, exit_status=1)
            self._tell_orchestrator(exited, [])

    def _evict(self, message: EvictHost) -> None:
        host = self._hosts.setdefault(message.host, _Host(message.host, name=""))  # a new carrier knows none
        host.is_refused = message.gone
        there, host.there = host.there, None
        if there is not None:
            there.session.send(Fenced(reason="an operator says that the host is lost"))
            self._part(there)

    def _end(self) -> None:
        """The instance ends in order."""
        for there in self._there():
            there.session.send(Ended())
        by_s = time.monotonic() + _LAST_WORDS_S
        while time.monotonic() < by_s and any(
            there.session.link is not None and there.session.link.num_waiting for there in self._there()
        ):
            for there in self._there():
                self._flush_last(there.session)
            time.sleep(RETRY_S)
        self._is_over = True


def _known(host: _Host) -> Known:
    boot = host.there.boot if host.there is not None else ""
    num_received = host.there.session.incoming.num_received if host.there is not None else 0
    return Known(host.name, boot, num_received, host.is_refused)


def _joined(host: _Host, there: RemoteHost) -> HostJoined:
    return HostJoined(host=host.number, name=host.name, address=host.address, found=there.found())
