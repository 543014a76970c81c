"""RemoteExperts against LocalExperts, bit for bit, while expert workers fail in every way there is."""

import functools
import random
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from everserve.backends.cpu import ops as native
from everserve.backends.cpu.reference import ReferenceOps
from everserve.control.decide.effects import Lost
from everserve.control.decide.inputs import Alive, Said
from everserve.control.decide.machine import Machine, Policy
from everserve.errors import StepAbandoned
from everserve.model.ops import NO_EXPERT
from everserve.tables.ids import MAX_RANKS, Incarnation, Rank
from everserve.wire.messages import Hello, Ready, Suspected
from tests.support.experts import (
    MAX_TOKENS,
    MOE_LAYERS,
    NUM_EXPERTS,
    SHAPE,
    TOP_K,
    RandomExperts,
    Rows,
    local_experts,
    routes,
)
from tests.support.held_slots import goal_of
from tests.support.in_process_experts import Fault, MemoryExperts

NATIVE = native.NativeOps(num_threads=1)
LAYER = MOE_LAYERS[0]
Places = Mapping[int, list[int]]
TWO_EACH: Places = {1: [0, 1, 2, 3], 2: [4, 5, 0, 1], 3: [2, 3, 4, 5]}
EVERYWHERE: Places = {rank: [*range(NUM_EXPERTS)] for rank in (1, 2, 3)}


class Cluster(MemoryExperts):
    """Expert workers at these places, and the truth to compare with."""

    def __init__(self, places: Places, faults: Mapping[int, Mapping[int, Fault]] | None = None, ops=NATIVE) -> None:
        super().__init__(SHAPE, MOE_LAYERS, NUM_EXPERTS)
        self.places, self.ops = dict(places), ops
        for rank in places:
            self.start(rank, (faults or {}).get(rank))
        self.peers.use(self.routes())
        self.messages: list = []  # on the control socket
        self.expert_io = self.remote_experts(ops, self.read_control)
        self.local = local_experts(ops)

    def start(self, rank: int, faults: Mapping[int, Fault] | None = None) -> None:
        self.add(Rank(rank), RandomExperts(self.ops, self.places[rank]), faults)

    def routes(self, epoch: int = 1, without: tuple[int, ...] = ()):
        return routes({Rank(r): p for r, p in self.places.items() if r not in without}, epoch)

    def write_control(self, *messages) -> None:
        self.messages += messages
        self.cell.ring_control()

    def read_control(self) -> None:
        while self.messages:
            self.messages.pop(0)()

    def check(self, layer: int = LAYER, num_tokens: int = 9, seed: int = 0) -> None:
        """One layer, exactly right."""
        rows = Rows(num_tokens, seed)
        assert torch.equal(rows.through(self.expert_io, layer), rows.through(self.local, layer))


@pytest.fixture
def make():
    clusters = []

    def make(*args, **kwargs) -> Cluster:
        clusters.append(Cluster(*args, **kwargs))
        return clusters[-1]

    yield make
    for cluster in clusters:
        cluster.close()


# nothing fails


@pytest.mark.parametrize("ops", [NATIVE, ReferenceOps(batch_invariant=True)], ids=lambda ops: ops.name)
@pytest.mark.parametrize("num_workers", [1, 2, 3, 4])
def test_placement_does_not_change_a_bit(make, ops, num_workers):
    rng = random.Random(num_workers)
    for seed in range(3):
        places: dict[int, list[int]] = {rank: [] for rank in range(5, 5 + num_workers)}
        for expert in rng.sample(range(NUM_EXPERTS), NUM_EXPERTS):
            for rank in rng.sample(sorted(places), rng.randint(1, num_workers)):
                places[rank].append(expert)
        cluster = make({rank: slots or [0] for rank, slots in places.items()}, ops=ops)
        for num_tokens in (1, 2, MAX_TOKENS):
            for layer in MOE_LAYERS:
                cluster.check(layer, num_tokens, seed)
        assert cluster.suspected == cluster.replayed == [] and cluster.peers.num_stale == 0


