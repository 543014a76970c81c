"""Attention over the paged KV pool, a row's bits the same in prefill and decode.

The host has cut the work into items (backends/cuda/device_batch.py); a program takes one item and one KV head at a
time, and stacks the queries that share its keys:

    rows of the item x query heads of the KV head = M query rows, padded to BM        m = row * GROUP + head

Keys are walked in tiles at fixed positions, tiles in segments of SEGMENT keys. A segment begins with nothing, ends as

    best     the highest score
    total    the sum of 2 ** (score - best)
    sum      the values, weighted by these

and segments are folded together in ascending order by `fold`. An item that covers all segments of its rows does that
itself. A decoding row may be cut into one item per segment; these leave the three in the workspace, and `_merge` folds
them in the same order. Scores are counted in powers of two, which the device knows, instead of e.

Windows and chunks: tiles in front of the first key that any row of the item sees are not walked, and a tile that shows
a row nothing changes nothing of it. Sinks are a part of the total that no value belongs to. Heads whose size is not a
power of two are padded with zeros.

Within a tile, too, nothing depends on BM: products go through tensor cores, which add in one order whatever the tile's
shape. So do the totals (weights times a matrix of ones): a sum across threads would be taken in the order of a layout.
"""

import math
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from everserve.backends.cuda.device_batch import LARGE, SEGMENT, SMALL, DeviceBatch, Items
from everserve.backends.cuda.ops.pdl import early, is_stopped
from everserve.backends.cuda.ops.rows import tanh
from everserve.model.ops import Scores

MANY_ROWS = 512  # more are prompts, nearly all: few rows are split
MAX_PROGRAMS = 1056  # eight per SM: more than run at once, so that long and short items even out


class Launch(NamedTuple):
    """How programs run: none of it changes a bit."""

    num_stages: int  # about half of them are tiles on their way, the other half lines of the block table
    num_warps: int
    max_registers: int  # a thread; so that three programs fit on an SM, or two


SMALL_LAUNCH, LARGE_LAUNCH = Launch(5, 4, 168), Launch(3, 4, 255)
LOWEST = tl.constexpr(-1e30)  # what a segment's best begins with; finite, as differences are taken of it


class Workspace:
    """What split items leave for `_merge`, by row and segment: only the first `max_rows` rows may be split."""

    def __init__(self, max_rows: int, max_segments: int, num_heads: int, head_size: int, device: torch.device) -> None:
        empty = partial(torch.empty, dtype=torch.float32, device=device)
        self.best_TSH = empty(max_rows, max_segments, num_heads)
        self.total_TSH = empty(max_rows, max_segments, num_heads)
        self.sum_TSHE = empty(max_rows, max_segments, num_heads, head_size)


def attend(
    q_THE: Tensor, batch: DeviceBatch, kv_pool: Tensor, layer: int, scores: Scores, workspace: Workspace, stop: Tensor
) -> Tensor:
    """[T, H * E] bfloat16. A row that is split has one item for each of its segments. Padding rows give 0."""
    num_rows, num_heads, head_size = q_THE.shape
    num_layers, _, num_kv_heads, block_size = kv_pool.shape[1:5]
    assert q_THE.dtype is kv_pool.dtype is torch.bfloat16 and q_THE.is_contiguous() and kv_pool.is_contiguous()
    group, padded = num_heads // num_kv_heads, triton.next_power_of_2(head_size)
    assert scores.sinks_H is None or scores.sinks_H.dtype is torch.float32
    # Scores are counted in powers of two; those that are capped, from the cap on.
    scale = scores.scale / scores.softcap if scores.softcap else scores.scale * math.log2(math.e)
    out_TX = torch.empty(num_rows, num_heads * head_size, dtype=torch.bfloat16, device=q_THE.device)
    is_split_T = torch.empty(num_rows, dtype=torch.int32, device=q_THE.device)
    parts = (workspace.best_TSH, workspace.total_TSH, workspace.sum_TSHE)
    max_segments = workspace.best_TSH.shape[1]

    def run(items: Items, BM: int, launch: Launch) -> None:
        _attend[(min(len(items.items_W4) * num_kv_heads, MAX_PROGRAMS),)](
            q_THE, batch.positions_T, batch.row_seqs_T, batch.block_tables_SB, items.items_W4, items.num_items,
            kv_pool, layer, scale, out_TX, is_split_T, *parts, scores.sinks_H, stop,
            batch.block_tables_SB.shape[1], max_segments,
            L=num_layers, G=num_kv_heads, GROUP=group, BLOCK_SIZE=block_size, E=head_size, EP=padded,
            WINDOW=scores.window, CHUNK=scores.chunk, CAP=scores.softcap * math.log2(math.e),
            SEGMENT=SEGMENT, TILE=64 if padded <= 128 else 32, BM=BM, STAGES=launch.num_stages,
            **early(q_THE.device), num_warps=launch.num_warps if padded <= 128 else 8, maxnreg=launch.max_registers,
        )  # fmt: skip

    if not num_rows:
        return out_TX
    run(batch.small, max(SMALL, triton.next_power_of_2(group)), SMALL_LAUNCH)
    if batch.large is not None:
        run(batch.large, max(LARGE, triton.next_power_of_2(group)), LARGE_LAUNCH)
    rows_at_once = 1 if num_rows <= MANY_ROWS else 16
    _merge[(triton.cdiv(num_rows, rows_at_once), num_kv_heads)](
        batch.positions_T, is_split_T, *parts, out_TX, scores.sinks_H, stop, max_segments, num_rows,
        G=num_kv_heads, GROUP=group, HEADS=triton.next_power_of_2(group), E=head_size, EP=padded, SEGMENT=SEGMENT,
        ROWS=rows_at_once,
        **early(q_THE.device), num_warps=2,
    )  # fmt: skip
    return out_TX


