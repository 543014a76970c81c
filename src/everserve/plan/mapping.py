"""Experts without a place whose weights are still in memory: which worker maps which, and for how long.

The memory of an expert seat outlives its workers. While none of them serves, because it has died, leaves or is only
starting, other workers that reach the memory use what lies there, without a copy, in slots that have no memory of their
own (`HeldSlots.num_mapped`). That is for a while:

    no ready worker holds the expert        it is mapped: lowest layers and most loaded experts first, where least is
                                            mapped already
    a ready worker holds it in memory of    the mapped slot is given up: routes stop leading to it, and when every
    its own: the next worker of the seat,   attention worker uses such routes, it is cleared
    or one that has made a copy

What is mapped does not count as one of the places that an expert should have: the planner (repair.py) does not see it.
Pure functions, of what workers hold now.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from everserve.plan.dealing import Loads
from everserve.plan.moves import GivenUp, Have, Move
from everserve.tables.ids import Rank
from everserve.tables.placement import Placement
from everserve.tables.slots import EMPTY, Fill, HeldSlots, Place

Reaches = Callable[[Rank, Rank], bool]  # (worker, seat): whether the worker can compute with the seat's memory


def not_needed(placement: Placement, have: Have, ready: Collection[Rank], leaving: GivenUp) -> GivenUp:
    """Mapped slots, of workers that `have` lists, whose expert is in memory of its own on a `ready` worker, or on the
    same one. `leaving`: slots that are about to hold something else. They do not count, unless their expert shall have
    no place at all: what maps it may be in their way."""
    found: dict[Rank, set[Place]] = {}
    if not any(held.num_mapped for held in have.values()):
        return {}
    planned = [{e for seat in placement.seats for e in seat.experts(i)} for i in range(len(placement.calls))]
    owned = {rank: _owned(held, leaving.get(rank, frozenset()), planned) for rank, held in have.items()}
    for rank, held in have.items():
        for index in range(len(held.experts)) if held.num_mapped else ():
            elsewhere = set[int]().union(*(owned[other][index] for other in have if other in ready or other == rank))
            slots = held.mapped(index).items()
            places = [Place(index, slot) for slot, expert in slots if expert != EMPTY and expert in elsewhere]
            found.setdefault(rank, set()).update(places)
    return {rank: frozenset(places) for rank, places in found.items() if places}


def _owned(held: HeldSlots, leaving: Collection[Place], planned: Sequence[Collection[int]]) -> list[set[int]]:
    return [
        {e for slot, e in enumerate(held.own(index)) if Place(index, slot) not in leaving or e not in planned[index]}
        for index in range(len(held.experts))
    ]


def next_mappings(
    have: Have,
    left: Have,
    reaches: Reaches,
    calls: Iterable[int],
    loads: Mapping[int, Loads],
    refused: Collection[tuple[Rank, int, int]] = (),
) -> list[Move]:
    """What ready workers should map, in the order in which it is needed. `have`: what they hold, or will when their
    fills are done; `left`: what is in the memory of seats without a ready worker. `calls`: those that may be mapped.
    `refused`: (worker, index of the call, expert) that was tried in vain."""
    moves: list[Move] = []
    mappers = {rank: held for rank, held in have.items() if held.num_mapped}
    for index in calls if mappers and left else ():
        served = set[int]().union(*(held.experts[index] for held in have.values()))
        lenders = {rank: set(held.own(index)) - served - {EMPTY} for rank, held in left.items()}
        free = {rank: [s for s, e in held.mapped(index).items() if e == EMPTY] for rank, held in mappers.items()}
        load = loads.get(index, ())
        for expert in sorted(set[int]().union(*lenders.values()), key=lambda e: (-_load(load, e), e)):
            owners = [rank for rank, experts in lenders.items() if expert in experts]
            able = [
                rank
                for rank, slots in free.items()
                if slots and (rank, index, expert) not in refused and any(reaches(rank, owner) for owner in owners)
            ]
            if able:
                rank = max(able, key=lambda r: (len(free[r]), -r))
                moves.append(Move(0, rank, Fill(index, free[rank].pop(0), expert)))
    return moves


def _load(loads: Sequence[float], expert: int) -> float:
    return loads[expert] if expert < len(loads) else 0.0
