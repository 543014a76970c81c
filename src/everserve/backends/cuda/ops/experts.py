"""The expert networks, down(activation(gate x) * up x), with or without biases, for many experts in one go.

Rows are sorted by slot, so that each expert's weights are read once and its rows are computed together:

    ids_TK      3 0 | 3 1 | 0 3            which expert, for each row (t, k)
    sorted      t0 t2 | t1 | t0 t1 t2      src_R: the token of each sorted row
    slot        0     | 1  | 3
    tiles       (0, first 0, 2 rows) (1, first 2, 1 row) (3, first 3, 3 rows)

    plan_local -> gate_up: h_RF -> down: y -> combine: residual + the weighted sum over k

How many rows a slot has is known on the device only. So `plan_local` writes a list of *tiles*, up to `rows` rows of one
slot each, and the two products are persistent: a fixed number of programs walks over tiles x columns (walk.py).
Neighbours in that walk have the same columns of the same slot, or of the next one: weights come from memory once.

Weights come through TMA descriptors: with plain loads these kernels reach half the bandwidth of the memory, with
descriptors nearly all of it. x and y lie wherever rows lie, in lanes for instance, which are not torch tensors: they
are given as the address of row 0, and the caller must keep them mapped.

No sum is split along its length, so a row's bits depend neither on its neighbours nor on the shape of tiles.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from everserve.backends.cuda.ops.pdl import await_before, early, is_stopped
from everserve.backends.cuda.ops.sorting import Sorted, sort_by_slot
from everserve.backends.cuda.ops.timeline import PRODUCT_NOTE, note
from everserve.backends.cuda.ops.walk import tile_and_column
from everserve.model.ops import SILU
from everserve.model.spec import Activation, ActivationKind

_COMBINE_COLUMNS = 512  # 4 per thread: more, and the rows of 8 experts would not fit into registers at once
_ALIGNMENT = 32  # of tables, in int32
_INTERPRETED_PROGRAMS = 3  # any number must do
_ACTIVATIONS = {kind: number for number, kind in enumerate(ActivationKind)}
_GELU_TANH = tl.constexpr(_ACTIVATIONS[ActivationKind.GELU_TANH])
_RELU = tl.constexpr(_ACTIVATIONS[ActivationKind.RELU])
_CLAMPED_SWIGLU = tl.constexpr(_ACTIVATIONS[ActivationKind.CLAMPED_SWIGLU])


class Product(NamedTuple):
    """How one matrix product is cut, and how it is run."""

    columns: int  # of the result, per tile
    depth: int  # how much of a row is multiplied at a time
    stages: int
    warps: int
    programs: int  # per multiprocessor
    band: int = 0  # tiles that are walked over together (walk.py)


class Cut(NamedTuple):
    """Tile shapes. Any cut is right for any batch, with the same bits; they differ in speed."""

    rows: int
    gate_up: Product
    down: Product


FEW_ROWS = Cut(16, Product(64, 128, 3, 4, 2), Product(64, 128, 4, 4, 2))
SOME_ROWS = Cut(64, Product(128, 64, 4, 4, 1), Product(128, 64, 4, 4, 2))
# The second product is short where experts are small: two programs, one of which computes while the other one begins or
# stores a tile. The first has two sums for each of its columns, and no room for that.
MANY_ROWS = Cut(128, Product(128, 64, 4, 8, 1, 16), Product(128, 64, 3, 8, 2, 16))


def cut_for(max_rows_per_slot: int) -> Cut:
    """The cut for about so many rows in the fullest slot."""
    if max_rows_per_slot <= FEW_ROWS.rows:
        return FEW_ROWS
    return SOME_ROWS if max_rows_per_slot <= 2 * SOME_ROWS.rows else MANY_ROWS


@dataclass(frozen=True)
class Tiles:
    """What to compute: `num_tiles` tiles of up to `cut.rows` sorted rows of one slot. Written by kernels; all int32."""

    slot_M: Tensor
    row_M: Tensor  # the first of its sorted rows
    size_M: Tensor  # how many there are
    num_tiles: Tensor  # the first element
    cut: Cut

    @classmethod
    def empty(cls, max_rows: int, num_slots: int, cut: Cut, device: torch.device) -> "Tiles":
        """Room for any distribution of so many rows. Nothing is in it before a kernel has written it."""
        max_tiles = num_slots + max_rows // cut.rows
        # Triton compiles kernels anew for pointers that are aligned otherwise.
        padded = triton.cdiv(max_tiles, _ALIGNMENT) * _ALIGNMENT
        slot_M, row_M, size_M, num_tiles = torch.empty(4, padded, dtype=torch.int32, device=device)
        return cls(slot_M, row_M, size_M, num_tiles, cut)

    def alternative(self, cut: Cut) -> "Tiles":
        """The same lists for another cut, with its own count: the kernel that writes them decides which cut is used."""
        assert cut.rows >= self.cut.rows
        return Tiles(self.slot_M, self.row_M, self.size_M, torch.empty_like(self.num_tiles), cut)


class LocalPlan(NamedTuple):
    """Where each row goes. `pos_TK`: its place among the sorted rows, or -1. `src_R`: the token of each sorted row."""

    pos_TK: Tensor
    src_R: Tensor
    tiles: Tiles


class ExpertArena:
    """The weights of all slots of all layers, in the caller's memory, and the descriptors for them.

    The memory consists of *places* for one expert each. Which place a slot of a layer has is in a table on the device
    (`place_LS`), so a slot can get another place, in memory of another process for instance, and no kernel or captured
    graph changes. At first slot s of layer l has place l * num_own + s.

    gate_up   [.., D]    of each place the rows of gate, then those of up
    down      [.., F]
    """

    def __init__(
        self,
        gate_up: Tensor,
        down: Tensor,
        num_layers: int,
        num_slots: int,
        gate_up_rows: int | None = None,
        down_rows: int | None = None,
        num_own: int | None = None,
        *,
        activation: Activation = SILU,
        biases: Tensor | None = None,
        bias_step: int = 0,
    ) -> None:
        """`gate_up_rows`, `down_rows`: from one place to the next; as many as a place has unless they are given.
        `num_own`: of each layer, the slots that have a place at first; all of them unless it is given. `biases`: the
        numbers from the biases of the first place on, which are `bias_step` in front of those of the next."""
        self.activation, self.biases, self.bias_step = activation, biases, bias_step
        self.num_layers = num_layers
        self.num_slots = num_slots
        self._num_own = num_slots if num_own is None else num_own
        self.hidden_size, self.expert_size = gate_up.shape[1], down.shape[1]
        self.gate_up_rows = gate_up_rows or 2 * self.expert_size
        self.down_rows = down_rows or self.hidden_size
        assert self.hidden_size % 8 == 0 and self.expert_size % 8 == 0, "rows must begin at multiples of 16 bytes"
        assert gate_up.dtype == down.dtype == torch.bfloat16 and gate_up.is_contiguous() and down.is_contiguous()
        assert max(len(gate_up), len(down)) < 1 << 31, "a descriptor's rows have numbers of 32 bits"
        self._gate_up = gate_up
        self.down_matrix = down
        self.gate_up = functools.cache(functools.partial(_descriptor, gate_up))
        self.down = functools.cache(functools.partial(_descriptor, down))
        place_LS = torch.zeros(num_layers, num_slots, dtype=torch.int32)
        place_LS[:, : self._num_own] = torch.arange(num_layers * self._num_own).view(num_layers, self._num_own)
        self.place_LS = place_LS.to(gate_up.device)

    @classmethod
    def of_experts(
        cls,
        experts: Tensor,
        num_layers: int,
        num_slots: int,
        num_own: int | None = None,
        *,
        activation: Activation = SILU,
        sizes: tuple[int, int] | None = None,
    ) -> "ExpertArena":
        """Over memory in which the three matrices of a place lie side by side: [num_places, 3, F, D]. With biases
        behind them it is [num_places, numbers of one], and `sizes` are (F, D)."""
        size, hidden = sizes or experts.shape[2:]
        numbers, step = experts.view(-1), experts[0].numel()
        gate_up, down = numbers.view(-1, hidden), numbers[2 * size * hidden :].view(-1, size)
        biases = numbers[3 * size * hidden :] if step > 3 * size * hidden else None
        return cls(
            gate_up, down, num_layers, num_slots, step // hidden, step // size, num_own,
            activation=activation, biases=biases, bias_step=step,
        )  # fmt: skip

    def number_by(self, calls: Sequence[int], num_calls: int) -> None:
        """From now on kernels know the layers here as these calls, of so many. The host still counts layers."""
        place_LS = torch.zeros(num_calls, self.num_slots, dtype=torch.int32, device=self.place_LS.device)
        place_LS[list(calls)] = self.place_LS
        self.place_LS = place_LS

    def own_place(self, call_index: int, slot: int) -> int:
        """The place that this slot has at first."""
        assert 0 <= call_index < self.num_layers and 0 <= slot < self._num_own, (call_index, slot)
        return call_index * self._num_own + slot

    def fill(
        self,
        call_index: int,
        slot: int,
        gate_FD: Tensor,
        up_FD: Tensor,
        down_DF: Tensor,
        biases: Tensor | None = None,
    ) -> None:
        """Put one expert's weights into the first place of a slot of the call_index-th layer that has experts."""
        place = self.own_place(call_index, slot)
        gate, down = place * self.gate_up_rows, place * self.down_rows
        self._gate_up[gate : gate + self.expert_size].copy_(gate_FD)
        self._gate_up[gate + self.expert_size : gate + 2 * self.expert_size].copy_(up_FD)
        self.down_matrix[down : down + self.hidden_size].copy_(down_DF)
        if biases is not None and self.biases is not None:
            self.biases[place * self.bias_step :][: len(biases)].copy_(biases)


