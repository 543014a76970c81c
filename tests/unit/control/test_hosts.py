"""Hosts as the machine has them: lost with all their workers at once, and there again."""

import pytest

from everserve.control.decide.effects import Decision, DropHost, Lost, Provision
from everserve.control.decide.inputs import Exited, Said, Silent, Started, Tick
from everserve.control.decide.machine import Found, Machine, Policy
from everserve.tables.goal import Goal, SeatGoal
from everserve.tables.ids import Epoch, Incarnation, Rank, Role
from everserve.tables.members import HOST_IS_SILENT, Host, HostState, WorkerState
from everserve.wire.events import HostLost, HostReturned
from everserve.wire.messages import AdmitHost, EvictHost, Hello, HostJoined, HostLeft, Leave, Ready
from everserve.wire.operators import DrainRequest, DrainView, FaultRequest, HostChangeView, ReturnRequest, ScaleRequest
from tests.support.decisions import answered, ask, view_of

BOTH = (Role.ATTENTION, Role.EXPERT)
POLICY = Policy(detect_s=0.1)


def new_machine(num_workers: int = 4, num_hosts: int = 2, goal: Goal | None = None) -> Machine:
    seats = [
        SeatGoal(rank=Rank(r), roles=BOTH, own_experts=2, host=r % num_hosts, device=r) for r in range(num_workers)
    ]
    hosts = [Host(host=h, state=HostState.AWAITED if h else HostState.SERVING) for h in range(num_hosts)]
    return Machine(goal or Goal(version=1, seats=tuple(seats), placement=None), POLICY, hosts=hosts)


def of(decision: Decision, kind: type) -> list:
    return [effect for effect in decision.effects if isinstance(effect, kind)]


def make_ready(machine: Machine, rank: int, now: float = 0.0) -> None:
    seat = next(worker for worker in machine.members.workers if worker.rank == rank)
    for given in (
        Started(Rank(rank), seat.incarnation, 100 + rank),
        Said(Rank(rank), seat.incarnation, Hello()),
        Said(Rank(rank), seat.incarnation, Ready()),
    ):
        machine.handle(given, now)


@pytest.fixture
def machine() -> Machine:
    made = new_machine()
    made.handle(HostJoined(host=1, name="b", address="x"), 0.0)
    made.start(0.0)
    for rank in range(4):
        make_ready(made, rank)
    return made


def states(machine: Machine) -> dict[int, WorkerState]:
    return {worker.rank: worker.state for worker in machine.members.workers}


def test_a_lost_host(machine):
    decision = machine.handle(HostLeft(host=1, reason="it is dark"), 1.0)
    assert [lost.rank for lost in of(decision, Lost)] == [1, 3]
    assert not of(decision, Provision)
    assert of(decision, DropHost) == [DropHost(1)]
    assert of(decision, HostLost) == [HostLost(host=1, reason="it is dark", gone=False, ranks=[1, 3])]
    assert machine.tables().hosts[1].state is HostState.LOST
    assert states(machine)[1] is WorkerState.GONE and not machine.violations
    late = machine.handle(Exited(Rank(1), Incarnation(1), -9), 1.1)
    assert not of(late, Provision)
    assert not of(machine.handle(Tick(), 60.0), Provision)


def test_it_joins_again(machine):
    machine.handle(HostLeft(host=1, reason="it is dark"), 1.0)
    decision = machine.handle(HostJoined(host=1, name="b", address="y"), 2.0)
    assert [(one.rank, one.incarnation) for one in of(decision, Provision)] == [(1, 2), (3, 2)]
    assert of(decision, HostReturned) == [HostReturned(host=1, name="b", ranks=[1, 3])]
    assert machine.tables().hosts[1].state is HostState.SERVING


def test_a_host_that_is_gone_gives_its_seats_to_others(machine):
    step = machine.handle(ask(FaultRequest(host=1, gone=True)), 1.0)
    assert view_of(answered(step), HostChangeView).ranks == (1, 3)
    assert of(step, EvictHost) == [EvictHost(host=1, gone=True)]
    assert {one.rank for one in of(step, Provision)} == {1, 3}
    assert {seat.host for seat in machine.goal.seats} == {0}
    for rank in (1, 3):
        make_ready(machine, rank, 2.0)
    back = machine.handle(ask(ReturnRequest(host=1)), 3.0)
    assert of(back, AdmitHost) == [AdmitHost(host=1)]
    joined = machine.handle(HostJoined(host=1, name="b", address="z"), 4.0)
    leaving = [tell.rank for tell in joined.effects if isinstance(getattr(tell, "message", None), Leave)]
    assert len(leaving) == 2
    assert sorted(seat.host for seat in machine.goal.seats) == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (FaultRequest(host=0), "the first host"),
        (FaultRequest(host=7), "no host 7"),
        (ReturnRequest(host=1), "not gone"),
        (ScaleRequest(attention=5), "several hosts"),
    ],
)
def test_what_is_refused(machine, request_, why):
    decision = machine.handle(ask(request_), 1.0)
    assert why in decision.reason


def test_a_worker_is_replaced_where_it_was(machine):
    decision = machine.handle(Exited(Rank(1), Incarnation(1), -9), 1.0)
    assert [one.rank for one in of(decision, Provision)] == [1]
    assert machine.goal.seats[1].host == 1


def test_silence_of_a_host_is_no_death_of_its_workers(machine):
    """The host is judged as a whole."""
    for at in (1.0, 3.0, 6.0):
        decision = machine.handle(Silent(Rank(1), Incarnation(1), HOST_IS_SILENT), at)
        assert not of(decision, Lost)


def test_a_new_orchestrator_knows_lost_hosts(machine):
    machine.handle(HostLeft(host=1, reason="it is dark"), 1.0)
    later = new_machine(goal=machine.goal)
    found = [
        Found(rank=Rank(rank), incarnation=Incarnation(1), pid=100, has_reported=True, is_ready=True) for rank in (0, 2)
    ]
    decision = later.resume(2.0, found, Epoch(9), was_all_ready=True)
    assert not of(decision, Provision)
    joined = later.handle(HostJoined(host=1, name="b", address="y"), 3.0)
    assert {one.rank for one in of(joined, Provision)} == {1, 3}


def test_a_drain_on_another_host(machine):
    decision = machine.handle(ask(DrainRequest(rank=3)), 1.0)
    assert view_of(answered(decision), DrainView).rank == 3
