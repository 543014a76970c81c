"""What becomes of one incarnation: its messages, silence, suspicions, its end, and when the next one starts.

The table of inputs is in machine.py.
"""

import signal
from collections.abc import Iterator
from typing import assert_never

from everserve.control.decide import moving, slow_workers, switching
from everserve.control.decide import seats as states
from everserve.control.decide.cluster import ClusterState, Step, who
from everserve.control.decide.effects import AnyEffect, Cause, GiveUp, Kill, Lost, Probe, Retire
from everserve.control.decide.inputs import (
    Alive,
    ChannelEnded,
    Died,
    Exited,
    FromWorker,
    OfWorker,
    Said,
    Silent,
    Started,
)
from everserve.control.decide.policy import Policy
from everserve.control.decide.processes import Silence
from everserve.control.decide.seats import Found, Seat
from everserve.plan.evacuation import why_empty
from everserve.tables.ids import Incarnation, Rank, Role, WorkerId
from everserve.tables.members import HOST_IS_SILENT, WorkerState
from everserve.tables.routes import DID_NOT_SERVE
from everserve.wire.events import WorkerBackedOff, WorkerLeaving
from everserve.wire.messages import (
    Failed,
    Hello,
    Leaving,
    LoadReported,
    PaceReported,
    Ready,
    Report,
    RoutesUsed,
    SlotsReported,
    Suspected,
)


def handle(cluster: ClusterState, given: OfWorker, now: float) -> Step:
    """An input from or about one incarnation."""
    seat = _current(cluster, given.rank, given.incarnation)
    if seat is None:
        return _not_current(cluster, given)
    match given:
        case Said():
            return _said(cluster, given.message, seat, now)
        case Started():
            seat.exist(given.pid, now, cluster.policy)
            return Step(f"{who(seat)} exists")
        case Alive():
            return _answer(seat)
        case Exited():
            return _exited(cluster, seat, given.exit_status, now)
        case Died():
            return _died(cluster, seat, "the kernel marked its life word", now)
        case ChannelEnded():
            return _died(cluster, seat, "its control channel ended", now)
        case Silent():
            return _silent(cluster, seat, given, now)
        case _:
            assert_never(given)


def _current(cluster: ClusterState, rank: Rank, incarnation: Incarnation) -> Seat | None:
    """The seat that holds this incarnation."""
    seat = cluster.seats.get(rank)
    if seat is None or seat.state is WorkerState.GONE or seat.incarnation != incarnation:
        return None
    seat.touch()  # whatever is asked for is about to change it
    return seat


def _not_current(cluster: ClusterState, given: OfWorker) -> Step:
    """A lost incarnation, or one that was never provisioned. It changes nothing; its messages are counted."""
    worker, name = WorkerId(given.rank, given.incarnation), f"rank {given.rank} incarnation {given.incarnation}"
    what = type(given.message if isinstance(given, Said) else given).__name__
    if not _was_provisioned(cluster, worker):
        cluster.num_stale += 1
        return Step(f"{name} was never provisioned: {what} dropped")
    match given:
        case Exited():
            cluster.kill_at.pop(worker, None)
            return Step(f"{name} was lost already; now its process has ended")
        case Died() | ChannelEnded() | Silent():  # a death is observed in several ways
            return Step(f"{name} was lost already")
        case Started() if worker not in cluster.kill_at:
            cluster.num_stale += 1
            return Step(f"{name} comes to be after it was lost: kill it", (Kill(*worker),))
        case Said(message=Failed(user_error=True, reason=reason)) if not cluster.was_all_ready and not cluster.ending:
            # The message arrived after the loss was decided. An error in the user's input is still valid.
            cluster.end_for("the instance gave up")
            return Step(f"{name} was lost already, by the user's fault", (GiveUp(reason, True),))
        case _:
            cluster.num_stale += 1
            return Step(f"{name} was lost already: {what} dropped")


def _was_provisioned(cluster: ClusterState, worker: WorkerId) -> bool:
    seat = cluster.seats.get(worker.rank)
    return seat is not None and 1 <= worker.incarnation <= seat.incarnation


# -- what it says ----------------------------------------------------------------------------------


