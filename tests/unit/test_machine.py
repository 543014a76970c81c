"""The orchestrator's machine, event by event: what it decides and the reason that it gives."""

import pytest

from everserve.orchestrator.effects import AllReady, BackOff, GiveUp, Kill, Lost, Probe, Provision, Publish
from everserve.orchestrator.events import (
    Answered,
    ChannelEnded,
    Died,
    Exited,
    Reported,
    SaidFailed,
    SaidHello,
    SaidReady,
    Silent,
    Started,
    Stopping,
    Tick,
)
from everserve.orchestrator.machine import Machine, Policy, SeatSpec
from everserve.plan.placement import place_experts
from everserve.tables.ids import Rank, Role
from everserve.tables.members import WorkerState

POLICY = Policy(detect_s=0.1)
ATTENTION, EXPERT = (Role.ATTENTION,), (Role.EXPERT,)


class Driver:
    """The machine with a clock: events in, decisions out, the effects of the last one by kind."""

    def __init__(self, num_attention: int = 1, num_expert: int = 3, ready: bool = True) -> None:
        seats = [SeatSpec(Rank(i), ATTENTION) for i in range(num_attention)]
        seats += [SeatSpec(Rank(num_attention + i), EXPERT) for i in range(num_expert)]
        placement = place_experts(12, (0, 1), [seat.rank for seat in seats[num_attention:]], None)
        self.machine = Machine(seats, placement, POLICY)
        self.now = 100.0
        self.decision = self.machine.start(self.now)
        if ready:
            for seat in seats:
                self.bring_up(seat.rank)
            assert self.machine.was_all_ready

    def tell(self, event):
        self.decision = self.machine.handle(event, self.now)
        return self.decision

    def bring_up(self, rank: int, incarnation: int = 1) -> None:
        self.tell(Started(rank, incarnation, 1000 * incarnation + rank))
        self.tell(SaidHello(rank, incarnation))
        self.tell(SaidReady(rank, incarnation))

    def pass_time(self, seconds: float):
        self.now += seconds
        return self.tell(Tick())

    def only(self, kind):
        found = [effect for effect in self.decision.effects if isinstance(effect, kind)]
        assert len(found) == 1, self.decision
        return found[0]

    def kinds(self) -> list[str]:
        return [type(effect).__name__ for effect in self.decision.effects]

    def worker(self, rank: int):
        return next(worker for worker in self.machine.members.workers if worker.rank == rank)

    def routed(self) -> set[int]:
        return set(self.machine.routes.array()[..., 0].ravel().tolist()) - {-1}


# -- starting ------------------------------------------------------------------------------------


def test_start_provisions_every_seat_and_says_what_is_missing():
    driver = Driver(ready=False)
    assert driver.kinds() == ["Publish", "Provision", "Provision", "Provision", "Provision"]
    assert driver.decision.reason == "the instance starts with 4 seats"
    assert driver.machine.epoch == 1
    assert "no attention worker is ready" in driver.machine.violations
    assert "12 experts of layers 0-1 have no place: 0, 1, 2, 3, 4, 5, 6, 7, ..." in driver.machine.violations
    assert "rank 2 (expert) is starting" in driver.machine.degraded
    assert (driver.worker(1).slots, driver.worker(1).shadow_slots) == (8, 4)


def test_all_ready_is_said_once():
    driver = Driver(ready=False)
    said = []
    for rank in range(4):
        driver.bring_up(rank)
        said.append(AllReady() in driver.decision.effects)
    assert said == [False, False, False, True]
    assert (driver.machine.violations, driver.machine.degraded) == ((), ())
    driver.tell(Died(2, 1))
    driver.bring_up(2, 2)
    assert driver.kinds() == ["Publish"]


def test_seats_with_both_roles_have_neither_placement_nor_routes():
    machine = Machine([SeatSpec(Rank(0), (Role.ATTENTION, Role.EXPERT), slots=16)], None, POLICY)
    machine.start(0.0)
    machine.handle(Started(0, 1, 7), 0.0)
    decision = machine.handle(SaidReady(0, 1), 1.0)
    publish, all_ready = decision.effects
    assert (publish.routes, publish.violations, publish.degraded) == (None, (), ())
    assert all_ready == AllReady()
    assert (machine.members.workers[0].slots, machine.members.workers[0].shadow_slots) == (16, 0)


