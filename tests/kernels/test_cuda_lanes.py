"""Both ends of lanes in device memory, against each other and against the reference."""

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

from everserve.backends.cpu.reference import ReferenceOps
from everserve.backends.cuda.lanes import send
from everserve.backends.cuda.lanes.lane import (
    ANSWER_AT,
    COUNT_BITS,
    FLAG_AT,
    NUM_BOXES,
    POSITION_AT,
    REQUEST_AT,
    STATUS_AT,
    CudaLaneShape,
    moved_expert,
)
from everserve.seam.outcomes import Status
from tests.kernels.toy_experts import assert_close, reference_slots
from tests.kernels.toy_lanes import NUM_EXPERTS, NUM_LAYERS, Attention, Cluster, make_cluster

LAST = NUM_LAYERS - 1


def expected(cluster: Cluster, worker: Attention, layer: int) -> Tensor:
    ops = ReferenceOps(worker.x_TD.device)
    real = worker.ids_TK[:-2]
    token_R = torch.arange(len(real), dtype=torch.int32, device=real.device).repeat_interleave(real.shape[1])
    slots = reference_slots(cluster.weights[layer], worker.x_TD.device)
    y_RD = ops.expert_rows(worker.x_TD.float(), token_R, real.flatten(), slots)
    hidden_TD = ops.combine(y_RD.view(*real.shape, -1), worker.weights_TK[:-2], worker.residual_TD[:-2])
    return torch.cat([hidden_TD, worker.residual_TD[-2:]])  # padding is not routed


def assert_complete(cluster: Cluster, a: int, layer: int) -> None:
    worker = cluster.attention[a]
    hidden_TD = worker.finish(layer)
    assert worker.state.stop.item() == 0
    assert_close(hidden_TD, expected(cluster, worker, layer))


def taken(cluster: Cluster, e: int = 0) -> list[bool]:
    """Whose requests were in the last batch."""
    return [seq > 0 for seq in cluster.experts[e].state.seq_A.tolist()]


# -- the layout ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [CudaLaneShape(5, 2, 8, 3), CudaLaneShape(5, 8, 8, 2), CudaLaneShape(2048, 8, 2880, 128)]
)
def test_a_lane_has_room_for_everything_once(shape) -> None:
    words = [(at, at + 8) for at in (FLAG_AT, ANSWER_AT, STATUS_AT, REQUEST_AT, POSITION_AT)]
    counts = [(shape.counts_at(box), shape.counts_at(box) + 4 * shape.num_slots) for box in range(NUM_BOXES)]
    first_rows = [row for box in range(NUM_BOXES) for row in (shape.first_x(box), shape.first_y(box))]
    rows = [(row * shape.row_bytes, (row + shape.max_rows) * shape.row_bytes) for row in first_rows]
    parts = sorted([*words, *counts, *rows])
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(parts)), "parts overlap"
    assert parts[-1][1] <= shape.lane_bytes()
    assert shape.lane_bytes() % (2 << 20) == 0 and shape.lane_bytes() % shape.row_bytes == 0


def test_a_worker_with_few_slots_has_small_lanes() -> None:
    assert CudaLaneShape(2048, 8, 8192, 2).max_rows == 2 * 2048
    assert CudaLaneShape(2048, 2, 8192, 8).max_rows == 2 * 2048


def test_rows_must_be_countable() -> None:
    with pytest.raises(ValueError, match="more rows"):
        CudaLaneShape((1 << 20) - 1, 8, 64, 8).check(100)


def test_places_are_where_experts_are() -> None:
    place_of_LN, expert_at_LP = send.places(torch.tensor([[1, -1, 0]]), torch.tensor([[0, 0, 1]]), 2, 2)
    assert place_of_LN.tolist() == [[2, -1, 1]]
    assert expert_at_LP.tolist() == [[-1, 2, 0, -1]]


# -- nothing goes wrong --------------------------------------------------------------------------


def test_two_workers_are_served_in_one_batch_layer_after_layer(device) -> None:
    cluster = make_cluster(device)
    for layer in range(3):
        for worker in cluster.attention:
            worker.send(layer)
        assert [expert.serve() for expert in cluster.experts] == [layer, layer]
        assert taken(cluster, 0) == taken(cluster, 1) == [True, True]
        for a in range(2):
            assert_complete(cluster, a, layer)
    num_rows = sum(int((worker.ids_TK >= 0).sum()) for worker in cluster.attention)
    served = sum(expert.state.served for expert in cluster.experts)
    assert served.tolist() == [2 * 3, num_rows * 3, 0, 0]
    assert all(worker.state.num_done.item() == 0 for worker in cluster.attention)


