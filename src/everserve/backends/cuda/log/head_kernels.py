"""What touches the KV of divided heads in a home's stead: words of a step's rows, and tokens that are fetched.

The heads of a model are in the memory of several expert seats (plan/head_memory.py), all of which the home's device
reaches. So for each head there is an address: of what block 0 has of its piece, and of the words of that.

    keys of a token    =  address + block * stride + slot * row                 row = E elements
    values of a token  =  the same, block_size * row further
    its word           =  address of words + block * stride of words + slot * 8

The word is the checksum of both, mixed with the head's (layer, number) and the token's chain.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from everserve.backends.cuda.log.kernels import mixed_with, scramble, word_of

NUM_PROGRAMS = 264  # of `sign`: two per multiprocessor
_HEADS_AT_ONCE = 8
_WORD_BYTES = 8


@dataclass(frozen=True)
class Rows:
    """What a head's part of a block is like."""

    block_size: int
    row_bytes: int  # keys of one token, or its values

    def __post_init__(self) -> None:
        assert self.row_bytes % _WORD_BYTES == 0, "a row is a whole number of words"

    @property
    def sizes(self) -> dict[str, int]:
        num_words = self.row_bytes // _WORD_BYTES
        return {"BLOCK_SIZE": self.block_size, "WORDS": num_words, "LANES": triton.next_power_of_2(num_words)}


@dataclass(frozen=True)
class Places:
    """Where heads are, or should be: addresses of arrays. A head whose address is 0 is nowhere."""

    kv_H: int  # int64
    words_H: int  # int64
    strides: int  # two int64, in bytes: of KV and of words


def sign(
    rows: Rows, places: Places, mirror: Places | None, owners_H: int, num_heads: int, count: int, slots_T: int,
    mirror_slots_T: int, chains_T: int, first: int, end: int,
) -> None:  # fmt: skip
    """Write the words of a step's rows from `first` to `end`, where their KV is; both into the mirror, if there is one.

    All but numbers are addresses, as in `kernels.log_rows`: owners_H int64; slots_T int32, -1: not this row;
    mirror_slots_T likewise, for the mirror.
    """
    copy = mirror or places
    _sign[(NUM_PROGRAMS,)](
        places.kv_H, places.words_H, places.strides, copy.kv_H, copy.words_H, copy.strides, owners_H, num_heads,
        count, slots_T, mirror_slots_T, chains_T, first, end,
        HAS_MIRROR=mirror is not None, AT_ONCE=_HEADS_AT_ONCE, **rows.sizes, num_warps=4,
    )  # fmt: skip


def fetch(
    rows: Rows, sources: Places, num_sources: int, source_blocks: int, targets: Places, blocks_B: int,
    mirror: Places | None, mirror_blocks_B: int, owners_H: int, num_heads: int, chains_T: int, num_tokens: int,
    num_listed: int, right_T: int, num_copied: int, first_block: int, num_blocks: int,
) -> None:  # fmt: skip
    """Have tokens of a stream, from the one in block number `first_block` of its list on, in the blocks of blocks_B
    where heads are; and in the mirror, if there is one.

    `sources`: of each source the addresses of all heads, and its strides, one source after the other; source_blocks:
    likewise the blocks, `num_listed` for each, -1 where it does not have one. The first that fits is taken. right_T
    (int32) gets 0 for each token that is not right in all heads, `num_copied` (one int64) grows by the rows that were
    copied. What is compared is what was read, which is what is stored.
    """
    copy = mirror or targets
    _fetch[(num_blocks, num_heads)](
        sources.kv_H, sources.words_H, sources.strides, num_sources, source_blocks,
        targets.kv_H, targets.words_H, targets.strides, blocks_B,
        copy.kv_H, copy.words_H, copy.strides, mirror_blocks_B,
        owners_H, num_heads, chains_T, num_tokens, num_listed, right_T, num_copied, first_block,
        HAS_MIRROR=mirror is not None, SLOTS=triton.next_power_of_2(rows.block_size), **rows.sizes, num_warps=4,
    )  # fmt: skip


@triton.jit
def _int64s(address):
    return address.to(tl.pointer_type(tl.int64))


@triton.jit
def _int32s(address):
    return address.to(tl.pointer_type(tl.int32))


@triton.jit
def _words(address):
    return address.to(tl.pointer_type(tl.uint64))


@triton.jit
def _checksum(keys, values, mask, word, WORDS: tl.constexpr):
    """The checksum of each line."""
    total = mixed_with(keys, word) + mixed_with(values, word + WORDS)
    return tl.sum(tl.where(mask, total, 0), 1)


