"""One end's side of a boot: what was sent and received so far, over one connection after the other."""

from collections.abc import Iterator

from everserve.carrier.frames import AnyContent, Beat, Numbered, Pulse
from everserve.carrier.resend import Incoming, Outgoing
from everserve.carrier.tls import TlsLink
from everserve.errors import ProtocolError

_MOST_WAITING = 32 << 20  # bytes that were not acknowledged: then local sockets are not read
_BEATS_PER_DETECTION = 5  # as a warden's pulse
_DEFAULT_DETECT_MS = 50.0  # where silence of workers is not detected
_OUTLIVES = 3.0  # times the grace: the joined host gives up after two (far.py)
_MOST_BEHIND = 1 << 20  # bytes that a connection has not taken: a beat more would only come later


class Session:
    """`grace_s`: how long a connection may be away."""

    def __init__(self, detect_ms: float, grace_s: float, now_s: float) -> None:
        self.grace_s = grace_s
        self.link: TlsLink | None = None
        self.outgoing, self.incoming = Outgoing(), Incoming()
        self.heard_s = now_s  # when a frame came last
        self._period_s = (detect_ms or _DEFAULT_DETECT_MS) / 1000 / _BEATS_PER_DETECTION
        self._beat_s = now_s

    @property
    def is_behind(self) -> bool:
        """Whether what local sockets have must wait."""
        return self.outgoing.num_bytes > _MOST_WAITING

    def silent_s(self, now_s: float) -> float:
        return now_s - self.heard_s

    def attach(self, link: TlsLink, num_received: int, now_s: float) -> None:
        """A new connection, whose other end has received so many. Raises ProtocolError."""
        if self.link is not None:
            self.link.close()
        self.link, self.heard_s = link, now_s
        link.welcome(_OUTLIVES * self.grace_s)
        for frame in self.outgoing.resume(num_received):
            link.send_packed(frame)

    def detach(self) -> None:
        """The connection is of no use any more."""
        if self.link is not None:
            self.link.close()
            self.link = None

    def send(self, content: AnyContent) -> None:
        frame = self.outgoing.add(content)
        if self.link is not None:
            self.link.send_packed(frame)

    def is_due(self, now_s: float) -> bool:
        """Whether the other end should hear from us."""
        return now_s >= self._beat_s

    def timeout_s(self, now_s: float) -> float:
        """Until then."""
        return max(0.0, self._beat_s - now_s)

    def beat(self, now_s: float, pulses: list[Pulse]) -> None:
        self._beat_s = now_s + self._period_s
        if self.link is not None and self.link.num_waiting < _MOST_BEHIND:
            self.link.send(Beat(num_received=self.incoming.num_received, pulses=pulses))

    def receive(self, now_s: float) -> Iterator[AnyContent | Beat]:
        """What has come, each once. Raises LinkCut, and ProtocolError for what no carrier sends."""
        assert self.link is not None
        for frame in self.link.receive():
            self.heard_s = now_s
            match frame:
                case Beat():
                    self.outgoing.acknowledge(frame.num_received)
                    yield frame
                case Numbered():
                    content = self.incoming.take(frame)
                    if content is not None:
                        yield content
                case _:
                    raise ProtocolError(f"a {type(frame).__name__} comes first, or not at all")

    def flush(self) -> None:
        """Raises LinkCut."""
        if self.link is not None:
            self.link.flush()