@pytest.mark.long
def test_rows_are_counted_by_layer_and_expert(device) -> None:
    cluster = make_cluster(device)
    for layer in (0, 2, 2):
        for worker in cluster.attention:
            worker.send(layer)
        for expert in cluster.experts:
            expert.serve()
            expert.serve()  # nothing is left to do, or to count
        for a in range(2):
            assert_complete(cluster, a, layer)
    ids = torch.cat([worker.ids_TK[:-2].flatten() for worker in cluster.attention]).cpu()
    counts = ids.bincount(minlength=NUM_EXPERTS)
    assert sum(expert.state.rows_LN for expert in cluster.experts).tolist() == [
        counts.tolist(), [0] * NUM_EXPERTS, (2 * counts).tolist(), [0] * NUM_EXPERTS
    ]  # fmt: skip


def test_rows_that_are_refused_are_not_counted(device) -> None:
    cluster = make_cluster(device, num_attention=1)
    cluster.experts[0].state.held_LS.fill_(-1)
    cluster.attention[0].send(0)
    for expert in cluster.experts:
        expert.serve()
    assert cluster.word(0, 0, STATUS_AT).item() == Status.MOVED
    assert cluster.experts[0].state.rows_LN.sum() == 0 < cluster.experts[1].state.rows_LN.sum()


@pytest.mark.long
def test_many_rows_are_computed_in_large_tiles(device) -> None:
    cluster = make_cluster(device, num_tokens=82)
    for worker in cluster.attention:
        worker.ids_TK[:-2, 0] = 2
        worker.ids_TK[:-2, 1] = 4
        worker.send(0)
    cluster.experts[0].serve()
    assert cluster.experts[0].state.tiles.num_tiles[0].item() == 0
    assert cluster.experts[0].state.large_tiles.num_tiles[0].item() == 4  # 2 slots, 160 rows each
    for a in range(2):
        assert_complete(cluster, a, 0)


def test_nothing_is_sent_before_all_rows_are_there(device) -> None:
    cluster = make_cluster(device)
    worker, state = cluster.attention[0], cluster.attention[0].state
    state.num_done.fill_(-1)  # as if one program had not done its part yet
    worker.send(0)
    assert state.num_done.item() == len(worker.x_TD) - 1 and state.sent_E.tolist() == [0, 0]
    assert cluster.word(0, 0, REQUEST_AT).item() == cluster.word(0, 0, POSITION_AT, torch.int32).item() == 0


@pytest.mark.long
def test_the_bell_rings_again_while_a_step_goes_on(device) -> None:
    """So that the next graph looks for the next layer, instead of being woken for it."""
    cluster, bell = make_cluster(device, num_attention=1), torch.zeros(1, dtype=torch.int32, device=device)
    expert, other = cluster.experts
    expert.state = dataclasses.replace(expert.state, bell=bell.data_ptr())
    for layer in range(NUM_LAYERS):
        cluster.attention[0].send(layer)
        bell.fill_(1)
        assert expert.serve() == other.serve() == layer
        assert bell.item() == (layer < LAST)
        assert expert.serve() == -1, "nothing has come"
        assert bell.item() == 0


def test_the_flag_says_that_an_answer_is_due(device) -> None:
    cluster = make_cluster(device)
    cluster.attention[0].send(0)
    assert cluster.word(0, 0, FLAG_AT, torch.int32).item() == -1
    assert cluster.word(0, 0, REQUEST_AT).item() == 1 << 16 | 1 << 15
    assert cluster.word(0, 1, REQUEST_AT).item() == 1 << 16
    assert cluster.word(0, 0, POSITION_AT, torch.int32).item() == 1 + 1
    cluster.experts[0].serve()
    assert cluster.word(0, 0, FLAG_AT, torch.int32).item() == 0
    assert cluster.word(0, 0, ANSWER_AT).item() == 1
    assert cluster.word(0, 1, FLAG_AT, torch.int32).item() == -1, "the other expert worker has not answered"


