"""Which devices are emptied because of their health, and what the machine does about it."""

import msgspec
import pytest

from everserve.control.decide.effects import (
    AllReady,
    DropDevice,
    Kill,
    Lost,
    Provision,
    Publish,
    Retire,
    Trust,
)
from everserve.control.decide.inputs import (
    Died,
    Said,
    Tick,
)
from everserve.control.decide.machine import Machine
from everserve.plan.evacuation import devices_away, health_of, quiet_devices, why_needed, with_diagnosis
from everserve.plan.health import FEED
from everserve.tables.goal import Capacity, Goal, SeatGoal, Wanted
from everserve.tables.health import Diagnosis, Level
from everserve.tables.ids import Epoch, Incarnation, Rank, Role
from everserve.tables.outputs import AttentionLoad
from everserve.wire.events import DeviceHealthChanged
from everserve.wire.messages import Answered, KeepGoal, Leave, Ready, StreamsReported
from everserve.wire.operators import (
    DeviceChangeView,
    DrainRequest,
    FaultRequest,
    HealthRequest,
    HealthView,
    ReturnRequest,
)
from tests.property.test_moves import POLICY
from tests.property.test_scaling import ScalingWorld
from tests.support.decisions import answered, ask, is_told, view_of

CAPACITY = Capacity(max_workers=8, slots_per_layer=4)


def said(device: int, level: int, reason: str = "", source: str = "operator") -> Diagnosis:
    return Diagnosis(device=device, level=Level(level), reason=reason, source=source)


def goal_with(*health: Diagnosis, num_devices: int = 3, **changes: object) -> Goal:
    """Each device with an attention and an expert worker, of a model with 6 experts."""
    world = ScalingWorld(num_devices, 4)
    return msgspec.structs.replace(world.kept, health=tuple(health), **changes)


# -- which devices -------------------------------------------------------------------------------


def test_levels_1_and_6_do_not_empty_a_device_and_2_waits_until_it_is_quiet():
    levels = {level: devices_away(goal_with(said(1, level)), CAPACITY, ()) for level in range(1, 7)}
    assert levels == {1: (), 2: (), 3: (1,), 4: (1,), 5: (1,), 6: ()}
    assert devices_away(goal_with(said(1, 2)), CAPACITY, {1}) == (1,)
    assert devices_away(goal_with(said(1, 2), away=(1,)), CAPACITY, ()) == (1,), "it is not asked twice"


def test_the_worst_goes_first_when_not_all_can_go():
    """Two of three devices hold all experts, one does not."""
    assert devices_away(goal_with(said(0, 3), said(1, 3)), CAPACITY, ()) == (0,)
    assert devices_away(goal_with(said(0, 3), said(1, 4)), CAPACITY, ()) == (1,)
    assert devices_away(goal_with(said(0, 3), said(1, 3), away=(1,)), CAPACITY, ()) == (1,), "nothing goes to and fro"
    assert devices_away(goal_with(said(0, 3), said(1, 4), away=(0,)), CAPACITY, ()) == (1,)
    assert devices_away(goal_with(said(0, 3), gone=(2,)), CAPACITY, ()) == (), "it is needed after a loss"


def test_why_a_device_is_needed():
    assert "cannot hold all experts" in why_needed(goal_with(), CAPACITY, [0, 1])
    assert why_needed(goal_with(), CAPACITY, [0]) == ""
    alone = Goal(
        version=1, seats=(SeatGoal(rank=Rank(0), roles=(Role.ATTENTION, Role.EXPERT), device=0),), placement=None
    )
    assert why_needed(alone, CAPACITY, [0]) == "no other attention worker would be left"
    goal = goal_with()
    retiring = [msgspec.structs.replace(s, wanted=Wanted.RETIRE) if s.device == 2 else s for s in goal.seats]
    assert why_needed(msgspec.structs.replace(goal, seats=tuple(retiring)), CAPACITY, [0]), "workers that retire"


