"""Memory is allocated, offered, withdrawn and released while its readers, the anchor and the orchestrator die, in any
order. Once all that was sent has been read:

    who may read a piece of memory can open it, and gets the same as all others
    no other worker can, and no user of it still does
    no process has a descriptor of any other memory: nothing leaks
"""

import gc
import os
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

from hypothesis import example, given
from hypothesis import strategies as st

from everserve.control.hold.catalog import Catalog
from everserve.control.hold.hosts import Hosts
from everserve.memory.anchor import Anchor
from everserve.memory.anchor_client import AnchorClient
from everserve.memory.local import LocalMemory
from everserve.tables.ids import Incarnation, Rank, WorkerId
from everserve.tables.memory import Kind, MemoryName, seat_owner
from everserve.wire.channel import Channel, ChannelClosed
from everserve.wire.messages import Release
from everserve.worker.offered import Offered
from tests.support.examples import examples

NUM_READERS = 3
KINDS = (Kind.LOG, Kind.WEIGHTS, Kind.KV_MIRROR)
happenings = st.tuples(
    st.sampled_from(
        [
            *("begin", "begin", "allocate", "turn", "start"),
            *("release", "read", "restart_reader", "restart_anchor", "restart_orchestrator", "die_in_release"),
        ]
    ),
    st.integers(0, 59),
)


class Reader:
    """A worker that uses memory of others: it opens what it is offered, and keeps it open until it is withdrawn."""

    def __init__(self, id: WorkerId) -> None:
        self.id = id
        self.memory = LocalMemory()
        self.used: dict[MemoryName, int] = {}
        self.offered = Offered(self.memory, dict.fromkeys(KINDS, self))
        self.channel: Channel | None = None

    def offer(self, memory: MemoryName) -> None:
        self._end_use(memory)
        self.used[memory] = self.memory.open(memory)

    def withdraw(self, memory: MemoryName) -> None:
        assert memory in self.memory, "it is there until its user has let go of it"
        self._end_use(memory)

    def _end_use(self, memory: MemoryName) -> None:
        if memory in self.used:
            os.close(self.used.pop(memory))

    def read(self) -> None:
        assert self.channel is not None
        with suppress(ChannelClosed):  # an orchestrator that has died
            for message, fds in self.channel.receive_frames():
                self.offered.take(message, fds)

    def end(self) -> None:
        if self.channel is not None:
            self.channel.close()
        for memory in [*self.used]:
            self._end_use(memory)
        self.memory.drop_all()


class End:
    """What an orchestrator has of a reader."""

    def __init__(self, reader: Reader, report: list[MemoryName] | None) -> None:
        ours, theirs = Channel.pair()
        reader.channel, self.channel = Channel(ours), Channel(theirs)
        self.id, self.rank, self.is_connected, self.offered = reader.id, reader.id.rank, True, set()
        self.is_stuck = False
        self.report = SimpleNamespace(memory=report) if report is not None else None

    def send(self, message, fds=()) -> None:
        if not self.is_stuck:
            self.channel.send(message, fds)


class Orchestrator:
    """What one holds."""

    def __init__(self, anchor: Anchor) -> None:
        supervisor, ours = Channel.pair()
        self.supervisor, to_supervisor = Channel(supervisor), Channel(ours)
        self.client, self.ends = AnchorClient(), []
        self.catalog = Catalog(self.client, self.ends, Hosts(to_supervisor), may_read)
        self.channels = [to_supervisor]
        self.attach(anchor)

    def attach(self, anchor: Anchor) -> None:
        self.client.detach()
        ours, theirs = Channel.pair()
        anchor._attach(Channel(theirs))
        self.client.attach(Channel(ours))

    def connect(self, reader: Reader, report: list[MemoryName] | None = None) -> None:
        end = End(reader, report)
        self.ends.append(end)
        self.catalog.introduce(end)

    def close(self) -> None:
        self.client.detach()
        self.client.memory.drop_all()
        for channel in (*self.channels, *(end.channel for end in self.ends)):
            channel.close()


def may_read(end: End, memory: MemoryName) -> bool:
    return end.rank != memory.owners[0].rank


