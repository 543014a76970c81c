"""Parity of heads' KV: what a lost device had is rebuilt bit by bit from all others, and nothing else is believed."""

import os

import numpy as np
import pytest

from everserve.kvlog.chains import chains
from everserve.memory.kv_pieces import KvPieces, KvShape
from everserve.memory.owned import create_memory
from everserve.memory.pieces import parity as parity_module
from everserve.memory.pieces.layout import owner_of
from everserve.memory.pieces.parity_layout import ParityShape
from everserve.memory.pieces.sources import KvSources, Wanted
from everserve.tables.ids import Rank
from everserve.tables.memory import Kind

NUM, BLOCK_SIZE, ROW_BYTES = 3, 4, 24
SHAPE = KvShape(num_blocks=12, num_pieces=6, piece_bytes=2 * BLOCK_SIZE * ROW_BYTES, block_size=BLOCK_SIZE)
PARITY = ParityShape(SHAPE, num_homes=NUM, max_members=NUM - 1)
HEADS = [[(0, 0), (1, 1)], [(0, 1), (1, 0)], [(2, 0), (2, 1)]]  # by worker
GROUPS = {2: [[(0, 0), (0, 1)]], 1: [[(1, 1), (2, 0)]], 0: [[(1, 0), (2, 1)]]}  # by keeper
TOKENS = np.arange(10, dtype=np.int32)
CHAINS = chains(TOKENS)
BLOCKS = [1, 6, 3]  # of two homes: those of 0 to 3 and of 4 to 7


