"""The orchestrator's machine, event by event: what it decides and the reason that it gives."""

import dataclasses
import math

import msgspec
import pytest

from everserve.control.decide.effects import (
    AllReady,
    GiveUp,
    Kill,
    Lost,
    Probe,
    Provision,
    Publish,
    Resumed,
    Show,
    Tell,
)
from everserve.control.decide.inputs import (
    Alive,
    ChannelEnded,
    Died,
    Exited,
    Said,
    Silent,
    Started,
    Tick,
)
from everserve.control.decide.machine import Found, Machine, Policy
from everserve.plan.placement import place_experts
from everserve.tables.goal import Wanted
from everserve.tables.ids import Epoch, Incarnation, Rank, Role
from everserve.tables.members import WorkerState
from everserve.wire.events import WorkerBackedOff
from everserve.wire.messages import (
    Answered,
    Ask,
    Failed,
    GatewayReport,
    Hello,
    Leave,
    Leaving,
    Ready,
    Report,
    RoutesUsed,
    Shutdown,
    SlotsReported,
    Suspected,
)
from everserve.wire.operators import DrainRequest, DrainView
from tests.support.decisions import ask, kind_of, view_of
from tests.support.held_slots import goal_of, held

POLICY = Policy(detect_s=0.1, heal_after_s=math.inf)  # of moves: tests/property/test_moves.py
ATTENTION, EXPERT = (Role.ATTENTION,), (Role.EXPERT,)


def new_machine(num_expert: int) -> Machine:
    """One attention seat, then the experts'."""
    return Machine(goal_of([0], placement_of(num_expert)), POLICY)


def with_slots(found: list[Found], num_expert: int) -> list[Found]:
    """Expert workers that have reported hold what they should."""
    placement = placement_of(num_expert)
    return [
        dataclasses.replace(one, slots=held(placement, one.rank)) if placement.seat(one.rank) and one.is_ready else one
        for one in found
    ]


def placement_of(num_expert: int):
    return place_experts(12, (0, 1), [Rank(1 + i) for i in range(num_expert)], None)


class Driver:
    """The machine with a clock: events in, decisions out, the effects of the last one by kind."""

    def __init__(self, num_expert: int = 3, ready: bool = True) -> None:
        self.machine = new_machine(num_expert)
        self.now = 100.0
        self.decision = self.machine.start(self.now)
        if ready:
            for rank in range(1 + num_expert):
                self.bring_up(rank)
            assert self.machine.was_all_ready

    @classmethod
    def resumed(cls, found: list[Found], num_expert: int = 3, epoch: int = 5, was_all_ready: bool = True) -> "Driver":
        """After another orchestrator."""
        driver = cls(num_expert, ready=False)
        driver.machine = new_machine(num_expert)
        driver.decision = driver.machine.resume(driver.now, with_slots(found, num_expert), Epoch(epoch), was_all_ready)
        driver.only(Resumed)
        return driver

    def tell(self, event):
        self.decision = self.machine.handle(event, self.now)
        return self.decision

    def refused(self, asked: Ask) -> str:
        """Why nothing was done."""
        self.tell(asked)
        assert self.kinds() == ["Answered"] and self.only(Answered).refused == self.decision.reason
        return self.decision.reason

    def bring_up(self, rank: int, incarnation: int = 1) -> None:
        self.tell(Started(rank, incarnation, 1000 * incarnation + rank))
        self.tell(Said(rank, incarnation, Hello()))
        self.hold(rank, incarnation)
        self.tell(Said(rank, incarnation, Ready()))

    def hold(self, rank: int, incarnation: int = 1) -> None:
        if rank > 0:
            self.tell(Said(rank, incarnation, SlotsReported(slots=held(self.machine.goal.placement, rank))))

    def pass_time(self, seconds: float):
        self.now += seconds
        return self.tell(Tick())

    def only(self, kind):
        found = [effect for effect in self.decision.effects if kind_of(effect) is kind]
        assert len(found) == 1, self.decision
        return found[0]

    def kinds(self) -> list[str]:
        """Of all effects but that of having resumed."""
        return [kind_of(effect).__name__ for effect in self.decision.effects if not isinstance(effect, Resumed)]

    def worker(self, rank: int):
        return next(worker for worker in self.machine.members.workers if worker.rank == rank)

    def routed(self) -> set[int]:
        return set(self.machine.routes.array()[..., 0].ravel().tolist()) - {-1}

    def places(self, expert: int) -> set[int]:
        return {rank for rank, _ in self.machine.routes.candidates(0, expert)}


# -- starting ------------------------------------------------------------------------------------


def test_start_provisions_every_seat_and_says_what_is_missing():
    driver = Driver(ready=False)
    assert driver.kinds() == ["KeepGoal", "Publish", "Provision", "Provision", "Provision", "Provision"]
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
    machine = Machine(goal_of([0], None, own_experts=16), POLICY)
    machine.start(0.0)
    machine.handle(Started(0, 1, 7), 0.0)
    decision = machine.handle(Said(0, 1, Ready()), 1.0)
    publish, all_ready = decision.effects
    assert (publish.routes, publish.violations, publish.degraded) == (None, (), ())
    assert all_ready == AllReady()
    assert (machine.members.workers[0].slots, machine.members.workers[0].shadow_slots) == (16, 0)


def test_routes_lead_to_a_worker_from_its_ready_on():
    driver = Driver(ready=False)
    driver.tell(Started(1, 1, 5))
    assert driver.worker(1).pid == 5
    driver.hold(1)
    assert driver.routed() == set(), "it holds experts, and is not ready"
    driver.tell(Said(1, 1, Ready()))
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
        (Said(2, 1, Failed(reason="no memory", user_error=False)), "exit", "no memory", True),
        (
            Said(2, 1, Failed(reason="no such file", user_error=True)),
            "exit",
            "no such file",
            True,
        ),  # was up: not given up
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
    driver.tell(Said(2, 2, Hello()))
    assert driver.machine.next_deadline() == (driver.now + POLICY.fence_grace_s if is_killed_later else None)


