"""What operators ask for (wire/operators.py): drain a worker, take a device away and give it back, say how healthy it
is (health.py), more or fewer workers, another role (switching.py).

The view of a Step is the answer. Without one the request is refused, and the reason of the Step says why.
"""

from dataclasses import replace

import msgspec

from everserve.control.decide import devices, health, hosts, moving, switching
from everserve.control.decide.cluster import ClusterState, Step, provision, who
from everserve.control.decide.effects import AnyEffect, Retire, Tell
from everserve.control.decide.places import has_other_places
from everserve.control.decide.scaling import Refused, is_done, may_leave, scaled, size_of, staying
from everserve.control.decide.seats import Seat
from everserve.tables.ids import Incarnation, Rank, Role
from everserve.wire.events import DeviceLost, DeviceReturned, ScaleBegan, ScaleDone
from everserve.wire.messages import Answered, Ask
from everserve.wire.operators import (
    AnyRequest,
    DeviceChangeView,
    DrainRequest,
    DrainView,
    FaultRequest,
    HealthRequest,
    ReturnRequest,
    ScaleRequest,
    ScaleView,
    SwitchRequest,
    UpgradeRequest,
)


def handle(cluster: ClusterState, ask: Ask, now: float) -> Step:
    step = _do(cluster, ask.request, now)
    if step.view is None:
        answered = Answered(id=ask.id, refused=step.reason)
    else:
        answered = Answered(id=ask.id, view=msgspec.json.encode(step.view))
    return replace(step, effects=(*step.effects, answered))


def _do(cluster: ClusterState, request: AnyRequest, now: float) -> Step:
    match request:
        case DrainRequest():
            return _drain(cluster, Rank(request.rank))
        case ScaleRequest():
            return _scale(cluster, request, now)
        case SwitchRequest():
            return switching.switch(cluster, Rank(request.rank), Role(request.role), now)
        case FaultRequest():
            if request.host is not None:
                return hosts.take_away(cluster, request.host, request.gone, now)
            assert request.device is not None, "the machine sends no signals"
            return _take_away(cluster, request.device, request.gone, now)
        case ReturnRequest():
            if request.host is not None:
                return hosts.give_back(cluster, request.host)
            assert request.device is not None, "the gateway has checked it"
            return _give_back(cluster, request.device, now)
        case HealthRequest():
            return health.say(cluster, request, now)
        case UpgradeRequest():
            raise AssertionError("the supervisor is asked for these")


def _drain(cluster: ClusterState, rank: Rank) -> Step:
    seat = cluster.seats.get(rank)
    if seat is None:
        return Step(f"there is no rank {rank}")
    if cluster.ending or not seat.is_ready:
        return Step(f"{who(seat)} is not asked to leave: {cluster.ending or f'it is {seat.state}'}")
    if awaited := _awaited(cluster, seat):
        ranks = " and ".join(f"rank {rank}" for rank in awaited)
        return Step(f"{who(seat)} is not asked to leave yet: streams need it until {ranks} can serve them; ask again")
    view = DrainView(rank=rank, incarnation=seat.incarnation)
    return Step(f"{who(seat)} is asked to leave", (seat.ask_to_leave(),), view=view)


def _awaited(cluster: ClusterState, seat: Seat) -> list[Rank]:
    """Workers of its kind that will be ready again, if streams have to wait should it leave before that. If they have
    to wait anyway, as where it is the only one of its kind, it is the operator who decides."""
    others = [
        other
        for other in cluster.seats.values()
        if other is not seat and other.goal.roles == seat.goal.roles and not other.is_retired
    ]
    staying = [other for other in others if other.stays_ready]
    if has_other_places(seat, staying) and (staying or Role.ATTENTION not in seat.goal.roles):
        return []
    return [other.rank for other in others if other.comes_back]


# -- devices -------------------------------------------------------------------------------------