def _said(cluster: ClusterState, message: FromWorker, seat: Seat, now: float) -> Step:
    match message:
        case Hello():
            seat.speak()
            return Step(f"{who(seat)} says hello")
        case SlotsReported():
            return moving.hold(cluster, seat, message.slots, message.failed, message.num_done, now)
        case LoadReported():
            cluster.balancer.add(message.rows, now)
            return Step(f"{who(seat)} has computed rows")
        case PaceReported():
            return slow_workers.compare(cluster, seat, message, now)
        case RoutesUsed():
            return moving.acknowledge(cluster, seat, message.epoch)
        case Report():
            return _report(cluster, seat, message, now)
        case Ready():
            return _ready(cluster, seat, now)
        case Leaving():
            if seat.state is WorkerState.LEAVING:
                return Step(f"{who(seat)} was leaving already")
            seat.speak()
            seat.leave(now, cluster.policy)
            return Step(f"{who(seat)} leaves", (WorkerLeaving(rank=seat.rank, incarnation=seat.incarnation),))
        case Failed():
            is_chance = message.is_temporary and not seat.can_serve  # it never was ready
            user_error = message.user_error
            return lose(cluster, seat, "exit", message.reason, now, user_error=user_error, is_chance=is_chance)
        case Suspected():
            return _suspected(cluster, message, seat.rank, now)
        case _:
            assert_never(message)


def _ready(cluster: ClusterState, seat: Seat, now: float) -> Step:
    """Does not clear a doubt: it may have been sent before the silence."""
    if seat.state is not WorkerState.STARTING:
        return Step(f"{who(seat)} was {seat.state} already")
    seat.speak()
    seat.become_ready(now)
    if Role.ATTENTION not in seat.goal.roles:
        moving.take_back(cluster, seat)
    return Step(f"{who(seat)} is ready", switching.end(cluster, seat, now))


def _answer(seat: Seat) -> Step:
    was_reported, was_silent = seat.process.is_reported, seat.process.silence is not None
    seat.speak()
    seat.process.clear_doubt()
    if was_reported and seat.can_serve:
        return Step(f"{who(seat)} answers: peers that suspect it shall trust it again", publish_anyway=True)
    return Step(f"{who(seat)} answers after a silence" if was_silent else f"{who(seat)} answers; it was not in doubt")


def _report(cluster: ClusterState, seat: Seat, report: Report, now: float) -> Step:
    """A worker that reports only after this orchestrator has resumed."""
    seat.speak()
    steps = [moving.hold(cluster, seat, report.slots, now=now)] if report.slots is not None else []
    if report.is_leaving and seat.state is not WorkerState.LEAVING:
        seat.leave(now, cluster.policy)
    steps.append(cluster.overtake(report.epoch, who(seat)))
    reason = "; ".join(step.reason for step in steps)
    return Step(reason, publish_anyway=any(step.publish_anyway or step.publish_soon for step in steps))


def _suspected(cluster: ClusterState, said: Suspected, by: Rank, now: float) -> Step:
    """A peer routes around it."""
    seat = _current(cluster, said.rank, said.incarnation)
    if seat is None:
        was_there = _was_provisioned(cluster, WorkerId(said.rank, said.incarnation))
        cluster.num_stale += not was_there
        why = "was lost already" if was_there else "was never provisioned"
        return Step(f"rank {said.rank} incarnation {said.incarnation} {why}, and rank {by} suspects it")
    reason = f"{who(seat)} is suspected by rank {by}: {said.reason}"
    if not seat.has_spoken:
        return Step(f"{reason}; it has not said hello yet, so there is nothing to look at")
    if said.reason in DID_NOT_SERVE:
        num_times = seat.process.did_not_serve(by, now, cluster.policy)
        if num_times >= cluster.policy.max_unserved:
            return lose(cluster, seat, "hang", _unserved_words(said, by, num_times, cluster.policy), now)
    seat.process.is_reported = True
    return Step(reason, _probe(seat))


# -- what is observed from outside -------------------------------------------------------------------


def _exited(cluster: ClusterState, seat: Seat, exit_status: int, now: float) -> Step:
    cause: Cause = "exit" if exit_status in (0, 1) else "crash"
    reason = _exit_words(exit_status)
    if isinstance(seat.now, states.Leaving):
        if seat.now.leave_by is None:
            cause, reason = "left", f"{reason}, after {cluster.policy.leave_s:g} s in which it had not left"
        elif exit_status == 0:
            cause = "left"
    return lose(cluster, seat, cause, reason, now, has_ended=True)


