"""Where experts should be from now on: after a loss, a return, a change of the number of workers, or of the load.

One planner with one objective, in this order:

    1. every expert has a place                                                       `repair`
    2. every expert has as many places as the slots allow, on different devices       `repair`
    3. workers have as much to compute                                                `even` (evening.py)
    4. the fewest experts are moved: what is planned somewhere stays there, unless one of the first three needs it

Streams may wait for the first two, so after a loss these come at once, and the third soon after, in the background
(control/decide/moving.py). How experts should move because their load has changed is decided elsewhere
(plan/balance.py), layer by layer, with the same planner.

Layers are planned one by one, because they do not share slots. A layer whose places and loads look like those of
another one is planned like it. Of workers that have as little to do, whole experts go to the lowest rank: every layer
is as slow as its busiest worker, so different patterns would gain nothing. Shards that every row needs (plan/shards.py)
go to each of them in turn, from call to call, so that no worker ends up with the lost shard of every layer. Where a
remainder is to be dealt (tables/placement.py), it gets an active place on every worker that has a slot left.
Heads have as many places as they were to have at the start (`Placement.head_copies`), by default one: there are slots
for all of them everywhere, and their KV is in one place anyway.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

import msgspec

from everserve.plan.dealing import Dealing, Loads
from everserve.plan.evening import even
from everserve.plan.layer_plan import LayerPlan, Room, loads_of, numbers_dealt
from everserve.plan.load_search import lower_the_busiest
from everserve.tables.calls import ShardKind
from everserve.tables.ids import Rank
from everserve.tables.placement import Placement, SeatExperts

_MOST_ROUNDS = 4

__all__ = ["Loads", "Room", "repair", "replan"]


def replan(
    before: Placement,
    rooms: Sequence[Room],
    loads: Mapping[int, Loads] | None = None,
    dealing: Dealing | None = None,
    measured: Mapping[int, Loads] | None = None,
) -> Placement:
    """The whole plan for these workers. `loads`: by index of the layer; a layer without any is taken as evenly loaded.
    `dealing`: which attention workers send rows. `measured`: loads by which work should be even (evening.py).

    Where there are fewer slots than experts, the least loaded ones get no place.
    """
    placement = repair(before, rooms, loads, dealing)
    for _ in range(_MOST_ROUNDS):
        made_even = even(placement, rooms, measured)
        if made_even == placement:
            break
        placement = repair(made_even, rooms, loads, dealing)  # copies that made room, or were left, have other places
        if placement == made_even:
            break
    else:
        placement = even(placement, rooms, measured)
    return placement


def repair(
    before: Placement,
    rooms: Sequence[Room],
    loads: Mapping[int, Loads] | None = None,
    dealing: Dealing | None = None,
    balanced: Collection[int] | None = None,
) -> Placement:
    """Places for all, and as many as there should be. `balanced`: change only these layers, and move experts for load
    too."""
    if not rooms:
        return msgspec.structs.replace(before, seats=())
    planned: dict[object, LayerPlan] = {}
    layers: dict[int, LayerPlan] = {}
    num_homeless = dict.fromkeys(ShardKind, 0)  # so far
    pieces = _Pieces(before, rooms)
    dealt = numbers_dealt(before, rooms)
    for index in range(len(before.calls)) if balanced is None else balanced:
        num_experts = before.calls[index].num_shards
        load = loads_of(loads, index, num_experts)
        places = tuple((seat.rank, seat.active[index], seat.shadows[index]) for seat in before.seats)
        kind = before.calls[index].kind
        here = tuple(room for room in (one.of_layer(index) for one in rooms) if room.num_slots)
        here = pieces.limit(index, here) if kind is ShardKind.HEAD else here
        if not here:
            continue
        num_dealt = dealt[index]
        is_in_turn = before.deals_remainder or kind is not ShardKind.EXPERT
        is_in_turn &= kind is not ShardKind.HEAD or not pieces.are_counted
        turn = num_homeless[kind] % len(here) if is_in_turn else 0
        most_places = 1 + before.head_copies if kind is ShardKind.HEAD else None
        num_shadows = before.num_shadows if kind is ShardKind.EXPERT and not before.deals_remainder else None
        key = places, load, here, num_dealt, most_places, turn, num_shadows
        if key not in planned:
            layer = planned[key] = _Layer(here, load, places, dealing, num_dealt, most_places, turn, num_shadows)
            layer.plan(may_move=balanced is not None)
        layers[index] = planned[key]
        if kind is ShardKind.HEAD:
            pieces.count(index, planned[key])
        num_homeless[kind] += planned[key].num_homeless
    seats = tuple(_seat(room.rank, before.seat(room.rank), layers, len(before.calls)) for room in rooms)
    return msgspec.structs.replace(before, seats=seats)


class _Pieces:
    """How many heads each worker has room for: on GPUs layers share it (plan/head_memory.py)."""

    def __init__(self, before: Placement, rooms: Sequence[Room]) -> None:
        heads = [index for index, call in enumerate(before.calls) if call.kind is ShardKind.HEAD]
        self._num_held = Counter({(s.rank, index): len(s.experts(index)) for s in before.seats for index in heads})
        self._num_left = {
            room.rank: room.num_pieces - sum(self._num_held[room.rank, index] for index in heads)
            for room in rooms
            if room.num_pieces
        }

    @property
    def are_counted(self) -> bool:
        return bool(self._num_left)

    def limit(self, index: int, rooms: Sequence[Room]) -> tuple[Room, ...]:
        """The same workers, with slots for what they hold in this layer and as many more as they have pieces left.
        First the one with the most, so that the last layers find pieces on more than one."""
        limited = (room._replace(num_slots=min(room.num_slots, self._most(room, index))) for room in rooms)
        return tuple(sorted(limited, key=lambda room: -self._num_left.get(room.rank, 0)))

    def _most(self, room: Room, index: int) -> int:
        num_left = self._num_left.get(room.rank, room.num_slots)
        return self._num_held[room.rank, index] + max(num_left, 0)

    def count(self, index: int, layer: LayerPlan) -> None:
        """It is planned now."""
        for rank in self._num_left.keys() & layer.held.keys():
            self._num_left[rank] -= len(layer.held[rank]) - self._num_held[rank, index]


def _seat(rank: Rank, before: SeatExperts | None, layers: Mapping[int, LayerPlan], num_layers: int) -> SeatExperts:
    """A worker's part of the plan; in layers that were not planned, or not with it, what it had."""
    active, shadows = [], []
    for index in range(num_layers):
        layer = layers.get(index)
        if layer is not None and rank in layer.held:
            active.append(layer.active_on(rank))
            shadows.append(layer.shadows_on(rank))
        else:
            active.append(before.active[index] if before is not None else ())
            shadows.append(before.shadows[index] if before is not None else ())
    return SeatExperts(rank=rank, active=tuple(active), shadows=tuple(shadows))


