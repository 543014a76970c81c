"""Expert slots in shared memory: where their weights come from, and what happens when a source is not what it seems."""

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from everserve.backends.cpu.host_places import SeatMemory
from everserve.backends.cpu.reference import ReferenceOps
from everserve.memory.owned import create_memory
from everserve.memory.weights import copying
from everserve.memory.weights.backup_filling import BackupFilling
from everserve.memory.weights.expert_memory import ExpertMemory
from everserve.memory.weights.slot_table import state_bytes
from everserve.model.checkpoint import Checkpoint
from everserve.model.config import ModelConfig
from everserve.model.expert_half import ExpertHalf
from everserve.plan.expert_memory import ExpertMemoryPlan
from everserve.tables.calls import ShardKind
from everserve.tables.ids import Incarnation, Rank
from everserve.tables.memory import Kind, MemoryName
from everserve.tables.slots import EMPTY, FailedFill, Fill, Filled, Place, SeatSlots, Source
from tests.support.experts import NUM_EXPERTS
from tests.support.models import model_directory
from tests.support.seats import ALL_EXPERTS, EXPERT_BYTES, IDENTITY, NUM_LAYERS, SeatInMemory, SharedWeights

NUM_SLOTS = 4
FREE = 3  # the slot that is empty at first


class World:
    """Two seats with three experts each, and a backup."""

    def __init__(self) -> None:
        self.one, self.two = SeatInMemory(1, (0, 1, 2), NUM_SLOTS), SeatInMemory(2, (3, 4, 5), NUM_SLOTS)
        self.backup = SharedWeights(NUM_EXPERTS)
        self.one.are_files_gone = True

    def introduce(self) -> None:
        self.two.offer_to(self.one)

    def make_backup(self) -> None:
        for seat in (self.two, self.one):
            seat.backup = self.backup
            seat.slots.offer(None, self.backup.memory, self.backup.descriptors())
            seat.memory.offers.fill_backups()
        for seat in (self.two, self.one):
            seat.memory.offers.filling.join()

    def close(self) -> None:
        for seat in (self.one, self.two):
            seat.check()
            seat.close()
        self.backup.close()


@pytest.fixture
def world():
    world = World()
    yield world
    world.close()


def source_of(result: Filled | FailedFill) -> Source:
    assert isinstance(result, Filled), result
    assert result.num_bytes == EXPERT_BYTES and result.seconds > 0
    return result.source


def test_the_start_is_from_the_files(world):
    assert world.one.slots.held.experts == ((0, 1, 2, EMPTY),) * NUM_LAYERS
    assert world.one.num_file_reads == 3 * NUM_LAYERS
    world.one.check()


def test_from_another_slot_of_its_own(world):
    world.introduce()
    assert source_of(world.one.fill(Fill(1, FREE, 2))) is Source.SLOT
    assert world.one.slots.held.experts[1] == (0, 1, 2, 2)


def test_from_a_peer(world):
    world.introduce()
    assert source_of(world.one.fill(Fill(1, FREE, 4))) is Source.PEER
    assert world.one.slots.held.experts[1] == (0, 1, 2, 4)


def test_from_a_peer_that_is_dead(world):
    """Its memory belongs to its seat."""
    world.introduce()
    world.two.die()
    assert source_of(world.one.fill(Fill(1, FREE, 4))) is Source.PEER
    assert world.two.start() == 3 * NUM_LAYERS


def test_from_the_backup(world):
    world.make_backup()
    assert source_of(world.one.fill(Fill(1, FREE, 4))) is Source.HOST


def test_from_the_files(world):
    world.one.are_files_gone = False
    assert source_of(world.one.fill(Fill(1, FREE, 4))) is Source.FILE


def test_the_cheapest_is_taken(world):
    world.make_backup()
    world.introduce()
    world.one.are_files_gone = False
    assert source_of(world.one.fill(Fill(1, FREE, 4))) is Source.PEER
    world.one.slots.withdraw(world.two.rank)
    assert source_of(world.one.fill(Fill(2, FREE, 4))) is Source.HOST


def test_without_a_source_the_slot_is_empty(world):
    result = world.one.fill(Fill(1, 0, 4))
    assert isinstance(result, FailedFill) and "the files are gone" in result.reason
    assert world.one.slots.held.experts[1] == (EMPTY, 1, 2, EMPTY)
    assert world.one.weights.look().table.read(Place(1, 0)) is None


