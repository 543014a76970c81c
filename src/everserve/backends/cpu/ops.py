"""Ops in C for CPUs: float32 activations, weights and KV in float32, bfloat16 or float16 read in place.

    NativeOps(num_threads=2)      compiles on first use (seconds, once per machine), then loads in milliseconds
    unavailable()                 why that would fail here, or None

Every op is batch-invariant and thread-invariant: a row's result is the same bits whatever the other rows, the number
of threads, the chunks of a prefill and the block size (csrc/ops/gemm.h and csrc/ops/attention.c say how).

Threads. None is started before the first op that is worth sharing, and the child of a fork starts its own. The calling
thread does whatever the helpers have not taken, so a helper that gets no core delays no op. An idle helper spins for
`spin_us` before it sleeps, yielding its core every microsecond; if the next op comes within that time,
sharing it costs a microsecond, else about 20. With another process busy on one of two cores, two threads are as fast as
one (with libgomp four times slower); where processes outnumber cores by more, give each one thread.

The wrappers are called about nine times per layer and token, so they stay lean: each packs its arguments into a struct
that the C side declares with the same fields (EXPORT in ops/threads.h). What does not change is looked up and checked
once: facts about a weight are kept on the tensor (which must not get another dtype or shape afterwards), facts about
the batch and the pool for as long as these are the same objects.
"""

import ctypes
import functools
from array import array
from collections.abc import Sequence
from itertools import chain
from struct import Struct

import torch
from torch import Tensor

from everserve.backends.cpu.composed import Composed
from everserve.model.batch import StepBatch
from everserve.model.choosing import Draw
from everserve.model.ops import (
    SILU,
    ExpertSlots,
    HeadSlots,
    HeadWeights,
    Join,
    LatentWeights,
    RouterWeights,
    RowIndices,
    RowMemory,
    Scores,
    ShardWeights,
)
from everserve.model.quantised import Matrix, QuantisedMatrix
from everserve.model.rope import Rotation
from everserve.model.spec import Activation, ActivationKind, Norm, Router, Score
from everserve.model.whole_layers import LayerWeights, WholeLayers
from everserve.native import BuildError, library
from everserve.native.structs import source
from everserve.procs.host import num_cores

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # enum dtype in csrc/ops/gemm.h
QUANTISED = 3
KEY_TILE = 16  # csrc/ops/attention.c (TILE): block and head sizes are multiples of it
MAX_HEAD_SIZE = source("ops", "attention.h").constants["MAX_HEAD_SIZE"]
MAX_EXPERTS = source("ops", "route.c").constants["MAX_EXPERTS"]
SPIN_US = 50.0


def _packed(header: str, struct: str) -> Struct:
    return source("ops", header).packer(struct)


_set_threads_args = _packed("threads.c", "set_threads_args").pack
_embed_args = _packed("rows.h", "embed_args").pack
_linear_args = _packed("linear.h", "linear_args").pack
_norm_args = _packed("rows.h", "norm_args").pack
_join_args = _packed("rows.h", "join_args").pack
_softcap_args = _packed("rows.h", "softcap_args").pack
_sigmoid_args = _packed("rows.h", "sigmoid_args").pack
_rotate_args = _packed("attention.h", "rotate_args").pack
_attend_args = _packed("attention.h", "attend_args").pack
_turn_latent_args = _packed("latent.h", "turn_latent_args").pack
_by_head_args = _packed("latent.h", "by_head_args").pack
_route_args = _packed("route.h", "route_args").pack
_expert_rows_args = _packed("experts.h", "expert_rows_args").pack
_combine_args = _packed("rows.h", "combine_args").pack
_choose_args = _packed("choose.c", "choose_args").pack
_check_batch_args = _packed("check.h", "check_batch_args").pack
_head_rows_args = _packed("heads.c", "head_rows_args").pack
_slot = _packed("experts.h", "slot")
_head_slot = _packed("heads.h", "head_slot")
_SCORES = {Score.SOFTMAX: 0, Score.SIGMOID: 1, Score.SOFTMAX_OF_CHOSEN: 2}  # enum score in csrc/ops/route.h
_ACTIVATIONS = {kind: number for number, kind in enumerate(ActivationKind)}  # enum activation in csrc/ops/experts.h
NO_NORM = (0, 0, 0, 0.0, 0.0, 1.0)

