"""The places of experts: what workers hold, which slots they fill next, and when other places become the goal."""

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from everserve.control.decide.cluster import ClusterState, Step, who
from everserve.control.decide.effects import Show, Tell
from everserve.control.decide.places import (
    balanced_placement,
    is_mapped_elsewhere,
    is_settled,
    mapped_in_vain,
    new_placement,
    next_fills,
    slots_left_over,
    what_is_held,
)
from everserve.control.decide.seats import Seat
from everserve.plan.mapping import not_needed
from everserve.plan.moves import IsFree, missing
from everserve.tables.calls import ShardKind
from everserve.tables.ids import Epoch, Rank, Role
from everserve.tables.placement import Placement
from everserve.tables.remembered import remembered
from everserve.tables.slots import EMPTY, FailedFill, Fill, HeldSlots, Place
from everserve.words import count

_MOST_MAPPED = 128  # in one message: nothing is copied

# -- what workers hold and use -----------------------------------------------------------------------


def hold(
    cluster: ClusterState,
    seat: Seat,
    slots: HeldSlots,
    failed: Sequence[FailedFill] = (),
    num_done: int = 0,
    now: float = 0.0,
) -> Step:
    """Routes follow what workers hold."""
    has_changed = seat.held is None or seat.held.experts != slots.experts
    is_less = seat.held is not None and has_changed and _is_less(seat.held, slots)
    seat.process.held, changes = slots, seat.process.changes
    was_stopped = changes.is_stopped
    changes.note_done(num_done)
    is_stopped = was_stopped and changes.is_idle  # what it was told counted as soon mapped, and as changing
    has_changed |= is_stopped
    cluster.is_moving = cluster.routes is not None
    not_mapped = [one for one in failed if slots.is_mapped(Place(one.call_index, one.slot))]
    cluster.refused.update((seat.rank, one.call_index, one.expert) for one in not_mapped)
    if is_less or not_mapped or is_stopped:
        replace_missed(cluster)  # memory was withdrawn, or does not hold what it should
    if len(failed) > len(not_mapped):
        changes.again_at = now + cluster.policy.fill_again_s
    if failed:
        return Step(
            f"{who(seat)} could not load {count(len(failed), 'expert')} (last: {failed[-1].reason})",
            publish_soon=(has_changed or bool(not_mapped)) and seat.can_serve,
            change_soon=True,
        )
    return Step(f"{who(seat)} holds other experts", publish_soon=has_changed and seat.can_serve, change_soon=True)


def _is_less(before: HeldSlots, now: HeldSlots) -> bool:
    """Whether a mapped slot is empty now."""
    if before.num_mapped != now.num_mapped:
        return False
    changed = [i for i, slots in enumerate(before.experts) if slots != now.experts[i]]
    return any(now.mapped(i)[slot] == EMPTY != e for i in changed for slot, e in before.mapped(i).items())


def assume_memory(cluster: ClusterState, seat: Seat) -> None:
    """After an orchestrator that has died: the memory of a seat whose worker has not reported holds what was planned.
    A worker that is told to map something that is not there says so."""
    placement = cluster.goal.placement
    planned = placement.seat(seat.rank) if placement is not None else None
    if placement is not None and planned is not None and seat.held is None:
        experts = planned.slots(cluster.capacity.slots(len(placement.calls))).experts
        seat.left = HeldSlots(experts=experts, generations=tuple((0,) * len(slots) for slots in experts))


def acknowledge(cluster: ClusterState, seat: Seat, epoch: Epoch) -> Step:
    """Update the gateway if this changes which workers are behind the published routes."""
    oldest = cluster.oldest_used()
    seat.process.acknowledged = max(seat.process.acknowledged, epoch)
    seat.touch()
    if cluster.oldest_used() != oldest:  # slots that only older routes led to are free now
        cluster.is_moving = cluster.routes is not None
    tables, reason = cluster.note_use(seat), f"{who(seat)} uses the routes of epoch {epoch}"
    return Step(reason, (Show(tables),) if tables is not None else (), change_soon=True)


def owes_changes(cluster: ClusterState) -> bool:
    """Whether there may be slots to fill or to clear."""
    return cluster.is_moving and cluster.goal.placement is not None and not cluster.ending


