"""Linear: x @ weight.T (+ bias) (+ residual) for one weight, both through TMA descriptors.

While a step has few rows the weight's bytes are all that counts, and few output features give too few tiles to keep the
device busy reading. So the sum over D is cut into *splits*, whose number depends on the weight's shape alone:

                     D
          |  split 0  |  split 1  |  split 2  |
    few rows     program     program     program     -> three partial sums in memory, added by the next kernel
    many rows    one program, one after the other    -> the same three sums, in registers

Either way a result is ((0 + sum 0) + sum 1) + sum 2, and each of these sums is accumulated in ascending order of D, 16
at a time, by every tile shape: how many rows there are chooses tiles, and does not change a bit.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from everserve.backends.cuda.ops.pdl import early, is_stopped
from everserve.backends.cuda.ops.sums import Sums, summed
from everserve.backends.cuda.ops.walk import tile_and_column

SPLIT_UNIT = 128  # a split is a multiple of it, and every tile's BK divides it
MIN_SPLIT = 512
PROGRAMS = 132  # that a product of few rows should have, about: the SMs of the device these numbers were chosen on
ENOUGH_TILES = 100  # from here on splits need no programs of their own


class Tile(NamedTuple):
    """What one program computes at a time, and how."""

    BM: int  # rows
    BN: int  # output features
    BK: int  # of D, per stage
    num_stages: int
    num_warps: int
    programs_per_sm: int
    band: int = 0  # tiles of rows that are walked over together (walk.py); 0: a step of few rows


class Linear:
    """One weight. D is a multiple of 8; the weight is bfloat16 and contiguous, and must not move.

    `share`: how many processes do the same at the same time on this device, and should not wait for each other.
    """

    def __init__(self, weight_OD: Tensor, bias_O: Tensor | None = None, share: int = 1) -> None:
        assert weight_OD.dtype is torch.bfloat16 and weight_OD.is_contiguous(), "weights are contiguous bfloat16"
        self.out_features, self.in_features = weight_OD.shape
        assert self.in_features % 8 == 0, f"rows of {self.in_features} elements: TMA wants multiples of 16 bytes"
        self.weight_OD, self.bias_O = weight_OD, bias_O
        self.split_size = choose_split_size(self.out_features, self.in_features)
        self._share = share
        self._descriptors: dict[tuple[int, int], TensorDescriptor] = {}

    @property
    def num_splits(self) -> int:
        return -(-self.in_features // self.split_size)

    def __call__(
        self,
        x_TD: Tensor,
        stop: Tensor,
        *,
        residual_TO: Tensor | None = None,
        out_dtype: torch.dtype = torch.bfloat16,
        tile: Tile | None = None,
    ) -> Tensor:
        """The product, plus `residual_TO` (float32; then so is the result). `tile` is for measurements."""
        sums = self.sums(x_TD, stop, residual_TO=residual_TO, out_dtype=out_dtype, tile=tile)
        if not sums.num_splits:
            return sums.data
        out_dtype = out_dtype if residual_TO is None else torch.float32
        out_TO = torch.empty(len(x_TD), self.out_features, dtype=out_dtype, device=x_TD.device)
        _finish[(triton.cdiv(out_TO.numel(), 1024),)](
            sums.data, self.bias_O, residual_TO, out_TO, stop, len(x_TD),
            OUT=self.out_features, NUM_SPLITS=self.num_splits, BLOCK=1024, **early(x_TD.device), num_warps=4,
        )  # fmt: skip
        return out_TO

    def sums(
        self,
        x_TD: Tensor,
        stop: Tensor,
        *,
        residual_TO: Tensor | None = None,
        out_dtype: torch.dtype = torch.bfloat16,
        tile: Tile | None = None,
    ) -> Sums:
        """The same, for callers that add the splits themselves, and round the result to `out_dtype`."""
        assert x_TD.dtype is torch.bfloat16 and x_TD.is_contiguous() and x_TD.shape[1] == self.in_features
        num_rows = len(x_TD)
        if residual_TO is not None:
            assert residual_TO.dtype is torch.float32 and residual_TO.is_contiguous()
            out_dtype = torch.float32
        tile = tile or choose_tile(num_rows, self.out_features)
        assert SPLIT_UNIT % tile.BK == 0, "a stage would reach into the next split"
        num_tiles = -(-num_rows // tile.BM) * -(-self.out_features // tile.BN)
        if self.num_splits == 1 or num_tiles >= ENOUGH_TILES or not num_rows:
            out_TO = torch.empty(num_rows, self.out_features, dtype=out_dtype, device=x_TD.device)
            if num_rows:
                self._product(x_TD, stop, self.bias_O, residual_TO, out_TO, tile, num_tiles, parallel=False)
            return Sums(out_TO)
        parts_STO = torch.empty(self.num_splits, num_rows, self.out_features, dtype=torch.float32, device=x_TD.device)
        self._product(x_TD, stop, None, None, parts_STO, tile, num_tiles * self.num_splits, parallel=True)
        return Sums(parts_STO, self.num_splits, self.bias_O, residual_TO)

    def _product(
        self,
        x_TD: Tensor,
        stop: Tensor,
        bias_O: Tensor | None,
        residual_TO: Tensor | None,
        out: Tensor,
        tile: Tile,
        num_tiles: int,
        *,
        parallel: bool,
    ) -> None:
        num_at_once = max(tile.programs_per_sm * _num_sms(x_TD.device) // self._share, 1)
        num_rounds = -(-num_tiles // num_at_once)
        _product[(-(-num_tiles // num_rounds),)](
            TensorDescriptor.from_tensor(x_TD, [tile.BM, tile.BK]), self._descriptor(tile.BN, tile.BK),
            bias_O, residual_TO, out, stop, len(x_TD),
            OUT=self.out_features, D=self.in_features, NUM_SPLITS=self.num_splits, SPLIT_SIZE=self.split_size,
            PARALLEL=parallel, BM=tile.BM, BN=tile.BN, BK=tile.BK, STAGES=tile.num_stages,
            BAND=0 if parallel else tile.band, **early(x_TD.device),
            num_warps=tile.num_warps,
        )  # fmt: skip

    def _descriptor(self, BN: int, BK: int) -> TensorDescriptor:
        if (BN, BK) not in self._descriptors:
            self._descriptors[BN, BK] = TensorDescriptor.from_tensor(self.weight_OD, [BN, BK])
        return self._descriptors[BN, BK]


def choose_split_size(out_features: int, in_features: int) -> int:
    """By the weight's shape alone: as many splits as give one program per SM with tiles of 128 output features."""
    num_splits = round(PROGRAMS / -(-out_features // 128))
    num_splits = max(1, min(num_splits, in_features // MIN_SPLIT))
    return -(-in_features // (num_splits * SPLIT_UNIT)) * SPLIT_UNIT


def choose_tile(num_rows: int, out_features: int) -> Tile:
    """Bytes in flight for few rows, reuse of what was read for many. None of it changes a bit."""
    if num_rows <= 16:
        return Tile(16, 128 if out_features > 64 else 16, 128, 3, 4, 2)
    if out_features <= 64:  # a router: nearly all of it is x
        return Tile(64, 16, 128, 4, 4, 2)
    if num_rows <= 64:
        return Tile(64, 128, 64, 4, 4, 2)
    if num_rows <= 512:
        return Tile(128, 128, 64, 3, 8, 2)
    return Tile(128, 128, 64, 4, 8, 1, band=16)


@cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@triton.jit(do_not_specialize=["num_rows"])
def _product(
    x, weight, bias, residual, out, stop, num_rows,
    OUT: tl.constexpr, D: tl.constexpr, NUM_SPLITS: tl.constexpr, SPLIT_SIZE: tl.constexpr, PARALLEL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, BAND: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Tiles of the product, rows fastest: programs that run together share the weight's rows (walk.py).

    PARALLEL: `out` is [NUM_SPLITS, T, O], one sum each, and nothing is added to it."""
    if is_stopped(stop, EARLY):
        return
    NUM_N: tl.constexpr = (OUT + BN - 1) // BN
    num_m = tl.cdiv(num_rows, BM)
    num_tiles = num_m * NUM_N
    if PARALLEL:
        num_tiles *= NUM_SPLITS
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        split = tile // (num_m * NUM_N)
        m, n = tile_and_column(tile - split * (num_m * NUM_N), num_m, NUM_N, BAND)
        if NUM_SPLITS == 1 or PARALLEL:
            total = _sum(x, weight, m, n, split, D, SPLIT_SIZE, BM, BN, BK, STAGES)
        elif BAND == 0:  # several programs on an SM: one of them computes while another one waits
            total = tl.zeros((BM, BN), tl.float32)
            for i in range(NUM_SPLITS):
                total += _sum(x, weight, m, n, i, D, SPLIT_SIZE, BM, BN, BK, STAGES)
        else:
            total = _all_sums(x, weight, m, n, D, SPLIT_SIZE, BM, BN, BK, STAGES)
        rows, columns = m * BM + tl.arange(0, BM), n * BN + tl.arange(0, BN)
        mask = (rows < num_rows)[:, None] & (columns < OUT)[None, :]
        if bias is not None:
            total += tl.load(bias + columns, mask=columns < OUT, other=0.0).to(tl.float32)[None, :]
        at = rows.to(tl.int64)[:, None] * OUT + columns[None, :]
        if residual is not None:
            total += tl.load(residual + at, mask=mask, other=0.0)
        if PARALLEL:
            at += split.to(tl.int64) * num_rows * OUT
        tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _sum(
    x, weight, m, n, split,
    D: tl.constexpr, SPLIT_SIZE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    first = split * SPLIT_SIZE
    total = tl.zeros((BM, BN), tl.float32)
    for k in tl.range(first, tl.minimum(first + SPLIT_SIZE, D), BK, num_stages=STAGES):
        total = tl.dot(x.load([m * BM, k]), weight.load([n * BN, k]).T, total)
    return total


@triton.jit
def _all_sums(
    x, weight, m, n,
    D: tl.constexpr, SPLIT_SIZE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """((0 + sum 0) + sum 1) + ..., in one loop: what the next split needs is on its way when one ends. With a loop for
    each split the device would wait for the first load of each."""
    total, part = tl.zeros((BM, BN), tl.float32), tl.zeros((BM, BN), tl.float32)
    for k in tl.range(0, D, BK, num_stages=STAGES):
        part = tl.dot(x.load([m * BM, k]), weight.load([n * BN, k]).T, part)
        if (k + BK) % SPLIT_SIZE == 0:
            total += part
            part = tl.zeros((BM, BN), tl.float32)
    if D % SPLIT_SIZE != 0:
        total += part
    return total


@triton.jit(do_not_specialize=["num_rows"])
def _finish(
    parts, bias, residual, out, stop, num_rows,
    OUT: tl.constexpr, NUM_SPLITS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Adds the splits."""
    if is_stopped(stop, EARLY):
        return
    size = num_rows * OUT
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    total = summed(parts, bias, residual, at, at % OUT, size, mask, NUM_SPLITS)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)
