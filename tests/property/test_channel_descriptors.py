"""Frames of all sizes with and without descriptors, frames that are dropped, readers that come and go: each message
comes with its own descriptors, and what is not taken is closed."""

import gc
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everserve.wire.channel import MAX_FDS, Channel
from everserve.wire.messages import Cancel
from tests.support.descriptors import num_fds
from tests.support.examples import examples

SMALLEST_BUFFER = 4608  # of a socket, so that frames go out in pieces


class Noise(msgspec.Struct, frozen=True, tag=True):
    """None of our messages."""

    id: str


@dataclass(frozen=True)
class Sent:
    """One frame: how long, with how many descriptors, and whether it is a message at all."""

    num_bytes: int
    num_fds: int
    is_noise: bool


frames = st.builds(
    Sent,
    st.sampled_from([0, 1, 7, 100, 3000, 5000, 70_000]),
    st.sampled_from([0, 0, 1, 2, 3, 16, MAX_FDS]),
    st.sampled_from([False, False, False, True]),
)
# What the reader does between two sends: how many frames it reads at most, and whether it takes what comes with them.
reads = st.tuples(st.sampled_from([0, 0, 1, 2, 100]), st.booleans())


class Reader:
    """Checks what comes against what was sent."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.expected: list[tuple[int, list[int]]] = []  # of messages: their length, whose descriptors
        self.num_read = 0

    def read(self, at_most: int, takes: bool) -> None:
        if not at_most:
            return
        for num_read, (message, fds) in enumerate(self.channel.receive_frames(), start=1):
            length, identities = self.expected[self.num_read]
            self.num_read += 1
            assert len(message.id) == length and len(fds) == len(identities)
            if takes:
                taken = fds.take()
                assert [os.fstat(fd).st_ino for fd in taken] == identities
                for fd in taken:
                    os.close(fd)
            if num_read >= at_most:
                break


@pytest.fixture(autouse=True, scope="module")
def collect():
    """What other tests have left is not closed while we count."""
    gc.collect()


@contextmanager
def no_leak() -> Iterator[None]:
    before = num_fds()
    yield
    assert num_fds() == before


def send(channel: Channel, sent: Sent) -> list[int]:
    fds = [os.memfd_create("descriptor") for _ in range(sent.num_fds)]
    channel.send((Noise if sent.is_noise else Cancel)(id="x" * sent.num_bytes), fds)
    identities = [os.fstat(fd).st_ino for fd in fds]
    for fd in fds:
        os.close(fd)
    return identities


def pair() -> tuple[Channel, Channel]:
    ours, theirs = Channel.pair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALLEST_BUFFER)
    return Channel(ours), Channel(theirs)


@examples(38)
@given(st.lists(st.tuples(frames, reads), max_size=25))
def test_each_message_comes_with_its_own_descriptors(schedule):
    with no_leak():
        sender, receiver = pair()
        reader, num_noise = Reader(receiver), 0
        for sent, read in schedule:
            identities = send(sender, sent)
            num_noise += sent.is_noise
            if not sent.is_noise:
                reader.expected.append((sent.num_bytes, identities))
            reader.read(*read)
        while sender.wants_write:
            sender.flush()
            reader.read(100, takes=True)
        reader.read(1000, takes=True)
        assert reader.num_read == len(reader.expected) and receiver.num_dropped == num_noise
        sender.close()
        receiver.close()


@examples(25)
@given(st.lists(frames, max_size=12), st.integers(0, 12), st.booleans())
def test_an_end_at_any_moment_leaves_nothing_open(sents, num_read, sender_ends_first):
    with no_leak():
        sender, receiver = pair()
        for sent in sents:
            send(sender, sent)
        list(islice((message for message, _ in receiver.receive_frames()), num_read))
        ends = (sender, receiver) if sender_ends_first else (receiver, sender)
        for end in ends:
            end.close()
