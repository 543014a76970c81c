"""Who gets the descriptors of a log, and of its blocks where these are in memory of their own; and who lets go of them
when."""

import errno
import os
from types import SimpleNamespace

import pytest

from everserve.control.hold.catalog import Catalog
from everserve.control.hold.hosts import Hosts
from everserve.control.hold.log_references import Logs
from everserve.kvlog.chains import key_of
from everserve.kvlog.layout import HEADER
from everserve.kvlog.log import Log, LogMismatch, open_own
from everserve.memory.anchor_client import AnchorClient
from everserve.memory.owned import create_memory
from everserve.tables.ids import Incarnation, Rank, WorkerId
from everserve.wire.messages import Offer, Release, Withdraw
from everserve.worker.logs import KeptLogs
from tests.support.logs import SHAPE, Owner, Stream, offer_log, withdraw_log
from tests.support.memories import memory
from tests.support.toy import spec

A = WorkerId(Rank(0), Incarnation(1))
B = WorkerId(Rank(1), Incarnation(4))


class End:
    """A worker, or the supervisor: what it was sent, and what the descriptors were."""

    def __init__(self, id: WorkerId | None = None) -> None:
        self.id, self.is_connected, self.report, self.offered = id, True, None, set()
        self.got: list = []

    def send(self, message, fds=()) -> None:
        self.got.append((message, *[identity(fd) for fd in fds]) if fds else message)


class World:
    """The logs of an orchestrator without processes."""

    def __init__(self, *ends: End, num_gateways: int = 1) -> None:
        self.supervisor, self.anchor = End(), AnchorClient()
        may_read = lambda end, memory: end.id != memory.owners[0]  # noqa: E731
        self.catalog = Catalog(self.anchor, ends, Hosts(self.supervisor), may_read)
        self.logs = Logs(self.catalog, num_gateways)


def identity(fd: int) -> int:
    return os.fstat(fd).st_ino


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


@pytest.mark.parametrize("has_kv", [False, True])
def test_descriptors_come_and_go_together(has_kv):
    other = End(B)
    world = World(other, End(A))
    logs, pieces = world.logs, [memory("kv-0.1", gpu=0), memory("log-0.1")][not has_kv :]
    fds = [create_memory(piece.name, 4096) for piece in pieces]
    for piece, fd in zip(pieces, fds, strict=True):
        world.anchor.hold(piece, fd)
    logs.add(pieces[-1])
    offers = [(Offer(memory=piece), identity(fd)) for piece, fd in zip(pieces, fds, strict=True)]
    assert other.got == offers and logs.descriptors(A) == tuple(fds)
    late = End(WorkerId(Rank(2), Incarnation(0)))
    world.catalog.introduce(late)
    assert late.got == offers
    logs.lose(A)
    assert logs.has(A) and all(map(is_open, fds))
    logs.settle(0, A)
    assert not logs.has(A) and not any(map(is_open, fds))
    assert world.supervisor.got == [Release(memory=piece) for piece in reversed(pieces)]
    assert other.got[len(pieces) :] == [Withdraw(memory=piece) for piece in reversed(pieces)]


def test_a_worker_opens_both_when_it_needs_them():
    fd, kv_fd = create_memory("log", SHAPE.num_bytes), create_memory("kv", 4096)
    owner = Owner(Log(fd, SHAPE), in_log=False)
    owner.streams["a"] = Stream(0)
    owner.step({"a": [1, 2]})
    owner.commit("a")
    opened = []
    kept = KeptLogs(lambda fd, kv_fd: opened.append((fd, kv_fd)) or Log(fd, SHAPE), own=None)
    offer_log(kept, A, fd, kv_fd)
    again, kv_again = os.dup(fd), os.dup(kv_fd)
    offer_log(kept, A, again, kv_again)
    assert not is_open(fd) and not is_open(kv_fd) and kept.ids == [A] and not opened
    assert kept.find(spec("a", [1, 2]), B) is None
    saved = kept.find(spec("a", [1, 2]), A)
    assert saved is not None and saved.num_tokens == 2 and opened == [(again, kv_again)]
    assert saved.log.find(key_of("a")) == owner.log.find(key_of("a"))
    withdraw_log(kept, A, SimpleNamespace())
    kept.sweep(SimpleNamespace(waits_for=lambda log: log is saved.log))
    assert not saved.log.closed, "a stream waits with it in its hands"
    kept.sweep(SimpleNamespace(waits_for=lambda log: False))
    assert not is_open(again) and not is_open(kv_again) and saved.log.closed and kept.ids == []


def test_the_log_of_a_living_worker_is_not_kept_mapped():
    """It may live for months after a stream of its came here."""
    kept = KeptLogs(lambda fd, kv_fd: Log(fd, SHAPE), own=None)
    offer_log(kept, A, log_with_a_stream())
    first = kept.find(spec("a", [1, 2]), A)
    assert first is not None
    kept.sweep(SimpleNamespace(waits_for=lambda log: log is first.log))
    assert not first.log.closed, "a stream waits with it in its hands"
    second = kept.find(spec("a", [1, 2]), A)
    assert second is not None and second.num_tokens == 2
    kept.sweep(SimpleNamespace(waits_for=lambda log: False))
    assert first.log.closed and second.log.closed and kept.ids == [A]
    again = kept.find(spec("a", [1, 2]), A)
    assert again is not None and again.num_tokens == 2
    withdraw_log(kept, A, SimpleNamespace())
    kept.sweep(SimpleNamespace(waits_for=lambda log: False))
    assert again.log.closed


