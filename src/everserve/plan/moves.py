"""From what workers hold to what they should hold: which slots to fill next. Make before break.

    a slot that is empty                          can be filled at once
    a slot whose expert should not be there       is *given up* when it is needed and its expert has another place:
                                                  routes stop leading to it, and when every attention worker uses such
                                                  routes, it can be filled

    the same, and the expert is in every place    is *left over*: routes stop leading to it, and when every attention
    where it should be                            worker uses such routes, it is cleared

Nothing is remembered between two calls: whatever has happened in between, the next call goes on from what is there. An
expert that should not be where it is stays there, and is used, until its slot is needed, or until all of its places are
there: no more copies are kept than were asked for.

Only slots with memory of their own count here. What workers map of other seats' memory is another matter (mapping.py).
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from everserve.tables.ids import Rank
from everserve.tables.placement import Placement, SeatExperts
from everserve.tables.remembered import remembered
from everserve.tables.slots import EMPTY, Fill, HeldSlots, Place

Have = Mapping[Rank, HeldSlots]
GivenUp = dict[Rank, frozenset[Place]]
IsFree = Callable[[Rank, Place], bool]


class Move(NamedTuple):
    """A slot of a worker is to be filled. `urgency`: 0 if the expert has no place at all, 1 if it should be served
    there, 2 if it is a shadow."""

    urgency: int
    rank: Rank
    fill: Fill


def given_up(placement: Placement, have: Have, serving: Collection[Rank]) -> GivenUp:
    """Slots that routes shall not lead to any more, because other experts need them. `serving`: workers that routes
    may lead to. An expert that would have no place left keeps its slot, unless it should have none: there are fewer
    slots than experts."""
    found: dict[Rank, set[Place]] = {}
    crowded = [
        (layer, seat, num_needed)
        for seat, layer, num_missing in _unfinished(placement, have, serving)
        if (num_needed := num_missing - have[seat.rank].own(layer).count(EMPTY)) > 0
    ]
    for layer in {layer for layer, _, _ in crowded}:
        copies = Counter(expert for rank in serving if rank in have for expert in have[rank].own(layer))
        planned = {expert for seat in placement.seats for expert in seat.experts(layer)}
        for _, seat, num_needed in (one for one in crowded if one[0] == layer):
            slots, wanted = have[seat.rank].own(layer), set(seat.experts(layer))
            idle = [slot for slot, expert in enumerate(slots) if expert != EMPTY and expert not in wanted]
            for slot in sorted(idle, key=lambda slot: (-copies[slots[slot]], slot))[:num_needed]:
                if copies[slots[slot]] > 1 or slots[slot] not in planned:
                    copies[slots[slot]] -= 1
                    found.setdefault(seat.rank, set()).add(Place(layer, slot))
    return {rank: frozenset(places) for rank, places in found.items()}


def left_over(placement: Placement, have: Have, serving: Collection[Rank], calls: Collection[int]) -> GivenUp:
    """Slots whose expert should not be there, and is wherever it should be. `calls`: only in these."""
    planned = {seat.rank: seat for seat in placement.seats}
    staying = [rank for rank in serving if rank in have and rank in planned]
    extras = {rank: _extra(planned[rank], have[rank]) for rank in staying}
    if not any(extras.values()):
        return {}
    found: dict[Rank, set[Place]] = {}
    for layer in calls:
        extra = {rank: found.get(layer, frozenset()) for rank, found in extras.items()}
        if not any(extra.values()):
            continue
        own = {rank: set(have[rank].own(layer)) for rank in staying}
        there = {expert for seat in placement.seats for expert in seat.experts(layer)}
        for seat in placement.seats:
            there.difference_update(set(seat.experts(layer)).difference(own.get(seat.rank, ())))
        for rank, experts in extra.items():
            slots = enumerate(have[rank].own(layer))
            places = {Place(layer, slot) for slot, expert in slots if expert in experts and expert in there}
            if places:
                found.setdefault(rank, set()).update(places)
    return {rank: frozenset(places) for rank, places in found.items()}


def _unfinished(placement: Placement, have: Have, ranks: Collection[Rank]) -> Iterable[tuple[SeatExperts, int, int]]:
    """Where workers do not hold all that they should: (seat, layer, how many are missing)."""
    counted = frozenset(ranks)
    for seat in placement.seats:
        held = have.get(seat.rank) if seat.rank in counted else None
        for layer, num_missing in missing(seat, held) if held is not None else ():
            yield seat, layer, num_missing


@remembered
def missing(planned: SeatExperts, held: HeldSlots) -> tuple[tuple[int, int], ...]:
    """Layers in which a worker does not hold all that it should, and how many are missing there."""
    numbers = (len(set(planned.experts(i)).difference(held.own(i))) for i in range(len(held.experts)))
    return tuple((layer, number) for layer, number in enumerate(numbers) if number)


@remembered
def _extra(planned: SeatExperts, held: HeldSlots) -> dict[int, frozenset[int]]:
    """By layer what a worker holds and should not; only layers with any."""
    layers = range(len(held.experts))
    found = {i: frozenset(held.own(i)).difference(planned.experts(i), [EMPTY]) for i in layers}
    return {layer: experts for layer, experts in found.items() if experts}


def next_moves(
    placement: Placement,
    have: Have,
    serving: Collection[Rank],
    idle: Collection[Rank],
    leaving: GivenUp,
    is_free: IsFree,
) -> list[Move]:
    """What these `idle` workers can fill now, the most urgent first: experts without any place, in the order of layers,
    so that a step goes on layer by layer as they come. `leaving`: slots that were given up; `is_free(rank, place)`:
    whether every attention worker knows that."""
    moves: list[Move] = []
    served: dict[int, set[int]] = {}
    for seat, layer, _ in _unfinished(placement, have, idle):
        if layer not in served:
            served[layer] = {expert for rank in serving if rank in have for expert in have[rank].experts[layer]}
        places = leaving.get(seat.rank, frozenset())
        moves += _moves_of(seat, have[seat.rank], layer, served[layer], places, is_free)
    return sorted(moves)


def _moves_of(
    seat: SeatExperts, held: HeldSlots, layer: int, served: set[int], leaving: Collection[Place], is_free: IsFree
) -> Iterable[Move]:
    slots, active = held.own(layer), set(seat.active[layer])
    missing = [expert for expert in seat.experts(layer) if expert not in slots]
    free = [slot for slot, expert in enumerate(slots) if expert == EMPTY]
    here = [place.slot for place in leaving if place.call_index == layer and place.slot < len(slots)]
    given = sorted(here) if len(free) < len(missing) else ()
    wanted = set(seat.experts(layer))
    free += [slot for slot in given if slots[slot] not in wanted and is_free(seat.rank, Place(layer, slot))]
    urgency = {expert: 0 if expert not in served else 1 if expert in active else 2 for expert in missing}
    for slot, expert in zip(free, sorted(missing, key=lambda e: (urgency[e], e)), strict=False):
        yield Move(urgency[expert], seat.rank, Fill(layer, slot, expert))
