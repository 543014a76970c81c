"""What is done to each row by itself: embedding, norm, rotary positions and the store of keys and values.

A program has one row (or some heads of one), and is the same whatever else is in the batch. Arithmetic is float32.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from everserve.backends.cuda.ops.pdl import early, is_stopped
from everserve.backends.cuda.ops.sums import Sums, summed
from everserve.model.ops import Join, NextNorm
from everserve.model.rope import Rotation
from everserve.model.spec import Norm

_EMBED_COLUMNS = _NUMBERS = 1024


def embed(tokens_T: Tensor, embedding_VD: Tensor, stop: Tensor, scale: float = 1.0) -> Tensor:
    """The tokens' rows times the scale, float32."""
    num_rows, size = len(tokens_T), embedding_VD.shape[1]
    out_TD = torch.empty(num_rows, size, dtype=torch.float32, device=tokens_T.device)
    if num_rows:
        block = min(triton.next_power_of_2(size), _EMBED_COLUMNS)
        _embed[(num_rows, triton.cdiv(size, block))](
            tokens_T, embedding_VD, out_TD, stop, D=size, SCALE=scale, BLOCK=block,
            **early(tokens_T.device), num_warps=4,
        )  # fmt: skip
    return out_TD


def norm(x_TD: Tensor, weight_D: Tensor, norm: Norm, stop: Tensor, rows_L: Tensor | None = None) -> Tensor:
    """The norm of each row, or of those that are named, float32 inside, bfloat16 outside."""
    size = x_TD.shape[1]
    num_rows = len(x_TD if rows_L is None else rows_L)
    out_TD = torch.empty(num_rows, size, dtype=torch.bfloat16, device=x_TD.device)
    if num_rows:
        block = triton.next_power_of_2(size)
        _norm[(num_rows,)](
            x_TD, rows_L, weight_D, out_TD, stop, norm.eps,
            D=size, **_kind_of(norm), BLOCK=block, **early(x_TD.device), num_warps=_norm_warps(block),
        )  # fmt: skip
    return out_TD


def _kind_of(norm: Norm) -> dict[str, float]:
    return {"IS_CENTRED": norm.is_centred, "OFFSET": norm.offset, "SCALE": norm.scale}


def narrowed(x_TD: Tensor, stop: Tensor) -> Tensor:
    """Rows in bfloat16: as it goes into products."""
    if x_TD.dtype is torch.bfloat16:
        return x_TD
    out_TD = torch.empty_like(x_TD, dtype=torch.bfloat16)
    _each(_narrow, x_TD.numel(), stop, x_TD, out_TD)
    return out_TD


def zeros(like_TD: Tensor, stop: Tensor) -> Tensor:
    """float32."""
    out_TD = torch.empty_like(like_TD, dtype=torch.float32)
    _each(_zero, out_TD.numel(), stop, out_TD)
    return out_TD


def softcap(x: Tensor, cap: float, stop: Tensor) -> Tensor:
    """cap * tanh(x / cap), in place."""
    _each(_softcap, x.numel(), stop, x, CAP=cap)
    return x


def _each(kernel: Any, size: int, stop: Tensor, *tensors: Tensor, **constants: float) -> None:
    """A kernel that looks at each number by itself."""
    if size:
        grid = (triton.cdiv(size, _NUMBERS),)
        kernel[grid](*tensors, stop, size, BLOCK=_NUMBERS, **constants, **early(stop.device), num_warps=4)


def weighed(x_TD: Tensor, weights_TS: Tensor, stop: Tensor) -> tuple[Tensor, Tensor]:
    """Each row times its first weight, bfloat16; and ones, for the answers."""
    (num_rows, size), out_TD, ones_TS = x_TD.shape, torch.empty_like(x_TD), torch.empty_like(weights_TS)
    num_slices = weights_TS.shape[1]
    if num_rows:
        block = triton.next_power_of_2(size)
        _weigh[(num_rows,)](
            x_TD, weights_TS, out_TD, ones_TS, stop, D=size, S=num_slices,
            S2=triton.next_power_of_2(num_slices), BLOCK=block, **early(x_TD.device), num_warps=4,
        )  # fmt: skip
    return out_TD, ones_TS


