"""The state machine: inputs about processes -> membership, published tables, and which processes to start or kill.

Effects of inputs about the incarnation that a seat holds (inputs about any other incarnation change nothing); the first
ones are messages of that worker:

    input                    effect                                    loss
    Hello                    watched: silence is a symptom from now on
    SlotsReported            routes lead to what it holds, once it is ready
    Ready                    ready; routes may lead to it
    RoutesUsed               an attention worker's epoch; shown to operators
    LoadReported             counted; with a balance policy, a new goal now and then
    RowComputed,             compared (wrong_rows.py): the device of a worker that
      RowComputedAgain       computes wrong is evacuated
    PaceReported             compared (slowness.py): a slow worker is demoted, and
                             then asked to leave
    Report                   as SlotsReported, and Leaving if it is leaving;
                             published again if our epoch is not later
    Leaving                  leaving; routes lead to it only where no
                             ready worker has the expert; killed if it
                             has not ended after `leave_s`             left
    Failed                   lost at once                              exit
    Suspected (of a peer)    probed; lost if it pulses but did not
                             serve this peer `max_unserved` times
                             within `unserved_s`                       hang
    Started                  its pid is published; lost if it does not
                             say hello within `hello_s`                hang
    Exited 0 or 1 / other    lost at once                              exit / crash
    Died, ChannelEnded       lost at once                              crash
    Silent, Z X              lost at once                              crash
    Silent, T t or unknown   lost at once                              hang
    Silent, main thread      lost at once                              hang
      hangs, not in state D
    Silent, any other state  in doubt; probed again after              hang, if still
                             `starved_s` and lost if still silent;     silent
                             state D: again and again, for `blocked_s`
    Alive                    doubt cleared; published again if a peer had reported it
    Diagnosis                its device may be emptied, isolated or used
                             again (health.py)
    Ask, by an operator:     answered, with what follows or why nothing does
      DrainRequest           asked to leave if it is ready
      FaultRequest           all workers of a device are killed and lost, its memory
                             is dropped; if it is gone, nothing starts on it  crash
      ReturnRequest          workers start on it
      HealthRequest          as Diagnosis
      ScaleRequest           seats come, or should retire (scaling.py)
      SwitchRequest          a seat should have the other role (switching.py)
    StreamsReported          remembered: which attention worker has the fewest
                             streams, and how much KV; which device has little
                             to do
    GatewayReport            published again if our epoch is not later
    Shutdown                 nothing is started any more
    HostJoined               its seats are filled, if it was lost (hosts.py)
    HostLeft                 all its workers are lost, its memory is dropped; seats on
                             it stay empty                             crash
    Tick                     what is due: starts, last probes, kills; and what follows
                             from all inputs since the last one: routes to what
                             workers hold, and the next slots to fill

Silence is handled the same way while a worker starts: its pulse begins with its hello, before it loads its weights.

The loss of a leaving worker is an expected one (left) if it exits with status 0, if it dies and its status is not
known, or if it dies in any way after it was killed for taking too long. Otherwise the cause is the one in the table.

Lost: published at once, together with what else was lost in the same moment. Then the next incarnation is provisioned
at once, or after a delay if the seat's processes keep ending early (a worker that left does not count). If the exit of
the process was not seen, it is killed after `fence_grace_s`; until then it may wake up, find itself fenced and exit. A
loss is never revoked: a process that was declared gone wrongly is replaced all the same.

The goal (tables/goal.py) says which seats there are. A seat that should retire is not filled again; one that should
change its role is filled with a worker of the other role.

After every input, as far as `--on-lost-expert` allows (plan/lost_experts.py): experts without a place are masked, or no
longer, when tables are published; an attention worker becomes an expert worker if expert workers are gone and the
others have too few slots, and goes back when they have returned.

An orchestrator that replaces another one resumes with the goal that the supervisor has kept and with the processes that
exist, seat by seat (a process in a seat that is not in the goal is lost):

    latest incarnation       seat
    none                     provisioned
    has ended                lost (crash; left, if it was leaving), in case its end was not published; the next is
                             provisioned
    was lost, and lives      lost once more (hang); the next is provisioned
    has another role         the same: its seat has changed its role since
    being forked             starting
    has not reported         starting; lost (hang) if it does not report within `hello_s`
    reported                 starting, ready or leaving, as reported

Earlier incarnations were lost when the next one was provisioned: those that are alive are lost once more. No other
history is kept: neither crash counts nor doubts.
"""

import math
from collections.abc import Iterable, Sequence

