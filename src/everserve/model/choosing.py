"""Choosing tokens, in plain PyTorch: what `Ops.choose` means, and how `ReferenceOps` does it.

Every choice among tokens goes by (weight, then lower id first), without ties, so that the result does not depend on the
algorithm that sorts. min-p comes first, then the best top_k of what is left, then of those the fewest that reach top_p
of their mass.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Draw(NamedTuple):
    """How to choose the token of one row. Temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    uniform: float  # in [0, 1): the only randomness


def choose(logits_LV: Tensor, draws: Sequence[Draw]) -> list[int]:
    """One token per row; -1 where a logit is not a number."""
    tokens_L = logits_LV.argmax(dim=-1)
    sampled = [i for i, draw in enumerate(draws) if draw.temperature > 0]
    if len(sampled) == len(draws):
        tokens_L = _draw(logits_LV.float(), draws)
    elif sampled:
        rows = torch.tensor(sampled, device=logits_LV.device)
        tokens_L[rows] = _draw(logits_LV[rows].float(), [draws[i] for i in sampled])
    tokens: list[int] = torch.where(logits_LV.isnan().any(dim=-1), -1, tokens_L).tolist()
    return tokens


def order_keys(values_LV: Tensor) -> Tensor:
    """int64 keys that order like (value, then lower id first) and never tie."""
    bits = values_LV.float().contiguous().view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # two's complement order = float order
    lower_id_first = torch.arange(values_LV.shape[-1] - 1, -1, -1, device=values_LV.device)
    return (ordered.to(torch.int64) << 32) | lower_id_first


def _draw(logits_LV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Inverse transform: over all ids in order where nothing is filtered, else over what is kept, best first."""
    vocab = logits_LV.shape[1]
    columns = torch.tensor(draws, dtype=torch.float64, device=logits_LV.device).T.unsqueeze(-1)
    temperatures, top_k, top_p, min_p, uniforms = columns.unbind()
    probs_LV = torch.softmax(logits_LV / temperatures.float(), dim=-1).double()
    if not any(draw.top_k > 0 or draw.top_p < 1 or draw.min_p > 0 for draw in draws):
        return _invert(probs_LV.cumsum(dim=-1), uniforms).squeeze(-1)
    is_filtered = (top_k > 0) | (top_p < 1) | (min_p > 0)
    by_id = torch.arange(vocab, device=logits_LV.device).expand_as(probs_LV)
    best_first_LV = probs_LV.float().sort(dim=-1, descending=True, stable=True).indices
    ids_LV = torch.where(is_filtered, best_first_LV, by_id)
    sorted_LV = probs_LV.gather(-1, ids_LV)
    best_L1 = probs_LV.amax(dim=-1, keepdim=True)
    kept_LV = sorted_LV >= min_p * best_L1
    kept_LV &= torch.arange(vocab, device=logits_LV.device) < torch.where(top_k > 0, top_k, vocab)
    sorted_LV = torch.where(kept_LV, sorted_LV, 0.0)
    mass_LV = sorted_LV.cumsum(dim=-1)
    kept_LV = (mass_LV - sorted_LV < top_p * mass_LV[:, -1:]) | (top_p >= 1)
    kept_LV[:, 0] |= is_filtered[:, 0]
    cumulative_LV = torch.where(kept_LV, sorted_LV, 0.0).cumsum(dim=-1)
    return ids_LV.gather(-1, _invert(cumulative_LV, uniforms)).squeeze(-1)


def _invert(cumulative_LV: Tensor, uniforms_L1: Tensor) -> Tensor:
    """The first position where the cumulative mass exceeds u times the total."""
    target_L1 = uniforms_L1 * cumulative_LV[:, -1:]
    return torch.searchsorted(cumulative_LV, target_L1, right=True).clamp_(max=cumulative_LV.shape[-1] - 1)
