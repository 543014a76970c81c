"""The orchestrator's host with everything around it played by the test: what it is told, and what it then tells."""

import gc
import os
import signal
import time

import msgspec
import pytest

from everserve.memory.owned import create_memory
from everserve.tables.ids import Epoch, Incarnation, Rank, WorkerId
from everserve.tables.members import WorkerState
from everserve.tables.memory import Kind, MemoryName, seat_owner
from everserve.tables.outputs import ExpertStats
from everserve.tables.routes import Symptom
from everserve.wire.events import ScaleBegan, ScaleDone, StaleDropped
from everserve.wire.messages import (
    Answered,
    Ask,
    ClusterChanged,
    EventHappened,
    ExpertReport,
    Failed,
    Fenced,
    FoundProcess,
    GatewayReport,
    Hello,
    KeepGoal,
    LanesOpen,
    LanesSent,
    Leave,
    Leaving,
    LogSettled,
    Offer,
    PeerJoined,
    PeerLeft,
    Provision,
    Ready,
    Release,
    Report,
    RoutesChanged,
    RoutesPatched,
    RoutesUsed,
    RoutesWanted,
    Shutdown,
    Signalled,
    SignalWorker,
    SlotsReported,
    Suspected,
    Withdraw,
    WorkerLost,
)
from everserve.wire.operators import (
    DeviceChangeView,
    DrainRequest,
    DrainView,
    FaultRequest,
    FaultView,
    ReturnRequest,
    ScaleRequest,
    ScaleView,
)
from tests.support.decisions import view_of
from tests.support.orchestrator_toy import ToyOrchestrator, ToyWorker, held_at_start, serving, start_of, succeed


@pytest.fixture(autouse=True)
def collect():
    """Sockets that are parts of cycles are closed now, not while another test counts descriptors."""
    yield
    gc.collect()


def latest(orchestrator: ToyOrchestrator) -> ClusterChanged:
    return orchestrator.told(ClusterChanged)[-1]


def states(orchestrator: ToyOrchestrator) -> dict[int, tuple[int, WorkerState]]:
    return {worker.rank: (worker.incarnation, worker.state) for worker in latest(orchestrator).members.workers}


# -- starting ------------------------------------------------------------------------------------


def test_the_goal_is_kept_before_anything_is_done_about_it():
    orchestrator = ToyOrchestrator(start_of())
    assert isinstance(orchestrator.to_supervisor[0], KeepGoal)
    goal = orchestrator.to_supervisor[0].goal
    assert [seat.rank for seat in goal.seats] == [0, 1, 2]
    assert [message.start.rank for message in orchestrator.said(Provision)] == [0, 1, 2]


def test_a_worker_gets_a_lane_to_each_peer_and_is_ready_when_it_has_them():
    orchestrator = ToyOrchestrator(start_of())
    attention, first, second = (orchestrator.worker(rank) for rank in range(3))
    attention.come_up()
    assert attention.heard(PeerJoined) == []
    first.come_up()
    assert [peer.rank for peer in attention.heard(PeerJoined)] == [1]
    assert [peer.rank for peer in first.heard(PeerJoined)] == [0]
    assert attention.routed == {1}
    second.say(Hello())
    assert second.heard(PeerJoined) == [], "its peers map a lane to it when it has loaded"
    second.opens_lanes = False
    second.come_up()
    assert [peer.rank for peer in second.heard(PeerJoined)] == [0]
    assert attention.routed == {1} and not orchestrator.said(Ready), "it cannot answer yet"
    second.say(LanesOpen())
    assert attention.routed == {1, 2} and len(orchestrator.said(Ready)) == 1
    assert latest(orchestrator).conditions.violations == ()


def test_lanes_do_not_wait_for_a_peer_that_dies_meanwhile():
    orchestrator = ToyOrchestrator(start_of(num_attention=2, num_expert=1))
    first, second, expert = (orchestrator.worker(rank) for rank in range(3))
    first.come_up()
    second.come_up()
    assert orchestrator.anchor is not None
    orchestrator._read_anchor = lambda: 0  # nothing is allocated
    expert.come_up()
    orchestrator.exit(first)
    assert expert.heard(LanesSent) == []
    del orchestrator._read_anchor
    orchestrator.settle()
    assert [peer.rank for peer in expert.heard(PeerJoined)] == [1] and len(expert.heard(LanesSent)) == 1
    assert second.routed == {2}


