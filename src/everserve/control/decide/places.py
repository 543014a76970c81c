"""What the machine decides about the places of experts: a new placement when workers come and go, and the next slots to
fill on the way to it. Pure functions of seats, goal and routes."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec
import numpy as np

from everserve.control.decide.policy import Policy
from everserve.control.decide.seats import Seat
from everserve.plan.balance import BalancePolicy, Verdict, decide
from everserve.plan.cover import cover
from everserve.plan.dealing import Dealing, Loads
from everserve.plan.mapping import Reaches, in_vain, next_mappings, not_needed
from everserve.plan.moves import GivenUp, IsFree, Move, given_up, left_over, missing, next_moves
from everserve.plan.repair import Room, repair, replan
from everserve.tables.calls import Call, ShardKind
from everserve.tables.dealing import Dealer
from everserve.tables.goal import Capacity, Goal, Wanted
from everserve.tables.ids import NO_RANK, Rank, Role
from everserve.tables.placement import Placement, SeatExperts
from everserve.tables.routes import Routes
from everserve.tables.slots import EMPTY, Fill, HeldSlots, Place

Have = dict[Rank, HeldSlots]


def what_is_held(seats: Iterable[Seat]) -> Have:
    return {seat.rank: seat.held for seat in seats if seat.held is not None}


def has_other_places(seat: Seat, others: Iterable[Seat]) -> bool:
    """Whether these workers hold every expert that it holds."""
    held = what_is_held(others).values()
    return seat.held is None or all(
        set(experts) <= set().union({EMPTY}, *(one.experts[layer] for one in held))
        for layer, experts in enumerate(seat.held.experts)
    )


def slots_given_up(placement: Placement, seats: Collection[Seat]) -> GivenUp:
    """Slots that are needed for other experts, those whose expert has all its places elsewhere, those that are being
    filled or cleared, and mapped ones that are not needed any more: routes do not lead to them."""
    serving = [seat for seat in seats if seat.can_serve]
    ready = [seat for seat in serving if seat.is_ready]
    changing = _being_changed(serving)
    have, ranks = without(what_is_held(ready), changing), [seat.rank for seat in ready]
    found = given_up(placement, have, ranks)
    _add(found, slots_left_over(placement, seats))
    _add(found, changing)
    _add(found, not_needed(placement, what_is_held(serving), {seat.rank for seat in ready}, found))
    return found


def _add(found: GivenUp, more: GivenUp) -> None:
    for rank, places in more.items():
        found[rank] = found.get(rank, frozenset()) | places


def _being_changed(seats: Iterable[Seat]) -> GivenUp:
    changes = {seat.rank: seat.process.changes for seat in seats}
    return {rank: one.places() for rank, one in changes.items() if not one.is_idle}


def whole_calls(placement: Placement) -> list[int]:
    """All but those of heads, whose KV is where they are."""
    return [index for index, call in enumerate(placement.calls) if call.kind is not ShardKind.HEAD]


def slots_left_over(placement: Placement, seats: Collection[Seat]) -> GivenUp:
    """When everything is where it should be: until then copies may be of use, and streams may wait for routes."""
    if not holds_all(placement, {seat.rank: seat for seat in seats}):
        return {}
    ready = [seat for seat in seats if seat.is_ready]
    have = without(what_is_held(ready), _being_changed(ready))
    return left_over(placement, have, [seat.rank for seat in ready], whole_calls(placement))


def holds_all(placement: Placement, seats: Mapping[Rank, Seat]) -> bool:
    """Whether every worker of the placement is ready, with all that it should hold."""
    return all(_holds(planned, seats[planned.rank]) for planned in placement.seats)


def _holds(planned: SeatExperts, seat: Seat) -> bool:
    if not seat.is_ready or seat.held is None or seat.filling:
        return False
    return not missing(planned, seat.held)


def without(have: Have, places: GivenUp) -> Have:
    """What is held, but for these slots."""
    return {rank: _emptied(held, places[rank]) if places.get(rank) else held for rank, held in have.items()}


def _emptied(held: HeldSlots, places: frozenset[Place]) -> HeldSlots:
    experts = list(held.experts)
    changed: dict[int, list[int]] = {}
    for layer, slot in places:
        changed.setdefault(layer, [*experts[layer]])[slot] = EMPTY
    for layer, slots in changed.items():
        experts[layer] = tuple(slots)
    return msgspec.structs.replace(held, experts=tuple(experts))


def new_placement(
    goal: Goal,
    seats: Iterable[Seat],
    capacity: Capacity,
    loads: Mapping[int, Loads] | None = None,
    measured: Mapping[int, Loads] | None = None,
    *,
    covers_only: bool = False,
) -> Placement | None:
    """A placement for the expert workers that are there, or soon will be. The plan for one whose experts have places
    elsewhere, but which may come back at any moment, stays as it is: it takes part only where shards wait for it, and
    until then nothing is made even without it. `covers_only`: the first part of a plan, for which streams wait.
    """
    if goal.placement is None:
        return None
    rooms, before = [], []
    slots = capacity.slots(len(goal.placement.calls))
    staying = [seat for seat in seats if Role.ATTENTION not in seat.goal.roles and _is_to_stay(goal, seat)]
    for seat in staying:
        planned = goal.placement.seat(seat.rank)
        if seat.absence.is_replaced and planned is not None:
            awaited = _awaited(seat, goal.placement.calls, capacity)
            rooms.append(_room(seat, capacity, awaited))
            before.append(planned)
        else:
            rooms.append(_room(seat, capacity, slots))
            before.append(_there(seat, planned, slots))
    there = msgspec.structs.replace(goal.placement, seats=tuple(before))
    if covers_only and all(call.kind is ShardKind.EXPERT for call in there.calls):
        return cover(there, rooms, loads)
    dealing = Dealing(dealers(goal))
    if covers_only or any(seat.absence.is_replaced and not seat.absence.is_overdue for seat in staying):
        return repair(there, rooms, loads, dealing)
    return replan(there, rooms, loads, dealing, measured)


def _is_to_stay(goal: Goal, seat: Seat) -> bool:
    return seat.goal.wanted is Wanted.STAY and seat.goal.device not in goal.absent


def _room(seat: Seat, capacity: Capacity, slots: tuple[int, ...]) -> Room:
    return Room(seat.rank, seat.goal.device, capacity.slots_per_layer, slots, capacity.head_pieces)


def _awaited(seat: Seat, calls: Sequence[Call], capacity: Capacity) -> tuple[int, ...]:
    """Slots by call, where what was planned on a worker that is away gets no other place."""
    waits = capacity.heads_stay and seat.is_awaited
    slots = zip(calls, capacity.slots(len(calls)), strict=True)
    return tuple(num if waits and call.kind is ShardKind.HEAD else 0 for call, num in slots)


def dealers(goal: Goal) -> tuple[Dealer, ...]:
    """Attention workers that there should be: they send rows."""
    absent = goal.absent
    stay = [seat for seat in goal.seats if seat.wanted is Wanted.STAY and seat.device not in absent]
    beside = {seat.device: seat.rank for seat in reversed(stay) if Role.ATTENTION not in seat.roles}
    return tuple(Dealer(seat.rank, beside.get(seat.device, NO_RANK)) for seat in stay if Role.ATTENTION in seat.roles)


def is_settled(goal: Goal, seats: Mapping[Rank, Seat]) -> bool:
    """Every worker is ready but those that stay away, no slot is being filled, and everything is where it should be."""
    away = [seat for seat in seats.values() if seat.is_retired or seat.goal.device in goal.absent]
    are_ready = all(seat.is_ready for seat in seats.values() if seat not in away)
    return are_ready and goal.placement is not None and holds_all(goal.placement, seats)


def balanced_placement(
    goal: Goal, seats: Mapping[Rank, Seat], capacity: Capacity, loads: Mapping[int, Loads], policy: BalancePolicy
) -> Verdict:
    """Better places for the experts of workers that are all ready, if they are worth the moves."""
    assert goal.placement is not None
    experts = [seats[planned.rank] for planned in goal.placement.seats]
    slots = capacity.slots(len(goal.placement.calls))
    before = tuple(_there(s, goal.placement.seat(s.rank), slots) for s in experts)
    placement = msgspec.structs.replace(goal.placement, seats=before)
    rooms = [_room(seat, capacity, slots) for seat in experts]
    return decide(placement, what_is_held(experts), rooms, loads, Dealing(dealers(goal)), policy)


def _there(seat: Seat, planned: SeatExperts | None, slots: Sequence[int]) -> SeatExperts:
    """What the planner begins with: what a ready worker holds or will hold soon, then what was planned for it and has
    room. So a plan that was never carried out is not defended against what is there."""
    active, shadows = [], []
    for layer, num_slots in enumerate(slots):
        wanted = planned.experts(layer) if planned is not None else ()
        held = [*seat.held.own(layer)] if seat.held is not None and seat.is_ready else []
        for fill in seat.filling:
            if fill.slot < len(held) and fill.call_index == layer:
                held[fill.slot] = fill.expert
        there = dict.fromkeys(expert for expert in held if expert != EMPTY)
        missing = [expert for expert in wanted if expert not in there]
        there |= dict.fromkeys(missing[: max(num_slots - len(there), 0)])
        served = frozenset(planned.active[layer]) if planned is not None else frozenset()
        active.append(tuple(expert for expert in there if expert in served))
        shadows.append(tuple(expert for expert in there if expert not in served))
    return SeatExperts(rank=seat.rank, active=tuple(active), shadows=tuple(shadows))


# -- what workers map of the memory of others -----------------------------------------------------


def mappings(
    goal: Goal,
    seats: Mapping[Rank, Seat],
    loads: Callable[[], Mapping[int, Loads]],
    refused: Collection[tuple[Rank, int, int]] = (),
) -> list[Move]:
    """What ready workers should map now, besides what they were told already. Memory is dropped with its device, and
    with a seat that retires or changes its role."""
    if goal.placement is None:
        return []
    left = _left(goal, seats)
    if not left:
        return []
    have = what_is_held(seat for seat in seats.values() if seat.is_ready)
    changes = {rank: seats[rank].process.changes for rank in have}
    told = {rank: (one.filling, one.clearing) for rank, one in changes.items() if not one.is_idle}

    return next_mappings(goal.placement, have, left, told, _reaches(seats), whole_calls(goal.placement), loads, refused)


def mapped_in_vain(goal: Goal, seats: Mapping[Rank, Seat]) -> list[Seat]:
    """Workers that were told to map what a ready worker has in its own memory by now, or what was lost with its
    device."""
    mapping = [seat for seat in seats.values() if seat.is_mapping and not seat.process.changes.is_stopped]
    telling = {seat.rank: seat.filling for seat in mapping}
    if not telling:
        return []
    left = _left(goal, seats)
    ready = what_is_held(seat for seat in seats.values() if seat.is_ready)
    return [seats[rank] for rank in in_vain(telling, ready, left, _reaches(seats))]


def _left(goal: Goal, seats: Mapping[Rank, Seat]) -> Have:
    """What is in the memory of seats that no worker serves now. One that has reported what it holds is about to."""
    staying = [seat for seat in seats.values() if seat.goal.wanted is Wanted.STAY]
    away = [seat for seat in staying if not seat.serves_soon and seat.goal.device not in goal.absent]
    return {seat.rank: seat.in_memory for seat in away if seat.in_memory is not None}


def _reaches(seats: Mapping[Rank, Seat]) -> Reaches:
    def reaches(rank: Rank, lender: Rank) -> bool:
        """Whether one rank reaches another's memory: on CPUs all memory of the host, whichever device it counts as."""
        one, other = seats[rank].goal, seats[lender].goal
        return (one.host, one.gpu) == (other.host, other.gpu)

    return reaches