_empty = torch.empty
_empty_like = torch.empty_like
_float32 = torch.float32
_int32 = torch.int32


@functools.cache
def _load() -> ctypes.CDLL:
    try:
        lib = ctypes.CDLL(str(library("ops")))
    except OSError as e:
        raise BuildError(f"cannot load the native ops: {e}") from e
    for name in (
        *("set_threads", "linear", "norm", "join", "softcap", "sigmoid"),
        *("rotate_and_store", "attend", "turn_latent", "by_head", "route", "combine", "choose"),
    ):
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
        spin_us = SPIN_US if num_threads <= num_cores() else 0.0
    _load().es_set_threads(_set_threads_args(num_threads, spin_us))


def matrix_facts(weight: Matrix) -> tuple[int, int, int, int]:
    """Rows, columns, elements from row to row, dtype code. Of a quantised one the rest is in C's struct."""
    if isinstance(weight, QuantisedMatrix):
        return *weight.shape, 0, QUANTISED
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


def norm_fields(weight_D: Tensor, norm: Norm) -> tuple[float, ...]:
    """struct norm."""
    return weight_D.data_ptr(), vector_facts(weight_D)[1], norm.is_centred, norm.eps, norm.offset, norm.scale


def turn_fields(rotation: Rotation) -> tuple[float, ...]:
    """struct turn."""
    size = 0 if rotation.cos_PR is None else rotation.cos_PR.shape[1]
    q_scale = 0 if rotation.q_scale_P is None else rotation.q_scale_P.data_ptr()
    return size, rotation.is_row, rotation.norms_after, rotation.offset, q_scale


def view_fields(scores: Scores) -> tuple[float, ...]:
    """struct view."""
    sinks = 0
    if scores.sinks_H is not None:
        assert scores.sinks_H.dtype is _float32 and scores.sinks_H.is_contiguous()
        sinks = scores.sinks_H.data_ptr()
    return scores.scale, scores.softcap, scores.window, scores.chunk, sinks, scores.value_size


def choice_fields(router: Router, weights: RouterWeights) -> tuple[float, ...]:
    """struct choice."""
    bias, bias_dtype, correction = 0, 0, 0
    if weights.bias_N is not None:
        bias, bias_dtype = weights.bias_N.data_ptr(), vector_facts(weights.bias_N)[1]
    if weights.correction_N is not None:
        assert weights.correction_N.dtype is _float32 and weights.correction_N.is_contiguous()
        correction = weights.correction_N.data_ptr()
    groups = router.num_groups, router.groups_kept, router.counted
    return (
        bias, correction, bias_dtype, _SCORES[router.score], *groups, router.renormalise,
        router.least_sum, router.scale,
    )  # fmt: skip


