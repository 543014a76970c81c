"""The KV log: what is written is found, and what is not right is not taken."""

import ctypes
import itertools
import mmap
import os
import subprocess
import sys
from dataclasses import astuple, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from everserve.backends.cpu import ops as native
from everserve.kvlog.chains import START, chain_before, chains, key_of, marked_chains, start_of
from everserve.kvlog.layout import LogShape
from everserve.kvlog.log import Log, LogMismatch
from everserve.kvlog.writer import Commit, LogWriter
from everserve.memory.owned import create_memory
from everserve.tables.ids import Rank
from everserve.tables.requests import Masked
from tests.support.experts import MOE_LAYERS, NUM_EXPERTS, RandomExperts, Rows, local_experts, routes
from tests.support.experts import SHAPE as LANE_SHAPE
from tests.support.in_process_experts import MemoryExperts
from tests.support.logs import SHAPE, Heir, Owner, Stream, as_pool, call_meanwhile, kv_of, new_log

A, B, C = (key_of(name) for name in "abc")


def owner_of(*names: str, in_log: bool = False, shape: LogShape = SHAPE) -> Owner:
    owner = Owner(new_log(shape), in_log)
    for index, name in enumerate(names):
        owner.streams[name] = Stream(index)
    return owner


in_both_places = pytest.mark.parametrize("in_log", [False, True], ids=["beside the pool", "in the log"])


# layout


@pytest.mark.parametrize("piece_bytes", [4, 12, 64, 256])
@pytest.mark.parametrize(("num_blocks", "block_size", "num_records", "max_blocks"), [(1, 1, 1, 1), (77, 16, 5, 33)])
def test_layout(num_blocks, block_size, num_records, max_blocks, piece_bytes):
    shape = LogShape(
        num_blocks=num_blocks,
        block_size=block_size,
        num_layers=3,
        num_planes=4,
        piece_bytes=piece_bytes,
        num_records=num_records,
        max_blocks=max_blocks,
    )
    layout = shape.layout()
    regions = [
        (0, 64),
        (layout.records_at, 128 * num_records),
        (layout.lists_at, 4 * num_records * max_blocks),
        (layout.words_at, 8 * num_blocks * block_size),
        (layout.blocks_at, num_blocks * shape.block_bytes),
        (shape.num_bytes, 0),
    ]
    assert all(at + size <= following for (at, size), (following, _) in itertools.pairwise(regions))
    assert all(at % 64 == 0 for at, _ in regions) and layout.blocks_at % mmap.PAGESIZE == 0
    assert shape.block_bytes == 3 * 4 * block_size * piece_bytes and shape.num_bytes % mmap.PAGESIZE == 0


@pytest.mark.parametrize("wrong", [{"piece_bytes": 6}, {"num_blocks": 0}, {"block_size": 4096}, {"num_blocks": 2**30}])
def test_impossible_shapes(wrong):
    with pytest.raises(AssertionError):
        replace(SHAPE, **wrong)


def test_whoever_allocates_needs_neither_numpy_nor_torch():
    script = "import everserve.kvlog.layout, sys; sys.exit('numpy' in sys.modules or 'torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


# chains and keys


def test_chains_go_on():
    tokens = [5, 0, 0, 7, 151_000, 2**31 - 1]
    all_at_once = chains(tokens)
    assert all_at_once.dtype == np.uint64 and len(set(map(int, all_at_once))) == len(tokens)
    assert np.array_equal(chains(np.array(tokens, np.int32)), all_at_once)
    for cut in range(1, len(tokens)):
        rest = chains(tokens[cut:], before=all_at_once[cut - 1])
        assert np.array_equal(rest, all_at_once[cut:])
    assert len(chains([])) == 0


def test_chains_tell_streams_apart():
    streams = [list(tokens) for n in range(1, 6) for tokens in itertools.product(range(3), repeat=n)]
    assert len({int(chains(tokens)[-1]) for tokens in streams} | {START}) == len(streams) + 1