from everserve.control.decide import (
    health,
    hosts,
    membership,
    moving,
    operations,
    slow_workers,
    switching,
    wrong_rows,
)
from everserve.control.decide.balance import Balancer
from everserve.control.decide.cluster import ClusterState, Since, Step, provision
from everserve.control.decide.effects import (
    AllReady,
    AnyEffect,
    Decision,
    Lost,
    Probe,
    Publish,
    Resumed,
    Show,
    Tell,
)
from everserve.control.decide.inputs import AnyInput, SaidRow, Tick
from everserve.control.decide.places import holds_all
from everserve.control.decide.policy import Policy
from everserve.control.decide.seats import Found
from everserve.plan.balance import BalancePolicy
from everserve.plan.lost_experts import LostExpertPolicy
from everserve.tables.goal import Capacity, Goal, Wanted
from everserve.tables.health import Diagnosis
from everserve.tables.ids import NO_RANK, Epoch, Rank, WorkerId
from everserve.tables.members import Host, Members, WorkerState
from everserve.tables.routes import Routes
from everserve.tables.slots import Fill
from everserve.wire.events import DeviceLost, HostLost
from everserve.wire.messages import (
    Ask,
    GatewayReport,
    HostJoined,
    HostLeft,
    KeepGoal,
    Shutdown,
    StopChanges,
    StreamsReported,
)
from everserve.words import count

__all__ = ["Found", "Machine", "Policy"]

_ORDER = {
    DeviceLost: -1,
    HostLost: -1,
    KeepGoal: -1,
    Lost: 0,
    StopChanges: 0,
    Publish: 1,
    Probe: 3,
}  # all other effects: 2


