"""Memory is on the host of the worker that it is made for, and is offered there only."""

import gc

import msgspec
import pytest

from everserve.tables.goal import Goal
from everserve.tables.ids import Epoch
from everserve.tables.memory import Kind
from everserve.wire.messages import GatewayReport, KeepGoal
from tests.support.orchestrator_toy import ToyOrchestrator, serving

NUM = 4


@pytest.fixture(autouse=True)
def collect():
    yield
    gc.collect()


def on_two_hosts(goal: Goal) -> Goal:
    """Ranks take turns."""
    seats = tuple(msgspec.structs.replace(seat, host=seat.rank % 2) for seat in goal.seats)
    return msgspec.structs.replace(goal, seats=seats)


@pytest.fixture
def orchestrator() -> ToyOrchestrator:
    """It starts all workers of the goal that another one has left."""
    before = serving(num_attention=NUM, num_expert=NUM, log_mode="mirror", weights="memory")
    goal = on_two_hosts(before.said(KeepGoal)[-1].goal)
    after = ToyOrchestrator(msgspec.structs.replace(before.start, found=(), goal=goal))
    after.gateway.send(GatewayReport(epoch=Epoch(7), logs=[], lost=[]))
    after.settle()
    for worker in list(after.workers.values()):
        worker.come_up()
    return after


def test_memory_has_the_host_of_its_worker(orchestrator):
    assert len(orchestrator.workers) == 2 * NUM
    for worker in orchestrator.workers.values():
        assert worker.start.host == worker.start.rank % 2
        assert {piece.host for piece in worker.start.memory} == {worker.start.host}
    backups = {piece for w in orchestrator.workers.values() for piece in w.start.memory if piece.kind is Kind.BACKUP}
    assert {piece.host for piece in backups} == {0, 1} and len(backups) == 2, "one on each host"


def test_it_is_offered_on_that_host(orchestrator):
    for worker in orchestrator.workers.values():
        same = [other for other in orchestrator.workers.values() if other.start.host == worker.start.host]
        roles = [other for other in same if other.start.roles == worker.start.roles and other is not worker]
        assert len(roles) == NUM // 2 - 1
        ranks = {piece.owners[0].rank for piece in worker.offered}
        assert ranks == {other.start.rank for other in roles}
