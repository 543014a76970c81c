"""Which seats' weights exist, so that expert workers can copy experts out of each other's memory.

The weights of an expert seat belong to the seat: they outlive its workers, and all incarnations use the same memory.
Every other expert worker gets the descriptors in advance, so that a fill needs no other process. They are withdrawn
when the memory is dropped, because its device is lost or its seat has retired.
"""

from collections.abc import Callable

from everserve.control.anchor_client import AnchorClient
from everserve.control.needs import Needs
from everserve.control.worker_ends import WorkerEnd, WorkerEnds
from everserve.tables.goal import Goal
from everserve.tables.ids import Rank, Role
from everserve.tables.memory import Kind, Memory
from everserve.wire.channel import Channel
from everserve.wire.messages import DropMemory, WeightsJoined, WeightsLeft

_KINDS = (Kind.WEIGHTS, Kind.WEIGHTS_STATE)


class WeightsSources:
    """The weights of all expert seats, with their slot tables."""

    def __init__(
        self, anchor: AnchorClient, ends: WorkerEnds, supervisor: Channel, needs: Needs, goal: Callable[[], Goal]
    ) -> None:
        self._anchor = anchor
        self._ends = ends
        self._supervisor = supervisor
        self._needs = needs
        self._goal = goal
        self._known: dict[Rank, dict[Kind, Memory]] = {}

    def note(self, memory: Memory) -> None:
        """This memory is held now. Every connected expert worker learns of a seat whose memory is complete. Memory that
        a seat had in an earlier role, and that other workers still use, is none."""
        if memory.kind not in _KINDS:
            return
        rank = memory.owners[0].rank
        if memory not in self._needs.expert_weights(self._goal(), rank):
            return
        pieces = self._known.setdefault(rank, {})
        if pieces.get(memory.kind) != memory:
            pieces[memory.kind] = memory
            for end in self._ends:
                self._give(end, rank)

    def introduce(self, end: WorkerEnd) -> None:
        """A worker has connected: send it what there is. One that an earlier orchestrator has started may know of
        memory that is gone."""
        ranks = [seat.rank for seat in self._goal().seats if Role.ATTENTION not in seat.roles]
        for rank in ranks:
            if not self._give(end, rank) and end.report is not None and _copies_from(end, rank):
                end.send(WeightsLeft(rank=rank))

    def drop(self, device: int) -> None:
        """The memory of this device is lost."""
        for rank, pieces in [*self._known.items()]:
            if any(memory.device == device for memory in pieces.values()):
                self._release(rank)

    def retire(self, rank: Rank) -> None:
        """This seat has no weights any more."""
        if rank in self._known:
            self._release(rank)

    def _release(self, rank: Rank) -> None:
        for memory in self._known.pop(rank).values():
            self._anchor.release(memory)
            self._supervisor.send(DropMemory(memory=memory))
        for end in self._ends:
            if _copies_from(end, rank):
                end.send(WeightsLeft(rank=rank))

    def _give(self, end: WorkerEnd, rank: Rank) -> bool:
        pieces = self._known.get(rank, {})
        fds = [self._anchor.held(pieces.get(kind)) for kind in _KINDS]
        seat = self._goal().seat(rank)
        if None in fds or seat is None or Role.ATTENTION in seat.roles or not _copies_from(end, rank):
            return False
        end.send(WeightsJoined(rank=rank, weights=pieces[Kind.WEIGHTS]), fds=tuple(fd for fd in fds if fd is not None))
        return True


def _copies_from(end: WorkerEnd, rank: Rank) -> bool:
    return Role.ATTENTION not in end.roles and end.is_connected and end.rank != rank
