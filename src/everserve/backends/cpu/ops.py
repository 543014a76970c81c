"""Ops in C for CPUs: float32 activations, weights and KV in float32, bfloat16 or float16 read in place.

    NativeOps(num_threads=2)      compiles on first use (seconds, once per machine), then loads in milliseconds
    unavailable()                 why that would fail here, or None

Every op is batch-invariant and thread-invariant: a row's result is the same bits whatever the other rows, the number
of threads, the chunks of a prefill and the block size (csrc/gemm.h and csrc/attention.c say how).

Threads. None is started before the first op that is worth sharing, and the child of a fork starts its own. The calling
thread does whatever the helpers have not taken, so a helper that gets no core delays no op. An idle helper spins for
`spin_us` before it sleeps, yielding its core every microsecond; if the next op comes within that time,
sharing it costs a microsecond, else about 20. With another process busy on one of two cores, two threads are as fast as
one (with libgomp four times slower); where processes outnumber cores by more, give each one thread.

The wrappers are called about nine times per layer and token, so they stay lean: each packs its arguments into a struct
that the C side declares with the same fields (EXPORT in csrc/threads.h). What does not change is looked up and checked
once: facts about a weight are kept on the tensor (which must not get another dtype or shape afterwards), facts about
the batch and the pool for as long as these are the same objects.
"""

import ctypes
import functools
import os
from array import array
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from struct import Struct

import torch
from torch import Tensor

from everserve.backends.cpu.composed import Composed
from everserve.model.batch import StepBatch
from everserve.model.choosing import Draw
from everserve.model.ops import ExpertSlots, HeadSlots, HeadWeights, RowIndices, RowMemory
from everserve.model.rope import Rotation
from everserve.model.whole_layers import LayerWeights, WholeLayers
from everserve.native import BuildError, library

SOURCES = Path(__file__).parent / "csrc" / "ops"
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # enum dtype in csrc/gemm.h
KEY_TILE = 16  # csrc/attention.c: block and head sizes are multiples of it
MAX_HEAD_SIZE = 512  # csrc/attention.c, csrc/rotate.c
MAX_EXPERTS = 1024  # csrc/route.c
SPIN_US = 50.0

# One letter per field of the C struct: P pointer, q integer, d double.
_set_threads_args = Struct("qd").pack
_embed_args = Struct("3P5q").pack
_linear_args = Struct("5P6q").pack
_rms_norm_args = Struct("3P3qd").pack
_rotate_args = Struct("P6q9P4qd").pack
_attend_args = Struct("P6q6P4qd").pack
_route_args = Struct("5P7q").pack
_expert_rows_args = Struct("6P6q").pack
_combine_args = Struct("5P3q").pack
_choose_args = Struct("3P2q").pack
_check_batch_args = Struct("4P6q").pack
_head_rows_args = Struct("P6q7P6q2d").pack
_slot = Struct("3P4q")
_head_slot = Struct("6P5q")

_empty = torch.empty
_empty_like = torch.empty_like
_float32 = torch.float32
_int32 = torch.int32


@functools.cache
def _load() -> ctypes.CDLL:
    try:
        lib = ctypes.CDLL(str(library("native", SOURCES)))
    except OSError as e:
        raise BuildError(f"cannot load the native ops: {e}") from e
    for name in ("set_threads", "linear", "rms_norm", "rotate_and_store", "attend", "route", "combine", "choose"):
        function = getattr(lib, f"es_{name}")
        function.argtypes, function.restype = [ctypes.c_char_p], None
    for name in ("embed", "expert_rows", "head_rows", "check_batch", "layers"):
        function = getattr(lib, f"es_{name}")
        function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_int64
    return lib


def unavailable() -> str | None:
    """Why the native ops cannot be used on this machine, in one line; None if they can. Compiles them if need be."""
    try:
        _load()
    except BuildError as e:
        return str(e)
    return None


def unsupported(*, head_size: int, num_experts: int) -> str | None:
    """Why these kernels cannot compute a model of this shape, in one line; None if they can."""
    if head_size % KEY_TILE or head_size > MAX_HEAD_SIZE:
        return f"head size {head_size} is not a multiple of {KEY_TILE} up to {MAX_HEAD_SIZE}"
    if num_experts > MAX_EXPERTS:
        return f"{num_experts} experts are more than {MAX_EXPERTS}"
    return None


