"""Rows sorted by slot, and cut into tiles: where each (t, k) row goes, and what the products are to compute.

Few rows, as of a step that decodes: one kernel. A program for each slot looks at all rows twice, to count them and to
place its own; it counts the other slots' too, which is faster than waiting for their programs.

Many rows would be read by every program for too long. So they are cut into chunks:

    count   a program for each chunk             its rows of each slot: counts_CS
    begin   a program for each slot              where its rows of each chunk begin: first_CS; its tiles
    place   a program for each chunk and slot    its rows

Either way the rows of a slot keep their order.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from everserve.backends.cuda.ops.pdl import early, is_stopped

_MAX_CHUNK = 2048  # rows that one program looks at together
_MANY = 4 * _MAX_CHUNK  # from here on in chunks
_MOST_CHUNKS = 64


class Sorted(NamedTuple):
    """What is written: `pos_TK`, `src_R` as in experts.LocalPlan, the rest as in experts.Tiles."""

    pos_TK: Tensor
    src_R: Tensor
    slot_M: Tensor
    row_M: Tensor
    size_M: Tensor
    num_tiles: Tensor


def sort_by_slot(ids_TK: Tensor, slot_of_N: Tensor, num_slots: int, tile_rows: int, into: Sorted, stop: Tensor) -> None:
    """Rows with the id -1 go nowhere."""
    num_rows, device = ids_TK.numel(), ids_TK.device
    chunk = chunk_of(num_rows)
    sizes = {"S": num_slots, "SB": triton.next_power_of_2(num_slots)}
    if num_rows < _MANY:
        _sort[(num_slots + 1,)](
            ids_TK, slot_of_N, *into, stop, num_rows,
            K=ids_TK.shape[1], **sizes, BM=tile_rows, CHUNK=chunk, **early(device), num_warps=4,
        )  # fmt: skip
        return
    num_chunks = triton.cdiv(num_rows, chunk)
    counts_CS, first_CS = torch.empty(2, num_chunks, sizes["SB"], dtype=torch.int32, device=device)
    _count[(num_chunks,)](
        ids_TK, slot_of_N, counts_CS, stop, num_rows, SB=sizes["SB"], CHUNK=chunk, **early(device), num_warps=4
    )
    _begin[(num_slots + 1,)](
        counts_CS, first_CS, *into[2:], stop, num_chunks,
        **sizes, BM=tile_rows, CB=triton.next_power_of_2(num_chunks), **early(device), num_warps=4,
    )  # fmt: skip
    _place[(num_slots + 1, num_chunks)](
        ids_TK, slot_of_N, first_CS, into.pos_TK, into.src_R, stop, num_rows,
        K=ids_TK.shape[1], **sizes, CHUNK=chunk, **early(device), num_warps=4,
    )  # fmt: skip


def chunk_of(num_rows: int) -> int:
    """How many (t, k) rows a program looks at together: at least one for each of its threads."""
    size: int = triton.next_power_of_2(num_rows)
    return max(128, min(size, _MAX_CHUNK), size // _MOST_CHUNKS)


@triton.jit
def write_tiles(slot_M, row_M, size_M, slot, first_tile, first_row, num_rows, BM):
    """One slot's rows as tiles."""
    for start in range(0, (num_rows + BM - 1) // BM, 32):
        i = start + tl.arange(0, 32)
        left = num_rows - i * BM
        tl.store(slot_M + first_tile + i, tl.zeros((32,), tl.int32) + slot, mask=left > 0)
        tl.store(row_M + first_tile + i, first_row + i * BM, mask=left > 0)
        tl.store(size_M + first_tile + i, tl.minimum(left, BM), mask=left > 0)


@triton.jit
def _slots_of(ids, slot_of, r, num_rows):
    """The slots of some rows; -1 for those that go nowhere."""
    ids_R = tl.load(ids + r, mask=r < num_rows, other=-1)
    return tl.load(slot_of + ids_R, mask=ids_R >= 0, other=-1)


@triton.jit(do_not_specialize=["num_rows"])
def _sort(
    ids, slot_of, pos, src, slot_M, row_M, size_M, num_tiles, stop, num_rows,
    K: tl.constexpr, S: tl.constexpr, SB: tl.constexpr, BM: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program per slot, and one for the rows that go nowhere. Each counts all slots by itself: that is faster than
    waiting for other programs."""
    if is_stopped(stop, EARLY):
        return
    slot = tl.program_id(0)
    counts_S = tl.zeros((SB,), tl.int32)
    for start in range(0, num_rows, CHUNK):
        slots_R = _slots_of(ids, slot_of, start + tl.arange(0, CHUNK), num_rows)
        counts_S += tl.histogram(slots_R, SB, mask=slots_R >= 0)

    slots_S = tl.arange(0, SB)
    tiles_S = (counts_S + BM - 1) // BM
    first_row = tl.sum(tl.where(slots_S < slot, counts_S, 0))
    first_tile = tl.sum(tl.where(slots_S < slot, tiles_S, 0))
    count = tl.sum(tl.where(slots_S == slot, counts_S, 0))
    write_tiles(slot_M, row_M, size_M, slot, first_tile, first_row, count, BM)
    is_nowhere = slot == S
    if is_nowhere:
        tl.store(num_tiles, first_tile)

    wanted = tl.where(is_nowhere, -1, slot)
    next_row = first_row
    for start in range(0, num_rows, CHUNK):
        r = start + tl.arange(0, CHUNK)
        is_own = (_slots_of(ids, slot_of, r, num_rows) == wanted) & (r < num_rows)
        row = next_row + tl.cumsum(is_own.to(tl.int32), 0) - 1
        tl.store(pos + r, tl.where(is_nowhere, -1, row), mask=is_own)
        tl.store(src + row, r // K, mask=is_own & (slot < S))
        next_row += tl.sum(is_own.to(tl.int32))


@triton.jit(do_not_specialize=["num_rows"])
def _count(
    ids, slot_of, counts, stop, num_rows, SB: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    if is_stopped(stop, EARLY):
        return
    chunk = tl.program_id(0)
    slots_R = _slots_of(ids, slot_of, chunk * CHUNK + tl.arange(0, CHUNK), num_rows)
    tl.store(counts + chunk * SB + tl.arange(0, SB), tl.histogram(slots_R, SB, mask=slots_R >= 0))


@triton.jit(do_not_specialize=["num_chunks"])
def _begin(
    counts, first, slot_M, row_M, size_M, num_tiles, stop, num_chunks,
    S: tl.constexpr, SB: tl.constexpr, BM: tl.constexpr, CB: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The last program, of a slot that is none, knows how many tiles all slots have."""
    if is_stopped(stop, EARLY):
        return
    slot = tl.program_id(0)
    chunks_C, slots_S = tl.arange(0, CB), tl.arange(0, SB)
    at_CS = chunks_C[:, None] * SB + slots_S[None, :]
    counts_CS = tl.load(counts + at_CS, mask=(chunks_C < num_chunks)[:, None], other=0)
    counts_S = tl.sum(counts_CS, 0)
    first_row = tl.sum(tl.where(slots_S < slot, counts_S, 0))
    first_tile = tl.sum(tl.where(slots_S < slot, (counts_S + BM - 1) // BM, 0))
    if slot == S:
        tl.store(num_tiles, first_tile)
    else:
        own_C = tl.sum(tl.where(slots_S[None, :] == slot, counts_CS, 0), 1)
        tl.store(first + chunks_C * SB + slot, first_row + tl.cumsum(own_C, 0) - own_C, mask=chunks_C < num_chunks)
        write_tiles(slot_M, row_M, size_M, slot, first_tile, first_row, tl.sum(own_C), BM)


@triton.jit(do_not_specialize=["num_rows"])
def _place(
    ids, slot_of, first, pos, src, stop, num_rows,
    K: tl.constexpr, S: tl.constexpr, SB: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if is_stopped(stop, EARLY):
        return
    slot, chunk = tl.program_id(0), tl.program_id(1)
    r = chunk * CHUNK + tl.arange(0, CHUNK)
    slots_R = _slots_of(ids, slot_of, r, num_rows)
    if slot == S:
        tl.store(pos + r, tl.zeros((CHUNK,), tl.int32) - 1, mask=(slots_R < 0) & (r < num_rows))
    else:
        is_own = slots_R == slot
        row = tl.load(first + chunk * SB + slot) + tl.cumsum(is_own.to(tl.int32), 0) - 1
        tl.store(pos + r, row, mask=is_own)
        tl.store(src + row, r // K, mask=is_own)