@pytest.mark.parametrize("had_lanes", [True, False], ids=["with lanes", "without"])
def test_a_worker_that_had_not_opened_its_lanes_is_ready_under_the_next_orchestrator(had_lanes):
    before = serving()
    before.exit(before.worker(2))
    successor = before.worker(2, 2)
    successor.opens_lanes = False
    if not had_lanes:
        before._read_anchor = lambda: 0  # nothing is allocated any more
    successor.come_up()
    assert len(successor.heard(PeerJoined)) == had_lanes and before.worker(0).routed == {1}
    late = () if had_lanes else (successor.id,)
    after = succeed(before, epoch=latest(before).members.epoch, gone=[], late=late)
    if not had_lanes:
        successor.say(successor.report(0, []))
        assert [peer.rank for peer in successor.heard(PeerJoined)] == [0]
    assert after.worker(0).routed == {1, 2} and states(after)[2] == (2, WorkerState.READY)


def test_routes_follow_what_a_worker_reports_to_hold():
    orchestrator = serving()
    attention, first = orchestrator.worker(0), orchestrator.worker(1)
    held = held_at_start(first.start)
    emptied = tuple((-1,) * len(slots) for slots in held.experts)
    first.say(SlotsReported(slots=type(held)(experts=emptied, generations=held.generations)))
    assert attention.routed == {2}
    first.say(SlotsReported(slots=held))
    assert attention.routed == {1, 2}


def test_the_gateway_sees_when_all_workers_use_the_published_routes():
    orchestrator = serving()
    epoch = latest(orchestrator).members.epoch
    assert latest(orchestrator).conditions.epochs != ()
    orchestrator.worker(0).say(RoutesUsed(epoch=epoch))
    assert latest(orchestrator).conditions.epochs == ()
    assert latest(orchestrator).members.epoch == epoch


def test_a_start_that_cannot_succeed_is_given_up():
    orchestrator = ToyOrchestrator(start_of())
    orchestrator.worker(1).say(Hello(), Failed(reason="no such file", user_error=True))
    assert orchestrator.said(Failed) == [Failed(reason="no such file", user_error=True)]
    assert orchestrator.host.is_over


# -- losses --------------------------------------------------------------------------------------


def test_a_death_is_told_to_peers_and_gateway_and_the_seat_is_filled_again():
    orchestrator = serving()
    attention = orchestrator.worker(0)
    orchestrator.exit(orchestrator.worker(2))
    assert attention.routed == {1}
    assert [(left.rank, left.incarnation) for left in attention.heard(PeerLeft)] == [(2, 1)]
    (lost,) = orchestrator.told(WorkerLost)
    assert (lost.rank, lost.incarnation, lost.cause) == (2, 1, "crash")
    assert orchestrator.said(Provision)[-1].start.incarnation == 2
    orchestrator.worker(2, 2).come_up()
    assert attention.routed == {1, 2}
    assert states(orchestrator)[2] == (2, WorkerState.READY)


def test_a_worker_lost_while_its_memory_is_allocated_is_not_started():
    orchestrator = serving()
    assert orchestrator.anchor is not None
    orchestrator.anchor.close()  # nothing is allocated any more
    orchestrator._read_anchor = lambda: 0
    orchestrator.exit(orchestrator.worker(2))
    num_asked = len(orchestrator.said(Provision))
    del orchestrator._read_anchor
    orchestrator.attach_anchor()
    orchestrator.settle()
    assert len(orchestrator.said(Provision)) == num_asked + 1, "the new anchor was asked again"
    assert "cell-0.1" in orchestrator.adopted, "and was given what exists"


def test_memory_that_cannot_be_had_ends_a_start():
    orchestrator = ToyOrchestrator(start_of())
    orchestrator.refused = {Kind.LANE}
    for rank in (0, 1):
        orchestrator.worker(rank).come_up()
    (failed,) = orchestrator.said(Failed)
    assert failed.user_error and "out of memory" in failed.reason
    assert orchestrator.host.is_over