def test_routes_lead_to_a_worker_from_its_ready_on():
    driver = Driver(ready=False)
    driver.tell(Started(1, 1, 5))
    assert driver.worker(1).pid == 5
    assert driver.routed() == set()
    driver.tell(SaidReady(1, 1))
    assert driver.decision.reason == "rank 1 incarnation 1 is ready"
    assert driver.routed() == {1}


# -- losses --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "cause", "reason", "is_killed_later"),
    [
        (Died(2, 1), "crash", "the kernel marked its life word", True),
        (ChannelEnded(2, 1), "crash", "its control channel ended", True),
        (Exited(2, 1, -9), "crash", "killed by SIGKILL", False),
        (Exited(2, 1, -64), "crash", "killed by SIGRTMAX", False),
        (Exited(2, 1, 139), "crash", "exited with status 139", False),
        (Exited(2, 1, 0), "exit", "exited with status 0", False),
        (Exited(2, 1, 1), "exit", "exited with status 1", False),
        (SaidFailed(2, 1, "no memory"), "exit", "no memory", True),
        (SaidFailed(2, 1, "no such file", user_error=True), "exit", "no such file", True),  # was up: not given up
        (Silent(2, 1, "T"), "hang", "silent and stopped (T)", True),
        (Silent(2, 1, "t"), "hang", "silent and stopped (t)", True),
        (Silent(2, 1, None), "hang", "silent, and its process cannot be looked at", True),
        (Silent(2, 1, "Z"), "crash", "silent and dead (Z)", True),
        (Silent(2, 1, "X"), "crash", "silent and dead (X)", True),
    ],
)
def test_what_is_a_loss(event, cause, reason, is_killed_later):
    driver = Driver()
    epoch = driver.machine.epoch
    driver.now += 60
    driver.tell(event)
    assert driver.decision.effects[0] == Lost(2, 1, EXPERT, cause, reason, is_expected=False)
    assert driver.decision.reason == f"rank 2 incarnation 1 is gone ({cause}): {reason}"
    assert driver.kinds() == ["Lost", "Publish", "Provision"]
    assert driver.only(Provision) == Provision(2, 2)
    assert driver.machine.epoch == epoch + 1
    assert driver.routed() == {1, 3}
    assert driver.machine.violations == ()
    assert driver.worker(2).state is WorkerState.STARTING
    assert driver.worker(2).note == f"incarnation 1 was lost: {reason}"
    driver.tell(Started(2, 2, 77))
    driver.tell(SaidHello(2, 2))
    assert driver.machine.next_deadline() == (driver.now + POLICY.fence_grace_s if is_killed_later else None)


def test_a_lost_process_is_killed_unless_it_ends_in_time():
    driver = Driver()
    driver.tell(Silent(1, 1, "T"))
    driver.tell(Silent(2, 1, "T"))
    driver.tell(Exited(2, 1, 1))
    assert driver.decision.reason == "rank 2 incarnation 1 was lost already; now its process has ended"
    assert driver.pass_time(POLICY.fence_grace_s - 0.1).effects == ()
    driver.pass_time(0.1)
    assert driver.decision.effects == (Kill(1, 1),)
    assert driver.decision.reason == "rank 1 incarnation 1 was lost and has not ended: kill it"
    assert driver.machine.next_deadline() is None


def test_a_death_is_seen_in_many_ways_and_counts_once():
    driver = Driver()
    driver.tell(Died(2, 1))
    epoch = driver.machine.epoch
    for echo in (ChannelEnded(2, 1), Reported(2, 1, by=0, reason="no answer"), Silent(2, 1, "Z"), Exited(2, 1, -9)):
        assert driver.tell(echo).effects == ()
        assert "was lost already" in driver.decision.reason
    assert (driver.machine.epoch, driver.machine.num_stale) == (epoch, 0)


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (SaidReady(2, 1), "rank 2 incarnation 1 was lost already: SaidReady dropped"),
        (SaidHello(2, 1), "rank 2 incarnation 1 was lost already: SaidHello dropped"),
        (SaidFailed(2, 1, "late"), "rank 2 incarnation 1 was lost already: SaidFailed dropped"),
        (Answered(2, 1), "rank 2 incarnation 1 was lost already: Answered dropped"),
        (Started(2, 1, 5), "rank 2 incarnation 1 was lost already: Started dropped"),
        (SaidReady(2, 3), "rank 2 incarnation 3 was never provisioned: SaidReady dropped"),
        (Exited(2, 3, 0), "rank 2 incarnation 3 was never provisioned: Exited dropped"),
        (Died(2, 0), "rank 2 incarnation 0 was never provisioned: Died dropped"),
        (SaidReady(9, 1), "rank 9 incarnation 1 was never provisioned: SaidReady dropped"),
    ],
)
def test_what_the_wrong_incarnation_says_changes_nothing_and_is_counted(event, reason):
    driver = Driver()
    driver.tell(Silent(2, 1, "T"))
    tables, deadline = driver.machine.tables(), driver.machine.next_deadline()
    assert driver.tell(event).effects == ()
    assert driver.decision.reason == reason
    assert driver.machine.num_stale == 1
    assert (driver.machine.tables(), driver.machine.next_deadline()) == (tables, deadline)


