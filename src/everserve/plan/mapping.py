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
Pure functions, of what workers hold now. They run while streams wait, with thousands of experts: hence the tables.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain

import numpy as np

from everserve.plan.dealing import Loads
from everserve.plan.moves import GivenUp, Have, Move
from everserve.tables.ids import Rank
from everserve.tables.placement import Placement
from everserve.tables.slots import EMPTY, Fill, HeldSlots, Place

Reaches = Callable[[Rank, Rank], bool]  # (worker, seat): whether the worker can compute with the seat's memory
Told = Mapping[Rank, tuple[Collection[Fill], Collection[Place]]]  # what workers were told to fill, and to clear
Counts = np.ndarray[tuple[int, int], np.dtype[np.int64]]  # [index of the call][expert]


def not_needed(placement: Placement, have: Have, ready: Collection[Rank], leaving: GivenUp) -> GivenUp:
    """Mapped slots, of workers that `have` lists, whose expert is in memory of its own on a `ready` worker, or on the
    same one. `leaving`: slots that are about to hold something else. They do not count, unless their expert shall have
    no place at all: what maps it may be in their way."""
    mapped = {rank: [*_in_mapped_slots(held)] for rank, held in have.items()}
    if not any(mapped.values()):
        return {}
    shape = (len(placement.calls), placement.num_experts)
    own_LE = {rank: _count(shape, [held.own(i) for i in range(shape[0])]) for rank, held in have.items()}
    for rank, held in have.items():
        for layer, slot in leaving.get(rank, ()):
            expert = held.experts[layer][slot]
            is_held = slot < held.num_own(layer) and expert != EMPTY
            if is_held and any(expert in seat.experts(layer) for seat in placement.seats):
                own_LE[rank][layer, expert] -= 1
    ready_LE = sum((own_LE[rank] for rank in have if rank in ready), np.zeros(shape, np.int64))
    found = {
        rank: frozenset(place for place, e in slots if ready_LE[place[0], e] or own_LE[rank][place[0], e])
        for rank, slots in mapped.items()
    }
    return {rank: places for rank, places in found.items() if places}


def _in_mapped_slots(held: HeldSlots) -> Iterator[tuple[Place, int]]:
    for index in range(len(held.experts)) if held.num_mapped else ():
        first = held.num_own(index)
        for i, expert in enumerate(held.experts[index][first:]):
            if expert != EMPTY:
                yield Place(index, first + i), expert


def _count(shape: tuple[int, int], experts: Sequence[tuple[int, ...]]) -> Counts:
    """How often each expert is there."""
    num_layers, width = shape[0], shape[1] + 1  # the last one is EMPTY
    lengths = [*map(len, experts)]
    flat = np.fromiter(chain.from_iterable(experts), np.int64, sum(lengths)) % width
    flat += np.repeat(np.arange(num_layers) * width, lengths)
    return np.bincount(flat, minlength=num_layers * width).reshape(num_layers, width)[:, :-1]


def next_mappings(
    placement: Placement,
    have: Have,
    left: Have,
    told: Told,
    reaches: Reaches,
    calls: Collection[int],
    loads: Callable[[], Mapping[int, Loads]],
    refused: Collection[tuple[Rank, int, int]] = (),
) -> list[Move]:
    """What ready workers should map, in the order in which it is needed. `have`: what they hold, but for what they were
    `told` and have not done; `left`: what is in the memory of seats without a ready worker. `calls`: those that may be
    mapped. `refused`: (worker, index of the call, expert) that was tried in vain."""
    shape = (len(placement.calls), placement.num_experts)
    lender_LE = {rank: _count(shape, [held.own(i) for i in range(shape[0])]) > 0 for rank, held in left.items()}
    served_LE = sum((_count(shape, held.experts) for held in have.values()), np.zeros(shape, np.int64))
    for rank, (fills, places) in told.items():
        for layer, slot in [(fill.call_index, fill.slot) for fill in fills] + [*places]:
            expert = have[rank].experts[layer][slot]
            served_LE[layer, expert] -= expert != EMPTY
        for fill in fills:
            served_LE[fill.call_index, fill.expert] += 1
    missing_LE = np.logical_or.reduce([*lender_LE.values(), np.zeros(shape, bool)]) & (served_LE == 0)
    layers = [index for index in calls if missing_LE[index].any()]
    if not layers:
        return []
    lenders = {rank: [lender for lender in left if reaches(rank, lender)] for rank in have}
    load_of, moves = loads(), list[Move]()
    for index in layers:
        free = {rank: _free(held, index, *told.get(rank, ((), ()))) for rank, held in have.items()}
        there = {lender: set(np.flatnonzero(row_LE[index]).tolist()) for lender, row_LE in lender_LE.items()}
        reached = {rank: set[int]().union(*(there[lender] for lender in lenders[rank])) for rank in have if free[rank]}
        load = load_of.get(index, (0.0,) * shape[1])
        for expert in sorted(np.flatnonzero(missing_LE[index]).tolist(), key=lambda e: (-load[e], e)):
            able = [rank for rank, experts in reached.items() if free[rank] and expert in experts]
            able = [rank for rank in able if (rank, index, expert) not in refused] if refused else able
            if able:
                rank = max(able, key=lambda r: (len(free[r]), -r))
                moves.append(Move(0, rank, Fill(index, free[rank].pop(0), expert)))
    return moves


def in_vain(told: Mapping[Rank, Collection[Fill]], have: Have, left: Have, reaches: Reaches) -> list[Rank]:
    """Which of these workers, that were told to map something, need not map one of it any more, because the expert is
    in memory of its own on a ready worker (`have`), or cannot, because no memory that it reaches has it."""

    @cache
    def served(index: int) -> frozenset[int]:
        return _own_in(have.values(), index)

    @cache
    def lent(index: int, lenders: tuple[Rank, ...]) -> frozenset[int]:
        return _own_in([left[lender] for lender in lenders], index)

    found = []
    for rank, fills in told.items():
        lenders, by_call = tuple(lender for lender in left if reaches(rank, lender)), dict[int, set[int]]()
        for fill in fills:
            by_call.setdefault(fill.call_index, set()).add(fill.expert)
        if any(experts & served(index) or experts - lent(index, lenders) for index, experts in by_call.items()):
            found.append(rank)
    return found


def _own_in(held: Iterable[HeldSlots], index: int) -> frozenset[int]:
    return frozenset[int]().union(*(one.own(index) for one in held))


def _free(held: HeldSlots, index: int, fills: Collection[Fill], places: Collection[Place]) -> list[int]:
    """Mapped slots of a call that are empty, or will be, and that no fill is for."""
    if not held.num_mapped:
        return []
    cleared = {place.slot for place in places if place.call_index == index}
    filled = {fill.slot for fill in fills if fill.call_index == index}
    return [s for s, e in held.mapped(index).items() if (e == EMPTY or s in cleared) and s not in filled]
