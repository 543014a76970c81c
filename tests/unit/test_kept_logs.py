"""Who gets the descriptors of a log, and of its blocks where these are in memory of their own; and who lets go of them
when."""

import os
from types import SimpleNamespace

import pytest

from everserve.control.anchor_client import AnchorClient
from everserve.control.log_references import Logs
from everserve.kvlog.chains import key_of
from everserve.kvlog.log import Log
from everserve.memory.owned import create_memory
from everserve.tables.ids import Incarnation, Rank, Role, WorkerId
from everserve.wire.messages import DropMemory, LogJoined, LogLeft
from everserve.worker.logs import KeptLogs
from tests.logs import SHAPE, Owner, Stream
from tests.memories import memory
from tests.toy import spec

A = WorkerId(Rank(0), Incarnation(1))
B = WorkerId(Rank(1), Incarnation(4))


class End:
    """A worker, or the supervisor: what it was sent, and what the descriptors were."""

    def __init__(self, id: WorkerId | None = None) -> None:
        self.id, self.roles, self.is_connected = id, (Role.ATTENTION,), True
        self.got: list = []

    def send(self, message, fds=()) -> None:
        self.got.append((message, [identity(fd) for fd in fds]) if fds else message)


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
    supervisor, other = End(), End(B)
    logs = Logs(AnchorClient(), [other, End(A)], supervisor)
    fd, kv_fd = create_memory("log", 4096), create_memory("kv", 4096)
    log_identity, kv = identity(fd), [identity(kv_fd)] if has_kv else []
    if has_kv:
        logs.add(memory("kv-0.1", gpu=0), kv_fd)
    logs.add(memory("log-0.1"), fd)
    joined = LogJoined(rank=A[0], incarnation=A[1], has_kv=has_kv), [log_identity, *kv]
    assert other.got == [joined] and logs.descriptors(A) == ((kv_fd, fd) if has_kv else (fd,))
    late = End(WorkerId(Rank(2), Incarnation(0)))
    logs.introduce(late)
    assert late.got == [joined]
    logs.lose(A)
    assert logs.has(A) and is_open(fd)
    logs.settle(A)
    assert not logs.has(A) and not is_open(fd) and is_open(kv_fd) != has_kv
    assert supervisor.got == [
        DropMemory(memory=memory("log-0.1")),
        *([DropMemory(memory=memory("kv-0.1", gpu=0))] if has_kv else []),
    ]
    assert other.got[1:] == [LogLeft(rank=A[0], incarnation=A[1])]


def test_blocks_are_no_log():
    supervisor, other = End(), End(B)
    logs = Logs(AnchorClient(), [other], supervisor)
    logs.add(memory("kv-0.1", gpu=0), create_memory("kv", 4096))
    assert not logs.has(A) and other.got == []


def test_a_worker_opens_both_when_it_needs_them():
    fd, kv_fd = create_memory("log", SHAPE.num_bytes), create_memory("kv", 4096)
    owner = Owner(Log(fd, SHAPE), in_log=False)
    owner.streams["a"] = Stream(0)
    owner.step({"a": [1, 2]})
    owner.commit("a")
    opened = []
    kept = KeptLogs(lambda fd, kv_fd: opened.append((fd, kv_fd)) or Log(fd, SHAPE), own=None)
    kept.join(A, fd, kv_fd)
    again, kv_again = os.dup(fd), os.dup(kv_fd)
    kept.join(A, again, kv_again)
    assert not is_open(again) and not is_open(kv_again) and kept.ids == [A] and not opened
    assert kept.find(spec("a", [1, 2]), B) is None
    saved = kept.find(spec("a", [1, 2]), A)
    assert saved is not None and saved.num_tokens == 2 and opened == [(fd, kv_fd)]
    assert saved.log.find(key_of("a")) == owner.log.find(key_of("a"))
    kept.leave(A, SimpleNamespace())
    kept.sweep(SimpleNamespace(waits_for=lambda log: log is saved.log))
    assert not saved.log.closed, "a stream waits with it in its hands"
    kept.sweep(SimpleNamespace(waits_for=lambda log: False))
    assert not is_open(fd) and not is_open(kv_fd) and saved.log.closed and kept.ids == []


def test_on_a_device_logs_are_mapped_as_soon_as_they_are_known():
    """Between steps, and each once; one that cannot be mapped is as if it were not there."""
    fds = [create_memory("log", SHAPE.num_bytes) for _ in range(2)]
    opened, unreachable = [], fds[1]

    def open_log(fd: int, kv_fd: int | None) -> Log | None:
        opened.append(fd)
        return Log(fd, SHAPE) if fd != unreachable else None

    kept, engine = KeptLogs(open_log, own=None, opens_early=True), SimpleNamespace(waits_for=lambda log: False)
    kept.join(A, fds[0])
    kept.join(B, fds[1])
    assert not opened
    for _ in range(2):
        kept.sweep(engine)
        assert opened == fds
    assert kept.find(spec("a", [1, 2]), B) is None and opened == fds
    for id in (A, B):
        kept.leave(id, engine)
    kept.sweep(engine)
    assert not kept.ids and opened == fds