def test_a_salt_changes_all_chains():
    tokens, salts = [1, 2, 3], [b"", b"a", b"b", b"a salt that is longer than a hash"]
    starts = [start_of(salt) for salt in salts]
    assert starts[0] == START and starts == [start_of(salt) for salt in salts]
    for masked in (None, Masked(0, 7), Masked(1, 7)):
        found = [marked_chains(tokens, masked, start).tolist() for start in starts]
        assert len({chain for of_salt in found for chain in of_salt}) == len(tokens) * len(starts)
        for start, of_salt in zip(starts, found, strict=True):
            assert chain_before(tokens, masked, start) == of_salt[-1]
            assert marked_chains(tokens[:2], masked, start).tolist() == of_salt[:2]
    assert [chain_before([], None, start) for start in starts] == starts
    assert len({chain_before([], Masked(0, 7), start) for start in starts}) == len(starts)


def test_keys():
    assert len(A) == 16 and A != B and key_of("a") == A and key_of("é") != key_of("e")


# a step


@in_both_places
@pytest.mark.parametrize("gaps", [(), (0,), (1,), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("piece_bytes", [4, 8, 12, 20, 32, 64, 100])
def test_a_step_is_in_the_log(in_log, gaps, piece_bytes):
    shape = replace(SHAPE, piece_bytes=piece_bytes)
    owner = owner_of("a", "b", in_log=in_log, shape=shape)
    owner.free = [3, 4, 7, 0, 9, 1]  # runs within blocks, over their ends, and rows that stand alone
    owner.step({"a": [1, 2, 3, 4, 5, 6], "b": [1]}, gaps)
    owner.step({"b": [9], "a": [7]}, gaps)
    for name in "ab":
        stream = owner.streams[name]
        chains_T = chains(stream.tokens)
        for i, block in enumerate(stream.blocks):
            wanted_B = chains_T[4 * i : 4 * i + 4]
            assert owner.log.count_intact([block], len(wanted_B), wanted_B) == len(wanted_B)
            logged = as_pool(owner.log.blocks, shape)[block, :, :, : len(wanted_B)]
            assert np.array_equal(logged, kv_of(wanted_B, shape).transpose(1, 2, 0, 3))
    used = [block for stream in owner.streams.values() for block in stream.blocks]
    assert not np.delete(as_pool(owner.log.blocks, shape), used, axis=0).any(), "nothing else was touched"


def words_of(log: Log) -> np.ndarray:
    at, num_slots = log.layout.words_at, log.shape.num_blocks * log.shape.block_size
    return np.frombuffer(memory_of(log)[at : at + 8 * num_slots], np.uint64)


def memory_of(log: Log) -> ctypes.Array:
    return (ctypes.c_char * log.shape.num_bytes).from_address(log.layout.base)


@in_both_places
def test_words_do_not_depend_on_how_a_step_was_cut(in_log):
    """All layers at once or one by one, all rows in one step or in many, with other streams or alone."""
    tokens = {"a": [3, 1, 4, 1, 5, 9, 2], "b": [6, 5, 3]}
    found = []
    for gaps, size in [((), 7), ((0, 2), 7), ((), 1), ((1,), 3)]:
        owner = owner_of("a", "b", in_log=in_log)
        for name, rows in tokens.items():
            owner.streams[name].blocks = [ord(name) - ord("a"), 2 + ord(name) - ord("a")]
            if size == 7:
                continue
            for first in range(0, len(rows), size):
                owner.step({name: rows[first : first + size]}, gaps)
        if size == 7:
            owner.step(tokens, gaps)
        found.append(words_of(owner.log))
    assert np.count_nonzero(found[0]) == 10
    assert all(np.array_equal(words, found[0]) for words in found)


def test_large_steps():
    shape = replace(SHAPE, num_blocks=300, max_blocks=300)
    owner = owner_of("a", "b", shape=shape)
    owner.step({"a": [1, 2, 3]})
    owner.step({"a": [*range(500)], "b": [*range(600)]}, gaps=[1])
    owner.commit("a")
    owner.commit("b")
    heir = Heir(new_log(shape), in_log=False)
    assert heir.restore(owner.log, "a", owner.streams["a"].tokens) == 503
    assert heir.restore(owner.log, "b", owner.streams["b"].tokens) == 600


def test_an_empty_step():
    owner = owner_of("a")
    owner.step({})
    owner.step({"a": []})
    assert not words_of(owner.log).any()


@pytest.mark.parametrize(
    ("slots", "starts"), [([48], [0, 1]), ([-1], [0, 1]), ([1], [0, 2]), ([1], [1, 1]), ([1, 2], [0, 2, 1, 2])]
)
def test_rows_that_are_none(slots, starts):
    owner = owner_of()
    arrays = np.zeros(len(slots), np.int32), np.array(slots, np.int32), np.array(starts, np.int32)
    with pytest.raises(AssertionError, match="no rows of its pool"):
        owner.writer.begin(*arrays, np.zeros(len(starts) - 1, np.uint64))
    owner.writer.finish()
    assert not words_of(owner.log).any()


def test_meanwhile_outside_of_a_step_does_nothing():
    owner = owner_of("a")
    call_meanwhile(owner.writer, 2)
    owner.begin({"a": [1]})
    owner.writer.abandon()
    call_meanwhile(owner.writer, 2)
    assert len(owner.writer.finish()) == 0
    owner.streams["a"].blocks.clear()
    owner.step({"a": [1, 2]}, gaps=[2])
    call_meanwhile(owner.writer, 2)
    assert owner.log.count_intact([owner.streams["a"].blocks[0]], 2, chains([1, 2])) == 2


@in_both_places
def test_an_abandoned_step(in_log):
    """It leaves rubbish where another stream's KV had been; that is noticed, and the repetition is right again."""
    owner = owner_of("a", "b", in_log=in_log)
    owner.step({"a": [1, 2, 3, 4, 5]})
    first, second = owner.streams["a"].blocks
    owner.commit("a")
    owner.forget("a")  # its record is out of date from now on
    owner.free = [second, first, 7]
    owner.compute(range(2), *owner.begin({"b": [9]}), gaps=[0, 1])
    owner.writer.abandon()
    assert owner.log.count_intact([second], 1, chains([1, 2, 3, 4, 5])[4:]) == 0
    assert owner.log.count_intact([second], 1, chains([9])) == 0
    assert Heir(new_log(), False).restore(owner.log, "a", [1, 2, 3, 4, 5]) == 4
    owner.step({"b": [9]})
    assert owner.log.count_intact([second], 1, chains([9])) == 1


# what the words notice


def test_every_bit_counts():
    owner = owner_of("a")
    owner.step({"a": [1, 2, 3]})
    chains_T, blocks = chains([1, 2, 3]), as_pool(owner.log.blocks)
    for layer, plane, slot, byte in np.ndindex(SHAPE.num_layers, SHAPE.num_planes, 3, SHAPE.piece_bytes):
        for bit in range(8):
            blocks[0, layer, plane, slot, byte] ^= 1 << bit
            assert owner.log.count_intact([0], 3, chains_T) == slot
            blocks[0, layer, plane, slot, byte] ^= 1 << bit
    for slot, bit in itertools.product(range(3), range(64)):
        word = ctypes.c_uint64.from_address(owner.log.layout.base + owner.log.layout.words_at + 8 * slot)
        word.value ^= 1 << bit
        assert owner.log.count_intact([0], 3, chains_T) == slot
        word.value ^= 1 << bit
    assert owner.log.count_intact([0], 3, chains_T) == 3


@pytest.mark.parametrize("piece_bytes", [8, 36, 64])
def test_any_two_bits_count(piece_bytes):
    """Few bits in one word are not taken back by few bits in another."""
    shape = replace(SHAPE, num_blocks=1, block_size=1, num_layers=2, piece_bytes=piece_bytes)
    owner = owner_of("a", shape=shape)
    owner.step({"a": [1]})
    chains_T, bits = chains([1]), np.frombuffer(owner.log.blocks, np.uint8)
    for byte in range(len(bits)):
        for other in range(byte + 1, min(byte + 48, len(bits))):
            for bit, other_bit in [(7, 7), (0, 7), (7, 0), (0, 0)]:
                bits[byte] ^= 1 << bit
                bits[other] ^= 1 << other_bit
                assert owner.log.count_intact([0], 1, chains_T) == 0
                bits[byte] ^= 1 << bit
                bits[other] ^= 1 << other_bit
    assert owner.log.count_intact([0], 1, chains_T) == 1


def test_order_counts():
    """Pieces, words or tokens that have changed places."""
    owner = owner_of("a")
    owner.step({"a": [1, 1, 1]})
    blocks, chains_T = as_pool(owner.log.blocks), chains([1, 1, 1])
    views = [
        (blocks[0, 0, :, 0], blocks[0, 1, :, 0]),  # layers
        (blocks[0, 0, 0, 0], blocks[0, 0, 1, 0]),  # planes
        (blocks[0, :, :, 0], blocks[0, :, :, 1]),  # slots
        (blocks[0, 0, 0, 0, :8], blocks[0, 0, 0, 0, 8:16]),  # words
    ]
    for one, other in views:
        for _ in range(2):
            assert owner.log.count_intact([0], 3, chains_T) in (0, 3)
            saved = one.copy()
            one[...], other[...] = other.copy(), saved
        assert owner.log.count_intact([0], 3, chains_T) == 3
    one, other = views[2]
    one[...] = other
    assert owner.log.count_intact([0], 3, chains_T) == 0


@pytest.mark.parametrize("value", [0x00, 0x80, 0xFF])
def test_memory_that_was_never_written(value):
    log = new_log()
    log.blocks[:] = bytes([value]) * len(log.blocks)
    assert log.count_intact([0], 4, chains([1, 2, 3, 4])) == 0
    assert log.count_intact([0], 4, np.zeros(4, np.uint64)) == 0


def test_other_tokens_are_no_match():
    owner = owner_of("a")
    owner.step({"a": [1, 2, 3, 4, 5]})
    first, second = owner.streams["a"].blocks
    assert owner.log.count_intact([first], 4, chains([1, 2, 0, 4])) == 2
    assert owner.log.count_intact([second], 1, chains([5])) == 0, "the same token, elsewhere in a stream"


# records


def test_commits_are_found():
    owner = owner_of("a", "b")
    assert owner.log.records() == [] and owner.log.find(A) is None
    owner.step({"a": [1, 2, 3, 4, 5], "b": [6]})
    owner.commit("b")
    owner.commit("a")
    a, b = owner.log.find(A), owner.log.find(B)
    assert a == (0, A, 2, 5, (0, 1)) and b == (1, B, 1, 1, (2,)) and owner.log.find(C) is None
    assert owner.log.records() == [a, b]
    owner.step({"a": [1] * 6})
    owner.commit("a")
    assert owner.log.find(A) == (0, A, 3, 11, (0, 1, 3))


def test_commit_many():
    log = new_log()
    writer = LogWriter(log, log.blocks_address)
    writer.commit_many([Commit(0, A, 5, [7, 3], 0), Commit(4, B, 0, [], 0), Commit(2, C, 24, [*range(6)], 0)])
    writer.commit_many([Commit(2, C, 24, [*range(6)], 6), Commit(0, A, 9, [7, 3, 11], 2)])
    assert log.records() == [(0, A, 5, 9, (7, 3, 11)), (2, C, 4, 24, (0, 1, 2, 3, 4, 5)), (4, B, 2, 0, ())]
    writer.commit_many([])


@pytest.mark.parametrize(
    "wrong",
    [
        Commit(6, A, 0, [], 0),
        Commit(0, b"short", 0, [], 0),
        Commit(0, A, 5, [1], 0),
        Commit(0, A, 5, [*range(7)], 0),
        Commit(0, A, 4, [12], 0),
        Commit(0, A, 4, [-1], 0),
    ],
)
def test_impossible_commits(wrong):
    log = new_log()
    with pytest.raises(AssertionError):
        LogWriter(log, log.blocks_address).commit(*wrong)
    assert log.records() == []


def test_many_clears():
    log = new_log()
    writer = LogWriter(log, log.blocks_address)
    expected: dict[int, tuple[bytes, int]] = {}
    rng = np.random.default_rng(0)
    for seq in range(1, 400):
        index = int(rng.integers(6))
        if rng.random() < 0.4:
            writer.clear(index)
            expected.pop(index, None)
        key = key_of(str(seq))
        writer.commit(index, key, seq % 8, [1, 2], 0)
        expected[index] = (key, seq)
        assert {r.index: (r.key, r.seq) for r in log.records()} == expected
        assert all(log.find(key).index == index for index, (key, _) in expected.items())
    for index in range(6):
        writer.clear(index)
        writer.clear(index)
    assert log.records() == []


def test_the_newest_of_several_records():
    log = new_log()
    writer = LogWriter(log, log.blocks_address)
    for index in (3, 0, 5):
        writer.commit(index, A, index, [1, 2], 0)
    assert log.find(A).index == 5 and len(log.records()) == 3
    writer.commit(0, A, 1, [1, 2], 2)
    assert log.find(A).index == 0
    writer.commit(0, B, 1, [1, 2], 2)
    assert log.find(A).index == 5, "an old copy of a record that is another stream's now does not count"


def copies_of(log: Log, index: int) -> list[np.ndarray]:
    """The words of both copies: seq, key, key, num_tokens, num_blocks, check."""
    at = log.layout.base + log.layout.records_at + 128 * index
    return [np.frombuffer((ctypes.c_char * 48).from_address(at + 64 * i), np.uint64) for i in range(2)]


def test_a_torn_record():
    """Whatever is wrong with the newest copy, the one before it counts; none if both are wrong."""
    log = new_log()
    writer = LogWriter(log, log.blocks_address)
    for newest in (0, 1, 0, 1):
        writer.commit(2, A, 3 + newest, [4], 0)
        for word, bit in itertools.product(range(6), range(64)):
            copies_of(log, 2)[newest][word] ^= np.uint64(1 << bit)
            record = log.find(A)
            others = writer._writer.last_seq > 1
            assert record == ((2, A, writer._writer.last_seq - 1, 4 - newest, (4,)) if others else None)
            assert log.records() == ([record] if record else [])
            copies_of(log, 2)[newest][word] ^= np.uint64(1 << bit)
        assert log.find(A).num_tokens == 3 + newest
    for copy in copies_of(log, 2):
        copy[3] += 1
    assert log.find(A) is None and log.records() == []
    writer.commit(2, A, 1, [4], 0)
    assert log.find(A).num_tokens == 1


def test_a_half_written_copy_is_written_again():
    """A successor goes on with the copy that does not count, and with the numbers."""
    log = new_log()
    first = LogWriter(log, log.blocks_address)
    for num_tokens in (1, 2, 3):
        first.commit(0, A, num_tokens, [4], 0)
    copies_of(log, 0)[1][3] = 99  # died in the middle of the fourth
    second = LogWriter(log, log.blocks_address)
    second.commit(0, A, 4, [4], 1)
    assert log.find(A) == (0, A, 4, 4, (4,))
    copies_of(log, 0)[1][3] = 99
    assert log.find(A) == (0, A, 3, 3, (4,))


def test_a_record_counts_only_in_its_place():
    log = new_log()
    LogWriter(log, log.blocks_address).commit(0, A, 3, [4], 0)
    for copy, to in zip(copies_of(log, 0), copies_of(log, 1), strict=True):
        to[:] = copy
    assert [record.index for record in log.records()] == [0]


@pytest.mark.parametrize("rubbish", [-1, 12, 2**31 - 1, -(2**31)])
def test_a_broken_block_list(rubbish):
    log = new_log()
    LogWriter(log, log.blocks_address).commit(1, A, 11, [4, 5, 6], 0)
    ctypes.c_int32.from_address(log.layout.base + log.layout.lists_at + 4 * (6 + 1)).value = rubbish
    assert log.find(A) == (1, A, 1, 4, (4,))


# restoring


@in_both_places
@pytest.mark.parametrize("heir_in_log", [False, True])
def test_restore(in_log, heir_in_log):
    owner = owner_of("a", "b", in_log=in_log)
    owner.step({"a": [1, 2, 3, 4, 5, 6]})
    owner.commit("a")
    owner.step({"a": [7], "b": [1, 2, 3]})
    heir = Heir(new_log(), heir_in_log)
    assert heir.restore(owner.log, "a", [1, 2, 3, 4, 5, 6, 7]) == 6, "what is committed"
    assert heir.restore(owner.log, "b", [1, 2, 3]) == 0
    owner.commit("a")
    assert heir.restore(owner.log, "a", [1, 2, 3, 4, 5, 6, 7]) == 7
    assert heir.restore(owner.log, "a", [1, 2, 3]) == 3, "what is known"
    assert heir.restore(owner.log, "a", [1, 2, 3, 4, 5, 0, 7]) == 5, "what is the same"
    owner.end("a")
    assert heir.restore(owner.log, "a", [1, 2, 3, 4, 5, 6, 7]) == 0


@in_both_places
def test_what_was_restored_can_be_restored_again(in_log):
    """The heir's log holds it like any other stream, and goes on from there."""
    owner = owner_of("a", in_log=in_log)
    owner.step({"a": [1, 2, 3, 4, 5, 6]})
    owner.commit("a")
    heir = Heir(new_log(), in_log)
    heir.restore(owner.log, "a", [1, 2, 3, 4, 5, 6])
    heir.streams["a"] = Stream(3, [1, 2, 3, 4, 5, 6], [1, 2], owner.streams["a"].chain)
    heir.step({"a": [7, 8]})
    heir.commit("a")
    assert Heir(new_log(), in_log).restore(heir.log, "a", [1, 2, 3, 4, 5, 6, 7, 8]) == 8


@in_both_places
def test_stale_record_and_blocks_of_another_stream(in_log):
    owner = owner_of("a", "b", in_log=in_log)
    owner.step({"a": [1, 2, 3, 4, 5, 6, 7, 8, 9]})
    owner.commit("a")
    owner.forget("a")
    owner.free = [1, 0, 2]
    owner.step({"b": [1, 2, 3, 4, 5]}, gaps=[0])
    owner.commit("b")
    heir = Heir(new_log(), in_log)
    assert heir.restore(owner.log, "a", [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 0, "its first block is the other's second"
    assert heir.restore(owner.log, "b", [1, 2, 3, 4, 5]) == 5


@in_both_places
def test_from_the_own_log_to_another_block_or_the_same(in_log):
    fd = create_memory("log", SHAPE.num_bytes)
    dead = Owner(Log(fd, SHAPE), in_log)
    dead.streams["a"] = Stream(0)
    dead.step({"a": [1, 2, 3, 4, 5]})
    successor = Owner(Log(fd, SHAPE), in_log)
    os.close(fd)
    chains_T = chains([1, 2, 3, 4, 5])
    for source in (dead.log, successor.log):
        for block in (0, 6):
            assert successor.writer.copy_in(source, [0], 4, chains_T[:4], [block]) == 4
            assert np.array_equal(successor.pool[block], kv_of(chains_T[:4]).transpose(1, 2, 0, 3))
            assert successor.log.count_intact([block], 4, chains_T) == 4
    assert successor.writer.copy_in(successor.log, [1], 1, chains_T[4:], [1]) == 1
    assert successor.writer.copy_in(successor.log, [1], 0, chains_T[4:], [1]) == 0


def test_copy_in_takes_only_what_is_right():
    owner, heir = owner_of("a"), Heir(new_log(), in_log=False)
    owner.step({"a": [1, 2, 3, 4]})
    heir.log.blocks[:] = bytes([7]) * len(heir.log.blocks)
    as_pool(owner.log.blocks)[0, 2, 1, 2, 19] ^= 1
    assert heir.writer.copy_in(owner.log, [0], 4, chains([1, 2, 3, 4]), [5]) == 2
    assert (as_pool(heir.log.blocks)[5, :, :, 2:] == 7).all() and np.count_nonzero(words_of(heir.log)) == 2


@in_both_places
@pytest.mark.parametrize("num_tokens", [1, 4, 7, 8, 11])
@pytest.mark.parametrize("broken", [None, 0, 3, 4, 6, 10])
def test_many_blocks_at_once(in_log, num_tokens, broken):
    """Up to the first token that is not right, wherever that is."""
    owner, heir = owner_of("a"), Heir(new_log(), in_log)
    owner.free = [7, 2, 9]
    owner.step({"a": [*range(11)]})
    chains_T, expected = chains(range(11)), num_tokens if broken is None else min(num_tokens, broken)
    if broken is not None:
        as_pool(owner.log.blocks)[[7, 2, 9][broken // 4], 1, 1, broken % 4, 3] ^= 4
    blocks = [3, 11, 0][: -(-num_tokens // 4)]
    sources = [7, 2, 9][: len(blocks)]
    assert owner.log.count_intact(sources, num_tokens, chains_T) == expected
    assert heir.writer.copy_in(owner.log, sources, num_tokens, chains_T, blocks) == expected
    assert heir.writer.count_intact(blocks, num_tokens, chains_T) == expected
    for i in range(expected):
        assert np.array_equal(heir.pool[blocks[i // 4], :, :, i % 4], kv_of(chains_T)[i])
    with pytest.raises(AssertionError, match="in 0 blocks"):
        heir.writer.copy_in(owner.log, [], 1, chains_T, [1])


def test_copy_in_between_logs_of_different_size():
    owner = owner_of("a")
    owner.step({"a": [1, 2, 3, 4]})
    log = new_log(replace(SHAPE, num_blocks=3, num_records=1, max_blocks=2))
    writer = LogWriter(log, log.blocks_address)
    assert writer.copy_in(owner.log, [0], 4, chains([1, 2, 3, 4]), [2]) == 4
    other = new_log(replace(SHAPE, piece_bytes=24))
    with pytest.raises(AssertionError, match="another kind"):
        writer.copy_in(other, [0], 4, chains([1, 2, 3, 4]), [2])


def test_chains_of_any_stride():
    owner = owner_of("a")
    owner.step({"a": [1, 2, 3, 4]})
    wide = np.zeros(8, np.uint64)
    wide[::2] = chains([1, 2, 3, 4])
    assert owner.log.count_intact([0], 4, wide[::2]) == 4
    with pytest.raises(AssertionError):
        owner.log.count_intact([0], 5, chains([1, 2, 3, 4, 5]))
    with pytest.raises(AssertionError):
        owner.log.count_intact([12], 1, chains([1]))


# the memory


def test_opening():
    fd = create_memory("log", SHAPE.num_bytes)
    first = Log(fd, SHAPE)
    assert not first.was_there and first.records() == []
    LogWriter(first, first.blocks_address).commit(0, A, 0, [], 0)
    again = Log(fd, SHAPE)
    assert again.was_there and again.records() == first.records() and again.identity == first.identity
    assert again.blocks_address != first.blocks_address and new_log().identity != first.identity
    for name in ("num_blocks", "num_records", "max_blocks", "num_layers"):
        smaller = replace(SHAPE, **{name: getattr(SHAPE, name) - 1})
        with pytest.raises(LogMismatch, match="another shape"):
            Log(fd, smaller)
    os.close(fd)


def test_memory_of_something_else():
    fd = create_memory("log", SHAPE.num_bytes)
    os.pwrite(fd, b"something", 0)
    with pytest.raises(LogMismatch, match="something else"):
        Log(fd, SHAPE)
    os.close(fd)


def test_too_small():
    fd = create_memory("log", SHAPE.num_bytes - mmap.PAGESIZE)
    with pytest.raises(ValueError, match=r"this log has \d+ bytes, this memory has \d+"):
        Log(fd, SHAPE)
    os.close(fd)


def test_half_a_header_is_none():
    """Whoever made it died before it had signed."""
    fd = create_memory("log", SHAPE.num_bytes)
    os.pwrite(fd, np.array([1, *astuple(SHAPE)], np.int32).tobytes()[:20], 8)
    assert not Log(fd, SHAPE).was_there and Log(fd, SHAPE).was_there
    os.close(fd)


def mappings_of(identity: tuple[int, int]) -> int:
    return sum(line.split()[4] == str(identity[1]) for line in Path("/proc/self/maps").read_text().splitlines())


def num_descriptors() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


def test_closing():
    num_fds = num_descriptors()
    fd = create_memory("log", SHAPE.num_bytes)
    log = Log(fd, SHAPE)
    writer, other = LogWriter(log, log.blocks_address), new_log()
    os.close(fd)
    assert num_descriptors() == num_fds, "the mapping does not need a descriptor"
    pool = torch.frombuffer(log.blocks, dtype=torch.uint8).zero_()
    assert pool.data_ptr() == log.blocks_address and mappings_of(log.identity) == 1 and not log.closed
    view = log.blocks
    log.close()
    log.close()
    assert mappings_of(log.identity) == 0 and log.closed
    with pytest.raises(ValueError, match="released"):
        view[0]
    ones = np.ones(1, np.int32), np.ones(1, np.int32), np.array([0, 1], np.int32), chains([1])
    other_writer = LogWriter(other, other.blocks_address)
    call_meanwhile(writer, 0)
    for use in (
        lambda: log.find(A),
        log.records,
        lambda: log.count_intact([0], 1, chains([1])),
        lambda: writer.begin(*ones),
        writer.finish,
        lambda: writer.commit(0, A, 0, [], 0),
        lambda: writer.clear(0),
        lambda: writer.copy_in(other, [0], 1, chains([1]), [0]),
        lambda: other_writer.copy_in(log, [0], 1, chains([1]), [0]),
        lambda: LogWriter(log, 0),
    ):
        with pytest.raises(AssertionError):
            use()


def test_a_refusal_leaves_nothing_mapped():
    fd = create_memory("log", SHAPE.num_bytes)
    log = Log(fd, SHAPE)
    with pytest.raises(LogMismatch):
        Log(fd, replace(SHAPE, max_blocks=5))
    assert mappings_of(log.identity) == 1
    log.close()
    assert mappings_of(log.identity) == 0
    os.close(fd)


def test_a_dead_reader_of_a_small_log_costs_little():
    """Pages are paid for where they are used."""
    shape = replace(SHAPE, num_blocks=2**20, max_blocks=2**16)
    fd = create_memory("log", shape.num_bytes)
    log = Log(fd, shape)
    owner = Owner(log, in_log=True)
    owner.streams["a"] = Stream(0)
    owner.step({"a": [1, 2, 3]})
    owner.commit("a")
    assert log.find(A).num_tokens == 3
    assert 512 * os.fstat(fd).st_blocks <= 16 * mmap.PAGESIZE < shape.num_bytes
    os.close(fd)


# the gap in which a worker waits for experts


class Waiting(MemoryExperts):
    """An attention worker whose experts are in two others."""

    def __init__(self) -> None:
        super().__init__(LANE_SHAPE, MOE_LAYERS, NUM_EXPERTS)
        self.ops = native.NativeOps(num_threads=1)
        for rank in (Rank(1), Rank(2)):
            self.add(rank, RandomExperts(self.ops, range(NUM_EXPERTS)))
        self.peers.use(routes({rank: range(NUM_EXPERTS) for rank in self.members}))
        self.expert_io = self.remote_experts(self.ops)
        self.local = local_experts(self.ops)

    def run(self, layer: int) -> None:
        rows = Rows(5, layer)
        assert torch.equal(rows.through(self.expert_io, layer), rows.through(self.local, layer))


@pytest.fixture
def waiting():
    cluster = Waiting()
    yield cluster
    cluster.close()


def test_meanwhile_is_called_when_rows_are_on_their_way(waiting):
    called: list[tuple[int, int, int]] = []
    signature = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)

    @signature
    def meanwhile(argument, layer):
        answered = sum(peer.num_requests for peer in waiting.members.values())
        called.append((argument, layer, answered, waiting.cell.position))

    waiting.expert_io.do_meanwhile(ctypes.cast(meanwhile, ctypes.c_void_p).value, 77)
    for layer in MOE_LAYERS:
        waiting.run(layer)
    assert called == [(77, 1, 0, 3), (77, 3, 2, 4), (77, 4, 4, -1)], "once per layer; sent, and nothing answered yet"
    waiting.expert_io.do_meanwhile(0, 0)
    waiting.run(MOE_LAYERS[0])
    assert len(called) == 3


def test_a_layer_that_was_missed_is_taken_with_the_next(waiting):
    """One that begins with something to attend to has no gap of its own."""
    shape = replace(SHAPE, num_layers=5)
    owner = owner_of("a", shape=shape)
    waiting.expert_io.do_meanwhile(*owner.writer.meanwhile)
    slots_T, kv_T = owner.begin({"a": [1, 2, 3]})
    logged = as_pool(owner.log.blocks, shape)[0, :, :, :3]
    num_taken = []
    for layer in range(5):
        owner.compute([layer], slots_T, kv_T)
        if layer == 3:
            waiting.cell.ring_control()
        if layer in MOE_LAYERS:
            waiting.run(layer)
        num_taken.append(sum(bool(logged[i].any()) for i in range(5)))
    assert num_taken == [0, 2, 2, 2, 5]
    owner.writer.finish()
    assert owner.log.count_intact([0], 3, chains([1, 2, 3])) == 3
