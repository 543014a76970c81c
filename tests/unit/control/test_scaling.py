"""Which seats there should be after an operator has asked for another number of workers, and what is refused."""

import pytest

from everserve.control.decide.scaling import Refused, grown, scaled, size_of, staying
from everserve.plan.placement import place_experts
from everserve.tables.goal import Capacity, Goal, SeatGoal, Wanted
from everserve.tables.ids import Rank, Role
from everserve.wire.operators import ScaleRequest

CAPACITY = Capacity(max_workers=8, slots_per_layer=4)
DOMAINS = Capacity(max_workers=8, slots_per_layer=4, devices=2)


def goal_of(num_attention: int, num_expert: int, num_devices: int = 0, gone: tuple[int, ...] = ()) -> Goal:
    roles = [(Role.ATTENTION,)] * num_attention + [(Role.EXPERT,)] * num_expert
    numbers = [*range(num_attention), *range(num_expert)]
    seats = tuple(
        SeatGoal(rank=Rank(rank), roles=role, device=number % num_devices if num_devices else rank)
        for rank, (role, number) in enumerate(zip(roles, numbers, strict=True))
    )
    ranks = [Rank(num_attention + i) for i in range(num_expert)]
    placement = place_experts(8, (0, 1), ranks, None) if num_expert else None
    return Goal(version=1, seats=seats, placement=placement, gone=gone)


def after(goal: Goal, empty=(), capacity=CAPACITY, **asked: int) -> dict[int, tuple[str, int]]:
    """Rank -> role and device, of the seats that stay."""
    return {seat.rank: (seat.roles[0], seat.device) for seat in staying(ask(goal, empty, capacity, **asked))}


def ask(goal: Goal, empty=(), capacity=CAPACITY, **asked: int) -> Goal:
    return scaled(goal, ScaleRequest(**asked), capacity, {Rank(rank) for rank in empty})


def why_not(goal: Goal, empty=(), capacity=CAPACITY, **asked: int) -> str:
    with pytest.raises(Refused) as refused:
        ask(goal, empty, capacity, **asked)
    return str(refused.value)


def test_the_lowest_free_ranks_come_and_the_highest_go():
    goal = goal_of(1, 2)
    more = ask(goal, attention=2, expert=4)
    assert size_of(more) == (2, 4, 6)
    assert [(seat.rank, *seat.roles) for seat in more.seats if seat.rank > 2] == [
        (3, "attention"),
        (4, "expert"),
        (5, "expert"),
    ]
    fewer = ask(more, attention=1, expert=2)
    assert {seat.rank for seat in fewer.seats if seat.wanted is Wanted.RETIRE} == {3, 4, 5}
    assert size_of(fewer) == (1, 2, 3)


def test_one_number_leaves_the_other_as_it_is():
    assert size_of(ask(goal_of(2, 2), attention=3)) == (3, 2, 5)
    assert size_of(ask(goal_of(2, 2), expert=3)) == (2, 3, 5)


def test_a_worker_that_was_to_retire_may_stay():
    fewer = ask(goal_of(2, 3), expert=2)
    assert set(after(fewer, expert=3)) == {0, 1, 2, 3, 4}, "rank 4 has not left yet"
    assert set(after(fewer, empty=[4], expert=3)) == {0, 1, 2, 3, 4}, "rank 4 has left, and is used again"


def test_an_empty_rank_may_get_another_role_but_not_one_with_a_process():
    capacity = Capacity(max_workers=5, slots_per_layer=4)
    fewer = ask(goal_of(2, 3), expert=2)
    assert after(fewer, empty=[4], capacity=capacity, attention=3)[4] == ("attention", 4)
    assert "try again" in why_not(fewer, capacity=capacity, attention=3)