def test_who_gets_no_rows_is_not_asked_but_told_where_we_are(device) -> None:
    cluster = make_cluster(device)
    worker = cluster.attention[0]
    worker.ids_TK.masked_fill_(worker.ids_TK % 2 == 1, -1)  # the odd ones are at rank 1
    worker.send(1)
    assert cluster.word(0, 1, REQUEST_AT).item() == 0 and cluster.word(0, 1, FLAG_AT, torch.int32).item() == 0
    assert cluster.word(0, 1, POSITION_AT, torch.int32).item() == 1 + 2
    assert cluster.experts[1].serve() == -1 and cluster.experts[0].serve() == 1
    worker.finish(1)
    assert worker.state.stop.item() == 0


def test_a_step_without_rows_asks_nobody(device) -> None:
    cluster = make_cluster(device)
    worker = cluster.attention[0]
    worker.ids_TK.fill_(-1)
    worker.send(LAST)
    assert torch.equal(worker.finish(LAST), worker.residual_TD)
    assert worker.state.sent_E.tolist() == [0, 0]
    assert cluster.word(0, 0, POSITION_AT, torch.int32).item() == 0


def test_nothing_to_do_changes_nothing(device) -> None:
    cluster = make_cluster(device)
    before = cluster.memory.clone()
    assert cluster.experts[0].serve() == -1
    assert cluster.experts[0].state.tiles.num_tiles[0].item() == 0
    assert torch.equal(cluster.memory, before)


# -- what is computed first ----------------------------------------------------------------------


def test_the_lowest_layer_comes_first(device) -> None:
    cluster = make_cluster(device)
    cluster.attention[0].send(2)
    cluster.attention[1].send(1)
    for expert in cluster.experts:
        assert [expert.serve() for _ in range(3)] == [1, 2, -1]
    assert_complete(cluster, 0, 2)
    assert_complete(cluster, 1, 1)


def test_replays_come_before_everything(device) -> None:
    cluster = make_cluster(device)
    cluster.experts[0].state.limits[1:] = 100
    cluster.attention[0].send(1)
    cluster.attention[1].send(2, replay=True)
    send.announce(cluster.attention[0].state, 1)
    assert cluster.experts[0].serve() == 2
    assert taken(cluster) == [False, True]


@pytest.mark.parametrize("position, is_waited_for", [(2, True), (3, False), (1, False), (0, False), (-1, False)])
def test_whoever_is_on_the_way_is_waited_for(device, position, is_waited_for) -> None:
    cluster = make_cluster(device)
    cluster.experts[0].state.limits[1] = 10
    cluster.attention[0].send(2)
    send.announce(cluster.attention[1].state, position)
    for _ in range(2 if is_waited_for else 0):  # 4 polls each; its patience ends the third time
        assert cluster.experts[0].serve() == -1
    assert cluster.experts[0].serve() == 2
    assert cluster.experts[0].state.num_waits.item() == 0


def test_the_first_layer_has_a_patience_of_its_own(device) -> None:
    cluster = make_cluster(device)
    cluster.experts[0].state.limits[2] = 5
    send.announce(cluster.attention[1].state, 0)
    cluster.attention[0].send(0)
    assert [cluster.experts[0].serve() for _ in range(2)] == [-1, 0]


def test_steps_begin_together(device) -> None:
    cluster = make_cluster(device)
    expert, (first, second) = cluster.experts[0], cluster.attention
    expert.state.limits[2] = 100
    second.send(2)
    first.send(0)
    assert (expert.serve(), taken(cluster)) == (2, [False, True]), "the other one is in the middle of its step"
    assert expert.serve() == -1, "and is about to send its next layer"
    second.send(LAST)
    assert (expert.serve(), taken(cluster)) == (LAST, [False, True])
    send.announce(second.state, 0)
    assert expert.serve() == -1
    second.send(0)
    assert (expert.serve(), taken(cluster)) == (0, [True, True])
    assert expert.state.num_passed.item() == expert.state.num_waits.item() == 0


def test_whoever_has_just_begun_is_caught_up_with(device) -> None:
    cluster = make_cluster(device)
    cluster.experts[0].state.limits[1:] = 100
    cluster.attention[1].send(1)
    cluster.attention[0].send(0)
    assert (cluster.experts[0].serve(), taken(cluster)) == (0, [True, False])
    assert cluster.experts[0].serve() == -1
    cluster.attention[0].send(1)
    assert (cluster.experts[0].serve(), taken(cluster)) == (1, [True, True])