def log_with_a_stream() -> int:
    fd = create_memory("log", SHAPE.num_bytes)
    owner = Owner(Log(fd, SHAPE), in_log=False)
    owner.streams["a"] = Stream(0)
    owner.step({"a": [1, 2]})
    owner.commit("a")
    return fd


def flip(fd: int, bit: int) -> None:
    at, byte = bit // 8, os.pread(fd, 1, bit // 8)
    os.pwrite(fd, bytes([byte[0] ^ 1 << bit % 8]), at)


@pytest.mark.parametrize("opens_early", [False, True])
def test_a_log_that_cannot_be_read_is_no_log(opens_early, caplog):
    """Any bit of its header; memory that is too small; memory that cannot be mapped. Told once, counted, and nothing
    else: the streams are computed again."""
    broken = [log_with_a_stream() for _ in range(8 * HEADER.size)]
    for bit, fd in enumerate(broken):
        flip(fd, bit)
    closed = os.open(os.devnull, os.O_RDONLY)  # cannot be mapped, and is too small
    kept = KeptLogs(lambda fd, _: Log(fd, SHAPE), own=None, opens_early=opens_early)
    engine = SimpleNamespace(waits_for=lambda log: False, spare=list)
    whole = log_with_a_stream()
    for number, fd in enumerate([*broken, closed, whole]):
        offer_log(kept, WorkerId(Rank(number), Incarnation(1)), fd)
    for _ in range(2):
        kept.sweep(engine)
        found = [kept.find(spec("a", [1, 2]), id) for id in kept.ids]
        assert [saved.num_tokens if saved else None for saved in found] == [*[None] * (8 * HEADER.size + 1), 2]
        assert kept.num_unreadable == 8 * HEADER.size + 1 == caplog.text.count("cannot be read, so its streams")
    for id in kept.ids:
        withdraw_log(kept, id, engine)
    kept.sweep(engine)
    assert not any(map(is_open, [*broken, closed, whole]))


def test_memory_that_cannot_be_mapped_is_no_log(caplog):
    def open_log(fd: int, kv_fd: int | None) -> Log:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    kept = KeptLogs(open_log, own=None)
    offer_log(kept, A, log_with_a_stream())
    assert kept.find(spec("a", [1, 2]), A) is None and kept.num_unreadable == 1
    assert "Cannot allocate memory" in caplog.text


def test_an_own_log_that_cannot_be_read_is_begun_anew(caplog):
    """Otherwise no process could ever start in this seat again."""
    for bit in range(8 * HEADER.size):
        fd = log_with_a_stream()
        flip(fd, bit)
        own = open_own(lambda fd=fd: Log(fd, SHAPE), fd, SHAPE)
        assert own.was_unreadable and not own.records() and own.find(key_of("a")) is None
        assert KeptLogs(None, own).num_unreadable == 1 and Log(fd, SHAPE).was_there
        owner = Owner(own, in_log=False)
        owner.streams["b"] = Stream(0)
        owner.step({"b": [3, 4, 5]})
        owner.commit("b")
        assert own.find(key_of("b")).num_tokens == 3 and len(own.records()) == 1
        own.close()
        os.close(fd)
    assert caplog.text.count("is begun anew") == 8 * HEADER.size
    fd = log_with_a_stream()
    own = open_own(lambda: Log(fd, SHAPE), fd, SHAPE)
    assert not own.was_unreadable and len(own.records()) == 1 and not KeptLogs(None, own).num_unreadable
    os.close(fd)
    fd = create_memory("log", 4096)
    with pytest.raises(LogMismatch, match="bytes"):
        open_own(lambda: Log(fd, SHAPE), fd, SHAPE)
    os.close(fd)


def test_on_a_device_logs_are_mapped_as_soon_as_they_are_known():
    """Between steps, and each once; one that cannot be mapped is as if it were not there."""
    fds = [create_memory("log", SHAPE.num_bytes) for _ in range(2)]
    opened, unreachable = [], fds[1]

    def open_log(fd: int, kv_fd: int | None) -> Log | None:
        opened.append(fd)
        return Log(fd, SHAPE) if fd != unreachable else None

    kept, engine = KeptLogs(open_log, own=None, opens_early=True), SimpleNamespace(waits_for=lambda log: False)
    offer_log(kept, A, fds[0])
    offer_log(kept, B, fds[1])
    assert not opened
    for _ in range(2):
        kept.sweep(engine)
        assert opened == fds
    assert kept.find(spec("a", [1, 2]), B) is None and opened == fds
    for id in (A, B):
        withdraw_log(kept, id, engine)
    kept.sweep(engine)
    assert not kept.ids and opened == fds


def test_a_log_is_kept_until_no_gateway_needs_it():
    world = World(End(B), num_gateways=2)
    logs = world.logs
    world.anchor.hold(memory("log-0.1"), create_memory("log", 4096))
    logs.add(memory("log-0.1"))
    logs.settle(0, A)
    logs.lose(A)
    logs.settle(0, A)
    assert logs.has(A)
    logs.settle_lost_but(1, [A])
    assert logs.has(A), "the next gateway of that number says that it is needed"
    logs.settle(1, A)
    assert not logs.has(A)
