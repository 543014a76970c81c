"""The state machine: what is told about processes -> who counts, what everybody is told, who is started or ended.

What happens to the incarnation that a seat holds (an event about any other one changes nothing):

    event                    effect                                    loss
    Started                  its pid is published; lost if it does not
                             say hello within `hello_s`                hang
    SaidHello                its silence means something from now on
    SaidReady                ready; routes may lead to it
    SaidFailed               lost at once                              exit
    Exited 0 or 1 / other    lost at once                              exit / crash
    Died, ChannelEnded       lost at once                              crash
    Silent, Z X              lost at once                              crash
    Silent, T t or unknown   lost at once                              hang
    Silent, any other state  in doubt; looked at again after           hang, if it is
                             `starved_s` and lost if still silent      silent then
    Answered                 no doubt; published again if a peer had reported it
    Reported                 probed
    Tick                     whatever is due: starts, last looks, kills

Silence means the same while a worker starts: its pulse begins with its hello and does not wait for the weights.

Lost: published at once, then the next incarnation is provisioned at once, or after a delay if the seat's processes keep
ending early. If nobody saw the process end it is killed after `fence_grace_s`; until then it may wake up, find itself
fenced and exit. Losses are never taken back: a process that was declared gone wrongly is replaced all the same.
"""

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

from everserve.orchestrator.effects import (
    AllReady,
    AnyEffect,
    BackOff,
    Cause,
    Decision,
    GiveUp,
    Kill,
    Lost,
    Probe,
    Provision,
    Publish,
)
from everserve.orchestrator.events import (
    Answered,
    AnyEvent,
    ChannelEnded,
    Died,
    Exited,
    Reported,
    Said,
    SaidFailed,
    SaidHello,
    SaidReady,
    Seen,
    Silent,
    Started,
    Stopping,
    Tick,
)
from everserve.orchestrator.seats import Policy, Seat, SeatSpec
from everserve.plan.routing import make_routes
from everserve.tables.ids import Epoch, Incarnation, Rank, Role
from everserve.tables.members import Members, WorkerState
from everserve.tables.placement import Placement
from everserve.tables.routes import Routes
from everserve.tables.validity import degraded, violations

__all__ = ["Machine", "Policy", "SeatSpec"]

_ORDER = {Lost: 0, Publish: 1, Probe: 3}  # everything else between them


@dataclass(frozen=True, slots=True)
class _Step:
    """What one event leads to, before the tables are compared."""

    reason: str
    effects: tuple[AnyEffect, ...] = ()
    publish_anyway: bool = False  # a new epoch though the tables are the same


