"""Real workers with their experts in shared memory: every source of a fill, and streams that notice nothing."""

import os
import signal
import traceback
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from msgspec import structs

from everserve.backends.cpu import roles
from everserve.backends.cpu.build import load_experts, open_model
from everserve.backends.cpu.exchange import Exchange
from everserve.backends.cpu.lane import LaneShape
from everserve.backends.cpu.local_experts import LocalExperts
from everserve.backends.cpu.peers import ExpertPeers
from everserve.backends.cpu.remote_experts import RemoteExperts
from everserve.config.model import ModelSource
from everserve.control.hold.needs import Needs
from everserve.memory.liveness import Cell, Warden
from everserve.memory.owned import create_memory
from everserve.memory.weights.expert_memory import ExpertMemory
from everserve.model.bundled import DEMO_MODEL
from everserve.model.config import ModelConfig
from everserve.model.fingerprint import fingerprint
from everserve.plan.expert_memory import ExpertMemoryPlan
from everserve.seam.healing import NO_REPORTS
from everserve.tables.calls import expert_calls
from everserve.tables.goal import Capacity, Goal, SeatGoal
from everserve.tables.ids import Epoch, Incarnation, Rank, Role, SlotId, WorkerId
from everserve.tables.memory import Kind, MemoryName
from everserve.tables.placement import Placement, SeatExperts
from everserve.tables.routes import Routes
from everserve.tables.slots import Fill, HeldSlots, Place, Source
from everserve.wire.channel import Channel
from everserve.wire.messages import (
    FillSlots,
    Offer,
    PeerJoined,
    Ready,
    SlotsReported,
    Withdraw,
)
from everserve.worker import boot
from tests.support import cluster as c
from tests.support.configs import worker_settings
from tests.support.in_process_experts import new_cell, new_memory
from tests.support.memories import memory

DETECT_MS = 500.0
ATTENTION, FIRST, SECOND = Rank(0), Rank(1), Rank(2)
MODEL = ModelConfig.from_directory(DEMO_MODEL)
NUM_LAYERS, HALF = len(MODEL.moe_layers), MODEL.num_experts // 2
NUM_SLOTS = HALF + 2  # two of them empty at first
SOURCE = ModelSource(
    directory=str(DEMO_MODEL), fingerprint=fingerprint(DEMO_MODEL), weights="memory", expert_backup="host"
)
MAX_TOKENS = 16


def halves() -> Goal:
    """Rank 1 has the first half of the experts, rank 2 the second."""
    seats = tuple(
        SeatExperts(rank=rank, active=(tuple(range(a, b)),) * NUM_LAYERS, shadows=((),) * NUM_LAYERS)
        for rank, (a, b) in zip((FIRST, SECOND), pairwise((0, HALF, 2 * HALF)), strict=True)
    )
    return Goal(
        version=1,
        seats=(
            SeatGoal(rank=ATTENTION, roles=(Role.ATTENTION,)),
            *(SeatGoal(rank=rank, roles=(Role.EXPERT,)) for rank in (FIRST, SECOND)),
        ),
        placement=Placement(calls=expert_calls(MODEL.num_experts, MODEL.moe_layers), seats=seats),
    )


