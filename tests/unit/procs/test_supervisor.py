"""The supervisor's loop, message by message: who is told what, who is replaced, and in which order it ends."""

import errno
import gc
import os
import resource
import signal
import socket
import struct
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from everserve.procs import supervisor as supervisor_module
from everserve.procs.launching import ENVIRONMENT
from everserve.tables.goal import Goal, SeatGoal
from everserve.tables.ids import Rank, Role
from everserve.wire.channel import Channel
from everserve.wire.messages import (
    AnchorAttached,
    Answered,
    Ask,
    Attach,
    Failed,
    ForkWorker,
    GatewayAttached,
    GatewayBegun,
    GatewayKnown,
    KeepGoal,
    Offer,
    OrchestratorAttached,
    ProcessesChanged,
    Ready,
    Release,
    Shutdown,
    Signalled,
    SignalWorker,
    SparesChanged,
    StartGateway,
    StartOrchestrator,
    StartZygote,
    TokensAttached,
    WorkerExited,
    WorkerStarted,
)
from everserve.wire.operators import FaultRequest, FaultView
from tests.support import supervisor_toy
from tests.support.decisions import view_of
from tests.support.descriptors import num_fds
from tests.support.supervisor_toy import (
    Instance,
    are_connected,
    log_of,
    make_zygote,
    new_memory,
    size_of,
    start_worker,
)

ALL = ["gateway", "orchestrator", "anchor", "zygote"]
HELPERS = ALL[1:]


@pytest.fixture
def make(monkeypatch):
    gc.collect()  # what other tests have left
    before, made = num_fds(), []

    def make_instance(**settings) -> Instance:
        made.append(Instance(monkeypatch, **settings))
        return made[-1]

    yield make_instance
    for instance in made:
        instance.close()
    made.clear()
    gc.collect()
    assert num_fds() == before, "every descriptor was closed"


@pytest.fixture
def instance(make) -> Instance:
    return make()


@pytest.fixture
def serving(instance) -> Instance:
    instance.serve()
    return instance


# Starting


def test_every_process_is_started_and_connected_to_those_it_talks_to(make):
    instance = make(num_spares=3)
    assert list(instance.played) == ALL
    assert instance["gateway"].sockets["--listen-fd"].getsockname() == instance.address
    assert instance.get("gateway", StartGateway) == supervisor_toy.START_GATEWAY
    assert instance.get("orchestrator", StartOrchestrator) == supervisor_toy.START_ORCHESTRATOR
    told = instance.get("zygote", StartZygote)
    assert (told.device, told.num_spares, told.like) == ("cpu", 3, ())
    assert told.environment.items() >= {**os.environ, **ENVIRONMENT}.items()
    instance.get("gateway", OrchestratorAttached)
    orchestrators_end = Channel(instance["orchestrator"].sockets["--gateway-fd"])
    assert are_connected(orchestrators_end, instance["gateway"].channel_of(OrchestratorAttached))
    instance.get("anchor", OrchestratorAttached)
    instance.get("orchestrator", AnchorAttached)
    to_anchor = instance["orchestrator"].channel_of(AnchorAttached)
    assert are_connected(to_anchor, instance["anchor"].channel_of(OrchestratorAttached))
    known = instance["gateway"].messages(ProcessesChanged)[-1].processes
    assert [one.name for one in known] == ["root", "supervisor", "keeper", *HELPERS]
    assert [one.pid for one in known] == [os.getpid(), os.getpid(), *(instance[name].process.pid for name in ALL)]


def test_a_zygote_that_was_there_before_is_taken_over_and_replaced_as_any_other(make):
    played, early = make_zygote()
    instance = make(early=[early])
    assert list(instance.played) == ALL[:-1], "no other is started"
    instance.played["zygote"] = [played]
    assert instance.get("zygote", StartZygote).environment["OPENBLAS_NUM_THREADS"] == "1"
    (stderr,) = played.fds_of(StartZygote)
    assert os.fstat(stderr).st_ino == os.fstat(2).st_ino
    os.close(stderr)
    assert instance["gateway"].messages(ProcessesChanged)[-1].processes[-1].pid == played.process.pid
    instance.die("zygote")
    assert instance["zygote"] is not played and instance.get("zygote", StartZygote)