def _died(cluster: ClusterState, seat: Seat, reason: str, now: float) -> Step:
    """Its exit status is not known. The death of a leaving worker is expected."""
    return lose(cluster, seat, "left" if seat.state is WorkerState.LEAVING else "crash", reason, now)


def _silent(cluster: ClusterState, seat: Seat, seen: Silent, now: float) -> Step:
    starved_s, process_state = cluster.policy.starved_s, seen.process_state
    process = seat.process
    process.is_probed = False
    seat.speak()  # only workers that sent Hello are watched, but its message may still be queued
    match process_state:
        case "T" | "t":
            return lose(cluster, seat, "hang", f"silent and stopped ({process_state})", now)
        case "Z" | "X":
            return _died(cluster, seat, f"silent and dead ({process_state})", now)
        case None:
            return lose(cluster, seat, "hang", "silent, and its process cannot be looked at", now)
        case "R" | "S" if seen.is_hung:
            return lose(cluster, seat, "hang", f"its main thread hangs, in a process that runs ({process_state})", now)
    silence = process.silence = process.silence or Silence(since=now, until=now + starved_s)
    is_patient = seat.state is not WorkerState.LEAVING and now < silence.since + cluster.policy.blocked_s
    if process_state in ("D", HOST_IS_SILENT) and is_patient and now >= silence.until:
        process.silence = silence._replace(until=now + starved_s)
        why = "in the kernel (D): it may wait for a disk" if process_state == "D" else "so is its host"
        return Step(f"{who(seat)} is silent and {why}")
    if now < silence.until:
        return Step(f"{who(seat)} is silent but not stopped ({process_state}): it may only be starved")
    silent_s = now - silence.since
    return lose(cluster, seat, "hang", f"silent for {silent_s:.3g} s though not stopped ({process_state})", now)


def _probe(seat: Seat) -> tuple[Probe, ...]:
    """A probe of this seat; at most one probe of a seat at a time."""
    if seat.process.is_probed:
        return ()
    seat.process.is_probed = True
    return (Probe(seat.rank, seat.incarnation),)


# -- its end, and the next one ---------------------------------------------------------------------


def lose(
    cluster: ClusterState,
    seat: Seat,
    cause: Cause,
    reason: str,
    now: float,
    has_ended: bool = False,
    user_error: bool = False,
    is_chance: bool = False,
) -> Step:
    """End this incarnation and arrange the next one. `is_chance`: it could not start, and the next one may."""
    has_left = cause == "left"
    is_expected = has_left or bool(cluster.ending)
    lost = Lost(seat.rank, seat.incarnation, seat.goal.roles, cause, reason, is_expected)
    step_reason = f"{who(seat)} is gone ({cause}): {reason}"
    if not has_ended:
        cluster.kill_at[seat.id] = now + cluster.policy.fence_grace_s
    seat.end(reason, now, cluster.policy, has_left, is_chance)
    cluster.refused.clear()  # there is more memory to map
    cluster.slowness.end(seat.rank, now)
    give_up = _give_up(cluster, seat, reason, user_error)
    delay_s = 0.0 if has_left else cluster.policy.delay_s(seat.num_crashes)
    if is_chance:
        delay_s = cluster.policy.scarce_s
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
    backed_off = WorkerBackedOff(rank=seat.rank, num_crashes=seat.num_crashes, delay_s=delay_s)
    return Step(step_reason, (lost, backed_off))


def _leave_device(cluster: ClusterState, seat: Seat) -> tuple[Retire, ...]:
    """No worker should be on its device."""
    goal, device = cluster.goal, seat.goal.device
    seat.leave_empty(why_empty(goal, device))
    if device in goal.gone:
        return ()
    if not seat.is_retired and not goal.is_given_up(device):
        return ()
    seat.forget_memory()
    return (Retire(seat.rank),)


def _give_up(cluster: ClusterState, seat: Seat, reason: str, user_error: bool) -> tuple[GiveUp, ...]:
    """GiveUp if this loss shows that the instance cannot start. Never after all seats were ready once."""
    if cluster.was_all_ready or cluster.ending:
        return ()
    if not user_error:
        if seat.num_failed_starts < cluster.policy.max_failed_starts:
            return ()
        reason = f"rank {seat.rank} ended {seat.num_failed_starts} times before it was ready; last: {reason}"
    cluster.end_for("the instance gave up")
    return (GiveUp(reason, user_error),)


