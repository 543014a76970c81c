"""The expert workers, which of them this attention worker trusts, and hence where each expert is for it.

A peer, as seen from here:

    join ──> trusted ──died, silent, deaf, refused──> suspect ──pardoned *and* pulsing, in either order──> trusted
                │                                        │
                └───────────────── leave ────────────────┴──> retired ──its process is dead──> forgotten

Suspicion is local and immediate: the next candidate of the routes takes over, in the middle of a layer if need be. It
is not a decision; only the orchestrator makes a peer leave. The lane of a retired peer stays mapped, because a process
that was stopped may wake up and answer: that is counted, and never used.

Routes that come after the suspicion are the pardon: the orchestrator knows of the peer and keeps it. Its warden and
ours look at different moments, so the pardon may come while the peer is still silent for us. It is remembered then,
and the next pulse ends the suspicion.

A slot may hold another expert than our routes say: the routes are out of date, and the peer that says so works. The
expert has *moved*: its next candidate takes over until there are other routes, and no peer is suspected. If no
candidate is left, the step is abandoned, and its repetition asks all of them again.

How lanes are mapped depends on where they are: backends/cpu/peers.py in host memory, backends/cuda/lanes/peers.py in
device memory.
"""

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from everserve.memory.liveness import Cell, PeerState, life_word
from everserve.tables.ids import MAX_RANKS, NO_RANK, Incarnation, Rank, WorkerId
from everserve.tables.routes import Routes, Symptom
from everserve.tables.work import Work

log = logging.getLogger(__name__)

_SYMPTOMS = {PeerState.DIED: Symptom.DIED, PeerState.SILENT: Symptom.SILENT}


class Watcher(Protocol):
    """What is needed of a `Warden`."""

    alarm_address: int

    @property
    def alarm(self) -> int: ...
    def renew(self, seconds: float | None = None) -> None: ...
    def watch(self, key: int, cell: Cell, word: int) -> None: ...
    def unwatch(self, key: int) -> None: ...
    def state(self, key: int) -> PeerState: ...
    def changes(self) -> list[tuple[int, PeerState]]: ...


@dataclass(eq=False)
class Peer:
    """One incarnation of an expert worker. `suspicion` is why it is not trusted, or None. `is_pardoned`: only the
    missing pulse still stands against it."""

    rank: Rank
    incarnation: Incarnation
    cell: Cell
    lane: int
    suspicion: Symptom | None = None
    is_pardoned: bool = False


class Suspicion(NamedTuple):
    """A report to the orchestrator."""

    rank: Rank
    incarnation: Incarnation
    reason: Symptom


