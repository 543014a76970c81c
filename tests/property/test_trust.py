"""Pulses, pardons and epochs in any order: an attention worker's view of its peers against the orchestrator's machine.

Both watch the same expert workers with wardens of their own, which need not see the same thing at the same moment, and
their messages to each other take any time. Once all pulse and everything was delivered, every peer is trusted.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from hypothesis import given
from hypothesis import strategies as st

from everserve.backends.cpu.lane import LaneShape
from everserve.backends.cpu.peers import ExpertPeers
from everserve.control.decide.effects import Lost, Probe, Publish
from everserve.control.decide.inputs import Alive, AnyInput, Said, Silent
from everserve.control.decide.machine import Machine, Policy
from everserve.memory.liveness import Cell, PeerState
from everserve.plan.placement import place_experts
from everserve.tables.ids import Incarnation, Rank
from everserve.tables.routes import Routes
from everserve.wire.messages import GatewayReport, Hello, Ready, SlotsReported, Suspected
from tests.support.examples import examples
from tests.support.held_slots import goal_of, held
from tests.support.in_process_experts import MemoryWarden, new_cell, new_memory

ATTENTION, EXPERTS = Rank(0), (Rank(1), Rank(2))
FIRST = Incarnation(1)
SHAPE = LaneShape(4, 1, 16)
NUM_EXPERTS = 4
POLICY = Policy(detect_s=0.05)


class World:
    """One attention worker, two expert workers, one orchestrator. No time passes, so silence never ends a worker."""

    def __init__(self, peers: ExpertPeers, warden: MemoryWarden) -> None:
        self.peers, self.warden = peers, warden
        self.seen = dict.fromkeys(EXPERTS, PeerState.ALIVE)  # by the orchestrator's warden
        self.to_orchestrator: deque[AnyInput] = deque()
        self.to_worker: deque[Routes] = deque()
        self.lost: list[Lost] = []
        placement = place_experts(NUM_EXPERTS, [0], EXPERTS, None)
        self.machine = Machine(goal_of([ATTENTION], placement), POLICY)
        self.machine.start(0.0)
        for rank in EXPERTS:
            self.tell(Said(rank, FIRST, SlotsReported(slots=held(placement, rank))))
        for rank in (ATTENTION, *EXPERTS):
            for said in (Hello(), Ready()):
                self.tell(Said(rank, FIRST, said))

    def tell(self, event: AnyInput) -> None:
        undecided = deque([event])
        while undecided:
            for effect in self.machine.handle(undecided.popleft(), 0.0).effects:
                if isinstance(effect, Publish):
                    assert effect.routes is not None
                    self.to_worker.append(effect.routes)
                elif isinstance(effect, Probe):
                    undecided.append(self.judge(effect.rank))
                elif isinstance(effect, Lost):
                    self.lost.append(effect)

    def judge(self, rank: Rank) -> AnyInput:
        if self.seen[rank] is PeerState.ALIVE:
            return Alive(rank, FIRST)
        return Silent(rank, FIRST, "R")

    def see(self, rank: Rank, state: PeerState) -> None:
        """The orchestrator's warden."""
        if self.seen[rank] is not state:
            self.seen[rank] = state
            self.to_orchestrator.append(self.judge(rank))

    def feel(self, rank: Rank, state: PeerState) -> None:
        """The attention worker's warden."""
        if self.warden.state(rank) is not state:
            self.warden.set(rank, state)

    def attend(self) -> None:
        """The attention worker looks up from a layer."""
        for rank, incarnation, reason in self.peers.look():
            self.to_orchestrator.append(
                Said(ATTENTION, FIRST, Suspected(rank=rank, incarnation=incarnation, reason=reason))
            )

    def do(self, action: str, rank: Rank) -> None:
        match action:
            case "seen silent":
                self.see(rank, PeerState.SILENT)
            case "seen alive":
                self.see(rank, PeerState.ALIVE)
            case "felt silent":
                self.feel(rank, PeerState.SILENT)
            case "felt alive":
                self.feel(rank, PeerState.ALIVE)
            case "felt silent, attends":
                self.feel(rank, PeerState.SILENT)
                self.attend()
            case "hears, attends":
                self.do("hears", rank)
                self.attend()
            case "hears":
                if self.to_worker:
                    self.peers.use(self.to_worker.popleft())
            case "is heard":
                if self.to_orchestrator:
                    self.tell(self.to_orchestrator.popleft())
            case "epoch":
                self.tell(GatewayReport(epoch=self.machine.epoch, logs=[], lost=[*()]))
            case "abandons":
                self.peers.reconsider()

    def come_to_rest(self) -> None:
        for rank in EXPERTS:
            self.feel(rank, PeerState.ALIVE)
            self.see(rank, PeerState.ALIVE)
        self.attend()
        while self.to_worker or self.to_orchestrator:
            self.do("is heard", EXPERTS[0])
            self.do("hears", EXPERTS[0])
            self.attend()


ACTIONS = [
    "seen silent",
    "seen alive",
    "felt silent",
    "felt silent, attends",
    "felt alive",
    "hears",
    "hears, attends",
    "is heard",
    "epoch",
    "abandons",
]


@contextmanager
def worlds() -> Iterator[World]:
    cell, cell_fd = new_cell()
    warden = MemoryWarden(cell)
    peers = ExpertPeers(ATTENTION, FIRST, cell, warden, SHAPE, [0], NUM_EXPERTS)
    for rank in EXPERTS:
        peers.join(rank, FIRST, Cell(cell_fd), new_memory(SHAPE.lane_bytes()))
    world = World(peers, warden)
    world.come_to_rest()
    yield world
    peers.close()


@examples(125)
@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.sampled_from(EXPERTS)), max_size=20))
def test_a_healthy_peer_does_not_stay_suspect(actions):
    with worlds() as world:
        for action, rank in actions:
            world.do(action, rank)
        world.come_to_rest()
        assert not world.lost
        assert world.peers.suspects == {}


def test_a_pardon_may_come_before_the_pulse():
    with worlds() as world:
        world.feel(EXPERTS[0], PeerState.SILENT)
        world.attend()
        assert EXPERTS[0] in world.peers.suspects
        world.do("is heard", EXPERTS[0])  # the orchestrator has felt its pulse all the time: it pardons
        world.do("hears", EXPERTS[0])
        assert EXPERTS[0] in world.peers.suspects, "it is still silent for us"
        world.feel(EXPERTS[0], PeerState.ALIVE)
        world.attend()
        assert world.peers.suspects == {} and not world.to_worker


def test_without_a_pardon_a_pulse_is_not_enough():
    with worlds() as world:
        for state in (PeerState.SILENT, PeerState.ALIVE):
            world.feel(EXPERTS[0], state)
            world.attend()
        assert EXPERTS[0] in world.peers.suspects
        world.come_to_rest()
        assert world.peers.suspects == {}


def test_a_pardon_ends_one_suspicion_only():
    with worlds() as world:
        for state in (PeerState.SILENT, PeerState.ALIVE):
            world.feel(EXPERTS[0], state)
            world.attend()
            world.do("epoch", EXPERTS[0])
            world.do("hears", EXPERTS[0])
        assert world.peers.suspects == {}
        for state in (PeerState.SILENT, PeerState.ALIVE):
            world.feel(EXPERTS[0], state)
            world.attend()
        assert EXPERTS[0] in world.peers.suspects