def _take_away(cluster: ClusterState, device: int, is_gone: bool, now: float) -> Step:
    ranks = _ranks_on(cluster, device)
    if device in cluster.goal.lost_devices:
        return Step(f"device {device} is gone already")
    if not ranks:
        return Step(f"there is no device {device}")
    step = devices.lose(cluster, device, is_gone, now)
    told = DeviceLost(device=device, gone=is_gone, ranks=[*ranks])
    return replace(step, effects=(told, *step.effects), view=DeviceChangeView(device=device, ranks=ranks))


def _give_back(cluster: ClusterState, device: int, now: float) -> Step:
    """It is there, and it is healthy."""
    goal, ranks = cluster.goal, _ranks_on(cluster, device)
    if not ranks and device not in goal.gone:
        return Step(f"there is no device {device}")
    view = DeviceChangeView(device=device, ranks=ranks)
    if goal.level(device):
        step = health.return_healthy(cluster, device, now)
        return replace(step, view=view) if device not in cluster.goal.absent else step
    if device not in goal.gone:
        return Step(f"device {device} is not gone")
    step = devices.bring_back(cluster, device)
    told = DeviceReturned(device=device, ranks=[*ranks])
    return replace(step, effects=(told, *step.effects), view=view)


def _ranks_on(cluster: ClusterState, device: int) -> tuple[Rank, ...]:
    return tuple(worker.rank for worker in cluster.tables.members.workers if worker.device == device)


# -- more or fewer workers -----------------------------------------------------------------------


def _scale(cluster: ClusterState, asked: ScaleRequest, now: float) -> Step:
    if cluster.ending or not cluster.was_all_ready:
        return Step(cluster.ending or "the instance is still starting: try again when it serves")
    if cluster.hosts:
        return Step("an instance of several hosts cannot be scaled yet: its size is that of its start")
    empty = [rank for rank in cluster.seats if not cluster.has_process(rank)]
    stayed = {seat.rank for seat in staying(cluster.goal)}
    try:
        goal = scaled(cluster.goal, asked, cluster.capacity, empty)
    except Refused as refused:
        return Step(str(refused))
    stay = {seat.rank for seat in staying(goal)}
    new = [seat for seat in staying(goal) if seat.rank not in stayed and not cluster.has_process(seat.rank)]
    for one in new:
        before = cluster.seats.get(one.rank)
        cluster.add_seat(one, before.incarnation if before else Incarnation(0))
    cluster.set_goal(seats=goal.seats, placement=goal.placement, scaling_s=0.0)
    cluster.since.scaling_s = now
    moving.replan(cluster)
    added, retired = tuple(sorted(stay - stayed)), tuple(sorted(stayed - stay))
    size = size_of(cluster.goal)._asdict()
    effects: list[AnyEffect] = [ScaleBegan(**size, added=added, retired=retired)]
    for seat in cluster.seats.values():
        if seat.is_retired:
            seat.leave_empty("its seat is retired")
            effects.append(Retire(seat.rank))
    effects += [provision(cluster.seats[one.rank]) for one in new]
    view = ScaleView(**size, added=added, retired=retired)
    return Step(f"scale to {size_of(cluster.goal)}", tuple(effects), view=view)


def end_scaling(cluster: ClusterState, now: float) -> list[ScaleDone]:
    """Whether there are the workers that were asked for, since now."""
    if cluster.goal.scaling_s is None or not is_done(cluster.goal, cluster.seats.values()):
        return []
    cluster.set_goal(scaling_s=None)
    return [ScaleDone(**size_of(cluster.goal)._asdict(), took_s=now - cluster.since.scaling_s)]


def dismiss(cluster: ClusterState) -> list[Tell]:
    """Ask workers to leave that should retire or change their role, and are not needed any more."""
    if cluster.ending:
        return []
    return [seat.ask_to_leave() for seat in may_leave(cluster.goal, cluster.seats.values(), cluster.given_up)]
