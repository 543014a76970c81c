"""The last part of a plan: as much work for every worker, by the fewest shards that change hands.

What comes before (plan/repair.py) gives every shard its places, and keeps what is there. So one survivor may serve all
that a lost worker had, and a worker that has returned next to nothing. Here the busiest worker gives work away, one
*hand-over* after the other, until none helps:

    another place of a shard serves                      no weights move
    a shard moves into a free slot                       one fill
    the same, in the slot of a copy of which there are   one fill
    more; it stays as a copy where it was
    a shard and a copy that does not serve swap slots    two fills
    two shards swap slots, one of them with other places two fills

One without a fill may lead over others: the busiest worker gives a shard to a second one, which gives one to a third.
Where each worker has the copies of its neighbour, that evens out all layers without a byte.

Where remainders are dealt (tables/placement.py), what is to be dealt by the number of workers that there are now then
serves everywhere, in the slot of a copy if none is free.

First each call is made even, for all homes may be in the same layer at a time, and it takes as long as its busiest
worker; of equals the one that has less to do in all calls of the kind gets more. Then that sum, without making any
call's busiest worker busier. Each shard keeps as many places as it had, on different devices, and as many serve.
Where the loads of experts were measured these count, else each shard counts as one. What is measured is soon different:
for the last tenth of it no weights move.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from everserve.plan.dealing import Loads
from everserve.plan.layer_plan import Room, numbers_dealt
from everserve.tables.calls import ShardKind
from everserve.tables.ids import Rank
from everserve.tables.placement import Placement, SeatExperts

_ROUNDING = 1e-6
_EVEN, _EVEN_BY_LOAD = 0.02, 0.05  # beyond the mean: what is measured is never quite equal
_NOT_WORTH_A_FILL = 0.1  # of measured loads, beyond the mean
_MOST_PASSES = 8  # two are needed where a slot that became free is one for what is dealt


class _Handover(NamedTuple):
    """The handing over of one shard, from the worker that serves it to one that then does."""

    num_fills: int
    call: int
    shard: int
    giver: Rank
    receiver: Rank
    dropped: int | None = None  # the copy whose slot it takes
    swapped: int | None = None  # the copy that goes the other way
    exchanged: int | None = None  # what the receiver served, and the giver then does


def even(before: Placement, rooms: Sequence[Room], loads: Mapping[int, Loads] | None = None) -> Placement:
    """The placement with as even work as hand-overs reach. `rooms`: workers of the placement, and their slots; one
    takes no part in a call where it has none. `loads`: of experts, by index of the call; an empty one is not known, and
    the call stays as it is."""
    plan = _Plan(before, rooms, loads or {})
    has_changed = False
    for _ in range(_MOST_PASSES):
        if not _pass(plan):
            break
        has_changed = True
    return plan.placement() if has_changed else before


def _pass(plan: "_Plan") -> bool:
    """Whether shards have other active places."""
    num_done = 0
    for kind in ShardKind:
        calls = [index for index, call in enumerate(plan.before.calls) if call.kind is kind and not plan.stays(index)]
        for index in calls:
            num_done += plan.serve_once(index)
            num_done += plan.make_even([index])
            num_done += plan.deal(index)
        num_done += plan.make_even(calls)
    return num_done > 0


class _Plan:
    """`active[call][rank]`, `idle[call][rank]`: the shards that it serves, and its other copies. `work[call][rank]`;
    `total[kind][rank]` over all calls of a kind."""

    def __init__(self, before: Placement, rooms: Sequence[Room], loads: Mapping[int, Loads]) -> None:
        self.before = before
        self._rooms = {room.rank: room for room in rooms if before.seat(room.rank) is not None}
        seats = [seat for seat in before.seats if seat.rank in self._rooms]
        routed = {index: load for index, load in loads.items() if before.calls[index].kind is ShardKind.EXPERT}
        self._unknown = frozenset(index for index, load in routed.items() if not any(load))
        self._loads = {
            index: tuple(len(load) * one / sum(load) for one in load)
            for index, load in routed.items()
            if index not in self._unknown
        }
        self._dealt = numbers_dealt(before, [self._rooms[seat.rank] for seat in seats])
        self._active: list[dict[Rank, set[int]]] = []
        self._idle: list[dict[Rank, set[int]]] = []
        self._places: list[list[set[Rank]]] = []
        self._num_active: list[list[int]] = []
        for index, call in enumerate(before.calls):
            here = [seat for seat in seats if self._rooms[seat.rank].of_layer(index).num_slots]
            self._active.append({seat.rank: set(seat.active[index]) for seat in here})
            self._idle.append({seat.rank: set(seat.shadows[index]) for seat in here})
            self._places.append([set() for _ in range(call.num_shards)])
            self._num_active.append([0] * call.num_shards)
            for seat in here:
                for shard in seat.experts(index):
                    self._places[index][shard].add(seat.rank)
                for shard in seat.active[index]:
                    self._num_active[index][shard] += 1
        self._heads = [index for index, call in enumerate(before.calls) if call.kind is ShardKind.HEAD]
        self._num_pieces = {
            rank: sum(len(self._active[i].get(rank, ())) + len(self._idle[i].get(rank, ())) for i in self._heads)
            for rank in self._rooms
        }
        self._free: list[dict[Rank, Sequence[tuple[int, Rank, float]]]] = [{} for _ in before.calls]
        self._limits: list[tuple[float, frozenset[float]] | None] = [None] * len(before.calls)
        self._total = {kind: dict.fromkeys(self._rooms, 0.0) for kind in ShardKind}
        self._work: list[dict[Rank, float]] = [{} for _ in before.calls]
        for index in range(len(before.calls)):
            self._count(index)

    def stays(self, call: int) -> bool:
        return call in self._unknown

    def _count(self, call: int) -> None:
        """What each worker does in this call."""
        total, before = self._total[self.before.calls[call].kind], self._work[call]
        self._work[call] = {
            rank: sum(self._share(call, shard) for shard in shards) for rank, shards in self._active[call].items()
        }
        for rank, work in self._work[call].items():
            total[rank] += work - before.get(rank, 0.0)

    def _share(self, call: int, shard: int) -> float:
        """The work of one active place. What is dealt does not count: each worker has as much of it."""
        if self._is_dealt(call, shard):
            return 0.0
        load = self._loads.get(call)
        return (load[shard] if load else 1.0) / max(self._num_active[call][shard], 1)

    def placement(self) -> Placement:
        seats = tuple(self._seat(seat) if seat.rank in self._rooms else seat for seat in self.before.seats)
        return msgspec.structs.replace(self.before, seats=seats)

    def _seat(self, seat: SeatExperts) -> SeatExperts:
        rank, calls = seat.rank, range(len(self.before.calls))
        active = (sorted(self._active[i].get(rank, seat.active[i])) for i in calls)
        shadows = (sorted(self._idle[i].get(rank, seat.shadows[i])) for i in calls)
        return SeatExperts(rank=rank, active=tuple(map(tuple, active)), shadows=tuple(map(tuple, shadows)))

    def make_even(self, calls: Sequence[int]) -> int:
        """Returns how many hand-overs helped."""
        num_done = 0
        while self._lower_the_busiest(calls):
            num_done += 1
        return num_done

    def _lower_the_busiest(self, calls: Sequence[int]) -> bool:
        """One way from the busiest worker of these calls to the least busy one that it helps."""
        if not calls:
            return False
        total = self._total[self.before.calls[calls[0]].kind]
        work = self._work[calls[0]] if len(calls) == 1 else total
        order = sorted(work, key=lambda rank: (work[rank], total[rank], rank))
        if len(order) < 2:
            return False
        mean, tolerance = sum(work.values()) / len(work), _EVEN_BY_LOAD if calls[0] in self._loads else _EVEN
        busiest = order[-1]
        if work[busiest] <= (1 + tolerance) * mean:
            return False
        may_fill = calls[0] not in self._loads or work[busiest] > (1 + _NOT_WORTH_A_FILL) * mean
        free_ways = _FreeWays(self, calls, busiest)
        for receiver in order[:-1]:
            gap = work[busiest] - work[receiver] - tolerance / 2 * mean
            if gap <= 0:
                return False
            way = self._way(calls, free_ways, receiver, gap, may_fill=may_fill)
            for handover in way:
                self._carry_out(handover)
            if way:
                return True
        return False

    # -- what is dealt ----------------------------------------------------------------------------

    def _is_dealt(self, call: int, shard: int) -> bool:
        return shard >= self.before.calls[call].num_shards - self._dealt[call]

    def serve_once(self, call: int) -> int:
        """What is not dealt, by the number of workers that there are now. Returns how many shards that changes. Loads
        that were measured decide otherwise who serves what."""
        if not self.before.deals_remainder or call in self._loads:
            return 0
        active, num_changed = self._active[call], 0
        for shard in range(self.before.calls[call].num_shards - self._dealt[call]):
            serving = [rank for rank in active if shard in active[rank]]
            if len(serving) < 2:
                continue
            keeps = min(serving, key=lambda rank: (self._work[call][rank], rank))
            for rank in set(serving) - {keeps}:
                active[rank].remove(shard)
                self._idle[call][rank].add(shard)
            self._num_active[call][shard] = 1
            self._forget(call)
            self._count(call)
            num_changed += 1
        return num_changed

    def deal(self, call: int) -> int:
        """The remainder: each worker serves it, in the slot of a copy if none is free. Returns how many places that
        changes."""
        num_shards, num_changed = self.before.calls[call].num_shards, 0
        for shard in range(num_shards - self._dealt[call], num_shards):
            for rank, active in self._active[call].items():
                num_changed += shard not in active and self._serve_also(call, shard, rank)
        return num_changed

    def _serve_also(self, call: int, shard: int, rank: Rank) -> bool:
        idle, places = self._idle[call][rank], self._places[call]
        self._forget(call)
        if shard not in idle:
            if not self._has_room(call, rank):
                if not idle:
                    return False
                self._drop(call, max(idle, key=lambda one: (len(places[one]), one)), rank)
            self._add(call, shard, rank)
        idle.discard(shard)
        self._active[call][rank].add(shard)
        self._num_active[call][shard] += 1
        return True

    # -- one way from a worker to another ---------------------------------------------------------

    def _way(
        self, calls: Sequence[int], free_ways: "_FreeWays", receiver: Rank, gap: float, *, may_fill: bool
    ) -> list[_Handover]:
        """Hand-overs without a fill, the fewest; else one with as few fills as there can be."""
        is_counted, busiest = calls[0] not in self._loads, free_ways.busiest
        way = free_ways.to(receiver, gap) if is_counted else []
        if way and self._leaves_calls_even(way):
            return way
        one = self._at_once(calls, busiest, receiver, gap, fewest=int(is_counted and not way))
        if one is not None and (may_fill or not one.num_fills):
            return [one]
        return self._exchange(calls, busiest, receiver, gap) if may_fill else []

    def free(self, call: int, giver: Rank) -> Sequence[tuple[int, Rank, float]]:
        """What this worker can hand over without a fill in this call: shard, receiver, and the share of the work."""
        known = self._free[call].get(giver)
        if known is None:
            idle, places = self._idle[call], self._places[call]
            known = self._free[call][giver] = [
                (shard, target, self._share(call, shard))
                for shard in sorted(self._active[call].get(giver, ()))
                if len(places[shard]) > 1 and not self._is_dealt(call, shard)
                for target in sorted(places[shard])
                if shard in idle[target]
            ]
        return known

    def work(self, call: int) -> Mapping[Rank, float]:
        return self._work[call]

    def limits(self, call: int) -> tuple[float, frozenset[float]]:
        """What the call's busiest worker has to do, but for rounding; and all shares of work that there are, where each
        shard counts as one."""
        known = self._limits[call]
        if known is None:
            shares = frozenset(1.0 / max(number, 1) for number in set(self._num_active[call]))
            known = self._limits[call] = max(self._work[call].values(), default=0.0) + _ROUNDING, shares
        return known

    def _forget(self, call: int) -> None:
        """What was derived from who serves what there."""
        self._free[call].clear()
        self._limits[call] = None

    def _leaves_calls_even(self, way: Sequence[_Handover]) -> bool:
        """Whether no call becomes less even, as squares of work tell, and no worker on the way gets more to do."""
        work = {index: dict(self._work[index]) for index in {handover.call for handover in way}}
        more = dict.fromkeys(self._rooms, 0.0)
        for handover in way:
            share = self._share(handover.call, handover.shard)
            for rank, part in ((handover.giver, -share), (handover.receiver, share)):
                work[handover.call][rank] += part
                more[rank] += part
        squares = {index: sum(part * part for part in here.values()) for index, here in work.items()}
        before = {index: sum(part * part for part in self._work[index].values()) for index in work}
        is_no_burden = all(part < _ROUNDING for rank, part in more.items() if rank != way[0].receiver)
        return is_no_burden and all(squares[index] < before[index] + _ROUNDING for index in work)

    def _at_once(self, calls: Sequence[int], giver: Rank, receiver: Rank, gap: float, fewest: int) -> _Handover | None:
        """The cheapest hand-over between two workers; of these, in the call where the giver does most beyond the
        receiver. None that would make the receiver as busy as the busiest worker is, of all these calls or of one, nor
        one that leaves a call less even. None has fewer fills than `fewest`."""
        shared = [index for index in calls if giver in self._work[index] and receiver in self._work[index]]
        more = {index: self._work[index][giver] - self._work[index][receiver] for index in shared}
        found: _Handover | None = None
        for index in sorted(shared, key=lambda index: -more[index]):
            most = max(self._work[index].values()) - self._work[index][receiver] + _ROUNDING
            least = min(gap, most, more[index] + _ROUNDING)
            fits = [shard for shard in self._active[index][giver] if 0 < self._share(index, shard) < least]
            handover = self._cheapest(index, fits, giver, receiver) if fits else None
            if handover is not None and (found is None or handover.num_fills < found.num_fills):
                found = handover
                if found.num_fills <= fewest:
                    break
        return found

    def _cheapest(self, call: int, shards: Sequence[int], giver: Rank, receiver: Rank) -> _Handover | None:
        """The cheapest hand-over of one of these shards; of equal ones the most loaded."""
        idle, load = self._idle[call][receiver], self._loads.get(call)
        shards = sorted(shards, key=lambda shard: (-load[shard] if load else 0.0, shard))
        copied = next((shard for shard in shards if shard in idle), None)
        if copied is not None:
            return _Handover(0, call, copied, giver, receiver)
        moving = [shard for shard in shards if self._may_go(call, shard, giver, receiver)]
        if moving and self._has_room(call, receiver):
            return _Handover(1, call, moving[0], giver, receiver)
        places = self._places[call]
        rich = max(idle, key=lambda copy: (len(places[copy]), -copy), default=None)
        for shard in moving:
            is_apart = self._may_go(call, shard, None, receiver)
            if rich is not None and is_apart and len(places[rich]) > len(places[shard]):
                return _Handover(1, call, shard, giver, receiver, dropped=rich)
        for shard in moving:
            for copy in sorted(idle):
                if copy not in self._active[call][giver] and self._may_go(call, copy, receiver, giver):
                    return _Handover(2, call, shard, giver, receiver, swapped=copy)
        return None

    def _exchange(self, calls: Sequence[int], giver: Rank, receiver: Rank, gap: float) -> list[_Handover]:
        """No slot is free, and none has a copy. One of the two shards stays elsewhere while the slots change. Of use
        where shards have different loads."""
        for call in (call for call in calls if call in self._loads):
            work, places, least = self._work[call], self._places[call], 0.0
            if giver not in work or receiver not in work:
                continue
            least = min(gap, work[giver] - work[receiver] + _ROUNDING)
            for shard in sorted(self._active[call][giver]):
                for other in sorted(self._active[call][receiver]):
                    gain = self._share(call, shard) - self._share(call, other)
                    if not _ROUNDING < gain < least or len(places[shard]) == len(places[other]) == 1:
                        continue
                    if self._may_go(call, shard, giver, receiver) and self._may_go(call, other, receiver, giver):
                        return [_Handover(2, call, shard, giver, receiver, exchanged=other)]
        return []

    def _may_go(self, call: int, shard: int, giver: Rank | None, receiver: Rank) -> bool:
        """No two copies on one device. Without `giver`: that one stays."""
        devices = {self._rooms[rank].device for rank in self._places[call][shard] if rank != giver}
        return receiver not in self._places[call][shard] and self._rooms[receiver].device not in devices

    def _has_room(self, call: int, rank: Rank) -> bool:
        num_held, room = len(self._active[call][rank]) + len(self._idle[call][rank]), self._rooms[rank]
        if num_held >= room.of_layer(call).num_slots:
            return False
        return call not in self._heads or not room.num_pieces or self._num_pieces[rank] < room.num_pieces

    def _add(self, call: int, shard: int, rank: Rank) -> None:
        self._places[call][shard].add(rank)
        self._num_pieces[rank] += call in self._heads

    def _drop(self, call: int, copy: int, rank: Rank) -> None:
        self._idle[call][rank].remove(copy)
        self._places[call][copy].remove(rank)
        self._num_pieces[rank] -= call in self._heads

    def _carry_out(self, handover: _Handover) -> None:
        num_fills, call, shard, giver, receiver, dropped, swapped, exchanged = handover
        active, idle, work = self._active[call], self._idle[call], self._share(call, shard)
        self._forget(call)
        active[giver].remove(shard)
        active[receiver].add(shard)
        total = self._total[self.before.calls[call].kind]
        for rank, part in ((giver, -work), (receiver, work)):
            self._work[call][rank] += part
            total[rank] += part
        if not num_fills:
            idle[receiver].remove(shard)
            idle[giver].add(shard)
            return
        if dropped is not None:
            self._drop(call, dropped, receiver)
            self._add(call, shard, receiver)
            idle[giver].add(shard)
            return
        self._places[call][shard].discard(giver)
        self._num_pieces[giver] -= call in self._heads
        self._add(call, shard, receiver)
        if swapped is not None:
            self._drop(call, swapped, receiver)
            self._add(call, swapped, giver)
            idle[giver].add(swapped)
        if exchanged is not None:
            self._carry_out(_Handover(1, call, exchanged, receiver, giver))


class _FreeWays:
    """The ways without a fill from the busiest worker to others. They are looked for once for all receivers, as far as
    it takes to find the next one: which ways there are depends on a receiver only in which shares are not too large for
    it."""

    def __init__(self, plan: _Plan, calls: Sequence[int], busiest: Rank) -> None:
        self.busiest = busiest
        self._plan = plan
        self._calls = calls
        self._most: dict[int, float] = {}
        self._shares: list[float] = []
        self._searches: dict[int, tuple[dict[Rank, _Handover], deque[Rank]]] = {}

    def to(self, receiver: Rank, gap: float) -> list[_Handover]:
        """The shortest one. From its end on: each worker has room when it receives."""
        last = self._look_for(receiver, gap)
        way: list[_Handover] = []
        at = receiver
        while at in last and at != self.busiest:
            way.append(last[at])
            at = last[at].giver
        return way

    def _look_for(self, receiver: Rank, gap: float) -> dict[Rank, _Handover]:
        """The last hand-over on the way to each worker that was found so far."""
        if not self._most:
            limits = [self._plan.limits(call) for call in self._calls]
            self._most = {call: most for call, (most, _) in zip(self._calls, limits, strict=True)}
            self._shares = sorted(frozenset[float]().union(*(shares for _, shares in limits)))
        last, queue = self._searches.setdefault(bisect_left(self._shares, gap), ({}, deque([self.busiest])))
        while queue and receiver not in last:
            giver = queue.popleft()
            for call in self._calls:
                self._look_in(call, giver, gap, last, queue)
        return last

    def _look_in(self, call: int, giver: Rank, gap: float, last: dict[Rank, _Handover], queue: deque[Rank]) -> None:
        """What one worker can hand over in one call, so that its busiest worker does not get busier."""
        work, most = self._plan.work(call), self._most[call]
        for shard, target, share in self._plan.free(call, giver):
            if target not in last and target != self.busiest and share < gap and work[target] + share <= most:
                last[target] = _Handover(0, call, shard, giver, target)
                queue.append(target)