def test_only_the_lead_lets_somebody_stand_back(device) -> None:
    """The others go on with those who are further ahead as if it was not there."""
    cluster = make_cluster(device)
    for expert in cluster.experts:
        expert.state.limits[1:] = 100
    cluster.attention[1].send(2)
    cluster.attention[0].send(0)
    assert [expert.serve() for expert in cluster.experts] == [2, 0]
    assert cluster.experts[1].serve() == 2


def test_the_lead_is_asked_without_rows(device) -> None:
    cluster = make_cluster(device)
    worker = cluster.attention[0]
    worker.ids_TK.masked_fill_(worker.ids_TK % 2 == 0, -1)  # the even ones are at rank 0
    worker.send(0)
    assert cluster.word(0, 0, FLAG_AT, torch.int32).item() == -1
    assert [expert.serve() for expert in cluster.experts] == [0, 0]
    assert cluster.word(0, 0, FLAG_AT, torch.int32).item() == 0
    worker.finish(0)
    assert worker.state.stop.item() == 0
    assert [expert.state.served[0].item() for expert in cluster.experts] == [0, 1], "nothing was computed for it"


def test_a_step_goes_on_without_the_leads_leave(device) -> None:
    """It is dead. It had no rows, so nobody misses them."""
    cluster = make_cluster(device)
    worker = cluster.attention[0]
    worker.ids_TK.masked_fill_(worker.ids_TK % 2 == 0, -1)
    worker.send(0)
    cluster.experts[1].serve()
    worker.finish(0)
    assert worker.state.stop.item() == 0


def test_nobody_stands_back_for_one_who_does_not_go_on(device) -> None:
    cluster = make_cluster(device)
    cluster.experts[0].state.limits[2] = 10
    send.announce(cluster.attention[1].state, 2)
    cluster.attention[0].send(0)
    assert [cluster.experts[0].serve() for _ in range(3)] == [-1, -1, 0]  # 4 polls each


@pytest.mark.long
def test_nobody_stands_back_forever(device) -> None:
    """Here the other one begins new steps without ever being at the beginning of one."""
    cluster = make_cluster(device)
    cluster.experts[0].state.limits[2] = 100
    cluster.attention[0].send(0)
    layers = []
    for _ in range(2 * NUM_LAYERS + 1):
        cluster.attention[1].send(2)
        layers.append(cluster.experts[0].serve())
    assert layers == [2] * (2 * NUM_LAYERS) + [0]
    assert cluster.experts[0].state.num_passed.item() == 0


def test_a_replay_never_stands_back(device) -> None:
    cluster = make_cluster(device)
    cluster.experts[0].state.limits[2] = 100
    cluster.attention[1].send(2)
    cluster.attention[0].send(0, replay=True)
    assert [cluster.experts[0].serve() for _ in range(2)] == [0, 2]


def test_a_laggard_joins_the_batch(device) -> None:
    cluster = make_cluster(device)
    cluster.experts[0].state.limits[1] = 100
    send.announce(cluster.attention[1].state, 2)
    cluster.attention[0].send(3)
    assert cluster.experts[0].serve() == -1
    send.announce(cluster.attention[1].state, 3)
    assert cluster.experts[0].serve() == -1
    cluster.attention[1].send(3)
    assert cluster.experts[0].serve() == 3
    assert taken(cluster) == [True, True]


def test_nobody_waits_for_the_unhealthy(device) -> None:
    cluster = make_cluster(device)
    cluster.experts[0].state.limits[1] = 100
    cluster.experts[0].state.healthy_A[1] = 0
    cluster.attention[0].send(2)
    cluster.attention[1].send(2)
    assert cluster.experts[0].serve() == 2
    assert taken(cluster) == [True, False]


def test_what_does_not_fit_is_the_next_batch(device) -> None:
    cluster = make_cluster(device, max_rows=24)
    for worker in cluster.attention:
        worker.ids_TK[:-2] = torch.tensor([0, 2], dtype=torch.int32)  # 20 rows each, all at rank 0
        worker.send(1)
    batches = []
    for _ in range(3):
        batches.append((cluster.experts[0].serve(), taken(cluster)))
    assert batches == [(1, [True, False]), (1, [False, True]), (-1, [False, False])]
    for a in range(2):
        assert_complete(cluster, a, 1)


# -- something goes wrong ------------------------------------------------------------------------