def test_a_lost_process_is_killed_unless_it_ends_in_time():
    driver = Driver()
    driver.tell(Silent(1, 1, "T"))
    driver.tell(Silent(2, 1, "T"))
    driver.tell(Exited(2, 1, 1))
    assert driver.decision.reason == "rank 2 incarnation 1 was lost already; now its process has ended"
    assert not any(isinstance(one, Kill) for one in driver.pass_time(POLICY.fence_grace_s - 0.1).effects)
    driver.pass_time(0.1)
    assert driver.decision.effects == (Kill(1, 1),)
    assert driver.decision.reason == "rank 1 incarnation 1 was lost and has not ended: kill it"
    assert driver.machine.next_deadline() is None


def test_a_death_is_seen_in_many_ways_and_counts_once():
    driver = Driver()
    driver.tell(Died(2, 1))
    epoch = driver.machine.epoch
    for echo in (
        ChannelEnded(2, 1),
        Said(0, 1, Suspected(rank=2, incarnation=1, reason="no answer")),
        Silent(2, 1, "Z"),
        Exited(2, 1, -9),
    ):
        assert driver.tell(echo).effects == ()
        assert "was lost already" in driver.decision.reason
    assert (driver.machine.epoch, driver.machine.num_stale) == (epoch, 0)


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (Said(2, 1, Ready()), "rank 2 incarnation 1 was lost already: Ready dropped"),
        (Said(2, 1, Hello()), "rank 2 incarnation 1 was lost already: Hello dropped"),
        (
            Said(2, 1, Failed(reason="late", user_error=False)),
            "rank 2 incarnation 1 was lost already: Failed dropped",
        ),
        (Said(2, 1, Leaving()), "rank 2 incarnation 1 was lost already: Leaving dropped"),
        (Alive(2, 1), "rank 2 incarnation 1 was lost already: Alive dropped"),
        (Started(2, 1, 5), "rank 2 incarnation 1 was lost already: Started dropped"),
        (Said(2, 3, Ready()), "rank 2 incarnation 3 was never provisioned: Ready dropped"),
        (Exited(2, 3, 0), "rank 2 incarnation 3 was never provisioned: Exited dropped"),
        (Died(2, 0), "rank 2 incarnation 0 was never provisioned: Died dropped"),
        (Said(9, 1, Ready()), "rank 9 incarnation 1 was never provisioned: Ready dropped"),
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


@pytest.mark.parametrize("state", ["R", "S"])
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


@pytest.mark.parametrize("state", ["R", "S"])
def test_a_worker_whose_main_thread_hangs_is_lost_at_once(state):
    driver = Driver()
    driver.tell(Silent(2, 1, state, is_hung=True))
    assert driver.only(Lost).reason == f"its main thread hangs, in a process that runs ({state})"
    assert driver.only(Lost).cause == "hang"


def test_a_main_thread_that_waits_for_a_disk_does_not_hang():
    driver = Driver()
    assert driver.tell(Silent(2, 1, "D", is_hung=True)).effects == ()


def test_a_worker_that_waits_for_a_disk_gets_more_time():
    driver = Driver()
    driver.tell(Silent(2, 1, "D"))
    num_looks = 0
    while driver.worker(2).state is WorkerState.READY:
        num_looks += 1
        driver.pass_time(POLICY.starved_s)
        assert driver.only(Probe) == Probe(2, 1)
        driver.tell(Silent(2, 1, "D"))
    assert num_looks == pytest.approx(POLICY.blocked_s / POLICY.starved_s)
    assert driver.only(Lost).reason == "silent for 60 s though not stopped (D)"


def test_a_worker_that_has_waited_for_a_disk_and_hangs_now_is_lost_at_the_next_look():
    driver = Driver()
    for state in ("D", "D"):
        driver.tell(Silent(2, 1, state))
        assert driver.worker(2).state is WorkerState.READY
        driver.pass_time(POLICY.starved_s)
    driver.tell(Silent(2, 1, "S"))
    assert driver.only(Lost).cause == "hang"


def test_a_starved_worker_that_answers_is_not_lost():
    driver = Driver()
    epoch = driver.machine.epoch
    driver.tell(Silent(2, 1, "R"))
    driver.now += 0.9
    assert driver.tell(Alive(2, 1)).effects == ()
    assert driver.decision.reason == "rank 2 incarnation 1 answers after a silence"
    driver.tell(Silent(2, 1, "R"))  # a new silence has a new limit
    assert driver.machine.next_deadline() == driver.now + POLICY.starved_s
    driver.pass_time(POLICY.starved_s)
    assert driver.tell(Alive(2, 1)).effects == ()
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
    driver.tell(Said(1, 1, Ready()))
    assert driver.machine.next_deadline() == driver.now + POLICY.starved_s


def test_a_report_is_probed_once_and_an_answer_is_published():
    driver = Driver()
    epoch = driver.machine.epoch
    driver.tell(Said(0, 1, Suspected(rank=2, incarnation=1, reason="no answer in layer 1")))
    assert driver.decision.effects == (Probe(2, 1),)
    assert driver.decision.reason == "rank 2 incarnation 1 is suspected by rank 0: no answer in layer 1"
    assert driver.tell(Said(0, 1, Suspected(rank=2, incarnation=1, reason="again"))).effects == (), (
        "the first look is still under way"
    )
    driver.tell(Alive(2, 1))
    assert driver.decision.reason == "rank 2 incarnation 1 answers: peers that suspect it shall trust it again"
    publish = driver.only(Publish)
    assert (publish.members.epoch, publish.routes.epoch) == (epoch + 1, epoch + 1)
    assert driver.routed() == {1, 2, 3}
    assert driver.tell(Alive(2, 1)).effects == ()
    assert driver.decision.reason == "rank 2 incarnation 1 answers; it was not in doubt"