def test_a_zygote_that_has_died_before_it_was_taken_over_is_replaced(make):
    played, early = make_zygote()
    played.exit(1)
    instance = make(early=[early])
    instance.until(lambda: "zygote" in instance.played)
    assert instance.get("zygote", StartZygote) and not instance.is_over
    played.close()


@pytest.mark.parametrize("order", [("gateway", "orchestrator"), ("orchestrator", "gateway")])
def test_it_serves_when_the_gateway_and_the_orchestrator_are_ready(instance, order):
    for name in ("zygote", "anchor", order[0]):
        instance[name].control.send(Ready())
        instance.turn()
    assert instance.said_ready == []
    instance[order[1]].control.send(Ready())
    instance.until(lambda: instance.said_ready)
    instance.die("orchestrator")
    instance["orchestrator"].control.send(Ready())
    instance.turn()
    assert instance.said_ready == [f"http://127.0.0.1:{instance.address[1]}"], "once"


@pytest.mark.parametrize("is_user_error", [True, False])
def test_a_start_that_cannot_succeed_is_the_end_and_says_why(instance, is_user_error):
    """Nothing is tried again: it would fail again."""
    instance["orchestrator"].control.send(Failed(reason="no room", user_error=is_user_error))
    instance["orchestrator"].exit(1)
    assert instance.get("gateway", Shutdown).grace_s == 0.0
    assert instance.outcome == (2 if is_user_error else 1, "no room")
    assert len(instance.played["orchestrator"]) == 1


# Workers


def test_a_worker_from_its_order_to_its_end(serving):
    serving.provision()
    assert serving.get("zygote", ForkWorker).start == start_worker()
    cell, control, lifeline, tokens, log = serving["zygote"].fds_of(ForkWorker)
    assert (size_of(cell), size_of(log)) == (1, 10)
    pid = serving.fork()
    assert serving.get("orchestrator", WorkerStarted) == WorkerStarted(start=start_worker(), pid=pid)
    channel, cell, log = serving["orchestrator"].fds_of(WorkerStarted)
    assert are_connected(Channel.of_fd(channel), Channel.of_fd(control))
    assert (size_of(cell), size_of(log)) == (1, 10)
    assert serving.get("gateway", Attach) == Attach(rank=0, incarnation=1)
    assert are_connected(serving["gateway"].channel_of(Attach), Channel.of_fd(tokens))
    Channel.of_fd(lifeline).close()
    os.kill(pid, signal.SIGKILL)
    assert serving.get("orchestrator", WorkerExited) == WorkerExited(rank=0, incarnation=1, exit_status=-9)
    assert serving.supervisor._workers.pids == []


def test_a_signal_reaches_the_incarnation_that_it_is_for_and_no_other(serving):
    serving.provision(incarnation=2)
    pid = serving.fork()
    for incarnation in (1, 2):
        order = SignalWorker(rank=0, incarnation=incarnation, signal=signal.SIGKILL, id=f"to {incarnation}")
        serving["orchestrator"].control.send(order)
    answers = [serving.get("orchestrator", Signalled, num) for num in (1, 2)]
    assert [(answer.id, answer.pid) for answer in answers] == [("to 1", None), ("to 2", pid)]
    assert serving.get("orchestrator", WorkerExited).exit_status == -9


def test_an_operators_signal_to_another_process(serving):
    serving["gateway"].control.send(Ask(id="a", request=FaultRequest(process="anchor", signal="KILL")))
    serving["gateway"].control.send(Ask(id="b", request=FaultRequest(process="nobody", signal="KILL")))
    victim = serving["anchor"]
    killed, refused = (serving.get("gateway", Answered, num) for num in (1, 2))
    assert view_of(killed, FaultView) == FaultView(process="anchor", pid=victim.process.pid, signal="KILL")
    assert refused.refused == "the nobody has no process at the moment"
    victim.exit()
    serving.until(lambda: len(serving.played["anchor"]) == 2)
    assert victim.process.returncode == -signal.SIGKILL


