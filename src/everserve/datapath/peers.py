"""Who the expert workers are, which of them this attention worker trusts, and hence where each expert is for it.

A peer, as seen from here:

    join ──> trusted ──died, silent, deaf, refused──> suspect ──use(routes), and it pulses──> trusted
                │                                        │
                └───────────────── leave ────────────────┴──> retired ──its process is dead──> forgotten

Suspicion is local and immediate: the next candidate of the routes takes over, in the middle of a layer if need be. It
is not a decision; only the orchestrator makes a peer leave. The lane of a retired peer stays mapped, because a process
that was stopped may wake up and answer: that is counted, and never used.
"""

import ctypes
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from everserve.datapath.lane import MAX_RANKS, NUM_BOXES, LaneRegion, LaneShape, load, write_header
from everserve.runtime.liveness import Cell, PeerState, life_word
from everserve.tables.ids import Incarnation, Rank
from everserve.tables.routes import NOBODY, Routes

log = logging.getLogger(__name__)

_MAX_LANES = 2 * MAX_RANKS  # half of them may be retired
_int64 = ctypes.c_int64
_PerBox = _int64 * NUM_BOXES


class Watcher(Protocol):
    """What is needed of a `Warden`."""

    alarm_address: int

    @property
    def alarm(self) -> int: ...
    def renew(self, seconds: float) -> None: ...
    def watch(self, key: int, cell: Cell, word: int) -> None: ...
    def unwatch(self, key: int) -> None: ...
    def state(self, key: int) -> PeerState: ...
    def changes(self) -> list[tuple[int, PeerState]]: ...


class End(ctypes.Structure):
    """struct end in csrc/exchange.c."""

    _fields_ = [
        ("lane", _int64),
        ("cell", _int64),
        ("trusted", _int64),
        ("last_seq", _int64),
        ("sent", _PerBox),
        ("part", _PerBox),
        ("abandoned", _PerBox),
        ("num_stale", _int64),
        ("filling", _int64),
        ("num_tokens", _int64),
        ("num_rows", _int64),
        ("last_token", _int64),
        ("replay", _int64),
    ]
    lane: int
    cell: int
    trusted: int
    num_stale: int


@dataclass(eq=False)
class Peer:
    """One incarnation of an expert worker. `suspicion` is why it is not trusted, or None."""

    rank: Rank
    incarnation: Incarnation
    cell: Cell
    lane: int
    suspicion: str | None = None


class Suspicion(NamedTuple):
    """For the orchestrator's ears."""

    rank: Rank
    incarnation: Incarnation
    reason: str


@dataclass(eq=False)
class _Retired:
    peer: Peer
    end: End


