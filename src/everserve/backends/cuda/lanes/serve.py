"""The expert worker's kernels: one batch of one layer, out of the lanes of all attention workers.

    choose -> gather -> gate_up -> down and answer                     of experts or slices (ops/experts.py)
    choose -> gather -> project -> attend -> merge and answer          of heads (ops/heads.py)

`choose` looks for requests and decides as seam/batching.py says (`choose_layer` with the policy `ON_GPUS`). Which
attention workers have to stand back at the beginning of a step is decided by one expert worker, the lead that the
attention workers name (send.py): deciding independently, two expert workers can hold back each other's beginners, and
so deadlock until their patience ends.

It copies the counts of the boxes into this worker's own memory, and checks them: whatever a dying peer writes into its
lane, before or after, costs that peer a request and cannot crash this worker. It also compares the experts
that the counts are for with those that the slots hold now; the host empties a slot first, and overwrites its weights
only when all graphs have ended that may have seen it held (slots.py).

`gather` counts the rows of each expert, which is how a planner knows the load.

If there is nothing to do there are no tiles, and the other kernels fall through. Where heads are divided a graph has
both rows of kernels, one after the other, and each `choose` leaves what is of the other kind to the next one: in a step
calls of both kinds take turns, so in the long run no kernel is launched for nothing.

A CUDA stream that has nothing to do waits for its *bell*: a word that each sender sets after a request. `choose` clears
it before it looks, and sets it again if it leaves requests for the next time; also if a running step will send more,
since polling is faster than being woken.

One graph may serve batches of all sizes: then both products are queued for two cuts, of which `gather` chooses one.
Then too it is the last kernel that answers.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from everserve.backends.cuda.lanes.head_batch import HeadBatch
from everserve.backends.cuda.lanes.lane import COUNT_BITS, CudaLaneShape
from everserve.backends.cuda.lanes.words import ANSWER, FLAG, POSITION, REQUEST, STATUS, words32, words64
from everserve.backends.cuda.ops.experts import MANY_ROWS, SOME_ROWS, ExpertArena, Tiles, down, down_tiles
from everserve.backends.cuda.ops.heads import HeadArena, merge, merge_rows
from everserve.backends.cuda.ops.pdl import await_before, early, is_stopped
from everserve.backends.cuda.ops.sorting import write_tiles
from everserve.backends.cuda.ops.timeline import ANSWERED_NOTE, CHOOSE_NOTE, CHOSEN_NOTE, note, note_here
from everserve.seam.batching import JUST_BEGUN, ON_GPUS, ORDINARY
from everserve.seam.outcomes import Status

_ROWS_AT_A_TIME = 64
# A long kernel keeps other processes off the device, so `choose` polls for 0.2 ms at most, and hardly at all if there
# is no request and no attention worker is in the middle of a step. It may wait longer than that, in several launches.
_POLL_US = 0.6
MAX_SPINS = 320
_LIMITS = (MAX_SPINS, round(ON_GPUS.hold_us / _POLL_US), round(ON_GPUS.first_hold_us / _POLL_US))
_IDLE_COST = tl.constexpr(16)  # of a look at nothing, in polls
_BAD = tl.constexpr(int(Status.BAD_REQUEST))
_MOVED = tl.constexpr(int(Status.MOVED))
_COUNT_BITS = tl.constexpr(COUNT_BITS)
_COUNT_MASK = tl.constexpr((1 << COUNT_BITS) - 1)
_IS_MOVED = tl.constexpr(-(1 << 31))  # in a slot's word of an answer
_ORDINARY = tl.constexpr(ORDINARY)  # layers have 14 bits
_NOTHING = tl.constexpr(2 * ORDINARY)
_JUST_BEGUN = tl.constexpr(JUST_BEGUN)
_BEGINNING = tl.constexpr(JUST_BEGUN + 1)  # the position of one that has just begun; positions are layers + 1
_NEVER = 1 << 30
NUM_COUNTERS = 4  # besides those of rows by expert


@dataclass(frozen=True)
class ServeState:
    """What the kernels know of the lanes of attention ranks 0..A-1, and the batch at hand.

    region is the address of the lane of rank 0. The host changes `healthy_A` and maps or unmaps lanes only while no
    kernel of this worker runs; it may change `limits` at any time, and `held_LS` as its slots change (server.py).
    """

    shape: CudaLaneShape
    region: int
    stop: Tensor
    max_rows: int  # of a batch
    bell: int  # its address; 0: no stream waits for it
    healthy_A: Tensor  # int32, 1: look at this lane. Where it is 0, nothing is touched
    taken_A: Tensor  # int64: the last request that was answered. 0 with a new lane
    held_LS: Tensor  # int32: the expert in this slot, or -1
    limits: Tensor  # int32: max_spins, patience, first_patience, in polls of about 0.6 us
    num_waits: Tensor  # int32: how long there has been nothing but waiting for company, in polls
    num_passed: Tensor  # int32: batches since an attention worker stands back
    layer: Tensor  # int32: the layer of this batch, or -1
    seq_A: Tensor  # int64: the requests that are answered with this batch, or 0
    status_A: Tensor  # int64: the answers
    counts_AS: Tensor  # int32
    x_row_R: Tensor  # int32, in rows from the region's beginning
    y_row_R: Tensor
    num_rows: Tensor  # int32
    num_done: Tensor  # int32: programs of the last kernel that have done their part
    tiles: Tiles  # of SOME_ROWS
    large_tiles: Tiles  # of MANY_ROWS; one of both is empty
    counters: Tensor  # int64: the two below, side by side
    served: Tensor  # int64: batches, rows, refusals, and rows of replays since the beginning
    rows_LN: Tensor  # int64: rows of each expert since the beginning
    heads: HeadBatch | None = None  # if it may be one of heads

    @classmethod
    def empty(
        cls,
        shape: CudaLaneShape,
        region: int,
        num_ranks: int,
        num_layers: int,
        max_rows: int,
        stop: Tensor,
        bell: int = 0,
        num_experts: int = 1,
        is_head_L: Tensor | None = None,
    ) -> "ServeState":
        """`max_rows`: of a batch; at least what one lane can bring. `num_experts`: of the model, per layer.
        `is_head_L`: where heads are divided, 1 for calls about heads; a layer here is a call then."""
        shape.check(num_ranks)
        assert max_rows >= shape.max_rows and num_layers < 1 << 14
        device, num_slots = stop.device, shape.num_slots

        def zeros(*size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        tiles = Tiles.empty(max_rows, num_slots, SOME_ROWS, device)
        counters = zeros(NUM_COUNTERS + num_layers * num_experts, dtype=torch.int64)
        return cls(
            shape,
            region,
            stop,
            max_rows,
            bell,
            healthy_A=zeros(num_ranks),
            taken_A=zeros(num_ranks, dtype=torch.int64),
            held_LS=zeros(num_layers, num_slots) - 1,
            limits=torch.tensor(_LIMITS, dtype=torch.int32, device=device),
            num_waits=zeros(1),
            num_passed=zeros(1),
            layer=zeros(1),
            seq_A=zeros(num_ranks, dtype=torch.int64),
            status_A=zeros(num_ranks, dtype=torch.int64),
            counts_AS=zeros(num_ranks, num_slots),
            x_row_R=zeros(max_rows),
            y_row_R=zeros(max_rows),
            num_rows=zeros(1),
            num_done=zeros(1),
            tiles=tiles,
            large_tiles=tiles.alternative(MANY_ROWS),
            counters=counters,
            served=counters[:NUM_COUNTERS],
            rows_LN=counters[NUM_COUNTERS:].view(num_layers, num_experts),
            heads=None if is_head_L is None else HeadBatch.empty(is_head_L, tiles, num_ranks * num_slots, max_rows),
        )

    @property
    def num_ranks(self) -> int:
        return len(self.healthy_A)


def choose(state: ServeState, of_heads: bool | None = None) -> None:
    """Look for requests, for limits[0] polls at most; take those of one layer. `of_heads`: only if that is about heads,
    or only if it is not; otherwise it is left for the next time. None: whatever it is about."""
    shape, (num_layers, num_slots) = state.shape, state.held_LS.shape
    _choose_kernel[(1,)](
        state.region, state.bell, state.healthy_A, state.taken_A, state.held_LS, state.limits, state.num_waits,
        state.num_passed, state.layer, state.seq_A, state.status_A, state.counts_AS, state.served, state.stop,
        state.heads.is_head_L if state.heads is not None and of_heads is not None else None,
        OF_HEADS=bool(of_heads), **_all_ranks(state), S=num_slots, SB=triton.next_power_of_2(num_slots), L=num_layers,
        LANE_BYTES=shape.lane_bytes(), COUNTS_AT=shape.counts_at(0), COUNTS_BYTES=shape.counts_bytes,
        LANE_MAX_ROWS=shape.max_rows, MAX_ROWS=state.max_rows, HAS_BELL=state.bell != 0,
        ON_DEVICE=state.stop.is_cuda, num_warps=1,
    )  # fmt: skip


def gather(state: ServeState, may_be_large: bool = True, of_heads: bool = False) -> None:
    """Which rows of which boxes, sorted by slot, and the tiles of the products. Without `may_be_large` all of them are
    in `tiles`, which is slow if there are many. A batch of heads has tiles of its own, and jobs."""
    shape, batch = state.shape, state.heads if of_heads else None
    tiles, large = (state.tiles, state.large_tiles) if batch is None else (batch.tiles, batch.large_tiles)
    large_rows = large.cut.rows if may_be_large else _NEVER
    jobs = (None,) * 8 if batch is None else batch.arguments
    _gather_kernel[(shape.num_slots,)](
        state.seq_A, state.counts_AS, state.x_row_R, state.y_row_R, state.num_rows,
        tiles.slot_M, tiles.row_M, tiles.size_M, tiles.num_tiles, large.num_tiles,
        state.layer, state.held_LS, state.rows_LN, state.stop, *jobs,
        **_all_ranks(state), S=shape.num_slots, SB=triton.next_power_of_2(shape.num_slots), N=state.rows_LN.shape[1],
        LANE_ROWS=shape.lane_rows(), FIRST_X=shape.first_x(0), BOX_ROWS=shape.box_rows, LANE_MAX_ROWS=shape.max_rows,
        BM=tiles.cut.rows, LARGE_BM=large_rows, BR=_ROWS_AT_A_TIME, **early(state.stop.device), num_warps=4,
    )  # fmt: skip


def down_and_answer(
    state: ServeState, h_RF: Tensor, arena: ExpertArena, tiles: Tiles, slice_index: int = 0, num_slices: int = 1
) -> None:
    """The last product. Its last program to finish answers all requests of the batch. (One kernel less between the
    last row and the attention workers that wait for it.)"""
    down(
        h_RF, arena, state.layer, tiles, state.region, state.y_row_R, state.stop, slice_index, num_slices,
        kernel=_down_and_answer_kernel,
        arguments=(state.num_done, state.seq_A, state.status_A, state.taken_A, state.num_rows, state.served),
        **_all_ranks(state), LANE_BYTES=state.shape.lane_bytes(),
    )  # fmt: skip


def merge_and_answer(state: ServeState, arena: HeadArena) -> None:
    """The last kernel of a batch of heads, which answers likewise."""
    assert state.heads is not None
    merge(
        state.region, state.shape, state.heads, arena, state.y_row_R, state.stop,
        kernel=_merge_and_answer_kernel,
        arguments=(state.num_done, state.seq_A, state.status_A, state.taken_A, state.num_rows, state.served),
        **_all_ranks(state),
    )  # fmt: skip


def _all_ranks(state: ServeState) -> dict[str, int]:
    return {"A": state.num_ranks, "AB": triton.next_power_of_2(state.num_ranks)}


@triton.jit
def _layers_of(request):
    return ((request >> 1) & 0x3FFF).to(tl.int32)


@triton.jit
def _look(
    region, ranks, is_healthy, last, limits, num_waits_at, num_passed_at, is_head_L,
    A: tl.constexpr, AB: tl.constexpr, L: tl.constexpr, LANE_BYTES: tl.constexpr, ON_DEVICE: tl.constexpr,
    OF_HEADS: tl.constexpr,
):  # fmt: skip
    """The layer to compute, or -1; and the last request of each attention worker."""
    spins = tl.load(limits)
    patience = tl.load(limits + 1)
    first_patience = tl.load(limits + 2)
    num_waits = tl.load(num_waits_at)
    num_passed = tl.load(num_passed_at)
    requests = words64(region, ranks, LANE_BYTES, REQUEST)
    positions = words32(region, ranks, LANE_BYTES, POSITION)

    request = tl.zeros((AB,), tl.int64)
    chosen = -1
    num_back = 0
    while spins > 0:
        # The position first: a worker that has passed a layer has sent its request before, which is then seen below.
        position = tl.atomic_add(positions, 0, mask=is_healthy, sem="acquire", scope="sys")
        request = tl.atomic_add(requests, 0, mask=is_healthy, sem="acquire", scope="sys")
        is_new = is_healthy & ((request >> 16) > last)
        may_stand_back = (num_waits < first_patience) & (num_passed < A * L)
        first, num_back = _first(request, position, is_healthy, is_new, may_stand_back, L)
        layer = first % _ORDINARY
        is_coming = is_healthy & (is_new == 0) & (position > 0) & (position - 1 <= layer)
        is_coming &= (position > _BEGINNING) | (layer <= _JUST_BEGUN)
        limit = tl.where(layer == 0, first_patience, patience)
        waits = (first >= _ORDINARY) & (num_waits < limit) & (tl.sum(is_coming.to(tl.int32)) > 0)
        chosen = tl.where((first == _NOTHING) | waits, -1, layer)
        is_idle = (first == _NOTHING) & (num_back == 0)
        num_waits = tl.where(chosen >= 0, num_waits, tl.where(is_idle, 0, num_waits + 1))
        num_nonsense = tl.sum((is_new & (_layers_of(request) >= L)).to(tl.int32))
        is_amid = is_healthy & (position >= _BEGINNING)
        spins -= tl.where(is_idle & (tl.sum(is_amid.to(tl.int32)) == 0), _IDLE_COST, 1)
        spins = tl.where((chosen >= 0) | (num_nonsense > 0), 0, spins)
        if ON_DEVICE:  # noqa: SIM102 (a constant of the kernel, and a value)
            if spins > 0:
                spins = _after_nap(spins)
    if is_head_L is not None:  # what is left for the next time has waited long enough then, too
        is_head = tl.load(is_head_L + chosen, mask=chosen >= 0, other=0) != 0
        chosen = tl.where(is_head == OF_HEADS, chosen, -1)
    tl.store(num_waits_at, tl.where(chosen >= 0, 0, num_waits))
    tl.store(num_passed_at, tl.where(num_back == 0, 0, tl.where(chosen >= 0, num_passed + 1, num_passed)))
    return chosen, request


@triton.jit
def _after_nap(value):
    """The same, a quarter of a microsecond later: other programs need this multiprocessor."""
    return tl.inline_asm_elementwise(
        "nanosleep.u32 250; mov.u32 $0, $1;", "=r,r", [value], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _first(request, position, is_healthy, is_new, may_stand_back, L: tl.constexpr):
    """The urgency of what comes first among what was asked for, or _NOTHING; and how many stand back."""
    layers = _layers_of(request)
    urgency = tl.where((request & 1) == 1, layers, layers + _ORDINARY)
    is_amid = is_healthy & (tl.where(is_new, layers, position - 1) > _JUST_BEGUN)
    stands_back = is_new & ((request >> 15) & 1 == 1) & may_stand_back & (tl.sum(is_amid.to(tl.int32)) > 0)
    first = tl.min(tl.where(is_new & (layers < L) & (stands_back == 0), urgency, _NOTHING))
    return first, tl.sum(stands_back.to(tl.int32))


@triton.jit
def _choose_kernel(
    region, bell, healthy, taken, held_LS, limits, num_waits_at, num_passed_at,
    layer_at, seq_A, status_A, counts_AS, served, stop, is_head_L,
    OF_HEADS: tl.constexpr, A: tl.constexpr, AB: tl.constexpr, S: tl.constexpr, SB: tl.constexpr, L: tl.constexpr,
    LANE_BYTES: tl.constexpr, COUNTS_AT: tl.constexpr, COUNTS_BYTES: tl.constexpr,
    LANE_MAX_ROWS: tl.constexpr, MAX_ROWS: tl.constexpr, HAS_BELL: tl.constexpr,
    ON_DEVICE: tl.constexpr,
):  # fmt: skip
    note(stop, CHOOSE_NOTE)
    if tl.load(stop) != 0:
        return
    if HAS_BELL:
        tl.atomic_xchg(bell.to(tl.pointer_type(tl.int32)), 0, sem="acq_rel", scope="sys")
    ranks = tl.arange(0, AB)
    is_healthy = tl.load(healthy + ranks, mask=ranks < A, other=0) != 0
    last = tl.load(taken + ranks, mask=ranks < A, other=0)
    chosen, request = _look(
        region, ranks, is_healthy, last, limits, num_waits_at, num_passed_at, is_head_L,
        A, AB, L, LANE_BYTES, ON_DEVICE, OF_HEADS,
    )  # fmt: skip
    tl.store(layer_at, chosen)
    if chosen >= 0:
        note(stop, CHOSEN_NOTE + chosen)

    seq = request >> 16
    is_new = is_healthy & (seq > last)
    is_nonsense = is_new & (_layers_of(request) >= L)
    is_ours = is_new & (_layers_of(request) == chosen)
    slots = tl.arange(0, SB)
    boxes = region + ranks.to(tl.int64) * LANE_BYTES + COUNTS_AT + (seq & 1) * COUNTS_BYTES
    words_at = (boxes[:, None] + slots[None, :] * 4).to(tl.pointer_type(tl.int32))
    is_word = is_ours[:, None] & (slots < S)[None, :]
    words = tl.load(words_at, mask=is_word, other=0)
    counts = words & _COUNT_MASK
    named = (words >> _COUNT_BITS) - 1
    held = tl.load(held_LS + chosen * S + slots, mask=(slots < S) & (chosen >= 0), other=-1)
    is_sane = (counts == 0) | ((named >= 0) & (counts <= LANE_MAX_ROWS))
    counts = tl.where(is_sane, counts, 0)
    num_rows = tl.sum(counts, axis=1)
    is_bad = (tl.min(is_sane.to(tl.int32), axis=1) == 0) | (num_rows > LANE_MAX_ROWS) | is_nonsense
    is_moved = (counts > 0) & (named != held[None, :])
    num_moved = tl.sum(is_moved.to(tl.int32), axis=1)
    if tl.sum(num_moved) > 0:
        tl.store(words_at, words | _IS_MOVED, mask=is_word & is_moved)
    status = tl.where(is_bad, _BAD, tl.where(num_moved > 0, _MOVED, 0))
    # What is too much is left for the next batch.
    fits = tl.cumsum(tl.where(is_ours & (status == 0), num_rows, 0), 0) <= MAX_ROWS
    is_served = is_ours & (status == 0) & fits
    is_answered = is_served | ((is_ours | is_nonsense) & (status != 0))
    if HAS_BELL:  # noqa: SIM102 (a constant of the kernel, and a value)
        if (tl.sum((is_new & (is_answered == 0)).to(tl.int32)) > 0) | ((chosen >= 0) & (chosen < L - 1)):
            tl.atomic_xchg(bell.to(tl.pointer_type(tl.int32)), 1, sem="relaxed", scope="sys")
    num_replayed = tl.sum(tl.where(is_served & ((request & 1) == 1), num_rows, 0))
    if num_replayed > 0:
        tl.store(served + 3, tl.load(served + 3) + num_replayed)
    tl.store(seq_A + ranks, tl.where(is_answered, seq, 0), mask=ranks < A)
    tl.store(status_A + ranks, status.to(tl.int64), mask=ranks < A)
    is_entry = (ranks < A)[:, None] & (slots < S)[None, :]
    tl.store(counts_AS + ranks[:, None] * S + slots[None, :], tl.where(is_served[:, None], counts, 0), mask=is_entry)


@triton.jit
def _gather_kernel(
    seq_A, counts_AS, x_row, y_row, num_rows, slot_M, row_M, size_M, num_tiles, num_large_tiles,
    layer_at, held_LS, rows_LN, stop,
    num_jobs, job_lane, job_slot, job_row, job_size, row_lane, row_token, row_slot,
    A: tl.constexpr, AB: tl.constexpr, S: tl.constexpr, SB: tl.constexpr, N: tl.constexpr,
    LANE_ROWS: tl.constexpr, FIRST_X: tl.constexpr, BOX_ROWS: tl.constexpr, LANE_MAX_ROWS: tl.constexpr,
    BM: tl.constexpr, LARGE_BM: tl.constexpr, BR: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program per slot; each adds up all counts by itself."""
    if is_stopped(stop, EARLY):
        return
    slot = tl.program_id(0)
    ranks = tl.arange(0, AB)
    slots = tl.arange(0, SB)
    is_entry = (ranks < A)[:, None] & (slots < S)[None, :]
    counts = tl.load(counts_AS + ranks[:, None] * S + slots[None, :], mask=is_entry, other=0)
    box = (tl.load(seq_A + ranks, mask=ranks < A, other=0) & 1).to(tl.int32)

    total_S = tl.sum(counts, axis=0)
    is_large = tl.max(total_S) > LARGE_BM
    rows_per_tile = tl.where(is_large, LARGE_BM, BM)
    tiles_S = (total_S + rows_per_tile - 1) // rows_per_tile
    first_row = tl.sum(tl.where(slots < slot, total_S, 0))
    first_tile = tl.sum(tl.where(slots < slot, tiles_S, 0))
    own = tl.sum(tl.where(slots == slot, total_S, 0))
    write_tiles(slot_M, row_M, size_M, slot, first_tile, first_row, own, rows_per_tile)
    layer = tl.load(layer_at)
    if slot == 0:
        tl.store(num_rows, tl.sum(total_S))
        tl.store(num_tiles, tl.where(is_large, 0, tl.sum(tiles_S)))
        tl.store(num_large_tiles, tl.where(is_large, tl.sum(tiles_S), 0))
        if num_jobs is not None:
            tl.store(num_jobs, tl.sum((counts > 0).to(tl.int32)))

    if own > 0:
        expert = tl.load(held_LS + layer * S + slot)  # -1 if the host empties the slot just now
        tl.atomic_add(rows_LN + layer * N + expert, own.to(tl.int64), mask=(expert >= 0) & (expert < N), sem="relaxed")

    # Of this slot's rows, lane a has begin_A[a] up to end_A[a]; in its box they lie behind those of lower slots.
    own_A = tl.sum(tl.where((slots == slot)[None, :], counts, 0), axis=1)
    lower_A = tl.sum(tl.where((slots < slot)[None, :], counts, 0), axis=1)
    end_A = tl.cumsum(own_A, 0)
    begin_A = end_A - own_A
    offset_A = ranks * LANE_ROWS + FIRST_X + box * BOX_ROWS + lower_A - begin_A
    if num_jobs is not None:
        first_job = tl.sum(tl.sum(((counts > 0) & (slots < slot)[None, :]).to(tl.int32), axis=1), axis=0)
        is_job = own_A > 0
        job_A = first_job + tl.cumsum((own_A > 0).to(tl.int32), 0) - 1
        tl.store(job_lane + job_A, ranks, mask=is_job)
        tl.store(job_slot + job_A, tl.zeros((AB,), tl.int32) + slot, mask=is_job)
        tl.store(job_row + job_A, first_row + begin_A, mask=is_job)
        tl.store(job_size + job_A, own_A, mask=is_job)
    for start in range(0, own, BR):
        i = start + tl.arange(0, BR)
        is_from = (i[:, None] >= begin_A[None, :]) & (i[:, None] < end_A[None, :])
        row = i + tl.sum(tl.where(is_from, offset_A[None, :], 0), axis=1)
        tl.store(x_row + first_row + i, row, mask=i < own)
        tl.store(y_row + first_row + i, row + LANE_MAX_ROWS, mask=i < own)
        if num_jobs is not None:
            lane = tl.sum(tl.where(is_from, ranks[None, :], 0), axis=1)
            tl.store(row_lane + first_row + i, lane, mask=i < own)
            token = i - tl.sum(tl.where(is_from, begin_A[None, :], 0), axis=1)
            tl.store(row_token + first_row + i, token, mask=i < own)
            tl.store(row_slot + first_row + i, tl.zeros((BR,), tl.int32) + slot, mask=i < own)


