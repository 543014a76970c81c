"""Scaling in any order of events: operators ask for more and fewer workers and devices while workers die, devices are
lost and return, fills fail and the orchestrator is replaced. A worker that retires is asked to leave only when other
workers have what it has, no incarnation is used twice, and in the end there are exactly the workers asked for."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from everserve.control.decide.effects import Decision
from everserve.control.decide.inputs import Exited, Said
from everserve.control.decide.machine import Machine
from everserve.control.decide.scaling import size_of, staying
from everserve.tables.goal import Capacity, Wanted
from everserve.tables.ids import Rank, Role, WorkerId
from everserve.tables.members import WorkerState
from everserve.tables.slots import EMPTY
from everserve.wire.events import ScaleBegan
from everserve.wire.messages import Ask, Leave, Leaving
from everserve.wire.operators import ReturnRequest, ScaleRequest
from tests.property.test_moves import ACTIONS, NUM_EXPERTS, POLICY, Process, World
from tests.support.decisions import answered, ask, is_told
from tests.support.examples import examples

MAX_WORKERS = 9


def check_no_hole(leaving, others) -> None:
    """What it holds is in other seats too, in slots that are not being filled."""
    for layer, slots in enumerate(leaving.held.experts if leaving.held is not None else ()):
        elsewhere = {
            expert
            for seat in others
            for slot, expert in enumerate(seat.held.experts[layer])
            if (layer, slot) not in {(fill.call_index, fill.slot) for fill in seat.filling}
        }
        assert set(slots) - {EMPTY} <= elsewhere, "it would leave a hole"


class ScalingWorld(World):
    """Workers that can be asked to leave, and operators that ask for others."""

    def __init__(self, num_devices: int, num_slots: int) -> None:
        self.asked_to_leave: set[WorkerId] = set()
        super().__init__(num_devices, num_slots)

    def new_machine(self) -> None:
        capacity = Capacity(max_workers=MAX_WORKERS, slots_per_layer=self.num_slots, devices=self.num_devices)
        self.machine = Machine(self.kept, POLICY, capacity)

    def apply(self, decision: Decision) -> None:
        super().apply(decision)
        for effect in decision.effects:
            if is_told(effect, Leave):
                self.check_not_needed(effect.rank)
                self.asked_to_leave.add(WorkerId(effect.rank, effect.incarnation))

    def check_not_needed(self, rank: Rank) -> None:
        """As far as the machine can know."""
        leaving = self.machine._seats[rank]
        assert leaving.goal.wanted is not Wanted.STAY
        others = [seat for seat in self.machine._seats.values() if seat.goal.wanted is Wanted.STAY]
        others = [seat for seat in others if seat.state is WorkerState.READY and seat.goal.roles == leaving.goal.roles]
        assert others, "its streams would wait"
        check_no_hole(leaving, others)

    # -- what may happen -------------------------------------------------------------------------

    def leave(self, n: int) -> None:
        """A worker that was asked to leave says so, and exits later."""
        process = self.pick(n)
        if process is None or process.id not in self.asked_to_leave or not process.is_ready:
            return
        if not process.is_leaving:
            process.is_leaving = True
            process.says.append(Said(*process.id, Leaving()))
        elif not process.says and not process.todo:
            del self.processes[process.id]
            self.exits.append(Exited(*process.id, 0))

    def ask(self, asked: Ask) -> bool:
        before = self.machine.goal
        decision = self.machine.handle(asked, self.now)
        self.apply(decision)
        if not any(isinstance(effect, ScaleBegan) for effect in decision.effects):
            assert self.machine.goal == before and answered(decision).refused == decision.reason
            return False
        size = size_of(self.machine.goal)
        for wanted, got in zip(
            (asked.request.attention, asked.request.expert, asked.request.devices), size, strict=True
        ):
            assert wanted in (None, got)
        return True

    def scale(self, n: int) -> None:
        few, many = n % 4, n // 4 % 6
        asks = [
            ask(ScaleRequest(attention=few, expert=many)),
            ask(ScaleRequest(attention=few)),
            ask(ScaleRequest(expert=many)),
            ask(ScaleRequest(devices=many)),
        ]
        self.ask(asks[n % len(asks)])

    def settle(self) -> None:
        while True:
            super().settle()
            leaving = [process for process in self.processes.values() if process.id in self.asked_to_leave]
            if not leaving:
                return
            for process in leaving:
                self.leave(list(self.processes.values()).index(process))


SCALING_ACTIONS = [*ACTIONS, *[ScalingWorld.scale] * 2, *[ScalingWorld.leave] * 3]


@examples(25)
@given(
    st.lists(st.tuples(st.integers(0, len(SCALING_ACTIONS) - 1), st.integers(0, 1000)), min_size=10, max_size=120),
    st.sampled_from([(1, 6), (2, 6), (3, 4), (3, 3), (2, 3), (3, 2)]),
)
def test_there_are_exactly_the_workers_that_were_asked_for(schedule, shape):
    world = ScalingWorld(*shape)
    for action, n in schedule:
        SCALING_ACTIONS[action](world, n)
    world.settle()
    check_scaled(world)
    for device in world.machine.goal.gone:
        world.tell(ask(ReturnRequest(device=device)))
    world.settle()
    check_scaled(world)
    assert world.machine.degraded == ()
    size = size_of(world.machine.goal)
    if world.ask(ask(ScaleRequest(attention=2, expert=3))):  # whatever has been, it can be scaled again
        world.settle()
        check_scaled(world)
        assert size_of(world.machine.goal)[:2] == (2, 3)
    else:
        assert size_of(world.machine.goal) == size and 3 * world.num_slots < NUM_EXPERTS


def check_scaled(world: ScalingWorld) -> None:
    goal, machine = world.machine.goal, world.machine
    there = {process.id.rank for process in world.processes.values()}
    wanted = {seat.rank for seat in staying(goal)}
    if goal.gone and there > wanted:  # workers that should retire go on until those that should stay have come back
        assert goal.scaling_s is not None
        return
    assert there == wanted and goal.scaling_s is None
    away = {seat.rank for seat in goal.seats if seat.wanted is Wanted.STAY and seat.device in goal.gone}
    assert {worker.rank for worker in machine.members.workers} == wanted | away, "a retired worker is no member"
    assert all(worker.state is WorkerState.READY for worker in machine.members.workers if worker.rank in wanted)
    experts = [seat for seat in staying(goal) if Role.ATTENTION not in seat.roles]
    per_device = Counter({seat.device: 0 for seat in experts})
    for seat in experts:
        per_device[seat.device] += world.num_slots
    if sum(per_device.values()) >= NUM_EXPERTS and len(experts) < len(wanted):
        assert machine.violations == ()
        copies = [len(machine.routes.candidates(layer, expert)) for layer in range(2) for expert in range(NUM_EXPERTS)]
        assert min(copies) >= sum(min(num_slots, NUM_EXPERTS) for num_slots in per_device.values()) // NUM_EXPERTS
    assert machine.tables().conditions.epochs == ()
    for process in world.processes.values():
        check_holds(world, process)


def check_holds(world: ScalingWorld, process: Process) -> None:
    planned = world.machine.goal.placement.seat(process.id.rank)
    for layer in range(2) if planned is not None else ():
        assert set(planned.experts(layer)) <= set(process.experts[layer]), "not where it should be"
