"""The state that the machine's decisions read and change: seats, goal, published tables.

The machine (machine.py) owns one ClusterState. What becomes of one incarnation (membership.py), of the places of
experts (moving.py), of the role of a worker (switching.py) and of what operators ask for (operations.py) are functions
that change it and return a Step.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec

from everserve.control.decide.balance import Balancer
from everserve.control.decide.effects import AnyEffect, Provision, Publish
from everserve.control.decide.places import Have, LastNamed, dealers, mappings, slots_given_up, what_is_held, without
from everserve.control.decide.policy import Policy
from everserve.control.decide.row_checks import RowChecks
from everserve.control.decide.seats import Seat
from everserve.control.decide.slowness import Slowness
from everserve.plan.balance import BalancePolicy
from everserve.plan.evacuation import degraded_by, health_of, quiet_devices
from everserve.plan.lost_experts import LostExpertPolicy, choose_mask
from everserve.plan.moves import GivenUp, Move
from everserve.plan.routing import make_routes
from everserve.tables.goal import Capacity, Goal, Mask, SeatGoal
from everserve.tables.ids import Epoch, Incarnation, Rank, Role, WorkerId
from everserve.tables.members import Host, Members, Worker, WorkerState
from everserve.tables.outputs import AttentionLoad
from everserve.tables.placement import SeatExperts
from everserve.tables.remembered import remembered
from everserve.tables.routes import Routes
from everserve.tables.validity import Behind, Checked, check, conditions, degraded
from everserve.wire.events import ExpertsMasked, MaskLifted
from everserve.wire.operators import View

_NO_INCARNATION = Incarnation(0)


@dataclass(frozen=True, slots=True)
class Step:
    """The result of one input, before the tables are compared."""

    reason: str
    effects: tuple[AnyEffect, ...] = ()
    publish_anyway: bool = False  # a new epoch though the members are the same
    publish_soon: bool = False  # the same, with the next tick: other workers may report at the same time
    view: View | None = None  # for the operator who has asked for it; None: it is refused, and the reason says why
    change_soon: bool = False  # the next slots are chosen with the next tick, for the same reason


@dataclass(slots=True)
class Since:
    """When what the goal says is under way began, on this process's clock: the goal itself, which outlives the process
    and perhaps its host, says how long it has taken."""

    scaling_s: float = 0.0
    switch_s: dict[Rank, float] = field(default_factory=dict)

    @classmethod
    def of(cls, goal: Goal, now: float) -> "Since":
        """For an orchestrator that begins with this goal now."""
        switching = {seat.rank: now - seat.switch_s for seat in goal.seats if seat.switch_s is not None}
        return cls(now - (goal.scaling_s or 0.0), switching)

    def noted(self, goal: Goal, now: float) -> Goal:
        """The goal as it is kept: with the times that have passed."""
        if goal.scaling_s is None and all(seat.switch_s is None for seat in goal.seats):
            return goal
        seats = tuple(
            msgspec.structs.replace(seat, switch_s=now - self.switch_s.get(seat.rank, now))
            if seat.switch_s is not None
            else seat
            for seat in goal.seats
        )
        scaling_s = None if goal.scaling_s is None else now - self.scaling_s
        return msgspec.structs.replace(goal, seats=seats, scaling_s=scaling_s)


class ClusterState:
    """All seats, what they should be, and what was published about them."""

    def __init__(
        self,
        goal: Goal,
        policy: Policy,
        capacity: Capacity | None = None,
        balance: BalancePolicy | None = None,
        lost_policy: LostExpertPolicy | None = None,
    ) -> None:
        self.policy = policy
        self.goal = goal
        if capacity is None:
            num_planned = goal.placement.num_slots if goal.placement is not None else 0
            capacity = Capacity(max_workers=1 + max(seat.rank for seat in goal.seats), slots_per_layer=num_planned)
        self.capacity = capacity
        self.since = Since()
        moe_layers = goal.placement.moe_layers if goal.placement is not None else ()
        num_experts = goal.placement.num_experts if goal.placement is not None else 0
        self.balancer = Balancer(len(moe_layers), num_experts, balance)
        self.slowness = Slowness(policy.slow)
        self.row_checks = RowChecks()
        self.lost_policy = lost_policy or LostExpertPolicy()
        self.hosts: dict[int, Host] = {}  # by number; empty: there is only one
        self.loads: Mapping[Rank, AttentionLoad] = {}  # by the gateway's last report
        self.given_up: GivenUp = {}  # slots that routes do not lead to any more
        self.last_named = LastNamed()
        self._routed_for: tuple[object, ...] = ()  # what the last routes were made for, and they themselves
        self._routed_last = _NOTHING_ROUTED
        self.refused: set[tuple[Rank, int, int]] = set()  # what a worker could not map: rank, index of the call, expert
        self.first_epoch = Epoch(0)  # earlier ones were published by another orchestrator
        self.is_moving = True  # there may be slots to fill
        self.owes_cover = False  # there may be experts without a place in the goal
        self.owes_plan = False  # the goal covers what was lost, and may be no more than that
        self.planned_for: object = None  # for whom the last whole plan was made
        self.num_stale = 0  # messages of lost or unknown incarnations
        self.was_all_ready = False  # at some time since the instance started: it is not given up any more
        self.ending = ""  # non-empty: why no process is started any more
        assert goal.seats, "an instance has seats"
        self._touched: set[Rank] = set()  # seats that may show something else, or have another deadline
        self.seats: dict[Rank, Seat] = {}
        for seat in goal.seats:
            self.add_seat(seat)
        self.kill_at: dict[WorkerId, float] = {}  # lost, and its exit has not been seen
        self.isolate_at: dict[int, float] = {}  # devices that are being evacuated, and for how long they may be
        self._rows: dict[Rank, Worker] = {}  # what each seat shows now
        self._used: dict[Rank, Epoch] = {}  # of the routes that each serving attention worker uses
        self._deadlines: dict[Rank, float] = {}
        self._published: dict[Rank, Worker] = {}  # what it showed when tables were published last
        self._changed: set[Rank] = set()  # seats that show something else than then
        self._slots: dict[Rank, tuple[int, int]] = {}
        self._count_slots()
        self.tables = self.tables_of(Epoch(0))  # published last

    def add_seat(self, goal: SeatGoal, incarnation: Incarnation = _NO_INCARNATION) -> None:
        """An empty one; it takes the place of one with this rank."""
        self.seats[goal.rank] = seat = Seat(goal, incarnation=incarnation, touched=self._touched)
        seat.touch()

    # -- what seats show, and when one is due ----------------------------------------------------

    @property
    def tables(self) -> Publish:
        """Published last."""
        return self._tables

    @tables.setter
    def tables(self, tables: Publish) -> None:
        self._tables = tables
        self._behind = Behind(tables.members, self.acknowledged())
        self._published = {worker.rank: worker for worker in tables.members.workers}
        self._changed = {rank for rank, row in self._rows.items() if self._published.get(rank) is not row}
        self._changed |= self._published.keys() - self._rows.keys()

    def note_use(self, seat: Seat) -> Publish | None:
        """The attention worker has said which routes it uses. Returns the tables if that changes what they say."""
        if self.routes is None or not self._behind.note(seat.rank, seat.process.acknowledged):
            return None
        conditions = msgspec.structs.replace(self._tables.conditions, epochs=self._behind.sentences())
        self._tables = replace(self._tables, conditions=conditions)
        return self._tables

    @property
    def has_other_members(self) -> bool:
        """Whether seats show something else than what was published."""
        self._look()
        return bool(self._changed) or self.goal.version != self.tables.members.goal

    def next_deadline(self) -> float | None:
        """The first of a seat."""
        self._look()
        return min(self._deadlines.values(), default=None)

    def seats_due(self, now: float) -> list[Seat]:
        """Seats whose deadlines have passed, in their order."""
        self._look()
        due = {rank for rank, at in self._deadlines.items() if at <= now}
        return [seat for rank, seat in self.seats.items() if rank in due] if due else []

    def _look(self) -> None:
        """Look again at the seats that were touched."""
        for rank in self._touched:
            seat = self.seats[rank]
            deadline = seat.next_deadline()
            if deadline is None:
                self._deadlines.pop(rank, None)
            else:
                self._deadlines[rank] = deadline
            if Role.ATTENTION in seat.goal.roles and seat.can_serve:
                self._used[rank] = seat.process.acknowledged
            else:
                self._used.pop(rank, None)
            row = None if seat.is_retired else seat.worker(*self._slots[rank])
            published = self._published.get(rank)
            if row is None:
                self._rows.pop(rank, None)
            else:
                self._rows[rank] = row = published if published == row else row
            (self._changed.discard if row is published else self._changed.add)(rank)
        self._touched.clear()

    # -- the goal --------------------------------------------------------------------------------

    def set_goal(self, **changes: object) -> None:
        """The next version of the goal, with these changes."""
        self.goal = msgspec.structs.replace(self.goal, version=self.goal.version + 1, **changes)
        for seat in self.goal.seats:
            if self.seats[seat.rank].goal is not seat:
                self.seats[seat.rank].goal = seat
        self._count_slots()

    def _count_slots(self) -> None:
        """Slots and shadow slots of each seat, as the members table shows them."""
        placement = self.goal.placement
        slots = {rank: (seat.goal.own_experts, 0) for rank, seat in self.seats.items()}
        for planned in placement.seats if placement is not None else ():
            slots[planned.rank] = (self.capacity.slots_per_layer, _num_shadows(planned))
        for rank, numbers in slots.items():
            if numbers != self._slots.get(rank):
                self.seats[rank].touch()
        self._slots = slots

    # -- the tables ------------------------------------------------------------------------------

    @property
    def epoch(self) -> Epoch:
        return self.tables.members.epoch

    @property
    def routes(self) -> Routes | None:
        return self.tables.routes

    def members_of(self, epoch: Epoch) -> Members:
        self._look()
        workers = tuple(self._rows[rank] for rank in self.seats if rank in self._rows)
        return Members(epoch=epoch, goal=self.goal.version, workers=workers)

    def tables_of(self, epoch: Epoch) -> Publish:
        """What there is to publish now."""
        members, placement = self.members_of(epoch), self.goal.placement
        health = health_of(self.goal, self.capacity)
        routed = self._routed(epoch, members) if placement is not None else _NOTHING_ROUTED
        return Publish(
            members=members,
            routes=routed.routes,
            conditions=conditions(members, placement, routed.have, routed.routes, self.acknowledged(), routed.checked),
            degraded=(*degraded(members, placement, routed.routes, routed.checked), *degraded_by(self.goal, health)),
            gone=tuple(sorted(self.goal.lost_devices)),
            health=health,
            hosts=tuple(self.hosts[number] for number in sorted(self.hosts)),
        )

    def _routed(self, epoch: Epoch, members: Members) -> "_Routed":
        """Routes, and what is to be said about them. Most tables are published because of something that routes do not
        depend on: a process exists, an attention worker is ready."""
        placement, goal, facts = self.goal.placement, self.goal, self._facts()
        assert placement is not None
        if facts == self._routed_for and self._routed_last.routes is not None:
            routes = msgspec.structs.replace(self._routed_last.routes, epoch=epoch)
            self._routed_last = self._routed_last._replace(routes=routes)
            return self._routed_last
        self.given_up = slots_given_up(placement, self.seats.values())
        # What a slot holds that is about to be filled does not count.
        have = without(what_is_held(self.seats.values()), self.given_up)
        serving = [seat for seat in self.seats.values() if seat.can_serve]
        ready = {seat.rank for seat in serving if seat.is_ready}
        leaving = {seat.rank for seat in serving} - ready
        demoted = {seat.rank for seat in serving if seat.is_slow}
        routes = make_routes(epoch, placement, have, ready, leaving, demoted, dealers(goal))
        routes = routes.with_mask(goal.mask.experts, goal.mask.id)
        self._routed_for = facts
        self._routed_last = _Routed(have, routes, check(members, placement, have, routes))
        return self._routed_last

    def _facts(self) -> tuple[object, ...]:
        """All that routes depend on."""
        goal = self.goal
        experts = (seat for seat in self.seats.values() if Role.EXPERT in seat.goal.roles)
        parts = [seat.serving_facts for seat in experts if Role.ATTENTION not in seat.goal.roles]
        return goal.placement, goal.mask, goal.seats, goal.absent, parts

    def publish(self) -> Step:
        """Tables of the next epoch, and the mask for them."""
        epoch = Epoch(self.epoch + 1)
        self.tables = self.tables_of(epoch)
        masking = self._mask()
        if masking.effects:
            self.tables = self.tables_of(epoch)
        self.is_moving = self.routes is not None
        if self.routes is not None:
            self.last_named.note(self.routes)
        return Step(masking.reason, (self.tables, *masking.effects))

    def _mask(self) -> Step:
        """Whether experts without a place are masked, or no longer."""
        mask, policy = self.goal.mask, self.lost_policy
        if self.routes is None or self.ending or not self.was_all_ready or not (policy.max_masked or mask.experts):
            return Step("")
        soon = {(move.fill.call_index, move.fill.expert) for move in self.mappings()}
        choice = choose_mask([one for one in self.routes.lost_experts() if one not in soon], mask.experts, policy)
        if choice.experts == mask.experts:
            return Step(choice.reason)
        mask = Mask(last_id=mask.last_id + bool(choice.experts), experts=choice.experts)
        self.set_goal(mask=mask)
        return Step(choice.reason, (self._told_mask(choice.reason),))

    def _told_mask(self, reason: str) -> ExpertsMasked | MaskLifted:
        placement, mask = self.goal.placement, self.goal.mask
        if not mask.experts or placement is None:
            return MaskLifted(reason=reason)
        experts = [(placement.moe_layers[layer], expert) for layer, expert in mask.experts]
        return ExpertsMasked(mask_id=mask.id, experts=experts, reason=reason)

    def mappings(self) -> list[Move]:
        """What workers should map of the memory of others, and were not told yet."""
        if not self.was_all_ready or not self.capacity.mapped_slots:
            return []
        return mappings(self.goal, self.seats, self.balancer.loads.by_layer, self.refused)

    def acknowledged(self) -> dict[Rank, Epoch]:
        """The epoch of the routes that each attention worker uses, by its report."""
        homes = [seat for seat in self.seats.values() if seat.state is not WorkerState.GONE]
        return {seat.rank: seat.process.acknowledged for seat in homes if seat.process.acknowledged}

    def oldest_used(self) -> Epoch:
        """The oldest routes that an attention worker may follow."""
        self._look()
        return min(self._used.values(), default=self.epoch)

    def overtake(self, epoch: Epoch, who: str) -> Step:
        """Publish a later epoch than the one of this process, because processes drop tables that are not newer."""
        if epoch < self.epoch:
            return Step(f"epoch {epoch}, which {who} has, is past")
        self.tables = self.tables_of(epoch)
        self.first_epoch = Epoch(epoch + 1)
        return Step(f"{who} has tables of epoch {epoch} from the orchestrator before", publish_anyway=True)

    def quiet(self) -> set[int]:
        """Devices with little to do, as the gateway counted last."""
        return quiet_devices(self.goal, {rank: load.num_streams for rank, load in self.loads.items()})

    # -- processes -------------------------------------------------------------------------------

    def has_process(self, rank: Rank) -> bool:
        return rank in self.seats and self.seats[rank].state is not WorkerState.GONE

    def end_for(self, why: str) -> None:
        """No process is started any more."""
        self.ending = self.ending or why
        for seat in self.seats.values():
            if seat.state is WorkerState.GONE:
                seat.leave_empty(self.ending)


class _Routed(NamedTuple):
    """Routes with what they were made of, and what is wrong with them."""

    have: Have
    routes: Routes | None
    checked: Checked | None


_NOTHING_ROUTED = _Routed({}, None, None)


@remembered
def _num_shadows(planned: SeatExperts) -> int:
    return max(map(len, planned.shadows), default=0)


def provision(seat: Seat) -> Provision:
    """The next incarnation of this seat."""
    seat.begin()
    return Provision(seat.rank, seat.incarnation)


def who(seat: Seat) -> str:
    """A worker's name in reasons."""
    return f"rank {seat.rank} incarnation {seat.incarnation}"
