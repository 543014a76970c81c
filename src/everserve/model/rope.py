"""Rotary tables: cos and sin of every position, scaled as the config says.

A head of size E is rotated in E/2 pairs (i, i + E/2), pair i by position * frequency[i]. Both halves of a table row
hold the same numbers, so that an op needs no index arithmetic:  x * cos + (-x[E/2:], x[:E/2]) * sin.

A stream goes on in other processes, so the tables of all processes must be the same to the last bit. That is why they
are computed in float64, whose errors are lost when they are rounded, and not with torch: if a process's first call of
cos runs in several threads, MKL may compute the share of one of them with low precision (pytorch/pytorch#188792).
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from everserve.model.config import RopeConfig

RopeTables = tuple[Tensor, Tensor]  # cos_PE, sin_PE


class Rotation(NamedTuple):
    """What a layer does to the heads of q and k before they meet: a norm if it has weights for it, then this."""

    cos_PE: Tensor
    sin_PE: Tensor
    q_norm_E: Tensor | None
    k_norm_E: Tensor | None
    eps: float  # of these norms


def rope_tables(rope: RopeConfig, head_size: int, max_len: int, device: torch.device) -> RopeTables:
    """For positions below max_len, in float32. YaRN's attention factor is multiplied in."""
    angles = np.arange(max_len, dtype=np.float32)[:, None] * inverse_frequencies(rope, head_size).numpy()
    tables, half = np.empty((2, max_len, head_size), np.float32), head_size // 2
    for table, function in zip(tables, (np.cos, np.sin), strict=True):
        function(angles, out=table[:, :half], dtype=np.float64, casting="same_kind")
        table[:, half:] = table[:, :half]
    tables *= attention_factor(rope)
    cos_PE, sin_PE = torch.from_numpy(tables).to(device)
    return cos_PE, sin_PE


def inverse_frequencies(rope: RopeConfig, head_size: int) -> Tensor:
    """Radians per position of each of the E/2 pairs, float32."""
    exponents = torch.arange(0, head_size, 2, dtype=torch.float64) / head_size
    return _scaled(1.0 / rope.theta**exponents, rope, head_size).float()


def _scaled(plain: Tensor, rope: RopeConfig, head_size: int) -> Tensor:
    match rope.kind:
        case "default":
            return plain
        case "linear":
            return plain / rope.factor
        case "llama3":
            return _llama3(plain, rope)
        case "yarn":
            return _yarn(plain, rope, head_size)
        case _:
            raise AssertionError(f"ModelConfig let the rope kind {rope.kind} through")


def _llama3(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Short waves stay, waves longer than the original context are stretched, those between are blended."""
    waves_per_context = rope.original_max_positions / (2 * math.pi / plain)
    blend = (waves_per_context - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * (plain / rope.factor) + blend * plain


def _yarn(plain: Tensor, rope: RopeConfig, head_size: int) -> Tensor:
    """Pairs that turn over beta_fast times in the original context stay, those under beta_slow are stretched."""

    def pair_turning(times: float) -> float:
        """The (fractional) pair that turns this many times within the original context."""
        context_per_turn = rope.original_max_positions / (times * 2 * math.pi)
        return head_size * math.log(context_per_turn) / (2 * math.log(rope.theta))

    low, high = pair_turning(rope.beta_fast), pair_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    # The upper bound is in terms of E, not E/2: that is how the published models were trained.
    low, high = max(low, 0), min(high, head_size - 1)
    width = (high - low) or 0.001
    stretched_share = ((torch.arange(head_size // 2, dtype=torch.float64) - low) / width).clamp(0.0, 1.0)
    return (plain / rope.factor) * stretched_share + plain * (1 - stretched_share)


def attention_factor(rope: RopeConfig) -> float:
    """What YaRN multiplies cos and sin with, to keep the entropy of attention over longer contexts."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor

    def growth(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope.factor) + 1.0 if rope.factor > 1.0 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return growth(rope.mscale) / growth(rope.mscale_all_dim)
    return growth(1.0)
