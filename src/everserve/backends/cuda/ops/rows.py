"""What is done to each row by itself: embedding, norm, rotary positions and the store of keys and values.

A program has one row (or some heads of one), and is the same whatever else is in the batch. Arithmetic is float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from everserve.backends.cuda.ops.pdl import early, is_stopped
from everserve.backends.cuda.ops.sums import Sums, summed
from everserve.model.rope import Rotation

_EMBED_COLUMNS = 1024


def embed(tokens_T: Tensor, embedding_VD: Tensor, stop: Tensor) -> Tensor:
    """The tokens' rows, float32."""
    num_rows, size = len(tokens_T), embedding_VD.shape[1]
    out_TD = torch.empty(num_rows, size, dtype=torch.float32, device=tokens_T.device)
    if num_rows:
        block = min(triton.next_power_of_2(size), _EMBED_COLUMNS)
        _embed[(num_rows, triton.cdiv(size, block))](
            tokens_T, embedding_VD, out_TD, stop, D=size, BLOCK=block, **early(tokens_T.device), num_warps=4
        )
    return out_TD


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float, stop: Tensor, rows_L: Tensor | None = None) -> Tensor:
    """Root-mean-square norm of each row, or of those that are named, float32 inside, bfloat16 outside."""
    size = x_TD.shape[1]
    num_rows = len(x_TD if rows_L is None else rows_L)
    out_TD = torch.empty(num_rows, size, dtype=torch.bfloat16, device=x_TD.device)
    if num_rows:
        block = triton.next_power_of_2(size)
        _rms_norm[(num_rows,)](
            x_TD, rows_L, weight_D, out_TD, stop, eps,
            D=size, BLOCK=block, **early(x_TD.device), num_warps=_norm_warps(block),
        )  # fmt: skip
    return out_TD


def add_and_norm(sums: Sums, weight_D: Tensor, eps: float, stop: Tensor) -> tuple[Tensor, Tensor]:
    """The sums themselves, added up, and their norm."""
    if not sums.num_splits:
        return sums.data, rms_norm(sums.data, weight_D, eps, stop)
    num_rows, size = sums.num_rows, sums.num_columns
    whole_TD = torch.empty(num_rows, size, dtype=torch.float32, device=sums.data.device)
    out_TD = torch.empty(num_rows, size, dtype=torch.bfloat16, device=sums.data.device)
    block = triton.next_power_of_2(size)
    _add_and_norm[(num_rows,)](
        sums.data, sums.bias_O, sums.residual_TO, weight_D, whole_TD, out_TD, stop, eps, num_rows,
        D=size, NUM_SPLITS=sums.num_splits, BLOCK=block, **early(out_TD.device), num_warps=_norm_warps(block),
    )  # fmt: skip
    return whole_TD, out_TD


