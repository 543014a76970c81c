"""Another role for a worker: an attention worker becomes an expert worker, or the reverse.

    asked       by an operator; or by the machine, because expert workers are gone and the others have too few slots
    leaves      as a worker that retires: its streams move, or other workers load its experts first
    changes     when its process has ended, in whatever way: the goal gives its seat the other role, memory of the
                earlier one is released, and the next incarnation starts, with the experts that are planned for it
    done        when that is ready

All of it is in the goal (`Wanted.SWITCH`, `switch_s`), so a new orchestrator goes on from there. A worker that
stands in for expert workers on devices that are gone goes back when these have returned (plan/lost_experts.py).
"""

from dataclasses import replace

import msgspec

from everserve.control.decide import moving
from everserve.control.decide.cluster import ClusterState, Step, provision, who
from everserve.control.decide.effects import AnyEffect, ChangeRole
from everserve.control.decide.seats import Absence, Seat
from everserve.plan.lost_experts import Candidate, Staff, choose_role
from everserve.tables.calls import ShardKind
from everserve.tables.goal import SeatGoal, Wanted
from everserve.tables.ids import Rank, Role
from everserve.wire.events import SwitchBegan, SwitchDone
from everserve.wire.operators import SwitchView
from everserve.words import count


def switch(cluster: ClusterState, rank: Rank, role: Role, now: float) -> Step:
    """An operator asks."""
    seat = cluster.seats.get(rank)
    if cluster.ending or not cluster.was_all_ready:
        return Step(cluster.ending or "the instance is still starting: try again when it serves")
    if seat is None or seat.goal.wanted is Wanted.RETIRE:
        return Step(f"there is no rank {rank}" if seat is None else f"rank {rank} retires")
    if cluster.goal.placement is None:
        return Step("every worker of this instance has both roles")
    if any(call.kind is ShardKind.HEAD for call in cluster.goal.placement.calls):
        return Step("with --tensor-parallel-size roles are fixed: each device has a home and a place for heads")
    if seat.goal.next_role is role:
        is_coming = seat.goal.wanted is Wanted.SWITCH
        return Step(f"rank {rank} {'becomes' if is_coming else 'is'} an {role} worker already")
    if refusal := _refusal(cluster, seat, role):
        return Step(refusal)
    step = _begin(cluster, seat, role, f"rank {rank} becomes an {role} worker: an operator asks for it", now)
    return replace(step, view=SwitchView(rank=rank, role=role))


def staff_up(cluster: ClusterState, now: float) -> list[AnyEffect]:
    """After every input: roles change if there are too few expert workers, or too many again."""
    effects: list[AnyEffect] = []
    is_allowed = cluster.lost_policy.may_switch and cluster.was_all_ready and not cluster.ending
    while is_allowed and cluster.goal.placement is not None:
        choice = choose_role(_staff(cluster), cluster.lost_policy)
        if choice.rank is None:
            break
        reason = f"rank {choice.rank} becomes an {choice.role} worker: {choice.reason}"
        effects += _begin(cluster, cluster.seats[choice.rank], choice.role, reason, now, is_automatic=True).effects
    return effects


def start_next(cluster: ClusterState, seat: Seat) -> tuple[AnyEffect, ...]:
    """The next incarnation of a seat whose last one has ended; in the other role, if it should change."""
    if seat.goal.wanted is not Wanted.SWITCH:
        return (provision(seat),)
    roles = (seat.goal.next_role,)
    placement = cluster.goal.placement
    assert placement is not None, "workers with both roles keep them"
    placed = tuple(one for one in placement.seats if one.rank != seat.rank)
    changed = msgspec.structs.replace(seat.goal, roles=roles, wanted=Wanted.STAY)
    _set_seat(cluster, changed, placement=msgspec.structs.replace(placement, seats=placed))
    seat.absence = Absence()
    seat.forget_memory()
    moving.replan(cluster)
    return ChangeRole(seat.rank), provision(seat)


def end(cluster: ClusterState, seat: Seat, now: float) -> tuple[SwitchDone, ...]:
    """The worker in this seat is ready: in its new role, if that has changed."""
    if seat.goal.switch_s is None or seat.goal.wanted is not Wanted.STAY:
        return ()
    took_s = now - cluster.since.switch_s.pop(seat.rank, now)
    _set_seat(cluster, msgspec.structs.replace(seat.goal, switch_s=None))
    return (SwitchDone(rank=seat.rank, role=seat.goal.role, took_s=took_s),)


