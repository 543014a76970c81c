"""Slots that are filled while kernels may ask for them: from which source, in which order, and what is left if it goes
wrong. Memory of the host stands for that of devices."""

import ctypes
import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from everserve.backends.cuda.arena_range import ArenaRange
from everserve.backends.cuda.backup_copy import BackupCopy
from everserve.backends.cuda.device_places import DevicePlaces
from everserve.backends.cuda.file_feed import Buffers, FileFeed
from everserve.backends.cuda.ops.experts import FEW_ROWS, ExpertArena
from everserve.backends.cuda.seat_experts import missing_fills
from everserve.backends.cuda.transfer import Transfer
from everserve.memory.weights.checksum import checksum
from everserve.memory.weights.offers import Offers
from everserve.memory.weights.slot_table import SlotTable, state_bytes
from everserve.memory.weights.slots import MemorySlots
from everserve.plan.expert_memory import ExpertMemoryPlan
from everserve.tables.ids import Incarnation, Rank
from everserve.tables.memory import Kind, MemoryName
from everserve.tables.slots import EMPTY, FailedFill, Fill, Filled, Place, Source
from tests.kernels.host_device import HostDriver, HostStream
from tests.kernels.test_experts import compute
from tests.kernels.toy_experts import make_arena

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="these kernels are interpreted, over host memory")
NUM_LAYERS, NUM_OWN, NUM_MAPPED, NUM_EXPERTS = 2, 3, 2, 8
HIDDEN_SIZE, EXPERT_SIZE = 128, 64
PLACE_BYTES = 3 * HIDDEN_SIZE * EXPERT_SIZE * 2
PLAN = ExpertMemoryPlan.uniform(NUM_LAYERS, NUM_OWN, PLACE_BYTES)
BACKUP_PLAN = ExpertMemoryPlan.uniform(NUM_LAYERS, NUM_EXPERTS, PLACE_BYTES)
IDENTITY = bytes(range(32))
MAX_WORKERS = 4


def weights_of(call_index: int, expert: int) -> Tensor:
    """[3, F, D]"""
    generator = torch.Generator().manual_seed(100 * call_index + expert)
    return (torch.randn(3, EXPERT_SIZE, HIDDEN_SIZE, generator=generator) * HIDDEN_SIZE**-0.5).bfloat16()


def bytes_of(call_index: int, expert: int) -> bytes:
    return weights_of(call_index, expert).view(torch.int8).numpy().tobytes()


def memory_at(address: int, num_bytes: int = PLACE_BYTES) -> bytes:
    return ctypes.string_at(address, num_bytes)