def weigh_and_add(
    y_TD: Tensor, residual_TD: Tensor | None, gate_T1: Tensor | None, scale: float, stop: Tensor
) -> Tensor:
    """residual (or 0) + scale * sigmoid(gate) (or 1) * y, float32."""
    (num_rows, size), out_TD = y_TD.shape, torch.empty_like(y_TD, dtype=torch.float32)
    if num_rows:
        block = triton.next_power_of_2(size)
        _weigh_and_add[(num_rows,)](
            y_TD, residual_TD, gate_T1, out_TD, stop, D=size, SCALE=scale, BLOCK=block,
            **early(y_TD.device), num_warps=4,
        )  # fmt: skip
    return out_TD


def join_and_norm(
    sums: Sums, residual_TD: Tensor, join: Join, following: NextNorm | None, stop: Tensor
) -> tuple[Tensor, Tensor]:
    """residual + scale * [norm](the sums, added up), float32; and the norm of that, or twice the same."""
    assert sums.residual_TO is None and residual_TD.dtype is torch.float32
    num_rows, size, device = sums.num_rows, sums.num_columns, sums.data.device
    whole_TD = torch.empty(num_rows, size, dtype=torch.float32, device=device)
    out_TD = torch.empty(num_rows, size, dtype=torch.bfloat16, device=device) if following is not None else whole_TD
    inner, outer = join.norm or Norm(eps=0.0), following.norm if following is not None else Norm(eps=0.0)
    weight_D = following.weight_D if following is not None else None
    if num_rows:
        block = triton.next_power_of_2(size)
        _join_and_norm[(num_rows,)](
            sums.data, sums.bias_O, join.norm_D, residual_TD, weight_D, whole_TD, out_TD, stop,
            inner.eps, outer.eps, num_rows,
            D=size, NUM_SPLITS=sums.num_splits, JOIN_SCALE=join.scale, IS_CENTRED=inner.is_centred,
            OFFSET=inner.offset, SCALE=inner.scale, NEXT_IS_CENTRED=outer.is_centred, NEXT_OFFSET=outer.offset,
            NEXT_SCALE=outer.scale, BLOCK=block, **early(device), num_warps=_norm_warps(block),
        )  # fmt: skip
    return whole_TD, out_TD