def test_a_report_of_a_hang():
    driver = Driver()
    driver.tell(Said(0, 1, Suspected(rank=2, incarnation=1, reason="no answer")))
    driver.tell(Silent(2, 1, "T"))
    assert driver.only(Lost).cause == "hang"
    driver.bring_up(2, 2)
    assert driver.tell(Alive(2, 2)).effects == (), "the report was about the one before"


def test_a_starved_worker_that_was_reported_is_trusted_again_when_it_answers():
    driver = Driver()
    driver.tell(Said(0, 1, Suspected(rank=2, incarnation=1, reason="no answer")))
    assert driver.tell(Silent(2, 1, "R")).effects == ()
    assert driver.machine.next_deadline() == driver.now + POLICY.starved_s, "the look was answered: the limit counts"
    assert driver.tell(Said(0, 1, Suspected(rank=2, incarnation=1, reason="still no answer"))).effects == (Probe(2, 1),)
    driver.tell(Alive(2, 1))
    assert driver.kinds() == ["Publish"]


def complain(driver, reason: str, by: int = 0, rank: int = 2):
    """A peer reports it, and a look finds it well: it is pardoned, if it is not lost at once."""
    decision = driver.tell(Said(by, 1, Suspected(rank=rank, incarnation=1, reason=reason)))
    if Probe(rank, 1) in decision.effects:
        driver.tell(Alive(rank, 1))
        assert "Publish" in driver.kinds()
    return decision


@pytest.mark.parametrize("reason", ["deaf", "refused: bad request", "refused: no such slot", "refused"])
def test_one_that_pulses_but_does_not_serve_is_lost_as_a_hang(reason):
    driver = Driver()
    for _ in range(POLICY.max_unserved - 1):
        assert complain(driver, reason).effects == (Probe(2, 1),)
        driver.now += 3 * POLICY.detect_s
    complain(driver, reason)
    assert driver.kinds() == ["Lost", "Publish", "Provision"] and driver.only(Lost).cause == "hang"
    assert driver.only(Lost).reason == f"it pulses but did not serve rank 0, 3 times within 20 s (last: {reason})"
    assert driver.routed() == {1, 3}
    driver.bring_up(2, 2)
    assert driver.tell(Said(0, 1, Suspected(rank=2, incarnation=2, reason=reason))).effects == (Probe(2, 2),), (
        "the next one begins anew"
    )


@pytest.mark.parametrize("reason", ["silent", "died"])
def test_what_a_look_can_refute_does_not_count(reason):
    driver = Driver()
    for _ in range(10):
        assert complain(driver, reason).effects == (Probe(2, 1),)


def test_a_bad_moment_now_and_then_does_not_count():
    driver = Driver()
    for _ in range(10):
        assert complain(driver, "deaf").effects == (Probe(2, 1),)
        driver.now += POLICY.unserved_s / 2 + 0.001


def test_one_bad_moment_that_many_peers_see_is_one():
    driver = Driver()
    for by in (0, 1, 3):
        for _ in range(POLICY.max_unserved - 1):
            assert complain(driver, "deaf", by=by).effects == (Probe(2, 1),)


def test_a_report_before_the_hello_is_not_probed():
    driver = Driver(ready=False)
    driver.tell(Started(2, 1, 5))
    assert driver.tell(Said(0, 1, Suspected(rank=2, incarnation=1, reason="no answer"))).effects == ()
    assert driver.decision.reason.endswith("it has not said hello yet, so there is nothing to look at")
    driver.tell(Said(2, 1, Hello()))
    assert driver.tell(Said(0, 1, Suspected(rank=2, incarnation=1, reason="no answer"))).effects == (Probe(2, 1),)


def test_a_process_that_never_says_a_word_is_a_hang():
    driver = Driver(ready=False)
    for rank in range(4):
        driver.tell(Started(rank, 1, 10 + rank))
        if rank != 2:
            driver.tell(Said(rank, 1, Hello()))
    assert driver.machine.next_deadline() == driver.now + POLICY.hello_s
    driver.pass_time(POLICY.hello_s)
    assert driver.only(Lost) == Lost(2, 1, EXPERT, "hang", "has not said a word in 10 s", is_expected=False)
    assert driver.only(Provision) == Provision(2, 2)
    assert driver.machine.next_deadline() == driver.now + POLICY.fence_grace_s, "who says hello may load for hours"


def test_a_worker_that_hangs_while_it_loads_is_lost_too():
    driver = Driver(ready=False)
    driver.tell(Started(2, 1, 5))
    driver.tell(Said(2, 1, Hello()))
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
        back_off = driver.only(WorkerBackedOff)
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
    assert driver.only(WorkerBackedOff).num_crashes == 2
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
    driver.tell(Said(2, 1, Failed(reason="no such model", user_error=True)))
    assert driver.kinds() == ["Lost", "Publish", "GiveUp"]
    assert driver.only(GiveUp) == GiveUp("no such model", user_error=True)
    assert driver.worker(2).note == "not started again: the instance gave up"
    driver.tell(Said(1, 1, Failed(reason="no such model", user_error=True)))
    assert driver.kinds() == ["Lost", "Publish"], "said once"


def test_a_user_error_counts_even_if_the_death_was_seen_first():
    driver = Driver(ready=False)
    driver.tell(Died(2, 1))
    driver.tell(Said(2, 1, Failed(reason="no such model", user_error=True)))
    assert driver.decision.effects == (GiveUp("no such model", user_error=True),)
    assert driver.tell(Said(2, 1, Failed(reason="no such model", user_error=True))).effects == ()


def test_five_failed_starts_of_one_seat_before_all_were_ready():
    driver = Driver(ready=False)
    for incarnation in range(1, 6):
        driver.pass_time(30)
        driver.tell(Started(2, incarnation, 5))
        driver.tell(Said(2, incarnation, Failed(reason="no memory", user_error=False)))
    assert driver.only(GiveUp) == GiveUp("rank 2 ended 5 times before it was ready; last: no memory", False)
    assert WorkerBackedOff not in map(type, driver.decision.effects)