def set_num_threads(num_threads: int, spin_us: float | None = None) -> None:
    """Threads that work on one op, for this process. By default they spin a while if there is a core for each."""
    assert num_threads >= 1
    if spin_us is None:
        spin_us = SPIN_US if num_threads <= len(os.sched_getaffinity(0)) else 0.0
    _load().es_set_threads(_set_threads_args(num_threads, spin_us))


def matrix_facts(weight: Tensor) -> tuple[int, int, int, int]:
    """Rows, columns, elements from row to row, dtype code."""
    facts: tuple[int, int, int, int]
    try:
        facts = weight.native_facts  # type: ignore[attr-defined]
    except AttributeError:
        rows, columns = weight.shape
        row_stride, column_stride = weight.stride()
        assert (column_stride == 1 or columns <= 1) and weight.device.type == "cpu"
        facts = (rows, columns, row_stride, _dtype_code(weight))
        weight.native_facts = facts  # type: ignore[attr-defined]
    return facts


def vector_facts(weight: Tensor) -> tuple[int, int]:
    """Size, dtype code."""
    facts: tuple[int, int]
    try:
        facts = weight.native_facts  # type: ignore[attr-defined]
    except AttributeError:
        assert weight.dim() == 1 and weight.is_contiguous() and weight.device.type == "cpu"
        facts = (weight.shape[0], _dtype_code(weight))
        weight.native_facts = facts  # type: ignore[attr-defined]
    return facts


def _dtype_code(tensor: Tensor) -> int:
    assert tensor.dtype in DTYPE_CODES, f"native ops do not read {tensor.dtype}"
    return DTYPE_CODES[tensor.dtype]


class NativeExpertSlots:
    """Pointers to the expert weights of one layer. All filled slots have the same sizes; dtypes may differ."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.hidden_size = 0  # known from the first fill on
        self.inner_size = 0
        self._weights: list[tuple[Tensor, Tensor, Tensor] | None] = [None] * num_slots  # kept alive
        self._table = ctypes.create_string_buffer(_slot.size * num_slots)
        self.table_ptr = ctypes.addressof(self._table)

    def fill(self, slot: int, gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor) -> None:
        assert 0 <= slot < self.num_slots, f"slot {slot} of {self.num_slots}"
        weights = (gate_FD, up_FD, down_DF)
        inner_size, hidden_size, gate_stride, dtype = matrix_facts(gate_FD)
        up_stride, down_stride = matrix_facts(up_FD)[2], matrix_facts(down_DF)[2]
        assert up_FD.shape == gate_FD.shape and down_DF.shape == (hidden_size, inner_size)
        assert up_FD.dtype is down_DF.dtype is gate_FD.dtype
        if all(w is None for w in self._weights):
            self.hidden_size, self.inner_size = hidden_size, inner_size
        assert (hidden_size, inner_size) == (self.hidden_size, self.inner_size), "experts of one layer have one size"
        pointers = (w.data_ptr() for w in weights)
        _slot.pack_into(self._table, slot * _slot.size, *pointers, gate_stride, up_stride, down_stride, dtype)
        self._weights[slot] = weights

    def clear(self, slot: int) -> None:
        _slot.pack_into(self._table, slot * _slot.size, 0, 0, 0, 0, 0, 0, 0)
        self._weights[slot] = None


class NativeHeadSlots:
    """Pointers to the weights of some heads of one layer."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.group_size = 0  # query heads of a slot; known from the first fill on
        self.hidden_size = 0
        self._weights: list[HeadWeights | None] = [None] * num_slots  # kept alive
        self._table = ctypes.create_string_buffer(_head_slot.size * num_slots)
        self.table_ptr = ctypes.addressof(self._table)

    def fill(self, slot: int, weights: HeadWeights) -> None:
        assert 0 <= slot < self.num_slots, f"slot {slot} of {self.num_slots}"
        matrices, biases = weights[:3], weights[3:]
        (num_rows, hidden_size, q_stride, dtype), k, v = map(matrix_facts, matrices)
        size = k[0]
        assert num_rows % size == 0 and k[:2] == v[:2] == (size, hidden_size) and k[3] == v[3] == dtype
        self.group_size, self.hidden_size = num_rows // size, hidden_size
        bias_dtype = 0
        for bias, rows in zip(biases, (num_rows, size, size), strict=True):
            if bias is not None:
                bias_size, bias_dtype = vector_facts(bias)
                assert bias_size == rows
        pointers = (weight.data_ptr() if weight is not None else 0 for weight in weights)
        _head_slot.pack_into(
            self._table, slot * _head_slot.size, *pointers, q_stride, k[2], v[2], dtype, bias_dtype
        )  # fmt: skip
        self._weights[slot] = weights

    def clear(self, slot: int) -> None:
        _head_slot.pack_into(self._table, slot * _head_slot.size, *[0] * 11)
        self._weights[slot] = None