def test_a_log_lives_until_no_stream_needs_it():
    orchestrator = serving(num_attention=2, num_expert=1, log_mode="mirror")
    survivor, lost = orchestrator.worker(0), WorkerId(Rank(1), Incarnation(1))
    assert survivor.told_of(Offer, Kind.LOG) == [lost], "it has it from the beginning"
    orchestrator.exit(orchestrator.worker(1))
    orchestrator.worker(1, 2).come_up()
    assert survivor.heard(Withdraw) == [] and orchestrator.said(Release) == []
    orchestrator.gateway.send(LogSettled(rank=lost.rank, incarnation=lost.incarnation))
    orchestrator.settle()
    for rank, incarnation in ((0, 1), (1, 2)):
        assert orchestrator.worker(rank, incarnation).told_of(Withdraw, Kind.LOG) == [lost]
    assert [message.memory.name for message in orchestrator.said(Release)] == ["log-1.1"]
    assert "log-1.1" in orchestrator.released


@pytest.fixture
def fenced() -> tuple[ToyOrchestrator, ToyWorker]:
    """The first incarnation of rank 1 was declared gone and lives on beside its successor."""
    orchestrator = serving()
    old, attention = orchestrator.worker(1), orchestrator.worker(0)
    for _ in range(3):  # so often that it counts as a hang
        attention.say(Suspected(rank=Rank(1), incarnation=Incarnation(1), reason=Symptom.DEAF))
    assert [type(message) for message in old.got[-1:]] == [Fenced]
    orchestrator.worker(1, 2).come_up()
    orchestrator.worker(1, 2).say(ExpertReport(stats=ExpertStats(num_batches=7)))
    return orchestrator, old


def counters(orchestrator: ToyOrchestrator) -> tuple[int, dict[Rank, ExpertStats]]:
    """As the gateway would be told."""
    orchestrator.host._gateway.tell_cluster(orchestrator.host._machine.tables(), {})
    orchestrator.settle()
    return latest(orchestrator).num_stale, latest(orchestrator).expert_stats


