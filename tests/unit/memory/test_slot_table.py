"""The table beside weights in shared memory: what a reader believes, wherever the writer ends."""

import os
import random

import numpy as np
import pytest

from everserve.memory.owned import create_memory
from everserve.memory.weights import copying
from everserve.memory.weights.checksum import checksum
from everserve.memory.weights.expert_memory import ExpertMemory
from everserve.memory.weights.slot_table import Entry, NotOwnerError, SlotTable, state_bytes
from everserve.plan.expert_memory import ExpertMemoryPlan
from everserve.tables.ids import Incarnation
from everserve.tables.slots import EMPTY, Place

NUM_LAYERS, NUM_SLOTS = 2, 3
IDENTITY, OTHER = bytes(range(32)), bytes(32)
PLACE = Place(1, 2)
FIRST, SECOND = Incarnation(1), Incarnation(2)


@pytest.fixture
def fd():
    fd = create_memory("test", state_bytes(NUM_LAYERS, NUM_SLOTS))
    yield fd
    os.close(fd)


def table(fd: int, owner: Incarnation | None = FIRST, identity: bytes = IDENTITY) -> SlotTable:
    table = SlotTable(fd, NUM_LAYERS, NUM_SLOTS)
    table.claim(identity, owner)
    return table


def fill(table: SlotTable, place: Place, expert: int, total: int = 7) -> None:
    assert table.begin(place)
    table.complete(place, expert, total)
    table.end(place)


@pytest.mark.parametrize("num_bytes", [0, 1, 7, 8, 9, 31, 32, 33, 16384, 262144, 262145, 1_000_003])
def test_c_computes_the_checksum_that_is_defined(num_bytes):
    data = np.frombuffer(random.Random(num_bytes).randbytes(num_bytes), dtype=np.uint8)
    copied = np.zeros(num_bytes, dtype=np.uint8)
    address = copied.ctypes.data
    assert copying.copy(address, data.ctypes.data, num_bytes, rest_percent=10) == checksum(data.tobytes())
    assert np.array_equal(copied, data) and copying.sum_at(address, num_bytes) == checksum(data.tobytes())


