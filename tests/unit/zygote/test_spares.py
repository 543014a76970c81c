"""What the zygote keeps ahead of need: when spares are forked, who is given away, what becomes of bad ones."""

import socket
from collections.abc import Callable, Sequence

import pytest

from everserve.tables.ids import Incarnation, Rank, Role
from everserve.wire.channel import Channel
from everserve.wire.messages import AnyMessage, ForkWorker, Ready, StartWorker
from everserve.zygote import spares as spares_module
from everserve.zygote.spares import QUIET_S, Spare, Spares
from tests.support.configs import SMALL
from tests.support.descriptors import num_fds

ATTENTION, EXPERT = (Role.ATTENTION,), (Role.EXPERT,)


def start(device: int = 0, roles: tuple[Role, ...] = ATTENTION, rank: int = 0) -> StartWorker:
    return StartWorker(
        rank=Rank(rank), incarnation=Incarnation(1), roles=roles, settings=SMALL, num_workers=1, slots=None,
        detect_ms=0.0, gpu=device,
    )  # fmt: skip


class Asking(Channel):
    """The zygote's end of a channel to a spare, which answers before the zygote waits, or never."""

    def __init__(self, sock: socket.socket, on_ask: dict[int, Callable[[], None]], pid: int) -> None:
        super().__init__(sock)
        self._on_ask, self._pid = on_ask, pid

    def send(self, message: AnyMessage, fds: Sequence[int] = ()) -> None:
        super().send(message, fds)
        self._on_ask[self._pid]()


class World:
    """Spares without processes: their ends of the channels are here."""

    def __init__(self) -> None:
        self.spares = Spares(self.fork, lambda pid: self.states.get(pid, "S"), self.kill)
        self.ends: dict[int, Channel] = {}
        self.like: dict[int, tuple[StartWorker, ...]] = {}
        self.states: dict[int, str] = {}
        self.killed: list[int] = []
        self.on_ask: dict[int, Callable[[], None]] = {}
        self.on_kill: dict[int, Callable[[], None]] = {}
        self.now = 100.0

    def fork(self, device: int, like: tuple[StartWorker, ...]) -> Spare:
        ours, theirs = Channel.pair()
        pid = 1000 + len(self.ends)
        self.ends[pid] = Channel(theirs)
        self.like[pid] = like
        self.on_ask[pid] = lambda: self.ends[pid].send(Ready())
        return Spare(pid, device, Asking(ours, self.on_ask, pid))

    def kill(self, pid: int) -> None:
        self.killed.append(pid)
        self.on_kill.get(pid, lambda: None)()

    def learn(self, *starts: StartWorker) -> None:
        for one in starts:
            self.spares.learn(one, self.now)

    def later(self, seconds: float = QUIET_S) -> None:
        self.now += seconds
        self.spares.tend(self.now)

    def say_ready(self, *pids: int) -> None:
        for pid in pids:
            self.ends[pid].send(Ready())
        self.spares.tend(self.now)

    def take(self, device: int = 0) -> int | None:
        return self.spares.become(ForkWorker(start=start(device)), (), self.now)

    def close(self) -> None:
        for end in (*self.spares.channels, *self.ends.values()):
            end.close()


@pytest.fixture
def world():
    before = num_fds()
    world = World()
    yield world
    world.close()
    assert num_fds() == before, "every channel was closed"


def test_without_spares_nothing_is_due(world):
    world.spares.prepare(0, (), world.now)
    world.learn(start())
    world.later()
    assert not world.ends and world.spares.timeout_s(world.now) is None and world.spares.num_wanted == 0


def test_they_come_when_nobody_starts(world):
    world.spares.prepare(2, (), world.now)
    assert world.spares.timeout_s(world.now) is None, "what should they become?"
    world.learn(start())
    world.later(QUIET_S / 2)
    world.learn(start(rank=1))
    world.later(QUIET_S / 2)
    assert not world.ends, "rank 1 has hardly begun"
    assert world.spares.timeout_s(world.now) == pytest.approx(QUIET_S / 2)
    world.later(QUIET_S / 2)
    assert list(world.ends) == [1000, 1001] and world.spares.num_wanted == 2
    assert world.spares.ready_pids == () and world.take() is None, "they have just begun themselves"
    world.say_ready(1001)
    assert world.spares.ready_pids == (1001,)
    assert world.take() == 1001 and world.take() is None


