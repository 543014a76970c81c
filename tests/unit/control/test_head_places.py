"""Places of heads: no copies unless asked for, and no other places while the worker that has the KV may come back."""

import dataclasses
from collections import Counter

import msgspec
import pytest

from everserve.control.decide.effects import Provision
from everserve.control.decide.inputs import (
    Died,
    Said,
    Started,
    Tick,
)
from everserve.control.decide.machine import Machine, Policy
from everserve.control.decide.scaling import Refused, scaled
from everserve.control.hold.design import place
from everserve.engine.blocks import NO_BLOCKS_LEFT, BlockPool
from everserve.engine.undo import UndoLog
from everserve.errors import ConfigError
from everserve.model.config import ModelConfig
from everserve.plan.repair import Room, replan
from everserve.plan.shards import Spread, place_shards
from everserve.tables.block_ranges import block_range_of
from everserve.tables.calls import Call, ShardKind
from everserve.tables.goal import Capacity
from everserve.tables.ids import Rank
from everserve.tables.placement import Placement
from everserve.wire.messages import Hello, Ready, SlotsReported
from everserve.wire.operators import FaultRequest, ScaleRequest
from tests.support.decisions import ask
from tests.support.held_slots import goal_of, held
from tests.support.models import model_directory

RANKS = [Rank(rank) for rank in (3, 4, 5)]
CALLS = [
    Call(layer=layer, kind=kind, num_shards=num)
    for layer in range(4)
    for kind, num in ((ShardKind.HEAD, 8), (ShardKind.SLICE, 8))
]
PLACEMENT = place_shards(CALLS, RANKS, None, Spread.DEALT)


def of_heads(lists) -> list[tuple[int, ...]]:
    return [lists[i] for i, call in enumerate(CALLS) if call.kind is ShardKind.HEAD]


def test_heads_have_no_copies_and_are_spread_evenly():
    assert all(not any(of_heads(seat.shadows)) for seat in PLACEMENT.seats)
    assert any(any(shadows) for seat in PLACEMENT.seats for shadows in seat.shadows), "slices have"
    for seat in PLACEMENT.seats:
        assert {len(one) for one in of_heads(seat.active)} == {2 + 8 % 3}, "as many on each, and the dealt ones"


def machine(placement: Placement = PLACEMENT, heads_stay: bool = False) -> Machine:
    slots = placement.slots_by_call
    capacity = Capacity(
        max_workers=6, slots_per_layer=max(slots), slots_by_call=slots, devices=3, heads_stay=heads_stay
    )
    goal = goal_of([0, 1, 2], placement)
    seats = tuple(msgspec.structs.replace(seat, device=seat.rank % 3) for seat in goal.seats)
    found = Machine(msgspec.structs.replace(goal, seats=seats), Policy(detect_s=0.1), capacity)
    found.start(100.0)
    for rank in range(6):
        for event in (Started(rank, 1, 1000 + rank), Said(rank, 1, Hello())):
            found.handle(event, 100.0)
        if rank >= 3:
            found.handle(Said(rank, 1, SlotsReported(slots=held(placement, rank, slots))), 100.0)
        found.handle(Said(rank, 1, Ready()), 100.0)
    assert found.was_all_ready
    return found


def test_heads_of_a_dead_worker_wait_for_its_successor():
    running = machine()
    before = running.goal.placement
    decision = running.handle(Died(4, 1), 101.0)
    assert [effect for effect in decision.effects if isinstance(effect, Provision)] == [Provision(4, 2)]
    assert running.goal.placement == before and not running.goal.gone
    assert any("no place" in line for line in running.violations), "heads that only it has"


