"""plan and post (send.py) in one kernel, for a call that every row makes to all of its shards: heads, slices of a dense
FFN. Where each row goes then follows from the places alone, so each program finds out by itself.

    places     slot 0 and 2 of rank 0: shards 1 and 3; slot 1 of rank 1: shard 0
    rank 0     shard 1: rows 0 1 2 .. | shard 3: rows 0 1 2 ..
    rank 1     shard 0: rows 0 1 2 ..

Each program counts the rows that are no padding, which would take long if there were many.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from everserve.backends.cuda.lanes.lane import COUNT_BITS
from everserve.backends.cuda.lanes.send import SendState, all_ranks, send_requests
from everserve.backends.cuda.ops.pdl import early, is_stopped
from everserve.backends.cuda.ops.timeline import SENT_NOTE, note_here

MAX_TOKENS = 512  # of a step, for which one kernel is faster than two; a power of two
_COLUMNS = 1024
_COUNT_BITS = tl.constexpr(COUNT_BITS)


def post_to_all(
    state: SendState, x_TD: Tensor, ids_TK: Tensor, place_of_N: Tensor, expert_at_P: Tensor, layer: int,
    next_layer: int, replay: bool = False,
) -> Tensor:  # fmt: skip
    """y_row_TK, as `plan` would say. A row of `ids_TK` is 0, 1, .. K - 1, or -1 throughout: padding."""
    (num_tokens, num_shards), hidden_size, shape = ids_TK.shape, x_TD.shape[1], state.shape
    assert x_TD.dtype == torch.bfloat16 and hidden_size == shape.hidden_size and num_shards <= shape.top_k
    assert 0 < num_tokens <= MAX_TOKENS and len(expert_at_P) == state.num_ranks * shape.num_slots
    y_row_TK = torch.empty_like(ids_TK)
    columns = min(_COLUMNS, triton.next_power_of_2(hidden_size))
    _post_to_all[(num_tokens, triton.cdiv(hidden_size, columns))](
        state.region, x_TD, ids_TK, place_of_N, expert_at_P, state.present_E, state.sent_E, state.rows_E, y_row_TK,
        state.bell_E, state.lead, state.num_done, state.unplaced, state.stop, num_tokens, layer, next_layer,
        int(replay),
        TB=MAX_TOKENS, K=num_shards, KB=triton.next_power_of_2(num_shards),
        P=len(expert_at_P), PB=triton.next_power_of_2(len(expert_at_P)), S=shape.num_slots, D=hidden_size, BD=columns,
        COUNTS_AT=shape.counts_at(0), COUNTS_BYTES=shape.counts_bytes, LANE_ROWS=shape.lane_rows(),
        FIRST_Y=shape.first_y(0), BOX_ROWS=shape.box_rows, MAX_ROWS=shape.max_rows, **all_ranks(state),
        **early(x_TD.device), num_warps=4,
    )  # fmt: skip
    return y_row_TK


@triton.jit(
    do_not_specialize=["num_tokens", "layer", "next_layer", "replay"],
    do_not_specialize_on_alignment=["place_of", "expert_at"],
)
def _post_to_all(
    region, x, ids, place_of, expert_at, present, sent, rows, y_row, bell, lead, num_done, unplaced, stop,
    num_tokens, layer, next_layer, replay,
    TB: tl.constexpr, K: tl.constexpr, KB: tl.constexpr, P: tl.constexpr, PB: tl.constexpr,
    S: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, COUNTS_AT: tl.constexpr, COUNTS_BYTES: tl.constexpr,
    LANE_ROWS: tl.constexpr, FIRST_Y: tl.constexpr, BOX_ROWS: tl.constexpr, MAX_ROWS: tl.constexpr,
    E: tl.constexpr, EB: tl.constexpr, LANE_BYTES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Some columns of one row; the first program also writes the counts, and the last to finish sends."""
    if is_stopped(stop, EARLY):
        return
    token = tl.program_id(0)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    x_D = tl.load(x + token.to(tl.int64) * D + d, mask=d < D, other=0.0)
    t, k = tl.arange(0, TB), tl.arange(0, KB)
    is_row_T = tl.load(ids + t * K, mask=t < num_tokens, other=-1) >= 0
    is_row = tl.load(ids + token * K) >= 0
    place_K = tl.load(place_of + k, mask=k < K, other=-1)
    rank_K = tl.maximum(place_K, 0) // S
    is_placed_K = (place_K >= 0) & (tl.load(present + rank_K, mask=k < K, other=0) != 0)
    seq_K = tl.load(sent + rank_K, mask=k < K, other=0) + 1
    both = tl.sum(tl.where(is_row_T, 1 + ((t < token).to(tl.int32) << 16), 0))  # two counts in one sum
    num_rows, row = both & 0xFFFF, both >> 16

    is_before = (rank_K[None, :] == rank_K[:, None]) & (place_K[None, :] < place_K[:, None]) & (place_K >= 0)[None, :]
    before_K = tl.sum(is_before.to(tl.int32), axis=1)
    y_row_K = rank_K * LANE_ROWS + FIRST_Y + (seq_K & 1).to(tl.int32) * BOX_ROWS + before_K * num_rows + row
    is_sent_K = is_placed_K & is_row
    if tl.program_id(1) == 0:
        tl.store(y_row + token * K + k, tl.where(is_sent_K, y_row_K, -1), mask=k < K)
        if token == 0:
            _write_counts(
                region, expert_at, present, sent, rows, num_rows, rank_K, is_placed_K,
                P, PB, S, COUNTS_AT, COUNTS_BYTES, E, EB, LANE_BYTES,
            )  # fmt: skip
    boxes = tl.multiple_of(region.to(tl.pointer_type(tl.bfloat16)), 16)
    at = (y_row_K - MAX_ROWS).to(tl.int64)[:, None] * D + d[None, :]
    tl.store(boxes + at, tl.broadcast_to(x_D[None, :], (KB, BD)), mask=is_sent_K[:, None] & (d < D)[None, :])

    tl.debug_barrier()  # what all threads have stored, before the word that says so
    num_before = tl.atomic_add(num_done, 1, sem="acq_rel", scope="gpu")
    if num_before == tl.num_programs(0) * tl.num_programs(1) - 1:
        tl.store(num_done, 0)
        missing = tl.max(tl.where((k < K) & (is_placed_K == 0), k + 1, 0))
        if (missing > 0) & (num_rows > 0):  # it has no place, or the tables contradict each other
            tl.store(unplaced, missing)
            tl.store(stop, layer + 1)
        else:
            send_requests(region, present, rows, sent, bell, lead, layer, next_layer, replay, E, EB, LANE_BYTES)
            note_here(stop, SENT_NOTE)