def test_parts_add_up():
    data = random.Random(1).randbytes(4096)
    parts = [(0, 800), (800, 1600), (1600, 4096)]
    assert sum(checksum(data[a:b], a // 8) for a, b in reversed(parts)) % 2**64 == checksum(data)


@pytest.mark.parametrize("change", ["a bit", "two words swapped", "a part missing"])
def test_what_a_checksum_notices(change):
    data = bytearray(random.Random(2).randbytes(4096))
    before = checksum(data)
    if change == "a bit":
        data[1234] ^= 4
    elif change == "two words swapped":
        data[8:16], data[80:88] = data[80:88], data[8:16]
    else:
        data[2048:] = bytes(2048)
    assert checksum(data) != before


def test_an_entry_is_read_by_all_and_survives_its_writer(fd):
    writer, reader = table(fd), SlotTable(fd, NUM_LAYERS, NUM_SLOTS)
    assert reader.read(PLACE) is None and reader.find(1, 5) is None
    fill(writer, PLACE, 5)
    writer.close()
    assert reader.has(IDENTITY) and not reader.has(OTHER)
    assert reader.find(1, 5) == (PLACE, Entry(5, 1, 7)) and reader.find(0, 5) is None
    assert reader.experts() == [[EMPTY] * 3, [EMPTY, EMPTY, 5]]
    assert reader.missing() == [Place(0, 0), Place(0, 1), Place(0, 2), Place(1, 0), Place(1, 1)]
    successor = table(fd, SECOND)
    assert successor.read(PLACE) == Entry(5, 1, 7)
    fill(successor, PLACE, 0, total=9)
    assert reader.read(PLACE) == Entry(0, 2, 9)
    successor.clear(PLACE)
    assert reader.read(PLACE) is None


def test_another_identity_says_nothing(fd):
    fill(table(fd), PLACE, 5)
    other = table(fd, SECOND, OTHER)
    assert other.read(PLACE) is None and other.has(OTHER)


def test_a_slot_that_is_being_filled_is_empty(fd):
    writer, reader = table(fd), SlotTable(fd, NUM_LAYERS, NUM_SLOTS)
    fill(writer, PLACE, 5)
    assert writer.begin(PLACE) and reader.read(PLACE) is None
    writer.end(PLACE)
    assert reader.read(PLACE) is None, "it was not completed"


@pytest.mark.parametrize("num_words", range(4))
def test_a_torn_entry_is_not_believed(fd, num_words):
    """The writer ends after some of the words of an entry that replaces another one."""
    writer = table(fd)
    fill(writer, PLACE, 5, total=7)
    words = writer._entries[PLACE.call_index, PLACE.slot]
    old = words.copy()
    fill(writer, PLACE, 4, total=8)
    new = words.copy()
    words[:] = [*new[:num_words], *old[num_words:]]
    assert SlotTable(fd, NUM_LAYERS, NUM_SLOTS).read(PLACE) == (Entry(5, 1, 7) if num_words == 0 else None)


def test_an_older_incarnation_can_not_begin(fd):
    old, new = table(fd), table(fd, SECOND)
    with pytest.raises(NotOwnerError):
        old.begin(PLACE)
    with pytest.raises(NotOwnerError):
        old.clear(PLACE)
    assert not new.is_locked(PLACE)
    fill(new, PLACE, 3)


def test_a_fill_that_an_older_incarnation_has_begun_holds_its_slot_until_that_process_ends(fd):
    old = table(fd)
    assert old.begin(PLACE)
    new = table(fd, SECOND)
    assert new.is_locked(PLACE) and not new.begin(PLACE) and not new.is_locked(Place(0, 0))
    old.close()
    assert not new.is_locked(PLACE) and new.begin(PLACE)


def test_the_kernel_unlocks_what_a_dead_process_had_begun(fd):
    def begin_and_die():
        assert table(fd).begin(PLACE)
        os._exit(0)

    pid = os.fork()
    if pid == 0:
        begin_and_die()
    os.waitpid(pid, 0)
    new = table(fd, SECOND)
    assert new.read(PLACE) is None and new.begin(PLACE)


def test_a_memory_without_an_owner_is_filled_by_many(fd):
    one, other = table(fd, owner=None), table(fd, owner=None)
    assert one.begin(PLACE) and not other.begin(PLACE) and other.begin(Place(0, 0))
    one.complete(PLACE, 2, 1)
    one.end(PLACE)
    assert other.read(PLACE) == Entry(2, 1, 1)


# copying out of a memory that changes

PLAN = ExpertMemoryPlan.uniform(NUM_LAYERS, NUM_SLOTS, slot_bytes=1 << 12)


@pytest.fixture
def memory():
    fds = [create_memory("w", PLAN.num_bytes), create_memory("s", state_bytes(NUM_LAYERS, NUM_SLOTS))]
    memory = ExpertMemory(PLAN, fds)
    memory.table.claim(IDENTITY, FIRST)
    data = random.Random(3).randbytes(PLAN.slot_bytes[0])
    start = PLAN.offset(PLACE)
    memory.data[start : start + PLAN.slot_bytes[0]] = np.frombuffer(data, dtype=np.uint8)
    fill(memory.table, PLACE, 5, checksum(data))
    yield memory
    memory.close()


def copy_out(memory: ExpertMemory, expert: int = 5) -> tuple[int | None, bytes]:
    to = np.zeros(PLAN.slot_bytes[0], dtype=np.uint8)
    return memory.copy_out(1, expert, to.ctypes.data, PLAN.slot_bytes[0]), to.tobytes()


def test_an_expert_is_copied_from_where_it_is(memory):
    total, data = copy_out(memory)
    assert total == checksum(data) == memory.table.read(PLACE).checksum
    assert copy_out(memory, expert=4)[0] is None


def test_damaged_weights_are_not_used(memory):
    memory.data[PLAN.offset(PLACE) + 77] ^= 1
    assert copy_out(memory)[0] is None


def test_a_slot_that_changes_during_the_copy_is_not_used(memory, monkeypatch):
    copy = copying.copy

    def copy_and_refill(*args, **kwargs):
        total = copy(*args, **kwargs)
        memory.table.clear(PLACE)
        return total

    monkeypatch.setattr(copying, "copy", copy_and_refill)
    assert copy_out(memory)[0] is None


def test_a_memory_that_is_too_small(fd):
    with pytest.raises(ValueError):
        SlotTable(fd, NUM_LAYERS, NUM_SLOTS + 1000)
    with pytest.raises(ValueError):
        ExpertMemory(PLAN, [create_memory("w", 8), os.dup(fd)])


def test_a_slot_that_is_borrowed_does_not_change(fd):
    """By any number of processes; the last one that gives it back, or ends, lets writers in again."""
    owner = table(fd)
    fill(owner, PLACE, expert=4)
    entry = owner.read(PLACE)
    first, second = (SlotTable(fd, NUM_LAYERS, NUM_SLOTS, read_only=True) for _ in range(2))
    assert first.borrow(PLACE, entry) and second.borrow(PLACE, entry)
    owner.clear(PLACE)
    assert not owner.begin(PLACE) and owner.read(PLACE) == entry
    successor = table(fd, SECOND)
    assert not successor.is_locked(PLACE), "a successor holds what is only borrowed"
    first.give_back(PLACE)
    assert not successor.begin(PLACE)
    fill(successor, Place(1, 1), expert=4)
    del second
    assert successor.begin(PLACE)


def test_what_is_not_there_any_more_is_not_borrowed(fd):
    owner, reader = table(fd), SlotTable(fd, NUM_LAYERS, NUM_SLOTS, read_only=True)
    fill(owner, PLACE, expert=4)
    entry = owner.read(PLACE)
    assert owner.begin(PLACE)
    assert not reader.borrow(PLACE, entry), "it is being changed"
    owner.complete(PLACE, 5, 7)
    owner.end(PLACE)
    assert not reader.borrow(PLACE, entry)
    assert owner.begin(PLACE), "and nothing is locked for it"
