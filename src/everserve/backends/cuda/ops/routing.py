"""Which experts a row goes to: softmax over the allowed experts, the best K of them.

One program per row, all experts in registers. The best are taken one after the other, the lower expert first if two are
equal, as a stable sort would.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from everserve.backends.cuda.ops.pdl import early, is_stopped
from everserve.backends.cuda.ops.sums import Sums, summed


def route(
    logits: Sums, positions_T: Tensor, allowed_N: Tensor, top_k: int, renormalise: bool, stop: Tensor
) -> tuple[Tensor, Tensor]:
    """ids_TK int32, weights_TK float32; -1 and 0 where there is no expert to choose: padding, fewer than K allowed."""
    num_rows, num_experts, device = logits.num_rows, logits.num_columns, logits.data.device
    assert logits.data.dtype is torch.float32 and logits.data.is_contiguous() and allowed_N.dtype is torch.int32
    assert logits.bias_O is None and logits.residual_TO is None
    ids_TK = torch.empty(num_rows, top_k, dtype=torch.int32, device=device)
    weights_TK = torch.empty(num_rows, top_k, dtype=torch.float32, device=device)
    if num_rows:
        _route[(num_rows,)](
            logits.data, positions_T, allowed_N, ids_TK, weights_TK, stop, num_rows,
            N=num_experts, K=top_k, RENORMALISE=renormalise, NUM_SPLITS=logits.num_splits,
            N2=triton.next_power_of_2(num_experts), K2=triton.next_power_of_2(top_k),
            **early(device), num_warps=1,
        )  # fmt: skip
    return ids_TK, weights_TK


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["allowed"])
def _route(
    logits, positions, allowed, ids_out, weights_out, stop, num_rows,
    N: tl.constexpr, K: tl.constexpr, RENORMALISE: tl.constexpr, N2: tl.constexpr, K2: tl.constexpr,
    NUM_SPLITS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if is_stopped(stop, EARLY):
        return
    row = tl.program_id(0)
    expert, choice = tl.arange(0, N2), tl.arange(0, K2)
    open = tl.load(allowed + expert, mask=expert < N, other=0) != 0
    open = open & (tl.load(positions + row) >= 0)
    logit = summed(logits, None, None, row * N + expert, expert, num_rows * N, open, NUM_SPLITS)
    logit = tl.where(open, logit, float("-inf"))
    exponential = tl.where(open, tl.exp(logit - tl.max(logit, 0)), 0.0)
    total = tl.sum(exponential, 0)
    probability = exponential / total
    # A logit that is not a number makes all of them so. Then the first experts are as good as any.
    is_nan = total != total  # noqa: PLR0124
    left = tl.where(open, tl.where(is_nan, 0.0, probability), -1.0)
    ids, weights = tl.full((K2,), -1, tl.int32), tl.zeros((K2,), tl.float32)
    chosen = 0.0
    for k in tl.static_range(K):
        best = tl.max(left, 0)
        id = tl.min(tl.where(left == best, expert, N2), 0)
        weight = tl.where(best < 0.0, 0.0, tl.where(is_nan, total, best))
        ids = tl.where(choice == k, tl.where(best < 0.0, -1, id), ids)
        weights = tl.where(choice == k, weight, weights)
        chosen += weight
        left = tl.where(expert == id, -1.0, left)
    if RENORMALISE:
        weights = tl.where(ids >= 0, weights / chosen, 0.0)
    tl.store(ids_out + row * K + choice, ids, mask=choice < K)
    tl.store(weights_out + row * K + choice, weights, mask=choice < K)
