"""Expert workers in the same process, that fail on demand: for tests of everything on the attention worker's side.

    cluster = MemoryExperts(shape, moe_layers, num_experts)
    cluster.add(Rank(1), experts_of_rank_1, {3: Fault.DIE_BEFORE_ANSWER})     its third request is its last
    cluster.peers.use(routes)
    expert_io = cluster.remote_experts(ops)

Lanes and cells are the real ones, on memory of our own, and so is all the code that works on them. What is played is
the other processes: they take their turn whenever `RemoteExperts` would block, one after the other; and a warden that
says what it is told. When nobody has anything to do, detect_ms have passed.
"""

import ctypes
import itertools
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from struct import Struct

from everserve.backends.cpu.exchange import Exchange
from everserve.backends.cpu.lane import LaneShape
from everserve.backends.cpu.lane_server import LaneServer, Request
from everserve.backends.cpu.peers import ExpertPeers
from everserve.backends.cpu.remote_experts import RemoteExperts
from everserve.memory.liveness import CELL_BYTES, Cell, PeerState
from everserve.memory.liveness.cell import NUM_LIFE_WORDS
from everserve.model.expert_half import ExpertHalf
from everserve.model.ops import Ops
from everserve.seam.healing import Reports
from everserve.tables.ids import Incarnation, Rank

_LIFE_AT, _LIFE_BYTES, _WORD_AT = 4 * 64, 16, 8  # csrc/cell.h of memory/liveness
_OWNER_PID_AT = 3 * 64 + 12
_OWNER_DIED = 1 << 30
_MANY_LOOKS = 10
_ANSWER_AT, _STATUS_AT = 64, 72  # csrc/lanes/lane.h
_CUSTOMER = Rank(0)  # the attention worker
_uint64 = Struct("Q")


class Fault(Enum):
    """What an expert worker does when a certain request comes."""

    DIE_BEFORE_ANSWER = auto()  # half of the answer is written
    DIE_AFTER_ANSWER = auto()
    HANG = auto()  # stops, and falls silent
    ANSWER_LATE = auto()  # the same, but wakes up after its rows were sent elsewhere, and answers
    MISS_THE_RING = auto()  # stays idle until it is rung once more
    STAY_DEAF = auto()  # stays idle for good, though it pulses
    WAIT_FOR_A_CORE = auto()  # is woken, and idle for many looks: other processes run
    OLD_ANSWER = auto()  # answers with another request's number for good, and is idle
    OLD_ANSWER_FIRST = auto()  # the same, and then the right one
    STRANGE_ANSWER = auto()  # answers with a number that nobody has asked with, and is idle
    REFUSE = auto()  # says that it did not compute