@triton.jit(do_not_specialize=["slice_index", "num_slices"], do_not_specialize_on_alignment=["layer_at"])
def _down_and_answer_kernel(
    h, weights, region, y_row, layer_at, places, biases, slot_M, row_M, size_M, num_tiles, stop, slice_index,
    num_slices, num_done, seq_A, status_A, taken, num_rows, served,
    S: tl.constexpr, D: tl.constexpr, F: tl.constexpr, PLACE_ROWS: tl.constexpr, BIAS_STEP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, BAND: tl.constexpr,
    EARLY: tl.constexpr, A: tl.constexpr, AB: tl.constexpr, LANE_BYTES: tl.constexpr,
):  # fmt: skip
    await_before(EARLY)
    down_tiles(
        h, weights, region, y_row, layer_at, places, biases, slot_M, row_M, size_M, num_tiles, stop, slice_index,
        num_slices, S, D, F, PLACE_ROWS, BIAS_STEP, BM, BN, BK, STAGES, BAND,
    )  # fmt: skip
    if tl.load(stop) == 0:
        _answer_if_last(region, num_done, seq_A, status_A, taken, num_rows, served, stop, A, AB, LANE_BYTES)


@triton.jit
def _merge_and_answer_kernel(
    region, num_jobs, job_lane, job_row, job_size, y_row, is_split, part_best, part_total, part_sum, stop,
    num_done, seq_A, status_A, taken, num_rows, served,
    M: tl.constexpr, E: tl.constexpr, J: tl.constexpr, D: tl.constexpr, LANE_BYTES: tl.constexpr,
    PAGE_AT: tl.constexpr, POSITIONS_AT: tl.constexpr, MAX_SEQS: tl.constexpr, MAX_SEGMENTS: tl.constexpr,
    SEGMENT: tl.constexpr, HEADS: tl.constexpr, EARLY: tl.constexpr, A: tl.constexpr, AB: tl.constexpr,
):  # fmt: skip
    if is_stopped(stop, EARLY):
        return
    merge_rows(
        region, num_jobs, job_lane, job_row, job_size, y_row, is_split, part_best, part_total, part_sum,
        M, E, J, D, LANE_BYTES, PAGE_AT, POSITIONS_AT, MAX_SEQS, MAX_SEGMENTS, SEGMENT, HEADS,
    )  # fmt: skip
    _answer_if_last(region, num_done, seq_A, status_A, taken, num_rows, served, stop, A, AB, LANE_BYTES)


