"""Random experts on random workers that fail at random requests: the result is exact, or the step is abandoned because
an expert it needs has no place left. Nobody is suspected without a cause, and after a repair everything goes on."""

import hypothesis.strategies as st
import torch
from hypothesis import given

from everserve.backends.cpu import ops as native
from everserve.errors import StepAbandoned
from everserve.tables.ids import Rank
from tests.support.examples import examples
from tests.support.experts import MAX_TOKENS, MOE_LAYERS, NUM_EXPERTS, SHAPE, RandomExperts, Rows, local_experts, routes
from tests.support.in_process_experts import Fault, MemoryExperts

OPS = native.NativeOps(num_threads=1)
LOCAL = local_experts(OPS)
CAUSES = {
    "died": {Fault.DIE_BEFORE_ANSWER, Fault.DIE_AFTER_ANSWER},
    "silent": {Fault.HANG, Fault.ANSWER_LATE},
    "deaf": {Fault.STAY_DEAF, Fault.OLD_ANSWER, Fault.STRANGE_ANSWER},
    "refused: bad request": {Fault.REFUSE},
}

some_experts = st.lists(st.integers(0, NUM_EXPERTS - 1), min_size=1, unique=True)
workers = st.lists(some_experts, max_size=3)  # beside one that has them all
faults = st.dictionaries(st.integers(0, 3), st.dictionaries(st.integers(1, 8), st.sampled_from(Fault), max_size=4))
layers = st.lists(st.tuples(st.sampled_from(MOE_LAYERS), st.integers(1, MAX_TOKENS)), min_size=1, max_size=8)


class Cluster(MemoryExperts):
    """Workers with these experts in their slots; the i-th has rank 10 + i."""

    def __init__(self, places: list[list[int]], faults: dict[int, dict[int, Fault]]) -> None:
        super().__init__(SHAPE, MOE_LAYERS, NUM_EXPERTS)
        self.places = {Rank(10 + i): slots for i, slots in enumerate(places)}
        for i, rank in enumerate(self.places):
            self.add(rank, RandomExperts(OPS, self.places[rank]), faults.get(i))
        self.epoch = 1
        self.peers.use(routes(self.places, self.epoch))
        self.expert_io = self.remote_experts(OPS)

    def check(self, layer: int, num_tokens: int) -> None:
        rows = Rows(num_tokens, seed=num_tokens)
        assert torch.equal(rows.through(self.expert_io, layer), rows.through(LOCAL, layer))

    def repair(self) -> None:
        """Healthy workers in the seats of all that failed, whose processes may wake up whenever they like."""
        for rank in [rank for rank, peer in self.members.items() if peer.fired]:
            self.remove(rank)
            self.add(rank, RandomExperts(OPS, self.places[rank]))
        self.suspected.clear()
        self.epoch += 1
        self.peers.use(routes(self.places, self.epoch))


@examples(30)
@given(workers, faults, layers)
def test_exact_or_abandoned_for_a_reason(others, faults, layers):
    cluster = Cluster([[*range(NUM_EXPERTS)], *others], faults)
    try:
        for layer, num_tokens in layers:
            while not is_done(cluster, layer, num_tokens):
                cluster.repair()  # with workers that do not fail: so this ends
        cluster.repair()
        for peer in cluster.members.values():
            peer.faults = {}
        for layer in MOE_LAYERS:
            cluster.check(layer, MAX_TOKENS)
        assert cluster.suspected == []
    finally:
        cluster.close()


def is_done(cluster: Cluster, layer: int, num_tokens: int) -> bool:
    """One layer, exactly right; False if it was abandoned with good reason."""
    members = dict(cluster.members)
    try:
        cluster.check(layer, num_tokens)
        done = True
    except StepAbandoned as abandoned:
        suspects = {rank for rank, _ in cluster.suspected}
        assert abandoned.layer == layer and abandoned.experts
        for expert in abandoned.experts:
            assert suspects.issuperset(rank for rank, slots in cluster.places.items() if expert in slots)
        done = False
    for rank, reason in cluster.suspected:
        assert CAUSES[reason] & set(members[rank].fired), f"{rank} was suspected ({reason}) without a cause"
    return done
