"""Places at once for experts that have none: the first part of a repair, for which streams wait.

All else that a plan should have (copies on different devices, even loads) follows in a second one (plan/repair.py),
which finds these experts where they are: both use the same planner of a layer. To make that one first would take longer
than to load what is missing.
"""

import functools
from collections.abc import Mapping, Sequence

import msgspec

from everserve.plan.dealing import Loads
from everserve.plan.layer_plan import LayerPlan, Room, SeatBefore, loads_of
from everserve.tables.ids import Rank
from everserve.tables.placement import Placement, SeatExperts


def cover(before: Placement, rooms: Sequence[Room], loads: Mapping[int, Loads] | None = None) -> Placement:
    """The placement for these workers: what is planned on them stays there. An expert without a place goes where the
    fewest are, the most loaded first, and is served there. Where no slot is free, a copy makes room.

    Where there are fewer slots than experts, the least loaded ones get no place.
    """
    planned = {seat.rank: seat for seat in before.seats}
    active = {room.rank: [*planned[room.rank].active] for room in rooms}
    shadows = {room.rank: [*planned[room.rank].shadows] for room in rooms}
    covered = functools.cache(_covered)  # layers often look alike
    for index, call in enumerate(before.calls):
        here = tuple(room for room in (one.of_layer(index) for one in rooms) if room.num_slots)
        there = tuple((room.rank, active[room.rank][index], shadows[room.rank][index]) for room in here)
        if here and len(set[int]().union(*(served + held for _, served, held in there))) < call.num_shards:
            for rank, (served, held) in covered(here, loads_of(loads, index, call.num_shards), there).items():
                active[rank][index], shadows[rank][index] = served, held
    seats = [SeatExperts(rank=rank, active=tuple(active[rank]), shadows=tuple(shadows[rank])) for rank in active]
    return msgspec.structs.replace(before, seats=tuple(seats))


def _covered(
    rooms: tuple[Room, ...], loads: Loads, before: tuple[SeatBefore, ...]
) -> dict[Rank, tuple[tuple[int, ...], tuple[int, ...]]]:
    """One layer: who serves and holds something else than before."""
    layer = LayerPlan(rooms, loads, before)
    covered = layer.cover()
    for expert, rank in covered:
        layer.homes[expert].append(rank)
    return {rank: (layer.active_on(rank), layer.shadows_on(rank)) for rank in {rank for _, rank in covered}}
