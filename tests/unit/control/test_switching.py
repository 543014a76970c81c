"""Another role for a worker, event by event: what is refused, how it leaves, and what its seat becomes."""

import math

import msgspec
import pytest

from everserve.control.decide.effects import (
    ChangeRole,
    Leave,
    Lost,
    Provision,
)
from everserve.control.decide.inputs import (
    Died,
    Exited,
    Said,
    Started,
    Tick,
)
from everserve.control.decide.machine import Found, Machine, Policy
from everserve.plan.lost_experts import LostExpertPolicy
from everserve.plan.placement import place_experts
from everserve.tables.goal import Capacity, Goal, SeatGoal, Wanted
from everserve.tables.ids import Epoch, Rank, Role
from everserve.tables.members import WorkerState
from everserve.tables.outputs import AttentionLoad
from everserve.tables.slots import EMPTY, HeldSlots
from everserve.wire.events import ExpertsMasked, MaskLifted, SwitchBegan, SwitchDone
from everserve.wire.messages import Hello, KeepGoal, Leaving, Ready, SlotsReported, StreamsReported
from everserve.wire.operators import FaultRequest, ReturnRequest, ScaleRequest, SwitchRequest
from tests.support.decisions import answered, ask, is_told, kind_of

POLICY = Policy(detect_s=0.1, heal_after_s=math.inf, max_fills=1000)
NUM_EXPERTS, LAYERS = 12, (0, 1)
MAY_SWITCH = LostExpertPolicy(may_switch=True)


class Driver:
    """Attention workers, then expert workers, each on a device of its own."""

    def __init__(
        self, num_attention: int, num_expert: int, shadows: int | None = None, policy: LostExpertPolicy | None = None
    ) -> None:
        ranks = [Rank(num_attention + i) for i in range(num_expert)]
        placement = place_experts(NUM_EXPERTS, LAYERS, ranks, shadows)
        seats = [SeatGoal(rank=Rank(i), roles=(Role.ATTENTION,), device=i) for i in range(num_attention)]
        seats += [SeatGoal(rank=rank, roles=(Role.EXPERT,), device=rank) for rank in ranks]
        self.goal = Goal(version=1, seats=tuple(seats), placement=placement)
        self.capacity = Capacity(max_workers=8, slots_per_layer=placement.num_slots)
        self.policy = policy
        self.machine = Machine(self.goal, POLICY, self.capacity, None, policy)
        self.now = 100.0
        self.asked: list[tuple[int, int]] = []  # to leave
        self.decision = self.machine.start(self.now)
        for seat in seats:
            self.bring_up(seat.rank)
        assert self.machine.was_all_ready and not self.machine.violations

    def tell(self, event):
        self.decision = self.machine.handle(event, self.now)
        asked = [effect for effect in self.decision.effects if is_told(effect, Leave)]
        self.asked += [(effect.rank, effect.incarnation) for effect in asked]
        self.goal = next((effect.goal for effect in self.decision.effects if isinstance(effect, KeepGoal)), self.goal)
        return self.decision

    def only(self, kind):
        (found,) = [effect for effect in self.decision.effects if kind_of(effect) is kind]
        return found

    def has(self, kind) -> bool:
        return any(kind_of(effect) is kind for effect in self.decision.effects)

    def seat(self, rank: int) -> SeatGoal:
        return self.machine.goal.seat(Rank(rank))

    def worker(self, rank: int):
        return next(worker for worker in self.machine.members.workers if worker.rank == rank)

    def hold(self, rank: int, incarnation: int) -> None:
        """All that is planned for it, and all that it was told is done."""
        planned = self.machine.goal.placement.seat(Rank(rank))
        num_slots = self.capacity.slots_per_layer
        slots = planned.slots(num_slots).experts if planned is not None else ((EMPTY,) * num_slots,) * len(LAYERS)
        held = HeldSlots(experts=slots, generations=((1,) * num_slots,) * len(LAYERS))
        self.tell(
            Said(
                rank,
                incarnation,
                SlotsReported(slots=held, num_done=self.machine._seats[Rank(rank)].process.changes.num_told),
            )
        )

    def bring_up(self, rank: int, incarnation: int = 1) -> None:
        self.tell(Started(rank, incarnation, 1000 + rank))
        self.tell(Said(rank, incarnation, Hello()))
        if self.seat(rank).roles == (Role.EXPERT,):
            self.hold(rank, incarnation)
        self.tell(Said(rank, incarnation, Ready()))

    def switch(self, rank: int, role: Role) -> str:
        return self.tell(ask(SwitchRequest(rank=Rank(rank), role=role))).reason

    def count(self, **loads: tuple[int, int, int]) -> None:
        counted = {
            Rank(int(name[1:])): AttentionLoad(num_streams=n, num_used_blocks=used, num_free_blocks=free)
            for name, (n, used, free) in loads.items()
        }
        self.tell(StreamsReported(loads=counted))

    def lose_orchestrator(self, found: list[Found]) -> None:
        self.machine = Machine(self.goal, POLICY, self.capacity, None, self.policy)
        self.decision = self.machine.resume(self.now, found, Epoch(50), was_all_ready=True)
        self.goal = next((effect.goal for effect in self.decision.effects if isinstance(effect, KeepGoal)), self.goal)

    def found(self, rank: int, incarnation: int = 1, **more) -> Found:
        """As it was started: it holds what the first placement gave it."""
        roles = (Role.ATTENTION,) if rank < 2 else (Role.EXPERT,)
        slots = self.machine._seats[rank].held if roles == (Role.EXPERT,) else None
        fields = {"pid": 1000, "has_reported": True, "is_ready": True, "slots": slots, "roles": roles} | more
        return Found(rank=Rank(rank), incarnation=incarnation, **fields)


