"""Channels: framing, descriptors, bad bytes, slow readers, ends."""

import asyncio
import os
import socket
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everserve.tables.ids import Incarnation, Rank
from everserve.wire.channel import MAX_PACKET_BYTES, AsyncChannel, Channel, ChannelClosed
from everserve.wire.messages import Attach, Cancel, Ready, encode
from tests.support.examples import examples


def pair() -> tuple[Channel, Channel]:
    a, b = Channel.pair()
    return Channel(a), Channel(b)


def test_messages_arrive_in_order():
    a, b = pair()
    messages = [Cancel(id=str(i)) for i in range(1000)]
    received = []
    for message in messages:
        a.send(message)
    while len(received) < len(messages):
        received += b.receive_all()
        a.flush()
    assert received == messages


@pytest.mark.parametrize("bytes_asked", [None, 20_000, 1 << 20])
def test_a_channel_holds_what_was_asked_for_before_the_other_reads(bytes_asked):
    bytes_allowed = int(Path("/proc/sys/net/core/wmem_max").read_text())
    a, b = map(Channel, Channel.pair(bytes_asked))
    num_sent = 0
    while not a.wants_write:
        a.send(Cancel(id="x" * 8000))
        num_sent += 1
    usual = 100_000  # of more than twice as much, half of which is the kernel's own
    assert num_sent * 8000 >= min(bytes_asked or usual, bytes_allowed // 2)
    while num_sent:
        num_sent -= len(b.receive_all())
        a.flush()
    a.close()
    b.close()


@examples(15)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=20))
def test_any_fragmentation(cuts):
    sender, receiver = socket.socketpair()
    channel = Channel(receiver)
    frames = b"".join(struct.pack("<I", len(p)) + p for p in (encode(Cancel(id="x" * n)) for n in cuts))
    received = []
    for n in cuts * 5:
        sender.sendall(frames[:n])
        frames = frames[n:]
        received += channel.receive_all()
    sender.sendall(frames)
    received += channel.receive_all()
    assert [len(m.id) for m in received] == cuts
    sender.close()
    channel.close()


def test_a_reader_that_does_not_read_does_not_block_the_writer():
    a, b = pair()
    big = Cancel(id="x" * 100_000)
    for _ in range(100):
        a.send(big)
    assert a.wants_write
    count = 0
    while count < 100:
        count += len(b.receive_all())
        a.flush()
    assert not a.wants_write


def test_bytes_that_are_no_message_are_dropped_and_counted():
    sender, receiver = socket.socketpair()
    channel = Channel(receiver)
    for payload in (b"\xff\xff garbage", encode(Ready()), b"", b"\x81\xa4type\xa3Bad"):
        sender.sendall(struct.pack("<I", len(payload)) + payload)
    assert channel.receive_all() == [Ready()]
    assert channel.num_dropped == 3


def test_the_end_comes_after_everything_that_was_sent():
    a, b = pair()
    a.send(Ready())
    a.close()
    assert b.receive_all() == [Ready()]
    with pytest.raises(ChannelClosed):
        b.receive_all()
    b.send(Ready())  # nobody listens; not an error of the sender


def test_descriptors_travel_with_their_message():
    a, b = pair()
    reader, writer = os.pipe()
    a.send(Attach(rank=Rank(0), incarnation=Incarnation(1)), fds=[reader])
    os.close(reader)
    message, fds = b.receive_frame(timeout_s=1)
    assert isinstance(message, Attach)
    os.write(writer, b"hello")
    (fd,) = fds.take()
    assert os.read(fd, 5) == b"hello"
    os.close(fd)
    os.close(writer)


@pytest.mark.parametrize("num_fds", [0, 1, 3])
@pytest.mark.parametrize("way", ["send", "give", "try_send"])
def test_a_message_that_no_packet_holds_travels_in_memory(way, num_fds, tmp_path):
    """Whatever its size, and with the descriptors that belong to it; in order, also behind a reader that is late."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    ours, theirs = (Channel(end) for end in Channel.pair(are_packets=True))
    large = Cancel(id="x" * 3 * MAX_PACKET_BYTES)
    files = [(tmp_path / str(i)).open("w") for i in range(num_fds)]
    for _ in range(3):
        fds = [os.dup(file.fileno()) for file in files]
        assert getattr(ours, way)(large, fds) in (None, True)
        if way != "give":
            for fd in fds:
                os.close(fd)
    ours.send(Cancel(id="small"))
    for _ in range(3):
        frame = theirs.receive_frame(10)
        assert frame.message == large
        assert [os.fstat(fd).st_ino for fd in frame.fds.numbers] == [os.fstat(file.fileno()).st_ino for file in files]
        frame.fds.close()
    assert theirs.receive(10) == Cancel(id="small")
    for each in (ours, theirs, *files):
        each.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_receive_times_out():
    _, b = (ends := pair())
    assert b.receive(timeout_s=0.01) is None
    del ends


def test_async_end():
    async def talk() -> list:
        a, b = Channel.pair()
        left, right = AsyncChannel(a), AsyncChannel(b)
        for i in range(50):
            left.send(Cancel(id=str(i) * 20_000))
        received = [await right.receive() for _ in range(50)]
        left.close()
        with pytest.raises(ChannelClosed):
            await right.receive()
        right.close()
        return received

    assert [m.id[:1] for m in asyncio.run(talk())] == [str(i)[0] for i in range(50)]


def test_what_is_not_read_yet_stays_for_another_reader():
    """One that dies before it reads leaves everything to the next."""

    async def talk() -> object:
        a, b = Channel.pair(are_packets=True)
        with a, b:
            first = AsyncChannel(b, reads=False)
            Channel(a).send(Ready())
            await asyncio.sleep(0.01)
            assert not first.descriptors()
            return await AsyncChannel(b.dup()).receive()

    assert asyncio.run(talk()) == Ready()


def test_a_channel_may_be_closed_in_the_turn_in_which_it_becomes_readable():
    async def talk() -> None:
        failures: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(context))
        a, b = Channel.pair()
        channel = AsyncChannel(Channel(b))
        channel.close()
        a.close()
        await asyncio.sleep(0.01)
        assert not failures

    asyncio.run(talk())