def test_the_times_of_answers_are_counted_by_peer(make):
    cluster = make(TWO_EACH, {2: {1: Fault.DIE_BEFORE_ANSWER}})
    for seed in range(3):
        cluster.check(seed=seed)
    times = dict(cluster.peers.take_answer_times())
    assert set(times) == {(rank, 1) for rank in TWO_EACH}
    assert all(work.seconds > 0 for work in times.values())
    num_answers, num_rows = (sum(work.units[i] for work in times.values()) for i in (0, 1))
    assert num_rows >= 3 * 9 * TOP_K, "each row has an answer, or waited for one in vain"
    assert num_answers >= 6 and times[Rank(2), 1].units[0] <= 2, "after its death it is not asked any more"
    assert cluster.peers.take_answer_times() == []
    cluster.remove(Rank(2))
    cluster.start(2)
    cluster.check(seed=9)
    assert Incarnation(2) in {worker.incarnation for worker, _ in cluster.peers.take_answer_times()}


def test_no_tokens(make):
    rows = Rows(0, 0)
    assert rows.through(make(TWO_EACH).expert_io, LAYER).shape == (0, SHAPE.hidden_size)


def test_position_is_the_layer_that_comes_next(make):
    cluster = make(TWO_EACH)
    cluster.expert_io.begin_step(num_rows=1)
    positions = [cluster.cell.position]
    for layer in MOE_LAYERS:
        cluster.check(layer)
        positions.append(cluster.cell.position)
    cluster.expert_io.end_step()
    assert positions == [*MOE_LAYERS, -1] and cluster.cell.position == -1


# one worker fails


@pytest.mark.parametrize("ops", [NATIVE, ReferenceOps(batch_invariant=True)], ids=lambda ops: ops.name)
@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize(
    ("fault", "reason", "is_replayed", "num_stale"),
    [
        (Fault.DIE_BEFORE_ANSWER, "died", True, 0),
        (Fault.DIE_AFTER_ANSWER, "died", False, 0),
        (Fault.HANG, "silent", True, 0),
        (Fault.ANSWER_LATE, "silent", True, 1),
        (Fault.STAY_DEAF, "deaf", True, 0),
        (Fault.OLD_ANSWER, "deaf", True, 0),
        (Fault.STRANGE_ANSWER, "deaf", True, 0),
        (Fault.REFUSE, "refused: bad request", True, 0),
        (Fault.MISS_THE_RING, None, False, 0),
        (Fault.WAIT_FOR_A_CORE, None, False, 0),
        (Fault.OLD_ANSWER_FIRST, None, False, 0),
    ],
)
def test_one_fault(make, ops, at, fault, reason, is_replayed, num_stale):
    cluster = make(TWO_EACH, {2: {at: fault}}, ops)
    for layer in MOE_LAYERS:
        cluster.check(layer)
    assert cluster.members[Rank(2)].num_requests >= at, "the fault landed"
    assert cluster.suspected == ([(2, reason)] if reason else [])
    assert [(rank, layer) for rank, layer, _ in cluster.replayed] == [(2, MOE_LAYERS[at - 1])] * is_replayed
    assert any(peer.num_replays for peer in cluster.members.values()) == is_replayed, "and it was marked as such"
    assert cluster.expert_io.num_replayed_rows == sum(num_rows for _, _, num_rows in cluster.replayed)
    assert cluster.peers.num_stale == num_stale


@pytest.mark.parametrize("fault", [Fault.STAY_DEAF, Fault.REFUSE, Fault.STRANGE_ANSWER])
def test_one_that_pulses_but_does_not_serve_is_replaced_after_few_layers(make, fault):
    """Suspected, probed by its pulse, pardoned, asked again: not for ever."""
    cluster = make(TWO_EACH, {2: dict.fromkeys(range(1, 1000), fault)})
    ranks = (Rank(0), *cluster.members)
    machine = Machine(goal_of(ranks, None), Policy(detect_s=0.05))
    machine.start(0.0)
    for rank in ranks:
        for said in (Hello(), Ready()):
            machine.handle(Said(rank, Incarnation(1), said), 0.0)
    num_heard, lost = 0, []
    for epoch in range(2, 12):
        cluster.check()
        for rank, reason in cluster.suspected[num_heard:]:
            decision = machine.handle(
                Said(Rank(0), Incarnation(1), Suspected(rank=rank, incarnation=Incarnation(1), reason=reason)), 1.0
            )
            for loss in (effect for effect in decision.effects if isinstance(effect, Lost)):
                cluster.remove(loss.rank)
                lost.append(loss.rank)
            machine.handle(Alive(rank, Incarnation(1)), 1.0)  # it pulses
        num_heard = len(cluster.suspected)
        cluster.peers.use(cluster.routes(epoch=epoch, without=tuple(lost)))
    assert lost == [Rank(2)] and len(cluster.suspected) == Policy(detect_s=0.05).max_unserved