def _begin(cluster: ClusterState, seat: Seat, role: Role, reason: str, now: float, is_automatic: bool = False) -> Step:
    """Back to the role that it has still: then it stays, or is replaced by its like if it is on its way out."""
    is_back = seat.goal.role is role
    wanted, switch_s = (Wanted.STAY, None) if is_back else (Wanted.SWITCH, 0.0)
    cluster.since.switch_s[seat.rank] = now
    stands_in = is_automatic and role is Role.EXPERT
    _set_seat(cluster, msgspec.structs.replace(seat.goal, wanted=wanted, switch_s=switch_s, stands_in=stands_in))
    moving.replan(cluster)
    return Step(reason, (SwitchBegan(rank=seat.rank, role=role, reason=reason),))


def _set_seat(cluster: ClusterState, changed: SeatGoal, **others: object) -> None:
    seats = tuple(changed if one.rank == changed.rank else one for one in cluster.goal.seats)
    cluster.set_goal(seats=seats, **others)


# -- what speaks against it ----------------------------------------------------------------------


def _refusal(cluster: ClusterState, seat: Seat, role: Role) -> str:
    """Why this worker cannot have this role; empty if it can."""
    if seat.goal.role is role:
        return ""  # it only has to stay
    if not seat.is_ready:
        return f"{who(seat)} is {seat.state}: try again when it is ready"
    others = [other for other in _staying(cluster) if other is not seat]
    return _lacks_attention(cluster, seat, others) if role is Role.EXPERT else _lacks_slots(cluster, seat, others)


def _lacks_attention(cluster: ClusterState, seat: Seat, others: list[Seat]) -> str:
    assert cluster.goal.placement is not None
    ready = [other for other in others if other.goal.role is Role.ATTENTION and other.is_ready]
    if not ready:
        return f"rank {seat.rank} is the last attention worker that is ready"
    if len(others) - len(ready) >= cluster.goal.placement.num_experts:
        return (
            f"the model has {cluster.goal.placement.num_experts} experts per layer, so at most as many expert workers"
        )
    loads = cluster.loads
    if seat.rank in loads and all(other.rank in loads for other in ready):
        num_used = loads[seat.rank].num_used_blocks
        num_free = sum(loads[other.rank].num_free_blocks for other in ready)
        if num_used > num_free:
            return (
                f"the streams of rank {seat.rank} have {num_used} KV blocks, and the other attention workers only"
                f" {num_free} free ones"
            )
    return ""


def _lacks_slots(cluster: ClusterState, seat: Seat, others: list[Seat]) -> str:
    assert cluster.goal.placement is not None
    num_experts, num_slots = cluster.goal.placement.num_experts, cluster.capacity.slots_per_layer
    num_expert = sum(other.goal.role is Role.EXPERT for other in others)
    if num_expert * num_slots >= num_experts:
        return ""
    return (
        f"{count(num_expert, 'expert worker')} with {count(num_slots, 'slot')} per layer cannot hold the model's"
        f" {num_experts} experts without rank {seat.rank}"
    )


# -- who stands in for whom ----------------------------------------------------------------------


def _staying(cluster: ClusterState) -> list[Seat]:
    goal = cluster.goal
    return [
        seat
        for seat in cluster.seats.values()
        if seat.goal.wanted is Wanted.STAY and seat.goal.device not in goal.absent
    ]


def _staff(cluster: ClusterState) -> Staff:
    goal = cluster.goal
    assert goal.placement is not None
    kept = [seat for seat in cluster.seats.values() if seat.goal.wanted is not Wanted.RETIRE]
    experts = [seat for seat in kept if seat.goal.next_role is Role.EXPERT]
    present = [seat for seat in experts if seat.goal.device not in goal.absent]
    stand_ins = [seat for seat in present if seat.goal.stands_in]
    num_away = sum(not seat.goal.stands_in for seat in experts) - sum(not seat.goal.stands_in for seat in present)
    return Staff(
        num_experts=goal.placement.num_experts,
        slots_per_layer=cluster.capacity.slots_per_layer,
        num_present=len(present),
        num_away=num_away,
        num_attention=sum(s.goal.role is Role.ATTENTION and s.is_ready for s in _staying(cluster)),
        stand_ins=tuple(seat.rank for seat in sorted(stand_ins, key=lambda seat: seat.goal.role is Role.ATTENTION)),
        candidates=tuple(_candidate(cluster, seat) for seat in kept if seat not in experts),
    )


def _candidate(cluster: ClusterState, seat: Seat) -> Candidate:
    """Best of all one that is an expert worker still, and was about to go back."""
    refusal = _refusal(cluster, seat, Role.EXPERT)
    if seat.goal.device in cluster.goal.absent:
        refusal = f"rank {seat.rank} is on device {seat.goal.device}, which is gone or left"
    if seat.goal.role is Role.EXPERT:
        return Candidate(seat.rank, -1, refusal)
    load = cluster.loads.get(seat.rank)
    return Candidate(seat.rank, load.num_streams if load is not None else 0, refusal)
