"""Experts in memory that a worker has left, in any order of events: other workers map them, die meanwhile, lose the
memory with its device, meet the next worker of the seat and new orchestrators. No slot is changed while a worker
computes with it, in its own memory or in another's; every expert whose weights are in memory has a place at once; and
in the end nothing is mapped."""

import itertools
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everserve.control.decide.effects import Decision, DropDevice, FillSlots
from everserve.control.decide.inputs import (
    Said,
    Started,
)
from everserve.tables.ids import Rank, Role, WorkerId
from everserve.tables.slots import EMPTY, Fill, Place
from everserve.wire.messages import Hello, Leaving, Ready, SlotsReported
from everserve.wire.operators import FaultRequest, ReturnRequest
from tests.property.test_moves import ACTIONS, NUM_EXPERTS, Process, World, check_healed, kill_expert, num_places
from tests.support.decisions import ask, is_told
from tests.support.examples import examples

Loan = tuple[Rank, Place]  # of whose memory


class MappedWorld(World):
    """The weights of a seat lie in memory that outlives its workers."""

    def __init__(self, num_devices: int, num_slots: int, num_gpus: int = 0) -> None:
        self.num_mapped, self.num_gpus = min(num_slots, NUM_EXPERTS - num_slots), num_gpus
        self.memory: dict[Rank, list[list[int]]] = {}
        self.loans: dict[WorkerId, dict[Place, Loan]] = {}
        self.num_copied = 0  # since the start
        super().__init__(num_devices, num_slots)

    def new_machine(self) -> None:
        if self.num_gpus and self.kept.version == 1:
            seats = [msgspec.structs.replace(seat, gpu=seat.device % self.num_gpus) for seat in self.kept.seats]
            self.kept = msgspec.structs.replace(self.kept, seats=tuple(seats))
        super().new_machine()

    def start(self, id: WorkerId) -> None:
        """It holds what is in the memory, and loads the rest of what is planned into empty slots."""
        if not self.is_expert(id.rank):
            super().start(id)
            return
        self.latest[id.rank] = id.incarnation
        memory = self.memory.setdefault(id.rank, [[EMPTY] * self.num_slots for _ in range(2)])
        planned = self.machine.goal.placement.seat(id.rank)
        for layer, slots in enumerate(memory):
            wanted = planned.experts(layer) if planned is not None else ()
            missing = [expert for expert in wanted if expert not in slots]
            for slot, expert in zip([s for s, e in enumerate(slots) if e == EMPTY], missing, strict=False):
                slots[slot] = expert
        process = self.processes[id] = Process(id, (Role.EXPERT,), num_mapped=self.num_mapped)
        process.experts = [[*slots, *[EMPTY] * self.num_mapped] for slots in memory]
        process.says.extend(
            [Started(*id, 1000), Said(*id, Hello()), Said(*id, SlotsReported(slots=process.held)), Said(*id, Ready())]
        )

    def apply(self, decision: Decision) -> None:
        for effect in decision.effects:
            if isinstance(effect, DropDevice):
                self.drop(effect.device)
        super().apply(decision)

    def drop(self, device: int) -> None:
        """Its workers are killed first. Others are told that its memory is gone, and say what they have left."""
        lost = {seat.rank for seat in self.machine.goal.seats if seat.device == device}
        for id in [id for id in self.processes if id.rank in lost]:
            self.die(id)
        for rank in lost & self.memory.keys():
            del self.memory[rank]
        for id, process in self.processes.items():
            gone = [place for place, (rank, _) in self.loans.get(id, {}).items() if rank in lost]
            for place in gone:
                self.put(process, place, EMPTY)
            if gone:
                self.say_held(process)

    def die(self, id: WorkerId) -> None:
        self.loans.pop(id, None)
        super().die(id)

    def borrowed(self) -> Iterator[Loan]:
        return (loan for loans in self.loans.values() for loan in loans.values())

    def may_change(self, process: Process, change: Fill | Place) -> bool:
        """A slot that is borrowed is locked."""
        return (process.id.rank, Place(change.call_index, change.slot)) not in self.borrowed()

    def put(self, process: Process, at: Place, expert: int) -> bool:
        rank = process.id.rank
        if at.slot < self.num_slots:
            self.memory[rank][at.call_index][at.slot] = expert
            self.num_copied += expert != EMPTY
        else:
            loans = self.loans.setdefault(process.id, {})
            loans.pop(at, None)
            if expert != EMPTY:
                loan = self.find(rank, at.call_index, expert)
                if loan is None:
                    return False
                loans[at] = loan
        return super().put(process, at, expert)

    def find(self, mapper: Rank, layer: int, expert: int) -> Loan | None:
        gpus = {seat.rank: seat.gpu for seat in self.machine.goal.seats}
        for rank, memory in self.memory.items():
            if rank != mapper and expert in memory[layer] and gpus[rank] == gpus[mapper]:
                return rank, Place(layer, memory[layer].index(expert))
        return None

    def check_borrowed(self) -> None:
        for id, loans in self.loans.items():
            for at, (rank, place) in loans.items():
                held = self.processes[id].experts[at.call_index][at.slot]
                assert self.memory[rank][place.call_index][place.slot] == held, "what is borrowed has changed"

    @property
    def num_mapped_now(self) -> int:
        return sum(map(len, self.loans.values()))

    def stop_new(self, known: set[WorkerId]) -> None:
        """Workers that started since then take for ever."""
        for id in self.processes.keys() - known:
            self.processes[id].says.clear()


