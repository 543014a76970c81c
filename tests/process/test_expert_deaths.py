"""Real expert workers' loops in real processes, killed, stopped and left alone, behind one RemoteExperts.

Whatever happens, every layer is exactly what LocalExperts computes.
"""

import itertools
import os
import signal
import threading
import traceback
from collections.abc import Iterator

import pytest
import torch

from everserve.backends.cpu import ops as native
from everserve.backends.cpu.exchange import Exchange
from everserve.backends.cpu.expert_loop import ExpertLoop
from everserve.backends.cpu.peers import ExpertPeers
from everserve.backends.cpu.remote_experts import RemoteExperts
from everserve.backends.cpu.slots import MappedSlots
from everserve.memory.liveness import Cell, Warden
from everserve.seam.healing import Reports
from everserve.tables.ids import Incarnation, Rank, Role
from everserve.tables.slots import EMPTY, Fill, Place
from everserve.wire.channel import Channel
from everserve.wire.event_log import EventLog
from everserve.wire.messages import (
    AnyMessage,
    ClearSlots,
    ExpertReport,
    Fenced,
    FillSlots,
    LanesOpen,
    LanesSent,
    Offer,
    PeerJoined,
    PeerLeft,
    Ready,
    Shutdown,
    SlotsReported,
    StartWorker,
)
from everserve.worker.control import ControlEnd, LeaveRequest
from tests.support.configs import worker_settings
from tests.support.experts import MAX_TOKENS, MOE_LAYERS, NUM_EXPERTS, SHAPE, RandomExperts, Rows, local_experts, routes
from tests.support.in_process_experts import new_cell, new_memory
from tests.support.memories import memory

DETECT_MS = 400.0
EVERYTHING = [*range(NUM_EXPERTS)]
ATTENTION = Rank(0)