class Machine:
    """The seats of one instance. The host calls `start` once, then `handle` for each event, and sends Tick no later
    than `next_deadline`."""

    def __init__(self, seats: Sequence[SeatSpec], placement: Placement | None, policy: Policy) -> None:
        self.policy = policy
        self.placement = placement
        self.num_stale = 0  # what lost or unknown incarnations said
        self.was_all_ready = False
        self.ending = ""  # why nobody is started any more
        self._seats = {spec.rank: Seat(spec) for spec in seats}
        self._kill_at: dict[tuple[Rank, Incarnation], float] = {}  # lost, and nobody saw the process end
        assert len(self._seats) == len(seats) > 0, seats
        if placement is not None:
            experts = {spec.rank for spec in seats if Role.EXPERT in spec.roles}
            assert experts == {seat.rank for seat in placement.seats}, "expert seats and placement differ"
        for seat in self._seats.values():
            seat.slots = seat.spec.slots
            if placement is not None and Role.EXPERT in seat.spec.roles:
                slots = placement.seat(seat.rank)
                seat.slots, seat.shadow_slots = slots.num_slots, slots.num_slots - slots.num_active
        self._tables = self._tables_of(Epoch(0))

    # -- what is true now ------------------------------------------------------------------------

    def tables(self) -> Publish:
        """What was published last."""
        return self._tables

    @property
    def members(self) -> Members:
        return self._tables.members

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
        deadlines = [seat.next_deadline() for seat in self._seats.values()]
        return min([at for at in deadlines if at is not None] + list(self._kill_at.values()), default=None)

    def _tables_of(self, epoch: Epoch) -> Publish:
        members = Members(epoch=epoch, workers=tuple(seat.worker() for seat in self._seats.values()))
        routes = None
        if self.placement is not None:
            ready = {worker.rank for worker in members.workers if worker.state is WorkerState.READY}
            routes = make_routes(epoch, self.placement, ready)
        return Publish(
            members=members,
            routes=routes,
            violations=violations(members, self.placement, routes),
            degraded=degraded(members, self.placement, routes),
        )

    # -- doors -----------------------------------------------------------------------------------

    def start(self, now: float) -> Decision:
        """Provision every seat."""
        effects = [self._provision(seat) for seat in self._seats.values()]
        return self._decide(_Step(f"the instance starts with {len(effects)} seats", tuple(effects)))

    def handle(self, event: AnyEvent, now: float) -> Decision:
        """One event, at this time."""
        match event:
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

        Losses come first, so that nothing waits for anything slower; probes last, because the host may answer them
        before it goes on.
        """
        effects = list(step.effects)
        workers = tuple(seat.worker() for seat in self._seats.values())
        if workers != self.members.workers or step.publish_anyway:
            self._tables = self._tables_of(Epoch(self.epoch + 1))
            effects.append(self._tables)
        all_ready = all(worker.state is WorkerState.READY for worker in workers)
        if all_ready and not self.was_all_ready and not self.ending:
            self.was_all_ready = True
            effects.append(AllReady())
        effects.sort(key=lambda effect: _ORDER.get(type(effect), 2))
        return Decision(tuple(effects), step.reason)

    # -- events about a process ------------------------------------------------------------------

    def _not_current(self, event: Said | Seen, seat: Seat | None) -> _Step:
        """A lost incarnation, or one that never was. It changes nothing; what such a process *says* is counted."""
        who = f"rank {event.rank} incarnation {event.incarnation}"
        if seat is None or not 1 <= event.incarnation <= seat.incarnation:
            self.num_stale += 1
            return _Step(f"{who} was never provisioned: {type(event).__name__} dropped")
        match event:
            case Exited():
                self._kill_at.pop((event.rank, event.incarnation), None)
                return _Step(f"{who} was lost already; now its process has ended")
            case Died() | ChannelEnded() | Silent() | Reported():  # a death is seen in many ways; one was the first
                return _Step(f"{who} was lost already")
            case Started() if (event.rank, event.incarnation) not in self._kill_at:
                self.num_stale += 1
                return _Step(f"{who} comes to be after it was lost: kill it", (Kill(event.rank, event.incarnation),))
            case SaidFailed(user_error=True) if not self.was_all_ready and not self.ending:
                # Last words that its death has overtaken. What is wrong with the input stays true.
                self._end_for("the instance gave up")
                return _Step(f"{who} was lost already, by the user's fault", (GiveUp(event.reason, True),))
            case Started() | SaidHello() | SaidReady() | SaidFailed() | Answered():
                self.num_stale += 1
                return _Step(f"{who} was lost already: {type(event).__name__} dropped")
            case _:
                assert_never(event)

    def _current(self, event: Said | Seen, seat: Seat, now: float) -> _Step:
        who = _who(seat)
        match event:
            case Started():
                seat.exist(event.pid, now, self.policy)
                return _Step(f"{who} exists")
            case SaidHello():
                seat.speak()
                return _Step(f"{who} says hello")
            case SaidReady():
                # Not the end of a doubt: it may have said so before it fell silent.
                if seat.state is WorkerState.READY:
                    return _Step(f"{who} was ready already")
                seat.speak()
                seat.become_ready(now)
                return _Step(f"{who} is ready")
            case SaidFailed():
                return self._lose(seat, "exit", event.reason, now, user_error=event.user_error)
            case Exited():
                cause: Cause = "exit" if event.exit_status in (0, 1) else "crash"
                return self._lose(seat, cause, _exit_words(event.exit_status), now, has_ended=True)
            case Died():
                return self._lose(seat, "crash", "the kernel marked its life word", now)
            case ChannelEnded():
                return self._lose(seat, "crash", "its control channel ended", now)
            case Silent():
                return self._silent(seat, event.process_state, now)
            case Answered():
                was_reported, was_silent = seat.is_reported, seat.starve_at is not None
                seat.speak()
                seat.clear_doubt()
                if was_reported and seat.state is WorkerState.READY:
                    return _Step(f"{who} answers: peers that suspect it shall trust it again", publish_anyway=True)
                return _Step(f"{who} answers after a silence" if was_silent else f"{who} answers; nobody was in doubt")
            case Reported():
                said = f"{who} is suspected by rank {event.by}: {event.reason}"
                if not seat.has_spoken:
                    return _Step(f"{said}; it has not said hello yet, so there is nothing to look at")
                seat.is_reported = True
                return _Step(said, self._probe(seat))
            case _:
                assert_never(event)

    def _silent(self, seat: Seat, process_state: str | None, now: float) -> _Step:
        seat.is_probed = False
        seat.speak()  # only who has said hello is watched, though its hello may be on the way
        match process_state:
            case "T" | "t":
                return self._lose(seat, "hang", f"silent and stopped ({process_state})", now)
            case "Z" | "X":
                return self._lose(seat, "crash", f"silent and dead ({process_state})", now)
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
        """One look at a time."""
        if seat.is_probed:
            return ()
        seat.is_probed = True
        return (Probe(seat.rank, seat.incarnation),)

    def _lose(
        self, seat: Seat, cause: Cause, reason: str, now: float, has_ended: bool = False, user_error: bool = False
    ) -> _Step:
        """This incarnation is gone; see to the next one."""
        lost = Lost(seat.rank, seat.incarnation, seat.spec.roles, cause, reason, is_expected=bool(self.ending))
        step_reason = f"{_who(seat)} is gone ({cause}): {reason}"
        if not has_ended:
            self._kill_at[seat.rank, seat.incarnation] = now + self.policy.fence_grace_s
        seat.end(reason, now, self.policy)
        give_up = self._give_up(seat, reason, user_error)
        delay_s = self.policy.delay_s(seat.num_crashes)
        if self.ending:
            seat.leave_empty(self.ending)
            return _Step(step_reason, (lost, *give_up))
        if delay_s == 0:
            return _Step(step_reason, (lost, self._provision(seat)))
        seat.wait(delay_s, now)
        return _Step(step_reason, (lost, BackOff(seat.rank, seat.num_crashes, delay_s)))

    def _give_up(self, seat: Seat, reason: str, user_error: bool) -> tuple[GiveUp, ...]:
        """Whether this loss shows that the instance will never come up. Once it was up, it is never given up."""
        if self.was_all_ready or self.ending:
            return ()
        if not user_error:
            if seat.num_failed_starts < self.policy.max_failed_starts:
                return ()
            reason = f"rank {seat.rank} ended {seat.num_failed_starts} times before it was ready; last: {reason}"
        self._end_for("the instance gave up")
        return (GiveUp(reason, user_error),)

    def _stop(self) -> _Step:
        self._end_for("the instance stops")
        return _Step("the instance stops: nobody is started any more")

    def _end_for(self, why: str) -> None:
        self.ending = self.ending or why
        for seat in self._seats.values():
            if seat.state is WorkerState.GONE:
                seat.leave_empty(self.ending)

    def _tick(self, now: float) -> _Step:
        effects: list[AnyEffect] = []
        reasons: list[str] = []
        for seat in self._seats.values():
            due = seat.next_deadline()
            if due is None or due > now:
                continue
            if seat.state is WorkerState.GONE:
                effects.append(self._provision(seat))
                reasons.append(f"{_who(seat)} starts after a delay")
            elif seat.hello_by is not None:
                step = self._lose(seat, "hang", f"has not said a word in {self.policy.hello_s:g} s", now)
                effects += step.effects
                reasons.append(step.reason)
            else:
                # A look, not the clock, has the last word: the host itself may have been held up.
                effects += self._probe(seat)
                reasons.append(f"{_who(seat)} has been silent for {self.policy.starved_s:g} s: a last look")
        for (rank, incarnation), at in list(self._kill_at.items()):
            if at <= now:
                del self._kill_at[rank, incarnation]
                effects.append(Kill(rank, incarnation))
                reasons.append(f"rank {rank} incarnation {incarnation} was lost and has not ended: kill it")
        return _Step("; ".join(reasons) or "nothing is due", tuple(effects))


def _who(seat: Seat) -> str:
    return f"rank {seat.rank} incarnation {seat.incarnation}"


def _exit_words(exit_status: int) -> str:
    if exit_status >= 0:
        return f"exited with status {exit_status}"
    try:
        return f"killed by {signal.Signals(-exit_status).name}"
    except ValueError:
        return f"killed by signal {-exit_status}"