def test_descriptors_of_a_frame_that_is_no_message_are_closed_and_shift_no_others(serving):
    reader, writer = os.pipe()
    orchestrator = serving["orchestrator"].control
    socket.send_fds(orchestrator.sock, [struct.pack("<I", 3) + b"???"], [writer, writer])
    os.close(writer)
    serving.provision(sizes=(5, 50))
    serving.get("zygote", ForkWorker)
    cell, *channels, log = serving["zygote"].fds_of(ForkWorker)
    assert (size_of(cell), size_of(log)) == (5, 50), "those that it came with"
    close(*channels)
    assert os.read(reader, 1) == b"", "no copy of the pipe's other end is left"
    os.close(reader)


def test_descriptors_of_a_message_that_needs_none_are_closed(serving):
    reader, writer = os.pipe()
    serving["zygote"].control.send(SparesChanged(pids=(7,), num_wanted=1), fds=[writer])
    os.close(writer)
    serving.until(lambda: serving["gateway"].messages(ProcessesChanged)[-1].spares == (7,))
    assert os.read(reader, 1) == b""
    os.close(reader)


# Replacing


def test_the_next_orchestrator_gets_everything_that_the_one_before_had(serving):
    serving.provision(incarnation=1)
    ended = serving.fork()
    os.kill(ended, signal.SIGKILL)
    serving.get("orchestrator", WorkerExited)
    serving.provision(incarnation=2)
    lifeline = lifeline_of(serving, num_asked=2)
    pid = serving.fork(num_asked=2)
    serving.die("orchestrator", status=1)
    start = serving.get("orchestrator", StartOrchestrator)
    assert start.is_serving and [(one.rank, one.incarnation, one.pid) for one in start.found] == [(0, 2, pid)]
    started = serving.get("orchestrator", WorkerStarted)
    assert started == WorkerStarted(start=start_worker(2), pid=pid)
    channel, cell, log = serving["orchestrator"].fds_of(WorkerStarted)
    assert (size_of(cell), size_of(log)) == (1, 10)
    frame = lifeline.receive_frame(timeout_s=30)
    assert isinstance(frame.message, OrchestratorAttached)
    assert are_connected(Channel.of_fd(channel), Channel.of_fd(*frame.fds.take())), "a new channel to the worker"
    lifeline.close()
    assert serving.get("orchestrator", Offer).memory == log_of(1)
    assert [size_of(fd) for fd in serving["orchestrator"].fds_of(Offer)] == [10]
    serving.get("gateway", OrchestratorAttached, 2)
    to_gateway = Channel(serving["orchestrator"].sockets["--gateway-fd"])
    assert are_connected(to_gateway, serving["gateway"].channel_of(OrchestratorAttached))
    serving.get("anchor", OrchestratorAttached, 2)
    to_anchor = serving["orchestrator"].channel_of(AnchorAttached)
    assert are_connected(to_anchor, serving["anchor"].channel_of(OrchestratorAttached))


def lifeline_of(instance: Instance, num_asked: int) -> Channel:
    """The end that the worker gets."""
    instance.get("zygote", ForkWorker, num_asked)
    cell, control, lifeline, *others = instance["zygote"].fds_of(ForkWorker)
    close(cell, control, *others)
    return Channel.of_fd(lifeline)


def close(*fds: int) -> None:
    for fd in fds:
        os.close(fd)


def test_the_next_orchestrator_hears_of_workers_that_are_on_their_way_or_gone(serving):
    serving.provision(incarnation=1)
    os.kill(serving.fork(), signal.SIGKILL)
    serving.get("orchestrator", WorkerExited)
    serving.die("orchestrator")
    found = serving.get("orchestrator", StartOrchestrator).found
    assert [(one.incarnation, one.pid) for one in found] == [(1, -1)], "its number is not used again"
    serving.provision(incarnation=2)
    serving.get("zygote", ForkWorker, 2)
    serving.die("orchestrator")
    found = serving.get("orchestrator", StartOrchestrator).found
    assert [(one.incarnation, one.pid) for one in found] == [(2, 0)]