def plan_local(ids_TK: Tensor, slot_of_N: Tensor, num_slots: int, cut: Cut, stop: Tensor) -> LocalPlan:
    """Sort rows by slot, and cut them into tiles. Rows with the id -1 go nowhere."""
    num_rows = ids_TK.numel()
    pos_TK = torch.empty_like(ids_TK)
    src_R = torch.empty(num_rows, dtype=torch.int32, device=ids_TK.device)
    tiles = Tiles.empty(num_rows, num_slots, cut, ids_TK.device)
    into = Sorted(pos_TK, src_R, tiles.slot_M, tiles.row_M, tiles.size_M, tiles.num_tiles)
    sort_by_slot(ids_TK, slot_of_N, num_slots, cut.rows, into, stop)
    return LocalPlan(pos_TK, src_R, tiles)


def tiles_of_one_slot(num_rows: int, cut: Cut, device: torch.device) -> tuple[Tensor, Tiles]:
    """src_R and tiles for all rows in slot 0, in their order: what `plan_local` would find out, without a kernel."""
    tiles = Tiles.empty(num_rows, 1, cut, device)
    first = torch.arange(len(tiles.row_M), dtype=torch.int32, device=device) * cut.rows
    tiles.slot_M.zero_()
    tiles.row_M.copy_(first)
    tiles.size_M.copy_((num_rows - first).clamp(0, cut.rows))
    tiles.num_tiles.fill_(triton.cdiv(num_rows, cut.rows))
    return torch.arange(num_rows, dtype=torch.int32, device=device), tiles


