"""The contract between the tables: each way to break it has its sentence, and only that one."""

import msgspec
import numpy as np
import pytest

from everserve.plan.placement import place_experts
from everserve.plan.routing import make_routes
from everserve.plan.shards import Spread, place_shards
from everserve.tables.calls import Call, ShardKind
from everserve.tables.ids import Epoch, Incarnation, Rank, Role
from everserve.tables.members import Members, Worker, WorkerState
from everserve.tables.validity import conditions, degraded
from tests.support.held_slots import have, held

LAYERS = (2, 3, 4, 6)
PLACEMENT = place_experts(12, LAYERS, [Rank(1), Rank(2), Rank(3)], None)  # four active and four shadows each
EXPERTS = (Rank(1), Rank(2), Rank(3))


def worker(rank: int, *roles: Role, state: WorkerState = WorkerState.READY, note: str = "") -> Worker:
    return Worker(rank=Rank(rank), incarnation=Incarnation(1), pid=100 + rank, roles=roles, state=state, note=note)


def members(*changed: Worker, epoch: int = 5) -> Members:
    """Attention in seat 0, experts in seats 1 to 3, all ready but those given."""
    workers = {0: worker(0, Role.ATTENTION), **{rank: worker(rank, Role.EXPERT) for rank in EXPERTS}}
    workers.update({one.rank: one for one in changed})
    return Members(epoch=Epoch(epoch), workers=tuple(workers.values()))


def routes(*ready: int, leaving: tuple[int, ...] = (), epoch: int = 5):
    return make_routes(Epoch(epoch), PLACEMENT, have(PLACEMENT), ready or EXPERTS, leaving)


def violations(table, placement, route_table) -> tuple[str, ...]:
    """While all workers hold what they should, and attention workers use the routes."""
    held_by = have(placement) if placement is not None else {}
    found = conditions(table, placement, held_by, route_table, {Rank(0): table.epoch, Rank(1): table.epoch})
    return found.violations


def edited(table, change):
    """Routes with a hole made in them by hand."""
    array = table.array().copy()
    change(array)
    return msgspec.structs.replace(table, table=array.tobytes())


def test_all_is_well():
    assert violations(members(), PLACEMENT, routes()) == ()
    assert degraded(members(), PLACEMENT, routes()) == ()


def test_an_instance_without_expert_seats():
    both = worker(0, Role.ATTENTION, Role.EXPERT)
    starting = worker(1, Role.ATTENTION, Role.EXPERT, state=WorkerState.STARTING)
    table = Members(epoch=Epoch(1), workers=(both, starting))
    assert violations(table, None, None) == ()
    assert degraded(table, None, None) == ("rank 1 (attention+expert) is starting",)
    table = Members(epoch=Epoch(1), workers=(starting,))
    assert violations(table, None, None) == ("no attention worker is ready",)


@pytest.mark.parametrize(
    ("table", "placement", "route_table", "sentences"),
    [
        (members(worker(0, Role.ATTENTION, state=WorkerState.GONE)), PLACEMENT, routes(), ["no attention worker"]),
        (members(worker(0, Role.ATTENTION, state=WorkerState.LEAVING)), PLACEMENT, routes(), ["no attention worker"]),
        (members(worker(0, Role.EXPERT)), PLACEMENT, routes(), ["no attention worker is ready"]),
        (members(epoch=6), PLACEMENT, routes(), ["members are of epoch 6, routes of epoch 5"]),
        (
            members(worker(2, Role.EXPERT, state=WorkerState.GONE)),
            PLACEMENT,
            routes(),
            ["routes lead to rank 2, which is gone"],
        ),
        (
            members(worker(2, Role.EXPERT, state=WorkerState.STARTING)),
            PLACEMENT,
            routes(),
            ["routes lead to rank 2, which is starting"],
        ),
        (
            members(worker(2, Role.EXPERT, state=WorkerState.LEAVING)),
            PLACEMENT,
            routes(),
            ["8 experts of layers 2-4, 6 are routed to rank 2, which is leaving, though a ready worker has them: "],
        ),
        (members(worker(3, Role.ATTENTION)), PLACEMENT, routes(), ["rank 3, which does not have the expert role"]),
        (
            Members(epoch=Epoch(5), workers=members().workers[:3]),
            PLACEMENT,
            routes(),
            ["routes lead to rank 3, which is not a member"],
        ),
        (members(), None, routes(), ["there are routes but no expert workers"]),
        (members(), PLACEMENT, None, ["there are expert workers but no routes to them"]),
        (
            members(),
            place_experts(12, LAYERS[:3], list(EXPERTS), None),
            routes(),
            ["routes are for 4 layers of 12 experts, the placement for 3 of 12"],
        ),
    ],
)
def test_broken_contracts(table, placement, route_table, sentences):
    found = violations(table, placement, route_table)
    assert len(found) == len(sentences)
    for sentence, words in zip(found, sentences, strict=True):
        assert words in sentence


