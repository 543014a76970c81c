"""What the supervisor keeps for the next orchestrator: memory of workers that have exited, by name."""

import gc
import os
import select

import pytest

from everserve.procs import deferred_close as held
from everserve.procs import device_descriptors
from everserve.procs.provisioner import Workers
from everserve.tables.ids import Incarnation, Rank, Role, WorkerId
from everserve.tables.memory import seat_owner
from everserve.wire.channel import Channel
from everserve.wire.messages import (
    ForkWorker,
    Offer,
    Provision,
    StartWorker,
    WorkerExited,
    WorkerForked,
    WorkerStarted,
)
from tests.support.configs import worker_settings
from tests.support.descriptors import num_fds
from tests.support.memories import memory

NOBODY = 1 << 30  # more than any process's number can be


def start(incarnation: int, device: str = "cpu") -> StartWorker:
    seat = (Rank(2), Incarnation(incarnation))
    return StartWorker(
        rank=seat[0],
        incarnation=seat[1],
        roles=(Role.ATTENTION,),
        settings=worker_settings(device=device),
        num_workers=1,
        slots=None,
        detect_ms=0.0,
        memory=(memory(f"log-2.{incarnation}"), memory("weights-2")),
    )


class Told:
    """Messages, with the sizes of the memory that came along."""

    def __init__(self) -> None:
        self.messages: list[object] = []
        self.kept: dict[str, int] = {}

    def __call__(self, message, fds=()) -> None:
        self.messages.append(message)
        if isinstance(message, Offer):
            (self.kept[message.memory.name],) = (os.fstat(fd).st_size for fd in fds)


@pytest.fixture
def told():
    return Told()


@pytest.fixture
def workers(told):
    gc.collect()  # what other tests have left
    before = num_fds()
    workers = Workers(
        to_zygote=Told(),
        to_orchestrator=told,
        to_gateway=lambda number, message, fds: True,
        record=lambda: None,
        unannounced=lambda: [],
    )
    yield workers
    workers.close()
    assert num_fds() == before, "every descriptor was closed"


def live(workers: Workers, incarnation: int, pid: int, sizes=(1, 10, 100), device: str = "cpu") -> None:
    fds = [os.memfd_create("m") for _ in sizes]
    for fd, size in zip(fds, sizes, strict=True):
        os.ftruncate(fd, size)
    workers.provision(Provision(start=start(incarnation, device)), fds)
    workers.forked(WorkerForked(rank=Rank(2), incarnation=Incarnation(incarnation), pid=pid))


def kept(workers: Workers, told: Told) -> dict[str, int]:
    """What a new orchestrator would be given."""
    told.kept.clear()
    workers.hand_over()
    return dict(told.kept)


def test_memory_of_an_exited_worker_is_kept_until_it_is_dropped(workers, told):
    live(workers, 1, pid=1001)
    assert kept(workers, told) == {}, "its worker lives, and is introduced with it"
    assert isinstance(told.messages[-1], WorkerStarted)
    workers.exited(1001, -9)
    assert kept(workers, told) == {"log-2.1": 10, "weights-2": 100}
    workers.drop(memory("log-2.1"))
    assert kept(workers, told) == {"weights-2": 100}


def test_a_seats_memory_is_kept_once(workers, told):
    live(workers, 1, pid=1001)
    workers.exited(1001, -9)
    live(workers, 2, pid=1002)
    workers.exited(1002, -9)
    assert kept(workers, told) == {"log-2.1": 10, "log-2.2": 10, "weights-2": 100}


def test_what_a_worker_has_that_lives_is_not_kept_beside_it(workers, told):
    """Else every seat that was ever lost would hold its descriptors twice."""
    live(workers, 1, pid=NOBODY)
    with_one = num_fds()
    workers.exited(NOBODY, -9)
    workers.drop(memory("log-2.1"))
    live(workers, 2, pid=NOBODY)
    assert kept(workers, told) == {} and num_fds() == with_one
    live(workers, 3, pid=NOBODY + 1)  # the one before it was declared gone, and ends later
    workers.drop(memory("log-2.2"))
    workers.exited(NOBODY, -9)
    assert kept(workers, told) == {} and num_fds() == with_one
    workers.exited(NOBODY + 1, -9)
    assert kept(workers, told) == {"log-2.3": 10, "weights-2": 100}