def test_quiet_is_at_most_one_stream_for_each_attention_worker():
    goal = goal_with()
    assert quiet_devices(goal, {Rank(0): 2, Rank(1): 1, Rank(2): 0}) == {1, 2}
    assert quiet_devices(goal, {Rank(1): 1}) == {1}, "what was not counted is not quiet"
    experts_alone = [msgspec.structs.replace(s, device=9) if s.rank == 3 else s for s in goal.seats]
    goal = msgspec.structs.replace(goal, seats=tuple(experts_alone))
    assert 9 in quiet_devices(goal, {Rank(0): 2, Rank(1): 1, Rank(2): 0})
    assert 9 not in quiet_devices(goal, {Rank(0): 4, Rank(1): 0, Rank(2): 0})


def test_a_device_has_the_highest_level_and_all_reasons():
    goal = goal_with(said(1, 1, "warm"), said(1, 3, "a fan", FEED), said(2, 1))
    assert goal.level(1) is Level.DRAIN and goal.level(0) is Level.HEALTHY
    first, second = health_of(goal, CAPACITY)
    assert (first.device, first.level, first.reason) == (1, 3, "a fan; warm")
    assert second.reason == "said by the operator"


def test_an_operator_ends_events_but_not_what_is_still_there():
    health = (said(1, 4, "Xid 48", "Xid 48"), said(1, 3, "a fan", FEED), said(1, 2), said(2, 4, "Xid 48", "Xid 48"))
    assert with_diagnosis(health, said(1, 0)) == (health[1], health[3])
    assert with_diagnosis(health, said(1, 0, source=FEED)) == (health[0], health[2], health[3])
    assert with_diagnosis(health, said(1, 5)) == (*health[:2], health[3], said(1, 5))


# -- the machine ---------------------------------------------------------------------------------


class Instance(ScalingWorld):
    """Three devices with an attention and an expert worker each: ranks 0 to 2, and 3 to 5."""

    def __init__(self) -> None:
        self.done: list[object] = []
        super().__init__(3, 3)
        self.done.clear()

    def check_not_needed(self, rank: Rank) -> None:
        """Is the property test's business."""

    def apply(self, decision) -> None:
        super().apply(decision)
        self.done += decision.effects
        self.reason = decision.reason

    def say(self, *arguments) -> None:
        self.tell(said(*arguments))

    def asked(self) -> set[int]:
        return {effect.rank for effect in self.done if is_told(effect, Leave)}

    def ranks(self) -> set[int]:
        return {process.id.rank for process in self.processes.values()}

    def did(self, kind: type) -> list:
        return [effect for effect in self.done if isinstance(effect, kind)]


@pytest.fixture
def instance() -> Instance:
    return Instance()


def test_a_drained_device_keeps_its_memory_and_an_evacuated_one_does_not(instance):
    instance.say(1, 3, "a fan")
    assert instance.reason == "device 1 has health level 3 (a fan): it is drained"
    assert instance.asked() == {1}, "the expert worker waits until others have its experts"
    instance.settle()
    assert instance.asked() == {1, 4} and instance.ranks() == {0, 2, 3, 5}
    assert not instance.did(Retire)
    assert all(lost.cause == "left" for lost in instance.did(Lost))
    instance.say(1, 4, "smoke")
    assert {retired.rank for retired in instance.did(Retire)} == {1, 4}, "what its memory kept is released now"
    instance.say(1, 0)
    instance.settle()
    assert instance.ranks() == set(range(6)) and instance.machine.degraded == ()


def test_an_evacuated_device_releases_memory_as_its_workers_leave(instance):
    instance.say(2, 4)
    instance.settle()
    assert {retired.rank for retired in instance.did(Retire)} == {2, 5}


def test_the_goal_keeps_levels_before_anything_follows(instance):
    instance.say(1, 3, "a fan")
    first = instance.done[0]
    assert isinstance(first, KeepGoal) and first.goal.health == (said(1, 3, "a fan"),) and first.goal.away == (1,)


def test_what_cannot_be_left_is_used_on_and_left_when_there_is_more(instance):
    instance.say(0, 3)
    instance.settle()
    instance.say(1, 3, "a fan")
    instance.settle()
    assert instance.ranks() == {1, 2, 4, 5}
    assert "device 1 has health level 3 (a fan) and is used on: the other expert workers cannot hold all experts" in (
        instance.machine.degraded
    )
    instance.say(0, 0)
    instance.settle()
    assert instance.ranks() == {0, 2, 3, 5}