class NativeExpertSlots:
    """Pointers to the expert weights of one layer. All filled slots have the same sizes; dtypes may differ."""

    def __init__(self, num_slots: int, activation: Activation = SILU) -> None:
        self.num_slots = num_slots
        self._activation = _ACTIVATIONS[activation.kind], activation.alpha, activation.limit
        self.hidden_size = 0  # known from the first fill on
        self.inner_size = 0
        self._weights: list[ShardWeights | None] = [None] * num_slots  # kept alive
        self._table = ctypes.create_string_buffer(_slot.size * num_slots)
        self.table_ptr = ctypes.addressof(self._table)

    def fill(self, slot: int, weights: ShardWeights) -> None:
        assert 0 <= slot < self.num_slots, f"slot {slot} of {self.num_slots}"
        gate_FD, up_FD, down_DF, biases = weights
        inner_size, hidden_size, gate_stride, dtype = matrix_facts(gate_FD)
        up_stride, down_stride = matrix_facts(up_FD)[2], matrix_facts(down_DF)[2]
        assert up_FD.shape == gate_FD.shape and down_DF.shape == (hidden_size, inner_size)
        assert matrix_facts(up_FD)[3] == matrix_facts(down_DF)[3] == dtype
        if all(w is None for w in self._weights):
            self.hidden_size, self.inner_size = hidden_size, inner_size
        assert (hidden_size, inner_size) == (self.hidden_size, self.inner_size), "experts of one layer have one size"
        bias_size, bias_dtype = vector_facts(biases) if biases is not None else (2 * inner_size + hidden_size, 0)
        assert bias_size >= 2 * inner_size + hidden_size
        pointers = (w.data_ptr() if w is not None else 0 for w in weights)
        strides = gate_stride, up_stride, down_stride
        _slot.pack_into(
            self._table, slot * _slot.size, *pointers, *strides, dtype, bias_dtype, *self._activation
        )  # fmt: skip
        self._weights[slot] = weights

    def clear(self, slot: int) -> None:
        _slot.pack_into(self._table, slot * _slot.size, *[0] * 12)
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
        matrices, biases = (weights.q_XD, weights.k_ED, weights.v_ED), weights[3:6]
        (num_rows, hidden_size, q_stride, dtype), k, v = map(matrix_facts, matrices)
        size = k[0]
        assert num_rows % size == 0 and k[:2] == v[:2] == (size, hidden_size) and k[3] == v[3] == dtype
        self.group_size, self.hidden_size = num_rows // size, hidden_size
        bias_dtype = 0
        for bias, rows in zip(biases, (num_rows, size, size), strict=True):
            if bias is not None:
                bias_size, bias_dtype = vector_facts(bias)
                assert bias_size == rows
        if weights.sinks_M is not None:
            assert weights.sinks_M.dtype is _float32 and weights.sinks_M.is_contiguous()
            assert len(weights.sinks_M) == self.group_size
        pointers = (weight.data_ptr() if weight is not None else 0 for weight in weights)
        _head_slot.pack_into(
            self._table, slot * _head_slot.size, *pointers, q_stride, k[2], v[2], dtype, bias_dtype
        )  # fmt: skip
        self._weights[slot] = weights

    def clear(self, slot: int) -> None:
        _head_slot.pack_into(self._table, slot * _head_slot.size, *[0] * 12)
        self._weights[slot] = None