def gate_up(
    x_at: int,
    x_row_R: Tensor,
    arena: ExpertArena,
    layer_at: Tensor,
    tiles: Tiles,
    h_RF: Tensor,
    stop: Tensor,
    slice_index: int = 0,
    num_slices: int = 1,
) -> None:
    """h = activation(gate x) * up x for the sorted rows, of which row r is x's row x_row_R[r].

    `layer_at` is one int32 on the device: an index among the layers that have experts. With `num_slices`, this call
    computes one share of the columns: a long kernel keeps other processes off the device.
    """
    product, size = tiles.cut.gate_up, arena.expert_size
    _gate_up_kernel[(num_programs(h_RF.device, product),)](
        x_at, x_row_R, arena.gate_up(product.columns, product.depth), h_RF, layer_at, arena.place_LS, arena.biases,
        tiles.slot_M, tiles.row_M, tiles.size_M, tiles.num_tiles, stop, slice_index, num_slices,
        S=arena.num_slots, D=arena.hidden_size, F=size, PLACE_ROWS=arena.gate_up_rows, BIAS_STEP=arena.bias_step,
        ACTIVATION=_ACTIVATIONS[arena.activation.kind], ALPHA=arena.activation.alpha, LIMIT=arena.activation.limit,
        BM=tiles.cut.rows, BN=product.columns, BK=product.depth, STAGES=product.stages, BAND=product.band,
        **early(h_RF.device),
        num_warps=product.warps,
    )  # fmt: skip