def set_nobody(array) -> None:
    array[:, 3] = -1
    array[2, 5] = -1


def set_many_nobody(array) -> None:
    array[:3, :10] = -1


def set_wrong_slot(array) -> None:
    array[1, 0, 0, 1] += 1  # the neighbour's slot in the same worker


def set_no_such_slot(array) -> None:
    array[1, 0, 0, 1] = 99
    array[1, 1, 0, 1] = -1


def set_twice(array) -> None:
    array[:, 7, 1] = array[:, 7, 0]


def set_gap(array) -> None:
    array[0, 7, 0] = -1


@pytest.mark.parametrize(
    ("change", "sentences"),
    [
        (set_nobody, ("expert 3 of layers 2-3, 6 has no place", "2 experts of layer 4 have no place: 3, 5")),
        (set_many_nobody, ("10 experts of layers 2-4 have no place: 0, 1, 2, 3, 4, 5, 6, 7, ...",)),
        (set_wrong_slot, ("expert 0 of layer 3 is routed to a slot of rank 1 that does not hold it",)),
        (set_no_such_slot, ("2 experts of layer 3 are routed to a slot of rank 1 that does not hold them: 0, 1",)),
        (set_twice, ("expert 7 of layers 2-4, 6 has the same worker twice among its places",)),
        (set_gap, ("expert 7 of layer 2 has a gap among its places",)),
    ],
)
def test_broken_routes(change, sentences):
    assert violations(members(), PLACEMENT, edited(routes(), change)) == sentences


def test_one_death_degrades_and_two_violate():
    one = members(worker(2, Role.EXPERT, state=WorkerState.GONE, note="crashed 3 times; next start in 1 s"))
    assert violations(one, PLACEMENT, routes(1, 3)) == ()
    gone, short = degraded(one, PLACEMENT, routes(1, 3))
    assert gone == "rank 2 (expert) is gone: crashed 3 times; next start in 1 s"
    assert short.startswith("8 experts of layers 2-4, 6 have 1 of 2 places: ")

    two = members(*(worker(rank, Role.EXPERT, state=WorkerState.STARTING) for rank in (2, 3)))
    lost = sorted(set(range(12)) - set(held(PLACEMENT, 1).experts[0]))
    assert len(lost) == 4
    assert violations(two, PLACEMENT, routes(1)) == (
        f"4 experts of layers 2-4, 6 have no place: {', '.join(map(str, lost))}",
    )
    # those without any place are not said twice
    assert next(line for line in degraded(two, PLACEMENT, routes(1)) if "places" in line).startswith("8 experts")


def test_a_worker_that_leaves_degrades():
    table = members(worker(2, Role.EXPERT, state=WorkerState.LEAVING))
    turned_away = routes(1, 3, leaving=(2,))
    assert violations(table, PLACEMENT, turned_away) == ()
    leaving, short = degraded(table, PLACEMENT, turned_away)
    assert leaving == "rank 2 (expert) is leaving"
    assert short.startswith("8 experts of layers 2-4, 6 have 1 of 2 places: ")


def test_who_leaves_may_serve_what_nobody_else_has():
    """Ranks 1 and 2 have four experts in common; of those, no ready worker has any."""
    leaving = worker(2, Role.EXPERT, state=WorkerState.LEAVING)
    table = members(worker(1, Role.EXPERT, state=WorkerState.GONE), leaving)
    assert violations(table, PLACEMENT, routes(3, leaving=(2,))) == ()
    assert "rank 2 (expert) is leaving" in degraded(table, PLACEMENT, routes(3, leaving=(2,)))
    assert violations(table, PLACEMENT, routes(3))[0].startswith("4 experts of layers 2-4, 6 have no place: ")

    held_by_3 = held(PLACEMENT, 3).experts[1]
    shared = next(expert for expert in held(PLACEMENT, 2).experts[1] if expert in held_by_3)
    slot = held(PLACEMENT, 2).experts[1].index(shared)

    def lead_to_2(array) -> None:
        array[1, shared, 0] = (2, slot)

    assert violations(table, PLACEMENT, edited(routes(3, leaving=(2,)), lead_to_2)) == (
        f"expert {shared} of layer 3 is routed to rank 2, which is leaving, though a ready worker has it",
    )


def test_nobody_at_all():
    table = members(*(worker(rank, Role.EXPERT, state=WorkerState.GONE) for rank in EXPERTS))
    empty = make_routes(Epoch(5), PLACEMENT, have(PLACEMENT), [])
    assert violations(table, PLACEMENT, empty) == (
        "12 experts of layers 2-4, 6 have no place: 0, 1, 2, 3, 4, 5, 6, 7, ...",
    )


