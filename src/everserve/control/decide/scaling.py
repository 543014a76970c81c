"""Scale while serving: the seats that an operator asks for, and when a worker that should retire may leave.

    more workers     new seats are provisioned; expert workers start with the experts that are planned for them, and
                     routes lead to them when they are ready
    fewer workers    seats retire. An attention worker is asked to leave when another one is ready for its streams; an
                     expert worker when other ready workers hold all its experts, because the placement is made without
                     it from now on

A new request replaces an unfinished one: a seat that should retire and is still filled may stay after all. The seat of
a worker that has retired stays in the goal, empty, so that its incarnations go on counting when its rank is used again.

Pure functions of goal, seats and capacity.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import msgspec

from everserve.control.decide.places import what_is_held, without
from everserve.control.decide.seats import Seat
from everserve.plan.moves import GivenUp
from everserve.tables.calls import ShardKind
from everserve.tables.goal import Capacity, Goal, SeatGoal, Wanted
from everserve.tables.health import Level
from everserve.tables.ids import NO_DEVICE, Rank, Role
from everserve.tables.members import WorkerState
from everserve.tables.slots import EMPTY
from everserve.wire.operators import ScaleRequest
from everserve.words import agree, count, size


class Refused(Exception):
    """The instance cannot have these workers. The text is for the operator."""


class Size(NamedTuple):
    """How many workers there should be, and on how many devices. Workers with both roles count as attention workers."""

    attention: int
    expert: int
    devices: int

    def __str__(self) -> str:
        return size(*self)


def staying(goal: Goal) -> list[SeatGoal]:
    """Seats that are filled, or will be. A device that is gone or left has none."""
    return _stay(goal.seats, goal.absent)


def _stay(seats: Iterable[SeatGoal], absent: Collection[int]) -> list[SeatGoal]:
    return [seat for seat in seats if seat.wanted is Wanted.STAY and seat.device not in absent]


def size_of(goal: Goal) -> Size:
    seats = staying(goal)
    num_attention = sum(_is_attention(seat) for seat in seats)
    return Size(num_attention, len(seats) - num_attention, len({seat.device for seat in seats}))


def scaled(goal: Goal, asked: ScaleRequest, capacity: Capacity, empty: Collection[Rank]) -> Goal:
    """The goal with the seats that were asked for. `empty`: ranks without a process. Raises Refused."""
    switching = [seat.rank for seat in goal.seats if seat.wanted is Wanted.SWITCH]
    if switching:
        raise Refused(f"rank {switching[0]} is changing its role: try again when it has")
    if goal.placement is not None and any(call.kind is ShardKind.HEAD for call in goal.placement.calls):
        raise Refused("with --tensor-parallel-size the number of workers is fixed: each home has its KV blocks")
    draft = _Draft(goal, capacity, empty)
    draft.retire(seat for seat in goal.seats if seat.device in goal.absent)
    if asked.devices is not None:
        draft.set_devices(asked.devices)
    if asked.attention is not None:
        draft.set_number(Role.ATTENTION, asked.attention)
    if asked.expert is not None:
        draft.set_number(Role.EXPERT, asked.expert)
    return draft.goal()


def grown(goal: Goal, capacity: Capacity) -> Goal:
    """The largest goal that fits, with attention and expert workers in the proportion of this one: what devices must
    have memory for."""
    draft, size = _Draft(goal, capacity, empty=()), size_of(goal)
    for _ in range(capacity.max_workers - len(staying(goal))):
        is_attention = draft.count(Role.ATTENTION) * size.expert <= draft.count(Role.EXPERT) * size.attention
        draft.add(draft.like(Role.ATTENTION if is_attention else Role.EXPERT))
    return draft.goal()


class _Draft:
    """The seats while they are changed."""

    def __init__(self, goal: Goal, capacity: Capacity, empty: Collection[Rank]) -> None:
        self._goal = goal
        self._capacity = capacity
        self._empty = empty
        self._seats = {seat.rank: seat for seat in goal.seats}

    def goal(self) -> Goal:
        """Raises Refused if these seats cannot serve the model."""
        self._check()
        placement = self._goal.placement
        if placement is not None:  # a rank may have got another role
            placed = tuple(seat for seat in placement.seats if not _is_attention(self._seats[seat.rank]))
            placement = msgspec.structs.replace(placement, seats=placed)
        # The operator knows which devices there are: a worker that stands in for another one stays what it is now.
        seats = tuple(msgspec.structs.replace(seat, stands_in=False) for seat in self._in_order())
        return msgspec.structs.replace(self._goal, seats=seats, placement=placement)

    def count(self, role: Role) -> int:
        return len(self._of(role))

    def like(self, role: Role) -> SeatGoal:
        """A seat of this role, as a pattern for more."""
        return next(seat for seat in self._goal.seats if _is_attention(seat) == (role is Role.ATTENTION))

    # -- changes ---------------------------------------------------------------------------------

    def retire(self, seats: Iterable[SeatGoal]) -> None:
        for seat in seats:
            self._seats[seat.rank] = msgspec.structs.replace(seat, wanted=Wanted.RETIRE)

    def set_number(self, role: Role, number: int) -> None:
        """The highest ranks retire first."""
        if role is Role.EXPERT and self._goal.placement is None:
            if number:
                raise Refused("this instance has no expert workers: every attention worker has all experts itself")
            return
        there = self._of(role)
        self.retire(there[max(number, 0) :])
        for _ in range(number - len(there)):
            self.add(self.like(role))

    def set_devices(self, number: int) -> None:
        """Whole devices come and go, the highest numbers first. A new one gets the workers that the lowest one has."""
        there = sorted({seat.device for seat in self._staying()})
        if not there or self._is_each_alone:
            raise Refused(
                "every worker of this instance is a device of its own: say how many attention and expert workers, or"
                " start it with --devices"
            )
        if number < 1:
            raise Refused(f"{count(number, 'device')}: at least one is needed")
        self.retire(seat for seat in self._staying() if seat.device in there[number:])
        pattern = [seat for seat in self._staying() if seat.device == there[0]]
        for device in self._new_devices(there, number - len(there)):
            for seat in pattern:
                self.add(seat, device)

    def add(self, like: SeatGoal, device: int | None = None) -> None:
        """One more seat of this kind, with its process if it was about to retire; else in the lowest free rank."""
        for seat in self._retiring():
            if seat.roles == like.roles and seat.device not in self._goal.absent and device in (None, seat.device):
                self._seats[seat.rank] = msgspec.structs.replace(seat, wanted=Wanted.STAY)
                return
        self._check_number(len(self._staying()) + 1)
        free = [rank for rank in map(Rank, range(self._capacity.max_workers)) if self._is_free(rank)]
        if not free:
            raise Refused(
                f"all {self._capacity.max_workers} ranks of --max-workers are taken until the workers that retire have"
                " left: try again then"
            )
        chosen = device if device is not None else self._device_for(like)
        gpu = chosen % self._capacity.num_gpus if self._capacity.num_gpus else NO_DEVICE
        new = msgspec.structs.replace(like, rank=free[0], device=chosen, gpu=gpu, wanted=Wanted.STAY, switch_s=None)
        self._seats[new.rank] = new

    # -- inside ----------------------------------------------------------------------------------

    def _in_order(self) -> list[SeatGoal]:
        return [self._seats[rank] for rank in sorted(self._seats)]

    def _staying(self) -> list[SeatGoal]:
        return _stay(self._in_order(), self._goal.absent)

    def _of(self, role: Role) -> list[SeatGoal]:
        return [seat for seat in self._staying() if _is_attention(seat) == (role is Role.ATTENTION)]

    def _retiring(self) -> list[SeatGoal]:
        """Those that still have a process."""
        return [seat for seat in self._in_order() if seat.wanted is Wanted.RETIRE and seat.rank not in self._empty]

    def _is_free(self, rank: Rank) -> bool:
        seat = self._seats.get(rank)
        return seat is None or (seat.wanted is Wanted.RETIRE and rank in self._empty)

    @property
    def _is_each_alone(self) -> bool:
        """Whether every worker is a device of its own."""
        return self._capacity.devices is None and not self._capacity.num_gpus

    def _device_for(self, like: SeatGoal) -> int:
        """A device that need not be left; of those, the one with the fewest workers of this kind, then of any."""
        seats = self._staying()
        if self._is_each_alone:
            return self._new_devices({seat.device for seat in [*seats, *self._retiring()]}, 1)[0]
        alike = Counter(seat.device for seat in seats if seat.roles == like.roles)
        all_of = Counter(seat.device for seat in seats)
        gpus = range(self._capacity.num_gpus if self._capacity.devices is None else 0)
        devices: set[int] = {*all_of, *gpus}.difference(self._goal.absent)
        if not devices:
            raise Refused("all devices are gone or left: `everserve return` one of them")
        is_ill = {device: self._goal.level(device) > Level.NOTE for device in devices}
        return min(devices, key=lambda device: (is_ill[device], alike[device], all_of[device], device))

    def _new_devices(self, there: Collection[int], number: int) -> list[int]:
        """The lowest numbers that are not in use. Where a device is a GPU there are no more than those; otherwise it is
        a share of one, or a set of workers."""
        taken = {*there, *self._goal.absent}
        is_gpu = self._capacity.num_gpus and self._capacity.devices is None
        num_devices = self._capacity.num_gpus if is_gpu else len(taken) + max(number, 0)
        free = [device for device in range(num_devices) if device not in taken]
        if number > len(free):
            away = self._goal.absent
            gone = f", of which {len(away)} {agree('are', len(away))} gone or left" if away else ""
            raise Refused(f"{count(len(there) + number, 'device')}: this machine has {num_devices}{gone}")
        return free[: max(number, 0)]

    def _check_number(self, num_workers: int) -> None:
        if num_workers > self._capacity.max_workers:
            raise Refused(
                f"this instance has room for {count(self._capacity.max_workers, 'worker')}: restart it with a larger"
                " --max-workers"
            )

    def _check(self) -> None:
        if not self.count(Role.ATTENTION):
            raise Refused("at least one attention worker is needed")
        placement, num_expert = self._goal.placement, self.count(Role.EXPERT)
        if placement is None:
            return
        for call, num_slots in zip(placement.calls, self._capacity.slots(len(placement.calls)), strict=True):
            if call.kind is ShardKind.EXPERT and num_expert > call.num_shards:
                raise Refused(
                    f"{count(num_expert, 'expert worker')}: the model has {call.num_shards} {call.kind}s per layer, so"
                    f" at most {call.num_shards}"
                )
            if num_expert * num_slots < call.num_shards:
                fewest = -(-call.num_shards // num_slots)
                raise Refused(
                    f"{count(num_expert, 'expert worker')} with {count(num_slots, 'slot')} per layer cannot hold the"
                    f" model's {call.num_shards} {call.kind}s: at least {fewest}, or a restart with more"
                    " --shadow-experts"
                )


def _is_attention(seat: SeatGoal) -> bool:
    return Role.ATTENTION in seat.roles


# -- workers that leave for good, or for as long as their device is not healthy ------------------


def may_leave(goal: Goal, seats: Collection[Seat], given_up: GivenUp) -> list[Seat]:
    """Ready workers that should leave, are not needed any more, and were not asked to leave yet."""
    if goal.are_all_staying:
        return []
    ready = [seat for seat in seats if seat.is_ready]
    asked = [seat for seat in ready if not _stays(goal, seat) and not seat.is_asked_to_leave]
    if not asked:
        return []
    others = [seat for seat in ready if _stays(goal, seat) and not seat.is_asked_to_leave]
    has_attention = any(_is_attention(seat.goal) for seat in others)
    found = [seat for seat in asked if _is_attention(seat.goal) and has_attention]
    if goal.placement is not None:
        are_filled = _are_filled(goal, others)
        held = without(what_is_held(others), given_up).values()
        num_layers = len(goal.placement.moe_layers)
        elsewhere = [{expert for one in held for expert in one.own(layer)} for layer in range(num_layers)]
        experts = [seat for seat in asked if not _is_attention(seat.goal) and _is_held(seat, elsewhere)]
        found += [seat for seat in experts if are_filled or goal.is_given_up(seat.goal.device)]
    return found


def _stays(goal: Goal, seat: Seat) -> bool:
    return seat.goal.wanted is Wanted.STAY and seat.goal.device not in goal.absent


def _are_filled(goal: Goal, seats: Iterable[Seat]) -> bool:
    """Whether these workers hold what they should, so that redundancy does not suffer. A fill that has failed is not
    waited for."""
    assert goal.placement is not None
    for seat in seats:
        planned = goal.placement.seat(seat.rank)
        if planned is None or seat.held is None or seat.process.changes.again_at is not None:
            continue
        num_layers = len(seat.held.experts)
        if seat.filling or any(set(planned.experts(i)) - set(seat.held.own(i)) for i in range(num_layers)):
            return False
    return True


def _is_held(seat: Seat, elsewhere: Sequence[set[int]]) -> bool:
    if seat.held is None:
        return True
    return all(set(slots) - {EMPTY} <= found for slots, found in zip(seat.held.experts, elsewhere, strict=True))


def is_done(goal: Goal, seats: Iterable[Seat]) -> bool:
    """Whether there are exactly the workers that there should be, all ready."""
    for seat in seats:
        if seat.goal.wanted is Wanted.RETIRE:
            if seat.state is not WorkerState.GONE:
                return False
        elif not seat.is_ready and seat.goal.device not in goal.absent:
            return False
    return True