def is_mapped_elsewhere(seats: Iterable[Seat], rank: Rank, place: Place) -> bool:
    """Whether another worker uses what this slot holds, perhaps where it lies: it may not change before that ends."""
    held = {seat.rank: seat.held for seat in seats if seat.can_serve and seat.held is not None}
    if rank not in held:
        return False
    expert = held[rank].experts[place.call_index][place.slot]
    others = [one for other, one in held.items() if other != rank and one.num_mapped]
    return expert != EMPTY and any(expert in one.mapped(place.call_index).values() for one in others)


class LastNamed:
    """Keeps for every slot the latest epoch whose routes lead to it."""

    def __init__(self) -> None:
        self._epoch_RLS = np.zeros((0, 0, 0), np.int64)

    def note(self, routes: Routes) -> None:
        """These routes are published."""
        layer, _, _ = np.nonzero(routes.array()[..., 0] != NO_RANK)
        rank, slot = routes.array()[routes.array()[..., 0] != NO_RANK].T.astype(np.int64)
        if not len(rank):
            return
        grown = np.maximum(self._epoch_RLS.shape, (rank.max() + 1, routes.num_layers, slot.max() + 1))
        missing = [(0, new - old) for old, new in zip(self._epoch_RLS.shape, grown, strict=True)]
        self._epoch_RLS = np.pad(self._epoch_RLS, missing)
        self._epoch_RLS[rank, layer, slot] = routes.epoch

    def epoch(self, rank: Rank, place: Place) -> int:
        """0: no routes have led there."""
        at = (rank, place.call_index, place.slot)
        is_known = all(index < size for index, size in zip(at, self._epoch_RLS.shape, strict=True))
        return int(self._epoch_RLS[at]) if is_known else 0


def next_fills(
    placement: Placement, seats: Sequence[Seat], leaving: GivenUp, is_free: IsFree, policy: Policy
) -> dict[Rank, tuple[Fill, ...]]:
    """What to tell which worker to fill now: one message to a worker at a time, the most urgent first. `is_free`: no
    routes that an attention worker may follow lead to this slot."""
    ready = [seat for seat in seats if seat.is_ready]
    have = what_is_held(ready)
    idle = [one.rank for one in ready if one.process.changes.is_idle and one.process.changes.again_at is None]
    moves = next_moves(placement, have, [seat.rank for seat in ready], idle, leaving, is_free)
    by_rank: dict[Rank, list[Move]] = {}
    for move in moves:
        by_rank.setdefault(move.rank, []).append(move)
    told = {}
    for rank in (rank for rank in idle if rank in by_rank):
        mine = by_rank[rank]
        told[rank] = tuple(move.fill for move in mine if move.urgency == mine[0].urgency)[: policy.max_fills]
    return told
