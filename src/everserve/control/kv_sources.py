"""Which pools of heads' KV exist, with mirrors or parities: workers fetch KV out of each other's memory.

They belong to an expert seat, on a GPU mirrors to a home's, and outlive its workers. Pools and parities are lost with
their device, mirrors are not.
Those who fetch get the descriptors in advance, so that a fetch needs no other process: on CPUs every other expert
worker (memory/pieces/sources.py), on a GPU every attention worker (backends/cuda/log/head_pools.py).
"""

from everserve.control.anchor_client import AnchorClient
from everserve.control.worker_ends import WorkerEnd, WorkerEnds
from everserve.tables.ids import Rank, Role
from everserve.tables.memory import Kind, Memory
from everserve.wire.messages import KvJoined, KvLeft

_KINDS = (Kind.KV_PIECES, Kind.KV_MIRROR, Kind.KV_PARITY)


class KvSources:
    """The pools and mirrors of all expert seats, by rank and kind. The executor drops the memory itself. `fetches`: the
    role of those who fetch; None: no KV is fetched."""

    def __init__(self, anchor: AnchorClient, ends: WorkerEnds, fetches: Role | None = Role.EXPERT) -> None:
        self._anchor = anchor
        self._ends = ends
        self._fetches = fetches
        self._known: dict[tuple[Rank, Kind], Memory] = {}

    def note(self, memory: Memory) -> None:
        """This memory is held now."""
        if memory.kind not in _KINDS:
            return
        rank = memory.owners[0].rank
        if self._known.get((rank, memory.kind)) != memory:
            self._known[rank, memory.kind] = memory
            for end in self._ends:
                self._give(end, memory)

    def introduce(self, end: WorkerEnd) -> None:
        """A worker has connected: send it what there is. One that an earlier orchestrator has started may know of
        memory that is gone."""
        for memory in self._known.values():
            self._give(end, memory)
        if end.report is not None and self._known:
            ranks = {rank for rank, _ in self._known}
            for rank, kind in sorted({(rank, kind) for rank in ranks for kind in _KINDS} - self._known.keys()):
                if self._fetches_from(end, rank):
                    end.send(KvLeft(rank=rank, kind=kind))

    def drop(self, memory: Memory) -> None:
        """It is lost, or not kept any more."""
        rank = memory.owners[0].rank if memory.owners else None
        if rank is not None and self._known.get((rank, memory.kind)) == memory:
            del self._known[rank, memory.kind]
            for end in self._ends:
                if self._fetches_from(end, rank):
                    end.send(KvLeft(rank=rank, kind=memory.kind))

    def _give(self, end: WorkerEnd, memory: Memory) -> None:
        fd, rank = self._anchor.held(memory), memory.owners[0].rank
        if fd is not None and self._fetches_from(end, rank):
            end.send(KvJoined(rank=rank, kind=memory.kind), fds=(fd,))

    def _fetches_from(self, end: WorkerEnd, rank: Rank) -> bool:
        role = Role.ATTENTION if Role.ATTENTION in end.roles else Role.EXPERT
        return role is self._fetches and end.is_connected and end.rank != rank