def test_a_process_that_comes_to_be_after_its_end_was_reported_is_killed():
    driver = Driver(ready=False)
    driver.tell(Exited(2, 1, 1))
    assert driver.tell(Started(2, 1, 5)).effects == (Kill(2, 1),)
    assert driver.worker(2).pid == 0


# -- doubt ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["R", "D", "S"])
def test_a_starved_worker_is_lost_only_after_a_last_look(state):
    driver = Driver()
    assert driver.tell(Silent(2, 1, state)).effects == ()
    assert driver.decision.reason == f"rank 2 incarnation 1 is silent but not stopped ({state}): it may only be starved"
    assert driver.machine.next_deadline() == driver.now + POLICY.starved_s
    driver.pass_time(POLICY.starved_s)
    assert driver.decision.effects == (Probe(2, 1),)
    assert driver.decision.reason == "rank 2 incarnation 1 has been silent for 1 s: a last look"
    assert driver.machine.next_deadline() is None, "the answer decides, not the clock"
    driver.tell(Silent(2, 1, state))
    assert driver.only(Lost).reason == f"silent for 1 s though not stopped ({state})"
    assert driver.only(Lost).cause == "hang"


def test_a_starved_worker_that_answers_is_not_lost():
    driver = Driver()
    epoch = driver.machine.epoch
    driver.tell(Silent(2, 1, "R"))
    driver.now += 0.9
    assert driver.tell(Answered(2, 1)).effects == ()
    assert driver.decision.reason == "rank 2 incarnation 1 answers after a silence"
    driver.tell(Silent(2, 1, "R"))  # a new silence has a new limit
    assert driver.machine.next_deadline() == driver.now + POLICY.starved_s
    driver.pass_time(POLICY.starved_s)
    assert driver.tell(Answered(2, 1)).effects == ()
    assert driver.machine.epoch == epoch
    assert driver.worker(2).state is WorkerState.READY


def test_a_starved_worker_that_is_stopped_then_is_lost_at_once():
    driver = Driver()
    driver.tell(Silent(2, 1, "R"))
    driver.tell(Silent(2, 1, "T"))
    assert driver.only(Lost).reason == "silent and stopped (T)"


def test_readiness_said_before_a_silence_does_not_end_it():
    driver = Driver(ready=False)
    driver.tell(Started(1, 1, 5))
    driver.tell(Silent(1, 1, "R"))
    driver.tell(SaidReady(1, 1))
    assert driver.machine.next_deadline() == driver.now + POLICY.starved_s


def test_a_report_is_probed_once_and_an_answer_is_published():
    driver = Driver()
    epoch = driver.machine.epoch
    driver.tell(Reported(2, 1, by=0, reason="no answer in layer 1"))
    assert driver.decision.effects == (Probe(2, 1),)
    assert driver.decision.reason == "rank 2 incarnation 1 is suspected by rank 0: no answer in layer 1"
    assert driver.tell(Reported(2, 1, by=0, reason="again")).effects == (), "the first look is still under way"
    driver.tell(Answered(2, 1))
    assert driver.decision.reason == "rank 2 incarnation 1 answers: peers that suspect it shall trust it again"
    publish = driver.only(Publish)
    assert (publish.members.epoch, publish.routes.epoch) == (epoch + 1, epoch + 1)
    assert driver.routed() == {1, 2, 3}
    assert driver.tell(Answered(2, 1)).effects == ()
    assert driver.decision.reason == "rank 2 incarnation 1 answers; nobody was in doubt"