# -- by hand -------------------------------------------------------------------------------------


def test_an_attention_worker_leaves_and_its_seat_gets_experts():
    driver = Driver(2, 2)
    assert driver.switch(1, Role.EXPERT) == "rank 1 becomes an expert worker: an operator asks for it"
    assert driver.only(SwitchBegan).role is Role.EXPERT
    assert driver.only(Leave).rank == 1, "its streams go elsewhere"
    assert driver.worker(1).roles == (Role.ATTENTION,) and "becomes an expert worker" in driver.worker(1).note
    driver.tell(Said(1, 1, Leaving()))
    driver.tell(Exited(1, 1, 0))
    assert (driver.only(Lost).roles, driver.only(Lost).cause) == ((Role.ATTENTION,), "left")
    kinds = [type(effect) for effect in driver.decision.effects]
    assert kinds.index(KeepGoal) < kinds.index(Lost) < kinds.index(ChangeRole) < kinds.index(Provision)
    assert driver.only(Provision) == Provision(1, 2)
    assert driver.seat(1).roles == (Role.EXPERT,) and driver.seat(1).wanted is Wanted.STAY
    planned = driver.machine.goal.placement.seat(Rank(1))
    assert planned is not None and len(planned.experts(0)) == driver.capacity.slots_per_layer
    driver.now += 3.0
    driver.bring_up(1, 2)
    assert driver.only(SwitchDone) == SwitchDone(rank=1, role=Role.EXPERT, took_s=driver.now - 100.0)
    assert driver.seat(1).switch_s is None and not driver.machine.violations
    assert 1 in driver.machine.routes.array()[..., 0]


def test_an_expert_worker_leaves_when_others_hold_its_experts():
    driver = Driver(1, 3, shadows=2)  # six slots each for twelve experts
    driver.switch(3, Role.ATTENTION)
    assert driver.has(SwitchBegan) and not driver.has(Leave)
    assert driver.machine.goal.placement.seat(Rank(3)) is None, "nothing is planned for it any more"
    for rank in (1, 2):
        assert driver.asked == []
        driver.hold(rank, 1)
        driver.tell(Tick())
    assert driver.asked == [(3, 1)]
    driver.tell(Said(3, 1, Leaving()))
    driver.tell(Exited(3, 1, 0))
    assert driver.seat(3).roles == (Role.ATTENTION,) and driver.only(Provision) == Provision(3, 2)
    driver.bring_up(3, 2)
    assert driver.only(SwitchDone).role is Role.ATTENTION
    assert driver.worker(3).slots == driver.worker(3).shadow_slots == 0
    assert not driver.machine.violations