def test_one_of_each_kind_is_rehearsed(world):
    world.spares.prepare(1, (start(roles=EXPERT), start(rank=7)), world.now)
    world.learn(start(rank=8))
    world.later()
    assert {(one.roles, one.rank) for one in world.like[1000]} == {(EXPERT, 0), (ATTENTION, 8)}


def test_each_device_has_its_own(world):
    world.spares.prepare(1, (), world.now)
    world.learn(start(0), start(1))
    world.later()
    world.say_ready(1000, 1001)
    assert [one.gpu for pid in (1000, 1001) for one in world.like[pid]] == [0, 1]
    assert world.spares.num_wanted == 2
    assert world.take(1) == 1001 and world.take(1) is None and world.take(0) == 1000


def test_who_was_given_away_is_replaced_later(world):
    world.spares.prepare(1, (start(),), world.now)
    world.later()
    world.say_ready(1000)
    world.learn(start())
    assert world.take() == 1000
    world.later(QUIET_S / 2)
    assert len(world.ends) == 1
    world.later(QUIET_S / 2)
    assert len(world.ends) == 2


def test_the_dead_and_the_stopped_are_not_given_away(world):
    world.spares.prepare(3, (start(),), world.now)
    world.later()
    world.say_ready(1000, 1001, 1002)
    world.ends[1000].close()
    world.states[1001] = "T"
    assert world.take() == 1002
    assert world.killed == [1001], "it would sleep forever"
    assert world.spares.ready_pids == ()
    world.later()
    assert len(world.ends) == 6


@pytest.fixture
def short_wait(monkeypatch):
    monkeypatch.setattr(spares_module, "_ANSWER_S", 0.01)


def test_one_that_does_not_answer_is_no_worker(world, short_wait):
    """Its SIGSTOP came after its state was read."""
    world.spares.prepare(2, (start(),), world.now)
    world.later()
    world.say_ready(1000, 1001)
    world.on_ask[1000] = lambda: None
    assert world.take() == 1001 and world.killed == [1000]
    assert world.take() is None


def test_one_that_answers_when_it_is_killed_was_a_worker(world, short_wait):
    """It may have said hello, so another process must not do so under its name."""
    world.spares.prepare(1, (start(),), world.now)
    world.later()
    world.say_ready(1000)
    world.on_ask[1000] = lambda: None
    world.on_kill[1000] = lambda: (world.ends[1000].send(Ready()), world.ends[1000].close())
    assert world.take() == 1000 and world.killed == [1000]


def test_one_that_dies_when_it_is_asked(world):
    world.spares.prepare(1, (start(),), world.now)
    world.later()
    world.say_ready(1000)
    world.on_ask[1000] = world.ends[1000].close
    assert world.take() is None and not world.killed


def test_one_that_ended_is_noticed_without_a_need(world):
    world.spares.prepare(1, (start(),), world.now)
    world.later()
    world.say_ready(1000)
    world.ends[1000].close()
    world.spares.tend(world.now)
    assert world.spares.ready_pids == () and len(world.ends) == 1, "not at once"
    world.later()
    assert len(world.ends) == 2


def test_those_that_never_get_ready_come_more_and_more_seldom(world):
    world.spares.prepare(1, (start(),), world.now)
    world.later()
    delays = []
    for _ in range(7):
        world.ends[max(world.ends)].close()
        world.spares.tend(world.now)
        timeout_s = world.spares.timeout_s(world.now)
        assert timeout_s is not None
        delays.append(timeout_s)
        world.later(timeout_s)
    assert delays == pytest.approx([4, 8, 16, 32, 60, 60, 60])
    world.say_ready(max(world.ends))
    world.ends[max(world.ends)].close()
    world.spares.tend(world.now)
    assert world.spares.timeout_s(world.now) == pytest.approx(QUIET_S)
