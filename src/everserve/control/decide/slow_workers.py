"""What is done about slow workers: verdicts (slowness.py) become routes, a note for operators, and at last a drain."""

from collections.abc import Iterator

from everserve.control.decide.cluster import ClusterState, Step, who
from everserve.control.decide.effects import AnyEffect
from everserve.control.decide.places import has_other_places
from everserve.control.decide.seats import Seat
from everserve.control.decide.slowness import Standing, Verdict
from everserve.tables.goal import Wanted
from everserve.tables.ids import Rank, WorkerId
from everserve.wire.events import WorkerRecovered, WorkerSlow
from everserve.wire.messages import PaceReported


def compare(cluster: ClusterState, seat: Seat, said: PaceReported, now: float) -> Step:
    """An attention worker reports how long work took, its own and that of its peers."""
    ready = {other.id for other in _ready(cluster)}
    if seat.id in ready:
        peers = [(worker.rank, work) for worker, work in said.peers if WorkerId._make(worker) in ready]
        cluster.slowness.report(seat.rank, said.own, peers, now)
    steps = [*due(cluster, now)] or [Step(f"{who(seat)} reports its pace")]
    return Step("; ".join(step.reason for step in steps), tuple(effect for step in steps for effect in step.effects))


def due(cluster: ClusterState, now: float) -> Iterator[Step]:
    """What has changed."""
    ranks = {seat.rank for seat in _ready(cluster)}
    for verdict in cluster.slowness.decide(now, ranks, _may_leave(cluster)):
        seat = cluster.seats[verdict.rank]
        seat.touch()
        seat.process.is_slow = verdict.level in (Standing.DEMOTED, Standing.DRAINED)
        seat.note = verdict.reason if seat.is_slow else ""
        effects: list[AnyEffect] = [*_told(seat, verdict)]
        if verdict.level is Standing.DRAINED:
            effects.append(seat.ask_to_leave())
        yield Step(f"{who(seat)} is {verdict.level}: {verdict.reason}", tuple(effects))


def _told(seat: Seat, verdict: Verdict) -> Iterator[WorkerSlow | WorkerRecovered]:
    """Events for operators. There is none for a trial: it asks nothing of them."""
    if verdict.level is Standing.FINE:
        yield WorkerRecovered(rank=seat.rank, incarnation=seat.incarnation, reason=verdict.reason)
    elif verdict.level is not Standing.TRIAL:
        yield WorkerSlow(
            rank=seat.rank,
            incarnation=seat.incarnation,
            level=verdict.level,
            ratio=verdict.ratio,
            reason=verdict.reason,
        )


def next_deadline(cluster: ClusterState) -> float | None:
    """When the next trial is due."""
    if not cluster.slowness.has_demoted:
        return None
    return cluster.slowness.next_deadline({seat.rank for seat in _ready(cluster)})


def _ready(cluster: ClusterState) -> list[Seat]:
    return [seat for seat in cluster.seats.values() if seat.is_ready]


def _may_leave(cluster: ClusterState) -> set[Rank]:
    """Slow workers that are not needed: all workers of their roles are ready, one of the others is not slow, and every
    expert that they hold has another place."""
    slow = {
        rank for rank in cluster.slowness.ratios if cluster.slowness.level(rank) in (Standing.DEMOTED, Standing.TRIAL)
    }
    return {rank for rank in slow if not cluster.ending and _is_replaceable(cluster, cluster.seats[rank])}


def _is_replaceable(cluster: ClusterState, seat: Seat) -> bool:
    same = [other for other in cluster.seats.values() if other.goal.roles == seat.goal.roles and other is not seat]
    same = [other for other in same if other.goal.wanted is Wanted.STAY and not other.is_retired]
    if seat.goal.wanted is not Wanted.STAY or any(not other.is_ready for other in same):
        return False
    if all(other.is_slow for other in same):
        return False
    return has_other_places(seat, (other for other in _ready(cluster) if other is not seat))