@pytest.mark.parametrize(
    "message",
    [
        Suspected(rank=Rank(2), incarnation=Incarnation(1), reason=Symptom.DEAF),
        ExpertReport(stats=ExpertStats(num_batches=999)),
        Report(is_ready=True, is_leaving=False, epoch=Epoch(1000), peers=[], memory=[]),
        RoutesUsed(epoch=Epoch(1000)),
        Hello(),
        Ready(),
        Leaving(),
        Failed(reason="out of luck", user_error=False),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_a_fenced_worker_says_is_counted_and_nothing_else(fenced, message):
    orchestrator, old = fenced
    num_before, stats_before = counters(orchestrator)
    assert stats_before == {Rank(1): ExpertStats(num_batches=7)}, "its successor's"
    epoch, num_said = latest(orchestrator).members.epoch, len(orchestrator.to_supervisor)
    old.say(message)
    assert counters(orchestrator) == (num_before + 1, stats_before)
    assert latest(orchestrator).members.epoch == epoch
    assert len(orchestrator.to_supervisor) == num_said


def test_the_same_from_a_worker_that_counts_acts():
    """So the test above could fail."""
    orchestrator = serving()
    orchestrator.worker(1).say(ExpertReport(stats=ExpertStats(num_batches=999)))
    assert counters(orchestrator) == (0, {Rank(1): ExpertStats(num_batches=999)})
    epoch = latest(orchestrator).members.epoch
    orchestrator.worker(1).say(Leaving())
    assert latest(orchestrator).members.epoch == epoch + 1


def test_events_of_a_fenced_worker_are_news(fenced):
    orchestrator, old = fenced
    num_before, _ = counters(orchestrator)
    event = StaleDropped(process="worker-1", rank=1, incarnation=1, count=5, what="requests")
    old.say(EventHappened(event=event))
    assert EventHappened(event=event) in orchestrator.to_gateway
    assert counters(orchestrator)[0] == num_before + 5


def test_what_a_dead_worker_has_said_is_heard_before_its_end():
    orchestrator = ToyOrchestrator(start_of())
    worker = orchestrator.worker(1)
    worker.control.send(Hello())
    worker.control.send(Failed(reason="no room", user_error=True))
    orchestrator.exit(worker, status=1)
    assert orchestrator.said(Failed) == [Failed(reason="no room", user_error=True)]


# -- operators -----------------------------------------------------------------------------------


def test_a_drain_is_answered_with_who_was_asked():
    orchestrator = serving()
    asked, refused = orchestrator.ask(DrainRequest(rank=0)), orchestrator.ask(DrainRequest(rank=9))
    assert orchestrator.worker(0).heard(Leave)
    assert view_of(asked, DrainView) == DrainView(rank=0, incarnation=1)
    assert refused.refused == "there is no rank 9"


def scaled(orchestrator: ToyOrchestrator, **numbers: int) -> ScaleView:
    return view_of(orchestrator.ask(ScaleRequest(**numbers)), ScaleView)


def happened(orchestrator: ToyOrchestrator, kind: type) -> list:
    return [message.event for message in orchestrator.told(EventHappened) if isinstance(message.event, kind)]


def test_more_workers_and_fewer():
    orchestrator = serving(max_workers=5)
    answer = scaled(orchestrator, attention=2, expert=3)
    assert (answer.attention, answer.expert, answer.added) == (2, 3, (3, 4))
    assert orchestrator.said(KeepGoal)[-1].goal.scaling_s is not None
    orchestrator.worker(3).come_up()
    orchestrator.worker(4).come_up()
    assert orchestrator.worker(3).start.roles == ("attention",) and orchestrator.worker(4).start.slots is not None
    assert orchestrator.worker(0).routed == {1, 2, 4} == orchestrator.worker(3).routed
    (began,), (done,) = happened(orchestrator, ScaleBegan), happened(orchestrator, ScaleDone)
    assert (began.added, done.attention, done.expert) == ((3, 4), 2, 3)
    assert scaled(orchestrator, attention=2, expert=2).retired == (4,)
    leaving = orchestrator.worker(4)
    assert leaving.heard(Leave)
    leaving.say(Leaving())
    assert orchestrator.worker(0).routed == {1, 2}
    orchestrator.exit(leaving, status=0)
    assert 4 not in states(orchestrator) and len(happened(orchestrator, ScaleDone)) == 2
    assert scaled(orchestrator, attention=2, expert=3).added == (4,)
    assert orchestrator.worker(4, incarnation=2).start.roles == ("expert",)
    assert "--max-workers" in orchestrator.ask(ScaleRequest(attention=4)).refused


def test_a_new_orchestrator_goes_on_with_the_number_that_was_asked_for():
    before = serving(num_attention=2, num_expert=2)
    assert scaled(before, attention=1).retired == (1,)
    after = succeed(before, epoch=9, gone=[])
    assert after.worker(1).heard(Leave), "it is asked once more"
    after.exit(after.worker(1), status=0)
    assert 1 not in states(after) and len(happened(after, ScaleDone)) == 1


def test_an_incarnation_that_only_the_gateway_knows_of_is_not_used_again():
    before = serving()
    before.exit(before.worker(1))
    after = ToyOrchestrator(
        start_of(found=(FoundProcess(rank=Rank(1), incarnation=Incarnation(1), pid=-1),), is_serving=True)
    )
    lost = [WorkerId(Rank(1), Incarnation(4))]
    after.gateway.send(GatewayReport(epoch=Epoch(9), logs=[], lost=lost))
    after.settle()
    assert states(after)[1] == (5, WorkerState.STARTING)


def test_an_injected_fault_hits_the_process_that_the_supervisor_knows():
    orchestrator = serving()
    orchestrator.gateway.send(Ask(id="x", request=FaultRequest(rank=2, signal="KILL")))
    orchestrator.settle()
    (order,) = orchestrator.said(SignalWorker)
    assert (order.rank, order.incarnation, order.signal) == (2, 1, 9)
    orchestrator.supervisor.send(Signalled(id="x", pid=1002, reason=""))
    orchestrator.supervisor.send(Signalled(id="y", pid=1, reason=""))  # which another orchestrator was asked for
    orchestrator.settle()
    (answer,) = orchestrator.told(Answered)
    assert view_of(answer, FaultView) == FaultView(rank=2, incarnation=1, pid=1002, signal="KILL")


def test_shutting_down_reaches_every_worker_and_starts_none():
    orchestrator = serving()
    num_asked = len(orchestrator.said(Provision))
    orchestrator.supervisor.send(Shutdown(grace_s=3.0))
    orchestrator.settle()
    assert orchestrator.host.is_over
    assert all(worker.heard(Shutdown) for worker in orchestrator.workers.values())
    assert len(orchestrator.said(Provision)) == num_asked


# -- a new orchestrator --------------------------------------------------------------------------


def test_a_new_orchestrator_goes_on_with_what_it_finds():
    after = succeed(serving(), epoch=7, gone=[])
    assert after.said(Provision) == []
    assert latest(after).members.epoch == 8
    assert {rank: state for rank, (_, state) in states(after).items()} == dict.fromkeys(range(3), WorkerState.READY)
    assert after.worker(0).routed == {1, 2}
    assert after.worker(0).heard(PeerJoined) == [], "its lanes are there"


def test_the_capacity_is_that_of_the_start_whatever_the_goal_has_become():
    before = serving()
    goal = before.said(KeepGoal)[-1].goal
    grown = msgspec.structs.replace(goal.seats[0], rank=Rank(7))
    later = msgspec.structs.replace(goal, version=2, seats=(*goal.seats, grown))
    after = ToyOrchestrator(start_of(found=(), goal=later, is_serving=True))
    after.gateway.send(GatewayReport(epoch=Epoch(3), logs=[], lost=[]))
    after.settle()
    told = {message.start.rank: message.start.capacity for message in after.said(Provision)}
    assert set(told) == {0, 1, 2, 7}
    assert set(told.values()) == {before.worker(0).start.capacity}


def test_an_end_that_no_orchestrator_saw_is_told():
    dead = WorkerId(Rank(2), Incarnation(1))
    after = succeed(serving(), epoch=7, gone=[dead])
    assert [(left.rank, left.incarnation) for left in after.worker(0).heard(PeerLeft)] == [dead]
    assert [(lost.rank, lost.cause) for lost in after.told(WorkerLost)] == [(2, "crash")]
    assert after.said(Provision)[0].start.incarnation == 2


def test_the_end_of_a_worker_that_a_new_orchestrator_never_heard_from_is_told():
    """It hung when the orchestrator died. Its peers have lanes that this orchestrator does not know of."""
    hung = WorkerId(Rank(2), Incarnation(1))
    after = succeed(serving(), epoch=7, gone=[], late=(hung,))
    after.host._queue._recovery.deadline = 0.0  # it has been waited for long enough
    after.settle()
    assert latest(after).members.epoch >= 8
    after.exit(after.workers[hung])
    assert [(left.rank, left.incarnation) for left in after.worker(0).heard(PeerLeft)] == [hung]
    assert after.worker(1).heard(PeerLeft) == [], "it is no peer"


def test_nothing_is_published_before_all_have_reported():
    late = WorkerId(Rank(1), Incarnation(1))
    after = succeed(serving(), epoch=7, gone=[], late=(late,))
    assert after.told(ClusterChanged) == []
    worker = after.workers[late]
    worker.say(worker.report(7, [WorkerId(Rank(0), Incarnation(1))]))
    assert latest(after).members.epoch == 8


def test_what_operators_ask_for_waits_until_then():
    late = WorkerId(Rank(1), Incarnation(1))
    after = succeed(serving(), epoch=7, gone=[], late=(late,))
    after.gateway.send(Ask(id="a", request=DrainRequest(rank=0)))
    after.gateway.send(Ask(id="b", request=FaultRequest(device=2, gone=True)))
    after.settle()
    assert after.told(Answered) == []
    worker = after.workers[late]
    worker.say(worker.report(7, [WorkerId(Rank(0), Incarnation(1))]))
    drained, lost = after.told(Answered)
    assert view_of(drained, DrainView).incarnation == 1 and view_of(lost, DeviceChangeView).ranks == (2,)


# -- devices -------------------------------------------------------------------------------------


def lose(orchestrator: ToyOrchestrator, device: int, gone: bool = False) -> Answered:
    return orchestrator.ask(FaultRequest(device=device, gone=gone))


def test_a_lost_device_takes_its_workers_and_its_memory():
    orchestrator = serving(num_attention=2, log_mode="anchor")
    log = next(memory for memory in orchestrator.worker(0).start.memory if memory.kind is Kind.LOG)
    assert lose(orchestrator, 0, gone=True).view == b'{"device":0,"ranks":[0]}'
    kills = [(order.rank, order.signal) for order in orchestrator.said(SignalWorker)]
    assert kills == [(0, signal.SIGKILL)]
    assert Release(memory=log) in orchestrator.said(Release) and log.name in orchestrator.released
    assert orchestrator.worker(1).told_of(Withdraw, Kind.LOG) == [(0, 1)]
    assert orchestrator.said(KeepGoal)[-1].goal.gone == (0,)
    assert latest(orchestrator).gone == (0,)
    assert orchestrator.said(Provision)[-1].start.incarnation == 1, "nothing starts on it"
    assert lose(orchestrator, 0, gone=True).refused == "device 0 is gone already"


def test_a_device_returns_empty():
    orchestrator = serving(log_mode="anchor")
    assert orchestrator.ask(ReturnRequest(device=2)).refused == "device 2 is not gone"
    lose(orchestrator, 2, gone=True)
    orchestrator.exit(orchestrator.worker(2))
    assert orchestrator.worker(0).routed == {1}
    assert orchestrator.ask(ReturnRequest(device=2)).view == b'{"device":2,"ranks":[2]}'
    orchestrator.worker(2, 2).come_up()
    assert orchestrator.worker(0).routed == {1, 2}
    assert orchestrator.said(KeepGoal)[-1].goal.gone == latest(orchestrator).gone == ()


def weights_of(worker: ToyWorker) -> int:
    """Which memory it was given for its weights."""
    fds = dict(zip(worker.start.memory, worker.memory[1:], strict=True))
    return os.fstat(next(fd for memory, fd in fds.items() if memory.kind is Kind.WEIGHTS)).st_ino


def wait_for(orchestrator: ToyOrchestrator, rank: int, incarnation: int) -> None:
    """A seat whose workers end while they start waits before the next."""
    deadline = time.monotonic() + 30.0
    while WorkerId(Rank(rank), Incarnation(incarnation)) not in orchestrator.workers:
        assert time.monotonic() < deadline
        orchestrator.host.turn(0.05)
        orchestrator.settle()


@pytest.mark.parametrize("is_replaced", [False, True], ids=["the same orchestrator", "the next orchestrator"])
def test_what_a_worker_lost_with_its_device_while_it_was_forked_is_not_used(is_replaced):
    """Two processes of one seat exist, each with memory of the same name: that of the later one is the seat's."""
    orchestrator = serving(weights="memory")
    orchestrator.is_birth_held = True
    for _ in range(2):
        lose(orchestrator, 1)
    orchestrator.exit(orchestrator.worker(1))
    orchestrator.is_birth_held = False
    wait_for(orchestrator, 1, incarnation=3)
    lost, latest_one = orchestrator.worker(1, 2), orchestrator.worker(1, 3)
    assert weights_of(lost) != weights_of(latest_one), "the device came back empty"
    expected = weights_of(latest_one)
    if is_replaced:
        orchestrator = succeed(orchestrator, epoch=7, gone=[])
    orchestrator.exit(orchestrator.worker(1, 2))
    orchestrator.exit(orchestrator.worker(1, 3))
    wait_for(orchestrator, 1, incarnation=4)
    assert weights_of(orchestrator.worker(1, 4)) == expected
    memory = next(piece for piece in orchestrator.worker(1, 4).start.memory if piece.kind is Kind.WEIGHTS)
    assert os.fstat(orchestrator.owned.allocate(memory)).st_ino == expected, "the anchor has the same"


def test_the_next_orchestrator_does_not_use_what_was_dropped():
    """A device is lost, and the orchestrator dies before the worker on it does."""
    orchestrator = serving(weights="memory")
    worker = orchestrator.worker(1)
    worker.dropped = tuple(piece for piece in worker.start.memory if piece.owners == (seat_owner(Rank(1)),))
    dropped = weights_of(worker)
    orchestrator = succeed(orchestrator, epoch=7, gone=[])
    orchestrator.exit(orchestrator.worker(1))
    wait_for(orchestrator, 1, incarnation=2)
    assert worker.dropped and weights_of(orchestrator.worker(1, 2)) != dropped


def test_a_mirror_outlives_the_device_of_its_worker():
    orchestrator = serving(num_attention=2, log_mode="mirror")
    lose(orchestrator, 0)
    assert orchestrator.said(Release) == [] and orchestrator.worker(1).heard(Withdraw) == []


def test_a_gateway_with_later_tables_is_overtaken():
    after = succeed(serving(), epoch=7, gone=[])
    after.gateway.send(GatewayReport(epoch=Epoch(20), logs=[], lost=[]))
    after.settle()
    assert latest(after).members.epoch == 21
    assert after.worker(0).routes.epoch == 21


def test_a_worker_that_lacks_routes_is_sent_whole_ones():
    orchestrator = serving(num_attention=2)
    home = orchestrator.worker(0)
    lose(orchestrator, 1)
    num_whole = len(home.heard(RoutesChanged))
    assert home.heard(RoutesPatched), "what changes is told as such"
    home.say(RoutesWanted(epoch=Epoch(0)))
    assert [told.routes for told in home.heard(RoutesChanged)[num_whole:]] == [home.routes]
    assert len(orchestrator.worker(2).heard(RoutesChanged)) == 0, "expert workers need none"


def test_a_lane_that_only_one_of_the_two_got_is_made_again():
    """The orchestrator before died when it had told one of them."""
    late = WorkerId(Rank(1), Incarnation(1))
    after = succeed(serving(), epoch=7, gone=[], late=(late,))
    worker = after.workers[late]
    worker.say(worker.report(7, peers=[]))
    assert [peer.rank for peer in after.worker(0).heard(PeerJoined)] == [1]
    assert [peer.rank for peer in worker.heard(PeerJoined)] == [0]
    assert after.worker(2).heard(PeerJoined) == []


@pytest.mark.parametrize("is_needed", [True, False])
def test_a_log_of_a_worker_that_ended_before_is_kept_while_streams_need_it(is_needed):
    late, dead = WorkerId(Rank(0), Incarnation(2)), WorkerId(Rank(0), Incarnation(1))
    before = serving(log_mode="mirror")
    before.exit(before.worker(0))
    before.worker(0, 2).come_up()
    after = succeed(before, epoch=7, gone=[], late=(late,), logs=(dead,) if is_needed else ())
    memory = MemoryName(kind=Kind.LOG, owners=(dead,), num_bytes=1 << 20)
    after.supervisor.send(Offer(memory=memory), fds=[create_memory(memory.name, memory.num_bytes)])
    after.settle()
    worker = after.workers[late]
    worker.say(worker.report(7, peers=[WorkerId(Rank(1), Incarnation(1)), WorkerId(Rank(2), Incarnation(1))]))
    assert (Release(memory=memory) in after.said(Release)) != is_needed
    if is_needed:
        assert worker.told_of(Offer, Kind.LOG) == [dead]
        after.gateway.send(LogSettled(rank=dead.rank, incarnation=dead.incarnation))
        after.settle()
        assert after.said(Release) == [Release(memory=memory)]


def test_the_log_of_a_worker_that_was_lost_before_its_process_existed_is_dropped():
    """The gateway has said that no stream needs it before the orchestrator had it."""
    orchestrator = serving(num_attention=2, num_expert=1, log_mode="mirror")
    orchestrator.is_birth_held = True
    for incarnation in (1, 2):
        lose(orchestrator, 0)
        orchestrator.settle()
        orchestrator.gateway.send(LogSettled(rank=Rank(0), incarnation=Incarnation(incarnation)))
        orchestrator.settle()
    orchestrator.give_birth()
    orchestrator.settle()
    assert [message.memory.name for message in orchestrator.said(Release)] == ["log-0.1", "log-0.2"]
    survivor = orchestrator.worker(1)
    offered, withdrawn = (survivor.told_of(message, Kind.LOG) for message in (Offer, Withdraw))
    assert offered[:2] == withdrawn == [(0, 1), (0, 2)]  # a third one begins after a while


def test_the_log_of_a_lost_worker_that_ends_while_the_next_orchestrator_recovers_is_dropped():
    """The gateway knows that it is lost, so it is not lost once more."""
    before = serving(num_attention=2, num_expert=1, log_mode="mirror")
    lost, workers = before.worker(1), dict(before.workers)
    found = [FoundProcess(rank=id.rank, incarnation=id.incarnation, pid=w.pid) for id, w in workers.items()]
    goal = before.said(KeepGoal)[-1].goal
    after = ToyOrchestrator(start_of(2, 1, "mirror", found=tuple(found), goal=goal, is_serving=True), workers)
    after.exit(lost)
    for rank, peers in ((0, [2]), (2, [0])):
        worker = after.worker(rank)
        worker.say(worker.report(7, [WorkerId(Rank(peer), Incarnation(1)) for peer in peers]))
    after.gateway.send(GatewayReport(epoch=Epoch(7), logs=[], lost=[lost.id]))
    after.settle()
    assert states(after)[1][0] == 2, "its seat has the next incarnation"
    assert [message.memory.name for message in after.said(Release)] == ["log-1.1"]
