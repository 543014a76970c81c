"""Masks and other roles in any order of events: workers die, devices are gone and return, operators switch roles, fills
fail and the orchestrator is replaced. A mask covers exactly what has no place, within its limit and under a number that
no other set has; no worker leaves that is needed; and when all devices are back, every worker has the role that it
should have and nothing is masked."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everserve.control.decide.effects import Decision, Publish
from everserve.control.decide.machine import Machine
from everserve.control.decide.scaling import size_of
from everserve.plan.lost_experts import LostExpertPolicy
from everserve.tables.goal import Capacity, Wanted
from everserve.tables.ids import Rank, Role
from everserve.tables.members import WorkerState
from everserve.tables.outputs import AttentionLoad
from everserve.wire.events import SwitchBegan, SwitchDone
from everserve.wire.messages import StreamsReported
from everserve.wire.operators import ReturnRequest, SwitchRequest
from tests.property.test_moves import ACTIONS, NUM_EXPERTS, POLICY
from tests.property.test_scaling import MAX_WORKERS, ScalingWorld
from tests.support.decisions import ask
from tests.support.examples import examples


class LadderWorld(ScalingWorld):
    """Devices with an attention and an expert worker each, and a policy for lost experts."""

    def __init__(self, num_devices: int, num_slots: int, policy: LostExpertPolicy) -> None:
        self.lost_policy = policy
        self.mask_of: dict[int, tuple] = {}
        self.by_hand: set[Rank] = set()  # roles that an operator has chosen
        self.num_begun = self.num_ended = 0
        super().__init__(num_devices, num_slots)

    def new_machine(self) -> None:
        capacity = Capacity(max_workers=MAX_WORKERS, slots_per_layer=self.num_slots, devices=self.num_devices)
        self.machine = Machine(self.kept, POLICY, capacity, None, self.lost_policy)

    def apply(self, decision: Decision) -> None:
        super().apply(decision)
        self.num_begun += sum(isinstance(effect, SwitchBegan) for effect in decision.effects)
        self.num_ended += sum(isinstance(effect, SwitchDone) for effect in decision.effects)
        for effect in decision.effects:
            if isinstance(effect, Publish):
                self.check_mask(effect)
        for process in self.processes.values():
            if self.machine.counts(process.id):
                assert self.machine.goal.seat(process.id.rank).roles == process.roles, "not what it was started as"

    def check_mask(self, tables: Publish) -> None:
        masked, lost = tables.routes.masked_experts(), set(tables.routes.lost_experts())
        if masked:
            assert self.mask_of.setdefault(tables.routes.mask_id, masked) == masked, "a number names one set"
            assert tables.routes.mask_id == max(self.mask_of), "a later set has a higher number"
            assert lost and lost <= set(masked), "it covers what has no place"
            assert max(Counter(layer for layer, _ in masked).values()) <= self.lost_policy.max_masked
            assert not tables.conditions.coverage
        elif lost and self.machine.was_all_ready:
            assert max(Counter(layer for layer, _ in lost).values()) > self.lost_policy.max_masked

    # -- what may happen -------------------------------------------------------------------------

    def switch(self, n: int) -> None:
        seats = self.machine.goal.seats
        rank, role = seats[n % len(seats)].rank, (Role.EXPERT, Role.ATTENTION)[n // 50 % 2]
        before = self.machine.goal
        decision = self.machine.handle(ask(SwitchRequest(rank=rank, role=role)), self.now)
        self.apply(decision)
        if not any(isinstance(effect, SwitchBegan) and effect.rank == rank for effect in decision.effects):
            assert decision.reason and self.machine.goal.seat(rank) == before.seat(rank)
            return
        assert size_of(self.machine.goal).attention >= 1
        self.by_hand.add(rank)

    def count(self, n: int) -> None:
        ready = [
            w for w in self.machine.members.workers if w.state is WorkerState.READY and w.roles == (Role.ATTENTION,)
        ]
        loads = {
            worker.rank: AttentionLoad(num_streams=n % (5 + i), num_used_blocks=n % 7, num_free_blocks=n // 7 % 9)
            for i, worker in enumerate(ready)
        }
        self.tell(StreamsReported(loads=loads))


LADDER_ACTIONS = [*ACTIONS, *[LadderWorld.switch] * 2, *[LadderWorld.leave] * 4, LadderWorld.count]
POLICIES = [
    LostExpertPolicy(),
    LostExpertPolicy(max_masked=1),
    LostExpertPolicy(max_masked=2),
    LostExpertPolicy(may_switch=True),
    LostExpertPolicy(max_masked=2, may_switch=True),
]


@examples(30)
@given(
    st.lists(st.tuples(st.integers(0, len(LADDER_ACTIONS) - 1), st.integers(0, 1000)), min_size=10, max_size=120),
    st.sampled_from([(2, 6), (3, 4), (3, 2), (3, 3), (4, 3)]),
    st.sampled_from(POLICIES),
)
def test_every_expert_is_served_or_masked_and_roles_are_what_they_should_be(schedule, shape, policy):
    world = LadderWorld(*shape, policy)
    for action, n in schedule:
        LADDER_ACTIONS[action](world, n)
    world.tell(StreamsReported(loads={}))  # whatever there was, streams have room now
    world.settle()
    check_covered(world)
    for device in world.machine.goal.gone:
        world.tell(ask(ReturnRequest(device=device)))
    world.settle()
    check_covered(world)
    goal, machine = world.machine.goal, world.machine
    assert machine.violations == machine.degraded == ()
    assert machine.routes.mask_id == 0 and goal.mask.experts == ()
    for seat in goal.seats:
        assert seat.wanted is Wanted.STAY and not seat.stands_in and seat.switch_s is None
        if seat.rank not in world.by_hand:
            was = Role.ATTENTION if seat.rank < world.num_devices else Role.EXPERT
            assert seat.roles == (was,), "it has not gone back"


def check_covered(world: LadderWorld) -> None:
    """As far as there are slots, or attention workers that can have some."""
    goal, machine = world.machine.goal, world.machine
    size = size_of(goal)
    assert all(machine.members.workers) and size.attention + size.expert > 0
    if size.expert * world.num_slots >= NUM_EXPERTS and size.attention:
        assert machine.violations == ()
    elif world.lost_policy.may_switch:
        num_lacking = -(-NUM_EXPERTS // world.num_slots) - size.expert
        assert size.attention - 1 < num_lacking, "an attention worker could have stood in"


@pytest.mark.parametrize("policy", POLICIES[3:])
def test_one_of_three_devices_after_the_other_is_gone(policy):
    world = LadderWorld(3, 2, policy)
    world.lose_device(2)
    world.settle()
    experts = [seat for seat in world.machine.goal.seats if seat.roles == (Role.EXPERT,)]
    assert [seat.rank for seat in experts if seat.stands_in] == [0] and world.machine.violations == ()
    world.lose_device(1)
    world.settle()
    assert world.machine.violations, "two workers are left, and one must have streams"
    world.return_device(0)
    world.return_device(0)
    world.settle()
    assert [seat.roles[0] for seat in world.machine.goal.seats] == [Role.ATTENTION] * 3 + [Role.EXPERT] * 3
    assert world.machine.violations == world.machine.degraded == ()
    assert world.num_begun >= 2 and world.num_ended >= 2