class _Layer(LayerPlan):
    def plan(self, may_move: bool = False) -> None:
        self.num_homeless = sum(not homes for homes in self.homes)
        if self.most_places is not None:
            self._drop_copies(self.most_places)
        self._drop_what_does_not_fit()
        self.cover()
        self._separate()
        if not may_move:
            self._drop_what_was_not_asked_for()
        self._copy()
        self._even_out()
        self._level()
        self._deal()
        self._choose_homes()
        if may_move:
            lower_the_busiest(self)

    def _drop_copies(self, most: int) -> None:
        """So many places for each: where it is served, then where there is least. What is held beyond the plan stays
        until its slot is needed."""
        for expert, places in enumerate(self.places):
            homes = self.homes[expert]
            while expert not in self.dealt and len(places) > most:
                worst = max(places, key=lambda rank: (rank not in homes, self.how_full(rank)))
                self.take(expert, worst)

    def _drop_what_does_not_fit(self) -> None:
        """A worker may have fewer slots than before."""
        for room in self.rooms:
            while len(self.held[room.rank]) > room.num_slots:
                expert = max(self.held[room.rank], key=lambda e: (len(self.places[e]), -self.loads[e], -e))
                self.take(expert, room.rank)

    def _separate(self) -> None:
        """Separates copies: of two on one device one is given up, if there is a device without any: that is where
        `_copy` goes.
        """
        devices = {room.device for room in self.rooms}
        for expert, places in enumerate(self.places):
            seen: set[int] = set()
            if expert in self.dealt:
                continue
            for rank in sorted(places, key=lambda r: (r not in self.homes[expert], r)):
                device = self.by_rank[rank].device
                if device in seen and len({self.by_rank[r].device for r in places}) < len(devices):
                    self.take(expert, rank)
                seen.add(device)

    def _drop_what_was_not_asked_for(self) -> None:
        """Copies that were made while a worker was away, and for which there happened to be slots: those of experts
        that have least to do for each place left. Copies for balance, with more than all can have, are kept as long as
        there are not too many."""
        while self.num_wanted is not None and sum(map(len, self.places)) > self.num_wanted:
            copied = [expert for expert, ranks in enumerate(self.places) if len(ranks) > self.num_copies]
            if not copied:
                return
            expert = min(copied, key=lambda e: (self.loads[e] / (len(self.places[e]) - 1), e))
            devices = Counter(self.by_rank[rank].device for rank in self.places[expert])
            homes = self.homes[expert]
            worst = max(
                self.places[expert],
                key=lambda r: (devices[self.by_rank[r].device] > 1, r not in homes, self.how_full(r)),
            )
            self.take(expert, worst)

    def _copy(self) -> None:
        """One more place for every expert before another one for any, each on another device, until all have as many as
        there are slots for, and then as many more as were asked for."""
        self._grow(self.num_copies, num_places=None)
        if self.num_wanted is not None:
            self._grow(len(self.rooms), self.num_wanted)

    def _grow(self, most: int, num_places: int | None) -> None:
        growing = {expert for expert, ranks in enumerate(self.places) if 0 < len(ranks) < most}
        while growing and (num_places is None or sum(map(len, self.places)) < num_places):
            expert = min(growing, key=lambda e: (len(self.places[e]), -self.loads[e], e))
            devices = {self.by_rank[rank].device for rank in self.places[expert]}
            free = [r for r in self.held if self.room_on(r) > 0 and self.by_rank[r].device not in devices]
            free = free or self._shift(expert, devices)
            if free:
                self.put(expert, min(free, key=self.how_full))
            if not free or len(self.places[expert]) == most:
                growing.discard(expert)

    def _shift(self, expert: int, devices: set[int]) -> list[Rank]:
        """Room is left only where this expert is already: a copy of another one moves there, and leaves its slot."""
        roomy = [rank for rank in self.held if self.room_on(rank) > 0]
        for rank in sorted(self.held, key=self.how_full, reverse=True):
            if self.by_rank[rank].device in devices:
                continue
            for other in sorted(self.held[rank], key=lambda e: (rank in self.homes[e], e)):
                for there in roomy:
                    if self.may_go(other, rank, there):
                        self.take(other, rank)
                        self.put(other, there)
                        return [rank]
        return []

    def _even_out(self) -> None:
        """No slot is free, and an expert has more places than all can have, another one fewer: it gives it one."""
        while True:
            swap = next(self._swaps(), None)
            if swap is None:
                return
            rich, poor, rank = swap
            self.take(rich, rank)
            self.put(poor, rank)

    def _swaps(self) -> Iterator[tuple[int, int, Rank]]:
        placed = [expert for expert, ranks in enumerate(self.places) if ranks and expert not in self.dealt]
        most = self.num_copies
        by_copies = sorted(placed, key=lambda e: (len(self.places[e]), -self.loads[e], e))
        for poor in (expert for expert in by_copies if len(self.places[expert]) < most):
            devices = {self.by_rank[rank].device for rank in self.places[poor]}
            for rich in reversed(by_copies):
                if len(self.places[rich]) < len(self.places[poor]) + 2:
                    break
                for rank in sorted(self.places[rich], key=lambda r: (r in self.homes[rich], r)):
                    if self.by_rank[rank].device not in devices:
                        yield rich, poor, rank

    def _level(self) -> None:
        """Move copies from the fullest worker to the emptiest until they differ by at most one."""
        while True:
            fullest, emptiest = max(self.held, key=self.how_full), min(self.held, key=self.how_full)
            if len(self.held[fullest]) - len(self.held[emptiest]) < 2 or self.room_on(emptiest) == 0:
                return
            movable = [e for e in self.held[fullest] if self.may_go(e, fullest, emptiest)]
            if not movable:
                return
            expert = min(movable, key=lambda e: (fullest in self.homes[e], -self.loads[e], e))  # shadows first
            self.take(expert, fullest)
            self.put(expert, emptiest)

    def _deal(self) -> None:
        """What all should serve, wherever there is room for it."""
        for expert in self.dealt:
            for rank in [rank for rank in self.held if rank not in self.places[expert] and self.room_on(rank) > 0]:
                self.put(expert, rank)
            self.homes[expert] = sorted(self.places[expert])

    def _choose_homes(self) -> None:
        """Homes stay where they are. An expert without one gets it where there is least to do, the heaviest first."""
        work = self.work()
        homeless = [e for e, ranks in enumerate(self.places) if ranks and not self.homes[e]]
        for expert in sorted(homeless, key=lambda e: (-self.loads[e], len(self.places[e]), e)):
            rank = min(self.places[expert], key=lambda r: (work[r], self.order[r]))
            self.homes[expert].append(rank)
            work[rank] += self.loads[expert]
