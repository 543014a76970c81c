"""What becomes of one incarnation: its messages, silence, suspicions, its end, and when the next one starts.

The table of events is in machine.py.
"""

import signal
from collections.abc import Iterator
from typing import assert_never

from everserve.control import moving, slow_workers, switching
from everserve.control.cluster import Cluster, Step, who
from everserve.control.effects import AnyEffect, BackOff, Cause, GiveUp, Kill, Lost, Probe, Retire
from everserve.control.events import (
    Answered,
    ChannelEnded,
    Died,
    Exited,
    Said,
    SaidFailed,
    SaidHello,
    SaidHolds,
    SaidLeaving,
    SaidLoads,
    SaidPace,
    SaidReady,
    SaidReport,
    SaidUses,
    Seen,
    Silent,
    Started,
    Suspected,
)
from everserve.control.seats import Found, Policy, Seat
from everserve.plan.evacuation import why_empty
from everserve.tables.ids import Role, WorkerId
from everserve.tables.members import WorkerState
from everserve.tables.routes import DID_NOT_SERVE


def handle(cluster: Cluster, event: Said | Seen, now: float) -> Step:
    """An event about one incarnation."""
    seat = cluster.seats.get(event.rank)
    if seat is None or seat.state is WorkerState.GONE or seat.incarnation != event.incarnation:
        return _not_current(cluster, event, seat)
    match event:
        case Exited() | Died() | ChannelEnded() | Silent() | Suspected():
            return _seen(cluster, event, seat, now)
        case _:
            return _said(cluster, event, seat, now)


def _not_current(cluster: Cluster, event: Said | Seen, seat: Seat | None) -> Step:
    """A lost incarnation, or one that was never provisioned. It changes nothing; its messages are counted."""
    worker, name = WorkerId(event.rank, event.incarnation), f"rank {event.rank} incarnation {event.incarnation}"
    if seat is None or not 1 <= event.incarnation <= seat.incarnation:
        cluster.num_stale += 1
        return Step(f"{name} was never provisioned: {type(event).__name__} dropped")
    match event:
        case Exited():
            cluster.kill_at.pop(worker, None)
            return Step(f"{name} was lost already; now its process has ended")
        case Died() | ChannelEnded() | Silent() | Suspected():  # a death is observed in several ways
            return Step(f"{name} was lost already")
        case Started() if worker not in cluster.kill_at:
            cluster.num_stale += 1
            return Step(f"{name} comes to be after it was lost: kill it", (Kill(*worker),))
        case SaidFailed(user_error=True) if not cluster.was_all_ready and not cluster.ending:
            # The message arrived after the loss was decided. An error in the user's input is still valid.
            cluster.end_for("the instance gave up")
            return Step(f"{name} was lost already, by the user's fault", (GiveUp(event.reason, True),))
        case _:
            cluster.num_stale += 1
            return Step(f"{name} was lost already: {type(event).__name__} dropped")


# -- what it says ----------------------------------------------------------------------------------


def _said(cluster: Cluster, event: Said, seat: Seat, now: float) -> Step:
    match event:
        case Started():
            seat.exist(event.pid, now, cluster.policy)
            return Step(f"{who(seat)} exists")
        case SaidHello():
            seat.speak()
            return Step(f"{who(seat)} says hello")
        case SaidHolds():
            return moving.hold(cluster, seat, event.slots, event.failed, event.num_done, now)
        case SaidLoads():
            cluster.balancer.add(event.rows, now)
            return Step(f"{who(seat)} has computed rows")
        case SaidPace():
            return slow_workers.compare(cluster, seat, event, now)
        case SaidUses():
            return moving.acknowledge(cluster, seat, event.epoch)
        case SaidReport():
            return _report(cluster, seat, event, now)
        case SaidReady():
            return _ready(cluster, seat, now)
        case SaidLeaving():
            if seat.state is WorkerState.LEAVING:
                return Step(f"{who(seat)} was leaving already")
            seat.speak()
            seat.leave(now, cluster.policy)
            return Step(f"{who(seat)} leaves")
        case SaidFailed():
            return lose(cluster, seat, "exit", event.reason, now, user_error=event.user_error)
        case Answered():
            return _answer(seat)
        case _:
            assert_never(event)


