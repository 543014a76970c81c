"""After any losses and returns work is even again, by few moves: the planners that production uses, on many shapes."""

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everserve.plan.evening import even
from everserve.plan.repair import Room, repair, replan
from everserve.plan.shards import Spread, place_shards
from everserve.tables.calls import Call, ShardKind
from everserve.tables.ids import Rank
from everserve.tables.placement import Placement

LAYERS = 6
# Heads and shards of the FFN: Llama-70B, Mixtral (experts in two slices), one with few heads and many
# experts, and one with whole experts.
SHAPES = {
    "llama": ((ShardKind.HEAD, 8), (ShardKind.SLICE, 8)),
    "mixtral": ((ShardKind.HEAD, 8), (ShardKind.EXPERT, 16)),
    "qwen3": ((ShardKind.HEAD, 4), (ShardKind.EXPERT, 40)),
    "experts": ((ShardKind.EXPERT, 40),),
}


class Instance:
    """Workers that come and go, and the placement that repair and evening make of it. With dealt shards, as on CPUs,
    each has a slot for every head; without, as on GPUs, there is room for what the lost ones had."""

    def __init__(self, shape: str, num: int, *, is_dealt: bool, num_lost: int = 2) -> None:
        kinds = SHAPES[shape]
        calls = [Call(layer=layer, kind=kind, num_shards=n) for layer in range(LAYERS) for kind, n in kinds]
        self.ranks = [Rank(i) for i in range(num)]
        spread = Spread.DEALT if is_dealt else Spread.CYCLIC
        self.placement = place_shards(calls, self.ranks, None if is_dealt else 0, spread)
        fewest = max(num - num_lost, 1)
        self.slots = tuple(
            call.num_shards
            if call.kind is ShardKind.HEAD and is_dealt
            else min(max(slots, -(-call.num_shards // fewest)), call.num_shards)
            for call, slots in zip(calls, self.placement.slots_by_call, strict=True)
        )
        self.placement = repair(self.placement, self.rooms(self.ranks))  # makes copies where slots are free

    def rooms(self, ranks: Iterable[Rank]) -> list[Room]:
        return [Room(rank, int(rank), max(self.slots), self.slots) for rank in ranks]

    def go_on_with(self, ranks: Iterable[Rank]) -> tuple[Placement, Placement]:
        """What repair makes of it, and what it is in the end."""
        rooms = self.rooms(sorted(ranks))
        repaired = repair(self.placement, rooms)
        self.placement = even(repaired, rooms)
        check(self.placement, self.slots)
        is_at_its_end = even(self.placement, rooms) == self.placement
        assert is_at_its_end
        return repaired, self.placement


def check(after: Placement, slots: tuple[int, ...]) -> None:
    """Every shard is served, and slots are enough."""
    for index, call in enumerate(after.calls):
        active = [shard for seat in after.seats for shard in seat.active[index]]
        assert set(active) == set(range(call.num_shards))
        for seat in after.seats:
            assert len(seat.experts(index)) <= slots[index]


def work(placement: Placement, calls: Iterable[int]) -> dict[Rank, float]:
    """Of each worker, if homes deal rows evenly among active places."""
    done = {seat.rank: 0.0 for seat in placement.seats}
    for index in calls:
        serving = [seat.rank for seat in placement.seats for _ in seat.active[index]]
        shards = [shard for seat in placement.seats for shard in seat.active[index]]
        for rank, shard in zip(serving, shards, strict=True):
            done[rank] += 1 / shards.count(shard)
    return done


def assert_even(placement: Placement) -> None:
    """Of each kind the busiest worker has at most 5 % or one shard more than the mean."""
    for kind in {call.kind for call in placement.calls}:
        calls = [index for index, call in enumerate(placement.calls) if call.kind is kind]
        done = work(placement, calls)
        mean = sum(done.values()) / len(done)
        assert max(done.values()) <= max(1.05 * mean, mean + 1), (kind, done)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("is_dealt", [True, False], ids=["dealt", "cyclic"])
@pytest.mark.parametrize("num", [2, 3, 4, 5, 7, 8, 11])
def test_each_loss_and_return(shape: str, num: int, is_dealt: bool) -> None:
    """One worker is lost, another one, and both return."""
    losses = [(0, num - 1), (1, num // 2)] if num > 2 else [(0, 0), (1, 1)]
    for first, second in losses:
        instance = Instance(shape, num, is_dealt=is_dealt)
        alive = set(instance.ranks)
        for lost in (first, second):
            if len(alive) > 1:
                alive.discard(Rank(lost))
                assert_even(instance.go_on_with(alive)[1])
        for returned in (first, second):
            alive.add(Rank(returned))
            assert_even(instance.go_on_with(alive)[1])


@given(
    st.sampled_from(sorted(SHAPES)),
    st.integers(2, 9),
    st.booleans(),
    st.lists(st.integers(0, 8), min_size=1, max_size=6),
)
@settings(deadline=None, max_examples=15)
def test_any_order(shape: str, num: int, is_dealt: bool, changes: list[int]) -> None:
    instance = Instance(shape, num, is_dealt=is_dealt)
    alive = set(instance.ranks)
    for change in changes:
        alive ^= {Rank(change % num)}
        if len(alive) < max(num - 2, 1):
            alive |= {Rank(change % num)}
        assert_even(instance.go_on_with(alive)[1])


def test_repair_alone_is_not_even() -> None:
    """What this planner is for: one survivor of seven would serve twice what others do."""
    instance = Instance("llama", 8, is_dealt=False, num_lost=1)
    repaired, evened = instance.go_on_with(instance.ranks[:1] + instance.ranks[2:])
    slices = [index for index, call in enumerate(repaired.calls) if call.kind is ShardKind.SLICE]
    done = work(repaired, slices)
    assert max(done.values()) > 1.3 * sum(done.values()) / len(done)
    assert_even(evened)


def test_a_ring_of_copies_is_evened_without_a_fill() -> None:
    """Each worker has the copies of the next one. What a lost worker served is handed on around the ring."""
    calls = [Call(layer=layer, kind=ShardKind.SLICE, num_shards=8) for layer in range(14)]
    ranks = [Rank(i) for i in range(8)]
    placement = place_shards(calls, ranks, 1, Spread.CONTIGUOUS)
    rooms = [Room(rank, int(rank), 2) for rank in ranks if rank != 1]
    covered = repair(placement, rooms)
    evened = even(covered, rooms)
    assert max(work(evened, range(14)).values()) <= 17
    fills = [
        set(after.experts(index)) - set(before.experts(index))
        for before, after in zip(covered.seats, evened.seats, strict=True)
        for index in range(14)
    ]
    assert sum(map(len, fills)) == 0


def test_loads_count() -> None:
    """A busy expert and three idle ones on one worker, none on the other: two are left with one each."""
    calls = [Call(layer=0, num_shards=4)]
    placement = place_shards(calls, [Rank(0)], 0, Spread.CYCLIC)
    rooms = [Room(Rank(0), 0, 4), Room(Rank(1), 1, 4)]
    placement = replan(placement, rooms[:1])
    both = Placement(calls=placement.calls, seats=(*placement.seats, replan(placement, rooms).seats[1]))
    assert both.seats[1].rank == 1
    evened = even(replan(placement, rooms), rooms, {0: (9.0, 3.0, 3.0, 3.0)})
    shares = {seat.rank: sum((9.0, 3.0, 3.0, 3.0)[shard] for shard in seat.active[0]) for seat in evened.seats}
    assert shares == {0: 9.0, 1: 9.0}
