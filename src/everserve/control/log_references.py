"""Whose KV logs exist, and who keeps them.

A log belongs to one incarnation of an attention worker. All other attention workers keep its descriptor from the
beginning, so that restoring a stream needs nobody's help. It is let go when both are true, in whatever order:

    the incarnation is lost        (our decision)
    it is settled                  (the gateway says that no stream needs it)

Where its blocks are in memory of their own, on a device, that is held before the log is added, and goes with it.
"""

from collections.abc import Iterable

from everserve.control.anchor_client import Memory
from everserve.control.worker_ends import WorkerEnd, WorkerEnds
from everserve.memory.names import kv_name, log_name
from everserve.tables.ids import Incarnation, Rank, Role, WorkerId
from everserve.wire.channel import Channel
from everserve.wire.messages import DropMemory, LogJoined, LogLeft


class Logs:
    """Of all attention workers, living and lost."""

    def __init__(self, memory: Memory, ends: WorkerEnds, supervisor: Channel) -> None:
        self._memory = memory
        self._ends = ends
        self._supervisor = supervisor
        self._known: set[WorkerId] = set()
        self._lost: set[WorkerId] = set()
        self._settled: set[WorkerId] = set()

    def add(self, log: WorkerId, fd: int) -> None:
        """The descriptor is ours from now on. Every attention worker that is there gets it."""
        self._known.add(log)
        self._memory.hold(log_name(log), fd)
        for end in self._ends:
            if _keeps(end, log):
                self._give(end, log)

    def introduce(self, end: WorkerEnd, but: Iterable[WorkerId] = ()) -> None:
        """A worker has come: it keeps all logs from now on. (`but`: those that it has already.)"""
        had = set(but)
        for log in sorted(self._known - had):
            if _keeps(end, log):
                self._give(end, log)
        for rank, incarnation in sorted(had - self._known):
            end.send(LogLeft(rank=rank, incarnation=incarnation))

    def has(self, log: WorkerId) -> bool:
        return log in self._known

    def descriptors(self, log: WorkerId) -> tuple[int, ...]:
        """Its memory, and before that the memory of its blocks if that is another."""
        held = [self._memory.held(name) for name in (kv_name(log), log_name(log))]
        return tuple(fd for fd in held if fd is not None)

    def last_of(self, rank: Rank) -> WorkerId | None:
        """The log of the latest incarnation in this seat that has one."""
        return max((log for log in self._known if log[0] == rank), default=None)

    def lose(self, log: WorkerId) -> None:
        if log in self._known:
            self._lost.add(log)
            self._maybe_drop(log)

    def settle(self, log: WorkerId) -> None:
        if log in self._known:
            self._settled.add(log)
            self._maybe_drop(log)

    def settle_lost_but(self, needed: Iterable[WorkerId]) -> None:
        """The gateway knows what its streams need. What it may have told the orchestrator before us, it does not tell
        again. Only of those that are lost: streams may come to all others."""
        for log in sorted(self._lost - set(needed)):
            self.settle(log)

    def _maybe_drop(self, log: WorkerId) -> None:
        if log not in self._lost or log not in self._settled:
            return
        rank, incarnation = log
        for logs in (self._known, self._lost, self._settled):
            logs.discard(log)
        for name in (log_name(log), kv_name(log)):  # the log first: it is never there without its blocks
            if self._memory.held(name) is not None:
                self._memory.release(name)
                self._supervisor.send(DropMemory(name=name))
        for end in self._ends:
            if _keeps(end, log):
                end.send(LogLeft(rank=rank, incarnation=incarnation))

    def _give(self, end: WorkerEnd, log: WorkerId) -> None:
        rank, incarnation = log
        *kv, fd = self.descriptors(log)
        end.send(LogJoined(rank=rank, incarnation=Incarnation(incarnation), has_kv=bool(kv)), fds=(fd, *kv))


def _keeps(end: WorkerEnd, log: WorkerId) -> bool:
    return Role.ATTENTION in end.roles and end.is_connected and end.seat != log