def _ready(cluster: Cluster, seat: Seat, now: float) -> Step:
    """Does not clear a doubt: it may have been sent before the silence."""
    if seat.state is not WorkerState.STARTING:
        return Step(f"{who(seat)} was {seat.state} already")
    seat.speak()
    seat.become_ready(now)
    if Role.ATTENTION not in seat.goal.roles:
        seat.is_replaced = False
        moving.replan(cluster)
    return Step(f"{who(seat)} is ready", switching.end(cluster, seat))


def _answer(seat: Seat) -> Step:
    was_reported, was_silent = seat.is_reported, seat.starve_at is not None
    seat.speak()
    seat.clear_doubt()
    if was_reported and seat.can_serve:
        return Step(f"{who(seat)} answers: peers that suspect it shall trust it again", publish_anyway=True)
    return Step(f"{who(seat)} answers after a silence" if was_silent else f"{who(seat)} answers; it was not in doubt")


def _report(cluster: Cluster, seat: Seat, event: SaidReport, now: float) -> Step:
    """A worker that reports only after this orchestrator has resumed."""
    seat.speak()
    steps = [moving.hold(cluster, seat, event.slots, now=now)] if event.slots is not None else []
    if event.is_leaving and seat.state is not WorkerState.LEAVING:
        seat.leave(now, cluster.policy)
    steps.append(cluster.overtake(event.epoch, who(seat)))
    reason = "; ".join(step.reason for step in steps)
    return Step(reason, publish_anyway=any(step.publish_anyway or step.publish_soon for step in steps))


# -- what is observed from outside -------------------------------------------------------------------


def _seen(cluster: Cluster, event: Seen, seat: Seat, now: float) -> Step:
    match event:
        case Exited():
            return _exited(cluster, seat, event.exit_status, now)
        case Died():
            return _died(cluster, seat, "the kernel marked its life word", now)
        case ChannelEnded():
            return _died(cluster, seat, "its control channel ended", now)
        case Silent():
            return _silent(cluster, seat, event, now)
        case Suspected():
            return _suspected(cluster, seat, event, now)
        case _:
            assert_never(event)


def _exited(cluster: Cluster, seat: Seat, exit_status: int, now: float) -> Step:
    cause: Cause = "exit" if exit_status in (0, 1) else "crash"
    reason = _exit_words(exit_status)
    if seat.state is WorkerState.LEAVING:
        if seat.leave_by is None:
            cause, reason = "left", f"{reason}, after {cluster.policy.leave_s:g} s in which it had not left"
        elif exit_status == 0:
            cause = "left"
    return lose(cluster, seat, cause, reason, now, has_ended=True)


def _died(cluster: Cluster, seat: Seat, reason: str, now: float) -> Step:
    """Its exit status is not known. The death of a leaving worker is expected."""
    return lose(cluster, seat, "left" if seat.state is WorkerState.LEAVING else "crash", reason, now)


def _silent(cluster: Cluster, seat: Seat, event: Silent, now: float) -> Step:
    starved_s, process_state = cluster.policy.starved_s, event.process_state
    seat.is_probed = False
    seat.speak()  # only workers that sent Hello are watched, but its event may still be queued
    match process_state:
        case "T" | "t":
            return lose(cluster, seat, "hang", f"silent and stopped ({process_state})", now)
        case "Z" | "X":
            return _died(cluster, seat, f"silent and dead ({process_state})", now)
        case None:
            return lose(cluster, seat, "hang", "silent, and its process cannot be looked at", now)
        case "R" | "S" if event.is_hung:
            return lose(cluster, seat, "hang", f"its main thread hangs, in a process that runs ({process_state})", now)
    if seat.starve_at is None:
        seat.starve_at, seat.silent_since = now + starved_s, now
    is_patient = seat.state is not WorkerState.LEAVING and now < seat.silent_since + cluster.policy.blocked_s
    if process_state == "D" and is_patient and now >= seat.starve_at:
        seat.starve_at = now + starved_s
        return Step(f"{who(seat)} is silent and in the kernel (D): it may wait for a disk")
    if now < seat.starve_at:
        return Step(f"{who(seat)} is silent but not stopped ({process_state}): it may only be starved")
    silent_s = now - seat.silent_since
    return lose(cluster, seat, "hang", f"silent for {silent_s:.3g} s though not stopped ({process_state})", now)