def test_a_device_that_was_left_is_used_again_when_it_is_needed(instance):
    instance.say(0, 4)
    instance.settle()
    instance.say(1, 6, "fell off the bus")
    assert {start.rank for start in instance.did(Provision)} == {0, 3}, "at once, in the same decision"
    instance.settle()
    assert instance.ranks() == {0, 2, 3, 5} and instance.machine.violations == ()


def test_an_isolated_device_is_lost_at_once_and_returns_when_it_is_healthy(instance):
    instance.say(1, 6)
    assert {kill.rank for kill in instance.did(Kill)} == {1, 4} and instance.did(DropDevice)
    assert instance.machine.goal.gone == (1,)
    instance.settle()
    instance.say(1, 0)
    assert instance.machine.goal.gone == ()
    instance.settle()
    assert instance.ranks() == set(range(6)) and instance.machine.degraded == ()


def test_an_evacuation_at_level_5_has_a_deadline(instance):
    instance.say(1, 5)
    assert instance.asked() == {1} and not instance.did(Kill)
    deadline = instance.now + POLICY.isolate_s
    assert instance.machine.next_deadline() <= deadline
    instance.now = deadline
    instance.tell(Tick())
    assert {kill.rank for kill in instance.did(Kill)} == {1, 4} and instance.machine.goal.gone == (1,)


def test_level_5_that_is_taken_back_in_time_isolates_nothing(instance):
    instance.say(1, 5)
    instance.say(1, 0)
    instance.now += 2 * POLICY.isolate_s
    instance.tell(Tick())
    assert instance.machine.goal.gone == ()


def test_a_new_orchestrator_gives_an_evacuation_its_time_again(instance):
    instance.say(1, 5)
    instance.lose_orchestrator(0)
    assert instance.machine.next_deadline() is not None
    instance.settle()
    assert instance.machine.goal.gone == (1,)


def counted(num_streams: int) -> StreamsReported:
    """On each attention worker."""
    load = AttentionLoad(num_streams=num_streams, num_used_blocks=0, num_free_blocks=9)
    return StreamsReported(loads={Rank(rank): load for rank in range(3)})


def test_a_busy_device_is_drained_when_it_is_quiet(instance):
    instance.say(1, 2, "hot")
    assert instance.machine.goal.away == (), "nothing was counted yet"
    instance.tell(counted(2))
    instance.settle()
    assert instance.machine.goal.away == () and instance.ranks() == set(range(6))
    assert any("is drained when it is quiet" in sentence for sentence in instance.machine.degraded)
    instance.tell(counted(1))
    instance.tell(counted(9))
    instance.settle()
    assert instance.ranks() == {0, 2, 3, 5}, "what has begun is done"


def test_nobody_is_asked_to_leave_because_of_a_worker_that_was_asked_itself(instance):
    for rank in (0, 1):
        instance.tell(ask(DrainRequest(rank=Rank(rank))))
    instance.say(2, 4)
    assert Rank(2) not in instance.asked(), "its streams would find no worker"
    instance.settle()
    assert instance.ranks() == {0, 1, 3, 4}


def test_a_worker_that_dies_during_an_evacuation_is_not_replaced_there(instance):
    instance.say(1, 4)
    instance.die(next(id for id in instance.processes if id.rank == 4))
    instance.settle()
    assert instance.ranks() == {0, 2, 3, 5} and instance.machine.violations == ()


def test_a_new_orchestrator_after_an_evacuation_can_evacuate_the_next(instance):
    """It must not take workers for lost that it has not met yet."""
    instance.say(2, 3)
    instance.settle()
    instance.lose_orchestrator(0)
    instance.settle()
    instance.say(2, 0)
    instance.settle()
    instance.say(0, 3)
    instance.settle()
    assert instance.ranks() == {1, 2, 4, 5} and instance.machine.violations == ()