@pytest.mark.parametrize(
    ("shape", "rank", "role", "reason"),
    [
        ((2, 2), 9, Role.EXPERT, "there is no rank 9"),
        ((2, 2), 1, Role.ATTENTION, "rank 1 is an attention worker already"),
        ((1, 2), 0, Role.EXPERT, "rank 0 is the last attention worker that is ready"),
        ((1, 2, 0), 1, Role.ATTENTION, "1 expert worker with 6 slots per layer cannot hold the model's 12 experts"),
        ((2, 12), 1, Role.EXPERT, "the model has 12 experts per layer"),
    ],
)
def test_what_cannot_be_is_refused(shape, rank, role, reason):
    driver = Driver(*shape)
    before = driver.machine.goal
    assert driver.switch(rank, role).startswith(reason)
    assert answered(driver.decision).refused == driver.decision.reason and driver.machine.goal is before


def test_refused_while_the_others_have_no_room_for_its_streams():
    driver = Driver(2, 2)
    driver.count(r0=(3, 30, 20), r1=(4, 21, 29))
    assert "have 21 KV blocks, and the other attention workers only 20" in driver.switch(1, Role.EXPERT)
    driver.count(r0=(3, 30, 21), r1=(4, 21, 29))
    driver.switch(1, Role.EXPERT)
    assert driver.has(SwitchBegan)


def test_refused_for_workers_with_both_roles_and_for_those_that_are_not_there():
    seats = tuple(SeatGoal(rank=Rank(i), roles=(Role.ATTENTION, Role.EXPERT), own_experts=4) for i in range(2))
    machine = Machine(Goal(version=1, seats=seats, placement=None), POLICY)
    machine.resume(0.0, [], Epoch(1), was_all_ready=True)
    asked = ask(SwitchRequest(rank=Rank(1), role=Role.EXPERT))
    assert machine.handle(asked, 0.0).reason == "every worker of this instance has both roles"
    driver = Driver(2, 2)
    driver.tell(Died(1, 1))
    assert "is starting: try again when it is ready" in driver.switch(1, Role.EXPERT)
    driver = Driver(2, 2)
    driver.switch(1, Role.EXPERT)
    assert driver.switch(1, Role.EXPERT) == "rank 1 becomes an expert worker already"
    assert "rank 1 is changing its role" in driver.tell(ask(ScaleRequest(attention=1))).reason


def test_a_switch_is_taken_back():
    driver = Driver(2, 2)
    driver.switch(1, Role.EXPERT)
    driver.switch(1, Role.ATTENTION)
    assert driver.seat(1).wanted is Wanted.STAY and driver.seat(1).switch_s is None
    driver.tell(Said(1, 1, Leaving()))  # it was asked before
    driver.tell(Exited(1, 1, 0))
    assert driver.seat(1).roles == (Role.ATTENTION,) and driver.only(Provision) == Provision(1, 2)


# -- deaths in the middle ------------------------------------------------------------------------


def test_a_worker_that_dies_before_it_has_left_has_the_other_role_next():
    driver = Driver(2, 2)
    driver.switch(1, Role.EXPERT)
    driver.tell(Died(1, 1))
    assert driver.only(Lost).cause == "crash" and driver.only(Lost).roles == (Role.ATTENTION,)
    assert driver.seat(1).roles == (Role.EXPERT,) and driver.only(Provision) == Provision(1, 2)
    driver.tell(Died(1, 2))  # while it loads
    driver.now += 1.0
    driver.tell(Tick())
    assert driver.seat(1).roles == (Role.EXPERT,) and driver.only(Provision) == Provision(1, 3)
    driver.bring_up(1, 3)
    assert driver.only(SwitchDone).took_s == driver.now - 100.0