class Instance:
    """What supervisor, orchestrator and anchor have of two expert workers; and the attention worker's side."""

    def __init__(self) -> None:
        settings = structs.replace(worker_settings(max_num_batched_tokens=MAX_TOKENS), model=SOURCE)
        self.goal = halves()
        self.needs = Needs(MODEL, settings, Capacity(max_workers=3, slots_per_layer=NUM_SLOTS), DETECT_MS)
        self.memory: dict[MemoryName, int] = {}
        self.workers = {rank: ExpertProcess(self, rank) for rank in (FIRST, SECOND)}
        self.cell, self._cell_fd = new_cell()
        self.warden = Warden(self.cell, DETECT_MS)
        self.warden.start()
        shape = LaneShape.of(MODEL, MAX_TOKENS)
        opened = open_model(self.needs.start(self.goal, WorkerId(FIRST, Incarnation(1))))
        self.peers = ExpertPeers(
            ATTENTION, Incarnation(1), self.cell, self.warden, shape, MODEL.moe_layers, MODEL.num_experts
        )
        for worker in self.workers.values():
            lane_fd = new_memory(shape.lane_bytes())
            of_peer = {memory("cell-0.1"): self._cell_fd, memory(f"lane-0.1-{worker.rank}.1"): lane_fd}
            for piece, fd in of_peer.items():
                worker.tell(Offer(memory=piece), [fd])
            roles = (Role.ATTENTION,)
            worker.tell(PeerJoined(rank=ATTENTION, incarnation=Incarnation(1), roles=roles, memory=tuple(of_peer)))
            self.peers.join(worker.rank, Incarnation(1), Cell(worker.cell_fd), lane_fd)
        self.remote = RemoteExperts(
            Exchange(
                self.peers,
                NO_REPORTS,
                detect_ms=DETECT_MS,
                lease_s=30,
            ),
            opened.ops,
        )
        self.local = LocalExperts(load_experts(opened, "auto", slots=None))
        self._epoch = 0

    def descriptors(self, worker: WorkerId) -> list[int]:
        """Its cell, and its memory; what belongs to the seat, or to all, exists once."""
        pieces = self.needs.memory(self.goal, worker)
        for piece in pieces:
            if piece not in self.memory:
                self.memory[piece] = create_memory(piece.name, piece.num_bytes)
        return [self.memory[piece] for piece in pieces]

    def weights_of(self, rank: Rank) -> list[MemoryName]:
        """The weights of this seat, and their slot table."""
        pieces = self.needs.memory(self.goal, WorkerId(rank, Incarnation(1)))
        return [piece for piece in pieces if piece.kind in (Kind.WEIGHTS, Kind.WEIGHTS_STATE)]

    def backup(self) -> ExpertMemory:
        plan = ExpertMemoryPlan.of(MODEL, MODEL.dtype, MODEL.num_experts)
        return ExpertMemory(plan, [os.dup(self.memory[piece]) for piece in self.needs.backup()])

    def check(self, held: dict[Rank, HeldSlots]) -> None:
        """Every layer, by the slots that these workers report, is what one process computes."""
        self._epoch += 1
        table = [
            [
                [
                    (rank, SlotId(slot))
                    for rank in sorted(held, reverse=True)
                    for slot in reversed(range(NUM_SLOTS))
                    if held[rank].experts[index][slot] == expert
                ]
                for expert in range(MODEL.num_experts)
            ]
            for index in range(NUM_LAYERS)
        ]
        self.peers.use(Routes.of(Epoch(self._epoch), table))
        generator = torch.Generator().manual_seed(1)
        for layer in MODEL.moe_layers:
            hidden_TD = torch.randn(MAX_TOKENS, MODEL.hidden_size, generator=generator)
            order_TN = torch.rand(MAX_TOKENS, MODEL.num_experts, generator=generator).argsort(dim=1)
            ids_TK = order_TN[:, : MODEL.experts_per_token].to(torch.int32).contiguous()
            ids_TK[:, 0] = torch.arange(HALF + 8, HALF + 8 + MAX_TOKENS) % MODEL.num_experts
            weights_TK = torch.rand(ids_TK.shape, generator=generator)
            arguments = (layer, ids_TK, weights_TK, hidden_TD, hidden_TD)
            assert torch.equal(self.remote(*arguments), self.local(*arguments))
        self.remote.end_step()

    def close(self) -> None:
        self.peers.close()
        self.warden.stop()
        for worker in self.workers.values():
            worker.end()
        for fd in self.memory.values():
            os.close(fd)