def test_the_next_orchestrator_goes_on_with_the_last_goal(serving):
    for version in (1, 2):
        goal = Goal(version=version, seats=(SeatGoal(rank=Rank(0), roles=(Role.ATTENTION,)),), placement=None)
        serving["orchestrator"].control.send(KeepGoal(goal=goal))
    serving.die("orchestrator")
    assert serving.get("orchestrator", StartOrchestrator).goal == goal


def test_memory_that_was_dropped_is_not_handed_over(serving):
    serving.provision()
    os.kill(serving.fork(), signal.SIGKILL)
    serving.get("orchestrator", WorkerExited)
    serving["orchestrator"].control.send(Release(memory=log_of(1)))
    serving.die("orchestrator")
    serving.provision(incarnation=2)
    serving.fork(num_asked=2)
    serving.get("orchestrator", WorkerStarted)  # later than memory would have come
    assert serving["orchestrator"].messages(Offer) == []


def test_an_orchestrator_that_dies_during_the_start_is_followed_by_one_that_starts(instance):
    instance.die("orchestrator")
    start = instance.get("orchestrator", StartOrchestrator)
    assert start.found == () and not start.is_serving


def test_the_next_anchor_is_connected_to_the_orchestrator(serving):
    serving.die("anchor")
    serving.get("orchestrator", AnchorAttached, 2)
    serving.get("anchor", OrchestratorAttached)
    to_anchor = serving["orchestrator"].channel_of(AnchorAttached)
    assert are_connected(to_anchor, serving["anchor"].channel_of(OrchestratorAttached))
    assert len(serving.played["orchestrator"]) == 1


def test_the_next_zygote_gets_the_orders_that_the_one_before_still_had(serving):
    serving.provision(incarnation=1)
    first = serving.fork()
    serving.provision(incarnation=2, sizes=(7, 70))
    serving.get("zygote", ForkWorker, 2)
    before = serving["zygote"].fds_of(ForkWorker)
    serving.die("zygote")
    assert {start.incarnation for start in serving.get("zygote", StartZygote).like} == {2}, "one of each kind"
    assert serving.get("zygote", ForkWorker).start == start_worker(2)
    cell, *channels, log = serving["zygote"].fds_of(ForkWorker)
    sockets = [{os.fstat(fd).st_ino for fd in fds} for fds in (before, channels)]
    assert not sockets[0] & sockets[1], "with new channels"
    assert (size_of(cell), size_of(log)) == (7, 70)
    close(*before, *channels)
    serving.fork()
    assert first in serving.supervisor._workers.pids, "what it had forked goes on"


@pytest.mark.parametrize("name", HELPERS)
def test_a_helper_that_is_stopped_is_killed_and_replaced(serving, name):
    """It would be missed only when it is needed."""
    stopped = serving[name]
    stopped.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, stopped.process.pid, os.WSTOPPED)
    serving.turn()
    stopped.exit()
    serving.until(lambda: len(serving.played[name]) == 2)
    assert stopped.process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("name", HELPERS)
@pytest.mark.parametrize("is_used_again", [False, True])
@pytest.mark.parametrize("has_ended", [False, True])
def test_a_helper_whose_channel_was_closed_by_a_mistake_is_replaced(serving, name, is_used_again, has_ended):
    """When something is sent to it, or when it has seen the end of its channel. What has its number by then stays
    open."""
    before, fd = serving[name], serving.supervisor._children[name].control.fileno()
    other = new_memory(7)
    os.dup2(other, fd)
    os.close(other)
    if not is_used_again:
        os.close(fd)
    assert before.control.wait(0.0), "it sees the end of its channel"
    if has_ended:
        before.exit()
    else:
        serving.supervisor._children.send(name, Ready())
    serving.until(lambda: serving[name] is not before)
    assert before.process.wait() == (0 if has_ended else -signal.SIGKILL)
    if name != "zygote":
        anchor, orchestrator = (serving["anchor"], OrchestratorAttached), (serving["orchestrator"], AnchorAttached)
        ends = [played.channel_of(kind) for played, kind in (anchor, orchestrator)]
        assert are_connected(*ends)
        for end in ends:
            end.close()
    if is_used_again:
        assert size_of(fd) == 7


