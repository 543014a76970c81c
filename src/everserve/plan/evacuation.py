"""Which devices are emptied because of their health level (tables/health.py), and which are used though they should not
be. Pure functions of the goal.

Decided anew with every change of levels, devices, seats or load, the highest level first. A device without which no
attention worker would be left, or too few slots for the experts, is used on, and operators see why. It is emptied when
there is more hardware; and one that was emptied is used again if it is needed after a loss.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping

from everserve.plan.health import OVER_BY_THEMSELVES
from everserve.tables.goal import Capacity, Goal, Wanted
from everserve.tables.health import OPERATOR, DeviceHealth, Diagnosis, Level
from everserve.tables.ids import Rank, Role

_EMPTIED = (Level.DRAIN_WHEN_QUIET, Level.DRAIN, Level.EVACUATE, Level.EVACUATE_AND_ISOLATE)


def reason_of(goal: Goal, device: int) -> str:
    """Why the device has its level: all that is said of it, the worst first."""
    found = sorted((one for one in goal.health if one.device == device), key=lambda one: -one.level)
    return "; ".join(one.reason or f"said by the {one.source}" for one in found)


def with_diagnosis(health: Iterable[Diagnosis], new: Diagnosis) -> tuple[Diagnosis, ...]:
    """A source replaces what it said before. An operator who says *healthy* ends what operators and events said; what
    is over by itself, such as a line of a file, counts until it is."""
    kept = [one for one in health if (one.device, one.source) != (new.device, new.source)]
    if new.level is not Level.HEALTHY:
        return (*kept, new)
    if new.source == OPERATOR:
        kept = [one for one in kept if one.device != new.device or one.source in OVER_BY_THEMSELVES]
    return tuple(kept)


def devices_away(goal: Goal, capacity: Capacity, quiet: Collection[int]) -> tuple[int, ...]:
    """The devices to empty. One that was to be drained when quiet, and is being drained, is not asked again."""
    ready = {*quiet, *goal.away}
    asked = [
        device
        for device in {one.device for one in goal.health}
        if (level := goal.level(device)) in _EMPTIED and device not in goal.lost_devices
        if level is not Level.DRAIN_WHEN_QUIET or device in ready
    ]
    away: list[int] = []
    for device in sorted(asked, key=lambda d: (-goal.level(d), d not in goal.away, d)):
        if not why_needed(goal, capacity, [*away, device]):
            away.append(device)
    return tuple(sorted(away))


def why_needed(goal: Goal, capacity: Capacity, away: Collection[int]) -> str:
    """Why the instance cannot serve without these devices; empty if it can."""
    absent = {*goal.lost_devices, *away}
    seats = [seat for seat in goal.seats if seat.wanted is Wanted.STAY and seat.device not in absent]
    num_expert = sum(Role.ATTENTION not in seat.roles for seat in seats)
    if len(seats) == num_expert:
        return "no other attention worker would be left"
    if goal.placement is not None and num_expert * capacity.slots_per_layer < goal.placement.num_experts:
        return "the other expert workers cannot hold all experts"
    return ""


def quiet_devices(goal: Goal, streams: Mapping[Rank, int]) -> set[int]:
    """Devices with little to do: at most one stream for each of their attention workers. Where there is none, because
    expert workers serve the streams of all, for each attention worker of the instance. A device of whose workers one
    was not counted is not quiet."""
    present = [seat for seat in goal.seats if seat.wanted is Wanted.STAY and seat.device not in goal.absent]
    attention = [seat for seat in present if Role.ATTENTION in seat.roles]
    found = set()
    for device in {seat.device for seat in goal.seats}:
        ranks = [s.rank for s in attention if s.device == device] or [s.rank for s in attention]
        if all(rank in streams for rank in ranks) and sum(streams[rank] for rank in ranks) <= len(ranks):
            found.add(device)
    return found


def health_of(goal: Goal, capacity: Capacity) -> tuple[DeviceHealth, ...]:
    """Every device that is not healthy, for operators."""
    found = []
    for device in sorted({one.device for one in goal.health}):
        level, reason = goal.level(device), reason_of(goal, device)
        note = why_used(goal, capacity, device, level)
        found.append(DeviceHealth(device=device, level=level, reason=reason, note=note))
    return tuple(found)


def degraded_by(goal: Goal, health: Iterable[DeviceHealth]) -> Iterator[str]:
    """Devices that are not used as before, or should not be."""
    for one in health:
        note = one.note or ("is not used" if one.device in goal.away else "")
        if note:
            yield f"device {one.device} has health level {one.level.value} ({one.reason}) and {note}"


def why_used(goal: Goal, capacity: Capacity, device: int, level: Level) -> str:
    """Why workers are on a device that is to be emptied; empty if there should be none, or it is to be used."""
    if level not in _EMPTIED or device in goal.absent:
        return ""
    if why := why_needed(goal, capacity, [*goal.away, device]):
        return f"is used on: {why}"
    return "is drained when it is quiet"


def why_empty(goal: Goal, device: int) -> str:
    """Why no worker is started on a device."""
    if device in goal.gone:
        return f"its device {device} is gone"
    if device in goal.lost_devices:
        return "its host is lost"
    return f"its device {device} has health level {goal.level(device).value}"