@triton.jit
def _answer_if_last(
    region, num_done, seq_A, status_A, taken, num_rows, served, stop,
    A: tl.constexpr, AB: tl.constexpr, LANE_BYTES: tl.constexpr,
):  # fmt: skip
    """Each program comes here when it has done its part."""
    tl.debug_barrier()  # what all threads have stored, before the word that says so
    num_before = tl.atomic_add(num_done, 1, sem="acq_rel", scope="gpu")
    if num_before == tl.num_programs(0) - 1:
        tl.store(num_done, 0)
        _answer(region, seq_A, status_A, taken, num_rows, served, A, AB, LANE_BYTES)
        note_here(stop, ANSWERED_NOTE)


@triton.jit
def _answer(
    region, seq_A, status_A, taken, num_rows, served, A: tl.constexpr, AB: tl.constexpr, LANE_BYTES: tl.constexpr
):  # fmt: skip
    """All y are written. The flag comes last: it wakes the attention worker's stream, which reads the other words."""
    ranks = tl.arange(0, AB)
    seq = tl.load(seq_A + ranks, mask=ranks < A, other=0)
    status = tl.load(status_A + ranks, mask=ranks < A, other=0)
    is_answered = seq > 0
    flag = tl.zeros((AB,), tl.int32)
    tl.store(words64(region, ranks, LANE_BYTES, STATUS), status, mask=is_answered)
    tl.debug_barrier()
    tl.atomic_xchg(words64(region, ranks, LANE_BYTES, ANSWER), seq, mask=is_answered, sem="release", scope="sys")
    tl.debug_barrier()
    tl.atomic_xchg(words32(region, ranks, LANE_BYTES, FLAG), flag, mask=is_answered, sem="release", scope="sys")
    tl.store(taken + ranks, seq, mask=is_answered)
    rows = tl.load(num_rows).to(tl.int64)
    num_refused = tl.sum((is_answered & (status != 0)).to(tl.int64))
    tl.store(served, tl.load(served) + tl.where(rows > 0, 1, 0))
    tl.store(served + 1, tl.load(served + 1) + rows)
    tl.store(served + 2, tl.load(served + 2) + num_refused)