SHAPES = [(2, 3, 0), (3, 2, 0), (3, 3, 0), (3, 4, 0), (4, 2, 2), (4, 3, 2)]


@examples(40)
@given(
    st.lists(st.tuples(st.integers(0, len(ACTIONS) - 1), st.integers(0, 1000)), min_size=10, max_size=120),
    st.sampled_from(SHAPES),
)
def test_nothing_that_is_in_use_changes_and_everything_finds_its_place(schedule, shape):
    world = MappedWorld(*shape)
    undisturbed = num_places(world)
    for action, n in schedule:
        ACTIONS[action](world, n)
        world.check_borrowed()
    world.settle()
    check_healed(world)
    for device in world.machine.goal.gone:
        world.tell(ask(ReturnRequest(device=device)))
    world.settle()
    check_healed(world)
    assert world.machine.degraded == (), "every worker is back"
    assert world.num_mapped_now == 0, "every expert is in memory of the worker that serves it"
    assert num_places(world) == undisturbed, "no copy was left behind"


@pytest.mark.parametrize("num_slots", [2, 3])
def test_what_a_dead_worker_left_is_served_without_a_copy(num_slots):
    world = MappedWorld(num_devices=3, num_slots=num_slots)
    goal, known, copied = world.machine.goal, {*world.processes}, world.num_copied
    kill_expert(world, 1)
    world.stop_new(known)
    num_lost = len(world.machine.routes.lost_experts())
    assert 0 < num_lost <= 4
    world.settle(is_time_passing=False)
    assert world.machine.violations == () and world.num_copied == copied
    assert world.machine.goal.placement == goal.placement, "it is expected back"
    assert world.num_mapped_now == num_lost, "no more than have no other place"


def test_the_next_worker_of_the_seat_ends_it():
    world = MappedWorld(num_devices=3, num_slots=2)
    kill_expert(world, 1)
    world.settle(is_time_passing=False)
    assert world.machine.violations == () and world.num_mapped_now == 0 and world.machine.degraded == ()


def test_the_death_of_the_worker_that_maps():
    """What it mapped, and what it had, is mapped by the last one."""
    world = MappedWorld(num_devices=3, num_slots=2)
    for device in (0, 1):
        known = {*world.processes}
        kill_expert(world, device)
        world.stop_new(known)
        world.settle(is_time_passing=False)
    assert world.num_mapped_now == 4, "as much as it has slots for"
    assert "no place" in world.machine.violations[0]
    world.lose_orchestrator(0)
    world.settle()
    assert world.machine.violations == () and world.num_mapped_now == 0


@pytest.mark.parametrize("devices", [(0, 1), (1, 3), (2, 3)])
def test_two_die_with_the_orchestrator(devices):
    """The next one reads the reports of those that are left after it has told them what to map; some of the rest is
    copied into slots that are empty otherwise. When the two are back, all is as before."""
    world = MappedWorld(num_devices=4, num_slots=2)
    undisturbed = num_places(world)
    for device in devices:
        world.die(next(id for id in world.processes if id.rank == world.num_devices + device))
    known = {*world.processes}
    world.lose_orchestrator(0)
    told = {id: [*process.says] for id, process in world.processes.items() if id not in known}
    world.stop_new(known)
    world.settle(is_time_passing=False)
    assert world.num_mapped_now > 0
    for id, says in told.items():
        world.processes[id].says.extend(says)
    world.settle()
    check_healed(world)
    assert world.num_mapped_now == 0 and num_places(world) == undisturbed


