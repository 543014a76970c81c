"""The kernel that chooses what an expert worker computes, against the policy that both kinds of devices follow."""

import hypothesis.strategies as st
import torch
from hypothesis import HealthCheck, given, settings

from everserve.backends.cuda.lanes import serve
from everserve.backends.cuda.lanes.lane import POSITION_AT, REQUEST_AT
from everserve.seam.batching import ON_GPUS, Request, choose_layer
from everserve.tables.ids import Rank
from tests.kernels.toy_lanes import NUM_LAYERS, make_cluster

NUM_RANKS = 3
PATIENCE, FIRST_PATIENCE = 5, 9  # in polls
POLICY = ON_GPUS._replace(hold_us=PATIENCE, first_hold_us=FIRST_PATIENCE)

layers = st.integers(0, NUM_LAYERS - 1)
requests = st.tuples(layers, st.booleans(), st.booleans())  # layer, replay, begins
workers = st.tuples(st.integers(-1, NUM_LAYERS - 1), st.none() | requests, st.sampled_from([True, True, True, False]))
cases = st.lists(workers, min_size=NUM_RANKS, max_size=NUM_RANKS)


@settings(
    max_examples=150 if torch.cuda.is_available() else 60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(cases, st.integers(0, 10), st.booleans())
def test_the_kernel_follows_the_policy(device, cases, num_waits, has_stood_back_long) -> None:
    cluster = make_cluster(device, num_attention=NUM_RANKS, num_experts=1, num_tokens=4, max_spins=1)
    state = cluster.experts[0].state
    state.limits.copy_(torch.tensor([1, PATIENCE, FIRST_PATIENCE]))
    state.num_waits.fill_(num_waits)
    state.num_passed.fill_(NUM_RANKS * NUM_LAYERS if has_stood_back_long else 0)
    pending, positions, beginners = [], {}, []
    for rank, (position, request, is_healthy) in enumerate(cases):
        state.healthy_A[rank] = int(is_healthy)
        cluster.word(rank, 0, POSITION_AT, torch.int32).fill_(position + 1)
        if is_healthy:
            positions[Rank(rank)] = position
        if request is None:
            continue
        layer, replay, begins = request
        begins = begins and layer == 0 and not replay
        cluster.word(rank, 0, REQUEST_AT).fill_(1 << 16 | int(begins) << 15 | layer << 1 | int(replay))
        if is_healthy:
            pending.append(Request(Rank(rank), 1, layer, int(replay), 0, 0))
            if begins and num_waits < FIRST_PATIENCE and not has_stood_back_long:
                beginners.append(Rank(rank))
    expected = choose_layer(pending, positions, 1000 * num_waits, POLICY, beginners)
    serve.choose(state)
    assert state.layer.item() == (-1 if expected.layer is None else expected.layer), expected
    served = [Rank(rank) for rank, seq in enumerate(state.seq_A.tolist()) if seq]
    together = [request.rank for request in pending if request.layer == expected.layer]
    assert served == together, "and takes all requests of that layer"