def test_starts_that_found_nothing_to_start_with_are_tried_again_every_second():
    """However often: it says nothing of the next one. Nor does it delay that one further."""
    driver = Driver()
    driver.now += 60
    driver.tell(Died(2, 1))
    for incarnation in range(2, 20):
        driver.tell(Started(2, incarnation, 5))
        driver.tell(Said(2, incarnation, Failed(reason="no thread", user_error=False, is_temporary=True)))
        assert driver.only(WorkerBackedOff).delay_s == 1.0 and GiveUp not in map(type, driver.decision.effects)
        driver.pass_time(1.0)
        assert driver.only(Provision) == Provision(2, incarnation + 1)
    driver.bring_up(2, 20)
    driver.tell(Said(2, 20, Failed(reason="no thread", user_error=False, is_temporary=True)))
    assert driver.only(Provision) == Provision(2, 21), "one that was ready is replaced at once"


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
    driver.tell(Shutdown(grace_s=0.0))
    assert driver.kinds() == ["Publish"]
    assert driver.worker(1).note == "not started again: the instance stops"
    driver.tell(Exited(2, 1, 0))
    assert driver.kinds() == ["Lost", "Publish"]
    assert driver.only(Lost).is_expected
    driver.tell(Exited(1, 1, -9))
    driver.tell(Exited(1, 2, -9))
    assert driver.machine.next_deadline() is None
    assert driver.tell(Shutdown(grace_s=0.0)).effects == ()


def test_stopping_before_all_are_ready_never_says_all_ready():
    driver = Driver(ready=False)
    driver.tell(Shutdown(grace_s=0.0))
    for rank in range(4):
        driver.bring_up(rank)
    assert AllReady() not in driver.decision.effects


# -- leaving -------------------------------------------------------------------------------------


def test_a_drain_asks_a_ready_worker_to_leave():
    driver = Driver()
    tables = driver.machine.tables()
    driver.tell(ask(DrainRequest(rank=2)))
    assert view_of(driver.only(Answered), DrainView) == DrainView(rank=2, incarnation=1)
    assert driver.only(Leave) == Tell(2, 1, Leave())
    assert driver.decision.reason == "rank 2 incarnation 1 is asked to leave"
    assert driver.machine.tables() is tables, "it has not said that it leaves"
    driver.tell(ask(DrainRequest(rank=2)))
    assert driver.only(Leave) == Tell(2, 1, Leave()), "asked again until it says so"


def test_a_drain_is_refused_with_a_reason():
    driver = Driver()
    assert driver.refused(ask(DrainRequest(rank=9))) == "there is no rank 9"
    driver.tell(Said(2, 1, Leaving()))
    assert driver.refused(ask(DrainRequest(rank=2))) == "rank 2 incarnation 1 is not asked to leave: it is leaving"
    driver.tell(Died(1, 1))
    assert driver.refused(ask(DrainRequest(rank=1))) == "rank 1 incarnation 2 is not asked to leave: it is starting"
    driver.tell(Died(1, 2))
    assert driver.refused(ask(DrainRequest(rank=1))) == "rank 1 incarnation 2 is not asked to leave: it is gone"
    driver.tell(Shutdown(grace_s=0.0))
    assert driver.refused(ask(DrainRequest(rank=3))) == "rank 3 incarnation 1 is not asked to leave: the instance stops"


def test_workers_that_stand_in_for_each_other_are_not_drained_together():
    """Each expert has two places, on three workers: one of them may leave at a time. Streams would wait otherwise."""
    driver = Driver()
    driver.tell(ask(DrainRequest(rank=2)))
    why = "rank 1 incarnation 1 is not asked to leave yet: streams need it until rank 2 can serve them; ask again"
    for happens in (Said(2, 1, Leaving()), Died(2, 1)):
        assert driver.refused(ask(DrainRequest(rank=1))) == why
        driver.tell(happens)
    driver.bring_up(2, 2)
    driver.tell(ask(DrainRequest(rank=1)))
    assert driver.only(Leave) == Tell(1, 1, Leave())


def test_a_worker_without_another_of_its_kind_is_drained():
    """Streams wait for its successor, as the operator knows."""
    driver = Driver()
    driver.tell(ask(DrainRequest(rank=0)))
    assert driver.only(Leave) == Tell(0, 1, Leave())


def test_routes_turn_away_from_a_worker_that_leaves():
    driver = Driver()
    driver.tell(Said(2, 1, Leaving()))
    assert driver.kinds() == ["Publish", "WorkerLeaving"]
    assert driver.decision.reason == "rank 2 incarnation 1 leaves"
    assert driver.worker(2).state is WorkerState.LEAVING
    assert driver.routed() == {1, 3}
    assert driver.machine.violations == ()
    assert driver.machine.degraded[0] == "rank 2 (expert) is leaving"
    assert driver.machine.next_deadline() == driver.now + POLICY.leave_s
    driver.now += 1
    assert driver.tell(Said(2, 1, Leaving())).effects == ()
    assert driver.decision.reason == "rank 2 incarnation 1 was leaving already"
    assert driver.tell(Said(2, 1, Ready())).effects == ()
    assert driver.machine.next_deadline() == driver.now - 1 + POLICY.leave_s


def test_an_expert_that_nobody_else_has_is_served_by_the_worker_that_leaves():
    driver = Driver()
    only_in_1 = [e for e in range(12) if driver.places(e) <= {1, 2}]  # once rank 2 is gone
    assert 0 < len(only_in_1) < 12
    driver.tell(Said(1, 1, Leaving()))
    assert driver.routed() == {2, 3}
    driver.tell(Died(2, 1))
    assert driver.routed() == {1, 3}
    assert all(driver.places(e) == ({1} if e in only_in_1 else {3}) for e in range(12))
    assert driver.machine.violations == ()
    driver.bring_up(2, 2)
    assert driver.routed() == {2, 3}, "somebody else has it again"
    driver.tell(Died(2, 2))
    driver.tell(Exited(1, 1, 0))
    assert driver.routed() == {3}
    assert [line for line in driver.machine.violations if "no place" in line]