class MemoryWarden:
    """Says of each peer what it was told to say."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self._alarm = ctypes.c_uint32()
        self._states: dict[int, PeerState] = {}
        self._changes: list[tuple[int, PeerState]] = []
        self.alarm_address = ctypes.addressof(self._alarm)

    @property
    def alarm(self) -> int:
        return self._alarm.value

    def renew(self, seconds: float | None = None) -> None:
        """Nobody watches us."""

    def watch(self, key: int, cell: Cell, word: int) -> None:
        self._states[key] = PeerState.ALIVE

    def unwatch(self, key: int) -> None:
        del self._states[key]

    def state(self, key: int) -> PeerState:
        return self._states[key]

    def changes(self) -> list[tuple[int, PeerState]]:
        changes, self._changes = self._changes, []
        return changes

    def set(self, key: int, state: PeerState) -> None:
        """From now on."""
        self._states[key] = state
        self._changes.append((key, state))
        self._alarm.value += 1
        self._cell.ring()


class MemoryPeer:
    """One incarnation of an expert worker. `faults`: what happens at its n-th request, from 1."""

    def __init__(
        self,
        rank: Rank,
        incarnation: Incarnation,
        experts: ExpertHalf,
        shape: LaneShape,
        customer: Cell,
        warden: MemoryWarden,
        faults: Mapping[int, Fault],
    ) -> None:
        self.rank = rank
        self.incarnation = incarnation
        self.faults = faults
        self.is_dead = False
        self.is_watched = True
        self.num_requests = 0
        self.num_replays = 0  # of them
        self.fired: list[Fault] = []  # faults so far
        self.cell, self.cell_fd = new_cell()
        self.lane_fd = new_memory(shape.lane_bytes())
        self._shape = shape
        self._lane = mmap.mmap(self.lane_fd, shape.lane_bytes())  # to write what no server would
        self._warden = warden
        self._no_alarm = ctypes.c_uint32()
        self._server = LaneServer(self.cell, ctypes.addressof(self._no_alarm), shape, experts)
        self._server.open(_CUSTOMER, customer, os.dup(self.lane_fd))
        self._held: list[Request] = []  # to be computed when it goes on
        self._goes_on: Callable[[], bool] | None = None  # None: it runs

    def turn(self) -> bool:
        """Do whatever there is to do; False if that is nothing."""
        if self.is_dead or (self._goes_on is not None and not self._goes_on()):
            return False
        held, self._held = self._held, []
        if self._goes_on is not None:
            self._goes_on = None
            self.cell.idle = False
            self._own(0)
            self._look(PeerState.ALIVE)
        for request in held:
            self._server.compute([request])
        requests = self._server.poll(0)
        for request in requests:
            self.num_requests += 1
            self.num_replays += request.replay
            if not self.is_dead and self._goes_on is None:
                self._serve(request, self.faults.get(self.num_requests))
            else:
                self._held.append(request)
        return bool(held or requests)

    def be_busy(self, until: Callable[[], bool]) -> None:
        """Compute something else until then: neither idle nor silent. `until` is asked once per turn."""
        self._goes_on = until

    def die(self) -> None:
        """As the kernel tells it: all life words say so at once."""
        self.is_dead = True
        for word in range(NUM_LIFE_WORDS):
            at = self.cell.address + _LIFE_AT + _LIFE_BYTES * word + _WORD_AT
            ctypes.c_uint32.from_address(at).value = _OWNER_DIED
        self._look(PeerState.DIED)

    def close(self) -> None:
        self._server.close()
        self._lane.close()
        self.cell.close()
        os.close(self.cell_fd)
        os.close(self.lane_fd)

    def _serve(self, request: Request, fault: Fault | None) -> None:
        if fault is not None:
            self.fired.append(fault)
        match fault:
            case None:
                self._server.compute([request])
            case Fault.DIE_BEFORE_ANSWER:
                self._scribble(request)
                self.die()
            case Fault.DIE_AFTER_ANSWER:
                self._server.compute([request])
                self.die()
            case Fault.HANG:
                self._stop(_never, PeerState.SILENT)
            case Fault.ANSWER_LATE:
                self._held.append(request)
                self._stop(lambda: True, PeerState.SILENT)
            case Fault.MISS_THE_RING:
                self._held.append(request)
                seen = self.cell.doorbell
                self._stop(lambda: self.cell.doorbell != seen, PeerState.ALIVE)
            case Fault.WAIT_FOR_A_CORE:
                self._held.append(request)
                self._own(os.getpid())  # which is runnable
                looks = itertools.count()
                self._stop(lambda: next(looks) > _MANY_LOOKS, PeerState.ALIVE)
            case Fault.STAY_DEAF:
                self._stop(_never, PeerState.ALIVE)
            case Fault.OLD_ANSWER | Fault.STRANGE_ANSWER:
                self._answer(request, ahead=-1 if fault is Fault.OLD_ANSWER else 1 << 40)
                self._stop(_never, PeerState.ALIVE)
            case Fault.OLD_ANSWER_FIRST:
                self._answer(request, ahead=-1)
                self._server.compute([request])
            case Fault.REFUSE:
                self._answer(request, status=2)

    def _stop(self, goes_on: Callable[[], bool], state: PeerState) -> None:
        """One who pulses while it does nothing is idle."""
        self._goes_on = goes_on
        self.cell.idle = state is PeerState.ALIVE
        self._look(state)

    def _own(self, pid: int) -> None:
        """What a warden writes into its cell."""
        ctypes.c_uint32.from_address(self.cell.address + _OWNER_PID_AT).value = pid

    def _look(self, state: PeerState) -> None:
        """What the attention worker's warden sees. Once we are removed, somebody else may be in our rank."""
        if self.is_watched and self._warden.state(self.rank) is not state:
            self._warden.set(self.rank, state)

    def _scribble(self, request: Request) -> None:
        """Half an answer."""
        at = self._box_at(request) + self._shape.layout().y_at
        self._lane[at : at + self._shape.row_bytes] = b"\xff" * self._shape.row_bytes

    def _answer(self, request: Request, ahead: int = 0, status: int = 0) -> None:
        at = self._box_at(request)
        (seq,) = _uint64.unpack_from(self._lane, at)
        _uint64.pack_into(self._lane, at + _STATUS_AT, status)
        _uint64.pack_into(self._lane, at + _ANSWER_AT, seq + ahead)

    def _box_at(self, request: Request) -> int:
        layout = self._shape.layout()
        return layout.first_box + request.box * layout.box_bytes


