"""Slots of an expert worker that are changed while it serves: what is done, in which order, and what is reported."""

import msgspec
import pytest
import torch

from everserve.backends.cpu.reference import ReferenceOps
from everserve.backends.cpu.slots import CpuSlots
from everserve.backends.cuda.ops.experts import ExpertArena
from everserve.backends.cuda.slots import CudaSlots
from everserve.errors import ModelError
from everserve.tables.slots import EMPTY, FailedFill, Fill, HeldSlots, Place
from everserve.wire.messages import ClearSlots, FillSlots, SlotsReported
from everserve.worker.slot_changes import SlotChanges
from tests.experts import MOE_LAYERS, NUM_EXPERTS, RandomExperts

SLOTS = (2, 0, 4)


class World:
    """An expert worker on CPUs whose files may be gone."""

    def __init__(self) -> None:
        self.are_files_gone = False
        self.reports: list[SlotsReported] = []
        self.half = RandomExperts(ReferenceOps(), SLOTS)
        self.slots = CpuSlots(self.half, self._check_files)
        self.changes = SlotChanges(self.slots, self.reports.append)

    def _check_files(self) -> None:
        if self.are_files_gone:
            raise ModelError("the files have changed")

    def carry_out(self, *messages: FillSlots | ClearSlots) -> int:
        """How many turns that took."""
        for message in messages:
            self.changes.add(message)
        num_turns = 0
        while self.changes.is_pending:
            self.changes.do_one()
            num_turns += 1
        return num_turns


def test_one_slot_per_turn_and_one_report_per_message():
    world = World()
    fills = FillSlots(fills=[Fill(0, 1, 5), Fill(2, 0, 1)])
    world.changes.add(fills)
    world.changes.do_one()
    assert world.reports == [] and world.slots.held.experts == ((2, 5, 4), SLOTS, SLOTS)
    assert world.carry_out(ClearSlots(places=[Place(1, 2)])) == 2
    first, second = world.reports
    assert first.slots.experts == ((2, 5, 4), SLOTS, (1, 0, 4)) and first.failed == second.failed == []
    assert first.slots.generations == ((1, 3, 1), (1, 1, 1), (3, 1, 1)), "emptied and filled"
    assert second.slots.experts == ((2, 5, 4), (2, 0, EMPTY), (1, 0, 4))
    assert second.slots.generations == ((1, 3, 1), (1, 1, 2), (3, 1, 1))
    assert [*world.half.held[MOE_LAYERS[1]]] == [2, 0, EMPTY]


def test_a_message_about_nothing_is_reported():
    world = World()
    assert world.carry_out(FillSlots(fills=[]), ClearSlots(places=[])) == 2
    assert [report.slots.experts for report in world.reports] == [(SLOTS,) * 3] * 2


def test_a_fill_that_fails_leaves_the_slot_empty():
    world = World()
    world.are_files_gone = True
    world.carry_out(FillSlots(fills=[Fill(0, 1, 5)]))
    (report,) = world.reports
    assert report.slots.experts[0] == (2, EMPTY, 4)
    reason = "ModelError: the files have changed"
    assert report.failed == [FailedFill(layer_index=0, slot=1, expert=5, reason=reason)]
    world.are_files_gone = False
    world.carry_out(FillSlots(fills=[Fill(0, 1, 5)]))
    assert world.reports[-1].failed == [] and world.reports[-1].slots.experts[0] == (2, 5, 4)


def test_a_fill_that_fails_does_not_stop_the_others():
    world = World()
    load = world.half.load

    def load_but_three(layer: int, expert: int, slot: int) -> None:
        if expert == 3:
            raise OSError("cannot read")
        load(layer, expert, slot)

    world.half.load = load_but_three
    world.carry_out(FillSlots(fills=[Fill(0, 0, 3), Fill(0, 1, 1)]))
    (report,) = world.reports
    assert report.slots.experts[0] == (EMPTY, 1, 4) and [failed.slot for failed in report.failed] == [0]


