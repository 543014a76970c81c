"""Which experts a row goes to (model/spec.py, Router): scores of the allowed experts, the best K of them.

One program per row, all experts in registers. The best are taken one after the other, the lower expert first if two are
equal, as a stable sort would; likewise groups.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from everserve.backends.cuda.ops.pdl import early, is_stopped
from everserve.backends.cuda.ops.sums import Sums, summed
from everserve.model.spec import Router, Score

_SCORES = {Score.SOFTMAX: 0, Score.SIGMOID: 1, Score.SOFTMAX_OF_CHOSEN: 2}
_SOFTMAX, _SIGMOID = tl.constexpr(0), tl.constexpr(1)
_OF_CHOSEN = tl.constexpr(2)


def route(
    logits: Sums,
    positions_T: Tensor,
    allowed_N: Tensor,
    router: Router,
    stop: Tensor,
    correction_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """ids_TK int32, weights_TK float32; -1 and 0 where there is no expert to choose: padding, fewer than K allowed."""
    num_rows, num_experts, device = logits.num_rows, logits.num_columns, logits.data.device
    assert logits.data.dtype is torch.float32 and logits.data.is_contiguous() and allowed_N.dtype is torch.int32
    assert logits.residual_TO is None and (correction_N is None or correction_N.dtype is torch.float32)
    ids_TK = torch.empty(num_rows, router.top_k, dtype=torch.int32, device=device)
    weights_TK = torch.empty(num_rows, router.top_k, dtype=torch.float32, device=device)
    if num_rows:
        _route[(num_rows,)](
            logits.data, logits.bias_O, correction_N, positions_T, allowed_N, ids_TK, weights_TK, stop, num_rows,
            N=num_experts, K=router.top_k, SCORE=_SCORES[router.score], GROUPS=router.num_groups,
            KEPT=router.groups_kept, RENORMALISE=router.renormalise, LEAST=router.least_sum, SCALE=router.scale,
            NUM_SPLITS=logits.num_splits, N2=triton.next_power_of_2(num_experts),
            K2=triton.next_power_of_2(router.top_k), G2=triton.next_power_of_2(router.num_groups),
            **early(device), num_warps=1,
        )  # fmt: skip
    return ids_TK, weights_TK


@triton.jit
def _in_best_groups(rank, open, expert, SIZE: tl.constexpr, GROUPS: tl.constexpr, G2: tl.constexpr, KEPT: tl.constexpr):
    """Which experts are open, and in one of the groups that are kept. A group is as good as its two best experts
    together, or as its only one; without any it is not kept."""
    group = tl.arange(0, G2)
    scores = tl.full((G2,), float("-inf"), tl.float32)
    for g in tl.static_range(GROUPS):
        mine = open & (expert // SIZE == g)
        best = tl.max(tl.where(mine, rank, float("-inf")), 0)
        at = tl.min(tl.where(mine & (rank == best), expert, 1 << 30), 0)
        second = tl.max(tl.where(mine & (expert != at), rank, float("-inf")), 0)
        num = tl.sum(mine.to(tl.int32), 0)
        score = tl.where(num > 1, best + second, best)
        scores = tl.where(group == g, tl.where(num > 0, score, float("-inf")), scores)
    kept = open & (expert < 0)
    for _ in tl.static_range(KEPT):
        best = tl.max(scores, 0)
        at = tl.min(tl.where(scores == best, group, G2), 0)
        at = tl.where(best == float("-inf"), -1, at)
        kept = kept | (open & (expert // SIZE == at))
        scores = tl.where(group == at, float("-inf"), scores)
    return kept


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["allowed"])
def _route(
    logits, bias, correction, positions, allowed, ids_out, weights_out, stop, num_rows,
    N: tl.constexpr, K: tl.constexpr, SCORE: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr,
    RENORMALISE: tl.constexpr, LEAST: tl.constexpr, SCALE: tl.constexpr, NUM_SPLITS: tl.constexpr, N2: tl.constexpr,
    K2: tl.constexpr, G2: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if is_stopped(stop, EARLY):
        return
    row = tl.program_id(0)
    expert, choice = tl.arange(0, N2), tl.arange(0, K2)
    open = tl.load(allowed + expert, mask=expert < N, other=0) != 0
    open = open & (tl.load(positions + row) >= 0)
    logit = summed(logits, bias, None, row * N + expert, expert, num_rows * N, open, NUM_SPLITS)
    logit = tl.where(open, logit, float("-inf"))
    exponential = tl.where(open, tl.exp(logit - tl.max(logit, 0)), 0.0)
    total = tl.sum(exponential, 0)
    if SCORE == _SOFTMAX:
        score = exponential / total
    elif SCORE == _SIGMOID:
        score = tl.where(open, 1.0 / (1.0 + tl.exp(-logit)), 0.0)
    else:
        score = tl.where(open, logit, 0.0)
    # A logit that is not a number makes the total one. Then the first experts are as good as any.
    is_nan = total != total  # noqa: PLR0124
    rank = tl.where(is_nan, 0.0, score)
    if correction is not None:
        rank = rank + tl.load(correction + expert, mask=expert < N, other=0.0)
    if GROUPS > 1:
        open = _in_best_groups(rank, open, expert, N // GROUPS, GROUPS, G2, KEPT)
    left = tl.where(open, rank, float("-inf"))
    ids, weights = tl.full((K2,), -1, tl.int32), tl.zeros((K2,), tl.float32)
    chosen = 0.0
    for k in tl.static_range(K):
        best = tl.max(left, 0)
        is_none = best == float("-inf")
        id = tl.min(tl.where(left == best, expert, N2), 0)
        weight = tl.sum(tl.where(expert == id, score, 0.0), 0)
        weight = tl.where(is_none, 0.0, tl.where(is_nan, total, weight))
        ids = tl.where(choice == k, tl.where(is_none, -1, id), ids)
        weights = tl.where(choice == k, weight, weights)
        chosen += weight
        left = tl.where(expert == id, float("-inf"), left)
    if SCORE == _OF_CHOSEN:
        highest = tl.max(tl.where(ids >= 0, weights, float("-inf")), 0)
        weights = tl.where(ids >= 0, tl.exp(weights - highest), 0.0)
        weights = tl.where(ids >= 0, weights / tl.sum(weights, 0), 0.0)
    if RENORMALISE:
        if LEAST > 0.0:
            chosen = tl.where(chosen < LEAST, LEAST, chosen)
        weights = tl.where(ids >= 0, weights / chosen, 0.0)
    if SCALE != 1.0:
        weights = weights * SCALE
    tl.store(ids_out + row * K + choice, ids, mask=choice < K)
    tl.store(weights_out + row * K + choice, weights, mask=choice < K)