def test_a_worker_that_leaves_before_it_was_ready_serves_nobody():
    driver = Driver(num_expert=1, ready=False)
    driver.bring_up(0)
    driver.tell(Started(1, 1, 5))
    driver.tell(Said(1, 1, Leaving()))
    assert driver.worker(1).state is WorkerState.LEAVING
    assert driver.machine.next_deadline() == driver.now + POLICY.leave_s, "and not its hello"
    assert driver.tell(Said(1, 1, Ready())).effects == (), "too late"
    assert driver.decision.reason == "rank 1 incarnation 1 was leaving already"
    assert driver.routed() == set()
    driver.tell(Exited(1, 1, 0))
    assert driver.only(Lost).cause == "left"
    assert driver.only(Provision) == Provision(1, 2)


@pytest.mark.parametrize(
    ("event", "reason", "is_killed_later"),
    [
        (Exited(2, 1, 0), "exited with status 0", False),
        (Died(2, 1), "the kernel marked its life word", True),
        (ChannelEnded(2, 1), "its control channel ended", True),
        (Silent(2, 1, "Z"), "silent and dead (Z)", True),
    ],
)
def test_the_end_of_a_worker_that_leaves_is_no_fault(event, reason, is_killed_later):
    driver = Driver()
    driver.tell(Said(2, 1, Leaving()))
    driver.tell(event)
    assert driver.kinds() == ["Lost", "Publish", "Provision"]
    assert driver.only(Lost) == Lost(2, 1, EXPERT, "left", reason, is_expected=True)
    assert driver.decision.reason == f"rank 2 incarnation 1 is gone (left): {reason}"
    assert driver.only(Provision) == Provision(2, 2)
    assert driver.worker(2).note == "incarnation 1 left"
    driver.bring_up(2, 2)
    assert driver.worker(2).note == ""
    assert driver.machine.next_deadline() == (driver.now + POLICY.fence_grace_s if is_killed_later else None)
    assert driver.tell(Exited(2, 1, 0)).effects == ()
    assert driver.machine.next_deadline() is None


@pytest.mark.parametrize(
    ("event", "cause", "reason"),
    [
        (Exited(2, 1, -9), "crash", "killed by SIGKILL"),
        (Exited(2, 1, 139), "crash", "exited with status 139"),
        (Exited(2, 1, 1), "exit", "exited with status 1"),
        (Said(2, 1, Failed(reason="no memory", user_error=False)), "exit", "no memory"),
        (Silent(2, 1, "T"), "hang", "silent and stopped (T)"),
        (Silent(2, 1, None), "hang", "silent, and its process cannot be looked at"),
    ],
)
def test_what_is_a_fault_even_of_a_worker_that_leaves(event, cause, reason):
    driver = Driver()
    driver.tell(Said(2, 1, Leaving()))
    driver.tell(event)
    assert driver.only(Lost) == Lost(2, 1, EXPERT, cause, reason, is_expected=False)
    assert driver.worker(2).note == f"incarnation 1 was lost: {reason}"
    driver.tell(Died(2, 2))
    assert driver.only(WorkerBackedOff).num_crashes == 2, "both lives were short"


def test_a_worker_that_takes_too_long_to_leave_is_killed():
    driver = Driver()
    driver.tell(Said(2, 1, Leaving()))
    assert driver.pass_time(POLICY.leave_s - 0.1).effects == ()
    driver.pass_time(0.1)
    assert driver.decision.effects == (Kill(2, 1),)
    assert driver.decision.reason == "rank 2 incarnation 1 has not left in 30 s: kill it"
    assert driver.machine.next_deadline() is None
    assert driver.worker(2).state is WorkerState.LEAVING, "it is there until it has ended"
    driver.tell(Exited(2, 1, -9))
    reason = "killed by SIGKILL, after 30 s in which it had not left"
    assert driver.only(Lost) == Lost(2, 1, EXPERT, "left", reason, is_expected=True)
    assert driver.only(Provision) == Provision(2, 2)


def test_a_worker_that_leaves_may_be_starved_and_late_at_once():
    driver = Driver()
    driver.tell(Said(2, 1, Leaving()))
    driver.pass_time(POLICY.leave_s - 0.1)
    driver.tell(Silent(2, 1, "R"))
    assert driver.machine.next_deadline() == driver.now + 0.1
    assert driver.pass_time(0.1).effects == (Kill(2, 1),)
    assert driver.pass_time(0.9).effects == (Probe(2, 1),)
    driver.tell(Silent(2, 1, "D"))
    assert driver.only(Lost).cause == "hang", "not even a kill ends it"
    assert driver.only(Provision) == Provision(2, 2)


def test_leaving_neither_counts_as_a_crash_nor_ends_a_crash_loop():
    driver = Driver()
    driver.tell(Died(2, 1))
    driver.tell(Died(2, 2))
    driver.pass_time(0.25)
    for incarnation in (3, 4, 5):
        driver.bring_up(2, incarnation)
        driver.tell(Said(2, incarnation, Leaving()))
        driver.tell(Exited(2, incarnation, 0))
        assert driver.only(Provision) == Provision(2, incarnation + 1), "at once"
    driver.tell(Died(2, 6))
    assert driver.only(WorkerBackedOff).num_crashes == 3


def test_leaving_is_no_failed_start():
    driver = Driver(ready=False)
    for incarnation in range(1, 10):
        driver.tell(Started(2, incarnation, 5))
        driver.tell(Said(2, incarnation, Leaving()))
        driver.tell(Exited(2, incarnation, 0))
        assert driver.kinds() == ["Lost", "Publish", "Provision"]


