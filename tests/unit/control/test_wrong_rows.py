"""What the machine does about rows that workers compute to different bits."""

import pytest

from everserve.control.decide.effects import Tell
from everserve.control.decide.inputs import SaidRow
from everserve.control.decide.row_checks import Check
from everserve.tables.health import Level
from everserve.tables.ids import Incarnation, Rank, WorkerId
from everserve.wire.events import RowsDiffer
from everserve.wire.messages import ComputeRow, RowComputed, RowComputedAgain
from tests.unit.control.test_machine import Driver

X, RIGHT, WRONG = b"xxxx", b"rrrr", b"wwww"


class RowDriver(Driver):
    """Three expert workers (ranks 1 to 3), some of which compute wrong."""

    def check(self, rank: int, expert: int, wrong: dict[int, list[bytes]] | None = None) -> list:
        """All effects of a row that this worker has computed, until no worker is asked any more. `wrong`: what workers
        answer instead, in this order; the last one again and again."""
        answers = {r: [*values] for r, values in (wrong or {}).items()}

        def answer(of: int) -> bytes:
            values = answers.get(of, [RIGHT])
            return values.pop(0) if len(values) > 1 else values[0]

        row = RowComputed(call_index=0, expert=expert, x=X, y=answer(rank))
        left = [*self.tell(SaidRow(rank, 1, row)).effects]
        done = []
        while left:
            effect = left.pop(0)
            done.append(effect)
            if isinstance(effect, Tell) and isinstance(effect.message, ComputeRow):
                assert (effect.message.expert, effect.message.x) == (expert, X)
                said = RowComputedAgain(id=effect.message.id, y=answer(effect.rank))
                left += self.tell(SaidRow(effect.rank, effect.incarnation, said)).effects
        return done

    def holders(self, expert: int) -> list[int]:
        return sorted(self.places(expert))


def told(effects: list) -> list[tuple[int, bool]]:
    return [(effect.rank, effect.is_certain) for effect in effects if isinstance(effect, RowsDiffer)]


def asked(effects: list) -> list[int]:
    return [effect.rank for effect in effects if isinstance(effect, Tell) and isinstance(effect.message, ComputeRow)]


def test_equal_bits_change_nothing():
    driver = RowDriver()
    epoch = driver.machine.epoch
    one, other = driver.holders(0)[:2]
    assert asked(driver.check(one, 0)) == [other]
    assert driver.machine.epoch == epoch and not driver.machine.goal.health


def test_a_third_opinion_names_the_one_that_computes_wrong():
    driver = RowDriver()
    one, other, *_ = driver.holders(0)
    effects = driver.check(one, 0, {other: [WRONG]})
    assert sorted(asked(effects)) == sorted([other, 1, 2, 3]), "also the one that does not hold it"
    assert told(effects) == [(other, True)]
    device = driver.machine.goal.seats[other].device
    assert driver.machine.goal.level(device) is Level.EVACUATE


def test_one_that_does_not_repeat_itself_computes_wrong():
    driver = RowDriver()
    one, *_ = driver.holders(0)
    assert told(driver.check(one, 0, {one: [WRONG, RIGHT]})) == [(one, True)]


def test_one_against_one_is_told_and_changes_no_place():
    driver = RowDriver()
    one, other, *_ = driver.holders(0)
    (third,) = {1, 2, 3} - {one, other}
    effects = driver.check(one, 0, {other: [WRONG], third: [b""]})
    assert sorted(told(effects)) == [(min(one, other), False), (max(one, other), False)]
    assert {one.level for one in driver.machine.goal.health} == {Level.NOTE}


def test_late_and_stray_answers_are_dropped():
    driver = RowDriver()
    one, other = driver.holders(0)[:2]
    (ask,) = driver.tell(SaidRow(one, 1, RowComputed(call_index=0, expert=0, x=X, y=RIGHT))).effects
    said = RowComputedAgain(id=ask.message.id, y=WRONG)
    assert driver.tell(SaidRow(one, 1, said)).effects == (), "it was not asked"
    assert driver.tell(SaidRow(other, 7, said)).effects == (), "an incarnation that is not there"
    assert asked([*driver.tell(SaidRow(other, 1, said)).effects])


A, B, C = (WorkerId(Rank(rank), Incarnation(1)) for rank in (1, 2, 3))


@pytest.mark.parametrize(
    ("found", "wrong"),
    [
        ({A: [RIGHT, RIGHT], B: [WRONG, WRONG], C: [RIGHT]}, {B}),
        ({A: [RIGHT, RIGHT], B: [WRONG, RIGHT]}, {B}),
        ({A: [RIGHT, RIGHT], B: [WRONG, WRONG]}, set()),
        ({A: [RIGHT], B: [WRONG], C: [X]}, set()),
        ({A: [RIGHT, WRONG], B: [WRONG, X], C: [RIGHT]}, {A, B}),
    ],
)
def test_who_computes_wrong(found, wrong):
    assert Check(RowComputed(call_index=0, expert=0, x=X, y=RIGHT), found=found).wrong() == wrong