class ExpertPeers:
    """The expert workers of one attention worker. `num_experts` and `moe_layers` are the model's."""

    def __init__(
        self,
        rank: Rank,
        incarnation: Incarnation,
        cell: Cell,
        warden: Watcher,
        shape: LaneShape,
        moe_layers: Sequence[int],
        num_experts: int,
    ) -> None:
        self.rank = rank
        self.incarnation = incarnation
        self.cell = cell
        self.warden = warden
        self.shape = shape
        self.moe_layers = tuple(moe_layers)
        self.num_experts = num_experts
        self.epoch = 0
        cell.position = -1  # nobody should wait for us yet
        self.ends = (End * MAX_RANKS)()  # by rank; csrc/exchange.c works on it
        self._peers: dict[Rank, Peer] = {}
        self._retired: list[_Retired] = []
        self._num_stale_before = 0  # from lanes that are forgotten
        self._word = life_word(rank, incarnation)
        self._layout = shape.layout()
        self._region = LaneRegion(shape, _MAX_LANES)
        # [index of the MoE layer][expert] -> rank and slot, as trusted now. Changed in place: C has the addresses.
        self._owner = np.full((len(self.moe_layers), num_experts), NOBODY, np.int32)
        self._slot = np.full_like(self._owner, NOBODY)
        self._candidates = np.empty((*self._owner.shape, 0, 2), np.int16)
        first_owner, first_slot, stride = self._owner.ctypes.data, self._slot.ctypes.data, self._owner.strides[0]
        self.owners_at = {
            layer: (first_owner + i * stride, first_slot + i * stride) for i, layer in enumerate(self.moe_layers)
        }

    # -- what the orchestrator says --------------------------------------------------------------

    def join(self, rank: Rank, incarnation: Incarnation, cell: Cell, lane_fd: int) -> None:
        """An expert worker is there. Takes over the cell and the descriptor."""
        try:
            if rank in self._peers:
                self.leave(rank, self._peers[rank].incarnation)
            if not self._region.num_free:
                self._forget(self._retired[0])
            lane = self._region.map(lane_fd)
        finally:
            os.close(lane_fd)
        write_header(lane, self.shape, (self.rank, self.incarnation), (rank, incarnation))
        self.ends[rank] = End(lane=lane, cell=cell.address, part=_PerBox(-1, -1))
        self._peers[rank] = Peer(rank, incarnation, cell, lane)
        self.warden.watch(rank, cell, self._word)
        self._resolve()

    def leave(self, rank: Rank, incarnation: Incarnation) -> None:
        """That incarnation is gone: nothing of it counts any more."""
        peer = self._peers.get(rank)
        if peer is None or peer.incarnation != incarnation:
            return
        del self._peers[rank]
        self.warden.unwatch(rank)
        end = End.from_buffer_copy(self.ends[rank])
        load().brief.es_lane_retire(ctypes.byref(self._layout), ctypes.byref(end))
        self._retired.append(_Retired(peer, end))
        self.ends[rank] = End()
        self._resolve()

    def use(self, routes: Routes) -> None:
        """Follow these routes from now on, and trust suspects that live once more: the orchestrator knows of them."""
        if routes.epoch < self.epoch:
            log.warning("routes of epoch %d came after those of epoch %d: dropped", routes.epoch, self.epoch)
            return
        candidates = routes.array()
        if candidates.shape[:2] != self._owner.shape:
            raise ValueError(f"routes for {candidates.shape[:2]} layers and experts; there are {self._owner.shape}")
        if candidates[..., 0].max(initial=NOBODY) >= MAX_RANKS:
            raise ValueError(f"routes name a rank beyond {MAX_RANKS - 1}")
        self.epoch = routes.epoch
        self._candidates = candidates
        self.reconsider()

    @property
    def incarnations(self) -> list[tuple[Rank, Incarnation]]:
        """Who has joined and not left."""
        return [(peer.rank, peer.incarnation) for peer in self._peers.values()]

    # -- what is seen from here ------------------------------------------------------------------

    @property
    def suspects(self) -> dict[Rank, str]:
        """Peers that are there but not trusted, and why."""
        return {peer.rank: peer.suspicion for peer in self._peers.values() if peer.suspicion is not None}

    def trusted(self, rank: Rank) -> Peer | None:
        """The peer in that rank, if there is one and it is trusted."""
        peer = self._peers.get(rank)
        return peer if peer is not None and peer.suspicion is None else None

    def look(self) -> list[Suspicion]:
        """After an alarm: suspect everyone who died or fell silent and was trusted so far."""
        suspicions: list[Suspicion] = []
        for rank in sorted({Rank(key) for key, _ in self.warden.changes()}):
            peer = self.trusted(rank)
            state = self.warden.state(rank) if peer is not None else PeerState.ALIVE  # now, not at that change
            if peer is not None and state is not PeerState.ALIVE:
                suspicions.append(self.suspect(peer, state.name.lower()))
        return suspicions

    def suspect(self, peer: Peer, reason: str) -> Suspicion:
        """Route around a peer from now on."""
        peer.suspicion = reason
        self._resolve()
        return Suspicion(peer.rank, peer.incarnation, reason)

    def reconsider(self) -> None:
        """Trust every suspect again that pulses."""
        for peer in self._peers.values():
            if peer.suspicion is not None and self.warden.state(peer.rank) is PeerState.ALIVE:
                peer.suspicion = None
        self._resolve()

    @property
    def num_stale(self) -> int:
        """Answers that came too late to be used."""
        ends = [self.ends[rank] for rank in self._peers] + [retired.end for retired in self._retired]
        for end in ends:
            load().brief.es_lane_count_stale(ctypes.byref(self._layout), ctypes.byref(end))
        return self._num_stale_before + sum(end.num_stale for end in ends)

    def sweep(self) -> None:
        """Forget the retired whose processes are certainly dead. Not in the middle of a layer: their answers, if they
        came in time, may still be in use."""
        for retired in [r for r in self._retired if r.peer.cell.is_dead(self._word)]:
            self._forget(retired)

    def close(self) -> None:
        """Let go of all memory."""
        for peer in [*self._peers.values()]:
            self.leave(peer.rank, peer.incarnation)
        while self._retired:
            self._forget(self._retired[0])
        self._region.close()

    def _forget(self, retired: _Retired) -> None:
        load().brief.es_lane_count_stale(ctypes.byref(self._layout), ctypes.byref(retired.end))
        self._num_stale_before += retired.end.num_stale
        self._region.unmap(retired.peer.lane)
        retired.peer.cell.close()
        self._retired.remove(retired)

    def _resolve(self) -> None:
        """Owners and slots: for each expert the first candidate that is trusted. Runs in the middle of a layer."""
        trusted = np.zeros(MAX_RANKS + 1, bool)  # NOBODY is -1: the last one
        for rank, peer in self._peers.items():
            trusted[rank] = self.ends[rank].trusted = peer.suspicion is None
        if self._candidates.shape[2] == 0:
            self._owner[...] = NOBODY
            return
        rank_LNC, slot_LNC = self._candidates[..., 0], self._candidates[..., 1]
        usable_LNC = trusted[rank_LNC]
        first_LN1 = usable_LNC.argmax(axis=2)[..., None]

        def first(table_LNC: np.ndarray) -> np.ndarray:
            return np.take_along_axis(table_LNC, first_LN1, axis=2)[..., 0]

        self._owner[...] = np.where(first(usable_LNC), first(rank_LNC), NOBODY)
        self._slot[...] = first(slot_LNC)