def change_slots(cluster: ClusterState) -> list[Tell]:
    """The next slots to fill, on the way from what is held to the goal. What can be mapped comes first: streams wait
    for it, and it takes no time."""
    if not owes_changes(cluster):
        return []
    cluster.is_moving = False
    assert cluster.goal.placement is not None
    seats = tuple(cluster.seats.values())
    oldest = cluster.oldest_used()

    def is_free(rank: Rank, place: Place) -> bool:
        return oldest >= cluster.first_epoch and cluster.last_named.epoch(rank, place) < oldest

    has_mapped = any(seat.can_serve and seat.held is not None and seat.held.num_mapped for seat in seats)

    def may_change(rank: Rank, place: Place) -> bool:
        return is_free(rank, place) and not (has_mapped and is_mapped_elsewhere(seats, rank, place))

    placement = cluster.goal.placement
    stopped = [seat.stop() for seat in mapped_in_vain(cluster.goal, cluster.seats)]
    told = [*_map(cluster), *_unmap(cluster, placement, is_free)]
    fills = next_fills(placement, seats, cluster.given_up, may_change, cluster.policy)
    told += [cluster.seats[rank].fill(fills) for rank, fills in fills.items()]
    return [*stopped, *told, *_clear_left_over(cluster, placement, may_change)]


def _map(cluster: ClusterState) -> Iterator[Tell]:
    """Experts without a place whose weights are in memory that a survivor reaches."""
    if not any(seat.maps and seat.process.changes.is_idle for seat in cluster.seats.values()):
        return
    moves = cluster.mappings()
    for seat in [cluster.seats[rank] for rank in sorted({move.rank for move in moves})]:
        if seat.process.changes.is_idle:
            yield seat.fill(tuple(move.fill for move in moves if move.rank == seat.rank)[:_MOST_MAPPED])


def _unmap(cluster: ClusterState, placement: Placement, is_free: IsFree) -> Iterator[Tell]:
    """Mapped slots that are not needed any more, and that routes do not lead to. What was given up for another reason,
    when the last routes were made, may be needed now."""
    serving = [seat for seat in cluster.seats.values() if seat.can_serve]
    idle = {seat.rank: seat for seat in serving if seat.maps and seat.process.changes.is_idle}
    if not idle:
        return
    have = what_is_held(serving)
    ready = {seat.rank for seat in serving if seat.is_ready}
    for rank, places in not_needed(placement, have, ready, cluster.given_up).items():
        seat, given_up = idle.get(rank), cluster.given_up.get(rank, frozenset())
        if seat is not None:
            free = tuple(place for place in sorted(places & given_up) if is_free(rank, place))
            if free:
                yield seat.clear(free)


def _clear_left_over(cluster: ClusterState, placement: Placement, may_change: IsFree) -> Iterator[Tell]:
    """What workers hold beyond the plan, and routes do not lead to."""
    for rank, places in slots_left_over(placement, cluster.seats.values()).items():
        seat, given_up = cluster.seats[rank], cluster.given_up.get(rank, frozenset())
        free = tuple(place for place in sorted(places & given_up) if may_change(rank, place))
        if free and seat.process.changes.is_idle:
            yield seat.clear(free)


# -- where they should be ------------------------------------------------------------------------


def replan(cluster: ClusterState) -> None:
    """A new version of the goal, if other places are better for the workers that there are now."""
    cluster.owes_cover = cluster.owes_plan = False
    _plan(cluster, covers_only=False)
    cluster.planned_for = _planned_for(cluster)


def take_back(cluster: ClusterState, seat: Seat) -> None:
    """A worker is ready. If it holds what was planned for it, in a plan for the workers that there should be now, that
    plan stays: so it is with nearly all workers of a start, and with those that come back soon."""
    seat.absence.is_replaced = False
    placement = cluster.goal.placement
    planned = placement.seat(seat.rank) if placement is not None else None
    is_as_planned = planned is not None and seat.held is not None and not missing(planned, seat.held)
    if cluster.owes_plan or not is_as_planned or cluster.planned_for != _planned_for(cluster):
        replan(cluster)


def _planned_for(cluster: ClusterState) -> tuple[object, ...]:
    """For whom the whole plan is, and which it is."""
    there = (seat for seat in cluster.seats.values() if Role.ATTENTION not in seat.goal.roles)
    wanted = ((s.rank, s.goal.device, s.goal.wanted, s.absence.is_replaced, s.absence.is_overdue) for s in there)
    absent = cluster.goal.absent
    return cluster.goal.placement, [(*one, one[1] in absent) for one in wanted]