def down(
    h_RF: Tensor,
    arena: ExpertArena,
    layer_at: Tensor,
    tiles: Tiles,
    y_at: int,
    y_row_R: Tensor | None,
    stop: Tensor,
    slice_index: int = 0,
    num_slices: int = 1,
    kernel: Any = None,
    arguments: tuple[Any, ...] = (),
    **constants: int,
) -> None:
    """down h for the sorted rows; row r goes to y's row y_row_R[r], or, without that, to row r.

    `kernel`: another one around `down_tiles`, with arguments and constants of its own.
    """
    product, size = tiles.cut.down, arena.expert_size
    (kernel or _down_kernel)[(num_programs(h_RF.device, product),)](
        TensorDescriptor.from_tensor(h_RF, [tiles.cut.rows, product.depth]),
        arena.down(product.columns, product.depth), y_at, y_row_R, layer_at, arena.place_LS, arena.biases,
        tiles.slot_M, tiles.row_M, tiles.size_M, tiles.num_tiles, stop, slice_index, num_slices, *arguments,
        S=arena.num_slots, D=arena.hidden_size, F=size, PLACE_ROWS=arena.down_rows, BIAS_STEP=arena.bias_step,
        BM=tiles.cut.rows, BN=product.columns, BK=product.depth, STAGES=product.stages, BAND=product.band,
        **early(h_RF.device),
        num_warps=product.warps, **constants,
    )  # fmt: skip


def combine(y_at: int, y_row_TK: Tensor, weights_TK: Tensor, residual_TD: Tensor, stop: Tensor) -> Tensor:
    """residual + the sum over k, in its order, of weights * y; rows of y with the index -1 contribute nothing."""
    num_tokens, hidden_size = residual_TD.shape
    out_TD = torch.empty_like(residual_TD)
    columns = combine_columns(hidden_size)
    _combine_kernel[(num_tokens, triton.cdiv(hidden_size, columns))](
        y_at, y_row_TK, weights_TK, residual_TD, out_TD, stop,
        K=y_row_TK.shape[1], D=hidden_size, BD=columns, **early(residual_TD.device), num_warps=4,
    )  # fmt: skip
    return out_TD


def combine_columns(hidden_size: int) -> int:
    """How many columns a program of `combine_row` has."""
    size: int = triton.next_power_of_2(hidden_size)
    return min(_COMBINE_COLUMNS, size)


@triton.jit
def share_of(num_tiles, stop, slice_index, num_slices, NUM_COLUMNS: tl.constexpr):
    """Which (tile, column) pairs a slice has: from first up to end. None if the step is stopped."""
    note(stop, PRODUCT_NOTE)
    num_rows = tl.where(tl.load(stop) == 0, tl.load(num_tiles), 0)
    total = num_rows * NUM_COLUMNS
    return num_rows, total * slice_index // num_slices, total * (slice_index + 1) // num_slices


