"""The first part of a repair: everything that can have a place has one, and nothing moves that need not."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from everserve.plan.cover import cover
from everserve.plan.layer_plan import Room
from everserve.plan.placement import place_experts
from everserve.plan.repair import repair, replan
from everserve.tables.calls import expert_calls
from everserve.tables.ids import Rank
from everserve.tables.placement import Placement, SeatExperts
from tests.support.examples import examples

NUM_LAYERS = 2


def survivors_of(before: Placement, lost: set[int]) -> Placement:
    seats = tuple(seat for seat in before.seats if seat.rank not in lost)
    return Placement(calls=before.calls, seats=seats)


@examples(60)
@given(data=st.data(), num_seats=st.integers(2, 6), num_experts=st.integers(6, 16))
def test_what_was_lost_has_a_place_and_the_rest_stays(data, num_seats, num_experts):
    num_shadows = data.draw(st.integers(0, num_experts - num_experts // num_seats))
    lost = data.draw(st.sets(st.integers(0, num_seats - 1), min_size=1, max_size=num_seats - 1))
    loads = {i: tuple(data.draw(st.lists(st.floats(0, 9), min_size=num_experts, max_size=num_experts))) for i in (0, 1)}
    ranks = [Rank(i) for i in range(num_seats)]
    before = survivors_of(place_experts(num_experts, range(NUM_LAYERS), ranks, num_shadows), lost)
    num_slots = -(-num_experts // num_seats) + num_shadows
    rooms = [Room(rank, rank, num_slots) for rank in ranks if rank not in lost]
    after = cover(before, rooms, loads)
    for index in range(NUM_LAYERS):
        copies = Counter(expert for seat in after.seats for expert in seat.experts(index))
        assert len(copies) == min(num_experts, num_slots * len(rooms)), "as many have a place as there are slots"
        homeless = [loads[index][expert] for expert in range(num_experts) if not copies[expert]]
        placed = {expert for seat in before.seats for expert in seat.experts(index)}
        taken = [loads[index][expert] for expert in copies if expert not in placed]
        assert max(homeless, default=0.0) <= min(taken, default=9.0), "the most loaded first"
        for seat in after.seats:
            there = before.seat(seat.rank)
            assert there is not None and set(there.active[index]) <= set(seat.active[index]), "what serves goes on"
            gone = set(there.shadows[index]) - set(seat.shadows[index])
            assert len(seat.experts(index)) == len(set(seat.experts(index))) <= num_slots
            assert len(gone) <= len(set(seat.active[index]) - set(there.active[index])), "each made room for one"
    # The rest of the plan finds everything where it is: what was covered is not moved again.
    whole = replan(after, rooms, loads)
    for index in range(NUM_LAYERS):
        assert {e for s in whole.seats for e in s.experts(index)} == {e for s in after.seats for e in s.experts(index)}
    if not num_shadows:  # what comes last may move some, so that all workers have as much to do over all layers
        kept = repair(after, rooms, loads)
        assert all(set(a.experts(0)) == set(b.experts(0)) for a, b in zip(after.seats, kept.seats, strict=True))


def test_an_expert_that_is_served_twice_gives_a_place_to_one_that_has_none():
    """Streams wait for a place; what is served in two places only goes a little faster. With the plan that follows it
    would be the same."""
    seats = tuple(
        SeatExperts(rank=Rank(rank), active=(active,), shadows=((),)) for rank, active in enumerate([(0, 1), (0, 2)])
    )
    before = Placement(calls=expert_calls(4, [0]), seats=seats)
    rooms = [Room(Rank(rank), rank, num_slots=2) for rank in (0, 1)]
    after = cover(before, rooms, {0: (9.0, 1.0, 1.0, 2.0)})
    assert sorted(expert for seat in after.seats for expert in seat.active[0]) == [0, 1, 2, 3]
    assert {e for seat in replan(after, rooms).seats for e in seat.experts(0)} == {0, 1, 2, 3}
