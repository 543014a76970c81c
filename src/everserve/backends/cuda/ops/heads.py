"""Some heads of some layers, for rows of several homes at once: the same bits as where all heads are computed together.

    project     q, k and v of each head for the sorted rows              = dense.py
    rotate      norm and rotate q and k; k and v into the pool           = rows.py: rotate_and_store
    attend      each row over its own sequence, into the lanes' answers  = attention.py
    merge       likewise, of rows whose segments were attended to apart; where it is the last kernel it answers, too

Why the bits are the same: an element of a product is one sum, cut into splits by the shape of the whole weight of all
heads (`choose_split_size`), and added in the same order; the other kernels compute heads one by one anyway, and use the
same functions, in which no compiler may choose what is rounded (`one_by_one` in rows.py, `fold` in attention.py).

The rows of a home come with its page (lanes/page.py), which lies in memory of another process: every index out of it is
checked. A row that fails a check stores nothing, and its answer is of no use to anyone: what is wrong with a page is
that its home has died.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from everserve.backends.cuda.device_batch import LARGE, SEGMENT, SMALL
from everserve.backends.cuda.lanes.head_batch import HeadBatch
from everserve.backends.cuda.lanes.lane import CudaLaneShape
from everserve.backends.cuda.lanes.page import PageShape
from everserve.backends.cuda.ops.attention import (
    LARGE_LAUNCH,
    LOWEST,
    MAX_PROGRAMS,
    SMALL_LAUNCH,
    Launch,
    Workspace,
    attend_segment,
    finished,
    fold,
)
from everserve.backends.cuda.ops.dense import choose_split_size
from everserve.backends.cuda.ops.experts import MANY_ROWS, Product, Tiles, num_programs, share_of
from everserve.backends.cuda.ops.pdl import await_before, early, is_stopped
from everserve.backends.cuda.ops.rows import rotated
from everserve.model.rope import RopeTables

# A worker has few heads, so few tiles: each must have much on its way.
_SOME = Product(64, 128, 5, 4, 1)
_MANY = Product(128, 64, 4, 8, 1)
_INTERPRETED_PROGRAMS = 3  # any number must do
# Of kernels that walk over units. A program that finds none costs time, too, if it has to wait for its turn.
_ROTATE_PROGRAMS = 2112  # small ones, which all run at once
_SMALL_PROGRAMS = _MERGE_PROGRAMS = 528
_FEW_PROGRAMS = 132  # where there is seldom anything to do


@dataclass(frozen=True)
class HeadShape:
    """The heads of a model."""

    num_kv_heads: int
    group: int  # query heads per KV head
    head_size: int
    hidden_size: int
    eps: float
    block_size: int
    blocks_per_home: int
    num_homes: int

    @property
    def width(self) -> int:
        """Rows of a head's q, k and v."""
        return (self.group + 2) * self.head_size

    @property
    def answer_size(self) -> int:
        return self.group * self.head_size

    @property
    def num_blocks(self) -> int:
        return self.num_homes * self.blocks_per_home

    @property
    def split_size(self) -> int:
        """The split size of all heads' weight, as one."""
        return choose_split_size(self.num_kv_heads * self.width, self.hidden_size)


class HeadArena:
    """The heads of one worker, each with a *piece* of its memory: weights, and what each block of the pool has of it.

    weights   [num_pieces * width, D]: q, k and v of each head
    kv_pool   [num_blocks, num_pieces, 2, block_size, E]
    piece_LS  which piece a slot of a call has; norms_L2E of q and k, by call, or None

    It is for batches of at most `max_rows` rows, of which the first `page.max_seqs` of each job may be split.
    """

    def __init__(
        self,
        shape: HeadShape,
        weights: Tensor,
        kv_pool: Tensor,
        rope: RopeTables,
        norms_L2E: Tensor | None,
        num_calls: int,
        num_slots: int,
        max_rows: int,
        page: PageShape,
    ) -> None:
        num_pieces = kv_pool.shape[1]
        assert weights.shape == (num_pieces * shape.width, shape.hidden_size) and weights.is_contiguous()
        assert kv_pool.shape == (shape.num_blocks, num_pieces, 2, shape.block_size, shape.head_size)
        assert shape.answer_size <= shape.hidden_size, "an answer is a row of the lane at most"
        self.shape = shape
        self.page = page
        self.kv_pool = kv_pool
        self.rope = rope
        self.norms_L2E = norms_L2E
        self.num_slots = num_slots
        device = weights.device
        self.piece_LS = torch.zeros(num_calls, num_slots, dtype=torch.int32, device=device)
        self.weights = functools.cache(functools.partial(_descriptor, weights))
        self.qkv_RX = torch.empty(max_rows, shape.width, dtype=torch.bfloat16, device=device)
        self.is_split_R = torch.empty(max_rows, dtype=torch.int32, device=device)
        self.max_jobs = shape.num_homes * num_slots
        self.workspace = Workspace(
            self.max_jobs * page.max_seqs, page.max_segments, shape.group, shape.head_size, device
        )

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """The partial results of rows that are split."""
        return self.workspace.best_TSH, self.workspace.total_TSH, self.workspace.sum_TSHE