def test_a_peer_whose_weights_are_damaged(world):
    world.make_backup()
    world.introduce()
    world.two.damage(Place(1, 1))
    assert source_of(world.one.fill(Fill(1, FREE, 4))) is Source.HOST
    world.two.slots.clear(Place(1, 1))


def test_a_peer_that_refills_the_slot_during_the_copy(world, monkeypatch):
    world.make_backup()
    world.introduce()
    copy = copying.copy

    def copy_while_it_changes(*args, **kwargs):
        monkeypatch.setattr(copying, "copy", copy)
        world.two.slots.clear(Place(1, 1))
        return copy(*args, **kwargs)

    monkeypatch.setattr(copying, "copy", copy_while_it_changes)
    assert source_of(world.one.fill(Fill(1, FREE, 4))) is Source.HOST


# -- experts in the memory of others -------------------------------------------------------------


MAPPED = NUM_SLOTS  # the first slot without memory of its own


@pytest.fixture
def mapping(world):
    """A seat that is offered the memory of the second one, whose worker is dead."""
    seat = SeatInMemory(3, (0, 1), NUM_SLOTS, num_mapped=2)
    world.two.offer_to(seat)
    world.two.die()
    yield seat
    seat.check()
    seat.close()


def test_what_a_dead_worker_left_is_served_where_it_is(world, mapping):
    result = mapping.fill(Fill(1, MAPPED, 4))
    assert isinstance(result, Filled) and (result.source, result.num_bytes) == (Source.MAPPED, 0)
    assert mapping.slots.held.experts[1] == (0, 1, EMPTY, EMPTY, 4, EMPTY)
    assert mapping.slots.held.num_mapped == 2 and mapping.slots.held.own(1) == (0, 1, EMPTY, EMPTY)
    mapping.check()
    mapping.slots.clear(Place(1, MAPPED))
    assert mapping.slots.held.experts[1] == (0, 1, EMPTY, EMPTY, EMPTY, EMPTY)


def test_the_next_worker_of_the_seat_has_it_too_but_cannot_change_it_yet(world, mapping):
    mapping.fill(Fill(1, MAPPED, 4))
    assert world.two.start() == 3 * NUM_LAYERS
    world.two.slots.begin(Fill(1, 1, 3))
    assert world.two.slots.poll() is None
    mapping.check()
    mapping.slots.clear(Place(1, MAPPED))
    assert source_of(world.two.poll()) is Source.SLOT


def test_the_death_of_the_worker_that_maps_it_ends_the_loan(world, mapping):
    mapping.fill(Fill(1, MAPPED, 4))
    world.two.start()
    mapping.die()
    assert isinstance(world.two.fill(Fill(1, 1, 3)), Filled)
    mapping.start()


def test_memory_that_is_withdrawn_is_not_served_any_more(world, mapping):
    mapping.fill(Fill(1, MAPPED, 4))
    mapping.fill(Fill(2, MAPPED + 1, 5))
    mapping.slots.withdraw(world.two.rank)
    assert mapping.slots.held.experts == ((0, 1, *[EMPTY] * 4),) * NUM_LAYERS
    assert num_mappings(world.two.weights) == 1
    assert isinstance(mapping.fill(Fill(1, MAPPED, 4)), FailedFill)


def test_memory_that_is_offered_again_stays_mapped(world, mapping):
    """By a new orchestrator. Another memory of the same seat replaces it."""
    mapping.fill(Fill(1, MAPPED, 4))
    world.two.offer_to(mapping)
    assert mapping.slots.held.experts[1][MAPPED] == 4
    other = SharedWeights(NUM_SLOTS)
    mapping.slots.offer(world.two.rank, other.memory, other.descriptors())
    assert mapping.slots.held.experts[1][MAPPED] == EMPTY
    other.close()


@pytest.mark.parametrize("is_damaged", [True, False])
def test_what_is_damaged_or_not_there_is_not_mapped(world, mapping, is_damaged):
    if is_damaged:
        world.two.damage(Place(1, 1))
    result = mapping.fill(Fill(1, MAPPED, 4 if is_damaged else 0))
    assert isinstance(result, FailedFill)
    not_there = "no memory of another seat that ops reach has it"
    assert result.reason == ("mapped: the checksum is wrong" if is_damaged else not_there)
    world.two.start()
    world.two.slots.clear(Place(1, 1))


def test_what_is_mapped_can_be_copied(world, mapping):
    mapping.fill(Fill(1, MAPPED, 4))
    assert source_of(mapping.fill(Fill(1, FREE, 4))) is Source.PEER


# -- sources that change -------------------------------------------------------------------------


