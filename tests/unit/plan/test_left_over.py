"""Copies that were not asked for: which of them plans keep, and when slots that hold others are cleared."""

from collections import Counter

import pytest
from msgspec.structs import replace

from everserve.plan.moves import left_over
from everserve.plan.placement import place_experts
from everserve.plan.repair import Room, replan
from everserve.tables.ids import Rank
from everserve.tables.placement import Placement, SeatExperts
from everserve.tables.slots import EMPTY, HeldSlots, Place

ONE, TWO, THREE = RANKS = Rank(1), Rank(2), Rank(3)


def places(placement: Placement) -> Counter[int]:
    return Counter(expert for seat in placement.seats for expert in seat.experts(0))


def rooms(placement: Placement, ranks=RANKS) -> list[Room]:
    return [Room(rank, rank, placement.num_slots) for rank in ranks]


def with_seat(placement: Placement, rank: Rank, active: tuple[int, ...], shadows: tuple[int, ...]) -> Placement:
    seat = SeatExperts(rank=rank, active=(active,), shadows=(shadows,))
    return replace(placement, seats=tuple(seat if one.rank == rank else one for one in placement.seats))


def test_a_copy_in_a_slot_that_happens_to_be_free_is_not_kept():
    """Of 64 experts three workers have 22, 21 and 21: there are two slots more."""
    first = place_experts(64, (0,), RANKS, 0)
    second = first.seat(TWO)
    copied = with_seat(first, TWO, (*second.active[0], 0), ())
    assert places(copied)[0] == 2
    plan = replan(copied, rooms(first))
    assert places(plan) == Counter(range(64))


@pytest.mark.parametrize("num_shadows", [1, 4, 10])
def test_copies_that_were_asked_for_are_there_again_after_a_device_is(num_shadows):
    """Also where there are not enough for every expert."""
    first = place_experts(64, (0,), RANKS, num_shadows)
    two = replan(first, rooms(first, RANKS[:2]))
    back = replan(replace(two, seats=(*two.seats, SeatExperts(rank=THREE, active=((),), shadows=((),)))), rooms(first))
    assert places(back).total() == places(first).total() == 64 + 3 * num_shadows
    assert min(places(back).values()) == min(places(first).values())


def test_nothing_is_dropped_while_a_worker_is_away():
    """Nor later: there are fewer slots then than were asked for."""
    first = place_experts(64, (0,), [Rank(rank) for rank in range(8)], 8)
    left = [Rank(rank) for rank in range(7)]
    there = replace(first, seats=first.seats[:7])
    plan = replan(there, rooms(first, left))
    assert places(plan).total() == places(there).total() == 7 * 16


def test_the_copy_with_the_least_to_do_goes():
    """0 to 3, 4 to 7, and a third worker has four copies. One shadow for each of them is three."""
    first = place_experts(8, (0,), RANKS[:2], 0)
    seats = (*first.seats, SeatExperts(rank=THREE, active=((),), shadows=((0, 2, 4, 6),)))
    copied = replace(first, seats=seats, num_shadows=1)
    loads = {0: (9.0, 1.0, 5.0, 1.0, 2.0, 1.0, 5.0, 1.0)}
    plan = places(replan(copied, rooms(first), loads))
    assert sorted(expert for expert, number in plan.items() if number > 1) == [0, 2, 6]
    none = places(replan(replace(copied, num_shadows=0), rooms(first), loads))
    assert none == Counter(range(8)), "nothing was asked for"


def held(*experts: int) -> HeldSlots:
    return HeldSlots(experts=(experts,), generations=((0,) * len(experts),))


PLACEMENT = place_experts(6, (0,), RANKS, 0)  # 0 1 | 2 3 | 4 5


def test_what_is_left_over_is_cleared_when_all_its_places_are_there():
    have = {ONE: held(0, 1, 4), TWO: held(2, 3, EMPTY), THREE: held(4, 5, EMPTY)}
    assert left_over(PLACEMENT, have, RANKS, [0]) == {ONE: {Place(0, 2)}}
    assert left_over(PLACEMENT, have, RANKS, []) == {}
    assert left_over(PLACEMENT, have, [ONE, TWO], [0]) == {}, "its worker is away"
    have[THREE] = held(EMPTY, 5, EMPTY)
    assert left_over(PLACEMENT, have, RANKS, [0]) == {}, "it is the last place"


def test_what_has_no_place_in_the_plan_stays():
    """There are fewer slots than experts; and a worker without a plan is about to leave."""
    few = replace(PLACEMENT, seats=PLACEMENT.seats[:2])
    have = {ONE: held(0, 1, 4), TWO: held(2, 3, EMPTY), THREE: held(0, 1, 4)}
    assert left_over(few, have, RANKS, [0]) == {}
