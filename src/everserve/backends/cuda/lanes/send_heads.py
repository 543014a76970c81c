"""The attention worker's kernels for heads, besides those of send.py.

    turn_page       once per step: positions, KV slots, tables and items into the lanes of all expert workers
    collect_heads   is every answer there? then the attended rows, put together in the order of heads;
                    otherwise stop, and report which ranks are absent

In between, for each layer, rows go to heads as they go to experts: plan and post (send.py), all rows to all heads.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from everserve.backends.cuda.device_batch import DeviceBatch
from everserve.backends.cuda.lanes.page import PageShape
from everserve.backends.cuda.lanes.send import SendState, all_ranks, is_answered
from everserve.backends.cuda.ops.pdl import early, is_stopped
from everserve.backends.cuda.ops.timeline import COLLECT_NOTE, note

_PROGRAMS, _INTERPRETED_PROGRAMS = 16, 1  # for each lane
_BLOCK = 1024


def turn_page(state: SendState, batch: DeviceBatch, page: PageShape) -> None:
    """Write the page of this step into every lane that there is."""
    num_seqs, table_width = batch.block_tables_SB.shape
    num_rows, large = len(batch.positions_T), batch.large
    assert num_rows <= page.max_rows and num_seqs <= page.max_seqs and table_width == page.max_blocks
    assert len(batch.small.items_W4) <= page.max_small and (large is None or len(large.items_W4) <= page.max_rows)
    num_programs = _PROGRAMS if state.stop.is_cuda else _INTERPRETED_PROGRAMS
    _turn_page[(state.num_ranks, num_programs)](
        state.region, state.present_E, batch.positions_T, batch.kv_slots_T, batch.row_seqs_T,
        batch.small.items_W4, batch.small.num_items,
        None if large is None else large.items_W4, None if large is None else large.num_items,
        batch.block_tables_SB, state.stop, num_rows, num_seqs * table_width,
        LANE_BYTES=state.shape.lane_bytes(), PAGE_AT=state.shape.page_at, POSITIONS_AT=page.positions_at,
        KV_SLOTS_AT=page.kv_slots_at, ROW_SEQS_AT=page.row_seqs_at, SMALL_AT=page.small_at, LARGE_AT=page.large_at,
        TABLES_AT=page.tables_at, BLOCK=_BLOCK, **early(state.stop.device), num_warps=4,
    )  # fmt: skip


def collect_heads(state: SendState, y_row_TG: Tensor, width: int, layer: int) -> Tensor:
    """attended_TX: for each row the answers of all heads, `width` elements each. Padding rows are 0. Stops unless every
    rank that got rows has computed them."""
    num_tokens, num_heads = y_row_TG.shape
    attended_TX = torch.empty(num_tokens, num_heads * width, dtype=torch.bfloat16, device=y_row_TG.device)
    _collect_heads[(num_tokens, num_heads)](
        state.region, state.rows_E, state.sent_E, state.absent, y_row_TG, attended_TX, state.stop, layer,
        G=num_heads, WIDTH=width, BLOCK=triton.next_power_of_2(width), D=state.shape.hidden_size, **all_ranks(state),
        num_warps=1,
    )  # fmt: skip
    return attended_TX


@triton.jit
def _copy(source, target, num_words, BLOCK: tl.constexpr):
    """This program's share."""
    for start in range(tl.program_id(1) * BLOCK, num_words, tl.num_programs(1) * BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(target + i, tl.load(source + i, mask=i < num_words, other=0), mask=i < num_words)


@triton.jit(do_not_specialize=["num_rows", "num_table_words"])
def _turn_page(
    region, present, positions, kv_slots, row_seqs, small, num_small, large, num_large, tables, stop,
    num_rows, num_table_words,
    LANE_BYTES: tl.constexpr, PAGE_AT: tl.constexpr, POSITIONS_AT: tl.constexpr, KV_SLOTS_AT: tl.constexpr,
    ROW_SEQS_AT: tl.constexpr, SMALL_AT: tl.constexpr, LARGE_AT: tl.constexpr, TABLES_AT: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if is_stopped(stop, EARLY):
        return
    rank = tl.program_id(0).to(tl.int64)
    if tl.load(present + rank) == 0:
        return
    page = (region + rank * LANE_BYTES + PAGE_AT).to(tl.pointer_type(tl.int32))
    _copy(positions, page + POSITIONS_AT, num_rows, BLOCK)
    _copy(kv_slots, page + KV_SLOTS_AT, num_rows, BLOCK)
    _copy(row_seqs, page + ROW_SEQS_AT, num_rows, BLOCK)
    _copy(tables, page + TABLES_AT, num_table_words, BLOCK)
    items = tl.load(num_small)
    _copy(small, page + SMALL_AT, items * 4, BLOCK)
    large_items = 0
    if large is not None:
        large_items = tl.load(num_large)
        _copy(large, page + LARGE_AT, large_items * 4, BLOCK)
    if tl.program_id(1) == 0:
        tl.store(page, items)
        tl.store(page + 1, large_items)


@triton.jit(do_not_specialize=["layer"])
def _collect_heads(
    region, rows, sent, absent, y_row, out, stop, layer,
    G: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
    E: tl.constexpr, EB: tl.constexpr, LANE_BYTES: tl.constexpr,
):  # fmt: skip
    """One head of one row. Each program checks by itself, as in `collect`."""
    note(stop, COLLECT_NOTE)
    if tl.load(stop) != 0:
        return
    if is_answered(region, rows, sent, absent, stop, layer, E, EB, LANE_BYTES):
        at = tl.program_id(0).to(tl.int64) * G + tl.program_id(1)
        row = tl.load(y_row + at).to(tl.int64)
        i = tl.arange(0, BLOCK)
        y = tl.multiple_of(region.to(tl.pointer_type(tl.bfloat16)), 16)
        answer = tl.load(y + row * D + i, mask=(i < WIDTH) & (row >= 0), other=0.0)
        tl.store(out + at * WIDTH + i, answer, mask=i < WIDTH)