class ExpertProcess:
    """A worker from its fork on, as the zygote makes it."""

    def __init__(self, instance: Instance, rank: Rank, incarnation: int = 1) -> None:
        self.rank = rank
        worker = WorkerId(rank, Incarnation(incarnation))
        self.cell_fd, *memory = instance.descriptors(worker)
        self.cell = Cell(self.cell_fd)
        (ours, theirs), (self.lifeline, lifeline) = Channel.pair(), Channel.pair()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                fds = [os.dup(self.cell_fd), theirs.fileno(), lifeline.fileno(), *map(os.dup, memory)]
                os._exit(boot.run(instance.needs.start(instance.goal, worker), fds, roles))
            except BaseException:
                traceback.print_exc()
                os._exit(70)
        theirs.close()
        lifeline.close()
        self.control = Channel(ours)
        self.first = self.hear(SlotsReported)
        self.hear(Ready)

    def tell(self, message, fds=()) -> None:
        self.control.send(message, fds)
        self.cell.ring_control()

    def hear(self, kind: type):
        """The next message of that kind."""
        while not isinstance(message := self.control.receive(timeout_s=60), kind):
            pass
        return message

    def fill(self, fill: Fill) -> tuple[Source, HeldSlots]:
        self.tell(FillSlots(fills=[fill]))
        report = self.hear(SlotsReported)
        assert report.failed == [] and report.slots.experts[fill.call_index][fill.slot] == fill.expert
        (filled,) = report.filled
        assert filled.fill == fill
        return filled.source, report.slots

    def end(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0


@pytest.fixture
def instance() -> Iterator[Instance]:
    instance = Instance()
    yield instance
    instance.close()


def test_every_source(instance):
    first, second = instance.workers[FIRST], instance.workers[SECOND]
    held = {FIRST: first.first.slots, SECOND: second.first.slots}
    instance.check(held)
    backup = instance.backup()
    c.wait_until(lambda: not backup.table.missing(), what="a complete backup")
    empty, other = HALF, HALF + 1

    def fill(fill: Fill, expected: Source) -> None:
        source, held[FIRST] = first.fill(fill)
        assert source is expected

    weights = instance.weights_of(SECOND)
    for piece in weights:
        first.tell(Offer(memory=piece), [instance.memory[piece]])
    fill(Fill(0, empty, HALF + 8), Source.PEER)
    fill(Fill(0, other, 3), Source.SLOT)
    instance.check(held)

    for piece in weights:
        first.tell(Withdraw(memory=piece))
    fill(Fill(1, empty, HALF + 8), Source.HOST)
    backup.data[backup.plan.offset(Place(2, HALF + 8)) + 123] ^= 1
    fill(Fill(2, empty, HALF + 8), Source.FILE)
    instance.check(held)

    second.end()  # its memory stays, and is a source as before
    for piece in weights:
        first.tell(Offer(memory=piece), [instance.memory[piece]])
    for slot, expert in ((empty, HALF + 9), (other, HALF + 10)):
        fill(Fill(3, slot, expert), Source.PEER)
    instance.workers[SECOND] = ExpertProcess(instance, SECOND, incarnation=2)
    assert instance.workers[SECOND].first.slots.experts == held[SECOND].experts
    backup.close()


def num_found(server) -> list[int]:
    """How many slots each expert worker found full when it started."""
    lines = [line for line in server.log_text().splitlines() if "expert slots were in memory already" in line]
    return [int(line.split(" INFO ")[1].split()[0]) for line in lines]


def sources(server) -> set[str]:
    return {event["source"] for event in server.events() if event["event"] == "experts_moved"}


def test_deaths_and_losses_of_devices(start_server, expected):
    """A worker that dies together with the orchestrator finds its experts where they were; experts of lost devices come
    from the backup."""
    flags = ("-dp", "4", "--enable-expert-parallel", "--weights", "memory", "--expert-backup", "host")
    with start_server(*flags, "--kv-log", "mirror", "--enable-chaos", *c.PATIENT) as running:
        is_done = lambda: c.num_backed_up(running) == 4  # noqa: E731
        c.wait_until(is_done, what="a complete backup")
        assert "the backup of all experts takes" in running.log_text()
        rank = next(w["rank"] for w in c.cluster(running)["workers"] if "expert" in w["roles"])
        orchestrator = next(p["pid"] for p in c.cluster(running)["processes"] if p["name"] == "orchestrator")
        fault = c.Fault(running, rank, signal.SIGKILL)

        def kill_both() -> None:
            os.kill(orchestrator, signal.SIGKILL)
            fault()

        c.assert_equal(c.run_with(running, c.DECODE, c.in_decode, kill_both), expected)
        c.wait_until(lambda: c.worker(running, rank)["incarnation"] > fault.incarnation, what="a successor")
        c.wait_whole(running)
        first, found = num_found(running)[:4], num_found(running)[4:]
        assert first == [0] * 4 and len(found) == 1 and found[0] > 0

        def lose() -> None:
            for device in (0, 3):
                assert c.post(running, "/cluster/fault", {"device": device, "gone": True}).status_code == 200

        c.assert_equal(c.run_with(running, c.DECODE, c.in_decode, lose), expected)
        c.wait_until(lambda: "host" in sources(running), what="experts from the backup")
        assert "file" not in sources(running)
        assert "Traceback" not in running.log_text(), running.log_text()
