"""The state machine: events about processes -> membership, published tables, and which processes to start or kill.

Effects of events about the incarnation that a seat holds (events about any other incarnation change nothing):

    event                    effect                                    loss
    Started                  its pid is published; lost if it does not
                             say hello within `hello_s`                hang
    SaidHello                watched: silence is a symptom from now on
    SaidHolds                routes lead to what it holds, once it is ready
    SaidReady                ready; routes may lead to it
    SaidUses                 an attention worker's epoch; shown to operators
    SaidLoads                counted; with a balance policy, a new goal now and then
    SaidReport               as SaidHolds, and SaidLeaving if it is leaving;
                             published again if our epoch is not later
    SaidLeaving              leaving; routes lead to it only where no
                             ready worker has the expert; killed if it
                             has not ended after `leave_s`             left
    SaidFailed               lost at once                              exit
    Exited 0 or 1 / other    lost at once                              exit / crash
    Died, ChannelEnded       lost at once                              crash
    Silent, Z X              lost at once                              crash
    Silent, T t or unknown   lost at once                              hang
    Silent, any other state  in doubt; probed again after              hang, if still
                             `starved_s` and lost if still silent      silent
    Answered                 doubt cleared; published again if a peer had reported it
    Suspected                probed; lost if it pulses but did not
                             serve this peer `max_unserved` times
                             within `unserved_s`                       hang
    DrainAsked (of a rank)   asked to leave if it is ready
    DeviceLost               all its workers are killed and lost, its memory
                             is dropped; if it is gone, nothing starts on it  crash
    DeviceReturned           workers start on it
    ScaleAsked               seats come, or should retire (scaling.py)
    GatewayReported          published again if our epoch is not later
    Tick                     what is due: starts, last probes, kills

Silence is handled the same way while a worker starts: its pulse begins with its hello, before it loads its weights.

The loss of a leaving worker is an expected one (left) if it exits with status 0, if it dies and its status is not
known, or if it dies in any way after it was killed for taking too long. Otherwise the cause is the one in the table.

Lost: published at once. Then the next incarnation is provisioned at once, or after a delay if the seat's processes keep
ending early (a worker that left does not count). If the exit of the process was not seen, it is killed after
`fence_grace_s`; until then it may wake up, find itself fenced and exit. A loss is never revoked: a process that was
declared gone wrongly is replaced all the same.

The goal (tables/goal.py) says which seats there are. A seat that should retire is not filled again.

An orchestrator that replaces another one resumes with the goal that the supervisor has kept and with the processes that
exist, seat by seat (a process in a seat that is not in the goal is lost):

    latest incarnation       seat
    none                     provisioned
    has ended                lost (crash; left, if it was leaving), in case its end was not published; the next is
                             provisioned
    was lost, and lives      lost once more (hang); the next is provisioned
    being forked             starting
    has not reported         starting; lost (hang) if it does not report within `hello_s`
    reported                 starting, ready or leaving, as reported

Earlier incarnations were lost when the next one was provisioned: those that are alive are lost once more. No other
history is kept: neither crash counts nor doubts.
"""

import math
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

import msgspec

from everserve.control.balance import Balancer
from everserve.control.effects import (
    AllReady,
    AnyEffect,
    AskToLeave,
    BackOff,
    BeginScaling,
    Cause,
    Decision,
    DropDevice,
    EndScaling,
    FillSlots,
    GiveUp,
    Keep,
    Kill,
    Lost,
    Probe,
    Provision,
    Publish,
    Resumed,
    Retire,
    Show,
)
from everserve.control.events import (
    Answered,
    AnyEvent,
    ChannelEnded,
    DeviceLost,
    DeviceReturned,
    Died,
    DrainAsked,
    Exited,
    GatewayReported,
    Said,
    SaidFailed,
    SaidHello,
    SaidHolds,
    SaidLeaving,
    SaidLoads,
    SaidReady,
    SaidReport,
    SaidUses,
    ScaleAsked,
    Seen,
    Silent,
    Started,
    Stopping,
    Suspected,
    Tick,
)
from everserve.control.places import (
    LastNamed,
    balanced_placement,
    holds_all,
    is_settled,
    new_placement,
    next_fills,
    slots_given_up,
    what_is_held,
    without,
)
from everserve.control.scaling import Refused, is_done, may_leave, scaled, size_of, staying
from everserve.control.seats import Found, Policy, Seat
from everserve.plan.balance import BalancePolicy
from everserve.plan.moves import GivenUp
from everserve.plan.routing import make_routes
from everserve.tables.calls import ShardKind
from everserve.tables.goal import Capacity, Goal, Wanted
from everserve.tables.ids import Epoch, Incarnation, Rank, Role, WorkerId
from everserve.tables.members import Members, WorkerState
from everserve.tables.routes import DID_NOT_SERVE, Routes
from everserve.tables.slots import FailedFill, Fill, HeldSlots, Place
from everserve.tables.validity import behind, conditions, degraded