@triton.jit
def _write_counts(
    region, expert_at, present, sent, rows, num_rows, rank_K, is_placed_K,
    P: tl.constexpr, PB: tl.constexpr, S: tl.constexpr, COUNTS_AT: tl.constexpr, COUNTS_BYTES: tl.constexpr,
    E: tl.constexpr, EB: tl.constexpr, LANE_BYTES: tl.constexpr,
):  # fmt: skip
    """Into the boxes that the requests will name; and how many rows each rank gets."""
    place = tl.arange(0, PB)
    rank, slot = place // S, place % S
    is_there = tl.load(present + rank, mask=place < P, other=0) != 0
    expert = tl.load(expert_at + place, mask=place < P, other=-1)
    box = (tl.load(sent + rank, mask=place < P, other=0) + 1) & 1
    at = region + rank.to(tl.int64) * LANE_BYTES + COUNTS_AT + box * COUNTS_BYTES + slot * 4
    word = tl.where(expert >= 0, num_rows, 0) | ((expert + 1) << _COUNT_BITS)
    tl.store(at.to(tl.pointer_type(tl.int32)), word, mask=is_there)
    ranks = tl.arange(0, EB)
    num_shards = tl.sum(((ranks[:, None] == rank_K[None, :]) & is_placed_K[None, :]).to(tl.int32), axis=1)
    tl.store(rows + ranks, num_shards * num_rows, mask=ranks < E)