def test_a_dead_expert_stops_the_step_and_a_replay_gives_the_same_bits(device) -> None:
    undisturbed, cluster = make_cluster(device), make_cluster(device)
    for a in range(2):
        for name in ("x_TD", "ids_TK", "weights_TK", "residual_TD"):
            setattr(cluster.attention[a], name, getattr(undisturbed.attention[a], name))
    for new, old in zip(cluster.experts, undisturbed.experts, strict=True):
        new.arena = old.arena
    worker = undisturbed.attention[0]
    worker.send(1)
    for expert in undisturbed.experts:
        expert.serve()
    hidden_TD = worker.finish(1)

    worker, state = cluster.attention[0], cluster.attention[0].state
    worker.send(1)
    cluster.experts[0].serve()
    worker.finish(1)
    assert state.stop.item() == 2 and state.absent.item() == 0b10
    worker.send(2)  # what is queued behind falls through
    assert state.sent_E.tolist() == [1, 1]
    assert cluster.word(0, 0, REQUEST_AT).item() == 1 << 16 | 1 << 1

    state.stop.zero_()
    worker.route([0] * NUM_EXPERTS, list(range(NUM_EXPERTS)))
    worker.send(1, replay=True)
    assert state.sent_E.tolist() == [2, 1]
    assert cluster.word(0, 0, REQUEST_AT).item() == 2 << 16 | 1 << 1 | 1
    num_before = cluster.experts[0].state.served.tolist()[1]
    cluster.experts[0].serve()
    _, num_rows, _, num_replayed = cluster.experts[0].state.served.tolist()
    assert num_replayed == num_rows - num_before == (worker.ids_TK >= 0).sum().item(), "all of them, this time"
    assert torch.equal(worker.finish(1), hidden_TD)
    assert state.stop.item() == 0

    # It was not dead after all. Its answer is not used; the next one is.
    cluster.experts[1].serve()
    assert torch.equal(worker.finish(1), hidden_TD)
    worker.route([1] * NUM_EXPERTS, [(n + 1) % NUM_EXPERTS for n in range(NUM_EXPERTS)])
    worker.send(2)
    cluster.experts[1].serve()
    hidden_TD = worker.finish(2)
    assert state.stop.item() == 0
    assert_close(hidden_TD, expected(undisturbed, undisturbed.attention[0], 2))


def test_an_answer_to_an_earlier_request_does_not_count(device) -> None:
    cluster = make_cluster(device)
    worker = cluster.attention[0]
    worker.send(0)
    for expert in cluster.experts:
        expert.serve()
    worker.send(1)
    cluster.word(0, 0, FLAG_AT, torch.int32).zero_()  # whoever ended the wait
    cluster.experts[1].serve()
    worker.finish(1)
    assert worker.state.stop.item() == 2 and worker.state.absent.item() == 0b01


@pytest.mark.parametrize(
    "damage, status",
    [
        (lambda counts, request, held: counts.__setitem__(0, -1), Status.BAD_REQUEST),
        (lambda counts, request, held: counts.__setitem__(3, 2**31 - 1), Status.BAD_REQUEST),
        (
            lambda counts, request, held: counts.fill_(20 | 1 << COUNT_BITS),
            Status.BAD_REQUEST,
        ),  # more than a lane has rows
        (lambda counts, request, held: request.fill_(1 << 16 | NUM_LAYERS << 1), Status.BAD_REQUEST),
        (lambda counts, request, held: held.fill_(-1), Status.MOVED),
        (lambda counts, request, held: held.copy_(held.flip(0)), Status.MOVED),
    ],
    ids=["negative", "huge", "too many", "no such layer", "empty slots", "other experts"],
)
def test_what_cannot_be_computed_is_refused(device, damage, status) -> None:
    cluster = make_cluster(device)
    for worker in cluster.attention:
        worker.ids_TK[:-2] = torch.tensor([0, 2], dtype=torch.int32)  # all at rank 0
    cluster.attention[0].send(1)
    server = cluster.experts[0]
    damage(cluster.counts(0, 0, 1), cluster.word(0, 0, REQUEST_AT), server.state.held_LS[1])
    cluster.attention[1].send(2)
    server.serve()
    assert cluster.word(0, 0, STATUS_AT).item() == status and cluster.word(0, 0, ANSWER_AT).item() == 1
    server.serve()
    assert server.state.served.tolist() == [1, 20, 1, 0], "the other one does not suffer"
    cluster.attention[0].finish(1)
    assert cluster.attention[0].state.stop.item() == 2 and cluster.attention[0].state.absent.item() == 0b01
    assert_complete(cluster, 1, 2)