@pytest.mark.parametrize(
    "fill", [Fill(3, 0, 0), Fill(-1, 0, 0), Fill(0, 3, 0), Fill(0, -1, 0), Fill(0, 0, NUM_EXPERTS)]
)
def test_what_is_not_there_changes_nothing(fill):
    world = World()
    world.carry_out(FillSlots(fills=[fill]), ClearSlots(places=[Place(3, 0), Place(0, 3)]))
    assert [len(report.failed) for report in world.reports] == [1, 0]
    assert world.reports[-1].slots == World().slots.held


def test_clearing_twice_is_one_change():
    world = World()
    world.carry_out(ClearSlots(places=[Place(0, 0), Place(0, 0)]))
    assert world.reports[0].slots.generations[0] == (2, 1, 1)


@pytest.mark.parametrize(
    "experts, generations",
    [
        (((1,), (1, 2)), ((0,), (0, 0))),
        (((1, 2),), ((0,),)),
        (((1, 2),), ((0, 0), (0, 0))),
        (((1, -2),), ((0, 0),)),
        (((1, 2),), ((0, -1),)),
    ],
)
def test_tables_that_cannot_be(experts, generations):
    with pytest.raises(ValueError):
        HeldSlots(experts=experts, generations=generations)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"experts": experts, "generations": generations}, HeldSlots)


# on a GPU, with the host's memory for its


class SeatMemory:
    """Weights in the memory of a seat, and the server's kernels; what happens to them is in `events`."""

    def __init__(self) -> None:
        self.events: list[tuple] = []
        self.experts = [[2, EMPTY], [0, 1]]
        self.is_lost = False
        self.arena = ExpertArena(torch.zeros(4 * 16, 8).bfloat16(), torch.zeros(4 * 8, 8).bfloat16(), 2, 2)

    def load_checked(self, layer_index, expert):
        self.events.append(("load", layer_index, expert, self.arena.down_matrix[8 * layer_index, 0].item()))
        if self.is_lost:
            raise OSError("cannot read")
        return (torch.full((8, 8), float(expert)),) * 3

    def begin_change(self, layer_index, slot, expert):
        self.experts[layer_index][slot] = expert
        self.events.append(("begin", layer_index, slot, expert))

    def complete(self):
        self.events.append(("complete",))

    def empty(self, layer_index, slot):
        self.events.append(("empty", layer_index, slot))

    def hold(self, layer_index, slot, expert):
        first = (2 * layer_index + slot) * 8
        assert (self.arena.down_matrix[first : first + 8] == expert).all(), "the weights come before the table"
        self.events.append(("hold", layer_index, slot, expert))


@pytest.fixture
def seat() -> SeatMemory:
    return SeatMemory()


def test_kernels_know_of_an_expert_when_its_weights_are_there(seat):
    slots = CudaSlots(seat, seat.arena, seat, NUM_EXPERTS)
    slots.fill(Fill(0, 1, 5))
    assert [event[0] for event in seat.events] == ["begin", "empty", "load", "hold", "complete"]
    assert slots.held == HeldSlots(experts=((2, 5), (0, 1)), generations=((1, 1), (1, 1)))
    slots.clear(Place(0, 0))
    assert seat.events[5:] == [("begin", 0, 0, EMPTY), ("empty", 0, 0), ("complete",)]
    assert slots.held == HeldSlots(experts=((EMPTY, 5), (0, 1)), generations=((2, 1), (1, 1)))


def test_a_fill_on_a_gpu_that_fails_leaves_the_slot_empty(seat):
    slots, reports = CudaSlots(seat, seat.arena, seat, NUM_EXPERTS), []
    seat.is_lost = True
    changes = SlotChanges(slots, reports.append)
    changes.add(FillSlots(fills=[Fill(1, 0, 5)]))
    changes.do_one()
    assert [event[0] for event in seat.events] == ["begin", "empty", "load", "begin", "complete"]
    assert reports[0].slots == HeldSlots(experts=((2, EMPTY), (EMPTY, 1)), generations=((1, 0), (2, 1)))
    assert reports[0].failed[0].expert == 5
