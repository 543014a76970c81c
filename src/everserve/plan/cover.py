"""Places at once for experts that have none: the first part of a repair, for which streams wait.

All else that a plan should have (copies on different devices, even loads) follows in a second one (plan/repair.py),
which finds these experts where they are. To make that one first would take longer than to load what is missing.
"""

import heapq
from collections.abc import Mapping, Sequence

import msgspec

from everserve.plan.dealing import Loads
from everserve.plan.layer_plan import Room
from everserve.tables.ids import Rank
from everserve.tables.placement import Placement, SeatExperts


def cover(before: Placement, rooms: Sequence[Room], loads: Mapping[int, Loads] | None = None) -> Placement:
    """The placement for these workers: what is planned on them stays there. An expert without a place goes where the
    fewest are, the most loaded first. Where no slot is free, a shadow that has another place makes room.

    Where there are fewer slots than experts, the least loaded ones get no place.
    """
    planned = {seat.rank: seat for seat in before.seats}
    active = {room.rank: [*planned[room.rank].active] for room in rooms}
    shadows = {room.rank: [*planned[room.rank].shadows] for room in rooms}
    for index, call in enumerate(before.calls):
        load = (loads or {}).get(index) or (1.0,) * call.num_shards
        num_slots = {room.rank: num for room in rooms if (num := room.of_layer(index).num_slots)}
        layer = _Layer({rank: (active[rank][index], shadows[rank][index]) for rank in num_slots}, call.num_shards, load)
        for rank in layer.cover(num_slots):
            active[rank][index], shadows[rank][index] = layer.experts_on(rank)
    seats = [SeatExperts(rank=rank, active=tuple(active[rank]), shadows=tuple(shadows[rank])) for rank in active]
    return msgspec.structs.replace(before, seats=tuple(seats))


class _Layer:
    """`held`: by rank, the experts that it serves, and shadows."""

    def __init__(
        self, held: Mapping[Rank, tuple[Sequence[int], Sequence[int]]], num_experts: int, loads: Loads
    ) -> None:
        self._loads = loads
        self._active = {rank: [*active] for rank, (active, _) in held.items()}
        self._shadows = {rank: [*shadows] for rank, (_, shadows) in held.items()}
        self._num_places = [0] * num_experts
        for active, shadows in held.values():
            for expert in (*active, *shadows):
                self._num_places[expert] += 1
        self._spare: list[tuple[int, float, int]] | None = None  # a heap: experts with shadows that may go, when needed

    def cover(self, num_slots: Mapping[Rank, int]) -> set[Rank]:
        """Returns whose experts have changed."""
        lost = [expert for expert, number in enumerate(self._num_places) if not number]
        if not lost:
            return set()
        changed: set[Rank] = set()
        emptiest = [(*self._how_full(rank), rank) for rank in num_slots if self._num_on(rank) < num_slots[rank]]
        heapq.heapify(emptiest)
        for expert in sorted(lost, key=lambda e: (-self._loads[e], e)):
            if emptiest:
                rank = heapq.heappop(emptiest)[-1]
            elif (found := self._make_room()) is not None:
                rank = found
            else:
                break
            self._active[rank].append(expert)
            changed.add(rank)
            if self._num_on(rank) < num_slots[rank]:
                heapq.heappush(emptiest, (*self._how_full(rank), rank))
        return changed

    def experts_on(self, rank: Rank) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return tuple(sorted(self._active[rank])), tuple(sorted(self._shadows[rank]))

    def _make_room(self) -> Rank | None:
        """Drop a shadow of the expert with the most places; of those, of the least loaded, on the fullest worker."""
        if self._spare is None:
            shadows = {expert for experts in self._shadows.values() for expert in experts}
            self._spare = [self._in_heap(expert) for expert in shadows if self._num_places[expert] > 1]
            heapq.heapify(self._spare)
        if not self._spare:
            return None
        expert = heapq.heappop(self._spare)[-1]
        ranks = [rank for rank, shadows in self._shadows.items() if expert in shadows]
        rank = max(ranks, key=self._how_full)
        self._shadows[rank].remove(expert)
        self._num_places[expert] -= 1
        if self._num_places[expert] > 1 and len(ranks) > 1:
            heapq.heappush(self._spare, self._in_heap(expert))
        return rank

    def _in_heap(self, expert: int) -> tuple[int, float, int]:
        return -self._num_places[expert], self._loads[expert], expert

    def _num_on(self, rank: Rank) -> int:
        return len(self._active[rank]) + len(self._shadows[rank])

    def _how_full(self, rank: Rank) -> tuple[int, float]:
        return self._num_on(rank), sum(self._loads[e] for e in (*self._active[rank], *self._shadows[rank]))