class TestWhereKvCannotBeBroughtAlong:
    """As on a GPU: no copies of anything, and in each layer two workers have a slot more than the third has heads."""

    def places(self, running: Machine, kind: ShardKind) -> dict[Rank, list[tuple[int, ...]]]:
        """What workers other than the dead one shall hold."""
        found = running.goal.placement
        calls = [i for i, call in enumerate(CALLS) if call.kind is kind]
        return {seat.rank: [seat.experts(i) for i in calls] for seat in found.seats if seat.rank != 4}

    def test_heads_wait_where_slices_of_the_same_worker_do_not(self):
        running = machine(place_shards(CALLS, RANKS, 0, Spread.CYCLIC), heads_stay=True)
        heads, slices = self.places(running, ShardKind.HEAD), self.places(running, ShardKind.SLICE)
        running.handle(Died(4, 1), 101.0)
        assert self.places(running, ShardKind.SLICE) != slices, "those that there is a free slot for"
        assert self.places(running, ShardKind.HEAD) == heads
        running.handle(Tick(), 102.0)  # the whole plan
        running.handle(Started(4, 2, 2004), 102.0)
        running.handle(Died(4, 2), 102.5)
        assert self.places(running, ShardKind.HEAD) == heads, "its memory is still there"

    def test_but_not_for_ever(self):
        running = machine(place_shards(CALLS, RANKS, 0, Spread.CYCLIC), heads_stay=True)
        heads = self.places(running, ShardKind.HEAD)
        running.handle(Died(4, 1), 101.0)
        running.handle(Tick(), 130.0)
        assert self.places(running, ShardKind.HEAD) == heads
        running.handle(Tick(), 131.1)
        running.handle(Tick(), 133.0)
        assert self.places(running, ShardKind.HEAD) != heads
        assert any("no place" in line for line in running.violations), "there is not a slot for each"

    def test_memory_that_is_lost_is_not_waited_for(self):
        running = machine(place_shards(CALLS, RANKS, 0, Spread.CYCLIC), heads_stay=True)
        heads = self.places(running, ShardKind.HEAD)
        running.handle(ask(FaultRequest(device=1, gone=True)), 101.0)
        assert self.places(running, ShardKind.HEAD) != heads


@pytest.mark.parametrize("copies", [1, 2])
def test_heads_with_further_places(copies):
    """They are on other workers, as many of each; and a death leaves no head without a place."""
    placement = place_shards(CALLS, RANKS, None, Spread.DEALT, copies)
    num_places = Counter((i, head) for seat in placement.seats for i in range(len(CALLS)) for head in seat.experts(i))
    assert min(num_places.values()) == 1 + copies
    slots = tuple(8 if i % 2 == 0 else num for i, num in enumerate(placement.slots_by_call))  # of heads for all
    assert replan(placement, [Room(rank, rank, 8, slots) for rank in RANKS]) == placement
    running = machine(placement)
    running.handle(Died(4, 1), 101.0)
    assert running.goal.placement == placement and not running.violations


def test_more_places_than_devices():
    with pytest.raises(ConfigError, match="--shadow-shards 3: on 3 devices a shard has at most 2 further places"):
        place_shards(CALLS, RANKS, None, Spread.DEALT, 3)


def test_the_number_of_workers_is_fixed():
    with pytest.raises(Refused, match="is fixed"):
        scaled(goal_of([0, 1, 2], PLACEMENT), ask(ScaleRequest(attention=4)), Capacity(max_workers=8), ())


def test_homes_have_different_blocks():
    ranges = [block_range_of(Rank(home), 6) for home in (0, 1, 2)]
    pools = [BlockPool(num, 4, UndoLog(), first) for first, num in ranges]
    taken = [[pool.allocate() for _ in range(7)] for pool in pools]
    assert [blocks[:-1] for blocks in taken] == [[*range(6)], [*range(6, 12)], [*range(12, 18)]]
    assert all(blocks[-1] == NO_BLOCKS_LEFT for blocks in taken)
    for block in taken[2][:-1]:
        pools[2].release(block)
    assert sorted(pools[2].free_list()) == [*range(12, 18)] and pools[2].num_free == 6


def test_calls_of_a_model_with_divided_heads():
    plain = ModelConfig.from_directory(str(model_directory("qwen3-moe")))
    divided = dataclasses.replace(plain, tensor_parallel=True, divides_heads=True)
    assert [call.kind for call in divided.calls] == [ShardKind.HEAD, ShardKind.EXPERT] * plain.num_layers
    assert divided.call_numbers == (0, 1, 2, 3) and divided.numbers_of(ShardKind.HEAD) == {0: 0, 1: 2}
    assert plain.call_numbers == plain.call_layers and not plain.numbers_of(ShardKind.HEAD)
    found = place(divided, RANKS, None)
    assert found.calls == divided.calls
