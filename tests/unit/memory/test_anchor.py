"""The anchor's answers, and what the orchestrator makes of them: memory, or a line that says what to do."""

import errno
import os
from types import SimpleNamespace

import pytest

from everserve.memory import device as driver
from everserve.memory import owned as anchor_memory
from everserve.memory.anchor import Anchor
from everserve.memory.anchor_client import AnchorClient
from everserve.memory.device import CudaError
from everserve.memory.names import lack
from everserve.memory.owned import NoMemoryError, OwnedMemory
from everserve.procs import device_descriptors
from everserve.tables.ids import NO_DEVICE, Rank
from everserve.wire.channel import Channel, Descriptors
from everserve.wire.messages import Allocate, DeviceDescriptors, Offer, Withdraw
from tests.support.memories import memory


class Pair:
    """An anchor and an orchestrator's client of it, without processes."""

    def __init__(self) -> None:
        self.anchor = Anchor(Channel(Channel.pair()[0]))
        ours, theirs = Channel.pair()
        self.end = Channel(theirs)
        self.client = AnchorClient()
        self.client.attach(Channel(ours))
        self.got: list[int] = []
        self.failed: list[str] = []

    def ask(self, name: str, num_bytes: int, gpu: int) -> None:
        then = lambda fd: self.got.append(os.fstat(fd).st_size)  # noqa: E731
        self.client.allocate(memory(name, num_bytes, gpu), then=then, otherwise=self.failed.append)

    def run(self) -> None:
        for message, fds in self.end.receive_frames():
            self.anchor._handle(message, fds, self.end)
        self.client.read()


@pytest.fixture
def no_driver(monkeypatch):
    """A machine without NVIDIA's library, whatever this one has."""

    def missing() -> None:
        raise CudaError("libcuda.so.1", 0, "the NVIDIA driver's library cannot be loaded: no such file")

    monkeypatch.setattr(driver, "load", missing)


class ToyDriver:
    """Has so many bytes, and no device."""

    free = 1000
    error = CudaError("cuMemCreate", 2, "out of memory", "5000 asked for, 1000 free")

    def __init__(self, device: int) -> None:
        self.device = device

    def make_current(self) -> None: ...

    def create(self, num_bytes: int) -> int:
        if num_bytes > self.free:
            raise self.error
        return os.memfd_create("toy")


def test_host_memory(no_driver):
    pair = Pair()
    pair.ask("cell-0.1", 5000, gpu=-1)
    pair.run()
    assert pair.got == [8192] and not pair.failed


def test_a_device_without_a_driver_is_an_answer(no_driver):
    pair = Pair()
    pair.ask("weights-0", 5000, gpu=0)
    pair.ask("cell-0.1", 5000, gpu=-1)
    pair.run()
    assert pair.got == [8192], "others are served"
    assert len(pair.failed) == 1 and "device 0 cannot be used: libcuda.so.1" in pair.failed[0]
    pair.client.attach(Channel(Channel.pair()[0]))  # nothing is owed any more


def test_too_little_device_memory_is_an_answer_and_the_next_wish_is_granted(monkeypatch):
    monkeypatch.setattr(anchor_memory, "Driver", ToyDriver)
    pair = Pair()
    pair.ask("weights-0", 5000, gpu=0)
    pair.ask("lane-0.1-1.1", 500, gpu=0)
    pair.run()
    assert pair.failed == ["cuMemCreate: out of memory (5000 asked for, 1000 free)"] and pair.got == [0]


def test_a_broken_context_ends_the_anchor(monkeypatch):
    """Only a new process has a new one; the supervisor starts it, and it is asked again."""
    monkeypatch.setattr(anchor_memory, "Driver", ToyDriver)
    monkeypatch.setattr(ToyDriver, "error", CudaError("cuMemCreate", 700, "an illegal memory access was encountered"))
    with pytest.raises(CudaError, match="illegal memory access"):
        OwnedMemory().allocate(memory("weights-0", 5000, gpu=0))


