"""The attention worker's kernels for one layer with experts.

    plan      where does each row go? counts, with the experts they are for, into the boxes; y_row_TK for the others
    post      x rows into the boxes; then the requests, and our position
              (the stream waits until flag >= 0 in every lane that may have been sent something)
    collect   is every answer there? then the sum of y rows, straight out of the boxes, by y_row_TK;
              otherwise stop, and report which ranks are absent

All tables are contents of device memory, so that a captured graph follows every change of routes. A layer is sent
again, after a peer died, by plan and post with new tables and `replay`: under new sequence numbers, into the other
boxes. Experts are pure functions, so the result is the same bit for bit.

If a row's expert has no place, the step stops before anything is sent.

One of the expert workers, the *lead*, lets steps begin (serve.py): it is always asked in the first layer, for rows or
not. What it has no rows for it need not answer: the step goes on if it dies.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from everserve.backends.cuda.lanes.lane import COUNT_BITS, CudaLaneShape
from everserve.backends.cuda.lanes.words import ANSWER, FLAG, POSITION, REQUEST, STATUS, words32, words64
from everserve.backends.cuda.ops.experts import combine_columns, combine_row
from everserve.backends.cuda.ops.pdl import early, is_stopped
from everserve.backends.cuda.ops.sorting import chunk_of
from everserve.backends.cuda.ops.timeline import COLLECT_NOTE, SENT_NOTE, note, note_here

_POST_COLUMNS = 2048
NO_RANK = -1
_COUNT_BITS = tl.constexpr(COUNT_BITS)


def places(rank_LN: Tensor, slot_LN: Tensor, num_ranks: int, num_slots: int) -> tuple[Tensor, Tensor]:
    """The tables of `plan`, of all layers, from where each expert is (rank -1: nowhere). A *place* is a slot of a rank.

    place_of_LN   rank * num_slots + slot, or -1
    expert_at_LP  its inverse: the expert in each place, or -1

    Of two experts in one place, which no routes should have, one has none: what an earlier step has left would be taken
    for its answers.
    """
    place_of_LN = torch.where(rank_LN >= 0, rank_LN * num_slots + slot_LN, NO_RANK).to(torch.int32)
    num_layers, num_experts = place_of_LN.shape
    # Experts without a place are put into one more column, which is cut off.
    expert_at_LP = torch.full((num_layers, num_ranks * num_slots + 1), NO_RANK, dtype=torch.int32)
    expert_LN = torch.arange(num_experts, dtype=torch.int32).expand(num_layers, -1)
    column_LN = place_of_LN.long() % expert_at_LP.shape[1]
    expert_at_LP.scatter_(1, column_LN, expert_LN)
    place_of_LN = torch.where(expert_at_LP.gather(1, column_LN) == expert_LN, place_of_LN, NO_RANK)
    return place_of_LN, expert_at_LP[:, :-1].contiguous()


@dataclass(frozen=True)
class SendState:
    """What the kernels know of the lanes to expert ranks 0..E-1, and what they say. `stop` is the step's.

    region is the address of the lane of rank 0.
    """

    shape: CudaLaneShape
    region: int
    stop: Tensor
    present_E: Tensor  # int32, 1: there is a lane. Where it is 0, nothing is mapped and nothing is touched
    sent_E: Tensor  # int64: the last sequence number. 0 with a new lane
    bell_E: Tensor  # int64: where to ring once something was sent: an address, or 0
    lead: Tensor  # int32: the rank that lets our steps begin; num_ranks if there is none
    rows_E: Tensor  # int32: how many rows of this layer went there
    num_done: Tensor  # int32: programs of `post` that have done their part
    unplaced: Tensor  # int32: an expert without a place, plus 1, if that is why the step stopped
    absent: Tensor  # int64: the ranks (as bits) without an answer, if that is why the step stopped

    @classmethod
    def empty(cls, shape: CudaLaneShape, region: int, num_ranks: int, stop: Tensor) -> "SendState":
        shape.check(num_ranks)

        def zeros(size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=stop.device)

        return cls(
            shape,
            region,
            stop,
            present_E=zeros(num_ranks),
            sent_E=zeros(num_ranks, torch.int64),
            bell_E=zeros(num_ranks, torch.int64),
            lead=zeros(1) - 1,
            rows_E=zeros(num_ranks),
            num_done=zeros(1),
            unplaced=zeros(1),
            absent=zeros(1, torch.int64),
        )

    @property
    def num_ranks(self) -> int:
        return len(self.present_E)


def plan(state: SendState, ids_TK: Tensor, place_of_N: Tensor, expert_at_P: Tensor, layer: int) -> Tensor:
    """y_row_TK: where the answer to each row will be, in rows from the region's beginning, or -1 for padding.

    Counts go into the boxes that the next requests will name. `layer` is an index among layers with experts.
    """
    shape, num_rows = state.shape, ids_TK.numel()
    assert ids_TK.shape[0] <= shape.max_tokens and ids_TK.shape[1] <= shape.top_k
    assert len(expert_at_P) == state.num_ranks * shape.num_slots
    y_row_TK = torch.empty_like(ids_TK)
    _plan_kernel[(len(expert_at_P) + 1,)](
        state.region, ids_TK, place_of_N, expert_at_P, state.present_E, state.sent_E, state.rows_E, y_row_TK,
        state.unplaced, state.stop, num_rows, layer,
        P=len(expert_at_P), S=shape.num_slots, CHUNK=chunk_of(num_rows),
        LANE_BYTES=shape.lane_bytes(), COUNTS_AT=shape.counts_at(0), COUNTS_BYTES=shape.counts_bytes,
        LANE_ROWS=shape.lane_rows(), FIRST_Y=shape.first_y(0), BOX_ROWS=shape.box_rows,
        **early(ids_TK.device), num_warps=4,
    )  # fmt: skip
    return y_row_TK


def post(state: SendState, x_TD: Tensor, y_row_TK: Tensor, layer: int, next_layer: int, replay: bool = False) -> None:
    """Each row of x into the boxes, once per expert; then send. We are on our way to `next_layer` then (-1: this was
    the last one)."""
    num_tokens, hidden_size = x_TD.shape
    assert x_TD.dtype == torch.bfloat16 and hidden_size == state.shape.hidden_size
    columns = min(_POST_COLUMNS, triton.next_power_of_2(hidden_size))
    _post_kernel[(num_tokens, triton.cdiv(hidden_size, columns))](
        state.region, x_TD, y_row_TK, state.present_E, state.rows_E, state.sent_E, state.bell_E, state.lead,
        state.num_done, state.stop, layer, next_layer, int(replay),
        K=y_row_TK.shape[1], D=hidden_size, BD=columns, MAX_ROWS=state.shape.max_rows,
        **all_ranks(state), **early(x_TD.device), num_warps=4,
    )  # fmt: skip


def collect(state: SendState, y_row_TK: Tensor, weights_TK: Tensor, residual_TD: Tensor, layer: int) -> Tensor:
    """residual + the weighted sum of the answers. Stops unless every rank that got rows has computed them."""
    num_tokens, hidden_size = residual_TD.shape
    out_TD = torch.empty_like(residual_TD)
    columns = combine_columns(hidden_size)
    _collect_kernel[(num_tokens, triton.cdiv(hidden_size, columns))](
        state.region, state.rows_E, state.sent_E, state.absent, y_row_TK, weights_TK, residual_TD, out_TD, state.stop,
        layer,
        K=y_row_TK.shape[1], D=hidden_size, BD=columns, **all_ranks(state), num_warps=4,
    )  # fmt: skip
    return out_TD


def announce(state: SendState, layer: int) -> None:
    """Tell all expert workers which layer we are on our way to: 0 where a step begins, -1 if it is given up."""
    _announce_kernel[(1,)](state.region, state.present_E, state.stop, layer, **all_ranks(state), num_warps=1)


def all_ranks(state: SendState) -> dict[str, int]:
    """What kernels that look at all lanes are launched with."""
    num_ranks = state.num_ranks
    return {"E": num_ranks, "EB": triton.next_power_of_2(num_ranks), "LANE_BYTES": state.shape.lane_bytes()}


@triton.jit
def _places_of(ids_R, place_of):
    return tl.load(place_of + ids_R, mask=ids_R >= 0, other=-1)


@triton.jit(do_not_specialize=["num_rows", "layer"], do_not_specialize_on_alignment=["place_of", "expert_at"])
def _plan_kernel(
    region, ids, place_of, expert_at, present, sent, rows, y_row, unplaced, stop, num_rows, layer,
    P: tl.constexpr, S: tl.constexpr, CHUNK: tl.constexpr,
    LANE_BYTES: tl.constexpr, COUNTS_AT: tl.constexpr, COUNTS_BYTES: tl.constexpr,
    LANE_ROWS: tl.constexpr, FIRST_Y: tl.constexpr, BOX_ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program per place, and one for rows that have none. Each counts by itself what is before it in its box: that
    is faster than waiting for other programs. A place that no expert is routed to has little to do."""
    if is_stopped(stop, EARLY):
        return
    place = tl.program_id(0)
    if place == P:
        _plan_unplaced(ids, place_of, y_row, unplaced, stop, num_rows, layer, CHUNK)
    else:
        rank = place // S
        slot = place % S
        expert = tl.load(expert_at + place)
        is_there = tl.load(present + rank) != 0
        seq = tl.load(sent + rank) + 1
        box = (seq & 1).to(tl.int32)
        count = 0
        if (expert >= 0) | (slot == S - 1):
            before = 0
            for start in range(0, num_rows, CHUNK):
                r = start + tl.arange(0, CHUNK)
                places_R = _places_of(tl.load(ids + r, mask=r < num_rows, other=-1), place_of)
                before += tl.sum(((places_R >= rank * S) & (places_R < place)).to(tl.int32))
            first = rank * LANE_ROWS + FIRST_Y + box * BOX_ROWS + before
            for start in range(0, num_rows, CHUNK):
                r = start + tl.arange(0, CHUNK)
                is_own = (tl.load(ids + r, mask=r < num_rows, other=-1) == expert) & (expert >= 0) & (r < num_rows)
                row = first + count + tl.cumsum(is_own.to(tl.int32), 0) - 1
                tl.store(y_row + r, row, mask=is_own)
                count += tl.sum(is_own.to(tl.int32))
            if (count > 0) & (is_there == 0):  # the tables contradict each other: stop, as if it had no place
                tl.store(unplaced, expert + 1)
                tl.store(stop, layer + 1)
            if slot == S - 1:
                tl.store(rows + rank, tl.where(is_there, before + count, 0))
        counts_at = region + rank.to(tl.int64) * LANE_BYTES + COUNTS_AT + box * COUNTS_BYTES + slot * 4
        word = count | ((expert + 1) << _COUNT_BITS)
        tl.store(counts_at.to(tl.pointer_type(tl.int32)), word, mask=is_there)


