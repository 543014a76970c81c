"""The orchestrator as others see it: what it says to supervisor, gateway, anchor and workers, and when."""

import signal

import pytest

from everserve.tables.ids import Epoch, Incarnation, Rank, WorkerId
from everserve.tables.members import WorkerState
from everserve.wire.messages import (
    Adopt,
    Allocate,
    AllocationFailed,
    ClusterChanged,
    DrainAnswered,
    DrainWorker,
    DropMemory,
    Failed,
    FaultInjected,
    Fenced,
    GatewayReport,
    Hello,
    InjectFault,
    Leave,
    Leaving,
    LogJoined,
    LogLeft,
    LogSettled,
    MemoryKept,
    PeerJoined,
    PeerLeft,
    Provision,
    Ready,
    Release,
    RoutesChanged,
    Shutdown,
    Signalled,
    SignalWorker,
    WorkerLost,
)
from tests.unit.host_toy import (
    ATTENTION,
    EXPERT,
    Orchestrator,
    Worker,
    found,
    joined,
    ranks_in,
    report,
    same_memory,
    start_worker,
)
from tests.unit.supervisor_toy import new_memory


@pytest.fixture
def make():
    made: list[Orchestrator] = []

    def make_orchestrator(**settings) -> Orchestrator:
        made.append(Orchestrator(**settings))
        return made[-1]

    yield make_orchestrator
    for orchestrator in made:
        orchestrator.close()


@pytest.fixture
def orchestrator(make) -> Orchestrator:
    return make()


def states(orchestrator: Orchestrator) -> dict[tuple[int, int], WorkerState]:
    """By rank and incarnation, as the gateway was told last."""
    told = orchestrator.gateway.all(ClusterChanged)
    return {(one.rank, one.incarnation): one.state for one in told[-1].members.workers} if told else {}


def epochs(orchestrator: Orchestrator) -> list[int]:
    return [change.members.epoch for change in orchestrator.gateway.all(ClusterChanged)]


# A start


def test_a_worker_is_ordered_when_its_memory_is_there(make):
    orchestrator = make(with_anchor=False)
    orchestrator.gateway.get(ClusterChanged)
    assert orchestrator.supervisor.all(Provision) == []
    orchestrator.new_anchor()
    orders = [orchestrator.supervisor.get(Provision, num).start for num in (1, 2, 3)]
    assert sorted((one.rank, one.incarnation, one.roles) for one in orders) == [
        (0, 1, ATTENTION),
        (1, 1, EXPERT),
        (2, 1, EXPERT),
    ]
    names = {start.rank: start.memory for start in orders}
    assert names == {0: ("log-0.1",), 1: (), 2: ()}
    asked = {message.name: message.num_bytes for message in orchestrator.anchor.all(Allocate)}
    assert set(asked) == {"cell-0.1", "cell-1.1", "cell-2.1", "log-0.1"} and min(asked.values()) > 0


def test_peers_meet_over_a_lane_that_both_of_them_get(orchestrator):
    attention, *experts = sorted((orchestrator.start_worker(num) for num in (1, 2, 3)), key=lambda one: one.id)
    for worker in (attention, *experts):
        worker.send(Hello())
    for expert in experts:
        cells_and_lanes = [attention.fds_of(joined(expert)), expert.fds_of(joined(attention))]
        (expert_cell, lane), (attention_cell, same_lane) = cells_and_lanes
        assert same_memory(lane, same_lane)
        assert same_memory(expert_cell, expert.memory[0]) and same_memory(attention_cell, attention.memory[0])
    assert not any(expert.all(LogJoined) for expert in experts), "they have no streams"


def test_it_is_ready_when_all_workers_are(orchestrator):
    workers = [orchestrator.start_worker(num) for num in (1, 2, 3)]
    for worker in workers:
        worker.send(Hello())
    for worker in workers[:-1]:
        worker.send(Ready())
        orchestrator.until(lambda worker=worker: states(orchestrator).get(worker.id) == WorkerState.READY)
    assert orchestrator.supervisor.all(Ready) == []
    workers[-1].send(Ready())
    orchestrator.supervisor.get(Ready)
    orchestrator.until(lambda: set(states(orchestrator).values()) == {WorkerState.READY})
    attention = next(worker for worker in workers if worker.start.roles == ATTENTION)
    orchestrator.until(lambda: attention.all(RoutesChanged) and ranks_in(attention.all(RoutesChanged)[-1]) == {1, 2})
    assert epochs(orchestrator) == sorted(set(epochs(orchestrator))), "each epoch once, in order"