@triton.jit(do_not_specialize=["layer", "table_width", "max_segments"])
def _attend(
    q, positions, row_seqs, block_tables, items, num_items,
    kv_pool, layer, scale, out, is_split, part_best, part_total, part_sum, sinks, stop,
    table_width, max_segments,
    L: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, CAP: tl.constexpr, SEGMENT: tl.constexpr, TILE: tl.constexpr,
    BM: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if is_stopped(stop, EARLY):
        return
    m, columns = tl.arange(0, BM), tl.arange(0, EP)[None, :]
    for unit in range(tl.program_id(0), tl.load(num_items) * G, tl.num_programs(0)):
        item, kv_head = unit // G, unit % G
        first_row, num_rows = tl.load(items + item * 4), tl.load(items + item * 4 + 1)
        first_segment, num_segments = tl.load(items + item * 4 + 2), tl.load(items + item * 4 + 3)
        used = m < num_rows * GROUP
        stored = used[:, None] & (columns < E) if EP != E else used[:, None]
        row = first_row + m // GROUP
        position = tl.load(positions + row, mask=used, other=-1)
        last = tl.load(positions + first_row + num_rows - 1)
        table = block_tables + tl.load(row_seqs + first_row).to(tl.int64) * table_width
        keys = kv_pool + (layer * 2 * G + kv_head) * (BLOCK_SIZE * E)  # of this layer and head, in block 0
        at = ((row.to(tl.int64) * G + kv_head) * GROUP + m % GROUP)[:, None] * E + columns
        queries = tl.load(q + at, mask=stored, other=0.0)

        best, total = tl.full((BM,), LOWEST, tl.float32), tl.zeros((BM,), tl.float32)
        sum = tl.zeros((BM, EP), tl.float32)
        for segment in range(first_segment, first_segment + num_segments):
            of_segment = attend_segment(
                queries, position, last, table, keys, scale, segment * SEGMENT, None,
                L * 2 * G * BLOCK_SIZE * E, G * BLOCK_SIZE * E, BLOCK_SIZE, E, SEGMENT, TILE, BM, STAGES,
                EP, first_key(tl.load(positions + first_row), WINDOW, CHUNK), WINDOW, CHUNK, CAP,
            )  # fmt: skip
            best, total, sum = fold(best, total, sum, of_segment[0], of_segment[1], of_segment[2])

        split = num_segments <= last // SEGMENT  # then the item is one segment of one row
        if split:
            part = ((first_row * max_segments + first_segment) * G + kv_head) * GROUP + m
            tl.store(part_best + part, best, mask=used)
            tl.store(part_total + part, total, mask=used)
            tl.store(part_sum + part.to(tl.int64)[:, None] * E + columns, sum, mask=stored)
        else:
            if sinks is not None:
                total = with_sink(best, total, tl.load(sinks + kv_head * GROUP + m % GROUP))
            tl.store(out + at, finished(total, sum), mask=stored)
        tl.store(is_split + row, split.to(tl.int32), mask=used)


@triton.jit
def first_key(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """The first one that a row at this position sees."""
    if WINDOW > 0:
        return tl.maximum(position - WINDOW + 1, 0)
    if CHUNK > 0:
        return tl.maximum(position, 0) // CHUNK * CHUNK
    return position * 0


@triton.jit
def with_sink(best, total, sink):
    """With a score that belongs to no key, counted in e."""
    return total + tl.exp2(sink * 1.4426950408889634 - best)


@triton.jit
def attend_segment(
    queries, position, last, table, keys, scale, first, num_blocks,
    BLOCK: tl.constexpr, VALUES: tl.constexpr, BLOCK_SIZE: tl.constexpr, E: tl.constexpr,
    SEGMENT: tl.constexpr, TILE: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr, EP: tl.constexpr = 0,
    lowest=0, WINDOW: tl.constexpr = 0, CHUNK: tl.constexpr = 0, CAP: tl.constexpr = 0.0,
):  # fmt: skip
    """(best, total, sum) over the keys first .. first + SEGMENT, if not after `last`; a row sees those up to its own
    position, in its window or chunk. A tile without keys for a row changes nothing of it; no row sees keys in front of
    `lowest`.

    BLOCK, VALUES: how far apart blocks are, and the values of a head from its keys. `num_blocks`: of the pool, if the
    table is another process's and may say anything. EP: the columns of a head with padding; 0: it has none. CAP: of
    scores, which `scale` has divided by it."""
    WIDTH: tl.constexpr = EP if EP > 0 else E
    columns = tl.arange(0, WIDTH)[None, :]
    ones = tl.full((TILE, 16), 1.0, tl.float32).to(tl.bfloat16)
    best, totals = tl.full((BM,), LOWEST, tl.float32), tl.zeros((BM, 16), tl.float32)
    sum = tl.zeros((BM, WIDTH), tl.float32)
    begin = first
    if WINDOW > 0 or CHUNK > 0:
        begin = tl.maximum(first, lowest // TILE * TILE)
    for start in tl.range(begin, tl.minimum(first + SEGMENT, last + 1), TILE, num_stages=STAGES):
        key = start + tl.arange(0, TILE)
        stored = key <= last  # nothing else may be read: it may be anything, and 0 * NaN is NaN
        block = tl.load(table + key // BLOCK_SIZE, mask=stored, other=0).to(tl.int64)
        if num_blocks is not None:
            stored &= (block >= 0) & (block < num_blocks)
        at = (block * BLOCK + key % BLOCK_SIZE * E)[:, None] + columns
        is_read = stored[:, None] if WIDTH == E else stored[:, None] & (columns < E)
        k = tl.load(keys + at, mask=is_read, other=0.0)
        v = tl.load(keys + at + VALUES, mask=is_read, other=0.0)
        scores = tl.dot(queries, k.T) * scale
        if CAP > 0.0:
            scores = CAP * tanh(scores)
        seen = key[None, :] <= position[:, None]
        if WINDOW > 0 or CHUNK > 0:
            seen = seen & (key[None, :] >= first_key(position, WINDOW, CHUNK)[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        rescale = tl.exp2(best - new_best)[:, None]
        weights = tl.exp2(scores - new_best[:, None]).to(tl.bfloat16)
        totals = tl.dot(weights, ones, totals * rescale)
        sum = tl.dot(weights, v, sum * rescale)
        best = new_best
    return best, tl.max(totals, 1), sum  # all 16 columns of totals are the same


@triton.jit
def fold(best, total, sum, next_best, next_total, next_sum):
    """Two lots of keys as one. Fused by hand, so that no compiler may choose which of the two products is rounded."""
    new_best = tl.maximum(best, next_best)
    scale, next_scale = tl.exp2(best - new_best), tl.exp2(next_best - new_best)
    total = tl.fma(total, scale, next_total * next_scale)
    sum = tl.fma(sum, tl.broadcast_to(scale[:, None], sum.shape), next_sum * next_scale[:, None])
    return new_best, total, sum


@triton.jit
def finished(total, sum):
    """The result; 0 where there were no keys."""
    return (sum * tl.div_rn(1.0, tl.where(total == 0.0, 1.0, total))[:, None]).to(tl.bfloat16)


@triton.jit(do_not_specialize=["max_segments", "num_rows"])
def _merge(
    positions, is_split, part_best, part_total, part_sum, out, sinks, stop, max_segments, num_rows,
    G: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
    SEGMENT: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Some rows of one KV head: folds what the items of a row left, if it was split; zeros if it is padding."""
    if is_stopped(stop, EARLY):
        return
    first, kv_head = tl.program_id(0) * ROWS, tl.program_id(1)
    for i in range(ROWS):
        row = first + i
        is_row = row < num_rows
        position = tl.load(positions + row, mask=is_row, other=0)
        if is_row & ((position < 0) | (tl.load(is_split + row, mask=is_row, other=0) != 0)):
            _merge_row(
                row, position, kv_head, part_best, part_total, part_sum, out, sinks, max_segments,
                G, GROUP, HEADS, E, EP, SEGMENT,
            )  # fmt: skip


@triton.jit
def _merge_row(
    row, position, kv_head, part_best, part_total, part_sum, out, sinks, max_segments,
    G: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
    SEGMENT: tl.constexpr,
):  # fmt: skip
    head, columns = tl.arange(0, HEADS), tl.arange(0, EP)[None, :]
    used = head < GROUP
    stored = used[:, None] & (columns < E) if EP != E else used[:, None]
    at = ((row.to(tl.int64) * G + kv_head) * GROUP + head)[:, None] * E + columns
    best, total = tl.full((HEADS,), LOWEST, tl.float32), tl.zeros((HEADS,), tl.float32)
    sum = tl.zeros((HEADS, EP), tl.float32)
    num_segments = tl.where(position < 0, 0, position // SEGMENT + 1)
    for segment in tl.range(0, num_segments, num_stages=4):
        part = ((row * max_segments + segment) * G + kv_head) * GROUP + head
        next_best = tl.load(part_best + part, mask=used, other=LOWEST)
        next_total = tl.load(part_total + part, mask=used, other=0.0)
        next_sum = tl.load(part_sum + part.to(tl.int64)[:, None] * E + columns, mask=stored, other=0.0)
        best, total, sum = fold(best, total, sum, next_best, next_total, next_sum)
    if sinks is not None:
        total = with_sink(best, total, tl.load(sinks + kv_head * GROUP + head, mask=used, other=0.0))
    tl.store(out + at, finished(total, sum), mask=stored)
