"""CudaPeers: peers with lanes in device memory, at addresses that captured graphs contain.

A lane can only be mapped in its place, or unmapped, while no step runs: a peer that joins in the middle of a step waits
for its end. Until then it is not trusted, so nothing is sent to it.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from everserve.backends.cuda.lanes.lane import (
    ANSWER_AT,
    FLAG_AT,
    MAX_EXPERTS,
    NUM_BOXES,
    POOL_AT,
    STATUS_AT,
    CudaLaneShape,
    moved_expert,
)
from everserve.backends.cuda.lanes.send import SendState, places
from everserve.backends.cuda.ops.words import Words
from everserve.memory.device import Driver, Region
from everserve.memory.liveness import Cell
from everserve.memory.names import BELL_BYTES, bell_at
from everserve.seam.trust import Peer, Peers, Watcher
from everserve.tables.ids import Incarnation, Rank, WorkerId

_ZERO, _AWAITED, _RING = bytes(4), b"\xff" * 4, (1).to_bytes(4, "little")


@dataclass
class _Joining:
    rank: Rank
    incarnation: Incarnation
    cell: Cell
    lane_fd: int
    bell_fd: int | None


class CudaPeers(Peers):
    """`state` and the tables are what send.py's kernels read."""

    def __init__(
        self,
        rank: Rank,
        incarnation: Incarnation,
        cell: Cell,
        warden: Watcher,
        shape: CudaLaneShape,
        calls: Sequence[int],
        num_shards: int,
        driver: Driver,
        expert_ranks: range,
        words: Words,
    ) -> None:
        assert num_shards <= MAX_EXPERTS
        super().__init__(rank, incarnation, cell, warden, calls, num_shards)
        self.is_in_step = False
        self._driver = driver
        self.expert_ranks = expert_ranks
        num_ranks, device = expert_ranks.stop, words.stop.device
        self._region = Region(driver, num_ranks, shape.lane_bytes())
        self._bells = Region(driver, num_ranks, driver.whole(BELL_BYTES))
        state = SendState.empty(shape, self._region.base, num_ranks, words.stop)
        self.state = replace(state, unplaced=words.unplaced, absent=words.absent)
        num_layers, num_places = len(self.calls), num_ranks * shape.num_slots
        self.place_of_LN = torch.full((num_layers, num_shards), -1, dtype=torch.int32, device=device)
        self.expert_at_LP = torch.full((num_layers, num_places), -1, dtype=torch.int32, device=device)
        self._joining: list[_Joining] = []
        self._retired: list[Peer] = []
        self._uploaded = 0
        self._owed: dict[Rank, int] = {}  # the last request to a peer that was given up, if it had no answer then
        self._num_stale = 0
        self._bell_of: dict[Rank, int] = {}

    def end(self) -> None:
        """No step will come any more, and none runs."""
        self._region.close()
        self._bells.close()

    # -- between steps ---------------------------------------------------------------------------

    def join(self, rank: Rank, incarnation: Incarnation, cell: Cell, lane_fd: int, bell_fd: int | None = None) -> None:
        if self.is_in_step:
            self._joining.append(_Joining(rank, incarnation, cell, lane_fd, bell_fd))
        else:
            super().join(rank, incarnation, cell, lane_fd, bell_fd)

    def leave(self, rank: Rank, incarnation: Incarnation) -> None:
        for joining in [j for j in self._joining if WorkerId(j.rank, j.incarnation) == WorkerId(rank, incarnation)]:
            self._joining.remove(joining)  # it has come and gone in one step
            joining.cell.close()
            for fd in (joining.lane_fd, joining.bell_fd):
                if fd is not None:
                    os.close(fd)
        super().leave(rank, incarnation)

    def sweep(self) -> None:
        """The step has ended: map the lanes of peers that joined meanwhile."""
        assert not self.is_in_step
        joining, self._joining = self._joining, []
        for peer in joining:
            self.join(peer.rank, peer.incarnation, peer.cell, peer.lane_fd, peer.bell_fd)
        for retired in [r for r in self._retired if r.cell.is_dead(self._word)]:
            self._retired.remove(retired)
            retired.cell.close()

    @property
    def incarnations(self) -> list[WorkerId]:
        return [*super().incarnations, *(WorkerId(peer.rank, peer.incarnation) for peer in self._joining)]

    @property
    def is_settled(self) -> bool:
        """Whether the device has the latest tables, and no peer waits for the end of a step to join."""
        return self._uploaded == self.num_changes and not self._joining

    def upload(self) -> None:
        """Bring the device's tables up to date, in the order of its current stream."""
        if self._uploaded != self.num_changes:
            self._uploaded = self.num_changes
            owners, slots = torch.from_numpy(self.owner_LN), torch.from_numpy(self.slot_LN)
            place_of, expert_at = places(owners, slots, self.state.num_ranks, self.state.shape.num_slots)
            self.place_of_LN.copy_(place_of)
            self.expert_at_LP.copy_(expert_at)
            # The same for all attention workers, as soon as they follow the same routes and trust the same.
            lead = self.lowest_of_first_layer
            self.state.lead.fill_(lead if lead is not None else self.state.num_ranks)

    def ring(self) -> None:
        """An expert worker rings its bell itself; but where many processes share a device, that may be queued behind
        the graph that waits for it."""
        for rank, address in self._bell_of.items():
            if self.trusted(rank) is not None:
                self._driver.write(address, _RING)

    # -- in the middle of one --------------------------------------------------------------------

    def release(self, rank: Rank) -> None:
        """Do not wait for an answer from there any longer. `collect` checks whether it has arrived."""
        self._driver.write(self._region.address(rank) + FLAG_AT, _ZERO)

    def await_again(self, rank: Rank) -> None:
        """The flag was written for nothing: the answer is still to come. If it comes this very moment, we see it."""
        self._driver.write(self._region.address(rank) + FLAG_AT, _AWAITED)
        if self.has_answered(rank):
            self.release(rank)

    def is_awaited(self, rank: Rank) -> bool:
        """Whether something was sent there that is not answered."""
        return self._driver.read(self._region.address(rank) + FLAG_AT, 4) == _AWAITED

    def has_refused(self, rank: Rank) -> int:
        """The status with which it has answered the last request; 0 if it has not, or has computed it."""
        if not self.has_answered(rank):
            return 0
        return int.from_bytes(self._driver.read(self._region.address(rank) + STATUS_AT, 8), "little")

    def moved_places(self, rank: Rank) -> set[tuple[int, int]]:
        """The (slot, expert) that it has marked in the last request, which it has answered with MOVED."""
        shape, box = self.state.shape, int(self.state.sent_E[rank].item()) % NUM_BOXES
        words = self._driver.read(self._region.address(rank) + shape.counts_at(box), 4 * shape.num_slots)
        experts = map(moved_expert, np.frombuffer(words, np.int32).tolist())
        return {(slot, expert) for slot, expert in enumerate(experts) if expert is not None and expert >= 0}

    def take_back(self, ranks: Sequence[Rank]) -> list[int]:
        """These have not answered in this layer, or have refused, and are not waited for any more: how many rows each
        of them has."""
        rows_E, sent_E = self._contents(self.state.rows_E, np.int32), self._contents(self.state.sent_E, np.int64)
        self._owed |= {rank: int(sent_E[rank]) for rank in ranks if self.last_answer(rank) != sent_E[rank]}
        return [int(rows_E[rank]) for rank in ranks]

    def _contents(self, table: Tensor, dtype: type[np.signedinteger[Any]]) -> NDArray[Any]:
        """What is in it now, whatever torch's streams do. (They have nothing to do: the step has stopped.)"""
        num_bytes = table.numel() * table.element_size()
        return np.frombuffer(self._driver.read(table.data_ptr(), num_bytes), dtype)

    def has_answered(self, rank: Rank) -> bool:
        """Whether it has answered the last request: then nothing of an abandoned step is still to come."""
        return self.last_answer(rank) == int(self.state.sent_E[rank].item())

    def pool_of(self, rank: Rank) -> int:
        """Where heads are divided: the identity of its KV; 0 if it has not opened our lane yet."""
        return int.from_bytes(self._driver.read(self._region.address(rank) + POOL_AT, 8), "little")

    def last_answer(self, rank: Rank) -> int:
        """The number of the request that it has answered last."""
        return int.from_bytes(self._driver.read(self._region.address(rank) + ANSWER_AT, 8), "little")

    @property
    def given_up(self) -> list[Rank]:
        """Ranks with a lane that are not trusted: no answer is expected from them."""
        ranks = map(Rank, self.expert_ranks)
        return [rank for rank in ranks if self._region.is_mapped(rank) and self.trusted(rank) is None]

    @property
    def num_stale(self) -> int:
        """A late answer of a peer that was given up is counted only when another peer takes its place: the lane is not
        read before."""
        return self._num_stale

    # -- lanes -----------------------------------------------------------------------------------

    def _open(self, rank: Rank, incarnation: Incarnation, cell: Cell, lane_fd: int, bell_fd: int | None) -> int:
        assert not self.is_in_step and bell_fd is not None
        torch.cuda.synchronize()
        owed = self._owed.pop(rank, None)
        self._num_stale += owed is not None and self.last_answer(rank) == owed
        self._region.map(lane_fd, rank)
        self._bells.map(bell_fd, rank)
        self.state.bell_E[rank] = self._bell_of[rank] = bell_at(self._bells.address(rank), incarnation)
        self.state.sent_E[rank] = 0
        self.state.present_E[rank] = 1
        torch.cuda.synchronize()  # the step is on another stream, which would not wait for this
        return self._region.address(rank)

    def _retire(self, peer: Peer) -> None:
        """Its lane stays until another one takes its place; it may have been sent something in this very step."""
        self._retired.append(peer)

    def _note_trust(self, rank: Rank, is_trusted: bool) -> None:
        """Nothing to do: the tables name only places at trusted peers."""
