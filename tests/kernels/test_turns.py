"""Where heads are divided: batches of heads and of the FFN are served in turns; neither is lost, or waits for long."""

import torch

from everserve.backends.cuda.lanes import serve
from everserve.backends.cuda.lanes.lane import ANSWER_AT
from everserve.backends.cuda.lanes.serve import ServeState
from tests.kernels.toy_lanes import NUM_LAYERS, Cluster, make_cluster

IS_HEAD_L = torch.arange(NUM_LAYERS, dtype=torch.int32) % 2 == 0


def _worker(device: torch.device, cluster: Cluster) -> ServeState:
    """The cluster's only expert worker, to which layers 0 and 2 are heads."""
    like = cluster.experts[0].state
    state = ServeState.empty(
        like.shape, like.region, like.num_ranks, NUM_LAYERS, like.max_rows, like.stop,
        num_experts=like.rows_LN.shape[1], is_head_L=IS_HEAD_L.to(torch.int32).to(device),
    )  # fmt: skip
    state.healthy_A.fill_(1)
    state.held_LS.copy_(like.held_LS)
    state.limits.copy_(torch.tensor([4, 0, 0]))
    return state


def test_what_is_of_the_other_kind_is_left_for_the_next_time(device: torch.device) -> None:
    cluster = make_cluster(device, num_attention=2, num_experts=1, num_tokens=4)
    state = _worker(device, cluster)
    cluster.attention[0].send(1)
    for of_heads, expected in ((True, -1), (False, 1)):
        serve.choose(state, of_heads)
        assert state.layer.item() == expected
        assert (state.seq_A > 0).tolist() == [expected == 1, False] and (state.counts_AS.sum() > 0) == (expected == 1)
    state.taken_A.copy_(state.seq_A)
    cluster.attention[0].send(2)
    cluster.attention[1].send(2)
    for of_heads, expected in ((False, -1), (True, 2)):
        serve.choose(state, of_heads)
        assert state.layer.item() == expected
        assert (state.seq_A > 0).tolist() == [expected == 2] * 2
    assert cluster.word(0, 0, ANSWER_AT).item() == 0, "choosing alone answers nothing"


def test_what_has_waited_long_enough_has_done_so_in_both_turns(device: torch.device) -> None:
    cluster = make_cluster(device, num_attention=2, num_experts=1, num_tokens=4, max_spins=1)
    state = _worker(device, cluster)
    state.limits.copy_(torch.tensor([1, 4, 4]))  # one look at a time, four at most for company
    cluster.attention[1].send(0)
    serve.choose(state, of_heads=True)
    state.taken_A.copy_(state.seq_A)  # rank 1 has been served once, and is on its way to layer 1
    cluster.attention[0].send(1)  # which rank 0 asks for: it is worth waiting for
    found = []
    for turn in range(6):
        serve.choose(state, of_heads=turn % 2 == 0)
        found.append(int(state.layer.item()))
    assert found == [-1, -1, -1, -1, -1, 1], "what the fifth turn has left to the sixth must not wait once more"