def test_the_next_orchestrator_asks_it_to_leave_again():
    driver = Driver(2, 2)
    driver.switch(1, Role.EXPERT)
    driver.lose_orchestrator([driver.found(rank) for rank in range(4)])
    assert driver.only(Leave).rank == 1
    driver.lose_orchestrator([driver.found(0), driver.found(1, pid=-1), driver.found(2), driver.found(3)])
    assert driver.only(Lost).roles == (Role.ATTENTION,)
    assert driver.has(ChangeRole) and driver.only(Provision) == Provision(1, 2)
    assert driver.seat(1).roles == (Role.EXPERT,)


def test_a_process_of_the_earlier_role_is_not_taken_over():
    """The last orchestrator had the goal stored, and died before the loss was told."""
    driver = Driver(2, 2)
    driver.switch(1, Role.EXPERT)
    driver.tell(Died(1, 1))
    driver.lose_orchestrator([driver.found(rank) for rank in range(4)])
    assert (driver.only(Lost).rank, driver.only(Lost).roles) == (1, (Role.ATTENTION,))
    assert driver.only(Provision) == Provision(1, 2)
    assert driver.worker(1).state is WorkerState.STARTING and driver.worker(1).roles == (Role.EXPERT,)


def test_a_switch_that_ended_while_there_was_no_orchestrator():
    driver = Driver(2, 2)
    driver.switch(1, Role.EXPERT)
    driver.tell(Died(1, 1))
    held = driver.machine._seats[3].held
    ready = driver.found(1, 2, roles=(Role.EXPERT,), slots=held)
    driver.lose_orchestrator([driver.found(0), ready, driver.found(2), driver.found(3)])
    assert driver.only(SwitchDone) == SwitchDone(rank=1, role=Role.EXPERT, took_s=driver.now - 100.0)
    assert driver.goal.seat(Rank(1)).switch_s is None


# -- by itself -----------------------------------------------------------------------------------


def test_an_attention_worker_stands_in_for_a_device_that_is_gone_until_it_returns():
    driver = Driver(2, 2, shadows=0, policy=MAY_SWITCH)
    driver.count(r0=(1, 5, 50), r1=(4, 20, 35))
    driver.tell(ask(FaultRequest(device=3, gone=True)))
    assert driver.only(SwitchBegan).rank == 0 and driver.only(Leave).rank == 0
    assert "1 expert worker has 6 slots for 12 experts" in driver.only(SwitchBegan).reason
    assert driver.seat(0).stands_in
    driver.tell(Exited(0, 1, 0))
    driver.bring_up(0, 2)
    assert not driver.machine.violations and driver.has(SwitchDone)
    driver.tell(ask(ReturnRequest(device=3)))
    assert driver.only(SwitchBegan).role is Role.ATTENTION
    assert driver.asked == [(0, 1)], "its experts have no other place yet"
    driver.bring_up(3, 2)
    for rank, incarnation in ((3, 2), (2, 1), (3, 2)):  # what is planned for them now
        driver.hold(rank, incarnation)
        driver.tell(Tick())
    assert driver.asked == [(0, 1), (0, 2)]
    driver.tell(Said(0, 2, Leaving()))
    driver.tell(Exited(0, 2, 0))
    assert driver.seat(0).roles == (Role.ATTENTION,) and not driver.seat(0).stands_in
    driver.bring_up(0, 3)
    assert not driver.machine.violations and not driver.machine.degraded


def test_a_device_that_returns_at_once_stops_the_switch():
    driver = Driver(2, 2, shadows=0, policy=MAY_SWITCH)
    driver.tell(ask(FaultRequest(device=3, gone=True)))
    assert driver.seat(0).wanted is Wanted.SWITCH
    driver.tell(ask(ReturnRequest(device=3)))
    assert driver.seat(0).wanted is Wanted.STAY and not driver.seat(0).stands_in


def test_a_device_that_is_lost_again_keeps_its_stand_in():
    driver = Driver(2, 2, shadows=0, policy=MAY_SWITCH)
    driver.tell(ask(FaultRequest(device=3, gone=True)))
    driver.tell(Exited(0, 1, 0))
    driver.bring_up(0, 2)
    driver.tell(ask(ReturnRequest(device=3)))
    assert driver.seat(0).wanted is Wanted.SWITCH
    driver.tell(ask(FaultRequest(device=3, gone=True)))
    assert driver.seat(0).wanted is Wanted.STAY and driver.seat(0).stands_in
    assert driver.seat(1).wanted is Wanted.STAY and not driver.machine.violations