def _suspected(cluster: Cluster, seat: Seat, event: Suspected, now: float) -> Step:
    said = f"{who(seat)} is suspected by rank {event.by}: {event.reason}"
    if not seat.has_spoken:
        return Step(f"{said}; it has not said hello yet, so there is nothing to look at")
    if event.reason in DID_NOT_SERVE:
        num_times = seat.did_not_serve(event.by, now, cluster.policy)
        if num_times >= cluster.policy.max_unserved:
            return lose(cluster, seat, "hang", _unserved_words(event, num_times, cluster.policy), now)
    seat.is_reported = True
    return Step(said, _probe(seat))


def _probe(seat: Seat) -> tuple[Probe, ...]:
    """At most one probe of a seat at a time."""
    if seat.is_probed:
        return ()
    seat.is_probed = True
    return (Probe(seat.rank, seat.incarnation),)


# -- its end, and the next one ---------------------------------------------------------------------


def lose(
    cluster: Cluster,
    seat: Seat,
    cause: Cause,
    reason: str,
    now: float,
    has_ended: bool = False,
    user_error: bool = False,
) -> Step:
    """End this incarnation and arrange the next one."""
    has_left = cause == "left"
    is_expected = has_left or bool(cluster.ending)
    lost = Lost(seat.rank, seat.incarnation, seat.goal.roles, cause, reason, is_expected)
    step_reason = f"{who(seat)} is gone ({cause}): {reason}"
    if not has_ended:
        cluster.kill_at[seat.id] = now + cluster.policy.fence_grace_s
    seat.end(reason, now, cluster.policy, has_left)
    cluster.refused.clear()  # there is more memory to map
    cluster.slowness.end(seat.rank, now)
    give_up = _give_up(cluster, seat, reason, user_error)
    delay_s = 0.0 if has_left else cluster.policy.delay_s(seat.num_crashes)
    if cluster.ending:
        seat.leave_empty(cluster.ending)
        return Step(step_reason, (lost, *give_up))
    if seat.goal.device in cluster.goal.absent:
        moving.replace_missed(cluster)
        return Step(step_reason, (lost, *_leave_device(cluster, seat)))
    moving.see_to_experts(cluster, seat, now)
    if seat.is_retired:
        return Step(f"{step_reason}; its seat is retired", (lost, Retire(seat.rank)))
    if delay_s == 0:
        return Step(step_reason, (lost, *switching.start_next(cluster, seat)))
    seat.wait(delay_s, now)
    return Step(step_reason, (lost, BackOff(seat.rank, seat.num_crashes, delay_s)))


def _leave_device(cluster: Cluster, seat: Seat) -> tuple[Retire, ...]:
    """No worker should be on its device."""
    goal, device = cluster.goal, seat.goal.device
    seat.leave_empty(why_empty(goal, device))
    if device in goal.gone:
        return ()
    if not seat.is_retired and not goal.is_given_up(device):
        return ()
    seat.forget_memory()
    return (Retire(seat.rank),)


def _give_up(cluster: Cluster, seat: Seat, reason: str, user_error: bool) -> tuple[GiveUp, ...]:
    """GiveUp if this loss shows that the instance cannot start. Never after all seats were ready once."""
    if cluster.was_all_ready or cluster.ending:
        return ()
    if not user_error:
        if seat.num_failed_starts < cluster.policy.max_failed_starts:
            return ()
        reason = f"rank {seat.rank} ended {seat.num_failed_starts} times before it was ready; last: {reason}"
    cluster.end_for("the instance gave up")
    return (GiveUp(reason, user_error),)