def test_what_moved_is_marked_and_the_next_place_computes_it(device) -> None:
    """Experts 0 and 2 were at rank 0; 2 is not any more."""
    cluster = make_cluster(device)
    worker, other = cluster.attention
    for asking in cluster.attention:
        asking.ids_TK[:-2] = torch.tensor([0, 2], dtype=torch.int32)
    cluster.experts[0].state.held_LS[1, 2] = 5
    worker.send(1)
    other.ids_TK[:, 1] = -1
    other.send(1)
    cluster.experts[0].serve()
    assert [cluster.word(a, 0, STATUS_AT).item() for a in range(2)] == [Status.MOVED, Status.COMPUTED]
    assert [moved_expert(word) for word in cluster.counts(0, 0, 1).tolist()] == [None, None, 2, None, None, None]
    assert cluster.experts[0].state.served.tolist() == [1, 10, 1, 0]
    worker.finish(1)
    assert worker.state.stop.item() == 2 and worker.state.absent.item() == 0b01
    worker.state.stop.zero_()
    ranks = [0, 1, 1, 1, 0, 1]
    worker.route(ranks, [(n + rank) % NUM_EXPERTS for n, rank in enumerate(ranks)])
    worker.send(1, replay=True)
    for expert in cluster.experts:
        expert.serve()
    assert_complete(cluster, 0, 1)


def test_a_slot_without_rows_may_hold_anything(device) -> None:
    cluster = make_cluster(device)
    worker = cluster.attention[0]
    worker.ids_TK[:-2] = torch.tensor([0, 2], dtype=torch.int32)
    cluster.experts[0].state.held_LS[1, 4] = -1
    worker.send(1)
    cluster.experts[0].serve()
    assert_complete(cluster, 0, 1)


def test_a_refused_lane_does_not_harm_its_batch(device) -> None:
    cluster = make_cluster(device)
    for worker in cluster.attention:
        worker.send(1)
    cluster.counts(0, 0, 1)[2] = -5
    for expert in cluster.experts:
        expert.serve()
    assert taken(cluster) == [True, True]
    assert_complete(cluster, 1, 1)


def test_rows_without_a_place_stop_the_step_before_anything_is_sent(device) -> None:
    cluster = make_cluster(device)
    worker = cluster.attention[0]
    worker.ids_TK[0] = torch.tensor([1, 4], dtype=torch.int32)
    worker.route([0, -1, 0, 0, -1, 0], list(range(NUM_EXPERTS)))
    worker.send(2)
    assert worker.state.stop.item() == 3 and worker.state.unplaced.item() == 4 + 1
    assert worker.state.sent_E.tolist() == [0, 0]
    assert cluster.word(0, 0, REQUEST_AT).item() == 0 and cluster.experts[0].serve() == -1


def test_two_experts_in_one_place_stop_the_step_before_anything_is_sent(device) -> None:
    """The tables contradict each other. One of the two would get the answers of an earlier step."""
    cluster = make_cluster(device)
    worker = cluster.attention[0]
    worker.ids_TK[0] = torch.tensor([1, 4], dtype=torch.int32)
    worker.route([0] * NUM_EXPERTS, [0, 1, 2, 3, 1, 5])
    worker.send(2)
    assert worker.state.stop.item() == 3 and worker.state.unplaced.item() in (1 + 1, 4 + 1)
    assert worker.state.sent_E.tolist() == [0, 0]


def test_lanes_that_are_not_there_are_not_touched(device) -> None:
    cluster = make_cluster(device)
    worker = cluster.attention[0]
    lane_bytes = cluster.shape.lane_bytes()
    absent = cluster.memory[lane_bytes : 2 * lane_bytes]
    before = absent.clone()
    worker.state.present_E[1] = 0
    worker.route([0] * NUM_EXPERTS, list(range(NUM_EXPERTS)))
    send.announce(worker.state, 0)
    worker.send(0)
    cluster.experts[0].serve()
    assert_complete(cluster, 0, 0)
    assert torch.equal(absent, before)


def test_a_stopped_server_takes_nothing(device) -> None:
    cluster = make_cluster(device)
    cluster.attention[0].send(0)
    cluster.experts[0].state.stop.fill_(1)
    before = cluster.memory.clone()
    cluster.experts[0].serve()
    assert torch.equal(cluster.memory, before)
    assert cluster.experts[0].state.taken_A.tolist() == [0, 0]