@pytest.mark.parametrize("policy", [None, MAY_SWITCH])
def test_no_role_changes_where_survivors_have_room(policy):
    driver = Driver(2, 2, policy=policy)  # every worker has room for all experts
    driver.tell(ask(FaultRequest(device=3, gone=True)))
    assert not driver.has(SwitchBegan) and not driver.machine.violations


def test_only_with_the_policy_and_not_the_last_attention_worker():
    for driver in (Driver(2, 2, shadows=0), Driver(1, 2, shadows=0, policy=MAY_SWITCH)):
        last = 3 if driver.machine.goal.seat(Rank(3)) is not None else 2
        driver.tell(ask(FaultRequest(device=last, gone=True)))
        assert not driver.has(SwitchBegan) and driver.machine.violations


# -- masks ---------------------------------------------------------------------------------------


def masked(driver: Driver) -> tuple[int, int]:
    routes = driver.machine.routes
    return routes.mask_id, len(routes.masked_experts())


def test_lost_experts_are_masked_at_once_and_the_mask_is_lifted():
    driver = Driver(1, 3, shadows=0, policy=LostExpertPolicy(max_masked=4))
    driver.tell(Died(3, 1))
    assert masked(driver) == (1, 8) and driver.only(ExpertsMasked).mask_id == driver.machine.goal.mask.id
    kinds = [type(effect).__name__ for effect in driver.decision.effects]
    assert kinds.index("KeepGoal") < kinds.index("Publish") < kinds.index("ExpertsMasked")
    assert driver.decision.reason.endswith("8 experts without a place are masked")
    assert not driver.machine.violations and any("masked" in said for said in driver.machine.degraded)
    driver.bring_up(3, 2)
    assert masked(driver) == (0, 0) and driver.only(MaskLifted).reason == "every masked expert has a place again"
    driver.tell(Died(2, 1))
    assert masked(driver) == (2, 8), "another set has another number"


def test_more_than_the_limit_are_waited_for():
    driver = Driver(1, 3, shadows=0, policy=LostExpertPolicy(max_masked=3))
    driver.tell(Died(3, 1))
    assert masked(driver) == (0, 0) and driver.machine.violations and not driver.has(MaskLifted)
    assert "4 experts of one layer have no place, more than the 3 that may be masked" in driver.decision.reason


def test_the_next_orchestrator_goes_on_with_the_mask():
    driver = Driver(2, 3, shadows=0, policy=LostExpertPolicy(max_masked=4))
    driver.tell(Died(4, 1))
    assert masked(driver) == (1, 8)
    found = [driver.found(rank) for rank in range(4)] + [driver.found(4, 2, is_ready=False, slots=None)]
    driver.lose_orchestrator(found)
    assert masked(driver) == (1, 8), "the same set has the same number"
    driver.hold(4, 2)
    driver.tell(Said(4, 2, Ready()))
    assert masked(driver) == (0, 0)
    driver.lose_orchestrator([driver.found(rank) for rank in range(4)])
    assert masked(driver) == (2, 8)


def test_nothing_is_masked_while_the_instance_starts():
    driver = Driver(1, 3, shadows=0, policy=LostExpertPolicy(max_masked=4))
    machine = Machine(msgspec.structs.replace(driver.goal, version=1), POLICY, driver.capacity, None, driver.policy)
    machine.start(0.0)
    assert machine.routes.mask_id == 0 and machine.violations


def test_mask_now_and_switch_meanwhile():
    policy = LostExpertPolicy(max_masked=6, may_switch=True)
    driver = Driver(2, 2, shadows=0, policy=policy)
    driver.tell(ask(FaultRequest(device=3, gone=True)))
    assert driver.only(SwitchBegan).rank == 0 and masked(driver) == (1, 12)
    driver.tell(Exited(0, 1, 0))
    driver.bring_up(0, 2)
    assert masked(driver) == (0, 0) and not driver.machine.violations
