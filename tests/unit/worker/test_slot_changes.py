"""Slots of an expert worker that are changed while it serves: what is done, in which order, and what is reported."""

import msgspec
import pytest

from everserve.backends.cpu.reference import ReferenceOps
from everserve.backends.cpu.slots import MappedSlots
from everserve.errors import ModelError
from everserve.tables.slots import EMPTY, FailedFill, Fill, Filled, HeldSlots, Place, Source
from everserve.wire.messages import ClearSlots, FillSlots, SlotsReported
from everserve.worker.slot_changes import SlotChanges
from tests.support.experts import MOE_LAYERS, NUM_EXPERTS, RandomExperts

SLOTS = (2, 0, 4)


class World:
    """An expert worker on CPUs whose files may be gone."""

    def __init__(self) -> None:
        self.are_files_gone = False
        self.reports: list[SlotsReported] = []
        self.half = RandomExperts(ReferenceOps(), SLOTS)
        self.slots = MappedSlots(self.half, self._check_files)
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
    assert [filled.fill for filled in first.filled] == fills.fills and second.filled == []
    assert {filled.source for filled in first.filled} == {Source.FILE}


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
    assert report.failed == [FailedFill(call_index=0, slot=1, expert=5, reason=reason)]
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


class SlowSlots(MappedSlots):
    """A fill ends when the test says so."""

    is_done = False

    def begin(self, fill: Fill) -> None:
        super().begin(fill)
        half, layer = self._at(fill.call_index)
        half.clear(layer, fill.slot)
        self._fill = fill

    def poll(self) -> Filled | FailedFill | None:
        if not self.is_done:
            return None
        half, layer = self._at(self._fill.call_index)
        half.load(layer, self._fill.expert, self._fill.slot)
        return super().poll()


@pytest.fixture
def slow() -> World:
    world = World()
    world.slots = SlowSlots(world.half, world._check_files)
    world.changes = SlotChanges(world.slots, world.reports.append)
    return world


def test_a_fill_runs_beside_the_loop(slow):
    slow.changes.add(FillSlots(fills=[Fill(0, 1, 5)]))
    assert slow.changes.wait_s(1.0) == 0.0
    for _ in range(3):
        slow.changes.do_one()
        assert slow.changes.is_pending and 0 < slow.changes.wait_s(1.0) < 1.0 and not slow.reports
        assert slow.slots.held.experts[0] == (2, EMPTY, 4)
    slow.slots.is_done = True
    slow.changes.do_one()
    assert slow.reports[0].slots.experts[0] == (2, 5, 4) and slow.changes.wait_s(1.0) == 1.0


def test_a_new_orchestrator_finds_nothing_pending(slow):
    """What its predecessor had asked for is not done, so that what the worker reports stays true."""
    slow.changes.add(FillSlots(fills=[Fill(0, 1, 5), Fill(0, 0, 3)]))
    slow.changes.add(ClearSlots(places=[Place(2, 2)]))
    slow.changes.do_one()
    slow.changes.forget()
    reported = slow.slots.held.experts
    assert reported == ((2, EMPTY, 4), SLOTS, SLOTS)
    slow.changes.add(FillSlots(fills=[Fill(0, 1, 1)]))
    slow.changes.do_one()
    assert slow.slots.held.experts == reported and slow.reports == []
    slow.slots.is_done = True
    slow.changes.do_one()
    assert slow.slots.held.experts == reported and slow.reports == [], "what was begun before is given up"
    slow.carry_out()
    (report,) = slow.reports
    assert report.slots.experts == ((2, 1, 4), SLOTS, SLOTS)
    assert [filled.fill for filled in report.filled] == [Fill(0, 1, 1)]


def test_reports_count_what_was_done_of_all_that_was_told(slow):
    """A report on something else, sent before a message was read, does not answer that message."""
    slow.slots.is_done = True
    slow.carry_out(FillSlots(fills=[Fill(0, 1, 5), Fill(9, 0, 0)]), ClearSlots(places=[Place(2, 2), Place(9, 0)]))
    assert [report.num_done for report in slow.reports] == [2, 4]
    slow.changes.forget()
    slow.carry_out(FillSlots(fills=[Fill(0, 1, 3)]))
    assert slow.reports[-1].num_done == 1, "by this orchestrator"


def test_what_is_not_begun_can_be_taken_back(slow):
    slow.changes.add(FillSlots(fills=[Fill(0, 1, 5), Fill(0, 0, 3), Fill(0, 2, 1)]))
    slow.changes.do_one()
    slow.changes.stop()
    assert slow.reports == [] and slow.changes.is_pending, "one of them runs"
    slow.slots.is_done = True
    slow.carry_out()
    (report,) = slow.reports
    assert report.slots.experts[0] == (2, 5, 4) and report.num_done == 3
    slow.changes.stop()
    assert not slow.changes.is_pending and len(slow.reports) == 1, "there was nothing left"


def test_fills_that_fail_are_one_line_in_the_log(caplog):
    world = World()
    world.are_files_gone = True
    world.carry_out(FillSlots(fills=[Fill(0, slot, 5 - slot) for slot in range(3)]))
    (line,) = caplog.messages
    assert line.startswith("could not load 3 experts; the last, expert 3 of call 0: ModelError")


@pytest.mark.parametrize(
    "experts, generations",
    [
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
