"""One instance in virtual time: it starts, loses workers and devices, and is whole again."""

import pytest

from everserve.control.decide.machine import Policy
from everserve.plan.placement import place_experts
from everserve.simulate.instance import Instance
from everserve.simulate.meter import Meter
from everserve.simulate.world import Times
from everserve.tables.goal import Capacity, Goal, SeatGoal
from everserve.tables.ids import Rank, Role


@pytest.fixture
def instance() -> Instance:
    """Four devices with an attention and an expert worker each, all ready."""
    homes = [SeatGoal(rank=Rank(n), roles=(Role.ATTENTION,), device=n) for n in range(4)]
    experts = [SeatGoal(rank=Rank(4 + n), roles=(Role.EXPERT,), device=n) for n in range(4)]
    placement = place_experts(8, (0, 1), [seat.rank for seat in experts], None)
    goal = Goal(version=1, seats=(*homes, *experts), placement=placement)
    capacity = Capacity(max_workers=8, slots_per_layer=placement.num_slots)
    made = Instance(goal, capacity, Policy(detect_s=0.05), Times(), Meter())
    made.meter.begin("start")
    made.start()
    made.run_until(60.0)
    return made


def test_it_starts(instance: Instance) -> None:
    assert instance.machine.was_all_ready and not instance.machine.degraded
    assert instance.machine.violations == ()


@pytest.mark.parametrize("rank", [0, 5])
def test_a_worker_dies_and_is_replaced(instance: Instance, rank: int) -> None:
    event = instance.meter.begin("loss")
    instance.kill([Rank(rank)])
    instance.run_until(instance.now + 0.5)
    assert instance.machine.degraded and instance.machine.violations == ()
    instance.run_until(instance.now + 60.0)
    assert not instance.machine.degraded
    assert instance.workers[Rank(rank)].id.incarnation == 2
    assert event.num_decisions > 0 and event.num_bytes > 0


def test_time_passes_only_where_it_is_told_to(instance: Instance) -> None:
    assert instance.now == 60.0
    instance.kill([Rank(0)])
    assert instance.now == 60.0 and not instance.machine.degraded