class Memories:
    """Two descriptors, as the anchor would hold them: weights, and their table."""

    def __init__(self, plan: ExpertMemoryPlan, owner: Incarnation | None, experts: dict[Place, int]) -> None:
        self.plan = plan
        self.fds = [os.memfd_create("weights"), os.memfd_create("state")]
        os.ftruncate(self.fds[0], -(-plan.num_bytes // 4096) * 4096)
        os.ftruncate(self.fds[1], state_bytes(plan.num_layers, plan.num_slots))
        self.table = SlotTable(self.fds[1], plan.num_layers, plan.num_slots)
        self.table.claim(IDENTITY, owner)
        for place, expert in experts.items():
            self.put(place, expert)

    def put(self, place: Place, expert: int, *, damaged: bool = False) -> None:
        data = bytes_of(place.call_index, expert)
        assert self.table.begin(place)
        os.pwrite(self.fds[0], bytes(len(data)) if damaged else data, self.plan.offset(place))
        self.table.complete(place, expert, checksum(data))
        self.table.end(place)

    def read(self, place: Place) -> bytes:
        return os.pread(self.fds[0], PLACE_BYTES, self.plan.offset(place))

    def copies(self) -> list[int]:
        return [os.dup(fd) for fd in self.fds]


class Kernels:
    """What the server's kernels are told; graphs that are queued end when `has_ended` is set."""

    def __init__(self, arena: ExpertArena) -> None:
        self.arena = arena
        self.held = [[EMPTY] * arena.num_slots for _ in range(arena.num_layers)]
        self.has_ended = True
        self.num_drained = self.num_rings = 0

    def empty(self, call_index: int, slot: int) -> None:
        self.held[call_index][slot] = EMPTY

    def fence(self):
        return lambda: self.has_ended

    def ring(self) -> None:
        self.num_rings += 1

    def hold(self, call_index: int, slot: int, expert: int, place: int) -> None:
        self.arena.place_LS[call_index, slot] = place
        self.held[call_index][slot] = expert

    def drain(self) -> None:
        self.num_drained += 1


class Files:
    def __init__(self) -> None:
        self.buffers = Buffers(lambda address, num_bytes: None, chunk_bytes=16 << 10)
        self.are_gone = False
        self.num_read = 0

    def load(self, call_index: int, expert: int) -> list[Tensor]:
        if self.are_gone:
            raise OSError("cannot read")
        self.num_read += 1
        return [matrix.float() for matrix in weights_of(call_index, expert)]  # to be narrowed on the way

    def feed(self, call_index: int, expert: int):
        feed = FileFeed(self.buffers, lambda: self.load(call_index, expert))
        return feed, lambda: feed.checksum


class Worker:
    """An expert worker in seat 1."""

    def __init__(self, seat: Memories | None = None, incarnation: int = 1) -> None:
        self.seat = seat or Memories(PLAN, Incarnation(incarnation), {Place(0, 0): 2, Place(1, 2): 5})
        self.driver, self.stream, self.files = HostDriver(), HostStream(), Files()
        self.range = ArenaRange(
            self.driver, self.seat.fds[0], PLAN.num_bytes, PLACE_BYTES, 2 * EXPERT_SIZE, MAX_WORKERS
        )
        numbers = (ctypes.c_char * (self.range.num_places * PLACE_BYTES)).from_address(self.range.address)
        places = torch.frombuffer(numbers, dtype=torch.bfloat16).view(-1, 3, EXPERT_SIZE, HIDDEN_SIZE)
        self.arena = ExpertArena.of_experts(places, NUM_LAYERS, NUM_OWN + NUM_MAPPED, NUM_OWN)
        self.kernels = Kernels(self.arena)
        self.table = SlotTable(self.seat.fds[1], NUM_LAYERS, NUM_OWN)
        self.table.claim(IDENTITY, Incarnation(incarnation))
        places = DevicePlaces(self.driver, self.range, PLAN, NUM_EXPERTS, self.kernels, self.stream, self.files)
        self.offers = Offers(places, IDENTITY, lambda *_: None)
        num_slots = [[num] * NUM_LAYERS for num in (NUM_OWN + NUM_MAPPED, NUM_OWN, NUM_EXPERTS)]
        self.slots = MemorySlots(self.table, *num_slots, places, self.offers)
        self.slots.take_over()

    def offer(self, rank: int, memories: Memories, gpu: int = 0) -> None:
        weights = MemoryName(kind=Kind.WEIGHTS, owners=(), num_bytes=PLAN.num_bytes, gpu=gpu)
        self.slots.offer(Rank(rank), weights, memories.copies())

    def offer_backup(self, memories: Memories) -> None:
        self.slots.offer(None, MemoryName(kind=Kind.BACKUP, owners=(), num_bytes=1), memories.copies())
        assert self.offers.backup is not None
        self.offers.backup.wait()

    def fill(self, *fill: int) -> Filled | FailedFill:
        self.slots.begin(Fill(*fill))
        return self.finish()

    def finish(self) -> Filled | FailedFill:
        while True:
            if (result := self.slots.poll()) is not None:
                return result

    def assert_holds(self, fill: Fill) -> None:
        """Kernels, and the next incarnation, find this expert there."""
        index, slot, expert = fill
        assert self.slots.held.experts[index][slot] == self.kernels.held[index][slot] == expert
        assert self.seat.read(Place(index, slot)) == bytes_of(index, expert)
        entry = self.seat.table.read(Place(index, slot))
        assert entry is not None and (entry.expert, entry.checksum) == (expert, checksum(bytes_of(index, expert)))


@pytest.fixture
def worker() -> Worker:
    return Worker()


@pytest.fixture
def peer() -> Iterator[Memories]:
    return Memories(PLAN, Incarnation(7), {Place(0, 1): 6, Place(1, 0): 3})


# -- sources -------------------------------------------------------------------------------------


@pytest.mark.parametrize("expert", range(NUM_EXPERTS))
def test_an_expert_out_of_the_files(worker, expert):
    result = worker.fill(1, 1, expert) if expert != 5 else worker.fill(0, 1, expert)
    assert isinstance(result, Filled) and (result.source, result.num_bytes) == (Source.FILE, PLACE_BYTES)
    worker.assert_holds(result.fill)


def test_the_cheapest_source_is_used(worker, peer):
    backup = Memories(BACKUP_PLAN, None, {Place(0, e): e for e in range(NUM_EXPERTS - 1)})
    worker.offer(0, peer)
    worker.offer_backup(backup)
    results = [worker.fill(0, 1, expert) for expert in (7, 4, 6)] + [worker.fill(0, 2, 6)]
    assert [result.source for result in results] == [Source.FILE, Source.HOST, Source.PEER, Source.SLOT]
    worker.assert_holds(Fill(0, 1, 6))
    worker.assert_holds(Fill(0, 2, 6))
    assert worker.files.num_read == 1


def test_memory_on_another_device_is_copied_from_too(worker, peer):
    worker.offer(0, peer, gpu=1)
    assert worker.fill(0, 2, 6).source is Source.PEER
    worker.assert_holds(Fill(0, 2, 6))


def test_what_is_damaged_falls_to_the_next_source(worker, peer):
    peer.put(Place(0, 1), 6, damaged=True)
    backup = Memories(BACKUP_PLAN, None, {})
    backup.put(Place(0, 6), 6, damaged=True)
    worker.offer(0, peer)
    worker.offer_backup(backup)
    assert worker.fill(0, 2, 6).source is Source.FILE
    worker.assert_holds(Fill(0, 2, 6))


def test_memory_of_another_model_is_not_used(worker, peer):
    peer.table.claim(bytes(32), Incarnation(7))
    worker.offer(0, peer)
    assert worker.fill(0, 2, 6).source is Source.FILE


def test_an_expert_that_changes_during_the_copy_is_not_used(worker, peer):
    worker.offer(0, peer)
    worker.stream.is_stuck = True
    worker.slots.begin(Fill(0, 2, 6))
    assert worker.slots.poll() is None
    peer.put(Place(0, 1), 6)  # the same bytes, but who knows what was there in between
    worker.stream.is_stuck = False
    assert worker.finish().source is Source.FILE


def test_a_fill_without_a_source_leaves_the_slot_empty(worker):
    worker.files.are_gone = True
    result = worker.fill(0, 0, 6)
    assert isinstance(result, FailedFill) and result.reason == "file: OSError: cannot read"
    assert worker.slots.held.experts[0][0] == worker.kernels.held[0][0] == EMPTY
    assert worker.seat.table.read(Place(0, 0)) is None
    worker.files.are_gone = False
    assert isinstance(worker.fill(0, 0, 6), Filled), "nothing of that is left"


# -- order ---------------------------------------------------------------------------------------


def test_a_slot_is_overwritten_when_no_graph_reads_it_and_held_when_it_is_full(worker, peer):
    worker.offer(0, peer)
    worker.kernels.hold(0, 0, 2, 0)
    worker.kernels.has_ended, worker.stream.is_stuck = False, True
    worker.slots.begin(Fill(0, 0, 6))
    assert worker.kernels.held[0][0] == worker.slots.held.experts[0][0] == EMPTY, "from the first moment on"
    for _ in range(3):
        assert worker.slots.poll() is None
    assert worker.seat.read(Place(0, 0)) == bytes_of(0, 2) and worker.seat.table.read(Place(0, 0)) is not None
    worker.kernels.has_ended = True
    for _ in range(3):
        assert worker.slots.poll() is None
    assert worker.seat.table.read(Place(0, 0)) is None, "it will be overwritten at any moment"
    assert worker.kernels.held[0][0] == EMPTY
    worker.stream.is_stuck = False
    assert worker.finish().source is Source.PEER
    worker.assert_holds(Fill(0, 0, 6))
    assert worker.slots.held.generations[0][:2] == (3, 0)


def test_a_copy_behind_a_graph_that_waits_for_its_bell(worker, peer):
    """Rings until it gets its turn; while it goes on, the bell is left alone."""
    worker.offer(0, peer)
    assert worker.fill(0, 1, 6).source is Source.PEER and worker.kernels.num_rings == 0
    worker.stream.is_stuck = True
    worker.slots.begin(Fill(1, 0, 3))
    for _ in range(30):
        assert worker.slots.poll() is None
    assert 0 < worker.kernels.num_rings < 30
    worker.stream.is_stuck = False
    assert worker.finish().source is Source.PEER


def test_a_slot_that_is_filled_after_it_was_cleared_is_not_read_either(worker):
    worker.kernels.has_ended = False
    worker.slots.clear(Place(0, 0))
    assert worker.seat.table.read(Place(0, 0)) is None
    worker.slots.begin(Fill(0, 0, 6))
    assert worker.slots.poll() is None
    assert worker.seat.read(Place(0, 0)) == bytes_of(0, 2)
    worker.kernels.has_ended = True
    assert worker.finish().source is Source.FILE


def test_memory_that_is_withdrawn_during_a_copy(worker, peer):
    worker.offer(0, peer)
    worker.stream.is_stuck = True
    worker.slots.begin(Fill(0, 2, 6))
    assert worker.slots.poll() is None
    worker.slots.withdraw(Rank(0))
    worker.stream.is_stuck = False
    assert worker.finish().source is Source.FILE
    worker.assert_holds(Fill(0, 2, 6))


def test_memory_that_is_withdrawn_before_its_turn(worker, peer):
    """Both have it. The first is used when both go away."""
    other = Memories(PLAN, Incarnation(1), {Place(0, 0): 6})
    worker.offer(0, peer)
    worker.offer(2, other)
    worker.stream.is_stuck = True
    worker.slots.begin(Fill(0, 2, 6))
    assert worker.slots.poll() is None
    worker.slots.withdraw(Rank(2))
    worker.slots.withdraw(Rank(0))
    worker.stream.is_stuck = False
    assert worker.finish().source is Source.FILE
    worker.assert_holds(Fill(0, 2, 6))


def test_an_older_incarnation_changes_nothing(worker):
    successor = SlotTable(worker.seat.fds[1], NUM_LAYERS, NUM_OWN)
    successor.claim(IDENTITY, Incarnation(2))
    result = worker.fill(0, 0, 6)
    assert isinstance(result, FailedFill) and "another incarnation" in result.reason
    assert successor.read(Place(0, 0)).expert == 2 and worker.seat.read(Place(0, 0)) == bytes_of(0, 2)


def test_a_successor_finds_what_is_complete():
    first = Worker()
    first.stream.is_stuck = True
    first.slots.begin(Fill(0, 0, 6))
    assert first.slots.poll() is None
    first.table.close()  # as if it had died: its lock is gone
    second = Worker(first.seat, incarnation=2)
    assert second.slots.held.experts == ((EMPTY,) * 5, (EMPTY, EMPTY, 5, EMPTY, EMPTY))
    assert second.fill(0, 0, 6).source is Source.FILE
    second.assert_holds(Fill(0, 0, 6))


@pytest.mark.parametrize(
    "held, expected",
    [
        ((EMPTY, EMPTY, EMPTY), [(0, 4), (1, 5)]),
        ((4, 5, EMPTY), []),
        ((5, EMPTY, EMPTY), [(1, 4)]),  # its own slot is taken
        ((7, EMPTY, EMPTY), [(1, 5), (2, 4)]),
        ((7, 6, EMPTY), [(2, 4)]),  # the rest is for the orchestrator to decide
        ((7, 6, 3), []),
    ],
)
def test_what_a_successor_misses(held, expected):
    planned = (4, 5, EMPTY)
    assert missing_fills([planned, planned], [held, planned]) == [Fill(0, *pair) for pair in expected]


# -- experts in the memory of others -------------------------------------------------------------


def rows_of(worker: Worker, layer: int, slot: int) -> Tensor:
    """What kernels compute with this slot."""
    torch.manual_seed(1)
    x_TD = torch.randn(5, HIDDEN_SIZE).bfloat16()
    ids_TK = torch.full((5, 1), slot, dtype=torch.int32)
    return compute(x_TD, ids_TK, worker.arena, layer, FEW_ROWS, torch.zeros(1, dtype=torch.int32))[1]


def expected_rows(layer: int, expert: int) -> Tensor:
    torch.manual_seed(1)
    x_TD = torch.randn(5, HIDDEN_SIZE).bfloat16()
    arena, _ = make_arena(1, 1, HIDDEN_SIZE, EXPERT_SIZE, x_TD.device)
    gate, up, down = weights_of(layer, expert)
    arena.fill(0, 0, gate, up, down.reshape(HIDDEN_SIZE, EXPERT_SIZE))
    return compute(x_TD, torch.zeros(5, 1, dtype=torch.int32), arena, 0, FEW_ROWS, torch.zeros(1, dtype=torch.int32))[1]


def test_kernels_compute_with_an_expert_where_a_dead_worker_left_it(worker, peer):
    worker.offer(0, peer)
    before = [worker.seat.read(place) for place in worker.table.places()]
    result = worker.fill(1, 3, 3)
    assert (result.source, result.num_bytes) == (Source.MAPPED, 0)
    assert worker.slots.held.experts[1] == (EMPTY, EMPTY, 5, 3, EMPTY)
    assert torch.equal(rows_of(worker, 1, 3), expected_rows(1, 3))
    assert torch.equal(rows_of(worker, 1, 2), expected_rows(1, 5)), "its own are where they were"
    assert before == [worker.seat.read(place) for place in worker.table.places()]
    worker.slots.clear(Place(1, 3))
    assert worker.slots.held.experts[1][3] == worker.kernels.held[1][3] == EMPTY


def test_a_loan_ends_when_no_graph_reads_it_any_more(worker, peer):
    """Until then no process can change what is lent."""
    worker.offer(0, peer)
    worker.fill(1, 3, 3)
    assert worker.slots.held.num_mapped == NUM_MAPPED and not peer.table.begin(Place(1, 0))
    worker.kernels.has_ended = False
    worker.slots.clear(Place(1, 3))
    worker.slots.tend()
    assert not peer.table.begin(Place(1, 0))
    worker.kernels.has_ended = True
    worker.slots.tend()
    assert peer.table.begin(Place(1, 0))


def test_a_fill_that_fails_borrows_nothing(worker, peer):
    peer.put(Place(1, 0), 3, damaged=True)
    worker.offer(0, peer)
    assert isinstance(worker.fill(1, 3, 3), FailedFill)
    assert peer.table.begin(Place(1, 0))


def test_an_expert_that_is_lent_can_be_copied(worker, peer):
    worker.offer(0, peer)
    worker.fill(0, 4, 6)
    peer.table.clear(Place(0, 1))
    assert worker.fill(0, 1, 6).source is Source.PEER
    worker.assert_holds(Fill(0, 1, 6))


@pytest.mark.parametrize("damaged", [False, True])
def test_what_a_dead_worker_left_half_filled_is_not_lent(worker, peer, damaged):
    if damaged:
        peer.put(Place(1, 0), 3, damaged=True)
    else:
        assert peer.table.begin(Place(1, 0))
    worker.offer(0, peer)
    result = worker.fill(1, 3, 3)
    assert isinstance(result, FailedFill)
    assert result.reason == (
        "mapped: the checksum is wrong" if damaged else "no memory of another seat that ops reach has it"
    )
    assert worker.kernels.held[1][3] == EMPTY


def test_memory_on_another_device_is_not_lent(worker, peer):
    worker.offer(0, peer, gpu=1)
    assert isinstance(worker.fill(1, 3, 3), FailedFill)


def test_a_loan_ends_when_the_memory_is_withdrawn(worker, peer):
    worker.offer(0, peer)
    worker.fill(1, 3, 3)
    worker.fill(0, 3, 6)
    worker.slots.withdraw(Rank(0))
    assert worker.slots.held.experts == ((2, *[EMPTY] * 4), (EMPTY, EMPTY, 5, EMPTY, EMPTY))
    assert worker.kernels.num_drained > 0, "no graph may read it when it is unmapped"
    assert peer.table.begin(Place(1, 0)), "it is given back"
    assert isinstance(worker.fill(1, 3, 3), FailedFill)


def test_memory_that_is_offered_again_stays_lent(worker, peer):
    worker.offer(0, peer)
    worker.fill(1, 3, 3)
    worker.offer(0, peer)
    assert worker.slots.held.experts[1][3] == 3 and torch.equal(rows_of(worker, 1, 3), expected_rows(1, 3))


def test_ranks_have_places_of_their_own(worker, peer):
    other = Memories(PLAN, Incarnation(1), {Place(0, 0): 7})
    worker.offer(0, peer)
    worker.offer(3, other)
    worker.fill(0, 3, 6)
    worker.fill(0, 4, 7)
    assert torch.equal(rows_of(worker, 0, 3), expected_rows(0, 6))
    assert torch.equal(rows_of(worker, 0, 4), expected_rows(0, 7))
    worker.slots.withdraw(Rank(0))
    assert torch.equal(rows_of(worker, 0, 4), expected_rows(0, 7))


def test_ranks_beyond_the_range_are_copied_from(worker, peer):
    worker.offer(MAX_WORKERS, peer)
    assert isinstance(worker.fill(1, 3, 3), FailedFill)
    assert worker.fill(1, 1, 3).source is Source.PEER


# -- the backup ----------------------------------------------------------------------------------


def test_the_backup_is_filled_from_slots_and_files(worker):
    backup = Memories(BACKUP_PLAN, None, {})
    copy_out = BackupCopy(
        worker.driver, worker.table, lambda *at: worker.range.place_address(worker.arena.own_place(*at)),
        PLACE_BYTES, worker.files.load,
    )  # fmt: skip
    to = ctypes.create_string_buffer(PLACE_BYTES)
    assert copy_out(0, 4, ctypes.addressof(to), True) is None, "it does not hold that"
    assert copy_out(0, 2, ctypes.addressof(to), True) == checksum(bytes_of(0, 2))
    assert to.raw == bytes_of(0, 2) and worker.files.num_read == 0
    assert copy_out(0, 4, ctypes.addressof(to), False) == checksum(bytes_of(0, 4))
    assert to.raw == bytes_of(0, 4)
    os.pwrite(worker.seat.fds[0], b"x", 7)
    assert copy_out(0, 2, ctypes.addressof(to), True) is None, "its checksum is wrong"
    assert backup.table.read(Place(0, 2)) is None


def test_the_backup_is_let_go_of(worker):
    backup = Memories(BACKUP_PLAN, None, {Place(0, 6): 6})
    worker.offer_backup(backup)
    assert worker.driver.registered
    worker.slots.withdraw(None)
    assert not worker.driver.registered
    assert worker.fill(0, 1, 6).source is Source.FILE


def test_a_file_that_ends_too_soon(worker):
    feed = FileFeed(worker.files.buffers, lambda: (_ for _ in ()).throw(OSError("gone")))
    transfer = Transfer(worker.stream, feed, worker.range.address, PLACE_BYTES)
    with pytest.raises(OSError, match="gone"):
        while True:
            transfer.poll()
    transfer.give_up()