class OnDevice:
    """A worker on a device, which leaves descriptors of a pipe with the supervisor."""

    def __init__(self, workers: Workers, monkeypatch) -> None:
        workers.to_zygote = self._fork
        live(workers, 1, pid=NOBODY, device="cuda")
        self._monkeypatch = monkeypatch

    def _fork(self, message: ForkWorker, fds: list[int]) -> None:
        _, _, lifeline_fd, *_ = fds
        self.lifeline = Channel.of_fd(os.dup(lifeline_fd))

    def entrust(self, num_left: int) -> int:
        """Returns the pipe's other end, which is readable when nobody has any copy."""
        reader, writer = os.pipe()
        self._monkeypatch.setattr(device_descriptors, "device_fds", lambda: [writer] * num_left)
        device_descriptors.entrust(self.lifeline)
        os.close(writer)
        return reader

    def die(self, workers: Workers) -> None:
        self.lifeline.close()
        workers.exited(NOBODY, -9)


def is_held(reader: int) -> bool:
    poll = select.poll()  # select() knows no descriptor above 1023
    poll.register(reader)
    return not poll.poll(0)


@pytest.mark.parametrize("num_left", [1, 600])
@pytest.mark.parametrize("is_read", [False, True])
def test_what_a_worker_on_a_device_left_is_held_for_a_moment_after_its_end(workers, monkeypatch, num_left, is_read):
    now_s = 100.0
    monkeypatch.setattr(held.time, "monotonic", lambda: now_s)
    worker = OnDevice(workers, monkeypatch)
    reader = worker.entrust(num_left)
    before = num_fds()
    if is_read:
        workers.flush()
        assert num_fds() == before + num_left, "none of them is in flight any more"
    worker.die(workers)
    workers.flush()
    assert is_held(reader)
    now_s += held.CLOSE_AFTER_S
    workers.flush()
    assert not is_held(reader)
    os.close(reader)


def test_what_it_leaves_later_takes_the_place_of_what_it_left_before(workers, monkeypatch):
    worker = OnDevice(workers, monkeypatch)
    first = worker.entrust(300)
    workers.flush()
    second = worker.entrust(600)
    assert is_held(first) and is_held(second)
    workers.flush()
    assert not is_held(first) and is_held(second)
    worker.die(workers)
    workers.close()
    assert not is_held(second)
    os.close(first)
    os.close(second)


class OnDeviceAsSpare:
    """A spare that rehearses."""

    def __init__(self, workers: Workers, monkeypatch) -> None:
        ours, theirs = Channel.pair()
        workers.spare_forked(NOBODY, Channel(ours))
        self.lifeline, self._monkeypatch = Channel(theirs), monkeypatch

    entrust = OnDevice.entrust
    die = OnDevice.die


@pytest.mark.parametrize("is_read", [False, True])
def test_what_a_spare_left_is_held_for_a_moment_after_its_end(workers, monkeypatch, is_read):
    """However it ended: the zygote may have died first."""
    now_s = 100.0
    monkeypatch.setattr(held.time, "monotonic", lambda: now_s)
    spare = OnDeviceAsSpare(workers, monkeypatch)
    reader = spare.entrust(40)
    if is_read:
        workers.flush()
    spare.die(workers)
    workers.flush()
    assert is_held(reader)
    now_s += held.CLOSE_AFTER_S
    workers.flush()
    assert not is_held(reader)
    os.close(reader)


def test_a_spare_that_becomes_a_worker_is_protected_until_it_has_told_anew(workers, monkeypatch):
    spare = OnDeviceAsSpare(workers, monkeypatch)
    rehearsed = spare.entrust(40)
    spare.lifeline.close()  # as it does when it has rehearsed
    workers.flush()
    worker = OnDevice(workers, monkeypatch)
    workers.flush()
    assert is_held(rehearsed)
    served = worker.entrust(50)
    workers.flush()
    assert not is_held(rehearsed) and is_held(served)
    worker.die(workers)
    workers.close()
    assert not is_held(served)
    os.close(rehearsed)
    os.close(served)


@pytest.mark.parametrize("is_read", [False, True])
def test_a_worker_that_was_a_spare_has_as_many_descriptors_as_others(workers, told, is_read):
    """On CPUs, where it leaves none with us."""
    live(workers, 1, pid=1001)
    usual = num_fds()
    workers.exited(1001, -9)
    workers.drop(memory("log-2.1"))
    ours, theirs = Channel.pair()
    workers.spare_forked(1002, Channel(ours))
    theirs.close()
    if is_read:
        workers.flush()
    live(workers, 2, pid=1002)
    workers.flush()
    assert num_fds() == usual
    workers.exited(1002, -9)