class MemoryExperts:
    """An attention worker's view of expert workers: `peers`, and `Experts` for them."""

    def __init__(self, shape: LaneShape, moe_layers: Sequence[int], num_experts: int) -> None:
        self.cell, self._cell_fd = new_cell()
        self.warden = MemoryWarden(self.cell)
        self.peers = ExpertPeers(_CUSTOMER, Incarnation(1), self.cell, self.warden, shape, moe_layers, num_experts)
        self.members: dict[Rank, MemoryPeer] = {}
        self.suspected: list[tuple[Rank, str]] = []
        self.replayed: list[tuple[Rank, int, int]] = []  # suspect, layer, num_rows
        self._past: list[MemoryPeer] = []

    def add(self, rank: Rank, experts: ExpertHalf, faults: Mapping[int, Fault] | None = None) -> MemoryPeer:
        """A new incarnation joins."""
        incarnation = Incarnation(1 + sum(peer.rank == rank for peer in self._past))
        peer = MemoryPeer(rank, incarnation, experts, self.peers.shape, self.cell, self.warden, faults or {})
        self.peers.join(rank, incarnation, Cell(peer.cell_fd), os.dup(peer.lane_fd))
        self.members[rank] = peer
        return peer

    def remove(self, rank: Rank) -> MemoryPeer:
        """The orchestrator says that it is gone. Its process may still run: it keeps taking turns."""
        peer = self.members.pop(rank)
        peer.is_watched = False
        self._past.append(peer)
        self.peers.leave(rank, peer.incarnation)
        return peer

    def remote_experts(self, ops: Ops, on_control: Callable[[], None] = lambda: None) -> RemoteExperts:
        return RemoteExperts(
            Exchange(
                self.peers,
                detect_ms=50,
                lease_s=1,
                reports=Reports(
                    on_control,
                    lambda rank, incarnation, reason: self.suspected.append((rank, reason)),
                    lambda *replay: self.replayed.append(replay),
                ),
                others_turn=self.turn,
            ),
            ops,
        )

    def turn(self) -> bool:
        """Everybody's turn; False if nobody had anything to do."""
        return sum(peer.turn() for peer in (*self._past, *self.members.values())) > 0

    def close(self) -> None:
        self.peers.close()
        for peer in (*self._past, *self.members.values()):
            peer.close()
        self.cell.close()
        os.close(self._cell_fd)


def new_memory(num_bytes: int) -> int:
    """The descriptor of shared memory without a name, as the anchor makes it."""
    fd = os.memfd_create("everserve")
    os.ftruncate(fd, num_bytes)
    return fd


def new_cell() -> tuple[Cell, int]:
    """A cell and its descriptor."""
    fd = new_memory(CELL_BYTES)
    return Cell(fd), fd


def _never() -> bool:
    return False