def take_over(cluster: Cluster, seat: Seat, latest: Found | None, now: float) -> tuple[AnyEffect, ...]:
    """The latest incarnation keeps the seat if it is alive, was not lost and has the role of the seat; an earlier one
    never does."""
    goal, device = cluster.goal, seat.goal.device
    is_device_gone, is_left = device in goal.gone, device in goal.away
    has_role = latest is None or latest.roles in ((), seat.goal.roles)
    if latest is not None and latest.pid >= 0 and not latest.was_lost and not is_device_gone and has_role:
        seat.adopt(latest, now, cluster.policy)
        return switching.end(cluster, seat) if seat.state is WorkerState.READY else ()
    seat.incarnation = latest.incarnation if latest is not None else seat.incarnation
    next_one: tuple[AnyEffect, ...]
    roles = seat.goal.roles  # that it had, unless something else is known
    if is_device_gone or is_left:
        next_one = _leave_device(cluster, seat)
    else:
        next_one = (Retire(seat.rank),) if seat.is_retired else switching.start_next(cluster, seat)
    if latest is None:
        return next_one
    if latest.was_lost or (latest.pid >= 0 and (is_device_gone or not has_role)):
        return (*fence_again(cluster, latest, roles, now), *next_one)
    cause: Cause = "left" if latest.is_leaving or is_left else "crash"
    reason, is_expected = "ended while there was no orchestrator", cause == "left"
    lost = Lost(seat.rank, latest.incarnation, latest.roles or roles, cause, reason, is_expected)
    return lost, *next_one


def fence_again(cluster: Cluster, old: Found, roles: tuple[Role, ...], now: float) -> tuple[Lost, ...]:
    """The previous orchestrator lost it and died before the process ended: fence it again."""
    if old.pid < 0:
        return ()
    cluster.kill_at[WorkerId(old.rank, old.incarnation)] = now + cluster.policy.fence_grace_s
    reason = "was lost to the orchestrator before this one, and lives"
    return (Lost(old.rank, old.incarnation, old.roles or roles, "hang", reason, is_expected=True),)


# -- what is due -------------------------------------------------------------------------------------


def due(cluster: Cluster, seat: Seat, now: float) -> Iterator[Step]:
    """What a tick does to one seat."""
    due_at = seat.next_deadline()
    if due_at is None or due_at > now:
        return
    policy = cluster.policy
    if seat.heal_at is not None and seat.heal_at <= now:
        seat.is_overdue, seat.heal_at = True, None
        moving.replace_away(cluster, seat)
        yield Step(f"{who(seat)} has been away for {policy.heal_after_s:g} s: others take over its experts")
    if seat.fill_at is not None and seat.fill_at <= now:
        seat.fill_at = None
        cluster.is_moving = True
        yield Step(f"{who(seat)} may try to load experts again")
    if seat.state is WorkerState.GONE:
        if seat.start_at is None or seat.start_at > now:
            return
        starts = switching.start_next(cluster, seat)
        yield Step(f"{who(seat)} starts after a delay", starts)
        return
    if seat.hello_by is not None and seat.hello_by <= now:
        yield lose(cluster, seat, "hang", f"has not said a word in {policy.hello_s:g} s", now)
        return
    if seat.leave_by is not None and seat.leave_by <= now:
        seat.leave_by = None
        yield Step(f"{who(seat)} has not left in {policy.leave_s:g} s: kill it", (Kill(*seat.id),))
    if seat.starve_at is not None and seat.starve_at <= now and not seat.is_probed:
        # A probe decides, not the clock: the host itself may have been delayed.
        yield Step(f"{who(seat)} has been silent for {policy.starved_s:g} s: a last look", _probe(seat))


def kills_due(cluster: Cluster, now: float) -> Iterator[Step]:
    """Lost processes that have not ended in time."""
    for worker, at in list(cluster.kill_at.items()):
        if at <= now:
            del cluster.kill_at[worker]
            reason = f"rank {worker.rank} incarnation {worker.incarnation} was lost and has not ended: kill it"
            yield Step(reason, (Kill(*worker),))


def _unserved_words(event: Suspected, num_times: int, policy: Policy) -> str:
    often = f"{num_times} times within {policy.unserved_s:g} s"
    return f"it pulses but did not serve rank {event.by}, {often} (last: {event.reason})"


def _exit_words(exit_status: int) -> str:
    if exit_status >= 0:
        return f"exited with status {exit_status}"
    try:
        return f"killed by {signal.Signals(-exit_status).name}"
    except ValueError:
        return f"killed by signal {-exit_status}"
