"""Processes come and go in any order, with memory and device descriptors: after every turn of its loop, each descriptor
of the supervisor has exactly one owner, and is what that owner opened.

A descriptor that is closed twice takes one with it that was opened in between: its owner finds another file under its
number, or none. One without an owner is a leak. Memory that was dropped is not kept, and what was made later by the
same name is not lost with it, whichever worker ends first.
"""

import gc
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everserve.procs import deferred_close
from everserve.procs import supervisor as supervisor_module
from everserve.procs.deferred_close import Held
from everserve.procs.supervisor import Child, Supervisor
from everserve.tables.ids import Incarnation, Rank, Role
from everserve.tables.memory import MemoryName
from everserve.wire.channel import Channel
from everserve.wire.messages import (
    DeviceDescriptors,
    ForkWorker,
    Provision,
    Release,
    SpareForked,
    StartWorker,
    WorkerForked,
)
from tests.support.configs import worker_settings
from tests.support.examples import examples
from tests.support.memories import memory
from tests.support.supervisor_toy import Instance

SETTINGS = worker_settings(device="cuda")
NUM_RANKS = 2
HELPERS = ("orchestrator", "anchor", "zygote")
NAMES = (
    *("provision", "fork", "provision", "fork", "kill", "drop", "spare", "entrust", "clog", "wait"),
    *("supervisor", "supervisor", *HELPERS),
)
# What happens, to whom (a number that is taken modulo), and whether the supervisor has a turn afterwards.
happenings = st.tuples(st.sampled_from(NAMES), st.integers(0, 41), st.booleans())


class Died(BaseException):
    """The supervisor was killed here."""