def test_a_report_of_a_worker_that_leaves_is_probed_and_its_answer_published():
    driver = Driver(num_expert=1)
    driver.tell(Said(1, 1, Leaving()))
    assert driver.routed() == {1}
    assert driver.tell(Said(0, 1, Suspected(rank=1, incarnation=1, reason="no answer"))).effects == (Probe(1, 1),)
    driver.tell(Alive(1, 1))
    assert driver.kinds() == ["Publish"], "there is nobody else to trust"


def test_leaving_while_the_instance_stops():
    driver = Driver()
    driver.tell(Said(2, 1, Leaving()))
    driver.tell(Shutdown(grace_s=0.0))
    driver.tell(Exited(2, 1, 0))
    assert driver.kinds() == ["Lost", "Publish"]
    assert driver.only(Lost).cause == "left"
    assert driver.worker(2).note == "not started again: the instance stops"


# -- resuming after an orchestrator --------------------------------------------------------------


def found(rank: int, incarnation: int = 1, pid: int = 7, **said: bool) -> Found:
    return Found(rank=Rank(rank), incarnation=Incarnation(incarnation), pid=pid, **said)


def ready(rank: int, incarnation: int = 1) -> Found:
    return found(rank, incarnation, 1000 * incarnation + rank, has_reported=True, is_ready=True)


def test_resuming_with_everybody_ready_changes_nothing_but_the_epoch():
    driver = Driver.resumed([ready(0), ready(1, 4), ready(2), ready(3)], epoch=17)
    assert driver.kinds() == ["Publish", "AllReady"], "the supervisor waits for it"
    assert driver.decision.reason == "a new orchestrator goes on after epoch 17; 4 processes were found"
    publish = driver.only(Publish)
    assert (publish.members.epoch, publish.routes.epoch, driver.machine.epoch) == (18, 18, 18)
    assert (driver.worker(1).incarnation, driver.worker(1).pid) == (4, 4001)
    assert driver.routed() == {1, 2, 3}
    assert (driver.machine.violations, driver.machine.degraded) == ((), ())
    assert driver.machine.next_deadline() is None
    assert driver.tell(Said(2, 1, Ready())).effects == ()


def test_those_ready_before_have_had_a_stable_life():
    driver = Driver.resumed([ready(rank) for rank in range(4)])
    driver.tell(Died(2, 1))
    driver.tell(Died(2, 2))
    assert driver.only(Provision) == Provision(2, 3), "the first short life"


def test_who_has_not_reported_may_still_load():
    driver = Driver.resumed([ready(0), ready(1), found(2), ready(3)])
    assert driver.kinds() == ["Publish"]
    assert (driver.worker(2).state, driver.worker(2).pid) == (WorkerState.STARTING, 7)
    assert driver.routed() == {1, 3}
    assert driver.machine.next_deadline() == driver.now + POLICY.hello_s
    driver.tell(Said(2, 1, Hello()))
    assert driver.machine.next_deadline() is None
    driver.tell(Said(2, 1, Ready()))
    assert driver.kinds() == ["Publish", "AllReady"]


def test_who_never_reports_is_lost():
    driver = Driver.resumed([ready(0), ready(1), found(2, 3), ready(3)])
    driver.pass_time(POLICY.hello_s)
    assert driver.only(Lost) == Lost(2, 3, EXPERT, "hang", "has not said a word in 10 s", is_expected=False)
    assert driver.only(Provision) == Provision(2, 4)
    driver.pass_time(POLICY.fence_grace_s)
    assert Kill(2, 3) in driver.decision.effects


def test_a_pulse_is_a_word():
    driver = Driver.resumed([ready(0), ready(1), found(2), ready(3)])
    driver.tell(Alive(2, 1))
    assert driver.machine.next_deadline() is None


def test_who_has_reported_and_is_not_ready_may_load_for_hours():
    driver = Driver.resumed([ready(0), ready(1), found(2, has_reported=True), ready(3)])
    assert driver.worker(2).state is WorkerState.STARTING
    assert driver.machine.next_deadline() is None
    driver.tell(Silent(2, 1, "T"))
    assert driver.only(Lost).cause == "hang"


def test_who_is_about_to_be_born_has_its_hello_before_it():
    driver = Driver.resumed([ready(0), ready(1), found(2, 5, pid=0), ready(3)])
    assert (driver.worker(2).state, driver.worker(2).pid) == (WorkerState.STARTING, 0)
    assert driver.machine.next_deadline() is None
    driver.tell(Started(2, 5, 99))
    assert driver.machine.next_deadline() == driver.now + POLICY.hello_s


def test_who_leaves_goes_on_leaving():
    leaving = found(2, has_reported=True, is_ready=True, is_leaving=True)
    driver = Driver.resumed([ready(0), ready(1), leaving, ready(3)])
    assert driver.worker(2).state is WorkerState.LEAVING
    assert driver.routed() == {1, 3}
    assert driver.machine.next_deadline() == driver.now + POLICY.leave_s
    driver.tell(Exited(2, 1, 0))
    assert driver.only(Lost).cause == "left"


@pytest.mark.parametrize(("is_ready", "routed"), [(True, {1}), (False, set())])
def test_who_leaves_and_was_ready_serves_those_that_have_nobody_else(is_ready, routed):
    leaving = found(1, has_reported=True, is_ready=is_ready, is_leaving=True)
    assert Driver.resumed([ready(0), leaving], num_expert=1).routed() == routed


def test_a_seat_with_nobody_is_provisioned():
    driver = Driver.resumed([ready(0), ready(1), ready(3)])
    assert driver.kinds() == ["Publish", "Provision"]
    assert driver.only(Provision) == Provision(2, 1)


