"""What becomes of streams when any one or two workers or devices are lost: as placement, slots and KV log are now.

                    one more place for    memory that survivors    room for every shard     none of these
                    every shard           reach, and slots
    processes die   at once               when survivors have      when survivors, or the   when the successor has
                                          mapped it                successor, have loaded   started
                                                                   it
    devices lost    at once                                        when survivors have      when a device returns
                                                                   loaded it

Where heads are divided their KV outlives processes. With a device it is lost, and there is what its shadow gives: all
of it (mirror), that of one device (parity), or nothing. Heads without a second place wait for the successor, which
finds their KV.
"""

from itertools import combinations

import numpy as np

from everserve.config.kvlog import LogConfig
from everserve.plan.placement import survivable_losses
from everserve.tables.calls import ShardKind
from everserve.tables.goal import Capacity, Goal, SeatGoal, Wanted
from everserve.tables.ids import Role
from everserve.tables.placement import Placement
from everserve.tables.survival import Kv, Survival, Weights
from everserve.words import any_of

_NUMBERS = (1, 2)  # of losses at once


def survivals(goal: Goal, capacity: Capacity, log: LogConfig) -> tuple[Survival, ...]:
    """What the instance survives, with the workers that there should be now. `log`: where KV outlives its worker, and
    its device.
    """
    seats = [s for s in goal.seats if s.wanted is not Wanted.RETIRE and s.device not in goal.absent]
    domains = {"process": len(seats), "device": len({seat.device for seat in seats})}
    found = []
    for name, num_there in domains.items():
        is_device = name == "device"
        for num in (num for num in _NUMBERS if num <= num_there):
            weights = _weights(goal, seats, capacity, num, is_device=is_device)
            found.append(
                Survival(
                    failure=any_of(num, name),
                    weights=weights,
                    kv=_kv(_has_heads(goal.placement), log, num, is_device=is_device),
                )
            )
    return tuple(found)


def _kv(has_heads: bool, log: LogConfig, num: int, *, is_device: bool) -> Kv:
    if log.mode == "off":
        return Kv.COMPUTED
    if not is_device or (log.kv_shadow if has_heads else log.mode) == "mirror":
        return Kv.KEPT
    return Kv.REBUILT if has_heads and log.kv_shadow == "parity" and num == 1 else Kv.COMPUTED


def _has_heads(placement: Placement | None) -> bool:
    return placement is not None and any(call.kind is ShardKind.HEAD for call in placement.calls)


def repairable_devices(goal: Goal, placement: Placement, capacity: Capacity) -> int:
    """How many devices may be lost at once so that the slots of the others have room for every shard."""
    devices = _devices(goal, placement)
    slots = zip(placement.calls, capacity.slots(len(placement.calls)), strict=True)
    per_device = ((call, num * len(placement.seats) // len(devices)) for call, num in slots)
    fewest = max(-(-call.num_shards // num) for call, num in per_device)
    if capacity.head_pieces:
        num_heads = sum(call.num_shards for call in placement.calls if call.kind is ShardKind.HEAD)
        fewest = max(fewest, -(-num_heads // (capacity.head_pieces * len(placement.seats) // len(devices))))
    return len(devices) - fewest


def _weights(goal: Goal, seats: list[SeatGoal], capacity: Capacity, num: int, *, is_device: bool) -> Weights:
    homes = [seat for seat in seats if Role.ATTENTION in seat.roles]
    num_left = len({seat.device for seat in homes} if is_device else homes) - num
    if num_left < 1:
        return Weights.RETURN if is_device else Weights.SUCCESSOR
    if goal.placement is None:
        return Weights.AT_ONCE
    there = tuple(seat for seat in goal.placement.seats if any(s.rank == seat.rank for s in seats))
    if not there:
        return Weights.RETURN
    placement = Placement(calls=goal.placement.calls, seats=there)
    device_of = {seat.rank: seat.device if is_device else seat.rank for seat in seats}
    if survivable_losses(placement, device_of) >= num:
        return Weights.AT_ONCE
    if _has_heads(placement) and not is_device and (capacity.heads_stay or not capacity.num_gpus):
        return Weights.SUCCESSOR  # on CPUs it is there before anything else could be
    if not is_device and _can_map(placement, seats, capacity.mapped_slots, num):
        return Weights.MAPPED
    if repairable_devices(goal, placement, capacity) >= num:
        return Weights.LOADED
    return Weights.RETURN if is_device else Weights.SUCCESSOR


def _can_map(placement: Placement, seats: list[SeatGoal], mapped_slots: int, num: int) -> bool:
    """Whether all experts without a place, whichever so many workers die, are in memory that others reach which have
    slots for them (plan/mapping.py)."""
    num_seats = len(placement.seats)
    if not mapped_slots or num >= num_seats:
        return False
    where = {seat.rank: (seat.host, seat.gpu) for seat in seats}
    reached = [where[seat.rank] for seat in placement.seats]
    held_RLE = np.zeros((num_seats, len(placement.calls), placement.num_experts), bool)
    for row, seat in enumerate(placement.seats):
        for index in range(len(placement.calls)):
            held_RLE[row, index, list(seat.experts(index))] = True
    places_LE = held_RLE.sum(axis=0)
    for dead in combinations(range(num_seats), num):
        lost_LE = (places_LE > 0) & (held_RLE[list(dead)].sum(axis=0) == places_LE)
        for memory in {reached[row] for row in dead}:
            num_left = sum(reached[row] == memory for row in range(num_seats) if row not in dead)
            there_LE = lost_LE & held_RLE[[row for row in dead if reached[row] == memory]].any(axis=0)
            if there_LE.sum(axis=1).max() > num_left * mapped_slots:
                return False
    return True


def _devices(goal: Goal, placement: Placement) -> set[int]:
    device_of = {seat.rank: seat.device for seat in goal.seats}
    return {device_of[seat.rank] for seat in placement.seats}
