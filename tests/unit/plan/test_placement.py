"""Where experts live and how routes lead to them: counts, spread, and what is impossible."""

from collections import Counter
from itertools import combinations, product

import msgspec
import pytest

from everserve.errors import ConfigError
from everserve.plan.placement import place_experts, survivable_deaths
from everserve.plan.routing import make_routes
from everserve.tables.calls import expert_calls
from everserve.tables.ids import Epoch, Rank
from everserve.tables.placement import Placement, SeatExperts
from everserve.tables.slots import EMPTY
from tests.support.held_slots import have, held

LAYERS = (1, 3, 4)


def ranks(num_seats: int) -> list[Rank]:
    return [Rank(10 + seat) for seat in range(num_seats)]


def place(num_experts: int, num_seats: int, shadow_experts: int | None) -> Placement:
    return place_experts(num_experts, LAYERS, ranks(num_seats), shadow_experts)


def routes_of(epoch: int, placement: Placement, ready, leaving=()):
    return make_routes(Epoch(epoch), placement, have(placement), ready, leaving)


def active(seat: SeatExperts, layer: int = 0) -> list[int]:
    return list(seat.active[layer])


def shadows(seat: SeatExperts, layer: int = 0) -> list[int]:
    return list(seat.shadows[layer])


def default_shadows(num_experts: int, num_seats: int) -> int:
    return -(-num_experts // num_seats) if num_seats > 1 else 0


def spread(counts: Counter, keys) -> int:
    values = [counts[key] for key in keys]
    return max(values) - min(values) if values else 0


SHAPES = [
    (num_experts, num_seats, shadow_experts)
    for num_experts in [*range(1, 18), 24, 60, 64]
    for num_seats in range(1, min(num_experts, 8) + 1)
    for shadow_experts in {None, 0, 1, 3, num_experts // 2, num_experts - num_experts // num_seats}
    if shadow_experts is None or shadow_experts <= num_experts - num_experts // num_seats
]


def test_every_expert_is_active_once_and_seats_have_even_shares():
    for num_experts, num_seats, shadow_experts in SHAPES:
        placement = place(num_experts, num_seats, shadow_experts)
        assert [seat.rank for seat in placement.seats] == ranks(num_seats)
        for layer in range(len(LAYERS)):
            shares = [active(seat, layer) for seat in placement.seats]
            assert sorted(expert for share in shares for expert in share) == list(range(num_experts))
            assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_shadows_give_as_many_copies_as_the_slots_allow():
    for num_experts, num_seats, shadow_experts in SHAPES:
        placement = place(num_experts, num_seats, shadow_experts)
        copies = Counter(expert for seat in placement.seats for expert in seat.experts(0))
        num_slots = shadow_experts if shadow_experts is not None else default_shadows(num_experts, num_seats)
        assert all(len(shadows(seat)) <= num_slots for seat in placement.seats)
        most = min(num_seats, 1 + num_slots * num_seats // num_experts)
        assert min(copies.values()) == most, (num_experts, num_seats, shadow_experts)
        assert max(copies.values()) - min(copies.values()) <= 1, "a third copy before everybody had a second"
        assert survivable_deaths(placement) == most - 1


def test_the_default_is_the_fewest_shadows_that_survive_any_one_death():
    for num_experts, num_seats, shadow_experts in SHAPES:
        if shadow_experts is None and num_seats > 1:
            placement = place(num_experts, num_seats, None)
            num_shadows = max(len(shadows(seat)) for seat in placement.seats)
            assert num_shadows == default_shadows(num_experts, num_seats)
            assert survivable_deaths(placement) >= 1
            assert survivable_deaths(place(num_experts, num_seats, num_shadows - 1)) == 0


def test_the_shadows_of_a_seat_are_spread_over_the_others():
    for num_experts, num_seats, shadow_experts in SHAPES:
        placement = place(num_experts, num_seats, shadow_experts)
        owner = {expert: seat.rank for seat in placement.seats for expert in active(seat)}
        held = Counter((owner[expert], seat.rank) for seat in placement.seats for expert in shadows(seat))
        for rank in ranks(num_seats):
            assert held[rank, rank] == 0, "a shadow beside its own active place helps nobody"
            others = [(rank, other) for other in ranks(num_seats) if other != rank]
            allowed = 1 if num_experts % num_seats == 0 else 2
            assert spread(held, others) <= allowed, (num_experts, num_seats, shadow_experts)


@pytest.mark.parametrize(
    ("num_experts", "num_seats", "shadow_experts", "words"),
    [
        (4, 5, None, "--expert-workers 5: the model has 4 experts per layer, so at most 4"),
        (8, 2, 5, "--shadow-experts 5: with 8 experts on 2 expert workers it must be between 0 and 4"),
        (9, 2, 6, "between 0 and 5"),
        (8, 1, 1, "between 0 and 0"),
        (8, 2, -1, "between 0 and 4"),
        (0, 1, None, "this model has no experts"),
    ],
)
def test_impossible_input_is_one_clear_line(num_experts, num_seats, shadow_experts, words):
    with pytest.raises(ConfigError, match=words) as error:
        place(num_experts, num_seats, shadow_experts)
    assert "\n" not in str(error.value)


def test_a_model_without_moe_layers_has_no_expert_workers():
    with pytest.raises(ConfigError, match="no experts"):
        place_experts(8, [], ranks(2), None)


# -- routes --------------------------------------------------------------------------------------


def candidates(routes, expert: int, layer: int = 0) -> list[Rank]:
    return [rank for rank, _ in routes.candidates(layer, expert)]


def test_routes_are_the_active_place_then_all_shadows_of_ready_workers():
    for num_experts, num_seats, shadow_experts in [(8, 4, None), (10, 4, 5), (7, 3, 1), (6, 6, 5), (5, 1, None)]:
        placement = place(num_experts, num_seats, shadow_experts)
        for num_dead in range(num_seats + 1):
            for dead in combinations(ranks(num_seats), num_dead):
                ready = set(ranks(num_seats)) - set(dead)
                routes = routes_of(7, placement, ready)
                assert (routes.epoch, routes.num_layers, routes.num_experts) == (7, len(LAYERS), num_experts)
                for layer in range(len(LAYERS)):
                    for expert in range(num_experts):
                        check_candidates(placement, routes, ready, layer, expert)


def check_candidates(placement: Placement, routes, ready: set[Rank], layer: int, expert: int) -> None:
    found = routes.candidates(layer, expert)
    places = {
        (seat.rank, held(placement, seat.rank).experts[layer].index(expert))
        for seat in placement.seats
        if seat.rank in ready and expert in seat.experts(layer)
    }
    assert set(found) == places
    assert len(found) == len(places)
    home = next(seat for seat in placement.seats if expert in active(seat, layer))
    if home.rank in ready:
        assert found[0] == (home.rank, active(home, layer).index(expert))


def test_workers_that_leave_have_only_what_nobody_else_has():
    for num_experts, num_seats, shadow_experts in [(8, 4, None), (10, 4, 5), (7, 3, 1), (5, 1, None)]:
        placement = place(num_experts, num_seats, shadow_experts)
        for states in product(("ready", "leaving", "gone"), repeat=num_seats):
            ready = {rank for rank, state in zip(ranks(num_seats), states, strict=True) if state == "ready"}
            leaving = {rank for rank, state in zip(ranks(num_seats), states, strict=True) if state == "leaving"}
            routes = routes_of(7, placement, ready, leaving)
            by_ready, by_leaving = (routes_of(7, placement, some) for some in (ready, leaving))
            for expert in range(num_experts):
                expected = by_ready.candidates(0, expert) or by_leaving.candidates(0, expert)
                assert routes.candidates(0, expert) == expected


def test_layers_need_not_look_alike():
    seats = (
        SeatExperts(rank=Rank(4), active=((0,), (1,)), shadows=((1,), (0,))),
        SeatExperts(rank=Rank(5), active=((1,), (0,)), shadows=((), (1,))),
    )
    placement = Placement(calls=expert_calls(2, (0, 1)), seats=seats)
    routes = routes_of(1, placement, [Rank(4), Rank(5)])
    assert [[candidates(routes, expert, layer) for expert in (0, 1)] for layer in (0, 1)] == [
        [[4], [5, 4]],
        [[5, 4], [4, 5]],
    ]


@pytest.mark.parametrize(
    ("num_experts", "num_seats", "shadow_experts", "allowed"),
    [(32, 4, None, 1), (30, 6, None, 1), (64, 8, 24, 1), (60, 6, 20, 2), (61, 7, 20, 2)],
)
def test_a_death_spreads_its_load(num_experts, num_seats, shadow_experts, allowed):
    """Before anybody publishes (the second candidates) and after (the first ones), evenly both times."""
    placement = place(num_experts, num_seats, shadow_experts)
    everybody = routes_of(1, placement, ranks(num_seats))
    for dead in ranks(num_seats):
        others = [rank for rank in ranks(num_seats) if rank != dead]
        heirs = Counter(
            candidates(everybody, expert)[1]
            for expert in range(num_experts)
            if candidates(everybody, expert)[0] == dead
        )
        assert spread(heirs, others) <= allowed
        after = routes_of(2, placement, others)
        assert spread(Counter(candidates(after, expert)[0] for expert in range(num_experts)), others) <= allowed


def test_routes_follow_what_is_held_not_what_is_planned():
    placement = place(4, 2, None)  # everything on both
    first, second = ranks(2)
    moved = msgspec.structs.replace(held(placement, second), experts=((EMPTY, 2, EMPTY, 0), *[(0, 1, 2, 3)] * 2))
    routes = make_routes(Epoch(1), placement, {first: held(placement, first), second: moved}, [first, second])
    assert routes.candidates(0, 3) == ((first, 3),), "planned for the second one, which does not hold it"
    assert routes.candidates(0, 2) == ((second, 1), (first, 2)), "still the active place, in another slot"
    assert routes.candidates(0, 0) == ((first, 0), (second, 3))
    elsewhere = make_routes(Epoch(1), placement, {Rank(3): moved}, [Rank(3)])
    assert elsewhere.candidates(0, 0) == ((Rank(3), 3),), "held by a worker that the plan does not know"