class Storm:
    """An instance, and what its processes do."""

    def __init__(self, instance: Instance, before: set[int]) -> None:
        self.instance, self.before = instance, before
        self.incarnations = {rank: count(1) for rank in range(NUM_RANKS)}
        self.made = count()
        self.current: dict[MemoryName, str] = {}  # what the orchestrator has, and how that file is called
        self.started: set[str] = set()  # files that a worker process has had
        self.lifelines: dict[int, Channel] = {}  # a worker's or a spare's end, by pid
        self.spares: list[int] = []
        self.dropped: set[MemoryName] = set()  # since the last turn
        self.controls: dict[Child, int] = {}  # which socket each child is reached through

    @property
    def supervisor(self) -> Supervisor:
        """The one that lives now."""
        return self.instance.supervisor

    # -- what happens ----------------------------------------------------------------------------

    def provision(self, which: int) -> None:
        """A worker with the memory of its seat, as far as that exists, and a log of its own."""
        rank = which % NUM_RANKS
        message = Provision(start=start(rank, next(self.incarnations[rank])))
        for piece in message.start.memory:
            self.current.setdefault(piece, f"{piece.name}#{next(self.made)}")
        files = [os.memfd_create(name) for name in ("cell", *(self.current[piece] for piece in message.start.memory))]
        self.instance["orchestrator"].control.send(message, files)
        close_all(files)

    def fork(self, which: int) -> None:
        """The zygote obeys the oldest of its orders, with a spare or without."""
        zygote = self.instance["zygote"]
        zygote.read()
        orders = [frame for frame in zygote.received if isinstance(frame.message, ForkWorker) and len(frame.fds)]
        if not orders:
            return
        begun = orders[0].message.start
        (cell, control, lifeline, tokens, *pieces) = orders[0].fds.take()
        self.started |= {name_of(fd) for fd in pieces}
        close_all([cell, control, tokens, *pieces])
        pid = self.spares.pop() if self.spares and which % 2 else self._process()
        if pid in self.lifelines:
            self.lifelines.pop(pid).close()
        self.lifelines[pid] = Channel.of_fd(lifeline)
        zygote.control.send(WorkerForked(rank=begun.rank, incarnation=begun.incarnation, pid=pid))

    def spare(self, which: int) -> None:
        ours, theirs = Channel.pair()
        pid = self._process()
        self.spares.append(pid)
        self.lifelines[pid] = Channel(ours)
        with theirs:
            self.instance["zygote"].control.send(SpareForked(pid=pid), fds=[theirs.fileno()])

    def entrust(self, which: int) -> None:
        """One of them leaves device descriptors with the supervisor: a set of one frame, or of two, or half a set."""
        channels = [self.instance["anchor"].control, *self.lifelines.values()]
        for num_following in ((0,), (1, 0), (1,))[which % 3]:
            files = [os.memfd_create("device") for _ in range(1 + which % 7)]
            channels[which % len(channels)].send(DeviceDescriptors(num_following=num_following), files)
            close_all(files)

    def kill(self, which: int) -> None:
        """A worker or a spare."""
        if self.lifelines:
            pid = list(self.lifelines)[which % len(self.lifelines)]
            self.spares = [spare for spare in self.spares if spare != pid]
            self.lifelines.pop(pid).close()
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

    def drop(self, which: int) -> None:
        """The device is lost that some memory is on."""
        if self.current:
            piece = list(self.current)[which % len(self.current)]
            self.instance["orchestrator"].control.send(Release(memory=piece))
            del self.current[piece]
            self.dropped.add(piece)

    def clog(self, which: int) -> None:
        """From now on most of what the supervisor sends to this process waits, with copies of its descriptors."""
        child = self.supervisor._children[("gateway", *HELPERS)[which % 4]]
        child.control.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 0)

    def wait(self, which: int) -> None:
        self.instance.pass_time(deferred_close.CLOSE_AFTER_S)

    def end(self, name: str) -> None:
        """It is killed, and replaced."""
        played = self.instance[name]
        self.instance.pass_time(supervisor_module._RESTARTS_WITHIN_S)
        played.process.kill()
        os.waitid(os.P_PID, played.process.pid, os.WEXITED | os.WNOWAIT)
        for pid in self.spares if name == "zygote" else ():
            self.lifelines.pop(pid).close()
        self.spares = [] if name == "zygote" else self.spares
        played.received.clear()
        played.control.close()
        self.instance.until(lambda: self.instance[name] is not played)

    def replace_supervisor(self, which: int) -> None:
        """It dies between two turns; or in the middle of one, before or after it writes the process table."""
        old = {name: self.instance[name] for name in HELPERS}
        dropped = set(self.dropped)
        if which % 4:
            self._die_in_a_turn(num_writes=which % 4, is_written=which % 2 == 1)
        else:
            self.turn()
            dropped = set()
        gc.collect()  # what it had in hand and in no table
        others = set(self._of_others()) | {self.instance.root.table_fd}
        self.instance.replace_supervisor(left=open_fds() - others)
        for played in old.values():
            played.received.clear()
            played.control.close()
        self.instance.until(lambda: all(self.instance[name] is not played for name, played in old.items()))
        for pid in set(self.lifelines) - set(self.supervisor._workers.pids):
            self.lifelines.pop(pid).close()
        self.spares = []
        for piece, fd in self.supervisor._workers._kept.items():  # which it had not heard of, and an orchestrator has
            if piece in dropped:
                self.current.setdefault(piece, name_of(fd))

    def _die_in_a_turn(self, num_writes: int, is_written: bool) -> None:
        file = self.supervisor._file
        write, left = file.write, count(num_writes - 1, -1)

        def die(table: object) -> None:
            is_last = next(left) == 0
            if not is_last or is_written:
                write(table)
            if is_last:
                raise Died

        file.write = die
        with suppress(Died):
            self.turn()
        file.write = write

    def turn(self) -> None:
        self.instance.signal(signal.SIGCHLD)  # or it would wait for something to happen
        self.instance.turn()
        self.dropped.clear()

    def _process(self) -> int:
        pid = os.posix_spawnp("sleep", ["sleep", "1000"], os.environ)
        self.instance.workers.append(pid)
        return pid

    # -- what must be so -------------------------------------------------------------------------

    def check(self) -> None:
        """All that was sent to the supervisor has been read."""
        owned = list(self._owned())
        fds = [fd for fd, _ in owned]
        assert len(set(fds)) == len(fds), "a descriptor has two owners"
        wrong = {fd: (name_of(fd), name) for fd, name in owned if not is_called(name_of(fd), name)}
        assert not wrong, "it was closed by mistake, and its number was used again"
        assert {name_of(fd) for fd in open_fds() - set(fds) - set(self._of_others())} == set(), "a leak"
        self._check_kept()

    def _check_kept(self) -> None:
        workers = self.supervisor._workers
        kept = {memory: name_of(fd) for memory, fd in workers._kept.items()}
        assert kept.items() <= self.current.items(), "what was dropped is not kept"
        holders = (*workers._processes.values(), *workers._orders.values())
        there = set(kept.values()) | {name_of(fd) for holder in holders for fd in holder.memory}
        lost = {name for name in self.current.values() if name in self.started} - there
        assert not lost, "what was not dropped is kept, or has a worker"

    def _owned(self) -> Iterator[tuple[int, str]]:
        """Each descriptor of the supervisor, and what it must be."""
        supervisor, workers = self.supervisor, self.supervisor._workers
        yield supervisor._selector.fileno(), "anon_inode:[eventpoll]"
        memory = supervisor._keepers.memory
        yield memory.listen, "socket:"
        yield memory.shared, "gateways"
        yield from ((ledger, "ledger") for ledger in memory.ledgers)
        for child in supervisor._children.values():
            is_new = child not in self.controls
            self.controls.setdefault(child, os.fstat(child.control.fileno()).st_ino)
            assert is_new or name_of(child.control.fileno()) == f"socket:[{self.controls[child]}]", child.name
            yield from of_channel(child.control)
            yield from of_held(child.held)
        for order in workers._orders.values():
            yield from zip(order.memory, ("cell", *(memory.name for memory in order.start.memory)), strict=True)
            tokens = (end for pair in order.tokens for end in pair)
            for sock in (*(order.control or ()), *(order.lifeline or ()), *tokens):
                yield sock.fileno(), "socket:"
        for worker in workers._processes.values():
            yield from zip(worker.memory, ("cell", *(memory.name for memory in worker.start.memory)), strict=True)
            yield from ((fd, "socket:") for fd in worker.tokens.values())
            yield from of_held(worker.held)
            yield from of_held(worker.rehearsed) if worker.rehearsed is not None else ()
        yield from ((fd, memory.name) for memory, fd in workers._kept.items())
        ended = [held for _, held in (*workers._deferred._ended, *supervisor._children.deferred._ended)]
        for held in (*workers._spares.values(), *ended):
            yield from of_held(held)

    def _of_others(self) -> Iterator[int]:
        """Of the processes that are played, and of this one."""
        yield from self.before
        yield from (self.instance._signals._reader.fileno(), self.instance._signals._writer.fileno())
        yield from self.instance.root.own_fds
        for played in (one for each in self.instance.played.values() for one in each):
            yield played.process.stdin.fileno()
            yield from (fd for fd, _ in of_channel(played.control))
            yield from (sock.fileno() for sock in played.sockets.values())
            yield from (fd for frame in played.received for fd in frame.fds._fds)
        for lifeline in self.lifelines.values():
            yield from (fd for fd, _ in of_channel(lifeline))