def test_dead_before_the_layer_begins(make):
    cluster = make(TWO_EACH)
    cluster.members[Rank(3)].die()
    cluster.check()
    assert cluster.suspected == [(3, "died")] and cluster.replayed == [] and cluster.members[3].num_requests == 0


# more than one


@pytest.mark.parametrize("second", [Fault.DIE_BEFORE_ANSWER, Fault.HANG, Fault.ANSWER_LATE, Fault.REFUSE])
@pytest.mark.parametrize("first", [Fault.DIE_BEFORE_ANSWER, Fault.ANSWER_LATE, Fault.STAY_DEAF])
def test_two_in_the_same_layer(make, first, second):
    cluster = make(EVERYWHERE, {1: {1: first}, 2: {1: second}})
    cluster.check()
    cluster.check(MOE_LAYERS[1])
    assert {rank for rank, _ in cluster.suspected} == {1, 2}


@pytest.mark.parametrize("second", [Fault.DIE_BEFORE_ANSWER, Fault.DIE_AFTER_ANSWER, Fault.HANG, Fault.ANSWER_LATE])
def test_the_one_who_gets_the_replay_fails_too(make, second):
    cluster = make(EVERYWHERE, {1: {1: Fault.DIE_BEFORE_ANSWER}, 2: {2: second}})
    cluster.check()
    cluster.check(MOE_LAYERS[1])
    assert cluster.members[Rank(2)].num_requests >= 2 and [rank for rank, _ in cluster.suspected] == [1, 2]


@pytest.mark.parametrize("num_busy_turns", [0, 1, 10], ids=["all answered", "some answered", "none answered"])
def test_three_parts_of_a_layer_in_two_boxes(make, num_busy_turns):
    """Rank 3 gets its own rows, then those of 1, then those of 2; nothing of that may be overwritten."""
    faults = {1: {1: Fault.DIE_BEFORE_ANSWER}, 2: {1: Fault.STAY_DEAF}}
    cluster = make({1: [0, 1, 3], 2: [1, 2, 4], 3: [*range(NUM_EXPERTS)]}, faults)
    turns = iter([False] * num_busy_turns)
    cluster.members[Rank(3)].be_busy(until=lambda: next(turns, True))
    cluster.check(num_tokens=MAX_TOKENS)
    assert cluster.suspected == [(1, "died"), (2, "deaf")]
    assert cluster.members[Rank(3)].num_requests == 3 and len(cluster.replayed) == 2


def test_both_boxes_busy(make):
    """Abandoned steps leave two unanswered requests with rank 2: the next one waits until one of them is answered."""
    cluster = make({1: [3, 4, 5], 2: [0, 1, 2]})
    turns = iter([False] * 4 + [True])
    cluster.members[Rank(2)].be_busy(until=lambda: next(turns))
    for epoch in (2, 4):
        lose_rank_1 = functools.partial(cluster.write_control, lambda: cluster.remove(Rank(1)).die())
        cluster.members[Rank(1)].be_busy(until=lambda lose=lose_rank_1: bool(lose()))
        with pytest.raises(StepAbandoned):
            cluster.check()
        cluster.start(1)
        cluster.peers.use(cluster.routes(epoch))
    assert cluster.members[Rank(2)].num_requests == 0 and cluster.peers.num_stale == 0
    cluster.check()
    assert cluster.members[Rank(2)].num_requests == 3 and cluster.suspected == []
    cluster.check(MOE_LAYERS[1])
    assert cluster.peers.num_stale == 2, "both came in the end, and neither was used"