def test_two_may_wait_for_the_same(no_driver):
    pair = Pair()
    pair.ask("weights-0", 5000, gpu=-1)
    pair.ask("weights-0", 5000, gpu=-1)
    ((asked, fds),) = pair.end.receive_frames()
    pair.anchor._handle(asked, fds, pair.end)
    pair.client.read()
    assert pair.got == [8192, 8192] and not pair.failed
    for _ in range(2):
        pair.ask("weights-1", 5000, gpu=0)
    pair.run()
    assert len(pair.failed) == 2


def test_an_allocation_that_nobody_waits_for_may_fail():
    client, lane = AnchorClient(), memory("lane-0.1-1.1", 10, gpu=3)
    ours, theirs = Channel.pair()
    client.attach(Channel(ours))
    called = SimpleNamespace(then=[], otherwise=[])
    client.allocate(lane, then=called.then.append, otherwise=called.otherwise.append)
    client.release(lane)
    anchor = Channel(theirs)
    (asked, _) = anchor.receive_all()
    assert asked == Allocate(memory=lane)
    anchor.send(Withdraw(memory=lane, reason="none"))
    client.read()
    assert not called.then and not called.otherwise


def test_a_new_anchor_is_asked_again_for_the_same():
    client, weights = AnchorClient(), memory("weights-1", 10, gpu=1)
    client.allocate(weights, then=lambda fd: None, otherwise=print)
    ours, theirs = Channel.pair()
    client.attach(Channel(ours))
    assert Channel(theirs).receive_all() == [Allocate(memory=weights)]


@pytest.mark.parametrize(("number", "kind"), [(errno.ENOMEM, NoMemoryError), (errno.EMFILE, OSError)])
def test_host_memory_that_cannot_be_had(monkeypatch, number, kind):
    """Memory is the user's to give. For want of a descriptor this anchor ends, and the next one is asked."""

    def full(*_: object) -> int:
        raise OSError(number, "no")

    monkeypatch.setattr(os, "memfd_create", full)
    with pytest.raises(kind, match="no"):
        OwnedMemory().allocate(memory("cell-0.1", 10))


def test_asking_twice_gives_the_same_memory():
    owned = OwnedMemory()
    assert owned.allocate(memory("cell-0.1", 10)) == owned.allocate(memory("cell-0.1", 10))
    assert owned.allocate(memory("cell-0.1", 20)) != owned.allocate(memory("cell-0.1", 10))
    owned.release_all()
    assert len(owned) == 0


@pytest.mark.parametrize(
    ("kind", "flag"), [("weights", "--shadow-experts"), ("lane", "--max-num-batched-tokens"), ("log", "--kv-log off")]
)
def test_the_line_says_what_to_do(kind, flag):
    line = lack(Rank(3), kind, "out of memory")
    assert "worker 3" in line and "out of memory" in line and flag in line and "\n" not in line


def test_what_ties_it_to_a_device_is_entrusted_to_the_supervisor_once(monkeypatch):
    """It may be killed while a device still clears memory for it. Its memory is not: that would never be free again."""
    ours, theirs = Channel.pair()
    supervisor, anchor = Channel(ours), Anchor(Channel(theirs))
    orchestrator = Channel(Channel.pair()[0])
    monkeypatch.setattr(device_descriptors, "device_fds", lambda: [0, 1, *anchor._memory.fds])
    create = lambda num_bytes: os.memfd_create("device")  # noqa: E731
    monkeypatch.setattr(
        anchor_memory, "Driver", lambda device: SimpleNamespace(create=create, make_current=lambda: None)
    )
    adopted = Descriptors([os.memfd_create("device")])
    anchor._handle(Offer(memory=memory("weights-1", gpu=0)), adopted, orchestrator)
    for i, device in enumerate((NO_DEVICE, 0, 0, 1)):
        anchor._handle(Allocate(memory=memory(f"cell-{i}.1", gpu=device)), Descriptors(), orchestrator)
    told = [(message, len(fds)) for message, fds in supervisor.receive_frames()]
    assert told == [(DeviceDescriptors(num_following=0), 2)] * 2, "once for each device"
    anchor._memory.release_all()