@pytest.mark.parametrize(
    ("has_left", "cause"),
    [(False, "crash"), (True, "left")],
)
def test_an_end_that_nobody_saw_is_told_and_the_next_number_is_higher(has_left, cause):
    ended = found(2, 6, pid=-1, has_reported=has_left, is_leaving=has_left)
    driver = Driver.resumed([ready(0), ready(1), ended, found(2, 3, pid=-1), ready(3)])
    assert driver.kinds() == ["Lost", "Publish", "Provision"]
    assert driver.only(Lost) == Lost(2, 6, EXPERT, cause, "ended while there was no orchestrator", has_left)
    assert driver.only(Provision) == Provision(2, 7)
    assert driver.machine.next_deadline() is None, "there is nobody to kill"
    assert driver.decision.reason.endswith("; 3 processes were found")


def test_a_fenced_process_beside_its_successor_is_fenced_again_and_killed():
    driver = Driver.resumed([ready(0), ready(1), ready(2, 3), found(2, 2), found(2, 1, pid=-1), ready(3)])
    assert driver.kinds() == ["Lost", "Publish", "AllReady"]
    reason = "was lost to the orchestrator before this one, and lives"
    assert driver.only(Lost) == Lost(2, 2, EXPERT, "hang", reason, is_expected=True)
    assert driver.worker(2).incarnation == 3
    assert driver.tell(Said(2, 2, Ready())).effects == ()
    assert driver.machine.num_stale == 1
    assert driver.pass_time(POLICY.fence_grace_s).effects == (Kill(2, 2),)


def test_a_fenced_process_does_not_get_its_seat_back_when_its_successor_has_ended():
    driver = Driver.resumed([ready(0), ready(1), ready(2, 1), found(2, 2, pid=-1), ready(3)])
    assert [(effect.incarnation, effect.cause) for effect in driver.decision.effects if isinstance(effect, Lost)] == [
        (1, "hang"),
        (2, "crash"),
    ]
    assert driver.only(Provision) == Provision(2, 3)
    assert driver.pass_time(POLICY.fence_grace_s).effects == (Kill(2, 1),)


def test_a_loss_that_somebody_knows_of_is_not_taken_back():
    lost = found(2, 4, has_reported=True, is_ready=True, was_lost=True)
    driver = Driver.resumed([ready(0), ready(1), lost, ready(3)])
    assert driver.kinds() == ["Lost", "Publish", "Provision"]
    assert (driver.only(Lost).incarnation, driver.only(Lost).is_expected) == (4, True)
    assert driver.only(Provision) == Provision(2, 5)
    assert driver.pass_time(POLICY.fence_grace_s).effects == (Kill(2, 4),)


def test_a_loss_that_is_over_is_not_told_again():
    driver = Driver.resumed([ready(0), ready(1), found(2, 4, pid=-1, was_lost=True), ready(3)])
    assert driver.kinds() == ["Publish", "Provision"]
    assert driver.only(Provision) == Provision(2, 5)
    assert driver.machine.next_deadline() is None


def test_an_instance_that_was_up_is_never_given_up_again():
    for was_up in (True, False):
        driver = Driver.resumed([ready(0), ready(1), ready(3)], was_all_ready=was_up)
        driver.tell(Said(2, 1, Failed(reason="no such model", user_error=True)))
        assert (GiveUp("no such model", user_error=True) in driver.decision.effects) == (not was_up)


def test_all_ready_is_said_once_more_when_all_are():
    driver = Driver.resumed([ready(0), ready(1), ready(3)])
    driver.bring_up(2, 1)
    assert driver.kinds() == ["Publish", "AllReady"]
    driver.tell(Died(2, 1))
    driver.bring_up(2, 2)
    assert driver.kinds() == ["Publish"]


def test_one_born_meanwhile_may_be_ready_without_a_report():
    driver = Driver.resumed([ready(0), ready(1), found(2, pid=0, is_ready=True), ready(3)])
    driver.tell(Started(2, 1, 99))
    assert driver.worker(2).state is WorkerState.READY
    assert driver.machine.next_deadline() is None, "it has spoken"


def test_a_late_report_of_a_later_epoch_is_overtaken():
    driver = Driver.resumed([ready(rank) for rank in range(4)], epoch=5)
    assert driver.tell(GatewayReport(epoch=5, logs=[], lost=[*()])).effects == ()
    assert driver.decision.reason == "epoch 5, which the gateway has, is past"
    driver.tell(GatewayReport(epoch=9, logs=[], lost=[*()]))
    assert driver.decision.reason == "the gateway has tables of epoch 9 from the orchestrator before"
    assert driver.only(Publish).members.epoch == driver.only(Publish).routes.epoch == driver.machine.epoch == 10
    driver.tell(GatewayReport(epoch=10, logs=[], lost=[*()]))
    assert driver.machine.epoch == 11, "the same number, and perhaps other tables"


def test_an_orchestrator_goes_on_with_the_goal_that_was_kept():
    """Also with ranks that did not exist at the start, in any order of roles. A process in no seat of it is lost."""
    placement = place_experts(12, (0, 1), [Rank(0), Rank(7)], None)
    goal = msgspec.structs.replace(goal_of([5, 3], placement), version=4)
    machine = Machine(goal, POLICY)
    there = [ready(5), ready(3), ready(0), ready(7, 2), ready(1)]
    there = [dataclasses.replace(one, slots=held(placement, one.rank) if one.rank in (0, 7) else None) for one in there]
    decision = machine.resume(0.0, there, Epoch(9), was_all_ready=True)
    lost = [effect for effect in decision.effects if isinstance(effect, Lost)]
    assert [(one.rank, one.is_expected) for one in lost] == [(1, True)], "the goal has no such seat"
    assert machine.members.goal == 4
    assert {worker.rank for worker in machine.members.workers} == {0, 3, 5, 7}
    assert set(machine.routes.array()[..., 0].ravel().tolist()) == {0, 7}
    assert (machine.violations, machine.degraded) == ((), ())
    assert machine.handle(Tick(), POLICY.fence_grace_s).effects == (Kill(1, 1),)


