"""What touches KV in device memory: checksums and words of a step's rows, and KV that comes from other logs.

A program has one token: it goes through all its pieces, which lie at equal distances in a block,

    piece q of a slot  =  block + q * block_size * piece + slot * piece         q = layer * num_planes + plane

keeps a sum per thread, adds these up once, and writes the token's word. All memory is given by address, because it
has other owners: the pool, a log in host memory that the device can reach, blocks in another worker's device memory.

The words are those of csrc/hash.h, bit for bit.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from everserve.kvlog.layout import LogShape

NUM_PROGRAMS = 264  # of `log_rows`: two per multiprocessor; more rows than that are done one after the other
_WORDS_AT_ONCE = 1024
_TOKENS_AT_ONCE = 8192  # of `bring` and `check`: short kernels: other workers may wait for them if we die

_ODD = tl.constexpr(0x9FB21C651E98DF25)
_MIX = tl.constexpr(0xBF58476D1CE4E5B9)
_SCRAMBLE = tl.constexpr(0x94D049BB133111EB)


@dataclass(frozen=True)
class _Cut:
    """How a token's pieces are walked over."""

    num_pieces: int
    piece_words: int
    block_size: int
    pieces_at_once: int
    piece_lanes: int  # a power of two

    @classmethod
    def of(cls, shape: LogShape) -> "_Cut":
        assert shape.piece_bytes % 8 == 0, "a piece is a whole number of words"
        num_pieces, piece_words = shape.num_layers * shape.num_planes, shape.piece_bytes // 8
        lanes = triton.next_power_of_2(piece_words)
        at_once = min(max(_WORDS_AT_ONCE // lanes, 1), triton.next_power_of_2(num_pieces))
        return cls(num_pieces, piece_words, shape.block_size, at_once, lanes)


def log_rows(
    shape: LogShape,
    pool: int,
    mirror: int,
    words: int,
    count: int,
    slots_T: int,
    chains_T: int,
    first: int,
    end: int,
) -> None:
    """Write the words of a step's rows from `first` to `end`, and their KV into the mirror (0: there is none).

    All others are addresses: `count` of one int32, how many rows there are; slots_T int32, -1: this row is not logged;
    chains_T uint64. These are read when the device gets there, so that a captured launch serves all steps.
    """
    cut = _Cut.of(shape)
    _log_rows[(NUM_PROGRAMS,)](
        pool, mirror, words, count, slots_T, chains_T, first, end,
        HAS_MIRROR=mirror != 0, PIECES=cut.num_pieces, WORDS=cut.piece_words, BLOCK_SIZE=cut.block_size,
        AT_ONCE=cut.pieces_at_once, LANES=cut.piece_lanes, num_warps=4,
    )  # fmt: skip


def bring(
    shape: LogShape,
    source: int,
    source_blocks_B: int,
    source_words_T: int,
    chains_T: int,
    num_tokens: int,
    pool: int,
    mirror: int,
    words: int,
    blocks_B: int,
    reach: int,
    right_T: int,
) -> None:
    """Tokens from blocks at the address `source` into the pool, and into the mirror (0: there is none).

    What is checked is what has arrived. right_T (int32) gets 1 for each token that is right; these have their words in
    our log. Of that log only the first `reach` blocks are touched.
    """
    cut = _Cut.of(shape)
    for first in range(0, num_tokens, _TOKENS_AT_ONCE):
        _bring[(min(num_tokens - first, _TOKENS_AT_ONCE),)](
            source, source_blocks_B, source_words_T, chains_T, pool, mirror, words, blocks_B, reach, right_T, first,
            COPIES=True, HAS_MIRROR=mirror != 0, PIECES=cut.num_pieces, WORDS=cut.piece_words,
            BLOCK_SIZE=cut.block_size, AT_ONCE=cut.pieces_at_once, LANES=cut.piece_lanes, num_warps=4,
        )  # fmt: skip


def check(
    shape: LogShape, pool: int, blocks_B: int, words_T: int, chains_T: int, num_tokens: int, right_T: int
) -> None:
    """Check tokens where they lie: `bring` without a copy."""
    cut = _Cut.of(shape)
    for first in range(0, num_tokens, _TOKENS_AT_ONCE):
        _bring[(min(num_tokens - first, _TOKENS_AT_ONCE),)](
            pool, blocks_B, words_T, chains_T, pool, 0, words_T, blocks_B, 0, right_T, first,
            COPIES=False, HAS_MIRROR=False, PIECES=cut.num_pieces, WORDS=cut.piece_words,
            BLOCK_SIZE=cut.block_size, AT_ONCE=cut.pieces_at_once, LANES=cut.piece_lanes, num_warps=4,
        )  # fmt: skip


@triton.jit(do_not_specialize=["mirror", "first_row", "end_row"])
def _log_rows(
    pool, mirror, words, count, slots_T, chains_T, first_row, end_row,
    HAS_MIRROR: tl.constexpr, PIECES: tl.constexpr, WORDS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    AT_ONCE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    end = tl.minimum(tl.load(count.to(tl.pointer_type(tl.int32))), end_row)
    for row in range(first_row + tl.program_id(0), end, tl.num_programs(0)):
        slot = tl.load(slots_T.to(tl.pointer_type(tl.int32)) + row).to(tl.int64)
        if slot >= 0:
            chain = tl.load(chains_T.to(tl.pointer_type(tl.uint64)) + row)
            at = _first_word(slot, PIECES, WORDS, BLOCK_SIZE)
            total = tl.zeros([AT_ONCE, LANES], tl.uint64)
            for first in range(0, PIECES, AT_ONCE):
                at_QW, mask_QW = _tile(at, first, PIECES, WORDS, BLOCK_SIZE, AT_ONCE, LANES)
                kv_QW = tl.load(pool.to(tl.pointer_type(tl.uint64)) + at_QW, mask=mask_QW, other=0)
                if HAS_MIRROR:
                    tl.store(mirror.to(tl.pointer_type(tl.uint64)) + at_QW, kv_QW, mask=mask_QW)
                total += tl.where(mask_QW, _mixed(kv_QW, first, WORDS, AT_ONCE, LANES), 0)
            tl.store(words.to(tl.pointer_type(tl.uint64)) + slot, word_of(tl.sum(tl.sum(total, 1), 0), chain))


@triton.jit(do_not_specialize=["mirror", "reach", "first_token"])
def _bring(
    source, source_blocks_B, source_words_T, chains_T, pool, mirror, words, blocks_B, reach, right_T, first_token,
    COPIES: tl.constexpr, HAS_MIRROR: tl.constexpr, PIECES: tl.constexpr, WORDS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, AT_ONCE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    token = first_token + tl.program_id(0)
    block, slot = token // BLOCK_SIZE, token % BLOCK_SIZE
    source_block = tl.load(source_blocks_B.to(tl.pointer_type(tl.int32)) + block).to(tl.int64)
    target_block = tl.load(blocks_B.to(tl.pointer_type(tl.int32)) + block).to(tl.int64)
    source_slot, target_slot = source_block * BLOCK_SIZE + slot, target_block * BLOCK_SIZE + slot
    word = tl.load(source_words_T.to(tl.pointer_type(tl.uint64)) + token)
    chain = tl.load(chains_T.to(tl.pointer_type(tl.uint64)) + token)
    source_at = _first_word(source_slot, PIECES, WORDS, BLOCK_SIZE)
    target_at = _first_word(target_slot, PIECES, WORDS, BLOCK_SIZE)
    total = tl.zeros([AT_ONCE, LANES], tl.uint64)
    for first in range(0, PIECES, AT_ONCE):
        at_QW, mask_QW = _tile(0, first, PIECES, WORDS, BLOCK_SIZE, AT_ONCE, LANES)
        kv_QW = tl.load(source.to(tl.pointer_type(tl.uint64)) + source_at + at_QW, mask=mask_QW, other=0)
        if COPIES:
            tl.store(pool.to(tl.pointer_type(tl.uint64)) + target_at + at_QW, kv_QW, mask=mask_QW)
        if HAS_MIRROR:
            mirrored_QW = mask_QW & (target_block < reach)
            tl.store(mirror.to(tl.pointer_type(tl.uint64)) + target_at + at_QW, kv_QW, mask=mirrored_QW)
        total += tl.where(mask_QW, _mixed(kv_QW, first, WORDS, AT_ONCE, LANES), 0)
    is_right = word == word_of(tl.sum(tl.sum(total, 1), 0), chain)
    if COPIES:
        tl.store(words.to(tl.pointer_type(tl.uint64)) + target_slot, word, mask=is_right & (target_block < reach))
    tl.store(right_T.to(tl.pointer_type(tl.int32)) + token, is_right.to(tl.int32))


@triton.jit
def _first_word(slot, PIECES: tl.constexpr, WORDS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """The word of a slot's first piece, counted from the first block."""
    return slot // BLOCK_SIZE * (PIECES * BLOCK_SIZE * WORDS) + slot % BLOCK_SIZE * WORDS


@triton.jit
def _tile(
    at, first, PIECES: tl.constexpr, WORDS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    AT_ONCE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Where the words of some pieces are, from the one with number `first` on, and which of them there are."""
    piece, word = first + tl.arange(0, AT_ONCE)[:, None], tl.arange(0, LANES)[None, :]
    return at + piece * (BLOCK_SIZE * WORDS) + word, (piece < PIECES) & (word < WORDS)


@triton.jit
def _mixed(kv_QW, first, WORDS: tl.constexpr, AT_ONCE: tl.constexpr, LANES: tl.constexpr):
    """Each word with its number: what a token's checksum is the sum of."""
    return mixed_with(kv_QW, (first + tl.arange(0, AT_ONCE)[:, None]) * WORDS + tl.arange(0, LANES)[None, :])


@triton.jit
def mixed_with(kv, number):
    """What words with these numbers, from 0 on, add to a checksum."""
    x = kv ^ (number + 1).to(tl.uint64) * _ODD
    x = (x ^ (x >> 32)) * _MIX
    return x ^ ((x << 25) | (x >> 39)) ^ ((x << 47) | (x >> 17))


@triton.jit
def scramble(x):
    x = (x ^ (x >> 30)) * _MIX
    x = (x ^ (x >> 27)) * _SCRAMBLE
    return x ^ (x >> 31)


@triton.jit
def word_of(checksum, chain):
    word = scramble(checksum ^ scramble(chain))
    return tl.where(word == 0, 1, word)