def test_a_worker_whose_start_is_a_users_mistake_is_the_end(orchestrator):
    worker = orchestrator.start_worker(1)
    worker.send(Hello())
    worker.send(Failed(reason="no such dtype", user_error=True))
    told = orchestrator.supervisor.get(Failed)
    assert told.user_error and "no such dtype" in told.reason
    orchestrator.wait_for_end()


def test_memory_that_cannot_be_had_is_the_end_and_says_whose_it_was(make):
    orchestrator = make(num_expert=0, with_anchor=False)
    orchestrator.gateway.get(ClusterChanged)
    orchestrator.new_anchor().send(AllocationFailed(name="cell-0.1", reason="out of memory"))
    told = orchestrator.supervisor.get(Failed)
    assert told.user_error and "out of memory" in told.reason
    orchestrator.wait_for_end()


# Losses


def test_an_expert_worker_is_replaced(orchestrator):
    attention, expert, _ = orchestrator.start_all()
    expert.exit()
    lost = orchestrator.gateway.get(WorkerLost)
    assert (lost.rank, lost.incarnation, lost.roles) == (1, 1, EXPERT)
    attention.wait_for(PeerLeft(rank=1, incarnation=1))
    orchestrator.until(lambda: ranks_in(attention.all(RoutesChanged)[-1]) == {2})
    orchestrator.anchor.wait_for(Release(name="lane-0.1-1.1"))
    successor = orchestrator.start_worker(4)
    assert successor.id == WorkerId(1, 2)
    successor.send(Hello())
    attention.wait_for(joined(successor))
    assert ranks_in(attention.all(RoutesChanged)[-1]) == {2}, "it is not ready yet"
    successor.send(Ready())
    orchestrator.until(lambda: ranks_in(attention.all(RoutesChanged)[-1]) == {1, 2})
    routes = [change.routes.epoch for change in attention.all(RoutesChanged)]
    assert routes == sorted(routes)


def test_a_loss_is_told_before_the_routes_without_it(orchestrator):
    """What a worker learns first it uses first: no answer of a dead peer counts under new routes."""
    attention, expert, _ = orchestrator.start_all()
    num_before = len(attention.all(RoutesChanged))
    expert.exit()
    attention.get(RoutesChanged, num_before + 1)
    kinds = [type(frame.message) for frame in attention.frames]
    assert kinds.index(PeerLeft) < [i for i, kind in enumerate(kinds) if kind is RoutesChanged][num_before]


def test_a_log_lives_until_no_stream_needs_it(make):
    orchestrator = make(num_attention=2, num_expert=1)
    survivor, victim, _ = orchestrator.start_all()
    (log,) = survivor.fds_of(LogJoined(rank=1, incarnation=1))
    assert same_memory(log, victim.memory[1]), "it had it from the beginning"
    victim.exit()
    orchestrator.gateway.wait_for(WorkerLost(rank=1, incarnation=1, roles=ATTENTION, cause="crash"))
    orchestrator.start_worker(4).send(Hello())
    survivor.wait_for(LogJoined(rank=1, incarnation=2))
    assert orchestrator.supervisor.all(DropMemory) == [] and survivor.all(LogLeft) == []
    orchestrator.gateway.send(LogSettled(rank=1, incarnation=1))
    survivor.wait_for(LogLeft(rank=1, incarnation=1))
    orchestrator.supervisor.wait_for(DropMemory(name="log-1.1"))
    orchestrator.anchor.wait_for(Release(name="log-1.1"))


