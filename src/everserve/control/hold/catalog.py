"""Memory, from its allocation to its release. One life for all kinds:

    allocated, or found with a worker that exists
        -> held                          the anchor owns it, so that it outlives all who map it
        -> offered                       to every worker that may need it (readers.py), now and when one connects
        -> withdrawn, and released       by the anchor and the supervisor: no later orchestrator finds it

Who uses memory of others gets it in advance, so that it needs no other process when it needs the memory. A worker that
an earlier orchestrator has started may know of memory that is gone: that is withdrawn as soon as it reports.
"""

from collections.abc import Callable, Iterable

from everserve.control.hold.hosts import Hosts
from everserve.control.hold.worker_ends import WorkerEnd
from everserve.memory.anchor_client import AnchorClient
from everserve.tables.ids import WorkerId
from everserve.tables.memory import Kind, MemoryName
from everserve.wire.messages import Offer, Release, Withdraw

Reads = Callable[[WorkerEnd, MemoryName], bool]  # whether this worker may need that memory


class Catalog:
    """All memory but lanes and cells."""

    def __init__(self, anchor: AnchorClient, ends: Iterable[WorkerEnd], hosts: Hosts, may_read: Reads) -> None:
        self._anchor = anchor
        self._ends = ends
        self._hosts = hosts
        self._may_read = may_read
        self._offered: dict[MemoryName, None] = {}  # in the order in which it was

    # -- what there is ---------------------------------------------------------------------------

    @property
    def offered(self) -> list[MemoryName]:
        return [*self._offered]

    def held(self, memory: MemoryName | None) -> int | None:
        """The descriptor; None if it is not held."""
        return self._anchor.held(memory)

    def beside(self, memory: MemoryName, kind: Kind) -> MemoryName | None:
        """The memory of another kind with the same owners, if it is held."""
        return self._anchor.memory.beside(memory, kind)

    def held_by(self, owner: WorkerId) -> list[MemoryName]:
        """The memory that is held and has no other owner."""
        return self._anchor.held_by(owner)

    def on_device(self, device: int) -> list[MemoryName]:
        """What is held of the memory of a device."""
        return self._anchor.on_device(device)

    def on_host(self, host: int) -> list[MemoryName]:
        """What is held of the memory of a host."""
        return self._anchor.on_host(host)

    def forget_requests(self, host: int) -> None:
        """The host is lost."""
        self._anchor.forget_requests(host)

    # -- its life --------------------------------------------------------------------------------

    def offer(self, memory: MemoryName) -> None:
        """It is held, and has been given to the worker that it belongs to."""
        if memory not in self._offered:
            self._offered[memory] = None
            for end in self._ends:
                self._give(end, memory)

    def introduce(self, end: WorkerEnd) -> None:
        """A worker has connected."""
        had = end.report.memory if end.report is not None else []
        end.offered = {memory for memory in had if memory in self._offered}
        for memory in had:
            if memory not in self._offered:
                end.send(Withdraw(memory=memory))
        for memory in self._offered:
            self._give(end, memory)

    def release(self, memory: MemoryName) -> None:
        """It is not needed any more. A process that still maps it keeps it mapped."""
        self.let_go(memory)
        self._hosts.send(memory.host, Release(memory=memory))

    def let_go(self, memory: MemoryName) -> None:
        """The same, of memory that the supervisor does not have, or not under this name any more."""
        self._offered.pop(memory, None)
        for end in self._ends:
            if memory in end.offered:
                end.offered.discard(memory)
                end.send(Withdraw(memory=memory))
        self._anchor.release(memory)

    def _give(self, end: WorkerEnd, memory: MemoryName) -> None:
        fd = self._anchor.held(memory)
        if fd is not None and end.is_connected and memory not in end.offered and self._may_read(end, memory):
            end.offered.add(memory)
            end.send(Offer(memory=memory), fds=(fd,))