def add_and_norm(sums: Sums, weight_D: Tensor, kind: Norm, stop: Tensor) -> tuple[Tensor, Tensor]:
    """The sums themselves, added up, and their norm."""
    if not sums.num_splits:
        return sums.data, norm(sums.data, weight_D, kind, stop)
    num_rows, size = sums.num_rows, sums.num_columns
    whole_TD = torch.empty(num_rows, size, dtype=torch.float32, device=sums.data.device)
    out_TD = torch.empty(num_rows, size, dtype=torch.bfloat16, device=sums.data.device)
    block = triton.next_power_of_2(size)
    _add_and_norm[(num_rows,)](
        sums.data, sums.bias_O, sums.residual_TO, weight_D, whole_TD, out_TD, stop, kind.eps, num_rows,
        D=size, NUM_SPLITS=sums.num_splits, **_kind_of(kind), BLOCK=block,
        **early(out_TD.device), num_warps=_norm_warps(block),
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
    num_rows, device = qkv.num_rows, qkv.data.device
    q_THE = torch.empty(num_rows, num_heads, head_size, dtype=torch.bfloat16, device=device)
    if not _is_plain(rotation, head_size):
        _rotate_any_and_store(qkv, positions_T, kv_slots_T, kv_pool, layer, rotation, q_THE, stop)
    elif num_rows:
        heads_at_once = min(_power_of_2_in(num_heads), _power_of_2_in(num_kv_heads), 8)
        if one_by_one and rotation.q_norm is not None:  # a sum: in the same order as in heads.py
            heads_at_once = 1
        grid = (num_rows, (num_heads + 2 * num_kv_heads) // heads_at_once)
        _rotate_and_store[grid](
            qkv.data, qkv.bias_O, positions_T, kv_slots_T, kv_pool, layer, *rotation[:5], q_THE, stop, num_rows,
            L=num_layers, H=num_heads, G=num_kv_heads, BLOCK_SIZE=block_size, E=head_size, NUM_SPLITS=qkv.num_splits,
            HEADS=heads_at_once, FUSED=one_by_one, **early(device), num_warps=2,
        )  # fmt: skip
    return q_THE


def _is_plain(rotation: Rotation, size: int) -> bool:
    """Whether heads are of a size that is a power of two, and rotated whole, behind a norm of each if there is one."""
    if rotation.cos_PR is None or rotation.sin_PR is None or rotation.q_scale_P is not None:
        return False
    assert rotation.cos_PR.dtype is rotation.sin_PR.dtype is torch.float32
    is_whole = rotation.cos_PR.shape[1] == size and size & (size - 1) == 0
    return is_whole and not rotation.is_row and not rotation.norms_after and rotation.offset == 0.0


def _rotate_any_and_store(
    qkv: Sums, positions_T: Tensor, kv_slots_T: Tensor, kv_pool: Tensor, layer: int, rotation: Rotation, q_THE: Tensor,
    stop: Tensor,
) -> None:  # fmt: skip
    """Every kind of norm and rotation, head by head."""
    num_layers, _, num_kv_heads, block_size, size = kv_pool.shape[1:]
    num_rows, num_heads, device = len(q_THE), q_THE.shape[1], q_THE.device
    if not num_rows:
        return
    factors_T2 = None
    if rotation.is_row:  # a sum over all heads, once
        factors_T2 = torch.empty(num_rows, 2, dtype=torch.float32, device=device)
        block = triton.next_power_of_2(num_heads * size)
        _row_factors[(num_rows, 2)](
            qkv.data, qkv.bias_O, factors_T2, rotation.eps, stop, num_rows, Q=num_heads * size, K=num_kv_heads * size,
            NUM_SPLITS=qkv.num_splits, BLOCK=block, **early(device), num_warps=_norm_warps(block),
        )  # fmt: skip
    rotated = 0 if rotation.cos_PR is None else rotation.cos_PR.shape[1]
    _rotate_any[(num_rows, num_heads + 2 * num_kv_heads)](
        qkv.data, qkv.bias_O, positions_T, kv_slots_T, kv_pool, layer, rotation.cos_PR, rotation.sin_PR,
        rotation.q_norm, rotation.k_norm, factors_T2, rotation.q_scale_P, rotation.eps, q_THE, stop, num_rows,
        L=num_layers, H=num_heads, G=num_kv_heads, BLOCK_SIZE=block_size, E=size, EP=triton.next_power_of_2(size),
        R=rotated, NUM_SPLITS=qkv.num_splits, NORMS_AFTER=rotation.norms_after, OFFSET=rotation.offset,
        **early(device), num_warps=1,
    )  # fmt: skip


def _norm_warps(block: int) -> int:
    """The same wherever rows are normed: how many threads share a row decides the order of its sum."""
    return min(max(block // 512, 1), 16)


def _power_of_2_in(number: int) -> int:
    """The largest power of two that divides it."""
    return number & -number


@triton.jit
def _embed(
    tokens, embedding, out, stop, D: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    if is_stopped(stop, EARLY):
        return
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens + row).to(tl.int64)
    x = tl.load(embedding + token * D + columns, mask=columns < D, other=0.0).to(tl.float32)
    if SCALE != 1.0:
        x = x * SCALE
    tl.store(out + row * D + columns, x, mask=columns < D)


@triton.jit
def _narrow(x, out, stop, size, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    if is_stopped(stop, EARLY):
        return
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < size, other=0.0).to(tl.bfloat16), mask=at < size)


@triton.jit
def _zero(out, stop, size, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    if is_stopped(stop, EARLY):
        return
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.zeros((BLOCK,), tl.float32), mask=at < size)


@triton.jit
def _softcap(x, stop, size, CAP: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    if is_stopped(stop, EARLY):
        return
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    number = tl.load(x + at, mask=at < size, other=0.0)
    tl.store(x + at, CAP * tanh(number / CAP), mask=at < size)


@triton.jit
def tanh(x):
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def _weigh(
    x, weights, out, ones, stop,
    D: tl.constexpr, S: tl.constexpr, S2: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if is_stopped(stop, EARLY):
        return
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    weighed = tl.load(x + row * D + columns, mask=columns < D, other=0.0).to(tl.float32)
    weighed = weighed * tl.load(weights + row * S)
    tl.store(out + row * D + columns, weighed.to(tl.bfloat16), mask=columns < D)
    slices = tl.arange(0, S2)
    tl.store(ones + row * S + slices, tl.full((S2,), 1.0, tl.float32), mask=slices < S)


@triton.jit
def _weigh_and_add(
    y, residual, gate, out, stop, D: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    if is_stopped(stop, EARLY):
        return
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    at, mask = row * D + columns, columns < D
    answer = tl.load(y + at, mask=mask, other=0.0).to(tl.float32)
    if gate is not None:
        answer = answer * (tl.sigmoid(tl.load(gate + row).to(tl.float32)) * SCALE)
    elif SCALE != 1.0:
        answer = answer * SCALE
    if residual is not None:
        answer = answer + tl.load(residual + at, mask=mask, other=0.0)
    tl.store(out + at, answer, mask=mask)


@triton.jit
def _norm(
    x, rows, weight, out, stop, eps, D: tl.constexpr, IS_CENTRED: tl.constexpr, OFFSET: tl.constexpr,
    SCALE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if is_stopped(stop, EARLY):
        return
    at = tl.program_id(0).to(tl.int64) * D
    from_at = at
    if rows is not None:
        from_at = tl.load(rows + tl.program_id(0)).to(tl.int64) * D
    columns = tl.arange(0, BLOCK)
    mask = columns < D
    row = tl.load(x + from_at + columns, mask=mask, other=0.0).to(tl.float32)
    normed = _normed(row, weight, columns, mask, eps, D, IS_CENTRED, OFFSET, SCALE)
    tl.store(out + at + columns, normed.to(tl.bfloat16), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _add_and_norm(
    data, bias, residual, weight, whole, out, stop, eps, num_rows,
    D: tl.constexpr, NUM_SPLITS: tl.constexpr, IS_CENTRED: tl.constexpr, OFFSET: tl.constexpr, SCALE: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if is_stopped(stop, EARLY):
        return
    at = tl.program_id(0) * D
    columns = tl.arange(0, BLOCK)
    mask = columns < D
    row = summed(data, bias, residual, at + columns, columns, num_rows * D, mask, NUM_SPLITS)
    tl.store(whole + at + columns, row, mask=mask)
    normed = _normed(row, weight, columns, mask, eps, D, IS_CENTRED, OFFSET, SCALE)
    tl.store(out + at + columns, normed.to(tl.bfloat16), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _join_and_norm(
    data, bias, inner, residual, weight, whole, out, stop, inner_eps, eps, num_rows,
    D: tl.constexpr, NUM_SPLITS: tl.constexpr, JOIN_SCALE: tl.constexpr, IS_CENTRED: tl.constexpr,
    OFFSET: tl.constexpr, SCALE: tl.constexpr, NEXT_IS_CENTRED: tl.constexpr, NEXT_OFFSET: tl.constexpr,
    NEXT_SCALE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if is_stopped(stop, EARLY):
        return
    at = tl.program_id(0) * D
    columns = tl.arange(0, BLOCK)
    mask = columns < D
    row = summed(data, bias, None, at + columns, columns, num_rows * D, mask, NUM_SPLITS)
    if inner is not None:
        row = _normed(row, inner, columns, mask, inner_eps, D, IS_CENTRED, OFFSET, SCALE)
    if JOIN_SCALE != 1.0:
        row = row * JOIN_SCALE
    row = tl.load(residual + at + columns, mask=mask, other=0.0) + row
    tl.store(whole + at + columns, row, mask=mask)
    if weight is not None:
        normed = _normed(row, weight, columns, mask, eps, D, NEXT_IS_CENTRED, NEXT_OFFSET, NEXT_SCALE)
        tl.store(out + at + columns, normed.to(tl.bfloat16), mask=mask)


@triton.jit
def _normed(
    row, weight, columns, mask, eps, D: tl.constexpr, IS_CENTRED: tl.constexpr, OFFSET: tl.constexpr,
    SCALE: tl.constexpr,
):  # fmt: skip
    if IS_CENTRED:
        row = tl.where(mask, row - tl.sum(row, 0) / D, 0.0)
    factor = tl.rsqrt(tl.sum(row * row, 0) / D + eps)
    weights = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    if OFFSET != 0.0:
        weights = weights + OFFSET
    normed = row * factor * weights
    if SCALE != 1.0:
        normed = normed * SCALE
    return normed


@triton.jit(do_not_specialize=["num_rows"])
def _row_factors(
    qkv, bias, factors, eps, stop, num_rows,
    Q: tl.constexpr, K: tl.constexpr, NUM_SPLITS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """What norms over all heads of q, and over all of k, multiply with."""
    if is_stopped(stop, EARLY):
        return
    row, of_k = tl.program_id(0).to(tl.int64), tl.program_id(1)
    WIDTH: tl.constexpr = Q + 2 * K
    size = tl.where(of_k == 1, K, Q)
    columns = tl.arange(0, BLOCK)
    column = of_k * Q + columns
    x = summed(qkv, bias, None, row * WIDTH + column, column, num_rows * WIDTH, columns < size, NUM_SPLITS)
    x = tl.where(columns < size, x, 0.0)
    if NUM_SPLITS > 0:  # as they would have come
        x = x.to(tl.bfloat16).to(tl.float32)
    tl.store(factors + row * 2 + of_k, tl.rsqrt(tl.sum(x * x, 0) / size + eps))


@triton.jit(do_not_specialize=["layer", "num_rows"])
def _rotate_any(
    qkv, bias, positions, kv_slots, kv_pool, layer, cos, sin, q_norm, k_norm, factors, q_scale, eps, q_out, stop,
    num_rows,
    L: tl.constexpr, H: tl.constexpr, G: tl.constexpr, BLOCK_SIZE: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
    R: tl.constexpr, NUM_SPLITS: tl.constexpr, NORMS_AFTER: tl.constexpr, OFFSET: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One head of one row, with columns up to a power of two; each value is rotated with its partner."""
    if is_stopped(stop, EARLY):
        return
    HALF: tl.constexpr = R // 2
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position, slot = tl.load(positions + row), tl.load(kv_slots + row).to(tl.int64)
    columns = tl.arange(0, EP)
    is_first, is_second = columns < HALF, (columns >= HALF) & (columns < R)
    partner = tl.where(is_first, columns + HALF, tl.where(is_second, columns - HALF, columns))
    mask, size = columns < E, num_rows * (H + 2 * G) * E
    at = (row * (H + 2 * G) + head) * E
    x = summed(qkv, bias, None, at + columns, head * E + columns, size, mask, NUM_SPLITS)
    other = summed(qkv, bias, None, at + partner, head * E + partner, size, mask, NUM_SPLITS)
    if NUM_SPLITS > 0:  # as they would have come
        x, other = x.to(tl.bfloat16).to(tl.float32), other.to(tl.bfloat16).to(tl.float32)
    if head < H + G:
        if q_norm is not None:
            if head < H:
                weights = q_norm + (head * E if factors is not None else 0)
            else:
                weights = k_norm + ((head - H) * E if factors is not None else 0)
            w = tl.load(weights + columns, mask=mask, other=0.0).to(tl.float32) + OFFSET
            if not NORMS_AFTER:
                if factors is not None:
                    factor = tl.load(factors + row * 2 + (head >= H).to(tl.int32))
                else:
                    factor = tl.rsqrt(tl.sum(x * x, 0) / E + eps)
                of_other = tl.load(weights + partner, mask=mask, other=0.0).to(tl.float32) + OFFSET
                x, other = x * factor * w, other * factor * of_other
        if R > 0:
            is_rotated = is_first | is_second
            table = tl.maximum(position, 0) * R + columns
            c = tl.load(cos + table, mask=is_rotated, other=1.0)
            s = tl.load(sin + table, mask=is_rotated, other=0.0)
            x = tl.where(is_rotated, x * c + tl.where(is_first, -other, other) * s, x)
        if q_norm is not None:  # noqa: SIM102 (a constant of the kernel, and another one)
            if NORMS_AFTER:
                x = x * tl.rsqrt(tl.sum(tl.where(mask, x * x, 0.0), 0) / E + eps) * w
        if q_scale is not None:  # noqa: SIM102 (a constant of the kernel, and a value)
            if head < H:
                x = x * tl.load(q_scale + tl.maximum(position, 0))
    stored = mask & (slot >= 0)
    if head < H:
        q_at = q_out + (row * H + head) * E + columns
        tl.store(q_at, tl.where(stored, x, 0.0).to(tl.bfloat16), mask=mask)
    else:
        kv_at = kv_pool + (slot // BLOCK_SIZE * L + layer) * (2 * G * BLOCK_SIZE * E) + slot % BLOCK_SIZE * E
        kv_at += (head - H) * (BLOCK_SIZE * E) + columns
        tl.store(kv_at, x.to(tl.bfloat16), mask=stored)


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