def take_over(cluster: ClusterState, seat: Seat, latest: Found | None, now: float) -> tuple[AnyEffect, ...]:
    """The latest incarnation keeps the seat if it is alive, was not lost and has the role of the seat; an earlier one
    never does."""
    goal, device = cluster.goal, seat.goal.device
    is_device_gone, is_left = device in goal.lost_devices, device in goal.away
    has_role = latest is None or latest.roles in ((), seat.goal.roles)
    if latest is not None and latest.pid >= 0 and not latest.was_lost and not is_device_gone and has_role:
        seat.adopt(latest, now, cluster.policy)
        return switching.end(cluster, seat, now) if seat.is_ready else ()
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


def fence_again(cluster: ClusterState, old: Found, roles: tuple[Role, ...], now: float) -> tuple[Lost, ...]:
    """The previous orchestrator lost it and died before the process ended: fence it again."""
    if old.pid < 0:
        return ()
    cluster.kill_at[WorkerId(old.rank, old.incarnation)] = now + cluster.policy.fence_grace_s
    reason = "was lost to the orchestrator before this one, and lives"
    return (Lost(old.rank, old.incarnation, old.roles or roles, "hang", reason, is_expected=True),)


# -- what is due -------------------------------------------------------------------------------------


def due(cluster: ClusterState, seat: Seat, now: float) -> Iterator[Step]:
    """What a tick does to one seat."""
    due_at = seat.next_deadline()
    if due_at is None or due_at > now:
        return
    seat.touch()
    policy, absence = cluster.policy, seat.absence
    if absence.heal_at is not None and absence.heal_at <= now:
        absence.is_overdue, absence.heal_at = True, None
        moving.replace_away(cluster, seat)
        yield Step(f"{who(seat)} has been away for {policy.heal_after_s:g} s: others take over its experts")
    match seat.now:
        case states.Empty(start_at=at) if at is not None and at <= now:
            starts = switching.start_next(cluster, seat)
            yield Step(f"{who(seat)} starts after a delay", starts)
        case states.Starting(hello_by=by) if by is not None and by <= now:
            yield lose(cluster, seat, "hang", f"has not said a word in {policy.hello_s:g} s", now)
        case states.Leaving(leave_by=by) if by is not None and by <= now:
            seat.now.leave_by = None
            yield Step(f"{who(seat)} has not left in {policy.leave_s:g} s: kill it", (Kill(*seat.id),))
    if seat.state is not WorkerState.GONE:
        yield from _process_due(cluster, seat, now)


def _process_due(cluster: ClusterState, seat: Seat, now: float) -> Iterator[Step]:
    changes, look_at = seat.process.changes, seat.process.look_at()
    if changes.again_at is not None and changes.again_at <= now:
        changes.again_at = None
        cluster.is_moving = True
        yield Step(f"{who(seat)} may try to load experts again")
    if look_at is not None and look_at <= now:
        # A probe decides, not the clock: the orchestrator itself may have been delayed.
        yield Step(f"{who(seat)} has been silent for {cluster.policy.starved_s:g} s: a last look", _probe(seat))


def kills_due(cluster: ClusterState, now: float) -> Iterator[Step]:
    """Lost processes that have not ended in time."""
    for worker, at in list(cluster.kill_at.items()):
        if at <= now:
            del cluster.kill_at[worker]
            reason = f"rank {worker.rank} incarnation {worker.incarnation} was lost and has not ended: kill it"
            yield Step(reason, (Kill(*worker),))


def _unserved_words(said: Suspected, by: Rank, num_times: int, policy: Policy) -> str:
    often = f"{num_times} times within {policy.unserved_s:g} s"
    return f"it pulses but did not serve rank {by}, {often} (last: {said.reason})"


def _exit_words(exit_status: int) -> str:
    if exit_status >= 0:
        return f"exited with status {exit_status}"
    try:
        return f"killed by {signal.Signals(-exit_status).name}"
    except ValueError:
        return f"killed by signal {-exit_status}"