__all__ = ["Found", "Machine", "Policy"]

_ORDER = {Keep: -1, Lost: 0, Publish: 1, Probe: 3}  # all other effects: 2


@dataclass(frozen=True, slots=True)
class _Step:
    """The result of one event, before the tables are compared."""

    reason: str
    effects: tuple[AnyEffect, ...] = ()
    publish_anyway: bool = False  # a new epoch though the members are the same
    publish_soon: bool = False  # the same, with the next tick: other workers may report at the same time


class Machine:
    """The seats of one instance. The host calls `start` or `resume` once, then `handle` for each event, and sends Tick
    no later than `next_deadline`."""

    def __init__(
        self,
        goal: Goal,
        policy: Policy,
        capacity: Capacity | None = None,
        balance: BalancePolicy | None = None,
    ) -> None:
        self.policy = policy
        self.goal = goal
        if capacity is None:
            num_planned = goal.placement.num_slots if goal.placement is not None else 0
            capacity = Capacity(max_workers=1 + max(seat.rank for seat in goal.seats), slots_per_layer=num_planned)
        self._capacity = capacity
        moe_layers = goal.placement.moe_layers if goal.placement is not None else ()
        num_experts = goal.placement.num_experts if goal.placement is not None else 0
        self.balancer = Balancer(len(moe_layers), num_experts, balance)
        self._given_up: GivenUp = {}  # slots that routes do not lead to any more
        self._last_named = LastNamed()
        self._first_epoch = Epoch(0)  # earlier ones were published by another orchestrator
        self._is_moving = True  # there may be slots to fill
        self._owes_routes = False  # workers hold other experts than the published routes say
        self.num_stale = 0  # messages of lost or unknown incarnations
        self.was_all_ready = False  # at some time since the instance started: it is not given up any more
        self._has_said_all_ready = False
        self._kept_goal: Goal | None = None  # the version that the supervisor has
        self.ending = ""  # non-empty: why no process is started any more
        assert goal.seats, "an instance has seats"
        self._seats = {seat.rank: Seat(seat) for seat in goal.seats}
        self._kill_at: dict[WorkerId, float] = {}  # lost, and its exit has not been seen
        self._count_slots()
        self._tables = self._tables_of(Epoch(0))

    def _count_slots(self) -> None:
        """As the members table shows them."""
        placement = self.goal.placement
        for seat in self._seats.values():
            seat.slots = seat.goal.own_experts
            planned = placement.seat(seat.rank) if placement is not None else None
            if placement is not None and planned is not None:
                seat.slots = self._capacity.slots_per_layer
                seat.shadow_slots = max(map(len, planned.shadows), default=0)

    # -- current state ------------------------------------------------------------------------

    def tables(self) -> Publish:
        """The tables published last."""
        return self._tables

    def counts(self, worker: WorkerId) -> bool:
        """Whether its seat holds this incarnation. A worker may be lost before its process exists."""
        seat = self._seats.get(worker.rank)
        return seat is not None and seat.incarnation == worker.incarnation and seat.state is not WorkerState.GONE

    @property
    def members(self) -> Members:
        return self._tables.members

    @property
    def moves(self) -> dict[Rank, tuple[Fill, ...]]:
        """Slots that are being filled."""
        return {seat.rank: seat.filling for seat in self._seats.values() if seat.filling}

    @property
    def is_as_planned(self) -> bool:
        """Every expert worker that should be there is ready and holds what it should."""
        return self.goal.placement is None or holds_all(self.goal.placement, self._seats)

    @property
    def routes(self) -> Routes | None:
        return self._tables.routes

    @property
    def epoch(self) -> Epoch:
        return self.members.epoch

    @property
    def violations(self) -> tuple[str, ...]:
        return self._tables.violations

    @property
    def degraded(self) -> tuple[str, ...]:
        return self._tables.degraded

    def next_deadline(self) -> float | None:
        if self._owes_routes:
            return -math.inf
        deadlines = [self.balancer.look_at, *(seat.next_deadline() for seat in self._seats.values())]
        return min([at for at in deadlines if at is not None] + list(self._kill_at.values()), default=None)

    def _members(self, epoch: Epoch) -> Members:
        seats = (seat for seat in self._seats.values() if not seat.is_retired)
        return Members(epoch=epoch, goal=self.goal.version, workers=tuple(seat.worker() for seat in seats))

    def _tables_of(self, epoch: Epoch) -> Publish:
        members, placement = self._members(epoch), self.goal.placement
        have = what_is_held(self._seats.values())
        routes = None
        if placement is not None:
            self._given_up = slots_given_up(placement, self._seats.values())
            have = without(have, self._given_up)  # what a slot holds that is about to be filled does not count
            serving = [seat for seat in self._seats.values() if seat.can_serve]
            leaving = {seat.rank for seat in serving if seat.state is WorkerState.LEAVING}
            ready = {seat.rank for seat in serving} - leaving
            routes = make_routes(epoch, placement, have, ready, leaving)
        return Publish(
            members=members,
            routes=routes,
            conditions=conditions(members, placement, have, routes, self._acknowledged()),
            degraded=degraded(members, placement, routes),
            gone=self.goal.gone,
        )

    def _acknowledged(self) -> dict[Rank, Epoch]:
        return {seat.rank: seat.acknowledged for seat in self._seats.values() if seat.acknowledged}

    # -- entry points -----------------------------------------------------------------------------------

    def start(self, now: float) -> Decision:
        """Provision every seat."""
        starts = [self._provision(seat) for seat in self._seats.values()]
        reason = f"the instance starts with {len(starts)} seats"
        return self._decide(_Step(reason, tuple(starts)))

    def resume(self, now: float, found: Sequence[Found], epoch: Epoch, was_all_ready: bool) -> Decision:
        """Take over from an orchestrator that has died. `epoch` is the highest that any process knows."""
        self.was_all_ready = was_all_ready
        self._kept_goal = self.goal
        effects: list[AnyEffect] = []
        for seat in self._seats.values():
            in_order = sorted((one for one in found if one.rank == seat.rank), key=lambda one: one.incarnation)
            for one in in_order[:-1]:
                effects += self._fence_again(one, seat.goal.roles, now)
            effects += self._take_over(seat, in_order[-1] if in_order else None, now)
        for one in found:
            if one.rank not in self._seats:
                effects += self._fence_again(one, (), now)
        self._replan()
        for seat in self._seats.values():
            if not seat.can_serve and not seat.is_retired and seat.goal.device not in self.goal.gone:
                self._see_to_experts(seat, now)
        self._tables = self._tables_of(epoch)
        self._first_epoch = Epoch(epoch + 1)
        alive = [one for one in found if one.pid >= 0]
        num_missing = sum(one.pid > 0 and not one.has_reported for one in alive)
        resumed = Resumed(num_reports=sum(one.has_reported for one in alive), num_missing=num_missing)
        reason = f"a new orchestrator goes on after epoch {epoch}; {len(alive)} processes were found"
        return self._decide(_Step(reason, (*effects, resumed), publish_anyway=True))

    def handle(self, event: AnyEvent, now: float) -> Decision:
        """One event, at this time."""
        match event:
            case DeviceLost():
                step = self._lose_device(event.device, event.is_gone, now)
            case DeviceReturned():
                step = self._return_device(event.device)
            case DrainAsked():
                step = self._drain(event.rank)
            case ScaleAsked():
                step = self._scale(event, now)
            case GatewayReported():
                step = self._overtake(event.epoch, "the gateway")
            case Tick():
                step = self._tick(now)
            case Stopping():
                step = self._stop()
            case _:
                seat = self._seats.get(event.rank)
                if seat is None or seat.state is WorkerState.GONE or seat.incarnation != event.incarnation:
                    step = self._not_current(event, seat)
                else:
                    step = self._current(event, seat, now)
        return self._decide(step)

    def _decide(self, step: _Step) -> Decision:
        """Compare the tables, publish if they changed.

        Losses come first, so that they do not wait for slower effects. Probes come last, because the host may answer
        them before it runs the next effect.
        """
        effects = [*step.effects, *self._end_scaling()]
        if self.goal is not self._kept_goal:
            self._kept_goal = self.goal
            effects.append(Keep(self.goal))
        self._owes_routes |= step.publish_soon
        if self._members(self.epoch) != self.members or step.publish_anyway:
            self._owes_routes = False
            self._tables = self._tables_of(Epoch(self.epoch + 1))
            effects.append(self._tables)
            self._is_moving = self.routes is not None
            if self.routes is not None:
                self._last_named.note(self.routes)
        effects += self._fill()
        effects += self._dismiss()
        staying = [seat for seat in self._seats.values() if seat.goal.wanted is Wanted.STAY]
        all_ready = all(seat.state is WorkerState.READY for seat in staying)
        if all_ready and not self._has_said_all_ready and not self.ending:
            self.was_all_ready = self._has_said_all_ready = True
            effects.append(AllReady())
        effects.sort(key=lambda effect: _ORDER.get(type(effect), 2))
        return Decision(tuple(effects), step.reason)

    # -- events about a process ------------------------------------------------------------------

    def _not_current(self, event: Said | Seen, seat: Seat | None) -> _Step:
        """A lost incarnation, or one that was never provisioned. It changes nothing; its messages are counted."""
        who = f"rank {event.rank} incarnation {event.incarnation}"
        if seat is None or not 1 <= event.incarnation <= seat.incarnation:
            self.num_stale += 1
            return _Step(f"{who} was never provisioned: {type(event).__name__} dropped")
        match event:
            case Exited():
                self._kill_at.pop(WorkerId(event.rank, event.incarnation), None)
                return _Step(f"{who} was lost already; now its process has ended")
            case Died() | ChannelEnded() | Silent() | Suspected():  # a death is observed in several ways
                return _Step(f"{who} was lost already")
            case Started() if WorkerId(event.rank, event.incarnation) not in self._kill_at:
                self.num_stale += 1
                return _Step(f"{who} comes to be after it was lost: kill it", (Kill(event.rank, event.incarnation),))
            case SaidFailed(user_error=True) if not self.was_all_ready and not self.ending:
                # The message arrived after the loss was decided. An error in the user's input is still valid.
                self._end_for("the instance gave up")
                return _Step(f"{who} was lost already, by the user's fault", (GiveUp(event.reason, True),))
            case _:
                self.num_stale += 1
                return _Step(f"{who} was lost already: {type(event).__name__} dropped")

    def _current(self, event: Said | Seen, seat: Seat, now: float) -> _Step:
        who = _who(seat)
        match event:
            case Started():
                seat.exist(event.pid, now, self.policy)
                return _Step(f"{who} exists")
            case SaidHello():
                seat.speak()
                return _Step(f"{who} says hello")
            case SaidHolds():
                return self._hold(seat, event.slots, event.failed, event.num_left, now)
            case SaidLoads():
                self.balancer.add(event.rows, now)
                return _Step(f"{who} has computed rows")
            case SaidUses():
                return self._acknowledge(seat, event.epoch)
            case SaidReport():
                return self._report(seat, event, now)
            case SaidReady():
                # Does not clear a doubt: it may have been sent before the silence.
                if seat.state is not WorkerState.STARTING:
                    return _Step(f"{who} was {seat.state} already")
                seat.speak()
                seat.become_ready(now)
                if Role.ATTENTION not in seat.goal.roles:
                    seat.is_replaced = False
                    self._replan()
                return _Step(f"{who} is ready")
            case SaidLeaving():
                if seat.state is WorkerState.LEAVING:
                    return _Step(f"{who} was leaving already")
                seat.speak()
                seat.leave(now, self.policy)
                return _Step(f"{who} leaves")
            case SaidFailed():
                return self._lose(seat, "exit", event.reason, now, user_error=event.user_error)
            case Exited():
                return self._exited(seat, event.exit_status, now)
            case Died():
                return self._died(seat, "the kernel marked its life word", now)
            case ChannelEnded():
                return self._died(seat, "its control channel ended", now)
            case Silent():
                return self._silent(seat, event.process_state, now)
            case Answered():
                was_reported, was_silent = seat.is_reported, seat.starve_at is not None
                seat.speak()
                seat.clear_doubt()
                if was_reported and seat.can_serve:
                    return _Step(f"{who} answers: peers that suspect it shall trust it again", publish_anyway=True)
                return _Step(f"{who} answers after a silence" if was_silent else f"{who} answers; it was not in doubt")
            case Suspected():
                said = f"{who} is suspected by rank {event.by}: {event.reason}"
                if not seat.has_spoken:
                    return _Step(f"{said}; it has not said hello yet, so there is nothing to look at")
                if event.reason in DID_NOT_SERVE:
                    num_times = seat.did_not_serve(event.by, now, self.policy)
                    if num_times >= self.policy.max_unserved:
                        return self._lose(seat, "hang", _unserved_words(event, num_times, self.policy), now)
                seat.is_reported = True
                return _Step(said, self._probe(seat))
            case _:
                assert_never(event)

    def _exited(self, seat: Seat, exit_status: int, now: float) -> _Step:
        cause: Cause = "exit" if exit_status in (0, 1) else "crash"
        reason = _exit_words(exit_status)
        if seat.state is WorkerState.LEAVING:
            if seat.leave_by is None:
                cause, reason = "left", f"{reason}, after {self.policy.leave_s:g} s in which it had not left"
            elif exit_status == 0:
                cause = "left"
        return self._lose(seat, cause, reason, now, has_ended=True)

    def _died(self, seat: Seat, reason: str, now: float) -> _Step:
        """Its exit status is not known. The death of a leaving worker is expected."""
        return self._lose(seat, "left" if seat.state is WorkerState.LEAVING else "crash", reason, now)

    def _silent(self, seat: Seat, process_state: str | None, now: float) -> _Step:
        seat.is_probed = False
        seat.speak()  # only workers that sent Hello are watched, but its event may still be queued
        match process_state:
            case "T" | "t":
                return self._lose(seat, "hang", f"silent and stopped ({process_state})", now)
            case "Z" | "X":
                return self._died(seat, f"silent and dead ({process_state})", now)
            case None:
                return self._lose(seat, "hang", "silent, and its process cannot be looked at", now)
        if seat.starve_at is None:
            seat.starve_at = now + self.policy.starved_s
        if now < seat.starve_at:
            return _Step(f"{_who(seat)} is silent but not stopped ({process_state}): it may only be starved")
        silence = f"silent for {self.policy.starved_s:g} s though not stopped ({process_state})"
        return self._lose(seat, "hang", silence, now)

    # -- transitions -----------------------------------------------------------------------------

    def _provision(self, seat: Seat) -> Provision:
        seat.begin()
        return Provision(seat.rank, seat.incarnation)

    def _probe(self, seat: Seat) -> tuple[Probe, ...]:
        """At most one probe of a seat at a time."""
        if seat.is_probed:
            return ()
        seat.is_probed = True
        return (Probe(seat.rank, seat.incarnation),)

    def _lose(
        self, seat: Seat, cause: Cause, reason: str, now: float, has_ended: bool = False, user_error: bool = False
    ) -> _Step:
        """End this incarnation and arrange the next one."""
        has_left = cause == "left"
        is_expected = has_left or bool(self.ending)
        lost = Lost(seat.rank, seat.incarnation, seat.goal.roles, cause, reason, is_expected)
        step_reason = f"{_who(seat)} is gone ({cause}): {reason}"
        if not has_ended:
            self._kill_at[seat.id] = now + self.policy.fence_grace_s
        seat.end(reason, now, self.policy, has_left)
        give_up = self._give_up(seat, reason, user_error)
        delay_s = 0.0 if has_left else self.policy.delay_s(seat.num_crashes)
        if self.ending:
            seat.leave_empty(self.ending)
            return _Step(step_reason, (lost, *give_up))
        if seat.goal.device in self.goal.gone:
            seat.leave_empty(f"its device {seat.goal.device} is gone")
            return _Step(step_reason, (lost,))
        self._see_to_experts(seat, now)
        if seat.is_retired:
            return _Step(f"{step_reason}; its seat is retired", (lost, Retire(seat.rank)))
        if delay_s == 0:
            return _Step(step_reason, (lost, self._provision(seat)))
        seat.wait(delay_s, now)
        return _Step(step_reason, (lost, BackOff(seat.rank, seat.num_crashes, delay_s)))

    def _see_to_experts(self, seat: Seat, now: float) -> None:
        """An expert without any place gets one at once. Lost redundancy can wait for the next incarnation."""
        if self.goal.placement is None or Role.ATTENTION in seat.goal.roles:
            return
        if not seat.is_replaced and seat.heal_at is None and math.isfinite(self.policy.heal_after_s):
            seat.heal_at = now + self.policy.heal_after_s
        self._replace_missed()

    def _replace_missed(self) -> None:
        """Workers that are away, also those that were lost before, and of whose experts one has no place now. Heads can
        wait for the next incarnation, which finds their KV: elsewhere all of it would have to be computed again."""
        if self.goal.placement is None or not self.was_all_ready:
            return
        held = what_is_held(seat for seat in self._seats.values() if seat.can_serve).values()
        calls = [i for i, call in enumerate(self.goal.placement.calls) if call.kind is not ShardKind.HEAD]
        served = {i: set().union(*(one.experts[i] for one in held)) for i in calls}
        missed = []
        for planned in self.goal.placement.seats:
            seat = self._seats[planned.rank]
            has_places = all(found.issuperset(planned.experts(call)) for call, found in served.items())
            if not seat.can_serve and not seat.is_replaced and not has_places:
                missed.append(seat)
        if missed:
            self._replace(*missed)

    def _give_up(self, seat: Seat, reason: str, user_error: bool) -> tuple[GiveUp, ...]:
        """GiveUp if this loss shows that the instance cannot start. Never after all seats were ready once."""
        if self.was_all_ready or self.ending:
            return ()
        if not user_error:
            if seat.num_failed_starts < self.policy.max_failed_starts:
                return ()
            reason = f"rank {seat.rank} ended {seat.num_failed_starts} times before it was ready; last: {reason}"
        self._end_for("the instance gave up")
        return (GiveUp(reason, user_error),)

    def _take_over(self, seat: Seat, latest: Found | None, now: float) -> tuple[AnyEffect, ...]:
        """The latest incarnation keeps the seat if it is alive and was not lost; an earlier one never does."""
        is_device_gone = seat.goal.device in self.goal.gone
        if latest is not None and latest.pid >= 0 and not latest.was_lost and not is_device_gone:
            seat.adopt(latest, now, self.policy)
            return ()
        seat.incarnation = latest.incarnation if latest is not None else seat.incarnation
        next_one: tuple[AnyEffect, ...] = ()
        if is_device_gone:
            seat.leave_empty(f"its device {seat.goal.device} is gone")
        else:
            next_one = (Retire(seat.rank) if seat.is_retired else self._provision(seat),)
        if latest is None:
            return next_one
        if latest.was_lost or (is_device_gone and latest.pid >= 0):
            return (*self._fence_again(latest, seat.goal.roles, now), *next_one)
        cause: Cause = "left" if latest.is_leaving else "crash"
        reason, is_expected = "ended while there was no orchestrator", cause == "left"
        lost = Lost(seat.rank, latest.incarnation, seat.goal.roles, cause, reason, is_expected)
        return lost, *next_one

    def _fence_again(self, old: Found, roles: tuple[Role, ...], now: float) -> tuple[Lost, ...]:
        """The previous orchestrator lost it and died before the process ended: fence it again."""
        if old.pid < 0:
            return ()
        self._kill_at[WorkerId(old.rank, old.incarnation)] = now + self.policy.fence_grace_s
        reason = "was lost to the orchestrator before this one, and lives"
        return (Lost(old.rank, old.incarnation, roles, "hang", reason, is_expected=True),)

    def _overtake(self, epoch: Epoch, who: str) -> _Step:
        """Publish a later epoch than the one of this process, because processes drop tables that are not newer."""
        if epoch < self.epoch:
            return _Step(f"epoch {epoch}, which {who} has, is past")
        self._tables = self._tables_of(epoch)
        self._first_epoch = Epoch(epoch + 1)
        return _Step(f"{who} has tables of epoch {epoch} from the orchestrator before", publish_anyway=True)

    def _hold(
        self, seat: Seat, slots: HeldSlots, failed: Sequence[FailedFill] = (), num_left: int = 0, now: float = 0.0
    ) -> _Step:
        """Routes follow what workers hold."""
        has_changed = seat.held is None or seat.held.experts != slots.experts
        seat.held, seat.filling = slots, seat.filling[len(seat.filling) - num_left :]
        self._is_moving = self.routes is not None
        if failed:
            seat.fill_at = now + self.policy.fill_again_s
            return _Step(
                f"{_who(seat)} could not load {len(failed)} experts (last: {failed[-1].reason})",
                publish_soon=has_changed and seat.can_serve,
            )
        return _Step(f"{_who(seat)} holds other experts", publish_soon=has_changed and seat.can_serve)

    def _fill(self) -> list[FillSlots]:
        """The next slots to fill, on the way from what is held to the goal."""
        if not self._is_moving or self.goal.placement is None or self.ending:
            return []
        self._is_moving = False
        attention = [s for s in self._seats.values() if Role.ATTENTION in s.goal.roles and s.can_serve]
        oldest = min((seat.acknowledged for seat in attention), default=self.epoch)  # that a worker may follow

        def is_free(rank: Rank, place: Place) -> bool:
            return oldest >= self._first_epoch and self._last_named.epoch(rank, place) < oldest

        told = next_fills(self.goal.placement, tuple(self._seats.values()), self._given_up, is_free, self.policy)
        for fill in told:
            self._seats[fill.rank].filling = fill.fills
        return told

    # -- the goal --------------------------------------------------------------------------------

    def _replan(self) -> None:
        """A new version of the goal, if other places are better for the workers that there are now."""
        loads = self.balancer.loads.by_layer()
        placement = new_placement(self.goal, self._seats.values(), self._capacity, loads)
        if placement != self.goal.placement:
            self._set_goal(placement=placement)

    def _balance(self, now: float) -> Iterator[_Step]:
        """Now and then: other places for experts because of their load, if that is worth it."""
        policy = self.balancer.policy
        if policy is None or self.ending or not self.balancer.is_due(now) or not is_settled(self.goal, self._seats):
            return
        loads = self.balancer.loads.by_layer(now)
        verdict = balanced_placement(self.goal, self._seats, self._capacity, loads, policy)
        if verdict.placement is not None:
            self._set_goal(placement=verdict.placement)
        yield _Step(verdict.reason, self.balancer.tell(verdict, now))

    def _set_goal(self, **changes: object) -> None:
        self.goal = msgspec.structs.replace(self.goal, version=self.goal.version + 1, **changes)
        for seat in self.goal.seats:
            self._seats[seat.rank].goal = seat
        self._count_slots()

    def _replace(self, *seats: Seat) -> None:
        """The experts of workers that are away get places elsewhere. A worker keeps those that were planned for it: if
        it comes back first, it serves them."""
        for seat in seats:
            seat.is_replaced, seat.heal_at = True, None
        self._replan()

    def _lose_device(self, device: int, is_gone: bool, now: float) -> _Step:
        """All workers on it at once, and all that was in its memory."""
        seats = [seat for seat in self._seats.values() if seat.goal.device == device]
        if not seats:
            return _Step(f"there is no device {device}")
        if is_gone and device not in self.goal.gone:
            self._set_goal(gone=(*self.goal.gone, device))
        alive = [seat for seat in seats if seat.state is not WorkerState.GONE]
        kills = [Kill(*seat.id) for seat in alive]
        steps = [self._lose(seat, "crash", f"its device {device} was lost", now) for seat in alive]
        for seat in seats:
            if device in self.goal.gone:
                seat.leave_empty(f"its device {device} is gone")
        self._replan()
        self._replace_missed()
        effects = [effect for step in steps for effect in step.effects]
        reason = f"device {device} is {'gone' if is_gone else 'lost'} with {len(alive)} workers"
        return _Step(reason, (*kills, DropDevice(device), *effects))

    def _return_device(self, device: int) -> _Step:
        if device not in self.goal.gone:
            return _Step(f"device {device} is not gone")
        self._set_goal(gone=tuple(other for other in self.goal.gone if other != device))
        self._replan()
        seats = [seat for seat in self._seats.values() if seat.goal.device == device]
        starts = [self._provision(seat) for seat in seats if seat.state is WorkerState.GONE and not seat.is_retired]
        return _Step(f"device {device} is back: {len(starts)} workers start", tuple(starts))

    def _acknowledge(self, seat: Seat, epoch: Epoch) -> _Step:
        """Update the gateway if this changes which workers are behind the published routes."""
        seat.acknowledged = max(seat.acknowledged, epoch)
        self._is_moving = self.routes is not None
        step = _Step(f"{_who(seat)} uses the routes of epoch {epoch}")
        epochs = behind(self.members, self._acknowledged()) if self.routes is not None else ()
        if epochs == self._tables.conditions.epochs:
            return step
        self._tables = replace(self._tables, conditions=msgspec.structs.replace(self._tables.conditions, epochs=epochs))
        return replace(step, effects=(Show(self._tables),))

    def _report(self, seat: Seat, event: SaidReport, now: float) -> _Step:
        """A worker that reports only after this orchestrator has resumed."""
        seat.speak()
        steps = [self._hold(seat, event.slots, now=now)] if event.slots is not None else []
        if event.is_leaving and seat.state is not WorkerState.LEAVING:
            seat.leave(now, self.policy)
        steps.append(self._overtake(event.epoch, _who(seat)))
        reason = "; ".join(step.reason for step in steps)
        return _Step(reason, publish_anyway=any(step.publish_anyway or step.publish_soon for step in steps))

    def _drain(self, rank: Rank) -> _Step:
        """The reason is the answer to the operator."""
        seat = self._seats.get(rank)
        if seat is None:
            return _Step(f"there is no rank {rank}")
        if self.ending or seat.state is not WorkerState.READY:
            return _Step(f"{_who(seat)} is not asked to leave: {self.ending or f'it is {seat.state}'}")
        return _Step(f"{_who(seat)} is asked to leave", (AskToLeave(rank, seat.incarnation),))

    # -- scaling ---------------------------------------------------------------------------------

    def _scale(self, asked: ScaleAsked, now: float) -> _Step:
        """The reason is the answer to the operator."""
        if self.ending or not self.was_all_ready:
            return _Step(self.ending or "the instance is still starting: try again when it serves")
        empty = [rank for rank in self._seats if not self._has_process(rank)]
        stayed = {seat.rank for seat in staying(self.goal)}
        try:
            goal = scaled(self.goal, asked, self._capacity, empty)
        except Refused as refused:
            return _Step(str(refused))
        stay = {seat.rank for seat in staying(goal)}
        new = [seat for seat in staying(goal) if seat.rank not in stayed and not self._has_process(seat.rank)]
        for one in new:
            before = self._seats.get(one.rank)
            self._seats[one.rank] = Seat(one, incarnation=before.incarnation if before else Incarnation(0))
        self._set_goal(seats=goal.seats, placement=goal.placement, scaling_since_s=now)
        self._replan()
        effects: list[AnyEffect] = [BeginScaling(tuple(sorted(stay - stayed)), tuple(sorted(stayed - stay)))]
        for seat in self._seats.values():
            if seat.is_retired:
                seat.leave_empty("its seat is retired")
                effects.append(Retire(seat.rank))
        effects += [self._provision(self._seats[one.rank]) for one in new]
        return _Step(f"scale to {size_of(self.goal)}", tuple(effects))

    def _has_process(self, rank: Rank) -> bool:
        return rank in self._seats and self._seats[rank].state is not WorkerState.GONE

    def _end_scaling(self) -> list[EndScaling]:
        since_s = self.goal.scaling_since_s
        if since_s is None or not is_done(self.goal, self._seats.values()):
            return []
        self._set_goal(scaling_since_s=None)
        return [EndScaling(since_s)]

    def _dismiss(self) -> list[AskToLeave]:
        """Ask workers to leave that should retire and are not needed any more."""
        if self.ending:
            return []
        seats = may_leave(self.goal, self._seats.values(), self._given_up)
        for seat in seats:
            seat.is_asked_to_leave = True
        return [AskToLeave(*seat.id) for seat in seats]

    def _stop(self) -> _Step:
        self._end_for("the instance stops")
        return _Step("the instance stops: no process is started any more")

    def _end_for(self, why: str) -> None:
        self.ending = self.ending or why
        for seat in self._seats.values():
            if seat.state is WorkerState.GONE:
                seat.leave_empty(self.ending)

    def _tick(self, now: float) -> _Step:
        steps = [step for seat in self._seats.values() for step in self._due(seat, now)]
        steps += self._balance(now)
        for worker, at in list(self._kill_at.items()):
            if at <= now:
                del self._kill_at[worker]
                reason = f"rank {worker.rank} incarnation {worker.incarnation} was lost and has not ended: kill it"
                steps.append(_Step(reason, (Kill(*worker),)))
        if self._owes_routes:
            steps.append(_Step("workers hold other experts"))
        reason = "; ".join(step.reason for step in steps)
        effects = tuple(effect for step in steps for effect in step.effects)
        return _Step(reason or "nothing is due", effects, publish_anyway=self._owes_routes)

    def _due(self, seat: Seat, now: float) -> Iterator[_Step]:
        due_at = seat.next_deadline()
        if due_at is None or due_at > now:
            return
        if seat.heal_at is not None and seat.heal_at <= now:
            self._replace(seat)
            yield _Step(f"{_who(seat)} has been away for {self.policy.heal_after_s:g} s: others take over its experts")
        if seat.fill_at is not None and seat.fill_at <= now:
            seat.fill_at = None
            self._is_moving = True
            yield _Step(f"{_who(seat)} may try to load experts again")
        if seat.state is WorkerState.GONE:
            if seat.start_at is None or seat.start_at > now:
                return
            provision = self._provision(seat)
            yield _Step(f"{_who(seat)} starts after a delay", (provision,))
            return
        if seat.hello_by is not None and seat.hello_by <= now:
            yield self._lose(seat, "hang", f"has not said a word in {self.policy.hello_s:g} s", now)
            return
        if seat.leave_by is not None and seat.leave_by <= now:
            seat.leave_by = None
            reason = f"{_who(seat)} has not left in {self.policy.leave_s:g} s: kill it"
            yield _Step(reason, (Kill(seat.rank, seat.incarnation),))
        if seat.starve_at is not None and seat.starve_at <= now and not seat.is_probed:
            # A probe decides, not the clock: the host itself may have been delayed.
            yield _Step(f"{_who(seat)} has been silent for {self.policy.starved_s:g} s: a last look", self._probe(seat))


def _who(seat: Seat) -> str:
    return f"rank {seat.rank} incarnation {seat.incarnation}"


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