def num_mappings(weights: SharedWeights) -> int:
    inode = str(os.fstat(weights.fds[0]).st_ino)
    return sum(line.split()[4] == inode for line in Path("/proc/self/maps").read_text().splitlines())


def test_memory_that_is_withdrawn_during_the_copy(world, monkeypatch):
    """It is not used, and not mapped any more."""
    world.make_backup()
    world.introduce()
    copy = copying.copy

    def copy_and_lose(*args, **kwargs):
        monkeypatch.setattr(copying, "copy", copy)
        total = copy(*args, **kwargs)
        world.one.slots.withdraw(world.two.rank)
        return total

    assert num_mappings(world.two.weights) == 2, "its own, and that of the other seat"
    monkeypatch.setattr(copying, "copy", copy_and_lose)
    assert source_of(world.one.fill(Fill(1, FREE, 4))) is Source.HOST
    assert num_mappings(world.two.weights) == 1


def test_a_peer_that_has_moved_the_expert_to_another_slot(world):
    world.introduce()
    world.two.slots.clear(Place(1, 1))
    assert isinstance(world.one.fill(Fill(1, FREE, 4)), FailedFill)
    world.two.fill(Fill(1, FREE, 4))
    assert source_of(world.one.fill(Fill(1, FREE, 4))) is Source.PEER


def test_a_peer_with_other_weights_says_nothing(world):
    world.introduce()
    world.two.weights.table().claim(bytes(32), world.two.incarnation)
    assert isinstance(world.one.fill(Fill(1, FREE, 4)), FailedFill)
    for index in range(NUM_LAYERS):
        for slot in range(3):
            world.two.slots.clear(Place(index, slot))


def test_a_peer_of_another_size_is_not_used(world):
    small = SharedWeights(1)
    world.one.slots.offer(world.two.rank, small.memory, small.descriptors())
    assert isinstance(world.one.fill(Fill(1, FREE, 4)), FailedFill)
    small.close()


def test_a_successor_loads_what_is_missing(world):
    world.introduce()
    world.one.fill(Fill(0, FREE, 4))
    world.one.slots.clear(Place(2, 1))
    world.one.die()
    before = world.one.num_file_reads
    assert world.one.start() == 3 * NUM_LAYERS
    assert world.one.num_file_reads == before + 1
    assert world.one.slots.held.experts == ((0, 1, 2, 4), (0, 1, 2, EMPTY), (0, 1, 2, EMPTY))


def test_a_successor_keeps_what_is_there(world):
    """Its predecessor had other experts in all slots, and may still compute with them: the orchestrator knows when they
    can be replaced."""
    world.introduce()
    for slot, expert in ((FREE, 2), (0, 3), (1, 4), (2, 5)):
        world.one.fill(Fill(1, slot, expert))
    world.one.die()
    world.one.start()
    assert world.one.slots.held.experts == ((0, 1, 2, EMPTY), (3, 4, 5, 2), (0, 1, 2, EMPTY))


def test_a_successor_loads_from_the_backup(world):
    world.make_backup()
    for place in (Place(index, slot) for index in range(NUM_LAYERS) for slot in range(3)):
        world.one.slots.clear(place)
    look = world.backup.look()
    assert all(look.table.read(Place(index, expert)) for index in range(NUM_LAYERS) for expert in ALL_EXPERTS)
    reads = world.one.num_file_reads
    world.one.die()
    assert world.one.start() == 0 and world.one.num_file_reads == reads
    assert world.one.slots.held.experts == ((0, 1, 2, EMPTY),) * NUM_LAYERS


def test_the_backup_is_made_by_the_workers_that_are_left(world):
    """One ends while it copies; its lock goes with it."""
    stuck = world.backup
    table = stuck.table()
    table.claim(IDENTITY, owner=None)
    assert table.begin(Place(0, 3))
    world.two.slots.offer(None, stuck.memory, stuck.descriptors())
    world.two.memory.offers.fill_backups()
    look, filling = stuck.look(), world.two.memory.offers.filling
    while len(filling._missing()) > 1:
        time.sleep(0.001)
    assert look.table.read(Place(0, 3)) is None
    table.close()
    filling.join()
    assert look.table.read(Place(0, 3)).expert == 3
    assert world.two.num_file_reads > 3 * NUM_LAYERS, "what no worker holds comes from the files"