class NativeOps(Composed):
    """Ops on the CPU, by the kernels in csrc."""

    name = "native"
    device = torch.device("cpu")
    activation_dtype = torch.float32
    batch_invariant = True
    reads_quantised = True
    is_captured = False

    def __init__(self, num_threads: int = 1, spin_us: float | None = None) -> None:
        lib = _load()
        set_num_threads(num_threads, spin_us)
        self._embed = lib.es_embed
        self._linear = lib.es_linear
        self._norm = lib.es_norm
        self._join = lib.es_join
        self._softcap = lib.es_softcap
        self._sigmoid = lib.es_sigmoid
        self._rotate_and_store = lib.es_rotate_and_store
        self._attend = lib.es_attend
        self._turn_latent = lib.es_turn_latent
        self._by_head = lib.es_by_head
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
        self._rotation: Rotation | None = None

    def embed(self, tokens_T: Tensor, embedding_VD: Tensor, scale: float = 1.0) -> Tensor:
        num_tokens, size, stride, dtype = matrix_facts(embedding_VD)
        num_rows = tokens_T.numel()
        assert tokens_T.dtype is _int32 and tokens_T.is_contiguous()
        out_TD = _empty(num_rows, size, dtype=_float32)
        wrong = self._embed(
            _embed_args(
                embedding_VD.data_ptr(), tokens_T.data_ptr(), out_TD.data_ptr(),
                num_rows, num_tokens, size, stride, dtype, scale,
            )
        )  # fmt: skip
        if wrong:
            raise IndexError(f"row {wrong - 1}: token {tokens_T[wrong - 1]} of {num_tokens}")
        return out_TD

    def linear(
        self,
        x_TD: Tensor,
        weight_OD: Matrix,
        bias_O: Tensor | None = None,
        residual_TO: Tensor | None = None,
        scale: float = 1.0,
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
                num_rows, num_columns, k, stride, dtype, bias_dtype, scale,
            )
        )  # fmt: skip
        return out_TO

    def head(self, x_LD: Tensor, weight_VD: Tensor) -> Tensor:
        return self.linear(x_LD, weight_VD)

    def norm(self, x_TD: Tensor, weight_D: Tensor, norm: Norm, rows_L: Tensor | None = None) -> Tensor:
        if rows_L is not None and len(rows_L) != len(x_TD):  # ascending: as many as there are, are all of them
            x_TD = x_TD.index_select(0, rows_L)
        num_rows, size = x_TD.shape
        assert size == vector_facts(weight_D)[0] and x_TD.dtype is _float32 and x_TD.is_contiguous()
        out_TD = _empty_like(x_TD)
        self._norm(_norm_args(x_TD.data_ptr(), out_TD.data_ptr(), num_rows, size, *norm_fields(weight_D, norm)))
        return out_TD

    def join(self, x_TD: Tensor, residual_TD: Tensor, join: Join) -> Tensor:
        num_rows, size = x_TD.shape
        assert x_TD.shape == residual_TD.shape and x_TD.dtype is residual_TD.dtype is _float32
        assert x_TD.is_contiguous() and residual_TD.is_contiguous()
        norm = NO_NORM if join.norm_D is None or join.norm is None else norm_fields(join.norm_D, join.norm)
        out_TD = _empty_like(x_TD)
        pointers = x_TD.data_ptr(), residual_TD.data_ptr(), out_TD.data_ptr()
        self._join(_join_args(*pointers, num_rows, size, join.scale, *norm))
        return out_TD

    def softcap(self, logits_LV: Tensor, cap: float) -> Tensor:
        assert logits_LV.dtype is _float32 and logits_LV.is_contiguous()
        self._softcap(_softcap_args(logits_LV.data_ptr(), logits_LV.numel(), cap))
        return logits_LV

    def sigmoid(self, x: Tensor) -> Tensor:
        """The sigmoid, in place."""
        assert x.dtype is _float32 and x.is_contiguous()
        self._sigmoid(_sigmoid_args(x.data_ptr(), x.numel()))
        return x

    def rotate_and_store(
        self,
        qkv_TX: Tensor,
        batch: StepBatch,
        kv_pool: Tensor,
        layer: int,
        rotation: Rotation,
    ) -> Tensor:
        if batch is not self._batch or kv_pool is not self._pool:
            self._bind(batch, kv_pool)
        if rotation is not self._rotation:
            self._bind_rotation(rotation)
        assert self._highest_position < self._num_positions and 0 <= layer < self._num_layers
        num_rows, width = qkv_TX.shape
        head_size = self._head_size
        num_q_heads = width // head_size - 2 * self._num_kv_heads
        assert num_rows == self._num_rows and qkv_TX.dtype is _float32 and qkv_TX.is_contiguous()
        assert num_q_heads > 0 and (num_q_heads + 2 * self._num_kv_heads) * head_size == width
        q_sizes = head_size, num_q_heads * head_size
        k_sizes = head_size, self._num_kv_heads * head_size
        q_norm_ptr, q_norm_dtype = _qk_norm_fields(rotation.q_norm, q_sizes[rotation.is_row])
        k_norm_ptr, k_norm_dtype = _qk_norm_fields(rotation.k_norm, k_sizes[rotation.is_row])
        q_THE = _empty(num_rows, num_q_heads, head_size, dtype=_float32)
        self._rotate_and_store(
            _rotate_args(
                *self._pool_fields, layer, 0,
                qkv_TX.data_ptr(), *self._table_ptrs, q_norm_ptr, k_norm_ptr,
                self._positions_ptr, self._kv_slots_ptr, q_THE.data_ptr(),
                num_rows, num_q_heads, q_norm_dtype, k_norm_dtype, rotation.eps, *turn_fields(rotation),
            )
        )  # fmt: skip
        return q_THE

    def attend(self, q_THE: Tensor, batch: StepBatch, kv_pool: Tensor, layer: int, scores: Scores) -> Tensor:
        if batch is not self._batch or kv_pool is not self._pool:
            self._bind(batch, kv_pool)
        num_rows, num_q_heads, head_size = q_THE.shape
        assert num_rows == self._num_rows and head_size == self._head_size and 0 <= layer < self._num_layers
        assert num_q_heads % self._num_kv_heads == 0 and q_THE.dtype is _float32 and q_THE.is_contiguous()
        value_size = scores.value_size or head_size
        assert value_size % KEY_TILE == 0 and bool(scores.value_size) == (self._num_planes == 1)
        out_TX = _empty(num_rows, num_q_heads * value_size, dtype=_float32)
        self._attend(
            _attend_args(
                *self._pool_fields, layer, 0,
                q_THE.data_ptr(), out_TX.data_ptr(), *self._attend_fields, num_q_heads, *view_fields(scores),
            )
        )  # fmt: skip
        return out_TX

    def turn_and_store(
        self, q_TX: Tensor, kv_TC: Tensor, weights: LatentWeights, batch: StepBatch, kv_pool: Tensor, layer: int
    ) -> Tensor:
        if batch is not self._batch or kv_pool is not self._pool:
            self._bind(batch, kv_pool)
        num_rows, size = kv_TC.shape
        num_heads, rank, plain_size = weights.keys_HRP.shape
        num_positions, rotary_size = weights.cos_PU.shape
        assert num_rows == self._num_rows and size == self._head_size == rank + rotary_size and self._num_planes == 1
        assert q_TX.shape == (num_rows, num_heads * (plain_size + rotary_size)) and 0 <= layer < self._num_layers
        assert self._highest_position < num_positions and self._num_kv_heads == 1
        assert all(t.dtype is _float32 and t.is_contiguous() for t in (q_TX, kv_TC, weights.cos_PU, weights.sin_PU))
        norm_size, norm_dtype = vector_facts(weights.kv_norm_R)
        assert norm_size == rank
        q_THC = _empty(num_rows, num_heads, size, dtype=_float32)
        self._products(q_TX, plain_size + rotary_size, weights.keys_HRP, q_THC, size)
        self._turn_latent(
            _turn_latent_args(
                *self._pool_fields, layer, 0, q_TX.data_ptr(), kv_TC.data_ptr(),
                weights.cos_PU.data_ptr(), weights.sin_PU.data_ptr(), weights.kv_norm_R.data_ptr(),
                self._positions_ptr, self._kv_slots_ptr, q_THC.data_ptr(),
                num_rows, num_heads, plain_size, rotary_size, norm_dtype, weights.norm.eps,
            )
        )  # fmt: skip
        return q_THC

    def by_head(self, x_TX: Tensor, weight_HOK: Tensor) -> Tensor:
        num_heads, num_columns, k = weight_HOK.shape
        assert x_TX.shape[1] == num_heads * k and x_TX.dtype is _float32 and x_TX.is_contiguous()
        out_TX = _empty(len(x_TX), num_heads * num_columns, dtype=_float32)
        self._products(x_TX, k, weight_HOK, out_TX, num_columns)
        return out_TX

    def _products(self, x: Tensor, x_stride: int, weight_HOK: Tensor, out: Tensor, out_stride: int) -> None:
        """Those of each head with its own matrix; from head to head so many numbers lie in x and in out."""
        head_stride, row_stride, column_stride = weight_HOK.stride()
        assert column_stride == 1 or weight_HOK.shape[2] == 1
        num_heads, num_columns, k = weight_HOK.shape
        self._by_head(
            _by_head_args(
                x.data_ptr(), weight_HOK.data_ptr(), out.data_ptr(), len(x), num_heads, num_columns, k,
                x_stride, out_stride, head_stride, row_stride, _dtype_code(weight_HOK),
            )
        )  # fmt: skip

    def route(
        self, x_TD: Tensor, weights: RouterWeights, router: Router, allowed_N: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        router_ND, top_k = weights.router_ND, router.top_k
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
                num_rows, num_experts, size, top_k, stride, dtype, *choice_fields(router, weights),
            )
        )  # fmt: skip
        return ids_TK, weights_TK

    def expert_slots(self, num_slots: int, activation: Activation = SILU) -> NativeExpertSlots:
        return NativeExpertSlots(num_slots, activation)

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
        self, requests: int, num_requests: int, slots: HeadSlots, kv_pool: Tensor, rotation: Rotation, scores: Scores
    ) -> None:
        assert isinstance(slots, NativeHeadSlots)
        _, num_pieces, two, block_size, head_size = kv_pool.shape
        assert two == 2 and kv_pool.is_contiguous() and block_size % KEY_TILE == 0
        assert head_size <= MAX_HEAD_SIZE and not rotation.is_row, "all heads have one norm"
        cos_ptr, sin_ptr, _ = _table_facts(rotation, head_size)
        norms = [_qk_norm_fields(norm, head_size) for norm in (rotation.q_norm, rotation.k_norm)]
        wrong = self._head_rows(
            _head_rows_args(
                kv_pool.data_ptr(), _dtype_code(kv_pool), num_pieces, 0, block_size, head_size, two, 0, 0,
                slots.table_ptr, requests, cos_ptr, sin_ptr, norms[0][0], norms[1][0],
                slots.num_slots, num_requests, slots.group_size, slots.hidden_size, norms[0][1], norms[1][1],
                rotation.eps, *turn_fields(rotation), *view_fields(scores),
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
        self, batch: StepBatch, kv_pool: Tensor, num_positions: int
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, int, int]]:
        """For C, checked against each other: the fields of the pool, where positions, KV slots, query starts and block
        tables are, and how many rows, sequences and columns of tables there are. `num_positions`: for which there are
        tables."""
        if batch is not self._batch or kv_pool is not self._pool:
            self._bind(batch, kv_pool)
        assert self._highest_position < num_positions
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
        num_blocks, num_layers, num_planes, num_kv_heads, block_size, head_size = kv_pool.shape
        assert num_planes in (1, 2) and kv_pool.is_contiguous() and block_size % KEY_TILE == 0
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
        self._num_planes = num_planes
        self._pool_fields = (kv_pool.data_ptr(), dtype, num_layers, num_kv_heads, block_size, head_size, num_planes)
        self._attend_fields = (pointers[0], pointers[2], pointers[3], num_rows, num_seqs, width)
        self._batch, self._pool = batch, kv_pool

    def _bind_rotation(self, rotation: Rotation) -> None:
        *self._table_ptrs, self._num_positions = _table_facts(rotation, self._head_size)
        self._rotation = rotation


def _qk_norm_fields(norm: Tensor | None, size: int) -> tuple[int, int]:
    """Where the weights are, if there are some, and their dtype."""
    if norm is None:
        return 0, 0
    assert vector_facts(norm)[0] == size
    return norm.data_ptr(), vector_facts(norm)[1]


def _table_facts(rotation: Rotation, head_size: int) -> tuple[int, int, int]:
    """Where cos and sin are, if there are some, and for how many positions there is everything."""
    tables = [table for table in (rotation.cos_PR, rotation.sin_PR, rotation.q_scale_P) if table is not None]
    assert all(table.dtype is _float32 and table.is_contiguous() for table in tables)
    num_positions = min((len(table) for table in tables), default=1 << 31)
    if rotation.cos_PR is None or rotation.sin_PR is None:
        return 0, 0, num_positions
    size = rotation.cos_PR.shape[1]
    assert rotation.cos_PR.shape == rotation.sin_PR.shape and size <= head_size and size % 2 == 0
    return rotation.cos_PR.data_ptr(), rotation.sin_PR.data_ptr(), num_positions


_BATCH_FAULTS = {  # csrc/ops/check.c
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
