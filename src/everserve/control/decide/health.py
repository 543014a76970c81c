"""What follows from the health level of a device (tables/health.py): it is emptied, isolated, or used again.

A device is emptied like one that scales away (scaling.py), but its seats stay in the goal: the placement is made
without it, its attention workers are asked to leave when another one is ready, its expert workers when other ready
workers hold all their experts. From level 4 on that is enough; below it they also wait until the others hold
everything that is planned for them, so that no redundancy is lost meanwhile.
"""

from collections.abc import Iterator
from dataclasses import replace

from everserve.control.decide import devices, moving, switching
from everserve.control.decide.cluster import ClusterState, Step
from everserve.control.decide.effects import AnyEffect, Retire, Trust
from everserve.control.decide.seats import Seat
from everserve.plan.evacuation import (
    devices_away,
    reason_of,
    why_empty,
    why_used,
    with_diagnosis,
)
from everserve.tables.health import WORDS, Diagnosis, Level
from everserve.tables.members import WorkerState
from everserve.wire.events import DeviceHealthChanged
from everserve.wire.operators import HealthRequest, HealthView

_ISOLATED = (Level.EVACUATE_AND_ISOLATE, Level.ISOLATE)


def resume(cluster: ClusterState, now: float) -> None:
    """An orchestrator before this one was told of these levels. The time that an evacuation has taken is not known."""
    for device in {one.device for one in cluster.goal.health}.difference(cluster.goal.gone):
        if cluster.goal.level(device) is Level.EVACUATE_AND_ISOLATE:
            cluster.isolate_at[device] = now + cluster.policy.isolate_s


def note(cluster: ClusterState, new: Diagnosis, now: float) -> Step:
    """What a source says. The reason of the Step is what follows."""
    device, goal = new.device, cluster.goal
    if not _is_known(cluster, device):
        return Step(f"there is no device {device}")
    health = with_diagnosis(goal.health, new)
    if health == goal.health:
        return Step(f"device {device} has health level {goal.level(device).value}, as before")
    cluster.set_goal(health=health)
    return _follow(cluster, device, goal.level(device), now)


def say(cluster: ClusterState, said: HealthRequest, now: float) -> Step:
    """An operator is a source, too, and ends what others have said by saying that the device is healthy."""
    level, reason = Level(said.level), " ".join(said.reason.split())
    step = note(cluster, Diagnosis(device=said.device, level=level, reason=reason), now)
    if not _is_known(cluster, said.device):
        return step
    now_level, why = cluster.goal.level(said.device), reason_of(cluster.goal, said.device)
    trusted = (Trust(said.device),) if level is Level.HEALTHY else ()
    view = HealthView(device=said.device, level=now_level, reason=why, done=step.reason)
    return replace(step, effects=(*step.effects, *trusted), view=view)


def return_healthy(cluster: ClusterState, device: int, now: float) -> Step:
    """An operator says that the device can be used: it is there, and it is healthy. Refused if it still may not be."""
    step = note(cluster, Diagnosis(device=device, level=Level.HEALTHY, reason=""), now)
    effects, reason = (*step.effects, Trust(device)), step.reason
    if device in cluster.goal.gone and cluster.goal.level(device) not in _ISOLATED:
        back = devices.bring_back(cluster, device)
        effects, reason = (*effects, *back.effects), back.reason
    if device in cluster.goal.absent:
        level = cluster.goal.level(device).value
        reason = f"device {device} still has health level {level}: {reason_of(cluster.goal, device)}"
    return replace(step, effects=effects, reason=reason)


def _is_known(cluster: ClusterState, device: int) -> bool:
    return device in {seat.device for seat in cluster.goal.seats} | {one.device for one in cluster.goal.health}


def _follow(cluster: ClusterState, device: int, before: Level, now: float) -> Step:
    """The device has another level now, or the same for other reasons."""
    level, is_gone, steps = cluster.goal.level(device), device in cluster.goal.gone, []
    if level is Level.ISOLATE and not is_gone:
        steps.append(devices.lose(cluster, device, is_gone=True, now=now))
    elif before in _ISOLATED and level not in _ISOLATED and is_gone:
        steps.append(devices.bring_back(cluster, device))
    if level is not Level.EVACUATE_AND_ISOLATE or device in cluster.goal.gone:
        cluster.isolate_at.pop(device, None)
    else:
        cluster.isolate_at.setdefault(device, now + cluster.policy.isolate_s)
    effects = [effect for step in steps for effect in step.effects]
    effects += see_to(cluster)
    if cluster.goal.is_given_up(device) and device not in cluster.goal.gone:
        effects += [Retire(seat.rank) for seat in _seats_on(cluster, device) if seat.state is WorkerState.GONE]
    reason = reason_of(cluster.goal, device) or "healthy"
    done = "; ".join(step.reason for step in steps) or _done(cluster, device, level)
    changed = DeviceHealthChanged(device=device, level=level, before=before, reason=reason, done=done)
    words = f"device {device} has health level {level.value} ({reason}): {done}"
    return Step(words, (*effects, changed), publish_anyway=True)


def _done(cluster: ClusterState, device: int, level: Level) -> str:
    if device in cluster.goal.absent:
        return f"it is {WORDS[level]}" if level else "it is gone"
    return why_used(cluster.goal, cluster.capacity, device, level) or WORDS[level]


def see_to(cluster: ClusterState) -> list[AnyEffect]:
    """Empty the devices that are to be emptied now, and use the others again. After every input: seats and devices may
    have changed."""
    goal = cluster.goal
    if not goal.health and not goal.away:
        return []
    away = devices_away(goal, cluster.capacity, cluster.quiet())
    if away == goal.away:
        return []
    cluster.set_goal(away=away)
    moving.replan(cluster)
    effects: list[AnyEffect] = []
    for device in {*away, *goal.away}:
        for seat in _seats_on(cluster, device):
            if seat.state is not WorkerState.GONE:
                continue
            if device in away:
                seat.leave_empty(why_empty(cluster.goal, device))
            elif not seat.is_retired and device not in cluster.goal.gone and not cluster.ending:
                effects += switching.start_next(cluster, seat)
    return effects


def due(cluster: ClusterState, now: float) -> Iterator[Step]:
    """Devices that have not been left in time."""
    for device, at in list(cluster.isolate_at.items()):
        if at <= now:
            del cluster.isolate_at[device]
            yield devices.lose(cluster, device, is_gone=True, now=now)


def _seats_on(cluster: ClusterState, device: int) -> list[Seat]:
    return [seat for seat in cluster.seats.values() if seat.goal.device == device]