def test_a_worker_that_is_lost_is_fenced(orchestrator):
    """It says that it cannot go on, and its process has not ended yet: nothing that it does counts any more."""
    attention, expert, _ = orchestrator.start_all()
    expert.send(Failed(reason="broken", user_error=False))
    expert.get(Fenced)
    attention.wait_for(PeerLeft(rank=1, incarnation=1))
    assert orchestrator.supervisor.get(Provision, 4).start.incarnation == 2


# Operators


def test_a_fault_is_asked_of_the_supervisor_and_answered(orchestrator):
    _, expert, _ = orchestrator.start_all()
    orchestrator.gateway.send(InjectFault(id="a", rank=Rank(1), signal=signal.SIGKILL))
    orchestrator.supervisor.wait_for(SignalWorker(rank=1, incarnation=1, signal=signal.SIGKILL, id="a"))
    orchestrator.supervisor.send(Signalled(id="a", pid=expert.pid, reason=""))
    orchestrator.gateway.wait_for(FaultInjected(id="a", pid=expert.pid, incarnation=1, reason=""))
    orchestrator.gateway.send(InjectFault(id="b", rank=Rank(9), signal=signal.SIGKILL))
    orchestrator.until(lambda: len(orchestrator.gateway.all(FaultInjected)) == 2)
    assert orchestrator.gateway.all(FaultInjected)[-1].pid is None


def test_a_worker_that_is_drained_leaves_and_is_replaced(orchestrator):
    _, expert, _ = orchestrator.start_all()
    orchestrator.gateway.send(DrainWorker(id="a", rank=Rank(1)))
    assert orchestrator.gateway.get(DrainAnswered).incarnation == 1
    expert.get(Leave)
    expert.send(Leaving())
    orchestrator.until(lambda: states(orchestrator)[1, 1] == WorkerState.LEAVING)
    expert.exit(status=0)
    orchestrator.gateway.wait_for(WorkerLost(rank=1, incarnation=1, roles=EXPERT, cause="left"))
    assert orchestrator.start_worker(4).id == WorkerId(1, 2)


# Anchors, and the end


def test_a_new_anchor_adopts_what_exists_and_owes_what_was_asked(orchestrator):
    orchestrator.start_all()
    before = orchestrator.anchor
    orchestrator.new_anchor()
    needed = {"cell-0.1", "cell-1.1", "cell-2.1", "log-0.1"}
    orchestrator.until(lambda: {message.name for message in orchestrator.anchor.all(Adopt)} >= needed)
    assert before.all(Release) == []


def test_what_an_anchor_did_not_answer_is_asked_of_the_next(make):
    orchestrator = make(num_expert=0, with_anchor=False)
    orchestrator.is_silent = True
    asked = orchestrator.new_anchor().get(Allocate)
    orchestrator.is_silent = False
    assert orchestrator.new_anchor().get(Allocate) == asked
    assert orchestrator.supervisor.get(Provision).start.rank == 0


def test_workers_are_told_of_a_shutdown(orchestrator):
    workers = orchestrator.start_all()
    orchestrator.supervisor.send(Shutdown(grace_s=3.0))
    for worker in workers:
        worker.wait_for(Shutdown(grace_s=3.0))
    orchestrator.wait_for_end()


# A new orchestrator


PEERS = {0: [WorkerId(1, 1), WorkerId(2, 1)], 1: [WorkerId(0, 1)], 2: [WorkerId(0, 1)]}
ROLES = {0: ATTENTION, 1: EXPERT, 2: EXPERT}


def introduced(orchestrator: Orchestrator, *ranks: int) -> list[Worker]:
    """Workers of the orchestrator before."""
    return [orchestrator.introduce(start_worker(rank, 1, ROLES[rank])) for rank in ranks]


