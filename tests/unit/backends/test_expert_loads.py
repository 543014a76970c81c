"""Rows of each expert are counted where they are gathered, told as differences, and dealt among active places."""

import torch

from everserve.backends.cpu import ops as native
from everserve.tables.ids import Epoch, Rank, SlotId
from everserve.tables.routes import Routes
from everserve.worker.load_reports import LoadReports
from tests.support.experts import MOE_LAYERS, NUM_EXPERTS, SHAPE, RandomExperts, Rows, local_experts, routes
from tests.support.in_process_experts import MemoryExperts

OPS = native.NativeOps(num_threads=1)
LOCAL = local_experts(OPS)
EVERYTHING = [*range(NUM_EXPERTS)]


class Cluster(MemoryExperts):
    """Ranks 1 and 2, each with all experts."""

    def __init__(self) -> None:
        super().__init__(SHAPE, MOE_LAYERS, NUM_EXPERTS)
        self.halves = {Rank(rank): RandomExperts(OPS, EVERYTHING) for rank in (1, 2)}
        for rank, half in self.halves.items():
            self.add(rank, half)
        self.peers.use(routes(dict.fromkeys(self.halves, EVERYTHING), 1))
        self.expert_io = self.remote_experts(OPS)

    def counts(self, layer: int) -> torch.Tensor:
        return torch.tensor([list(peer._server.rows_of[layer]) for peer in self.members.values()])

    def check(self, layer: int, seed: int) -> torch.Tensor:
        """The rows of each expert in this input."""
        rows = Rows(9, seed)
        assert torch.equal(rows.through(self.expert_io, layer), rows.through(LOCAL, layer))
        return torch.bincount(rows.ids_TK.flatten(), minlength=NUM_EXPERTS)


def test_every_row_is_counted_once_where_it_was_computed():
    cluster = Cluster()
    first, second = MOE_LAYERS[0], MOE_LAYERS[1]
    expected = cluster.check(first, 0) + cluster.check(first, 1)
    assert torch.equal(cluster.counts(first).sum(0), expected)
    assert cluster.counts(second).sum() == 0
    assert (cluster.counts(first)[0] * cluster.counts(first)[1]).sum() == 0, "one place for each expert"
    cluster.close()


def test_rows_that_moved_are_counted_where_they_went():
    cluster = Cluster()
    layer = MOE_LAYERS[1]
    cluster.halves[Rank(1)].load(layer, 5, 0)  # instead of expert 0
    expected = cluster.check(layer, 0)
    assert torch.equal(cluster.counts(layer).sum(0), expected), "a request that was refused is not counted"
    cluster.close()


def test_an_attention_worker_asks_its_own_active_place_and_gets_the_same():
    """Both places of every expert are active. This worker is rank 0: even experts at rank 1, odd ones at rank 2."""
    cluster = Cluster()
    table = [[(Rank(1), SlotId(e)), (Rank(2), SlotId(e))] for e in EVERYTHING]
    dealt = Routes.of(Epoch(2), [table] * len(MOE_LAYERS), [[2] * NUM_EXPERTS] * len(MOE_LAYERS))
    assert cluster.peers.rank == 0
    cluster.peers.use(dealt)
    layer = MOE_LAYERS[0]
    expected = cluster.check(layer, 3)
    is_even = torch.arange(NUM_EXPERTS) % 2 == 0
    assert torch.equal(cluster.counts(layer), torch.stack([expected * is_even, expected * ~is_even]))
    assert cluster.peers.lowest_of_first_layer == 1
    cluster.members[Rank(1)].die()
    cluster.check(layer, 4)
    assert cluster.peers.lowest_of_first_layer == 2
    cluster.close()


def test_reports_are_differences_without_zeros():
    reports = LoadReports()
    assert reports.next([]) is None, "a backend that does not count"
    reports = LoadReports()
    assert reports.next([[0, 0], [0, 0]]) is None
    first = reports.next([[3, 0], [0, 0]])
    assert first is not None and first.rows == {0: {0: 3}}
    assert reports.next([[3, 0], [0, 0]]) is None
    second = reports.next([[4, 0], [2, 7]])
    assert second is not None and second.rows == {0: {0: 1}, 1: {0: 2, 1: 7}}
