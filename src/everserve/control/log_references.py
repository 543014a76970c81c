"""Which KV logs exist, and when they can be released.

A log belongs to one incarnation of an attention worker. All other attention workers get its descriptor in advance, so
that restoring a stream needs no other process. It is released when both are true, in any order:

    the incarnation is lost        (the orchestrator's decision)
    it is settled                  (the gateway says that no stream needs the log)

Where the blocks are in device memory of their own, that memory is held before the log is added, and released with it.
"""

from collections.abc import Callable, Iterable, Sequence

from everserve.control.anchor_client import AnchorClient
from everserve.control.worker_ends import WorkerEnd, WorkerEnds
from everserve.tables.ids import Incarnation, Rank, Role, WorkerId
from everserve.tables.memory import Kind, Memory
from everserve.wire.channel import Channel
from everserve.wire.messages import DropMemory, LogJoined, LogLeft


class Logs:
    """The logs of all attention workers, live and lost."""

    def __init__(self, anchor: AnchorClient, ends: WorkerEnds, supervisor: Channel) -> None:
        self._anchor = anchor
        self._ends = ends
        self._supervisor = supervisor
        self._known: dict[WorkerId, tuple[Memory, ...]] = {}  # the memory of its blocks first, if separate
        self._blocks: dict[WorkerId, Memory] = {}  # of logs that are not added yet
        self._lost: set[WorkerId] = set()
        self._settled: set[WorkerId] = set()
        self.needed: Sequence[WorkerId] | None = None  # by streams, as the gateway reported during a recovery

    def add(self, memory: Memory, fd: int) -> None:
        """Takes ownership of the descriptor. The memory of a log's blocks is added before the log itself; then every
        connected attention worker gets both."""
        (log,) = memory.owners
        self._anchor.hold(memory, fd)
        if memory.kind is Kind.KV:
            self._blocks[log] = memory
            return
        blocks = self._blocks.pop(log, None)
        self._known[log] = (memory,) if blocks is None else (blocks, memory)
        for end in self._ends:
            if _keeps(end, log):
                self._give(end, log)

    def introduce(self, end: WorkerEnd, but: Iterable[WorkerId] = ()) -> None:
        """A worker has connected: send it all logs, except those that it has already (`but`)."""
        had = set(but)
        for log in sorted(self._known.keys() - had):
            if _keeps(end, log):
                self._give(end, log)
        for rank, incarnation in sorted(had - self._known.keys()):
            end.send(LogLeft(rank=rank, incarnation=incarnation))

    def has(self, log: WorkerId) -> bool:
        return log in self._known

    @property
    def has_lost(self) -> bool:
        """Whether streams may still be restored from the log of a worker that is lost."""
        return bool(self._lost)

    def descriptors(self, log: WorkerId) -> tuple[int, ...]:
        """The memory of its blocks, if separate, then that of the log."""
        held = [self._anchor.held(memory) for memory in self._known[log]]
        return tuple(fd for fd in held if fd is not None)

    def last_of(self, rank: Rank) -> WorkerId | None:
        """The log of the latest incarnation in this seat that has one."""
        return max((log for log in self._known if log[0] == rank), default=None)

    def lose(self, log: WorkerId) -> None:
        if log in self._known:
            self._lost.add(log)
            self._maybe_drop(log)

    def lose_all_but(self, is_current: Callable[[WorkerId], bool]) -> None:
        """A worker that was lost to the previous orchestrator, and has ended since, is not lost once more."""
        for log in sorted(self._known):
            if not is_current(log):
                self.lose(log)

    def settle(self, log: WorkerId) -> None:
        if log in self._known:
            self._settled.add(log)
            self._maybe_drop(log)

    def settle_lost_but(self, needed: Iterable[WorkerId]) -> None:
        """Settle all lost logs but those that the gateway needs: a LogSettled that it sent to the previous orchestrator
        is not sent again. Logs of live workers stay unsettled, because these may still get streams."""
        for log in sorted(self._lost - set(needed)):
            self.settle(log)

    def lose_device(self, device: int) -> None:
        """Logs in the memory of a lost device are gone, also those that streams still need."""
        for log, memory in list(self._known.items()):
            if any(piece.device == device for piece in memory):
                self._drop(log)

    def _maybe_drop(self, log: WorkerId) -> None:
        if log in self._lost and log in self._settled:
            self._drop(log)

    def _drop(self, log: WorkerId) -> None:
        rank, incarnation = log
        for memory in reversed(self._known.pop(log)):  # the log first: a log never exists without its blocks
            self._anchor.release(memory)
            self._supervisor.send(DropMemory(memory=memory))
        self._lost.discard(log)
        self._settled.discard(log)
        for end in self._ends:
            if _keeps(end, log):
                end.send(LogLeft(rank=rank, incarnation=incarnation))

    def _give(self, end: WorkerEnd, log: WorkerId) -> None:
        rank, incarnation = log
        *kv, fd = self.descriptors(log)
        end.send(LogJoined(rank=rank, incarnation=Incarnation(incarnation), has_kv=bool(kv)), fds=(fd, *kv))


def _keeps(end: WorkerEnd, log: WorkerId) -> bool:
    return Role.ATTENTION in end.roles and end.is_connected and end.id != log
