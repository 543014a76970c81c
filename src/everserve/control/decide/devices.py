"""What becomes of a device as a whole: it is lost with all that is on it, or there again."""

from everserve.control.decide import membership, moving, switching
from everserve.control.decide.cluster import ClusterState, Step
from everserve.control.decide.effects import DropDevice, Kill
from everserve.plan.evacuation import devices_away, why_empty
from everserve.tables.members import WorkerState
from everserve.words import count


def lose(cluster: ClusterState, device: int, is_gone: bool, now: float) -> Step:
    """All workers on it at once, and all that was in its memory. `is_gone`: it does not come back by itself."""
    seats = [seat for seat in cluster.seats.values() if seat.goal.device == device]
    if not seats:
        return Step(f"there is no device {device}")
    if is_gone and device not in cluster.goal.gone:
        cluster.set_goal(gone=(*cluster.goal.gone, device))
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
    reason = f"device {device} is {'gone' if is_gone else 'lost'} with {count(len(alive), 'worker')}"
    return Step(reason, (*kills, DropDevice(device), *effects))


def bring_back(cluster: ClusterState, device: int) -> Step:
    """It was gone. Workers start on it, unless its health does not allow that."""
    cluster.set_goal(gone=tuple(other for other in cluster.goal.gone if other != device))
    cluster.set_goal(away=devices_away(cluster.goal, cluster.capacity, cluster.quiet()))
    moving.replan(cluster)
    seats = [seat for seat in cluster.seats.values() if seat.goal.device == device and device not in cluster.goal.away]
    empty = [seat for seat in seats if seat.state is WorkerState.GONE and not seat.is_retired]
    starts = [effect for seat in empty for effect in switching.start_next(cluster, seat)]
    return Step(f"device {device} is back: {count(len(empty), 'worker', 'start')}", tuple(starts))
