"""An attention worker whose routes are out of date: slots hold other experts than they say."""

import pytest
import torch

from everserve.backends.cpu import ops as native
from everserve.errors import StepAbandoned
from everserve.tables.ids import Rank
from tests.support.experts import MOE_LAYERS, NUM_EXPERTS, SHAPE, RandomExperts, Rows, local_experts, routes
from tests.support.in_process_experts import MemoryExperts

OPS = native.NativeOps(num_threads=1)
LOCAL = local_experts(OPS)
LAYER = MOE_LAYERS[1]
EVERYTHING = [*range(NUM_EXPERTS)]


class Cluster(MemoryExperts):
    """Ranks 1, 2 and 3, each with all experts; expert e is first asked for at rank 1 + e % 3."""

    def __init__(self, num_ranks: int = 3) -> None:
        super().__init__(SHAPE, MOE_LAYERS, NUM_EXPERTS)
        self.halves = {Rank(rank): RandomExperts(OPS, EVERYTHING) for rank in range(1, 1 + num_ranks)}
        for rank, half in self.halves.items():
            self.add(rank, half)
        self.use_routes(1)
        self.expert_io = self.remote_experts(OPS)

    def use_routes(self, epoch: int) -> None:
        self.peers.use(routes(dict.fromkeys(self.halves, EVERYTHING), epoch))

    def move(self, rank: int, expert: int, slot: int, layer: int = LAYER) -> None:
        self.halves[Rank(rank)].load(layer, expert, slot)

    def check(self, layer: int = LAYER, seed: int = 0) -> None:
        rows = Rows(9, seed)
        assert torch.equal(rows.through(self.expert_io, layer), rows.through(LOCAL, layer))

    def num_requests(self) -> list[int]:
        return [peer.num_requests for peer in self.members.values()]


@pytest.fixture
def make():
    clusters = []

    def make(*args) -> Cluster:
        clusters.append(Cluster(*args))
        return clusters[-1]

    yield make
    for cluster in clusters:
        assert cluster.suspected == [] and cluster.replayed == []
        assert cluster.expert_io.num_replayed_rows == 0 and cluster.peers.num_stale == 0
        cluster.close()


def test_the_next_candidate_computes_what_moved(make):
    cluster = make()
    cluster.move(rank=1, expert=5, slot=0)
    cluster.check()
    assert cluster.num_requests() == [2, 2, 1], "rank 1 is asked again for what it has; rank 2 for expert 0 too"
    assert cluster.expert_io.num_moved_rows > 0


def test_other_layers_are_where_they_were(make):
    cluster = make()
    cluster.move(rank=1, expert=5, slot=0)
    for layer in MOE_LAYERS:
        cluster.check(layer)
    assert cluster.num_requests() == [4, 4, 3]


def test_what_moved_is_remembered_until_there_are_other_routes(make):
    cluster = make()
    cluster.move(rank=1, expert=5, slot=0)
    cluster.check()
    for seed in range(3):
        cluster.check(seed=seed)
    assert cluster.num_requests() == [5, 5, 4], "it is asked for once only"
    cluster.use_routes(1)
    cluster.check()
    assert cluster.num_requests() == [7, 7, 5], "of the same epoch, but sent again: it may be back"


def test_an_empty_slot(make):
    cluster = make()
    for slot in EVERYTHING:
        cluster.halves[Rank(1)].clear(LAYER, slot)
    cluster.check()
    cluster.check()
    assert cluster.num_requests()[0] == 1, "all of it is told in one answer"


def test_two_slots_that_have_changed_places(make):
    cluster = make()
    for rank in (1, 2):
        cluster.move(rank, expert=3, slot=0)
        cluster.move(rank, expert=0, slot=3)
    cluster.check()


def test_without_a_candidate_the_step_is_abandoned_and_asked_for_again(make):
    cluster = make(2)
    for rank in (1, 2):
        cluster.halves[Rank(rank)].clear(LAYER, 4)
    for _ in range(2):
        before = cluster.num_requests()
        with pytest.raises(StepAbandoned) as abandoned:
            cluster.check()
        assert abandoned.value.experts == (4,) and abandoned.value.layer == LAYER
        after = cluster.num_requests()
        assert all(b < a <= b + 3 for b, a in zip(before, after, strict=True)), (
            "both are asked, and not again and again"
        )
    cluster.move(rank=2, expert=4, slot=4)
    cluster.check()


def test_routes_that_come_between_the_question_and_the_answer(make):
    """The answer is about a slot of the old routes; in the new ones the same expert is in another slot of that rank."""
    cluster = make(1)
    half = cluster.halves[Rank(1)]

    def change() -> bool:
        for slot in EVERYTHING:
            half.clear(LAYER, slot)
        for slot, expert in enumerate(reversed(EVERYTHING)):
            half.load(LAYER, expert, slot)
        cluster.cell.ring_control()
        return False

    def read_control() -> None:
        if half.held[LAYER][0] == EVERYTHING[-1]:
            cluster.peers.use(routes({Rank(1): EVERYTHING[::-1]}, epoch=2))

    turns = iter([change, lambda: True])
    cluster.expert_io = cluster.remote_experts(OPS, read_control)
    cluster.members[Rank(1)].be_busy(until=lambda: next(turns)() is True)
    cluster.check()


def test_a_new_incarnation_is_asked_for_everything(make):
    cluster = make()
    cluster.move(rank=1, expert=5, slot=0)
    cluster.check()
    cluster.remove(Rank(1))
    cluster.halves[Rank(1)] = RandomExperts(OPS, EVERYTHING)
    peer = cluster.add(Rank(1), cluster.halves[Rank(1)])
    cluster.check()
    assert peer.num_requests == 1 and cluster.peers.owner_LN[1, 0] == 1


def test_moved_without_saying_what_is_a_reason_for_suspicion():
    cluster = Cluster()
    peer = cluster.members[Rank(1)]
    serve = peer._server.compute
    peer._server.compute = lambda batch: peer._answer(batch[0], status=4) if peer.num_requests == 1 else serve(batch)
    cluster.check()
    assert cluster.suspected == [(1, "refused")]
    cluster.close()
