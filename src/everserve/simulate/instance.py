"""One instance in virtual time: the production machine, and a world that answers its effects.

    agenda (what happens when)  ->  machine.handle(input, now)  ->  effects  ->  agenda

As in the orchestrator's process (control/run), one input is decided after the other, what happens to a whole device is
decided together, and a tick comes when the machine's deadline has passed.
"""

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from everserve.control.decide import effects
from everserve.control.decide.effects import AnyEffect, Decision, Publish
from everserve.control.decide.inputs import Alive, AnyInput, Died, Exited, Said, Started, Tick
from everserve.control.decide.machine import Machine, Policy
from everserve.control.hold.worker_ends import change_of
from everserve.simulate.meter import Meter
from everserve.simulate.world import Times, Worker, num_missing
from everserve.tables.goal import Capacity, Goal
from everserve.tables.ids import Epoch, Rank, WorkerId
from everserve.tables.slots import EMPTY, Fill, HeldSlots
from everserve.wire.messages import (
    AnyMessage,
    Ask,
    ClearSlots,
    ClusterChanged,
    FillSlots,
    Hello,
    KeepGoal,
    Leave,
    Leaving,
    Ready,
    RoutesUsed,
    SlotsReported,
    WorkerLost,
)
from everserve.wire.operators import FaultRequest, ReturnRequest

Happening = Callable[[], None]


