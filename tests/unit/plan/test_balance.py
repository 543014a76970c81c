"""Places by load: how rows are dealt, what the planner makes of skew, when it is worth it, and when nothing moves."""

import random

import numpy as np
import pytest

from everserve.control.decide.balance import Balancer
from everserve.plan.balance import BalancePolicy, decide
from everserve.plan.dealing import Dealing, balance, imbalance, work_of
from everserve.plan.placement import place_experts
from everserve.plan.repair import Room, repair, replan
from everserve.plan.routing import make_routes
from everserve.tables.calls import ShardKind, expert_calls
from everserve.tables.dealing import Dealer
from everserve.tables.ids import NO_RANK, Epoch, Rank
from everserve.tables.placement import Placement, SeatExperts
from everserve.tables.slots import HeldSlots
from tests.support.held_slots import have, held

NUM_EXPERTS = 16
DEALERS = tuple(Dealer(Rank(i)) for i in range(4))
DEALING = Dealing(DEALERS)
POLICY = BalancePolicy(expert_bytes=1000)


def seats(num: int) -> list[Rank]:
    return [Rank(10 + i) for i in range(num)]


def rooms(placement: Placement, num_slots: int | None = None) -> list[Room]:
    """Each worker on a device of its own."""
    return [Room(seat.rank, seat.rank, num_slots or placement.num_slots) for seat in placement.seats]


def skewed(num_hot: int, share: float, total: float = 1000.0) -> tuple[float, ...]:
    """The first experts have this share of the rows, evenly; they all begin on the first worker."""
    cold = total * (1 - share) / max(NUM_EXPERTS - num_hot, 1)
    return (total * share / num_hot,) * num_hot + (cold,) * (NUM_EXPERTS - num_hot)


def ratio(placement: Placement, layer: int, load, dealing: Dealing = DEALING) -> float:
    work = work_of(placement, layer, load, dealing)
    return max(work.values()) * len(work) / sum(work.values())


def copies(placement: Placement, layer: int) -> list[list[Rank]]:
    return [[s.rank for s in placement.seats if expert in s.experts(layer)] for expert in range(NUM_EXPERTS)]


# dealing