@triton.jit(do_not_specialize=["num_heads", "first_row", "end_row"])
def _sign(
    kv_H, words_H, strides, mirror_kv_H, mirror_words_H, mirror_strides, owners_H, num_heads,
    count, slots_T, mirror_slots_T, chains_T, first_row, end_row,
    HAS_MIRROR: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK_SIZE: tl.constexpr, WORDS: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Some heads of one row at a time."""
    num_rows = tl.minimum(tl.load(_int32s(count)), end_row) - first_row
    num_chunks = (num_heads + AT_ONCE - 1) // AT_ONCE
    word = tl.arange(0, LANES)[None, :]
    for unit in range(tl.program_id(0), num_rows * num_chunks, tl.num_programs(0)):
        row = first_row + unit // num_chunks
        slot = tl.load(_int32s(slots_T) + row).to(tl.int64)
        if slot >= 0:
            head = unit % num_chunks * AT_ONCE + tl.arange(0, AT_ONCE)
            is_head = head < num_heads
            kv = tl.load(_int64s(kv_H) + head, mask=is_head, other=0)
            is_there = is_head & (kv != 0)
            block, within = slot // BLOCK_SIZE, slot % BLOCK_SIZE
            at = (kv + block * tl.load(_int64s(strides)) + within * (WORDS * 8))[:, None] + word * 8
            mask = is_there[:, None] & (word < WORDS)
            keys = tl.load(_words(at), mask=mask, other=0)
            values = tl.load(_words(at + BLOCK_SIZE * WORDS * 8), mask=mask, other=0)
            owner = tl.load(_words(owners_H) + head, mask=is_head, other=0)
            chain = tl.load(_words(chains_T) + row)
            found = word_of(_checksum(keys, values, mask, word, WORDS), chain ^ scramble(owner))
            words = tl.load(_int64s(words_H) + head, mask=is_head, other=0)
            tl.store(_words(words + block * tl.load(_int64s(strides) + 1) + within * 8), found, mask=is_there)
            if HAS_MIRROR:
                copy = tl.load(_int32s(mirror_slots_T) + row).to(tl.int64)
                is_copied = is_there & (copy >= 0)
                block, within = copy // BLOCK_SIZE, copy % BLOCK_SIZE
                kv = tl.load(_int64s(mirror_kv_H) + head, mask=is_head, other=0)
                at = (kv + block * tl.load(_int64s(mirror_strides)) + within * (WORDS * 8))[:, None] + word * 8
                mask = is_copied[:, None] & (word < WORDS)
                tl.store(_words(at), keys, mask=mask)
                tl.store(_words(at + BLOCK_SIZE * WORDS * 8), values, mask=mask)
                words = tl.load(_int64s(mirror_words_H) + head, mask=is_head, other=0)
                words += block * tl.load(_int64s(mirror_strides) + 1) + within * 8
                tl.store(_words(words), found, mask=is_copied)


@triton.jit
def _store(
    kv, words, strides, block, slot, word, keys, values, found, is_stored, BLOCK_SIZE: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """Rows of one head, and their words, in this block."""
    at = (kv + block * tl.load(_int64s(strides)) + slot * (WORDS * 8))[:, None] + word * 8
    mask = is_stored[:, None] & (word < WORDS)
    tl.store(_words(at), keys, mask=mask)
    tl.store(_words(at + BLOCK_SIZE * WORDS * 8), values, mask=mask)
    tl.store(_words(words + block * tl.load(_int64s(strides) + 1) + slot * 8), found, mask=is_stored)


@triton.jit(do_not_specialize=["num_sources", "num_heads", "num_tokens", "num_listed", "first_block"])
def _fetch(
    source_kv_CH, source_words_CH, source_strides_C2, num_sources, source_blocks_CB,
    target_kv_H, target_words_H, target_strides, blocks_B,
    mirror_kv_H, mirror_words_H, mirror_strides, mirror_blocks_B,
    owners_H, num_heads, chains_T, num_tokens, num_listed, right_T, num_copied, first_block,
    HAS_MIRROR: tl.constexpr, SLOTS: tl.constexpr, BLOCK_SIZE: tl.constexpr, WORDS: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """One head of one block."""
    index, head = first_block + tl.program_id(0), tl.program_id(1)
    slot, word = tl.arange(0, SLOTS).to(tl.int64), tl.arange(0, LANES)[None, :].to(tl.int64)
    token = index * BLOCK_SIZE + slot
    is_wanted = (slot < BLOCK_SIZE) & (token < num_tokens)
    chain = tl.load(_words(chains_T) + token, mask=is_wanted, other=0)
    key = chain ^ scramble(tl.load(_words(owners_H) + head))
    target, block = tl.load(_int64s(target_kv_H) + head), tl.load(_int32s(blocks_B) + index).to(tl.int64)
    target_words = tl.load(_int64s(target_words_H) + head)
    is_left = is_wanted
    for source in range(num_sources):
        kv = tl.load(_int64s(source_kv_CH) + source * num_heads + head)
        there = tl.load(_int32s(source_blocks_CB) + source * num_listed + index).to(tl.int64)
        if (kv != 0) & (there >= 0) & (tl.sum(is_left.to(tl.int32)) > 0):
            strides = source_strides_C2 + source * 16
            mask = is_left[:, None] & (word < WORDS)
            at = (kv + there * tl.load(_int64s(strides)) + slot * (WORDS * 8))[:, None] + word * 8
            keys = tl.load(_words(at), mask=mask, other=0)
            values = tl.load(_words(at + BLOCK_SIZE * WORDS * 8), mask=mask, other=0)
            words = tl.load(_int64s(source_words_CH) + source * num_heads + head)
            words += there * tl.load(_int64s(strides) + 1)
            said = tl.load(_words(words + slot * 8), mask=is_left, other=0)
            fits = is_left & (said == word_of(_checksum(keys, values, mask, word, WORDS), key))
            if (kv != target) | (there != block):
                _store(target, target_words, target_strides, block, slot, word, keys, values, said, fits,
                       BLOCK_SIZE, WORDS)  # fmt: skip
                num_fitting = tl.sum(fits.to(tl.int64))
                tl.atomic_add(_int64s(num_copied), num_fitting, mask=num_fitting > 0, sem="relaxed")
            if HAS_MIRROR:
                copy = tl.load(_int32s(mirror_blocks_B) + index).to(tl.int64)
                mirror = tl.load(_int64s(mirror_kv_H) + head)
                is_copied = fits & (copy >= 0) & ((kv != mirror) | (there != copy))
                _store(mirror, tl.load(_int64s(mirror_words_H) + head), mirror_strides, copy, slot, word, keys,
                       values, said, is_copied, BLOCK_SIZE, WORDS)  # fmt: skip
            is_left &= fits == 0
    tl.store(_int32s(right_T) + token, tl.zeros((SLOTS,), tl.int32), mask=is_left)
