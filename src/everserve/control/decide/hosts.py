"""What becomes of a host as a whole: it joins, it is lost with its workers and all its memory, it joins again.

    lost      its seats stay empty, and its workers' streams go on elsewhere; when it joins again workers start on it
    gone      an operator says that it does not come back: its seats move to the other hosts. When it is returned and
              joins, it gets some of the seats of the fullest host

The first host is always there: its orchestrator decides.
"""

from dataclasses import replace

import msgspec

from everserve.control.decide import membership, moving, switching
from everserve.control.decide.cluster import ClusterState, Step
from everserve.control.decide.effects import AnyEffect, DropHost
from everserve.control.decide.seats import Seat
from everserve.tables.goal import Wanted
from everserve.tables.ids import Rank
from everserve.tables.members import Host, HostState, WorkerState
from everserve.wire.events import HostLost, HostReturned
from everserve.wire.messages import AdmitHost, EvictHost, HostJoined, HostLeft
from everserve.wire.operators import HostChangeView
from everserve.words import count


def join(cluster: ClusterState, said: HostJoined) -> Step:
    """It is there, with a boot that has nothing yet; or the carrier tells a new orchestrator of it."""
    host = said.host
    was = cluster.hosts[host].state if host in cluster.hosts else HostState.AWAITED
    cluster.hosts[host] = Host(host=host, state=HostState.SERVING, name=said.name, address=said.address)
    if host not in cluster.goal.lost_hosts:
        return Step(f"host {host} ({said.name}) is there", publish_anyway=was is not HostState.SERVING)
    cluster.set_goal(lost_hosts=tuple(other for other in cluster.goal.lost_hosts if other != host))
    moving.replan(cluster)
    starts = [effect for seat in _empty(cluster, host) for effect in switching.start_next(cluster, seat)]
    leaves = [seat.ask_to_leave() for seat in _move_here(cluster, host)]
    ranks = sorted(seat.rank for seat in cluster.seats.values() if seat.goal.host == host)
    told = HostReturned(host=host, name=said.name, ranks=[*ranks])
    reason = f"host {host} ({said.name}) has joined again: {count(len(ranks), 'worker', 'start')}"
    return Step(reason, (told, *starts, *leaves), publish_anyway=True)


def leave(cluster: ClusterState, said: HostLeft, now: float) -> Step:
    """The carrier has given it up."""
    if said.host in cluster.goal.lost_hosts or said.host not in cluster.hosts:
        return Step(f"host {said.host} was lost already")
    return _lose(cluster, said.host, said.reason, is_gone=False, now=now)


def take_away(cluster: ClusterState, host: int, is_gone: bool, now: float) -> Step:
    """An operator's fault."""
    if host == 0:
        return Step("the first host cannot be lost by itself: with it the instance ends")
    if host not in cluster.hosts:
        return Step(f"there is no host {host}")
    if host in cluster.goal.gone_hosts or (host in cluster.goal.lost_hosts and not is_gone):
        return Step(f"host {host} is {cluster.hosts[host].state} already")
    view = HostChangeView(host=host, ranks=_ranks(cluster, host))
    step = _lose(cluster, host, "an operator says so", is_gone, now)
    return replace(step, effects=(EvictHost(host=host, gone=is_gone), *step.effects), view=view)


def give_back(cluster: ClusterState, host: int) -> Step:
    """An operator says that it may join again."""
    goal = cluster.goal
    if host not in goal.gone_hosts:
        return Step(f"host {host} is not gone" if host in cluster.hosts else f"there is no host {host}")
    cluster.set_goal(gone_hosts=tuple(other for other in goal.gone_hosts if other != host))
    cluster.hosts[host] = msgspec.structs.replace(cluster.hosts[host], state=HostState.LOST)
    view = HostChangeView(host=host, ranks=_ranks(cluster, host))
    return Step(f"host {host} may join again", (AdmitHost(host=host),), publish_anyway=True, view=view)


