"""Words of KV by heads: what is right is found wherever it is, and nothing else is believed."""

import os

import numpy as np
import pytest

from everserve.kvlog.chains import chains
from everserve.memory.kv_pieces import KvPieces, KvShape
from everserve.memory.owned import create_memory
from everserve.memory.pieces.sources import KvSources, Wanted
from everserve.tables.ids import Rank
from everserve.tables.memory import Kind

BLOCK_SIZE, ROW_BYTES = 4, 24  # of keys, and of values
SHAPE = KvShape(num_blocks=8, num_pieces=3, piece_bytes=2 * BLOCK_SIZE * ROW_BYTES, block_size=BLOCK_SIZE)
HEADS = [(0, 0), (0, 1), (1, 0)]
TOKENS = np.arange(10, dtype=np.int32)
CHAINS = chains(TOKENS)
BLOCKS = [5, 2, 7]


class Worker:
    """One seat, with these heads."""

    def __init__(self, heads=HEADS, mirrored: bool = True) -> None:
        self.fd = create_memory("kv-pieces", SHAPE.num_bytes)
        self.mirror_fd = create_memory("kv-mirror", SHAPE.mirrored.num_bytes) if mirrored else None
        self.heads = heads
        self.open()

    def open(self) -> None:
        self.kv = KvPieces(self.fd, SHAPE, self.mirror_fd)
        self.piece = {head: self.kv.piece_of(*head) for head in self.heads}
        self.sources = KvSources(self.kv)

    def lose_memory(self) -> None:
        self.kv.close()
        os.close(self.fd)
        self.fd = create_memory("kv-pieces", SHAPE.num_bytes)
        self.open()

    def rows(self, head) -> np.ndarray:
        """[block, keys or values, slot, bytes]"""
        pool = np.frombuffer(self.kv.blocks, np.uint8)
        return pool.reshape(SHAPE.num_blocks, SHAPE.num_pieces, 2, BLOCK_SIZE, ROW_BYTES)[:, self.piece[head]]

    def store(self, blocks=BLOCKS, chains_T=CHAINS, seed=0, first=0) -> None:
        """What a step does: the same bytes for the same stream, wherever it is."""
        slots = np.array(
            [blocks[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(len(chains_T))], np.int32
        )
        for number, head in enumerate(HEADS):
            random = np.random.default_rng([seed, number]).integers(0, 256, (len(slots), 2, ROW_BYTES), np.uint8)
            if head in self.piece:
                for i in range(first, len(slots)):
                    block, slot = divmod(int(slots[i]), BLOCK_SIZE)
                    self.rows(head)[block, :, slot] = random[i]
        slots, stored = slots[first:].copy(), np.ascontiguousarray(chains_T[first:])
        pieces = np.array(list(self.piece.values()), np.int32)
        self.kv.sign(slots.ctypes.data, stored.ctypes.data, len(slots), pieces.ctypes.data, len(pieces))

    def mirror(self) -> None:
        self.kv.mirror.copy_some(1 << 30)

    def fetch(self, blocks=BLOCKS, sources=None, chains_T=CHAINS, heads=None):
        heads = self.heads if heads is None else heads
        pieces = np.array([self.piece[head] for head in heads], np.int32)
        num_blocks = -(-len(chains_T) // BLOCK_SIZE)
        to = np.array(blocks[:num_blocks], np.int32)
        come_from = np.array((sources or blocks)[:num_blocks], np.int32)
        return self.sources.fetch(Wanted(pieces, come_from, to, np.ascontiguousarray(chains_T)))

    def meet(self, other: "Worker", rank: int = 1) -> None:
        self.sources.offer(Rank(rank), Kind.KV_PIECES, os.dup(other.fd))
        if other.mirror_fd is not None:
            self.sources.offer(Rank(rank), Kind.KV_MIRROR, os.dup(other.mirror_fd))


@pytest.fixture
def worker() -> Worker:
    worker = Worker()
    worker.store()
    return worker


def test_what_is_in_its_place_is_not_copied(worker):
    assert worker.fetch() == (10, 0)


def test_other_tokens_are_not_believed(worker):
    """Another stream; the same one, but for its last tokens."""
    assert worker.fetch(chains_T=chains(TOKENS + 1)).num_right == 0
    assert worker.fetch(chains_T=chains([*TOKENS[:6], 99, 98])).num_right == 6


@pytest.mark.parametrize("plane", [0, 1], ids=["keys", "values"])
@pytest.mark.parametrize("head", HEADS)
def test_one_changed_byte_shortens_what_is_right(worker, head, plane):
    """Of all pieces the one that has the least counts."""
    worker.rows(head)[BLOCKS[1], plane, 2, 5] ^= 1
    assert worker.fetch().num_right == 4 + 2
    assert worker.fetch(heads=[other for other in HEADS if other != head]).num_right == 10


def test_a_row_without_its_word(worker):
    """Stored, and the process has died before it signed."""
    worker.rows(HEADS[1])[BLOCKS[2], :, 0] = 7
    assert worker.fetch().num_right == 8


def test_kv_of_one_head_is_none_of_another(worker):
    """A piece that was given to another head, with everything that is in it."""
    worker.kv.memory.owners[worker.piece[HEADS[0]]] = 4711
    assert worker.fetch().num_right == 0


def test_blocks_of_another_stream(worker):
    worker.store(seed=1, chains_T=chains(TOKENS + 7), blocks=[5, 6, 1])
    assert worker.fetch().num_right == 0
    worker.store(seed=0)
    worker.store(seed=1, chains_T=chains(TOKENS + 7), blocks=[6, 7, 1])
    assert worker.fetch().num_right == 8


def test_within_the_pool_into_other_blocks(worker):
    got = worker.fetch(sources=BLOCKS, blocks=[0, 1, 3])
    assert got == (10, 10 * 3 * 2 * ROW_BYTES)
    for head in HEADS:
        assert (worker.rows(head)[[0, 1]] == worker.rows(head)[[5, 2]]).all()
    assert worker.fetch(blocks=[0, 1, 3]) == (10, 0), "with their words"


def test_from_its_own_mirror(worker):
    worker.mirror()
    worker.lose_memory()
    assert worker.fetch() == (10, 10 * 3 * 2 * ROW_BYTES)
    assert worker.fetch() == (10, 0)


def test_a_mirror_that_lags_behind(worker):
    worker.mirror()
    more = chains([*TOKENS, 50, 51])
    worker.store(chains_T=more, first=10)
    worker.lose_memory()
    assert worker.fetch(chains_T=more).num_right == 10


def test_a_mirror_has_what_was_fetched(worker):
    other = Worker()
    other.meet(worker)
    assert other.fetch().num_right == 10
    other.mirror()
    other.sources.withdraw(Rank(1), Kind.KV_PIECES)
    other.sources.withdraw(Rank(1), Kind.KV_MIRROR)
    other.lose_memory()
    assert other.fetch().num_right == 10


def test_a_mirror_that_waits_too_long_is_not_forgotten(worker, monkeypatch):
    monkeypatch.setattr("everserve.memory.pieces.mirror._MOST_WAITING", 100)
    worker.store(chains_T=chains([*TOKENS, 50]), first=10)
    worker.lose_memory()
    assert worker.fetch().num_right >= 9


@pytest.mark.parametrize("is_lost", [False, True], ids=["pool", "mirror"])
def test_from_another_worker_for_some_heads(worker, is_lost):
    """In other pieces there, and one head is at a third worker."""
    third = Worker([HEADS[1]])
    third.store()
    other = Worker([HEADS[2], HEADS[1]])
    other.meet(worker)
    other.meet(third, rank=2)
    worker.mirror()
    if is_lost:
        other.sources.withdraw(Rank(1), Kind.KV_PIECES)
    assert other.fetch() == (10, 10 * 2 * 2 * ROW_BYTES)
    assert (other.rows(HEADS[2])[BLOCKS[0]] == worker.rows(HEADS[2])[BLOCKS[0]]).all()


def test_the_better_source_counts(worker):
    """One has the beginning, the other one all of it; and a third one rubbish."""
    rubbish, short, other = Worker(), Worker(), Worker()
    rubbish.store(seed=9)
    rubbish.rows(HEADS[0])[...] = 1
    short.store(chains_T=CHAINS[:6])
    for rank, source in enumerate((rubbish, short, worker), start=1):
        other.meet(source, rank)
    assert other.fetch().num_right == 10
    other.sources.withdraw(Rank(3), Kind.KV_PIECES)
    assert Worker.fetch(other, blocks=[0, 1, 3], sources=BLOCKS).num_right == 10, "it has it itself by now"


def test_without_a_source_nothing_is_right():
    assert Worker().fetch() == (0, 0)


def test_a_lost_pool_keeps_its_pieces_where_its_mirror_has_them(worker):
    """Its successor loads heads in another order."""
    worker.mirror()
    worker.heads = HEADS[::-1]
    worker.lose_memory()
    assert worker.fetch().num_right == 10
