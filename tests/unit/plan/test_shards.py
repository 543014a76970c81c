"""Places for slices, heads and cut experts on any number of workers: how even they are, and what planners make of
them."""

import pytest

from everserve.errors import ConfigError
from everserve.plan.layer_plan import Room
from everserve.plan.placement import survivable_deaths
from everserve.plan.repair import repair, replan
from everserve.plan.routing import make_routes
from everserve.plan.shards import (
    Spread,
    evenness,
    largest_power_of_two,
    memory_per_worker,
    place_shards,
    work_per_worker,
)
from everserve.tables.calls import Call, ShardKind
from everserve.tables.dealing import Dealer
from everserve.tables.ids import Epoch, Rank
from everserve.tables.placement import Placement
from tests.support.held_slots import have

NUM_LAYERS = 32
DEGREES = range(1, 13)
ONE = dict.fromkeys(ShardKind, 1.0)


def calls_of(heads: int = 8, slices: int = 8, experts: int = 0) -> list[Call]:
    """A step of a dense or an MoE model: heads, then slices or experts, in every layer."""
    ffn = (ShardKind.EXPERT, experts) if experts else (ShardKind.SLICE, slices)
    kinds = ((ShardKind.HEAD, heads), ffn)
    return [Call(layer=layer, kind=kind, num_shards=num) for layer in range(NUM_LAYERS) for kind, num in kinds]


def workers(num: int) -> list[Rank]:
    return [Rank(num + i) for i in range(num)]  # after as many homes


def homes(num: int) -> list[Dealer]:
    return [Dealer(Rank(i), Rank(num + i)) for i in range(num)]


def place(calls: list[Call], num: int, spread: Spread = Spread.DEALT, shadows: int | None = None) -> Placement:
    return place_shards(calls, workers(num), shadows, spread)


@pytest.mark.parametrize("calls", [calls_of(), calls_of(experts=16), calls_of(4, 12), calls_of(8, experts=128)])
def test_dealt_is_even_in_every_layer(calls):
    fewest = min(call.num_shards for call in calls)
    for num in (num for num in DEGREES if num <= fewest):
        found = evenness(place(calls, num), homes(num), ONE, ONE)
        assert found.work == pytest.approx(1.0) and found.work_in_step == pytest.approx(1.0), num
        assert found.memory == pytest.approx(1.0), num


@pytest.mark.parametrize("calls", [calls_of(), calls_of(4, 12)])
@pytest.mark.parametrize("num", DEGREES)
def test_cyclic_differs_by_at_most_one_shard_of_each_kind(calls, num):
    placement = place(calls, num, Spread.CYCLIC)
    for kind in (ShardKind.HEAD, ShardKind.SLICE):
        work = work_per_worker(placement, homes(num), {**dict.fromkeys(ShardKind, 0.0), kind: 1.0})
        assert max(work.values()) - min(work.values()) <= 1
    held = [len(seat.active[0]) for seat in placement.seats]
    assert max(held) - min(held) <= 1 and sum(held) == calls[0].num_shards  # in one layer too


@pytest.mark.parametrize("num", DEGREES)
def test_contiguous_is_as_uneven_as_one_layer(num):
    found = evenness(place(calls_of(), num, Spread.CONTIGUOUS), homes(num), ONE, ONE)
    assert [found.work, found.work_in_step] == pytest.approx([-(-8 // num) * num / 8] * 2)


@pytest.mark.parametrize("num", range(1, 9))
def test_state_per_worker(num):
    """Weights of dealt shards are on all workers, KV of dealt heads is not."""
    placement = place(calls_of(), num)
    sizes = {**dict.fromkeys(ShardKind, 0.0), ShardKind.SLICE: 1.0}
    assert set(memory_per_worker(placement, sizes).values()) == {NUM_LAYERS * (8 // num + 8 % num)}
    kv = work_per_worker(placement, homes(num), {**dict.fromkeys(ShardKind, 0.0), ShardKind.HEAD: 1.0})
    assert max(kv.values()) == pytest.approx(min(kv.values())) == pytest.approx(NUM_LAYERS * 8 / num)


@pytest.mark.parametrize("num", DEGREES)
@pytest.mark.parametrize("spread", Spread)
def test_every_slice_has_a_second_place(num, spread):
    """A head has none: a copy without its KV would be of no use."""
    slices = [call for call in calls_of(8, 12) if call.kind is ShardKind.SLICE]
    assert survivable_deaths(place(slices, num, spread)) >= min(num - 1, 1)
    if num > 1:
        assert survivable_deaths(place(slices, num, spread, shadows=0)) == 0 or num > 12
    placement = place(calls_of(8, 12), num, spread)
    routes = make_routes(Epoch(1), placement, have(placement), workers(num))
    assert routes.num_without_place == 0 and routes.num_survivable == survivable_deaths(placement)
    assert routes.widths == (8, 12) * NUM_LAYERS


def rooms_of(placement: Placement, ranks: list[Rank]) -> list[Room]:
    return [Room(rank, rank, placement.num_slots, placement.slots_by_call) for rank in ranks]


@pytest.mark.parametrize("num", DEGREES)
def test_a_fresh_placement_is_what_the_planner_would_keep(num):
    placement = place(calls_of(8, 12), num)
    again = replan(placement, rooms_of(placement, workers(num)))
    for before, after in zip(placement.seats, again.seats, strict=True):
        for index in range(len(placement.calls)):
            assert set(before.active[index]) == set(after.active[index])
            assert set(before.experts(index)) <= set(after.experts(index))  # slots that are left may be used


@pytest.mark.parametrize("num", range(2, 9))
def test_survivors_keep_what_they_alone_serve(num):
    """A slice that is lost has a place at once, and no more is loaded than was lost. Copies of what is everywhere
    may make room for the second place of another shard."""
    placement = place(calls_of(), num)
    for lost in workers(num):
        left = [rank for rank in workers(num) if rank != lost]
        after = repair(placement, rooms_of(placement, left))
        routes = make_routes(Epoch(2), after, have(placement), left)
        assert all(placement.calls[index].kind is ShardKind.HEAD for index, _ in routes.lost_experts())
        for index, call in enumerate(placement.calls):
            num_loaded = 0
            for seat in after.seats:
                before, now = placement.seat(seat.rank), set(seat.experts(index))
                assert {s for s in before.active[index] if s < call.num_shards - call.num_shards % num} <= now
                num_loaded += len(now.difference(before.experts(index)))
            if call.kind is ShardKind.SLICE:  # free slots may get copies of heads, which are of no use yet
                assert num_loaded <= len(placement.seat(lost).experts(index))


def test_what_is_refused_and_what_others_do():
    with pytest.raises(ConfigError, match="--shadow-experts 7: with 8 shards per layer on 3 workers"):
        place(calls_of(), 3, shadows=7)
    assert [largest_power_of_two(num) for num in (1, 2, 3, 4, 7, 8, 9)] == [1, 2, 2, 4, 4, 8, 8]