def _lose(cluster: ClusterState, host: int, reason: str, is_gone: bool, now: float) -> Step:
    """All its workers at once. Each seat stays as it is planned, unless the host does not come back."""
    goal = cluster.goal
    was_lost = host in goal.lost_hosts
    cluster.set_goal(
        lost_hosts=(*{*goal.lost_hosts, host},), gone_hosts=(*{*goal.gone_hosts, *([host] if is_gone else [])},)
    )
    state = HostState.GONE if is_gone else HostState.LOST
    cluster.hosts[host] = msgspec.structs.replace(cluster.hosts[host], state=state)
    seats = [seat for seat in cluster.seats.values() if seat.goal.host == host]
    alive = [seat for seat in seats if seat.state is not WorkerState.GONE]
    for seat in seats:
        seat.forget_memory()
    why = f"host {host} was lost: {reason}"
    steps = [membership.lose(cluster, seat, "crash", why, now, has_ended=True) for seat in alive]
    effects: list[AnyEffect] = [effect for step in steps for effect in step.effects]
    for seat in seats:
        seat.leave_empty(f"its host {host} is {state}")
    if is_gone:
        effects += _move_away(cluster, seats)
    moving.cover(cluster)
    moving.replace_missed(cluster)
    told = [] if was_lost else [HostLost(host=host, reason=reason, gone=is_gone, ranks=[seat.rank for seat in alive])]
    said = f"host {host} is {state} with {count(len(alive), 'worker')}: {reason}"
    return Step(said, (*told, DropHost(host), *effects), publish_anyway=True)


def _ranks(cluster: ClusterState, host: int) -> tuple[Rank, ...]:
    return tuple(seat.rank for seat in cluster.seats.values() if seat.goal.host == host and not seat.is_retired)


def _empty(cluster: ClusterState, host: int) -> list[Seat]:
    absent = cluster.goal.absent
    seats = [seat for seat in cluster.seats.values() if seat.goal.host == host and seat.goal.device not in absent]
    return [seat for seat in seats if seat.state is WorkerState.GONE and not seat.is_retired and not cluster.ending]


def _num_seats(cluster: ClusterState) -> dict[int, int]:
    """How many seats each host has that is there."""
    there = [host for host in cluster.hosts if host not in cluster.goal.lost_hosts]
    return {host: len(_ranks(cluster, host)) for host in there}


def _move_away(cluster: ClusterState, seats: list[Seat]) -> list[AnyEffect]:
    """The seats of a host that does not come back, one after the other to where there are fewest."""
    moved: dict[Rank, int] = {}
    num = _num_seats(cluster)
    for seat in seats:
        if not seat.is_retired and seat.goal.wanted is Wanted.STAY:
            moved[seat.rank] = min(num, key=lambda host: (num[host], host))
            num[moved[seat.rank]] += 1
    _set_hosts(cluster, moved)
    if cluster.ending:
        return []
    empty = [cluster.seats[rank] for rank in moved if cluster.seats[rank].goal.device not in cluster.goal.absent]
    return [effect for seat in empty for effect in switching.start_next(cluster, seat)]


def _move_here(cluster: ClusterState, host: int) -> list[Seat]:
    """Seats that this host gets, which has two less than others, or more: their workers leave, and the next ones start
    here."""
    num, moved = _num_seats(cluster), list[Seat]()
    while not cluster.ending and (fullest := max(num, key=lambda other: num[other])) != host:
        ready = [seat for seat in cluster.seats.values() if seat.goal.host == fullest and seat.stays_ready]
        ready = [seat for seat in ready if seat not in moved]
        if num[fullest] - num[host] < 2 or not ready:
            break
        moved.append(ready[-1])
        num[fullest] -= 1
        num[host] += 1
    _set_hosts(cluster, {seat.rank: host for seat in moved})
    return moved


def _set_hosts(cluster: ClusterState, moved: dict[Rank, int]) -> None:
    if moved:
        seats = [
            msgspec.structs.replace(seat, host=moved[seat.rank]) if seat.rank in moved else seat
            for seat in cluster.goal.seats
        ]
        cluster.set_goal(seats=tuple(seats))