def cover(cluster: ClusterState) -> None:
    """After a loss, which streams may wait for: places for what has none. The rest of the plan follows when no input
    waits."""
    cluster.owes_cover = cluster.owes_plan = True


def cover_now(cluster: ClusterState) -> None:
    """Covers lost experts at the end of an input, in which several workers may have been lost."""
    if cluster.owes_cover:
        cluster.owes_cover = False
        _plan(cluster, covers_only=True)


def _plan(cluster: ClusterState, covers_only: bool) -> None:
    loads, num_workers = cluster.balancer.loads.by_layer(), len(cluster.goal.seats)
    seats, capacity, measured = cluster.seats.values(), cluster.capacity, cluster.balancer.measured(num_workers)
    placement = new_placement(cluster.goal, seats, capacity, loads, measured, covers_only=covers_only)
    if placement != cluster.goal.placement:
        cluster.set_goal(placement=placement)


def balance(cluster: ClusterState, now: float) -> Iterator[Step]:
    """Now and then: other places for experts because of their load, if that is worth it."""
    balancer, goal, seats = cluster.balancer, cluster.goal, cluster.seats
    if balancer.policy is None or cluster.ending or not balancer.is_due(now):
        return
    if cluster.owes_plan or not is_settled(goal, seats):
        return
    loads = balancer.loads.by_layer(now)
    verdict = balanced_placement(goal, seats, cluster.capacity, loads, balancer.policy)
    if verdict.placement is not None:
        cluster.set_goal(placement=verdict.placement)
    yield Step(verdict.reason, balancer.tell(verdict, cluster.goal.version, now))


def see_to_experts(cluster: ClusterState, seat: Seat, now: float) -> None:
    """A worker is away. An expert without any place gets one at once. Lost redundancy can wait for the next
    incarnation."""
    if cluster.goal.placement is None or Role.ATTENTION in seat.goal.roles:
        return
    absence = seat.absence
    if not absence.is_overdue and absence.heal_at is None and math.isfinite(cluster.policy.heal_after_s):
        absence.heal_at = now + cluster.policy.heal_after_s
    replace_missed(cluster)


def replace_missed(cluster: ClusterState) -> None:
    """Workers that are away, also those that were lost before, and of whose experts one has no place now, nor can be
    mapped. Heads alone can wait for the next incarnation, which finds their KV."""
    placement = cluster.goal.placement
    if placement is None or not cluster.was_all_ready:
        return
    away = [seat for planned in placement.seats if (seat := cluster.seats[planned.rank]).is_missed]
    if not away:
        return
    is_served_LE = np.zeros((len(placement.calls), placement.num_experts), bool)
    for index, call in enumerate(placement.calls):
        is_served_LE[index] = call.kind is ShardKind.HEAD
    for held in what_is_held(seat for seat in cluster.seats.values() if seat.serves_soon or seat.can_serve).values():
        layer_F, _, expert_F = held.filled
        is_served_LE[layer_F, expert_F] = True
    for one in _soon_mapped(cluster):
        is_served_LE[one.call_index, one.expert] = True
    missed = [seat for seat in away if not is_served_LE[*_all_planned(placement, seat.rank)].all()]
    if missed:
        replace_away(cluster, *missed)


@remembered
def _all_planned(placement: Placement, rank: Rank) -> "NDArray[np.int64]":
    """[call, expert][place] of a seat."""
    planned = placement.seat(rank)
    assert planned is not None, "the seat has a part of the placement"
    experts = [(index, expert) for index in range(len(placement.calls)) for expert in planned.experts(index)]
    return np.array(experts, np.int64).reshape(len(experts), 2).T


def _soon_mapped(cluster: ClusterState) -> list[Fill]:
    """What ready workers map just now, or will."""
    ready = [seat for seat in cluster.seats.values() if seat.is_ready and not seat.process.changes.is_stopped]
    told = [fill for seat in ready if seat.is_mapping for fill in seat.filling]
    return told + [move.fill for move in cluster.mappings()]


def replace_away(cluster: ClusterState, *seats: Seat) -> None:
    """The experts of workers that are away get places elsewhere. A worker keeps those that were planned for it: if it
    comes back first, it serves them."""
    for seat in seats:
        seat.absence.is_replaced = True
    cover(cluster)
