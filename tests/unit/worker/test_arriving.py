"""Streams that come together are received together, however little the socket holds; and nobody waits for ever."""

import threading

import pytest

from everserve.tables.requests import RequestSpec, SamplingParams, as_tokens
from everserve.wire.channel import Channel, ChannelClosed
from everserve.wire.messages import Cancel, Submit
from everserve.worker import attention as arriving
from everserve.worker.attention import receive_together


def pair() -> tuple[Channel, Channel]:
    a, b = Channel.pair()
    return Channel(a), Channel(b)


def submit(number: int, num_following: int, num_tokens: int = 1) -> Submit:
    spec = RequestSpec(id=str(number), prompt=as_tokens([30_000] * num_tokens), params=SamplingParams(max_tokens=1))
    return Submit(spec=spec, source=None, num_following=num_following)


def test_more_than_a_socket_holds(monkeypatch):
    monkeypatch.setattr(arriving, "_TOGETHER_S", 60.0)
    gateway, worker = pair()
    sent = [submit(i, num_following=99 - i, num_tokens=4000) for i in range(100)]
    for message in sent:
        gateway.send(message)
    assert gateway.wants_write, "they do not fit at once"

    def go_on() -> None:
        while gateway.wants_write:
            gateway.wait(None)

    writer = threading.Thread(target=go_on)
    writer.start()
    received = list(receive_together(worker))
    writer.join()
    assert received == sent


class Clock:
    """Stands still, but for what the test adds."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(arriving, "time", clock)
    monkeypatch.setattr(arriving, "_TOGETHER_S", 0.5)
    return clock


def test_what_was_announced_and_does_not_come_is_not_waited_for_again(monkeypatch, clock):
    gateway, worker = pair()
    gateway.send(submit(0, num_following=3))
    waits_s: list[float] = []

    def nothing_comes(timeout_s: float) -> bool:
        waits_s.append(timeout_s)
        clock.now_s += timeout_s
        return False

    monkeypatch.setattr(worker, "wait", nothing_comes)
    assert len(list(receive_together(worker))) == 1
    assert waits_s == [0.5], "once, and for all the time there is"
    monkeypatch.setattr(worker, "wait", lambda timeout_s: pytest.fail("nothing was announced with this"))
    gateway.send(Cancel(id="0"))
    assert list(receive_together(worker)) == [Cancel(id="0")]


def test_those_that_run_do_not_wait_long_for_many(monkeypatch, clock):
    """However fast they come."""
    gateway, worker = pair()

    def another(timeout_s: float) -> bool:
        clock.now_s += 0.125
        gateway.send(submit(0, num_following=1))
        return True

    monkeypatch.setattr(worker, "wait", another)
    gateway.send(submit(0, num_following=1))
    assert len(list(receive_together(worker))) == 5, "four more came in the half second that there is"


def test_nobody_waits_if_all_are_there(monkeypatch):
    gateway, worker = pair()
    monkeypatch.setattr(worker, "wait", lambda timeout_s: pytest.fail("all are there"))
    sent = [submit(0, 1), submit(1, 0), Cancel(id="0")]
    for message in sent:
        gateway.send(message)
    assert list(receive_together(worker)) == sent


def test_a_gateway_that_ends_in_between():
    gateway, worker = pair()
    gateway.send(submit(0, num_following=2))
    gateway.close()
    received = []
    with pytest.raises(ChannelClosed):
        for message in receive_together(worker):
            received.append(message)
    assert len(received) == 1
