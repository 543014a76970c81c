"""Which slices a row goes to (model/shard_choice.py), in kernels that a step can stop."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from everserve.backends.cuda.ops.pdl import early, is_stopped
from everserve.model.shard_choice import Choice


def all_slices(positions_T: Tensor, num_slices: int, stop: Tensor, weight: float = 1.0) -> Choice:
    """Every row goes to every slice, all with this weight; padding goes nowhere."""
    num_rows, device = len(positions_T), positions_T.device
    ids_TK = torch.empty(num_rows, num_slices, dtype=torch.int32, device=device)
    weights_TK = torch.empty(num_rows, num_slices, dtype=torch.float32, device=device)
    if num_rows:
        _all_slices[(num_rows,)](
            positions_T, ids_TK, weights_TK, stop, weight,
            K=num_slices, K2=triton.next_power_of_2(num_slices), **early(device), num_warps=1,
        )  # fmt: skip
    return ids_TK, weights_TK


def sliced(ids_TK: Tensor, weights_TK: Tensor, num_slices: int, stop: Tensor) -> Choice:
    """The choice of slices that follows from one of experts."""
    num_rows, num_experts = ids_TK.shape
    num = num_experts * num_slices
    slices_TS = torch.empty(num_rows, num, dtype=torch.int32, device=ids_TK.device)
    sliced_TS = torch.empty(num_rows, num, dtype=torch.float32, device=ids_TK.device)
    if num_rows:
        _sliced[(num_rows,)](
            ids_TK, weights_TK, slices_TS, sliced_TS, stop,
            K=num_experts, S=num_slices, N2=triton.next_power_of_2(num), **early(ids_TK.device), num_warps=1,
        )  # fmt: skip
    return slices_TS, sliced_TS


@triton.jit
def _all_slices(positions, ids_out, weights_out, stop, weight, K: tl.constexpr, K2: tl.constexpr, EARLY: tl.constexpr):
    if is_stopped(stop, EARLY):
        return
    row, slices = tl.program_id(0), tl.arange(0, K2)
    is_row = (slices >= 0) & (tl.load(positions + row) >= 0)
    tl.store(ids_out + row * K + slices, tl.where(is_row, slices, -1), mask=slices < K)
    tl.store(weights_out + row * K + slices, is_row.to(tl.float32) * weight, mask=slices < K)


@triton.jit
def _sliced(
    ids, weights, ids_out, weights_out, stop, K: tl.constexpr, S: tl.constexpr, N2: tl.constexpr, EARLY: tl.constexpr
):
    if is_stopped(stop, EARLY):
        return
    row, at = tl.program_id(0), tl.arange(0, N2)
    is_one = at < K * S
    id = tl.load(ids + row * K + at // S, mask=is_one, other=-1)
    weight = tl.load(weights + row * K + at // S, mask=is_one, other=0.0)
    tl.store(ids_out + row * (K * S) + at, tl.where(id >= 0, id * S + at % S, -1), mask=is_one)
    tl.store(weights_out + row * (K * S) + at, weight, mask=is_one)