def test_nothing_changes_where_nothing_was_lost(make):
    orchestrator = make(found=found((0, 1, 1000), (1, 1, 1001), (2, 1, 1002)))
    workers = introduced(orchestrator, 0, 1, 2)
    for worker in workers:
        worker.send(report(epoch=40 + worker.id.rank, peers=PEERS[worker.id.rank]))
    orchestrator.gateway.send(GatewayReport(epoch=Epoch(41), logs=[]))
    assert orchestrator.gateway.get(ClusterChanged).members.epoch > 42, "higher than any that is known"
    orchestrator.until(lambda: set(states(orchestrator).values()) == {WorkerState.READY})
    orchestrator.until(lambda: workers[0].all(RoutesChanged) and ranks_in(workers[0].all(RoutesChanged)[-1]) == {1, 2})
    assert orchestrator.supervisor.all(Provision) == [] and orchestrator.gateway.all(WorkerLost) == []
    assert not any(worker.all(PeerLeft) for worker in workers)
    assert not any(message.name.startswith("lane") for message in orchestrator.anchor.all(Allocate)), "they have lanes"


def test_a_worker_that_ended_while_there_was_no_orchestrator_is_missed_and_replaced(make):
    orchestrator = make(found=found((0, 1, 1000), (1, 1, -1), (2, 1, 1002)))
    attention, other = introduced(orchestrator, 0, 2)
    attention.send(report(epoch=7, peers=PEERS[0]))
    other.send(report(epoch=0, peers=PEERS[2]))
    orchestrator.gateway.send(GatewayReport(epoch=Epoch(7), logs=[]))
    attention.wait_for(PeerLeft(rank=Rank(1), incarnation=Incarnation(1)))
    assert orchestrator.gateway.get(WorkerLost).rank == 1
    orchestrator.until(lambda: attention.all(RoutesChanged) and ranks_in(attention.all(RoutesChanged)[-1]) == {2})
    assert orchestrator.start_worker(1).id == WorkerId(1, 2)


def test_a_worker_that_ends_while_it_is_waited_for(make):
    orchestrator = make(found=found((0, 1, 1000), (1, 1, 1001), (2, 1, 1002)))
    attention, victim, other = introduced(orchestrator, 0, 1, 2)
    for worker in (attention, other):
        worker.send(report(epoch=7, peers=PEERS[worker.id.rank]))
    orchestrator.gateway.send(GatewayReport(epoch=Epoch(7), logs=[]))
    victim.exit()
    attention.wait_for(PeerLeft(rank=Rank(1), incarnation=Incarnation(1)))
    assert orchestrator.start_worker(1).id == WorkerId(1, 2)


def test_a_lane_that_only_one_end_has_is_made_again(make):
    """The orchestrator before died when it had told one of the two."""
    orchestrator = make(found=found((0, 1, 1000), (1, 1, 1001), (2, 1, 1002)))
    attention, expert, other = introduced(orchestrator, 0, 1, 2)
    attention.send(report(epoch=3, peers=PEERS[0]))
    expert.send(report(epoch=0, peers=[]))
    other.send(report(epoch=0, peers=PEERS[2]))
    orchestrator.gateway.send(GatewayReport(epoch=Epoch(3), logs=[]))
    ends = [attention.fds_of(joined(expert)), expert.fds_of(joined(attention))]
    assert same_memory(ends[0][1], ends[1][1])
    assert other.all(PeerJoined) == []


@pytest.mark.parametrize("is_needed", [True, False])
def test_a_log_that_was_left_is_kept_if_streams_need_it(make, is_needed):
    orchestrator = make(num_expert=0, found=found((0, 2, 2000)))
    memory, log = new_memory(1 << 20), WorkerId(Rank(0), Incarnation(1))
    orchestrator.supervisor.send(MemoryKept(name="log-0.1"), fds=[memory])
    worker = orchestrator.introduce(start_worker(0, 2, (*ATTENTION, *EXPERT)))
    worker.send(report(epoch=5))
    orchestrator.gateway.send(GatewayReport(epoch=Epoch(5), logs=[log] if is_needed else []))
    orchestrator.gateway.get(ClusterChanged)
    if is_needed:
        (given,) = worker.fds_of(LogJoined(rank=Rank(0), incarnation=Incarnation(1)))
        assert same_memory(given, memory) and orchestrator.supervisor.all(DropMemory) == []
        orchestrator.gateway.send(LogSettled(rank=Rank(0), incarnation=Incarnation(1)))
    orchestrator.supervisor.wait_for(DropMemory(name="log-0.1"))