class Worker:
    """One seat on a device of its own."""

    def __init__(self, rank: int, heads, clock) -> None:
        self._clock, self.rank, self.heads = clock, Rank(rank), list(heads)
        self.fd, self.parity_fd = create_memory("kv-pieces", SHAPE.num_bytes), self._new_parity()
        self.open()

    def _new_parity(self) -> int:
        return create_memory("kv-parity", PARITY.num_bytes)

    def open(self) -> None:
        self.kv = KvPieces(self.fd, SHAPE, None, self.parity_fd, PARITY, clock=self._clock)
        self.piece = {head: self.kv.piece_of(*head) for head in self.heads}
        self.sources = KvSources(self.kv)

    def restart(self) -> None:
        """The process ends; its memory stays."""
        self.kv.close()
        self.open()

    def add(self, head) -> None:
        self.heads.append(head)
        self.piece[head] = self.kv.piece_of(*head)

    def rows(self, head) -> np.ndarray:
        pool = np.frombuffer(self.kv.blocks, np.uint8)
        return pool.reshape(SHAPE.num_blocks, SHAPE.num_pieces, 2, BLOCK_SIZE, ROW_BYTES)[:, self.piece[head]]

    def store(self, blocks=BLOCKS, chains_T=CHAINS, seed=0, first=0) -> None:
        """What a step does: the same bytes for the same stream and head, wherever it is."""
        num = len(chains_T)
        slots = np.array([blocks[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(num)], np.int32)
        for layer, head in self.heads:
            drawn = np.random.default_rng([seed, layer, head]).integers(0, 256, (num, 2, ROW_BYTES), np.uint8)
            for i in range(first, num):
                block, slot = divmod(int(slots[i]), BLOCK_SIZE)
                self.rows((layer, head))[block, :, slot] = drawn[i]
        slots, stored = slots[first:].copy(), np.ascontiguousarray(chains_T[first:])
        pieces = np.array(list(self.piece.values()), np.int32)
        self.kv.sign(slots.ctypes.data, stored.ctypes.data, len(slots), pieces.ctypes.data, len(pieces))

    def shadow(self) -> None:
        while self.sources.has_to_shadow:
            self.sources.shadow_some(1000)

    def fetch(self, heads, blocks=BLOCKS, sources=None, chains_T=CHAINS):
        pieces = np.array([self.piece[head] for head in heads], np.int32)
        num_blocks = -(-len(chains_T) // BLOCK_SIZE)
        to, come_from = (np.array(some[:num_blocks], np.int32) for some in (blocks, sources or blocks))
        return self.sources.fetch(Wanted(pieces, come_from, to, np.ascontiguousarray(chains_T)))


class World:
    """Three workers that know of each other. Time stands still unless it is told to pass."""

    def __init__(self) -> None:
        self.now = 0.0
        self.workers = [self.worker(rank, heads) for rank, heads in enumerate(HEADS)]
        for reader in self.workers:
            self.meet(reader)
        self.group(GROUPS)

    def worker(self, rank: int, heads) -> Worker:
        return Worker(rank, heads, lambda: self.now)

    def meet(self, reader: Worker) -> None:
        for owner in self.workers:
            if owner is not reader:
                reader.sources.offer(owner.rank, Kind.KV_PIECES, os.dup(owner.fd))
                reader.sources.offer(owner.rank, Kind.KV_PARITY, os.dup(owner.parity_fd))

    def group(self, groups) -> None:
        for worker in self.workers:
            mine = [[owner_of(*head) for head in group] for group in groups.get(worker.rank, ())]
            worker.sources.regroup([mine] * NUM)

    def store(self, **what) -> None:
        for worker in self.workers:
            worker.store(**what)

    def shadow(self, but=()) -> None:
        self.now += 1000.0
        for worker in self.workers:
            if worker.rank not in but:
                worker.shadow()

    def lose(self, rank: int) -> list[Worker]:
        """Its device, with pool and parity. Who is left."""
        lost = self.workers.pop([worker.rank for worker in self.workers].index(rank))
        for worker in self.workers:
            worker.sources.withdraw(lost.rank, Kind.KV_PIECES)
            worker.sources.withdraw(lost.rank, Kind.KV_PARITY)
        return self.workers


@pytest.fixture
def world() -> World:
    return World()


def expected(head, seed=0) -> np.ndarray:
    """[token, keys or values, bytes]"""
    return np.random.default_rng([seed, *head]).integers(0, 256, (len(TOKENS), 2, ROW_BYTES), np.uint8)


def assert_rebuilt(worker: Worker, head, blocks=BLOCKS) -> None:
    rows = worker.rows(head)
    for i, row in enumerate(expected(head)):
        assert (rows[blocks[i // BLOCK_SIZE], :, i % BLOCK_SIZE] == row).all(), i


@pytest.mark.parametrize("lost", range(NUM))
def test_every_head_of_any_lost_device_is_rebuilt(world, lost):
    world.store()
    world.shadow()
    heir, other = world.lose(lost)
    for worker, head in zip((heir, other), HEADS[lost], strict=True):
        worker.add(head)
        assert worker.fetch([head]) == (10, 10 * 2 * ROW_BYTES)
        assert_rebuilt(worker, head)
        assert worker.fetch([head]) == (10, 0), "with its words"


def test_into_other_blocks(world):
    """A stream that has another home now."""
    world.store()
    world.shadow()
    heir, _ = world.lose(1)
    heir.add((1, 0))
    assert heir.fetch([(1, 0)], blocks=[9, 8, 11], sources=BLOCKS).num_right == 10
    assert_rebuilt(heir, (1, 0), [9, 8, 11])


def test_two_losses_are_too_many(world):
    world.store()
    world.shadow()
    world.lose(0)
    (left,) = world.lose(1)
    for head in HEADS[0] + HEADS[1]:
        left.add(head)
        assert left.fetch([head]).num_right == 0


def test_what_was_not_covered_yet_is_not_there(world):
    world.store()
    world.shadow()
    more = chains([*TOKENS, 50, 51])
    world.store(chains_T=more, first=10)
    heir, _ = world.lose(1)
    heir.add((0, 1))
    assert heir.fetch([(0, 1)], chains_T=more).num_right == 10


def test_a_member_that_comes_later_is_waited_for(world):
    """The keeper has its own part of a step before others have theirs."""
    keeper = world.workers[2]
    world.workers[0].store()
    keeper.store()
    world.shadow()
    assert keeper.sources.has_to_shadow is False, "not now"
    world.workers[1].store()
    world.shadow()
    heir, _ = world.lose(0)
    heir.add((0, 0))
    assert heir.fetch([(0, 0)]).num_right == 10


def test_what_waits_too_long_does_not_wait_for_idle_times(world, monkeypatch):
    monkeypatch.setattr(parity_module, "_MOST_WAITING", 100)
    world.store()
    keeper = world.workers[2]
    assert keeper.sources.is_behind
    world.shadow()
    assert not keeper.sources.is_behind and keeper.kv.parity._num_waiting == 0


def test_a_member_that_never_comes_is_given_up_and_noted_again(world):
    keeper = world.workers[2]
    keeper.store()
    world.workers[0].store()
    for _ in range(20):
        world.shadow()
    assert not keeper.kv.parity._waiting
    world.store()  # the step is repeated: the same slots, the same chains
    world.shadow()
    heir, _ = world.lose(0)
    heir.add((0, 0))
    assert heir.fetch([(0, 0)]).num_right == 10


@pytest.mark.parametrize("where", ["parity", "member", "word of the parity"])
def test_one_changed_byte_shortens_what_is_right(world, where):
    world.store()
    world.shadow()
    keeper, member = world.workers[2], world.workers[1]
    parity = keeper.kv.parity.memory._pool
    if where == "parity":
        rows = np.frombuffer(parity.blocks, np.uint8).reshape(SHAPE.num_blocks, SHAPE.num_pieces, 2, BLOCK_SIZE, -1)
        rows[BLOCKS[1], 0, 1, 2, 5] ^= 1
    elif where == "member":
        member.rows((0, 1))[BLOCKS[1], 0, 2, 7] ^= 8
    else:
        parity._map[SHAPE.words_at + 8 * ((BLOCKS[1] * SHAPE.num_pieces) * BLOCK_SIZE + 2)] ^= 1
    heir = world.lose(0)[0]
    heir.add((0, 0))
    assert heir.fetch([(0, 0)]).num_right == 4 + 2


def test_a_parity_that_is_older_than_a_member_is_not_believed(world):
    """The block belongs to another stream at one worker already, and the parity is still that of the last one."""
    world.store()
    world.shadow()
    world.workers[1].store(chains_T=chains(TOKENS + 7), seed=1)
    heir = world.lose(0)[0]
    heir.add((0, 0))
    assert heir.fetch([(0, 0)]).num_right == 0
    assert heir.fetch([(0, 0)], chains_T=chains(TOKENS + 7)).num_right == 0


def test_blocks_of_another_stream(world):
    world.store()
    world.shadow()
    world.store(chains_T=chains(TOKENS + 7), seed=1)
    world.shadow()
    heir = world.lose(0)[0]
    heir.add((0, 0))
    assert heir.fetch([(0, 0)]).num_right == 0
    assert heir.fetch([(0, 0)], chains_T=chains(TOKENS + 7)).num_right == 10


def test_new_groups_are_written_anew_behind_the_steps(world):
    """After a loss: what was lost is at its heirs, in groups of two devices. Then a second loss is survived."""
    world.store()
    world.shadow()
    first, second = world.lose(2)
    for worker, head in ((first, (2, 0)), (second, (2, 1))):
        worker.add(head)
        assert worker.fetch([head]).num_right == 10
    world.group({0: [[head] for head in second.heads], 1: [[head] for head in first.heads]})
    world.shadow()
    (left,) = world.lose(0)
    for head in first.heads:
        left.add(head)
        assert left.fetch([head]).num_right == 10
        assert_rebuilt(left, head)


def test_groups_that_stay_are_left_alone(world):
    world.store()
    world.shadow()
    world.group(GROUPS)
    assert not any(worker.kv.parity._waiting for worker in world.workers)


def test_a_parity_outlives_the_process_of_its_keeper(world):
    """Also what that had noted, and not written."""
    world.store()
    world.shadow(but=(2,))
    keeper = world.workers[2]
    keeper.restart()
    world.meet(keeper)
    world.shadow()
    heir = world.lose(0)[0]
    heir.add((0, 0))
    assert heir.fetch([(0, 0)]).num_right == 10


def test_a_returned_device_learns_by_fetching_what_it_can_cover(world):
    """Its heads, and with them the chains of all streams, are copied there."""
    world.store()
    world.shadow()
    world.lose(2)
    back = world.worker(2, HEADS[2][:1])
    world.workers.append(back)
    world.meet(back)
    for worker in world.workers[:2]:
        worker.sources.offer(back.rank, Kind.KV_PIECES, os.dup(back.fd))
        worker.sources.offer(back.rank, Kind.KV_PARITY, os.dup(back.parity_fd))
    assert back.fetch([(2, 0)]).num_right == 10
    world.group(GROUPS)
    world.shadow()
    heir = world.lose(0)[0]
    heir.add((0, 0))
    assert heir.fetch([(0, 0)]).num_right == 10, "kept by the one that came back"
