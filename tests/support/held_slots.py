"""Workers that hold what they should, and goals to go with them."""

from collections.abc import Iterable

from everserve.tables.goal import Goal, SeatGoal
from everserve.tables.ids import Rank, Role
from everserve.tables.placement import Placement
from everserve.tables.slots import HeldSlots


def held(placement: Placement, rank: int, num_slots: int | None = None) -> HeldSlots:
    """All that the placement gives to this rank, each expert for the first time."""
    planned = placement.seat(Rank(rank))
    assert planned is not None
    experts = planned.slots(num_slots or placement.num_slots).experts
    return HeldSlots(experts=experts, generations=tuple((1,) * len(slots) for slots in experts))


def have(placement: Placement) -> dict[Rank, HeldSlots]:
    return {seat.rank: held(placement, seat.rank) for seat in placement.seats}


def goal_of(attention: Iterable[int], placement: Placement | None, own_experts: int = 0) -> Goal:
    """Attention workers in these ranks (with both roles, if there is no placement), expert workers where it says."""
    roles = (Role.ATTENTION,) if placement is not None else (Role.ATTENTION, Role.EXPERT)
    seats = [SeatGoal(rank=Rank(rank), roles=roles, own_experts=own_experts) for rank in attention]
    if placement is not None:
        seats += [SeatGoal(rank=seat.rank, roles=(Role.EXPERT,)) for seat in placement.seats]
    return Goal(version=1, seats=tuple(seats), placement=placement)
