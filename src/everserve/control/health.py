"""What follows from the health level of a device (tables/health.py): it is emptied, isolated, or used again.

A device is emptied like one that scales away (scaling.py), but its seats stay in the goal: the placement is made
without it, its attention workers are asked to leave when another one is ready, its expert workers when other ready
workers hold all their experts. From level 4 on that is enough; below it they also wait until the others hold
everything that is planned for them, so that no redundancy is lost meanwhile.
"""

from collections.abc import Iterator

from everserve.control import moving, switching
from everserve.control.cluster import Cluster, Step
from everserve.control.effects import AnyEffect, LevelChanged, Retire
from everserve.control.events import AboutDevice, DeviceLost, DeviceReturned, HealthSaid
from everserve.control.operations import lose_device, return_device
from everserve.control.seats import Seat
from everserve.plan.evacuation import (
    devices_away,
    reason_of,
    why_empty,
    why_used,
    with_diagnosis,
)
from everserve.tables.health import WORDS, DeviceHealth, Diagnosis, Level
from everserve.tables.members import WorkerState

_ISOLATED = (Level.EVACUATE_AND_ISOLATE, Level.ISOLATE)


def handle(cluster: Cluster, event: AboutDevice, now: float) -> Step:
    """The reason of the Step is what follows, for the operator."""
    match event:
        case HealthSaid():
            return _said(cluster, event.diagnosis, now)
        case DeviceReturned():
            return _returned(cluster, event.device, now)


def resume(cluster: Cluster, now: float) -> None:
    """An orchestrator before this one was told of these levels. The time that an evacuation has taken is not known."""
    for device in {one.device for one in cluster.goal.health}.difference(cluster.goal.gone):
        if cluster.goal.level(device) is Level.EVACUATE_AND_ISOLATE:
            cluster.isolate_at[device] = now + cluster.policy.isolate_s


def _said(cluster: Cluster, new: Diagnosis, now: float) -> Step:
    device, goal = new.device, cluster.goal
    if device not in {seat.device for seat in goal.seats} | {one.device for one in goal.health}:
        return Step(f"there is no device {device}")
    health = with_diagnosis(goal.health, new)
    if health == goal.health:
        return Step(f"device {device} has health level {goal.level(device).value}, as before")
    cluster.set_goal(health=health)
    return _follow(cluster, device, goal.level(device), now)


def _follow(cluster: Cluster, device: int, before: Level, now: float) -> Step:
    """The device has another level now, or the same for other reasons."""
    level, is_gone, steps = cluster.goal.level(device), device in cluster.goal.gone, []
    if level is Level.ISOLATE and not is_gone:
        steps.append(lose_device(cluster, DeviceLost(device, is_gone=True), now))
    elif before in _ISOLATED and level not in _ISOLATED and is_gone:
        steps.append(return_device(cluster, device))
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
    shown = DeviceHealth(device=device, level=level, reason=reason)
    words = f"device {device} has health level {level.value} ({reason}): {done}"
    return Step(words, (*effects, LevelChanged(shown, before, done)), publish_anyway=True)


def _done(cluster: Cluster, device: int, level: Level) -> str:
    if device in cluster.goal.absent:
        return f"it is {WORDS[level]}" if level else "it is gone"
    return why_used(cluster.goal, cluster.capacity, device, level) or WORDS[level]


def _returned(cluster: Cluster, device: int, now: float) -> Step:
    """An operator says that the device can be used: it is there, and it is healthy."""
    if device not in cluster.goal.gone and not cluster.goal.level(device):
        return Step(f"device {device} is not gone")
    healthy = Diagnosis(device=device, level=Level.HEALTHY, reason="")
    step = _said(cluster, healthy, now)
    if device not in cluster.goal.gone or cluster.goal.level(device) in _ISOLATED:
        return step
    back = return_device(cluster, device)
    return Step(back.reason, (*step.effects, *back.effects), publish_anyway=step.publish_anyway)


def see_to(cluster: Cluster) -> list[AnyEffect]:
    """Empty the devices that are to be emptied now, and use the others again. After every event: seats and devices may
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


def due(cluster: Cluster, now: float) -> Iterator[Step]:
    """Devices that have not been left in time."""
    for device, at in list(cluster.isolate_at.items()):
        if at <= now:
            del cluster.isolate_at[device]
            yield lose_device(cluster, DeviceLost(device, is_gone=True), now)


def _seats_on(cluster: Cluster, device: int) -> list[Seat]:
    return [seat for seat in cluster.seats.values() if seat.goal.device == device]
