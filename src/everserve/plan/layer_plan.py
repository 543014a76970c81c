"""One layer while it is planned: which workers should hold which experts, and which of them serve.

What every plan does first is here: to give experts without a place one. A plan for which streams wait does no more
(plan/cover.py); the whole one goes on from there (plan/repair.py).
"""

import heapq
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from everserve.plan.dealing import Dealing, Loads
from everserve.tables.calls import ShardKind
from everserve.tables.ids import Rank
from everserve.tables.placement import Placement

# rank, active experts, shadows
SeatBefore = tuple[Rank, tuple[int, ...], tuple[int, ...]]


class Room(NamedTuple):
    """An expert worker that there should be."""

    rank: Rank
    device: int  # workers on one device are lost together
    num_slots: int  # per layer; of the layer with the most, if they differ
    slots: tuple[int, ...] = ()  # by index of the layer, if they differ; in one without any it takes no part
    num_pieces: int = 0  # the most heads in all layers together; 0: as many as there are slots for

    def of_layer(self, index: int) -> "Room":
        return self._replace(num_slots=self.slots[index], slots=()) if self.slots else self


def numbers_dealt(placement: Placement, rooms: Sequence[Room]) -> tuple[int, ...]:
    """How many shards of each call should be served everywhere. All that remain, or none where slots are too few for
    that: a part of them would make the busiest worker only busier."""
    numbers = []
    for index, call in enumerate(placement.calls):
        slots = [room.of_layer(index).num_slots for room in rooms]
        num_here = sum(num > 0 for num in slots)
        num = placement.num_dealt(index, num_here) if num_here else 0
        fits = num and call.num_shards // num_here + num <= min(one for one in slots if one)
        numbers.append(num if fits else 0)
    heads = [index for index, call in enumerate(placement.calls) if call.kind is ShardKind.HEAD]
    num_pieces = (
        sum(placement.calls[index].num_shards // len(rooms) + numbers[index] for index in heads) if rooms else 0
    )
    if any(room.num_pieces and room.num_pieces < num_pieces for room in rooms):
        numbers = [0 if index in heads else num for index, num in enumerate(numbers)]
    return tuple(numbers)


def loads_of(loads: Mapping[int, Loads] | None, index: int, num_shards: int) -> Loads:
    """The loads of one layer; evenly loaded if it has none."""
    return tuple((loads or {}).get(index, ()))[:num_shards] or (1.0,) * num_shards


class LayerPlan:
    """`places[e]`: the ranks that should hold expert e; `homes[e]`: those of them that serve it, its active places.
    The last `num_dealt` experts should be served by all workers. No other has more places than `most_places` (None: as
    many as there are slots for). With `num_shadows` further places for each worker, all together have `num_wanted`, and
    no more are kept. Of equals the worker with number `turn` is the first, then the next one."""

    def __init__(
        self,
        rooms: Sequence[Room],
        loads: Loads,
        before: Sequence[SeatBefore],
        dealing: Dealing | None = None,
        num_dealt: int = 0,
        most_places: int | None = None,
        turn: int = 0,
        num_shadows: int | None = None,
    ) -> None:
        self.rooms = rooms
        self.most_places = most_places
        self.order = {room.rank: (i - turn) % len(rooms) for i, room in enumerate(rooms)}
        self.num_homeless = 0  # experts that no worker served before
        self.loads = loads
        self.dealing = dealing or Dealing()
        self.by_rank = {room.rank: room for room in rooms}
        self.places: list[list[Rank]] = [[] for _ in loads]
        self.homes: list[list[Rank]] = [[] for _ in loads]
        self.held: dict[Rank, set[int]] = {room.rank: set() for room in rooms}
        self.dealt = range(len(loads) - num_dealt, len(loads))
        # Places that every other expert gets before any gets more, as far as there are devices.
        num_left = sum(room.num_slots for room in rooms) - num_dealt * len(rooms)
        self.num_copies = max(num_left // max(len(loads) - num_dealt, 1), 1)
        if most_places is not None:
            self.num_copies = min(self.num_copies, most_places)
        self.num_wanted: int | None = None
        if num_shadows is not None:
            num_slots = sum(room.num_slots for room in rooms)
            asked = min(num_slots, len(loads) + num_shadows * len(rooms))
            self.num_wanted = max(self.num_copies * len(loads), asked)
        for rank, active, shadows in before:
            if rank in self.by_rank:
                self.held[rank].update(active, shadows)
                for expert in active:
                    self.places[expert].append(rank)
                    self.homes[expert].append(rank)
                for expert in shadows:
                    self.places[expert].append(rank)

    def active_on(self, rank: Rank) -> tuple[int, ...]:
        return tuple(expert for expert in sorted(self.held[rank]) if rank in self.homes[expert])

    def shadows_on(self, rank: Rank) -> tuple[int, ...]:
        return tuple(expert for expert in sorted(self.held[rank]) if rank not in self.homes[expert])

    def put(self, expert: int, rank: Rank) -> None:
        self.places[expert].append(rank)
        self.held[rank].add(expert)

    def take(self, expert: int, rank: Rank) -> None:
        self.places[expert].remove(rank)
        self.held[rank].discard(expert)
        if rank in self.homes[expert]:
            self.homes[expert].remove(rank)

    def room_on(self, rank: Rank) -> int:
        return self.by_rank[rank].num_slots - len(self.held[rank])

    def cover(self) -> list[tuple[int, Rank]]:
        """Experts without a place, the most loaded first, where there is least to do. Where no slot is free, a copy
        makes room. Returns who got which."""
        lost = [expert for expert, ranks in enumerate(self.places) if not ranks]
        if not lost:
            return []
        covered: list[tuple[int, Rank]] = []
        emptiest = [(self.how_full(rank), rank) for rank in self.held if self.room_on(rank) > 0]
        heapq.heapify(emptiest)
        copied: list[tuple[int, float, int]] | None = None  # a heap: experts that may give a place up
        for expert in sorted(lost, key=lambda e: (-self.loads[e], e)):
            if emptiest:
                _, rank = heapq.heappop(emptiest)
            else:
                copied = self._copied() if copied is None else copied
                if not copied:
                    break
                rank = self._make_room(copied)
            self.put(expert, rank)
            covered.append((expert, rank))
            if self.room_on(rank) > 0:
                heapq.heappush(emptiest, (self.how_full(rank), rank))
        return covered

    def _copied(self) -> list[tuple[int, float, int]]:
        """The expert with the most copies first; of those, the least loaded."""
        copied = [(-len(ranks), self.loads[e], e) for e, ranks in enumerate(self.places) if len(ranks) > 1]
        heapq.heapify(copied)
        return copied

    def _make_room(self, copied: list[tuple[int, float, int]]) -> Rank:
        """Drop a copy of the first one, and one that serves only if all of them do. Returns where that was."""
        number, load, expert = heapq.heappop(copied)
        idle = [r for r in self.places[expert] if r not in self.homes[expert]] or self.places[expert]
        rank = max(idle, key=self.how_full)
        self.take(expert, rank)
        if -number > 2:
            heapq.heappush(copied, (number + 1, load, expert))
        return rank

    def how_full(self, rank: Rank) -> tuple[int, float, int]:
        return len(self.held[rank]), sum(self.loads[expert] for expert in self.held[rank]), self.order[rank]

    def may_go(self, expert: int, rank: Rank | None, to: Rank) -> bool:
        """Whether its copy on `rank` (None: another copy) may be on `to`: no two copies are on one device."""
        devices = {self.by_rank[place].device for place in self.places[expert] if place != rank}
        return to not in self.places[expert] and self.by_rank[to].device not in devices

    def work(self) -> dict[Rank, float]:
        """What each worker has to compute."""
        work = dict.fromkeys(self.held, 0.0)
        for expert, homes in enumerate(self.homes):
            for rank, part in self.parts(expert, homes).items():
                work[rank] += part
        return work

    def parts(self, expert: int, homes: Sequence[Rank]) -> Mapping[Rank, float]:
        """What an expert with these active places adds to each of them."""
        if len(homes) < 2:  # nearly always
            return {homes[0]: self.loads[expert]} if homes else {}
        places = sorted(homes)
        shares = self.dealing.shares(expert, places)
        return {rank: share * self.loads[expert] for rank, share in zip(places, shares, strict=True)}
