"""What the machine does about slow workers."""

from everserve.control.decide.effects import Lost, Publish, Tell
from everserve.control.decide.inputs import Exited, Said
from everserve.control.decide.slowness import Standing
from everserve.tables.ids import WorkerId
from everserve.tables.members import WorkerState
from everserve.tables.work import Work
from everserve.wire.events import WorkerRecovered, WorkerSlow
from everserve.wire.messages import Leave, Leaving, PaceReported
from tests.support.decisions import is_told
from tests.unit.control.test_machine import Driver


class SlowDriver(Driver):
    """One attention worker (rank 0) and three expert workers, one of which may be slow."""

    def pace(self, seconds: float, slow: int | None = None, incarnations: dict[int, int] | None = None) -> list:
        """The effects of so many seconds of reports, two each second."""
        effects = []
        for _ in range(round(2 * seconds)):
            self.now += 0.5
            works = {rank: Work(10.0 if rank == slow else 1.0, (100, 100)) for rank in (1, 2, 3)}
            asked = [rank for rank in works if not self.worker(rank).is_slow]
            peers = tuple((WorkerId(rank, (incarnations or {}).get(rank, 1)), works[rank]) for rank in asked)
            effects += self.tell(Said(0, 1, PaceReported(own=Work(1.0, (100, 100, 100)), peers=peers))).effects
        return effects

    def demote(self, rank: int) -> None:
        effects = self.pace(2.5, slow=rank)
        assert [type(effect) for effect in effects] == [Publish, WorkerSlow]

    def first_places(self) -> set[int]:
        return {self.machine.routes.candidates(0, expert)[0][0] for expert in range(12)}

    def levels(self, effects: list) -> list[Standing]:
        """What was told of them."""
        told = [effect for effect in effects if isinstance(effect, WorkerSlow | WorkerRecovered)]
        return [Standing(one.level) if isinstance(one, WorkerSlow) else Standing.FINE for one in told]


def test_a_slow_expert_worker_is_asked_last_and_shown():
    driver = SlowDriver()
    places = {expert: driver.places(expert) for expert in range(12)}
    epoch = driver.machine.epoch
    driver.demote(2)
    assert driver.machine.epoch == epoch + 1 and driver.worker(2).is_slow
    assert driver.first_places() == {1, 3}
    assert {expert: driver.places(expert) for expert in range(12)} == places, "if the others die it still serves"
    assert driver.machine.violations == ()
    (sentence,) = driver.machine.degraded
    assert sentence.startswith("rank 2 (expert) is slow: it takes ")
    assert driver.machine.slowness[2] > 2


def test_trials_are_due_without_reports():
    driver = SlowDriver()
    driver.demote(2)
    deadline = driver.machine.next_deadline()
    assert deadline is not None and deadline > driver.now
    driver.pass_time(deadline - driver.now)
    assert "is trial" in driver.decision.reason and driver.levels(driver.decision.effects) == []
    assert not driver.worker(2).is_slow and driver.first_places() == {1, 2, 3}
    assert driver.machine.next_deadline() is None


def test_still_slow_it_is_asked_to_leave_and_the_next_incarnation_is_one_like_any_other():
    driver = SlowDriver()
    driver.demote(2)
    effects = driver.pace(8, slow=2)
    assert driver.levels(effects) == [Standing.DRAINED]
    assert [effect for effect in effects if is_told(effect, Leave)] == [Tell(2, 1, Leave())]
    driver.tell(Said(2, 1, Leaving()))
    driver.tell(Exited(2, 1, 0))
    assert driver.only(Lost).cause == "left"
    driver.bring_up(2, 2)
    assert not driver.worker(2).is_slow and driver.worker(2).note == ""
    assert driver.machine.degraded == () and driver.first_places() == {1, 2, 3}


def test_a_place_that_is_slow_again_is_shown_and_not_drained_again():
    driver = SlowDriver()
    driver.demote(2)
    driver.pace(8, slow=2)
    driver.tell(Said(2, 1, Leaving()))
    driver.tell(Exited(2, 1, 0))
    driver.bring_up(2, 2)
    effects = driver.pace(60, slow=2, incarnations={2: 2})
    levels = driver.levels(effects)
    assert levels[0] is Standing.DEMOTED and Standing.DRAINED not in levels
    assert not [effect for effect in effects if is_told(effect, Leave)]


def test_a_worker_whose_experts_have_no_other_place_is_not_asked_to_leave():
    driver = SlowDriver()
    driver.tell(Exited(3, 1, -9))
    effects = driver.pace(20, slow=2)
    assert Standing.DRAINED not in driver.levels(effects), "rank 3 is not there"
    assert driver.worker(2).state is WorkerState.READY


def test_reports_about_another_incarnation_or_by_a_lost_worker_do_not_count():
    driver = SlowDriver()
    assert driver.pace(20, slow=2, incarnations={2: 7}) == []
    assert 2 not in driver.machine.slowness
    num_stale = driver.machine.num_stale
    driver.tell(Said(0, 9, PaceReported(own=Work(1.0, (1, 1, 1)))))
    assert driver.machine.num_stale == num_stale + 1
