"""Health levels in any order of events, beside deaths, losses of devices, scaling and new orchestrators. A worker
leaves a device only when others have what it has; without other faults no expert is ever without a place; what cannot
be left is used on; and when all devices are healthy again, everything is as it was."""

from hypothesis import given
from hypothesis import strategies as st

from everserve.control.decide.effects import Provision
from everserve.control.decide.scaling import staying
from everserve.plan.evacuation import why_needed
from everserve.plan.health import FEED
from everserve.tables.goal import Wanted
from everserve.tables.health import OPERATOR, Diagnosis, Level
from everserve.tables.ids import Rank, Role, WorkerId
from everserve.tables.members import WorkerState
from everserve.tables.outputs import AttentionLoad
from everserve.wire.events import DeviceHealthChanged, ScaleBegan
from everserve.wire.messages import Ask, StreamsReported
from everserve.wire.operators import ReturnRequest
from tests.property.test_moves import NUM_EXPERTS, World
from tests.property.test_scaling import SCALING_ACTIONS, ScalingWorld, check_no_hole
from tests.support.decisions import ask
from tests.support.examples import examples

SOURCES = (OPERATOR, FEED, "Xid 48")


class HealthWorld(ScalingWorld):
    """Sources say how healthy devices are, and the gateway counts streams."""

    def check_not_needed(self, rank: Rank) -> None:
        machine = self.machine
        leaving = machine._seats[rank]
        goal = machine.goal
        assert leaving.goal.wanted is Wanted.RETIRE or leaving.goal.device in goal.away
        stay = {seat.rank for seat in staying(goal)}
        others = [s for s in machine._seats.values() if s.rank in stay and s.state is WorkerState.READY]
        others = [
            s for s in others if s.goal.roles == leaving.goal.roles and WorkerId(*s.id) not in self.asked_to_leave
        ]
        assert others or leaving.held is not None, "its streams would wait"
        check_no_hole(leaving, others)

    def apply(self, decision) -> None:
        super().apply(decision)
        goal = self.machine.goal
        is_scaling = any(isinstance(effect, ScaleBegan) for effect in decision.effects)
        for effect in decision.effects:
            if isinstance(effect, Provision) and not is_scaling:  # more workers may allow to leave a device
                seat = goal.seat(effect.rank)
                assert seat is not None and seat.device not in goal.absent, "nothing starts on a device that is left"
            if isinstance(effect, DeviceHealthChanged):
                assert effect.done and effect.level == goal.level(effect.device)
        if goal.away:
            assert not why_needed(goal, self.machine._cluster.capacity, goal.away)

    def lose_orchestrator(self, n: int) -> None:
        """A worker that was asked to leave and has not begun to will be asked again."""
        self.asked_to_leave = {id for id, process in self.processes.items() if process.is_leaving}
        super().lose_orchestrator(n)

    def ask(self, asked: Ask) -> bool:
        """More workers may be what another device was waiting for to be left: then it is."""
        return super().ask(asked) if not self.machine.goal.health else self.ask_some(asked)

    def ask_some(self, asked: Ask) -> bool:
        decision = self.machine.handle(asked, self.now)
        self.apply(decision)
        return any(isinstance(effect, ScaleBegan) for effect in decision.effects)

    def say(self, n: int, most: int = max(Level)) -> None:
        n, device = divmod(n, self.num_devices)
        n, level = divmod(n, most + 1)
        source = SOURCES[n % len(SOURCES)]
        self.tell(Diagnosis(device=device, level=Level(level), reason=f"case {n}", source=source))

    def say_little(self, n: int) -> None:
        self.say(n, most=Level.EVACUATE)

    def call_healthy(self, n: int) -> None:
        self.tell(Diagnosis(device=n % self.num_devices, level=Level.HEALTHY, reason=""))

    def count_streams(self, n: int) -> None:
        ranks = [seat.rank for seat in self.machine.goal.seats if Role.ATTENTION in seat.roles]
        loads = [
            AttentionLoad(num_streams=(n >> i) % 4, num_used_blocks=0, num_free_blocks=9) for i in range(len(ranks))
        ]
        self.tell(StreamsReported(loads=dict(zip(ranks, loads, strict=True))))

    def all_healthy(self) -> None:
        """Those that are over by themselves are, an operator says the rest."""
        for device in {one.device for one in self.machine.goal.health}:
            self.tell(Diagnosis(device=device, level=Level.HEALTHY, reason="", source=FEED))
            self.tell(Diagnosis(device=device, level=Level.HEALTHY, reason=""))
        assert self.machine.goal.health == () and self.machine.goal.away == ()
        for device in self.machine.goal.gone:
            self.tell(ask(ReturnRequest(device=device)))


HEALTH_ACTIONS = [
    *[action for action in SCALING_ACTIONS if action is not World.lose_orchestrator],
    HealthWorld.lose_orchestrator,
    *[HealthWorld.say] * 4,
    HealthWorld.call_healthy,
    HealthWorld.count_streams,
    *[HealthWorld.leave] * 3,
]
ORDERLY = [
    *[HealthWorld.deliver] * 6,
    *[World.reap] * 2,
    *[HealthWorld.use_routes] * 5,
    *[lambda world, n: world.fill_one(n, may_fail=False)] * 5,
    *[HealthWorld.say_little] * 2,
    HealthWorld.call_healthy,
    HealthWorld.count_streams,
    *[HealthWorld.leave] * 3,
    HealthWorld.lose_orchestrator,
]
SHAPES = [(1, 6), (2, 6), (3, 4), (3, 3), (2, 3), (4, 2)]


def schedules(actions: list) -> st.SearchStrategy:
    return st.lists(st.tuples(st.integers(0, len(actions) - 1), st.integers(0, 10_000)), min_size=10, max_size=100)


@examples(15)
@given(schedules(HEALTH_ACTIONS), st.sampled_from(SHAPES))
def test_whatever_is_said_everything_heals(schedule, shape):
    world = HealthWorld(*shape)
    for action, n in schedule:
        HEALTH_ACTIONS[action](world, n)
    world.settle()
    world.all_healthy()
    world.settle()
    assert world.machine.degraded == () and world.machine.goal.scaling_s is None
    assert {process.id.rank for process in world.processes.values()} == {s.rank for s in staying(world.machine.goal)}
    num_expert = sum(Role.ATTENTION not in seat.roles for seat in staying(world.machine.goal))
    assert world.machine.violations == () or num_expert * world.num_slots < NUM_EXPERTS


@examples(15)
@given(schedules(ORDERLY), st.sampled_from(SHAPES))
def test_an_evacuation_never_leaves_an_expert_without_a_place(schedule, shape):
    world = HealthWorld(*shape)
    for action, n in schedule:
        ORDERLY[action](world, n)
        assert world.machine.routes.num_without_place == 0
        assert world.machine.violations == (), "nor streams without a worker"
    world.settle()
    check_emptied(world)
    world.all_healthy()
    world.settle()
    assert world.machine.degraded == () and len(world.processes) == 2 * world.num_devices


def check_emptied(world: HealthWorld) -> None:
    """What its level asks for has happened to every device, or cannot."""
    goal, capacity = world.machine.goal, world.machine._cluster.capacity
    used = {goal.seat(process.id.rank).device for process in world.processes.values()}
    assert used == set(range(world.num_devices)) - set(goal.away)
    for device in range(world.num_devices):
        if goal.level(device) >= Level.DRAIN and device in used:
            assert why_needed(goal, capacity, [*goal.away, device])
            assert any(f"device {device} has health level" in sentence for sentence in world.machine.degraded)