# masked experts


@pytest.mark.parametrize("fault", [None, Fault.DIE_BEFORE_ANSWER, Fault.REFUSE])
@pytest.mark.parametrize("num_left", [2, 1, 0])
def test_what_is_masked_needs_no_place(make, fault, num_left):
    """Fewer experts are left than a row wants: nothing is sent for the rest, whatever else happens to the layer."""
    places = {rank: [expert for expert in (2, 5) if expert < 5 or num_left > 1] for rank in (1, 2)}
    cluster = make(places, {2: {1: fault}} if fault else None)
    rows = Rows(9, seed=1)
    rows.ids_TK[:] = torch.tensor([2, 5, NO_EXPERT] if num_left == 2 else [2, NO_EXPERT, NO_EXPERT])
    if num_left == 0:
        rows.ids_TK[:] = NO_EXPERT
    rows.weights_TK[rows.ids_TK == NO_EXPERT] = 0.0
    expected = rows.through(cluster.local, LAYER)
    assert torch.equal(rows.through(cluster.expert_io, LAYER), expected)
    assert torch.equal(expected, rows.residual_TD) == (num_left == 0)


# no place


def test_an_expert_without_a_place(make):
    cluster = make({1: [0, 1, 2], 2: [3, 4, 5], 3: [0, 1, 2]}, {2: {2: Fault.DIE_BEFORE_ANSWER}})
    cluster.check(MOE_LAYERS[0])
    with pytest.raises(StepAbandoned) as abandoned:
        cluster.check(MOE_LAYERS[1])
    assert (abandoned.value.layer, abandoned.value.experts) == (MOE_LAYERS[1], (3, 4, 5))
    assert cluster.cell.position == -1, "nobody waits for us"
    with pytest.raises(StepAbandoned):
        cluster.check(MOE_LAYERS[0])
    cluster.remove(Rank(2))
    cluster.start(2)
    cluster.peers.use(cluster.routes(epoch=2))
    for layer in MOE_LAYERS:
        cluster.check(layer)


def test_only_experts_that_are_needed_are_missed(make):
    cluster = make({1: [0, 1, 2, 3, 4]})
    rows = Rows(1, seed=0)
    rows.ids_TK = torch.tensor([[4, 0, 2]], dtype=torch.int32)
    assert torch.equal(rows.through(cluster.expert_io, LAYER), rows.through(cluster.local, LAYER))
    rows.ids_TK = torch.tensor([[4, 5, 2]], dtype=torch.int32)
    with pytest.raises(StepAbandoned, match="layer 1: no place for the experts 5"):
        rows.through(cluster.expert_io, LAYER)


def test_without_routes_there_is_no_place(make):
    cluster = MemoryExperts(SHAPE, MOE_LAYERS, NUM_EXPERTS)
    with pytest.raises(StepAbandoned):
        Rows(2, 0).through(cluster.remote_experts(NATIVE), LAYER)
    cluster.close()


# trust


def test_one_who_comes_back_is_trusted_with_the_next_routes(make):
    cluster = make(TWO_EACH, {2: {1: Fault.ANSWER_LATE}})
    cluster.check(MOE_LAYERS[0])
    cluster.check(MOE_LAYERS[1])
    assert cluster.peers.suspects == {2: "silent"} and cluster.members[Rank(2)].num_requests == 1
    cluster.peers.use(cluster.routes(epoch=2))
    assert cluster.peers.suspects == {}
    cluster.check(MOE_LAYERS[2])
    assert cluster.members[Rank(2)].num_requests == 2


def test_new_routes_do_not_raise_the_dead(make):
    cluster = make(EVERYWHERE, {1: {1: Fault.DIE_BEFORE_ANSWER}, 2: {1: Fault.HANG}})
    cluster.check()
    cluster.peers.use(cluster.routes(epoch=2))
    assert cluster.peers.suspects == {1: "died", 2: "silent"}


def test_a_suspect_that_is_the_only_place_is_asked_again(make):
    cluster = make({1: [0, 1, 2, 3, 4, 5]}, {1: {1: Fault.REFUSE}})
    with pytest.raises(StepAbandoned):
        cluster.check()
    cluster.check()