def test_a_seat_that_should_retire_is_not_filled_again():
    placement = placement_of(3)
    goal = goal_of([0, 9], placement)
    seats = tuple(msgspec.structs.replace(s, wanted=Wanted.RETIRE) if s.rank == 9 else s for s in goal.seats)
    driver = Driver(ready=False)
    driver.machine = Machine(msgspec.structs.replace(goal, seats=seats), POLICY)
    driver.decision = driver.machine.resume(0.0, with_slots([ready(r) for r in (0, 1, 2, 3, 9)], 3), Epoch(2), True)
    assert driver.worker(9).state is WorkerState.READY
    driver.tell(Exited(9, 1, 0))
    assert driver.kinds() == ["Lost", "Publish", "Retire"]
    assert 9 not in {worker.rank for worker in driver.machine.members.workers}
    assert driver.machine.degraded == ()


# -- what workers hold and use -------------------------------------------------------------------


def test_routes_follow_what_a_ready_worker_holds():
    driver = Driver()
    other = held(driver.machine.goal.placement, 1)
    emptied = tuple((-1,) * len(slots) for slots in other.experts)
    driver.tell(Said(1, 1, SlotsReported(slots=msgspec.structs.replace(other, experts=emptied))))
    assert driver.kinds() == [] and driver.machine.next_deadline() == -math.inf, "others may report, too"
    driver.tell(Tick())
    assert driver.kinds() == ["Publish", "FillSlots"], "it is told to hold them again"
    assert driver.routed() == {2, 3} and driver.machine.next_deadline() is None
    driver.tell(Said(1, 1, SlotsReported(slots=msgspec.structs.replace(other, experts=emptied))))
    driver.tell(Tick())
    assert driver.kinds() == [] and driver.machine.next_deadline() is None, "sent before it had read what it was told"
    (fills,) = driver.machine.moves.values()
    driver.tell(Said(1, 1, SlotsReported(slots=msgspec.structs.replace(other, experts=emptied), num_done=len(fills))))
    driver.tell(Tick())
    assert driver.kinds() == ["FillSlots"] and driver.machine.next_deadline() is None, "it did none of it"
    driver.tell(Said(1, 1, SlotsReported(slots=other, num_done=2 * len(fills))))
    driver.tell(Tick())
    assert driver.routed() == {1, 2, 3}


def test_a_new_incarnation_holds_nothing_until_it_says_so():
    driver = Driver()
    driver.tell(Died(2, 1))
    driver.tell(Started(2, 2, 77))
    driver.tell(Said(2, 2, Hello()))
    driver.tell(Said(2, 2, Ready()))
    assert driver.routed() == {1, 3}
    driver.hold(2, 2)
    driver.tell(Tick())
    assert driver.routed() == {1, 2, 3}


def test_an_epoch_that_all_attention_workers_use_is_shown():
    driver = Driver()
    epoch = driver.machine.epoch
    assert len(driver.machine.tables().conditions.epochs) == 1
    driver.tell(Said(0, 1, RoutesUsed(epoch=epoch - 1)))
    assert driver.kinds() == ["Show"]
    assert driver.machine.tables().conditions.epochs == (
        f"rank 0 uses routes of epoch {epoch - 1}, published is {epoch}",
    )
    driver.tell(Said(0, 1, RoutesUsed(epoch=epoch)))
    assert driver.only(Show).tables.conditions.epochs == ()
    assert driver.tell(Said(0, 1, RoutesUsed(epoch=epoch))).effects == ()
    assert driver.machine.epoch == epoch, "nothing was published for it"
    driver.tell(Died(2, 1))
    assert driver.machine.tables().conditions.epochs != ()
    assert driver.machine.violations == ()


def test_a_late_report_says_all_at_once():
    driver = Driver.resumed([ready(0), ready(1), found(2), ready(3)], epoch=5)
    slots = held(driver.machine.goal.placement, 2)
    driver.tell(Said(2, 1, Report(is_ready=True, is_leaving=False, epoch=Epoch(8), peers=[], memory=[], slots=slots)))
    assert driver.machine.epoch == 9, "later than what it has"
    driver.tell(Said(2, 1, Ready()))
    assert driver.routed() == {1, 2, 3}
    driver.tell(Said(3, 1, Report(is_ready=True, is_leaving=True, epoch=Epoch(2), peers=[], memory=[], slots=slots)))
    assert driver.worker(3).state is WorkerState.LEAVING


# -- publishing ----------------------------------------------------------------------------------


def test_nothing_is_published_when_nothing_changed():
    driver = Driver()
    tables = driver.machine.tables()
    for event in (Said(2, 1, Ready()), Said(2, 1, Hello()), Started(2, 1, driver.worker(2).pid), Alive(2, 1), Tick()):
        assert driver.tell(event).effects == ()
    assert driver.machine.tables() is tables
    assert driver.tell(Tick()).reason == "nothing is due"


def test_one_tick_does_everything_that_is_due_in_the_order_of_urgency():
    driver = Driver()
    driver.tell(Silent(1, 1, "T"))  # killed later
    driver.tell(Started(1, 2, 5))  # says nothing
    driver.tell(Silent(2, 1, "R"))  # starved
    driver.pass_time(POLICY.fence_grace_s)
    assert driver.kinds() == ["Lost", "Publish", "WorkerBackedOff", "Kill", "Probe"]
    assert driver.decision.reason.count(";") == 2


def test_redundancy_is_restored_after_a_change_of_orchestrators_too():
    policy = dataclasses.replace(POLICY, heal_after_s=30.0)
    machine = Machine(goal_of([0], placement_of(3)), policy)
    machine.resume(100.0, with_slots([ready(rank) for rank in (0, 1, 2)], 3), Epoch(2), True)  # nothing is left of 3
    assert machine.next_deadline() == 130.0
    decision = machine.handle(Tick(), 130.0)
    assert "others take over its experts" in decision.reason
