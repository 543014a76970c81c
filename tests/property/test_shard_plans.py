"""Planners over calls of several kinds and widths, while workers come and go: everything has a place, nothing is in a
slot that does not exist, and what is held reaches what is planned."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from everserve.plan.layer_plan import Room
from everserve.plan.moves import given_up, next_moves
from everserve.plan.placement import survivable_deaths
from everserve.plan.repair import replan
from everserve.plan.routing import make_routes
from everserve.plan.shards import Spread, place_shards
from everserve.tables.calls import Call, ShardKind
from everserve.tables.ids import Epoch, Rank
from everserve.tables.members import Members
from everserve.tables.placement import Placement
from everserve.tables.slots import EMPTY, HeldSlots
from everserve.tables.validity import conditions
from tests.support.examples import examples

Held = dict[Rank, list[list[int]]]

steps = st.lists(st.integers(0, 5), min_size=1, max_size=4)  # whose turn it is to leave, or to come back
calls = st.lists(
    st.builds(
        lambda layer, kind, num: Call(layer=layer, kind=kind, num_shards=num),
        st.integers(0, 3),
        st.sampled_from(ShardKind),
        st.integers(2, 13),
    ),
    min_size=1,
    max_size=5,
)


def reported(held: Held) -> dict[Rank, HeldSlots]:
    return {
        rank: HeldSlots(experts=tuple(map(tuple, layers)), generations=tuple((0,) * len(slots) for slots in layers))
        for rank, layers in held.items()
    }


def carry_out(placement: Placement, held: Held, ranks: list[Rank]) -> None:
    """Fill by fill, as workers would."""
    for _ in range(1000):
        have = reported({rank: held[rank] for rank in ranks})
        moves = next_moves(placement, have, ranks, ranks, given_up(placement, have, ranks), lambda rank, place: True)
        if not moves:
            return
        for move in moves:
            slots = held[move.rank][move.fill.call_index]
            assert move.fill.expert < placement.calls[move.fill.call_index].num_shards
            slots[move.fill.slot] = move.fill.expert
    raise AssertionError("moves that never end")


@examples(10)
@given(calls=calls, num=st.integers(2, 6), spread=st.sampled_from(Spread), steps=steps, copies=st.integers(0, 2))
def test_workers_come_and_go(calls: list[Call], num: int, spread: Spread, steps: list[int], copies: int) -> None:
    """`copies`: further places that every shard has at the start, and heads whenever there are enough workers."""
    copies = min(copies, num - 1)
    ranks = [Rank(1 + i) for i in range(num)]
    placement = place_shards(calls, ranks, None, spread, copies)
    assert survivable_deaths(placement) >= copies
    widths = zip(calls, placement.slots_by_call, strict=True)
    slots = tuple(call.num_shards if call.kind is ShardKind.HEAD else num for call, num in widths)
    held: Held = {seat.rank: [list(layer) for layer in seat.slots(slots).experts] for seat in placement.seats}
    there = [*ranks]
    for step in steps:
        rank = ranks[step % num]
        if rank in there and len(there) > 1:
            there.remove(rank)
        elif rank not in there:
            there.append(rank)
            held[rank] = [[EMPTY] * num_slots for num_slots in slots]
        rooms = [Room(rank, rank, max(slots), slots) for rank in sorted(there)]
        placement = replan(placement, rooms)
        for seat in placement.seats:
            assert all(len(seat.experts(i)) <= num_slots for i, num_slots in enumerate(slots))
        carry_out(placement, held, there)
        have = reported({rank: held[rank] for rank in there})
        routes = make_routes(Epoch(step + 2), placement, have, there)
        for index, call in enumerate(calls):
            room = len(there) * slots[index] - call.num_shards
            placed = sum(bool(routes.candidates(index, shard)) for shard in range(call.num_shards))
            assert placed == call.num_shards or room < 0, (index, call, placed)
            if call.kind is ShardKind.HEAD:
                dealt = call.num_shards - placement.num_dealt(index, len(there))
                planned = Counter(shard for seat in placement.seats for shard in seat.experts(index) if shard < dealt)
                assert set(planned.values()) <= {min(1 + copies, len(there))}, (planned, there)
        found = conditions(Members(epoch=routes.epoch, goal=1, workers=()), placement, have, routes, {})
        assert not [said for said in found.coverage if "no place" not in said], found.coverage