def test_a_report_of_a_hang():
    driver = Driver()
    driver.tell(Reported(2, 1, by=0, reason="no answer"))
    driver.tell(Silent(2, 1, "T"))
    assert driver.only(Lost).cause == "hang"
    driver.bring_up(2, 2)
    assert driver.tell(Answered(2, 2)).effects == (), "the report was about the one before"


def test_a_starved_worker_that_was_reported_is_trusted_again_when_it_answers():
    driver = Driver()
    driver.tell(Reported(2, 1, by=0, reason="no answer"))
    assert driver.tell(Silent(2, 1, "R")).effects == ()
    assert driver.machine.next_deadline() == driver.now + POLICY.starved_s, "the look was answered: the limit counts"
    assert driver.tell(Reported(2, 1, by=0, reason="still no answer")).effects == (Probe(2, 1),)
    driver.tell(Answered(2, 1))
    assert driver.kinds() == ["Publish"]


def test_a_report_before_the_hello_is_not_probed():
    driver = Driver(ready=False)
    driver.tell(Started(2, 1, 5))
    assert driver.tell(Reported(2, 1, by=0, reason="no answer")).effects == ()
    assert driver.decision.reason.endswith("it has not said hello yet, so there is nothing to look at")
    driver.tell(SaidHello(2, 1))
    assert driver.tell(Reported(2, 1, by=0, reason="no answer")).effects == (Probe(2, 1),)


def test_a_process_that_never_says_a_word_is_a_hang():
    driver = Driver(ready=False)
    for rank in range(4):
        driver.tell(Started(rank, 1, 10 + rank))
        if rank != 2:
            driver.tell(SaidHello(rank, 1))
    assert driver.machine.next_deadline() == driver.now + POLICY.hello_s
    driver.pass_time(POLICY.hello_s)
    assert driver.only(Lost) == Lost(2, 1, EXPERT, "hang", "has not said a word in 10 s", is_expected=False)
    assert driver.only(Provision) == Provision(2, 2)
    assert driver.machine.next_deadline() == driver.now + POLICY.fence_grace_s, "who says hello may load for hours"


def test_a_worker_that_hangs_while_it_loads_is_lost_too():
    driver = Driver(ready=False)
    driver.tell(Started(2, 1, 5))
    driver.tell(SaidHello(2, 1))
    driver.tell(Silent(2, 1, "T"))
    assert driver.only(Lost).reason == "silent and stopped (T)"
    assert driver.only(Provision) == Provision(2, 2)


# -- crash loops ---------------------------------------------------------------------------------


def test_crash_loop_delays_double_up_to_a_limit():
    driver = Driver()
    driver.now += 60
    driver.tell(Exited(2, 1, -9))  # was stable: not part of a loop
    delays = []
    for incarnation in range(2, 14):
        driver.tell(Started(2, incarnation, 5))
        driver.tell(Exited(2, incarnation, 1))
        assert GiveUp not in map(type, driver.decision.effects)
        if Provision(2, incarnation + 1) in driver.decision.effects:
            delays.append(0.0)
            continue
        back_off = driver.only(BackOff)
        delays.append(back_off.delay_s)
        assert back_off.num_crashes == incarnation - 1
        assert driver.worker(2).state is WorkerState.GONE
        assert driver.machine.next_deadline() == driver.now + back_off.delay_s
        driver.pass_time(back_off.delay_s)
        assert driver.only(Provision) == Provision(2, incarnation + 1)
        assert driver.decision.reason == f"rank 2 incarnation {incarnation + 1} starts after a delay"
    assert delays == [0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, 30.0]


def test_operators_see_the_crash_loop():
    driver = Driver()
    for incarnation in (1, 2, 3):
        driver.tell(Exited(2, incarnation, 1))
        driver.pass_time(0.25)
    assert driver.worker(2).note == "crashed 3 times while starting (last: exited with status 1); next start in 0.5 s"
    assert f"rank 2 (expert) is gone: {driver.worker(2).note}" in driver.machine.degraded
    driver.pass_time(0.25)
    assert driver.worker(2).note == "crashed 3 times while starting (last: exited with status 1)"
    assert driver.worker(2).state is WorkerState.STARTING
    driver.bring_up(2, 4)
    assert driver.worker(2).note == ""
    driver.tell(Exited(2, 4, -11))
    assert driver.worker(2).note.startswith("crashed 4 times soon after starting (last: killed by SIGSEGV); next start")