def test_a_backup_that_is_withdrawn_while_an_expert_is_copied_there(world, monkeypatch):
    """That copy ends well, and no other begins."""
    seat, copy = world.two, copying.copy
    seat.slots.offer(None, world.backup.memory, world.backup.descriptors())

    def copy_and_lose(*args, **kwargs):
        monkeypatch.setattr(copying, "copy", copy)
        seat.slots.withdraw(None)
        return copy(*args, **kwargs)

    monkeypatch.setattr(copying, "copy", copy_and_lose)
    filling = BackupFilling(seat.memory.offers.backup.memory, seat.memory.copy_out, first_layer=0)
    seat.memory.offers.filling = filling
    assert filling._pass(is_held=True) == 1
    assert len(world.backup.look().table.missing()) == NUM_LAYERS * NUM_EXPERTS - 1


def test_a_slot_that_a_stopped_predecessor_fills_is_left_to_it(world):
    """It was stopped in the middle of a copy and declared gone; it may wake up, and write, until it is killed."""
    place = Place(1, 0)
    predecessor = world.one.weights.table()
    predecessor.claim(IDENTITY, world.one.incarnation)
    assert predecessor.begin(place)
    world.one.start()
    assert world.one.slots.held.experts[1][0] == EMPTY and EMPTY in world.one.slots.held.experts[1]
    world.two.offer_to(world.one)
    world.one.slots.begin(Fill(1, 0, 4))
    assert world.one.slots.poll() is None and world.one.slots.held.experts[1][0] == EMPTY
    predecessor.close()
    assert source_of(world.one.poll()) is Source.PEER


def test_a_predecessor_that_wakes_up_can_not_change_a_slot(world):
    memory, half = world.one.memory, world.one.half
    predecessor = memory.slots
    world.one.start()
    predecessor.begin(Fill(1, 0, 2))
    while (result := predecessor.poll()) is None:
        time.sleep(0.0002)
    assert isinstance(result, FailedFill) and "another incarnation" in result.reason
    predecessor.clear(Place(1, 1))
    assert half is not world.one.half
    world.one.check()
    memory.close()


def test_layers_whose_slots_are_not_alike():
    """A model with experts and dense layers, all of it divided: other numbers of slots, other sizes, one memory."""
    directory = model_directory("qwen3-moe-mixed", "bfloat16")
    model = replace(ModelConfig.from_directory(directory), tensor_parallel=True)
    assert len({cut.shard_size for cut in model.cuts}) == 2
    slots = tuple(3 if cut.kind is ShardKind.SLICE else 5 for cut in model.cuts)
    halves = [ExpertHalf(model, Checkpoint.open(directory), ReferenceOps(), num) for num in (slots, model.max_shards)]
    plan = ExpertMemoryPlan.of(model, "bfloat16", slots)
    state = state_bytes(plan.num_layers, plan.num_slots)
    own = ExpertMemory(plan, [create_memory("weights", plan.num_bytes), create_memory("state", state)])
    seat = SeatMemory(halves[0], own, IDENTITY, Incarnation(1), lambda: None)
    held = seat.slots
    backup_plan = plan.with_slots([cut.num_shards for cut in model.cuts])
    table_bytes = state_bytes(backup_plan.num_layers, backup_plan.num_slots)
    fds = [create_memory("backup", backup_plan.num_bytes), create_memory("table", table_bytes)]
    held.offer(None, MemoryName(kind=Kind.BACKUP, owners=(), num_bytes=backup_plan.num_bytes), fds)
    planned = tuple((7, 1) + (EMPTY,) * (num - 2) for num in slots)
    seat.load(SeatSlots(rank=Rank(1), experts=planned))
    seat.offers.fill_backups()
    last = [Fill(index, num - 1, 4) for index, num in enumerate(slots)]
    for fill in last:
        held.begin(fill)
        while (result := held.poll()) is None:
            time.sleep(0.001)
        assert isinstance(result, Filled), result
    assert held.held.experts == tuple((7, 1) + (EMPTY,) * (num - 3) + (4,) for num in slots)
    halves[1].load_all()
    x_TD, tokens_R = torch.randn(3, model.hidden_size), torch.tensor([0, 1, 2], dtype=torch.int32)
    for layer, num in zip(model.call_layers, slots, strict=True):
        found = halves[0].rows(layer, x_TD, tokens_R, torch.tensor([0, 1, num - 1], dtype=torch.int32))
        right = halves[1].rows(layer, x_TD, tokens_R, torch.tensor([7, 1, 4], dtype=torch.int32))
        assert torch.equal(found, right)
    seat.offers.filling.join()  # it ends when there is every shard that exists
    seat.close()
