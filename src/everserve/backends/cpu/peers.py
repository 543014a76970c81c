"""ExpertPeers: peers with lanes in host memory, with the tables that csrc/lanes/exchange.c works on."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from everserve.backends.cpu.lane import NUM_BOXES, LaneRegion, LaneShape, load, write_header
from everserve.memory.liveness import Cell
from everserve.native.structs import source
from everserve.seam.trust import Peer, Peers, Watcher
from everserve.tables.ids import MAX_RANKS, Incarnation, Rank, WorkerId
from everserve.tables.work import Work

_MAX_LANES = 2 * MAX_RANKS  # half of them may be retired
_int64 = ctypes.c_int64


class End(ctypes.Structure):
    """struct end in csrc/lanes/exchange.c."""

    _fields_ = source("lanes", "exchange.c").fields("end")
    lane: int
    cell: int
    trusted: int
    num_stale: int
    is_fetching: int
    answer_ns: int
    num_answers: int
    num_answered_rows: int


@dataclass(eq=False)
class _Retired:
    peer: Peer
    end: End


class ExpertPeers(Peers):
    """`ends` and `owners_at` are for C."""

    def __init__(
        self,
        rank: Rank,
        incarnation: Incarnation,
        cell: Cell,
        warden: Watcher,
        shape: LaneShape,
        calls: Sequence[int],
        num_shards: int,
    ) -> None:
        super().__init__(rank, incarnation, cell, warden, calls, num_shards)
        self.shape = shape
        self.ends = (End * MAX_RANKS)()  # by rank
        self._retired: list[_Retired] = []
        self._num_stale_before = 0  # from lanes that are forgotten
        self._layout = shape.layout()
        self._region = LaneRegion(shape, _MAX_LANES)
        first_owner, first_slot = self.owner_LN.ctypes.data, self.slot_LN.ctypes.data
        stride = self.owner_LN.strides[0]
        self.owners_at = {
            layer: (first_owner + i * stride, first_slot + i * stride) for i, layer in enumerate(self.calls)
        }

    @property
    def num_stale(self) -> int:
        ends = [self.ends[rank] for rank in self._peers] + [retired.end for retired in self._retired]
        for end in ends:
            load().brief.es_lane_count_stale(ctypes.byref(self._layout), ctypes.byref(end))
        return self._num_stale_before + sum(end.num_stale for end in ends)

    def take_answer_times(self) -> list[tuple[WorkerId, Work]]:
        taken: list[tuple[WorkerId, Work]] = []
        for rank, peer in self._peers.items():
            end = self.ends[rank]
            if end.num_answers:
                work = Work(end.answer_ns * 1e-9, (end.num_answers, end.num_answered_rows))
                taken.append((WorkerId(rank, peer.incarnation), work))
                end.answer_ns = end.num_answers = end.num_answered_rows = 0
        return taken

    def sweep(self) -> None:
        for retired in [r for r in self._retired if r.peer.cell.is_dead(self._word)]:
            self._forget(retired)

    def close(self) -> None:
        """Let go of all memory."""
        for peer in [*self._peers.values()]:
            self.leave(peer.rank, peer.incarnation)
        while self._retired:
            self._forget(self._retired[0])
        self._region.close()

    def _open(self, rank: Rank, incarnation: Incarnation, cell: Cell, lane_fd: int, bell_fd: int | None) -> int:
        assert bell_fd is None, "cells have doorbells"
        if not self._region.num_free:
            self._forget(self._retired[0])
        lane = self._region.map(lane_fd)
        write_header(lane, self.shape, WorkerId(self.rank, self.incarnation), WorkerId(rank, incarnation))
        self.ends[rank] = End(lane=lane, cell=cell.address, part=(-1,) * NUM_BOXES)
        return lane

    def _retire(self, peer: Peer) -> None:
        end = End.from_buffer_copy(self.ends[peer.rank])
        load().brief.es_lane_retire(ctypes.byref(self._layout), ctypes.byref(end))
        self._retired.append(_Retired(peer, end))
        self.ends[peer.rank] = End()

    def _note_trust(self, rank: Rank, is_trusted: bool) -> None:
        self.ends[rank].trusted = is_trusted

    def _forget(self, retired: _Retired) -> None:
        load().brief.es_lane_count_stale(ctypes.byref(self._layout), ctypes.byref(retired.end))
        self._num_stale_before += retired.end.num_stale
        self._region.unmap(retired.peer.lane)
        retired.peer.cell.close()
        self._retired.remove(retired)