def rotate_and_store(
    qkv: Sums,
    positions_T: Tensor,
    kv_slots_T: Tensor,
    kv_pool: Tensor,
    layer: int,
    rotation: Rotation,
    num_heads: int,
    stop: Tensor,
    one_by_one: bool = False,
) -> Tensor:
    """Norm and rotate q and k, write k and v into the pool, return q_THE in bfloat16.
    Sums that are not complete yet are rounded to bfloat16 first.

    Rows with slot -1 (padding) store nothing, and their q is 0. `one_by_one`: with the bits of divided heads.
    """
    num_layers, _, num_kv_heads, block_size, head_size = kv_pool.shape[1:]
    assert qkv.num_columns == (num_heads + 2 * num_kv_heads) * head_size and qkv.data.is_contiguous()
    assert qkv.residual_TO is None
    assert kv_pool.dtype is torch.bfloat16 and kv_pool.is_contiguous()
    assert rotation.cos_PE.dtype is rotation.sin_PE.dtype is torch.float32
    num_rows, device = qkv.num_rows, qkv.data.device
    q_THE = torch.empty(num_rows, num_heads, head_size, dtype=torch.bfloat16, device=device)
    if num_rows:
        heads_at_once = min(_power_of_2_in(num_heads), _power_of_2_in(num_kv_heads), 8)
        if one_by_one and rotation.q_norm_E is not None:  # a sum: in the same order as in heads.py
            heads_at_once = 1
        grid = (num_rows, (num_heads + 2 * num_kv_heads) // heads_at_once)
        _rotate_and_store[grid](
            qkv.data, qkv.bias_O, positions_T, kv_slots_T, kv_pool, layer, *rotation, q_THE, stop, num_rows,
            L=num_layers, H=num_heads, G=num_kv_heads, BLOCK_SIZE=block_size, E=head_size, NUM_SPLITS=qkv.num_splits,
            HEADS=heads_at_once, FUSED=one_by_one, **early(device), num_warps=2,
        )  # fmt: skip
    return q_THE


def _norm_warps(block: int) -> int:
    """The same wherever rows are normed: how many threads share a row decides the order of its sum."""
    return min(max(block // 512, 1), 16)


def _power_of_2_in(number: int) -> int:
    """The largest power of two that divides it."""
    return number & -number


@triton.jit
def _embed(tokens, embedding, out, stop, D: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    if is_stopped(stop, EARLY):
        return
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens + row).to(tl.int64)
    x = tl.load(embedding + token * D + columns, mask=columns < D, other=0.0).to(tl.float32)
    tl.store(out + row * D + columns, x, mask=columns < D)


@triton.jit
def _rms_norm(x, rows, weight, out, stop, eps, D: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    if is_stopped(stop, EARLY):
        return
    at = tl.program_id(0).to(tl.int64) * D
    from_at = at
    if rows is not None:
        from_at = tl.load(rows + tl.program_id(0)).to(tl.int64) * D
    columns = tl.arange(0, BLOCK)
    mask = columns < D
    row = tl.load(x + from_at + columns, mask=mask, other=0.0).to(tl.float32)
    _store_normed(row, weight, out + at, columns, mask, eps, D)


@triton.jit(do_not_specialize=["num_rows"])
def _add_and_norm(
    data, bias, residual, weight, whole, out, stop, eps, num_rows,
    D: tl.constexpr, NUM_SPLITS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if is_stopped(stop, EARLY):
        return
    at = tl.program_id(0) * D
    columns = tl.arange(0, BLOCK)
    mask = columns < D
    row = summed(data, bias, residual, at + columns, columns, num_rows * D, mask, NUM_SPLITS)
    tl.store(whole + at + columns, row, mask=mask)
    _store_normed(row, weight, out + at, columns, mask, eps, D)


@triton.jit
def _store_normed(row, weight, out, columns, mask, eps, D: tl.constexpr):
    scale = tl.rsqrt(tl.sum(row * row, 0) / D + eps)
    normed = row * scale * tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + columns, normed.to(tl.bfloat16), mask=mask)


@triton.jit(do_not_specialize=["layer", "num_rows"])
def _rotate_and_store(
    qkv, bias, positions, kv_slots, kv_pool, layer, cos, sin, q_norm, k_norm, eps, q_out, stop, num_rows,
    L: tl.constexpr, H: tl.constexpr, G: tl.constexpr, BLOCK_SIZE: tl.constexpr, E: tl.constexpr, HEADS: tl.constexpr,
    NUM_SPLITS: tl.constexpr, FUSED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """HEADS heads of one row, all of q, of k or of v. The halves of a head are kept apart: rotation mixes them."""
    if is_stopped(stop, EARLY):
        return
    HALF: tl.constexpr = E // 2
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS
    position, slot = tl.load(positions + row), tl.load(kv_slots + row).to(tl.int64)
    heads, columns = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    at = (row * (H + 2 * G) + head + heads) * E + columns
    column, size = (head + heads) * E + columns, num_rows * (H + 2 * G) * E
    every = (heads >= 0) & (columns >= 0)
    first = summed(qkv, bias, None, at, column, size, every, NUM_SPLITS)
    second = summed(qkv, bias, None, at + HALF, column + HALF, size, every, NUM_SPLITS)
    if NUM_SPLITS > 0:  # as they would have come
        first, second = first.to(tl.bfloat16).to(tl.float32), second.to(tl.bfloat16).to(tl.float32)
    stored = every & (slot >= 0)
    if head < H:
        q_first, q_second = rotated(first, second, position, cos, sin, q_norm, eps, E, FUSED)
        q_at = q_out + (row * H + head + heads) * E + columns
        tl.store(q_at, tl.where(stored, q_first, 0.0).to(tl.bfloat16))
        tl.store(q_at + HALF, tl.where(stored, q_second, 0.0).to(tl.bfloat16))
    else:
        if head < H + G:
            first, second = rotated(first, second, position, cos, sin, k_norm, eps, E, FUSED)
        # In the pool the values of all heads follow the keys of all heads, as they do in a row of qkv.
        kv_at = kv_pool + (slot // BLOCK_SIZE * L + layer) * (2 * G * BLOCK_SIZE * E) + slot % BLOCK_SIZE * E
        kv_at += (head - H + heads) * (BLOCK_SIZE * E) + columns
        tl.store(kv_at, first.to(tl.bfloat16), mask=stored)
        tl.store(kv_at + HALF, second.to(tl.bfloat16), mask=stored)


@triton.jit
def rotated(first, second, position, cos, sin, norm, eps, E: tl.constexpr, FUSED: tl.constexpr):
    """FUSED: by hand. Of two products that are added the compiler chooses which one is rounded, and it does not choose
    the same one in every kernel, nor for every element of one."""
    HALF: tl.constexpr = E // 2
    columns = tl.arange(0, HALF)[None, :]
    if norm is not None:
        if FUSED:  # noqa: SIM108 (a constant of the kernel)
            squares = tl.fma(first, first, second * second)
        else:
            squares = first * first + second * second
        scale = tl.rsqrt(tl.sum(squares, 1) / E + eps)[:, None]
        first = first * scale * tl.load(norm + columns).to(tl.float32)
        second = second * scale * tl.load(norm + HALF + columns).to(tl.float32)
    at = tl.maximum(position, 0) * E + columns
    cos_first, cos_second = tl.load(cos + at), tl.load(cos + at + HALF)
    sin_first, sin_second = tl.load(sin + at), tl.load(sin + at + HALF)
    if FUSED:
        cos_first, cos_second = tl.broadcast_to(cos_first, first.shape), tl.broadcast_to(cos_second, first.shape)
        return tl.fma(first, cos_first, -(second * sin_first)), tl.fma(second, cos_second, first * sin_second)
    return first * cos_first - second * sin_first, second * cos_second + first * sin_second