def start(rank: int, incarnation: int) -> StartWorker:
    names = (f"log-{rank}.{incarnation}", f"weights-{rank}", f"kv-pieces-{rank}")
    return StartWorker(
        rank=Rank(rank),
        incarnation=Incarnation(incarnation),
        roles=(Role.ATTENTION,),
        settings=SETTINGS,
        num_workers=NUM_RANKS,
        slots=None,
        detect_ms=0.0,
        memory=tuple(memory(name) for name in names),
    )


def of_channel(channel: Channel) -> Iterator[tuple[int, str]]:
    if channel.fileno() != -1:
        yield channel.fileno(), "socket:"
    yield from ((fd, "") for _, fds in channel._outgoing for fd in fds)
    yield from ((fd, "device") for batch in channel._batches for fd in batch.fds._fds)


def of_held(held: Held) -> Iterator[tuple[int, str]]:
    yield from of_channel(held.lifeline) if held.lifeline is not None else ()
    yield from ((fd, "device") for fds in (*held._held, *held._arriving) for fd in fds._fds)


def open_fds() -> set[int]:
    """Without that of the directory itself, which is gone when we look."""
    return {int(path.name) for path in list(Path("/proc/self/fd").iterdir()) if path.is_symlink()}


def name_of(fd: int) -> str:
    """Of the file."""
    return str(Path(f"/proc/self/fd/{fd}").readlink()).removeprefix("/memfd:").removesuffix(" (deleted)")


def is_called(name: str, expected: str) -> bool:
    return name.partition("#")[0] == expected or (expected in ("", "socket:") and name.startswith(expected))


def close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


@pytest.fixture(autouse=True, scope="module")
def collect():
    """What other tests have left is not closed while we look."""
    gc.collect()


@examples(12)
@given(st.lists(happenings, max_size=40))
def test_each_descriptor_has_one_owner_and_is_what_that_opened(schedule):
    before = open_fds()
    with pytest.MonkeyPatch.context() as monkeypatch:
        instance = Instance(monkeypatch)
        monkeypatch.setattr(deferred_close, "time", supervisor_module.time)
        storm = Storm(instance, before)
        try:
            for name, which, has_turn in schedule:
                if name in HELPERS:
                    storm.end(name)
                elif name == "supervisor":
                    storm.replace_supervisor(which)
                else:
                    getattr(storm, name)(which)
                if has_turn:
                    storm.turn()
                    storm.check()
        finally:
            instance.close()
            for lifeline in storm.lifelines.values():
                lifeline.close()
    del instance, storm
    gc.collect()
    assert open_fds() == before
