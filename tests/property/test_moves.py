"""Experts that move, in any order of events: workers die, devices are lost and return, fills fail, attention workers
are slow to use new routes, the orchestrator is replaced. No slot is filled while a route that some attention worker may
follow leads to it, and when the faults end everything is where it should be."""

import itertools
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everserve.control.decide.effects import (
    Decision,
    Kill,
    Lost,
    Provision,
    Publish,
    Tell,
    ToWorker,
)
from everserve.control.decide.inputs import (
    AnyInput,
    Exited,
    Said,
    Started,
    Tick,
)
from everserve.control.decide.machine import Found, Machine, Policy
from everserve.plan.balance import BalancePolicy
from everserve.plan.placement import place_experts
from everserve.tables.goal import Capacity, Goal, SeatGoal
from everserve.tables.ids import Epoch, Incarnation, Rank, Role, WorkerId
from everserve.tables.routes import Routes
from everserve.tables.slots import EMPTY, FailedFill, Fill, HeldSlots, Place
from everserve.wire.messages import (
    ClearSlots,
    FillSlots,
    Hello,
    KeepGoal,
    Ready,
    Report,
    RoutesUsed,
    SlotsReported,
    StopChanges,
)
from everserve.wire.operators import FaultRequest, ReturnRequest
from tests.support.decisions import ask
from tests.support.examples import examples

POLICY = Policy(detect_s=0.05, max_fills=2)
NUM_EXPERTS, LAYERS = 6, (0, 1)


@dataclass
class Process:
    """A worker. What it says is on its way until it is delivered."""

    id: WorkerId
    roles: tuple[Role, ...] = ()
    says: deque[AnyInput] = field(default_factory=deque)
    is_ready: bool = False
    is_leaving: bool = False
    # an expert worker
    experts: list[list[int]] = field(default_factory=list)
    num_mapped: int = 0
    todo: deque[deque[Fill | Place]] = field(default_factory=deque)
    num_done: int = 0
    failed: list[FailedFill] = field(default_factory=list)
    # an attention worker
    hears: deque[Routes] = field(default_factory=deque)
    uses: Routes | None = None

    @property
    def held(self) -> HeldSlots:
        experts = tuple(map(tuple, self.experts))
        generations = tuple((0,) * len(slots) for slots in experts)
        return HeldSlots(experts=experts, generations=generations, num_mapped=self.num_mapped)