class Machine:
    """The seats of one instance. Its process calls `start` or `resume` once, then `handle` for each input, and sends
    Tick no later than `next_deadline`."""

    def __init__(
        self,
        goal: Goal,
        policy: Policy,
        capacity: Capacity | None = None,
        balance: BalancePolicy | None = None,
        lost_policy: LostExpertPolicy | None = None,
        hosts: Sequence[Host] = (),
    ) -> None:
        self._cluster = ClusterState(goal, policy, capacity, balance, lost_policy)
        self._cluster.hosts = {host.host: host for host in hosts}
        self._seats = self._cluster.seats
        self._lost_at = -math.inf  # the last loss
        self._owes_routes = False  # workers hold other experts than the published routes say
        self._published_at = -math.inf
        self._gathers = False  # what workers say is not published yet, because the instance is starting
        self._owes_changes = False  # workers have reported: there may be slots to fill
        self._postponed: list[Step] = []  # their effects are under way; what they change was not published
        self._has_said_all_ready = False
        self._not_ready = NO_RANK
        self._kept_goal: Goal | None = None  # the version that the supervisor has

    # -- current state ------------------------------------------------------------------------

    def tables(self) -> Publish:
        """The tables published last."""
        return self._cluster.tables

    def counts(self, worker: WorkerId) -> bool:
        """Whether its seat holds this incarnation. A worker may be lost before its process exists."""
        seat = self._seats.get(worker.rank)
        return seat is not None and seat.incarnation == worker.incarnation and seat.state is not WorkerState.GONE

    @property
    def goal(self) -> Goal:
        return self._cluster.goal

    @property
    def balancer(self) -> Balancer:
        return self._cluster.balancer

    @property
    def members(self) -> Members:
        return self._cluster.tables.members

    @property
    def moves(self) -> dict[Rank, tuple[Fill, ...]]:
        """Slots that are being filled."""
        return {seat.rank: seat.filling for seat in self._seats.values() if seat.filling}

    @property
    def mapping(self) -> tuple[Rank, ...]:
        """Workers that map experts in the memory of others just now."""
        return tuple(seat.rank for seat in self._seats.values() if seat.is_mapping)

    @property
    def has_postponed(self) -> bool:
        """Whether more has happened than the published tables say."""
        return bool(self._postponed)

    @property
    def is_as_planned(self) -> bool:
        """Every expert worker that should be there is ready and holds what it should."""
        if self._cluster.owes_plan:
            return False
        return self.goal.placement is None or holds_all(self.goal.placement, self._seats)

    @property
    def routes(self) -> Routes | None:
        return self._cluster.tables.routes

    @property
    def epoch(self) -> Epoch:
        return self._cluster.epoch

    @property
    def violations(self) -> tuple[str, ...]:
        return self._cluster.tables.violations

    @property
    def degraded(self) -> tuple[str, ...]:
        return self._cluster.tables.degraded

    @property
    def slowness(self) -> dict[Rank, float]:
        """How many times as long as its peers each worker takes, lately."""
        return self._cluster.slowness.ratios

    @property
    def num_stale(self) -> int:
        """Messages of lost or unknown incarnations."""
        return self._cluster.num_stale

    @property
    def was_all_ready(self) -> bool:
        """Whether all seats were ready at some time since the instance started: it is not given up any more."""
        return self._cluster.was_all_ready

    @property
    def ending(self) -> str:
        """Non-empty: why no process is started any more."""
        return self._cluster.ending

    def next_deadline(self) -> float | None:
        if self._owes_routes or self._owes_changes or self._postponed:
            return -math.inf
        deadlines = [self._plan_at(), self.balancer.look_at, slow_workers.next_deadline(self._cluster)]
        deadlines.append(self._cluster.next_deadline())
        if self._gathers:
            deadlines.append(self._published_at + self._cluster.policy.gather_s)
        times = [*self._cluster.kill_at.values(), *self._cluster.isolate_at.values()]
        return min([at for at in deadlines if at is not None] + times, default=None)

    def _plan_at(self) -> float | None:
        """When the rest of a plan is made. That takes a while, and what follows a loss at once should not wait for it:
        least of all fills that streams wait for."""
        cluster = self._cluster
        if not cluster.owes_plan:
            return None
        is_covered = cluster.routes is None or not cluster.routes.num_lost
        return self._lost_at + (cluster.policy.plan_after_s if is_covered else cluster.policy.plan_within_s)

    # -- entry points -----------------------------------------------------------------------------------

    def start(self, now: float) -> Decision:
        """Provision every seat."""
        starts = [provision(seat) for seat in self._seats.values()]
        reason = f"the instance starts with {count(len(starts), 'seat')}"
        return self._decide(Step(reason, tuple(starts)), now)

    def resume(self, now: float, found: Sequence[Found], epoch: Epoch, was_all_ready: bool) -> Decision:
        """Take over from an orchestrator that has died. `epoch` is the highest that any process knows."""
        cluster = self._cluster
        cluster.was_all_ready = was_all_ready
        cluster.since = Since.of(self.goal, now)
        self._kept_goal = self.goal
        effects: list[AnyEffect] = []
        for seat in self._seats.values():
            in_order = sorted((one for one in found if one.rank == seat.rank), key=lambda one: one.incarnation)
            for one in in_order[:-1]:
                effects += membership.fence_again(cluster, one, seat.goal.roles, now)
            effects += membership.take_over(cluster, seat, in_order[-1] if in_order else None, now)
            moving.assume_memory(cluster, seat)
        for one in found:
            if one.rank not in self._seats:
                effects += membership.fence_again(cluster, one, (), now)
        moving.replan(cluster)
        for seat in self._seats.values():
            if not seat.can_serve and not seat.is_retired and seat.goal.device not in self.goal.absent:
                moving.see_to_experts(cluster, seat, now)
        health.resume(cluster, now)
        cluster.tables = cluster.tables_of(epoch)
        cluster.first_epoch = Epoch(epoch + 1)
        alive = [one for one in found if one.pid >= 0]
        num_missing = sum(one.pid > 0 and not one.has_reported for one in alive)
        resumed = Resumed(num_reports=sum(one.has_reported for one in alive), num_missing=num_missing)
        reason = f"a new orchestrator goes on after epoch {epoch}; {count(len(alive), 'process', 'were')} found"
        return self._decide(Step(reason, (*effects, resumed), publish_anyway=True), now)

    def handle(self, given: AnyInput, now: float, is_last: bool = True) -> Decision:
        """One input, at this time. Not the last: more has happened, and what all of it changes is published once."""
        match given:
            case Ask():
                step = operations.handle(self._cluster, given, now)
                is_last = True  # an operator may rely on what is answered: it is kept before
            case Diagnosis():
                step = health.note(self._cluster, given, now)
            case StreamsReported():
                self._cluster.loads = given.loads
                step = Step("the gateway has counted streams")
            case HostJoined():
                step = hosts.join(self._cluster, given)
            case HostLeft():
                step = hosts.leave(self._cluster, given, now)
            case GatewayReport():
                step = self._cluster.overtake(given.epoch, "the gateway")
            case Shutdown():
                self._cluster.end_for("the instance stops")
                step = Step("the instance stops: no process is started any more")
            case SaidRow():
                step = wrong_rows.handle(self._cluster, given, now)
            case Tick():
                step = self._tick(now)
            case _:
                step = membership.handle(self._cluster, given, now)
        return self._decide(step, now) if is_last else self._postpone(step)

    def _postpone(self, step: Step) -> Decision:
        self._postponed.append(step)
        self._owes_routes |= step.publish_soon
        return Decision(_in_order(step.effects), step.reason)

    def _tick(self, now: float) -> Step:
        steps = [*health.due(self._cluster, now)]  # first: nothing starts on a device that is isolated now
        steps += [step for seat in self._cluster.seats_due(now) for step in membership.due(self._cluster, seat, now)]
        steps += moving.balance(self._cluster, now)
        steps += membership.kills_due(self._cluster, now)
        steps += slow_workers.due(self._cluster, now)
        if self._owes_routes:
            steps.append(Step("workers hold other experts"))
        plan_at = self._plan_at()
        if plan_at is not None and plan_at <= now:
            moving.replan(self._cluster)
            steps.append(Step("what was lost gets its further places"))
        reason = "; ".join(step.reason for step in steps)
        effects = tuple(effect for step in steps for effect in step.effects)
        return Step(reason or "nothing is due", effects, publish_anyway=self._owes_routes)

    # -- after every input -----------------------------------------------------------------------

    def _decide(self, step: Step, now: float) -> Decision:
        """Compare the tables, publish if they changed.

        Losses come first, so that they do not wait for slower effects. Probes come last, because the executor may
        answer them before it runs the next effect.
        """
        cluster, postponed, self._postponed = self._cluster, self._postponed, []
        reasons = [one.reason for one in (*postponed, step)]
        self._owes_routes |= step.publish_soon
        publish_anyway = any(one.publish_anyway for one in (*postponed, step))
        if cluster.owes_cover:
            self._lost_at = now
        moving.cover_now(cluster)
        effects = [*step.effects, *health.see_to(cluster), *operations.end_scaling(cluster, now)]
        effects += switching.staff_up(cluster, now)
        has_changed = cluster.has_other_members or publish_anyway
        self._gathers = has_changed and not publish_anyway and self._may_gather(effects, now)
        if has_changed and not self._gathers:
            self._owes_routes, self._published_at = False, now
            published = cluster.publish()
            effects = [effect for effect in effects if not isinstance(effect, Show)]  # these show more
            effects += published.effects
            reasons += [published.reason] if published.reason else []
        if cluster.goal is not self._kept_goal:
            self._kept_goal = cluster.goal
            effects.append(KeepGoal(goal=cluster.since.noted(cluster.goal, now)))
        can_wait = all(one.change_soon for one in (*postponed, step))
        self._owes_changes = can_wait and moving.owes_changes(cluster)
        if not self._owes_changes and not self._gathers:
            effects += moving.change_slots(cluster)
        effects += operations.dismiss(cluster)
        effects += self._say_all_ready()
        return Decision(_in_order(effects), "; ".join(dict.fromkeys(reasons)))

    def _may_gather(self, effects: Iterable[AnyEffect], now: float) -> bool:
        """Whether the tables can wait for what more workers will say. Each of hundreds that start says that it exists
        and that it is ready; tables for each of these would take longer than the start. No stream waits for them."""
        cluster = self._cluster
        if cluster.was_all_ready or cluster.ending or len(self._seats) <= cluster.policy.num_at_once:
            return False
        if now >= self._published_at + cluster.policy.gather_s or any(isinstance(effect, Lost) for effect in effects):
            return False
        return not self._are_all_ready()

    def _are_all_ready(self) -> bool:
        """The seat that was not ready the last time is asked first: nearly always it still is not."""
        absent, first = self.goal.absent, self._seats.get(self._not_ready)
        asked = self._seats.values() if first is None else (first, *self._seats.values())
        for seat in asked:
            if not seat.is_ready and seat.goal.wanted is Wanted.STAY and seat.goal.device not in absent:
                self._not_ready = seat.rank
                return False
        return True

    def _say_all_ready(self) -> list[AllReady]:
        if self._has_said_all_ready or self.ending or not self._are_all_ready():
            return []
        self._cluster.was_all_ready = self._has_said_all_ready = True
        return [AllReady()]


def _in_order(effects: Iterable[AnyEffect]) -> tuple[AnyEffect, ...]:
    return tuple(sorted(effects, key=_turn))


def _turn(effect: AnyEffect) -> int:
    return _ORDER.get(type(effect.message if isinstance(effect, Tell) else effect), 2)