def test_memory_may_be_dropped_before_its_worker_ends(workers, told):
    live(workers, 1, pid=1001)
    workers.drop(memory("log-2.1"))
    workers.drop(memory("log-9.9"))
    workers.exited(1001, -9)
    assert kept(workers, told) == {"weights-2": 100}


@pytest.mark.parametrize("ends_first", [1, 2])
def test_memory_that_was_dropped_and_made_again_by_the_same_name(workers, told, ends_first):
    """Its device was lost while its worker was stopped, and came back: whichever ends first, what is new is kept."""
    live(workers, 1, pid=1001)
    workers.drop(memory("weights-2"))
    live(workers, 2, pid=1002, sizes=(1, 20, 200))
    kept(workers, told)
    assert [message.dropped for message in told.messages[-2:]] == [(memory("weights-2"),), ()]
    for incarnation in (ends_first, 3 - ends_first):
        workers.exited(1000 + incarnation, -9)
    assert kept(workers, told) == {"log-2.1": 10, "log-2.2": 20, "weights-2": 200}


@pytest.mark.parametrize("is_asked_again", [False, True])
def test_memory_may_be_dropped_before_its_worker_begins(workers, told, is_asked_again):
    workers.provision(Provision(start=start(1)), [os.memfd_create("m") for _ in range(3)])
    workers.drop(memory("weights-2"))
    if is_asked_again:
        workers.ask_again()
    live(workers, 2, pid=1002, sizes=(1, 20, 200))
    workers.exited(1002, -9)
    workers.forked(WorkerForked(rank=Rank(2), incarnation=Incarnation(1), pid=1001))
    assert told.messages[-1].dropped == (memory("weights-2"),)
    assert told.messages[-1].start.incarnation == 1 and kept(workers, told) == {"log-2.2": 20, "weights-2": 200}
    workers.exited(1001, -9)
    assert kept(workers, told) == {"log-2.1": 0, "log-2.2": 20, "weights-2": 200}


def test_a_worker_that_ends_before_we_are_told_of_it(workers, told):
    workers.provision(Provision(start=start(1)), [os.memfd_create("m") for _ in range(3)])
    assert workers.exited(1001, -9) is None
    workers.forked(WorkerForked(rank=Rank(2), incarnation=Incarnation(1), pid=1001))
    assert told.messages[-1] == WorkerExited(rank=Rank(2), incarnation=Incarnation(1), exit_status=-9)
    assert workers.pids == []


def test_the_end_of_a_spare_says_nothing_of_a_worker_that_gets_its_pid_later(workers, told):
    assert workers.exited(NOBODY, -9) is None
    live(workers, 1, pid=NOBODY)
    assert workers.pids == [NOBODY] and isinstance(told.messages[-1], WorkerStarted)
    workers.exited(NOBODY, -9)


def test_one_worker_of_each_kind(workers):
    assert workers.kinds() == ()
    live(workers, 1, pid=NOBODY)
    live(workers, 2, pid=NOBODY + 1)
    assert workers.kinds() == (start(2),)
    for pid in (NOBODY, NOBODY + 1):
        workers.exited(pid, -9)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_on_a_device_a_lifeline_is_closed_a_moment_after_its_worker(workers, device, monkeypatch):
    """What must not end together with the worker is in it (procs/device_descriptors.py)."""
    now_s = 100.0
    monkeypatch.setattr(held.time, "monotonic", lambda: now_s)
    live(workers, 1, pid=NOBODY, device=device)
    lifeline = workers._processes[Rank(2), Incarnation(1)].lifeline
    workers.exited(NOBODY, -9)
    workers.flush()
    assert (lifeline.fileno() >= 0) == (device == "cuda")
    now_s += held.CLOSE_AFTER_S
    workers.flush()
    assert lifeline.fileno() == -1


def test_names():
    assert memory("lane-0.1-12.345").name == "lane-0.1-12.345"
    assert memory("log-12.345").owners == (WorkerId(Rank(12), Incarnation(345)),)
    assert memory("weights-state-12").name == "weights-state-12"
    assert memory("weights-12").owners == (seat_owner(Rank(12)),), "of the seat, whichever incarnation sits there"