def test_layers_may_differ_in_their_number_of_places():
    """Where planned and present agree nothing is degraded, even if other experts have more places."""
    placement = place_experts(12, LAYERS, list(EXPERTS), 1)
    counts = np.unique(
        [len(make_routes(Epoch(5), placement, have(placement), EXPERTS).candidates(0, e)) for e in range(12)]
    )
    assert counts.tolist() == [1, 2]
    assert degraded(members(), placement, make_routes(Epoch(5), placement, have(placement), EXPERTS)) == ()


def test_the_three_conditions_are_told_apart():
    found = conditions(members(), PLACEMENT, have(PLACEMENT), routes(), {Rank(0): Epoch(5)})
    assert (found.peers, found.coverage, found.epochs) == ((), (), ())
    gone = members(worker(2, Role.EXPERT, state=WorkerState.GONE))
    assert conditions(gone, PLACEMENT, have(PLACEMENT), routes(), {Rank(0): Epoch(5)}).peers == (
        "routes lead to rank 2, which is gone",
    )
    uncovered = conditions(members(), PLACEMENT, have(PLACEMENT), edited(routes(), set_nobody), {Rank(0): Epoch(5)})
    assert uncovered.coverage[0] == "expert 3 of layers 2-3, 6 has no place"


def test_a_worker_that_uses_older_routes_is_shown_and_breaks_nothing():
    late = conditions(members(), PLACEMENT, have(PLACEMENT), routes(), {Rank(0): Epoch(4)})
    assert late.epochs == ("rank 0 uses routes of epoch 4, published is 5",)
    assert late.violations == ()
    silent = conditions(members(), PLACEMENT, have(PLACEMENT), routes(), {})
    assert silent.epochs == ("rank 0 has not said which routes it uses; published is epoch 5",)
    starting = members(worker(0, Role.ATTENTION, state=WorkerState.STARTING))
    assert conditions(starting, PLACEMENT, have(PLACEMENT), routes(), {}).epochs == (), "it loads"


def test_routes_must_agree_with_what_is_held():
    other = have(PLACEMENT)
    first = list(other[Rank(1)].experts[1])
    first[0], first[1] = first[1], first[0]
    experts = (other[Rank(1)].experts[0], tuple(first), *other[Rank(1)].experts[2:])
    other[Rank(1)] = msgspec.structs.replace(other[Rank(1)], experts=experts)
    found = conditions(members(), PLACEMENT, other, routes(), {Rank(0): Epoch(5)})
    assert found.coverage == ("2 experts of layer 3 are routed to a slot of rank 1 that does not hold them: 0, 1",)


def test_a_masked_expert_is_covered_and_degraded():
    two_dead = [worker(rank, Role.EXPERT, state=WorkerState.GONE) for rank in (2, 3)]
    bare = routes(1)
    lost = [(layer, e) for layer in range(len(LAYERS)) for e in range(12) if not bare.candidates(layer, e)]
    assert bare.num_without_place == len(lost) > 0 and bare.masked_experts() == ()
    masked = bare.with_mask(lost, 3)
    assert masked.masked_experts() == tuple(lost) and masked.mask_id == 3
    assert (masked.num_without_place, masked.num_survivable) == (0, 0)
    assert violations(members(*two_dead), PLACEMENT, masked) == ()
    (sentence,) = [one for one in degraded(members(*two_dead), PLACEMENT, masked) if "masked" in one]
    assert sentence.startswith(f"{len(lost) // len(LAYERS)} experts of layers 2-4, 6 are masked")
    all_but_one = bare.with_mask(lost[1:], 4)
    assert violations(members(*two_dead), PLACEMENT, all_but_one) == (f"expert {lost[0][1]} of layer 2 has no place",)
    assert masked.with_mask((), 5) == bare
    with pytest.raises(ValueError, match="mask 0"):
        msgspec.structs.replace(masked, mask_id=0)


def test_layers_of_different_widths():
    """What a layer does not have needs no place, and what it has is called by its name."""
    calls = (
        Call(layer=0, kind=ShardKind.HEAD, num_shards=2),
        Call(layer=0, kind=ShardKind.SLICE, num_shards=5),
        Call(layer=1, kind=ShardKind.HEAD, num_shards=2),
    )
    placement = place_shards(calls, list(EXPERTS), 0, Spread.CYCLIC)
    table = make_routes(Epoch(5), placement, have(placement), EXPERTS)
    assert violations(members(), placement, table) == () and degraded(members(), placement, table) == ()
    assert table.num_without_place == 0 and table.num_survivable == 0
    two = make_routes(Epoch(5), placement, have(placement), EXPERTS[:2])
    gone = members(worker(3, Role.EXPERT, state=WorkerState.GONE))
    assert violations(gone, placement, two) == (
        "slice 2 of layer 0 has no place",
        "head 0 of layer 1 has no place",
    )
    assert two.num_without_place == 2
    wider = place_shards((calls[0], calls[1], calls[1]), list(EXPERTS), 0, Spread.CYCLIC)
    said = "routes and placement are for different numbers of experts in some layers"
    assert violations(members(), wider, table) == (said,)
