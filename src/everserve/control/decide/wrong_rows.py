"""A worker that computes wrong without knowing it: its bits tell.

A row has the same bits wherever it is computed. So now and then each expert worker says what it was asked and what it
has answered (RowComputed), and another worker that holds the same expert computes that row again (ComputeRow):

    equal      ->  nothing more is done
    different  ->  all who hold the expert compute it, these two once more; and one who does not, from the model's files
                     one does not repeat itself         ->  it computes wrong
                     a majority contradicts one         ->  so does that one
                     one against one                    ->  it cannot be told which

The device of a worker that computes wrong is evacuated, like one whose memory reports errors; its weights are given up,
for they may be what is wrong. Where it cannot be told which, operators see a note at both devices. Nothing of this
outlives the orchestrator: there will be other rows.
"""

from collections.abc import Iterable, Iterator
from typing import assert_never

from everserve.control.decide import health
from everserve.control.decide.cluster import ClusterState, Step, who
from everserve.control.decide.effects import Tell
from everserve.control.decide.inputs import SaidRow
from everserve.control.decide.row_checks import Check
from everserve.control.decide.seats import Seat
from everserve.tables.health import Diagnosis, Level
from everserve.tables.ids import WorkerId
from everserve.wire.events import RowsDiffer
from everserve.wire.messages import ComputeRow, RowComputed, RowComputedAgain

_SOURCE = "rows computed twice"  # of what is said of a device


def handle(cluster: ClusterState, given: SaidRow, now: float) -> Step:
    """A worker has computed a row, for a client or for us."""
    seat = cluster.seats.get(given.rank)
    if seat is None or seat.incarnation != given.incarnation or not seat.is_ready:
        cluster.num_stale += 1
        return Step(f"rank {given.rank} incarnation {given.incarnation} does not serve: its row is dropped")
    match given.message:
        case RowComputed():
            return _begin(cluster, seat, given.message)
        case RowComputedAgain():
            return _compare(cluster, seat, given.message, now)
        case _:
            assert_never(given.message)


def _begin(cluster: ClusterState, seat: Seat, row: RowComputed) -> Step:
    """Another one computes it, if another one can: on another device, if there is one, and each time another."""
    others = [one for one in _holders(cluster, row) if one is not seat]
    if not others:
        return Step(f"no other worker holds the expert whose row {who(seat)} has computed")
    check = Check(row)
    check.found[seat.id].append(row.y)
    id = cluster.row_checks.begin(check)
    apart = [one for one in others if one.goal.device != seat.goal.device] or others
    other = apart[id % len(apart)]
    return Step(f"{who(other)} computes a row of {who(seat)} again", tuple(_ask(check, id, [other])))


def _compare(cluster: ClusterState, seat: Seat, said: RowComputedAgain, now: float) -> Step:
    """No bits: it could not."""
    checks = cluster.row_checks
    check = checks.open.get(said.id)
    if check is None or seat.id not in check.waits_for:
        return Step(f"{who(seat)} has computed a row for which nothing waits")
    check.waits_for.discard(seat.id)
    if said.y:
        check.found[seat.id].append(said.y)
    if check.waits_for:
        return Step(f"{who(seat)} has computed a row again; others have not")
    if not check.is_unanimous and not check.is_disputed:
        check.is_disputed = True
        asks = tuple(_ask(check, said.id, [*_holders(cluster, check.row), *_one_more(cluster, check.row)]))
        if asks:
            return Step(f"{_name(cluster, check.row)} has different bits: all who hold it compute it again", asks)
    del checks.open[said.id]
    if check.is_unanimous:
        return Step(f"{_name(cluster, check.row)} has the same bits at {who(seat)}")
    return _settle(cluster, check, now)


def _ask(check: Check, id: int, seats: Iterable[Seat]) -> Iterator[Tell]:
    for seat in seats:
        check.waits_for.add(seat.id)
        message = ComputeRow(id=id, call_index=check.row.call_index, expert=check.row.expert, x=check.row.x)
        yield Tell(seat.rank, seat.incarnation, message)


def _settle(cluster: ClusterState, check: Check, now: float) -> Step:
    """Everyone who could be asked has answered, and they do not agree."""
    wrong = check.wrong()
    steps = [_blame(cluster, check, worker, bool(wrong), now) for worker in sorted(wrong or check.found)]
    return Step(
        "; ".join(step.reason for step in steps),
        tuple(effect for step in steps for effect in step.effects),
        publish_anyway=any(step.publish_anyway for step in steps),
    )


def _blame(cluster: ClusterState, check: Check, worker: WorkerId, is_certain: bool, now: float) -> Step:
    device, name = cluster.seats[worker.rank].goal.device, _name(cluster, check.row)
    told = RowsDiffer(
        rank=worker.rank,
        incarnation=worker.incarnation,
        device=device,
        layer=_layer(cluster, check.row),
        expert=check.row.expert,
        is_certain=is_certain,
    )
    words = f"rank {worker.rank} computes {name} wrong" if is_certain else f"{name} has other bits elsewhere"
    level = Level.EVACUATE if is_certain else Level.NOTE
    done = health.note(cluster, Diagnosis(device=device, level=level, reason=words, source=_SOURCE), now)
    return Step(f"{words}: {done.reason}", (told, *done.effects), publish_anyway=done.publish_anyway)


def _holders(cluster: ClusterState, row: RowComputed) -> list[Seat]:
    """Ready workers that hold the expert, in memory of their own."""
    return [seat for seat in cluster.seats.values() if seat.is_ready and _holds(seat, row)]


def _one_more(cluster: ClusterState, row: RowComputed) -> list[Seat]:
    """An expert worker that does not hold it, for a third opinion; on a device of its own, if there is one."""
    holders = _holders(cluster, row)
    devices = {seat.goal.device for seat in holders}
    others = [seat for seat in cluster.seats.values() if seat.is_ready and seat.held is not None]
    others = [seat for seat in others if seat not in holders]
    return sorted(others, key=lambda seat: seat.goal.device in devices)[:1]


def _holds(seat: Seat, row: RowComputed) -> bool:
    held = seat.held
    return held is not None and 0 <= row.call_index < len(held.experts) and row.expert in held.own(row.call_index)


def _layer(cluster: ClusterState, row: RowComputed) -> int:
    placement = cluster.goal.placement
    assert placement is not None, "some worker holds the expert"
    return placement.moe_layers[row.call_index]


def _name(cluster: ClusterState, row: RowComputed) -> str:
    return f"a row of expert {row.expert} of layer {_layer(cluster, row)}"
