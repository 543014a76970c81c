"""The log's kernels do what the C functions do: the same words, the same copies, the same judgement."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from everserve.backends.cuda.log import kernels
from everserve.kvlog.chains import chains
from everserve.kvlog.log import Log
from tests.support.logs import SHAPE as ODD_SHAPE
from tests.support.logs import Owner, Stream, as_pool, kv_of, new_log

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the host's memory is not the device's")

SHAPE = replace(ODD_SHAPE, piece_bytes=32)
shapes = pytest.mark.parametrize(
    "shape",
    [
        SHAPE,
        replace(SHAPE, piece_bytes=24, num_layers=1),
        replace(SHAPE, piece_bytes=256, num_planes=8, num_layers=5),
        replace(SHAPE, piece_bytes=8, num_planes=3, block_size=1, num_blocks=30, max_blocks=30),
    ],
    ids=str,
)


def words_of(log: Log) -> np.ndarray:
    at, num_slots = log.layout.words_at, log.shape.num_blocks * log.shape.block_size
    memory = (np.ctypeslib.ctypes.c_char * log.shape.num_bytes).from_address(log.layout.base)
    return np.frombuffer(memory, np.uint64, num_slots, at)


def words_address(log: Log) -> int:
    return log.layout.base + log.layout.words_at


@shapes
@pytest.mark.parametrize("has_mirror", [False, True])
def test_rows_are_logged_as_c_does(shape, has_mirror):
    """All rows of a step at once, of several streams, within blocks and over their ends; -1: somebody else's."""
    owner, log = Owner(new_log(shape), in_log=False), new_log(shape)
    owner.streams = {"a": Stream(0), "b": Stream(1)}
    owner.free = [*range(1, shape.num_blocks, 2), *range(0, shape.num_blocks, 2)]
    tokens = {"a": [1, 2, 3, 4, 5, 6], "b": [9, 8, 7]}
    slots_T, _ = owner.begin(tokens)
    owner.writer.abandon()
    for stream in owner.streams.values():
        stream.blocks.clear()
    owner.free = [*range(1, shape.num_blocks, 2), *range(0, shape.num_blocks, 2)]
    owner.step(tokens)
    slots_T = np.insert(slots_T, 3, -1)
    chains_T = np.insert(np.concatenate([chains(tokens["a"]), chains(tokens["b"])]), 3, 0)
    count = np.array([len(slots_T)], np.int32)
    for first in (0, 7):
        kernels.log_rows(
            shape, owner.pool.ctypes.data, log.blocks_address if has_mirror else 0, words_address(log),
            count.ctypes.data, slots_T.ctypes.data, chains_T.ctypes.data, first, first + 7,
        )  # fmt: skip
    assert np.count_nonzero(words_of(log)) == 9
    assert np.array_equal(words_of(log), words_of(owner.log))
    assert bytes(log.blocks) == (bytes(owner.log.blocks) if has_mirror else bytes(len(log.blocks)))


def test_no_rows():
    log, zero = new_log(SHAPE), np.zeros(1, np.uint64)
    kernels.log_rows(SHAPE, log.blocks_address, 0, words_address(log), *[zero.ctypes.data] * 3, 0, 8)
    assert not words_of(log).any()


@shapes
@pytest.mark.parametrize("has_mirror", [False, True])
@pytest.mark.parametrize("broken", [None, 0, 4, 5])
def test_what_is_brought_is_checked(shape, has_mirror, broken):
    """A wrong token, or one that belongs to another stream, is told; all others are in the pool and in our log."""
    owner, log = Owner(new_log(shape), in_log=False), new_log(shape)
    owner.streams["a"] = Stream(0)
    owner.free = [7, 2, 9, *range(10, shape.num_blocks), 0, 1, 3]
    tokens, size = [5, 4, 3, 2, 1, 0], shape.block_size
    owner.step({"a": tokens})
    sources = np.array(owner.streams["a"].blocks, np.int32)
    blocks = (sources + 1) % shape.num_blocks
    if broken is not None:
        as_pool(owner.log.blocks, shape)[sources[broken // size], 0, 1, broken % size, 7] ^= 128
    chains_T = chains(tokens)
    chains_T[3] ^= np.uint64(1 << 63)
    words_T = owner.log.words(sources.tolist(), len(tokens))
    pool, right_T = np.zeros(len(log.blocks), np.uint8), np.full(len(tokens), 7, np.int32)
    kernels.bring(
        shape, owner.log.blocks_address, sources.ctypes.data, words_T.ctypes.data, chains_T.ctypes.data, len(tokens),
        pool.ctypes.data, log.blocks_address if has_mirror else 0, words_address(log), blocks.ctypes.data,
        shape.num_blocks, right_T.ctypes.data,
    )  # fmt: skip
    expected = [int(i not in (3, broken)) for i in range(len(tokens))]
    assert right_T.tolist() == expected
    slots = blocks[np.arange(len(tokens)) // size] * size + np.arange(len(tokens)) % size
    assert words_of(log)[slots].tolist() == np.where(expected, words_T, np.uint64(0)).tolist()
    for place in (pool, log.blocks) if has_mirror else (pool,):
        for i in np.flatnonzero(expected):
            found = as_pool(place, shape)[blocks[i // size], :, :, i % size]
            assert np.array_equal(found, kv_of(chains(tokens), shape)[i])
    if not has_mirror:
        assert not any(log.blocks)
    kernels.check(
        shape, owner.log.blocks_address, sources.ctypes.data, words_T.ctypes.data, chains_T.ctypes.data, len(tokens),
        right_T.ctypes.data,
    )  # fmt: skip
    assert right_T.tolist() == expected
