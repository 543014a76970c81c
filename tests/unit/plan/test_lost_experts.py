"""What is done while experts have no place: the steps that the policy allows, and the reason of each."""

import pytest

from everserve.plan.lost_experts import Candidate, LostExpertPolicy, Staff, choose_mask, choose_role
from everserve.tables.ids import Rank, Role

MASK = LostExpertPolicy(max_masked=2)
SWITCH = LostExpertPolicy(may_switch=True)


@pytest.mark.parametrize(
    ("on_lost_expert", "max_masked_experts", "num_experts", "top_k", "expected"),
    [
        ("wait", 4, 64, 8, LostExpertPolicy()),
        ("mask", 1 / 32, 64, 8, LostExpertPolicy(max_masked=2)),
        ("mask", 1 / 32, 8, 2, LostExpertPolicy(max_masked=1)),  # at least one
        ("mask", 5, 64, 8, LostExpertPolicy(max_masked=5)),
        ("mask", 1, 64, 8, LostExpertPolicy(max_masked=1)),  # a number, not all of them
        ("mask", 0, 64, 8, LostExpertPolicy()),
        ("mask", 100, 8, 2, LostExpertPolicy(max_masked=6)),  # a token needs two
        ("switch-role", 4, 64, 8, LostExpertPolicy(may_switch=True)),
        ("mask-and-switch-role", 4, 64, 8, LostExpertPolicy(max_masked=4, may_switch=True)),
    ],
)
def test_the_policy_of_an_instance(on_lost_expert, max_masked_experts, num_experts, top_k, expected):
    assert LostExpertPolicy.of(on_lost_expert, max_masked_experts, num_experts, top_k) == expected


def test_lost_experts_are_masked_within_the_limit_of_every_layer():
    lost = {(1, 3), (0, 5), (0, 2)}
    assert choose_mask(lost, (), MASK) == (((0, 2), (0, 5), (1, 3)), "3 experts without a place are masked")
    choice = choose_mask({*lost, (0, 7)}, (), MASK)
    assert choice.experts == () and "3 experts of one layer have no place, more than the 2" in choice.reason
    assert choose_mask({*lost, (0, 7)}, ((0, 2),), MASK).experts == (), "then streams wait for all of them"
    assert choose_mask(lost, (), LostExpertPolicy()).experts == ()


def test_a_mask_changes_only_for_another_loss_and_is_lifted_when_all_are_back():
    masked = ((0, 2), (0, 5), (1, 3))
    assert choose_mask({(0, 2)}, masked, MASK).experts == masked, "a part of it is back: that is not worth a change"
    assert choose_mask({(0, 2), (1, 4)}, masked, MASK).experts == ((0, 2), (1, 4))
    assert choose_mask((), masked, MASK) == ((), "every masked expert has a place again")
    assert choose_mask((), (), MASK) == ((), "")


def staff(num_present: int, num_away: int = 1, num_attention: int = 2, **more) -> Staff:
    return Staff(
        num_experts=8,
        slots_per_layer=4,
        num_present=num_present,
        num_away=num_away,
        num_attention=num_attention,
        **more,
    )


def test_the_attention_worker_with_the_fewest_streams_becomes_an_expert_worker():
    able = (Candidate(Rank(0), 7), Candidate(Rank(1), 3), Candidate(Rank(2), 0, "rank 2 is starting"))
    choice = choose_role(staff(1, candidates=able), SWITCH)
    assert (choice.rank, choice.role) == (1, Role.EXPERT)
    assert choice.reason == "1 expert worker has 4 slots for 8 experts; it has the fewest streams (3)"
    assert choose_role(staff(2, candidates=able), SWITCH).rank is None, "there is room for all experts"
    assert choose_role(staff(1, candidates=able), MASK).rank is None
    back = Candidate(Rank(5), -1)
    assert choose_role(staff(1, candidates=(*able, back)), SWITCH).rank == 5, "it need not even leave"


def test_no_worker_changes_its_role_if_that_is_not_enough():
    able = (Candidate(Rank(0), 7), Candidate(Rank(1), 3))
    choice = choose_role(staff(0, num_away=2, candidates=able), SWITCH)
    assert choice.rank is None and "2 more are needed, and 1 attention worker can become one" in choice.reason
    three = (*able, Candidate(Rank(2), 9))
    assert choose_role(staff(0, num_away=2, num_attention=3, candidates=three), SWITCH).rank == 1
    full = (Candidate(Rank(0), 7, "no KV is free"), Candidate(Rank(1), 3, "no KV is free"))
    assert choose_role(staff(1, candidates=full), SWITCH).reason.endswith("no KV is free; no KV is free")


def test_a_stand_in_goes_back_when_the_others_have_room():
    assert choose_role(staff(3, num_away=0, stand_ins=(Rank(1), Rank(0))), SWITCH)[:2] == (0, Role.ATTENTION)
    assert choose_role(staff(3, num_away=1, stand_ins=(Rank(1),)), SWITCH).rank is None, "one is away still"
    assert choose_role(staff(2, num_away=0, stand_ins=(Rank(1),)), SWITCH).rank is None, "it is needed"
    assert choose_role(staff(3, num_away=0), SWITCH).rank is None