def test_a_stable_life_ends_the_loop():
    driver = Driver()
    driver.tell(Died(2, 1))
    driver.tell(Died(2, 2))
    assert driver.only(BackOff).num_crashes == 2
    driver.pass_time(0.25)
    driver.bring_up(2, 3)
    driver.now += POLICY.stable_s
    driver.tell(Died(2, 3))
    assert driver.only(Provision) == Provision(2, 4)
    driver.tell(Died(2, 4))
    assert driver.only(Provision) == Provision(2, 5), "the first short life after a stable one"


# -- giving up and stopping ----------------------------------------------------------------------


def test_a_user_error_during_start_ends_everything():
    driver = Driver(ready=False)
    driver.tell(SaidFailed(2, 1, "no such model", user_error=True))
    assert driver.kinds() == ["Lost", "Publish", "GiveUp"]
    assert driver.only(GiveUp) == GiveUp("no such model", user_error=True)
    assert driver.worker(2).note == "not started again: the instance gave up"
    driver.tell(SaidFailed(1, 1, "no such model", user_error=True))
    assert driver.kinds() == ["Lost", "Publish"], "said once"


def test_a_user_error_counts_even_if_the_death_was_seen_first():
    driver = Driver(ready=False)
    driver.tell(Died(2, 1))
    driver.tell(SaidFailed(2, 1, "no such model", user_error=True))
    assert driver.decision.effects == (GiveUp("no such model", user_error=True),)
    assert driver.tell(SaidFailed(2, 1, "no such model", user_error=True)).effects == ()


def test_five_failed_starts_of_one_seat_before_all_were_ready():
    driver = Driver(ready=False)
    for incarnation in range(1, 6):
        driver.pass_time(30)
        driver.tell(Started(2, incarnation, 5))
        driver.tell(SaidFailed(2, incarnation, "no memory"))
    assert driver.only(GiveUp) == GiveUp("rank 2 ended 5 times before it was ready; last: no memory", False)
    assert BackOff not in map(type, driver.decision.effects)


def test_failed_starts_of_different_seats_or_with_a_success_between_are_not_five():
    driver = Driver(ready=False)
    for rank in (1, 2):
        for incarnation in range(1, 5):
            driver.pass_time(30)
            driver.tell(Exited(rank, incarnation, 1))
            assert GiveUp not in map(type, driver.decision.effects)
    driver.pass_time(30)
    driver.bring_up(2, 5)
    driver.tell(Exited(2, 5, 1))  # it had been ready
    driver.pass_time(30)
    driver.tell(Exited(2, 6, 1))
    assert GiveUp not in map(type, driver.decision.effects)


def test_stopping_starts_nobody_and_expects_ends():
    driver = Driver()
    driver.tell(Died(1, 1))
    driver.tell(Died(1, 2))
    assert driver.machine.next_deadline() == driver.now + 0.25
    driver.tell(Stopping())
    assert driver.kinds() == ["Publish"]
    assert driver.worker(1).note == "not started again: the instance stops"
    driver.tell(Exited(2, 1, 0))
    assert driver.kinds() == ["Lost", "Publish"]
    assert driver.only(Lost).is_expected
    driver.tell(Exited(1, 1, -9))
    driver.tell(Exited(1, 2, -9))
    assert driver.machine.next_deadline() is None
    assert driver.tell(Stopping()).effects == ()


def test_stopping_before_all_are_ready_never_says_all_ready():
    driver = Driver(ready=False)
    driver.tell(Stopping())
    for rank in range(4):
        driver.bring_up(rank)
    assert AllReady() not in driver.decision.effects


# -- publishing ----------------------------------------------------------------------------------


def test_nothing_is_published_when_nothing_changed():
    driver = Driver()
    tables = driver.machine.tables()
    for event in (SaidReady(2, 1), SaidHello(2, 1), Started(2, 1, driver.worker(2).pid), Answered(2, 1), Tick()):
        assert driver.tell(event).effects == ()
    assert driver.machine.tables() is tables
    assert driver.tell(Tick()).reason == "nothing is due"


def test_one_tick_does_everything_that_is_due_in_the_order_of_urgency():
    driver = Driver()
    driver.tell(Silent(1, 1, "T"))  # killed later
    driver.tell(Started(1, 2, 5))  # says nothing
    driver.tell(Silent(2, 1, "R"))  # starved
    driver.pass_time(POLICY.fence_grace_s)
    assert driver.kinds() == ["Lost", "Publish", "BackOff", "Kill", "Probe"]
    assert driver.decision.reason.count(";") == 2
