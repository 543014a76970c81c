"""A fleet in virtual time: every instance with its own machine, under the faults of its hosts.

Instances do not know of each other, so one is simulated after the other. A device, as far as planners and machine see
it, is a host: its loss is one event, and copies are on different ones.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from everserve.control.decide.effects import Publish
from everserve.control.decide.machine import Policy
from everserve.plan.placement import place_experts
from everserve.plan.repair import Room, replan
from everserve.simulate.account import Account, total
from everserve.simulate.faults import Fault, What, faults_of
from everserve.simulate.instance import Instance
from everserve.simulate.others import falling_to_half, restarting
from everserve.simulate.settings import Settings
from everserve.simulate.world import Times
from everserve.tables.goal import Capacity, Goal, SeatGoal
from everserve.tables.ids import NO_RANK, Rank, Role
from everserve.tables.members import WorkerState

_DAY_S = 86_400.0
_SETTLED_S = 2 * 3600.0  # after the last fault: everything has found its place
_MOST_FILLS = 64  # in one message: routes follow when all are done
_STALLED_S = 900.0  # longer without a place for some expert, though there is room, is an error


@dataclass
class Result:
    """What a fleet has given, by policy: "everserve", and what it is compared with."""

    settings: Settings
    accounts: dict[str, Account]
    num_faults: dict[What, int]
    num_decisions: int
    core_s: float
    findings: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {
            "settings": msgspec.to_builtins(self.settings),
            "faults": {what.value: number for what, number in self.num_faults.items()},
            "policies": {name: one.as_json(self.settings.num_streams) for name, one in self.accounts.items()},
            "decisions": self.num_decisions,
            "findings": self.findings,
        }


def simulate(settings: Settings, progress: Callable[[int], None] = lambda _: None) -> Result:
    """The whole fleet. `progress` is told how many instances are done."""
    began_s, fleet = time.process_time(), faults_of(settings)
    first, capacity = first_goal(settings)
    ours, findings, num_decisions = [], [], 0
    for number, faults in enumerate(fleet):
        one = _Simulated(settings, first, capacity)
        one.run(faults)
        ours.append(one.account)
        findings += [f"instance {number}: {finding}" for finding in one.findings]
        num_decisions += one.instance.num_decisions
        progress(number + 1)
    accounts = {
        "everserve": total(ours),
        "restart": total(restarting(settings, faults) for faults in fleet),
        "half": total(falling_to_half(settings, faults) for faults in fleet),
    }
    numbers = {what: sum(fault.what is what for faults in fleet for fault in faults) for what in What}
    return Result(settings, accounts, numbers, num_decisions, time.process_time() - began_s, findings)


def first_goal(settings: Settings) -> tuple[Goal, Capacity]:
    """Returns the goal of a start (control/hold/design.py): a second place for every expert, on another host."""
    homes = [_seat(settings, number, Role.ATTENTION, 0) for number in range(settings.num_pairs)]
    experts = [_seat(settings, number, Role.EXPERT, settings.num_pairs) for number in range(settings.num_pairs)]
    placement = place_experts(settings.experts, range(settings.layers), [seat.rank for seat in experts], None)
    rooms = [Room(seat.rank, seat.device, placement.num_slots) for seat in experts]
    goal = Goal(version=1, seats=(*homes, *experts), placement=replan(placement, rooms))
    return goal, Capacity(max_workers=settings.seats, devices=settings.num_hosts, slots_per_layer=placement.num_slots)


def _seat(settings: Settings, number: int, role: Role, first: int) -> SeatGoal:
    host = number // settings.gpus_per_host
    return SeatGoal(rank=Rank(first + number), roles=(role,), host=host, device=host)


class _Simulated:
    """One instance, and what it gives."""

    def __init__(self, settings: Settings, goal: Goal, capacity: Capacity) -> None:
        times = Times(
            start_s=settings.start_s, load_s=settings.load_s, device_notice_s=settings.detect_ms / 1e3, step_s=0.05
        )
        policy = Policy(detect_s=settings.detect_ms / 1e3, max_fills=_MOST_FILLS)
        self.instance = Instance(goal, capacity, policy, times, watch=self._see)
        self.account = Account()
        self.findings: list[str] = []
        self._settings = settings
        self._seen_s = 0.0  # all before is in the account
        self._capacity = self._imbalance = 1.0
        self._routed: tuple[bytes, int] = b"", 0
        self._fault_at_s = 0.0  # the last one
        self._stalled_at_s: float | None = None
        self._said: set[str] = set()

    def run(self, faults: Sequence[Fault]) -> None:
        instance = self.instance
        instance.start()
        while not instance.machine.was_all_ready:
            instance.run_until(instance.now + 60)
        begin_s = self._seen_s = instance.now
        self._fault_at_s, self._stalled_at_s, self.account = begin_s, None, Account()
        instance.num_loaded = instance.num_decisions = 0
        for fault in faults:
            instance.run_until(begin_s + fault.at_s)
            self._happens(fault)
        instance.run_until(begin_s + self._settings.days * _DAY_S)
        self._pass_time()
        self.account.weights_bytes = instance.num_loaded * self._settings.expert_mb * 1e6
        self._end()

    # -- what happens ----------------------------------------------------------------------------

    def _happens(self, fault: Fault) -> None:
        instance, goal = self.instance, self.instance.machine.goal
        match fault.what:
            case What.BACK if fault.which in goal.gone:
                instance.return_device(fault.which)
            case What.LOST if fault.which not in goal.gone:
                self._note_loss([seat.rank for seat in goal.seats if seat.device == fault.which], is_host=True)
                instance.lose_device(fault.which)
            case What.CRASH if not instance.workers[Rank(fault.which)].is_dead:
                self._note_loss([Rank(fault.which)], is_host=False)
                instance.kill([Rank(fault.which)])

    def _note_loss(self, ranks: Sequence[Rank], *, is_host: bool) -> None:
        """Streams of lost homes go on elsewhere; all others wait until the step goes on with other places."""
        self._fault_at_s, settings = self.instance.now, self._settings
        notice_s = settings.detect_ms / 1e3 if is_host else 0.002
        lost = [worker for rank in ranks if not (worker := self.instance.workers[rank]).is_dead]
        num_homes = sum(worker.is_home for worker in lost)
        num_moved = num_homes * settings.streams
        self.account.pause(notice_s + settings.restore_ms / 1e3, num_moved)
        self.account.kv_bytes += num_moved * settings.kv_mb * 1e6
        if len(lost) > num_homes:
            self.account.pause(notice_s, settings.num_streams - num_moved)

    # -- what follows ----------------------------------------------------------------------------

    def _see(self, tables: Publish) -> None:
        """Tables are published: capacity and work may be others from now on."""
        self._pass_time()
        self._capacity = self._share_that_serves(tables)
        if tables.routes is not None and (tables.routes.table, tables.routes.num_candidates) != self._routed:
            self._routed = tables.routes.table, tables.routes.num_candidates
            self._imbalance = _imbalance(tables.routes.array()[:, :, :1, 0].reshape(-1, self._settings.experts))
        if tables.violations:
            self._stall(tables)
        elif self._stalled_at_s is not None:
            stalled_s, self._stalled_at_s = self.instance.now - self._stalled_at_s, None
            self.account.pause(stalled_s, self._settings.num_streams)

    def _stall(self, tables: Publish) -> None:
        now = self.instance.now
        if self._stalled_at_s is None:
            self._stalled_at_s = self._fault_at_s
        num_ready = sum(w.state is WorkerState.READY and Role.EXPERT in w.roles for w in tables.members.workers)
        placement = self.instance.machine.goal.placement
        assert placement is not None, "there are expert workers"
        has_room = num_ready * placement.num_slots >= self._settings.experts
        if has_room and now - self._fault_at_s > _STALLED_S:
            self._find(f"after {now - self._fault_at_s:.0f} s, with room: {tables.violations[0]}")

    def _share_that_serves(self, tables: Publish) -> float:
        ready = [worker for worker in tables.members.workers if worker.state is WorkerState.READY]
        num_homes = sum(Role.ATTENTION in worker.roles for worker in ready)
        return 0.0 if tables.violations else min(num_homes, len(ready) - num_homes) / self._settings.num_pairs

    def _pass_time(self) -> None:
        passed_s, self._seen_s = self.instance.now - self._seen_s, self.instance.now
        is_even = self._stalled_at_s is None
        self.account.pass_time(passed_s, self._capacity, self._imbalance if is_even else None)

    def _end(self) -> None:
        """All hosts come back: the instance must be as it was at the beginning."""
        account, self.account = self.account, Account()  # this counts no more
        instance, machine = self.instance, self.instance.machine
        for device in machine.goal.gone:
            instance.return_device(device)
        instance.run_until(instance.now + _SETTLED_S)
        for sentence in (*machine.violations, *machine.degraded):
            self._find(f"at the end, with all hosts: {sentence}")
        if not machine.is_as_planned:
            self._find("at the end, with all hosts, workers do not hold what they should")
        self.account = account

    def _find(self, finding: str) -> None:
        if finding not in self._said:
            self._said.add(finding)
            self.findings.append(finding)


def _imbalance(owner_LE: "np.ndarray[Any, np.dtype[np.int16]]") -> float:
    """Returns, for all layers together, the most loaded worker's experts over the mean of those that have any."""
    num_ranks = int(owner_LE.max()) + 1
    if num_ranks < 1:
        return 1.0
    num_layers = len(owner_LE)
    key_LE = owner_LE.astype(np.int64) + np.arange(num_layers)[:, None] * num_ranks
    num_LR = np.bincount(key_LE[owner_LE != NO_RANK], minlength=num_layers * num_ranks).reshape(num_layers, num_ranks)
    num_workers = int((num_LR.sum(axis=0) > 0).sum())
    return float(num_LR.max(axis=1).sum() * num_workers / max(num_LR.sum(), 1))