def test_whole_devices_come_and_go():
    goal = goal_of(2, 2, num_devices=2)
    more = ask(goal, capacity=DOMAINS, devices=4)
    assert size_of(more) == (4, 4, 4)
    assert after(goal, capacity=DOMAINS, devices=3) == after(goal) | {4: ("attention", 2), 5: ("expert", 2)}
    fewer = ask(more, capacity=DOMAINS, devices=3)
    assert {seat.device for seat in staying(fewer)} == {0, 1, 2} and size_of(fewer) == (3, 3, 3)


def test_devices_that_are_gone_are_not_there():
    goal = goal_of(3, 3, num_devices=3, gone=(1,))
    assert size_of(goal) == (2, 2, 2)
    assert {device for _, device in after(goal, [1, 4], DOMAINS, devices=3).values()} == {0, 2, 3}
    on_others = after(goal, [1, 4], DOMAINS, attention=3)
    assert 1 not in {device for _, device in on_others.values()} and len(on_others) == 5
    machine = Capacity(max_workers=8, slots_per_layer=4, num_gpus=3)
    assert "this machine has 3, of which 1 is gone" in why_not(goal, [1, 4], machine, devices=3)


def test_new_workers_go_where_the_fewest_are():
    goal = goal_of(2, 3, num_devices=2)
    assert after(goal, capacity=DOMAINS, expert=4)[5] == ("expert", 1)
    machine = Capacity(max_workers=8, slots_per_layer=4, num_gpus=4)
    more = ask(goal, capacity=machine, attention=4)
    assert [(seat.rank, seat.device, seat.gpu) for seat in more.seats[5:]] == [(5, 2, 2), (6, 3, 3)]
    shares = Capacity(max_workers=8, slots_per_layer=4, num_gpus=2, devices=2)
    assert [(seat.device, seat.gpu) for seat in ask(goal_of(2, 2, 2), capacity=shares, devices=3).seats[4:]] == [
        (2, 0),
        (2, 0),
    ]


def test_a_worker_that_is_alone_gets_a_device_of_its_own():
    goal = ask(goal_of(2, 3), expert=2)
    assert after(goal, attention=3)[5] == ("attention", 5), "rank 4 has not left device 4 yet"
    assert after(goal, empty=[4], attention=3)[4] == ("attention", 4)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"attention": 0}, "at least one attention worker"),
        ({"expert": 1}, "1 expert worker with 4 slots per layer cannot hold the model's 8 experts: at least 2"),
        ({"expert": 0}, "cannot hold"),
        ({"attention": 5, "expert": 4}, "room for 8 workers: restart it with a larger --max-workers"),
        ({"devices": 2}, "every worker of this instance is a device of its own"),
    ],
)
def test_what_is_refused(asked, reason):
    assert reason in why_not(goal_of(2, 3), **asked)


def test_more_devices_than_there_are_is_refused():
    goal = goal_of(2, 2, num_devices=2)
    assert "at least one" in why_not(goal, capacity=DOMAINS, devices=0)
    assert "cannot hold" in why_not(goal, capacity=DOMAINS, devices=1)
    assert "--max-workers" in why_not(goal, capacity=DOMAINS, devices=5)


def test_an_instance_without_expert_workers():
    goal = Goal(
        version=1,
        seats=(SeatGoal(rank=Rank(0), roles=(Role.ATTENTION, Role.EXPERT), device=0, own_experts=8),),
        placement=None,
    )
    assert "no expert workers" in why_not(goal, expert=1)
    more = ask(goal, attention=3)
    assert size_of(more) == (3, 0, 3) and {seat.own_experts for seat in more.seats} == {8}


def test_more_expert_workers_than_experts():
    capacity = Capacity(max_workers=16, slots_per_layer=4)
    assert "so at most 8" in why_not(goal_of(2, 3), capacity=capacity, expert=9)


def test_the_largest_goal_keeps_the_proportion():
    assert size_of(grown(goal_of(1, 2), Capacity(max_workers=6, slots_per_layer=4))) == (2, 4, 6)
    assert size_of(grown(goal_of(2, 2), Capacity(max_workers=4, slots_per_layer=4))) == (2, 2, 4)