@pytest.mark.parametrize("num_dealers", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("num_active", [1, 2, 3])
@pytest.mark.parametrize("is_beside", [False, True])
def test_shares_are_what_routes_deal(num_dealers, num_active, is_beside):
    ranks = seats(num_active)
    dealers = [Dealer(Rank(30 + 3 * i), Rank(9 + i) if is_beside else NO_RANK) for i in range(num_dealers)]
    everywhere = ((tuple(range(NUM_EXPERTS)),), ((),))
    placement = Placement(
        calls=expert_calls(NUM_EXPERTS, (0,)),
        seats=tuple(SeatExperts(rank=rank, active=everywhere[0], shadows=everywhere[1]) for rank in ranks),
    )
    routes = make_routes(Epoch(1), placement, have(placement), ranks, dealers=dealers)
    asked = [routes.seen_by(dealer.home)[0, :, 0, 0].tolist() for dealer in dealers]
    for expert in range(NUM_EXPERTS):
        firsts = [row[expert] for row in asked]
        expected = [firsts.count(rank) / num_dealers for rank in ranks]
        assert Dealing(dealers).shares(expert, ranks) == pytest.approx(expected)
    load = skewed(2, 0.5)
    kinds, device_of = (ShardKind.EXPERT,), {rank: number for number, rank in enumerate(ranks)}
    assert balance(routes, kinds, {0: load}, device_of)[kinds[0]] == pytest.approx(
        ratio(placement, 0, load, Dealing(dealers))
    )
    alone, with_idle = (balance(routes, kinds, {}, {**device_of, **more})[kinds[0]] for more in ({}, {Rank(99): 99}))
    assert with_idle == pytest.approx(alone * (num_active + 1) / num_active), "a device that should serve, and does not"
    assert imbalance(routes, {0: load}).max_over_mean == pytest.approx(ratio(placement, 0, load, Dealing(dealers)))


def test_every_attention_worker_has_all_candidates_active_ones_first():
    placement = place_experts(NUM_EXPERTS, (0, 1), seats(4), 8)
    hot = placement.seats[1].active[1][0]
    split = tuple(
        SeatExperts(
            rank=seat.rank,
            active=(seat.active[0], (*seat.active[1], *([hot] if hot in seat.shadows[1] else []))),
            shadows=(seat.shadows[0], tuple(e for e in seat.shadows[1] if e != hot)),
        )
        for seat in placement.seats
    )
    routes = make_routes(Epoch(1), Placement(calls=expert_calls(16, (0, 1)), seats=split), have(placement), seats(4))
    num_active = routes.num_active()
    assert num_active[0].tolist() == [1] * 16 and num_active[1, hot] == 3
    assert num_active[1].sum() == 16 + 2
    for rank in (dealer.home for dealer in DEALERS):
        seen = routes.seen_by(rank)
        for layer in range(2):
            for expert in range(NUM_EXPERTS):
                mine, published = seen[layer, expert].tolist(), routes.array()[layer, expert].tolist()
                n = num_active[layer, expert]
                first = (rank + expert) % n
                assert mine == [*published[first:n], *published[:first], *published[n:]]
    worker = placement.seats[0].rank
    assert make_routes(Epoch(1), placement, have(placement), [worker]).active == b"", "one active place is the default"


# the planner


@pytest.mark.parametrize("num_seats", [2, 4, 8])
@pytest.mark.parametrize(("num_hot", "share"), [(1, 0.3), (2, 0.5), (4, 0.9), (16, 1.0)])
def test_skew_is_levelled_and_no_redundancy_is_lost(num_seats, num_hot, share):
    before = place_experts(NUM_EXPERTS, (0, 1), seats(num_seats), None)
    loads = {0: skewed(num_hot, share)}
    after = repair(before, rooms(before), loads, DEALING, balanced=[0])
    best = max(1.0, max(loads[0]) / min(len(DEALERS), 2) * num_seats / sum(loads[0]))  # every expert has two places
    assert ratio(after, 0, loads[0]) <= max(1.15, 1.1 * best), (ratio(before, 0, loads[0]), best)
    assert [s.active[1] for s in after.seats] == [s.active[1] for s in before.seats], "not asked for"
    assert all(len(ranks) == 2 for ranks in copies(after, 0))
    assert after.num_slots <= before.num_slots
    again = repair(after, rooms(before), loads, DEALING, balanced=[0])
    assert again == after, "nothing is better still"


def test_slots_beyond_redundancy_are_for_hot_experts():
    before = place_experts(NUM_EXPERTS, (0,), seats(4), 1)  # 20 slots for 16 experts
    load = skewed(1, 0.6)
    after = repair(before, rooms(before), {0: load}, DEALING, balanced=[0])
    assert len(copies(after, 0)[0]) == 4, "it is everywhere"
    assert ratio(after, 0, load) < 1.1 and ratio(before, 0, load) > 2
    assert all(copies(after, 0)), "every expert has a place"


def test_one_attention_worker_cannot_deal_an_expert():
    before = place_experts(NUM_EXPERTS, (0,), seats(2), None)
    load = skewed(1, 0.9)
    after = repair(before, rooms(before), {0: load}, Dealing([Dealer(Rank(0))]), balanced=[0])
    assert [sum(0 in seat.active[0] for seat in after.seats)] == [1]
    assert ratio(after, 0, load, Dealing([Dealer(Rank(0))])) == pytest.approx(1.8)


def test_no_two_copies_come_to_one_device():
    before = place_experts(NUM_EXPERTS, (0,), seats(4), None)
    pairs = [Room(rank, rank % 2, before.num_slots) for rank in seats(4)]
    start = replan(before, pairs)
    for seed in range(20):
        shuffled = list(skewed(3, 0.7))
        random.Random(seed).shuffle(shuffled)
        after = repair(start, pairs, {0: tuple(shuffled)}, DEALING, balanced=[0])
        assert all({rank % 2 for rank in ranks} == {0, 1} for ranks in copies(after, 0))
        assert ratio(after, 0, shuffled) <= ratio(start, 0, shuffled)


def test_a_repair_does_not_move_experts_for_their_load():
    before = place_experts(NUM_EXPERTS, (0,), seats(4), None)
    load = skewed(4, 0.9)
    assert replan(before, rooms(before), {0: load}, DEALING) == before
    left = rooms(before)[:3]
    even, after = replan(before, left, None, DEALING), replan(before, left, {0: load}, DEALING)
    kept = [set(seat.experts(0)) for seat in before.seats[:3]]
    assert all(old <= set(new.experts(0)) for old, new in zip(kept, after.seats, strict=True)), "nothing is dropped"
    assert all(sum(e in s.active[0] for s in after.seats) == 1 for e in range(NUM_EXPERTS))
    assert ratio(after, 0, load) <= ratio(even, 0, load), "but which place serves costs nothing"


def test_an_orchestrator_without_loads_leaves_balanced_places_alone():
    before = place_experts(NUM_EXPERTS, (0,), seats(4), None)
    balanced = repair(before, rooms(before), {0: skewed(4, 0.8)}, DEALING, balanced=[0])
    assert replan(balanced, rooms(before), None, DEALING) == balanced != before


def test_a_repair_keeps_active_places_that_are_left():
    before = place_experts(NUM_EXPERTS, (0,), seats(4), None)
    load = skewed(1, 0.6)
    split = repair(before, rooms(before), {0: load}, DEALING, balanced=[0])
    homes = [seat.rank for seat in split.seats if 0 in seat.active[0]]
    assert len(homes) == 2
    left = [room for room in rooms(before) if room.rank != homes[0]]
    after = replan(split, left, {0: load}, DEALING)
    assert homes[1] in [seat.rank for seat in after.seats if 0 in seat.active[0]]
    assert all(copies(after, 0))


# whether it is worth it


def verdict_of(before: Placement, load, policy: BalancePolicy = POLICY, num_slots: int | None = None):
    slots = {seat.rank: held(before, seat.rank, num_slots) for seat in before.seats}
    return decide(before, slots, rooms(before, num_slots), {0: load}, DEALING, policy)


def test_skew_is_accepted_once_and_noise_is_not():
    before = place_experts(NUM_EXPERTS, (0,), seats(4), None)
    load = skewed(4, 0.8)
    verdict = verdict_of(before, load)
    assert verdict.placement is not None and verdict.max_over_mean > 2 and verdict.expected < 1.2
    assert verdict.reason.startswith(f"max/mean {verdict.max_over_mean:.2f} -> {verdict.expected:.2f}")
    assert verdict_of(verdict.placement, load).placement is None
    generator = random.Random(7)
    for _ in range(100):
        noisy = [one * generator.uniform(0.95, 1.05) for one in load]
        assert verdict_of(verdict.placement, noisy).placement is None


def test_too_few_rows_tell_nothing():
    before = place_experts(NUM_EXPERTS, (0,), seats(4), None)
    verdict = verdict_of(before, skewed(4, 0.8, total=10.0))
    assert verdict.placement is None and "too few rows" in verdict.reason


def test_what_costs_more_than_it_gains_is_not_done():
    before = place_experts(NUM_EXPERTS, (0,), seats(4), 1)  # most experts have one place: dealing alone does not help
    load = skewed(4, 0.9)
    cheap = verdict_of(before, load, BalancePolicy(expert_bytes=1000, pace_bytes_per_s=1000.0))
    assert cheap.placement is not None and cheap.num_moves > 0
    dear = verdict_of(before, load, BalancePolicy(expert_bytes=10**6, pace_bytes_per_s=1000.0))
    assert dear.placement is None and "would take longer than it saves" in dear.reason


def test_other_active_places_cost_nothing():
    before = place_experts(NUM_EXPERTS, (0,), seats(2), None)  # everything is everywhere
    verdict = verdict_of(before, skewed(4, 0.9), BalancePolicy(expert_bytes=10**12, pace_bytes_per_s=1.0))
    assert verdict.placement is not None and verdict.num_moves == 0


def test_experts_do_not_change_places_without_a_place_to_stay_meanwhile():
    before = place_experts(NUM_EXPERTS, (0,), seats(4), 0)  # no slot is free, no expert has a second place
    assert verdict_of(before, skewed(4, 0.9)).placement is None
    with_room = verdict_of(before, skewed(4, 0.9), num_slots=before.num_slots + 1)
    assert with_room.placement is not None


def test_the_worst_layers_come_first_and_few_at_a_time():
    layers = tuple(range(6))
    before = place_experts(NUM_EXPERTS, layers, seats(4), None)
    loads = {layer: skewed(4, 0.4 + 0.1 * layer) for layer in layers}
    policy = BalancePolicy(expert_bytes=1000, max_layers=2)
    verdict = decide(before, have(before), rooms(before), loads, DEALING, policy)
    assert verdict.placement is not None
    changed = [
        layer
        for layer in layers
        if any(
            new.active[layer] != old.active[layer]
            for new, old in zip(verdict.placement.seats, before.seats, strict=True)
        )
    ]
    assert changed == [4, 5]


# when it is looked at


def test_it_looks_now_and_then_and_only_if_there_is_news():
    balancer = Balancer(1, NUM_EXPERTS, POLICY)
    assert balancer.look_at is None
    balancer.add({0: {0: 10}}, 100.0)
    assert balancer.look_at == 105.0 and not balancer.is_due(104.9)
    balancer.add({0: {0: 10}}, 101.0)
    assert balancer.is_due(105.0) and balancer.look_at is None
    assert not balancer.is_due(200.0), "no reports since"
    balancer.add({0: {0: 10}}, 106.0)
    assert balancer.look_at == 110.0


def test_without_a_policy_loads_are_only_counted():
    balancer = Balancer(1, NUM_EXPERTS, None)
    balancer.add({0: {3: 10}}, 100.0)
    assert balancer.look_at is None and balancer.loads.by_layer()[0][3] > 0


def test_refusals_are_told_once_a_minute_and_acceptances_always():
    balancer = Balancer(1, NUM_EXPERTS, POLICY)
    before = place_experts(NUM_EXPERTS, (0,), seats(4), None)
    even, skew = verdict_of(before, skewed(16, 1.0)), verdict_of(before, skewed(4, 0.8))
    few = verdict_of(before, skewed(4, 0.8, total=1.0))
    assert [len(balancer.tell(even, 7, now)) for now in (0, 5, 10, 61)] == [1, 0, 0, 1]
    assert len(balancer.tell(few, 7, 62)) == 1, "another reason"
    assert [balancer.tell(skew, 7, now)[0].is_accepted for now in (63, 64)] == [True, True]
    assert len(balancer.tell(few, 7, 65)) == 1


# loads


def test_loads_are_rows_per_second_and_older_ones_count_less():
    balancer = Balancer(2, 3, None)
    for second in range(60):
        balancer.add({0: {0: 100, 1: 50}}, 1000.0 + second)
    assert balancer.loads.per_s(1059.0)[0] == pytest.approx([100, 50, 0], rel=0.06)
    assert balancer.loads.per_s(1059.0)[1].tolist() == [0, 0, 0]
    assert balancer.loads.per_s(1069.0)[0] == pytest.approx([50, 25, 0], rel=0.06)
    assert set(balancer.loads.by_layer()) == {0}
    assert min(balancer.loads.by_layer()[0]) > 0, "an expert without rows is not free of charge"


def test_the_first_seconds_are_not_taken_for_little_load():
    balancer = Balancer(1, 2, None)
    for second in range(3):
        balancer.add({0: {0: 100}}, 5.0 + second)
    assert balancer.loads.per_s(7.0)[0, 0] == pytest.approx(100, rel=0.1)


def test_loads_of_what_does_not_exist_do_not_count():
    balancer = Balancer(1, 2, None)
    balancer.add({5: {0: 1}, 0: {7: 1, -1: 1, 1: -4}, -1: {0: 3}}, 1.0)
    assert not np.any(balancer.loads.per_s(1.0))


def test_held_slots_of_another_size_are_no_problem():
    """A worker may have empty slots."""
    before = place_experts(NUM_EXPERTS, (0,), seats(2), 0)
    slots = {seat.rank: held(before, seat.rank, 12) for seat in before.seats}
    assert all(isinstance(one, HeldSlots) and one.num_slots == 12 for one in slots.values())
    verdict = decide(before, slots, rooms(before, 12), {0: skewed(4, 0.9)}, DEALING, POLICY)
    assert verdict.placement is not None and verdict.num_moves > 0