class Instance:
    """The machine of one instance and its workers. Time passes in `run_until` only.

    Without a meter nothing is measured, and what homes say of the same routes at the same time is decided together: the
    result is the same. `watch` sees all tables that are published."""

    def __init__(
        self,
        goal: Goal,
        capacity: Capacity,
        policy: Policy,
        times: Times | None = None,
        meter: Meter | None = None,
        watch: Callable[[Publish], None] | None = None,
    ) -> None:
        self.machine = Machine(goal, policy, capacity)
        self.now = 0.0
        self.workers: dict[Rank, Worker] = {}  # the latest of each rank
        self._capacity = capacity
        self._times = times or Times()
        self.meter = meter
        self._watch = watch
        self._agenda: list[tuple[float, int, Happening]] = []
        self._number = itertools.count()
        self._memory: dict[Rank, HeldSlots] = {}  # of expert seats: it outlives their workers
        self.num_loaded = 0  # experts that workers have loaded, when they started or were told to
        self.num_decisions = 0

    # -- time ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Every seat is provisioned."""
        self._decide("Start", lambda: self.machine.start(self.now))

    def run_until(self, end_s: float) -> None:
        """Everything that happens and is due until then."""
        while (at := self._next()) is not None and at <= end_s:
            self.now = max(self.now, at)
            if self._agenda and self._agenda[0][0] <= self.now:
                heapq.heappop(self._agenda)[2]()
            else:
                self.tell(Tick())
        self.now = max(self.now, end_s)

    def _next(self) -> float | None:
        """When something happens, or is due."""
        deadline = self.machine.next_deadline()
        times = [self._agenda[0][0]] if self._agenda else []
        return min(times if deadline is None else [*times, deadline], default=None)

    def after(self, delay_s: float, happening: Happening) -> None:
        heapq.heappush(self._agenda, (self.now + delay_s, next(self._number), happening))

    # -- what happens to workers -----------------------------------------------------------------

    def kill(self, ranks: Iterable[Rank]) -> None:
        """These processes die together."""
        alive = [self.workers[rank] for rank in ranks if not self.workers[rank].is_dead]
        for worker in alive:
            worker.is_dead = True
        self.after(self._times.notice_s, lambda: self._tell_all([Died(*worker.id) for worker in alive]))

    def lose_device(self, device: int) -> None:
        """It is gone, with its workers and all that is in its memory; the machine is told after `device_notice_s`."""
        for worker in self._on(device):
            worker.is_dead = True
        request = FaultRequest(device=device, gone=True)
        self.after(self._times.device_notice_s, lambda: self.tell(Ask(id="", request=request)))

    def return_device(self, device: int) -> None:
        """It is there again, with empty memory."""
        self.tell(Ask(id="", request=ReturnRequest(device=device)))

    def _on(self, device: int) -> list[Worker]:
        ranks = [seat.rank for seat in self.machine.goal.seats if seat.device == device]
        return [self.workers[rank] for rank in ranks if rank in self.workers]

    def _tell_all(self, inputs: list[AnyInput]) -> None:
        for given in inputs:
            self.tell(given, is_last=given is inputs[-1])

    def tell(self, given: AnyInput, is_last: bool = True) -> None:
        """One input of the machine, at this time."""
        what = type(given.message if isinstance(given, Said) else given).__name__
        self._decide(what, lambda: self.machine.handle(given, self.now, is_last))

    def _decide(self, what: str, decide: Callable[[], Decision]) -> None:
        self.num_decisions += 1
        if self.meter is None:
            decision = decide()
        else:
            with self.meter.decision(what):
                decision = decide()
                self.machine.next_deadline()  # the loop asks twice in each turn
        for effect in decision.effects:
            self._do(effect)

    # -- effects ---------------------------------------------------------------------------------

    def _do(self, effect: AnyEffect) -> None:
        match effect:
            case effects.Provision():
                self._provision(WorkerId(effect.rank, effect.incarnation))
            case effects.Publish():
                self._publish(effect)
            case effects.Tell(message=FillSlots(fills=fills)):
                self._note_told(effect.message)
                self._fill(self.workers[effect.rank], fills)
            case effects.Tell(message=ClearSlots(places=places)):
                self._note_told(effect.message)
                self._change_now(self.workers[effect.rank], [Fill(*place, EMPTY) for place in places])
            case effects.Tell(message=Leave()):
                self._leave(self.workers[effect.rank])
            case effects.Kill():
                self._end(WorkerId(effect.rank, effect.incarnation))
            case effects.Probe():
                self._answer_probe(self.workers[effect.rank])
            case effects.DropDevice():
                self._drop_device(effect.device)
            case effects.Lost():
                lost = WorkerLost(
                    rank=effect.rank, incarnation=effect.incarnation, roles=effect.roles, cause=effect.cause
                )
                self._note_told(lost)
            case KeepGoal():
                self._note_told(effect)

    def _note_told(self, message: AnyMessage, num_receivers: int = 1) -> None:
        if self.meter is not None:
            self.meter.told(message, num_receivers)

    def _publish(self, tables: Publish) -> None:
        """Homes are told the routes, and say when they use them; the gateway is told the members."""
        routes = tables.routes
        if self._watch is not None:
            self._watch(tables)
        told = ClusterChanged(
            members=tables.members, conditions=tables.conditions, degraded=tables.degraded, gone=tables.gone,
            num_experts_without_place=0, expert_stats={}, num_stale=0, health=tables.health,
        )  # fmt: skip
        self._note_told(told)
        homes = [worker for worker in self.workers.values() if worker.is_home and worker.has_said_hello]
        homes = [worker for worker in homes if not worker.is_dead]
        if routes is None or not homes:
            return
        known = {id(worker.routes): worker.routes for worker in homes}
        for number, before in known.items():
            num_homes = sum(id(worker.routes) == number for worker in homes)
            if self.meter is not None:
                self.meter.told(change_of(before, routes), num_homes)
        for worker in homes:
            worker.routes, worker.told_epoch = routes, routes.epoch
            if self.meter is not None:
                self.after(self._times.step_s, partial(self._use, [worker], routes.epoch))
        if self.meter is None:
            self.after(self._times.step_s, partial(self._use, homes, routes.epoch))

    # -- what workers do -------------------------------------------------------------------------

    def _provision(self, worker_id: WorkerId) -> None:
        seat = self.machine.goal.seat(worker_id.rank)
        assert seat is not None, "only seats are filled"
        worker = self.workers[worker_id.rank] = Worker(worker_id, seat.roles)
        self.after(self._times.fork_s, lambda: self._exist(worker))

    def _exist(self, worker: Worker) -> None:
        self._say(worker, Started(*worker.id, pid=1 + worker.id.rank))
        self.after(self._times.start_s, lambda: self._load(worker))

    def _load(self, worker: Worker) -> None:
        """It finds what is in the memory of its seat, and loads what is missing of its plan."""
        self._say(worker, Said(*worker.id, Hello()))
        worker.has_said_hello = not worker.is_dead
        delay_s = 0.0
        if not worker.is_home and not worker.is_dead:
            worker.held = self._planned(worker.id.rank)
            num_loaded = num_missing(worker.held, self._memory.get(worker.id.rank))
            self.num_loaded += num_loaded
            delay_s = self._times.load_s * num_loaded
        self.after(delay_s, lambda: self._be_ready(worker))

    def _planned(self, rank: Rank) -> HeldSlots:
        placement = self.machine.goal.placement
        assert placement is not None, "there are expert workers"
        num_slots = self._capacity.slots(len(placement.calls))
        planned = placement.seat(rank)
        experts = planned.slots(num_slots).experts if planned is not None else tuple((EMPTY,) * n for n in num_slots)
        return HeldSlots(experts=experts, generations=tuple((1,) * len(slots) for slots in experts))

    def _be_ready(self, worker: Worker) -> None:
        if worker.is_dead:
            return
        if worker.held is not None:
            self._memory[worker.id.rank] = worker.held
            self._say(worker, Said(*worker.id, SlotsReported(slots=worker.held)))
        worker.is_ready = True
        self._say(worker, Said(*worker.id, Ready()))

    def _use(self, homes: Sequence[Worker], epoch: Epoch) -> None:
        """Routes of an earlier epoch than the latest are not worth a word."""
        use = [worker for worker in homes if worker.told_epoch == epoch and not worker.is_dead]
        self._tell_all([Said(*worker.id, RoutesUsed(epoch=epoch)) for worker in use])

    def _fill(self, worker: Worker, fills: Sequence[Fill]) -> None:
        self.num_loaded += len(fills)
        self.after(self._times.load_s * len(fills), lambda: self._change_now(worker, fills))

    def _change_now(self, worker: Worker, fills: Sequence[Fill]) -> None:
        if not worker.is_dead:
            self._memory[worker.id.rank] = held = worker.change(fills)
            self._say(worker, Said(*worker.id, SlotsReported(slots=held, num_done=worker.num_done)))

    def _leave(self, worker: Worker) -> None:
        self.after(self._times.step_s, lambda: self._say(worker, Said(*worker.id, Leaving())))
        self.after(self._times.leave_s, lambda: self._end(worker.id, status=0))

    def _end(self, worker_id: WorkerId, status: int = -9) -> None:
        """Its process ends, or has ended: the supervisor says so."""
        worker = self.workers[worker_id.rank]
        if worker.id == worker_id:
            worker.is_dead = True
        self.after(self._times.notice_s, lambda: self.tell(Exited(*worker_id, exit_status=status)))

    def _answer_probe(self, worker: Worker) -> None:
        found = Died(*worker.id) if worker.is_dead else Alive(*worker.id)
        self.after(0.0, lambda: self.tell(found))

    def _drop_device(self, device: int) -> None:
        for seat in self.machine.goal.seats:
            if seat.device == device:
                self._memory.pop(seat.rank, None)

    def _say(self, worker: Worker, given: AnyInput) -> None:
        if not worker.is_dead:
            self.tell(given)