class NativeOps(Composed):
    """Ops on the CPU, by the kernels in csrc."""

    name = "native"
    device = torch.device("cpu")
    activation_dtype = torch.float32
    batch_invariant = True
    is_captured = False

    def __init__(self, num_threads: int = 1, spin_us: float | None = None) -> None:
        lib = _load()
        set_num_threads(num_threads, spin_us)
        self._embed = lib.es_embed
        self._linear = lib.es_linear
        self._rms_norm = lib.es_rms_norm
        self._rotate_and_store = lib.es_rotate_and_store
        self._attend = lib.es_attend
        self._route = lib.es_route
        self._expert_rows = lib.es_expert_rows
        self._head_rows = lib.es_head_rows
        self._combine = lib.es_combine
        self._choose = lib.es_choose
        self._check_batch = lib.es_check_batch
        self.run_layers = lib.es_layers
        address = ctypes.cast(lib.es_expert_rows, ctypes.c_void_p).value
        assert address is not None
        self.expert_rows_address = address  # for C that calls it
        # What _bind found out about the batch and pool at hand, which all layers of a step share.
        self._batch: StepBatch | None = None
        self._pool: Tensor | None = None
        self._cos: Tensor | None = None

    def embed(self, tokens_T: Tensor, embedding_VD: Tensor) -> Tensor:
        num_tokens, size, stride, dtype = matrix_facts(embedding_VD)
        num_rows = tokens_T.numel()
        assert tokens_T.dtype is _int32 and tokens_T.is_contiguous()
        out_TD = _empty(num_rows, size, dtype=_float32)
        wrong = self._embed(
            _embed_args(
                embedding_VD.data_ptr(), tokens_T.data_ptr(), out_TD.data_ptr(),
                num_rows, num_tokens, size, stride, dtype,
            )
        )  # fmt: skip
        if wrong:
            raise IndexError(f"row {wrong - 1}: token {tokens_T[wrong - 1]} of {num_tokens}")
        return out_TD

    def linear(
        self, x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None = None, residual_TO: Tensor | None = None
    ) -> Tensor:
        num_rows, k = x_TD.shape
        num_columns, weight_k, stride, dtype = matrix_facts(weight_OD)
        assert k == weight_k and x_TD.dtype is _float32 and x_TD.is_contiguous()
        bias_ptr = bias_dtype = residual_ptr = 0
        if bias_O is not None:
            bias_ptr = bias_O.data_ptr()
            bias_size, bias_dtype = vector_facts(bias_O)
            assert bias_size == num_columns
        if residual_TO is not None:
            residual_ptr = residual_TO.data_ptr()
            assert residual_TO.numel() == num_rows * num_columns
            assert residual_TO.dtype is _float32 and residual_TO.is_contiguous()
        out_TO = _empty(num_rows, num_columns, dtype=_float32)
        self._linear(
            _linear_args(
                x_TD.data_ptr(), weight_OD.data_ptr(), bias_ptr, residual_ptr, out_TO.data_ptr(),
                num_rows, num_columns, k, stride, dtype, bias_dtype,
            )
        )  # fmt: skip
        return out_TO

    def head(self, x_LD: Tensor, weight_VD: Tensor) -> Tensor:
        return self.linear(x_LD, weight_VD)

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float, rows_L: Tensor | None = None) -> Tensor:
        if rows_L is not None and len(rows_L) != len(x_TD):  # ascending: as many as there are, are all of them
            x_TD = x_TD.index_select(0, rows_L)
        num_rows, size = x_TD.shape
        weight_size, dtype = vector_facts(weight_D)
        assert size == weight_size and x_TD.dtype is _float32 and x_TD.is_contiguous()
        out_TD = _empty_like(x_TD)
        self._rms_norm(
            _rms_norm_args(x_TD.data_ptr(), weight_D.data_ptr(), out_TD.data_ptr(), num_rows, size, dtype, eps)
        )
        return out_TD

    def rotate_and_store(
        self,
        qkv_TX: Tensor,
        batch: StepBatch,
        kv_pool: Tensor,
        layer: int,
        rotation: Rotation,
    ) -> Tensor:
        cos_PE, sin_PE, q_norm_E, k_norm_E, eps = rotation
        if batch is not self._batch or kv_pool is not self._pool:
            self._bind(batch, kv_pool)
        if cos_PE is not self._cos:
            self._bind_rotation(cos_PE, sin_PE)
        assert self._highest_position < self._num_positions and 0 <= layer < self._num_layers
        num_rows, width = qkv_TX.shape
        head_size = self._head_size
        num_q_heads = width // head_size - 2 * self._num_kv_heads
        assert num_rows == self._num_rows and qkv_TX.dtype is _float32 and qkv_TX.is_contiguous()
        assert num_q_heads > 0 and (num_q_heads + 2 * self._num_kv_heads) * head_size == width
        q_norm_ptr = q_norm_dtype = k_norm_ptr = k_norm_dtype = 0
        if q_norm_E is not None:
            q_norm_ptr = q_norm_E.data_ptr()
            q_norm_size, q_norm_dtype = vector_facts(q_norm_E)
            assert q_norm_size == head_size
        if k_norm_E is not None:
            k_norm_ptr = k_norm_E.data_ptr()
            k_norm_size, k_norm_dtype = vector_facts(k_norm_E)
            assert k_norm_size == head_size
        q_THE = _empty(num_rows, num_q_heads, head_size, dtype=_float32)
        self._rotate_and_store(
            _rotate_args(
                *self._pool_fields, layer, 0,
                qkv_TX.data_ptr(), cos_PE.data_ptr(), sin_PE.data_ptr(), q_norm_ptr, k_norm_ptr,
                self._positions_ptr, self._kv_slots_ptr, q_THE.data_ptr(),
                num_rows, num_q_heads, q_norm_dtype, k_norm_dtype, eps,
            )
        )  # fmt: skip
        return q_THE

    def attend(self, q_THE: Tensor, batch: StepBatch, kv_pool: Tensor, layer: int, scale: float) -> Tensor:
        if batch is not self._batch or kv_pool is not self._pool:
            self._bind(batch, kv_pool)
        num_rows, num_q_heads, head_size = q_THE.shape
        assert num_rows == self._num_rows and head_size == self._head_size and 0 <= layer < self._num_layers
        assert num_q_heads % self._num_kv_heads == 0 and q_THE.dtype is _float32 and q_THE.is_contiguous()
        out_TX = _empty(num_rows, num_q_heads * head_size, dtype=_float32)
        self._attend(
            _attend_args(
                *self._pool_fields, layer, 0,
                q_THE.data_ptr(), out_TX.data_ptr(), *self._attend_fields, num_q_heads, scale,
            )
        )  # fmt: skip
        return out_TX

    def route(
        self, x_TD: Tensor, router_ND: Tensor, top_k: int, renormalise: bool, allowed_N: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        num_rows, size = x_TD.shape
        num_experts, router_size, stride, dtype = matrix_facts(router_ND)
        assert size == router_size and x_TD.dtype is _float32 and x_TD.is_contiguous()
        assert 0 < top_k <= num_experts <= MAX_EXPERTS
        allowed_ptr = 0
        if allowed_N is not None:
            assert allowed_N.dtype is _int32 and allowed_N.is_contiguous() and allowed_N.numel() == num_experts
            allowed_ptr = allowed_N.data_ptr()
        ids_TK = _empty(num_rows, top_k, dtype=_int32)
        weights_TK = _empty(num_rows, top_k, dtype=_float32)
        self._route(
            _route_args(
                x_TD.data_ptr(), router_ND.data_ptr(), ids_TK.data_ptr(), weights_TK.data_ptr(), allowed_ptr,
                num_rows, num_experts, size, top_k, stride, dtype, renormalise,
            )
        )  # fmt: skip
        return ids_TK, weights_TK

    def expert_slots(self, num_slots: int) -> NativeExpertSlots:
        return NativeExpertSlots(num_slots)

    def expert_rows(self, x_TD: Tensor, token_R: Tensor, slot_R: Tensor, slots: ExpertSlots) -> Tensor:
        assert isinstance(slots, NativeExpertSlots)
        num_tokens, size = x_TD.shape
        num_rows = token_R.numel()
        assert x_TD.dtype is _float32 and x_TD.is_contiguous()
        assert token_R.dtype is _int32 and token_R.is_contiguous()
        assert slot_R.dtype is _int32 and slot_R.is_contiguous() and slot_R.numel() == num_rows
        assert size == slots.hidden_size or not num_rows or not slots.hidden_size
        y_RD = _empty(num_rows, size, dtype=_float32)
        wrong = self._expert_rows(
            _expert_rows_args(
                x_TD.data_ptr(), token_R.data_ptr(), slot_R.data_ptr(), slots.table_ptr, y_RD.data_ptr(), 0,
                num_rows, num_tokens, num_rows, slots.num_slots, size, slots.inner_size,
            )
        )  # fmt: skip
        if wrong:
            raise _wrong_row(wrong, token_R, slot_R, num_tokens, slots)
        return y_RD

    def expert_rows_at(self, memory: RowMemory, rows: RowIndices, slots: ExpertSlots) -> None:
        assert isinstance(slots, NativeExpertSlots)
        base, num_base_rows, size = memory
        token_R, slot_R, y_R, num_rows = rows
        assert size == slots.hidden_size or not num_rows
        wrong = self._expert_rows(
            _expert_rows_args(
                base, token_R, slot_R, slots.table_ptr, base, y_R,
                num_rows, num_base_rows, num_base_rows, slots.num_slots, size, slots.inner_size,
            )
        )  # fmt: skip
        if wrong:
            raise IndexError(f"row {abs(wrong) - 1}: no such {'slot' if wrong > 0 else 'row of memory'}")

    def head_slots(self, num_slots: int) -> NativeHeadSlots:
        return NativeHeadSlots(num_slots)

    def head_rows_at(
        self, requests: int, num_requests: int, slots: HeadSlots, kv_pool: Tensor, rotation: Rotation, scale: float
    ) -> None:
        assert isinstance(slots, NativeHeadSlots)
        _, num_pieces, two, block_size, head_size = kv_pool.shape
        assert two == 2 and kv_pool.is_contiguous() and block_size % KEY_TILE == 0
        cos_PE, sin_PE, q_norm_E, k_norm_E, eps = rotation
        assert cos_PE.shape == sin_PE.shape and cos_PE.shape[1] == head_size <= MAX_HEAD_SIZE
        norms = [
            (norm.data_ptr(), vector_facts(norm)[1]) if norm is not None else (0, 0) for norm in (q_norm_E, k_norm_E)
        ]
        wrong = self._head_rows(
            _head_rows_args(
                kv_pool.data_ptr(), _dtype_code(kv_pool), num_pieces, 0, block_size, head_size, 0, 0,
                slots.table_ptr, requests, cos_PE.data_ptr(), sin_PE.data_ptr(), norms[0][0], norms[1][0],
                slots.num_slots, num_requests, slots.group_size, slots.hidden_size, norms[0][1], norms[1][1],
                eps, scale,
            )
        )  # fmt: skip
        if wrong:
            raise LookupError("a head is asked for whose slot is empty, or does not exist")

    def combine(self, rows_TKD: Tensor, weights_TK: Tensor, residual_TD: Tensor) -> Tensor:
        num_rows, top_k, size = rows_TKD.shape
        assert weights_TK.numel() == num_rows * top_k and residual_TD.numel() == num_rows * size
        assert rows_TKD.dtype is weights_TK.dtype is residual_TD.dtype is _float32
        assert rows_TKD.is_contiguous() and weights_TK.is_contiguous() and residual_TD.is_contiguous()
        out_TD = _empty_like(residual_TD)
        self._combine(
            _combine_args(
                rows_TKD.data_ptr(), 0, weights_TK.data_ptr(), residual_TD.data_ptr(), out_TD.data_ptr(),
                num_rows, top_k, size,
            )
        )  # fmt: skip
        return out_TD

    def combine_at(self, row_TK: int, weights_TK: Tensor, residual_TD: Tensor) -> Tensor:
        num_rows, top_k = weights_TK.shape
        size = residual_TD.shape[1]
        assert residual_TD.shape[0] == num_rows and weights_TK.dtype is residual_TD.dtype is _float32
        assert weights_TK.is_contiguous() and residual_TD.is_contiguous()
        out_TD = _empty_like(residual_TD)
        self._combine(
            _combine_args(
                0, row_TK, weights_TK.data_ptr(), residual_TD.data_ptr(), out_TD.data_ptr(), num_rows, top_k, size
            )
        )
        return out_TD

    def whole_layers(self, layers: Sequence[LayerWeights]) -> WholeLayers:
        from everserve.backends.cpu.whole_layers import NativeWholeLayers  # noqa: PLC0415 (made of these ops)

        return NativeWholeLayers(self, layers)

    def batch_fields(
        self, batch: StepBatch, kv_pool: Tensor, rotation: Rotation
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, int, int]]:
        """For C, checked against each other: the fields of the pool, where positions, KV slots, query starts and block
        tables are, and how many rows, sequences and columns of tables there are."""
        if batch is not self._batch or kv_pool is not self._pool:
            self._bind(batch, kv_pool)
        if rotation.cos_PE is not self._cos:
            self._bind_rotation(rotation.cos_PE, rotation.sin_PE)
        assert self._highest_position < self._num_positions
        starts, tables, num_rows, num_seqs, width = self._attend_fields[1:]
        return (
            self._pool_fields,
            (self._positions_ptr, self._kv_slots_ptr, starts, tables),
            (num_rows, num_seqs, width),
        )

    def choose(self, logits_LV: Tensor, draws: Sequence[Draw]) -> list[int]:
        num_rows, vocab = logits_LV.shape
        assert num_rows == len(draws) and logits_LV.dtype is _float32 and logits_LV.is_contiguous()
        tokens = array("i", bytes(4 * num_rows))
        numbers = array("d", chain.from_iterable(draws))
        self._choose(
            _choose_args(logits_LV.data_ptr(), numbers.buffer_info()[0], tokens.buffer_info()[0], num_rows, vocab)
        )
        return tokens.tolist()

    def _bind(self, batch: StepBatch, kv_pool: Tensor) -> None:
        """Check a batch and the pool against each other, and keep what every layer needs of them."""
        self._batch = self._pool = None
        num_blocks, num_layers, two, num_kv_heads, block_size, head_size = kv_pool.shape
        assert two == 2 and kv_pool.is_contiguous() and block_size % KEY_TILE == 0
        assert head_size % KEY_TILE == 0 and head_size <= MAX_HEAD_SIZE
        dtype = _dtype_code(kv_pool)

        num_rows, num_seqs = batch.num_tokens, batch.num_seqs
        width = batch.block_tables_SB.shape[1]
        positions, kv_slots = batch.positions_T, batch.kv_slots_T
        starts, tables = batch.query_starts_S, batch.block_tables_SB
        assert positions.shape == kv_slots.shape == (num_rows,) and starts.shape == (num_seqs + 1,)
        assert all(t.dtype is _int32 and t.is_contiguous() for t in (positions, kv_slots, starts, tables))
        pointers = (positions.data_ptr(), kv_slots.data_ptr(), starts.data_ptr(), tables.data_ptr())
        found = self._check_batch(_check_batch_args(*pointers, num_rows, num_seqs, width, 0, num_blocks, block_size))
        assert found >= 0, f"inconsistent batch: {_BATCH_FAULTS[found]}"

        self._num_rows = num_rows
        self._highest_position = found
        self._num_layers, self._num_kv_heads, self._head_size = num_layers, num_kv_heads, head_size
        self._positions_ptr, self._kv_slots_ptr = pointers[:2]
        self._pool_fields = (kv_pool.data_ptr(), dtype, num_layers, num_kv_heads, block_size, head_size)
        self._attend_fields = (pointers[0], pointers[2], pointers[3], num_rows, num_seqs, width)
        self._batch, self._pool = batch, kv_pool

    def _bind_rotation(self, cos_PE: Tensor, sin_PE: Tensor) -> None:
        assert cos_PE.shape == sin_PE.shape and cos_PE.shape[1] == self._head_size
        assert all(t.dtype is _float32 and t.is_contiguous() for t in (cos_PE, sin_PE))
        self._num_positions = cos_PE.shape[0]
        self._cos = cos_PE


_BATCH_FAULTS = {  # csrc/check.c
    -1: "query_starts do not cut the rows into sequences",
    -2: "positions of a sequence do not ascend, or lie beyond its block table",
    -3: "a block table names a block that the pool does not have",
    -4: "a row's KV slot is not where its sequence's block table puts its position",
}


def _wrong_row(wrong: int, token_R: Tensor, slot_R: Tensor, num_tokens: int, slots: NativeExpertSlots) -> Exception:
    if wrong < 0:
        return IndexError(f"row {-wrong - 1}: token {token_R[-wrong - 1]} of {num_tokens}")
    slot = int(slot_R[wrong - 1])
    if 0 <= slot < slots.num_slots:
        return LookupError(f"row {wrong - 1}: expert slot {slot} is empty")
    return IndexError(f"row {wrong - 1}: expert slot {slot} of {slots.num_slots}")