class World:
    """N devices, each with an attention and an expert worker."""

    balance: BalancePolicy | None = None
    num_mapped = 0

    def __init__(self, num_devices: int, num_slots: int) -> None:
        self.num_devices, self.num_slots = num_devices, num_slots
        experts = [Rank(num_devices + i) for i in range(num_devices)]
        placement = place_experts(NUM_EXPERTS, LAYERS, experts, num_slots - -(-NUM_EXPERTS // num_devices))
        seats = [SeatGoal(rank=Rank(i), roles=(Role.ATTENTION,), device=i) for i in range(num_devices)]
        seats += [SeatGoal(rank=rank, roles=(Role.EXPERT,), device=i) for i, rank in enumerate(experts)]
        self.kept = Goal(version=1, seats=tuple(seats), placement=placement)
        self.now = 0.0
        self.processes: dict[WorkerId, Process] = {}
        self.latest: dict[Rank, Incarnation] = {}  # as the supervisor knows them
        self.exits: deque[AnyInput] = deque()
        self.new_machine()
        self.apply(self.machine.start(self.now))
        self.settle()
        assert self.machine.was_all_ready and self.machine.violations == ()

    def new_machine(self) -> None:
        capacity = Capacity(max_workers=64, slots_per_layer=self.num_slots, mapped_slots=self.num_mapped)
        self.machine = Machine(self.kept, POLICY, capacity, self.balance)

    def is_expert(self, rank: Rank) -> bool:
        seat = self.machine.goal.seat(rank)
        return seat is not None and Role.ATTENTION not in seat.roles

    # -- between the machine and the processes ---------------------------------------------------

    def tell(self, event: AnyInput) -> None:
        self.apply(self.machine.handle(event, self.now))

    def apply(self, decision: Decision) -> None:
        is_published = False
        for effect in decision.effects:
            if isinstance(effect, KeepGoal):
                self.kept = effect.goal
            elif isinstance(effect, Publish):
                is_published = True
                self.publish(effect)
            elif isinstance(effect, Tell):
                process = self.processes.get(WorkerId(effect.rank, effect.incarnation))
                if process is not None:  # else the machine has not heard of its end
                    self.hear(process, effect.message)
            elif isinstance(effect, Provision):
                self.start(WorkerId(effect.rank, effect.incarnation))
            elif isinstance(effect, Lost):
                assert not is_published, "peers hear of a loss before the routes that follow from it"
            elif isinstance(effect, Kill):
                self.die(WorkerId(effect.rank, effect.incarnation))
        routes = self.machine.routes
        assert routes is not None
        for sentence in self.machine.violations:
            assert "no place" in sentence or "no attention worker" in sentence, sentence

    def hear(self, process: Process, message: ToWorker) -> None:
        match message:
            case FillSlots():
                self.order(process, message.fills)
            case ClearSlots():
                self.order(process, message.places)
            case StopChanges():
                self.stop(process)

    def order(self, process: Process, changes: Sequence[Fill | Place]) -> None:
        pending = {(change.call_index, change.slot) for order in process.todo for change in order}
        assert pending.isdisjoint((change.call_index, change.slot) for change in changes), "it was told already"
        process.todo.append(deque(changes))

    def stop(self, process: Process) -> None:
        process.num_done += sum(map(len, process.todo))
        process.todo.clear()
        self.say_held(process)

    def publish(self, tables: Publish) -> None:
        assert tables.routes is not None
        for process in self.processes.values():
            if not self.is_expert(process.id.rank):
                process.hears.append(tables.routes)

    def start(self, id: WorkerId) -> None:
        assert id.incarnation > self.latest.get(id.rank, 0), "an incarnation is never used again"
        self.latest[id.rank] = id.incarnation
        process = self.processes[id] = Process(id, self.machine.goal.seat(id.rank).roles)
        process.says.extend([Started(*id, 1000), Said(*id, Hello())])
        planned = self.machine.goal.placement.seat(id.rank)
        if self.is_expert(id.rank):
            slots = planned.slots(self.num_slots).experts if planned is not None else [[EMPTY] * self.num_slots] * 2
            process.experts = [[*row] for row in slots]
            process.says.append(Said(*id, SlotsReported(slots=process.held)))
        process.says.append(Said(*id, Ready()))

    def die(self, id: WorkerId) -> None:
        """The supervisor says so; a dead process says nothing."""
        if (process := self.processes.pop(id, None)) is not None:
            self.exits.append(Exited(*process.id, -9))

    # -- what may happen -------------------------------------------------------------------------

    def pick(self, n: int) -> Process | None:
        return list(self.processes.values())[n % len(self.processes)] if self.processes else None

    def deliver(self, n: int) -> None:
        process = self.pick(n)
        if process is not None and process.says:
            event = process.says.popleft()
            process.is_ready |= isinstance(event, Said) and isinstance(event.message, Ready)
            self.tell(event)

    def reap(self, n: int) -> None:
        if self.exits:
            self.tell(self.exits.popleft())

    def use_routes(self, n: int) -> None:
        """An attention worker between two steps."""
        process = self.pick(n)
        if process is None or not process.hears or not process.is_ready:
            return
        num_read = len(process.hears) if process.uses is None else 1 + n % len(process.hears)  # at first, all there is
        for _ in range(num_read):
            process.uses = process.hears.popleft()
        assert process.uses is not None
        process.says.append(Said(*process.id, RoutesUsed(epoch=process.uses.epoch)))

    def fill_one(self, n: int, may_fail: bool = True) -> None:
        process = self.pick(n)
        if process is None or not process.todo:
            return
        fills = process.todo[0]
        if not self.may_change(process, fills[0]):
            return
        change = fills.popleft()
        process.num_done += 1
        self.check_unused(process, change.call_index, change.slot)
        self.put(process, Place(change.call_index, change.slot), EMPTY)
        if isinstance(change, Fill) and not self.load(process, change, has_failed=may_fail and n % 7 == 3):
            process.failed.append(FailedFill(**change._asdict(), reason="a bad sector"))
        if not fills or n % 2:
            self.say_held(process)
        if not fills:
            process.todo.popleft()

    def say_held(self, process: Process) -> None:
        process.says.append(
            Said(
                *process.id, SlotsReported(slots=process.held, failed=tuple(process.failed), num_done=process.num_done)
            )
        )
        process.failed.clear()

    def load(self, process: Process, fill: Fill, has_failed: bool) -> bool:
        return not has_failed and self.put(process, Place(fill.call_index, fill.slot), fill.expert)

    def may_change(self, process: Process, change: Fill | Place) -> bool:
        return True

    def put(self, process: Process, at: Place, expert: int) -> bool:
        """False: there is no source."""
        process.experts[at.call_index][at.slot] = expert
        return True

    def check_unused(self, process: Process, layer: int, slot: int) -> None:
        expert = process.experts[layer][slot]
        if expert == EMPTY:
            return
        for other in self.processes.values():
            if other.uses is not None and self.machine.counts(other.id):  # the lanes of a lost worker are closed
                assert (process.id.rank, slot) not in other.uses.candidates(layer, expert), "a route leads to it"

    def kill(self, n: int) -> None:
        process = self.pick(n)
        if process is not None:
            self.die(process.id)

    def lose_device(self, n: int) -> None:
        if len(self.machine.goal.gone) < self.num_devices - 1:
            self.tell(ask(FaultRequest(device=n % self.num_devices, gone=n % 3 > 0)))

    def return_device(self, n: int) -> None:
        if self.machine.goal.gone:
            self.tell(ask(ReturnRequest(device=self.machine.goal.gone[n % len(self.machine.goal.gone)])))

    def lose_orchestrator(self, n: int) -> None:
        """What it was told is lost, and workers drop what they were told and have not done."""
        epoch = max([Epoch(0), *(p.uses.epoch for p in self.processes.values() if p.uses is not None)])
        epoch = max([epoch, *(routes.epoch for p in self.processes.values() for routes in p.hears)])
        self.exits.clear()
        found = []
        for rank, incarnation in {*self.processes, *map(WorkerId._make, self.latest.items())}:
            process = self.processes.get(WorkerId(rank, incarnation))
            if process is None:
                found.append(Found(rank=rank, incarnation=incarnation, pid=-1))
                continue
            process.todo.clear()
            process.failed.clear()
            process.num_done = 0
            process.says.clear()
            process.is_ready = True
            slots = process.held if self.is_expert(rank) else None
            one = Found(rank=rank, incarnation=incarnation, pid=1000, has_reported=True, is_ready=True, slots=slots)
            found.append(replace(one, is_leaving=process.is_leaving, roles=process.roles))
            reported = process.uses.epoch if process.uses is not None else Epoch(0)
            process.says.append(
                Said(
                    *process.id,
                    Report(
                        is_ready=True, is_leaving=process.is_leaving, epoch=reported, peers=[], memory=[], slots=slots
                    ),
                )
            )
            if process.uses is not None:
                process.says.append(Said(*process.id, RoutesUsed(epoch=process.uses.epoch)))
        self.new_machine()
        self.apply(self.machine.resume(self.now, found, epoch, was_all_ready=True))

    def tick(self, n: int) -> None:
        deadline = self.machine.next_deadline()
        if deadline is not None:
            self.now = max(self.now, deadline)
        self.tell(Tick())

    def settle(self, is_time_passing: bool = True) -> None:
        """No more faults: everything that is under way comes to its end."""
        for _ in range(3000):
            if self.exits:
                self.reap(0)
            elif any(process.says for process in self.processes.values()):
                for n in range(len(self.processes)):
                    self.deliver(n)
            elif any(process.todo for process in self.processes.values()):
                for n in range(len(self.processes)):
                    self.fill_one(n, may_fail=False)
            elif any(p.hears and p.is_ready for p in self.processes.values()):
                for n in range(len(self.processes)):
                    self.use_routes(n * len(self.processes) + n)
            elif (deadline := self.machine.next_deadline()) is not None and (is_time_passing or deadline <= self.now):
                self.now = max(self.now, deadline)
                self.tell(Tick())
            else:
                return
        raise AssertionError("it never settles")


ACTIONS = [
    *[World.deliver] * 6,
    *[World.reap] * 2,
    *[World.use_routes] * 5,
    *[World.fill_one] * 5,
    World.kill,
    World.lose_device,
    World.return_device,
    World.lose_orchestrator,
    World.tick,
]


@examples(30)
@given(
    st.lists(st.tuples(st.integers(0, len(ACTIONS) - 1), st.integers(0, 1000)), min_size=10, max_size=120),
    st.sampled_from([(2, 6), (3, 4), (3, 3), (4, 3), (3, 2), (4, 6)]),
)
def test_no_slot_in_use_is_filled_and_everything_finds_its_place(schedule, shape):
    world = World(*shape)
    undisturbed = num_places(world)
    for action, n in schedule:
        ACTIONS[action](world, n)
    world.settle()
    check_healed(world)
    for device in world.machine.goal.gone:
        world.tell(ask(ReturnRequest(device=device)))
    world.settle()
    check_healed(world)
    assert world.machine.degraded == (), "every worker is back"
    assert num_places(world) == undisturbed, "no copy was left behind"


def check_healed(world: World) -> None:
    num_devices = world.num_devices - len(world.machine.goal.gone)
    routes = world.machine.routes
    assert routes is not None
    slots = num_devices * world.num_slots
    if slots >= NUM_EXPERTS:
        assert world.machine.violations == ()
        copies = [len(routes.candidates(layer, expert)) for layer in range(2) for expert in range(NUM_EXPERTS)]
        assert min(copies) >= min(slots // NUM_EXPERTS, num_devices)
        if world.balance is None:  # else experts are where their load wants them
            check_even(world, num_devices)
    assert world.machine.tables().conditions.epochs == ()
    for process in world.processes.values():
        planned = world.machine.goal.placement.seat(process.id.rank)
        if planned is not None and world.machine.counts(process.id):
            for layer in range(2):
                assert set(planned.experts(layer)) <= set(process.experts[layer]), "not where it should be"


def check_even(world: World, num_devices: int) -> None:
    """In each layer no worker serves one expert more than the mean."""
    placement = world.machine.goal.placement
    assert placement is not None
    for layer in range(2):
        num_active = Counter(expert for seat in placement.seats for expert in seat.active[layer])
        work = [sum(1 / num_active[expert] for expert in seat.active[layer]) for seat in placement.seats]
        assert max(work) < NUM_EXPERTS / num_devices + 1, work


def num_places(world: World) -> list[tuple[int, int]]:
    """In each layer: slots with memory that hold an expert, and the fewest that hold the same one."""
    workers = [process for process in world.processes.values() if process.experts]
    found = []
    for layer in range(2):
        held = Counter(e for p in workers for e in p.experts[layer][: world.num_slots] if e != EMPTY)
        found.append((held.total(), min(held[expert] for expert in range(NUM_EXPERTS))))
    return found


def kill_expert(world: World, device: int) -> None:
    rank = world.num_devices + device
    world.die(next(id for id in world.processes if id.rank == rank))
    world.reap(0)


LOSSES = {
    "killed": kill_expert,
    "lost": lambda world, device: world.tell(ask(FaultRequest(device=device, gone=False))),
    "gone": lambda world, device: world.tell(ask(FaultRequest(device=device, gone=True))),
}


@pytest.mark.parametrize("second", LOSSES)
@pytest.mark.parametrize("first", LOSSES)
def test_experts_of_two_that_are_lost_one_after_the_other_do_not_wait_for_either(first, second):
    """The first loss leaves a place for every expert, the second does not. The successors take for ever to start."""
    for a, b in itertools.permutations(range(4), 2):
        world = World(num_devices=4, num_slots=3)
        for loss, device in ((first, a), (second, b)):
            before = set(world.processes)
            LOSSES[loss](world, device)
            for id in world.processes.keys() - before:
                world.processes[id].says.clear()
            world.settle(is_time_passing=False)
        assert world.machine.violations == (), (a, b)
