"""Slots that are refilled and cleared at any moment, under the traffic of several attention workers whose routes are
out of date: every row is exact, no peer is suspected, and a step is abandoned only if all candidates have moved."""

import ctypes
import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import hypothesis.strategies as st
import torch
from hypothesis import given

from everserve.backends.cpu import ops as native
from everserve.backends.cpu.exchange import Exchange
from everserve.backends.cpu.lane_server import LaneServer
from everserve.backends.cpu.peers import ExpertPeers
from everserve.backends.cpu.remote_experts import RemoteExperts
from everserve.errors import StepAbandoned
from everserve.memory.liveness import Cell
from everserve.seam.batching import Request
from everserve.seam.healing import Reports
from everserve.tables.ids import Epoch, Incarnation, Rank, SlotId
from everserve.tables.routes import Routes
from tests.support.examples import examples
from tests.support.experts import MAX_TOKENS, MOE_LAYERS, NUM_EXPERTS, SHAPE, RandomExperts, Rows, local_experts
from tests.support.in_process_experts import MemoryWarden, new_cell, new_memory

OPS = native.NativeOps(num_threads=1)
LOCAL = local_experts(OPS)
NUM_ATTENTION, EXPERT_RANKS = 2, (Rank(10), Rank(11), Rank(12))
FIRST = Incarnation(1)

attention = st.integers(0, NUM_ATTENTION - 1)
ranks = st.sampled_from(EXPERT_RANKS)
layers = st.sampled_from(MOE_LAYERS)
slots = experts = st.integers(0, NUM_EXPERTS - 1)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("fill"), ranks, layers, slots, experts),
        st.tuples(st.just("clear"), ranks, layers, slots),
        st.tuples(st.just("ask"), attention, layers, st.integers(1, MAX_TOKENS)),
        st.tuples(st.just("poll"), ranks),
        st.tuples(st.just("compute"), ranks),
        st.tuples(st.just("publish"), attention),
    ),
    max_size=60,
)