def test_old_routes_are_dropped(make):
    cluster = make(TWO_EACH)
    cluster.peers.use(cluster.routes(epoch=7))
    cluster.peers.use(routes({}, epoch=6))
    cluster.check()
    assert cluster.peers.epoch == 7


def test_routes_that_do_not_fit_are_an_error(make):
    cluster = make(TWO_EACH)
    with pytest.raises(ValueError, match=f"rank beyond {MAX_RANKS - 1}"):
        cluster.peers.use(routes({Rank(MAX_RANKS): [*range(NUM_EXPERTS)]}))
    cluster.check()


# the orchestrator speaks in the middle of a layer


def test_a_peer_leaves_in_the_middle_of_a_layer(make):
    cluster = make(TWO_EACH)

    def lose_rank_2() -> None:
        cluster.remove(Rank(2))
        cluster.peers.use(cluster.routes(epoch=2, without=(2,)))

    cluster.members[Rank(2)].be_busy(until=lambda: bool(cluster.write_control(lose_rank_2)))
    cluster.check()
    assert cluster.suspected == [] and [rank for rank, _, _ in cluster.replayed] == [2]


def test_an_answer_that_came_before_the_suspicion_counts(make):
    cluster = make(TWO_EACH)
    peer = cluster.members[Rank(2)]

    def answer_and_be_suspected() -> None:
        assert peer.turn()
        cluster.peers.suspect(cluster.peers.trusted(Rank(2)), "test")

    turns = iter([lambda: cluster.write_control(answer_and_be_suspected), lambda: True])
    peer.be_busy(until=lambda: bool(next(turns)()))
    cluster.check()
    assert cluster.replayed == [] and cluster.peers.suspects == {2: "test"} and cluster.peers.num_stale == 0


def test_a_new_incarnation_takes_the_seat_in_the_middle_of_a_layer(make):
    """What the old one answers after that counts no more, though its rank is trusted."""
    cluster = make({1: [*range(NUM_EXPERTS)]})
    old = cluster.members[Rank(1)]

    def replace() -> None:
        cluster.remove(Rank(1))
        cluster.start(1)
        cluster.peers.use(cluster.routes(epoch=2))

    turns = iter([lambda: cluster.write_control(replace), lambda: True])
    old.be_busy(until=lambda: bool(next(turns)()))
    cluster.check()
    new = cluster.members[Rank(1)]
    assert (old.incarnation, new.incarnation, old.num_requests, new.num_requests) == (1, 2, 1, 1)
    assert len(cluster.replayed) == 1 and cluster.peers.num_stale == 1


def test_retired_lanes_stay_until_the_process_is_dead(make):
    cluster = make(EVERYWHERE, {2: {1: Fault.ANSWER_LATE}})
    cluster.check()
    old = cluster.remove(Rank(2))
    num_free = cluster.peers._region.num_free
    cluster.expert_io.end_step()
    assert cluster.peers._region.num_free == num_free
    old.die()
    cluster.expert_io.end_step()
    assert cluster.peers._region.num_free == num_free + 1 and cluster.peers.num_stale == 1


def test_many_incarnations(make):
    """More than there are places for lanes: the oldest retired ones are forgotten, though their processes linger."""
    cluster = make({1: [*range(NUM_EXPERTS)]})
    num_fds = len([*Path("/proc/self/fd").iterdir()])
    for epoch in range(2, 150):
        cluster.remove(Rank(1)).close()
        cluster._past.clear()
        cluster.start(1)
        cluster.peers.use(cluster.routes(epoch))
        cluster.check(num_tokens=1)
    assert len([*Path("/proc/self/fd").iterdir()]) == num_fds


def test_wrong_input_is_our_own_bug(make):
    rows = Rows(2, 0)
    for wrong in (rows.ids_TK.long(), rows.ids_TK[:, : TOP_K - 1], rows.ids_TK + NUM_EXPERTS):
        rows.ids_TK = wrong
        with pytest.raises(AssertionError):
            rows.through(make(TWO_EACH).expert_io, LAYER)
