"""Rotary tables: cos and sin of every position, scaled as the config says.

The first R values of a head are rotated in R/2 pairs (i, i + R/2), pair i by position * frequency[i]; often that is all
of it. Both halves of a table row hold the same numbers, so that an op needs no index arithmetic:
x * cos + (-x[R/2:], x[:R/2]) * sin.

A stream goes on in other processes, so the tables of all processes must be the same to the last bit. That is why they
are computed in float64, whose errors are lost when they are rounded, and not with torch: if a process's first call of
cos runs in several threads, MKL may compute the share of one of them with low precision (pytorch/pytorch#188792).
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from everserve.model.spec import Gqa, Latent, QkNorm, RopeConfig, Temperature

RopeTables = tuple[Tensor, Tensor]  # cos_PR, sin_PR


class Rotation(NamedTuple):
    """What a layer does to the heads of q and k before they meet: a norm if it has weights for it, then the rotation,
    if it has tables for that; then each q is multiplied with the number of its position, if there are such numbers."""

    cos_PR: Tensor | None
    sin_PR: Tensor | None
    q_norm: Tensor | None  # E weights, or H * E
    k_norm: Tensor | None
    eps: float  # of these norms
    offset: float = 0.0  # of their weights
    is_row: bool = False  # all heads are normed together, each with weights of its own
    norms_after: bool = False  # behind the rotation
    q_scale_P: Tensor | None = None


class PositionTables:
    """What layers look up by position, for positions below max_len. Layers that are alike share a table."""

    def __init__(self, max_len: int, device: torch.device) -> None:
        self._max_len = max_len
        self._device = device
        self._rotations: dict[tuple[RopeConfig, int], RopeTables] = {}
        self._scales: dict[Temperature, Tensor] = {}

    def latent(self, mixer: Latent) -> RopeTables:
        """cos and sin of what a head rotates of q, and of what is rotated of a latent row."""
        return self._tables(mixer.rope, mixer.rotary_size)

    def _tables(self, rope: RopeConfig, size: int) -> RopeTables:
        if (rope, size) not in self._rotations:
            self._rotations[rope, size] = rope_tables(rope, size, self._max_len, self._device)
        return self._rotations[rope, size]

    def rotation(self, mixer: Gqa, q_norm: Tensor | None, k_norm: Tensor | None, eps: float, offset: float) -> Rotation:
        """`q_norm`, `k_norm`: their weights, if the model has some."""
        cos_PR = sin_PR = q_scale_P = None
        if mixer.rope is not None:
            cos_PR, sin_PR = self._tables(mixer.rope, mixer.rotary_size)
        if mixer.temperature is not None:
            if mixer.temperature not in self._scales:
                self._scales[mixer.temperature] = _query_scales(mixer.temperature, self._max_len, self._device)
            q_scale_P = self._scales[mixer.temperature]
        if mixer.qk_norm is QkNorm.UNIT:
            q_norm = k_norm = torch.ones(mixer.head_size, device=self._device)
            offset = 0.0
        is_row = mixer.qk_norm is QkNorm.ROW
        return Rotation(cos_PR, sin_PR, q_norm, k_norm, eps, offset, is_row, mixer.norms_after_rope, q_scale_P)


def _query_scales(temperature: Temperature, max_len: int, device: torch.device) -> Tensor:
    far = (np.arange(max_len, dtype=np.float64) + temperature.ahead) // temperature.every
    return torch.from_numpy((1.0 + temperature.beta * np.log1p(far)).astype(np.float32)).to(device)


def rope_tables(rope: RopeConfig, head_size: int, max_len: int, device: torch.device) -> RopeTables:
    """For positions below max_len, in float32, of the first `head_size` values of a head. The attention factor is
    multiplied in."""
    frequencies = inverse_frequencies(rope, head_size, max_len).numpy()
    angles = np.arange(max_len, dtype=np.float32)[:, None] * frequencies
    tables, half = np.empty((2, max_len, head_size), np.float32), head_size // 2
    for table, function in zip(tables, (np.cos, np.sin), strict=True):
        function(angles, out=table[:, :half], dtype=np.float64, casting="same_kind")
        table[:, half:] = table[:, :half]
    tables *= attention_factor(rope)
    cos_PE, sin_PE = torch.from_numpy(tables).to(device)
    return cos_PE, sin_PE


def inverse_frequencies(rope: RopeConfig, head_size: int, max_len: int = 0) -> Tensor:
    """Radians per position of each of the R/2 pairs, float32, where sequences have at most `max_len` tokens."""
    exponents = torch.arange(0, head_size, 2, dtype=torch.float64) / head_size
    return _scaled(1.0 / rope.theta**exponents, rope, head_size, max_len).float()


def _scaled(plain: Tensor, rope: RopeConfig, head_size: int, max_len: int) -> Tensor:
    match rope.kind:
        case "default":
            return plain
        case "linear":
            return plain / rope.factor
        case "llama3":
            return _llama3(plain, rope)
        case "yarn":
            return _yarn(plain, rope, head_size)
        case "longrope":
            # By the longest sequence that there may be, not by each one's length: keys would not be the same any more
            # when a sequence has grown beyond the original length.
            is_long = max_len > rope.original_max_positions
            return plain / torch.tensor(rope.long_factors if is_long else rope.short_factors, dtype=torch.float64)
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
    """What cos and sin are multiplied with, to keep the entropy of attention over longer contexts."""
    if rope.kind not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.kind == "longrope":
        return math.sqrt(1 + max(math.log(rope.factor), 0.0) / math.log(rope.original_max_positions))

    def growth(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope.factor) + 1.0 if rope.factor > 1.0 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return growth(rope.mscale) / growth(rope.mscale_all_dim)
    return growth(1.0)