def test_returning_a_device_calls_it_healthy_unless_something_else_says_otherwise(instance):
    instance.say(1, 4, "Xid 48", "Xid 48")
    instance.settle()
    instance.tell(ask(ReturnRequest(device=1)))
    assert instance.machine.goal.health == ()
    instance.settle()
    assert instance.ranks() == set(range(6))
    instance.say(1, 6, "unplugged", FEED)
    instance.tell(ask(ReturnRequest(device=1)))
    assert instance.machine.goal.gone == (1,) and instance.machine.goal.level(1) is Level.ISOLATE


def test_what_is_said_of_an_unknown_device_is_answered_and_changes_nothing(instance):
    before = instance.machine.goal
    instance.say(7, 3)
    assert instance.reason == "there is no device 7" and instance.machine.goal is before
    instance.say(1, 1, "warm")
    changed = instance.did(DeviceHealthChanged)
    assert [(one.device, one.level, one.before) for one in changed] == [(1, 1, 0)]
    assert instance.machine.degraded == () and instance.machine.tables().health[0].reason == "warm"
    instance.say(1, 1, "warm")
    assert len(instance.did(DeviceHealthChanged)) == 1, "the same again is no news"


def test_an_instance_may_start_without_a_device_that_is_not_healthy():
    """As a new orchestrator finds it that takes over before all workers are ready."""
    goal = msgspec.structs.replace(Instance().kept, health=(said(1, 4),), away=(1,))
    machine = Machine(goal, POLICY, CAPACITY)
    effects = machine.resume(0.0, [], Epoch(9), was_all_ready=False).effects
    ranks = {effect.rank for effect in effects if isinstance(effect, Provision)}
    assert ranks == {0, 2, 3, 5}
    effects = [effect for rank in ranks for effect in machine.handle(Said(rank, Incarnation(1), Ready()), 1.0).effects]
    assert any(isinstance(effect, AllReady) for effect in effects), "the instance serves"


# -- what operators are answered -----------------------------------------------------------------


def test_an_operator_is_answered_with_what_follows_and_ends_what_sources_have_said(instance):
    instance.tell(ask(HealthRequest(device=1, level=1, reason="a\n  fan")))
    decision = instance.machine.handle(ask(HealthRequest(device=1, level=1, reason="a fan")), instance.now)
    view = view_of(answered(decision), HealthView)
    assert (view.device, view.level, view.reason) == (1, 1, "a fan") and "as before" in view.done
    assert not instance.did(Trust)
    instance.tell(ask(HealthRequest(device=1, level=0)))
    assert [one.device for one in instance.did(Trust)] == [1] and instance.machine.goal.health == ()
    refused = instance.machine.handle(ask(HealthRequest(device=9, level=0)), instance.now)
    assert answered(refused).refused == "there is no device 9" and refused.effects == (answered(refused),)


def test_a_device_is_not_given_back_while_another_source_finds_it_ill(instance):
    instance.say(1, 4, "on fire", FEED)
    decision = instance.machine.handle(ask(ReturnRequest(device=1)), instance.now)
    assert answered(decision).refused == "device 1 still has health level 4: on fire"
    assert Trust(1) in decision.effects, "events of it may be said again"
    assert answered(instance.machine.handle(ask(ReturnRequest(device=2)), instance.now)).refused


def test_what_was_answered_is_kept_before_though_more_waits(instance):
    """An operator relies on it: deaths since then are decided with it."""
    (rank,) = [seat.rank for seat in instance.machine.goal.seats if seat.device == 0 and seat.role is Role.EXPERT]
    first = instance.machine.handle(Died(rank, Incarnation(1)), instance.now, is_last=False)
    assert not any(isinstance(effect, Publish | KeepGoal) for effect in first.effects)
    decision = instance.machine.handle(ask(FaultRequest(device=1, gone=True)), instance.now, is_last=False)
    kinds = [type(effect) for effect in decision.effects]
    assert kinds.index(KeepGoal) < kinds.index(Publish) < kinds.index(Answered)
    assert view_of(answered(decision), DeviceChangeView).device == 1 and instance.machine.goal.gone == (1,)
