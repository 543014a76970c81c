"""A worker's channel to its orchestrator: ends, successors, last words, and the end of the lifeline."""

import pytest

from everserve.tables.ids import Epoch, Incarnation, Rank
from everserve.wire.channel import Channel, Descriptors
from everserve.wire.messages import AnyMessage, Fenced, Leave, OrchestratorAttached, PeerLeft, Ready, Report, Withdraw
from everserve.worker.control import ControlEnd
from tests.support.descriptors import num_fds
from tests.support.memories import memory
from tests.support.readable import is_readable

REPORT = Report(is_ready=True, is_leaving=False, epoch=Epoch(7), peers=[(Rank(2), Incarnation(1))], memory=[])


class World:
    """The two processes at the other ends."""

    def __init__(self) -> None:
        ours, theirs = Channel.pair()
        lifeline, supervisor = Channel.pair()
        self.orchestrator, self.supervisor = Channel(theirs), Channel(supervisor)
        self.end = ControlEnd(Channel(ours), Channel(lifeline))
        self.end.make_report = lambda: REPORT
        self.heard: list[AnyMessage] = []

    def read(self) -> list[AnyMessage]:
        self.heard.clear()
        self.end.read(lambda message, _: self.heard.append(message))
        return list(self.heard)

    def replace(self) -> Channel:
        """A new orchestrator."""
        ours, theirs = Channel.pair()
        self.supervisor.send(OrchestratorAttached(), fds=[theirs.fileno()])
        theirs.close()
        return Channel(ours)

    def is_readable(self) -> bool:
        return is_readable(self.end)


@pytest.fixture
def world() -> World:
    return World()


def test_messages_both_ways(world):
    world.orchestrator.send(Leave())
    assert world.is_readable() and world.read() == [Leave()] and not world.is_readable()
    world.end.send(Ready())
    assert world.orchestrator.receive(timeout_s=5) == Ready()


def test_without_an_orchestrator_words_are_lost_and_nothing_else(world):
    world.orchestrator.close()
    assert world.is_readable() and world.read() == []
    world.end.send(Ready())
    world.end.flush()
    assert not world.is_readable() and world.read() == [] and not world.end.is_cut


def test_a_new_one_gets_a_report_first(world):
    world.orchestrator.close()
    new = world.replace()
    assert world.is_readable() and world.read() == []
    world.end.send(Ready())
    assert [new.receive(timeout_s=5), new.receive(timeout_s=5)] == [REPORT, Ready()]
    new.send(Leave())
    assert world.read() == [Leave()]


def test_the_last_words_of_the_old_one_are_heard_before_the_report(world):
    """What it had decided counts: a report that did not know of it would be wrong."""
    left = PeerLeft(rank=Rank(2), incarnation=Incarnation(1))
    seen: list[str] = []
    world.end.make_report = lambda: seen.append("report") or REPORT
    world.orchestrator.send(left)
    new = world.replace()
    world.orchestrator.close()
    world.end.read(lambda message, _: seen.append(type(message).__name__))
    assert seen == ["PeerLeft", "report"] and new.receive(timeout_s=5) == REPORT


def test_an_exception_in_its_last_words_gets_through(world):
    world.orchestrator.send(Fenced(reason="late"))
    world.orchestrator.close()
    world.replace()

    def handle(message: AnyMessage, _: Descriptors) -> None:
        raise RuntimeError(type(message).__name__)

    with pytest.raises(RuntimeError, match="Fenced"):
        world.end.read(handle)


def test_half_a_message_ends_with_its_sender(world):
    world.orchestrator.sock.send(b"\x40\x00\x00\x00half")
    new = world.replace()
    world.orchestrator.close()
    assert world.read() == [] and new.receive(timeout_s=5) == REPORT


def test_one_after_the_other(world):
    for _ in range(5):
        new = world.replace()
        world.orchestrator.close()
        world.read()
        assert new.receive(timeout_s=5) == REPORT
        world.orchestrator = new
    world.orchestrator.send(Withdraw(memory=memory("log-0.3")))
    assert len(world.read()) == 1


def test_the_end_of_the_lifeline_is_the_end(world):
    """Nobody knows this process: it must not live on."""
    world.supervisor.close()
    assert world.is_readable()
    world.read()
    assert world.end.is_cut


def test_a_worker_that_loads_leaves_its_lifeline_alone(world):
    world.end.make_report = None
    new = world.replace()
    world.orchestrator.close()
    assert world.read() == []
    world.end.make_report = lambda: REPORT
    world.read()
    assert new.receive(timeout_s=5) == REPORT


def test_no_descriptor_is_left_behind(world):
    before = num_fds()
    for _ in range(4):
        new = world.replace()
        world.orchestrator.close()
        world.read()
        world.orchestrator = new
    assert num_fds() == before