class ExpertWorker:
    """All experts at first. What it has polled waits until it computes: slots may change in between."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.cell, self.cell_fd = new_cell()
        self.half = RandomExperts(OPS, range(NUM_EXPERTS))
        self._alarm = ctypes.c_uint32()
        self.server = LaneServer(self.cell, ctypes.addressof(self._alarm), SHAPE, self.half)
        self._pending: list[Request] = []

    def poll(self) -> int:
        found = self.server.poll(0)
        self._pending += found
        return len(found)

    def compute(self) -> int:
        if not self._pending:
            return 0
        layer = self._pending[0].layer
        batch = [request for request in self._pending if request.layer == layer]
        self._pending = [request for request in self._pending if request.layer != layer]
        self.server.compute(batch)
        return len(batch)


class AttentionWorker:
    def __init__(self, world: "World", rank: Rank) -> None:
        self.is_asking = False
        self.routes_made_at = 0  # how many changes of slots there had been
        self._mail: tuple[Routes, int] | None = None
        self.cell, self._cell_fd = new_cell()
        self.peers = ExpertPeers(rank, FIRST, self.cell, MemoryWarden(self.cell), SHAPE, MOE_LAYERS, NUM_EXPERTS)
        for worker in world.experts:
            lane_fd = new_memory(SHAPE.lane_bytes())
            worker.server.open(rank, self.cell, os.dup(lane_fd))
            self.peers.join(worker.rank, FIRST, Cell(worker.cell_fd), lane_fd)
        self.suspected: list[object] = []
        self.experts = RemoteExperts(
            Exchange(
                self.peers,
                detect_ms=50,
                lease_s=1,
                reports=Reports(
                    self.read_control,
                    lambda *suspicion: self.suspected.append(suspicion),
                    lambda *replay: self.suspected.append(replay),
                ),
                others_turn=world.turn,
            ),
            OPS,
        )

    def publish(self, routes: Routes, made_at: int) -> None:
        self._mail = routes, made_at
        self.cell.ring_control()

    def read_control(self) -> None:
        if self._mail is not None:
            (routes, self.routes_made_at), self._mail = self._mail, None
            self.peers.use(routes)
            self.routes = routes

    def close(self) -> None:
        self.peers.close()
        self.cell.close()
        os.close(self._cell_fd)


class World:
    """Other processes take their turn whenever an attention worker would block: what they do then is drawn."""

    def __init__(self, actions: list[tuple]) -> None:
        self._actions = deque(actions)
        self._epoch = 0
        self._changed: list[tuple[Rank, int, int]] = []  # rank, layer, slot
        self.experts = [ExpertWorker(rank) for rank in EXPERT_RANKS]
        self.attention = [AttentionWorker(self, Rank(rank)) for rank in range(NUM_ATTENTION)]
        for worker in self.attention:
            self.publish(worker)
            worker.read_control()

    def run(self) -> None:
        while self._actions:
            self._do(*self._actions.popleft())

    def turn(self) -> bool:
        if self._actions:
            self._do(*self._actions.popleft())
            return True
        return sum(worker.poll() + worker.compute() for worker in self.experts) > 0

    def _do(self, action: str, who: int, *what: int) -> None:
        if action == "ask":
            self.ask(self.attention[who], *what)
        elif action == "publish":
            self.publish(self.attention[who])
        else:
            worker = next(worker for worker in self.experts if worker.rank == who)
            if action == "fill":
                layer, slot, expert = what
                worker.half.clear(layer, slot)
                worker.half.load(layer, expert, slot)
            else:
                {"clear": worker.half.clear, "poll": worker.poll, "compute": worker.compute}[action](*what)
            if action in ("fill", "clear"):
                self._changed.append((worker.rank, *what[:2]))

    def publish(self, to: AttentionWorker) -> None:
        """What all slots hold now; it need not be so when it is read."""
        self._epoch += 1
        table = [[self._holders(layer, expert) for expert in range(NUM_EXPERTS)] for layer in MOE_LAYERS]
        to.publish(Routes.of(Epoch(self._epoch), table), len(self._changed))

    def _holders(self, layer: int, expert: int) -> list[tuple[Rank, SlotId]]:
        places = [
            (worker.rank, SlotId(slot))
            for worker in self.experts
            for slot in range(NUM_EXPERTS)
            if worker.half.held[layer][slot] == expert
        ]
        first = expert % len(places) if places else 0
        return places[first:] + places[:first]

    def ask(self, worker: AttentionWorker, layer: int, num_tokens: int) -> None:
        """One layer, exactly right, or abandoned with good reason."""
        if worker.is_asking:
            return
        worker.is_asking = True
        rows = Rows(num_tokens, seed=num_tokens)
        try:
            assert torch.equal(rows.through(worker.experts, layer), rows.through(LOCAL, layer))
        except StepAbandoned as abandoned:
            changed = set(self._changed[worker.routes_made_at :])
            for expert in abandoned.experts:
                for rank, slot in worker.routes.candidates(MOE_LAYERS.index(layer), expert):
                    assert (rank, layer, slot) in changed, f"rank {rank} was not asked for expert {expert}"
        finally:
            worker.is_asking = False

    def come_to_rest(self) -> None:
        """Every expert has a place again, and everybody knows where."""
        for layer in MOE_LAYERS:
            for expert in range(NUM_EXPERTS):
                self.experts[0].half.load(layer, expert, slot=expert)
        for worker in self.attention:
            self.publish(worker)
            for layer in MOE_LAYERS:
                rows = Rows(MAX_TOKENS, seed=layer)
                assert torch.equal(rows.through(worker.experts, layer), rows.through(LOCAL, layer))

    def check(self) -> None:
        for worker in self.attention:
            assert worker.suspected == [] and worker.peers.suspects == {}
        for expert in self.experts:
            changed = {place[1:] for place in self._changed if place[0] == expert.rank}
            assert all(expert.half.generations[layer][slot] > 1 for layer, slot in changed)

    def close(self) -> None:
        for worker in self.attention:
            worker.close()
        for expert in self.experts:
            expert.server.close()
            expert.cell.close()
            os.close(expert.cell_fd)


@contextmanager
def worlds(actions: list[tuple]) -> Iterator[World]:
    world = World(actions)
    try:
        yield world
    finally:
        world.close()


@examples(50)
@given(actions)
def test_never_a_wrong_row_and_never_a_suspicion(actions):
    with worlds(actions) as world:
        world.run()
        world.check()
        world.come_to_rest()
        world.check()


def test_a_request_that_waits_while_its_slot_changes():
    """The schedule that computes the wrong expert if only the slot is named."""
    refill = [
        ("fill", rank, MOE_LAYERS[0], slot, (slot + 1) % NUM_EXPERTS) for rank in EXPERT_RANKS[:2] for slot in (0, 1)
    ]
    ask = ("ask", 0, MOE_LAYERS[0], MAX_TOKENS)
    polls = [("poll", rank) for rank in EXPERT_RANKS]
    with worlds([ask, *polls, *refill]) as world:
        world.run()
        world.come_to_rest()
        world.check()
        assert world.attention[0].experts.num_moved_rows > 0, "the refusal took place"