class World:
    """An instance without processes: the supervisor is a table of descriptors."""

    def __init__(self) -> None:
        self.kept = LocalMemory()  # by the supervisor
        self.anchor = Anchor(Channel(Channel.pair()[0]))
        self.num_incarnations = 0
        self.orchestrator = Orchestrator(self.anchor)
        self.readers = [Reader(WorkerId(Rank(rank), Incarnation(1))) for rank in range(NUM_READERS)]
        self.late: list[Reader] = []  # they have not reported to this orchestrator
        for reader in self.readers:
            self.orchestrator.connect(reader)

    # -- what happens ----------------------------------------------------------------------------

    def allocate(self, which: int) -> None:
        """For an incarnation, or for a seat."""
        kind, rank = KINDS[which % len(KINDS)], Rank(which % NUM_READERS)
        self.num_incarnations += 1
        owner = WorkerId(rank, Incarnation(self.num_incarnations)) if kind is Kind.LOG else seat_owner(rank)
        need, client = MemoryName(kind=kind, owners=(owner,), num_bytes=4096), self.orchestrator.client
        memory = need.made_for(WorkerId(rank, Incarnation(self.num_incarnations)))
        if client.find(need) is None and client.requested(need) is None:
            client.allocate(memory, then=lambda fd: client.hold(memory, os.dup(fd)), otherwise=print)

    def start(self, which: int) -> None:
        """A worker has begun that has this memory, so the supervisor has it too."""
        memory = self._some_held(which)
        if memory is not None and memory not in self.kept:
            self.kept.put(memory, self.orchestrator.client.memory.open(memory))
            self.orchestrator.catalog.offer(memory)

    def begin(self, which: int) -> None:
        """A worker that has memory which was allocated for it."""
        self.allocate(which)
        self.turn(which)
        self.start(-1)

    def release(self, which: int) -> None:
        memory = self._some_held(which)
        if memory is not None:
            self.orchestrator.catalog.release(memory)

    def die_in_release(self, which: int) -> None:
        """What it has said to the supervisor has been written, what it has said to readers has not."""
        for end in self.orchestrator.ends:
            end.is_stuck = True
        self.release(which)
        self.restart_orchestrator(which)

    def _some_held(self, which: int) -> MemoryName | None:
        held = [*self.orchestrator.client.memory]
        return held[which % len(held)] if held else None

    def turn(self, which: int) -> None:
        """Anchor, supervisor and orchestrator read what there is."""
        self.anchor._read_orchestrator()
        self.orchestrator.client.read()
        for message in self.orchestrator.supervisor.receive_all():
            assert isinstance(message, Release)
            self.kept.drop(message.memory)

    def read(self, which: int) -> None:
        self.readers[which % NUM_READERS].read()

    def restart_reader(self, which: int) -> None:
        before = self.readers[which % NUM_READERS]
        before.end()
        self.late = [reader for reader in self.late if reader is not before]
        self.orchestrator.ends[:] = [end for end in self.orchestrator.ends if end.id != before.id]
        after = Reader(WorkerId(before.id.rank, Incarnation(before.id.incarnation + 1)))
        self.readers[which % NUM_READERS] = after
        self.orchestrator.connect(after)

    def restart_anchor(self, which: int) -> None:
        self.anchor._memory.release_all()
        self.anchor = Anchor(Channel(Channel.pair()[0]))
        self.orchestrator.attach(self.anchor)

    def restart_orchestrator(self, which: int) -> None:
        """What it has sent to the supervisor and to readers is read. One reader, or none, reports late."""
        self.turn(which)
        for reader in self.readers:
            reader.read()
        self.orchestrator.close()
        self.orchestrator = Orchestrator(self.anchor)
        known = [*self.kept]
        cut = which % (len(known) + 1)
        self._hand_over(known[:cut])
        self.late = [reader for number, reader in enumerate(self.readers) if number == which % (NUM_READERS + 1)]
        for reader in self.readers:
            if reader not in self.late:
                self.orchestrator.connect(reader, reader.offered.names)
        self._hand_over(known[cut:])

    def _hand_over(self, memory: list[MemoryName]) -> None:
        """The supervisor tells a new orchestrator what exists."""
        for piece in memory:
            self.orchestrator.client.hold(piece, self.kept.open(piece))
            self.orchestrator.catalog.offer(piece)

    # -- what must be so -------------------------------------------------------------------------

    def settle(self) -> None:
        for reader in self.late:
            self.orchestrator.connect(reader, reader.offered.names)
        self.late = []
        for _ in range(2):
            self.turn(0)
        for reader in self.readers:
            reader.read()

    def check(self) -> None:
        offered, catalog = self.orchestrator.catalog.offered, self.orchestrator.client.memory
        for reader in self.readers:
            mine = [memory for memory in offered if memory.owners[0].rank != reader.id.rank]
            assert {*reader.offered.names} == {*reader.used} == {*mine}
            for memory in mine:
                assert file_of(reader.used[memory]) == file_of(catalog.descriptor(memory)), "it is another one"
        for memory in self.kept:
            assert file_of(self.kept.descriptor(memory)) == file_of(catalog.descriptor(memory))
        assert {*self.kept} == {*offered} <= {*catalog}
        assert len(self.anchor._memory) == len(catalog)

    def close(self) -> None:
        self.orchestrator.close()
        self.anchor._memory.release_all()
        self.kept.drop_all()
        for reader in self.readers:
            reader.end()


def file_of(fd: int) -> int:
    return os.fstat(fd).st_ino


def files() -> Counter[int]:
    """How many descriptors this process has of each memory."""
    found = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return Counter(path.stat().st_ino for path in found if str(path.readlink()).startswith("/memfd:everserve-"))


@examples(100)
@given(st.lists(happenings, max_size=30))
@example([("begin", 1), ("read", 0), ("die_in_release", 0), ("begin", 1)])  # other memory for the same seat
def test_memory_in_any_order_of_events(happening):
    gc.collect()
    before, world = files(), World()
    for name, which in happening:
        getattr(world, name)(which)
    world.settle()
    world.check()
    for memory in [*world.orchestrator.client.memory]:
        world.orchestrator.catalog.release(memory)
    world.settle()
    world.check()
    gc.collect()
    assert files() == before, "a leak"
    world.close()