@triton.jit(do_not_specialize=["slice_index", "num_slices"], do_not_specialize_on_alignment=["layer_at"])
def _gate_up_kernel(
    x_at, x_row, weights, h, layer_at, places, biases, slot_M, row_M, size_M, num_tiles, stop, slice_index, num_slices,
    S: tl.constexpr, D: tl.constexpr, F: tl.constexpr, PLACE_ROWS: tl.constexpr, BIAS_STEP: tl.constexpr,
    ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, BAND: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    await_before(EARLY)
    NUM_COLUMNS: tl.constexpr = (F + BN - 1) // BN
    num_m, first, end = share_of(num_tiles, stop, slice_index, num_slices, NUM_COLUMNS)
    layer = tl.load(layer_at)
    x = tl.multiple_of(x_at.to(tl.pointer_type(tl.bfloat16)), 16)
    for t in range(first + tl.program_id(0), end, tl.num_programs(0)):
        m, column = tile_and_column(t, num_m, NUM_COLUMNS, BAND)
        column *= BN
        place = tl.load(places + layer * S + tl.load(slot_M + m))
        row = tl.load(row_M + m)
        i = tl.arange(0, BM)
        is_row = i < tl.load(size_M + m)
        d = tl.arange(0, BK)
        x_rows = tl.load(x_row + row + i, mask=is_row, other=0).to(tl.int64)
        x_at_MK = x + x_rows[:, None] * D + d[None, :]
        gate = place * PLACE_ROWS + column
        gate_MN = tl.zeros((BM, BN), tl.float32)
        up_MN = tl.zeros((BM, BN), tl.float32)
        for k in tl.range(0, D, BK, num_stages=STAGES):
            if D % BK == 0:
                x_MK = tl.load(x_at_MK + k, mask=is_row[:, None], other=0.0)
            else:  # descriptors give zeros beyond the end of a row, and zeros they must meet
                x_MK = tl.load(x_at_MK + k, mask=is_row[:, None] & (d + k < D)[None, :], other=0.0)
            gate_MN = tl.dot(x_MK, weights.load([gate, k]).T, gate_MN)
            up_MN = tl.dot(x_MK, weights.load([gate + F, k]).T, up_MN)
        f = column + tl.arange(0, BN)
        if biases is not None:
            bias = biases + place.to(tl.int64) * BIAS_STEP + f
            gate_MN += tl.load(bias, mask=f < F, other=0.0).to(tl.float32)[None, :]
            up_MN += tl.load(bias + F, mask=f < F, other=0.0).to(tl.float32)[None, :]
        h_MN = _activated(gate_MN, up_MN, ACTIVATION, ALPHA, LIMIT)
        h_at_MN = h + (row + i).to(tl.int64)[:, None] * F + f[None, :]
        tl.store(h_at_MN, h_MN.to(tl.bfloat16), mask=is_row[:, None] & (f < F)[None, :])


@triton.jit
def _activated(gate, up, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    if ACTIVATION == _GELU_TANH:
        return gate * tl.sigmoid(1.5957691216 * (gate + 0.044715 * gate * gate * gate)) * up
    if ACTIVATION == _RELU:
        return tl.maximum(gate, 0.0) * up
    if ACTIVATION == _CLAMPED_SWIGLU:
        gate, up = tl.minimum(gate, LIMIT), tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        return gate * tl.sigmoid(gate * ALPHA) * (up + 1.0)
    return gate * tl.sigmoid(gate) * up


@triton.jit(do_not_specialize=["slice_index", "num_slices"], do_not_specialize_on_alignment=["layer_at"])
def _down_kernel(
    h, weights, y_at, y_row, layer_at, places, biases, slot_M, row_M, size_M, num_tiles, stop, slice_index, num_slices,
    S: tl.constexpr, D: tl.constexpr, F: tl.constexpr, PLACE_ROWS: tl.constexpr, BIAS_STEP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, BAND: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    await_before(EARLY)
    down_tiles(
        h, weights, y_at, y_row, layer_at, places, biases, slot_M, row_M, size_M, num_tiles, stop, slice_index,
        num_slices, S, D, F, PLACE_ROWS, BIAS_STEP, BM, BN, BK, STAGES, BAND,
    )  # fmt: skip


@triton.jit
def down_tiles(
    h, weights, y_at, y_row, layer_at, places, biases, slot_M, row_M, size_M, num_tiles, stop, slice_index, num_slices,
    S: tl.constexpr, D: tl.constexpr, F: tl.constexpr, PLACE_ROWS: tl.constexpr, BIAS_STEP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """This program's share."""
    NUM_COLUMNS: tl.constexpr = (D + BN - 1) // BN
    num_m, first, end = share_of(num_tiles, stop, slice_index, num_slices, NUM_COLUMNS)
    layer = tl.load(layer_at)
    y = tl.multiple_of(y_at.to(tl.pointer_type(tl.bfloat16)), 16)
    for t in range(first + tl.program_id(0), end, tl.num_programs(0)):
        m, column = tile_and_column(t, num_m, NUM_COLUMNS, BAND)
        column *= BN
        place = tl.load(places + layer * S + tl.load(slot_M + m))
        row = tl.load(row_M + m)
        i = tl.arange(0, BM)
        is_row = i < tl.load(size_M + m)
        y_rows = row + i if y_row is None else tl.load(y_row + row + i, mask=is_row, other=0)
        weight = place * PLACE_ROWS + column
        y_MN = tl.zeros((BM, BN), tl.float32)
        for k in tl.range(0, F, BK, num_stages=STAGES):
            # Rows of other slots come along; they are computed for nothing, and not stored.
            y_MN = tl.dot(h.load([row, k]), weights.load([weight, k]).T, y_MN)
        d = column + tl.arange(0, BN)
        if biases is not None:
            bias = biases + place.to(tl.int64) * BIAS_STEP + 2 * F + d
            y_MN += tl.load(bias, mask=d < D, other=0.0).to(tl.float32)[None, :]
        y_at_MN = y + y_rows.to(tl.int64)[:, None] * D + d[None, :]
        tl.store(y_at_MN, y_MN.to(tl.bfloat16), mask=is_row[:, None] & (d < D)[None, :])


@triton.jit
def _combine_kernel(
    y_at, y_row, weights, residual, out, stop,
    K: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if is_stopped(stop, EARLY):
        return
    combine_row(y_at, y_row, weights, residual, out, K, D, BD)


@triton.jit
def combine_row(y_at, y_row, weights, residual, out, K: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Combines, of the row program_id(0), the columns that are program_id(1)'s."""
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    y = tl.multiple_of(y_at.to(tl.pointer_type(tl.bfloat16)), 16)
    sum_D = tl.load(residual + token * D + d, mask=d < D)
    # All rows are on their way before the first is waited for. (ptxas would not reorder them by itself.)
    rows = ()
    for k in tl.static_range(K):
        rows += (tl.load(y_row + token * K + k).to(tl.int64),)  # type: ignore[assignment]
    ys = ()
    for k in tl.static_range(K):
        ys += (tl.load(y + rows[k] * D + d, mask=(d < D) & (rows[k] >= 0), other=0.0),)  # type: ignore[assignment]
    for k in tl.static_range(K):
        weight = tl.load(weights + token * K + k)
        sum_D = tl.where(rows[k] >= 0, sum_D + weight * ys[k].to(tl.float32), sum_D)
    tl.store(out + token * D + d, sum_D, mask=d < D)


def _descriptor(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(matrix, [rows, columns])


def num_programs(device: torch.device, product: Product) -> int:
    return _num_multiprocessors(device) * product.programs if device.type == "cuda" else _INTERPRETED_PROGRAMS


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