@pytest.mark.parametrize("name", HELPERS)
def test_a_helper_that_dies_again_and_again_is_the_end(serving, name):
    for _ in range(10):
        serving.die(name, status=3)
    serving[name].exit(3)
    assert serving.get("gateway", Shutdown).grace_s == 0.0
    assert serving.outcome == (1, f"the {name} died (exit status 3); stopping")
    assert len(serving.played[name]) == 11


@contextmanager
def room_for(num_fds: int) -> Iterator[None]:
    """This process may open so many more descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    first_free = os.dup(0)
    os.close(first_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (first_free + num_fds, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def see_the_end_of(instance: Instance, name: str) -> None:
    instance[name].exit(9)
    played = instance.supervisor._children[name]
    instance.until(lambda: instance.supervisor._children.get(name) is not played)


@pytest.mark.parametrize("name", HELPERS)
def test_what_cannot_be_had_is_tried_again_for_as_long_as_it_takes(serving, name):
    """There is no descriptor, wherever in the start the last one is used up: for its channel, or to start it."""
    serving.provision()
    lifeline = lifeline_of(serving, num_asked=1)
    serving.fork()
    for room in range(12):
        before = len(serving.played[name])
        with room_for(room):
            see_the_end_of(serving, name)
            serving.second()
            serving.second()
        serving.pass_time(supervisor_module._RESTARTS_WITHIN_S)
        serving.second()
        assert not serving.supervisor._steps
        assert len(serving.played[name]) == before + 1 and not serving.is_over
        lifeline.receive_all()
    serving.get("anchor", OrchestratorAttached)
    serving.get("orchestrator", AnchorAttached)
    serving.get("zygote", StartZygote)
    to_anchor = serving["orchestrator"].channel_of(AnchorAttached)
    assert are_connected(to_anchor, serving["anchor"].channel_of(OrchestratorAttached))
    if name == "orchestrator":
        assert serving.get("orchestrator", WorkerStarted).start == start_worker()
    lifeline.close()


@pytest.mark.parametrize("name", HELPERS)
def test_a_fork_that_fails_is_tried_again_every_second(serving, name, caplog):
    serving.num_refused = 0

    def refuse(*_):
        serving.num_refused += 1
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    start, serving.root.start = serving.root.start, refuse
    see_the_end_of(serving, name)
    for num_refused in range(1, 31):
        serving.signal(signal.SIGCHLD)
        serving.turn()
        assert serving.num_refused == num_refused, "once a second"
        serving.second()
    serving.root.start = start
    serving.second()
    assert len(serving.played[name]) == 2
    assert [message for message in caplog.messages if "cannot start" in message] == [
        f"cannot start the {name} now: [Errno 11] Resource temporarily unavailable; trying again every 1 s"
    ]


def test_a_start_for_which_there_is_no_room_fails_at_last(instance):
    instance.root.start = lambda *_: (_ for _ in ()).throw(BlockingIOError(errno.EAGAIN, "no process"))
    see_the_end_of(instance, "zygote")
    for _ in range(30):
        assert instance.outcome == (0, None)
        instance.second()
    instance.second()
    assert instance.outcome == (1, "cannot start the zygote: [Errno 11] no process")


def test_all_helpers_at_once(serving):
    """The steps of one go on where those of another began."""
    with room_for(0):
        for name in ("anchor", "orchestrator", "zygote", "anchor"):
            if name in serving.supervisor._children:
                see_the_end_of(serving, name)
        assert set(serving.supervisor._children) == {"gateway"}
    serving.second()
    assert not serving.supervisor._steps
    serving.get("anchor", OrchestratorAttached)
    serving.get("orchestrator", AnchorAttached)
    to_anchor = serving["orchestrator"].channel_of(AnchorAttached)
    assert are_connected(to_anchor, serving["anchor"].channel_of(OrchestratorAttached))
    assert serving.get("zygote", StartZygote)


@pytest.mark.parametrize("name", HELPERS)
def test_a_helper_that_had_no_room_is_replaced_as_often_as_it_takes(serving, name):
    for num_before in range(1, 15):
        serving[name].control.send(Failed(reason="no thread", user_error=False, is_temporary=True))
        see_the_end_of(serving, name)
        assert len(serving.played[name]) == num_before, "a second later"
        serving.second()
        assert len(serving.played[name]) == num_before + 1
    assert not serving.is_over


def test_a_worker_that_cannot_be_connected_yet_waits_with_its_memory(serving):
    """The order has come, or is left in the socket; wherever the last descriptor is used up."""
    for incarnation, room in enumerate(range(14), start=1):
        serving.provision(incarnation)
        with room_for(room):
            serving.second()
            serving.second()
        serving.second()
        close(*serving_fds(serving, incarnation))
        os.kill(serving.fork(incarnation), signal.SIGKILL)
        serving.get("orchestrator", WorkerExited, incarnation)


def serving_fds(instance: Instance, num_asked: int) -> list[int]:
    """What the zygote got with its last order: cell, control, lifeline, tokens and log."""
    instance.get("zygote", ForkWorker, num_asked)
    fds = instance["zygote"].fds_of(ForkWorker)
    assert [os.fstat(fd).st_size for fd in (fds[0], fds[-1])] == [1, 10] and len(fds) == 5
    return fds


def test_a_process_that_lingers_after_the_end_of_its_channel_holds_no_other_up(serving):
    lingering = serving["anchor"]
    lingering.control.close()
    serving["zygote"].control.send(SparesChanged(pids=(7,), num_wanted=1))
    serving.until(lambda: serving["gateway"].messages(ProcessesChanged)[-1].spares == (7,))
    assert lingering.process.poll() is None and len(serving.played["anchor"]) == 1, "it is given its time"
    serving.pass_time(3.0)
    serving.until(lambda: len(serving.played["anchor"]) == 2)
    assert lingering.process.returncode == -signal.SIGKILL


# Ending


def test_the_last_words_of_a_process_are_heard(instance):
    instance["gateway"].control.send(Ready())
    instance["orchestrator"].control.send(Ready())
    instance["orchestrator"].exit()
    instance.until(lambda: instance.said_ready)


@pytest.mark.parametrize("is_serving", [True, False])
def test_without_the_gateway_it_is_the_end(instance, is_serving):
    if is_serving:
        instance.serve()
    instance["gateway"].exit(4)
    for name in HELPERS:
        assert instance.get(name, Shutdown) == Shutdown(grace_s=0.0)
        instance[name].exit()
    instance.until(lambda: instance.is_over)
    assert instance.outcome == (1, "the gateway died (exit status 4); stopping")
    assert len(instance.said_ready) == is_serving and len(instance.played["gateway"]) == 1


def test_a_keeper_that_was_killed_has_a_successor_with_the_same_ledger(serving):
    """Which has the listening socket, too."""
    serving.provision()
    serving.fork()
    listening = os.fstat(serving["gateway"].sockets["--listen-fd"].fileno())
    serving["gateway"].kill()
    serving.until(lambda: len(serving.played["gateway"]) == 2)
    assert os.path.samestat(os.fstat(serving["gateway"].sockets["--listen-fd"].fileno()), listening)
    assert serving.outcome == (0, None)


def test_a_new_gateway_is_told_everything_again(serving):
    serving.provision()
    lifeline = lifeline_of(serving, num_asked=1)
    pid = serving.fork()
    gateway = serving["gateway"]
    gateway.control.send(GatewayBegun(pid=gateway.process.pid + 1, generation=1))
    assert serving.get("gateway", Attach) and not gateway.messages(GatewayKnown)
    gateway.control.send(GatewayBegun(pid=pid, generation=2))
    assert serving.get("gateway", GatewayKnown) == GatewayKnown(generation=2)
    assert serving.get("gateway", Attach, 2) == Attach(rank=Rank(0), incarnation=1)
    to_worker = gateway.channel_of(Attach)
    frame = lifeline.receive_frame(timeout_s=60)
    assert frame is not None and frame.message == TokensAttached()
    (fd,) = frame.fds.take()
    tokens = Channel.of_fd(fd)
    assert are_connected(to_worker, tokens)
    serving.get("gateway", OrchestratorAttached, 2)
    to_orchestrator = gateway.channel_of(OrchestratorAttached)
    serving.get("orchestrator", GatewayAttached)
    orchestrators_end = serving["orchestrator"].channel_of(GatewayAttached)
    assert are_connected(to_orchestrator, orchestrators_end)
    for channel in (to_worker, tokens, to_orchestrator, orchestrators_end, lifeline):
        channel.close()
    known = {process.name: process.pid for process in gateway.messages(ProcessesChanged)[-1].processes}
    assert known["keeper"] == gateway.process.pid and known["gateway"] == pid


def test_each_of_several_gateways_has_channels_of_its_own(make):
    instance = make(num_gateways=2)
    assert [instance.get(name, StartGateway).number for name in instance.gateways] == [0, 1]
    assert instance.get("orchestrator", StartOrchestrator).num_gateways == 2
    instance.serve()
    instance.provision()
    instance.get("zygote", ForkWorker)
    *others, first, second, log = instance["zygote"].fds_of(ForkWorker)
    instance.fork()
    close(*others, log)
    for number, (name, fd) in enumerate(zip(instance.gateways, (first, second), strict=True)):
        instance.get(name, Attach)
        with closing(instance[name].channel_of(Attach)) as ours, closing(Channel.of_fd(fd)) as theirs:
            assert are_connected(ours, theirs), number
    instance.get("orchestrator", GatewayAttached)
    instance.get("gateway-1", OrchestratorAttached)
    with (
        closing(instance["gateway-1"].channel_of(OrchestratorAttached)) as ours,
        closing(instance["orchestrator"].channel_of(GatewayAttached)) as theirs,
    ):
        assert are_connected(ours, theirs)
    assert instance["orchestrator"].messages(GatewayAttached) == [GatewayAttached(gateway=1)]


def test_the_death_of_one_of_several_gateways_is_its_own(make):
    instance = make(num_gateways=2)
    instance.serve()
    instance.provision()
    lifeline = lifeline_of(instance, num_asked=1)
    pid = instance.fork()
    instance.get("gateway", Attach)
    instance["gateway-1"].control.send(GatewayBegun(pid=pid, generation=2))
    assert instance.get("gateway-1", GatewayKnown) == GatewayKnown(generation=2)
    frame = lifeline.receive_frame(timeout_s=60)
    assert frame is not None and frame.message == TokensAttached(gateway=1)
    instance.get("orchestrator", GatewayAttached, 2)
    assert instance["orchestrator"].messages(GatewayAttached)[-1] == GatewayAttached(gateway=1)
    assert len(instance["gateway"].messages(Attach)) == 1 and not instance["gateway"].messages(GatewayKnown)
    known = {process.name: process.pid for process in instance["gateway"].messages(ProcessesChanged)[-1].processes}
    assert known["keeper-1"] == instance["gateway-1"].process.pid and known["gateway-1"] == pid
    lifeline.close()


def test_the_next_supervisor_goes_on_with_all_gateways(make):
    instance = make(num_gateways=2)
    instance.serve()
    instance.provision()
    instance.fork()
    ledgers = instance.supervisor._keepers.memory.ledgers
    instance.replace_supervisor()
    assert instance.supervisor._keepers.memory.ledgers == ledgers and len(set(ledgers)) == 2
    instance.get("orchestrator", GatewayAttached)
    assert [len(instance.played[name]) for name in instance.gateways] == [1, 1]
    instance["gateway-1"].kill()
    instance.until(lambda: len(instance.played["gateway-1"]) == 2)
    assert len(instance.played["gateway"]) == 1


def test_the_last_gateway_lets_the_others_end(make):
    instance = make(num_gateways=2)
    instance.serve()
    instance.signal(signal.SIGTERM)
    for name in instance.gateways:
        assert instance.get(name, Shutdown) == Shutdown(grace_s=7.0)
    instance["gateway"].exit()
    instance.until(lambda: "gateway" not in instance.supervisor._children)
    assert not any(instance[name].messages(Shutdown) for name in HELPERS), "streams of the other one need them"
    instance["gateway-1"].exit()
    for name in HELPERS:
        assert instance.get(name, Shutdown) == Shutdown(grace_s=0.0)
        instance[name].exit()
    instance.until(lambda: instance.is_over)
    assert instance.outcome == (0, None)


def test_streams_end_before_all_that_they_need(serving):
    serving.provision()
    worker = serving.fork()
    serving.signal(signal.SIGTERM)
    assert serving.get("gateway", Shutdown) == Shutdown(grace_s=7.0)
    serving.turn()
    assert not any(serving[name].messages(Shutdown) for name in HELPERS), "running streams need them"
    serving["gateway"].exit()
    for name in HELPERS:
        assert serving.get(name, Shutdown) == Shutdown(grace_s=0.0)
    os.kill(worker, signal.SIGTERM)  # as the orchestrator asks of it
    for name in HELPERS:
        serving[name].exit()
    serving.until(lambda: serving.is_over)
    assert serving.outcome == (0, None)
    assert [len(serving.played[name]) for name in ALL] == [1] * 4, "none was replaced"


@pytest.mark.parametrize("is_abstract", [False, True])
def test_the_service_manager_is_told_of_the_start_and_of_the_stop(make, monkeypatch, tmp_path, is_abstract):
    address = f"@{tmp_path}/notify" if is_abstract else f"{tmp_path}/notify"
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as manager:
        manager.bind(address.replace("@", "\0"))
        instance = make()
        assert "NOTIFY_SOCKET" not in instance.get("zygote", StartZygote).environment, "only the supervisor speaks"
        instance["gateway"].control.send(Ready())
        instance.turn()
        with pytest.raises(BlockingIOError):
            manager.recv(1000)
        instance.serve()
        url = f"http://127.0.0.1:{instance.address[1]}"
        assert manager.recv(1000).decode().splitlines() == ["READY=1", f"STATUS=serving at {url}"]
        instance.signal(signal.SIGTERM)
        instance.get("gateway", Shutdown)
        assert manager.recv(1000).decode().splitlines() == ["STOPPING=1", "STATUS=received SIGTERM"]
    instance.turn()  # it is gone: no harm


def test_a_process_that_does_not_end_when_it_is_told_is_killed(make):
    instance = make(grace_s=0.0)
    instance.serve()
    instance.provision()
    instance.fork()
    instance.signal(signal.SIGINT)
    instance.get("gateway", Shutdown)
    instance.turn()
    assert not any(one.process.poll() for (one,) in instance.played.values())
    instance.pass_time(3.0)
    instance.until(lambda: all(one.process.returncode is not None for (one,) in instance.played.values()))
    assert {one.process.returncode for (one,) in instance.played.values()} == {-signal.SIGKILL}
    assert instance.supervisor._workers.pids == []


@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGINT, signal.SIGINT]], ids=["starting", "twice"])
def test_at_once_if_nothing_has_begun_or_if_told_twice(make, signals):
    instance = make(grace_s=600.0)
    if len(signals) > 1:
        instance.serve()
    for signum in signals:
        instance.signal(signum)
        instance.turn()
    assert {one.process.returncode for (one,) in instance.played.values()} == {-signal.SIGKILL}
    assert instance.outcome == (0, None)