def test_what_was_told_is_taken_back_when_the_owner_is_there_again():
    world = MappedWorld(num_devices=3, num_slots=2)
    kill_expert(world, 1)
    assert any(process.todo for process in world.processes.values()), "others are told to map its experts"
    while any(process.says for process in world.processes.values()):
        for n in range(len(world.processes)):
            world.deliver(n)
    assert not any(process.todo for process in world.processes.values()) and world.machine.mapping == ()
    world.settle()
    assert world.num_mapped_now == 0 and world.machine.violations == ()


def test_an_orchestrator_that_dies_in_the_middle():
    """Half of it is mapped, and the next one knows of the rest what was planned."""
    world = MappedWorld(num_devices=3, num_slots=2)
    known, copied = {*world.processes}, world.num_copied
    kill_expert(world, 1)
    world.stop_new(known)
    world.fill_one(next(i for i, process in enumerate(world.processes.values()) if process.todo), may_fail=False)
    assert world.num_mapped_now == 1
    world.processes = {id: process for id, process in world.processes.items() if id in known}  # it does not start
    world.lose_orchestrator(0)
    world.stop_new(known)
    world.settle(is_time_passing=False)
    assert world.machine.violations == () and world.num_mapped_now == 4 and world.num_copied == copied


def test_memory_that_goes_with_its_device():
    """Of a worker that died before, and whose experts others map: they are loaded anew."""
    world = MappedWorld(num_devices=3, num_slots=3)
    known = {*world.processes}
    for device in (1, 2):
        kill_expert(world, device)
        world.stop_new(known)
    world.settle(is_time_passing=False)
    assert world.num_mapped_now > 0
    world.tell(ask(FaultRequest(device=1, gone=True)))
    world.tell(ask(FaultRequest(device=2, gone=True)))
    assert world.num_mapped_now == 0
    world.settle()
    check_healed(world)


def test_memory_that_is_lost_before_it_is_mapped():
    """What was told is taken back, and copied instead. The successors take for ever to start."""
    is_seen = False
    for devices in itertools.combinations(range(4), 2):
        world = MappedWorld(num_devices=4, num_slots=3)
        known = {*world.processes}
        for device in devices:
            kill_expert(world, device)
            world.stop_new(known)
        is_seen |= bool(world.machine.mapping)
        for device in devices:
            world.tell(ask(FaultRequest(device=device, gone=False)))
            world.stop_new(known)
        world.settle(is_time_passing=False)
        assert world.machine.violations == () and world.num_mapped_now == 0
    assert is_seen, "workers were told to map"


def test_memory_that_does_not_hold_what_it_should():
    """It is tried once by each; then a copy is made."""
    world = MappedWorld(num_devices=3, num_slots=3)
    known = {*world.processes}
    for device in (1, 2):
        kill_expert(world, device)
        world.stop_new(known)
        world.memory[Rank(3 + device)] = [[EMPTY] * 3 for _ in range(2)]
    world.settle(is_time_passing=False)
    assert world.num_mapped_now == 0 and world.machine.moves == {}
    served = {e for p in world.processes.values() if p.id in known for e in (p.experts or [[]])[0]} - {EMPTY}
    assert len(served) == 3, "there are no more slots"


def test_a_worker_that_leaves_is_mapped_while_it_does():
    world = MappedWorld(num_devices=3, num_slots=2)
    id = next(id for id in world.processes if id.rank == 4)
    world.tell(Said(*id, Leaving()))
    world.processes[id].is_leaving = True
    world.settle(is_time_passing=False)
    routes = world.machine.routes
    ranks = {rank for layer in range(2) for e in range(NUM_EXPERTS) for rank, _ in routes.candidates(layer, e)}
    assert world.machine.violations == () and ranks == {3, 5}


def test_only_workers_on_the_same_gpu_reach_it():
    world = MappedWorld(num_devices=4, num_slots=2, num_gpus=2)
    known = {*world.processes}
    told = []
    world.apply, apply = lambda decision: (told.append(decision), apply(decision)), world.apply
    kill_expert(world, 1)
    world.stop_new(known)
    world.settle(is_time_passing=False)
    fills = [effect for decision in told for effect in decision.effects if is_told(effect, FillSlots)]
    assert {effect.rank for effect in fills} == {4 + 3}
