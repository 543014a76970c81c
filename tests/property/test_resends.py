"""A link may be cut at any byte, as often as it likes: every frame comes once, in order."""

from hypothesis import given
from hypothesis import strategies as st

from everserve.carrier.frames import LENGTH, Beat, Bytes, Numbered, pack, unpack
from everserve.carrier.resend import Incoming, Outgoing
from everserve.errors import ProtocolError

SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=12)


class Wire:
    """One connection: what was sent, of which only a part comes."""

    def __init__(self) -> None:
        self.sent = b""
        self._read = 0

    def frames(self, num_bytes: int) -> list:
        """Those that are whole when so many bytes have come."""
        found = []
        while self._read + LENGTH.size <= min(num_bytes, len(self.sent)):
            (length,) = LENGTH.unpack_from(self.sent, self._read)
            end = self._read + LENGTH.size + length
            if end > num_bytes:
                break
            found.append(unpack(self.sent[self._read + LENGTH.size : end]))
            self._read = end
        return found


@given(SIZES, st.lists(st.integers(0, 600), max_size=8), st.data())
def test_every_frame_comes_once_and_in_order(sizes, cuts, data):
    outgoing, incoming = Outgoing(), Incoming()
    wire, received, waiting = Wire(), [], [Bytes(line=i, data=b"x" * size) for i, size in enumerate(sizes)]
    expected = list(waiting)

    def take(num_bytes: int) -> None:
        for frame in wire.frames(num_bytes):
            assert isinstance(frame, Numbered)
            content = incoming.take(frame)
            received.extend([content] if content is not None else [])
            if data.draw(st.booleans(), label="acknowledged"):
                outgoing.acknowledge(incoming.num_received)

    for cut in cuts:
        for _ in range(data.draw(st.integers(0, 3), label="sent")):
            if waiting:
                wire.sent += outgoing.add(waiting.pop(0))
        take(min(cut, len(wire.sent)))
        wire = Wire()  # all else of this connection is lost
        wire.sent = b"".join(outgoing.resume(incoming.num_received))
    for content in waiting:
        wire.sent += outgoing.add(content)
    take(len(wire.sent))
    outgoing.acknowledge(incoming.num_received)
    assert received == expected
    assert outgoing.num_bytes == 0


@given(st.integers(0, 5), st.integers(0, 9))
def test_what_cannot_be_true_is_refused(num_sent, num_received):
    outgoing = Outgoing()
    for line in range(num_sent):
        outgoing.add(Bytes(line=line, data=b""))
    try:
        outgoing.acknowledge(num_received)
        assert num_received <= num_sent
    except ProtocolError:
        assert num_received > num_sent


def test_a_gap_is_a_fault():
    outgoing, incoming = Outgoing(), Incoming()
    frames = [outgoing.add(Bytes(line=line, data=b"")) for line in range(3)]
    first, _, third = (unpack(frame[LENGTH.size :]) for frame in frames)
    assert incoming.take(first) is not None
    try:
        incoming.take(third)
    except ProtocolError:
        return
    raise AssertionError("a frame is missing")


def test_a_beat_is_not_numbered():
    assert unpack(pack(Beat(num_received=2))[LENGTH.size :]) == Beat(num_received=2)