@triton.jit
def _plan_unplaced(ids, place_of, y_row, unplaced, stop, num_rows, layer, CHUNK: tl.constexpr):
    """Rows without a place: padding has no row, anything else stops the step. The highest such expert is reported."""
    highest = 0
    for start in range(0, num_rows, CHUNK):
        r = start + tl.arange(0, CHUNK)
        ids_R = tl.load(ids + r, mask=r < num_rows, other=-1)
        has_none = _places_of(ids_R, place_of) < 0
        tl.store(y_row + r, tl.full((CHUNK,), -1, tl.int32), mask=has_none & (r < num_rows))
        highest = tl.maximum(highest, tl.max(tl.where(has_none, ids_R + 1, 0)))
    if highest > 0:
        tl.store(unplaced, highest)
        tl.store(stop, layer + 1)


@triton.jit(do_not_specialize=["layer", "next_layer", "replay"])
def _post_kernel(
    region, x, y_row, present, rows, sent, bell, lead, num_done, stop, layer, next_layer, replay,
    K: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, MAX_ROWS: tl.constexpr,
    E: tl.constexpr, EB: tl.constexpr, LANE_BYTES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Some columns of one row. The last program to finish sends for all: another kernel would take longer."""
    if is_stopped(stop, EARLY):
        return
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    x_D = tl.load(x + token * D + d, mask=d < D)
    boxes = tl.multiple_of(region.to(tl.pointer_type(tl.bfloat16)), 16)
    rows_K = ()  # all of them are loaded before the first is waited for
    for k in tl.static_range(K):
        rows_K += (tl.load(y_row + token * K + k).to(tl.int64),)  # type: ignore[assignment]
    for k in tl.static_range(K):
        tl.store(boxes + (rows_K[k] - MAX_ROWS) * D + d, x_D, mask=(d < D) & (rows_K[k] >= 0))
    tl.debug_barrier()  # what all threads have stored, before the word that says so
    num_before = tl.atomic_add(num_done, 1, sem="acq_rel", scope="gpu")
    if num_before == tl.num_programs(0) * tl.num_programs(1) - 1:
        tl.store(num_done, 0)
        send_requests(region, present, rows, sent, bell, lead, layer, next_layer, replay, E, EB, LANE_BYTES)
        note_here(stop, SENT_NOTE)


@triton.jit
def send_requests(
    region, present, rows, sent, bell, lead, layer, next_layer, replay,
    E: tl.constexpr, EB: tl.constexpr, LANE_BYTES: tl.constexpr,
):  # fmt: skip
    """x and counts are there. The flag comes before the request, since the answer to it sets the flag; our position
    comes after it, since a reader that sees that we have passed must also see what we sent."""
    ranks = tl.arange(0, EB)
    is_there = tl.load(present + ranks, mask=ranks < E, other=0) != 0
    begins = is_there & (ranks == tl.load(lead)) & (layer == 0) & (replay == 0)
    is_asked = (tl.load(rows + ranks, mask=ranks < E, other=0) > 0) | begins
    seq = tl.load(sent + ranks, mask=ranks < E, other=0) + 1
    request = (seq << 16) | (begins.to(tl.int64) << 15) | (layer.to(tl.int64) << 1) | replay.to(tl.int64)
    position = tl.zeros((EB,), tl.int32) + next_layer + 1
    flag = tl.full((EB,), -1, tl.int32)
    tl.atomic_xchg(words32(region, ranks, LANE_BYTES, FLAG), flag, mask=is_asked, sem="relaxed", scope="sys")
    tl.debug_barrier()
    tl.atomic_xchg(words64(region, ranks, LANE_BYTES, REQUEST), request, mask=is_asked, sem="release", scope="sys")
    tl.debug_barrier()
    tl.atomic_xchg(words32(region, ranks, LANE_BYTES, POSITION), position, mask=is_there, sem="release", scope="sys")
    bells = tl.load(bell + ranks, mask=ranks < E, other=0)
    ring = tl.full((EB,), 1, tl.int32)
    has_bell = is_asked & (bells != 0)
    tl.atomic_xchg(bells.to(tl.pointer_type(tl.int32)), ring, mask=has_bell, sem="release", scope="sys")
    tl.store(sent + ranks, seq, mask=is_asked)


@triton.jit(do_not_specialize=["layer"])
def _collect_kernel(
    region, rows, sent, absent, y_row, weights, residual, out, stop, layer,
    K: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, EB: tl.constexpr, LANE_BYTES: tl.constexpr,
):  # fmt: skip
    """Some columns of one row. Each program checks by itself. If some see an answer that other programs do not see yet,
    the step stops all the same, and what they have stored is stored once more when it goes on."""
    note(stop, COLLECT_NOTE)
    if tl.load(stop) != 0:
        return
    if is_answered(region, rows, sent, absent, stop, layer, E, EB, LANE_BYTES):
        combine_row(region, y_row, weights, residual, out, K, D, BD)


@triton.jit
def is_answered(
    region, rows, sent, absent, stop, layer, E: tl.constexpr, EB: tl.constexpr, LANE_BYTES: tl.constexpr
):  # fmt: skip
    """Whether every rank that got rows has computed them; else the step stops here."""
    ranks = tl.arange(0, EB)
    is_asked = tl.load(rows + ranks, mask=ranks < E, other=0) > 0
    seq = tl.load(sent + ranks, mask=ranks < E, other=0)
    answer = tl.atomic_add(words64(region, ranks, LANE_BYTES, ANSWER), 0, mask=is_asked, sem="acquire", scope="sys")
    status = tl.load(words64(region, ranks, LANE_BYTES, STATUS), mask=is_asked, other=0, volatile=True)
    is_absent = is_asked & ((answer != seq) | (status != 0))
    bits = tl.sum(is_absent.to(tl.int64) << ranks.to(tl.int64))
    if bits != 0:
        tl.store(absent, bits)
        tl.store(stop, layer + 1)
    return bits == 0


@triton.jit(do_not_specialize=["layer"])
def _announce_kernel(region, present, stop, layer, E: tl.constexpr, EB: tl.constexpr, LANE_BYTES: tl.constexpr):
    if tl.load(stop) != 0:
        return
    ranks = tl.arange(0, EB)
    is_there = tl.load(present + ranks, mask=ranks < E, other=0) != 0
    position = tl.zeros((EB,), tl.int32) + layer + 1
    tl.atomic_xchg(words32(region, ranks, LANE_BYTES, POSITION), position, mask=is_there, sem="release", scope="sys")