def project(
    region: int,
    x_row_R: Tensor,
    arena: HeadArena,
    layer_at: Tensor,
    tiles: Tiles,
    stop: Tensor,
    slice_index: int = 0,
    num_slices: int = 1,
) -> None:
    """qkv_RX of the sorted rows, of which row r is x's row x_row_R[r]. `num_slices`: as in experts.py."""
    shape, product = arena.shape, _MANY if tiles.cut is MANY_ROWS else _SOME
    _project[(num_programs(stop.device, product),)](
        region, x_row_R, arena.weights(product.columns, product.depth), arena.qkv_RX, layer_at, arena.piece_LS,
        tiles.slot_M, tiles.row_M, tiles.size_M, tiles.num_tiles, stop, slice_index, num_slices,
        S=arena.num_slots, D=shape.hidden_size, X=shape.width, SPLIT_SIZE=shape.split_size,
        NUM_SPLITS=-(-shape.hidden_size // shape.split_size),
        BM=tiles.cut.rows, BN=product.columns, BK=product.depth, STAGES=product.stages, **early(stop.device),
        num_warps=product.warps,
    )  # fmt: skip


def attend_heads(
    region: int, lane: CudaLaneShape, batch: HeadBatch, arena: HeadArena, layer_at: Tensor, num_rows: Tensor,
    y_row_R: Tensor, stop: Tensor, may_be_large: bool = True,
) -> None:  # fmt: skip
    """After `project`: store keys and values, attend, and write the answers into the lanes, but for those of rows that
    are left to `merge`. Without `may_be_large` prompts are attended to by fewer programs."""
    shape, page = arena.shape, arena.page
    of_page, of_heads = _of_page(lane, page), {"M": shape.group, "E": shape.head_size}
    norm_q, norm_k = (None, None) if arena.norms_L2E is None else (arena.norms_L2E, arena.norms_L2E[:, 1])
    _rotate_heads[(_programs(stop.device, _ROTATE_PROGRAMS),)](
        region, arena.qkv_RX, batch.lane_R, batch.token_R, batch.slot_R, num_rows, batch.num_jobs, layer_at,
        arena.piece_LS, arena.kv_pool, *arena.rope, norm_q, norm_k, shape.eps, stop,
        shape.blocks_per_home * shape.block_size, len(arena.rope[0]),
        S=arena.num_slots, P=arena.kv_pool.shape[1], BLOCK_SIZE=shape.block_size, KV_SLOTS_AT=page.kv_slots_at,
        MAX_ROWS=page.max_rows, **of_page, **of_heads, **early(stop.device), num_warps=2,
    )  # fmt: skip
    parts = arena.parts

    def run(items_at: int, count_at: int, BM: int, launch: Launch, num: int) -> None:
        _attend_heads[(_programs(stop.device, num),)](
            region, arena.qkv_RX, batch.num_jobs, batch.job_lane_J, batch.job_slot_J, batch.job_row_J,
            batch.job_size_J, layer_at, arena.piece_LS, arena.kv_pool, y_row_R, arena.is_split_R, *parts, stop,
            shape.head_size**-0.5 * math.log2(math.e), shape.num_blocks,
            S=arena.num_slots, P=arena.kv_pool.shape[1], J=arena.max_jobs, JB=triton.next_power_of_2(arena.max_jobs),
            D=lane.hidden_size, BLOCK_SIZE=shape.block_size, ROW_SEQS_AT=page.row_seqs_at, TABLES_AT=page.tables_at,
            TABLE_WIDTH=page.max_blocks, MAX_SEQS=page.max_seqs, MAX_SEGMENTS=page.max_segments,
            ITEMS_AT=items_at, COUNT_AT=count_at, MAX_ITEMS=page.max_rows if count_at else page.max_small,
            SEGMENT=SEGMENT, TILE=64 if shape.head_size <= 128 else 32, BM=BM, STAGES=launch.num_stages,
            **of_page, **of_heads, **early(stop.device),
            num_warps=launch.num_warps if shape.head_size <= 128 else 8, maxnreg=launch.max_registers,
        )  # fmt: skip

    num_small, num_large = (MAX_PROGRAMS, MAX_PROGRAMS) if may_be_large else (_SMALL_PROGRAMS, _FEW_PROGRAMS)
    run(page.small_at, 0, max(SMALL, triton.next_power_of_2(shape.group)), SMALL_LAUNCH, num_small)
    run(page.large_at, 1, max(LARGE, triton.next_power_of_2(shape.group)), LARGE_LAUNCH, num_large)


def merge(
    region: int, lane: CudaLaneShape, batch: HeadBatch, arena: HeadArena, y_row_R: Tensor, stop: Tensor,
    kernel: Any = None, arguments: tuple[Any, ...] = (), **constants: int,
) -> None:  # fmt: skip
    """After `attend_heads`: the answers of rows that were split.

    `kernel`: another one around `merge_rows`, with arguments and constants of its own."""
    shape, page = arena.shape, arena.page
    (kernel or _merge_heads)[(_programs(stop.device, _MERGE_PROGRAMS),)](
        region, batch.num_jobs, batch.job_lane_J, batch.job_row_J, batch.job_size_J, y_row_R, arena.is_split_R,
        *arena.parts, stop, *arguments,
        J=arena.max_jobs, D=lane.hidden_size, MAX_SEQS=page.max_seqs, MAX_SEGMENTS=page.max_segments, SEGMENT=SEGMENT,
        HEADS=triton.next_power_of_2(shape.group), **_of_page(lane, page), M=shape.group, E=shape.head_size,
        **early(stop.device), num_warps=2, **constants,
    )  # fmt: skip


def _of_page(lane: CudaLaneShape, page: PageShape) -> dict[str, int]:
    return {"LANE_BYTES": lane.lane_bytes(), "PAGE_AT": lane.page_at, "POSITIONS_AT": page.positions_at}


def _programs(device: torch.device, num: int) -> int:
    return num if device.type == "cuda" else _INTERPRETED_PROGRAMS


@triton.jit(do_not_specialize=["slice_index", "num_slices"], do_not_specialize_on_alignment=["layer_at"])
def _project(
    x_at, x_row, weights, qkv, layer_at, pieces, slot_M, row_M, size_M, num_tiles, stop, slice_index, num_slices,
    S: tl.constexpr, D: tl.constexpr, X: tl.constexpr, SPLIT_SIZE: tl.constexpr, NUM_SPLITS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    await_before(EARLY)
    num_m, first, end = share_of(num_tiles, stop, slice_index, num_slices, (X + BN - 1) // BN)
    layer = tl.load(layer_at)
    x = tl.multiple_of(x_at.to(tl.pointer_type(tl.bfloat16)), 16)
    for t in range(first + tl.program_id(0), end, tl.num_programs(0)):
        m = t % num_m
        column = t // num_m * BN
        weight = tl.load(pieces + layer * S + tl.load(slot_M + m)) * X + column
        row = tl.load(row_M + m)
        i = tl.arange(0, BM)
        is_row = i < tl.load(size_M + m)
        x_rows = tl.load(x_row + row + i, mask=is_row, other=0).to(tl.int64)
        total = _all_splits(x, x_rows, is_row, weights, weight, D, SPLIT_SIZE, NUM_SPLITS, BM, BN, BK, STAGES)
        f = column + tl.arange(0, BN)
        at = (row + i).to(tl.int64)[:, None] * X + f[None, :]
        tl.store(qkv + at, total.to(tl.bfloat16), mask=is_row[:, None] & (f < X)[None, :])


@triton.jit
def _all_splits(
    x, x_rows, is_row, weights, weight, D: tl.constexpr, SPLIT_SIZE: tl.constexpr, NUM_SPLITS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """((0 + split 0) + split 1) + .., in one loop, as in dense.py. One split alone is not added to 0: it may be -0."""
    d = tl.arange(0, BK)
    x_at = x + x_rows[:, None] * D + d[None, :]
    total, part = tl.zeros((BM, BN), tl.float32), tl.zeros((BM, BN), tl.float32)
    for k in tl.range(0, D, BK, num_stages=STAGES):
        if D % BK == 0:
            x_MK = tl.load(x_at + k, mask=is_row[:, None], other=0.0)
        else:  # descriptors give zeros beyond the end of a row, and zeros they must meet
            x_MK = tl.load(x_at + k, mask=is_row[:, None] & (d + k < D)[None, :], other=0.0)
        part = tl.dot(x_MK, weights.load([weight, k]).T, part)
        if NUM_SPLITS > 1:  # noqa: SIM102 (a constant of the kernel, and a value)
            if (k + BK) % SPLIT_SIZE == 0:
                total += part
                part = tl.zeros((BM, BN), tl.float32)
    if NUM_SPLITS == 1:
        return part
    if D % SPLIT_SIZE != 0:
        total += part
    return total


@triton.jit
def _page(region, lane, LANE_BYTES: tl.constexpr, PAGE_AT: tl.constexpr):
    return (region + lane.to(tl.int64) * LANE_BYTES + PAGE_AT).to(tl.pointer_type(tl.int32))


@triton.jit(do_not_specialize=["home_slots", "max_positions"], do_not_specialize_on_alignment=["layer_at"])
def _rotate_heads(
    region, qkv, row_lane, row_token, row_slot, num_rows, num_jobs, layer_at, pieces, kv_pool, cos, sin,
    q_norm, k_norm, eps, stop, home_slots, max_positions,
    M: tl.constexpr, E: tl.constexpr, S: tl.constexpr, P: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    LANE_BYTES: tl.constexpr, PAGE_AT: tl.constexpr, POSITIONS_AT: tl.constexpr, KV_SLOTS_AT: tl.constexpr,
    MAX_ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One head of one row at a time, of q (which is changed in place), of k or of v."""
    if is_stopped(stop, EARLY):
        return
    HALF: tl.constexpr = E // 2
    layer = tl.load(layer_at)
    num_units = tl.where(tl.load(num_jobs) > 0, tl.load(num_rows) * (M + 2), 0)
    columns = tl.arange(0, HALF)[None, :]
    size = tl.full((1, 1), E, tl.int64)
    for unit in range(tl.program_id(0), num_units, tl.num_programs(0)):
        row, head = unit // (M + 2), unit % (M + 2)
        lane, token = tl.load(row_lane + row), tl.load(row_token + row)
        page = _page(region, lane, LANE_BYTES, PAGE_AT)
        is_named = token < MAX_ROWS
        position = tl.load(page + POSITIONS_AT + token, mask=is_named, other=-1)
        slot = tl.load(page + KV_SLOTS_AT + token, mask=is_named, other=-1).to(tl.int64)
        first_slot = lane.to(tl.int64) * home_slots
        is_right = (position >= 0) & (position < max_positions) & (slot >= first_slot)
        is_right &= slot < first_slot + home_slots
        position = tl.where(is_right, position, 0)
        stored = (columns >= 0) & is_right
        at = qkv + unit * size + columns
        first, second = tl.load(at).to(tl.float32), tl.load(at + HALF).to(tl.float32)
        if head < M:
            first, second = _rotated_by(first, second, position, cos, sin, q_norm, layer, eps, E)
            tl.store(at, tl.where(stored, first, 0.0).to(tl.bfloat16))
            tl.store(at + HALF, tl.where(stored, second, 0.0).to(tl.bfloat16))
        else:
            if head == M:
                first, second = _rotated_by(first, second, position, cos, sin, k_norm, layer, eps, E)
            piece = tl.load(pieces + layer * S + tl.load(row_slot + row)).to(tl.int64)
            kv_at = kv_pool + ((slot // BLOCK_SIZE * P + piece) * 2 + head - M) * (BLOCK_SIZE * E)
            kv_at += slot % BLOCK_SIZE * E + columns
            tl.store(kv_at, first.to(tl.bfloat16), mask=stored)
            tl.store(kv_at + HALF, second.to(tl.bfloat16), mask=stored)


@triton.jit
def _rotated_by(first, second, position, cos, sin, norms, layer, eps, E: tl.constexpr):
    """`norms`: of all calls, two of E each; or None."""
    if norms is not None:
        norms += layer * (2 * E)
    return rotated(first, second, position, cos, sin, norms, eps, E, True)


@triton.jit(do_not_specialize=["num_blocks"], do_not_specialize_on_alignment=["layer_at"])
def _attend_heads(
    region, qkv, num_jobs, job_lane, job_slot, job_row, job_size, layer_at, pieces, kv_pool, y_row, is_split,
    part_best, part_total, part_sum, stop, scale, num_blocks,
    M: tl.constexpr, E: tl.constexpr, S: tl.constexpr, P: tl.constexpr, J: tl.constexpr, JB: tl.constexpr,
    D: tl.constexpr, BLOCK_SIZE: tl.constexpr, LANE_BYTES: tl.constexpr, PAGE_AT: tl.constexpr,
    POSITIONS_AT: tl.constexpr, ROW_SEQS_AT: tl.constexpr, TABLES_AT: tl.constexpr, TABLE_WIDTH: tl.constexpr,
    MAX_SEQS: tl.constexpr, MAX_SEGMENTS: tl.constexpr, ITEMS_AT: tl.constexpr, COUNT_AT: tl.constexpr,
    MAX_ITEMS: tl.constexpr, SEGMENT: tl.constexpr, TILE: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One item of one job at a time, as `_attend` (attention.py) does with all heads."""
    if is_stopped(stop, EARLY):
        return
    jobs = tl.arange(0, JB)
    is_job = jobs < tl.minimum(tl.load(num_jobs), J)
    lanes = tl.load(job_lane + jobs, mask=is_job, other=0)
    counts = tl.load(_page(region, lanes, LANE_BYTES, PAGE_AT) + COUNT_AT, mask=is_job, other=0)
    counts = tl.where((counts >= 0) & (counts <= MAX_ITEMS), counts, 0)
    ends = tl.cumsum(counts, 0)
    layer = tl.load(layer_at)
    m, columns = tl.arange(0, BM), tl.arange(0, E)[None, :]
    y = tl.multiple_of(region.to(tl.pointer_type(tl.bfloat16)), 16)
    for unit in range(tl.program_id(0), tl.sum(counts), tl.num_programs(0)):
        job = tl.sum((ends <= unit).to(tl.int32))
        page = _page(region, tl.load(job_lane + job), LANE_BYTES, PAGE_AT)
        item = page + ITEMS_AT + (unit - tl.sum(tl.where(jobs == job, ends - counts, 0))) * 4
        first_row, num_rows = tl.load(item), tl.load(item + 1)
        first_segment, num_segments = tl.load(item + 2), tl.load(item + 3)
        is_sane = (first_row >= 0) & (num_rows > 0) & (num_rows * M <= BM)
        is_sane &= first_row <= tl.load(job_size + job) - num_rows
        is_sane &= (first_segment >= 0) & (num_segments > 0) & (first_segment <= MAX_SEGMENTS - num_segments)
        if is_sane:
            used = m < num_rows * M
            row = first_row + m // M
            position = tl.load(page + POSITIONS_AT + row, mask=used, other=-1)
            last = tl.minimum(tl.load(page + POSITIONS_AT + first_row + num_rows - 1), TABLE_WIDTH * BLOCK_SIZE - 1)
            line = tl.load(page + ROW_SEQS_AT + first_row)
            line = tl.where((line >= 0) & (line < MAX_SEQS), line, 0)
            piece = tl.load(pieces + layer * S + tl.load(job_slot + job)).to(tl.int64)
            sorted_row = tl.load(job_row + job) + row
            queries = tl.load(
                qkv + (sorted_row.to(tl.int64) * (M + 2) + m % M)[:, None] * E + columns, mask=used[:, None], other=0.0
            )
            best, total = tl.full((BM,), LOWEST, tl.float32), tl.zeros((BM,), tl.float32)
            sum = tl.zeros((BM, E), tl.float32)
            for segment in range(first_segment, first_segment + num_segments):
                of_segment = attend_segment(
                    queries, position, last, page + TABLES_AT + line * TABLE_WIDTH,
                    kv_pool + piece * (2 * BLOCK_SIZE * E), scale, segment * SEGMENT, num_blocks,
                    P * 2 * BLOCK_SIZE * E, BLOCK_SIZE * E, BLOCK_SIZE, E, SEGMENT, TILE, BM, STAGES,
                )  # fmt: skip
                best, total, sum = fold(best, total, sum, of_segment[0], of_segment[1], of_segment[2])

            split = (num_segments <= last // SEGMENT) & (first_row < MAX_SEQS)
            if split:
                part = ((job * MAX_SEQS + first_row) * MAX_SEGMENTS + first_segment) * M + m
                tl.store(part_best + part, best, mask=used)
                tl.store(part_total + part, total, mask=used)
                tl.store(part_sum + part.to(tl.int64)[:, None] * E + columns, sum, mask=used[:, None])
            else:
                y_rows = tl.load(y_row + sorted_row, mask=used, other=0).to(tl.int64)
                at = (y_rows * D + m % M * E)[:, None] + columns
                tl.store(y + at, finished(total, sum), mask=used[:, None])
            tl.store(is_split + sorted_row, split.to(tl.int32), mask=used)


@triton.jit
def _merge_heads(
    region, num_jobs, job_lane, job_row, job_size, y_row, is_split, part_best, part_total, part_sum, stop,
    M: tl.constexpr, E: tl.constexpr, J: tl.constexpr, D: tl.constexpr, LANE_BYTES: tl.constexpr,
    PAGE_AT: tl.constexpr, POSITIONS_AT: tl.constexpr, MAX_SEQS: tl.constexpr, MAX_SEGMENTS: tl.constexpr,
    SEGMENT: tl.constexpr, HEADS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if is_stopped(stop, EARLY):
        return
    merge_rows(
        region, num_jobs, job_lane, job_row, job_size, y_row, is_split, part_best, part_total, part_sum,
        M, E, J, D, LANE_BYTES, PAGE_AT, POSITIONS_AT, MAX_SEQS, MAX_SEGMENTS, SEGMENT, HEADS,
    )  # fmt: skip


@triton.jit
def merge_rows(
    region, num_jobs, job_lane, job_row, job_size, y_row, is_split, part_best, part_total, part_sum,
    M: tl.constexpr, E: tl.constexpr, J: tl.constexpr, D: tl.constexpr, LANE_BYTES: tl.constexpr,
    PAGE_AT: tl.constexpr, POSITIONS_AT: tl.constexpr, MAX_SEQS: tl.constexpr, MAX_SEGMENTS: tl.constexpr,
    SEGMENT: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """This program's share, one row of one job at a time: folds what its items left, if it was split."""
    head, columns = tl.arange(0, HEADS), tl.arange(0, E)[None, :]
    used = head < M
    y = tl.multiple_of(region.to(tl.pointer_type(tl.bfloat16)), 16)
    for unit in range(tl.program_id(0), tl.minimum(tl.load(num_jobs), J) * MAX_SEQS, tl.num_programs(0)):
        job, row = unit // MAX_SEQS, unit % MAX_SEQS
        sorted_row = tl.load(job_row + job) + row
        is_row = row < tl.load(job_size + job)
        if tl.load(is_split + sorted_row, mask=is_row, other=0) != 0:
            page = _page(region, tl.load(job_lane + job), LANE_BYTES, PAGE_AT)
            best, total = tl.full((HEADS,), LOWEST, tl.float32), tl.zeros((HEADS,), tl.float32)
            sum = tl.zeros((HEADS, E), tl.float32)
            num_segments = tl.minimum(tl.load(page + POSITIONS_AT + row) // SEGMENT + 1, MAX_SEGMENTS)
            for segment in tl.range(0, num_segments, num_stages=4):
                part = ((job * MAX_SEQS + row) * MAX_SEGMENTS + segment) * M + head
                next_best = tl.load(part_best + part, mask=used, other=LOWEST)
                next_total = tl.load(part_total + part, mask=used, other=0.0)
                next_sum = tl.load(part_sum + part.to(tl.int64)[:, None] * E + columns, mask=used[:, None], other=0.0)
                best, total, sum = fold(best, total, sum, next_best, next_total, next_sum)
            at = (tl.load(y_row + sorted_row).to(tl.int64) * D + head * E)[:, None] + columns
            tl.store(y + at, finished(total, sum), mask=used[:, None])


def _descriptor(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(matrix, [rows, columns])