class ExpertProcess:
    """One expert worker, forked; and what the orchestrator has of it."""

    def __init__(self, rank: Rank, attention_cell_fd: int) -> None:
        self.rank = rank
        self.cell, self.cell_fd = new_cell()
        self.lane_fd = new_memory(SHAPE.lane_bytes())
        ours, theirs = Channel.pair()
        self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            self._serve(Channel(theirs))
        theirs.close()
        self.control = Channel(ours)
        of_peer = {memory("cell-0.1"): attention_cell_fd, memory(f"lane-0.1-{rank}.1"): self.lane_fd}
        for piece, fd in of_peer.items():
            self.tell(Offer(memory=piece), [fd])
        roles = (Role.ATTENTION,)
        self.tell(PeerJoined(rank=ATTENTION, incarnation=Incarnation(1), roles=roles, memory=tuple(of_peer)))
        assert isinstance(self.control.receive(timeout_s=60), Ready), "its warden pulses from now on"

    def tell(self, message, fds=()) -> None:
        self.control.send(message, fds)
        self.cell.ring_control()

    def hear(self, kind: type) -> AnyMessage:
        """The next message of that kind."""
        while not isinstance(message := self.control.receive(timeout_s=60), kind):
            pass
        return message

    def wait(self) -> int:
        """Its exit status; negative if a signal ended it."""
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.pid = 0
        return status

    def end(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()

    def _serve(self, control: Channel) -> None:
        try:
            warden = Warden(self.cell, DETECT_MS)
            warden.start()
            experts = RandomExperts(native.NativeOps(num_threads=1), EVERYTHING)
            slots = MappedSlots(experts, check_source=lambda: None)
            lifeline, self.other_end = Channel.pair()
            end, events = ControlEnd(control, Channel(lifeline)), EventLog("expert", None)
            loop = ExpertLoop(_start(self.rank), experts, slots, self.cell, warden, end, LeaveRequest(), events)
            control.send(Ready())
            loop.run()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(70)


def _start(rank: Rank) -> StartWorker:
    return StartWorker(
        rank=rank,
        incarnation=Incarnation(1),
        roles=(Role.EXPERT,),
        settings=worker_settings(max_num_batched_tokens=MAX_TOKENS),
        num_workers=3,
        slots=None,
        detect_ms=DETECT_MS,
    )


class Attention:
    """The attention worker's side, and expert workers 1 and 2, each with all experts."""

    def __init__(self) -> None:
        ops = native.NativeOps(num_threads=1)
        self.cell, self.cell_fd = new_cell()
        self.processes = [ExpertProcess(Rank(rank), self.cell_fd) for rank in (1, 2)]
        self.warden = Warden(self.cell, DETECT_MS)
        self.warden.start()
        self.peers = ExpertPeers(ATTENTION, Incarnation(1), self.cell, self.warden, SHAPE, MOE_LAYERS, NUM_EXPERTS)
        for process in self.processes:
            self.peers.join(process.rank, Incarnation(1), Cell(process.cell_fd), os.dup(process.lane_fd))
        self.peers.use(routes({process.rank: EVERYTHING for process in self.processes}))
        self.suspected: list[tuple[Rank, str]] = []
        self.expert_io = RemoteExperts(
            Exchange(
                self.peers,
                detect_ms=DETECT_MS,
                lease_s=30,
                reports=Reports(
                    lambda: None,
                    lambda rank, incarnation, reason: self.suspected.append((rank, reason)),
                    lambda *replay: None,
                ),
            ),
            ops,
        )
        local = local_experts(ops)
        self._cases = [(layer, Rows(1 + seed, seed)) for layer in MOE_LAYERS for seed in range(MAX_TOKENS)]
        self._expected = [rows.through(local, layer) for layer, rows in self._cases]
        self._turn = itertools.cycle(range(len(self._cases)))

    def check(self, num_layers: int = 1) -> None:
        for case in itertools.islice(self._turn, num_layers):
            layer, rows = self._cases[case]
            assert torch.equal(rows.through(self.expert_io, layer), self._expected[case])

    def check_until_suspected(self) -> None:
        while not self.suspected:
            self.check()


@pytest.fixture
def attention() -> Iterator[Attention]:
    attention = Attention()
    yield attention
    attention.warden.stop()
    for process in attention.processes:
        process.end()


def send_in_the_middle(attention: Attention, number: int, process: ExpertProcess) -> None:
    """From another thread, so that it comes anywhere in a layer."""
    attention.check(200)
    sender = threading.Thread(target=os.kill, args=(process.pid, number))
    sender.start()
    attention.check_until_suspected()
    sender.join()


def test_a_killed_worker(attention):
    first = attention.processes[0]
    send_in_the_middle(attention, signal.SIGKILL, first)
    assert first.wait() == -signal.SIGKILL and attention.suspected == [(first.rank, "died")]
    attention.check(200)
    assert [*attention.peers.suspects] == [first.rank]
    attention.peers.leave(first.rank, Incarnation(1))
    attention.expert_io.end_step()
    assert not attention.peers._retired, "dead for certain: its lane is let go"


def test_a_stopped_worker_is_fenced_and_goes_when_it_wakes(attention):
    first = attention.processes[0]
    send_in_the_middle(attention, signal.SIGSTOP, first)
    assert attention.suspected == [(first.rank, "silent")]
    attention.peers.leave(first.rank, Incarnation(1))
    first.tell(Fenced(reason="test"))
    attention.check(200)
    os.kill(first.pid, signal.SIGCONT)
    assert first.wait() == 0
    attention.check(200)
    assert attention.suspected == [(first.rank, "silent")]


def test_a_stopped_worker_that_wakes_in_time_is_trusted_again(attention):
    first, second = attention.processes
    send_in_the_middle(attention, signal.SIGSTOP, first)
    os.kill(first.pid, signal.SIGCONT)
    while attention.peers.suspects:
        attention.check()
        attention.peers.use(routes({process.rank: EVERYTHING for process in attention.processes}))
    attention.check(200)
    second.tell(Shutdown(grace_s=0))
    assert second.wait() == 0
    attention.check(200)


def test_without_an_orchestrator_the_loop_serves_on(attention):
    for process in attention.processes:
        process.control.close()
        process.cell.ring_control()
    attention.check(200)
    assert attention.suspected == []


def test_shutdown_waits_for_those_who_still_need_it(attention):
    for process in attention.processes:
        process.tell(Shutdown(grace_s=3600))
    attention.check(200)
    for process in attention.processes:
        process.tell(PeerLeft(rank=ATTENTION, incarnation=Incarnation(1)))
        assert process.wait() == 0


def test_an_expert_worker_says_when_its_lanes_are_open(attention):
    for process in attention.processes:
        process.tell(LanesSent())
        process.hear(LanesOpen)
    attention.check()


def test_an_expert_worker_reports_what_it_did(attention):
    attention.check(50)
    for process in attention.processes:
        report = process.control.receive(timeout_s=60)
        assert isinstance(report, ExpertReport)
        assert 0 < report.stats.num_batches <= 50 and report.stats.num_rows > 0 and report.stats.num_stale == 0


def test_slots_change_under_traffic(attention):
    """Rank 1 loses and gets experts all the time, and says so; rank 2 has them all."""
    first = attention.processes[0]
    held = {index: dict(enumerate(EVERYTHING)) for index in range(len(MOE_LAYERS))}
    for turn in range(60):
        index, slot = turn % len(MOE_LAYERS), turn * 5 % NUM_EXPERTS
        if turn % 4 == 0:
            first.tell(ClearSlots(places=[Place(index, slot)]))
            held[index][slot] = EMPTY
        else:
            expert = (slot + turn) % NUM_EXPERTS
            first.tell(FillSlots(fills=[Fill(index, slot, expert)]))
            held[index][slot] = expert
        attention.check(5)
        if turn % 7 == 0:  # also while it is being changed
            attention.peers.use(routes({process.rank: EVERYTHING for process in attention.processes}))
    reports = [first.hear(SlotsReported) for _ in range(60)]
    assert reports[-1].slots.experts == tuple(tuple(slots.values()) for slots in held.values())
    assert not any(report.failed for report in reports)
    assert attention.suspected == [] and attention.expert_io.num_moved_rows > 0
