"""Whether experts should change places because of their load: worth it, or not, and why.

A layer takes as long as its busiest worker. So a layer is changed if

    a plan for it lowers its busiest worker by more than `min_gain`, and
    the time that this saves within `horizon_s` is more than copying the weights takes at `pace_bytes_per_s`

and only a few layers at a time, those that would gain most. A layer that was changed is not changed again unless its
loads change: the planner finds nothing better then. Between two places that are about equally good nothing moves, which
keeps loads that vary a little from causing moves.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from everserve.plan.dealing import Dealing, Loads, work_of
from everserve.plan.moves import Have, given_up, next_moves
from everserve.plan.repair import Room, repair
from everserve.plan.weights import ITEM_BYTES, ModelSizes
from everserve.tables.calls import ShardKind
from everserve.tables.placement import Placement, SeatExperts
from everserve.tables.slots import HeldSlots
from everserve.words import count

MIN_ROWS = 20.0  # per second and expert worker in a layer; below, loads are mostly chance


@dataclass(frozen=True, kw_only=True)
class BalancePolicy:
    """When experts move for their load."""

    expert_bytes: int  # of the weights of one expert
    pace_bytes_per_s: float = 1e9  # at which slots are filled while streams run: a thread that yields to steps
    every_s: float = 5.0
    min_gain: float = 0.1  # of the busiest worker of a layer
    min_rows: float = MIN_ROWS
    horizon_s: float = 60.0  # how long loads are expected to stay like this
    max_layers: int = 4  # planned at once: for 32 workers with 256 experts that takes some 0.2 s

    @classmethod
    def of(cls, model: ModelSizes) -> "BalancePolicy":
        """The policy for weights as they are stored: gate, up and down."""
        return cls(expert_bytes=max(cut.num_weights(model.hidden_size) for cut in model.cuts) * ITEM_BYTES)


class Verdict(NamedTuple):
    """`placement`: None if everything stays where it is. max/mean is over the layers together."""

    placement: Placement | None
    reason: str
    max_over_mean: float
    expected: float  # max over mean when it is done
    num_moves: int = 0


class _Layer(NamedTuple):
    number: int  # its index
    busiest: float
    mean: float

    @property
    def excess(self) -> float:
        return self.busiest - self.mean


def decide(
    before: Placement,
    have: Have,
    rooms: Sequence[Room],
    loads: Mapping[int, Loads],
    dealing: Dealing,
    policy: BalancePolicy,
) -> Verdict:
    """`loads`: rows per second by index of the layer. `have`: what workers hold. Heads stay: their KV would have to
    move with them."""
    loads = {index: load for index, load in loads.items() if before.calls[index].kind is not ShardKind.HEAD}
    layers = [_measure(before, index, load, dealing) for index, load in loads.items()]
    total, means = sum(layer.busiest for layer in layers), sum(layer.mean for layer in layers)
    now = total / means if means else 0.0
    busy = [layer for layer in layers if layer.mean >= policy.min_rows]
    if not busy:
        return Verdict(None, "there are too few rows to tell which experts are busy", now, now)
    uneven = [layer for layer in busy if layer.excess > policy.min_gain * layer.busiest]
    worst = sorted(uneven, key=lambda layer: (-layer.excess, layer.number))[: policy.max_layers]
    if not worst:
        return Verdict(None, f"balanced: max/mean is {now:.2f}", now, now)
    plan = repair(before, rooms, loads, dealing, balanced=[layer.number for layer in worst])
    kept, num_moves, saved, why_not = [], 0, 0.0, ""
    for layer in worst:
        gain = layer.busiest - _measure(plan, layer.number, loads[layer.number], dealing).busiest
        num_fills = _num_fills(plan, have, layer.number)
        if gain <= policy.min_gain * layer.busiest:
            why_not = why_not or f"no plan lowers the busiest worker of a layer by more than {policy.min_gain:.0%}"
        elif num_fills is None:
            why_not = "there is no free slot and no second place to move experts through"
        elif gain / total * policy.horizon_s < num_fills * policy.expert_bytes / policy.pace_bytes_per_s:
            why_not = f"copying {count(num_fills, 'expert')} would take longer than it saves in {policy.horizon_s:g} s"
        else:
            kept.append(layer.number)
            num_moves, saved = num_moves + num_fills, saved + gain
    if not kept:
        return Verdict(None, f"{why_not}; max/mean is {now:.2f}", now, now)
    expected = (total - saved) / means
    moved = f"{count(num_moves, 'expert')} into other slots" if num_moves else "only other active places"
    reason = f"max/mean {now:.2f} -> {expected:.2f} by {len(kept)} of {count(len(layers), 'layer')}: {moved}"
    return Verdict(_merged(before, plan, kept), reason, now, expected, num_moves)


def _measure(placement: Placement, index: int, load: Loads, dealing: Dealing) -> _Layer:
    work = work_of(placement, index, load, dealing)
    return _Layer(index, max(work.values(), default=0.0), sum(work.values()) / max(len(work), 1))


def _num_fills(plan: Placement, have: Have, index: int) -> int | None:
    """How many slots of a layer are filled on the way to the plan; None if the way ends before."""
    placement = _only(plan, index)
    held = {rank: [*slots.experts[index]] for rank, slots in have.items()}
    num_fills = 0
    while True:
        found = {rank: HeldSlots(experts=(tuple(s),), generations=((0,) * len(s),)) for rank, s in held.items()}
        moves = next_moves(placement, found, held, held, given_up(placement, found, held), lambda rank, place: True)
        if not moves:
            break
        for move in moves:
            held[move.rank][move.fill.slot] = move.fill.expert
        num_fills += len(moves)
    arrived = all(set(seat.experts(0)) <= set(held.get(seat.rank, ())) for seat in placement.seats)
    return num_fills if arrived else None


def _only(placement: Placement, index: int) -> Placement:
    """One layer of it."""
    seats = tuple(
        SeatExperts(rank=seat.rank, active=(seat.active[index],), shadows=(seat.shadows[index],))
        for seat in placement.seats
    )
    return Placement(calls=(placement.calls[index],), seats=seats)


def _merged(before: Placement, plan: Placement, layers: Sequence[int]) -> Placement:
    """These layers as planned, all others as before."""
    seats = []
    for old in before.seats:
        new = plan.seat(old.rank)
        assert new is not None
        active = tuple(new.active[i] if i in layers else old.active[i] for i in range(len(old.active)))
        shadows = tuple(new.shadows[i] if i in layers else old.shadows[i] for i in range(len(old.shadows)))
        seats.append(SeatExperts(rank=old.rank, active=active, shadows=shadows))
    return msgspec.structs.replace(before, seats=tuple(seats))
