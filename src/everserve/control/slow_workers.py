"""What is done about slow workers: verdicts (slowness.py) become routes, a note for operators, and at last a drain."""

from collections.abc import Iterator

from everserve.control.cluster import Cluster, Step, who
from everserve.control.effects import AnyEffect, AskToLeave, SlownessDecided
from everserve.control.events import SaidPace
from everserve.control.places import what_is_held
from everserve.control.seats import Seat
from everserve.control.slowness import Standing
from everserve.tables.goal import Wanted
from everserve.tables.ids import Rank, WorkerId
from everserve.tables.members import WorkerState
from everserve.tables.slots import EMPTY


def compare(cluster: Cluster, seat: Seat, event: SaidPace, now: float) -> Step:
    """An attention worker reports how long work took, its own and that of its peers."""
    ready = {other.id for other in _ready(cluster)}
    if seat.id in ready:
        peers = [(worker.rank, work) for worker, work in event.peers if WorkerId._make(worker) in ready]
        cluster.slowness.report(seat.rank, event.own, peers, now)
    steps = [*due(cluster, now)] or [Step(f"{who(seat)} reports its pace")]
    return Step("; ".join(step.reason for step in steps), tuple(effect for step in steps for effect in step.effects))


def due(cluster: Cluster, now: float) -> Iterator[Step]:
    """What has changed."""
    ranks = {seat.rank for seat in _ready(cluster)}
    for verdict in cluster.slowness.decide(now, ranks, _may_leave(cluster)):
        seat = cluster.seats[verdict.rank]
        seat.is_slow = verdict.level in (Standing.DEMOTED, Standing.DRAINED)
        seat.note = verdict.reason if seat.is_slow else ""
        effects: list[AnyEffect] = [SlownessDecided(seat.incarnation, verdict)]
        if verdict.level is Standing.DRAINED:
            effects.append(AskToLeave(*seat.id))
        yield Step(f"{who(seat)} is {verdict.level}: {verdict.reason}", tuple(effects))


def next_deadline(cluster: Cluster) -> float | None:
    """When the next trial is due."""
    return cluster.slowness.next_deadline({seat.rank for seat in _ready(cluster)})


def _ready(cluster: Cluster) -> list[Seat]:
    return [seat for seat in cluster.seats.values() if seat.state is WorkerState.READY]


def _may_leave(cluster: Cluster) -> set[Rank]:
    """Slow workers that are not needed: all workers of their roles are ready, one of the others is not slow, and every
    expert that they hold has another place."""
    slow = {
        rank for rank in cluster.slowness.ratios if cluster.slowness.level(rank) in (Standing.DEMOTED, Standing.TRIAL)
    }
    return {rank for rank in slow if not cluster.ending and _is_replaceable(cluster, cluster.seats[rank])}


def _is_replaceable(cluster: Cluster, seat: Seat) -> bool:
    same = [other for other in cluster.seats.values() if other.goal.roles == seat.goal.roles and other is not seat]
    same = [other for other in same if other.goal.wanted is Wanted.STAY and not other.is_retired]
    if seat.goal.wanted is not Wanted.STAY or any(other.state is not WorkerState.READY for other in same):
        return False
    if all(other.is_slow for other in same):
        return False
    return seat.held is None or _have_other_places(cluster, seat)


def _have_other_places(cluster: Cluster, seat: Seat) -> bool:
    held = what_is_held(other for other in _ready(cluster) if other is not seat).values()
    assert seat.held is not None
    return all(
        set(experts) <= set().union({EMPTY}, *(one.experts[layer] for one in held))
        for layer, experts in enumerate(seat.held.experts)
    )
