"""What operators ask for: drain a worker, take a device away and give it back (with its health: health.py), more or
fewer workers, another role, stop.

The reason of a Step is the answer to the operator.
"""

from everserve.control import membership, moving, switching
from everserve.control.cluster import Cluster, Step, provision, who
from everserve.control.effects import AnyEffect, AskToLeave, BeginScaling, DropDevice, EndScaling, Kill, Retire
from everserve.control.events import Asked, DeviceLost, DrainAsked, ScaleAsked, Stopping, SwitchAsked
from everserve.control.scaling import Refused, is_done, may_leave, scaled, size_of, staying
from everserve.control.seats import Seat
from everserve.plan.evacuation import devices_away, why_empty
from everserve.tables.ids import Incarnation
from everserve.tables.members import WorkerState


def handle(cluster: Cluster, event: Asked, now: float) -> Step:
    match event:
        case DrainAsked():
            return _drain(cluster, event)
        case ScaleAsked():
            return _scale(cluster, event, now)
        case SwitchAsked():
            return switching.switch(cluster, event.rank, event.role, now)
        case DeviceLost():
            return lose_device(cluster, event, now)
        case Stopping():
            cluster.end_for("the instance stops")
            return Step("the instance stops: no process is started any more")


def _drain(cluster: Cluster, asked: DrainAsked) -> Step:
    seat = cluster.seats.get(asked.rank)
    if seat is None:
        return Step(f"there is no rank {asked.rank}")
    if cluster.ending or seat.state is not WorkerState.READY:
        return Step(f"{who(seat)} is not asked to leave: {cluster.ending or f'it is {seat.state}'}")
    seat.is_asked_to_leave = True
    return Step(f"{who(seat)} is asked to leave", (AskToLeave(*seat.id),))


# -- devices -------------------------------------------------------------------------------------


def lose_device(cluster: Cluster, lost: DeviceLost, now: float) -> Step:
    """All workers on it at once, and all that was in its memory."""
    device, goal = lost.device, cluster.goal
    seats = [seat for seat in cluster.seats.values() if seat.goal.device == device]
    if not seats:
        return Step(f"there is no device {device}")
    if lost.is_gone and device not in goal.gone:
        cluster.set_goal(gone=(*goal.gone, device))
    alive = [seat for seat in seats if seat.state is not WorkerState.GONE]
    kills = [Kill(*seat.id) for seat in alive]
    for seat in seats:
        seat.forget_memory()
    steps = [membership.lose(cluster, seat, "crash", f"its device {device} was lost", now) for seat in alive]
    for seat in seats:
        if device in cluster.goal.gone:
            seat.leave_empty(why_empty(cluster.goal, device))
    moving.cover(cluster)
    moving.replace_missed(cluster)
    effects = [effect for step in steps for effect in step.effects]
    reason = f"device {device} is {'gone' if lost.is_gone else 'lost'} with {len(alive)} workers"
    return Step(reason, (*kills, DropDevice(device), *effects))


def return_device(cluster: Cluster, device: int) -> Step:
    """Workers start on it, unless its health does not allow that."""
    gone = tuple(other for other in cluster.goal.gone if other != device)
    if gone == cluster.goal.gone:
        return Step(f"device {device} is not gone")
    cluster.set_goal(gone=gone)
    cluster.set_goal(away=devices_away(cluster.goal, cluster.capacity, cluster.quiet()))
    moving.replan(cluster)
    seats = [seat for seat in cluster.seats.values() if seat.goal.device == device and device not in cluster.goal.away]
    empty = [seat for seat in seats if seat.state is WorkerState.GONE and not seat.is_retired]
    starts = [effect for seat in empty for effect in switching.start_next(cluster, seat)]
    return Step(f"device {device} is back: {len(empty)} workers start", tuple(starts))


# -- more or fewer workers -----------------------------------------------------------------------


def _scale(cluster: Cluster, asked: ScaleAsked, now: float) -> Step:
    if cluster.ending or not cluster.was_all_ready:
        return Step(cluster.ending or "the instance is still starting: try again when it serves")
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
        cluster.seats[one.rank] = Seat(one, incarnation=before.incarnation if before else Incarnation(0))
    cluster.set_goal(seats=goal.seats, placement=goal.placement, scaling_since_s=now)
    moving.replan(cluster)
    effects: list[AnyEffect] = [BeginScaling(tuple(sorted(stay - stayed)), tuple(sorted(stayed - stay)))]
    for seat in cluster.seats.values():
        if seat.is_retired:
            seat.leave_empty("its seat is retired")
            effects.append(Retire(seat.rank))
    effects += [provision(cluster.seats[one.rank]) for one in new]
    return Step(f"scale to {size_of(cluster.goal)}", tuple(effects))


def end_scaling(cluster: Cluster) -> list[EndScaling]:
    """Whether there are the workers that were asked for, since now."""
    since_s = cluster.goal.scaling_since_s
    if since_s is None or not is_done(cluster.goal, cluster.seats.values()):
        return []
    cluster.set_goal(scaling_since_s=None)
    return [EndScaling(since_s)]


def dismiss(cluster: Cluster) -> list[AskToLeave]:
    """Ask workers to leave that should retire or change their role, and are not needed any more."""
    if cluster.ending:
        return []
    seats = may_leave(cluster.goal, cluster.seats.values(), cluster.given_up)
    for seat in seats:
        seat.is_asked_to_leave = True
    return [AskToLeave(*seat.id) for seat in seats]