class Peers(ABC):
    """The expert workers of one attention worker. `calls` are the numbers by which it asks, in the order of the tables;
    `num_shards` is how many the widest of them has."""

    def __init__(
        self,
        rank: Rank,
        incarnation: Incarnation,
        cell: Cell,
        warden: Watcher,
        calls: Sequence[int],
        num_shards: int,
    ) -> None:
        self.rank = rank
        self.incarnation = incarnation
        self.cell = cell
        self.warden = warden
        self.calls = tuple(calls)
        self.num_shards = num_shards
        self.epoch = 0
        self.mask_id, self.masked = 0, b""  # of the latest routes. A step that runs may have begun under another mask
        cell.position = -1  # no expert worker should wait for us yet
        self._peers: dict[Rank, Peer] = {}
        self._word = life_word(rank, incarnation)
        # [index of the call][shard] -> rank and slot, as trusted now. Changed in place: C holds their addresses.
        self.owner_LN = np.full((len(self.calls), num_shards), NO_RANK, np.int32)
        self.slot_LN = np.full_like(self.owner_LN, NO_RANK)
        self.num_changes = 0  # of these two
        # The same without `stick`, where that is used: as if it did not matter where experts were asked before.
        self.wanted_LN = np.full_like(self.owner_LN, NO_RANK)
        self.wanted_slot_LN = np.full_like(self.owner_LN, NO_RANK)
        self._sticky: tuple[np.ndarray, np.ndarray] | None = None
        self._candidates = np.empty((*self.owner_LN.shape, 0, 2), np.int16)
        self._is_moved_LNC = np.zeros(self._candidates.shape[:3], bool)

    # -- where lanes are -------------------------------------------------------------------------

    @abstractmethod
    def _open(self, rank: Rank, incarnation: Incarnation, cell: Cell, lane_fd: int, bell_fd: int | None) -> int:
        """Map a lane; returns its address. Descriptors stay the caller's."""

    @abstractmethod
    def _retire(self, peer: Peer) -> None:
        """It has left. Its lane may have to stay for a while."""

    @abstractmethod
    def _note_trust(self, rank: Rank, is_trusted: bool) -> None:
        """Update the sender's tables: whether rows may be sent to this rank."""

    def ring(self) -> None:  # noqa: B027 (only where a device waits)
        """No step runs, because streams wait. Expert workers should look for requests all the same: what they do for
        these streams may be queued behind that, on their device."""

    @property
    @abstractmethod
    def num_stale(self) -> int:
        """Answers that came too late to be used."""

    def take_answer_times(self) -> list[tuple[WorkerId, Work]]:
        """For each peer the time from requests to their answers since the last call, with the number of answers and of
        rows. Empty where that is not measured: on a GPU the device exchanges rows by itself."""
        return []

    @abstractmethod
    def sweep(self) -> None:
        """Forget retired peers once their processes are certainly dead. Not in the middle of a layer: answers that they
        sent in time may still be in use."""

    def stick(self, layers: np.ndarray, ranks_LN: np.ndarray) -> None:
        """What is in these layers (by index) is asked in these ranks, as long as they are candidates: something is
        there that other candidates do not have. The array is looked at whenever places are resolved."""
        self._sticky = layers, ranks_LN

    # -- what the orchestrator says --------------------------------------------------------------

    def join(self, rank: Rank, incarnation: Incarnation, cell: Cell, lane_fd: int, bell_fd: int | None = None) -> None:
        """An expert worker is there. Takes over the cell and the descriptors."""
        try:
            if rank in self._peers:
                self.leave(rank, self._peers[rank].incarnation)
            lane = self._open(rank, incarnation, cell, lane_fd, bell_fd)
        finally:
            for fd in (lane_fd, bell_fd):
                if fd is not None:
                    os.close(fd)
        self._peers[rank] = Peer(rank, incarnation, cell, lane)
        self.warden.watch(rank, cell, self._word)
        self.resolve()

    def leave(self, rank: Rank, incarnation: Incarnation) -> None:
        """This incarnation is gone: nothing of it counts any more."""
        peer = self._peers.get(rank)
        if peer is None or peer.incarnation != incarnation:
            return
        del self._peers[rank]
        self.warden.unwatch(rank)
        self._retire(peer)
        self._is_moved_LNC[self._candidates[..., 0] == rank] = False  # that was about its slots
        self.resolve()

    def use(self, routes: Routes) -> None:
        """Follow these routes from now on. They pardon all suspects: the orchestrator knows of them. What was moved by
        the routes before is forgotten, also if these are of the same epoch."""
        if routes.epoch < self.epoch:
            log.warning("routes of epoch %d came after those of epoch %d: dropped", routes.epoch, self.epoch)
            return
        candidates = routes.seen_by(self.rank)
        if candidates.shape[:2] != self.owner_LN.shape:
            raise ValueError(f"routes for {candidates.shape[:2]} layers and experts; there are {self.owner_LN.shape}")
        if candidates[..., 0].max(initial=NO_RANK) >= MAX_RANKS:
            raise ValueError(f"routes name a rank beyond {MAX_RANKS - 1}")
        self.epoch = routes.epoch
        self.mask_id, self.masked = routes.mask_id, routes.masked
        self._candidates = candidates
        self._is_moved_LNC = np.zeros(candidates.shape[:3], bool)
        for peer in self._peers.values():
            peer.is_pardoned = peer.suspicion is not None
        self.reconsider()

    @property
    def lowest_of_first_layer(self) -> Rank | None:
        """The lowest trusted rank that holds an expert of the first layer. It does not depend on how rows are dealt:
        all attention workers that follow the same routes and trust the same peers see the same one."""
        ranks = {Rank(int(rank)) for rank in np.unique(self._candidates[0, ..., 0])}
        return min((rank for rank in ranks if self.trusted(rank) is not None), default=None)

    @property
    def incarnations(self) -> list[WorkerId]:
        """The expert workers that have joined and not left."""
        return [WorkerId(peer.rank, peer.incarnation) for peer in self._peers.values()]

    # -- what is seen from here ------------------------------------------------------------------

    @property
    def suspects(self) -> dict[Rank, Symptom]:
        """Peers that are there but not trusted, and why."""
        return {peer.rank: peer.suspicion for peer in self._peers.values() if peer.suspicion is not None}

    def trusted(self, rank: Rank) -> Peer | None:
        """The peer in that rank, if there is one and it is trusted."""
        peer = self._peers.get(rank)
        return peer if peer is not None and peer.suspicion is None else None

    def look(self) -> list[Suspicion]:
        """After an alarm: suspect every trusted peer that died or fell silent; trust the pardoned that pulse again."""
        suspicions: list[Suspicion] = []
        for rank in sorted({Rank(key) for key, _ in self.warden.changes()} & self._peers.keys()):
            peer, state = self._peers[rank], self.warden.state(rank)  # now, not at that change
            if state is PeerState.ALIVE:
                if peer.is_pardoned:
                    self._trust(peer)
                    self.resolve()
            elif peer.suspicion is None:
                suspicions.append(self.suspect(peer, _SYMPTOMS[state]))
        return suspicions

    def suspect(self, peer: Peer, reason: Symptom) -> Suspicion:
        """Route around a peer from now on."""
        peer.suspicion = reason
        self.resolve()
        return Suspicion(peer.rank, peer.incarnation, reason)

    def note_moved(self, rank: Rank, layer: int, places: Collection[tuple[int, int]]) -> None:
        """These (slot, expert) of a peer are not what our routes say: go to the next candidates of these experts."""
        index = self.calls.index(layer)
        for slot, expert in places:
            is_there_C = (self._candidates[index, expert] == (rank, slot)).all(axis=1)
            self._is_moved_LNC[index, expert] |= is_there_C
        self.resolve()

    def reconsider(self) -> None:
        """Trust every suspect again that pulses, and ask for what was moved: there is no other candidate, or there are
        other routes."""
        self._is_moved_LNC[...] = False
        for peer in self._peers.values():
            if peer.suspicion is not None and self.warden.state(peer.rank) is PeerState.ALIVE:
                self._trust(peer)
        self.resolve()

    def _trust(self, peer: Peer) -> None:
        peer.suspicion, peer.is_pardoned = None, False

    def resolve(self) -> None:
        """Owners and slots: for each expert the first candidate that is trusted. Runs in the middle of a layer."""
        self.num_changes += 1
        trusted = np.zeros(MAX_RANKS + 1, bool)  # NO_RANK is -1: the last one
        for rank, peer in self._peers.items():
            trusted[rank] = peer.suspicion is None
            self._note_trust(rank, peer.suspicion is None)
        if self._candidates.shape[2] == 0:
            self.owner_LN[...] = NO_RANK
            self.wanted_LN[...] = NO_RANK
            return
        rank_LNC, slot_LNC = self._candidates[..., 0], self._candidates[..., 1]
        usable_LNC = trusted[rank_LNC] & ~self._is_moved_LNC
        is_usable_LN = usable_LNC.any(axis=2)

        def choose(index_LN: np.ndarray, rank_LN: np.ndarray, slot_LN: np.ndarray) -> None:
            def at(table_LNC: np.ndarray) -> np.ndarray:
                return np.take_along_axis(table_LNC, index_LN[..., None], axis=2)[..., 0]

            rank_LN[...], slot_LN[...] = np.where(is_usable_LN, at(rank_LNC), NO_RANK), at(slot_LNC)

        first_LN = usable_LNC.argmax(axis=2)
        if self._sticky is not None:
            choose(first_LN, self.wanted_LN, self.wanted_slot_LN)
            layers, ranks_LN = self._sticky
            narrow = slice(ranks_LN.shape[1])
            stays_LNC = usable_LNC[layers, narrow] & (rank_LNC[layers, narrow] == ranks_LN[..., None])
            stays_LN, index_LN = stays_LNC.any(axis=2), stays_LNC.argmax(axis=2)
            first_LN[layers, narrow] = np.where(stays_LN, index_LN, first_LN[layers, narrow])
        choose(first_LN, self.owner_LN, self.slot_LN)
